"""Bytes in flight and in memory while row groups are fetched and decoded, whatever their size."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import until

from dataload import CacheConfig, World, make_dataset, make_loader, mix
from dataload.benchmarks.origin import Origin
from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.cache.local import key_locks
from dataload.cache.local.key_locks import KeyLocks
from dataload.cache.local.tier import LocalTier
from dataload.cache.origin.origin import Origin as ObjectStore
from dataload.formats import parquet, range_stream
from dataload.formats.range_stream import fetched_buffers
from dataload.rows import row_group_cache, row_group_plan
from dataload.rows.making import compute_lock, file_maker, pipeline, row_group_memory
from dataload.rows.making.pipeline import make_cached
from dataload.rows.making.row_group_memory import (
    MEMORY_DIVISOR,
    MIN_MEMORY,
    RELEASED_BYTES,
    TRAINER_DIVISOR,
    RankShare,
)
from dataload.runtime.memory_budget import ReservationCancelled
from dataload.runtime.resource_limits import usable_cores, usable_memory

GROUPS, GROUP_BYTES = 12, 4_000_000


def write(path: Path) -> None:
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(path, pa.schema([("image", pa.binary())]), compression="none") as writer:
        for _ in range(GROUPS):
            images = [rng.bytes(GROUP_BYTES // 40) for _ in range(40)]
            writer.write_table(pa.table({"image": images}, writer.schema))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "data" / "bucket").mkdir(parents=True)
    write(tmp_path / "data" / "bucket" / "x.parquet")
    return tmp_path / "data"


def test_one_row_group_uses_all_requests(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row group is fetched alone, in one request on each connection, so that it arrives early."""
    monkeypatch.setattr(range_stream, "LEAST_SHARE", GROUP_BYTES // 64)
    with Origin(files) as origin:
        dataset = make_dataset(
            "s3://bucket/x.parquet", storage_options=origin.storage_options, cache=CacheConfig(str(tmp_path / "cache"))
        )
        origin.behave(bytes_per_second=200_000.0)
        until(lambda: dataset.blocks.free_requests)  # Reads of earlier tests may be under way.
        assert make_cached(dataset.rowstore.row_groups.caches[0], 0)
        assert origin.stats()["most_gets_at_once"] == IN_FLIGHT


def test_a_row_group_is_divided_only_if_all_connections_are_free(files: Path, tmp_path: Path) -> None:
    with Origin(files) as origin:
        blocks = make_dataset(
            "s3://bucket/x.parquet", storage_options=origin.storage_options, cache=CacheConfig(str(tmp_path / "cache"))
        ).blocks
        until(lambda: blocks.free_requests == IN_FLIGHT)  # Reads of earlier tests may be under way.
        limiter = blocks.origin.limiter
        assert limiter is not None
        limiter.share(blocks, 16)
        assert blocks.free_requests == limiter.limit == CacheConfig().in_flight // 16
        busy = threading.Event()
        pending = blocks.submit(busy.wait)
        assert blocks.free_requests == 0
        busy.set()
        pending.result()
    assert make_dataset(str(files / "bucket"), cache=False).blocks.free_requests == 0


@pytest.mark.parametrize(("files", "row_groups", "blobs"), [(3, 1, 2), (1, 3, 3)])
def test_only_small_row_groups_with_neighbours_share_a_cached_block(
    tmp_path: Path, files: int, row_groups: int, blobs: int
) -> None:
    (tmp_path / "data").mkdir()
    for number in range(files):
        pq.write_table(
            pa.table({"a": range(30)}), tmp_path / "data" / f"{number}.parquet", row_group_size=30 // row_groups
        )
    dataset = make_dataset(str(tmp_path / "data"), cache=CacheConfig(str(tmp_path / "cache")))

    def cached() -> int:
        return len(list((tmp_path / "cache" / "blobs").glob("*/*")))

    before = cached()
    assert all(map(partial(make_cached, dataset.rowstore.row_groups.caches[0]), range(2)))
    assert cached() - before == blobs
    assert make_cached(dataset.rowstore.row_groups.caches[0], 2)  # Nothing needs the block any more.
    assert cached() - before == 3


@pytest.mark.variants
@pytest.mark.parametrize("most_bytes", [row_group_cache.SMALL_BYTES, 0])
def test_a_thread_that_computes_holds_the_lock(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """The thread that loads a small row group holds the lock while it decodes, and during no request."""
    monkeypatch.setattr(compute_lock, "PATIENCE_SECONDS", 60)
    monkeypatch.setattr(row_group_cache, "SMALL_BYTES", most_bytes)
    seen: set[tuple[str, str, bool]] = set()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            thread = threading.current_thread().name.partition("_")[0]
            seen.add((name, thread, compute_lock.lock.is_held))
            return call(*args)

        return noting

    dataset = make_dataset(dataset_of([[300]] * 60), storage_options=bucket.options, cache=cache)
    monkeypatch.setattr(file_maker, "decode", noted("decode", file_maker.decode))
    monkeypatch.setattr(ObjectStore, "_request", noted("request", ObjectStore._request))
    assert sum(len(batch["row_id"]) for batch in make_loader(dataset, 300)) == 18_000
    decoding = ("decode", "dataload-load", True) if most_bytes else ("decode", "dataload-decode", False)
    assert seen == {decoding, ("request", "dataload-blocks-read", False)}


def test_row_groups_that_wait_for_a_decoder_hold_only_their_bytes(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests go on while decoding is the bottleneck, until the budget is full of fetched bytes."""
    blobs = make_dataset(str(files / "bucket"), cache=CacheConfig(str(tmp_path / "cache"))).rowstore.row_groups.caches[
        0
    ]
    maker, fetched = blobs.maker, threading.Semaphore(0)
    maker.memory.use(RankShare(TRAINER_DIVISOR * 15 * GROUP_BYTES, usable_cores()))
    publish = pipeline._publish_streamed
    monkeypatch.setattr(pipeline, "_publish_streamed", lambda job: [fetched.release(), publish(job)][1])
    together = maker.memory.held.total // maker.reservation(0)
    assert together > maker.memory.held.total // (maker.reservation(0) + blobs.decoding_bytes(0))
    with ThreadPoolExecutor(GROUPS) as pool:
        with maker.memory.decoding.reserve(sys.maxsize):  # The decoders are busy.
            made = [pool.submit(make_cached, blobs, group) for group in range(GROUPS)]
            for _ in range(together):
                assert fetched.acquire(timeout=200)
            assert not any(future.done() for future in made)
        assert all(future.result(200) for future in made)
    assert maker.memory.held.idle
    assert maker.memory.decoding.idle


def test_record_batches_are_decompressed_in_the_memory_of_decoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow decompresses all rows at once, and a file may have few bytes for them."""
    monkeypatch.setattr(row_group_plan, "BLOB_BYTES", 1 << 20)
    groups, size = 4, 8 << 20
    table = pa.table({"x": np.zeros(size // 8)})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(tmp_path / "x.arrow", table.schema, options=options) as file:
        for _ in range(groups):
            file.write_table(table)
    blobs = make_dataset(tmp_path / "x.arrow", cache=CacheConfig(str(tmp_path / "cache"))).rowstore.row_groups.caches[0]
    maker, fetched = blobs.maker, threading.Semaphore(0)
    assert blobs.decoding_bytes(0) > size > 4 * max(blobs.plan.blob_sizes(0))
    publish, before = pipeline._publish_streamed, pa.total_allocated_bytes()
    monkeypatch.setattr(pipeline, "_publish_streamed", lambda job: [fetched.release(), publish(job)][1])
    with ThreadPoolExecutor(groups) as pool:
        with maker.memory.decoding.reserve(sys.maxsize):  # The decoders are busy.
            made = [pool.submit(make_cached, blobs, group) for group in range(groups)]
            for _ in range(groups):
                assert fetched.acquire(timeout=200)
            assert pa.total_allocated_bytes() - before < size
        assert all(future.result(200) for future in made)


def test_a_list_of_structs_is_streamed_as_several_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has pieces in flight, for which the least budget must have room."""
    monkeypatch.setattr(file_maker, "COLUMN_BYTES", 1)
    rows = pa.array([[{"a": 1, "b": [2]}]], pa.list_(pa.struct({"a": pa.int8(), "b": pa.list_(pa.int8())})))
    pq.write_table(pa.table({"x": [1], "y": rows}), tmp_path / "x.parquet")
    assert make_dataset(tmp_path / "x.parquet", cache=False).rowstore.row_groups.caches[0].maker.need.held == 3


@pytest.mark.parametrize("sources", [1, 2])
def test_a_second_loader_keeps_what_the_first_has_reserved(tmp_path: Path, sources: int) -> None:
    for name, rows in (("small", 10), ("large", 1000)):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"x": list(range(rows))}), tmp_path / name / "0.parquet")
    cache = CacheConfig(str(tmp_path / "cache"))
    parts = [make_dataset(str(tmp_path / name), cache=cache) for name in ("small", "large")]
    data = parts[0] if sources == 1 else mix(parts)
    cached = data.rowstore.row_groups.caches[0]
    cached.memory.use(RankShare(1 << 40, usable_cores()))
    # As a loader that reads `data`:
    with cached.memory.held.reserve(sys.maxsize), cached.memory.decoding.reserve(sys.maxsize):
        make_loader(data, 4, world=World(0, 1), num_workers=1)  # less memory for each process
        assert not cached.memory.held.fits(cached.reservation(0))
        assert not cached.memory.decoding.fits(1)
    assert cached.memory.held.fits(cached.reservation(0))
    assert cached.memory.held.idle
    assert cached.memory.decoding.idle


def test_a_wait_for_another_process_holds_no_memory(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group that another process makes does not keep this process from making others."""
    blobs = make_dataset(str(files / "bucket"), cache=CacheConfig(str(tmp_path / "cache"))).rowstore.row_groups.caches[
        0
    ]
    tier, waiting = blobs.blocks.tier, threading.Event()
    assert isinstance(tier, LocalTier)
    wait = LocalTier.wait_for_holder
    monkeypatch.setattr(LocalTier, "wait_for_holder", lambda *given: (waiting.set(), wait(*given))[1])
    with ThreadPoolExecutor(1) as pool:
        with tier.key_lock(blobs.key(0)) as busy:
            assert busy is None
            waits = pool.submit(make_cached, blobs, 0)
            assert waiting.wait(200)
            assert blobs.maker.memory.held.idle
            assert make_cached(blobs, 1), "another row group meanwhile"
            assert not waits.done()
        assert waits.result(200)


def test_a_row_group_whose_maker_was_stopped_is_made_without_the_lock(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other row groups are published meanwhile, which tells the tier that its disk works."""
    dataset = make_dataset(str(files / "bucket"), cache=CacheConfig(str(tmp_path / "cache")))
    blobs, tier = dataset.rowstore.row_groups.caches[0], dataset.blocks.tier
    assert isinstance(tier, LocalTier)
    monkeypatch.setattr("dataload.cache.local.tier.FILL_SECONDS", 0.1)
    monkeypatch.setattr(key_locks, "SILENCE_SECONDS", 0.1)
    stopped = KeyLocks(str(tier.path / "locks"))
    assert make_cached(blobs, 1)
    with stopped.hold(blobs.key(0).digest, timeout=0), ThreadPoolExecutor(1) as pool:
        waits = pool.submit(make_cached, blobs, 0)
        others = iter([*range(2, GROUPS)])
        while not waits.done():
            make_cached(blobs, next(others, 1))
        assert waits.result()


def test_a_copy_for_another_process_has_the_same_memory(files: Path) -> None:
    dataset = make_dataset(str(files / "bucket"), cache=False)
    dataset.rowstore.row_groups.memory.use(RankShare(123 << 20, 3))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.rowstore.row_groups.memory.rank == RankShare(123 << 20, 3)
    assert copy.rowstore.row_groups.memory.held.total == dataset.rowstore.row_groups.memory.held.total < 123 << 20
    maker = pickle.loads(pickle.dumps(dataset.rowstore.row_groups.caches[0])).maker
    assert maker.memory.held.total == dataset.rowstore.row_groups.memory.held.total


def test_the_ranks_of_a_host_divide_its_memory_and_say_so(files: Path, tmp_path: Path) -> None:
    whole = usable_memory() // MEMORY_DIVISOR
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (1, 1, {}),
        (4, 1, {}),
        (2, 2, {"num_workers": 1, "transform": dict}),
        (3, 1, {"num_workers": 1}),  # Without a transform there are no workers.
    ]
    for ranks, processes, workers in cases:
        world = World(0, ranks, 0, ranks)
        cache = CacheConfig(str(tmp_path / f"{ranks}"))
        loader = make_loader(str(files / "bucket"), 8, world=world, cache=cache, **workers)
        next(iter(loader))
        share = max(MIN_MEMORY, whole // (ranks * processes))
        maker = loader.dataset.rowstore.row_groups.caches[0].maker
        assert maker.memory.rank == RankShare(share, max(1, usable_cores() // ranks))
        assert 0 < loader.stats().memory_bytes == maker.memory.limit <= share
        assert set(loader.row_group_states()) == {"planned", "fetching", "decoding", "cached", "mapped"}


def test_the_largest_numbers_of_all_loaders_divide_the_memory(files: Path) -> None:
    """A loader for validation must not give its memory to each worker of the loader for training."""
    dataset = make_dataset(str(files / "bucket"), cache=False)
    memory = dataset.rowstore.row_groups.memory
    train = make_loader(dataset, 8, world=World(0, 2, 0, 2), num_workers=1, transform=dict)
    assert memory.rank == RankShare.of(2, 2)
    validation = make_loader(dataset, 8, world=World(0, 1))
    assert memory.rank == RankShare.of(2, 2)
    del train
    assert len(list(validation)) == len(validation)
    assert memory.rank == RankShare.of(1, 1)


def test_the_ranks_of_a_host_divide_its_cores(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank, and each copy for its background decoder, decodes on its part of them, and on one at least."""
    monkeypatch.setattr(row_group_memory, "usable_cores", lambda: 6)
    monkeypatch.setattr(row_group_memory, "host_cores", lambda: 6)
    dataset = make_dataset(str(files / "bucket"), cache=False)
    memory = dataset.rowstore.row_groups.memory
    assert memory.decoders._count == 6
    for ranks, count in [(4, 1), (2, 3), (12, 1)]:
        world = World(0, ranks, 0, ranks)
        loader = make_loader(dataset, 8, world=world, num_workers=1)
        assert memory.decoders._count == count
        copy = pickle.loads(pickle.dumps(loader.dataset.rowstore.row_groups.caches[0])).memory
        assert copy.decoders._count == count
        del loader
    monkeypatch.setattr(row_group_memory, "host_cores", lambda: 48)  # The launcher bound each rank to six
    make_loader(dataset, 8, world=World(0, 8, 0, 8))
    assert memory.decoders._count == 6


def test_the_budget_holds_for_row_groups_of_very_many_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow needs a part of each column at a time. The memory that is stated has room for these parts."""
    columns, rows = 150, 2000
    monkeypatch.setattr(row_group_memory, "MIN_MEMORY", 0)
    monkeypatch.setattr(file_maker, "COLUMN_BYTES", 4 * rows // 2)
    monkeypatch.setattr(row_group_memory, "MEMORY_DIVISOR", usable_memory() // 100_000)
    table = pa.table({f"c{number}": np.zeros(rows, np.float32) for number in range(columns)})
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=False, compression="none")
    needed = file_maker.COLUMN_BYTES * columns
    taken, allocate, opened = list[int](), range_stream._allocate, pq.ParquetFile
    monkeypatch.setattr(range_stream, "SMALLEST_PIECE", 1000)
    monkeypatch.setattr(range_stream, "_allocate", lambda size: [taken.append(size), allocate(size)][1])

    def noted(*args: Any, buffer_size: int, **options: Any) -> pq.ParquetFile:
        taken.append(columns * buffer_size)
        return opened(*args, buffer_size=buffer_size, **options)

    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache")))
    maker = dataset.rowstore.row_groups.caches[0].maker
    loader = make_loader(dataset, 8)
    next(iter(loader))
    assert maker.memory.held.total == maker.reservation(0) == needed
    assert 2 * needed <= loader.stats().memory_bytes == maker.memory.limit < 2.2 * needed
    taken.clear()
    monkeypatch.setattr(parquet.pq, "ParquetFile", noted)
    with maker.open(0, dataset.rowstore.row_groups.caches[0].blocks):
        assert needed / 2 < sum(taken) <= needed


def test_bytes_that_were_never_reserved_do_not_count_as_returned(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(10)}), tmp_path / "x.parquet")
    memory = make_dataset(str(tmp_path / "x.parquet"), cache=False).rowstore.row_groups.caches[0].maker.memory
    buffer = fetched_buffers.take(1000)
    fetched_buffers.give_back(buffer)
    with pytest.raises(ReservationCancelled), memory.hold(RELEASED_BYTES, lambda: True):
        pass
    assert fetched_buffers.take(1000) is buffer
    fetched_buffers.give_back(buffer)
    with memory.hold(RELEASED_BYTES, lambda: False):
        pass
    assert fetched_buffers.take(1000) is not buffer


PROGRAM = """
import sys, threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from dataload import CacheConfig, make_dataset
from dataload.rows.making.pipeline import make_cached
from dataload.rows.making.row_group_memory import RankShare
from dataload.runtime.resource_limits import usable_cores

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

blobs = make_dataset(sys.argv[1], cache=CacheConfig(sys.argv[2])).rowstore.row_groups.caches[0]
make_cached(blobs, 0)  # loads all modules
blobs.memory.rank = RankShare(int(sys.argv[3]), usable_cores())
blobs.memory.after_fork_in_child()
before, peak, end = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not end.is_set():
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
with ThreadPoolExecutor(12) as pool:
    assert all(pool.map(partial(make_cached, blobs), range(1, 12)))
end.set()
watcher.join()
print(peak - before)
"""


@pytest.mark.parametrize(("budget", "most"), [(32 << 20, 40 << 20)])
def test_memory_stays_in_the_budget(files: Path, tmp_path: Path, budget: int, most: int) -> None:
    """Half of the budget is for this process; a row group takes a third of that. Arrow and malloc keep a part."""
    command: list[Any] = [sys.executable, "-c", PROGRAM, files / "bucket", tmp_path / "cache", budget]
    peak = int(subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout)
    assert peak < most
