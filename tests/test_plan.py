"""What is foretold of bytes and requests is what a server then counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, make_dataset, make_loader, room, rowstore
from dataload.benchmarks.origin import Origin
from dataload.cache import stream
from dataload.cache.blocks import Object
from dataload.forecast import Costs, Fetched, Reader
from dataload.plan import Plan
from dataload.plan import plan as foretell
from dataload.warm import order_of, warm

noise = np.random.default_rng(0)


def images(rows: int) -> pa.Table:
    pixels = pa.array([noise.bytes(size) for size in noise.integers(4000, 12_000, rows).tolist()], pa.binary())
    return pa.table({"image": pixels, "label": noise.integers(0, 10, rows)})


def tabular(rows: int) -> pa.Table:
    return pa.table({f"x{number}": noise.random(rows) for number in range(12)} | {"y": noise.integers(0, 2, rows)})


def tokens(rows: int) -> pa.Table:
    texts = [noise.integers(0, 30_000, size).astype(np.int32) for size in noise.integers(20, 200, rows).tolist()]
    return pa.table({"tokens": pa.array(texts, pa.list_(pa.int32()))})


def captions(rows: int) -> pa.Table:
    """As Parquet's writers have it unless told otherwise: codes of a few values."""
    texts = [f"{'hello world ' * repeats}{repeats}" for repeats in noise.integers(20, 200, rows).tolist()]
    return pa.table({"caption": texts, "kind": [f"kind {number % 7}" for number in range(rows)], "id": range(rows)})


# By name: what a row group is made by, its rows, row groups of each of two files, rows of a batch, the window.
DATASETS: dict[str, tuple[Callable[[int], pa.Table], int, int, int, int]] = {
    "images": (images, 80, 8, 8, 2),
    "tabular": (tabular, 500, 20, 64, 3),
    "tokens": (tokens, 200, 15, 32, 2),
    "captions": (captions, 1000, 15, 32, 2),
    "small": (tabular, 500, 150, 64, 8),  # a gather draws on several at once
    "tiny": (images, 4, 150, 8, 8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("origin")
    for name, (make, rows, groups, _, _) in DATASETS.items():
        (path / "bucket" / name).mkdir(parents=True)
        for file in range(2):
            parts = [make(rows) for _ in range(groups)]
            with pq.ParquetWriter(path / "bucket" / name / f"{file}.parquet", parts[0].schema) as writer:
                for part in parts:
                    writer.write_table(part)
    return path


@pytest.fixture
def origin(folder: Path) -> Iterator[Origin]:
    with Origin(folder) as running:
        yield running


def planned(origin: Origin, name: str, cache: CacheConfig, columns: Any = None, **options: Any) -> tuple[Plan, Any]:
    """And the dataset that it is the plan of."""
    _, _, _, batch, window = DATASETS[name]
    dataset = make_dataset(f"s3://bucket/{name}", storage_options=origin.storage_options, cache=cache, columns=columns)
    manifest, blobs = dataset.manifest, dataset.rowstore.blobs
    return foretell(manifest, blobs, dataset.blocks, order_of(manifest, window=window), batch, **options), dataset


def counted(origin: Origin) -> Fetched:
    """Since the last time."""
    stats = origin.stats()
    origin.reset()
    return Fetched(stats["get_bytes"], stats["get_requests"])


def settled(dataset: Any) -> None:
    """What was asked for in advance is there."""
    for asked in list(dataset.rowstore._asked.values()):
        asked.contents.result(60)


def epochs(origin: Origin, dataset: Any, name: str, count: int) -> list[Fetched]:
    """What a loader has fetched in each epoch, as the server counts it."""
    _, _, _, batch, window = DATASETS[name]
    loader = make_loader(dataset, batch, window=window)
    counted(origin)
    found = []
    for _ in range(count):
        assert sum(len(next(iter(batch.values()))) for batch in loader) == len(dataset)
        settled(dataset)
        found.append(counted(origin))
    return found


def decoded(dataset: Any) -> int:
    blobs = dataset.rowstore.blobs
    return sum(len(blob) for group in range(len(dataset.row_groups)) for blob in blobs.find(group))


@pytest.mark.parametrize("name", ["images", "tabular", "tokens", "captions"])
def test_what_is_foretold_happens(origin: Origin, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cache that all fits into, and in one that half of it does."""
    found, dataset = planned(origin, name, CacheConfig(str(tmp_path / "all"), "1GB"))
    dataset.blocks.tier._limit = found.cache_bytes_needed
    assert found.later_epoch == Fetched()
    assert epochs(origin, dataset, name, 2) == [found.first_epoch, Fetched()]
    assert dataset.blocks.stats()["refused"] == 0
    used = dataset.blocks.tier.folder.index.used_bytes()
    assert used <= found.cache_bytes_needed <= 1.1 * used
    assert found.decoded_bytes == pytest.approx(decoded(dataset), rel=0.01)
    assert found.is_estimate == (name == "captions")

    monkeypatch.setattr(room, "RUN_BYTES", 1)  # a gather draws on few row groups, as it does of large data
    monkeypatch.setattr(rowstore, "LOADERS", 1)  # row groups find room in their order, not just by and large
    limit = found.decoded_bytes // 2
    found, dataset = planned(origin, name, CacheConfig(str(tmp_path / "half"), limit), price=0.09)
    _, _, _, batch, window = DATASETS[name]
    costs = Costs(dataset.manifest, dataset.rowstore.blobs, dataset.blocks)
    reader = Reader(costs, order_of(dataset.manifest, window=window), limit)
    expected = list(islice(reader.epochs(batch), 4))
    assert epochs(origin, dataset, name, 4) == expected
    later = found.later_epoch
    assert found.first_epoch == expected[0]
    assert later is not None
    assert later.bytes == pytest.approx(sum(one.bytes for one in expected[1:]) / 3, rel=0.01)
    assert 0.3 < later.bytes / found.bytes < 0.8
    assert found.later_epoch_cost == pytest.approx(later.bytes / 1e9 * 0.09)
    assert any("later epochs fetch nothing" in line for line in found.advice)


@pytest.mark.parametrize("name", ["small", "tiny"])
def test_of_many_row_groups_it_happens_by_and_large(origin: Origin, name: str, tmp_path: Path) -> None:
    """Whatever the threads that load them do first: to 1 %, as docs/commands.md says, and this for small ones, too."""
    _, dataset = planned(origin, name, CacheConfig(str(tmp_path / "a"), "1GB"))
    limit = dataset.rowstore.blobs.num_bytes // 2
    found, dataset = planned(origin, name, CacheConfig(str(tmp_path / "b"), limit))
    first, *later = epochs(origin, dataset, name, 4)
    assert found.first_epoch is not None
    assert found.later_epoch is not None
    for what in ("bytes", "requests"):
        assert getattr(found.first_epoch, what) == pytest.approx(getattr(first, what), rel=0.01)
        assert getattr(found.later_epoch, what) == pytest.approx(np.mean([getattr(e, what) for e in later]), rel=0.01)
    assert dataset.blocks.stats()["refused"] == 0


@pytest.mark.parametrize("room", [6000, 3000])
def test_what_a_stream_asks_for(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of columns that are held whole, and of those that are too large for that."""
    monkeypatch.setattr(stream, "SMALLEST_PIECE", 100)
    monkeypatch.setattr(stream, "LARGEST_PIECE", 400)
    asked = []

    def fetch(start: int, stop: int) -> Future[memoryview]:
        asked.append((start, stop))
        found: Future[memoryview] = Future()
        found.set_result(memoryview(bytes(stop - start)))
        return found

    ranges = [(0, 1000), (5000, 9100)]
    with stream.RangeStream(fetch, Object("x", 10_000, "1"), ranges, room) as file:
        for start, stop in ranges:
            file.seek(start)
            while file.tell() < stop:
                file.read(min(50, stop - file.tell()))
    assert sorted(asked) == stream.pieces(ranges, room)


def test_columns_that_are_left_out_are_not_fetched(origin: Origin, tmp_path: Path) -> None:
    found, dataset = planned(origin, "images", CacheConfig(str(tmp_path), "1GB"), columns=["label"])
    whole, _ = planned(origin, "images", CacheConfig(str(tmp_path), "1GB"))
    counted(origin)
    warm(dataset.rowstore.blobs, range(len(dataset.row_groups)))
    assert counted(origin) == found.first_epoch
    assert found.first_epoch.bytes < 0.01 * whole.first_epoch.bytes


def test_arrow_files_are_foretold_too(tmp_path: Path) -> None:
    folder = tmp_path / "origin" / "bucket" / "arrow"
    folder.mkdir(parents=True)
    large = [images(120) for _ in range(3)]  # so large that their index is read without them
    with pa.ipc.new_file(folder / "large.arrow", large[0].schema) as writer:
        for part in large:
            writer.write_table(part)
    with Origin(tmp_path / "origin") as running:
        url, options = "s3://bucket/arrow", running.storage_options
        dataset = make_dataset(url, storage_options=options, cache=CacheConfig(str(tmp_path / "c"), "1GB"))
        blobs = dataset.rowstore.blobs
        found = foretell(dataset.manifest, blobs, dataset.blocks, order_of(dataset.manifest), 8)
        counted(running)
        warm(blobs, range(3))
        assert counted(running) == found.first_epoch
