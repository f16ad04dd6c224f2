"""Parquet footers with what no writer puts there, which pyarrow answers by aborting the process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from decoded import plain
from thrift import Struct, fields_of, with_footer, with_length, written

from dataload import make_dataset
from dataload.cache.blocks.reader import Object
from dataload.errors import DataError
from dataload.formats.base import Footer
from dataload.formats.detect import parse_footer
from dataload.formats.table_columns import ID, STORED, TableColumns, TableFile

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
METADATA, CRYPTO_METADATA, ENCRYPTION_ALGORITHM = 3, 8, 8
TYPE, STATISTICS, SIZE_STATISTICS = 1, 12, 16
PLANTED_IN_CHUNK = {
    "column key": (STRUCT, {2: (STRUCT, {1: (LIST, (BINARY, [b"x"]))})}),
    "footer key": (STRUCT, {1: (STRUCT, {})}),
    "no key": (STRUCT, {}),
}
PLANTED_IN_METADATA = {
    "long histograms": (SIZE_STATISTICS, (STRUCT, {2: (LIST, (I64, [2] * 9)), 3: (LIST, (I64, [2] * 9))})),
    "text of numbers": (SIZE_STATISTICS, (STRUCT, {1: (I64, 8)})),
    "short bounds": (STATISTICS, (STRUCT, {3: (I64, 0), 5: (BINARY, b"\1"), 6: (BINARY, b"\1")})),
    "other type": (TYPE, (I32, 12)),
}
PROGRAM = """
import json, sys
from dataload import make_dataset
from dataload.errors import DataError

for path in sys.argv[1:]:
    for options in ({}, {"columns": ["y"]}, {"columns": ["y"], "filters": [("x", ">", 1)]}):
        try:
            dataset = make_dataset(path, cache=False, **options)
            result = dataset.__getitems__(range(len(dataset))).columns["y"].tolist()
        except DataError as error:
            result = str(error)
        print(json.dumps(result), flush=True)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What reading each file ends in, with all columns, with y alone, and with a filter of x: column y, or an error.

    One child process reads all files, whose columns are x and y. The footer is odd in the last chunk of x.
    """

    def chunk(footer: Struct) -> Struct:
        found: Struct = footer[4][1][1][-1][1][1][1][0]
        return found

    changes = {
        name: lambda footer, value=value: chunk(footer).update({CRYPTO_METADATA: value})
        for name, value in PLANTED_IN_CHUNK.items()
    }
    changes |= {
        name: lambda footer, item=item: chunk(footer)[METADATA][1].update([item])
        for name, item in PLANTED_IN_METADATA.items()
    }
    changes["algorithm"] = lambda footer: footer.update({ENCRYPTION_ALGORITHM: (STRUCT, {1: (STRUCT, {})})})
    folder = tmp_path_factory.mktemp("planted")
    pq.write_table(pa.table({"x": [1, 2], "y": [3, 4]}), folder / "whole", row_group_size=1)
    paths = [folder / f"{name}.parquet" for name in changes]
    for path, change in zip(paths, changes.values(), strict=True):
        path.write_bytes(with_footer((folder / "whole").read_bytes(), change))
    child = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, paths)], capture_output=True, check=False)
    assert not child.returncode, child.stderr.decode()
    found = list(map(json.loads, child.stdout.splitlines()))
    return {name: found[3 * place : 3 * place + 3] for place, name in enumerate(changes)}


@pytest.mark.parametrize("name", PLANTED_IN_CHUNK)
def test_an_encrypted_column_of_an_unsigned_footer_is_refused_by_name(results: dict[str, list[Any]], name: str) -> None:
    every, other, filtered = results[name]
    assert f"{name}.parquet: column 'x' is encrypted; leave it out with columns=" in every
    assert other == [3, 4]
    assert "column 'x' is encrypted" in filtered


@pytest.mark.parametrize("name", PLANTED_IN_METADATA)
def test_statistics_that_do_not_fit_their_column_end_no_process(results: dict[str, list[Any]], name: str) -> None:
    every, other, filtered = results[name]
    assert f"{name}.parquet row group " in every
    assert other == [3, 4]
    assert f"{name}.parquet row group " in filtered


def test_an_encryption_algorithm_hides_no_column_in_plain_text(results: dict[str, list[Any]]) -> None:
    assert results["algorithm"] == [[3, 4], [3, 4], [4]]


TABLE = pa.table(
    {
        "x": [1, None, 3, 4],
        "text": ["a" * 300, "b", None, "c"],
        "coded": pa.array(["a", "b", "a", None]).dictionary_encode(),
        "lists": [[1, 2], None, [], [3]],
        "flag": [True, None, None, False],
        "parts": [{"a": 1, "b": [b"x"]}, None, {"a": None, "b": None}, {"a": 2, "b": []}],
    }
)


@pytest.mark.parametrize("options", [{}, {"write_statistics": False}, {"write_page_index": True, "version": "1.0"}])
def test_unusual_encodings_of_a_footer_mean_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    """with_footer writes each head of a field in its long form, as no writer does."""
    pq.write_table(TABLE, tmp_path / "usual.parquet", row_group_size=2, **options)
    (tmp_path / "unusual.parquet").write_bytes(with_footer((tmp_path / "usual.parquet").read_bytes(), lambda _: None))
    paths = [str(tmp_path / f"{name}.parquet") for name in ("usual", "unusual")]
    usual, unusual = (make_dataset(path, cache=False, null_masks=True) for path in paths)
    groups = [[(group.rows, group.bytes, group.sizes) for group in each.row_groups] for each in (usual, unusual)]
    assert groups[0] == groups[1]
    nulls = [{name: counts.tolist() for name, counts in each.manifest.nulls.items()} for each in (usual, unusual)]
    assert nulls[0] == nulls[1]
    assert nulls[0].keys() == {"x", "flag", "parts.a"}
    assert plain_rows(unusual) == plain_rows(usual)


def plain_rows(dataset: Any) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in row.items()} for row in dataset.__getitems__(range(len(dataset)))]


def test_arrow_reads_a_schema_once_for_all_files_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, rows: list[int], **metadata: str) -> None:
        schema = pa.schema([("a schema of this test", pa.int64())], metadata)
        pq.write_table(pa.table([rows], schema), tmp_path / f"{name}.parquet", row_group_size=2)

    opened, file = list[int](), pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda *args, **options: opened.append(1) or file(*args, **options))
    for number in range(5):
        write(str(number), list(range(number + 1)))
    assert [group.rows for group in make_dataset(str(tmp_path), cache=False).row_groups] == [1, 2, 2, 1, 2, 2, 2, 2, 1]
    assert len(opened) == 1
    write("other", [5], key="value")
    make_dataset(str(tmp_path), cache=False)
    assert len(opened) == 2


def test_a_second_list_of_row_groups_is_refused(tmp_path: Path) -> None:
    """Arrow would take the last one."""
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), file)
    data = file.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - size : -9] + bytes([LIST, 2 * 4, STRUCT, 0])
    file.write_bytes(data[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    assert pq.read_metadata(file).num_row_groups == 0
    with pytest.raises(DataError, match=r"x\.parquet has a Parquet footer that cannot be read: .* two fields 4"):
        make_dataset(str(file), cache=False)


def test_opening_a_footer_takes_few_steps_a_column(tmp_path: Path) -> None:
    """A column chunk takes pyarrow about a microsecond, and a call takes Python a tenth of that."""
    table = pa.table({f"column_{number}": [0, None] for number in range(2000)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1)
    make_dataset(str(tmp_path / "x.parquet"), cache=False)  # finds out what the schema decides
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("dataload.formats.parquet"):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    threading.setprofile(sys.getprofile())
    try:
        make_dataset(str(tmp_path / "x.parquet"), cache=False)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert 0 < calls.total() < 4 * 4000, calls.most_common(9)


def _footer_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue().to_pybytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


def _parsed(footer: bytes, by: Any = None, size: int = 10_000) -> Footer:
    """Return the footer of x.parquet, perhaps as a file of a table whose columns are known by name or by id."""
    obj = Object("/x.parquet", size, "")
    if by is not None:
        columns = TableColumns(pa.schema([pa.field("x", pa.int64(), metadata={ID: b"1", STORED: b'["x"]'})]), by)
        obj = TableFile("/x.parquet", size, "", columns=columns)
    return parse_footer(memoryview(with_length(footer)), obj)


MUCH = b"\xff" * 8 + b"\x7f"  # 2**63 - 1 as a size
DEEP_FIELDS, DEEP_LISTS = 0x90 | STRUCT, 0x90 | LIST  # heads of a field 16, which no footer has
TAILS = {
    "structs in structs": bytes([DEEP_FIELDS]) + bytes([0x10 | STRUCT]) * 5000,
    "lists in lists": bytes([DEEP_LISTS]) + bytes([0x10 | LIST]) * 5000,
    "a list of 2**63 booleans": bytes([DEEP_LISTS, 0xF1]) + MUCH,
    "a list of 2**63 bytes": bytes([DEEP_LISTS, 0xF3]) + MUCH,
    "a list of 2**63 doubles": bytes([DEEP_LISTS, 0xF7]) + MUCH,
    "a list of 2**63 structs": bytes([DEEP_LISTS, 0xF0 | STRUCT]) + MUCH,
    "a text of 2**63 bytes": bytes([0x90 | BINARY]) + MUCH,
    "a number of a megabyte": bytes([0x90 | I64]) + b"\xff" * (1 << 20) + b"\1",
    "a text whose size is a number of a megabyte": bytes([0x90 | BINARY]) + b"\xff" * (1 << 20) + b"\1",
}
OF_TABLES = None, "name", "id"


@pytest.mark.parametrize("by", OF_TABLES)
@pytest.mark.parametrize("tail", TAILS)
def test_a_footer_that_never_ends_is_an_error_at_once(tail: str, by: Any) -> None:
    """Most of these would take a decade, or more memory than there is."""
    footer = _footer_of(pa.table({"x": [1, 2]}))
    with pytest.raises(DataError, match=r"x\.parquet has a Parquet footer"):
        _parsed(footer[:-1] + TAILS[tail] + b"\0", by)
    with pytest.raises(DataError, match=r"x\.parquet has a Parquet footer"):
        _parsed(TAILS[tail] + footer, by)


def test_field_numbers_of_more_than_16_bits_hide_no_second_list_of_row_groups() -> None:
    """Arrow counts them in 16 bits, and would take the last list."""
    footer = _footer_of(pa.table({"x": [1, 2]}))
    fields, step = divmod(0x10000 + 4 - max(fields_of(footer)), 15)
    assert step
    again = bytes([0xF0 | I64, 0]) * fields + bytes([step << 4 | LIST, STRUCT])
    with pytest.raises(DataError, match="two fields 4"):
        _parsed(footer[:-1] + again + b"\0")


CHANGED_ROWS = {  # of the first row group, or of its chunk of a column: which rows, and which values
    "fewer rows": lambda group: group.update({3: (I64, 2)}),
    "no rows": lambda group: group.update({3: (I64, 0)}),
    "more rows": lambda group: group.update({3: (I64, 8)}),
    "fewer numbers": lambda group: _metadata(group, 0).update({5: (I64, 2)}),
    "more numbers": lambda group: _metadata(group, 0).update({5: (I64, 8)}),
    "fewer values of lists": lambda group: _metadata(group, 1).update({5: (I64, 2)}),
    "less than no values": lambda group: _metadata(group, 1).update({5: (I64, 1)}),
}


def _metadata(group: Struct, leaf: int) -> Struct:
    found: Struct = group[1][1][1][leaf][METADATA][1]
    return found


@pytest.mark.parametrize("change", CHANGED_ROWS)
def test_a_row_group_whose_columns_have_other_rows_hides_none(tmp_path: Path, change: str) -> None:
    pq.write_table(pa.table({"x": [1, 2], "y": [[3], [4, 5]]}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(with_footer(whole, lambda footer: CHANGED_ROWS[change](footer[4][1][1][0])))
    with pytest.raises(DataError, match=r"x\.parquet has a Parquet footer that cannot be read: row group 0 of "):
        make_dataset(str(tmp_path / "x.parquet"), cache=False)


def test_more_rows_than_any_row_group_has_are_an_error_of_the_file(tmp_path: Path) -> None:
    def change(footer: Struct) -> None:
        group = footer[4][1][1][0]
        group.update({3: (I64, 1 << 41)})
        _metadata(group, 0).update({5: (I64, 1 << 41)})

    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "whole.parquet")
    (tmp_path / "x.parquet").write_bytes(with_footer((tmp_path / "whole.parquet").read_bytes(), change))
    with pytest.raises(DataError, match=r"x\.parquet has a Parquet footer that cannot be read: row group 0 of "):
        make_dataset(str(tmp_path / "x.parquet"), cache=False)


@pytest.mark.parametrize("size", [1 << 20, 1 << 61])
def test_a_chunk_that_ends_behind_its_file_is_an_error_before_anything_is_fetched(tmp_path: Path, size: int) -> None:
    """Another chunk begins behind it, and ends inside the file."""
    pq.write_table(pa.table({"x": [1, 2], "y": [3, 4]}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    change = lambda footer: _metadata(footer[4][1][1][0], 0).update({7: (I64, size << 1)})  # noqa: E731
    (tmp_path / "x.parquet").write_bytes(with_footer(whole, change))
    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=False)
    content = (tmp_path / "x.parquet").read_bytes()
    footer = _parsed(content[-8 - int.from_bytes(content[-8:-4], "little") : -8], size=len(content))
    with pytest.raises(DataError, match=r"x\.parquet row group 0 cannot be fetched: its footer names bytes 4 to "):
        footer.fetched(0, ["x", "y"], 100)
    with pytest.raises(DataError, match=r"x\.parquet row group 0 cannot be fetched: its footer names bytes 4 to "):
        dataset[0]


LISTS_OF_OTHERS = {  # what has elements of another type than Arrow reads
    "schema": lambda footer: footer.update({2: (LIST, (I64, [1]))}),
    "key values": lambda footer: footer.update({5: (LIST, (I64, [1]))}),
    "orders": lambda footer: footer.update({7: (LIST, (I64, [1]))}),
    "sorting columns": lambda footer: footer[4][1][1][0].update({4: (LIST, (I64, [1]))}),
    "path": lambda footer: _metadata(footer[4][1][1][0], 0).update({3: (LIST, (I64, [1]))}),
    "encoding statistics": lambda footer: _metadata(footer[4][1][1][0], 0).update({13: (LIST, (I64, [1]))}),
}


@pytest.mark.parametrize("name", LISTS_OF_OTHERS)
@pytest.mark.parametrize("short", [False, True])
def test_a_list_of_another_type_than_arrow_reads_is_refused(name: str, *, short: bool) -> None:
    """Arrow takes its elements for what they should be, and so finds other chunks behind it."""
    footer = fields_of(_footer_of(pa.table({"x": [1, 2]})))
    LISTS_OF_OTHERS[name](footer)
    with pytest.raises(DataError, match=r"a list of Thrift's type 6"):
        _parsed(written(footer, short=short))
