"""Accelerator utilization follows MLPerf Storage, and the search ends at the largest number that is busy."""

from __future__ import annotations

import pytest

from dataload.benchmarks.accelerators import QUEUE_SECONDS, Clock, search, utilization


class Time:
    """A clock that only sleeps and waits move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


def consume(waits: list[float], rows_per_second: float = 10.0, rows: int = 10) -> tuple[Clock, Time]:
    """Consume batches of which each comes some seconds after it was asked for."""
    time = Time()
    clock = Clock(rows_per_second, lambda: time.now, time.sleep)
    for wait in waits:
        time.now += wait
        clock.take(rows)
    return clock, time


def test_a_loader_that_is_faster_than_the_accelerator_keeps_it_busy() -> None:
    clock, time = consume([0.0] * 11)
    assert utilization(clock.compute_seconds, clock.total_seconds) == pytest.approx(1)
    assert clock.compute_seconds == pytest.approx(10)  # the first of eleven steps counts in no sum
    assert time.slept == pytest.approx(10)  # one batch is queued


def test_the_wait_for_the_first_batch_does_not_count() -> None:
    clock, _ = consume([100.0] + [0.0] * 10)
    assert utilization(clock.compute_seconds, clock.total_seconds) == pytest.approx(1)


def test_utilization_is_compute_time_over_total_time() -> None:
    clock, _ = consume([0.0] + [4.0] * 10)  # a step takes 1 s, a batch 4 s
    assert clock.compute_seconds == pytest.approx(10)
    assert utilization(clock.compute_seconds, clock.total_seconds) == pytest.approx(0.25, rel=0.1)


def test_the_queued_batch_hides_a_wait_as_long_as_its_step() -> None:
    hidden, _ = consume([0.0, 0.0, 0.9, 0.0])
    assert hidden.total_seconds == pytest.approx(hidden.compute_seconds)
    seen, _ = consume([0.0, 0.0, 1.5, 0.0])
    assert seen.total_seconds - seen.compute_seconds == pytest.approx(0.5)


def test_short_steps_are_queued_without_sleeps() -> None:
    clock, time = consume([0.0] * 5, rows_per_second=10 / (QUEUE_SECONDS / 10))
    assert time.slept == 0
    assert utilization(clock.compute_seconds, clock.total_seconds) == pytest.approx(1)


def test_an_epoch_of_one_step_has_no_utilization() -> None:
    clock, _ = consume([1.0])
    assert utilization(clock.compute_seconds, clock.total_seconds) == 0


@pytest.mark.parametrize("first", [1, 30, 100, 1000])
def test_a_search_ends_near_the_largest_number_that_is_busy(first: int) -> None:
    def measure(accelerators: int) -> float:
        return min(1.0, 100 / accelerators)  # 111 accelerators have 90 %

    found = search(measure, first, lambda tries: len(tries) >= 30)
    most = max(fed.accelerators for fed in found if fed.is_busy)
    assert 105 <= most <= 111
    assert len(found) < 30


def test_waits_that_do_not_come_from_the_rate_do_not_hold_a_search_up() -> None:
    def measure(accelerators: int) -> float:
        return 10 / (10 + 0.02 * accelerators)  # a fixed time is lost: 55 accelerators have 90 %

    found = search(measure, 86, lambda _: True)
    assert 50 <= max(fed.accelerators for fed in found if fed.is_busy) <= 55
    assert len(found) == 3


@pytest.mark.parametrize("first", [1, 10, 100, 1000])
def test_a_search_that_must_end_has_numbers_that_are_and_are_not_busy(first: int) -> None:
    found = search(lambda accelerators: min(1.0, 9 / accelerators), first, lambda _: True)
    assert {fed.is_busy for fed in found} == {True, False}
    assert len(found) < 14


def test_a_loader_that_feeds_none_ends_the_search_at_one() -> None:
    found = search(lambda _: 0.1, 10, lambda _: False)
    assert [fed.accelerators for fed in found][-1] == 1
