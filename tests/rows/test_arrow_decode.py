"""Batches of every supported type equal the result of pyarrow's take."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from decoded import gather, plain, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload.catalog.locations import Location
from dataload.errors import ConfigError, DataError
from dataload.formats.schema import fields_of
from dataload.rows.arrow_decode import decode
from dataload.rows.batch_tree import map_tensors
from dataload.rows.collate import Flat, cut, to_batch
from dataload.rows.columns import Dense
from dataload.rows.numbered_rows import NumberedRows

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
    if types.is_dictionary(kind):
        return values_of(kind.value_type)
    if types.is_boolean(kind):
        return st.booleans()
    if types.is_integer(kind):
        signed = types.is_signed_integer(kind)
        top = 2 ** (kind.bit_width - signed)
        return st.integers(-top if signed else 0, top - 1)
    if types.is_floating(kind):
        top = float(np.finfo(kind.to_pandas_dtype()).max)  # without bounds most halves drawn overflow and are redrawn
        numbers = st.floats(-top, top, width=kind.bit_width) | st.sampled_from([-math.inf, math.inf])
        return numbers.map(np.float16) if types.is_float16(kind) else numbers
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    if types.is_fixed_size_binary(kind):
        return st.binary(min_size=kind.byte_width, max_size=kind.byte_width)
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
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
    pa.list_(pa.list_(pa.float64(), 2), 3),
    pa.list_view(pa.int64()),
    pa.large_list_view(pa.float32()),
    pa.list_(pa.bool_()),
    pa.list_(pa.list_(pa.float32(), 4)),
    pa.large_list(pa.list_(pa.list_(pa.int16(), 2), 3)),
    pa.list_view(pa.list_(pa.bool_(), 2)),
    pa.list_(pa.list_(pa.uint8(), 0)),
    pa.string_view(),
    pa.binary_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int16(), pa.float32()),
]


@pytest.mark.variants
@pytest.mark.parametrize("kind", TYPES, ids=str)
@settings(max_examples=25)
@given(data=st.data())
def test_a_batch_holds_what_take_gives(kind: pa.DataType, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.lists(values_of(kind), min_size=1, max_size=6), min_size=1, max_size=3))
    tables = [pa.table({"c": pa.array(part, kind)}) for part in parts]
    which = np.array(data.draw(st.lists(st.integers(0, len(parts) - 1), max_size=8)), np.int64)
    rows = np.array([data.draw(st.integers(0, len(parts[part]) - 1)) for part in which], np.int64)

    sliced = [
        pa.concat_tables([table, table]).slice(len(table), len(table)) for table in tables
    ]  # offsets that start late
    for source in (tables, sliced):
        found = to_batch(gather(source, which, rows))["c"]
        expected = [parts[part][row] for part, row in zip(which, rows, strict=True)]
        assert len(found) == len(expected)
        assert [plain(value) for value in found] == expected


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_dtypes_and_shapes_follow_the_schema(kind: pa.DataType) -> None:
    batch = whole(pa.table({"c": pa.nulls(2, kind)}).filter([False, False]))["c"]
    assert len(batch) == 0
    if kind in NUMBERS:
        assert batch.dtype == torch.from_numpy(np.empty(0, kind.to_pandas_dtype())).dtype
    if pa.types.is_fixed_size_list(kind):
        assert batch.shape[:2] == (0, kind.list_size)


@pytest.mark.parametrize(
    ("name", "precision", "scale"),
    [
        (name, *size)
        for name in ("decimal32", "decimal64", "decimal128", "decimal256")
        for size in ((9, 2), (10, 2), (15, 15), (5, 22), (1, 0))
        if size[0] <= 9 or name != "decimal32"
    ],
)
def test_decimals_become_the_nearest_floats(name: str, precision: int, scale: int) -> None:
    """Arrow makes 0.35000000000000003 of 0.35."""
    if not hasattr(pa, name):
        pytest.skip(f"pyarrow {pa.__version__} lacks {name}")
    unscaled = np.random.default_rng(0).integers(1 - 10**precision, 10**precision, 500).tolist()
    rows = [Decimal(number).scaleb(-scale) for number in (*unscaled, 35 % 10**precision, 0)]
    kind = getattr(pa, name)(precision, scale)
    table = pa.table({"c": pa.array([Decimal(1).scaleb(-scale), *rows, None], kind).slice(1)})
    found = whole(table)["c"].tolist()
    assert found[:-1] == [float(row) for row in rows]
    assert math.isnan(found[-1])
    lists = whole(pa.table({"c": pa.array([rows, [], rows[:1]], pa.list_(kind))}))["c"]
    assert [values.tolist() for values in lists] == [[float(row) for row in rows], [], [float(rows[0])]]


@pytest.mark.parametrize(("kind", "most"), [(pa.decimal128(38, 2), 2**64), (pa.decimal256(76, 2), 2**192)], ids=str)
def test_decimals_of_many_digits_become_the_nearest_floats_if_their_values_have_few(
    kind: pa.DataType, most: int
) -> None:
    rows = [Decimal(number).scaleb(-2) for number in (*range(-999, 1000, 7), 2**53)]
    large = [-(2**63), 2**64 + 1, most]
    column = pa.array([*rows, *(Decimal(f"{number}e-2") for number in large), None], kind)
    found = whole(pa.table({"c": column}))["c"].tolist()
    assert found[: len(rows)] == [float(row) for row in rows]
    assert found[len(rows) : -1] == pytest.approx([number / 100 for number in large], rel=1e-15)


def test_times_are_their_counts_and_decimals_floats() -> None:
    moment = datetime(2026, 5, 17, 1, 2, 3, 4, UTC)
    table = pa.table(
        {
            "date": pa.array([date(1970, 1, 3)], pa.date32()),
            "day": pa.array([date(1970, 1, 3)], pa.date64()),
            "second": pa.array([time(0, 1)], pa.time32("s")),
            "time": pa.array([time(0, 0, 1)], pa.time64("ns")),
            "moment": pa.array([moment], pa.timestamp("us", tz="UTC")),
            "span": pa.array([timedelta(seconds=2)], pa.duration("ms")),
            "price": pa.array([Decimal("12.50")], pa.decimal128(6, 2)),
            "much": pa.array([Decimal("1e30")], pa.decimal256(40, 0)),
        }
    )
    batch = whole(table)
    found = {name: column.item() for name, column in batch.items()}
    assert found == {
        "date": 2,
        "day": 2 * 86_400_000,
        "second": 60,
        "time": 10**9,
        "moment": (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1),
        "span": 2000,
        "price": 12.5,
        "much": 1e30,
    }
    assert {column.dtype for column in batch.values()} == {torch.int64, torch.float64}


def test_structs_are_dotted_columns() -> None:
    rows = [{"x": 1, "deep": {"y": "a"}}, {"x": 2, "deep": {"y": "b"}}]
    kind = pa.struct([("x", pa.int64()), ("deep", pa.struct([("y", pa.string())]))])
    table = pa.table({"s": pa.array(rows, kind), "z": [5, 6]})
    batch = whole(table)
    assert {name: [plain(value) for value in column] for name, column in batch.items()} == {
        "s.x": [1, 2],
        "s.deep.y": ["a", "b"],
        "z": [5, 6],
    }
    holes = pa.table({"s": pa.array([rows[0], None], kind)})
    with pytest.raises(DataError, match=r"'s\.x' has 1 nulls"):
        whole(holes)
    assert whole(holes, {"s.x": -1, "s.deep.y": "?"})["s.x"].tolist() == [1, -1]


def test_a_batch_is_of_views(tmp_path: Any) -> None:
    table = pa.table({"image": [b"abc", b"de"], "a": [1.0, 2.0], "b": [3.0, 4.0]})
    records = gather([table], np.zeros(2, np.int64), np.arange(2))
    batch = to_batch(records, group={"x": ["a", "b"]})
    assert np.shares_memory(batch["x"].numpy(), records.rows)
    assert batch["x"].tolist() == [[1, 3], [2, 4]]
    blob = np.frombuffer(records.blobs[0].heap(records.layout.ragged[0]), np.uint8)
    assert all(np.shares_memory(np.frombuffer(image, np.uint8), blob) for image in batch["image"])
    assert all(image.readonly for image in batch["image"])


@pytest.mark.parametrize("ragged", ["list", "flat"])
def test_cutting_gives_the_batches_of_its_parts(ragged: str) -> None:
    table = pa.table({"n": [1, 2, 3], "l": [[1], [], [2, 3]], "b": [b"a", b"", b"bc"], "s": ["x", "yy", ""]})
    records = gather([table], np.zeros(3, np.int64), np.arange(3))
    parts = list(cut(to_batch(records, ragged=ragged), [2, 1]))
    for part, expected in zip(parts, [records[:2], records[2:]], strict=True):
        other = to_batch(expected, ragged=ragged)
        assert part.keys() == other.keys()
        for name, column in part.items():
            if isinstance(column, Flat):
                assert column.values.tolist() == other[name].values.tolist()
                assert column.offsets.tolist() == other[name].offsets.tolist()
            else:
                assert [plain(value) for value in column] == [plain(value) for value in other[name]]


@pytest.mark.parametrize("ragged", ["list", "flat"])
def test_rows_are_indexed_like_a_list(ragged: str) -> None:
    """Indexing works for every kind of column, from both ends."""
    table = pa.table(
        {
            "a": [1.0, 2.0, 3.0],
            "b": [4.0, 5.0, 6.0],
            "number": [7, 8, 9],
            "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
            "list": [[1], [], [2, 3]],
            "binary": [b"a", b"", b"bc"],
            "text": ["x", "yy", ""],
        }
    )
    expected = [
        {
            "x": [row["a"], row["b"]],
            **{name: row[name] for name in ("number", "fixed", "list", "text")},
            "binary": row["binary"] if ragged == "list" else list(row["binary"]),
        }
        for row in table.to_pylist()
    ]
    records = gather([table], np.zeros(3, np.int64), np.arange(3))
    shape: dict[str, Any] = {"ragged": ragged, "group": {"x": ["a", "b"]}}
    rows = NumberedRows(records, np.arange(3), lambda row: Location("rows", 0, row), **shape)

    def plain_row(row: dict[str, Any]) -> dict[str, Any]:
        return {name: plain(value) for name, value in row.items()}

    for index in (*range(-3, 3), np.int8(-1), np.uint8(2)):
        assert plain_row(rows[index]) == expected[index], index
    for part in (slice(None), slice(-2, None), slice(-3, -1), slice(None, None, -1), slice(-1, None, -2), slice(5, 9)):
        assert [plain_row(row) for row in rows[part]] == expected[part], part
    assert [plain_row(row) for row in rows] == expected
    none = rows.part(slice(0, 0))
    for some, index in ((rows, 3), (rows, -4), (none, 0), (none, -1)):
        with pytest.raises(IndexError):
            some[index]


def test_dictionaries_come_as_their_values() -> None:
    table = pa.table({"c": pa.array(["x", "y", "x"]).dictionary_encode()})
    assert whole(table)["c"] == ["x", "y", "x"]


def test_text_that_is_not_utf_8() -> None:
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff"))
    with pytest.raises(DataError, match="UTF-8"):
        whole(pa.table({"c": broken}))


def test_flat() -> None:
    table = pa.table({"numbers": [[1, 2], [], [3]], "bytes": [b"ab", b"", b"c"], "text": ["a", "b", "c"]})
    batch = to_batch(gather([table], np.array([0, 0]), np.array([2, 0])), ragged="flat")
    numbers = batch["numbers"]
    assert isinstance(numbers, Flat)
    assert (numbers.values.tolist(), numbers.offsets.tolist()) == ([3, 1, 2], [0, 1, 3])
    assert bytes(batch["bytes"].values.tolist()) == b"cab"
    assert batch["text"] == ["c", "a"]


def test_group() -> None:
    table = pa.table({"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5, 6], "d": ["x", "y"]})
    columns = gather([table], np.array([0, 0]), np.array([0, 1]))
    batch = to_batch(columns, group={"x": ["b", "a"]})
    assert batch["x"].tolist() == [[3.0, 1.0], [4.0, 2.0]]
    assert batch["x"].stride(1) == 1
    assert set(batch) == {"x", "c", "d"}
    for members in (["a", "c"], ["a", "d"], ["a", "nothing"]):
        with pytest.raises(ConfigError, match="'x'"):
            to_batch(columns, group={"x": members})


def test_map_tensors_reaches_everything() -> None:
    batch = {
        "a": torch.ones(2),
        "b": [torch.ones(1), "text"],
        "c": (torch.ones(1), b""),
        "d": Flat(torch.ones(1), torch.ones(2)),
        "e": [[{"f": torch.ones(1), "g": 1}, {"f": None, "g": None}], ["text"]],
    }
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert doubled["a"].tolist() == [2, 2]
    assert doubled["b"][0].tolist() == [2]
    assert doubled["b"][1] == "text"
    assert doubled["c"][0].tolist() == [2]
    assert isinstance(doubled["d"], Flat)
    assert doubled["d"].values.tolist() == [2]
    assert doubled["e"] == [[{"f": torch.full((1,), 2.0), "g": 1}, {"f": None, "g": None}], ["text"]]


def test_map_tensors_takes_one_call_for_the_strings_of_a_row() -> None:
    batch = {"tags": [["a", "b", None]] * 100, "turns": [[{"role": "user", "text": "hello"}] * 10] * 100}
    found, calls = [batch], list[str]()
    sys.setprofile(lambda _, event, __: calls.append(event) if event == "call" else None)
    try:
        found[0] = map_tensors(batch, lambda tensor: tensor)
    finally:
        sys.setprofile(None)
    assert found == [batch]
    assert len(calls) < 3 * 1200  # of 3,300 strings, in 1,200 lists and dicts


@pytest.mark.parametrize("kind", [pa.int32(), pa.bool_(), pa.large_string()], ids=str)
def test_memory_that_is_longer_than_its_values(kind: pa.DataType) -> None:
    """A file may claim a buffer that is a byte too long."""
    column = pa.array(["0", "1", "0"]).cast(pa.int8()).cast(kind)
    longer = [buffer and pa.py_buffer(buffer.to_pybytes() + b"x") for buffer in column.buffers()]
    found = whole(pa.table({"c": pa.Array.from_buffers(kind, 3, longer).slice(1)}))["c"]
    assert [str(int(value)) for value in found] == ["1", "0"]


def test_flags_are_unpacked_from_where_they_begin() -> None:
    table = pa.table({"flag": pa.array(np.arange(100_000) % 7 == 0)})
    [column] = decode(table.slice(99_993, 5), fields_of(table.schema), None, "here", table.schema).values()
    assert isinstance(column, Dense)
    assert column.values.tolist() == [number % 7 == 0 for number in range(99_993, 99_998)]
    assert column.values.base is not None
    assert column.values.base.nbytes < 100


def test_decoding_does_without_pandas(tmp_path: Path) -> None:
    """The import would delay the first batch, and each background process, by most of a second."""
    columns = {str(kind): pa.array([True, None]).cast(pa.int8()).cast(kind) for kind in NUMBERS}
    columns |= {"text": pa.array(["a", "b"]), "codes": pa.array(["a", "a"]).dictionary_encode()}
    columns |= {"lists": pa.array([[1], []]), "pairs": pa.array([[1, 2]] * 2, pa.list_(pa.int8(), 2))}
    table = pa.table(columns)
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
        for _ in range(2):
            file.write(table.slice(0, 1))
    program = f"""
import sys
import pyarrow as pa
from dataload.rows.arrow_decode import decode
from dataload.formats.schema import fields_of

table = pa.ipc.open_file({str(tmp_path / "rows.arrow")!r}).read_all()
fields = fields_of(table.schema)
for rows in table, table.slice(0, 1):
    print(len(decode(rows, fields, None, "here", table.schema)))
print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["16", "16", "False"], done.stderr


@pytest.mark.slow
def test_batches_do_without_pandas(tmp_path: Path) -> None:
    """Each process that makes batches would import it: a third of a second, and tens of megabytes."""
    texts = [f"text {row}" for row in range(100)]
    table = pa.table({"text": texts, "topic": ["a", "b"] * 50, "pairs": [[{"a": row}] for row in range(100)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    program = f"""
import sys
from dataload import make_loader

for batch in make_loader({str(tmp_path / "rows.parquet")!r}, 100, shuffle=False, cache_dir={str(tmp_path / "cache")!r}):
    print(batch["text"][99], batch["topic"][99], batch["pairs"][99])
print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["text 99 b [{'a': 99}]", "False"], done.stderr
