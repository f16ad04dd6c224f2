"""Every snapshot of Iceberg tables that changed at random has the rows that pyiceberg reads."""

from __future__ import annotations

import functools
import re

import pytest

pytest.importorskip("pyiceberg")

from iceberg_histories import IcebergHistory
from table_rows import check_same

from dataload import make_dataset
from dataload.errors import ConfigError, DataError

CHANGES = 14
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
            if check_scan(history):
                history.told.append("scan")
        return history

    return made


def check_scan(history: IcebergHistory) -> bool:
    """Check a scan with a condition that is not true for nulls, and with some columns. Return whether it is read."""
    names = history.table.schema().column_names
    first = next(each for each in names if history.table.schema().find_type(each).is_primitive)
    kind = history.table.schema().find_type(first)
    literal = {"int": "3", "long": "3", "string": "'a'", "date": "'1970-01-02'"}.get(str(kind), "3.0")
    condition = history.draw.choice([f"{first} != {literal}", f"{first} != {literal} or {first} is null"])
    condition = history.draw.choice([condition, f"not ({first} = {literal})"])
    scan = history.table.scan(row_filter=condition, selected_fields=tuple(history.draw.sample(names, 2)))
    try:
        make_dataset(scan, null_masks=True, cache=False)
    except (ConfigError, DataError) as error:
        if re.search("leaves open whether rows without a value|selects a part of", str(error)):
            return False
    check_same(scan, scan.to_arrow())
    return True


def check_snapshots(history: IcebergHistory) -> None:
    for snapshot in history.table.snapshots():
        scan = history.table.scan(snapshot_id=snapshot.snapshot_id)
        check_same(scan, scan.to_arrow())


@pytest.mark.variants
@pytest.mark.parametrize("seed", range(QUICK))
def test_each_snapshot_has_the_rows_of_pyiceberg(seed, checked):
    check_snapshots(checked(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, ALL))
def test_more_snapshots_have_the_rows_of_pyiceberg(seed, checked):
    check_snapshots(checked(seed))


@pytest.mark.slow
def test_the_first_histories_have_all_kinds_of_changes(checked):
    assert {name for seed in range(QUICK) for name in checked(seed).told} == {
        *("append", "overwrite", "delete", "upsert", "add", "widen", "rename", "rename_member", "drop"),
        *("repartition", "positions", "vector", "expire", "add_member", "roll_back", "scan"),
    }


def test_most_scans_of_the_first_histories_are_read(checked):
    read = [checked(seed).told.count("scan") for seed in range(QUICK)]
    assert min(read) > CHANGES / 2
