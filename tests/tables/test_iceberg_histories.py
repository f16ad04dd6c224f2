"""Every snapshot of Iceberg tables that changed at random has the rows that pyiceberg reads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from iceberg_histories import IcebergHistory
from table_rows import check_same

CHANGES = 10


def check_history(folder: Path, seed: int) -> list[str]:
    """Change a table, and compare it after each change, and each of its snapshots in the end."""
    history = IcebergHistory(folder, seed)
    told = []
    for _ in range(CHANGES):
        told.append(history.change())
        check_same(history.table, history.table.scan().to_arrow())
    for snapshot in history.table.snapshots():
        scan = history.table.scan(snapshot_id=snapshot.snapshot_id)
        check_same(scan, scan.to_arrow())
    return told


@pytest.mark.parametrize("seed", range(4))
def test_each_snapshot_has_the_rows_of_pyiceberg(seed, tmp_path):
    check_history(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 60))
def test_more_snapshots_have_the_rows_of_pyiceberg(seed, tmp_path):
    check_history(tmp_path, seed)
