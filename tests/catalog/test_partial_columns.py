"""Tests of columns that some files lack, or have with another type: `columns=` leaves them out or makes them null."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from dataload import CacheConfig, make_dataset, make_loader
from dataload.errors import ConfigError, DataError


def write(folder: Path, *tables: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, columns in enumerate(tables):
        table = pa.table(columns)
        if number % 2:
            feather.write_feather(table, folder / f"{number}.feather")
        else:
            pq.write_table(table, folder / f"{number}.parquet")
    return folder


@pytest.fixture
def evolved(tmp_path: Path) -> Path:
    """Return a table that gained columns, and whose column z changed its type."""
    new = {"y": [0.5, 1.5], "n": [7, 8], "s": [{"a": 1, "b": "p"}, None], "t": ["u", "v"], "l": [[1], [2, 3]]}
    old = {"x": [1, 2], "z": ["p", "q"]}
    return write(tmp_path / "table", old, {"x": [3, 4], "z": [1, 2], **new}, {**new, "x": [5, 6], "s": [{"a": 9}] * 2})


def rows(source: Any, **options: Any) -> list[dict[str, Any]]:
    dataset = make_dataset(source, **{"cache": False, **options})
    return [
        {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
        for row in dataset.__getitems__(range(len(dataset)))
    ]


def test_columns_that_are_left_out_may_differ(evolved: Path) -> None:
    assert [row["x"] for row in rows(evolved, columns=["x"])] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(DataError, match=r"differ in column 'z': int64 there, string here; leave it out with columns="):
        make_dataset(evolved, cache=False)
    with pytest.raises(DataError, match="differ in column 'z'"):
        make_dataset(evolved, columns=["x", "z"], cache=False)
    with pytest.raises(DataError, match="differ in column 'z'"):
        make_dataset(evolved, columns=["x"], filters=[("z", "=", 1)], cache=False)
    with pytest.raises(DataError, match="differ in column 'z'"):
        make_dataset(evolved, columns=["x"], filters=pc.field("z") == "1", cache=False)
    filled = rows(evolved, columns=["x"], fill_null={"x": 0, "z": 0})
    assert [row["x"] for row in filled] == [1, 2, 3, 4, 5, 6]


def test_a_partition_key_that_some_files_store_is_not_compared(tmp_path: Path) -> None:
    for day, columns in ((1, {"x": [1]}), (2, {"x": [2], "day": [2]})):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table(columns), tmp_path / f"day={day}" / "x.parquet")
    for filters in (pc.field("day") == 1, [("day", "=", 1)]):
        with pytest.raises(DataError, match="'day' as a key of its folders, and other files as a column"):
            make_dataset(tmp_path, columns=["x"], filters=filters, cache=False)


def test_a_named_column_is_null_where_a_file_lacks_it(
    evolved: Path, cache: CacheConfig, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # the second time, from the cached manifest
        found = rows(evolved, columns=["x", "y", "t", "l", "s.b"], cache=cache)
        assert [row["t"] for row in found] == [None, None, "u", "v", "u", "v"]
        assert [row["l"] for row in found] == [None, None, [1], [2, 3], [1], [2, 3]]
        assert [row["s.b"] for row in found] == [None, None, "p", None, None, None]
        np.testing.assert_equal([row["y"] for row in found], [np.nan, np.nan, 0.5, 1.5, 0.5, 1.5])
    assert "'y', 't', 'l': null in the files that lack it, such as" in caplog.text
    with pytest.raises(DataError, match=r"0\.parquet row group 0.*column 'n' has 2 nulls"):
        rows(evolved, columns=["n"])
    assert [row["n"] for row in rows(evolved, columns=["n"], fill_null=-1)] == [-1, -1, 7, 8, 7, 8]
    marked = rows(evolved, columns=["n"], null_masks=True)
    assert [row["n.is_null"] for row in marked] == [True, True, False, False, False, False]


def test_lists_of_runs_that_a_file_lacks(tmp_path: Path) -> None:
    offsets = pa.array([0, 2, 3], pa.int32())
    members = {"n": [1, 1, 2], "t": ["a", "a", "b"]}
    lists = {name: pa.ListArray.from_arrays(offsets, pc.run_end_encode(pa.array(row))) for name, row in members.items()}
    for number, columns in enumerate([{"x": [1, 2]}, {"x": [3, 4], **lists}]):
        table = pa.table(columns)
        with pa.ipc.new_file(tmp_path / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table)
    found = rows(tmp_path, columns=["x", "n", "t"], null_masks=True)
    assert [row["n"] for row in found] == [None, None, [1, 1], [2]]
    assert [row["t"] for row in found] == [None, None, ["a", "a"], ["b"]]


def test_the_order_does_not_depend_on_columns_that_files_lack(evolved: Path) -> None:
    def order(columns: list[str]) -> list[int]:
        loader = make_loader(evolved, 2, columns=columns, null_masks=True, cache=False)
        return [int(value) for batch in loader for value in batch["x"]]

    assert order(["x"]) == order(["x", "n", "s", "t"])
    assert sorted(order(["x"])) == [1, 2, 3, 4, 5, 6]


def test_filters_on_a_column_that_files_lack(evolved: Path) -> None:
    def kept(filters: Any) -> list[int]:
        return [row["x"] for row in rows(evolved, columns=["x"], filters=filters)]

    assert kept([("n", ">", 7)]) == [4, 6]
    assert kept([("x", ">", 1), ("y", "<", 1)]) == [3, 5]
    assert kept(pc.field("n").is_null() | (pc.field("x") == 6)) == [1, 2, 6]
    assert kept(pc.field("n").is_null()) == [1, 2]
    with pytest.raises(ConfigError, match=r"no filter can use 's\.b', because .* lacks this member"):
        kept([("s.b", "=", "p")])


@pytest.mark.parametrize("order", [1, -1])
def test_filters_on_a_column_with_a_dot_that_files_lack(tmp_path: Path, order: int) -> None:
    """It is no member of a struct. So the rows are those of a column without a dot."""
    tables: list[dict[str, Any]] = [{"x": [1, 2]}, {"x": [3, 4], "user.id": [7, 8], "user_id": [7, 8]}]
    write(tmp_path / "table", *tables[::order])
    for sign, value in ((">", 7), ("not in", [7]), ("in", [None, 8])):
        kept = [
            [row["x"] for row in rows(tmp_path / "table", columns=["x"], filters=[(name, sign, value)])]
            for name in ("user.id", "user_id")
        ]
        assert kept[0] == kept[1] != []


@pytest.mark.parametrize("first", [{"x": [1], "s": [{"a": 1}]}, {"x": [1]}], ids=["a", "no struct"])
@pytest.mark.parametrize("filters", [[("s.b", "=", 2)], pc.field("s.b") == 2, pc.field("s", "b") == 2], ids=str)
def test_filters_on_a_member_that_the_first_file_lacks(tmp_path: Path, first: dict[str, Any], filters: Any) -> None:
    write(tmp_path, first, {"x": [2], "s": [{"b": 2}]})
    with pytest.raises(ConfigError, match=r"no filter can use 's\.b', because .*0\.parquet lacks this member"):
        rows(tmp_path, columns=["x"], filters=filters)


def test_a_column_that_is_a_key_of_folders_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "day=1", {"x": [1]})
    write(tmp_path / "day=2", {"x": [1], "day": [2]})
    assert len(rows(tmp_path, columns=["x"])) == 2
    with pytest.raises(DataError, match="has 'day' as a key of its folders, and other files as a column"):
        rows(tmp_path, columns=["day"])


def test_a_file_without_rows_has_no_say_in_the_columns(tmp_path: Path) -> None:
    other_type = pa.table({"x": pa.array([], pa.float64()), "y": pa.array([], pa.string())})
    for number, table in enumerate([other_type, pa.table({}), pa.table({"x": [1, 2]}), other_type]):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    feather.write_feather(other_type, tmp_path / "4.feather")
    assert [row["x"] for row in rows(tmp_path)] == [1, 2]
    assert [row["x"] for row in rows(tmp_path, filters=[("x", ">", 1)])] == [2]
    (tmp_path / "2.parquet").unlink()
    with pytest.raises(DataError, match="lacks column 'x'"):
        make_dataset(tmp_path, cache=False)


def test_an_index_of_pandas_that_some_files_have(tmp_path: Path) -> None:
    write(tmp_path, {"x": [1]}, {"x": [2], "__index_level_0__": [7]})
    with pytest.raises(DataError, match=r"lacks column '__index_level_0__'.*it is an index of pandas.*index=False"):
        make_dataset(tmp_path, cache=False)
    assert [row["x"] for row in rows(tmp_path, columns=["x"])] == [1, 2]
