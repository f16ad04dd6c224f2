"""Strings and bytes of dictionaries: stored once in a blob, made once in a process, equal to Arrow's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from decoded import gather, plain, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload import CacheConfig, make_dataset
from dataload.rows import row_group_plan
from dataload.rows.collate import to_batch

LONG = [f"{number:03d} é " * 12 for number in range(20)]


def texts(rows: int, *, nulls: bool = False) -> list[str | None]:
    return [None if nulls and row % 5 == 0 else LONG[row * 7 % len(LONG)] for row in range(rows)]


@settings(max_examples=100)
@given(
    rows=st.lists(st.none() | st.sampled_from(["", "a", *LONG[:3]]), min_size=1, max_size=40),
    kind=st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.binary_view()]),
    start=st.integers(0, 3),
    data=st.data(),
)
def test_values_of_dictionaries_are_those_of_arrow(rows: list[Any], kind: pa.DataType, start: int, data: Any) -> None:
    """Also of a dictionary that does not pay, of several chunks, of slices, and beside a column of plain values."""
    binary = kind in (pa.binary(), pa.binary_view())
    values = [value.encode() if binary and value is not None else value for value in rows]
    own = list(dict.fromkeys(value for value in values if value is not None))
    codes = [None if value is None else own.index(value) for value in values]
    first = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int16()), pa.array(own, kind))
    turned = [None if code is None else len(own) - 1 - code for code in codes]
    other = pa.DictionaryArray.from_arrays(pa.array(turned, pa.int16()), pa.array(own[::-1], kind))
    column = pa.chunked_array([first.slice(min(start, len(first) - 1)), other])
    table = pa.table({"c": column})
    expected = values[min(start, len(first) - 1) :] + values
    which = np.array(data.draw(st.lists(st.integers(0, 1), max_size=9)), np.int64)
    chosen = np.array([data.draw(st.integers(0, len(expected) - 1)) for _ in which], np.int64)
    plain_table = pa.table({"c": pa.chunked_array([pa.array(expected, kind)])})
    for tables in ([table, table], [table, plain_table]):
        batch = to_batch(gather(tables, which, chosen))["c"]
        assert [plain(value) for value in batch] == [expected[row] for row in chosen]
        flat = to_batch(gather(tables, which, chosen), ragged="flat")["c"]
        if binary:
            assert bytes(flat.values.tolist()) == b"".join(expected[row] or b"" for row in chosen)


def test_a_dictionary_that_does_not_pay_is_stored_plain() -> None:
    def stored(values: list[str]) -> int:
        return len(
            gather([pa.table({"c": pa.array(values).dictionary_encode()})], np.zeros(1, int), np.zeros(1, int))
            .blobs[0]
            .heap(field)
        )

    [field] = gather([pa.table({"c": ["a"]})], np.zeros(1, int), np.zeros(1, int)).layout.fields
    distinct = [f"{number:060d}" for number in range(100)]
    assert stored(distinct) == stored(distinct * 1) == 6848 - 800
    assert stored(distinct * 9) == 6848 - 800
    assert stored(["same " * 9] * 100) == 64 - 8
    unused = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(distinct))
    assert len(gather([pa.table({"c": unused})], np.zeros(1, int), np.zeros(1, int)).blobs[0].heap(field)) == 128 - 8


def test_a_null_inside_a_dictionary() -> None:
    codes = pa.array([0, 1, 1, 0, None] * 9, pa.int8())
    column = pa.DictionaryArray.from_arrays(codes, pa.array([LONG[0], None]))
    assert whole(pa.table({"c": column}))["c"] == [LONG[0], None, None, LONG[0], None] * 9


@pytest.mark.parametrize("nulls", [False, True])
def test_text_of_a_file_is_stored_and_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, nulls: bool
) -> None:
    """The codes of Parquet stay codes: a blob has each value once, and equal rows of it are one object."""
    monkeypatch.setattr(row_group_plan, "BLOB_ROWS", 1024)
    rows = texts(5000, nulls=nulls)
    table = pa.table({"text": rows, "id": range(5000), "blob": [text and text.encode() for text in rows]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=4000)
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=cache)
    order = np.random.default_rng(0).permutation(5000)
    batch = dataset.__getitems__(order).columns
    assert batch["text"] == [rows[row] for row in order]
    assert [plain(value) for value in batch["blob"]] == [rows[row] and rows[row].encode() for row in order]
    blobs = dataset.rowstore.blobs
    assert sum(map(len, blobs.load(0))) < 4000 * dataset.rowstore.layout.dtype.itemsize + 4 * 2 * 3000
    again = dataset.__getitems__(np.arange(1024)).columns["text"]
    assert len({id(text) for text in again}) <= len(LONG) + nulls
    few = make_dataset(str(tmp_path / "x.parquet"), columns=["text"], cache=cache)
    assert few.__getitems__(order).columns["text"] == batch["text"]
    filled = make_dataset(str(tmp_path / "x.parquet"), columns=["text"], cache=cache, fill_null="?")
    assert filled.__getitems__(order).columns["text"] == [text or "?" for text in batch["text"]]


def test_the_plan_knows_how_large_members_of_structs_are(tmp_path: Path) -> None:
    """Their codes are not kept: each row has its text."""
    rows = pa.array([{"text": text} for text in texts(30_000)])
    pq.write_table(pa.table({"s": rows}), tmp_path / "x.parquet")
    blobs = make_dataset(str(tmp_path / "x.parquet"), cache=None).rowstore.blobs
    blobs.measure()
    assert blobs.num_bytes == pytest.approx(sum(map(len, blobs.load(0))), rel=0.01)


def test_the_plan_knows_how_small_shared_values_are(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": texts(30_000)}), tmp_path / "x.parquet")
    blobs = make_dataset(str(tmp_path / "x.parquet"), cache=None).rowstore.blobs
    blobs.measure()
    actual = sum(map(len, blobs.load(0)))
    assert actual <= blobs.num_bytes < 1.1 * actual


def test_text_that_is_long_by_its_dictionary_alone() -> None:
    """Values that many rows share would be gigabytes without their dictionary."""
    value = "x" * (1 << 20)
    codes = pa.array(np.zeros(8192, np.int32))
    table = pa.table({"c": pa.DictionaryArray.from_arrays(codes, pa.array([value]))})
    assert whole(table)["c"] == [value] * 8192
