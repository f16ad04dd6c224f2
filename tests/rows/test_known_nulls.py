"""Nulls that the footers know are told before the first batch: by make_loader, plan, warm, doctor and head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from dataload import make_dataset, make_loader
from dataload.cli.app import app
from dataload.errors import DataError

N = 40


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Row 25 has a null in each column that ends in "null", and row 26 in "age" too, which row group 2 has."""

    def column(values: list[Any], *nulls: int) -> list[Any]:
        return [None if row in nulls else value for row, value in enumerate(values)]

    columns = {
        "x": range(N),
        "age": column([*range(N)], 25, 26),
        "flag": column([True] * N, 25),
        "vector": pa.array(column([[1, 2]] * N, 25), pa.list_(pa.int32(), 2)),
        "weight": column([0.5] * N, 25),
        "text": column(["a"] * N, 25),
        "tokens": pa.array(column([[1]] * N, 25), pa.list_(pa.int32())),
    }
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "data" / "a.parquet", row_group_size=10)
    return str(tmp_path / "data")


@pytest.mark.parametrize(("columns", "says"), [(["age"], "'age' has 2"), (["x", "flag"], "'flag' has 1")])
def test_make_loader_names_known_nulls_before_the_first_batch(folder: str, columns: list[str], says: str) -> None:
    dataset = make_dataset(folder, columns=columns, cache=False)
    place = rf"{folder}/a\.parquet row group 2 column {says} nulls, which batches cannot hold \(in all files: "
    with pytest.raises(DataError, match=rf"^{place}.*\): pass fill_null= to replace them, or null_masks=True"):
        make_loader(dataset, 4)


def test_all_columns_with_known_nulls_are_named(folder: str) -> None:
    with pytest.raises(DataError, match=r"in all files: 'age' 2, 'flag' 1, 'vector' 1\)"):
        make_loader(folder, 4, cache=False)


@pytest.mark.parametrize(
    "options",
    [
        {"columns": ["x", "weight", "text", "tokens"]},
        {"fill_null": 0, "columns": ["age", "weight", "vector"]},
        {"fill_null": {"age": -1}, "columns": ["age", "x"]},
        {"null_masks": True},
    ],
    ids=str,
)
def test_nulls_that_batches_can_hold_are_no_error(folder: str, options: dict[str, Any]) -> None:
    assert sum(len(batch[next(iter(batch))]) for batch in make_loader(folder, 4, cache=False, **options)) == N


def test_a_filter_of_whole_row_groups_without_nulls_is_no_error(folder: str) -> None:
    loader = make_loader(folder, 4, columns=["x", "age"], filters=[("x", "<", 20)], shuffle=False, cache=False)
    assert [row for batch in loader for row in batch["age"].tolist()] == [*range(20)]
    with pytest.raises(DataError, match="'age' has 2 nulls"):
        make_loader(folder, 4, columns=["age"], filters=[("x", ">=", 20)], cache=False)


def test_a_column_that_a_file_or_a_folder_has_no_value_of_has_known_nulls(tmp_path: Path) -> None:
    for key, columns in (("1", {"x": [1, 2], "y": [3, 4]}), ("__HIVE_DEFAULT_PARTITION__", {"x": [5]})):
        (tmp_path / f"k={key}").mkdir()
        pq.write_table(pa.table(columns), tmp_path / f"k={key}" / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet row group 0 column 'k' has 1 nulls.*'k' 1, 'y' 1\)"):
        make_loader(str(tmp_path), 1, columns=["x", "k", "y"], cache=False)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_warm_names_known_nulls_and_fetches_nothing(folder: str, tmp_path: Path) -> None:
    command = ["warm", folder, "--columns", "age", "--cache-dir", str(tmp_path / "cache")]
    done = run(*command)
    assert isinstance(done.exception, DataError)
    assert "'age' has 2 nulls" in str(done.exception)
    assert "pass --fill-null to replace them, or --null-masks" in str(done.exception)
    assert run(*command, "--fill-null", "0").exit_code == 0


def test_plan_and_doctor_name_known_nulls(folder: str, tmp_path: Path) -> None:
    common = [folder, "--columns", "age", "--cache-dir", str(tmp_path / "cache")]
    plan = run("plan", *common)
    assert plan.exit_code == 1
    assert "'age' has 2 nulls" in plan.stdout.replace("\n", " ")
    assert "--null-masks" in plan.stdout
    assert run("plan", *common, "--null-masks").exit_code == 0
    checks = json.loads(run("doctor", *common, "--json").stdout)["checks"]
    assert checks["dataset"]["status"] == "problem"
    assert "'age' has 2 nulls" in checks["dataset"]["what"]
    assert "--fill-null" in checks["dataset"]["advice"]


def test_head_says_how_to_read_columns_with_nulls(folder: str, tmp_path: Path) -> None:
    found = run("head", folder, "--rows", "0", "--cache-dir", str(tmp_path / "cache")).stdout
    lines = {line.split()[0]: line for line in found.splitlines() if line.split()}
    assert "2 nulls: pass fill_null= or null_masks=True" in lines["age"]
    assert lines["weight"].endswith("1 null")
