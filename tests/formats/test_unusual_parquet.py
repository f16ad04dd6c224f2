"""Parquet files that Arrow does not write: each gives the rows that pyarrow gives, or one error that names the file."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from decoded import plain

from dataload import CacheConfig, make_dataset
from dataload.errors import DataError
from dataload.formats import parquet


def written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, store_schema=False, **options)
    return sink.getvalue()


def with_empty_group(data: bytes, parent: bytes) -> bytes:
    """Return a Parquet file with a group "empty" without members, as the first member of a group of its schema."""
    size = int.from_bytes(data[-8:-4], "little")
    body, footer = data[: -8 - size], data[-8 - size : -8]
    elements = footer[3] >> 4  # of the list of schema elements, in Thrift's compact protocol
    children = footer.index(bytes([len(parent)]) + parent + b"\x15") + len(parent) + 2
    group = b"\x35\x02\x18\x05empty\x15\x00\x00"  # optional, its name, no children
    changed = bytes([*footer[:3], (elements + 1) << 4 | 0xC, *footer[4:children], footer[children] + 2, 0])
    changed += group + footer[children + 2 :]
    return body + changed + struct.pack("<I", len(changed)) + b"PAR1"


def rows_of(path: Path, **options: Any) -> list[dict[str, Any]]:
    dataset = make_dataset(str(path), cache=False, **options)
    return [{name: plain(value) for name, value in row.items()} for row in dataset.__getitems__(range(len(dataset)))]


@pytest.mark.parametrize("columns", [None, ["c", "a"]])
def test_columns_after_a_struct_without_members_keep_their_values(columns: list[str] | None, tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2], "b": ["x", "y"], "c": [1.5, 2.5]})
    (tmp_path / "x.parquet").write_bytes(with_empty_group(written(table), b"schema"))
    expected = pq.ParquetFile(tmp_path / "x.parquet").read(columns=columns)
    assert rows_of(tmp_path / "x.parquet", columns=columns) == table.select(expected.column_names).to_pylist()


def test_a_struct_without_members_inside_another_is_an_error_that_names_its_column(tmp_path: Path) -> None:
    """Arrow cannot read it. Columns beside it keep their values."""
    table = pa.table({"s": [{"a": 1}, {"a": 2}], "c": [1.5, 2.5]})
    (tmp_path / "x.parquet").write_bytes(with_empty_group(written(table), b"s"))
    with pytest.raises(DataError, match=r"x\.parquet row group 0: column 's' holds structs without members"):
        rows_of(tmp_path / "x.parquet")
    assert rows_of(tmp_path / "x.parquet", columns=["c"]) == [{"c": 1.5}, {"c": 2.5}]


def test_columns_of_one_name_do_not_hide_others(tmp_path: Path) -> None:
    """Also a column whose name is that of a member of a struct."""
    columns = [pa.array([{"x": 1, "y": 2}]), pa.array([3]), pa.array(["a"]), pa.array(["b"]), pa.array([4.5])]
    pq.write_table(pa.table(columns, ["s", "s.x", "t", "t", "z"]), tmp_path / "x.parquet")
    assert rows_of(tmp_path / "x.parquet", columns=["z", "s.y"]) == [{"z": 4.5, "s.y": 2}]
    kept = make_dataset(str(tmp_path / "x.parquet"), columns=["z"], filters=[("s.y", "=", 2)], cache=False)
    assert kept[0]["z"] == 4.5
    for name, columns in {"s.x": ["s"], "t": ["t"]}.items():
        with pytest.raises(DataError, match=rf"x\.parquet: 2 columns would be called '{name}'; leave it out with"):
            rows_of(tmp_path / "x.parquet", columns=columns)


def test_a_name_that_is_no_text_is_an_error_of_the_file(tmp_path: Path) -> None:
    data = written(pa.table({"wxyz": [1], "l": [[{"abcd": 1}]]}))
    for name in (b"wxyz", b"abcd"):
        (tmp_path / "x.parquet").write_bytes(data.replace(name, b"\xff\xfe\xfd\xfc"))
        with pytest.raises(DataError, match=r"x\.parquet has a Parquet footer that cannot be read: 'utf-8'.*") as error:
            rows_of(tmp_path / "x.parquet")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("rows", [10, 200_000])
def test_a_flipped_bit_under_a_checksum_of_the_file_is_an_error(rows: int, tmp_path: Path) -> None:
    table = pa.table({"x": range(rows)})
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False, "write_statistics": False}
    data = bytearray(written(table, **options))
    data[data.index((rows - 1).to_bytes(8, "little"))] ^= 1  # in the last page
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"x\.parquet row group 0 cannot be decoded: .*CRC checksum"):
        rows_of(tmp_path / "x.parquet")
    unverified = CacheConfig(str(tmp_path / "cache"), cache_bytes=64 << 20, page_checksums=False)
    dataset = pickle.loads(pickle.dumps(make_dataset(str(tmp_path / "x.parquet"), cache=unverified)))
    assert dataset[rows - 1]["x"] == (rows - 1) ^ 1


@pytest.mark.slow
def test_a_row_that_takes_more_memory_than_all_row_groups_may_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of 96 MiB each, compressed to a few kB: decoding them would take five times as much, and end a small job."""
    keys = [[("a" * (96 << 20), 1)], [("b" * (96 << 20), 2)]]
    table = pa.table({"m": pa.array(keys, pa.map_(pa.string(), pa.int32())), "x": [1, 2]})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 1 << 20
    monkeypatch.setattr(parquet, "LEAST_MEMORY", 256 << 20)
    monkeypatch.setattr(parquet, "usable_memory", lambda: 2 << 30)
    with pytest.raises(DataError, match=r"x\.parquet row group 0 column 'm': a row takes about \d+ MiB to decode"):
        rows_of(tmp_path / "x.parquet")
    assert rows_of(tmp_path / "x.parquet", columns=["x"]) == [{"x": 1}, {"x": 2}]
