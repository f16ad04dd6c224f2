"""A batch that leaves a worker arrives as it was."""

from __future__ import annotations

import multiprocessing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataload.loader import worker_transport
from dataload.loader.worker_transport import Packed, pack, unpack
from dataload.rows.collate import Flat

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
]


class Pair(NamedTuple):
    left: Any
    right: Any


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if draw(st.booleans()) and len(shape) > 1 else tensor


LEAVES = st.one_of(
    tensors(),
    tensors().filter(lambda tensor: tensor.dtype != torch.bfloat16).map(torch.Tensor.numpy),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.none(),
    st.integers(),
    st.lists(st.text(st.characters(), max_size=3), max_size=3),
    st.lists(st.binary(max_size=3).map(memoryview), max_size=3),
    st.lists(tensors(), max_size=3),
    st.lists(st.integers(0, 5), max_size=3).map(lambda sizes: [torch.arange(size) for size in sizes]),
)
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
    if isinstance(wanted, np.ndarray):
        return isinstance(found, np.ndarray) and found.dtype == wanted.dtype and np.array_equal(found, wanted)
    if isinstance(wanted, memoryview):
        return bytes(found) == bytes(wanted)
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, (list, tuple)):
        alike = type(found) is type(wanted) and len(found) == len(wanted)
        return alike and all(same(one, other) for one, other in zip(found, wanted, strict=True))
    return bool(found == wanted)


@pytest.mark.parametrize("piped", [0, 1 << 20])
@given(batch=BATCHES)
def test_what_is_packed_comes_back(piped: int, batch: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_transport, "PIPED_BYTES", piped)
        assert same(unpack(pack(batch)), batch)


def test_all_that_is_large_is_in_one_piece() -> None:
    batch = {
        "x": torch.ones(1 << 17),
        "image": [bytes(1 << 18)],
        "text": ["a" * 9],
        "l": Flat(torch.ones(2), torch.ones(3)),
    }
    packed = pack({**batch, "y": np.ones(1 << 17)})
    assert isinstance(packed.content, torch.Tensor)
    assert packed.content.nbytes >= (1 << 19) + (1 << 20)
    assert packed.content.nbytes >= (1 << 19) + (1 << 18) + 9
    queue = multiprocessing.get_context("fork").SimpleQueue()
    queue.put(Packed(b"", packed.shape))  # type: ignore[arg-type]
    assert b"aaa" not in queue.get().shape


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128])
def test_tensors_of_a_pinned_batch_share_its_storage(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """By its storage, torch finds the block that a copy still reads and must not reuse."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    batch = {
        "flags": torch.ones(3, dtype=torch.bool),
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "lists": [torch.arange(2).to(dtype), torch.arange(5).to(dtype)],
        "scalar": torch.tensor(7).to(dtype),
        "array": np.arange(4),
        "none": torch.empty(0, 3, dtype=dtype),
    }
    packed = pack(batch).pin_memory()
    assert isinstance(packed.content, torch.Tensor)
    found = unpack(packed)
    assert same(found, batch)
    for tensor in (found["flags"], found["matrix"], *found["lists"], found["scalar"]):
        assert tensor.untyped_storage().data_ptr() == packed.content.untyped_storage().data_ptr()
    version = found["matrix"]._version
    found["scalar"].zero_()
    assert found["matrix"]._version == version  # Autograd allows a change of another column in place.


def test_parameters_go_as_they_are() -> None:
    weight = torch.ones(2, requires_grad=True)
    found = unpack(pack({"w": weight}))["w"]
    assert found.requires_grad
    assert torch.equal(found, weight)


class Labelled(dict[str, Any]):
    pass


def test_what_a_subclass_adds_is_not_lost() -> None:
    found = unpack(pack({"inner": Labelled(x=1), "size": torch.ones(2, 3).shape, "names": [b"a", b"b"]}))
    assert type(found["inner"]) is Labelled
    assert type(found["size"]) is torch.Size
    assert dict.fromkeys(found["names"], 1) == {b"a": 1, b"b": 1}


def test_views_of_numbers_are_their_bytes() -> None:
    numbers = np.arange(4, dtype=np.float32)
    found = unpack(pack([memoryview(numbers[:2]), memoryview(numbers[2:])]))
    assert b"".join(found) == numbers.tobytes()
