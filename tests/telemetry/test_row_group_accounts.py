"""Each epoch counts each row group that its batches use once: as a hit, or as a miss with the bytes fetched for it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from row_groups import make_in_background

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.rows import scheduler
from dataload.runtime.counters import Counters, charge, charged_to
from dataload.telemetry.loader_stats import LoaderStats
from dataload.telemetry.row_group_accounts import Accounts, Served
from dataload.telemetry.stats_log import Samples, read

GROUPS = 40


@pytest.fixture
def url(dataset_of: Callable[..., str]) -> str:
    return dataset_of([[5] * 10] * 4)


@pytest.fixture
def dataset(bucket: Any, url: str, cache: CacheConfig) -> Any:
    return make_dataset(url, storage_options=bucket.options, cache=cache)


def same(batch: Any) -> Any:
    return batch


def rows_of(loader: Iterable[Any]) -> int:
    return sum(len(batch["row_id"]) for batch in loader)


def groups_of(loader: Iterable[Any]) -> int:
    """Take all batches. Return how many row groups they use."""
    return len({row // 5 for batch in loader for row in batch["row_id"].tolist()})


def size_of(dataset: Any) -> int:
    """Return the bytes of the records of all row groups in the cache."""
    return sum(
        len(blob)
        for group in range(len(dataset.row_groups))
        for blob in dataset.rowstore.row_groups.caches[0].find(group)
    )


def stored(dataset: Any) -> int:
    return sum(file.size for file in {group.file for group in dataset.row_groups})


def start_decoder(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start the background process before the first batch is requested."""
    monkeypatch.setattr(scheduler, "BACKGROUND_BYTES", 0)
    dataset.rowstore.prefetch([])
    decoder = dataset.rowstore.scheduler.decoder
    make_in_background(decoder, 0)
    assert decoder._process.ready.wait(200)
    return decoder


@pytest.mark.variants
@pytest.mark.parametrize("capacity", [2, GROUPS])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_cold_epoch_has_no_hits_and_a_warm_one_nothing_else(dataset: Any, workers: int, capacity: int) -> None:
    """This holds even if the row groups of the second epoch are still open from the first."""
    loader = make_loader(dataset, 8, window=capacity // 2, num_workers=workers, transform=same)
    assert rows_of(loader) == 5 * GROUPS
    cold = loader.stats()
    assert (cold.hits, cold.misses, cold.hit_rate, cold.bytes_local) == (0, GROUPS, 0, 0)
    assert (cold.bytes_origin, cold.requests_origin) == (stored(dataset), 4)
    assert "cache hits 0.0%" in str(cold)
    for _ in range(2):
        assert rows_of(loader) == 5 * GROUPS
        warm = loader.stats()
        assert (warm.hits, warm.misses, warm.hit_rate) == (GROUPS, 0, 1)
        assert (warm.bytes_local, warm.bytes_origin, warm.requests_origin) == (size_of(dataset), 0, 0)
        assert "cache hits 100.0%, 0 bytes from the origin" in str(warm)


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_group_that_the_background_process_decodes_is_a_miss(
    dataset: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = start_decoder(dataset, monkeypatch)
    loader = make_loader(dataset, 8, num_workers=workers, transform=same)
    with dataset.rowstore.row_groups.memory.held.reserve(
        sys.maxsize
    ):  # This process has no memory to decode by itself.
        for hits in (0, GROUPS):
            assert rows_of(loader) == 5 * GROUPS
            assert (loader.stats().hits, loader.stats().misses) == (hits, GROUPS - hits)
            assert workers or loader.stats().bytes_origin == (0 if hits else stored(dataset))
    assert workers or decoder._process.made == GROUPS
    decoder.end()


def test_large_row_groups_are_charged_to_the_byte(bucket: Any, cache: CacheConfig) -> None:
    noise = np.random.default_rng(0)
    table = pa.table({"row_id": np.arange(40), "x": [noise.bytes(100_000) for _ in range(40)]})
    bucket.put_table("large/x.parquet", table, row_group_size=10)
    dataset = make_dataset(bucket.url("large"), storage_options=bucket.options, cache=cache)
    bucket.server.reset()
    loader = make_loader(dataset, 8)
    rows_of(loader)
    sent, stats = bucket.server.stats(), loader.stats()
    assert (stats.bytes_origin, stats.requests_origin) == (sent["get_bytes"], sent["get_requests"])
    assert (stats.hits, stats.misses) == (0, 4)


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_cache_memory_gives_the_hits(bucket: Any, url: str, workers: int) -> None:
    dataset = make_dataset(url, storage_options=bucket.options, cache=False)
    loader = make_loader(dataset, 8, num_workers=workers, transform=same)
    for hits in (0, 0 if workers else GROUPS):  # Each epoch has new worker processes.
        rows_of(loader)
        assert (loader.stats().hits, loader.stats().misses) == (hits, GROUPS - hits)


def test_a_row_group_that_was_prefetched_before_an_epoch_is_one_miss_of_it(dataset: Any) -> None:
    store = dataset.rowstore
    store.prefetch(range(6))
    for load in list(store.scheduler._loads.values()):
        load.contents.result()
    loader = make_loader(dataset, 8)
    for hits in (0, GROUPS):
        rows_of(loader)
        assert (loader.stats().hits, loader.stats().misses) == (hits, GROUPS - hits)


def test_a_row_group_that_was_read_by_index_before_an_epoch_is_a_hit(dataset: Any) -> None:
    assert len(dataset.__getitems__([0, 7])) == 2
    loader = make_loader(dataset, 8)
    rows_of(loader)
    assert (loader.stats().hits, loader.stats().misses) == (2, GROUPS - 2)


def test_in_a_cache_smaller_than_the_data_each_fetch_is_one_miss(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path
) -> None:
    """The lookahead fetches row groups of the next epoch, which count in that one."""
    cache = CacheConfig(str(tmp_path / "small"), 100_000)
    dataset = make_dataset(dataset_of([[20] * 80]), storage_options=bucket.options, cache=cache)
    loader = make_loader(dataset, 8, window=2)
    for epoch in range(3):
        assert rows_of(loader) == 20 * 80
        stats = loader.stats()
        assert stats.hits + stats.misses == 80
        assert (stats.hits == 0) == (epoch == 0)
        assert stats.misses > 0


@pytest.mark.parametrize("shuffle", [True, False])
def test_of_ranks_that_share_a_cache_the_one_that_fetched_counts_the_miss(dataset: Any, shuffle: bool) -> None:
    def rank(number: int) -> LoaderStats:
        own = pickle.loads(pickle.dumps(dataset))  # with its own ledger, as in another process
        loader = make_loader(own, 8, world=World(number, 2), shuffle=shuffle)
        used = groups_of(loader)
        cold = loader.stats()
        assert used <= cold.hits + cold.misses <= GROUPS
        return cold

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    assert first.misses + second.misses == GROUPS
    assert first.bytes_origin + second.bytes_origin == stored(dataset)


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_counts_no_row_group_that_it_neither_used_nor_fetched(dataset: Any, workers: int) -> None:
    rows_of(make_loader(dataset, 8))
    rank = make_loader(dataset, 8, world=World(0, 2), shuffle=False, num_workers=workers, transform=same)
    used = groups_of(rank)
    assert GROUPS / 2 <= used < GROUPS
    assert (rank.stats().hits, rank.stats().misses) == (used, 0)


def test_a_row_group_of_another_rank_counts_only_if_this_one_fetched_it() -> None:
    ledger = Accounts()
    stats, served = served_by(ledger)
    ledger.begin(1).add(decoded=1, bytes_origin=50, under_way=-1)  # fetched
    ledger.begin(2).add(under_way=-1)  # cancelled, or found in the cache
    slow = ledger.begin(3)
    ledger.begin(4)
    served.use({}, prefetched=[1, 2, 3, 4, 5])
    assert (stats.hits, stats.misses, stats.bytes_origin) == (0, 1, 50)
    slow.add(decoded=1, bytes_origin=7)
    served.close()
    assert (stats.hits, stats.misses, stats.bytes_origin) == (0, 2, 57)


def test_the_log_of_the_epochs_has_the_same_counts(dataset: Any, tmp_path: Path) -> None:
    loader = make_loader(dataset, 8, stats_dir=tmp_path / "stats")
    for _ in range(2):
        rows_of(loader)
    cold, warm = read(tmp_path / "stats")
    assert (cold.stats.hit_rate, cold.stats.misses, cold.stats.bytes_origin) == (0, GROUPS, stored(dataset))
    assert (warm.stats.hit_rate, warm.stats.hits, warm.stats.bytes_local) == (1, GROUPS, size_of(dataset))


def test_the_log_has_the_counts_settled_after_a_loop_left_at_its_last_batch(tmp_path: Path) -> None:
    ledger = Accounts()
    stats, served = served_by(ledger)
    account = ledger.begin(3)
    with pytest.raises(GeneratorExit), Samples(tmp_path, stats) as samples, closing(served):
        stats.seconds = 1.0
        served.use({3: {}})
        samples.take(last=True)
        account.add(decoded=1, under_way=-1)
        raise GeneratorExit
    [epoch] = read(tmp_path)
    assert (epoch.ended, epoch.stats.seconds, epoch.stats.misses) == (True, 1.0, 1)


# Statistics of several loops


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 2])
def test_the_statistics_of_a_loop_do_not_change_after_its_early_end(dataset: Any, workers: int) -> None:
    loader = make_loader(dataset, 8, window=2, num_workers=workers, transform=same)
    for _ in loader:
        break
    left = asdict(loader.stats())
    assert 0 < left["misses"] < GROUPS
    dataset.rowstore.prefetch(range(GROUPS))  # Loads of the lookahead may continue.
    for load in list(dataset.rowstore.scheduler._loads.values()):
        load.contents.result()
    assert asdict(loader.stats()) == left


def test_the_reads_of_another_loop_are_not_charged_to_this_one(dataset: Any) -> None:
    training, validation = dataset.split([0.75, 0.25], seed=0)
    loader, other = make_loader(training, 8, window=2), make_loader(validation, 8)
    batches = iter(loader)
    next(batches)
    before = asdict(loader.stats())
    assert rows_of(other) == 50
    assert asdict(loader.stats()) == before
    for _ in batches:
        pass
    for stats, groups in ((loader.stats(), 30), (other.stats(), 10)):
        assert (stats.hits, stats.misses) == (0, groups)
    assert loader.stats().bytes_origin + other.stats().bytes_origin == stored(dataset)


# Accounts


def served_by(ledger: Accounts, in_flight: int = 0) -> tuple[LoaderStats, Served]:
    stats = LoaderStats()
    return stats, Served(stats, ledger, lambda _: 100, in_flight, lambda _: None)


def test_a_row_group_is_counted_when_its_load_has_ended() -> None:
    ledger = Accounts()
    stats, served = served_by(ledger)
    account = ledger.begin(3)
    served.use({3: {}})
    assert (stats.hits, stats.misses) == (0, 0)
    account.add(decoded=1, bytes_origin=50, requests_origin=1)
    account.add(under_way=-1)
    served.use({4: None})
    assert (stats.hits, stats.misses, stats.bytes_local, stats.bytes_origin) == (1, 1, 100, 50)


def test_a_loop_that_ends_before_a_load_counts_by_the_entries_so_far() -> None:
    ledger = Accounts()
    stats, served = served_by(ledger)
    ledger.begin(3)
    ledger.begin(4).add(ordered=1)
    served.use({3: {}, 4: {}})
    served.close()
    assert (stats.hits, stats.misses) == (1, 1)


def test_a_hit_of_a_worker_waits_for_the_answers_that_may_turn_it_into_a_miss() -> None:
    stats, served = served_by(Accounts(), in_flight=2)
    served.use({3: {}, 4: {}})
    served.use({3: {"decoded": 1, "bytes_origin": 50}})
    assert (stats.hits, stats.misses, stats.bytes_local) == (0, 1, 0)
    served.use({3: {"decoded": 1, "bytes_origin": 7}})
    assert (stats.hits, stats.misses, stats.bytes_local, stats.bytes_origin) == (1, 1, 100, 57)
    served.use({5: {}})
    served.close()
    assert (stats.hits, stats.misses, stats.bytes_local, stats.bytes_origin) == (2, 1, 200, 57)


def test_counts_never_fall_when_a_row_group_is_fetched_after_its_hit() -> None:
    """A small cache evicted the row group between two batches that use it."""
    stats, served = served_by(Accounts())
    served.use({3: {}})
    assert (stats.hits, stats.misses, stats.bytes_local) == (1, 0, 100)
    served.use({3: {"decoded": 1, "bytes_origin": 50}})
    assert (stats.hits, stats.misses, stats.bytes_local, stats.bytes_origin) == (1, 0, 100, 50)


def test_work_is_charged_to_the_account_of_its_submitter() -> None:
    threads, accounts = scheduler.DaemonExecutor(2, "dataload-load"), [Counters(), Counters()]
    futures = []
    for account in accounts:
        with charged_to(account):
            futures += [threads.submit(lambda: charge(bytes_origin=1)) for _ in range(3)]
    charge(bytes_origin=1)
    for future in futures:
        future.result()
    assert [account.snapshot() for account in accounts] == [{"bytes_origin": 3}] * 2
