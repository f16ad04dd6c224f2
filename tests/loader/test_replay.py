"""`rows_at` and `batch_at` against what loops of random runs got."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from seeds import seeds

from dataload import World, make_dataset, make_loader, mix
from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.replay import Run
from dataload.replay.rebuild import loader_of

SIZES = {"a": [60, 7, 33], "b": [41, 41], "c": [25]}  # rows of the row groups of each file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with an "id" that differs in all files, "tokens" and their number."""
    path: Path = tmp_path_factory.mktemp("replay")
    rng, first = np.random.default_rng(4), 0
    for name, sizes in SIZES.items():
        rows = sum(sizes)
        lengths = rng.integers(1, 30, rows)
        tokens = pa.array([np.arange(length, dtype=np.int32) for length in lengths], pa.list_(pa.int32()))
        table = pa.table({"id": range(first, first + rows), "tokens": tokens, "n_tokens": lengths})
        with pq.ParquetWriter(path / f"{name}.parquet", table.schema) as writer:
            for start, size in zip(np.cumsum([0, *sizes[:-1]]).tolist(), sizes, strict=True):
                writer.write_table(table.slice(start, size))
        first += rows
    return path


def twice(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "id": batch["id"] * 2}


def noisy(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Draw from each generator that belongs to the batch."""
    return {**batch, "noise": rng.random(3), "torch": torch.rand(3)}


def _some_rows(dataset: Dataset, rng: np.random.Generator) -> Dataset:
    rows = len(dataset)
    ways: list[Callable[[], Dataset]] = [
        lambda: dataset,
        lambda: dataset.filter([("n_tokens", ">", 8)]),
        lambda: dataset.select(rng.random(rows) < 0.6),
        lambda: dataset.exclude(rng.integers(0, rows, 5)),
        lambda: dataset.split([0.6, 0.4], seed=3)[0],
    ]
    return ways[rng.integers(len(ways))]()


def _source(folder: Path, rng: np.random.Generator) -> Any:
    """Return a random dataset, or a mixture of such."""
    packs, maps, splits = (bool(rng.random() < 0.4) for _ in range(3))

    def one(name: str) -> Dataset:
        found = _some_rows(make_dataset(folder / f"{name}.parquet", cache=False), rng)
        found = found.map(twice, columns=["id"]) if maps else found
        return found.pack(32, split=splits) if packs else found

    if rng.random() < 0.5:
        return one("a")
    sources = {name: one(name) for name in SIZES}
    schedule = {0: [3, 1, 1], 40: [1, 1, 2]} if rng.random() < 0.5 else None
    stop = ["first_exhausted", "all_exhausted"][rng.integers(2)]
    weights = None if schedule else [5, 3, 2]
    batching = "homogeneous" if rng.random() < 0.2 else "mixed"
    return mix(sources, weights, schedule=schedule, ramp=schedule is not None and maps, stop=stop, batching=batching)


def _loaders(folder: Path, rng: np.random.Generator) -> Callable[..., Loader]:
    """Return a function that makes the loader of a rank, among some ranks, of a random run."""
    source = _source(folder, rng)
    is_even = isinstance(source, Dataset) or source.order["batching"] == "mixed"
    by_tokens = is_even and "n_tokens" in source.schema.names and rng.random() < 0.4
    how: dict[str, Any] = {
        "shuffle": ["block", "block", "full", False][rng.integers(4)],
        "seed": int(rng.integers(100)),
        "drop_last": bool(rng.random() < 0.3),
        "window": [None, 1, 2][rng.integers(3)],
        "row_ids": True,
        "transform": noisy,
        "num_threads": [None, 0, 2][rng.integers(3)],
    }

    def make(rank: int, ranks: int, stats_dir: Path | None = None) -> Loader:
        rows = 5 if is_even and ranks == 2 else 6 // ranks  # Those of a homogeneous global batch stay the same.
        size = {"batch_tokens": 60, "length": "n_tokens"} if by_tokens else {"batch_size": rows}
        return make_loader(source, **size, **how, world=World(rank, ranks), stats_dir=stats_dir)

    return make


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        return type(found) is type(expected) and found.tolist() == expected.tolist() and found.dtype == expected.dtype
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_equal(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return bool(found == expected)


def _check_run(make: Callable[..., Loader], run: Path, rng: np.random.Generator, change: Callable[[], str]) -> None:
    """Check a run that is killed, and goes on on other ranks, perhaps from before the kill.

    Args:
        make: Returns the loader of a rank.
        run: The folder of its ledger.
        rng: Draws how it goes on.
        change: Changes the data between two loops. Returns how to go on.
    """
    state, on_change = None, ""
    seen: list[list[list[int]]] = []  # the rows of each rank, by step
    for _ in range(5):
        ranks = int(rng.choice([1, 2, 3, 6]))
        loaders, fresh = [make(rank, ranks, run) for rank in range(ranks)], make(0, ranks)
        if state is not None:
            for loader in (*loaders, fresh):
                loader.load_state_dict(state, on_change)
        epoch, first = fresh.rank_sampler.epoch, _first_step(fresh)
        steps, lost = [None, 1, 4][rng.integers(3)], int(rng.integers(3))
        iterators = [iter(loader) for loader in loaders]
        got = [list(islice(iterator, steps)) for iterator in iterators]
        state = loaders[-1].state_dict()
        for number, batches in enumerate(zip(*got, strict=True)):
            rows = fresh.rows_at(epoch, first + number)
            seen.append([each.tolist() for each in rows])
            assert seen[-1] == [batch["row_id"].tolist() for batch in batches]
            again = [fresh.batch_at(epoch, first + number, rank) for rank in range(ranks)]
            assert all(map(_equal, again, batches))
        if steps is None:
            with pytest.raises(IndexError):
                fresh.rows_at(epoch, first + len(got[0]))
        for iterator in iterators:
            list(islice(iterator, lost))
            iterator.close()
        on_change = change()
    found = Run(run, lambda record, data: loader_of(record, {"cache": False}, data))
    for number, rows in enumerate(seen, 1):
        [batch] = found.step(number).batches
        assert [each.tolist() for each in batch.rows] == rows
    assert found.verify()[2:] == ([], [])


@pytest.mark.variants
@pytest.mark.parametrize("seed", seeds(3, 200))
def test_a_run_is_read_again_by_formula(folder: Path, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    _check_run(_loaders(folder, rng), tmp_path / "run", rng, lambda: "error")


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(3, 200))
def test_a_run_whose_data_changes_is_read_again_by_formula(folder: Path, tmp_path: Path, seed: int) -> None:
    """Each loop is read by the ledger alone, although files of earlier ones are gone."""
    rng, data = np.random.default_rng(seed), tmp_path / "data"
    for name in SIZES:
        (data / name).mkdir(parents=True)
        shutil.copy(folder / f"{name}.parquet", data / name / "0.parquet")
    kinds = rng.integers(4), rng.integers(2), rng.integers(3)
    how: dict[str, Any] = {"seed": int(rng.integers(100)), "window": [None, 1, 2][rng.integers(3)], "row_ids": True}
    how |= {"shuffle": ["block", "full", False][rng.integers(3)], "transform": noisy}

    def one(name: str) -> Dataset:
        found = make_dataset(data / name, cache=False)
        found = found.filter([("n_tokens", ">", 8)]) if kinds[0] == 0 else found
        return found.map(twice, columns=["id"]) if kinds[1] else found

    def make(rank: int, ranks: int, stats_dir: Path | None = None) -> Loader:
        source: Any = one("a")
        if kinds[2] == 0:
            source = mix({name: one(name) for name in SIZES}, [5, 3, 2], stop="all_exhausted")
        elif kinds[2] == 1:
            source = mix({name: one(name) for name in SIZES})
        return make_loader(source, 6 // ranks, **how, world=World(rank, ranks), stats_dir=stats_dir)

    def change() -> str:
        folder_of, number = data / str(rng.choice(list(SIZES))), int(rng.integers(1_000_000))
        files, way = sorted(folder_of.iterdir()), rng.integers(4)
        if way == 0 and len(files) > 1:
            files[0].unlink()
        elif way < 3:
            table = pq.read_table(files[-1]).slice(0, 30)
            pq.write_table(
                table.set_column(0, "id", pa.array(range(number, number + len(table)))),
                folder_of / f"{number}.parquet",
                row_group_size=11,
            )
            return str(rng.choice(["continue", "next_epoch"]))
        return "continue"

    _check_run(make, tmp_path / "run", rng, change)


def _first_step(loader: Loader) -> int:
    """Return the number of the step with which the next loop begins."""
    sampler = loader.rank_sampler
    return next(number for number in range(10_000) if _begins(loader, number) >= sampler.cursor)


def _begins(loader: Loader, step: int) -> int:
    try:
        return loader.rank_sampler.at(loader.rank_sampler.epoch, step).cursor
    except ConfigError:  # on other ranks
        return -1
    except IndexError:
        return loader.rank_sampler.num_rows


@pytest.mark.slow
def test_a_batch_of_a_worker_is_made_again(folder: Path) -> None:
    loader = make_loader(folder, 16, transform=noisy, num_workers=1, cache=False, world=World(0, 1))
    assert all(_equal(loader.batch_at(0, number), batch) for number, batch in enumerate(loader))


def test_steps_that_are_not_there_are_errors(folder: Path) -> None:
    loader = make_loader(folder, 16, cache=False, world=World(0, 2))
    assert len(loader.rows_at(5, len(loader) - 1)) == 2
    with pytest.raises(IndexError, match=f"epoch 5 has no step {len(loader)}"):
        loader.rows_at(5, len(loader))
    with pytest.raises(ConfigError, match="rank=2 is not among the 2 ranks"):
        loader.batch_at(5, 0, rank=2)
    other = make_loader(folder, 10, cache=False, world=World(0, 1))
    state = next(iter(other)) and other.state_dict()
    loader.load_state_dict(state)
    assert loader.rows_at(0, 0)[0].tolist() == other.rank_sampler.order.rows(0, range(10, 26)).tolist()
    state["cursor"] = 50
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="step 0 of epoch 0 came before the state was saved"):
        loader.rows_at(0, 0)


def test_later_epochs_have_the_weights_that_are_set(folder: Path) -> None:
    sources = {name: make_dataset(folder / f"{name}.parquet", cache=False) for name in SIZES}
    mixture = mix(sources, [1, 1, 1])
    loader, again = (make_loader(mixture, 8, row_ids=True, world=World(0, 1)) for _ in range(2))
    batches = iter(loader)
    seen = [next(batches)]
    mixture.set_weights([8, 1, 1])
    coming = loader.rows_at(1, 2)[0].tolist()
    assert [rows.tolist() for rows in loader.rows_at(0, 0)] == [seen[0]["row_id"].tolist()]
    list(batches)
    assert coming == [batch["row_id"] for batch in loader][2].tolist() != again.rows_at(0, 2)[0].tolist()


def _epoch(loader: Loader, batches: int | None = None) -> list[list[int]]:
    iterator = iter(loader)
    found = [batch["row_id"].tolist() for batch in islice(iterator, batches)]
    iterator.close()
    return found


def _known(loader: Loader, epoch: int, batches: int) -> list[list[int]]:
    return [loader.rows_at(epoch, number)[0].tolist() for number in range(batches)]


def test_past_epochs_keep_the_weights_that_they_had(folder: Path) -> None:
    sources = {name: make_dataset(folder / f"{name}.parquet", cache=False) for name in SIZES}
    mixture = mix(sources, [1, 1, 1])
    loader = make_loader(mixture, 8, row_ids=True, world=World(0, 1))
    seen = list[list[list[int]]]()
    for weights in ([8, 1, 1], [1, 8, 1], [1, 1, 8]):
        seen.append(_epoch(loader))
        mixture.set_weights(weights)
        assert [_known(loader, epoch, len(rows)) for epoch, rows in enumerate(seen)] == seen
    other = make_loader(mixture, 8, row_ids=True, world=World(0, 1))
    other.load_state_dict(loader.state_dict())
    assert _known(other, 3, 2) == _known(loader, 3, 2)
    mixture.set_weights([1, 2, 3])
    _epoch(other)
    _epoch(other)
    with pytest.raises(ConfigError, match="epoch 1 came before those that this loader has had"):
        other.rows_at(1, 0)


def test_steps_before_a_restored_row_are_unknown(folder: Path) -> None:
    first = make_loader(folder, 10, row_ids=True, cache=False, world=World(0, 1))
    _epoch(first, 4)
    state = {**first.state_dict(), "cursor": 40}
    other = make_loader(folder, 20, row_ids=True, cache=False, world=World(0, 1))
    other.load_state_dict(state)
    for number in range(2):
        with pytest.raises(ConfigError, match=f"step {number} of epoch 0 came before the state was saved"):
            other.rows_at(0, number)
    coming = [other.rows_at(0, number)[0].tolist() for number in range(2, 5)]
    assert coming == _epoch(other)[:3]
    # and when the epoch is over
    assert coming == [other.rows_at(0, number)[0].tolist() for number in range(2, 5)]
    with pytest.raises(ConfigError, match="step 1 of epoch 0 came before the state was saved"):
        other.rows_at(0, 1)


def test_a_restored_offset_holds_when_the_epoch_is_over(folder: Path) -> None:
    first = make_loader(folder, 10, row_ids=True, cache=False, world=World(0, 1))
    _epoch(first)
    state = {**first.state_dict(), "epoch": 0, "cursor": 10}
    loader = make_loader(folder, 32, row_ids=True, seed=7, cache=False, world=World(0, 1))
    loader.load_state_dict(state)
    rows = _epoch(loader)
    assert _known(loader, 0, len(rows)) == rows
    following = _epoch(loader)
    assert _known(loader, 0, len(rows)) == rows
    assert _known(loader, 1, len(following)) == following
    state["epoch"] = 3
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="epoch 1 came before those that this loader has had"):
        loader.rows_at(1, 0)


def test_epochs_of_other_data_are_unknown(folder: Path) -> None:
    data = make_dataset(folder / "a.parquet", cache=False)
    first = make_loader(data, 10, row_ids=True, world=World(0, 1))
    _epoch(first)
    loader = make_loader(data.exclude([3]), 10, row_ids=True, world=World(0, 1))
    loader.load_state_dict(first.state_dict(), on_change="next_epoch")
    with pytest.raises(ConfigError, match="epoch 0 came before those that this loader has had"):
        loader.rows_at(0, 0)
    rows = _epoch(loader)
    assert _known(loader, 1, len(rows)) == rows


def test_the_arguments_of_a_loader_hold_after_the_epoch_of_a_state(folder: Path, tmp_path: Path) -> None:
    first = make_loader(folder, 10, row_ids=True, cache=False, world=World(0, 1))
    _epoch(first, 2)
    state = first.state_dict()
    state["cursor"] = 20
    loader = make_loader(folder, 10, row_ids=True, seed=7, window=1, cache=False, stats_dir=tmp_path, world=World(0, 1))
    loader.load_state_dict(state)
    rest = len(_epoch(loader))
    following = _known(loader, 1, 5)
    run = Run(tmp_path, lambda record, data: loader_of(record, {"cache": False}, data))
    assert [run.step(rest + 1 + number).batches[0].rows[0].tolist() for number in range(5)] == following
