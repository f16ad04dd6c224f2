"""Every snapshot of Iceberg tables that changed at random has the rows that pyiceberg reads."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("pyiceberg")

from iceberg_histories import IcebergHistory
from table_rows import check_same

CHANGES = 12
QUICK, ALL = 4, 60  # histories


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Return a function of a seed: a table that was compared after each change, which is made once."""

    @functools.cache
    def made(seed: int) -> IcebergHistory:
        history = IcebergHistory(tmp_path_factory.mktemp("history"), seed)
        for _ in range(CHANGES):
            history.change()
            check_same(history.table, history.table.scan().to_arrow())
        return history

    return made


def check_snapshots(history: IcebergHistory) -> None:
    for snapshot in history.table.snapshots():
        scan = history.table.scan(snapshot_id=snapshot.snapshot_id)
        check_same(scan, scan.to_arrow())


@pytest.mark.parametrize("seed", range(QUICK))
def test_each_snapshot_has_the_rows_of_pyiceberg(seed, checked):
    check_snapshots(checked(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, ALL))
def test_more_snapshots_have_the_rows_of_pyiceberg(seed, checked):
    check_snapshots(checked(seed))


def test_the_first_histories_have_all_kinds_of_changes(checked):
    assert {name for seed in range(QUICK) for name in checked(seed).told} == {
        *("append", "overwrite", "delete", "upsert", "add", "widen", "rename", "rename_member", "drop"),
        *("repartition", "positions", "vector", "expire"),
    }
