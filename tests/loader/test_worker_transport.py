"""A batch of a worker is unpacked as it was packed."""

from __future__ import annotations

import array
import ctypes
import gc
import multiprocessing
import pickle
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataload.loader import worker_transport
from dataload.loader.worker_transport import pack, unpack
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


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return isinstance(found, np.ndarray) and found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(expected, memoryview):
        return bytes(found) == bytes(expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, (list, tuple)):
        alike = type(found) is type(expected) and len(found) == len(expected)
        return alike and all(same(one, other) for one, other in zip(found, expected, strict=True))
    return bool(found == expected)


@pytest.mark.parametrize("piped", [0, 1 << 20])
@given(batch=BATCHES)
def test_unpacking_restores_the_batch(piped: int, batch: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_transport, "PIPED_BYTES", piped)
        assert same(unpack(pack(batch)), batch)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("size", [10, 300_000])
def test_the_default_device_of_torch_is_not_that_of_a_batch(
    monkeypatch: pytest.MonkeyPatch, size: int, is_pinned: bool
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: is_pinned)
    batch = {"x": torch.arange(size), "without rows": torch.zeros(0)}
    with torch.device("meta"):
        assert same(unpack(pack(batch)), batch)


def test_the_rows_of_a_column_are_not_searched() -> None:
    batch = {"turns": [[{"role": "user", "text": "hello"}] * 10] * 100, "views": [memoryview(b"ab"), memoryview(b"c")]}
    found, calls = list[Any](), list[str]()
    sys.setprofile(lambda _, event, __: calls.append(event) if event == "call" else None)
    try:
        found.append(unpack(pack(batch)))
    finally:
        sys.setprofile(None)
    assert same(found, [batch])
    assert len(calls) < 100


def test_large_values_are_in_one_buffer() -> None:
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
    queue.put(packed._replace(content=bytearray()))
    assert b"aaa" not in pickle.dumps(queue.get())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128])
def test_tensors_of_a_pinned_batch_share_its_storage(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The storage is how torch identifies a block that a copy still reads, so that it is not reused."""
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
    assert found["matrix"]._version == version  # Autograd allows an in-place change of another column.


IMAGES = torch.arange(96).reshape(2, 3, 4, 4)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(
    ("tensor", "keeps"),
    [
        (IMAGES.to(memory_format=torch.channels_last), True),
        (IMAGES[:, :1].to(memory_format=torch.channels_last), True),
        (IMAGES.bfloat16().to(memory_format=torch.channels_last), True),
        (IMAGES.permute(3, 0, 2, 1), True),
        (torch.arange(4).expand(1, 4), True),
        (torch.arange(4).expand(3, 4), False),
        (IMAGES[:, ::2], False),
        (IMAGES[0, 0, 1:, 1:], False),
    ],
)
def test_dense_values_keep_the_order_of_their_memory(
    monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, keeps: bool, is_pinned: bool
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: is_pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    array = tensor.float().numpy() if keeps else tensor.numpy()
    packed = pack({"tensor": tensor, "array": array, "flipped": array[::-1], "after": 1})
    found = unpack(packed.pin_memory() if is_pinned else packed)
    assert same(found["tensor"], tensor)
    assert same([found["array"], found["flipped"]], [array, array[::-1]])
    assert (found["tensor"].stride() == tensor.stride()) == keeps
    assert (found["array"].strides == array.strides) == keeps


def test_parameters_are_pickled() -> None:
    weight = torch.ones(2, requires_grad=True)
    found = unpack(pack({"w": weight}))["w"]
    assert found.requires_grad
    assert torch.equal(found, weight)


class Labelled(dict[str, Any]):
    pass


def test_subclasses_are_preserved() -> None:
    found = unpack(pack({"inner": Labelled(x=1), "size": torch.ones(2, 3).shape, "names": [b"a", b"b"]}))
    assert type(found["inner"]) is Labelled
    assert type(found["size"]) is torch.Size
    assert dict.fromkeys(found["names"], 1) == {b"a": 1, b"b": 1}


NUMBERS = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "view",
    [
        *(memoryview(NUMBERS), NUMBERS[::2, ::3].data, NUMBERS[:0].data, np.array(2.5).data, np.ones(2, ">i4").data),
        *(memoryview(array.array("q", [1, -2])), memoryview(array.array("q")), memoryview(b"abcd").cast("c")),
        *(memoryview(b"abcd").cast("B", (2, 2)), memoryview((ctypes.c_int * 2)(1, 2)), memoryview(b"abcd").cast("b")),
        memoryview(b"abcd")[::2],
    ],
)
def test_views_of_other_formats_and_shapes_keep_them(view: memoryview) -> None:
    def content(view: memoryview) -> Any:
        return view.format.lstrip("<"), view.shape, view.tobytes()

    for found in (
        *unpack(pack([view, view])),
        unpack(pack({"v": view}))["v"],
        unpack(pack([view, memoryview(b"a")]))[0],
    ):
        assert content(found) == content(view)
        assert found.readonly


def test_a_batch_is_freed_without_a_collection_of_garbage() -> None:
    """In large runs users call gc.disable() or gc.freeze()."""
    content = pack({"x": torch.arange(1000), "s": ["a", "b"]})
    contents = []
    gc.disable()
    try:
        batch = unpack(content)
        contents = [found for found in gc.get_objects() if type(found).__name__ in ("_Content", "_Unpickler")]
        del batch
        assert contents == []
    finally:
        gc.enable()


def test_one_bfloat16_value_of_a_strided_column() -> None:
    value = torch.arange(6).reshape(1, 6).bfloat16()[:, 2]
    assert torch.equal(unpack(pack({"x": value}))["x"], value)
