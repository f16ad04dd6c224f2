"""A load ends with its program, and its owner can say where each row group is."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, make_dataset
from dataload.errors import DataError
from dataload.rows.row_group_load import RowGroupLoad, timed
from dataload.telemetry.wait_timeline import doing


def a_load() -> RowGroupLoad:
    return RowGroupLoad(0, cast(Any, None), 0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_load_ends_with_the_program(has_begun: bool) -> None:
    load, call = a_load(), Future[None]()
    assert not has_begun or load.begin()
    load.finish_with(call)
    assert not load.contents.done()
    call.cancel()
    load.finish_with(call)
    with pytest.raises(CancelledError):
        load.contents.result(0)
    assert load.is_stale()


def test_row_groups_that_a_thread_loads_together_have_its_timeline() -> None:
    loads = [a_load(), a_load()]
    with timed(loads) as timeline, doing("decode"):
        pass
    assert [load.timeline for load in loads] == [timeline, timeline]
    assert timeline.spent()["decode"] > 0
    with timed(loads[:1]):
        assert loads[0].timeline is not timeline  # of another thread


@pytest.fixture
def dataset(tmp_path: Any) -> Any:
    pq.write_table(pa.table({"a": range(100)}), tmp_path / "x.parquet", row_group_size=10)
    return make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache")))


def test_a_row_group_that_cannot_be_decoded_is_released(tmp_path: Any) -> None:
    pq.write_table(pa.table({"a": [1, None]}), tmp_path / "x.parquet")
    store = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache"))).rowstore
    with pytest.raises(DataError):
        store.gather(np.array([0]))
    assert not any(store.states().values())


def test_the_owner_counts_the_row_groups_of_each_state(dataset: Any) -> None:
    store = dataset.rowstore
    store.capacity = 3
    for row in range(0, 100, 10):
        store.gather(np.array([row]))
    assert store.states() == {"planned": 0, "fetching": 0, "decoding": 0, "cached": 0, "mapped": 3}
    store.prefetch([0])
    store.scheduler._loads[0].contents.result(200)
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
        store.scheduler._loads[group].contents.result(200)
    assert store.states()["cached"] == 4
