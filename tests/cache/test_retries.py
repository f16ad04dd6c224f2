"""Tests of repeated requests: which errors are transient, how often and for how long a request is repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dataload.cache.origin.retries import (
    FIRST_CONTACT_SECONDS,
    FIRST_PAUSE,
    LEAST_ATTEMPTS,
    LONGEST_PAUSE,
    RETRY_SECONDS,
    abandoned,
    retried,
)


class Store:
    """A store that fails for some seconds, with a clock that its requests and the pauses advance."""

    def __init__(
        self, outage: float, error: Callable[[], Exception] = ConnectionResetError, seconds: float = 0
    ) -> None:
        self.outage, self.error, self.seconds = outage, error, seconds
        self.now = 0.0
        self.requests = 0
        self.pauses: list[float] = []
        self.retried: list[Exception] = []

    def request(self) -> str:
        self.requests += 1
        is_down = self.now < self.outage
        self.now += self.seconds
        if is_down:
            raise self.error()
        return "bytes"

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def read(self) -> str:
        return retried(self.request, lambda _: RETRY_SECONDS, self.retried.append, self.sleep, lambda: self.now)


def test_a_request_that_works_is_made_once() -> None:
    store = Store(0)
    assert store.read() == "bytes"
    assert (store.requests, store.pauses) == (1, [])


@pytest.mark.parametrize("outage", [3.2, 30, RETRY_SECONDS - 1e-6])
def test_an_outage_is_outlasted_however_quickly_requests_fail(outage: float) -> None:
    store = Store(outage)
    assert store.read() == "bytes"
    assert len(store.retried) == len(store.pauses) == store.requests - 1 < 100


def test_pauses_may_grow_to_the_longest() -> None:
    longest = [0.0] * 9
    for _ in range(500):
        store = Store(RETRY_SECONDS - 1e-6)
        store.read()
        longest = list(map(max, longest, store.pauses))
    for number, most in enumerate(longest):
        allowed = min(LONGEST_PAUSE, FIRST_PAUSE * 2**number)
        assert 0.9 * allowed < most <= allowed


def test_the_last_attempt_begins_with_the_last_second() -> None:
    store = Store(2 * RETRY_SECONDS)
    with pytest.raises(ConnectionResetError):
        store.read()
    assert store.now == pytest.approx(RETRY_SECONDS)


def test_a_request_that_failed_late_has_the_whole_time_for_retries() -> None:
    """It may have waited for its turn for a minute before its first failure."""
    store = Store(RETRY_SECONDS + 30)
    late = iter([RETRY_SECONDS])

    def request() -> str:
        store.now += next(late, 0)
        return Store.request(store)

    assert retried(request, lambda _: RETRY_SECONDS, store.retried.append, store.sleep, lambda: store.now) == "bytes"


@pytest.mark.parametrize(("seconds", "requests"), [(RETRY_SECONDS, LEAST_ATTEMPTS), (FIRST_CONTACT_SECONDS, 1)])
def test_a_slow_request_is_repeated_unless_the_store_has_never_answered(seconds: float, requests: int) -> None:
    store = Store(9 * RETRY_SECONDS, seconds=RETRY_SECONDS)
    with pytest.raises(ConnectionResetError):
        retried(store.request, lambda _: seconds, store.retried.append, store.sleep, lambda: store.now)
    assert store.requests == requests


def test_a_request_that_nobody_waits_for_is_not_repeated() -> None:
    ended = threading.Event()

    def request() -> None:
        ended.set()
        requests.append(1)
        raise ConnectionResetError

    requests: list[int] = []
    before = abandoned.set(ended)
    try:
        with pytest.raises(ConnectionResetError):
            retried(request, lambda _: RETRY_SECONDS, lambda _: None)
    finally:
        abandoned.reset(before)
    assert requests == [1]


def test_an_error_that_is_not_transient_is_raised_at_once() -> None:
    store = Store(1, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        store.read()
    assert (store.requests, store.pauses) == (1, [])
