"""One thread computes at a time, by turn."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dataload.runtime import baton
from dataload.runtime.baton import computing
from dataload.runtime.turns import in_turn


@contextmanager
def held_elsewhere() -> Iterator[None]:
    """Let another thread hold the baton for the duration of the block."""
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
    return len(baton._baton._waiters)


def is_free() -> bool:
    return baton._baton._holder is None


def test_the_baton_goes_to_the_lowest_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton, "PATIENCE_SECONDS", 60)
    order: list[int] = []

    def compute(turn: int) -> None:
        with in_turn(turn), computing():
            order.append(turn)

    threads = [threading.Thread(target=compute, args=(turn,)) for turn in (3, 1, 2)]
    with held_elsewhere():
        for number, thread in enumerate(threads, 1):
            thread.start()
            while queued() < number:
                threading.Event().wait(0.001)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [1, 2, 3]


def test_an_error_gives_the_baton_back() -> None:
    with pytest.raises(KeyError), computing():
        raise KeyError
    assert is_free()


def test_a_thread_that_is_interrupted_while_it_waits_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next holder would give the baton to it, and the baton would stay taken for ever."""
    monkeypatch.setattr(baton, "PATIENCE_SECONDS", 60)
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


def test_a_thread_that_is_interrupted_just_after_it_received_the_baton(monkeypatch: pytest.MonkeyPatch) -> None:
    take = baton._baton.take

    def interrupted() -> None:
        take()
        raise KeyboardInterrupt

    monkeypatch.setattr(baton._baton, "take", interrupted)
    with pytest.raises(KeyboardInterrupt), computing():
        pass
    assert is_free()


def test_a_thread_that_died_with_the_baton() -> None:
    thread = threading.Thread(target=baton._baton.take)
    thread.start()
    thread.join()
    assert not is_free()
    with computing():
        assert baton._baton.is_mine
    assert is_free()


def test_a_holder_that_never_ends_stops_no_other() -> None:
    """As if it waited for a lock that this thread has."""
    with held_elsewhere():
        with computing():
            assert not baton._baton.is_mine
        assert queued() == 0
    assert is_free()


def test_a_forked_child_has_a_baton_of_its_own() -> None:
    with held_elsewhere():
        child = os.fork()
        if child == 0:
            with computing():
                os._exit(int(not baton._baton.is_mine))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
