"""Prefetching in the order of need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dataload.loader.lookahead import FIRST_AHEAD, SCAN_FACTOR, Lookahead


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


def test_lookahead_that_starts_prefetches_no_more_than_it_must_and_then_all() -> None:
    prefetched: list[int] = []
    lookahead = Lookahead(((position // 10, position) for position in range(5000)), prefetched.extend, ahead=1000)
    for position, ahead in ((1, FIRST_AHEAD), (2, 2 * FIRST_AHEAD), (2, 4 * FIRST_AHEAD), (3, 1000), (4, 1000)):
        lookahead.reach(position)
        assert prefetched == list(range(10 * position + ahead))


def test_lookahead_prefetches_transient_row_groups_further_ahead() -> None:
    """Both kinds are prefetched in the order of need; row groups that stay in the cache no further than `ahead`."""
    prefetched: list[list[int]] = []
    needs = [(position, position + 50) for position in range(10)]
    lookahead = Lookahead(
        iter(needs), prefetched.append, ahead=2, transient_ahead=3, is_transient=lambda group: group in (50, 54, 57, 59)
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
