"""The limit on requests in flight: per process, for all readers, and divided among the processes of a host."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin.limiter import RequestLimiter, limiter_of
from dataload.cache.origin.origin import Origin
from dataload.runtime.counters import Counters, charged_to

PATIENCE = 200


def limit_in_another_process(limiter: RequestLimiter) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_limit, (limiter,))


def _limit(limiter: RequestLimiter) -> int:
    return limiter.limit


def test_all_origins_of_a_cache_share_a_limiter(tmp_path: Path) -> None:
    one, other, elsewhere = (
        TierCacheFileSystem("memory", cache_dir=str(tmp_path / name), in_flight=6, skip_instance_cache=True)
        for name in ("a", "a", "b")
    )
    limiter = one.blocks.origin.limiter
    assert limiter is other.blocks.origin.limiter
    assert limiter is pickle.loads(pickle.dumps(limiter))
    assert limiter is not elsewhere.blocks.origin.limiter


@pytest.mark.parametrize(("processes", "limit"), [(1, 6), (2, 3), (4, 1), (100, 1)])
def test_processes_have_equal_parts_and_one_request_at_least(processes: int, limit: int) -> None:
    limiter = limiter_of("equal parts", 6)
    limiter.share(limiter, processes)
    assert limiter.limit == limit


@pytest.mark.slow
def test_the_share_goes_with_a_copy_to_another_process() -> None:
    limiter = limiter_of("a copy", 6)
    limiter.share(limiter, 2)
    assert limit_in_another_process(limiter) == 3


def test_a_forked_child_has_its_whole_share_while_requests_of_the_parent_are_in_flight() -> None:
    limiter = limiter_of("a fork", 1)
    with limiter.request():
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)  # It ends also where it waits for ever.
            with limiter.request():
                os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_requests_come_in_turn_and_no_more_at_a_time_than_allowed() -> None:
    limiter, mutex = limiter_of("in turn", 2), threading.Lock()
    order: list[int] = []
    held = [limiter.request() for _ in range(2)]
    for one in held:
        one.__enter__()

    def ask(number: int) -> None:
        with limiter.request(), mutex:
            order.append(number)

    threads = []
    for number in range(6):
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
        while len(limiter._budget._waiters) <= number:
            assert not order
    held.pop().__exit__(None, None, None)
    for one in threads:
        one.join(PATIENCE)
    assert order == list(range(6))
    held.pop().__exit__(None, None, None)


def test_a_smaller_share_counts_the_requests_in_flight() -> None:
    limiter = limiter_of("a smaller share", 2)
    with limiter.request():
        with limiter.request():
            limiter.share(limiter, 2)
        assert not limiter._budget.fits(1)
    assert limiter._budget.fits(1)


def test_a_limiter_goes_with_the_last_of_its_origins() -> None:
    limiter = limiter_of("the last", 6)
    limiter.share(limiter, 3)
    del limiter
    gc.collect()
    assert limiter_of("the last", 6).limit == 6


@pytest.mark.parametrize(
    ("world", "limit"),
    [
        (World(), 32),  # the other half is for the process that decodes in the background
        (World(3, 16, 3, 8), 4),
        (World(3, 4), 8),  # how many of them are here is not known: all of them may be
        (World(3, 512), 4),
    ],
)
def test_the_ranks_of_a_host_share_its_requests(
    bucket: Any, dataset_of: Any, cache: CacheConfig, world: World, limit: int
) -> None:
    dataset = make_dataset(dataset_of([[5] * 512]), storage_options=bucket.options, cache=cache)
    assert dataset.blocks.origin.limiter.limit == 64, "nothing is known of ranks yet"
    make_loader(dataset, 1, world=world)
    assert dataset.blocks.origin.limiter.limit == limit


def test_a_request_for_metadata_waits_for_the_limit() -> None:
    limiter, requested = limiter_of("metadata", 1), list[Any]()
    origin = Origin(fsspec.filesystem("memory"), limiter=limiter)
    thread = threading.Thread(target=origin.metadata, args=("x", requested.append), daemon=True)
    with limiter.request():
        thread.start()
        while not limiter._budget._waiters:
            assert not requested
    thread.join(PATIENCE)
    assert len(requested) == 1


def test_a_listing_of_nothing_takes_one_request_at_a_time() -> None:
    """It asks whether the store is there at all."""
    origin = Origin(fsspec.filesystem("memory"), limiter=limiter_of("nothing", 1))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(origin.list("/nothing is here")), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found == [{}]


def test_a_loader_of_one_rank_leaves_the_parts_of_the_other_ranks(
    bucket: Any, dataset_of: Any, cache: CacheConfig
) -> None:
    """Such as that for the validation, which only one rank makes."""
    dataset = make_dataset(dataset_of([[5] * 4]), storage_options=bucket.options, cache=cache)
    training = make_loader(dataset, 1, world=World(3, 16, 3, 8))
    validation = make_loader(dataset, 1, world=World(0, 1))
    assert dataset.blocks.origin.limiter.limit == 4
    del training
    next(iter(validation))
    assert dataset.blocks.origin.limiter.limit == 32


def test_a_request_that_waits_for_the_limit_is_counted() -> None:
    limiter, account = limiter_of("counted", 1), Counters()
    with charged_to(account), limiter.request():
        assert not account.snapshot()
        waiting = limiter.request()
    with waiting:
        assert account.snapshot() == {"requests_limited": 1}
