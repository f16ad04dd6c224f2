"""Emulated accelerators compute on a clock of deadlines, and their utilization is that of MLPerf Storage."""

from __future__ import annotations

import pytest

from dataload.benchmarks.accelerators import LOAD, QUEUE_SECONDS, Clock, load


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


def utilization(clock: Clock) -> float:
    return clock.compute_seconds / clock.total_seconds


def test_a_loader_that_is_faster_than_the_accelerator_keeps_it_busy() -> None:
    clock, time = consume([0.0] * 11)
    assert utilization(clock) == pytest.approx(1)
    assert clock.compute_seconds == pytest.approx(10)  # the first of eleven steps counts in no sum
    assert time.slept == pytest.approx(10)  # one batch is queued


def test_the_wait_for_the_first_batch_does_not_count() -> None:
    clock, _ = consume([100.0] + [0.0] * 10)
    assert utilization(clock) == pytest.approx(1)


def test_utilization_is_compute_time_over_total_time() -> None:
    clock, _ = consume([0.0] + [4.0] * 10)  # a step takes 1 s, a batch 4 s
    assert clock.compute_seconds == pytest.approx(10)
    assert utilization(clock) == pytest.approx(0.25, rel=0.1)


def test_the_queued_batch_hides_a_wait_as_long_as_its_step() -> None:
    hidden, _ = consume([0.0, 0.0, 0.9, 0.0])
    assert hidden.total_seconds == pytest.approx(hidden.compute_seconds)
    seen, _ = consume([0.0, 0.0, 1.5, 0.0])
    assert seen.total_seconds - seen.compute_seconds == pytest.approx(0.5)


def test_short_steps_are_queued_without_sleeps() -> None:
    clock, time = consume([0.0] * 5, rows_per_second=10 / (QUEUE_SECONDS / 10))
    assert time.slept == 0
    assert utilization(clock) == pytest.approx(1)


def test_a_single_step_counts_in_no_sum() -> None:
    clock, _ = consume([1.0])
    assert clock.compute_seconds == clock.total_seconds == 0


def test_the_last_step_ends_after_its_batch_has_come() -> None:
    clock, time = consume([0.0] * 3)
    assert clock.free_at == pytest.approx(3)
    assert time.now == pytest.approx(2)


def test_the_load_is_a_part_of_the_wire() -> None:
    assert load(1000, 10) == pytest.approx(LOAD * 100)
