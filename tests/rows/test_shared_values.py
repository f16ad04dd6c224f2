"""Strings and bytes of dictionaries: stored once in a blob, made once in a process, equal to Arrow's values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from decoded import gather, plain, whole
from hypothesis import given
from hypothesis import strategies as st
from row_groups import load

from dataload import CacheConfig, make_dataset, make_loader
from dataload.cache.tier import BlobKey
from dataload.errors import DataError
from dataload.formats import parquet
from dataload.formats.schema import Layout, fields_of
from dataload.rows import row_group_plan
from dataload.rows.collate import to_batch
from dataload.rows.columns import Coded, Ragged, codes_of, concatenate
from dataload.rows.row_block import FEW_STRINGS, NO_KEY, Blob, check, pack, packed_bytes

LONG = [f"{number:03d} é " * 12 for number in range(20)]


def _front(memory: memoryview, size: int) -> memoryview:
    return memory[:size]


def texts(rows: int, *, nulls: bool = False) -> list[str | None]:
    return [None if nulls and row % 5 == 0 else LONG[row * 7 % len(LONG)] for row in range(rows)]


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
    assert stored(distinct) == stored(distinct * 9) == 100 * 60
    assert stored(["same " * 9] * 100) == 45
    unused = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(distinct))
    assert len(gather([pa.table({"c": unused})], np.zeros(1, int), np.zeros(1, int)).blobs[0].heap(field)) == 60


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
    blobs = dataset.rowstore.row_groups.caches[0]
    assert sum(map(len, load(blobs, 0))) < 4000 * dataset.rowstore.layout.dtype.itemsize + 4 * 2 * 3000
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
    blobs = make_dataset(str(tmp_path / "x.parquet"), cache=False).rowstore.row_groups.caches[0]
    blobs.measure()
    assert blobs.num_bytes == pytest.approx(sum(map(len, load(blobs, 0))), rel=0.01)


def test_the_plan_knows_how_small_shared_values_are(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": texts(30_000)}), tmp_path / "x.parquet")
    blobs = make_dataset(str(tmp_path / "x.parquet"), cache=False).rowstore.row_groups.caches[0]
    blobs.measure()
    assert blobs.num_bytes == pytest.approx(sum(map(len, load(blobs, 0))), rel=0.01)


def test_text_that_is_long_by_its_dictionary_alone() -> None:
    """Values that many rows share would be gigabytes without their dictionary."""
    value = "x" * (1 << 20)
    codes = pa.array(np.zeros(8192, np.int32))
    table = pa.table({"c": pa.DictionaryArray.from_arrays(codes, pa.array([value]))})
    assert whole(table)["c"] == [value] * 8192


def test_the_last_row_of_the_longest_blob() -> None:
    values = [f"{row:x}" for row in range(1 << 16)]
    table = pa.table({"c": values, "l": pa.array([[row] for row in values])})
    assert whole(table) == {"c": values, "l": [[row] for row in values]}


def test_a_dictionary_with_more_values_than_rows_is_stored_plain() -> None:
    """Codes of 16 bits could not count its values. The rows of a blob without shared values are in its table."""
    codes = pa.DictionaryArray.from_arrays(
        pa.array([7, 8] * 20, pa.int32()), pa.array([*[""] * 7, *LONG[:2], *[""] * 99])
    )
    table = pa.table({"c": codes})
    records = gather([table], np.zeros(40, int), np.arange(40))
    [blob], [field] = records.blobs, records.layout.fields
    assert len(blob.spans(field)) == 40
    column = blob.column(field)
    assert isinstance(column, Ragged)
    assert bytes(column.values).decode() == "".join(LONG[:2] * 20)
    assert to_batch(records)["c"] == LONG[:2] * 20


def test_blobs_that_share_values_and_others_become_one_blob() -> None:
    shared, own = LONG[:3] * 20 + [None], ["x", None, "é", "y"]
    tables = [pa.table({"c": pa.array(shared).dictionary_encode()}), pa.table({"c": own})]
    records = gather(tables, np.arange(2), np.zeros(2, int))
    [field] = records.layout.fields
    for blobs, expected in ((records.blobs, shared + own), (records.blobs[::-1], own + shared)):
        joined = concatenate([blob.column(field) for blob in blobs])
        assert isinstance(joined, Coded)
        memory = memoryview(bytearray(1 << 14))
        pack({"c": joined}, len(expected), records.layout, NO_KEY, "here", partial(_front, memory))
        size = packed_bytes(len(expected), [joined.values.nbytes + joined.spans.nbytes], records.layout)
        blob = Blob(memory[:size], len(expected), records.layout)
        assert blob.strings(field, codes_of(joined)).tolist() == expected
        assert codes_of(blob.column(field)).tolist() == codes_of(joined).tolist()


def test_a_dictionary_of_several_blobs_stays_one() -> None:
    """Blobs of all columns have fewer rows than those of one column, which are made of them."""
    tables = [pa.table({"c": pa.array(LONG * 3).dictionary_encode()})] * 3
    records = gather(tables, np.arange(3), np.zeros(3, int))
    [field] = records.layout.fields
    joined = concatenate([blob.column(field) for blob in records.blobs])
    assert isinstance(joined, Coded)
    assert len(joined.spans) == len(LONG)
    assert joined.codes.tolist() == list(range(len(LONG))) * 9


@pytest.mark.parametrize(
    ("rows", "times"), [(FEW_STRINGS - 1, 1), (2 * FEW_STRINGS - 1, 1), (2 * FEW_STRINGS, 1), (1000, 1), (1000, 1200)]
)
@pytest.mark.parametrize("nulls", [False, True])
def test_few_many_and_long_strings_are_those_of_arrow(rows: int, times: int, nulls: bool) -> None:
    """Of two blobs; Arrow takes many short strings at once. Each is empty, null, of one byte or more characters."""
    values = [None if nulls and not row % 7 else f"{row} é" * (row % 4) * times for row in range(500)]
    tables = [pa.table({"c": pa.array(part, pa.string())}) for part in (values, values[::-1])]
    which, chosen = np.arange(rows) % 2, np.random.default_rng(0).integers(0, 500, rows)
    expected = [(values, values[::-1])[blob][row] for blob, row in zip(which, chosen, strict=True)]
    records = gather(tables, which, chosen)
    assert to_batch(records)["c"] == expected
    by_arrow = isinstance(records.strings(records.layout.fields[0]), pa.LargeStringArray)
    assert by_arrow is (rows >= 2 * FEW_STRINGS and times == 1)


@pytest.mark.parametrize("last", ["", "z", "thirteen long"])
def test_strings_of_a_few_bytes_are_those_of_arrow(last: str) -> None:
    """Arrow keeps up to 12 bytes of a string beside its length. Those of the last strings reach beyond the values."""
    values = [None, *("abcdefghijklmnop"[:length] for length in range(17)), "é" * 6, "é" * 7, "ab", last]
    tables = [pa.table({"c": pa.array(part, pa.string())}) for part in (values, [last, last], ["", ""])]
    which = np.repeat([0, 1, 2], [10 * len(values), 100, 100])
    rows = np.concatenate([np.tile(np.arange(len(values)), 10), np.arange(200) % 2])
    mixed = np.random.default_rng(0).permutation(len(rows))
    records = gather(tables, which[mixed], rows[mixed])
    assert isinstance(records.strings(records.layout.fields[0]), pa.LargeStringArray)
    assert to_batch(records)["c"] == [(values, [last, last], ["", ""])[which[row]][rows[row]] for row in mixed]


@pytest.mark.parametrize("shared", [100, 20])
def test_strings_that_most_rows_share_are_kept_although_others_are_not(shared: int) -> None:
    """Arrow would make a string of its own for each row."""
    own = [f"own {row}" for row in range(50)]
    tables = [pa.table({"c": pa.array(LONG[:2] * 50).dictionary_encode()}), pa.table({"c": own})]
    which, rows = np.repeat([0, 1], [shared, 50]), np.concatenate([np.arange(shared), np.arange(50)])
    records = gather(tables, which, rows)
    found = records.strings(records.layout.fields[0])
    assert isinstance(found, list) is (shared == 100)
    assert to_batch(records)["c"] == (LONG[:2] * 50)[:shared] + own


def test_one_string_of_many_that_is_not_utf8_raises() -> None:
    texts = pa.array([b"fine"] * 99 + [b"\xff"]).view(pa.string())
    with pytest.raises(DataError, match="'c' has a string that is not UTF-8"):
        whole(pa.table({"c": texts}))


def test_a_shared_value_that_is_not_utf8_spoils_its_own_rows_only() -> None:
    values = pa.array([b"fine", b"\xff"]).cast(pa.string(), safe=False)
    codes = pa.array([0, 1] * 20, pa.int8())
    table = pa.table({"c": pa.DictionaryArray.from_arrays(codes, values)})
    rows = np.arange(0, 40, 2)
    assert to_batch(gather([table], np.zeros(20, int), rows))["c"] == ["fine"] * 20
    with pytest.raises(DataError, match="'c' has a string that is not UTF-8"):
        whole(table)


@pytest.mark.parametrize(
    ("kinds", "size"),
    [
        ([pa.string()], 2),
        ([pa.string(), pa.bool_(), pa.binary()], 6),
        ([pa.list_(pa.list_(pa.int8())), pa.float32(), pa.int8()], 8),
        ([pa.int64(), pa.string()], 16),
        ([pa.list_(pa.uint8(), 127)], 127),
        ([pa.list_(pa.uint8(), 129)], 136),
        ([pa.list_(pa.uint8(), 0)], 1),
    ],
)
def test_a_record_is_padded_to_its_largest_element(kinds: list[pa.DataType], size: int) -> None:
    layout = Layout(fields_of(pa.schema([(str(number), kind) for number, kind in enumerate(kinds)])))
    assert layout.dtype.itemsize == size


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_codes_that_end_in_other_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """Spark and parquet-rs can go on so once a dictionary is full. Arrow does not read such pages as codes."""
    texts = [f"text {number % 7}" for number in range(100)]
    table, written = pa.table({"c": texts}), {"use_dictionary": False, "column_encoding": {"c": encoding}}
    pq.write_table(table, tmp_path / "x.parquet", **written)
    monkeypatch.setattr(parquet, "_has_codes", lambda _: True)
    [batch] = make_loader(tmp_path / "x.parquet", 100, shuffle=False, cache=False)
    assert batch["c"] == texts


def test_a_blob_with_rows_and_without_values_is_refused() -> None:
    """Its rows would refer to values that are not there."""
    key = BlobKey("origin", "path", "version", "rows")
    layout = Layout(fields_of(pa.schema([("c", pa.string())])))
    blob = bytearray(packed_bytes(2, [0], layout))
    end = np.array([len(blob) - packed_bytes(0, [0], layout), 0, 0], np.int64)
    blob[-len(key.digest) - end.nbytes :] = end.tobytes() + key.digest
    with pytest.raises(ValueError, match="has values of 'c' out of place"):
        check(key, memoryview(blob), 2, layout)
    check(key, memoryview(bytes(end.nbytes) + key.digest), 0, layout)
