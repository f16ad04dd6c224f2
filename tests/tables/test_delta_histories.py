"""Every version of Delta tables that changed at random has the rows that deltalake reads."""

from __future__ import annotations

import functools

import pyarrow as pa
import pytest

pytest.importorskip("deltalake")

from delta_histories import DeltaHistory
from deltalake import DeltaTable
from table_rows import check_same, rows_of

from dataload import make_dataset
from dataload.errors import OriginNotFound

CHANGES = 10
QUICK, ALL = 6, 60  # histories


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Return a function of a seed: a table that has changed, which is made once."""

    @functools.cache
    def made(seed: int) -> DeltaHistory:
        path = tmp_path_factory.mktemp("history") / "t"
        table = DeltaHistory(path, seed, ("none", "name", "id")[seed % 3], vectors=seed % 2 == 1)
        for _ in range(CHANGES):
            table.change()
        return table

    return made


def check_versions(history: DeltaHistory) -> None:
    path = history.path
    for version in range(DeltaTable(str(path)).version() + 1):
        try:
            expected = pa.table(DeltaTable(str(path), version=version).scan())
        except Exception as error:
            if version >= history.since:
                raise
            assert "No such file" in str(error) or "not found" in str(error)
            with pytest.raises(OriginNotFound, match="VACUUM or expire_snapshots has removed it"):
                rows_of(make_dataset(f"delta+{path}@{version}", cache=False))
        else:
            check_same(f"delta+{path}@{version}", expected)


@pytest.mark.variants
@pytest.mark.parametrize("seed", range(QUICK))
def test_each_version_has_the_rows_of_deltalake(seed, history):
    check_versions(history(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, ALL))
def test_more_histories_have_the_rows_of_deltalake(seed, history):
    check_versions(history(seed))


@pytest.mark.slow
def test_the_first_histories_have_all_kinds_of_changes(history):
    assert {name for seed in range(QUICK) for name in history(seed).told} == {
        *("append", "overwrite", "delete", "update", "merge", "add", "compact", "repartition", "vacuum"),
        *("rename", "rename_member", "drop", "vector", "add_member", "restore"),
    }
