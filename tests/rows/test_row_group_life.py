"""A row group goes from planned to released by the steps that exist, and its owner can say where each one is."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from itertools import pairwise, product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, make_dataset
from dataload.errors import DataError
from dataload.rows.row_group_life import RowGroupLife, State, charged_together
from dataload.telemetry.wait_timeline import doing

PATHS = [
    [State.PLANNED, State.FETCHING, State.DECODING, State.CACHED, State.MAPPED],  # made here
    [State.PLANNED, State.CACHED, State.MAPPED],  # found in the cache
    [State.PLANNED, State.FAILED],  # cancelled
    [State.PLANNED, State.CACHED, State.FAILED],  # The rest of its bunch could not be loaded.
    [State.PLANNED, State.FETCHING, State.FAILED],  # The origin failed.
    [State.PLANNED, State.FETCHING, State.DECODING, State.FAILED],  # It cannot be decoded.
    [State.PLANNED, State.FETCHING, State.PLANNED],  # Its bytes are damaged: it is fetched again.
    [State.PLANNED, State.FETCHING, State.DECODING, State.PLANNED],
]
STEPS = {step for path in PATHS for step in pairwise(path)}


def in_state(state: State) -> RowGroupLife:
    life = RowGroupLife()
    life.state = state
    return life


@pytest.mark.parametrize(("before", "after"), list(product(State, State)))
def test_steps(before: State, after: State) -> None:
    life = in_state(before)
    if (before, after) in STEPS:
        life.enter(after)
        assert life.state is after
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {before.value} to {after.value}"):
            life.enter(after)
        assert life.state is before


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_life_ends_with_the_program(has_begun: bool) -> None:
    life, call = RowGroupLife(), Future[None]()
    assert not has_begun or life.begin()
    life.finish_with(call)
    assert not life.contents.done()
    call.cancel()
    life.finish_with(call)
    with pytest.raises(CancelledError):
        life.contents.result(0)
    assert life.is_stale()


def test_row_groups_that_a_thread_loads_together_have_its_timeline() -> None:
    lives = [RowGroupLife(), RowGroupLife()]
    with charged_together(lives) as timeline, doing("decode"):
        pass
    assert [life.timeline for life in lives] == [timeline, timeline]
    assert timeline.spent()["decode"] > 0
    with lives[0].charged():
        assert lives[0].timeline is not timeline  # of another thread


@pytest.fixture
def dataset(tmp_path: Any) -> Any:
    pq.write_table(pa.table({"a": range(100)}), tmp_path / "x.parquet", row_group_size=10)
    return make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache")))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """The states that row groups enter."""
    states: list[State] = []
    enter = RowGroupLife.enter

    def note(life: RowGroupLife, state: State) -> None:
        states.append(state)
        enter(life, state)

    monkeypatch.setattr(RowGroupLife, "enter", note)
    return states


def test_a_row_group_is_made_once_and_found_later(dataset: Any, noted: list[State]) -> None:
    store = dataset.rowstore
    store.gather(np.array([5]))
    assert noted == [State.FETCHING, State.DECODING, State.CACHED, State.MAPPED]
    noted.clear()
    store.after_fork_in_child()  # Nothing is open.
    store.gather(np.array([5]))
    assert noted == [State.CACHED, State.MAPPED]


def test_a_row_group_that_cannot_be_decoded_is_released(tmp_path: Any, noted: list[State]) -> None:
    pq.write_table(pa.table({"a": [1, None]}), tmp_path / "x.parquet")
    store = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache"))).rowstore
    with pytest.raises(DataError):
        store.gather(np.array([0]))
    assert noted == [State.FETCHING, State.DECODING, State.FAILED]
    assert store.states()["mapped"] == 0


def test_the_owner_counts_the_row_groups_of_each_state(dataset: Any) -> None:
    store = dataset.rowstore
    store.capacity = 3
    for row in range(0, 100, 10):
        store.gather(np.array([row]))
    assert store.states() == {"planned": 0, "fetching": 0, "decoding": 0, "cached": 0, "mapped": 3}
    store.prefetch([0])
    store.scheduler._lives[0].contents.result(200)
    assert store.states() == {"planned": 0, "fetching": 0, "decoding": 0, "cached": 1, "mapped": 3}
    store.capacity = 5
    store.gather(np.array([1]))  # More row groups may be open now, so the open ones are closed.
    assert store.states() == {"planned": 0, "fetching": 0, "decoding": 0, "cached": 0, "mapped": 1}


def test_a_row_group_waits_as_planned_until_there_is_memory(dataset: Any) -> None:
    store = dataset.rowstore
    with store.row_groups.memory.held.reserve(1 << 60):
        store.prefetch(range(4))
        assert store.states()["planned"] == 4
    for group in range(4):
        store.scheduler._lives[group].contents.result(200)
    assert store.states()["cached"] == 4
