"""Batches for a device are copied to contiguous memory, outside the training thread."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from dataload import CacheConfig, make_loader
from dataload.benchmarks import gpu
from dataload.loader import loader
from dataload.loader.device_copy import DeviceCopy, HostMemory, host_memory_for
from dataload.loader.loader import Loader
from dataload.loader.worker_transport import pack, unpack
from dataload.rows.batch_tree import map_tensors, on_device
from dataload.train.evaluation import evaluate_over
from dataload.train.harness import fit
from dataload.train.optimizer_step import OptimizerStep
from dataload.train.profiling import traced
from dataload.train.rank_batches import num_rows

ROWS, BATCH = 40, 8
LARGE = 64 << 10  # bytes; smaller copies are labels and the like


def fixed(values: np.ndarray[Any, Any], *sizes: int) -> pa.Array:
    array = pa.array(values.ravel())
    for size in reversed(sizes):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


@pytest.fixture
def source(tmp_path: Path) -> dict[str, Any]:
    """A file with each kind of column that becomes a tensor, and other columns between them."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 5, ROWS)
    table = pa.table(
        {
            "number": np.arange(ROWS),
            "other": np.arange(ROWS) * 2,
            "far": np.arange(ROWS) * 3,
            "flag": draw.integers(0, 2, ROWS).astype(bool),
            "vector": fixed(draw.random((ROWS, 3), np.float32), 3),
            "matrix": fixed(draw.integers(0, 99, (ROWS, 2, 5)), 2, 5),
            "pixels": fixed(draw.integers(0, 255, (ROWS, 7)).astype(np.uint8), 7),
            "flags": fixed(draw.integers(0, 2, (ROWS, 3)).astype(bool), 3),
            "tokens": pa.array([draw.integers(0, 99, length).tolist() for length in lengths]),
            "text": [f"row {number}" for number in range(ROWS)],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=10)
    return {
        "source": str(tmp_path / "x.parquet"),
        "batch_size": BATCH,
        "cache": CacheConfig(str(tmp_path / "c"), "1GB"),
    }


def tensors_of(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(batch, lambda tensor: (found.append(tensor), tensor)[1])
    return found


class Seen:
    """The tensors that are allocated for batches, and those that are copied to the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated: list[torch.Tensor] = []
        self.copied: list[torch.Tensor] = []
        self.threads: set[threading.Thread] = set()
        empty, call = HostMemory.empty, DeviceCopy.__call__

        def allocates(memory: HostMemory, *args: Any) -> torch.Tensor:
            self.threads.add(threading.current_thread())
            self.allocated.append(empty(memory, *args))
            return self.allocated[-1]

        def copies(copy: DeviceCopy, batch: Any) -> Any:
            self.copied += tensors_of(batch)
            return call(copy, batch)

        monkeypatch.setattr(HostMemory, "empty", allocates)
        monkeypatch.setattr(DeviceCopy, "__call__", copies)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


GROUPS = [None, {"x": ["number", "other"]}, {"x": ["far", "number"]}]


@pytest.mark.parametrize("at_once", [1, 64])
@pytest.mark.parametrize("ragged", ["list", "flat"])
@pytest.mark.parametrize("group", GROUPS, ids=["no group", "neighbours", "others"])
def test_columns_are_copied_once_to_staging_memory(
    source: dict[str, Any], seen: Seen, monkeypatch: pytest.MonkeyPatch, group: Any, ragged: str, at_once: int
) -> None:
    monkeypatch.setattr(loader, "gathered_at_once", lambda _: at_once)
    batches = list(make_loader(**source, device="meta", group=group, ragged=ragged))
    assert len(batches) == ROWS // BATCH
    assert all(tensor.is_contiguous() for tensor in seen.copied)
    assert storages(seen.copied) <= storages(seen.allocated)
    assert threading.current_thread() not in seen.threads
    copied = sum(tensor.nbytes for tensor in seen.copied)
    offsets = 8 * (ROWS + len(batches)) if ragged == "flat" else 0  # offsets begin at 0 in each batch
    assert copied <= sum(tensor.nbytes for tensor in seen.allocated) <= copied + offsets


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_have_the_gpu_of_the_loop(
    source: dict[str, Any], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Each thread has a current GPU of its own, at first GPU 0."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "gpu", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(current, "gpu", gpu))
    torch.cuda.set_device(3)
    batches = make_loader(**source, num_threads=threads, transform=lambda _: torch.cuda.current_device())
    assert list(batches) == [3] * len(batches)


def halved(batch: Any) -> Any:
    return {**batch, "half": batch["matrix"][:, :, ::2], "turned": batch["matrix"].mT, "none": None}


class OnMeta(torch.nn.Linear):
    """A model on a device other than the CPU."""

    def __init__(self) -> None:
        super().__init__(1, 1, device="meta")


def fitted(batches: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(step: OptimizerStep, batch: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        assert {tensor.device for tensor in tensors_of(batch)} == {step.device}
        return torch.zeros(()), {}

    monkeypatch.setattr(OptimizerStep, "add", add)
    model = OnMeta()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(model, optimizer, batches, lambda *_: None, epochs=1, check_finite=False, progress=False, device="meta")  # type: ignore[arg-type,return-value]


def evaluated(batches: Loader, _: pytest.MonkeyPatch) -> None:
    assert evaluate_over(OnMeta(), batches, lambda _, batch: {"x": torch.ones(len(batch["number"]))})["rows"] == ROWS


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("over", [fitted, evaluated])
def test_training_has_the_loader_copy_to_the_device_of_the_model(
    source: dict[str, Any], seen: Seen, monkeypatch: pytest.MonkeyPatch, over: Any, workers: int
) -> None:
    options: dict[str, Any] = {"transform": dict, "num_workers": workers} if workers else {}
    batches = make_loader(**source, **options)
    over(batches, monkeypatch)
    assert len(seen.copied) >= 8 * len(batches)
    assert all(tensor.is_contiguous() for tensor in seen.copied)
    assert threading.current_thread() not in seen.threads
    assert batches.device is None


@pytest.mark.parametrize(
    ("own", "requested", "used"), [(None, None, None), (None, "meta", "meta"), ("cpu", "meta", "cpu")]
)
def test_the_device_of_the_loader_has_precedence(
    source: dict[str, Any], own: str | None, requested: str | None, used: str | None
) -> None:
    device = None if requested is None else torch.device(requested)
    batch = next(make_loader(**source, device=own).batches_on(device))
    assert batch["number"].device.type == (used or "cpu")


def columns_of(rows: Any) -> Any:
    return dict(rows.columns)


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("code", [{"transform": halved}, {"collate_fn": columns_of}], ids=["transform", "collate"])
def test_tensors_of_user_code_are_dense_too(source: dict[str, Any], seen: Seen, code: Any, workers: int) -> None:
    batches = list(make_loader(**source, device="meta", num_workers=workers, **code))
    assert len(batches) == ROWS // BATCH
    assert len(seen.copied) >= 8 * len(batches)
    for tensor in seen.copied:
        assert tensor.is_contiguous() or tensor.mT.is_contiguous()


@pytest.mark.parametrize(
    "options",
    [{}, {"ragged": "flat"}, {"group": GROUPS[1]}, {"transform": halved}],
    ids=["default", "ragged", "group", "transform"],
)
def test_the_batches_are_the_same(source: dict[str, Any], options: Any) -> None:
    prepared, plain = (list(make_loader(**source, pin_memory=pin, **options)) for pin in (True, None))
    assert len(prepared) == len(plain)
    for found, expected in zip(prepared, plain, strict=True):
        assert list(found) == list(expected)
        assert found["text"] == expected["text"]
        for tensor, other in zip(tensors_of(found), tensors_of(expected), strict=True):
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor, other)


def test_pinning_is_decided_when_an_iteration_begins(source: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader may be made before the Accelerator, which determines the device of batches."""
    devices: list[torch.device | None] = [None]
    pinned: list[bool] = []

    def begin(workers: DataLoader[Any]) -> Iterator[Any]:
        pinned.append(workers.pin_memory)
        return (answer for answer in ())

    monkeypatch.setattr(loader, "trainer_device", lambda: devices[-1])
    monkeypatch.setattr(loader, "DeviceCopy", lambda _: None)
    monkeypatch.setattr(DataLoader, "__iter__", begin)
    batches = make_loader(**source, transform=dict, num_workers=1)
    assert list(batches) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices.append(torch.device("cuda"))
    assert list(batches) == []
    assert pinned == [False, True]


@pytest.mark.parametrize(
    ("device", "pin_memory", "prepared"),
    [(None, None, False), ("cpu", None, False), ("meta", None, True), ("cuda", False, True), ("cpu", True, True)],
)
def test_batches_are_copied_to_host_memory_only_if_needed(
    device: str | None, pin_memory: bool | None, prepared: bool
) -> None:
    target = None if device is None else torch.device(device)
    assert (host_memory_for(target, pin_memory) is not None) == prepared


def test_a_packed_sequence_keeps_its_sizes_on_the_host() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = on_device({"words": packed}, torch.device("meta"))["words"]
    assert type(moved) is type(packed)
    assert (moved.data.device.type, moved.sorted_indices.device.type) == ("meta", "meta")
    assert moved.batch_sizes is packed.batch_sizes


def test_mappings_keep_their_type() -> None:
    """The output of a tokenizer has the columns as attributes."""

    class Encoding(UserDict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self.data[name]

    encoding = Encoding(input_ids=torch.ones(2), text=["a", "b"])
    moved = on_device([encoding], torch.device("meta"))[0]
    assert (type(moved), moved.input_ids.device.type, moved.text) == (Encoding, "meta", ["a", "b"])
    assert encoding.input_ids.device.type == "cpu"
    assert on_device(Counter(a=3), torch.device("meta")) == Counter(a=3)
    assert type(on_device(MappingProxyType({"x": torch.ones(2)}), torch.device("cpu"))) is dict


class Graph:
    """An object of tensors that copies itself."""

    def __init__(self, x: torch.Tensor, pinned: bool = False) -> None:
        self.x, self.pinned = x, pinned

    def pin_memory(self) -> Graph:
        self.pinned = True
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        return Graph(self.x.to(device, non_blocking=non_blocking), self.pinned)


class Boxes(Graph):
    def to(self, device: torch.device) -> Graph:  # type: ignore[override]
        return super().to(device)


class Columns(MutableMapping[str, Any]):
    """A mapping that is no dict, with a state of its own."""

    def __init__(self, unit: str, **columns: Any) -> None:
        self.unit, self.columns = unit, columns

    def __copy__(self) -> Columns:
        return Columns(self.unit, **self.columns)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __setitem__(self, name: str, column: Any) -> None:
        self.columns[name] = column

    def __delitem__(self, name: str) -> None:
        del self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


class Aliasing(Columns):
    """A mapping whose copy has the columns of the original."""

    __copy__ = None  # type: ignore[assignment]


class SelfCopying(Columns, Graph):
    """A mapping that copies itself, such as a TensorDict."""

    def __init__(self, x: torch.Tensor) -> None:
        Columns.__init__(self, "m", x=x)
        Graph.__init__(self, x)


@pytest.mark.parametrize("kind", [Graph, Boxes, SelfCopying])
def test_objects_pin_and_copy_themselves(kind: Callable[[torch.Tensor], Graph]) -> None:
    batch: dict[str, Any] = {"graphs": [kind(torch.ones(2))], "name": "a"}
    assert not HostMemory(pinned=False).prepare(batch)["graphs"][0].pinned
    moved = DeviceCopy(torch.device("meta"))(HostMemory(pinned=True).prepare(batch))["graphs"][0]
    assert (type(moved), moved.x.device.type, moved.pinned) == (Graph, "meta", True)


def test_a_mapping_that_is_no_dict_keeps_its_type() -> None:
    columns = Columns("m", x=torch.ones(2))
    moved = on_device(columns, torch.device("meta"))
    assert (type(moved), moved.unit, moved["x"].device.type) == (Columns, "m", "meta")
    assert columns["x"].device.type == "cpu"


def test_a_mapping_that_does_not_say_how_to_copy_it_stays_as_it_is() -> None:
    columns = Aliasing("m", x=torch.ones(2))
    assert on_device(columns, torch.device("meta"))["x"].device.type == "meta"
    assert columns["x"].device.type == "cpu"


@pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("meta", False)])
def test_a_copy_to_the_host_is_complete(monkeypatch: pytest.MonkeyPatch, device: str, waits: bool) -> None:
    """An asynchronous copy from a GPU would be read before it is there."""
    asked, to = [], torch.Tensor.to

    def recorded(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        asked.append(options["non_blocking"])
        return to(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    for copy in (lambda batch: on_device(batch, torch.device(device)), DeviceCopy(torch.device(device))):
        copy({"x": torch.ones(2)})
    assert asked == [not waits] * 2


def test_the_default_device_of_torch_is_not_that_of_host_memory() -> None:
    with torch.device("meta"):
        assert HostMemory(pinned=False).empty((2,), torch.uint8).device.type == "cpu"


def test_dense_tensors_are_not_copied_again() -> None:
    memory = HostMemory(pinned=False)
    batch = {"x": torch.arange(6).view(2, 3), "y": [torch.arange(6).view(2, 3)[:, 1:]]}
    found = memory.prepare(batch)
    assert found["x"] is batch["x"]
    assert found["y"][0].is_contiguous()
    assert torch.equal(found["y"][0], batch["y"][0])
    channels_last = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert memory.prepare(channels_last) is channels_last
    assert memory.prepare(channels_last[:, :, 1:]).is_contiguous(memory_format=torch.channels_last)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")


@needs_gpu
@pytest.mark.parametrize("rows", [1, 100_000], ids=["through the pipe", "through shared memory"])
def test_a_batch_of_a_worker_is_pinned_as_a_whole(rows: int) -> None:
    batch = {"x": torch.arange(rows), "y": [torch.arange(3), torch.arange(2)], "z": "text"}
    found = unpack(pack(batch).pin_memory())
    assert all(tensor.is_pinned() for tensor in tensors_of(found))
    assert torch.equal(found["x"], batch["x"])
    assert found["z"] == "text"


def with_parameter(batch: Any) -> Any:
    return {**batch, "weight": torch.ones(2, requires_grad=True)}


def test_tensors_that_cannot_be_packed_are_copied_to_host_memory(
    source: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[torch.Tensor] = []

    def answers(workers: DataLoader[Any]) -> Iterator[Any]:
        return (workers.dataset[request] for request in workers.sampler)

    def prepare(_: HostMemory, batch: Any) -> Any:
        prepared.append(batch["weight"])
        return batch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(DataLoader, "__iter__", answers)
    monkeypatch.setattr(HostMemory, "prepare", prepare)
    batches = list(make_loader(**source, pin_memory=True, transform=with_parameter, num_workers=1))
    assert len(prepared) == len(batches) == ROWS // BATCH
    assert all(one is batch["weight"] for one, batch in zip(prepared, batches, strict=True))


@needs_gpu
def test_tensors_of_workers_that_cannot_be_packed_are_pinned(source: dict[str, Any]) -> None:
    batches = list(make_loader(**source, pin_memory=True, transform=with_parameter, num_workers=1))
    assert all(tensor.is_pinned() for tensor in tensors_of(batches) if tensor.numel())


@needs_gpu
def test_objects_copy_themselves_to_a_gpu() -> None:
    copied = DeviceCopy(torch.device("cuda"))({"graph": Graph(torch.ones(2)), "x": torch.ones(2)})
    assert (copied["graph"].x.device.type, copied["x"].device.type) == ("cuda", "cuda")


@needs_gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_copies_are_asynchronous_and_overlap_the_step(tmp_path: Path, workers: int) -> None:
    rows, width = 512, 3 * 128 * 128
    pixels = fixed(np.random.default_rng(0).integers(0, 255, (rows, width)).astype(np.uint8), width)
    pq.write_table(pa.table({"id": np.arange(rows), "pixels": pixels}), tmp_path / "x.parquet", row_group_size=64)
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    options: dict[str, Any] = {"transform": dict, "num_workers": workers} if workers else {}
    batches = make_loader(str(tmp_path / "x.parquet"), 32, cache=cache, device="cuda", **options)
    weights = torch.randn(4096, 4096, device="cuda")
    for _ in batches:  # decodes the rows and warms up the GPU
        torch.mm(weights, weights)
    with traced(tmp_path / "trace", 0) as step:
        for batch in batches:
            assert batch["pixels"].device.type == "cuda"
            for _ in range(20):
                torch.mm(weights, weights)
            step()
        torch.cuda.synchronize()
    events = json.loads(next((tmp_path / "trace").iterdir()).read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"] and e["args"]["bytes"] >= LARGE]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    assert {e["name"] for e in copies} == {"Memcpy HtoD (Pinned -> Device)"}
    hidden = sum(gpu.overlap(e["ts"], e["ts"] + e["dur"], kernels) for e in copies)
    assert hidden > 0.5 * sum(e["dur"] for e in copies)


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    labels: list[torch.Tensor]
    name: str
    rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", len(self.x))


def test_dataclasses_move_to_the_device_with_all_their_fields(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(8.0)}), tmp_path / "x.parquet")

    def collated(rows: Any) -> dict[str, Sample]:
        x = rows.columns["x"]
        return {"sample": Sample(x, [x, x + 1], "a")}

    for workers in (0, 1):
        loader = make_loader(tmp_path, 4, collate_fn=collated, shuffle=False, device="meta", num_workers=workers)
        sample = next(iter(loader))["sample"]
        assert type(sample) is Sample
        assert {each.device.type for each in (sample.x, *sample.labels)} == {"meta"}
        assert (sample.name, sample.rows) == ("a", 4)
    batch = Sample(torch.arange(4), [], "a")
    assert map_tensors(batch, lambda tensor: tensor) is batch
    assert num_rows(batch) == 4
