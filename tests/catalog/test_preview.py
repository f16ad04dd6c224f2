"""The first rows of a dataset, with values that Python or batches cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import make_dataset
from dataload.catalog.preview import first_rows


def preview(path: Path) -> list[dict[str, Any]]:
    dataset = make_dataset(str(path), cache=False)
    return first_rows(dataset.manifest, dataset.manifest.schema.names, dataset.blocks, 2)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (pa.array([b"\xff", b"fine"]).view(pa.string()), [b"\xff", "fine"]),
        (pa.array([10**15, 0]).cast(pa.timestamp("ms")), "<value out of range: 1000000000000000>"),
        (pa.array([[b"\xff"]]).cast(pa.list_(pa.binary())), [[b"\xff"]]),
    ],
    ids=["not UTF-8", "year 33658", "nested"],
)
def test_values_that_python_cannot_hold_are_shown(values: pa.Array, shown: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": values}), tmp_path / "x.parquet")
    found = [row["a"] for row in preview(tmp_path / "x.parquet")]
    assert found[0].startswith(shown) if isinstance(shown, str) else found == shown


def test_dictionaries_of_structs_are_shown_by_member(tmp_path: Path) -> None:
    coded = pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]))
    with pa.ipc.new_file(tmp_path / "x.arrow", pa.schema([("s", coded.type)])) as writer:
        writer.write_table(pa.table({"s": coded}))
    assert preview(tmp_path / "x.arrow") == [{"s.x": 2, "s.y": "b"}, {"s.x": 1, "s.y": "a"}]
