"""Tests of the row store: each row group is decoded once, in the order of need, within the capacity."""

from __future__ import annotations

import errno
import pickle
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import until
from row_groups import load

from dataload import CacheConfig, make_dataset, make_loader
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Waited
from dataload.errors import ConfigError, OriginError
from dataload.formats import parquet
from dataload.rows import open_row_groups, row_group_plan, row_store, scheduler
from dataload.rows.making import pipeline
from dataload.rows.mmap_arena import MmapArena
from dataload.runtime.executor import LOOK_SECONDS, DaemonExecutor


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count how often each row group is decoded."""
    counts: Counter[int] = Counter()
    read = parquet.ParquetFooter.open_row_group

    def counting(footer: Any, obj: Any, number: int, *rest: Any) -> Any:
        counts[number] += 1
        return read(footer, obj, number, *rest)

    monkeypatch.setattr(parquet.ParquetFooter, "open_row_group", counting)
    return counts


@pytest.fixture
def dataset(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Any:
    return make_dataset(dataset_of([[5] * 200]), storage_options=bucket.options, cache=cache)


@pytest.mark.variants
@pytest.mark.parametrize(("window", "batch_size"), [(16, 10), (16, 100), (4, 16), (None, 64), (3, 400)])
def test_an_epoch_decodes_each_row_group_once(dataset: Any, decoded: Any, window: int | None, batch_size: int) -> None:
    loader = make_loader(dataset, batch_size, window=window)
    assert sum(len(batch["row_id"]) for batch in loader) == 1000
    assert decoded == Counter(range(200))


def test_full_shuffle_decodes_each_row_group_once_in_all(dataset: Any, decoded: Any) -> None:
    loader = make_loader(dataset, 50, shuffle="full")
    for _ in range(2):
        assert sum(len(batch["row_id"]) for batch in loader) == 1000
    assert decoded == Counter(range(200))


def test_what_is_prefetched_is_not_decoded_again(dataset: Any, decoded: Any) -> None:
    dataset.rowstore.prefetch([3, 1])
    found = dataset.rowstore.gather(np.array([16, 5]))
    assert found.rows["row_id"].tolist() == [16, 5]
    assert decoded == Counter([3, 1])


def test_the_row_group_that_was_requested_first_is_evicted_first(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, loaded = dataset.rowstore, Counter[int]()
    finish = store.scheduler._finish

    def noted(load: Any, result: Any) -> None:
        loaded[load.group] += 1
        finish(load, result)

    monkeypatch.setattr(store.scheduler, "_finish", noted)
    store.capacity = 2
    for group in (0, 1, 0, 2, 1, 0):
        store.gather(np.array([5 * group]))
    assert loaded == Counter({0: 2, 1: 1, 2: 1})


def test_an_open_row_group_that_is_needed_again_is_closed_last(dataset: Any) -> None:
    """An epoch leaves row groups open. They are the oldest ones in the next epoch, which may need them soon."""
    store = dataset.rowstore
    store.capacity = 2
    store.gather(np.array([0, 5]))
    store.prefetch([0])
    store.gather(np.array([10]))
    loads = row_store.Loads()
    store.gather(np.array([0]), loads=loads)
    assert loads.opened == {0: False}


def test_the_row_groups_of_a_gather_are_not_evicted(dataset: Any) -> None:
    store = dataset.rowstore
    store.capacity = 2
    store.gather(np.array([0, 5]))
    rows = [12, 0, 7, 19]
    assert store.gather(np.array(rows)).rows["row_id"].tolist() == rows


def test_a_gather_makes_room_for_all_its_row_groups_at_once(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one row group at a time takes a time that is quadratic in the row groups of a gather."""
    passes: list[int] = []
    make = open_row_groups.evictions
    monkeypatch.setattr(open_row_groups, "evictions", lambda *args: [passes.append(0), make(*args)][1])
    store = dataset.rowstore
    store.capacity = 100
    for first in (0, 500):
        store.gather(np.arange(first, first + 500))
        assert store.states()["mapped"] == 100
    assert len(passes) <= 4


def test_a_cache_that_cannot_be_written_to_takes_no_memory_without_bound(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncached row groups are made ahead within the budget, and closed as soon as no batch needs them."""
    dataset = make_dataset(dataset_of([[2000] * 60]), storage_options=bucket.options, cache=cache)
    loader = make_loader(dataset, 100, window=2)
    store = dataset.rowstore
    owner, memory = store.scheduler, store.row_groups.memory
    monkeypatch.setattr(memory.held, "total", 10 * store.size_of(0))
    monkeypatch.setattr(LocalTier, "can_write", lambda _: False)
    store.gather(np.array([0]))  # It shows that the cache keeps nothing.
    found, most = list[int](), 0
    for number, batch in enumerate(loader):
        found += batch["row_id"].tolist()
        if number % 100 == 0:
            until(lambda: sum(store.states()[state] for state in ("planned", "fetching", "decoding")) == 0)
            ahead = [load.contents.result(0) or [] for load in owner._loads.copy().values() if not load.awaited]
            most = max(most, sum(sum(map(len, contents)) for contents in ahead))
            assert store.states()["mapped"] <= 6
    assert 0 < most <= memory.held.total
    assert sorted(found) == list(range(60 * 2000))


def test_a_copy_for_a_worker_keeps_as_few_uncached_row_groups_open(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(dataset_of([[2000] * 40]), storage_options=bucket.options, cache=cache)
    loader = make_loader(dataset, 100, window=2)
    copy = pickle.loads(pickle.dumps(dataset)).rowstore
    monkeypatch.setattr(LocalTier, "can_write", lambda _: False)
    for store in (dataset.rowstore, copy):
        for group in range(40):
            store.gather(np.array([2000 * group]))
        assert store.states()["mapped"] <= 6 < store.capacity // 2
    del loader


def test_prefetched_row_groups_leave_maps_for_others(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "max_maps", lambda: 800)
    loader = make_loader(dataset, 10, window=2)
    batches = iter(loader)
    next(batches)
    until(lambda: sum(dataset.rowstore.states()[state] for state in ("planned", "fetching", "decoding")) == 0)
    assert dataset.rowstore.states()["cached"] <= 50
    assert sum(len(batch["row_id"]) for batch in batches) == 990


def test_rows_are_decoded_once_a_host(dataset: Any, decoded: Any, cache: CacheConfig) -> None:
    ours = dataset.rowstore.gather(np.arange(1000))
    assert decoded == Counter(range(200))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.rowstore.gather(np.arange(1000)).rows.tobytes() == ours.rows.tobytes()
    assert decoded == Counter(range(200))


def test_a_failed_decode_is_tried_again(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OriginError("down")

    with monkeypatch.context() as patch:
        patch.setattr(parquet.ParquetFooter, "open_row_group", fails)
        with pytest.raises(OriginError, match="down"):
            dataset.rowstore.gather(np.array([0]))
    assert dataset.rowstore.gather(np.array([0])).rows["row_id"].tolist() == [0]


def test_a_pickled_copy_reads_the_same(bucket: Any, cache: CacheConfig) -> None:
    bucket.put_table("data/x.parquet", pa.table({"a": [1, None]}))
    dataset = make_dataset(bucket.url("data"), storage_options=bucket.options, cache=cache, fill_null=7)
    assert pickle.loads(pickle.dumps(dataset)).rowstore.gather(np.array([1, 0])).rows["a"].tolist() == [7, 1]


def test_fewer_columns_come_from_the_records_of_all(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, decoded: Counter[int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(row_group_plan, "BLOB_BYTES", 2600)  # several blobs a row group, more of them with all columns
    url = dataset_of([[150, 40]])
    whole = make_dataset(url, storage_options=bucket.options, cache=cache)
    whole.rowstore.gather(np.arange(190))
    assert decoded == Counter([0, 1])
    few = make_dataset(url, columns=["text", "half"], storage_options=bucket.options, cache=cache)
    assert len(few.rowstore.row_groups.row_starts) < len(whole.rowstore.row_groups.row_starts)
    rows = np.random.default_rng(0).permutation(190)
    assert few.__getitems__(rows).columns["text"] == [f"row {row}" for row in rows]
    assert few.__getitems__(rows).columns["half"].tolist() == (rows / 2).tolist()
    assert decoded == Counter([0, 1])
    other = make_dataset(url, columns=["half"], storage_options=bucket.options, cache=cache, fill_null=0)
    other.rowstore.gather(np.array([0]))
    assert decoded == Counter([0, 1, 0])


def test_open_rows_hold_no_descriptors(dataset: Any) -> None:
    """The dataset has strings, so each blob stays mapped twice."""
    dataset.rowstore.gather(np.arange(5))
    before = len(list(Path("/proc/self/fd").iterdir()))
    dataset.rowstore.capacity = 200
    dataset.rowstore.gather(np.arange(1000))
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 50


def test_a_row_group_that_could_not_be_mapped_is_tried_again(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no map left")

    with monkeypatch.context() as patch:
        patch.setattr(MmapArena, "put", fails)
        with pytest.raises(OSError, match="no map left"):
            dataset.rowstore.gather(np.array([0]))
    assert dataset.rowstore.gather(np.array([0])).rows["row_id"].tolist() == [0]


def test_a_row_group_whose_disk_fails_before_it_is_open_is_loaded_again(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig
) -> None:
    dataset = make_dataset(dataset_of([[5] * 2]), storage_options=bucket.options, cache=cache, columns=["row_id"])
    store = dataset.rowstore
    store.prefetch([0])
    assert store.scheduler._loads[0].contents.result(200)
    for blob in Path(cache.cache_dir).glob("blobs/*/*"):
        blob.write_bytes(b"")
    assert store.gather(np.array([3])).rows["row_id"].tolist() == [3]


def test_more_row_groups_than_a_process_has_maps_for(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "max_maps", lambda: 100)
    dataset.rowstore.capacity = 200
    for first in range(0, 1000, 50):
        assert dataset.rowstore.gather(np.arange(first, first + 50)).rows["row_id"][0] == first
    with pytest.raises(ConfigError, match=r"200 row groups takes more maps .* raise vm.max_map_count"):
        dataset.rowstore.gather(np.arange(1000))


def test_forget_cancels_prefetched_row_groups_that_no_thread_has_started(
    dataset: Any, decoded: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go = dataset.rowstore, threading.Event()
    make = pipeline.make
    monkeypatch.setattr(pipeline, "make", lambda *args: go.wait(60) and make(*args))
    store.capacity = 200
    store.prefetch(range(200))
    store.forget()
    go.set()
    assert store.gather(np.array([999])).rows["row_id"].tolist() == [999]
    assert decoded == Counter([199])


def test_a_load_that_waits_for_memory_is_cancelled_by_forget_and_restarted_by_a_request(
    dataset: Any, decoded: Counter[int]
) -> None:
    store = dataset.rowstore
    store.capacity = 200
    with store.row_groups.memory.held.reserve(sys.maxsize):
        store.prefetch(range(20))
        cancelled = [load for group, load in store.scheduler._loads.items() if group != 7]
        store.forget()
        store.prefetch([7])
    assert len(store.scheduler._loads[7].contents.result(200)) == 1
    assert not wait([load.contents for load in cancelled], 60).not_done
    assert all(load.is_stale() for load in cancelled)
    assert store.gather(np.array([16, 35])).rows["row_id"].tolist() == [16, 35]
    assert decoded == Counter([3, 7])


def test_a_gather_restarts_a_load_that_another_loop_cancels(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, go = dataset.rowstore, threading.Event()
    make = pipeline.make
    monkeypatch.setattr(pipeline, "make", lambda *args: go.wait(60) and make(*args))
    store.prefetch(range(scheduler.LOADERS))  # Every thread is busy, so the next row group waits.
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.extend(store.gather(np.array([999])).rows["row_id"]))
    waiting.start()
    while 199 not in store.scheduler._loads:
        threading.Event().wait(0.001)
    store.forget()
    go.set()
    waiting.join(200)
    assert found == [999]


@pytest.fixture
def gathering(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gathers rows on a thread. `waits` is released each time the gather begins to wait for a row group."""

    class Gathering:
        def __init__(self) -> None:
            self.waits = threading.Semaphore(0)
            self.stop: Future[None] = Future()
            self.found: list[int] = []
            self.cancelled = False
            self.stops: list[Future[None]] = []  # the `stop` of each wait

        def gather(self, rows: list[int]) -> threading.Thread:
            thread = threading.Thread(target=self._gather, args=(rows,))
            thread.start()
            return thread

        def _gather(self, rows: list[int]) -> None:
            try:
                self.found.extend(dataset.rowstore.gather(np.array(rows), self.stop).rows["row_id"].tolist())
            except CancelledError:
                self.cancelled = True

    gathering, contents_of = Gathering(), dataset.rowstore.scheduler.contents_of

    def noted(load: Any, stop: Any) -> Any:
        gathering.stops.append(stop)
        gathering.waits.release()
        return contents_of(load, stop)

    monkeypatch.setattr(dataset.rowstore.scheduler, "contents_of", noted)
    return gathering


def test_a_long_wait_for_a_row_group_is_logged(
    dataset: Any, gathering: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go, read = threading.Event(), parquet.ParquetFooter.open_row_group

    def held(*arguments: Any) -> Any:
        with dataset.blocks.origin.limiter.request():
            assert go.wait(200)
        return read(*arguments)

    monkeypatch.setattr(scheduler, "LOG_SECONDS", 0.01)
    monkeypatch.setattr(parquet.ParquetFooter, "open_row_group", held)
    thread = gathering.gather([7])
    message = r"rank 0 has waited 0 s for .*0\.parquet row group 1, 1 of \d+ requests in flight \(fetching\)"
    until(lambda: sum(bool(re.search(message, line)) for line in caplog.messages) > 1)
    go.set()
    thread.join()
    assert gathering.found == [7]


def test_the_wait_for_a_row_group_is_cut_into_short_ones(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that comes just before a wait is handled after it."""
    store, begun, timeouts = dataset.rowstore, threading.Event(), list[float]()
    make, wait_for_first = pipeline.make, scheduler.wait

    def noted(futures: Any, timeout: float, **when: Any) -> Any:
        timeouts.append(timeout)
        begun.set()
        return wait_for_first(futures, timeout, **when)

    monkeypatch.setattr(pipeline, "make", lambda *args: begun.wait(60) and make(*args))
    monkeypatch.setattr(scheduler, "wait", noted)
    assert store.gather(np.array([0])).rows["row_id"].tolist() == [0]
    assert 0 < max(timeouts) <= LOOK_SECONDS


def occupy_every_thread(store: Any, go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start as many loads as there are threads. They continue once `go` is set."""
    busy, make = threading.Semaphore(0), pipeline.make

    def blocked(loads: Any, *rest: Any) -> None:
        if loads[0].group < scheduler.LOADERS:
            busy.release()
            go.wait()
        make(loads, *rest)

    monkeypatch.setattr(pipeline, "make", blocked)
    store.capacity = 200
    store.prefetch(range(scheduler.LOADERS))
    for _ in range(scheduler.LOADERS):
        busy.acquire()


def test_a_gather_restarts_a_cancelled_load_at_once_while_every_thread_is_busy(
    dataset: Any, gathering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go = dataset.rowstore, threading.Event()
    try:
        occupy_every_thread(store, go, monkeypatch)
        waiting = gathering.gather([999])
        gathering.waits.acquire()
        store.forget()
        waiting.join()
        assert gathering.found == [999]
    finally:
        go.set()


def test_at_the_limit_of_threads_a_restarted_load_waits_for_a_shared_thread(
    dataset: Any, gathering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go, start = dataset.rowstore, threading.Event(), threading.Thread.start

    def at_the_limit(thread: threading.Thread) -> None:
        if "load-now" in thread.name:
            go.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    try:
        occupy_every_thread(store, go, monkeypatch)
        waiting = gathering.gather([999])
        gathering.waits.acquire()
        monkeypatch.setattr(threading.Thread, "start", at_the_limit)
        store.forget()
        waiting.join()
        assert gathering.found == [999]
    finally:
        go.set()


def test_a_load_that_no_thread_can_run_is_not_under_way(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_the_limit(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = dataset.rowstore
    with monkeypatch.context() as patch:
        patch.setattr(store.scheduler, "_threads", DaemonExecutor(1, "dataload-load"))  # Others may have threads.
        patch.setattr(threading.Thread, "start", at_the_limit)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            store.gather(np.array([0]), loads=row_store.Loads())
    assert not store.scheduler.ledger.peek(0).get("under_way")
    assert store.gather(np.array([0])).rows["row_id"].tolist() == [0]


def test_a_load_that_a_gather_waits_for_keeps_its_place_in_the_budget_when_another_loop_ends(
    dataset: Any, gathering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, loads = dataset.rowstore, Counter[int]()
    make, budget = pipeline.make, store.row_groups.memory.held

    def counting(requested: Any, *rest: Any) -> None:
        loads.update(load.group for load in requested)
        make(requested, *rest)

    monkeypatch.setattr(pipeline, "make", counting)
    with budget.reserve(sys.maxsize):
        waiting = gathering.gather([35])
        gathering.waits.acquire()
        until(lambda: budget._waiters)
        with budget._mutex:  # The loading thread has released it, so it waits for memory.
            pass
        store.forget()
        gathering.waits.acquire()  # The gather was notified and still needs the row group.
    waiting.join()
    assert gathering.found == [35]
    assert loads == Counter([7])


def test_a_loop_that_ends_does_not_restart_the_loads_that_it_cancels(dataset: Any, gathering: Any) -> None:
    store = dataset.rowstore
    with store.row_groups.memory.held.reserve(sys.maxsize):
        waiting = gathering.gather([35])
        gathering.waits.acquire()
        gathering.stop.set_result(None)
        store.forget()
        waiting.join()
        assert gathering.cancelled
        assert all(load.is_cancelled() for load in store.scheduler._loads.values())


def test_a_loader_stops_waiting_before_it_cancels_its_loads(
    dataset: Any, gathering: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go, stopped = dataset.rowstore, threading.Event(), list[bool]()
    make, forget = pipeline.make, store.forget
    monkeypatch.setattr(
        pipeline, "make", lambda loads, *rest: [loads[0].group == 0 or go.wait(), make(loads, *rest)][1]
    )
    monkeypatch.setattr(store, "forget", lambda: [stopped.append(gathering.stops[-1].done()), forget()])
    batches = iter(make_loader(dataset, 5, shuffle=False, transform=dict))  # A thread waits.
    try:
        assert next(batches)["row_id"].tolist() == [0, 1, 2, 3, 4]
        for _ in range(2):  # the second row group never arrives
            gathering.waits.acquire()
        batches.close()
        assert stopped == [True]
        assert all(load.is_cancelled() for load in store.scheduler._loads.values())
    finally:
        go.set()


def test_what_the_cache_does_not_keep_is_made_without_waiting_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a full cache, the ranks of a host would make such a row group one after the other, in each epoch."""
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "x.parquet")
    blobs = make_dataset(tmp_path / "x.parquet", cache=CacheConfig(str(tmp_path / "c"))).rowstore.row_groups.caches[0]
    tier = blobs.tier
    with monkeypatch.context() as full:
        full.setattr(tier, "can_write", lambda: False)
        load(blobs, 0)
        full.setattr("dataload.cache.local.tier.LocalTier.wait_for_holder", lambda *_: pytest.fail("it waits"))
        with tier.key_lock(blobs.key(0)):
            load(blobs, 0)
    load(blobs, 0)  # It is kept now, so others are waited for again.
    blobs.tier.discard(blobs.keys(0), [])
    monkeypatch.setattr("dataload.cache.local.tier.LocalTier.wait_for_holder", lambda *_: Waited.IN_VAIN)
    with tier.key_lock(blobs.key(0)):
        assert not blobs.is_refused(0)
        load(blobs, 0)


def test_null_replacements_that_differ_in_one_element_have_separate_blobs(tmp_path: Any) -> None:
    path, config = tmp_path / "x.arrow", CacheConfig(str(tmp_path / "cache"), "1GB")
    table = pa.table({"e": pa.array([None], pa.list_(pa.float64(), 2000))})
    with pa.ipc.new_file(path, table.schema) as file:  # pyarrow reads such nulls from Parquet only from 26 on
        file.write(table)
    zeros, other = np.zeros(2000), np.zeros(2000)
    other[1000] = 5
    assert make_dataset(str(path), cache=config, fill_null={"e": zeros})[0]["e"].sum() == 0
    assert make_dataset(str(path), cache=config, fill_null={"e": other})[0]["e"].sum() == 5


def test_counting_fetched_bytes_starts_no_engine(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "x.parquet")
    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "c")))
    dataset.blocks.origin._engine = None
    assert dataset.blocks.counts()["requests_origin"] >= 0
    assert dataset.rowstore.row_groups.caches[0].caches_everything
    assert dataset.blocks.origin._engine is None
    assert dataset.blocks.stats()["engine"]
