"""The forecast of the bytes of decoded rows, beside the bytes that are made."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_groups import load

from dataload import make_dataset, make_loader
from dataload.cache.config import CacheConfig
from dataload.catalog import footer_cache
from dataload.formats.detect import parse_footer
from dataload.rows import row_group_plan
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_group_plan import RowGroupPlan

ROWS = 40_000
LONG = [f"{number:0100d}" for number in range(20_000)]
ADDRESSES = [f"{'https://example.org/a/long/path/' * 4}{row}" for row in range(ROWS)]
WHOLE = {"dictionary_pagesize_limit": 64 << 20}
PREFIXES = {"use_dictionary": False, "column_encoding": {"c": "DELTA_BYTE_ARRAY"}}


def shared(values: list[str], rows: int = ROWS) -> list[str]:
    return np.random.default_rng(0).choice(values, rows).tolist()


def blobs_of(path: Path, column: list[Any], fill_null: Any = None, **options: Any) -> RowGroupCache:
    pq.write_table(pa.table({"c": column}), path, **options)
    return make_dataset(path, cache=False, fill_null=fill_null).rowstore.row_groups.caches[0]


def made(blobs: RowGroupCache, group: int = 0) -> int:
    return sum(map(len, load(blobs, group)))


@pytest.mark.parametrize(
    ("column", "options"),
    [
        pytest.param(shared(LONG), WHOLE, id="a dictionary of 2 MB"),
        pytest.param(shared([text * 50 for text in LONG[:50]], 2000), WHOLE, id="few large values"),
        pytest.param(ADDRESSES, PREFIXES, id="common prefixes"),
        pytest.param(
            [[[row, 1]] for row in range(ROWS)],
            {"use_dictionary": False, "column_encoding": {"c.list.element.list.element": "DELTA_BINARY_PACKED"}},
            id="numbers in nested lists",
        ),
    ],
)
def test_measured_sizes(column: list[Any], options: dict[str, Any], tmp_path: Path) -> None:
    blobs = blobs_of(tmp_path / "x.parquet", column, **options)
    blobs.measure()
    assert blobs.num_bytes == pytest.approx(made(blobs), rel=0.02)


@pytest.mark.parametrize("blob_rows", [1 << 10, 1 << 16])
def test_each_blob_has_a_dictionary(blob_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_group_plan, "BLOB_ROWS", blob_rows)
    blobs = blobs_of(tmp_path / "x.parquet", shared(LONG[:100]))
    blobs.measure()
    assert blobs.num_bytes == pytest.approx(made(blobs), rel=0.02)


def test_nulls_that_are_replaced_by_long_text_share_it(tmp_path: Path) -> None:
    column = [None if row % 3 else text for row, text in enumerate(shared(LONG[:100]))]
    sizes = []
    for filling in (None, "unknown" * 100):
        blobs = blobs_of(tmp_path / f"{filling is None}.parquet", column, {"c": filling} if filling else None)
        blobs.measure()
        sizes.append(made(blobs))
        assert blobs.num_bytes == pytest.approx(sizes[-1], rel=0.02)
    assert 700 <= sizes[1] - sizes[0] < 800


@pytest.mark.parametrize("in_struct", [False, True])
def test_text_that_one_file_lacks_is_measured(tmp_path: Path, in_struct: bool) -> None:
    """As pandas writes it: a column of the type null, or a struct of which only one file has the members."""
    texts = shared(LONG[:100])
    columns = [{"c": [{"a": text} for text in texts]}, {"c": [None] * ROWS}] if in_struct else [{"c": texts}, {"c": []}]
    columns[1] = {"c": pa.nulls(ROWS)}
    for number, column in enumerate(columns):
        pq.write_table(pa.table(column), tmp_path / f"{number}.parquet")
    blobs = make_dataset(tmp_path, cache=False).rowstore.row_groups.caches[0]
    blobs.measure()
    assert 0.99 * made(blobs) < blobs.bytes_of(0) < 5 * made(blobs)


def test_reservations_follow_blobs_that_are_larger_than_footers_say(tmp_path: Path) -> None:
    blobs = blobs_of(tmp_path / "x.parquet", ADDRESSES, row_group_size=ROWS // 2, **PREFIXES)
    size = made(blobs)
    assert blobs.plan.bytes_of(1) < size / 4
    assert blobs.decoding_bytes(1) == pytest.approx(3 * size, rel=0.1)


def test_measuring_parses_a_footer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A footer of thousands of columns takes long, and each column of each sample needs it."""
    columns = pa.table({name: shared(LONG[:100], 400) for name in "abcd"})
    pq.write_table(columns, tmp_path / "x.parquet", row_group_size=50)
    blobs = make_dataset(tmp_path / "x.parquet", cache=False).rowstore.row_groups.caches[0]
    parsed = []
    monkeypatch.setattr(footer_cache, "parse_footer", lambda *a: parsed.append(a) or parse_footer(*a))
    blobs.measure()
    assert len(parsed) == 1


def test_a_loader_estimates_a_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over hundreds of thousands of row groups takes a second."""
    pq.write_table(pa.table({"c": shared(LONG, 800)}), tmp_path / "x.parquet", row_group_size=100)
    dataset = make_dataset(tmp_path / "x.parquet", cache=CacheConfig(str(tmp_path / "cache")))
    estimated = Counter[int]()
    bytes_of = RowGroupPlan.bytes_of
    monkeypatch.setattr(RowGroupPlan, "bytes_of", lambda plan, n: estimated.update([n]) or bytes_of(plan, n))
    make_loader(dataset, 8)
    assert estimated == Counter(range(8))
