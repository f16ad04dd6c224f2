"""Delta tables of other projects: as deltalake reads them, or refused.

GOLDEN_TABLES names a folder with some, such as a clone of delta-rs, which has 59.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("deltalake")

from deltalake import DeltaTable
from table_rows import check_same, rows_as_plain, rows_of

from dataload import make_dataset
from dataload.errors import DataloadError

CORPORA = Path(__file__).resolve().parents[3] / "shared" / "corpora"
TABLES = sorted(path.parent for path in Path(os.environ.get("GOLDEN_TABLES", CORPORA)).rglob("_delta_log"))
# deltalake wraps times of 96 bits that nanoseconds cannot hold.
WRAPPED = "table_with_edge_timestamps"


@pytest.mark.slow
@pytest.mark.parametrize("path", TABLES, ids=str)
def test_golden_tables_are_read_as_by_deltalake_or_refused(path):
    try:
        table = DeltaTable(str(path))
        expected = pa.table(table.scan())
    except Exception as error:  # deltalake has many
        with pytest.raises(DataloadError):
            rows_of(make_dataset(f"delta+{path}", cache=False))
        pytest.skip(f"deltalake cannot read it: {error}")
    if path.name == WRAPPED:
        pytest.skip("deltalake wraps its times around")
    try:
        check_same(table, expected)
    except DataloadError as refused:
        if "of the type variant" not in str(refused):
            with pytest.raises(DataloadError):  # columns that no batch can hold
                rows_as_plain(expected)
