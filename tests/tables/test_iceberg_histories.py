"""Every snapshot of Iceberg tables that changed at random has the rows that pyiceberg reads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from iceberg_histories import IcebergHistory
from table_rows import check_same

CHANGES = 12
QUICK, ALL = 4, 60  # histories


def check_history(folder: Path, seed: int) -> IcebergHistory:
    """Change a table, and compare it after each change, and each of its snapshots in the end."""
    history = IcebergHistory(folder, seed)
    for _ in range(CHANGES):
        history.change()
        check_same(history.table, history.table.scan().to_arrow())
    for snapshot in history.table.snapshots():
        scan = history.table.scan(snapshot_id=snapshot.snapshot_id)
        check_same(scan, scan.to_arrow())
    return history


@pytest.mark.parametrize("seed", range(QUICK))
def test_each_snapshot_has_the_rows_of_pyiceberg(seed, tmp_path):
    check_history(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, ALL))
def test_more_snapshots_have_the_rows_of_pyiceberg(seed, tmp_path):
    check_history(tmp_path, seed)


def test_the_first_histories_have_all_kinds_of_changes(tmp_path):
    told = set[str]()
    for seed in range(QUICK):
        history = IcebergHistory(tmp_path / f"{seed}", seed)
        told.update(history.change() for _ in range(CHANGES))
    assert told == {
        *("append", "overwrite", "delete", "upsert", "add", "widen", "rename", "rename_member", "drop"),
        *("repartition", "positions", "vector", "expire"),
    }
