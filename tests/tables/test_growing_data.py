"""Epochs that go on while their data changes: each row that is left comes once, and deleted rows never again."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from delta_histories import deletion_vector
from deltalake import DeltaTable, write_deltalake
from growing import KINDS, GrowingDelta, GrowingFolder, GrowingIceberg, as_a_new_process
from pyarrow import feather
from pyiceberg.table import StaticTable
from pyiceberg.types import DoubleType, LongType, StringType
from test_agreement import errors_of, together
from torch import nn

from dataload import fit, make_dataset, make_loader, mix
from dataload.catalog import inventory_store
from dataload.catalog.footer_summary import Summarize
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError, OriginNotFound
from dataload.formats.detect import parse_footer
from dataload.lineage import calls_as_json
from dataload.loader import changes
from dataload.samplers import position
from dataload.world import World


@pytest.fixture(autouse=True)
def no_memory() -> None:
    """Forget what this process knows of earlier data, as a new one."""
    as_a_new_process()


def marked(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "mark": batch["id"] + 1}


def numbers(batch: dict[str, Any]) -> list[int]:
    return batch["id"].tolist()


def read(loaders: list[Any], batches: int | None, state: Any) -> tuple[list[int], Any]:
    """Return the rows of some batches of all ranks, or of the rest of the epoch, and the state after them."""
    rows, states = [], []
    for loader in loaders:
        iterator = iter(loader)
        if batches is None:
            own = [number for batch in iterator for number in numbers(batch)]
            rows += own[: len(own) - loader.padding]
            continue
        sampler = loader.rank_sampler
        whole = (sampler.num_rows - sampler.cursor) // sampler.global_batch_size  # The last one may have padding.
        rows += [number for _ in range(min(batches, whole - 1)) for number in numbers(next(iterator))]
        states.append(json.loads(json.dumps(loader.state_dict())))
        iterator.close()
    assert all(each == states[0] for each in states)
    assert len(json.dumps(states)) <= 4096 * max(1, len(states))
    return rows, states[0] if states else state


def run_epoch(kind: str, folder: Path, draw: random.Random, shape: str, cache: Any) -> None:
    """Read an epoch with three changes of the data in it, each by a new process on another number of ranks."""
    sources = [KINDS[kind](folder / "a", 0, 60)]
    if shape == "mixture":
        sources.append(KINDS[kind](folder / "b", 1000, 30))

    def loaders() -> list[Any]:
        as_a_new_process()
        datasets = [make_dataset(each.source(), cache=cache, filters=[("id", "!=", 3)]) for each in sources]
        if shape == "map":
            datasets = [each.map(marked) for each in datasets]
        whole = mix({str(number): each for number, each in enumerate(datasets)}) if shape == "mixture" else datasets[0]
        world, size = draw.randint(1, 3), draw.randint(1, 4)
        how = {"shuffle": draw.choice(["block", "full", False]), "num_streams": draw.choice([None, 1])}
        return [make_loader(whole, size, seed=5, world=World(rank, world, rank, world), **how) for rank in range(world)]

    seen: list[int] = []
    restored = set[int]()  # Rows that were deleted after they were read: one that is restored may come again.
    state: Any = None
    for step in range(4):
        batches = None if step == 3 else draw.randint(1, 2)
        current = loaders()
        for loader in current if state else []:
            loader.load_state_dict(state, on_change="continue")
        rows, state = read(current, batches, state)
        alive = set.union(*(each.alive for each in sources))
        assert set(rows) <= alive - {3}
        restored |= set(seen) - alive
        seen += rows
        for each in sources if step < 3 else []:
            each.change(draw)
    counts = Counter(seen)
    assert {number for number, times in counts.items() if times > 1} <= restored
    assert alive - {3} <= counts.keys()
    whole = read(loaders(), None, None)[0]  # the plain order of the new data
    assert sorted(whole) == sorted(alive - {3})


@pytest.mark.variants
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", ["plain", "map", "mixture"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_that_is_left_comes_once_over_three_changes_and_other_ranks(kind, shape, seed, tmp_path):
    from dataload.cache.config import CacheConfig

    cache = CacheConfig(cache_dir=str(tmp_path / "cache"), cache_bytes="1GB") if kind == "folder" or seed % 2 else False
    run_epoch(kind, tmp_path, random.Random(f"{kind} {shape} {seed}"), shape, cache)


def write(path: Path, first: int, count: int) -> None:
    pq.write_table(pa.table({"id": pa.array(range(first, first + count), pa.int64())}), path, row_group_size=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    write(path / "a.parquet", 0, 20)
    write(path / "b.parquet", 20, 20)
    return path


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"cache_dir": str(tmp_path / "cache"), "cache_bytes": "1GB"}


def begun(source: Any, batches: int = 3, **options: Any) -> tuple[list[int], Any]:
    """Return the rows of the first batches of an epoch, and the state after them."""
    return read([make_loader(source, 4, **options)], batches, None)


def ended(loader: Any) -> list[int]:
    return [number for batch in loader for number in numbers(batch)]


def read_or_die(folder: str, options: dict[str, Any], saved: Path, last: int | None) -> None:
    """Go on with an epoch, and save the rows and the state after each batch. The process dies after `last` batches."""
    as_a_new_process()
    loader, rows = make_loader(folder, 4, **options), list[int]()
    if saved.exists():
        content = json.loads(saved.read_text())
        loader.load_state_dict(content["state"], on_change="continue")
        rows = content["rows"]
    for number, batch in enumerate(loader, 1):
        rows += numbers(batch)
        saved.with_suffix(".draft").write_text(json.dumps({"rows": rows, "state": loader.state_dict()}))
        saved.with_suffix(".draft").rename(saved)
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)


def test_processes_that_are_killed_have_each_row_once(folder, tmp_path, options, ranks):
    saved = tmp_path / "saved.json"

    def run(last: int | None) -> Any:
        return ranks(1, read_or_die, str(folder), options, saved, last)[0]

    assert str(run(3)) == str(-signal.SIGKILL)
    write(folder / "c.parquet", 40, 10)
    assert str(run(2)) == str(-signal.SIGKILL)
    gone = set(range(20)) - set(json.loads(saved.read_text())["rows"])
    (folder / "a.parquet").unlink()
    write(folder / "d.parquet", 50, 10)
    assert run(None) is None
    assert sorted(json.loads(saved.read_text())["rows"]) == sorted(set(range(60)) - gone)


def read_after_a_refresh(folder: str, grow: bool) -> list[int]:
    """Read an epoch, refresh, and read another one; on one rank after the folder has grown."""

    def epochs(rank: int) -> list[int]:
        loader = make_loader(folder, 4, cache=False)
        ended(loader)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        if rank == 0:
            loader.dataset.refresh()
            store.set("rank 0 has listed", "")
        store.wait(["rank 0 has listed"])
        if rank == 1:
            write(Path(folder) / "c.parquet", 40, 4) if grow else None
            loader.dataset.refresh()
        return ended(loader)

    return together(epochs, "agent")


def read_one_after_the_other(folder: str, repeats: bool) -> list[int]:
    """Read an epoch on both ranks, and one after a refresh, on rank 0 when rank 1 has ended its own."""

    def epochs(rank: int) -> list[int]:
        loader = make_loader(folder, 4, cache=False)
        ended(loader)
        loader.set_epoch(0 if repeats else 1)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.set(f"rank {rank} has read", "")
        store.wait(["rank 0 has read", "rank 1 has read"])
        if rank == 0:
            store.wait(["rank 1 is done"])
        else:
            write(Path(folder) / "c.parquet", 40, 4)
        loader.dataset.refresh()
        rows = ended(loader)
        store.set(f"rank {rank} is done", "")
        return rows

    return together(epochs, "agent")


def refresh_on_one_rank(folder: str, refreshing: int) -> list[int]:
    """Read an epoch, refresh on one rank after the folder has grown, and read another one."""

    def epochs(rank: int) -> list[int]:
        loader = make_loader(folder, 4, cache=False)
        ended(loader)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.set(f"rank {rank} has read", "")
        store.wait(["rank 0 has read", "rank 1 has read"])
        if rank == refreshing:
            write(Path(folder) / "c.parquet", 40, 4)
            loader.dataset.refresh()
        return ended(loader)

    return together(epochs, "agent")


@pytest.mark.parametrize("refreshing", [0, 1])
def test_a_refresh_on_one_rank_alone_is_told(refreshing, folder, ranks):
    errors = errors_of(ranks(2, refresh_on_one_rank, str(folder), refreshing))
    assert errors
    for error in errors:
        assert "has 40 rows in 2 files" in error
        assert "has 44 rows in 3 files" in error
        assert "file that differs is" in error
        assert "c.parquet" in error or "the one after" in error  # as the rank that lacks it says
        assert "Call refresh() on every rank, before the same epoch" in error


@pytest.mark.parametrize("repeats", [False, True])
def test_a_rank_that_has_not_refreshed_yet_is_no_other_one(repeats, folder, ranks):
    rows = ranks(2, read_one_after_the_other, str(folder), repeats)
    assert sorted([*rows[0], *rows[1]]) == list(range(44))


def test_ranks_whose_refreshes_differ_are_told(folder, ranks):
    rows = ranks(2, read_after_a_refresh, str(folder), False)
    assert sorted([*rows[0], *rows[1]]) == list(range(40))
    errors = errors_of(ranks(2, read_after_a_refresh, str(folder), True))
    assert errors
    for error in errors:
        assert "the ranks read different rows" in error
        assert "c.parquet" in error or "the one after" in error  # as the rank that lacks it says


def test_without_a_choice_other_data_is_refused_and_the_choices_are_named(folder, options):
    _, state = begun(str(folder), **options)
    write(folder / "c.parquet", 40, 10)
    loader = make_loader(str(folder), 4, **options)
    with pytest.raises(ConfigError, match=r'of another dataset .* on_change="continue" or "next_epoch"'):
        loader.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"on_change='later': use"):
        loader.load_state_dict(state, on_change="later")
    assert sorted(ended(loader)) == list(range(50))


def test_next_epoch_ends_the_epoch_on_the_old_data_first(folder, options):
    seen, state = begun(str(folder), **options)
    write(folder / "c.parquet", 40, 10)
    loader = make_loader(str(folder), 4, row_ids=True, **options)
    loader.load_state_dict(state, on_change="next_epoch")
    assert len(loader) == 10
    half = iter(loader)
    batch = next(half)
    assert numbers(batch) == [int(loader.dataset[row]["id"]) for row in batch["row_id"].tolist()]
    again = make_loader(str(folder), 4, **options)
    again.load_state_dict(loader.state_dict(), on_change="next_epoch")
    half.close()
    rows = numbers(batch) + ended(again)
    assert sorted(seen + rows) == list(range(40))
    assert sorted(ended(again)) == list(range(50))
    assert len(again.dataset) == 50


def test_next_epoch_tells_which_file_of_a_folder_is_gone(folder, options):
    _, state = begun(str(folder), **options)
    write(folder / "a.parquet", 100, 20)
    loader = make_loader(str(folder), 4, **options)
    with pytest.raises(OriginNotFound, match=r"a\.parquet of the interrupted epoch is gone, or replaced: on_change="):
        loader.load_state_dict(state, on_change="next_epoch")
    assert sorted(ended(loader)) == sorted([*range(100, 120), *range(20, 40)])


def test_next_epoch_tells_that_files_of_a_table_were_vacuumed(tmp_path):
    table = GrowingDelta(tmp_path / "table")
    _, state = begun(table.source(), cache=False)
    write_deltalake(str(table.folder), pa.table({"id": [1], "text": ["x"]}), mode="overwrite")
    table.source().vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(OriginNotFound, match="VACUUM or expire_snapshots has removed it"):
        make_loader(table.source(), 4, cache=False).load_state_dict(state, on_change="next_epoch")


def test_continue_tells_that_rows_may_have_moved_from_files_that_were_vacuumed(tmp_path, options):
    table = GrowingDelta(tmp_path / "table")
    _, state = begun(table.source(), **options)
    table.source().optimize.compact()
    table.source().vacuum(0, dry_run=False, enforce_retention_duration=False)
    as_a_new_process()
    loader = make_loader(table.source(), 4, cache=False)
    with pytest.raises(
        ConfigError, match=rf"{table.folder}@1, of which the epoch has rows, cannot be opened: .*VACUUM"
    ):
        loader.load_state_dict(state, on_change="continue")


def test_rows_that_were_updated_come_with_their_new_values(tmp_path):
    table = GrowingDelta(tmp_path / "table")
    seen, state = begun(table.source(), cache=False)
    table.source().update(updates={"text": "'new'"}, predicate=f"id in ({seen[0]}, 39, 38)")
    loader = make_loader(table.source(), 4, cache=False)
    loader.load_state_dict(state, on_change="continue")
    texts = {number: text for batch in loader for number, text in zip(numbers(batch), batch["text"], strict=True)}
    assert sorted(texts) == sorted({*range(40)} - {*seen} | {seen[0], 38, 39})
    assert texts[seen[0]] == "new"


def test_equal_rows_that_were_written_again_come_as_often_as_they_are_left(tmp_path):
    path = f"{tmp_path}/table"
    write_deltalake(path, pa.table({"id": [7] * 10 + [8] * 6}))
    seen, state = begun(DeltaTable(path), 2, cache=False)
    write_deltalake(path, pa.table({"id": [7] * 2}), mode="append")
    DeltaTable(path).optimize.compact()
    loader = make_loader(DeltaTable(path), 4, cache=False)
    loader.load_state_dict(state, on_change="continue")
    assert Counter(seen + ended(loader)) == {7: 12, 8: 6}


@pytest.mark.parametrize("seed", range(4))
def test_equal_rows_come_as_often_as_they_are_left_after_a_restore(seed, tmp_path):
    """A row of the files that come back, which the epoch has had already, is no further one."""
    path = f"{tmp_path}/table"
    write_deltalake(path, pa.table({"id": [1] * 4 + [2] * 4}))
    write_deltalake(path, pa.table({"id": [3] * 4}), mode="append")

    def resumed(state: Any) -> Any:
        as_a_new_process()
        loader = make_loader(DeltaTable(path), 1, seed=seed, cache=False)
        loader.load_state_dict(state, on_change="continue")
        return loader

    seen, state = read([make_loader(DeltaTable(path), 1, seed=seed, cache=False)], 3, None)
    DeltaTable(path).optimize.compact()
    more, state = read([resumed(state)], 3, state)
    DeltaTable(path).restore(1)
    assert Counter(seen + more + ended(resumed(state))) == {1: 4, 2: 4, 3: 4}


@pytest.mark.parametrize("row", range(4))
def test_equal_rows_stay_excluded_once_after_a_restore(row, tmp_path):
    path = f"{tmp_path}/table"
    for ids in ([1, 1], [1, 2]):
        write_deltalake(path, pa.table({"id": ids}), mode="append")
    dataset = make_dataset(DeltaTable(path), cache=False).exclude([row])
    left = sorted(dataset["id"].tolist())
    for change in (lambda: DeltaTable(path).optimize.compact(), lambda: DeltaTable(path).restore(1)):
        change()
        assert dataset.refresh().rows == 0
        assert sorted(dataset.newest["id"].tolist()) == left


@pytest.mark.parametrize("choice", ["continue", "next_epoch"])
@pytest.mark.parametrize("grows", [False, True])
def test_rows_are_excluded_from_the_rest_of_an_epoch_without_the_cache_of_its_run(grows, choice, tmp_path):
    table = GrowingDelta(tmp_path / "table")
    seen, state = begun(table.source(), cache=False)
    as_a_new_process()
    if grows:
        table.append(4)
    bad = min({*range(40)} - {*seen})
    dataset = make_dataset(table.source(), cache=False)
    loader = make_loader(dataset.exclude([dataset["id"].tolist().index(bad)]), 4)
    loader.load_state_dict(state, on_change=choice)
    left = table.alive - {bad} if choice == "continue" else {*range(40)}  # next_epoch ends it on the old rows
    assert sorted(seen + ended(loader)) == sorted(left)


def without(dataset: Any, *ids: int) -> Any:
    """Return a dataset without some rows, each of which a call of its own excludes."""
    for each in ids:
        dataset = dataset.exclude([dataset["id"].tolist().index(each)])
    return dataset


@pytest.mark.parametrize("choice", ["continue", "next_epoch"])
@pytest.mark.parametrize("shape", ["plain", "mixture"])
def test_further_rows_are_excluded_without_the_cache_of_its_run(shape, choice, tmp_path):
    table = GrowingDelta(tmp_path / "table")

    def loader(*ids: int) -> Any:
        as_a_new_process()
        whole = make_dataset(table.source(), cache=False)
        other = without(whole, 0)
        return make_loader(without(other, *ids) if shape == "plain" else mix([without(whole, *ids), other]), 4)

    seen, state = read([loader()], 3, None)
    bad = min({*range(1, 40)} - {*seen})
    resumed = loader(bad)
    resumed.load_state_dict(state, on_change=choice)
    left = Counter(range(1, 40)) if shape == "plain" else Counter([*range(40), *range(1, 40)])
    left[bad] -= choice == "continue"
    assert Counter(seen + ended(resumed)) == +left


@pytest.mark.parametrize("choice", ["continue", "next_epoch"])
@pytest.mark.parametrize("further", [False, True])
def test_rows_that_were_written_again_are_excluded_without_the_cache_of_its_run(further, choice, tmp_path):
    """The call names them in the new files."""
    table = GrowingDelta(tmp_path / "table")
    table.append(4)

    def loader(*ids: int) -> Any:
        as_a_new_process()
        return make_loader(without(make_dataset(table.source(), cache=False), 7, *ids), 4)

    seen, state = read([loader()], 3, None)
    bad = [min({*range(44)} - {*seen, 7})] if further else []
    table.source().optimize.compact()
    resumed = loader(*bad)
    resumed.load_state_dict(state, on_change=choice)
    left = {*range(44)} - {7, *(bad if choice == "continue" else [])}
    assert sorted(seen + ended(resumed)) == sorted(left)


def test_rows_of_one_of_many_sources_are_excluded_without_the_cache_of_its_run(tmp_path):
    """All of them have excluded rows before."""
    table = GrowingDelta(tmp_path / "table", 0, 8)

    def loader(*ids: int) -> Any:
        as_a_new_process()
        other = without(make_dataset(table.source(), cache=False), 0)
        return make_loader(mix({"a": without(other, *ids), **{f"s{each}": other for each in range(12)}}), 4)

    seen, state = read([loader()], 1, None)
    resumed = loader(1)
    resumed.load_state_dict(state, on_change="continue")
    found = Counter(seen + ended(resumed))
    assert found[1] in (12, 13)
    assert {**found, 1: 13} == dict.fromkeys(range(1, 8), 13)


def test_rows_that_are_excluded_no_more_are_told_without_the_cache_of_its_run(tmp_path):
    table = GrowingDelta(tmp_path / "table")
    _, state = read([make_loader(without(make_dataset(table.source(), cache=False), 0), 4)], 3, None)
    as_a_new_process()
    with pytest.raises(ConfigError, match=r"is not in this cache, .* for a table, with its filters and exclude"):
        make_loader(table.source(), 4, cache=False).load_state_dict(state, on_change="continue")


def test_a_replaced_file_of_the_same_size_and_rows_is_another_one(folder, options):
    how = {"compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"id": range(20)}), folder / "a.parquet", **how)
    size = (folder / "a.parquet").stat().st_size
    seen, state = begun(str(folder), **options)
    pq.write_table(pa.table({"id": range(60, 80)}), folder / "a.parquet", **how)
    assert (folder / "a.parquet").stat().st_size == size
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + ended(loader)) == sorted({*seen, *range(20, 40), *range(60, 80)})


def test_a_file_that_was_only_touched_is_the_same(folder, options):
    seen, state = begun(str(folder), **options)
    body = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").unlink()
    (folder / "a.parquet").write_bytes(body)
    write(folder / "c.parquet", 40, 4)
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + ended(loader)) == list(range(44))


def test_arrow_files_that_were_only_touched_are_the_same(tmp_path, options):
    folder = tmp_path / "arrow"
    folder.mkdir()
    feather.write_feather(pa.table({"id": range(40)}), folder / "a.arrow", chunksize=10)
    begun(str(folder), **options)
    os.utime(folder / "a.arrow", ns=(0, 0))
    seen, state = begun(str(folder), **options)
    feather.write_feather(pa.table({"id": range(40, 44)}), folder / "b.arrow")
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + ended(loader)) == list(range(44))


def test_a_run_goes_on_at_a_copy_of_the_folder(folder, tmp_path, options):
    seen, state = begun(str(folder), **options)
    folder = folder.rename(tmp_path / "moved")
    write(folder / "c.parquet", 40, 4)
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + ended(loader)) == list(range(44))


def test_rows_are_excluded_from_the_rest_of_an_epoch(folder, options):
    seen, state = begun(str(folder), **options)
    bad = [row for row in range(40) if row not in seen][:5]
    write(folder / "c.parquet", 40, 4)
    loader = make_loader(make_dataset(str(folder), **options).exclude(bad), 4)
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + ended(loader)) == sorted({*range(44)} - {*bad})
    assert sorted(ended(loader)) == sorted({*range(44)} - {*bad})


def test_files_that_were_renamed_within_an_epoch_are_told(folder, options, caplog):
    seen, state = begun(str(folder), 9, **options)
    had = {row for row in seen if row < 20}
    (folder / "a.parquet").rename(folder / "z.parquet")
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    told = f"files that the epoch had {len(had)} rows of are gone, renamed or replaced, such as "
    assert told in caplog.text
    assert "a.parquet: if new files have these rows, they come again" in caplog.text
    assert Counter(seen + ended(loader)) == Counter([*range(40), *had])


def test_an_epoch_that_has_not_begun_has_the_new_data(folder, options):
    state = make_loader(str(folder), 4, **options).state_dict()
    write(folder / "c.parquet", 40, 4)
    for choice in ("continue", "next_epoch"):
        loader = make_loader(str(folder), 4, **options)
        loader.load_state_dict({**state, "epoch": 3}, on_change=choice)
        assert loader.state_dict()["epoch"] == 3
        assert sorted(ended(loader)) == list(range(44))


def test_an_epoch_at_its_end_goes_on_with_new_rows(folder, options):
    loader = make_loader(str(folder), 4, **options)
    iterator = iter(loader)
    seen = [number for _ in range(10) for number in numbers(next(iterator))]
    state = loader.state_dict()
    iterator.close()
    write(folder / "c.parquet", 40, 4)
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + ended(loader)) == list(range(44))


def test_without_the_cache_of_the_run_the_rows_it_had_are_unknown(folder, options):
    _, state = begun(str(folder), **options)
    write(folder / "c.parquet", 40, 4)
    as_a_new_process()
    loader = make_loader(str(folder), 4, cache=False)
    for choice in ("continue", "next_epoch"):
        with pytest.raises(ConfigError, match=r"is not in this cache, .*: use the cache_dir of the run"):
            loader.load_state_dict(state, on_change=choice)
    assert sorted(ended(loader)) == list(range(44))


def test_a_state_that_is_full_of_changes_is_told(folder, options, monkeypatch):
    monkeypatch.setattr(changes, "MOST_EARLIER_CHARACTERS", 300)
    state = None
    seen: list[int] = []
    with pytest.raises(ConfigError, match=r"the data has changed 7 times within one epoch, more than a state holds"):
        for number in range(9):
            loader = make_loader(str(folder), 1, **options)
            if state is not None:
                loader.load_state_dict(state, on_change="continue")
            rows, state = read([loader], 1, state)
            seen += rows
            write(folder / f"c{number:03}.parquet", 40 + 2 * number, 2)
    assert len(set(seen)) == len(seen)


def test_nodes_keep_their_streams(folder, options):
    def loaders() -> list[Any]:
        how = {"window": 2, "num_streams": 2, **options}
        return [make_loader(str(folder), 2, world=World(rank, 2, 0, 1), **how) for rank in range(2)]

    seen, state = read(loaders(), 3, None)
    write(folder / "c.parquet", 40, 20)
    nodes = loaders()
    for loader in nodes:
        loader.load_state_dict(state, on_change="continue")
    groups = [set(loader.rank_sampler.blocks_from()) for loader in nodes]
    assert len(groups[0] & groups[1]) <= 1  # that on the border
    rows = [ended(loader) for loader in nodes]
    for own, of in zip(rows, groups, strict=True):
        starts = nodes[0].dataset.block_lengths.cumsum()
        assert {int((starts <= row).sum()) for row in own} <= of
    assert sorted(seen + rows[0] + rows[1]) == list(range(60))


REFUSED = {
    "flat_map": lambda dataset: make_loader(dataset.flat_map(marked, ["id"]), 4),
    "batch_tokens": lambda dataset: make_loader(dataset, batch_tokens=400, length="id"),
    'batching="homogeneous"': lambda dataset: make_loader(mix([dataset], batching="homogeneous"), 4),
    "a schedule of weights": lambda dataset: make_loader(mix([dataset, dataset], schedule={0: [1, 1], 9: [1, 2]}), 4),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_go_on_is_refused(what, folder, options):
    (folder / "a.parquet").unlink()
    state = REFUSED[what](make_dataset(str(folder), **options)).state_dict()
    write(folder / "c.parquet", 40, 4)
    for choice in ("continue", "next_epoch"):
        loader = REFUSED[what](make_dataset(str(folder), **options))
        with pytest.raises(ConfigError, match=f"a loader with {what} cannot go on with other data"):
            loader.load_state_dict({**state, "cursor": 4}, on_change=choice)


def test_a_sampler_alone_does_not_go_on(folder, options):
    _, state = begun(str(folder), **options)
    write(folder / "c.parquet", 40, 4)
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    other = make_loader(str(folder), 4, **options)
    with pytest.raises(ConfigError, match=r"changed within the epoch of the state: load it by loader\.load_state_dict"):
        other.rank_sampler.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="a trainer that skips the batches that it has had cannot continue then"):
        list(loader.batch_sampler)
    with pytest.raises(ConfigError, match="the state has earlier="):
        other.load_state_dict({**loader.state_dict(), "earlier": [{"dataset": "x", "rows": "many"}]})
    with pytest.raises(ConfigError, match="the state has had 99 rows of an epoch of 40"):
        other.load_state_dict({**loader.state_dict(), "cursor": 99, "earlier": [{**state, "rows": 99}]})


# Refreshes of a running job


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
def test_a_refresh_is_read_from_the_next_epoch_on(kind, tmp_path, options):
    data, draw = KINDS[kind](tmp_path / "data"), random.Random(1)
    dataset = make_dataset(data.source(), filters=[("id", ">", 0)], **options).map(marked)
    dataset = dataset.exclude([dataset["id"].tolist().index(1)])
    loader = make_loader(dataset, 4)
    assert not loader.dataset.refresh()
    assert sorted(ended(loader)) == list(range(2, 40))
    for _ in range(3):
        before = sorted(data.alive - {0, 1})
        iterator = iter(loader)
        rows = numbers(next(iterator))
        data.change(draw)
        assert dataset.refresh()
        assert sorted(rows + [number for batch in iterator for number in numbers(batch)]) == before
        assert len(loader) == -(-len(data.alive - {0, 1}) // 4)
        assert len(loader.dataset) == len(data.alive - {0, 1})
        assert sorted(ended(loader)) == sorted(data.alive - {0, 1})
    assert not dataset.refresh()


@pytest.mark.parametrize("kind", ["list", "set", "generator", "array"])
def test_a_refresh_filters_by_the_values_that_were_given(kind, folder, options):
    given = [0, 1, 2, 3]
    made = {"list": list, "set": set, "generator": lambda few: (each for each in few), "array": np.array}
    values = made[kind](given)
    filters = [("id", "not in", values)]
    for dataset in (
        make_dataset(str(folder), filters=filters, **options),
        make_dataset(str(folder), **options).filter([("id", "not in", made[kind](given))]),
    ):
        assert len(pickle.loads(pickle.dumps(dataset))) == 36
        assert calls_as_json(dataset)[1:] == [{"filter": [["id", "not in", given]]}]
        if kind in ("list", "set"):
            values.clear()
        filters.append(("id", "<", 0))
        write(folder / "c.parquet", 40, 4)
        assert dataset.refresh()
        assert sorted(dataset.newest["id"].tolist()) == list(range(4, 44))
        (folder / "c.parquet").unlink()


def test_a_refresh_tells_what_has_changed(folder, options):
    dataset = make_dataset(str(folder), **options)
    write(folder / "c.parquet", 40, 4)
    (folder / "a.parquet").unlink()
    found = dataset.refresh()
    assert (found.rows, found.files_added, found.files_removed) == (-16, 1, 1)
    assert found


def test_a_mixture_is_refreshed_with_its_weights_by_rows(folder, tmp_path, options):
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "x.parquet", 1000, 20)
    mixture = mix({"a": str(folder), "b": str(tmp_path / "other")}, name_column="source", **options)
    loader = make_loader(mixture, 4)
    assert len(ended(loader)) == 60
    write(tmp_path / "other" / "y.parquet", 1020, 20)
    assert mixture.refresh()
    rows = [
        (number, source)
        for batch in loader
        for number, source in zip(*map(list, (numbers(batch), batch["source"].tolist())), strict=True)
    ]
    assert sorted(number for number, _ in rows) == [*range(40), *range(1000, 1040)]
    assert all((number >= 1000) == source for number, source in rows)


def test_a_refresh_between_the_load_of_a_state_and_its_epoch_waits_for_the_next_one(folder, options):
    seen, state = begun(str(folder), **options)
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state)
    write(folder / "c.parquet", 40, 4)
    assert loader.dataset.refresh()
    assert sorted(seen + ended(loader)) == list(range(40))
    assert sorted(ended(loader)) == list(range(44))


@pytest.mark.parametrize("batches", [7, 12, 15])
def test_a_source_that_repeats_goes_on_with_its_pass(batches, folder, tmp_path, options):
    (tmp_path / "small").mkdir()
    write(tmp_path / "small" / "x.parquet", 1000, 9)

    def loader() -> Any:
        sources = {"large": str(folder), "small": str(tmp_path / "small")}
        return make_loader(mix(sources, [1, 1], num_rows=100, **options), 4)

    seen, state = read([loader()], batches, None)
    passes = [row for row in seen if row >= 1000]
    had = passes[(len(passes) - 1) // 9 * 9 :]
    write(tmp_path / "small" / "y.parquet", 1009, 5)
    resumed = loader()
    resumed.load_state_dict(state, on_change="continue")
    rest = ended(resumed)
    assert len(seen + rest) == 100
    small = [row for row in rest if row >= 1000]
    left = 14 - len(had)
    assert set(had) | set(small[:left]) == set(range(1000, 1014))
    for first in range(left, len(small), 14):
        assert len(set(small[first : first + 14])) == len(small[first : first + 14])


def test_a_pass_that_began_after_a_change_has_had_no_rows_of_the_passes_before(folder, tmp_path, options):
    (tmp_path / "small").mkdir()
    write(tmp_path / "small" / "x.parquet", 1000, 9)

    def resumed(state: Any) -> Any:
        sources = {"large": str(folder), "small": str(tmp_path / "small")}
        loader = make_loader(mix(sources, [1, 1], num_rows=100, **options), 4)
        if state is not None:
            loader.load_state_dict(state, on_change="continue")
        return loader

    _, state = read([resumed(None)], 2, None)
    write(tmp_path / "small" / "y.parquet", 1009, 5)
    rows, state = read([resumed(state)], 8, state)
    small = [row for row in rows if row >= 1000]
    had = small[10:]  # The first pass had 4 of its 14 rows before.
    assert len(had) == 6
    write(tmp_path / "small" / "z.parquet", 1014, 3)
    rest = [row for row in ended(resumed(state)) if row >= 1000]
    assert sorted(had + rest[:11]) == list(range(1000, 1017))


# Mixtures


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other"
    path.mkdir()
    write(path / "x.parquet", 1000, 20)
    return path


@pytest.mark.parametrize("choice", ["continue", "next_epoch"])
@pytest.mark.parametrize("has_cache", [True, False])
def test_an_epoch_that_has_not_begun_weighs_a_mixture_by_its_new_rows(has_cache, choice, folder, other, options):
    """Also on a host that has not the cache of the run."""

    def loader(**how: Any) -> Any:
        return make_loader(mix({"a": str(folder), "b": str(other)}, **how), 4)

    first = loader(**options)
    ended(first)
    state = first.state_dict()
    first.dataset.set_weights([3, 1])
    weighed = first.state_dict()
    as_a_new_process()
    write(other / "y.parquet", 1020, 20)
    resumed = loader(**(options if has_cache else {"cache": False}))
    resumed.load_state_dict(state, on_change=choice)
    for _ in range(2):
        assert sorted(ended(resumed)) == [*range(40), *range(1000, 1040)]
    resumed.load_state_dict(weighed, on_change=choice)  # weights of one's own stay
    assert resumed.state_dict()["weights"] == [3, 1]


@pytest.mark.parametrize("characters", [3400, 0])
def test_a_mixture_by_rows_is_saved_before_the_first_batch_after_a_change(
    characters, folder, other, options, monkeypatch
):
    monkeypatch.setattr(position, "MOST_CHARACTERS", characters)  # As those of many sources, weights become a digest.

    def loader(state: Any, weights: Any = None) -> Any:
        as_a_new_process()
        found = make_loader(mix({"a": str(folder), "b": str(other)}, weights, **options), 4, window=2)
        found.load_state_dict(state, on_change="continue")
        return found

    mixture = mix({"a": str(folder), "b": str(other)}, **options)
    seen, state = begun(mixture, window=2)
    write(other / "y.parquet", 1020, 20)
    state = json.loads(json.dumps(loader(state).state_dict()))
    write(other / "z.parquet", 1040, 30)
    resumed = loader(state)
    assert sorted(seen + ended(resumed)) == [*range(40), *range(1000, 1070)]
    assert sorted(ended(resumed)) == [*range(40), *range(1000, 1070)]
    assert sorted(seen + ended(loader(state, [3, 1]))) == [*range(40), *range(1000, 1070)]  # It holds from then on.


def test_default_windows_are_known_after_a_change(folder, other, options, monkeypatch):
    monkeypatch.setattr(position, "MOST_CHARACTERS", 0)  # As those of many sources, windows become a digest.

    def loader() -> Any:
        as_a_new_process()
        return make_loader(mix({"a": str(folder), "b": str(other)}, **options), 4)

    seen, state = read([loader()], 3, None)
    window = loader().rank_sampler.order.windows
    for count in (20, 200):
        write(other / f"{count}.parquet", 1000 + count, count)
        resumed = loader()
        assert resumed.rank_sampler.order.windows != window
        resumed.load_state_dict(state, on_change="continue")
        rows, state = read([resumed], 3, state)
        seen += rows
    resumed = loader()
    resumed.load_state_dict(state)
    assert sorted(seen + ended(resumed)) == [*range(40), *range(1000, 1040), *range(1200, 1400)]


@pytest.mark.parametrize("characters", [3400, 0])
def test_weights_that_equal_the_rows_stay(characters, folder, other, options, monkeypatch):
    monkeypatch.setattr(position, "MOST_CHARACTERS", characters)
    write(other / "x.parquet", 1000, 40)

    def loader() -> Any:
        return make_loader(mix({"a": str(folder), "b": str(other)}, [1, 1], **options), 4, window=2)

    seen, state = read([loader()], 8, None)
    (other / "x.parquet").unlink()
    write(other / "z.parquet", 1040, 40)
    resumed = loader()
    resumed.load_state_dict(state, on_change="continue")
    rest = ended(resumed)
    left = 40 - sum(row < 1000 for row in seen)
    assert sum(row < 1000 for row in rest) == left
    assert abs(sum(row >= 1000 for row in rest) - left) <= 1


def test_steps_before_a_change_are_not_those_after_it(folder, options):
    _, state = begun(str(folder), **options)
    write(folder / "c.parquet", 40, 8)
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    for ask in (loader.rows_at, loader.batch_at):
        for step in (0, 2):
            with pytest.raises(ConfigError, match=f"step {step} of epoch 0 had rows of .*dataset='{state['dataset']}'"):
                ask(0, step)
    [rows] = loader.rows_at(0, 3)
    assert numbers(next(iter(loader))) == loader.dataset["id"][rows].tolist()


FORGED = {
    "earlier=": {"earlier": 5},
    "earlier=.5": {"earlier": [5]},
    "tables=.5": {"tables": [5]},
    "tables=5": {"tables": 5},
    "dataset=": {"dataset": ["x"]},
    "fewer than": {"cursor": 2},
    "lacks": {"seed": None},
    "makes no order": {"shuffle": []},
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_state_is_refused(what, folder, options):
    _, state = begun(str(folder), **options)
    write(folder / "c.parquet", 40, 8)
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    saved = loader.state_dict()
    forged = {name: value for name, value in {**saved, **FORGED[what]}.items() if value is not None}
    write(folder / "d.parquet", 48, 8)
    loader = make_loader(str(folder), 4, **options)
    with pytest.raises(ConfigError, match=what):
        loader.load_state_dict(forged, on_change="continue")
    with pytest.raises(ConfigError, match="the state has earlier="):
        loader.load_state_dict({**saved, "earlier": [{**saved["earlier"][0], "tables": 5}]}, on_change="continue")


def packed(content: str, selections: bytes = b"") -> str:
    return base64.b64encode(zlib.compress(f"{content}\n".encode() + selections)).decode()


@pytest.mark.parametrize(
    "content",
    [
        '[["k",1,[["p",Infinity,"v",[[0,5]]]],0]]',
        '[["k",1,[["p",1,"v",[[0,1e400]]]],0]]',
        f'[["k",1,[["p",1,"v",[[0,{2**70}]]]],0]]',
        '[["k",1,[["p",1,"v",[[0,-5]]]],0]]',
        '[["k",1,[["p",1,"v",[[0,10000000000000]]]],0]]',
        '[["k",1,[["p",1,"v",[[0,5.5]]]],0]]',
        '[["k",1,[[1,1,"v",[[0,5]]]],0]]',
        '[["k",1,5,0]]',
        '[["k","1",[["p",1,"v",[[0,5]]]],0]]',
        '[["k",1,[["p",1,"v",[[0,5]]]],9]]',
        '[["k",1,[["p",1,"v",[[0,5]]]],-1]]',
        '[[5,1,[["p",1,"v",[[0,5]]]],0]]',
        "[" * 100_000,
    ],
)
def test_a_forged_inventory_is_refused(content):
    with pytest.raises(ConfigError, match="the inventory of 12ab cannot be read"):
        inventory_store.learn({"12ab": packed(content)})


def test_an_inventory_does_not_unpack_to_any_size(folder, options, monkeypatch):
    loader = make_loader(str(folder), 4, **options)
    texts = loader.inventories()
    inventory_store.learn(texts)
    monkeypatch.setattr(inventory_store, "MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        inventory_store.learn(texts)


def test_an_inventory_of_other_rows_than_its_digest_is_not_used(folder, options):
    seen, state = begun(str(folder), **options)
    text = make_loader(str(folder), 4, **options).inventories()[state["dataset"]]
    [content] = json.loads(zlib.decompress(base64.b64decode(text)))
    content[2][1][3][0][1], content[2][1][3][1][1] = 2, 8
    write(folder / "c.parquet", 40, 8)
    for cached in (True, False):
        as_a_new_process()
        inventory_store.learn({state["dataset"]: packed(json.dumps([content]))})
        loader = make_loader(str(folder), 4, **(options if cached else {"cache": False}))
        if cached:
            loader.load_state_dict(state, on_change="continue")
            assert sorted(seen + ended(loader)) == list(range(48))
        else:
            with pytest.raises(ConfigError, match="is not in this cache"):
                loader.load_state_dict(state, on_change="continue")


@pytest.mark.parametrize("name", ["split", "select"])
def test_rows_that_were_chosen_by_number_do_not_go_on_with_other_data(name, folder, options):
    def chosen() -> Any:
        dataset = make_dataset(str(folder), **options)
        return dataset.split([0.5, 0.5], seed=1)[0] if name == "split" else dataset.select(range(20))

    before = sorted(chosen()["id"].tolist())
    seen, state = begun(chosen(), 2)
    write(folder / "0.parquet", 40, 20)
    loader = make_loader(chosen(), 4)
    with pytest.raises(ConfigError, match=f"{name} is of the rows of one snapshot, and on_change="):
        loader.load_state_dict(state, on_change="continue")
    loader.load_state_dict(state, on_change="next_epoch")
    assert sorted(seen + ended(loader)) == before


def test_equal_files_in_two_folders_are_told_apart_after_a_move(tmp_path, options):
    old, new = tmp_path / "old", tmp_path / "new"
    for day in "xy":
        (old / f"day={day}").mkdir(parents=True)
        write(old / f"day={day}" / "part-0.parquet", 0, 20)
    seen, state = begun(str(old), **options)
    as_a_new_process()
    old.rename(new)
    (new / "day=z").mkdir()
    write(new / "day=z" / "part-0.parquet", 100, 8)
    loader = make_loader(str(new), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    assert Counter(seen + ended(loader)) == {**dict.fromkeys(range(20), 2), **dict.fromkeys(range(100, 108), 1)}


def test_rows_that_were_chosen_by_number_are_not_refreshed(folder, options):
    dataset = make_dataset(str(folder), **options)
    packed = dataset.map(listed).pack(8, "id")
    for chosen in (dataset.select([1, 2]), dataset.split([0.5, 0.5])[0], dataset.flat_map(marked), packed):
        with pytest.raises(ConfigError, match=r"(select|split|flat_map|pack) is of the rows of one snapshot"):
            chosen.refresh()


def test_what_has_no_newer_snapshot_says_why(tmp_path, folder, options):
    opened = make_dataset(str(folder), **options)
    with pytest.raises(ConfigError, match="cannot be made again of a new snapshot: open the source again"):
        Dataset(opened.manifest, opened.blocks).refresh()
    copied = pickle.loads(pickle.dumps(make_dataset(GrowingDelta(tmp_path / "delta").source(), cache=False)))
    with pytest.raises(ConfigError, match="is a copy of another process, which has the table: refresh it there"):
        copied.refresh()
    table = KINDS["iceberg"](tmp_path / "iceberg").source()
    static = make_dataset(StaticTable.from_metadata(table.metadata_location), cache=False)
    with pytest.raises(ConfigError, match="the table has no catalog, which would know its newest snapshot"):
        static.refresh()


def listed(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": [[number] * 3 for number in numbers(batch)]}


def test_another_number_of_sources_is_told(folder, options):
    _, state = begun(mix([str(folder)], **options))
    loader = make_loader(mix([str(folder), str(folder)], **options), 4)
    with pytest.raises(ConfigError, match="the state is of 1 sources, and this loader has 2: use those"):
        loader.load_state_dict(state, on_change="continue")


def test_a_damaged_inventory_is_told():
    for text in ("", "nonsense", '["bm9uc2Vuc2U="]'):
        with pytest.raises(ConfigError, match="the inventory of 12ab cannot be read"):
            inventory_store.learn({"12ab": text})


def test_scans_and_urls_are_refreshed_as_they_were_named(tmp_path):
    table = KINDS["iceberg"](tmp_path / "iceberg")
    scan = make_dataset(table.source().scan(row_filter="id > 9", selected_fields=("id",)), cache=False)
    fixed = make_dataset(table.source().scan(snapshot_id=table.source().current_snapshot().snapshot_id), cache=False)
    delta = GrowingDelta(tmp_path / "delta")
    moving, pinned = (make_dataset(f"delta+{delta.folder}{at}", cache=False) for at in ("", "@1"))
    table.append(5)
    delta.append(5)
    assert not fixed.refresh()
    assert not pinned.refresh()
    for dataset, first in ((scan, 10), (moving, 0)):
        assert dataset.refresh().rows == 5
        assert sorted(dataset.newest["id"].tolist()) == list(range(first, 45))
    assert scan.newest.schema.names == ["id"]
    assert calls_as_json(scan.newest)[0]["make_dataset"]["columns"] == ["id"]  # also in the ledger of a run


def test_loaders_with_token_budgets_are_not_refreshed(folder, options):
    (folder / "a.parquet").unlink()
    loader = make_loader(str(folder), batch_tokens=400, length="id", **options)
    assert not loader.dataset.refresh()
    assert sorted(ended(loader)) == list(range(20, 40))
    write(folder / "c.parquet", 40, 4)
    loader.dataset.refresh()
    with pytest.raises(ConfigError, match="a loader with batch_tokens stays at its snapshot: make it again"):
        ended(loader)


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "id": batch["id"] * 1}


@pytest.mark.parametrize("how", [{"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_workers_follow_a_refresh(how, folder, options):
    loader = make_loader(str(folder), 4, transform=doubled, **how, **options)
    assert sorted(ended(loader)) == list(range(40))
    write(folder / "c.parquet", 40, 4)
    loader.dataset.refresh()
    assert sorted(ended(loader)) == list(range(44))


def plus_one(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"] + 1}


def same(batch: dict[str, Any]) -> dict[str, Any]:
    return dict(batch)


OTHER_COLUMNS: dict[str, Any] = {
    "a wider column that map keeps": ([2**40], pa.array([2**40]), pa.array([1])),
    "a wider column that map gets": ([7], pa.array([7]), pa.array([1.5])),
    "a further column": ([7], pa.array([7]), pa.array([1]), pa.array(["text"])),
    "a column that is gone": (None, None, pa.array([1])),
}


@pytest.mark.parametrize("choice", ["refresh", "next_epoch"])
@pytest.mark.parametrize("gets", [["x"], None])
@pytest.mark.parametrize("change", OTHER_COLUMNS)
def test_map_makes_the_columns_of_each_snapshot(change, gets, choice, tmp_path):
    path, (kept, *columns) = str(tmp_path / "table"), OTHER_COLUMNS[change]
    usual = pa.table({"keep": pa.array([1, 2], pa.int32()), "x": pa.array([3, 4], pa.int32())})
    other = {name: each for name, each in zip(("keep", "x", "more"), columns, strict=False) if each is not None}

    def write_rows(rows: pa.Table) -> None:
        write_deltalake(path, rows, mode="overwrite", schema_mode="overwrite")

    def loader() -> Any:
        as_a_new_process()
        return make_loader(make_dataset(DeltaTable(path), cache=False).map(plus_one if gets else same, gets), 1)

    both = usual, pa.concat_tables([pa.table(other)] * 2)
    before, after = both if choice == "refresh" else both[::-1]
    write_rows(before)
    current = loader()
    batches = iter(current)
    next(batches)
    state = current.state_dict()
    if choice == "refresh":
        list(batches)
        write_rows(after)
        current.dataset.refresh()
    else:
        batches.close()
        write_rows(after)
        current = loader()
        current.load_state_dict(state, on_change="next_epoch")
    row = next(iter(current))
    assert row["x"].tolist() == [columns[1][0].as_py() + bool(gets)]
    assert (row["keep"].tolist() if "keep" in row else None) == kept


def test_rows_that_fail_are_skipped_after_a_refresh(folder, options):
    def positive(batch: dict[str, Any]) -> dict[str, Any]:
        if int(batch["id"].min()) < 1:
            raise ValueError("zero")
        return {"id": batch["id"]}

    dataset = make_dataset(str(folder), **options).map(positive)
    loader = make_loader(dataset, 4, on_error="skip")
    assert 0 not in ended(loader)
    for number, refresh in enumerate((dataset.refresh, loader.dataset.refresh, dataset.refresh), 1):
        write(folder / f"more-{number}.parquet", 36 + 4 * number, 4)
        assert refresh()
        rows = ended(loader)
        assert len(rows) == 40 + 4 * number
        assert set(range(1, 40 + 4 * number)) == set(rows)


def test_a_loader_follows_a_refresh_of_any_of_its_snapshots(folder, options):
    dataset = make_dataset(str(folder), **options)
    loader = make_loader(dataset, 4)
    for number, refresh in enumerate((loader.dataset.refresh, lambda: loader.dataset.refresh(), dataset.refresh), 1):
        write(folder / f"more-{number}.parquet", 36 + 4 * number, 4)
        assert refresh()
        assert sorted(ended(loader)) == list(range(40 + 4 * number))


def test_a_loader_that_ends_an_epoch_on_earlier_data_follows_a_refresh(folder, options):
    seen, state = begun(str(folder), **options)
    write(folder / "c.parquet", 40, 4)
    loader = make_loader(str(folder), 4, **options)
    loader.load_state_dict(state, on_change="next_epoch")
    assert sorted(seen + ended(loader)) == list(range(40))
    write(folder / "d.parquet", 44, 4)
    assert loader.dataset.refresh()
    assert sorted(ended(loader)) == list(range(48))


def test_a_dataset_is_pickled_without_its_other_snapshots(folder, options):
    dataset = make_dataset(str(folder), **options)
    size = len(pickle.dumps(dataset))
    write(folder / "c.parquet", 40, 4)
    dataset.refresh()
    assert len(pickle.dumps(dataset)) <= size + 100
    assert len(pickle.loads(pickle.dumps(dataset)).newest) == 40


def test_rows_that_were_chosen_are_pickled_once(folder, options):
    pq.write_table(pa.table({"id": range(100_000)}), folder / "a.parquet")
    dataset = make_dataset(str(folder / "a.parquet"), **options)
    rows = np.random.default_rng(0).permutation(100_000)[:50_000]
    for chosen in (dataset.select(rows), dataset.exclude(rows)):
        assert len(pickle.dumps(chosen)) < len(pickle.dumps(dataset)) + 40_000  # at most three bits a row


def fetched(bucket: Any, before: int) -> int:
    """Return the bytes of files of data that were sent since."""
    sent = bucket.server.requests[before:]
    return sum(each.num_bytes for each in sent if each.method == "GET" and each.path.endswith(".parquet"))


def test_a_new_snapshot_fetches_only_its_new_files(bucket, tmp_path, options):
    for number in range(10):
        bucket.put_table(f"data/{number}.parquet", pa.table({"id": range(3000 * number, 3000 * (number + 1))}))
    how = {"storage_options": bucket.options, **options}
    loader = make_loader(bucket.url("data"), 100, **how)
    assert len(ended(loader)) == 30_000
    new = bucket.put_table("data/new.parquet", pa.table({"id": range(30_000, 33_000)}))
    before = len(bucket.server.requests)
    assert loader.dataset.refresh()
    assert sorted(ended(loader)) == list(range(33_000))
    assert 0 < fetched(bucket, before) <= 2 * new  # Its footer comes in a request of its own, which has all of it.
    seen, state = begun(bucket.url("data"), **how)
    newer = bucket.put_table("data/newer.parquet", pa.table({"id": range(33_000, 36_000)}))
    loader = make_loader(bucket.url("data"), 100, **how)
    before = len(bucket.server.requests)  # without the footers, of which neighbours are cached together
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + ended(loader)) == list(range(36_000))
    assert 0 < fetched(bucket, before) <= newer


def test_a_snapshot_that_only_deletes_fetches_no_data(bucket, tmp_path, options):
    from delta_histories import deletion_vector

    given = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ENDPOINT_URL": bucket.server.endpoint_url,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_S3_ALLOW_UNSAFE_RENAME": "true",
    }
    write_deltalake(bucket.url("table"), pa.table({"id": range(100)}), storage_options=given)
    loader = make_loader(DeltaTable(bucket.url("table"), storage_options=given), 4, **options)
    assert len(ended(loader)) == 100
    seen, state = read([loader], 3, None)
    log = bucket.client.get_object(Bucket=bucket.name, Key=f"table/_delta_log/{0:020}.json")["Body"].read()
    [add] = [json.loads(line)["add"] for line in log.splitlines() if b'"add"' in line]
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    actions = [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"remove": {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}},
        {"add": {**add, "deletionVector": deletion_vector(tmp_path, range(50), "i")}},
    ]
    bucket.put(f"table/_delta_log/{1:020}.json", "\n".join(map(json.dumps, actions)).encode())
    before = len(bucket.server.requests)
    resumed = make_loader(DeltaTable(bucket.url("table"), storage_options=given), 4, **options)
    resumed.load_state_dict(state, on_change="continue")
    rest = ended(resumed)
    assert min(rest) >= 50
    assert sorted({*seen, *rest}) == sorted({*seen, *range(50, 100)})
    assert len(seen + rest) == len({*seen, *rest})
    assert fetched(bucket, before) == 0


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose footers were parsed."""
    found = list[str]()

    def parse(data: memoryview, obj: Any) -> Any:
        found.append(obj.path)
        return parse_footer(data, obj)

    monkeypatch.setattr("dataload.catalog.footer_cache.parse_footer", parse)
    return found


def test_a_newer_version_parses_the_footers_of_its_new_files_alone(parsed, tmp_path, options):
    table = GrowingDelta(tmp_path / "table")
    for number in range(12):
        table.append(number + 1)
    dataset = make_dataset(table.source(), **options)
    assert len(parsed) == 14
    for _ in range(2):
        table.append(3)
        parsed.clear()
        newer = make_dataset(table.source(), **options)
        assert len(parsed) == 1
        assert sorted(newer["id"].tolist()) == sorted(table.alive)
    parsed.clear()
    assert dataset.refresh().files_added == 2
    assert not parsed


def test_the_first_version_with_other_columns_parses_all_footers(parsed, tmp_path, options):
    table = GrowingIceberg(tmp_path / "table")
    make_dataset(table.source(), **options)
    with table.source().update_schema() as update:
        update.rename_column("text", "words")
    parsed.clear()
    for footers in (2, 1):
        assert make_dataset(table.source(), **options).schema.names == ["id", "words"]
        assert len(parsed) == footers
        parsed.clear()
        table.source().append(pa.table({"id": [99], "words": ["new"]}))


def test_a_folder_that_grows_parses_few_footers(parsed, folder, options, monkeypatch):
    monkeypatch.setattr("dataload.catalog.footer_cache.RUN", 1)
    make_dataset(str(folder), **options)
    write(folder / "c.parquet", 40, 4)
    parsed.clear()
    assert len(make_dataset(str(folder), **options)) == 44
    assert [Path(path).name for path in parsed] == ["c.parquet"]


@pytest.mark.slow
def test_another_pyarrow_parses_footers_again(folder, options):
    """It may read other types of them, such as UUIDs where an older one reads bytes."""
    make_dataset(str(folder), **options)
    program = f"""
import pyarrow
pyarrow.__version__ = "99.0"
from dataload import make_dataset
from dataload.catalog import footer_cache
parse = footer_cache.parse_footer
footer_cache.parse_footer = lambda data, obj: [print(obj.path), parse(data, obj)][1]
make_dataset({str(folder)!r}, **{options!r})
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert len(done.stdout.split()) == 2


def forged(place, value, folder, options, monkeypatch):
    """Open two files with four row groups each, and cache something else of each than its footer says."""
    monkeypatch.setattr("dataload.catalog.footer_cache.RUN", 1)
    pq.write_table(pa.table({"id": range(20), "text": ["a"] * 20}), folder / "a.parquet", row_group_size=5)
    pq.write_table(pa.table({"id": range(20, 40), "text": ["b"] * 20}), folder / "b.parquet", row_group_size=5)

    to_bytes = Summarize.to_bytes

    def changed(self: Summarize, found: Any) -> bytes:
        schemas, [file] = json.loads(to_bytes(self, found))
        inner = file
        for number in place[:-1]:
            inner = inner[number]
        inner[place[-1]] = value
        return json.dumps([schemas, [file]]).encode()

    with monkeypatch.context() as patch:
        patch.setattr(Summarize, "to_bytes", changed)
        make_dataset(str(folder), **options)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0,), 7),  # the number of the file
        ((2, 0, 0), -3),  # rows
        ((2, 0, 0), "5"),
        ((2, 0, 0), 10**30),
        ((2, 0, 1), -1),  # bytes
        ((2, 0, 2), []),  # bytes of each column whose values vary in length
        ((2, 0, 3), ["many"]),  # nulls
        ((3,), [1]),  # unreadable columns
        ((4,), None),  # the mark
        ((2, 0, 0), 0),  # rows, which would be hidden
        ((2,), []),  # row groups, which would hide the file
    ],
)
def test_what_no_footer_says_is_found_again(place, value, folder, options, monkeypatch):
    forged(place, value, folder, options, monkeypatch)
    pq.write_table(pa.table({"id": [40], "text": ["c"]}), folder / "c.parquet")
    assert make_dataset(str(folder), **options)["id"].tolist() == list(range(41))


@pytest.mark.parametrize(("place", "value"), [((2, 0, 0), 7), ((2, 0, 0), 3), ((2,), [[5, 9, [9], [0]]] * 5)])
def test_cached_row_counts_that_differ_from_the_footer_name_the_file(place, value, folder, options, monkeypatch):
    forged(place, value, folder, options, monkeypatch)
    write(folder / "c.parquet", 40, 4)
    with pytest.raises(DataError, match=r"[ab]\.parquet row group \d has .* by its footer, and .* by the cache"):
        make_dataset(str(folder), columns=["id"], **options)["id"]


def compact(table: GrowingDelta) -> None:
    table.source().optimize.compact()


def delete_a_row(table: GrowingDelta) -> None:
    table.source().delete("id = 1")
    table.alive.remove(1)


@pytest.mark.parametrize("rewrite", [compact, delete_a_row])
def test_excluded_rows_stay_out_when_a_table_writes_them_again(rewrite, tmp_path):
    table = GrowingDelta(tmp_path / "table")
    dataset = make_dataset(table.source(), cache=False, filters=[("id", "!=", 5)])
    dataset = dataset.exclude([dataset["id"].tolist().index(3)]).map(marked)
    dataset = dataset.exclude([dataset["id"].tolist().index(25)])
    loader = make_loader(dataset, 4)
    left = {*range(40)} - {3, 5, 25}
    assert sorted(ended(loader)) == sorted(left)
    for _ in range(2):
        rewrite(table) if 1 in table.alive else compact(table)
        table.append(4)
        assert loader.dataset.refresh()
        assert sorted(ended(loader)) == sorted(table.alive - {3, 5, 25})


def with_nulls(count: int) -> pa.Table:
    """Return rows of which every third has a null, as rows that are excluded, deleted or filtered out may have."""
    ids = range(count)
    return pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array([row if row % 3 else None for row in ids])})


@pytest.mark.parametrize("how", ["filters", "row_filter", "deletion vector"])
def test_rows_are_found_beside_rows_with_nulls_that_are_not_read(how, tmp_path):
    from iceberg_histories import catalog_in

    table = GrowingDelta(tmp_path / "table", 0, 0)
    if how == "row_filter":
        catalog = catalog_in(tmp_path / "lake")
        catalog.create_table("space.table", with_nulls(40).schema).append(with_nulls(40))
    else:
        write_deltalake(str(table.folder), with_nulls(40), mode="overwrite", schema_mode="overwrite")
    [(name, add)] = table._adds().items() if how == "deletion vector" else [("", {})]

    def delete_nulls() -> None:
        vector = deletion_vector(table.folder, range(0, 40, 3), "i")
        remove = {"path": name, "deletionTimestamp": 1, "dataChange": True}
        table._commit([{"remove": remove}, {"add": {**add, "deletionVector": vector}}])

    def loader() -> Any:
        as_a_new_process()
        if how == "row_filter":
            return make_loader(catalog.load_table("space.table").scan(row_filter="x is not null"), 4, cache=False)
        return make_loader(table.source(), 4, cache=False, filters=[("x", ">", -1)] if how == "filters" else None)

    if how == "deletion vector":
        delete_nulls()
    seen, state = read([loader()], 4, None)
    if how == "row_filter":
        catalog.load_table("space.table").delete("id = 1")
    elif how == "filters":
        table.source().delete("id = 1")
    else:
        rows = with_nulls(40).to_pylist()
        kept = pa.Table.from_pylist([row for row in rows if row["x"] is not None and row["id"] != 1])
        write_deltalake(str(table.folder), kept, mode="overwrite")
    resumed = loader()
    resumed.load_state_dict(state, on_change="continue")
    left = {row for row in range(40) if row % 3}
    assert sorted([*seen, *ended(resumed)]) == sorted(left - {1} | {*seen} & {1})


def test_excluded_rows_are_found_beside_rows_with_nulls_that_are_filtered_out(tmp_path):
    write_deltalake(path := f"{tmp_path}/table", with_nulls(40))
    dataset = make_dataset(DeltaTable(path), cache=False, filters=[("x", ">", -1)])
    dataset = dataset.exclude([dataset["id"].tolist().index(4)])
    DeltaTable(path).delete("id = 1")
    assert dataset.refresh()
    assert sorted(dataset.newest["id"].tolist()) == [row for row in range(40) if row % 3 and row not in (1, 4)]


def test_excluded_rows_stay_out_when_their_file_comes_back(folder, tmp_path, options):
    dataset = make_dataset(str(folder), **options).exclude([3, 25])
    (folder / "a.parquet").rename(tmp_path / "a.parquet")
    assert dataset.refresh()
    assert sorted(dataset.newest["id"].tolist()) == sorted({*range(20, 40)} - {25})
    (tmp_path / "a.parquet").rename(folder / "a.parquet")
    assert dataset.refresh()
    assert sorted(dataset.newest["id"].tolist()) == sorted({*range(40)} - {3, 25})


def test_excluded_rows_that_may_be_anywhere_are_told(tmp_path, folder, caplog):
    table = GrowingDelta(tmp_path / "table")
    dataset = make_dataset(table.source(), cache=False).exclude([3])
    table.source().optimize.compact()
    table.source().vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(
        ConfigError, match=r"So it is not known which rows exclude leaves out now: open the table again"
    ):
        dataset.refresh()
    dataset = make_dataset(str(folder), cache=False).exclude([3])
    (folder / "a.parquet").rename(folder / "z.parquet")
    assert dataset.refresh()
    assert "a.parquet had excluded rows and is gone or replaced: exclude them again" in caplog.text


def labelled(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"id": pa.array(ids, pa.int64()), "label": pa.array([row % 2 for row in ids], pa.int64())})


def test_rows_that_were_written_again_are_found_by_renamed_columns(tmp_path):
    from iceberg_histories import catalog_in

    catalog = catalog_in(tmp_path / "table")
    table = catalog.create_table("space.table", labelled(0, 1).schema)
    table.append(labelled(0, 40))
    seen, state = begun(catalog.load_table("space.table"), cache=False)
    with table.update_schema() as update:
        update.rename_column("id", "num")
    catalog.load_table("space.table").delete("num = 1")
    loader = make_loader(catalog.load_table("space.table"), 4, cache=False)
    loader.load_state_dict(state, on_change="continue")
    rest = [row for batch in loader for row in batch["num"].tolist()]
    assert sorted([*seen, *rest]) == sorted({*range(40)} - {1} | {*seen} & {1})
    table = catalog.load_table("space.table")
    with table.update_schema() as update:
        update.delete_column("num")
    with table.update_schema() as update:
        update.add_column("num", StringType())
    catalog.load_table("space.table").delete("label = 1")
    loader = make_loader(catalog.load_table("space.table"), 4, cache=False)
    with pytest.raises(ConfigError, match=r"columns were dropped and added since, so equal rows cannot be found"):
        loader.load_state_dict(state, on_change="continue")


def test_rows_that_were_written_again_are_found_beside_rows_that_map_cannot_make(tmp_path):
    table = GrowingDelta(tmp_path / "table")

    def fails(batch: dict[str, Any]) -> dict[str, Any]:
        if 19 in numbers(batch):
            raise ValueError("19")
        return {"id": batch["id"]}

    def loader() -> Any:
        return make_loader(make_dataset(table.source(), cache=False).map(fails), 4, on_error="skip")

    seen, state = read([loader()], 6, None)  # of both files
    table.source().delete("id = 1")
    as_a_new_process()
    resumed = loader()
    resumed.load_state_dict(state, on_change="continue")
    rest = ended(resumed)
    assert set(seen + rest) - {1} == {*range(40)} - {1, 19}
    assert not set(seen) & set(rest)


def test_rows_of_all_types_are_found_when_a_table_writes_them_again(tmp_path):
    path, long = f"{tmp_path}/table", "the same beginning of more than eight bytes"
    texts = ["", None, "a", "a\0", "b" * 8, "b" * 9, long, f"{long}, and another end"]
    columns = {
        "id": pa.array(range(32), pa.int64()),
        "text": [texts[row % 8] for row in range(32)],
        "data": pa.array([None if row % 5 == 0 else bytes([row % 3]) * (row % 9) for row in range(32)], pa.binary()),
        "x": pa.array([None if row % 7 == 0 else row / 3 for row in range(32)], pa.float32()),
        "list": pa.array([None if row % 6 == 0 else [row % 2] * (row % 4) for row in range(32)], pa.list_(pa.int32())),
        "nested": [[{"a": row % 3, "b": texts[row % 8]}] * (row % 3) for row in range(32)],
        "flag": [row % 3 == 0 for row in range(32)],
    }
    table = pa.table(columns)
    for first in (0, 16):
        write_deltalake(path, table.slice(first, 16), mode="append")
    twice = table.drop_columns("id").append_column("id", pa.array([0] * 32, pa.int64())).select(table.column_names)
    write_deltalake(path, twice, mode="append")
    seen, state = begun(DeltaTable(path), 9, cache=False)
    DeltaTable(path).optimize.compact()
    loader = make_loader(DeltaTable(path), 4, cache=False)
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + ended(loader)) == sorted([*range(32), *[0] * 32])


def test_rows_are_found_whose_column_was_widened(tmp_path):
    from iceberg_histories import catalog_in

    catalog = catalog_in(tmp_path / "table")
    rows = pa.table(
        {"id": pa.array(range(40), pa.int32()), "x": pa.array([row / 3 for row in range(40)], pa.float32())}
    )
    catalog.create_table("space.table", rows.schema).append(rows)
    seen, state = begun(catalog.load_table("space.table"), cache=False)
    with catalog.load_table("space.table").update_schema() as update:
        update.update_column("id", LongType())
        update.update_column("x", DoubleType())
    catalog.load_table("space.table").delete("id = 1")
    loader = make_loader(catalog.load_table("space.table"), 4, cache=False)
    loader.load_state_dict(state, on_change="continue")
    assert sorted({*seen, *(rest := ended(loader))} - {1}) == [0, *range(2, 40)]
    assert len({*seen} & {*rest}) == 0


def test_damaged_numbers_of_rows_that_were_written_again_are_made_again(tmp_path, options, monkeypatch):
    table = GrowingDelta(tmp_path / "table")
    seen, state = begun(table.source(), **options)
    table.source().optimize.compact()
    for wrong in ([-2, -1], [3, 2], [400]):
        with monkeypatch.context() as patch, suppress(ValueError, IndexError):
            found = zlib.compress(np.diff(wrong, prepend=0).astype("<i8").tobytes())
            patch.setattr("dataload.moved_rows._found", lambda *_, found=found: found)
            make_loader(table.source(), 4, **options).load_state_dict(state, on_change="continue")
    loader = make_loader(table.source(), 4, **options)
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + ended(loader)) == list(range(40))


def test_versions_of_tables_with_long_urls_are_in_the_state(tmp_path):
    tables = [GrowingDelta(tmp_path / f"{number}{'x' * 200}", 100 * number, 20) for number in range(2)]

    def loader() -> Any:
        as_a_new_process()
        return make_loader(mix([make_dataset(each.source(), cache=False) for each in tables]), 4)

    seen, state = read([loader()], 4, None)
    assert state["tables"] == ["1", "1"]
    for each in tables:
        each.source().delete("id % 100 = 1")
    resumed = loader()
    resumed.load_state_dict(state, on_change="continue")
    rest = ended(resumed)
    assert sorted(seen + rest) == sorted({*range(20), *range(100, 120)} - {1, 101} | {*seen})
    with pytest.raises(ConfigError, match=f"delta\\+{tables[0].folder}@1, .*and this loader reads"):
        loader().load_state_dict(state)


@pytest.mark.variants
@pytest.mark.parametrize("choice", ["continue", "next_epoch"])
def test_a_mixture_of_many_tables_goes_on_without_the_cache_of_its_run(choice, tmp_path):
    table = GrowingIceberg(tmp_path / "table", 0, 4)

    def loader() -> Any:
        as_a_new_process()
        return make_loader(mix({f"s{each}": make_dataset(table.source(), cache=False) for each in range(50)}), 4)

    seen, state = read([loader()], 3, None)
    assert len(state["tables"]) == 50
    table.append(1)
    resumed = loader()
    resumed.load_state_dict(state, on_change=choice)
    rest = ended(resumed)
    assert Counter(seen + rest) == dict.fromkeys(range(4 + (choice == "continue")), 50)


def many_tables(table: GrowingIceberg, cache: Any) -> Any:
    as_a_new_process()
    dataset = make_dataset(table.source(), cache=cache)
    return make_loader(mix({f"s{each}": dataset for each in range(50)}), 4)


@pytest.mark.slow
def test_a_mixture_of_many_tables_changes_often_within_an_epoch(tmp_path):
    """The cache stands for versions that a state cannot hold, but for those of which rows are compared."""
    from dataload.cache.config import CacheConfig

    table, cache = GrowingIceberg(tmp_path / "table", 0, 4), CacheConfig(cache_dir=str(tmp_path / "cache"))
    seen, state = read([many_tables(table, cache)], 3, None)
    for number in range(3):
        table.append(1)
        resumed = many_tables(table, cache)
        resumed.load_state_dict(state, on_change="continue")
        rows, state = read([resumed], 3, state)
        seen += rows
        assert ["tables" in each for each in state["earlier"]] == number * [False] + [True]
    had = Counter(seen)
    table.source().delete("id = 1")
    resumed = many_tables(table, cache)
    resumed.load_state_dict(state, on_change="continue")
    rows, state = read([resumed], 3, state)
    rest = many_tables(table, cache)
    rest.load_state_dict(state, on_change="continue")
    assert Counter(seen + rows + ended(rest)) == dict.fromkeys(table.alive - {1}, 50) | {1: had[1]}


@pytest.mark.slow
def test_ranks_on_other_hosts_have_equal_states_of_many_tables(tmp_path):
    """The first host has the cache of the run. The second opens its tables, and the third has a checkpoint."""
    from dataload.cache.config import CacheConfig

    table = GrowingIceberg(tmp_path / "table", 0, 4)
    caches = [CacheConfig(cache_dir=str(tmp_path / f"host {number}")) for number in range(3)]
    _, state = read([many_tables(table, caches[0])], 3, None)
    known: dict[str, str] = {}
    for number, hosts in enumerate((2, 3, 3)):
        table.append(1)
        states = []
        for cache in caches[:hosts]:
            resumed = many_tables(table, cache)
            inventory_store.learn(known if number == 1 and cache is caches[2] else {})
            resumed.load_state_dict(state, on_change="continue")
            states.append(read([resumed], 3, state)[1])
            known = resumed.inventories()
        state = states[0]
        assert states == [state] * hosts
    assert ["tables" in each for each in state["earlier"]] == [False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("why", ["without a cache", "rewritten rows"])
def test_a_state_leaves_out_no_version_that_the_epoch_needs(why, tmp_path):
    from dataload.cache.config import CacheConfig

    cache = False if why == "without a cache" else CacheConfig(cache_dir=str(tmp_path / "cache"))
    table = GrowingIceberg(tmp_path / "table", 0, 4)
    _, state = read([many_tables(table, cache)], 3, None)
    table.append(1) if why == "without a cache" else table.source().delete("id = 1")
    resumed = many_tables(table, cache)
    resumed.load_state_dict(state, on_change="continue")
    _, state = read([resumed], 3, state)
    table.append(1)
    with pytest.raises(ConfigError, match=r"the data has changed 2 times within one epoch, more than a state holds"):
        many_tables(table, cache).load_state_dict(state, on_change="continue")


# fit


def train(source: Any, folder: Path, steps: int, rows: list[int], **options: Any) -> None:
    """Train on an epoch, or up to an error after some steps."""
    taken = iter(range(steps))

    def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if next(taken, None) is None:
            raise RuntimeError("enough")
        rows.extend(numbers(batch))
        return net(batch["id"][:, None].float()).mean()

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    how = {"checkpoint_dir": folder, "checkpoint_every": 1, "precision": "fp32", "progress": False}
    fit(model, optimizer, make_loader(source, 4, cache=False), loss, epochs=1, **how, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_fit_goes_on_with_new_data_without_a_cache(kind, tmp_path):
    data, rows = KINDS[kind](tmp_path / "data"), list[int]()
    for count in (3, 2):
        with pytest.raises(RuntimeError, match="enough"):
            train(data.source(), tmp_path / "run", count, rows, on_change="continue")
        as_a_new_process()
        data.append(10)
    with pytest.raises(ConfigError, match=r"was saved within an epoch of .*choose on_change="):
        train(data.source(), tmp_path / "run", 99, rows)
    as_a_new_process()
    train(data.source(), tmp_path / "run", 99, rows, on_change="continue")
    assert sorted(rows) == list(range(60))


def test_fit_ends_the_epoch_of_a_checkpoint_on_its_data(tmp_path):
    data, rows = GrowingFolder(tmp_path / "data"), list[int]()
    with pytest.raises(RuntimeError, match="enough"):
        train(data.source(), tmp_path / "run", 3, rows)
    as_a_new_process()
    data.append(10)
    train(data.source(), tmp_path / "run", 99, rows, on_change="next_epoch")
    assert sorted(rows) == list(range(40))
    with pytest.raises(ConfigError, match="on_change='never'"):
        train(data.source(), tmp_path / "run", 99, rows, on_change="never")
