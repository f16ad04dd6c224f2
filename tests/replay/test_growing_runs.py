"""The ledger of a run whose data grew: `dataload rows` makes the dataset of each loop again."""

from __future__ import annotations

import json
import pickle
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deltalake")

from growing import GrowingDelta, GrowingFolder, as_a_new_process
from typer.testing import CliRunner

from dataload import World, make_dataset, make_loader, mix
from dataload.cli.app import app
from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.lineage import calls_as_json
from dataload.loader.loader import Loader
from dataload.telemetry.run_ledger import KEPT


def twice(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "id": batch["id"] * 2}


def chosen(source: Any, **options: Any) -> Dataset:
    """Return the rows of a source but for those with the ids 3, 5 and 25."""
    found = make_dataset(source, columns=["id"], filters=[("id", "!=", 5)], cache=False, **options)
    found = found.exclude([found["id"].tolist().index(3)]).map(twice)
    return found.exclude([found["id"].tolist().index(50)])


def loader_of(data: Any, stats_dir: Path) -> Loader:
    return make_loader(data, 4, row_ids=True, stats_dir=stats_dir, world=World(0, 1))


def taken(loader: Loader, batches: int | None = None) -> list[list[int]]:
    iterator = iter(loader)
    found = [batch["row_id"].tolist() for batch in islice(iterator, batches)]
    iterator.close()
    return found


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what `dataload rows` prints of a step of the run in `tmp_path / "run"`: the ids of its rows, by row."""
    monkeypatch.setenv("DATALOAD_CACHE_DIR", str(tmp_path / "command"))

    def call(step: int) -> tuple[list[int], list[int]]:
        words = ["rows", str(tmp_path / "run"), "--step", str(step), "--show", "--json"]
        as_a_new_process()
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        [batch] = json.loads(done.stdout)["batches"]
        found = batch["ranks"][0]["rows"]
        return [row["row_id"] for row in found], [row["values"]["id"] for row in found]

    return call


def ids(dataset: Any, numbers: list[int]) -> list[int]:
    """Return the ids of rows, before `map`."""
    return [int(dataset["id"][number]) // 2 for number in numbers]


@pytest.mark.parametrize("kept", [True, False])  # the files beside the ledger
@pytest.mark.parametrize("kind", [GrowingDelta, GrowingFolder])
def test_a_loop_that_began_after_a_refresh_is_made_again(kind: Any, kept: bool, tmp_path: Path, rows: Any) -> None:
    data = kind(tmp_path / "data")
    loader = loader_of(chosen(data.source()), tmp_path / "run")
    taken(loader)
    for _ in range(2):
        data.append(4)
        if kind is GrowingDelta:
            data.source().optimize.compact()
        loader.dataset.refresh()
    steps = len(loader)
    batches = taken(loader)
    if kept or kind is GrowingDelta:
        data.append(9)
    if not kept:
        shutil.rmtree(tmp_path / "run" / KEPT)
    assert len(loader.dataset) == 45
    assert [next(iter(call)) for call in calls_as_json(loader.dataset)] == [
        "make_dataset",
        "filter",
        "exclude",
        "map",
        "exclude",
    ]
    first = -(-37 // 4)
    assert steps == len(batches) == 12
    for number in (0, 11):
        assert rows(first + 1 + number) == (batches[number], ids(loader.dataset, batches[number]))


def test_a_mixture_that_was_refreshed_is_made_again(tmp_path: Path, rows: Any) -> None:
    table, folder = GrowingDelta(tmp_path / "table"), GrowingFolder(tmp_path / "folder")
    mixture = mix({"table": chosen(table.source()), "folder": chosen(folder.source())}, num_rows=40)
    table.append(4)
    assert mixture.refresh()
    loader = loader_of(mixture, tmp_path / "run")
    batches = taken(loader)
    table.append(4)
    assert rows(10) == (batches[9], ids(loader.dataset, batches[9]))


@pytest.mark.parametrize("choice", ["next_epoch", "continue"])
@pytest.mark.parametrize("kind", [GrowingDelta, GrowingFolder])
def test_a_loop_that_went_on_after_a_change_is_made_again(kind: Any, choice: Any, tmp_path: Path, rows: Any) -> None:
    data, folder = kind(tmp_path / "data"), tmp_path / "run"
    first = loader_of(chosen(data.source()), folder)
    before = taken(first, 3)
    state = first.state_dict()
    data.append(8)
    loader = loader_of(chosen(data.source()), folder)
    loader.load_state_dict(state, on_change=choice)
    batches = taken(loader, 2)
    dataset = loader.dataset
    data.append(3)
    assert rows(5) == (batches[1], ids(dataset, batches[1]))
    assert rows(2) == (before[1], ids(first.dataset, before[1]))


def test_the_calls_of_a_copy_in_another_process_are_whole(tmp_path: Path) -> None:
    data = GrowingDelta(tmp_path / "data")
    dataset = chosen(data.source())
    mixture = mix({"a": dataset, "b": dataset.select([1, 2])})
    for each in (dataset, *mixture.datasets, dataset.flat_map(twice)):
        len(each)
        copy = pickle.loads(pickle.dumps(each))
        assert calls_as_json(copy) == calls_as_json(each)
        assert calls_as_json(copy)[0] == {"make_dataset": {"columns": ["id"], "source": f"delta+{data.folder}@1"}}
        with pytest.raises(ConfigError):
            copy.refresh()
