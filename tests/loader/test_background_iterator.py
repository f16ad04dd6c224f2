"""Items that threads make ahead of their use."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import until
from threads import no_more_threads

from dataload import make_loader
from dataload.loader import background_iterator
from dataload.loader.background_iterator import run_ahead
from dataload.rows import collate
from dataload.telemetry.wait_timeline import Timeline, doing

T = TypeVar("T")
SECONDS = 200  # a deadline that a busy machine does not reach


def ahead_of(
    calls: Iterable[Callable[[], T]], threads: int = 1, depth: int = 3, stop: Future[None] | None = None
) -> Generator[T, None, None]:
    return run_ahead(calls, threads, depth, stop or Future(), Timeline())


def constants(items: Iterable[T]) -> Iterator[Callable[[], T]]:
    return (partial(lambda item: item, item) for item in items)


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_items_come_in_order(threads: int) -> None:
    assert list(ahead_of(constants(range(100)), threads)) == list(range(100))
    assert list(ahead_of([], threads)) == []
    assert list(ahead_of(constants([None, 1]), threads, depth=1)) == [None, 1]


def test_calls_that_end_in_another_order_come_in_theirs() -> None:
    last_is_done = threading.Event()

    def make(number: int) -> int:
        if number == 0:
            assert last_is_done.wait(SECONDS)
        if number == 3:
            last_is_done.set()
        return number

    assert list(ahead_of([partial(make, number) for number in range(4)], threads=2, depth=4)) == [0, 1, 2, 3]


def test_calls_overlap_on_as_many_threads() -> None:
    meeting = threading.Barrier(3)
    calls = [partial(meeting.wait, SECONDS)] * 9
    assert sorted(ahead_of(calls, threads=3)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("threads", [1, 3])
def test_at_most_depth_items_are_made_ahead(threads: int) -> None:
    made: list[int] = []
    three = threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if len(made) == 4:
            three.set()
        return number

    ahead = ahead_of((partial(make, number) for number in range(100)), threads, depth=3)
    assert next(ahead) == 0
    assert three.wait(SECONDS)
    ahead.close()
    assert len(made) == 4  # one taken and three ready


def test_without_threads_a_call_runs_when_its_item_is_needed() -> None:
    made: list[tuple[int, threading.Thread]] = []
    calls = (partial(lambda number: made.append((number, threading.current_thread())), number) for number in range(9))
    ahead = ahead_of(calls, threads=0)
    assert made == []
    next(ahead)
    next(ahead)
    assert made == [(0, threading.current_thread()), (1, threading.current_thread())]


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("where", ["calls", "call"])
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), StopIteration("broken")])
def test_an_error_is_raised_in_the_place_of_its_item(threads: int, where: str, error: BaseException) -> None:
    def fail() -> int:
        raise error

    def calls() -> Iterator[Callable[[], int]]:
        yield from constants(range(5))
        if where == "calls":
            raise error
        yield fail
        yield from constants(range(100))

    ahead = ahead_of(calls(), threads)
    assert [next(ahead) for _ in range(5)] == list(range(5))
    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as caught:
        next(ahead)
    assert error in (caught.value, caught.value.__cause__)
    assert list(ahead) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_an_item_that_takes_too_long_times_out(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(background_iterator, "JOIN_SECONDS", 0)
    ahead = run_ahead([partial(release.wait, SECONDS)], threads, 3, Future(), Timeline(), timeout=0.01)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.01 seconds"):
        next(ahead)
    release.set()


def test_an_error_at_the_start_of_a_thread_is_raised() -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        next(run_ahead(constants(range(5)), 2, 3, Future(), Timeline(), begin=fail))


def threads_ahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dataload-ahead")]


@pytest.mark.parametrize("threads", [1, 3])
def test_closing_waits_for_the_threads(threads: int) -> None:
    closed = threading.Event()

    def calls() -> Iterator[Callable[[], int]]:
        try:
            while True:
                yield int
        finally:
            closed.set()

    ahead = ahead_of(calls(), threads)
    next(ahead)
    assert len(threads_ahead()) == threads
    ahead.close()
    assert not threads_ahead()
    del ahead
    assert closed.is_set()


def test_closing_stops_calls_that_wait() -> None:
    stop, begun = Future[None](), threading.Barrier(3)

    def make() -> None:
        begun.wait(SECONDS)
        stop.result(SECONDS)

    ahead = ahead_of([lambda: None, make, make], threads=2, stop=stop)
    next(ahead)
    begun.wait(SECONDS)
    ahead.close()
    assert not threads_ahead()


def test_an_iterator_that_its_own_thread_collects_ends() -> None:
    held: list[Generator[object, None, None]] = []
    held_now = threading.Event()

    def collect() -> None:
        assert held_now.wait(SECONDS)
        held.clear()

    ahead = ahead_of([lambda: None, *[collect] * 100], threads=2)
    next(ahead)
    held.append(ahead)
    threads = threads_ahead()
    assert len(threads) == 2
    del ahead
    held_now.set()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_threads_that_cannot_start_are_not_needed() -> None:
    with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        next(ahead_of(constants(range(3)), threads=2))
    starts = []

    class Second(threading.Thread):
        def start(self) -> None:
            starts.append(self)
            if len(starts) > 1:
                raise RuntimeError("can't start new thread")
            super().start()

    before, threading.Thread = threading.Thread, Second  # type: ignore[misc]
    try:
        assert list(ahead_of(constants(range(9)), threads=3)) == list(range(9))
    finally:
        threading.Thread = before  # type: ignore[misc]
    assert len(starts) == 2


class Item:
    """An object that can be referred to weakly."""


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_used_items_are_not_kept(threads: int) -> None:
    gc.disable()
    try:
        made: list[weakref.ref[Item]] = []

        def make() -> Item:
            item = Item()
            made.append(weakref.ref(item))
            return item

        ahead = ahead_of([make] * 3, threads)
        for _ in range(3):
            next(ahead)
        assert next(ahead, None) is None
        assert [item() for item in made] == [None, None, None]
    finally:
        gc.enable()


def test_an_error_that_the_loop_does_not_take_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that breaks leaves the error of the gather that its end cancels."""
    monkeypatch.setattr(background_iterator, "JOIN_SECONDS", SECONDS)
    made: list[weakref.ref[Item]] = []

    def fail() -> Item:
        item = Item()
        made.append(weakref.ref(item))
        raise ValueError

    gc.disable()
    try:
        ahead = ahead_of([Item, fail])
        next(ahead)
        until(lambda: made)
        ahead.close()
        del ahead
        assert [item() for item in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_wait_is_charged_to_what_the_awaited_call_does(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits while the call of its item copies and, with two threads, the call of the next item reads."""
    waiting, awaited, taken = Timeline(), threading.Event(), threading.Event()
    next_of = background_iterator._next_of
    monkeypatch.setattr(background_iterator, "_next_of", lambda *args: (awaited.set(), next_of(*args))[1])

    def copy() -> None:
        with doing("transfer"):
            assert threads == 0 or awaited.wait(SECONDS)

    def read() -> None:
        with doing("disk"):
            assert threads == 0 or taken.wait(SECONDS)

    ahead = run_ahead([copy, read], threads, 3, Future(), waiting)
    next(ahead)
    spent = waiting.spent()
    assert spent["transfer"] > 0
    assert threads == 1 or "disk" not in spent  # A thread may begin the next call before the loop has its item.
    taken.set()
    next(ahead)
    ahead.close()


def test_as_many_batches_of_nested_columns_are_made_ahead_as_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"n": [[{"a": row}] for row in range(320)]}), tmp_path / "x.parquet")
    made, convert = list[str](), collate._pylist

    def counting(array: pa.Array, name: str) -> list[Any]:
        made.append(name)
        return convert(array, name)

    monkeypatch.setattr(collate, "_pylist", counting)
    batches = iter(make_loader(tmp_path, 8, prefetch=8, cache=False))
    next(batches)
    until(lambda: len(made) > 8)
