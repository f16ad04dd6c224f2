"""Loaders over filtered datasets: each row that matches comes once, on any ranks, and no other byte is fetched."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tiers
from torch.utils.data import DataLoader

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.samplers import ShardedSampler

FILES = [[40, 60], [7, 0, 93], [50, 50, 1]]
N = 301
EVEN = [row for row in range(N) if row % 2 == 0]


@pytest.fixture
def even(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Dataset:
    """The even rows. Row i has half == i / 2."""
    options = {"columns": ["half"], "storage_options": bucket.options, "cache": cache}
    return make_dataset(dataset_of(FILES), **options).select(EVEN)


def columns_of(rows: Any) -> Any:
    return rows.columns


def rows_of(batches: Any) -> list[int]:
    return [int(2 * half) for batch in batches for half in batch["half"]]


@pytest.mark.variants
@pytest.mark.parametrize("shuffle", [True, "full", False])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_selected_row_comes_once(even: Dataset, shuffle: Any, workers: int) -> None:
    found = []
    for rank in range(3):
        options = {"transform": dict, "num_workers": workers} if workers else {}
        loader = make_loader(even, 8, shuffle=shuffle, world=World(rank, 3), **options)
        mine = rows_of(loader)
        found += mine[: len(mine) - loader.sampler.padding_from(0)]
    assert sorted(found) == EVEN


def test_a_sampler_with_the_lengths_of_a_selection(even: Dataset) -> None:
    filtered = even.filter(pc.field("half") >= 20)
    assert [rows for rows in filtered.block_lengths if rows] == [30, 4, 46, 25, 25, 1]
    found = []
    for rank in range(2):
        sampler = ShardedSampler(filtered.block_lengths, num_replicas=2, rank=rank, batch_size=8, drop_last=True)
        batches = DataLoader(filtered, 8, sampler=sampler, collate_fn=columns_of)
        found += rows_of(batches)
    assert len(found) == len({*found}) == len(filtered) // 16 * 16
    assert {*found} <= {row for row in EVEN if row >= 40}


def test_a_sampler_reads_no_row_to_refuse_a_dataset(even: Dataset, bucket: Any) -> None:
    bucket.server.reset()
    with pytest.raises(ConfigError, match=r"block_lengths must be one list of row counts.*: pass dataset\.block_len"):
        ShardedSampler(even, num_replicas=2, rank=0)
    assert bucket.server.stats()["get_requests"] == 0


def test_a_resume_on_other_ranks_repeats_and_loses_nothing(even: Dataset) -> None:
    whole = make_loader(even, 12, world=World(0, 1))
    stream = rows_of(whole)
    states = []
    for rank in range(2):
        loader = make_loader(even, 6, world=World(rank, 2))
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        states.append(loader.state_dict())
        batches.close()
    assert states[0] == states[1]
    assert len(json.dumps(states[0])) < 4096
    resumed = make_loader(even, 12, world=World(0, 1))
    resumed.load_state_dict(states[0])
    assert rows_of(resumed) == stream[48:]


def test_a_state_of_other_rows_is_refused(even: Dataset) -> None:
    first, second = even.select(range(10)), even.select(range(10, 20))  # as many rows of the same row group
    state = make_loader(first, 6, world=World(0, 1)).state_dict()
    for other in (second, even, even.filter(pc.field("half") > 3)):
        with pytest.raises(ConfigError, match="another dataset"):
            make_loader(other, 6, world=World(0, 1)).load_state_dict(state)


def test_subsets_of_subsets(even: Dataset) -> None:
    late = even.filter([("half", ">=", 100.0)]).select(np.arange(51) % 3 == 0)
    assert rows_of([late.__getitems__(range(len(late))).columns]) == list(range(200, 301, 6))
    assert late.locate(0) == even.locate(100)
    parts = late.split([0.5, 0.5])
    assert sorted(row for part in parts for row in rows_of([part.__getitems__(range(len(part))).columns])) == list(
        range(200, 301, 6)
    )
    assert len({late.fingerprint, even.fingerprint, *(part.fingerprint for part in parts)}) == 4
    assert even.select(range(len(even))).fingerprint == even.fingerprint
    assert rows_of([pickle.loads(pickle.dumps(late)).__getitems__([1, 0]).columns]) == [206, 200]


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        ([], ConfigError, "no row is selected"),
        ([3, 3], ConfigError, "comes twice"),
        ([151], IndexError, "row 151 of a dataset of 151 rows"),
        ([-152], IndexError, "row -152"),
        ([150, -1], ConfigError, "comes twice"),
        ([0.5], ConfigError, "float64"),
        ([[1, 2]], ConfigError, "shape"),
        ([True], ConfigError, r"\(1,\).*151 rows"),
        (np.zeros(151, bool), ConfigError, "no row is selected"),
    ],
    ids=["none", "twice", "high", "negative", "twice from the end", "float", "nested", "short", "all false"],
)
def test_selections_that_cannot_work(even: Dataset, rows: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        even.select(rows)


def test_rows_are_selected_from_the_end(even: Dataset) -> None:
    last = even.select([-1])
    assert len(last) == 1
    assert rows_of([last.__getitems__([0]).columns]) == rows_of([even.__getitems__([150]).columns])
    assert even.select([3, -1, -151]).fingerprint == even.select([0, 3, 150]).fingerprint


# Bytes


COLUMNS = ("id", "x", "payload")
GROUP, GROUPS = 4000, 12


@pytest.fixture
def wide(bucket: Any) -> Iterator[tuple[str, pq.FileMetaData]]:
    """One file of row groups of 1 MB; `id` counts, `x` is at random in all but two row groups."""
    dice = np.random.default_rng(0)
    x = dice.random(GROUP * GROUPS)
    x[2 * GROUP : 4 * GROUP] = 0.0  # Statistics exclude them.
    payload = [dice.bytes(256) for _ in range(GROUP * GROUPS)]
    table = pa.table({"id": range(GROUP * GROUPS), "x": pa.array(x, mask=x < 0.01), "payload": payload})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP, use_dictionary=False, compression="none")
    bucket.put("wide/x.parquet", sink.getvalue().to_pybytes())
    bucket.server.reset()
    yield bucket.url("wide"), pq.read_metadata(pa.BufferReader(sink.getvalue()))


def bytes_of(footer: pq.FileMetaData, groups: Any, columns: Any) -> int:
    chunks = [footer.row_group(group).column(COLUMNS.index(name)) for group in groups for name in columns]
    return sum(chunk.total_compressed_size for chunk in chunks)


def test_only_what_a_filter_needs_is_fetched(
    wide: tuple[str, pq.FileMetaData], bucket: Any, cache: CacheConfig
) -> None:
    url, footer = wide
    options = {"storage_options": bucket.options, "cache": cache}

    def fetched(act: Callable[[], Any]) -> tuple[Any, int]:
        bucket.server.reset()
        result = act()
        return result, bucket.server.stats()["get_bytes"]

    fetched(lambda: make_dataset(url, **options))  # the footer
    by_statistics, size = fetched(lambda: make_dataset(url, filters=[("id", ">=", 8 * GROUP)], **options))
    assert (len(by_statistics), size) == (4 * GROUP, 0)
    # `x` excludes row groups 2 and 3, and `id` those from 6 on. It cuts row group 5.
    filters = [("x", ">", 0.999), ("id", "<", 5 * GROUP + 7)]
    some, size = fetched(lambda: make_dataset(url, filters=filters, **options))
    assert size == bytes_of(footer, [0, 1, 4, 5], ["x", "id"])
    again, size = fetched(lambda: make_dataset(url, filters=filters, **options))
    assert (again.fingerprint, size) == (some.fingerprint, 0)
    matching = [group.number for group in some.row_groups]
    assert matching == [0, 1, 4]
    _, size = fetched(lambda: list(make_loader(some, 4, world=World(0, 1))))
    assert size == bytes_of(footer, matching, COLUMNS)


def _rows(url: str, options: dict[str, Any], cache: CacheConfig, started: Any) -> tuple[str, int]:
    started.wait()
    dataset = make_dataset(url, storage_options=options, cache=cache, filters=pc.field("x") > 0.5)
    return dataset.fingerprint, len(dataset)


@pytest.mark.slow
def test_processes_of_a_host_find_the_rows_once(
    wide: tuple[str, pq.FileMetaData], bucket: Any, cache: CacheConfig
) -> None:
    url, footer = wide
    make_dataset(url, storage_options=bucket.options, cache=cache)
    bucket.server.reset()
    context = tiers.FORKSERVER
    with tiers.fork_server(__name__), context.Manager() as manager, context.Pool(3) as pool:
        results = pool.starmap(_rows, [(url, bucket.options, cache, manager.Barrier(3))] * 3)
    assert len(set(results)) == 1
    undecided = [group for group in range(GROUPS) if group not in (2, 3)]
    assert bucket.server.stats()["get_bytes"] == bytes_of(footer, undecided, ["x"])
