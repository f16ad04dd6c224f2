"""Columns that files write with different types have the type that pyarrow promotes them to."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from decoded import plain
from typer.testing import CliRunner

from dataload import make_dataset
from dataload.cache.config import CacheConfig
from dataload.cli.app import app
from dataload.errors import ConfigError, DataError

TIME = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC).replace(tzinfo=None)
A, AB = pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int64()), ("b", pa.string())])
PAIRS = {
    "int32 and int64": (pa.array([1], pa.int32()), pa.array([2**40])),
    "int and float": (pa.array([1, 2]), pa.array([0.5])),
    "unsigned and signed": (pa.array([2**32 - 1], pa.uint32()), pa.array([-1], pa.int32())),
    "float32 and float64": (pa.array([0.1], pa.float32()), pa.array([0.1])),
    "units of time": (pa.array([TIME], pa.timestamp("s")), pa.array([TIME], pa.timestamp("ns"))),
    "digits of decimals": (pa.array([Decimal("1.25")]), pa.array([Decimal("2.5000")], pa.decimal128(12, 4))),
    "decimals and floats": (pa.array([Decimal("1.25")]), pa.array([2.5])),
    "lists of numbers": (pa.array([[1], None], pa.list_(pa.int32())), pa.array([[2.5]], pa.large_list(pa.float64()))),
    "arrays": (pa.array([[1, 2]], pa.list_(pa.int32(), 2)), pa.array([[2**40, 4]], pa.list_(pa.int64(), 2))),
    "lists of structs": (
        pa.array([[{"a": 1}], [], None], pa.list_(A)),
        pa.array([[{"a": 2**40, "b": "x"}]], pa.list_(AB)),
    ),
    "maps of structs": (
        pa.array([[("k", {"a": 1})]], pa.map_(pa.string(), A)),
        pa.array([[("k", {"a": 2, "b": "x"}), ("l", None)]], pa.map_(pa.string(), AB)),
    ),
    "lists of lists": (
        pa.array([[[1]]], pa.list_(pa.list_(pa.int8()))),
        pa.array([[[500]]], pa.list_(pa.list_(pa.int16()))),
    ),
}


def write(path: Path, *columns: pa.Array) -> str:
    path.mkdir(exist_ok=True)
    for number, column in enumerate(columns):
        pq.write_table(pa.table({"x": column}), path / f"{number}.parquet")
    return str(path)


def values_of(dataset: Any, name: str = "x") -> list[Any]:
    return [plain(value) for value in dataset.__getitems__(range(len(dataset))).columns[name]]


def as_in_batches(column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    if pa.types.is_temporal(kind):
        column = column.cast(pa.int64())
    return [float(value) if pa.types.is_decimal(kind) else value for value in column.to_pylist()]


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_types_are_promoted_as_pyarrow_does(pair: str, is_swapped: bool, tmp_path: Path) -> None:
    columns = PAIRS[pair][::-1] if is_swapped else PAIRS[pair]
    tables = [pa.table({"x": column}) for column in columns]
    try:
        whole = pa.concat_tables(tables, promote_options="permissive").column("x")
    except pa.ArrowTypeError as error:
        pytest.skip(f"pyarrow {pa.__version__} promotes no {pair}: {error}")
    dataset = make_dataset(write(tmp_path / "x", *columns), cache=False)
    assert values_of(dataset) == as_in_batches(whole)
    assert pa.types.is_large_list(whole.type) or dataset.schema.field("x").type == whole.type


def test_dictionaries_and_views_of_other_values_are_promoted(tmp_path: Path) -> None:
    """The rule of pyarrow knows no dictionary beside plain values. In batches they are the same."""
    columns = pa.array([1, 1], pa.int32()).dictionary_encode(), pa.array([2**40])
    assert values_of(make_dataset(write(tmp_path / "x", *columns), cache=False)) == [1, 1, 2**40]


def test_structs_may_gain_members(tmp_path: Path) -> None:
    """They are null where a file lacks them, without being named, also those of an inner struct that is new."""
    rows = [{"a": 1}, {"a": 2, "b": "x", "c": {"d": 0.5}}]
    path = write(tmp_path / "x", *(pa.array([row]) for row in rows))
    dataset = make_dataset(path, cache=False)
    assert [values_of(dataset, f"x.{name}") for name in ("a", "b")] == [[1, 2], [None, "x"]]
    assert str(values_of(dataset, "x.c.d")) == "[nan, 0.5]"
    with pytest.raises(ConfigError, match=r"can use 'x\.b', because .*0\.parquet lacks this member"):
        make_dataset(path, filters=[("x.b", "=", "x")], cache=False)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            (pa.array([1]), pa.array(["a"])),
            r"1\.parquet and .*0\.parquet differ in column 'x': string there, int64 here",
        ),
        ((pa.array([True]), pa.array([1])), r"differ in column 'x': int64 there, bool here"),
        ((pa.array([{"a": 1}]), pa.array([1])), r"differ in column 'x'"),
        (
            (pa.array(["é"]), pa.array([b"\xff"])),
            r"1\.parquet and .*0\.parquet differ in column 'x': binary there, string here",
        ),
        ((pa.array(["é"]), pa.array([b"abc"], pa.binary(3))), r"differ in column 'x'"),
        ((pa.array([[b"a"]]), pa.array([["a"]])), r"differ in column 'x'"),
        ((pa.array([[{"a": 1, "b": "x"}]]), pa.array([[{"b": b"x", "a": 1}]])), r"differ in column 'x'"),
    ],
)
def test_types_without_a_common_one_are_refused(columns: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        make_dataset(write(tmp_path / "x", *columns), cache=False)


@pytest.mark.parametrize(
    "columns",
    [
        (pa.array([2**53 + 1]), pa.array([0.5])),
        (pa.array([2**60], pa.timestamp("ms")), pa.array([1], pa.timestamp("ns"))),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([1])),
    ],
)
def test_a_value_that_the_promoted_type_cannot_hold_is_an_error_not_another_value(columns: Any, tmp_path: Path) -> None:
    dataset = make_dataset(write(tmp_path / "x", *columns), cache=False)
    with pytest.raises(DataError, match=r"0\.parquet row group 0 column 'x' cannot be decoded"):
        values_of(dataset)


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize(("value", "kept"), [(2**33, [2**40]), (1, [1, 2**40]), (0.5, [1, 2**40])])
def test_filters_compare_promoted_values(value: float, kept: list[int], is_swapped: bool, tmp_path: Path) -> None:
    columns = [pa.array([0, 1], pa.int32()), pa.array([-5, 2**40])]
    path = write(tmp_path / "x", *columns[:: -1 if is_swapped else 1])
    assert sorted(values_of(make_dataset(path, filters=[("x", ">=", value)], cache=False))) == kept


def test_a_cached_file_is_not_served_with_the_type_of_another_dataset(tmp_path: Path) -> None:
    """Decimals and floats have the same records, but a cast to floats rounds."""
    pairs = {
        "ints": PAIRS["int32 and int64"],
        "floats": (pa.array([Decimal(cents) / 10**12 for cents in range(10**11, 10**11 + 99)]), pa.array([2.5])),
        "times": PAIRS["units of time"],
    }
    cache = CacheConfig(cache_dir=str(tmp_path / "cache"), cache_bytes=64 << 20)
    for name, columns in pairs.items():
        path = write(tmp_path / name, *columns)
        whole, alone = [make_dataset(source, cache=False) for source in (path, f"{path}/0.parquet")]
        expected = values_of(whole), values_of(alone)
        for _ in range(2):
            assert values_of(make_dataset(path, cache=cache)) == expected[0]
            assert values_of(make_dataset(f"{path}/0.parquet", cache=cache)) == expected[1]


def test_head_says_what_was_promoted_and_shows_rows_of_promoted_types(tmp_path: Path) -> None:
    columns = pa.array([{"a": 1, "b": 2}]), pa.array([{"a": 0.5, "c": "x"}])
    path = write(tmp_path / "x", *columns)
    result = CliRunner().invoke(app, ["head", path, "--json", "--cache-dir", str(tmp_path / "cache")])
    found = {column["name"]: (column["type"], column["promoted"]) for column in json.loads(result.stdout)["columns"]}
    assert found == {
        "x.a": ("double", f"int64 in {path}/0.parquet, double in {path}/1.parquet"),
        "x.b": ("int64", f"missing in {path}/1.parquet"),
        "x.c": ("string", f"missing in {path}/0.parquet"),
    }
    assert repr(json.loads(result.stdout)["first_rows"]) == "[{'x.a': 1.0, 'x.b': 2, 'x.c': None}]"
    result = CliRunner().invoke(app, ["head", path, "--cache-dir", str(tmp_path / "cache")])
    assert "double (int64 in" in " ".join(result.stdout.split())
