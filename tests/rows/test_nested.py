"""Batches of nested columns equal `to_pylist()`; with ragged="flat" they are the same values, flat."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from decoded import gather, plain, whole
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from dataload import CacheConfig, make_dataset, make_loader
from dataload.dataset import Dataset
from dataload.errors import DataError
from dataload.formats.schema import fields_of, flatten
from dataload.loader.worker_transport import pack, unpack
from dataload.rows import row_group_plan
from dataload.rows.collate import Flat, cut, map_tensors, to_batch
from dataload.train.batch_size import find_batch_size

EXAMPLES = 2000 if NIGHTLY else 100

LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(allow_nan=False, width=32),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    pa.large_string(): st.text("aé€😀", max_size=20),
    pa.string_view(): st.text("aé€😀", max_size=20),
    pa.binary(): st.binary(max_size=5),
    pa.large_binary(): st.binary(max_size=5),
    pa.binary_view(): st.binary(max_size=20),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["a", "b", "ccc"]),
    pa.date32(): st.dates(date(1900, 1, 1), date(2100, 1, 1)),
    pa.time64("us"): st.times(),
    pa.timestamp("us"): st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)),  # noqa: DTZ001 (the type has no zone)
    pa.timestamp("ms", "UTC"): st.integers(-(10**12), 10**12),
    pa.duration("us"): st.timedeltas(timedelta(-9999), timedelta(9999)),
    pa.decimal128(9, 3): st.integers(-(10**8), 10**8).map(lambda number: Decimal(number) / 1000),
}
KEYS = [pa.string(), pa.int64(), pa.large_string()]


def nested(depth: int, *, views: bool) -> st.SearchStrategy[pa.DataType]:
    """Return types of at most this depth, with or without the types of lists that Parquet lacks."""
    leaves = st.sampled_from(list(LEAVES))
    if depth == 0:
        return leaves
    inner = nested(depth - 1, views=views)
    lists = [pa.list_, pa.large_list, *([pa.list_view, pa.large_list_view] if views else [])]
    sizes = st.integers(1, 2)
    return st.one_of(
        leaves,
        st.builds(lambda make, kind: make(kind), st.sampled_from(lists), inner),
        st.builds(lambda kind, size: pa.list_(kind, size), inner, sizes),
        st.builds(lambda kinds: pa.struct(list(zip("abc", kinds, strict=False))), st.lists(inner, min_size=1, max_size=3)),
        st.builds(pa.map_, st.sampled_from(KEYS), inner),
    )


def columns(depth: int, *, views: bool) -> st.SearchStrategy[pa.DataType]:
    """Return types of columns of Python values."""
    kinds = nested(depth - 1, views=views)
    return st.one_of(kinds.map(pa.list_), kinds.map(pa.large_list), kinds.map(lambda kind: pa.map_(pa.string(), kind))).filter(
        lambda kind: fields_of(pa.schema([("c", kind)]))[0].kind == "nested"
    )


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return values of a type, as pyarrow accepts them, with nulls at every depth."""
    types = pa.types
    if types.is_struct(kind):
        found = st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    elif types.is_map(kind):
        found = st.lists(st.tuples(LEAVES[kind.key_type], values_of(kind.item_type)), max_size=2)
    elif types.is_fixed_size_list(kind):
        found = st.lists(values_of(kind.value_type), min_size=kind.list_size, max_size=kind.list_size)
    elif kind in LEAVES:
        found = LEAVES[kind]
    else:
        found = st.lists(values_of(kind.value_type), max_size=3)
    return st.none() | found


def columns_with_rows(*, views: bool) -> st.SearchStrategy[pa.Table]:
    """Return tables of one or two nested columns, which may be slices and may have several chunks."""

    @st.composite
    def draw(draw: Any) -> pa.Table:
        kinds = draw(st.lists(columns(4, views=views), min_size=1, max_size=2))
        count, start = draw(st.integers(1, 6)), draw(st.integers(0, 2))
        arrays = []
        for kind in kinds:
            rows = draw(st.lists(values_of(kind), min_size=count + start, max_size=count + start))
            parts = [pa.array(rows[:1], kind), pa.array(rows[1:], kind)] if draw(st.booleans()) else [pa.array(rows, kind)]
            arrays.append(pa.chunked_array(parts, kind))
        return pa.table(arrays, [f"c{number}" for number in range(len(kinds))]).slice(start)

    return draw()


@settings(max_examples=EXAMPLES)
@given(table=columns_with_rows(views=True), data=st.data())
def test_a_batch_is_to_pylist_of_take(table: pa.Table, data: st.DataObject) -> None:
    """Rows of two blobs, also flat; cut into two batches as a loader does it."""
    tables = [table, table.slice(1)] if len(table) > 1 else [table]
    rows = data.draw(st.lists(st.integers(0, len(tables[-1]) - 1), max_size=6))
    which = data.draw(st.lists(st.integers(0, len(tables) - 1), min_size=len(rows), max_size=len(rows)))
    expected = [tables[part].slice(row, 1).to_pylist()[0] for part, row in zip(which, rows, strict=True)]
    records = gather(tables, np.array(which, np.int64), np.array(rows, np.int64))
    batch = to_batch(records)
    assert {name: list(values) for name, values in batch.items()} == {
        name: [row[name] for row in expected] for name in table.column_names
    }
    try:
        flat = to_batch(records, ragged="flat")
    except DataError as error:
        assert "ragged='flat' cannot hold" in str(error)  # noqa: PT017 (most examples have no error)
    else:
        sizes = [1, len(rows) - 1] if len(rows) > 1 else [len(rows)]
        parts = list(zip(cut(flat, sizes), sizes, strict=True))
        for name in table.column_names:
            found = [row for part, size in parts for row in unflattened(part[name], size)]
            assert found == [emptied(row[name], table.schema.field(name).type) for row in expected]


def unflattened(column: Any, count: int) -> list[Any]:
    """Return the rows of a flat column as lists and dicts."""
    if isinstance(column, Flat):
        total = int(column.offsets[-1])
        values = unflattened(column.values, total)
        bounds = column.offsets.tolist()
        return [values[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    if isinstance(column, dict):
        members = {name: unflattened(values, count) for name, values in column.items()}
        return [{name: values[row] for name, values in members.items()} for row in range(count)]
    return [str(value) if isinstance(value, float) else value for value in plain(column)]


def emptied(value: Any, kind: pa.DataType) -> Any:
    """Return what a flat batch holds of a value: empty lists and bytes for nulls, counts for times, NaN for floats."""
    types = pa.types
    if types.is_struct(kind):
        return {field.name: emptied(value and value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return [{"key": key, "value": emptied(item, kind.item_type)} for key, item in value or []]
    if types.is_nested(kind):
        return [emptied(element, kind.value_type) for element in value or []]
    if types.is_dictionary(kind):
        return value
    if kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)):
        return list(value or b"")
    if types.is_decimal(kind) or types.is_floating(kind):
        return str(float("nan" if value is None else value))
    if types.is_temporal(kind):
        scalar = pa.scalar(value, kind)
        return scalar.cast(pa.int64() if kind.bit_width == 64 else pa.int32()).as_py()
    return value


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_files_are_read_like_arrow_reads_them(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("nested")
    as_parquet = data.draw(st.booleans())
    table = data.draw(columns_with_rows(views=not as_parquet))
    half = -(-len(table) // 2)
    if as_parquet:
        pq.write_table(table, folder / "x.parquet", row_group_size=half)
        table = pq.read_table(folder / "x.parquet")
    else:
        with pa.ipc.new_file(folder / "x.arrow", table.schema) as file:
            file.write_table(table.combine_chunks(), max_chunksize=half)
    rows = data.draw(st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_group_plan, "BLOB_ROWS", data.draw(st.sampled_from([1, 2, 1 << 16])))
        dataset = make_dataset(str(folder), cache=None)
    found = dataset.__getitems__(rows)
    assert [{name: value for name, value in row.items()} for row in found] == [
        table.slice(row, 1).to_pylist()[0] for row in rows
    ]
