"""Every version of Delta tables that changed at random has the rows that deltalake reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("deltalake")

from delta_histories import DeltaHistory
from deltalake import DeltaTable
from table_rows import check_same

CHANGES = 8


def history(path: Path, seed: int) -> tuple[DeltaHistory, list[str]]:
    table = DeltaHistory(path, seed, ("none", "name", "id")[seed % 3], vectors=seed % 2 == 1)
    return table, [table.change() for _ in range(CHANGES)]


def check_versions(path: Path, told: list[str]) -> None:
    newest = DeltaTable(str(path)).version()
    for version in range(newest + 1):
        expected = pa.table(DeltaTable(str(path), version=version).scan())
        check_same(f"delta+{path}@{version}", expected)


@pytest.mark.parametrize("seed", range(6))
def test_each_version_has_the_rows_of_deltalake(seed, tmp_path):
    check_versions(tmp_path / "t", history(tmp_path / "t", seed)[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 60))
def test_more_histories_have_the_rows_of_deltalake(seed, tmp_path):
    check_versions(tmp_path / "t", history(tmp_path / "t", seed)[1])


def test_histories_have_all_kinds_of_changes(tmp_path):
    told = Counter[str]()
    for seed in range(12):
        told.update(history(tmp_path / f"{seed}", seed)[1])
    missing = {
        "append",
        "overwrite",
        "delete",
        "add",
        "compact",
        "repartition",
        "rename",
        "drop",
        "vector",
    } - told.keys()
    assert not missing, told
