"""Nulls of every type: as batches represent them, replaced, marked by masks, or an error that names the ways out."""

from __future__ import annotations

import copy
import io
import math
import re
from datetime import UTC, date, datetime, timedelta
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
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather

from dataload import CacheConfig, make_dataset, make_loader
from dataload.errors import ConfigError, DataError
from dataload.formats import parquet
from dataload.formats.schema import fields_of
from dataload.rows.arrow_decode import decode
from dataload.rows.collate import Flat, to_batch
from dataload.rows.columns import Coded
from dataload.rows.row_group_plan import digest_of

WAYS_OUT = "pass fill_null= to replace them, or null_masks=True to mark them"

INTEGERS = [pa.bool_(), pa.int8(), pa.uint64(), pa.date32(), pa.timestamp("ns"), pa.time32("s"), pa.duration("us")]
FLOATS = [pa.float16(), pa.float32(), pa.float64(), pa.decimal128(9, 2)]
NONE = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary(2), pa.binary_view(), pa.null()]
NONE += [pa.dictionary(pa.int8(), pa.string()), pa.list_(pa.string()), pa.map_(pa.string(), pa.int8())]


def column_of(kind: pa.DataType, present: list[bool]) -> pa.Array:
    """Return a column with a value of the type where `present`, else null."""
    values: Any
    if pa.types.is_map(kind):
        values = [("a", 1)]
    elif pa.types.is_list(kind):
        values = ["a", None]
    elif pa.types.is_decimal(kind):
        values = Decimal("1.25")
    elif pa.types.is_floating(kind):
        values = np.float16(1.5)
    elif pa.types.is_null(kind):
        values = None
    elif kind in INTEGERS:
        return (
            pa.array([1 if here else None for here in present], pa.int8())
            .cast(pa.int32())
            .cast(pa.int32() if kind.bit_width == 32 else pa.int64())
            .cast(kind)
        )
    else:
        values = "ab"
    if pa.types.is_binary_view(kind) or pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        values = b"ab"
    return pa.array([values if here else None for here in present], kind)


def same(found: Any, expected: Any) -> bool:
    """Compare values; NaN equals NaN."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float) and math.isnan(expected):
        return bool(math.isnan(found))
    return bool(found == expected)


@given(
    kind=st.sampled_from([*INTEGERS, *FLOATS, *NONE]),
    present=st.lists(st.booleans(), min_size=1, max_size=9),
    start=st.integers(0, 3),
)
def test_nulls_are_those_of_arrow(kind: pa.DataType, present: list[bool], start: int) -> None:
    column = column_of(kind, present)[min(start, len(present) - 1) :]
    table = pa.table({"c": column})
    nulls = column.is_null().to_pylist()
    if kind in NONE:
        assert [plain(value) for value in whole(table)["c"]] == column.to_pylist()
    elif kind in FLOATS:
        expected = [math.nan if value is None else float(value) for value in column.to_pylist()]
        assert same(whole(table)["c"].tolist(), expected)
    elif any(nulls):
        with pytest.raises(DataError, match=f"here column 'c' has {sum(nulls)} nulls: {WAYS_OUT}"):
            whole(table)
    batch = whole(table, null_masks=True)
    if kind in INTEGERS:
        assert batch["c.is_null"].tolist() == nulls
        assert batch["c.is_null"].dtype == torch.bool
        assert [int(value) for value in batch["c"]] == [int(not null) for null in nulls]
    else:
        assert batch.keys() == {"c"}


@given(
    rows=st.lists(st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=3), min_size=1, max_size=6),
    kind=st.sampled_from([pa.list_, pa.large_list, pa.list_view, pa.large_list_view]),
    start=st.integers(0, 2),
)
def test_nulls_of_lists_of_numbers(rows: list[Any], kind: Any, start: int) -> None:
    """A null list is None, or an empty row; a null in a list of floats is NaN, in one of integers zero with a mask."""
    rows = rows[min(start, len(rows) - 1) :]
    table = pa.table({"i": pa.array([None] * start + rows, kind(pa.int32()))[start:]})
    table = table.append_column(
        "f",
        table["i"].cast(pa.list_(pa.float32()))
        if kind in (pa.list_, pa.large_list)
        else pa.array(rows, kind(pa.float32())),
    )
    batch = whole(table, null_masks=True)
    zeros = [None if row is None else [value or 0 for value in row] for row in rows]
    nans = [None if row is None else [math.nan if value is None else value for value in row] for row in rows]
    assert [plain(value) for value in batch["i"]] == zeros
    assert same([plain(value) for value in batch["f"]], nans)
    assert batch["i.is_null"].tolist() == [row is None or None in row for row in rows]
    flat = whole(table, null_masks=True, ragged="flat")["i"]
    assert flat.values.tolist() == [value for row in zeros for value in row or []]
    assert flat.offsets.diff().tolist() == [len(row or []) for row in rows]
    inside = sum(value is None for row in rows for value in row or [])
    if inside:
        with pytest.raises(DataError, match=f"here column 'i' has {inside} nulls inside its lists: {WAYS_OUT}"):
            whole(table)
        filled = whole(table, {"i": 7})["i"] if None not in rows else None
        assert filled is None or [plain(value) for value in filled] == [
            [7 if value is None else value for value in row] for row in rows
        ]


@pytest.mark.parametrize(
    "elements",
    [
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 1, 1], pa.int8())),
        pc.run_end_encode(pa.array([1, 0, 1, 1])),
    ],
    ids=["bool8", "runs"],
)
def test_a_null_list_of_elements_that_arrow_cannot_replace(elements: pa.Array) -> None:
    offsets = pa.array([0, 1, 3, 4], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, elements, mask=pa.array([False, True, False]))
    table = pa.table({"c": lists})
    assert [plain(value) for value in whole(table, null_masks=True)["c"]] == [[1], None, [1]]
    assert whole(table, null_masks=True, ragged="flat")["c"].offsets.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("kind", [pa.int32(), pa.float32()])
def test_a_replacement_of_a_column_of_lists_is_a_list_or_an_element(kind: pa.DataType) -> None:
    """It replaces the nulls that it fits."""
    both = pa.table({"c": pa.array([[1, None], None], pa.list_(kind))})
    inside, rows = both[:1], both[1:]
    for filling in (7, {"c": 7}):
        assert [plain(value) for value in whole(both, filling)["c"]] == [[1, 7], None]
        assert [plain(value) for value in whole(rows, filling)["c"]] == [None]
    assert [plain(value) for value in whole(rows, {"c": [7]})["c"]] == [[7]]
    unfilled = whole(inside, {"c": [7]}, null_masks=True)["c"]
    assert same([plain(value) for value in unfilled], [[1, math.nan if kind == pa.float32() else 0]])
    for table in (inside, rows):
        with pytest.raises(DataError, match=r"'c': fill_null='\?' is no"):
            whole(table, {"c": "?"})


def test_a_list_does_not_replace_the_nulls_inside_lists_of_integers() -> None:
    table = pa.table({"c": pa.array([[1, None], None], pa.list_(pa.int32()))})
    with pytest.raises(DataError, match=re.escape("'c': fill_null=[7] is no int32: pass a int32")):
        whole(table, {"c": [7]})


@pytest.mark.parametrize(
    ("kind", "filling", "expected"),
    [(pa.int32(), -1, [1, -1]), (pa.string(), "?", ["1", "?"]), (pa.float32(), 0, [1, 0])],
)
def test_nulls_are_replaced(kind: pa.DataType, filling: Any, expected: list[Any]) -> None:
    table = pa.table({"c": pa.array([1 if filling != "?" else "1", None], kind)})
    for fill_null in (filling, {"c": filling}):
        column = whole(table, fill_null)["c"]
        assert (column.tolist() if isinstance(column, torch.Tensor) else column) == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.large_string()])
def test_nulls_of_coded_text_are_replaced_and_stay_coded(kind: pa.DataType) -> None:
    rows = [None if row % 3 == 0 else "ab"[row % 2] * 50 for row in range(90)]
    column = pa.array(rows).dictionary_encode().cast(pa.dictionary(pa.int8(), kind))
    table = pa.table({"c": pa.chunked_array([column[:40], column[40:]])})
    filling = "?" if kind != pa.binary() else b"?"
    decoded = decode(table, fields_of(table.schema), filling, "here", table.schema)["c"]
    assert isinstance(decoded, Coded)
    assert len(decoded.spans) == 3
    found = [plain(value) for value in whole(table, {"c": filling})["c"]]
    assert found == [filling if row is None else row if kind != pa.binary() else row.encode() for row in rows]
    assert [value is None for value in whole(table, 1)["c"]] == [row is None for row in rows]
    with pytest.raises(DataError, match="'c': fill_null=1 is no large_"):
        whole(table, {"c": 1})


def test_a_null_without_a_replacement_names_file_row_group_and_column() -> None:
    table = pa.table({"c": pa.array([1, None])})
    for fill_null in (None, {"other": 0}):
        with pytest.raises(DataError, match=rf"x\.parquet row group 3 column 'c' has 1 nulls: {WAYS_OUT}"):
            decode(table, fields_of(table.schema), fill_null, "x.parquet row group 3", table.schema)


def test_one_replacement_is_for_the_columns_that_can_hold_it() -> None:
    """A replacement by column must fit: the caller meant that column."""
    table = pa.table(
        {"i": pa.array([None], pa.int8()), "s": pa.array([None], pa.string()), "f": pa.nulls(1, pa.float32())}
    )
    batch = whole(table, -1)
    assert (batch["i"].tolist(), batch["s"], batch["f"].tolist()) == ([-1], [None], [-1.0])
    batch = whole(table, "?", null_masks=True)
    assert (batch["i"].tolist(), batch["i.is_null"].tolist(), batch["s"]) == ([0], [True], ["?"])
    assert math.isnan(batch["f"].item())
    for name, filling, kind in (("s", -1, "large_string"), ("f", "?", "float"), ("i", 1.5, "int8")):
        with pytest.raises(DataError, match=re.escape(f"'{name}': fill_null={filling!r} is no {kind}")):
            whole(table.select([name]), {name: filling})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Text", "fill_null: column 'Text' is not in the dataset: did you mean 'text'"),
        ("tags", r"fill_null is for flat columns, and 'tags' has the nested type list<.*string>"),
        ("s", r"fill_null: 's' is a struct, name its members: \['s.x'\]"),
    ],
)
def test_replacements_of_columns_that_cannot_be_filled(name: str, says: str, tmp_path: Path) -> None:
    table = pa.table({"text": ["a", None], "tags": [["a"], None], "s": [{"x": 1}, None]})
    pq.write_table(table, tmp_path / "x.parquet")
    for columns in (None, ["text"]):
        with pytest.raises(ConfigError, match=says):
            make_dataset(tmp_path / "x.parquet", columns=columns, fill_null={name: "?"}, cache=False)
        with pytest.raises(ConfigError, match=says):
            make_loader(tmp_path / "x.parquet", 1, columns=columns, fill_null={"text": "?", name: "?"}, cache=False)
    dataset = make_dataset(
        tmp_path / "x.parquet", columns=["text", "tags"], fill_null={"s.x": 1, "text": "?"}, cache=False
    )
    assert dataset.__getitems__([0, 1]).columns == {"text": ["a", "?"], "tags": [["a"], None]}


@pytest.mark.parametrize(
    ("name", "filling", "kind"),
    [
        *(("text", 1, "large_string"), ("flag", 0, "bool"), ("s.x", "?", "int64")),
        *(("list", "?", "list<"), ("fixed", [7], "fixed_size_list<")),
    ],
)
def test_replacements_of_the_wrong_type_are_refused_before_data_is_read(
    name: str, filling: Any, kind: str, tmp_path: Path
) -> None:
    """The first null may be far into an epoch."""
    columns = {"text": pa.array(["a"]), "flag": pa.array([True]), "list": pa.array([[1]], pa.list_(pa.int32()))}
    members = {"fixed": pa.array([[1, 2]], pa.list_(pa.int8(), 2)), "s": pa.array([{"x": 1}])}
    pq.write_table(pa.table(columns | members), tmp_path / "x.parquet")
    says = re.escape(f"the dataset's column {name!r}: fill_null={filling!r} is no {kind}")
    for chosen in (None, ["text"]):  # Row groups of some columns are made of cached ones of all columns.
        with pytest.raises(ConfigError, match=says):
            make_dataset(tmp_path / "x.parquet", columns=chosen, fill_null={name: filling}, cache=False)
    make_dataset(tmp_path / "x.parquet", fill_null={name: None}, cache=False)


def test_a_null_replacement_of_another_type() -> None:
    with pytest.raises(DataError, match="'c': fill_null='text' is no int64"):
        whole(pa.table({"c": pa.array([None], pa.int64())}), "text")


def test_the_error_of_a_replacement_names_the_way_out() -> None:
    table = pa.table({"c": pa.array([None], pa.bool_())})
    with pytest.raises(DataError, match=re.escape("fill_null=0 is no bool: pass it by column, as fill_null={'c': …}")):
        whole(table, 0)
    with pytest.raises(DataError, match="fill_null=0 is no bool: pass a bool"):
        whole(table, {"c": 0})
    assert whole(table, {"c": False})["c"].tolist() == [False]


@pytest.mark.parametrize(
    ("kind", "filling"),
    [
        *((pa.int32(), 1.5), (pa.uint8(), 300), (pa.bool_(), "x")),
        *((pa.uint8(), -1), (pa.int32(), 2**70), (pa.int64(), math.inf), (pa.list_(pa.uint8()), [-1])),
        *((pa.list_(pa.int64()), [0.5, 1.5]), (pa.list_(pa.uint8()), [1.9]), (pa.list_(pa.uint8()), np.array([1.9]))),
        *((pa.list_(pa.int32(), 2), [7, None]), (pa.list_(pa.int32(), 2), [7, 1.5]), (pa.list_(pa.int8()), [None])),
        *((pa.list_(pa.list_(pa.int8(), 1), 1), [[1.5]]), (pa.timestamp("s"), 1.5), (pa.list_(pa.date32()), [1.5])),
        *((pa.timestamp("s"), datetime(2020, 1, 1, 0, 0, 0, 5, UTC)), (pa.duration("s"), timedelta(microseconds=5))),
    ],
)
def test_a_null_replacement_that_would_be_changed(kind: pa.DataType, filling: Any) -> None:
    table = pa.table({"c": pa.array([None], kind)})
    with pytest.raises(DataError, match=r"fill_null=.* is no"):
        whole(table, {"c": filling})
    if not pa.types.is_list(kind):  # whose nulls need no replacement
        with pytest.raises(DataError, match=r"fill_null=.* is no"):
            whole(table, filling)
    assert whole(table, filling, null_masks=True)["c.is_null"].tolist() == [True]


@pytest.mark.parametrize(
    ("kind", "filling"),
    [
        *(
            (pa.float16(), 1e9),
            (pa.float32(), 1e300),
            (pa.list_(pa.float16()), [1e9]),
            (pa.list_(pa.float16(), 1), [9e9]),
        ),
        *((pa.list_(pa.float64(), 2), [7.0, None]), (pa.list_(pa.float32()), [None])),
    ],
)
def test_a_null_replacement_of_floats_that_would_be_changed(kind: pa.DataType, filling: Any) -> None:
    with pytest.raises(DataError, match=r"fill_null=.* is no"):
        whole(pa.table({"c": pa.array([None], kind)}), {"c": filling})


@pytest.mark.parametrize(
    ("kind", "filling", "expected"),
    [
        *((pa.float16(), np.float32(2), 2), (pa.float16(), math.inf, math.inf), (pa.float32(), 0.5, 0.5)),
        *((pa.int8(), 2.0, 2), (pa.int8(), np.bool_(True), 1), (pa.bool_(), True, 1)),
        *((pa.list_(pa.float16()), np.ones(2, np.float32), [1, 1]), (pa.list_(pa.int8()), range(2), [0, 1])),
        *((pa.list_(pa.float16(), 2), [np.float32(1), 2], [1, 2]), (pa.list_(pa.uint8()), b"ab", [97, 98])),
        *((pa.list_(pa.int8(), 2), (1.0, np.int64(2)), [1, 2]), (pa.list_(pa.int64()), pa.array([1, 2]), [1, 2])),
        *((pa.list_(pa.int64(), 2), pa.scalar([1, 2]), [1, 2]), (pa.int64(), pa.scalar(3), 3)),
        *((pa.timestamp("ns"), np.datetime64(5, "ns"), 5), (pa.date32(), 4, 4), (pa.date32(), date(1970, 1, 2), 1)),
        *((pa.timestamp("us", "UTC"), datetime(1970, 1, 1, tzinfo=UTC), 0), (pa.list_(pa.bool_()), [True], [1])),
    ],
)
def test_a_null_replacement_of_another_type_that_holds_it(kind: pa.DataType, filling: Any, expected: Any) -> None:
    [found] = whole(pa.table({"c": pa.array([None], kind)}), {"c": filling})["c"]
    assert np.array_equal(found.tolist(), expected)


def test_a_replacement_keeps_the_mask() -> None:
    batch = whole(pa.table({"c": pa.array([1, None])}), 9, null_masks=True)
    assert (batch["c"].tolist(), batch["c.is_null"].tolist()) == ([1, 9], [False, True])


def test_decimals_in_lists_are_filled_by_floats() -> None:
    table = pa.table({"c": pa.array([[Decimal("1.25"), None], None], pa.list_(pa.decimal128(10, 2)))})
    assert [plain(value) for value in whole(table, {"c": 0.5})["c"]] == [[1.25, 0.5], None]


def test_decimals_are_filled_by_decimals_and_floats() -> None:
    table = pa.table({"c": pa.array([None, Decimal("1.25")], pa.decimal128(10, 2))})
    assert whole(table, Decimal("3.5"))["c"].tolist() == [3.5, 1.25]
    assert whole(table, 3.5)["c"].tolist() == [3.5, 1.25]


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 26, reason="pyarrow reads these from Parquet from 26 on")
def test_nulls_of_fixed_size_lists_survive_parquet() -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"c": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))}), file)
    table = pq.read_table(file)
    with pytest.raises(DataError, match=f"'c' has 1 rows with nulls: {WAYS_OUT}"):
        whole(table)
    assert whole(table, [9, 9])["c"].tolist() == [[1, 2], [9, 9], [3, 4]]
    assert whole(table, 7)["c"].tolist() == [[1, 2], [7, 7], [3, 4]]


def test_nulls_in_fixed_size_lists() -> None:
    rows = [[[1, None], [3, 4]], None, [[5, 6], None], [[7, 8], [9, 10]]]
    table = pa.table({"c": pa.array(rows, pa.list_(pa.list_(pa.int16(), 2), 2))})
    batch = whole(table, null_masks=True)
    assert batch["c"].tolist() == [[[1, 0], [3, 4]], [[0, 0], [0, 0]], [[5, 6], [0, 0]], [[7, 8], [9, 10]]]
    assert batch["c.is_null"].tolist() == [True, True, True, False]
    assert whole(table, 2)["c"].tolist() == [[[1, 2], [3, 4]], [[2, 2], [2, 2]], [[5, 6], [2, 2]], [[7, 8], [9, 10]]]
    with pytest.raises(DataError, match="'c' has 3 rows with nulls"):
        whole(table)
    floats = whole(pa.table({"c": pa.array([[1, None], None], pa.list_(pa.float64(), 2))}))["c"].tolist()
    assert same(floats, [[1, math.nan], [math.nan, math.nan]])


def test_a_null_struct_makes_its_members_null() -> None:
    kind = pa.struct([("x", pa.int64()), ("deep", pa.struct([("y", pa.string())]))])
    table = pa.table({"s": pa.array([{"x": 1, "deep": {"y": "a"}}, None, {"x": 2, "deep": None}], kind)})
    with pytest.raises(DataError, match=r"'s\.x' has 1 nulls"):
        whole(table)
    batch = whole(table, null_masks=True)
    assert batch["s.x"].tolist() == [1, 0, 2]
    assert batch["s.x.is_null"].tolist() == [False, True, False]
    assert batch["s.deep.y"] == ["a", None, None]
    assert whole(table, {"s.x": -1, "s.deep.y": "?"})["s.deep.y"] == ["a", "?", "?"]


def test_a_mask_that_has_the_name_of_a_column() -> None:
    with pytest.raises(DataError, match=r"null_masks=True adds a column 'a\.is_null', which the dataset has"):
        fields_of(pa.schema([("a", pa.int8()), ("a.is_null", pa.int8())]), null_masks=True)


def test_a_null_in_bytes_is_an_empty_row_of_flat() -> None:
    flat = whole(pa.table({"c": [b"ab", None, b"", b"c"]}), ragged="flat")["c"]
    assert isinstance(flat, Flat)
    assert (bytes(flat.values.tolist()), flat.offsets.tolist()) == (b"abc", [0, 2, 2, 2, 3])


def table_with_nulls(rows: int) -> pa.Table:
    numbers = [None if row % 3 == 0 else row for row in range(rows)]
    days = [None if number is None else date(2020, 1, 1) + timedelta(number) for number in numbers]
    texts = [None if number is None else str(number) for number in numbers]
    return pa.table({"i": pa.array(numbers, pa.int64()), "d": days, "s": texts, "id": range(rows)})


def test_a_loader_with_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has the masks, also of datasets of few columns, which are made from the rows of all columns."""
    monkeypatch.setattr(parquet, "SHARED_BYTES", 0)  # no bytes of the file are cached
    pq.write_table(table_with_nulls(100), tmp_path / "x.parquet", row_group_size=30)
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    loader = make_loader(str(tmp_path / "x.parquet"), 8, cache=cache, null_masks=True)
    found = {}
    for batch in loader:
        assert batch.keys() == {"i", "i.is_null", "d", "d.is_null", "s", "id", "id.is_null"}
        assert not batch["id.is_null"].any()
        found |= dict(
            zip(
                batch["id"].tolist(),
                zip(batch["i"].tolist(), batch["i.is_null"].tolist(), batch["s"], strict=True),
                strict=True,
            )
        )
    assert found == {row: (row, False, str(row)) if row % 3 else (0, True, None) for row in range(100)}
    few = make_dataset(str(tmp_path / "x.parquet"), columns=["i"], cache=cache, null_masks=True)
    content = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").unlink()  # The rows of all columns are cached.
    batch = few.__getitems__(range(100)).columns
    assert batch["i"].tolist() == [row if row % 3 else 0 for row in range(100)]
    assert batch["i.is_null"].tolist() == [row % 3 == 0 for row in range(100)]
    (tmp_path / "x.parquet").write_bytes(content)
    assert sum(part["i.is_null"].sum() for part in few.split([0.5, 0.5])) == 34
    with pytest.raises(DataError, match=rf"x\.parquet row group 0 column 'i' has 10 nulls: {WAYS_OUT}"):
        make_dataset(str(tmp_path / "x.parquet"), columns=["i"], cache=cache)[0]


def test_masked_values_are_zeros_whatever_the_file_holds() -> None:
    validity, values = pa.py_buffer(b"\x05"), pa.py_buffer(np.array([1, 99, 3], np.int32))
    column = pa.Array.from_buffers(pa.int32(), 3, [validity, values])
    assert column.to_pylist() == [1, None, 3]
    assert whole(pa.table({"c": column}), null_masks=True)["c"].tolist() == [1, 0, 3]


def test_nulls_among_gathered_rows() -> None:
    tables = [table_with_nulls(9).select(["s"]), table_with_nulls(5).select(["s"])]
    which, rows = np.array([1, 0, 0, 1]), np.array([0, 3, 4, 4])
    assert to_batch(gather(tables, which, rows))["s"] == [None, None, "4", "4"]


LONG = np.arange(2000)
CLOSE = np.float64(1 / 3), np.nextafter(1 / 3, 1)


@pytest.mark.parametrize(
    ("filling", "other"),
    [
        ([LONG], [np.where(LONG == 1000, 0, LONG)]),
        ({"c": (LONG,)}, {"c": (np.where(LONG == 1000, 0, LONG),)}),
        ([np.full(2, CLOSE[0])], [np.full(2, CLOSE[1])]),
        (np.array([None, LONG], object), np.array([None, np.where(LONG == 1000, 0, LONG)], object)),
        (pa.array(LONG), pa.array(LONG + 1)),
        (pa.chunked_array([LONG]), pa.chunked_array([LONG + 1])),
        (pa.scalar(1, pa.timestamp("ns")), pa.scalar(2, pa.timestamp("ns"))),
        (pa.array(["a", "b"]).dictionary_encode()[0], pa.array(["b", "a"]).dictionary_encode()[0]),
    ],
)
def test_the_digest_of_a_null_replacement_is_of_its_values(filling: Any, other: Any) -> None:
    assert digest_of(filling) != digest_of(other)
    assert digest_of(filling) == digest_of(copy.deepcopy(filling))


def test_another_null_replacement_has_other_cached_rows(tmp_path: Path) -> None:
    table = pa.table({"c": pa.array([None], pa.list_(pa.list_(pa.int64(), 2000), 1))})
    feather.write_feather(table, str(tmp_path / "x.arrow"))
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    for filling in (LONG, np.where(LONG == 1000, 0, LONG)):
        dataset = make_dataset(str(tmp_path / "x.arrow"), fill_null={"c": [filling]}, cache=cache)
        assert dataset[0]["c"].tolist() == [filling.tolist()]
