"""Tests of the calls that are under way at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from clusters import until

from dataload.mapping.running import in_flight
from dataload.runtime.executor import DaemonExecutor


class Calls:
    """Four calls on two threads. A running call ends when the loop waits for it, or has ended without a wait."""

    def __init__(self, first: Callable[[], object]) -> None:
        self.futures: list[Future[int]] = []
        self.ended: list[int] = []
        self.loop_ended = threading.Event()
        self._first = first
        self._second_runs = threading.Event()
        self._threads = DaemonExecutor(2, "calls")

    def results(self) -> Any:
        return in_flight(["chunk"] * 4, self._submit, 3)  # type: ignore[list-item]

    def _submit(self, _: Any) -> Future[int]:
        self.futures.append(self._threads.submit(self._call, len(self.futures)))
        return self.futures[-1]

    def _call(self, number: int) -> int:
        if number == 0:
            assert self._second_runs.wait(200)
            self._first()
        else:
            self._second_runs.set()
            until(lambda: bool(self.futures[number]._waiters) or self.loop_ended.is_set())
        self.ended.append(number)
        return number

    def check(self) -> None:
        """Check that the running call ended before the loop did, and that those in the queue never ran."""
        ended = list(self.ended)
        self.loop_ended.set()
        assert 1 in ended
        assert self.futures[3].cancelled()
        self._threads.submit(int).result(200)
        assert 3 not in self.ended


def test_an_error_ends_the_other_calls() -> None:
    def fails() -> None:
        raise KeyError("the first call")

    calls = Calls(fails)
    with pytest.raises(KeyError, match="the first call"):
        list(calls.results())
    calls.check()


def test_a_loop_that_ends_early_ends_the_other_calls() -> None:
    calls = Calls(int)
    with closing(calls.results()) as results:
        assert next(results) == 0
    calls.check()
