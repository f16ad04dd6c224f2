"""Tests of the thread pool, also at the system's limit of threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import wait

import pytest
from threads import no_more_threads

from dataload.runtime.executor import DaemonExecutor, shared_executor
from dataload.runtime.priority import priority

PATIENCE = 200


def test_a_call_that_no_thread_can_run_raises_and_never_runs() -> None:
    threads, ran = DaemonExecutor(2, "test"), []
    with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        threads.submit(ran.append, "rejected")
    assert threads.submit(ran.copy).result(PATIENCE) == []


def test_the_threads_that_run_do_all_calls_where_no_more_can_be_started() -> None:
    threads, may_end = DaemonExecutor(3, "test"), threading.Event()
    first = threads.submit(may_end.wait, PATIENCE)
    with no_more_threads():
        rest = [threads.submit(threading.current_thread) for _ in range(3)]
    may_end.set()
    assert first.result(PATIENCE)
    assert len({one.result(PATIENCE) for one in rest}) == 1


def test_threads_are_started_again_when_the_system_has_some() -> None:
    """Calls that waited for lack of threads do not count as idle threads."""
    threads, may_end = DaemonExecutor(3, "test"), threading.Event()
    first = threads.submit(may_end.wait, PATIENCE)
    with no_more_threads():
        late = [threads.submit(int) for _ in range(3)]
    may_end.set()
    assert [one.result(PATIENCE) for one in (first, *late)] == [True, 0, 0, 0]
    together = threading.Barrier(3)
    meeting = [threads.submit(together.wait, PATIENCE) for _ in range(3)]
    assert sorted(one.result(PATIENCE) for one in meeting) == [0, 1, 2]


def test_no_more_threads_are_started_than_calls_are_unfinished() -> None:
    threads, together = DaemonExecutor(8, "test-few"), threading.Barrier(2)
    for one in [threads.submit(together.wait, PATIENCE) for _ in range(2)]:
        one.result(PATIENCE)
    assert sum(one.name.startswith("test-few") for one in threading.enumerate()) == 2


def test_a_mapped_call_that_raises_cancels_the_calls_that_have_not_started() -> None:
    threads, may_end, ran = DaemonExecutor(1, "test"), threading.Event(), list[int]()
    assert threads.map(abs, [-2, 1]) == [2, 1]

    def call(number: int) -> None:
        ran.append(number)
        if number == 0:
            raise ZeroDivisionError
        may_end.wait(PATIENCE)

    with pytest.raises(ZeroDivisionError):
        threads.map(call, range(100))
    may_end.set()
    threads.submit(int).result(PATIENCE)
    assert ran in ([0], [0, 1])


def test_waiting_calls_run_by_priority() -> None:
    pool, go, ran = DaemonExecutor(1, "test"), threading.Event(), list[str]()
    blocked = pool.submit(go.wait)
    calls = []
    for value, name in ((2, "second"), (1, "first"), (2, "third"), (0, "before")):
        with priority(value):
            calls.append(pool.submit(ran.append, name))
    go.set()
    wait([blocked, *calls])
    assert ran == ["before", "first", "second", "third"]


def test_a_call_hands_its_turn_on() -> None:
    outer, inner, go, ran = DaemonExecutor(1, "outer"), DaemonExecutor(1, "inner"), threading.Event(), list[int]()
    blocked = inner.submit(go.wait)
    with priority(3):
        late = outer.submit(lambda: inner.submit(ran.append, 3)).result()
    with priority(1):
        early = inner.submit(ran.append, 1)
    go.set()
    wait([blocked, late, early])
    assert ran == [1, 3]


def test_a_shared_pool_lasts_as_long_as_it_is_used() -> None:
    pool = shared_executor(2, "test-shared")
    assert shared_executor(2, "test-shared") is pool
    assert shared_executor(2, "test-other") is not pool
    assert [future.result(PATIENCE) for future in [pool.submit(abs, -number) for number in range(5)]] == [*range(5)]
    [*threads] = (one for one in threading.enumerate() if one.name.startswith("test-shared"))
    assert 0 < len(threads) <= 2
    del pool
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def test_a_forked_child_has_shared_pools_of_its_own() -> None:
    pool = shared_executor(2, "test-shared")
    assert pool.submit(abs, -1).result(PATIENCE) == 1
    child = os.fork()
    if child == 0:
        own = shared_executor(2, "test-shared")
        os._exit(own is pool or own.submit(abs, -1).result(PATIENCE) != 1)
    assert os.waitpid(child, 0)[1] == 0
