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
from thrift import Struct, with_footer

from dataload import make_dataset
from dataload.errors import DataError

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
