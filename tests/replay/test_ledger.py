"""The ledger of a run: small, whole after any kill, without credentials, and sealed."""

from __future__ import annotations

import copy
import fcntl
import json
import pickle
import resource
from importlib.metadata import PackageNotFoundError
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import World, fit, make_dataset, make_loader
from dataload.catalog.recipe import ranges, rows_as_json, rows_of
from dataload.dataset import Dataset
from dataload.errors import ConfigError, NonFiniteLoss
from dataload.loader import run_record
from dataload.replay import Run
from dataload.replay.rebuild import loader_of
from dataload.samplers.rank_sampler import RankSampler
from dataload.telemetry import run_ledger
from dataload.telemetry.run_ledger import FILE, read_ledger

ROWS = 120


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    pq.write_table(pa.table({"id": range(ROWS)}), tmp_path / "rows.parquet", row_group_size=10)
    return make_dataset(tmp_path / "rows.parquet", cache=False)


def again(folder: Path) -> Run:
    return Run(folder, lambda record, data: loader_of(record, {"cache": False}, data))


def loop(dataset: Dataset, folder: Path, batches: int | None = None, state: Any = None, **how: Any) -> Any:
    """Take some batches of a loader. Return its state."""
    loader = make_loader(dataset, 10, stats_dir=folder, world=World(0, 1), **how)
    if state is not None:
        loader.load_state_dict(state)
    iterator = iter(loader)
    list(islice(iterator, batches))
    iterator.close()
    return loader.state_dict()


@pytest.mark.parametrize("restarts", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_restart_takes_65_bytes(dataset: Dataset, tmp_path: Path, restarts: int) -> None:
    loader = make_loader(dataset, 10, stats_dir=tmp_path / "run", world=World(0, 1), num_threads=0)
    for restart in range(restarts):
        loader.set_epoch(restart)
        iterator = iter(loader)
        next(iterator)
        iterator.close()
    lines = (tmp_path / "run" / FILE).read_bytes().splitlines(keepends=True)
    assert len(read_ledger(tmp_path / "run")) == restarts
    assert sum(map(len, lines[1:])) + len(lines[0]) * restarts / 1000 <= (restarts << 16) / 1000


def test_a_restart_of_a_training_takes_two_short_lines_and_a_seal(dataset: Dataset, tmp_path: Path) -> None:
    """Each ends with an error, after two checkpoints."""
    model, taken = torch.nn.Linear(1, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)

    def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal taken
        taken += 1
        return model(batch["id"].float()[:, None]).mean() * (float("nan") if taken % 4 == 0 else 1.0)

    restarts = 12
    for _ in range(restarts):
        loader = make_loader(dataset, 3, world=World(0, 1))
        with pytest.raises(NonFiniteLoss):
            fit(
                model,
                optimizer,
                loader,
                loss_fn,
                epochs=100,
                checkpoint_dir=tmp_path,
                checkpoint_every=2,
                progress=False,
            )
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    assert len(read_ledger(tmp_path)) >= restarts
    assert sum(map(len, lines[1:])) <= 50 * restarts  # numbers are short here
    assert again(tmp_path).verify()[2:] == ([], [])


def test_loops_inside_others_keep_their_seals(dataset: Dataset, tmp_path: Path) -> None:
    first = iter(make_loader(dataset, 10, stats_dir=tmp_path, world=World(0, 1)))
    next(first)
    inner = iter(make_loader(dataset, 7, seed=1, stats_dir=tmp_path, world=World(0, 1)))
    next(inner)
    list(make_loader(dataset, 8, seed=2, stats_dir=tmp_path, world=World(0, 1)))
    list(first)
    inner.close()
    assert again(tmp_path).verify() == (2 * ROWS + 7, 3, [], [])
    assert [start.reached for start in read_ledger(tmp_path)] == [ROWS, 7, ROWS]


def test_a_long_ledger_names_no_more_replaced_rows(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check(batch: dict[str, Any]) -> dict[str, Any]:
        if (batch["id"] % 3 == 0).any():
            raise ValueError("bad")
        return batch

    loader = make_loader(dataset, 10, stats_dir=tmp_path, world=World(0, 1), transform=check, on_error="skip")
    list(loader)
    most = (tmp_path / FILE).stat().st_size
    monkeypatch.setattr(run_ledger, "MOST_BYTES", most)
    for _ in range(2):
        list(loader)
    assert (tmp_path / FILE).stat().st_size < most + 500
    assert caplog.text.count("names no more rows that on_error replaces") == 2  # once for each loop
    assert again(tmp_path).verify()[1:] == (3, [], [])


def test_a_ledger_that_is_cut_at_any_byte_is_read_and_goes_on(dataset: Dataset, tmp_path: Path) -> None:
    state = loop(dataset, tmp_path / "run", 2)
    state = loop(dataset, tmp_path / "run", 2, state, seed=3)
    whole = (tmp_path / "run" / FILE).read_bytes()
    first = whole.index(b"\n")
    starts = len(read_ledger(tmp_path / "run"))
    for size in range(len(whole)):
        folder = tmp_path / f"cut-{size % 7}"
        folder.mkdir(exist_ok=True)
        (folder / FILE).write_bytes(whole[:size])
        if size < first:
            with pytest.raises(ConfigError, match="no start of a loop"):
                read_ledger(folder)
        else:
            assert 1 <= len(read_ledger(folder)) <= starts
        if size % 64 == 0 or size >= len(whole) - 2:
            loop(dataset, folder, 1, state, seed=4)
            last = read_ledger(folder)[-1]
            assert last.record["order"]["seed"] == 0  # that of the epoch of the state
            assert (last.epoch, last.cursor) == (0, 40)
            assert last.record["ranks"] == 1
            assert again(folder).verify()[2] == []


def test_the_ledger_has_no_credentials(bucket: Any, dataset_of: Any, tmp_path: Path) -> None:
    url, options = dataset_of([[8, 8]]), bucket.options
    loop(make_dataset(url, storage_options=options, cache=False), tmp_path / "run", 1)
    text = (tmp_path / "run" / FILE).read_text()
    assert url in text
    assert not [value for value in _texts(options) if value in text]


def _texts(options: Any) -> list[str]:
    if isinstance(options, dict):
        return [text for value in options.values() for text in _texts(value)]
    return [str(options)] if options else []


def test_another_version_or_world_is_a_line_of_what_changed(dataset: Dataset, tmp_path: Path) -> None:
    state = loop(dataset, tmp_path / "run", 3)
    for rank in range(2):
        loader = make_loader(dataset, 5, stats_dir=tmp_path / "run", world=World(rank, 2))
        loader.load_state_dict(state)
        list(loader)
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert [line if isinstance(line, dict) else line[0] for line in lines[1:]] == [
        30,
        {"batch_size": 5, "ranks": 2, "cursor": 30},
        ROWS - 30,
    ]


def test_replaced_rows_are_named(dataset: Dataset, tmp_path: Path) -> None:
    def check(batch: dict[str, Any]) -> dict[str, Any]:
        if 17 in batch["id"]:
            raise ValueError("bad")
        return batch

    for rank in range(2):
        loader = make_loader(
            dataset, 5, stats_dir=tmp_path / "run", world=World(rank, 2), transform=check, on_error="skip"
        )
        list(loader)
    skipped = [start.skipped for start in read_ledger(tmp_path / "run")]
    step = next(number for number in range(12) if any(17 in rows for rows in loader.rows_at(0, number)))
    rank = next(rank for rank, rows in enumerate(loader.rows_at(0, step)) if 17 in rows)
    assert skipped == [{rank: [17]}]
    assert again(tmp_path / "run").verify()[2] == []


@pytest.mark.parametrize("tokens", [False, True])
def test_verify_finds_one_changed_row(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: bool
) -> None:
    size: dict[str, Any] = {"batch_tokens": 600, "length": "id"} if tokens else {"batch_size": 10}

    def epoch(folder: Path) -> list[str]:
        list(make_loader(dataset, **size, stats_dir=folder, world=World(0, 1)))
        return again(folder).verify()[2]

    assert epoch(tmp_path / "run") == []
    runs = RankSampler.runs

    def changed(self: Any, *place: Any) -> Any:
        for rows, cursor, step in runs(self, *place):
            yield np.where(rows == 17, 18, rows), cursor, step

    with monkeypatch.context() as patch:
        patch.setattr(RankSampler, "runs", changed)
        list(make_loader(dataset, **size, stats_dir=tmp_path / "run", world=World(0, 1)))
    [difference] = again(tmp_path / "run").verify()[2]
    assert "the rows up to row" in difference
    # and a changed line
    path = tmp_path / "other" / FILE
    assert epoch(tmp_path / "other") == []
    path.write_text(path.read_text().replace('"seed":0', '"seed":1'))
    assert again(tmp_path / "other").verify()[2] != []


def test_a_folder_without_a_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the stats_dir of make_loader"):
        read_ledger(tmp_path)


def test_a_folder_that_cannot_be_written_ends_no_loop(
    dataset: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).mkdir()
    assert loop(dataset, tmp_path / "run")["epoch"] == 1
    assert "the ledger of the run ends here" in caplog.text


def test_numbers_of_numpy_are_recorded_as_plain_ones(dataset: Dataset, tmp_path: Path) -> None:
    numbers = make_dataset(tmp_path / "rows.parquet", cache=False, null_masks=np.True_)  # type: ignore[arg-type]
    part = numbers.split([0.5, 0.5], seed=np.int64(3))[0]  # type: ignore[arg-type]
    loop(part, tmp_path / "run")
    assert again(tmp_path / "run").verify()[2] == []


def test_a_missing_package_or_any_failure_ends_no_loop(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(run_record, "version", version)
        run_record._versions.cache_clear()
        loop(dataset, tmp_path / "run")
    run_record._versions.cache_clear()
    assert read_ledger(tmp_path / "run")[0].record["versions"].keys() == {"python"}
    assert not caplog.records
    monkeypatch.setattr(run_record, "plain", lambda _: object())
    assert loop(dataset, tmp_path / "other")["epoch"] == 1
    assert caplog.text.count("the ledger of the run ends here") == 1


def test_a_lock_that_another_process_keeps_ends_the_ledger_and_no_loop(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_ledger, "LOCK_SECONDS", 0)
    with (tmp_path / FILE).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert loop(dataset, tmp_path)["epoch"] == 1
    assert caplog.text.count("the ledger of the run ends here") == 1


def test_a_line_that_the_disk_cut_off_ends_the_ledger(
    dataset: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop(dataset, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    loader = make_loader(dataset, 10, stats_dir=tmp_path, world=World(0, 1), num_threads=0)
    loader.set_epoch(1)
    iterator = iter(loader)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / FILE).stat().st_size + 10, hard))
    try:
        next(iterator)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    list(iterator)
    assert "a line was cut off" in caplog.text
    assert len(read_ledger(tmp_path)) == 1
    assert again(tmp_path).verify()[1:] == (1, [], [])


def test_a_loader_is_pickled_and_copied_after_a_loop(dataset: Dataset, tmp_path: Path) -> None:
    loader = make_loader(dataset, 10, stats_dir=tmp_path / "run", world=World(0, 1), num_threads=0)
    list(loader)
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert len(list(other)) == ROWS // 10
    assert again(tmp_path / "run").verify()[1:] == (3, [], [])


def test_the_text_of_rows_needs_no_sort_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sort", "unique"):
        monkeypatch.setattr(np, name, None)
    mask = np.zeros(1000, bool)
    mask[[3, 4, 5, 9, 999]] = True
    assert rows_as_json(mask, 1000) == "3-5, 9, 999"
    assert rows_as_json(np.ones(5, bool), 5) == "0-4"
    monkeypatch.setattr(np, "flatnonzero", None)  # nor the rows of one with many borders
    assert rows_as_json(np.arange(10_000) % 2 == 0, 10_000) == {"unrecorded": "5,000 rows"}


def test_rows_that_are_recorded_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataload.catalog.recipe.MOST_ROWS", 10)
    for rows in (np.arange(11), np.ones(11, bool)):
        assert rows_as_json(rows, 11) == {"unrecorded": "11 rows"}
        assert rows_of(rows_as_json(rows[:10], 11)).tolist() == list(range(10))
    for text in ("0-10", "0-5, 3-8", "9-0, 0-10", f"0-{10**30}"):
        with pytest.raises((ValueError, OverflowError)):
            rows_of(text)


def test_ranges_are_ascending() -> None:
    assert ranges([7, 3, -1, 4, 3, 0]) == "-1-0, 3-4, 7"
    assert ranges([]) == ""
    assert ranges([5]) == "5"
