"""A request that takes too long is asked for a second time, and no more of them than agreed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from dataload.benchmarks.origin import Origin
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin import hedge
from dataload.cache.origin.hedge import Hedge

SIZE = 1000


class Store:
    """Whoever asks first has to wait; the next does not."""

    def __init__(self) -> None:
        self.asked = 0
        self.release = threading.Event()

    def __call__(self) -> str:
        self.asked += 1
        if self.asked == 1:
            assert self.release.wait(60)
            return "late"
        return "soon"


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.release.set()


def knowing(requests: int = 200) -> Hedge:
    """After so many requests of which each took a hundredth of a second."""
    found = Hedge()
    found.asked = requests
    found._seconds[SIZE.bit_length()].extend([0.01] * requests)
    return found


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """How long each first request was given; none of them is done by then."""
    given: list[float | None] = []

    def impatient(pending: Any, timeout: float | None = None, **how: Any) -> Any:
        if not how:
            given.append(timeout)
        return (set(), pending) if timeout is not None else wait(pending, **how)

    monkeypatch.setattr(hedge, "wait", impatient)
    return given


def late(found: Hedge, size: int, store: Store) -> bool:
    """Whether it waits for who asked first."""
    store.asked = 0
    store.release.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(found.first, size, store)
        store.release.set()
        return answer.result(60) == "late"


def test_what_takes_too_long_is_asked_for_again(store: Store) -> None:
    found = knowing()
    for number in range(8):
        store.asked = 0
        assert found.first(SIZE, store) == "soon"
        assert found.hedged == number + 1


def test_as_long_as_it_is_not_known_what_is_usual_nothing_is(store: Store, patience: list[float | None]) -> None:
    found = knowing(hedge.KNOWN - 1)
    assert late(found, SIZE, store)
    assert (patience, found.hedged) == ([None], 0)
    found.first(SIZE, store)
    assert patience[1] is not None


def test_other_sizes_take_other_times(store: Store, patience: list[float | None]) -> None:
    assert late(knowing(), 100 * SIZE, store)
    assert patience == [None]


def test_no_more_are_than_agreed(store: Store, patience: list[float | None]) -> None:
    found = knowing(100)
    found.hedged = most = int(hedge.MOST * 100)
    assert late(found, SIZE, store)
    assert (patience, store.asked, found.hedged) == ([0.01], 1, most)


def test_an_error_counts_when_both_fail() -> None:
    found = knowing()
    answers: Iterator[Any] = iter([OSError("first"), OSError("second")])

    def fail() -> None:
        raise next(answers)

    with pytest.raises(OSError, match="first"):
        found.first(SIZE, fail)


def test_an_error_of_one_is_not_the_end(store: Store) -> None:
    found, second = knowing(), threading.Event()

    def call() -> str:
        store.asked += 1
        if store.asked == 1:
            assert second.wait(60)
            raise OSError("the first one fails")
        second.set()
        assert store.release.wait(60)
        return "the second one"

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(found.first, SIZE, call)
        assert second.wait(60)
        store.release.set()
        assert answer.result(60) == "the second one"


def test_a_filesystem_hedges_where_it_is_asked_to(tmp_path: Path) -> None:
    folder = tmp_path / "objects" / "b"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(bytes(300 * SIZE))
    options = {"block_bytes": SIZE, "skip_instance_cache": True}
    with Origin(tmp_path / "objects") as origin:
        for hedged in (False, True):
            cache = str(tmp_path / f"cache {hedged}")
            fs = TierCacheFileSystem("s3", origin.storage_options, cache_dir=cache, hedge=hedged, **options)
            assert fs.cat_file("b/x", 0, 200 * SIZE) == bytes(200 * SIZE)
            origin.behave(stalled=0.03, stall=0.5, seed=1)
            assert fs.cat_file("b/x", 200 * SIZE) == bytes(100 * SIZE)
            assert (fs.stats()["hedged"] > 0) == hedged
            origin.behave(stalled=0.0)
