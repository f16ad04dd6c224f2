"""`Dataset.flat_map`: the rows, what is computed when, what is counted once, and errors."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tiers
import torch
from clusters import Server, running_server  # noqa: F401

from dataload import CacheConfig, World, make_dataset, make_loader, mix
from dataload.catalog.locations import Location
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.mapping import counting, map_maker
from dataload.planning.orders import order_of
from dataload.planning.plan import plan
from dataload.planning.warm import warm
from dataload.rows import row_group_plan

ROWS, GROUP = 120, 10
SAMPLED = 4 * GROUP  # rows of four row groups, which have fewer than 32 rows


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    with tiers.fork_server(__name__):
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    columns = {"id": range(ROWS), "text": [f"row {n}" for n in range(ROWS)]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=GROUP)
    return tmp_path / "rows.parquet"


@pytest.fixture
def dataset(file: Path, cache: CacheConfig) -> Dataset:
    return make_dataset(file, cache=cache)


class Repeat:
    """A function that makes as many rows of a row as `times` tells, and notes in a file which rows it got.

    Args:
        told: The file.
        times: Returns the rows to make of a row.
        fails_at: The row with which it raises, or kills its process if that is `killed`.
        killed: A process that may be killed; 0: none.
    """

    def __init__(
        self, told: Path, times: Callable[[int], int] = lambda n: n % 4, fails_at: int = -1, killed: int = 0
    ) -> None:
        self.told, self.times, self.fails_at, self.killed = str(told), times, fails_at, killed

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        ids = batch["id"].tolist()
        if self.fails_at in ids and not Path(f"{self.told}.go").exists():
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError(f"no row {self.fails_at}")
        with Path(self.told).open("a") as file:
            file.write("".join(f"{n}\n" for n in ids))
        rows = [(n, k) for n in ids for k in range(self.times(n))]
        return {
            "id": [n for n, _ in rows],
            "part": np.array([k for _, k in rows], np.int16),
            "name": [f"{n}-{k}" for n, k in rows],
            "tokens": [list(range(k + 1)) for _, k in rows],
            "turns": [[{"n": n, "k": [k]}] for n, k in rows],
        }

    @property
    def calls(self) -> list[int]:
        """The rows that it got."""
        path = Path(self.told)
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
def repeat(tmp_path: Path) -> Repeat:
    return Repeat(tmp_path / "told")


def quarter(n: int) -> int:
    return n % 4


EXPECTED = [(n, k) for n in range(ROWS) for k in range(n % 4)]


def rows_in(batch: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the rows of a batch, of which all columns must agree."""
    rows = list(zip(batch["id"].tolist(), batch["part"].tolist(), strict=True))
    assert batch["name"] == [f"{n}-{k}" for n, k in rows]
    assert [tokens.tolist() for tokens in batch["tokens"]] == [list(range(k + 1)) for _, k in rows]
    assert batch["turns"] == [[{"n": n, "k": [k]}] for n, k in rows]
    return rows


def all_rows(dataset: Dataset) -> list[tuple[int, int]]:
    return rows_in(dataset.__getitems__(range(len(dataset))).columns)


@pytest.mark.variants
@pytest.mark.parametrize("processes", [None, 1])
def test_each_row_comes_in_order_and_the_function_is_called_once(
    dataset: Dataset, repeat: Repeat, processes: int | None
) -> None:
    flat = dataset.flat_map(repeat, version="1", processes=processes)
    assert len(repeat.calls) == SAMPLED
    assert flat.uncounted is dataset
    assert len(flat) == len(EXPECTED)
    assert flat.uncounted is None
    assert Counter(repeat.calls[SAMPLED:]) == Counter(range(ROWS))
    assert all_rows(flat) == EXPECTED
    for _ in range(2):
        loader = make_loader(flat, 16, num_workers=0 if processes else 1)
        assert sorted(row for batch in loader for row in rows_in(batch)) == EXPECTED
    again = make_dataset(
        dataset.blocks.origin.url_of(dataset.row_groups[0].file.path),
        cache=CacheConfig(str(dataset.blocks.tier.location), "1GB"),
    ).flat_map(repeat, version="1")
    assert all_rows(again) == EXPECTED
    assert len(repeat.calls) == SAMPLED + ROWS


@pytest.mark.parametrize("most", [1, 8, 64])
def test_row_groups_of_several_blobs_are_made_once_too(
    dataset: Dataset, repeat: Repeat, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(row_group_plan, "BLOB_ROWS", most)
    monkeypatch.setattr(map_maker, "FIRST_ROWS", 2)
    flat = dataset.flat_map(repeat, version="1")
    assert all_rows(flat) == EXPECTED
    assert len(repeat.calls) == SAMPLED + ROWS
    blobs = [len(flat.rowstore.row_groups.caches[0].keys(number)) for number in range(2)]
    assert blobs == [max(1, -(-rows // most)) for rows in flat.block_lengths[:2].tolist()]


@pytest.mark.parametrize("most", [8, 1 << 16])
def test_rows_that_the_cache_has_lost_are_made_again(
    dataset: Dataset, repeat: Repeat, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(row_group_plan, "BLOB_ROWS", most)
    flat = dataset.flat_map(repeat, version="1")
    assert len(flat) == len(EXPECTED)
    [blobs] = flat.rowstore.row_groups.caches
    for number in range(ROWS // GROUP):
        blobs.tier.retract(blobs.keys(number))
    assert sorted(row for batch in make_loader(flat, 16) for row in rows_in(batch)) == EXPECTED
    assert len(repeat.calls) == SAMPLED + 2 * ROWS


def test_rows_of_a_map_after_it_may_be_skipped(dataset: Dataset, repeat: Repeat) -> None:
    def checked(batch: dict[str, Any]) -> dict[str, Any]:
        if 77 in batch["id"].tolist():
            raise LookupError("no row 77")
        return {"id": batch["id"]}

    mapped = dataset.flat_map(repeat, version="1").map(checked)
    loader = make_loader(mapped, 16, on_error="skip", shuffle=False)
    ids = Counter(n for batch in loader for n in batch["id"].tolist())
    assert 77 not in ids
    assert {n: 1 for n, _ in EXPECTED if n != 77}.keys() == ids.keys()
    assert loader.stats().skipped_rows == 77 % 4


def test_without_a_cache(file: Path, repeat: Repeat) -> None:
    assert all_rows(make_dataset(file, cache=False).flat_map(repeat, version="1")) == EXPECTED


def test_a_cache_that_is_too_small(file: Path, tmp_path: Path) -> None:
    large = Repeat(tmp_path / "told", lambda n: 100)
    flat = make_dataset(file, cache_dir=str(tmp_path / "small"), cache_bytes="4MB").flat_map(large, version="1")
    assert len(flat) == 100 * ROWS
    assert flat.rowstore.row_groups.num_bytes > 4 * 10**6
    rows = [row for batch in make_loader(flat, 1024, window=1) for row in rows_in(batch)]
    assert sorted(rows) == [(n, k) for n in range(ROWS) for k in range(100)]


def elastic(flat: Dataset, worlds: list[tuple[int, int]], **options: Any) -> list[Any]:
    """Return the batches of an epoch that goes on with other numbers of ranks: (ranks, steps of each)."""
    state: dict[str, Any] | None = None
    found = []
    for ranks, steps in worlds:
        loaders = [
            make_loader(flat, 12 // ranks, world=World(rank, ranks, rank, ranks), **options) for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            found += [batch for batch in (next(each, None) for each in iterators) if batch is not None]
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        state = states[0]
        del iterators
    return found


RANDOM = [range(first, first + 4) for first in range(0, 200, 4)]


@pytest.mark.variants
@pytest.mark.parametrize("seeds", RANDOM, ids=str)
def test_random_functions_and_an_elastic_resume(tmp_path: Path, seeds: range) -> None:
    """Each row that a function makes comes once, on 4 ranks, then on 3, then on one."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        groups = rng.integers(1, 9, rng.integers(1, 7)).tolist()
        path = tmp_path / f"{seed}.parquet"
        with pq.ParquetWriter(path, pa.schema([("id", pa.int64())])) as writer:
            for number, size in enumerate(groups):
                first = sum(groups[:number])
                writer.write_table(pa.table({"id": range(first, first + size)}))
        counts = (
            rng.choice([0, 0, 1, 2, 7], sum(groups)) * rng.integers(0, 2, sum(groups))
            if seed % 3
            else rng.integers(0, 4, sum(groups))
        )
        counts[rng.integers(0, len(counts))] += max(5, 40 - counts.sum())  # at least those of three batches of all
        told = Repeat(tmp_path / f"told {seed}", counts.tolist().__getitem__)
        flat = make_dataset(path, cache_dir=str(tmp_path / "cache"), cache_bytes="1GB").flat_map(
            told, version=f"{seed}"
        )
        expected = [(n, k) for n, count in enumerate(counts.tolist()) for k in range(count)]
        assert len(flat) == len(expected)
        assert all_rows(flat) == expected
        shuffle = ["block", "full"][seed % 2]
        batches = elastic(flat, [(4, 1), (3, 1), (1, 10**6)], shuffle=shuffle, seed=seed)
        assert Counter(row for batch in batches for row in rows_in(batch)) == Counter(expected), seed


def test_it_combines_with_other_rows_and_maps(dataset: Dataset, repeat: Repeat) -> None:
    flat = dataset.flat_map(repeat, version="1")
    assert flat["part"].tolist() == [k for _, k in EXPECTED]
    train, val = flat.split([0.75, 0.25])
    assert sorted(all_rows(train) + all_rows(val)) == EXPECTED
    chosen = flat.select(range(5, 20)).map(lambda batch: {"double": 2 * batch["id"]}, columns=["id"])
    batch = chosen.__getitems__(range(15)).columns
    assert batch["double"].tolist() == [2 * n for n, _ in EXPECTED[5:20]]
    assert batch["name"] == [f"{n}-{k}" for n, k in EXPECTED[5:20]]
    assert all_rows(flat.select([3, 0, 40])) == [EXPECTED[row] for row in (0, 3, 40)]
    few = dataset.filter(pc.field("id") < 30).map(lambda batch: {"id": batch["id"] + 1}).select(range(0, 30, 2))
    twice = few.flat_map(repeat, version="1").flat_map(lambda batch: {"id": batch["id"].repeat_interleave(2)})
    ids = twice.__getitems__(range(len(twice))).columns["id"].tolist()
    assert ids == [n + 1 for n in range(0, 30, 2) for _ in range(2 * ((n + 1) % 4))]
    part = few.flat_map(repeat, version="1").select([0, 1, 9])
    repeated = [(n + 1, k) for n in range(0, 30, 2) for k in range((n + 1) % 4)]
    assert all_rows(part) == [repeated[0], repeated[1], repeated[9]]
    mixed = list(make_loader(mix({"a": flat, "b": flat.select(range(9))}, weights=[1, 1]), 8))
    assert {row for batch in mixed for row in rows_in(batch)} <= set(EXPECTED)
    copy = pickle.loads(pickle.dumps(flat))
    assert all_rows(copy) == EXPECTED
    uncounted = pickle.loads(pickle.dumps(dataset.flat_map(quarters)))
    assert uncounted.uncounted is not None
    assert len(uncounted) == len(EXPECTED)


def quarters(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": torch.repeat_interleave(batch["id"], batch["id"] % 4)}


def test_identity_and_order(dataset: Dataset, file: Path) -> None:
    flat, same = dataset.flat_map(quarters), dataset.flat_map(quarters)
    assert (flat.fingerprint, flat.order_key) == (same.fingerprint, same.order_key)
    plain = dataset.map(lambda batch: {"id": batch["id"]})
    others = [dataset, plain, flat, flat.map(halves), flat.flat_map(halves), dataset.flat_map(halves), flat.select([1])]
    assert len({each.fingerprint for each in others}) == len(others)
    assert flat.order_key != dataset.order_key
    loader, other = make_loader(flat, 8), make_loader(flat, 8)
    first = [batch["id"].tolist() for batch in loader]
    other.set_epoch(1)
    second = [batch["id"].tolist() for batch in other]
    assert second != first
    assert sorted(itertools.chain(*second)) == sorted(itertools.chain(*first))
    state = loader.state_dict()
    with pytest.raises(ConfigError):
        make_loader(dataset, 8).load_state_dict(state)


def halves(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"] // 2}


def test_locations_tell_the_row_group(dataset: Dataset, repeat: Repeat, file: Path) -> None:
    flat = dataset.flat_map(repeat, version="1")
    row = EXPECTED.index((GROUP + 1, 1))
    found = flat.locate(row)
    assert isinstance(found, Location)
    assert found == (f"file://{file}", 1, row - EXPECTED.index((GROUP, 0)))
    assert found.text == f"file://{file} row group 1, row {found.row} of those that flat_map made of it"
    assert flat.select([row]).locate([0]) == [found]


def test_filters_come_first(dataset: Dataset, repeat: Repeat) -> None:
    flat = dataset.flat_map(repeat, version="1")
    for each in (flat, flat.map(halves), flat.select([1])):
        with pytest.raises(ConfigError, match="filter before flat_map"):
            each.filter([("id", ">", 3)])


def test_columns_that_the_function_gets(dataset: Dataset) -> None:
    def windows(batch: dict[str, Any]) -> dict[str, Any]:
        assert batch.keys() == {"text"}
        return {"word": [word for text in batch["text"] for word in text.split()]}

    flat = dataset.flat_map(windows, columns=["text"])
    assert flat.schema.names == ["word"]
    assert flat.__getitems__([0, 1, 2]).columns["word"] == ["row", "0", "row"]


def test_rows_that_are_left_out(dataset: Dataset) -> None:
    def last(batch: dict[str, Any]) -> dict[str, Any]:
        kept = [n for n in batch["id"].tolist() if n == ROWS - 1]
        return {"id": kept, "name": [str(n) for n in kept]} if kept else {}

    flat = dataset.flat_map(last)
    assert (len(flat), flat[0]["name"]) == (1, "119")
    assert [batch["id"].tolist() for batch in make_loader(flat, 4)] == [[ROWS - 1]]
    with pytest.raises(ConfigError, match=r"flat_map .*nothing makes no row of any of the 120 rows: return some"):
        dataset.flat_map(nothing)


def test_a_sample_with_rows_reads_no_others(dataset: Dataset) -> None:
    got: list[int] = []

    def noted(batch: dict[str, Any]) -> dict[str, Any]:
        got.extend(batch["id"].tolist())
        return batch

    mapped = dataset.map(noted, version="1")
    del got[:]
    mapped.flat_map(quarters)
    assert len(got) == SAMPLED


def nothing(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"][:0]}


def test_masks_and_empty_chunks(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, None, 3, 0]}), tmp_path / "x.parquet", row_group_size=1)
    dataset = make_dataset(tmp_path / "x.parquet", cache=False, null_masks=True)

    def repeated(batch: dict[str, Any]) -> dict[str, Any]:
        times = batch["id"]
        return {
            "y": [None if n == 3 else int(n) for n in times.tolist() for _ in range(n)],
            "z": times.repeat_interleave(times),
        }

    batch = (flat := dataset.flat_map(repeated)).__getitems__(range(len(flat))).columns
    assert (batch["y"].tolist(), batch["y.is_null"].tolist()) == ([1, 0, 0, 0], [False, True, True, True])
    assert (batch["z"].tolist(), batch["z.is_null"].tolist()) == ([1, 3, 3, 3], [False] * 4)


def test_errors_name_the_row(dataset: Dataset, tmp_path: Path, file: Path) -> None:
    def uneven(batch: dict[str, Any]) -> dict[str, Any]:
        return {"a": [1] * (2 if 13 in batch["id"] else 1), "b": [1]}

    with pytest.raises(
        DataError, match=r"row group 1 row 3: flat_map .*\('a' has 2 and 'b' has 1\): return columns of one"
    ):
        dataset.select(range(10, 20)).flat_map(uneven)
    failing = Repeat(tmp_path / "told", fails_at=57)
    flat = dataset.flat_map(failing, version="1")
    for on_error in ("raise", "skip"):
        with pytest.raises(DataError, match=r"rows.parquet row group 5 row 7: flat_map .*LookupError: no row 57"):
            make_loader(flat, 4, on_error=on_error)


def test_a_pass_that_failed_goes_on_where_it_was(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "IN_FLIGHT", 1)
    failing = Repeat(tmp_path / "told", fails_at=57)
    flat = dataset.flat_map(failing, version="1")
    with pytest.raises(DataError, match="no row 57"):
        len(flat)
    assert set(failing.calls[SAMPLED:]) == set(range(57))  # The rows of the last row group are tried one by one.
    Path(f"{failing.told}.go").touch()
    assert all_rows(flat) == EXPECTED
    times = Counter(failing.calls[SAMPLED:])
    assert all(times[n] == 1 for n in range(ROWS) if n // GROUP != 57 // GROUP)


def counted_in_a_process(file: Path, cache: CacheConfig, function: Repeat, out: Any) -> None:
    if function.killed:
        counting.IN_FLIGHT = 1
    flat = make_dataset(file, cache=cache).flat_map(function, version="1")
    out.put(all_rows(flat))


def test_a_killed_pass_goes_on_where_it_was(file: Path, cache: CacheConfig, tmp_path: Path) -> None:
    function = Repeat(tmp_path / "told", quarter, fails_at=57, killed=1)
    out = tiers.FORKSERVER.SimpleQueue()
    arguments = file, cache, function, out
    process = tiers.FORKSERVER.Process(target=counted_in_a_process, args=arguments)
    process.start()
    process.join(tiers.PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert function.calls[SAMPLED:] == list(range(50))
    Path(f"{function.told}.go").touch()
    process = tiers.FORKSERVER.Process(target=counted_in_a_process, args=arguments)
    process.start()
    assert out.get() == EXPECTED
    process.join(tiers.PATIENCE)
    assert Counter(function.calls[SAMPLED:]) == Counter(range(ROWS))


def test_ranks_of_a_host_count_once(file: Path, cache: CacheConfig, tmp_path: Path) -> None:
    function = Repeat(tmp_path / "told", quarter)
    out = tiers.FORKSERVER.SimpleQueue()
    ranks = [tiers.FORKSERVER.Process(target=counted_in_a_process, args=(file, cache, function, out)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    assert [out.get(), out.get()] == [EXPECTED, EXPECTED]
    for rank in ranks:
        rank.join(tiers.PATIENCE)
        assert rank.exitcode == 0
    assert len(function.calls) == SAMPLED + ROWS


def test_another_host_of_a_cluster_neither_counts_nor_makes_rows(
    file: Path, cache: CacheConfig, tmp_path: Path, cluster_server: Server, repeat: Repeat
) -> None:
    url = cluster_server.url
    first = make_dataset(file, cache=replace(cache, cluster=url)).flat_map(repeat, version="1")
    assert len(first) == len(EXPECTED)
    other = CacheConfig(str(tmp_path / "other"), "1GB", cluster=url)
    assert all_rows(make_dataset(file, cache=other).flat_map(repeat, version="1")) == EXPECTED
    assert len(repeat.calls) == SAMPLED + ROWS


@pytest.mark.parametrize("more", [-1, 1, GROUP])
@pytest.mark.parametrize("most", [4, 1 << 16])
def test_another_number_of_rows_than_was_counted(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, most: int
) -> None:
    monkeypatch.setattr(row_group_plan, "BLOB_ROWS", most)
    flag = tmp_path / "later"
    function = Repeat(tmp_path / "told", lambda n: n % 4 + (more if n == 7 and flag.exists() else 0))
    flat = dataset.flat_map(function, version="1")
    assert len(flat) == len(EXPECTED)
    [blobs] = flat.rowstore.row_groups.caches
    blobs.tier.retract(blobs.keys(0))
    flag.touch()
    rows = int(flat.block_lengths[0])
    with pytest.raises(
        DataError, match=rf"row group 0: flat_map .*Repeat.* made \d+ rows .*and {rows} rows when they were"
    ):
        flat[0]
    assert blobs.find(0) is None
    assert flat[len(flat) - 1]["id"] == ROWS - 1


def test_no_row_after_those_of_the_sample(dataset: Dataset, tmp_path: Path) -> None:
    flag = tmp_path / "later"
    flat = dataset.flat_map(Repeat(tmp_path / "told", lambda n: 0 if flag.exists() else 1), version="1")
    flag.touch()
    with pytest.raises(ConfigError, match=r"flat_map .*Repeat makes no row of any of the 120 rows: return some"):
        len(flat)


def test_the_plan_and_the_warm_up(dataset: Dataset, repeat: Repeat) -> None:
    flat = dataset.flat_map(repeat, version="1")
    text = repr(flat)
    assert "about 180 rows, not counted yet: it will be called once for each of 120 rows in 12 row groups, " in text
    assert "id: int64, part: int16, name: string" in text
    before = flat.uncounted
    assert before is not None
    cost = plan(before.rowstore.row_groups.caches, order_of(before.manifest, shuffle=False), 1).first_epoch
    assert cost is not None
    assert cost.bytes > 0
    assert len(repeat.calls) == SAMPLED
    row_groups = flat.rowstore.row_groups
    found = plan(row_groups.caches, order_of(flat.manifest), 8)
    assert (found.rows, found.row_groups) == (len(EXPECTED), ROWS // GROUP)
    assert warm(row_groups, range(ROWS // GROUP)) == ROWS // GROUP
    assert "180 rows in 12 row groups of 1 file" in repr(flat)


def test_chunks_are_as_small_as_the_rows_that_are_made_are_large(tmp_path: Path) -> None:
    """The calls under way together have 16 MB of rows."""
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "x.parquet", row_group_size=50)
    chunks = []

    def windows(batch: dict[str, Any]) -> dict[str, Any]:
        chunks.append(len(batch["id"]))
        return {"window": np.zeros((1000 * len(batch["id"]), 500))}  # 4 MB of a row

    rows = make_dataset(tmp_path / "x.parquet", cache=False).flat_map(windows, version="1")
    sampled = len(chunks)
    assert len(rows) == 100_000
    assert max(chunks[sampled:]) <= 4
