"""Every type a batch can hold comes out as pyarrow's own take gives it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload.batch import Flat, map_tensors, to_batch
from dataload.columns import check_types, decode, gather
from dataload.errors import ConfigError, DataError

NUMBERS = [
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.bool_(),
]


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    types = pa.types
    if types.is_boolean(kind):
        return st.booleans()
    if types.is_integer(kind):
        signed = types.is_signed_integer(kind)
        top = 2 ** (kind.bit_width - signed)
        return st.integers(-top if signed else 0, top - 1)
    if types.is_floating(kind):
        return st.floats(width=kind.bit_width, allow_nan=False)
    if types.is_string(kind) or types.is_large_string(kind):
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    if types.is_fixed_size_binary(kind):
        return st.binary(min_size=kind.byte_width, max_size=kind.byte_width)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return st.binary(max_size=8)
    size = kind.list_size if types.is_fixed_size_list(kind) else None
    return st.lists(values_of(kind.value_type), min_size=size or 0, max_size=4 if size is None else size)


TYPES = [
    *NUMBERS,
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.binary(3),
    pa.list_(pa.int32()),
    pa.large_list(pa.float32()),
    pa.list_(pa.int16(), 3),
    pa.list_(pa.bool_(), 2),
    pa.list_(pa.uint8(), 0),
]


def whole(table: pa.Table, fill_null: Any = None) -> dict[str, Any]:
    """All rows of a table as a batch."""
    rows = np.arange(len(table))
    return to_batch(gather([decode(table, fill_null, "here")], np.zeros_like(rows), rows))


@pytest.mark.parametrize("kind", TYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_batch_holds_what_take_gives(kind: pa.DataType, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.lists(values_of(kind), min_size=1, max_size=6), min_size=1, max_size=3))
    tables = [pa.table({"c": pa.array(part, kind)}) for part in parts]
    check_types(tables[0].schema)
    which = np.array(data.draw(st.lists(st.integers(0, len(parts) - 1), max_size=8)), np.int64)
    rows = np.array([data.draw(st.integers(0, len(parts[part]) - 1)) for part in which], np.int64)

    sliced = [
        pa.concat_tables([table, table]).slice(len(table), len(table)) for table in tables
    ]  # offsets that start late
    for source in (tables, sliced):
        found = to_batch(gather([decode(table, None, "here") for table in source], which, rows))["c"]
        wanted = [parts[part][row] for part, row in zip(which, rows, strict=True)]
        assert len(found) == len(wanted)
        assert [value.tolist() if isinstance(value, torch.Tensor) else value for value in found] == wanted


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_dtypes_and_shapes_follow_the_schema(kind: pa.DataType) -> None:
    columns = decode(pa.table({"c": pa.nulls(2, kind)}).filter([False, False]), None, "here")
    nothing = np.empty(0, np.int64)
    batch = to_batch(gather([columns], nothing, nothing))["c"]
    assert len(batch) == 0
    if kind in NUMBERS:
        assert batch.dtype == torch.from_numpy(np.empty(0, kind.to_pandas_dtype())).dtype
    if pa.types.is_fixed_size_list(kind):
        assert batch.shape == (0, kind.list_size)


def test_dictionaries_come_as_their_values() -> None:
    table = pa.table({"c": pa.array(["x", "y", "x"]).dictionary_encode()})
    check_types(table.schema)
    assert whole(table)["c"] == ["x", "y", "x"]


def test_text_that_is_none() -> None:
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
    with pytest.raises(DataError, match="UTF-8"):
        whole(pa.table({"c": broken}))


def test_flat() -> None:
    table = pa.table({"numbers": [[1, 2], [], [3]], "bytes": [b"ab", b"", b"c"], "text": ["a", "b", "c"]})
    batch = to_batch(gather([decode(table, None, "here")], np.array([0, 0]), np.array([2, 0])), ragged="flat")
    numbers = batch["numbers"]
    assert isinstance(numbers, Flat)
    assert (numbers.values.tolist(), numbers.offsets.tolist()) == ([3, 1, 2], [0, 1, 3])
    assert bytes(batch["bytes"].values.tolist()) == b"cab"
    assert batch["text"] == ["c", "a"]


def test_group() -> None:
    table = pa.table({"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5, 6], "d": ["x", "y"]})
    columns = gather([decode(table, None, "here")], np.array([0, 0]), np.array([0, 1]))
    batch = to_batch(columns, group={"x": ["b", "a"]})
    assert batch["x"].tolist() == [[3.0, 1.0], [4.0, 2.0]]
    assert batch["x"].is_contiguous()
    assert set(batch) == {"x", "c", "d"}
    for members in (["a", "c"], ["a", "d"], ["a", "nothing"]):
        with pytest.raises(ConfigError, match="'x'"):
            to_batch(columns, group={"x": members})


@pytest.mark.parametrize(
    ("kind", "filling", "wanted"),
    [(pa.int32(), -1, [1, -1]), (pa.string(), "?", ["1", "?"]), (pa.float32(), 0, [1, 0])],
)
def test_nulls(kind: pa.DataType, filling: Any, wanted: list[Any]) -> None:
    table = pa.table({"c": pa.array([1 if filling != "?" else "1", None], kind)})
    with pytest.raises(DataError, match=r"x\.parquet row group 3 column 'c' has 1 nulls: pass fill_null"):
        decode(table, None, "x.parquet row group 3")
    for fill_null in (filling, {"c": filling}):
        column = whole(table, fill_null)["c"]
        assert (column.tolist() if isinstance(column, torch.Tensor) else column) == wanted
    with pytest.raises(DataError, match="'c' has 1 nulls"):
        decode(table, {"other": 0}, "here")


def test_a_filling_of_another_type() -> None:
    with pytest.raises(DataError, match="'c': fill_null='text' is no int64"):
        decode(pa.table({"c": pa.array([None], pa.int64())}), "text", "here")


def test_nulls_inside_lists() -> None:
    with pytest.raises(DataError, match="'c' has nulls inside"):
        decode(pa.table({"c": [[1, None]]}), 0, "here")


def test_nulls_of_fixed_size_lists_survive_parquet() -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"c": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))}), file)
    table = pq.read_table(file)
    with pytest.raises(DataError, match="'c' has 1 nulls"):
        decode(table, None, "here")
    assert whole(table, [9, 9])["c"].tolist() == [[1, 2], [9, 9], [3, 4]]


@pytest.mark.parametrize(
    "kind", [pa.struct([("x", pa.int64())]), pa.list_(pa.string()), pa.timestamp("us"), pa.decimal128(5, 2), pa.null()]
)
def test_other_types_are_refused_by_name(kind: pa.DataType) -> None:
    with pytest.raises(DataError, match="column 'odd' has type"):
        check_types(pa.schema([("fine", pa.int8()), ("odd", kind)]))


def test_map_tensors_reaches_everything() -> None:
    batch = {
        "a": torch.ones(2),
        "b": [torch.ones(1), "text"],
        "c": (torch.ones(1), b""),
        "d": Flat(torch.ones(1), torch.ones(2)),
    }
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert doubled["a"].tolist() == [2, 2]
    assert doubled["b"][0].tolist() == [2]
    assert doubled["b"][1] == "text"
    assert doubled["c"][0].tolist() == [2]
    assert isinstance(doubled["d"], Flat)
    assert doubled["d"].values.tolist() == [2]
