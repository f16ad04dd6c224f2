"""Prefetching on a thread, and in the order of need."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import pytest

from dataload.loader.lookahead import SCAN_FACTOR, Lookahead, run_ahead
from dataload.telemetry.wait_timeline import Timeline

T = TypeVar("T")


def ahead_of(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    return run_ahead(items, depth, Future(), Timeline())


def test_items_come_in_order() -> None:
    assert list(ahead_of(range(100), depth=3)) == list(range(100))
    assert list(ahead_of([], depth=3)) == []
    assert list(ahead_of([None, 1], depth=1)) == [None, 1]


def test_it_runs_ahead_at_most_depth_items() -> None:
    made: list[int] = []
    three = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 2:
                three.set()
            yield number

    ahead = ahead_of(items(), depth=3)
    assert next(ahead) == 0
    assert three.wait(30)
    ahead.close()
    assert len(made) <= 5  # one taken, three ready and perhaps one in progress


def test_an_error_is_raised_in_the_place_of_its_item() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    ahead = ahead_of(items(), depth=5)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="broken"):
        next(ahead)
    assert list(ahead) == []


def test_closing_waits_for_the_thread() -> None:
    before = threading.active_count()
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    ahead = ahead_of(items(), depth=2)
    next(ahead)
    assert threading.active_count() == before + 1
    ahead.close()
    assert threading.active_count() == before
    del ahead
    assert closed.is_set()


def test_lookahead_prefetches_in_order_and_stays_ahead() -> None:
    prefetched: list[int] = []
    lookahead = Lookahead(iter([(0, 5), (0, 3), (10, 8), (10, 1), (30, 9)]), prefetched.extend, ahead=2)
    assert prefetched == []
    lookahead.reach(0)
    assert prefetched == [5, 3]
    lookahead.reach(0)
    assert prefetched == [5, 3]
    lookahead.reach(10)
    assert prefetched == [5, 3, 8, 1]
    lookahead.reach(11)
    assert prefetched == [5, 3, 8, 1, 9]
    lookahead.reach(40)
    assert prefetched == [5, 3, 8, 1, 9]


def test_lookahead_that_starts_behind_prefetches_all_that_is_needed_now() -> None:
    prefetched: list[int] = []
    Lookahead(iter([(0, 5), (0, 3), (10, 8), (30, 1)]), prefetched.extend, ahead=1).reach(20)
    assert prefetched == [5, 3, 8, 1]


def test_lookahead_prefetches_transient_row_groups_further_ahead() -> None:
    """Both kinds are prefetched in the order of need; row groups that stay in the cache no further than `ahead`."""
    prefetched: list[list[int]] = []
    needs = [(position, position + 50) for position in range(10)]
    lookahead = Lookahead(
        iter(needs), prefetched.append, ahead=2, further=3, passes=lambda group: group in (50, 54, 57, 59)
    )
    lookahead.reach(0)
    assert prefetched.pop() == [50, 51, 50, 54, 57]
    lookahead.reach(1)
    assert prefetched.pop() == [52, 59]
    lookahead.reach(4)
    assert prefetched.pop() == [53, 54, 55]
    lookahead.reach(10)
    assert prefetched.pop() == [56, 57, 58, 59]


@pytest.mark.parametrize(("passing", "scanned"), [(1.0, 3), (0.0, 3 * SCAN_FACTOR)])
def test_lookahead_scans_no_further_than_it_must(passing: float, scanned: int) -> None:
    """Without transient row groups it does not scan a whole epoch before the first batch."""
    checked, taken = [], []

    def passes(group: int) -> bool:
        checked.append(group)
        return bool(passing)

    def needs() -> Iterator[tuple[int, int]]:
        for position in range(1000):
            taken.append(position)
            yield position, position

    lookahead = Lookahead(needs(), lambda _: None, 2, 3, passes)
    for position in (0, 7, 20):
        lookahead.reach(position)
        assert checked == taken == list(range(position + scanned))


def test_lookahead_keeps_no_needs_that_it_has_not_prefetched() -> None:
    needs = ((position, CountedGroup()) for position in range(100))
    lookahead = Lookahead(needs, lambda _: None, 1)  # type: ignore[arg-type]
    lookahead.reach(99)
    assert CountedGroup.alive <= 2


class CountedGroup:
    """A row group that counts its instances."""

    alive = 0

    def __init__(self) -> None:
        CountedGroup.alive += 1

    def __del__(self) -> None:
        CountedGroup.alive -= 1
