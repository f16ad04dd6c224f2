"""Settings, objects and installations that cannot work raise a ConfigError that names the fix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from regression import build, in_order, squared_error

from dataload import CacheConfig, ConfigError, fit, make_dataset, make_loader
from dataload.cache.blocks.reader import Object
from dataload.cli import app
from dataload.train.tensorboard import TensorBoardWriter


@pytest.mark.parametrize("in_flight", [0, -1, 1.5, "8"])
def test_requests_in_flight_are_a_whole_number(in_flight: Any) -> None:
    with pytest.raises(ConfigError, match=r"in_flight=.* must be an integer of at least 1"):
        CacheConfig(in_flight=in_flight)


def test_an_object_needs_a_size() -> None:
    with pytest.raises(ConfigError, match="a/b: the origin does not report its size"):
        Object.of({"name": "a/b", "size": None, "type": "file"})


def test_columns_on_the_command_line_are_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "rows.parquet")
    monkeypatch.setattr(
        sys,
        "argv",
        ["dataload", "head", str(tmp_path / "rows.parquet"), "--columns", "[id", "--cache-dir", str(tmp_path / "c")],
    )
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 2
    assert "--columns=[id: not a JSON list" in capsys.readouterr().err


def test_map_needs_rows_and_values_that_it_can_identify(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "empty.parquet")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "rows.parquet")
    names = np.array(["a", None], object)

    def named(batch: dict[str, Any]) -> dict[str, Any]:
        return {"name": [names[0] for _ in batch["id"]]}

    with pytest.raises(ConfigError, match="the dataset has none"):
        make_dataset(tmp_path / "empty.parquet", cache=False).map(named, version=1)
    with pytest.raises(ConfigError, match="is an array of objects"):
        make_dataset(tmp_path / "rows.parquet", cache=False).map(named)


calls: list[int] = []


def test_map_needs_a_version_for_a_function_that_changes_what_it_refers_to(tmp_path: Path) -> None:
    def counted(batch: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(batch["id"]))
        return {"calls": [len(calls) for _ in batch["id"]]}

    pq.write_table(pa.table({"id": [1]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="it changes an object that it refers to"):
        make_dataset(tmp_path / "rows.parquet", cache=False).map(counted)


def test_a_checkpoint_with_the_state_of_a_loader_needs_one_again(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": torch.randn(8).tolist(), "y": [0.0] * 8}), tmp_path / "rows.parquet")
    options: dict[str, Any] = {"epochs": 2, "checkpoint_dir": tmp_path / "checkpoints", "progress": False}
    model, optimizer = build()
    fit(model, optimizer, in_order(8), squared_error, **options | {"epochs": 1})
    loader = make_loader(tmp_path / "rows.parquet", 4, cache=False)
    with pytest.raises(ConfigError, match="only one of the two has the state of a loader"):
        fit(model, optimizer, loader, squared_error, **options)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'dataload\[tensorboard\]'"):
        TensorBoardWriter(tmp_path, 1, torch.device("cpu"))


def test_results_of_another_version_cannot_be_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["dataload", "bench", "--render", str(tmp_path / "old.json")])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 2
    assert "is not of this version: measure again" in capsys.readouterr().err
