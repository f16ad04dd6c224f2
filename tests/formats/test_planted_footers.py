"""Parquet footers with what no writer puts there, which pyarrow answers by aborting the process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from thrift import Struct, with_footer

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
