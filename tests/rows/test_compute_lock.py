"""One thread computes at a time, by priority."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dataload.rows.making import compute_lock
from dataload.rows.making.compute_lock import computing
from dataload.runtime.priority import priority


@contextmanager
def held_elsewhere() -> Iterator[None]:
    """Let another thread hold the lock for the duration of the block."""
    holds, end = threading.Event(), threading.Event()

    def hold() -> None:
        with computing():
            holds.set()
            end.wait(200)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(200)
    try:
        yield
    finally:
        end.set()
        thread.join()


def queued() -> int:
    return len(compute_lock.lock._waiters)


def is_free() -> bool:
    return compute_lock.lock._holder is None


def test_the_lock_goes_to_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_lock, "PATIENCE_SECONDS", 60)
    order: list[int] = []

    def compute(value: int) -> None:
        with priority(value), computing():
            order.append(value)

    threads = [threading.Thread(target=compute, args=(value,)) for value in (3, 1, 2)]
    with held_elsewhere():
        for number, thread in enumerate(threads, 1):
            thread.start()
            while queued() < number:
                threading.Event().wait(0.001)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [1, 2, 3]


def test_an_error_releases_the_lock() -> None:
    with pytest.raises(KeyError), computing():
        raise KeyError
    assert is_free()


def test_a_thread_that_is_interrupted_while_it_waits_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be handed the lock, and never release it."""
    monkeypatch.setattr(compute_lock, "PATIENCE_SECONDS", 60)
    ended = threading.Event()

    def interrupt() -> None:
        while not queued() and not ended.is_set():
            threading.Event().wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with ExitStack() as stack:
        thread = threading.Thread(target=interrupt)
        stack.callback(thread.join)
        stack.callback(ended.set)
        stack.enter_context(held_elsewhere())
        thread.start()
        with pytest.raises(KeyboardInterrupt), computing():
            pass
        assert queued() == 0
    assert is_free()


def test_a_thread_that_is_interrupted_just_after_it_got_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    take = compute_lock.lock.acquire

    def interrupted() -> None:
        take()
        raise KeyboardInterrupt

    monkeypatch.setattr(compute_lock.lock, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt), computing():
        pass
    assert is_free()


def test_the_lock_of_a_thread_that_died_is_free() -> None:
    thread = threading.Thread(target=compute_lock.lock.acquire)
    thread.start()
    thread.join()
    assert not is_free()
    with computing():
        assert compute_lock.lock.is_held
    assert is_free()


def test_a_holder_that_never_ends_stops_no_other_thread() -> None:
    """As if it waited for a lock that this thread has."""
    with held_elsewhere():
        with computing():
            assert not compute_lock.lock.is_held
        assert queued() == 0
    assert is_free()


def test_a_forked_child_has_a_lock_of_its_own() -> None:
    with held_elsewhere():
        child = os.fork()
        if child == 0:
            with computing():
                os._exit(int(not compute_lock.lock.is_held))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
