"""The first rows of a dataset, with values that Python or batches cannot hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import make_dataset
from dataload.cache.blocks.reader import IN_FLIGHT, Object
from dataload.catalog import footer_cache
from dataload.catalog.preview import first_rows, preview_columns, rows_at
from dataload.dataset import Dataset
from dataload.formats.base import Footer
from dataload.formats.parquet_thrift import Page, pages_of


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


@pytest.mark.parametrize(
    "damaged",
    [
        lambda page: page._replace(offset=page.offset - (1 << 20)),
        lambda page: page._replace(offset=1 << 40),
        lambda page: page._replace(size=-page.size),
        lambda page: page._replace(size=1 << 40),
        lambda page: page._replace(first_row=page.first_row + 1),
        lambda page: page._replace(first_row=-page.first_row),
        None,
    ],
)
def test_an_index_of_pages_that_does_not_fit_is_done_without(
    damaged: Callable[[Page], Page] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it is that of another column."""
    table = pa.table({"a": range(900), "b": range(900, 1800)})
    small = {"data_page_size": 800, "write_batch_size": 100, "use_dictionary": False, "compression": "none"}
    pq.write_table(table, tmp_path / "x.parquet", write_page_index=True, **small)
    dataset, found = make_dataset(str(tmp_path / "x.parquet"), cache=False), list[list[Page]]()

    def pages(index: bytes) -> list[Page]:
        found.append(pages_of(index))
        return found[0] if damaged is None else list(map(damaged, found[-1]))

    monkeypatch.setattr("dataload.formats.parquet_pages.pages_of", pages)
    rows = rows_at(dataset.manifest, ["a", "b"], dataset.blocks, np.array([0, 450, 899]))
    assert rows == [{"a": row, "b": 900 + row} for row in (0, 450, 899)]
    assert len(found[0]) > 3


# Nulls


Parsed = Callable[[Callable[[], object]], None]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    """Return a function that has another one called before each footer is parsed."""
    whole = footer_cache.parse_footer

    def before_each(call: Callable[[], object]) -> None:
        def parse(data: Any, obj: Object) -> Footer:
            call()
            return whole(data, obj)

        monkeypatch.setattr(footer_cache, "parse_footer", parse)

    return before_each


def nulls(dataset: Dataset, progress: Callable[[], object]) -> int | None:
    [column] = preview_columns(dataset.manifest, ["a"], dataset.blocks, progress)
    return column.nulls


def test_the_nulls_of_several_files_are_counted_at_the_same_time(tmp_path: Path, parsed: Parsed) -> None:
    for number in range(4):
        pq.write_table(pa.table({"a": [1, None]}), tmp_path / f"{number}.parquet")
    dataset, together, done = make_dataset(tmp_path, cache=False), threading.Barrier(4), list[int]()
    parsed(lambda: together.wait(200))
    assert nulls(dataset, lambda: done.append(1)) == 4
    assert len(done) == 4


def test_nulls_of_rows_that_are_not_selected_are_not_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, None, 3, None, 5, 6]}), tmp_path / "x.parquet", row_group_size=2)
    dataset = make_dataset(tmp_path, cache=False)
    assert nulls(dataset, lambda: None) == 2
    assert nulls(dataset.exclude([1]), lambda: None) is None
    assert nulls(dataset.exclude([5]), lambda: None) == 2
    assert nulls(dataset.select([2, 3]), lambda: None) == 1


def test_no_more_footers_are_read_once_a_column_lacks_statistics(tmp_path: Path, parsed: Parsed) -> None:
    files, read = 2 * IN_FLIGHT, list[int]()
    for number in range(files):
        pq.write_table(pa.table({"a": [1]}), tmp_path / f"{number}.parquet", write_statistics=False)
    dataset, done = make_dataset(tmp_path, cache=False), list[int]()
    parsed(lambda: read.append(1))
    assert nulls(dataset, lambda: done.append(1)) is None
    assert 1 <= len(read) <= IN_FLIGHT
    assert len(done) == files
