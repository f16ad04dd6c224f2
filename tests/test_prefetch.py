from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import pytest

from dataload.prefetch import Lookahead, run_ahead
from dataload.timeline import Timeline

T = TypeVar("T")


def ahead_of(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    return run_ahead(items, depth, Future(), Timeline())


def test_items_come_in_order() -> None:
    assert list(ahead_of(range(100), depth=3)) == list(range(100))
    assert list(ahead_of([], depth=3)) == []
    assert list(ahead_of([None, 1], depth=1)) == [None, 1]


def test_it_runs_ahead_so_far_and_no_further() -> None:
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
    assert len(made) <= 5  # one taken, three ready, and perhaps one in the making


def test_an_error_arrives_in_its_place() -> None:
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


def test_lookahead_asks_in_order_and_stays_ahead() -> None:
    asked: list[int] = []
    lookahead = Lookahead(iter([(0, 5), (0, 3), (10, 8), (10, 1), (30, 9)]), asked.extend, ahead=2)
    assert asked == []
    lookahead.reach(0)
    assert asked == [5, 3]
    lookahead.reach(0)
    assert asked == [5, 3]
    lookahead.reach(10)
    assert asked == [5, 3, 8, 1]
    lookahead.reach(11)
    assert asked == [5, 3, 8, 1, 9]
    lookahead.reach(40)
    assert asked == [5, 3, 8, 1, 9]


def test_lookahead_that_starts_behind_asks_for_all_that_is_needed_now() -> None:
    asked: list[int] = []
    Lookahead(iter([(0, 5), (0, 3), (10, 8), (30, 1)]), asked.extend, ahead=1).reach(20)
    assert asked == [5, 3, 8, 1]


def test_lookahead_asks_further_for_what_does_not_stay() -> None:
    """In the order of need, wherever it lies; what stays is asked for when its turn comes."""
    asked: list[list[int]] = []
    needs = [(position, position + 50) for position in range(10)]
    lookahead = Lookahead(
        iter(needs), asked.append, ahead=2, further=3, stays=lambda group: group not in (50, 54, 57, 59)
    )
    lookahead.reach(0)
    assert asked.pop() == [50, 51, 50, 54, 57]
    lookahead.reach(1)
    assert asked.pop() == [52, 59]
    lookahead.reach(4)
    assert asked.pop() == [53, 54, 55]
    lookahead.reach(10)
    assert asked.pop() == [56, 57, 58, 59]


def test_lookahead_finds_out_what_stays_no_sooner_than_it_must() -> None:
    looked: list[int] = []

    def stays(group: int) -> bool:
        looked.append(group)
        return False

    lookahead = Lookahead(iter([(position, position) for position in range(10)]), lambda _: None, 1, 2, stays)
    lookahead.reach(0)
    assert looked == [0, 1]
    lookahead.reach(1)
    assert looked == [0, 1, 2]
