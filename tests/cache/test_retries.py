"""Tests of repeated requests: which errors are transient, how often and for how long a request is repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dataload.cache.origin.retries import ATTEMPTS, ATTEMPTS_SECONDS, FIRST_PAUSE, retried


class Store:
    """A store that fails, with a clock that its requests and the pauses advance."""

    def __init__(
        self, failures: int, error: Callable[[], Exception] = ConnectionResetError, seconds: float = 0
    ) -> None:
        self.failures, self.error, self.seconds = failures, error, seconds
        self.now = 1000.0
        self.requests = 0
        self.pauses: list[float] = []

    def request(self) -> str:
        self.requests += 1
        self.now += self.seconds
        if self.requests <= self.failures:
            raise self.error()
        return "bytes"

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def read(self) -> str:
        return retried(self.request, self.sleep, lambda: self.now)


def test_a_request_that_works_is_made_once() -> None:
    store = Store(0)
    assert store.read() == "bytes"
    assert (store.requests, store.pauses) == (1, [])


def test_transient_errors_are_retried_after_pauses_that_may_grow() -> None:
    longest = [0.0] * (ATTEMPTS - 1)
    for _ in range(500):
        store = Store(ATTEMPTS - 1)
        assert store.read() == "bytes"
        assert len(store.pauses) == ATTEMPTS - 1
        longest = list(map(max, longest, store.pauses))
    for number, most in enumerate(longest):
        assert 0.9 * FIRST_PAUSE * 2**number < most <= FIRST_PAUSE * 2**number


def test_the_last_error_is_raised_after_the_last_attempt() -> None:
    store = Store(ATTEMPTS)
    with pytest.raises(ConnectionResetError):
        store.read()
    assert (store.requests, len(store.pauses)) == (ATTEMPTS, ATTEMPTS - 1)


def test_no_attempt_begins_after_the_last_second() -> None:
    store = Store(ATTEMPTS, seconds=ATTEMPTS_SECONDS / 2)
    with pytest.raises(ConnectionResetError):
        store.read()
    assert store.requests == 2


def test_an_error_that_is_not_transient_is_raised_at_once() -> None:
    store = Store(1, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        store.read()
    assert (store.requests, store.pauses) == (1, [])
