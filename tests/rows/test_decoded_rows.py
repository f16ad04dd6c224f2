"""Rows of any Parquet file equal the result of pyarrow's take."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataload import CacheConfig, make_dataset, make_loader
from dataload.catalog import filters
from dataload.dataset import Dataset
from dataload.formats import parquet, parquet_reader, range_stream
from dataload.rows import arrow_decode, collate, row_block, row_group_plan
from dataload.rows.making import file_maker
from dataload.rows.making.row_group_memory import RankShare

TYPES: list[pa.DataType] = [
    pa.bool_(),
    pa.int8(),
    pa.uint16(),
    pa.int32(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(9, 3),
    pa.date32(),
    pa.timestamp("ns"),
    pa.time64("us"),
    pa.duration("ms"),
    pa.list_(pa.float32(), 3),
    pa.list_(pa.list_(pa.int16(), 2), 2),
    pa.list_(pa.int64()),
    pa.large_list(pa.uint8()),
    pa.list_(pa.list_(pa.float32(), 4)),
    pa.binary(),
    pa.binary(4),
    pa.string(),
    pa.large_string(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.struct([("x", pa.int32()), ("y", pa.string())]),
]


# Makes the first row group of x.parquet in a folder. Prints the most memory that Arrow had.
MOST_OF_ARROW = """
import sys
import pyarrow
from dataload import CacheConfig, make_dataset, make_loader
from dataload.catalog import filters
from dataload.rows.making.pipeline import make_cached
dataset = make_dataset(f"{sys.argv[1]}/x.parquet", cache=CacheConfig(f"{sys.argv[1]}/cache", "1GB"))
make_cached(dataset.rowstore.row_groups.caches[0], 0)
print(pyarrow.default_memory_pool().max_memory())
"""


def value_of(kind: pa.DataType, rng: np.random.Generator) -> Any:
    """Return a random value of a type, as pyarrow accepts it."""
    types = pa.types
    if types.is_struct(kind):
        return {field.name: value_of(field.type, rng) for field in kind}
    if types.is_dictionary(kind):
        return value_of(kind.value_type, rng)
    if types.is_fixed_size_list(kind):
        return [value_of(kind.value_type, rng) for _ in range(kind.list_size)]
    if types.is_list(kind) or types.is_large_list(kind):
        return [value_of(kind.value_type, rng) for _ in range(rng.integers(0, 4))]
    if types.is_fixed_size_binary(kind):
        return rng.bytes(kind.byte_width)
    if types.is_binary(kind):
        return rng.bytes(rng.integers(0, 9))
    if types.is_string(kind) or types.is_large_string(kind):
        return "".join(rng.choice(list("aé€😀"), rng.integers(0, 5)))
    if types.is_boolean(kind):
        return bool(rng.integers(2))
    if types.is_floating(kind):
        return np.float16(rng.standard_normal()) if types.is_float16(kind) else float(np.float32(rng.standard_normal()))
    number = int(rng.integers(0, 100))
    return Decimal(number) / 8 if types.is_decimal(kind) else number


def table_of(kinds: list[pa.DataType], rows: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    columns = [pa.array([value_of(kind, rng) for _ in range(rows)], kind) for kind in kinds]
    return pa.table(columns, [f"c{number}" for number in range(len(kinds))])


def write(path: Path, table: pa.Table, groups: list[int]) -> None:
    """Write the table as row groups of these lengths."""
    with pq.ParquetWriter(path, table.schema) as writer:
        for number, length in enumerate(groups):
            writer.write_table(table.slice(sum(groups[:number]), length), row_group_size=max(1, length))


def expected(table: pa.Table) -> dict[str, list[Any]]:
    """Return the columns as Python lists: times as counts, decimals as floats, struct members by dotted names."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    columns = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pa.types.is_temporal(column.type):
            column = column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
        values = column.to_pylist()
        is_decimal = pa.types.is_decimal(column.type)
        columns[name] = [float(value) for value in values] if is_decimal else values
    return columns


def found(dataset: Dataset, rows: Any) -> dict[str, list[Any]]:
    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return bytes(value) if isinstance(value, memoryview) else value

    return {name: [plain(value) for value in column] for name, column in dataset.__getitems__(rows).columns.items()}


@given(
    kinds=st.lists(st.sampled_from(TYPES), min_size=1, max_size=5),
    groups=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    blob_rows=st.sampled_from([1, 2, 4, 1 << 16]),
    values_at_once=st.sampled_from([3, 1 << 18]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_rows_are_those_of_take(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[pa.DataType],
    groups: list[int],
    blob_rows: int,
    values_at_once: int,
    seed: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    write(folder / "x.parquet", table_of(kinds, sum(groups), seed), groups)
    table = pq.read_table(folder / "x.parquet")
    rows = data.draw(st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=30))
    kept = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_group_plan, "BLOB_ROWS", blob_rows)
        patch.setattr(row_block, "CACHED_BYTES", 1 << 8)
        patch.setattr(row_block, "LEAST_AT_ONCE", 1)
        patch.setattr(parquet, "VALUES_AT_ONCE", values_at_once)
        cache = CacheConfig(str(folder / "cache"), "1GB") if kept else False
        dataset = make_dataset(str(folder / "x.parquet"), cache=cache)
        assert found(dataset, rows) == expected(table.take(rows))


def test_a_row_group_of_many_blobs_is_decoded_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is the same in every row is one value in the file, so the footer does not tell its decoded size."""
    monkeypatch.setattr(row_group_plan, "BLOB_ROWS", 64)
    table = pa.table({"id": np.arange(1000), "text": ["long " * 50] * 1000, "own": [f"row {i}" for i in range(1000)]})
    write(tmp_path / "x.parquet", table, [1000])
    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache"), "1GB"))
    assert len(dataset.rowstore.row_groups.row_starts) == 17
    rows = np.random.default_rng(0).permutation(1000)
    assert found(dataset, rows) == expected(table.take(rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pa.list_(pa.uint8(), 784), pa.list_(pa.uint8()), pa.struct([("x", pa.list_(pa.uint8()))])]
)
def test_lists_of_small_numbers_take_the_memory_that_is_reserved(tmp_path: Path, kind: pa.DataType) -> None:
    """Decoded at once, each value would take 13 bytes: 4 as Parquet stores it, 4 of its place in a list, and spares."""
    size = 784 * 16_000
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(size).astype(np.uint8)), 784)
    if pa.types.is_struct(kind):
        lists = pa.StructArray.from_arrays([lists.cast(kind.field(0).type)], ["x"])
    pq.write_table(pa.table({"list": lists.cast(kind)}), tmp_path / "x.parquet", row_group_size=16_000)
    command = [sys.executable, "-c", MOST_OF_ARROW, str(tmp_path)]
    done = subprocess.run(command, timeout=200, check=True, stdout=subprocess.PIPE, text=True)
    assert size < int(done.stdout) < 3 * size + (8 << 20)


@pytest.mark.parametrize("blob_rows", [64, 1 << 16])
def test_long_text_in_structs_is_read_in_smaller_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blob_rows: int
) -> None:
    """Arrow cannot read 2 GiB of text at once that is a member of structs; here, more than 30 rows from row 100 on."""
    read = pq.ParquetFile.iter_batches

    def too_long(*_: Any, **__: Any) -> Any:
        raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    def limited(file: pq.ParquetFile, most: int, **options: Any) -> Any:
        last = 0
        for batch in read(file, most, **options):
            last += len(batch)
            yield too_long() if last > 100 and len(batch) > 30 else batch

    monkeypatch.setattr(row_group_plan, "BLOB_ROWS", blob_rows)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", too_long)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", limited)
    texts = [{"text": f"text {row}", "list": [row]} for row in range(200)]
    table = pa.table({"id": range(200), "s": texts})
    pq.write_table(table, tmp_path / "x.parquet")
    rows = np.random.default_rng(0).permutation(200)
    assert found(make_dataset(tmp_path, cache=False), rows) == expected(table.take(rows))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (parquet_reader.ParquetReader, "tables"),
        (arrow_decode, "numbers"),
        (collate, "numbers"),
        (filters, "as_comparable"),
    ],
    ids=str,
)
def test_a_lack_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Else `on_error="skip"` would leave out good rows. Arrow's MemoryError is one of its exceptions, too."""
    pq.write_table(pa.table({"x": [1, 2], "l": [[[1]], [[2]]]}), tmp_path / "x.parquet")
    monkeypatch.setattr(module, name, lambda *_: pa.allocate_buffer(1 << 60))
    with pytest.raises(pa.ArrowMemoryError, match="malloc") as error:
        list(make_loader(make_dataset(tmp_path, cache=False, filters=[("x", ">", 1)]), 1, ragged="flat"))
    notes = getattr(error.value, "__notes__", [])
    assert module in (collate, filters) or any("x.parquet row group 0" in note for note in notes)


def test_a_file_without_rows(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([], pa.int64()), "s": pa.array([], pa.string())})
    pq.write_table(table, tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": [1], "s": ["x"]}), tmp_path / "1.parquet")
    dataset = make_dataset(str(tmp_path), cache=False)
    assert len(dataset) == 1
    assert found(dataset, [0]) == {"a": [1], "s": ["x"]}


@pytest.mark.parametrize(
    ("columns", "rows", "memory", "requests"),
    [(50, 1000, 1 << 30, 1), (2, 25_000, 1 << 30, 1), (2, 25_000, 800_000, 8)],
)
def test_a_row_group_is_held_or_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, rows: int, memory: int, requests: int
) -> None:
    """A row group of 400 kB that fits the memory budget is one request. Otherwise each column is read in pieces."""
    for name, value in (("SHARED_BYTES", 0), ("BUFFER_BYTES", 1000)):
        monkeypatch.setattr(parquet, name, value)
    monkeypatch.setattr(file_maker, "COLUMN_BYTES", 1000)
    monkeypatch.setattr(range_stream, "SMALLEST_PIECE", 1000)
    table = pa.table({f"c{number}": np.random.default_rng(number).random(rows) for number in range(columns)})
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=False, compression="none")
    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache"), "1GB"))
    dataset.rowstore.row_groups.memory.use(RankShare(memory, 2))
    footer = dataset.blocks.stats()["requests_origin"]
    needed = [rows - 1, 0, 7]
    assert found(dataset, needed) == expected(table.take(needed))
    assert requests <= dataset.blocks.stats()["requests_origin"] - footer <= 3 * requests


@pytest.mark.parametrize("memory", [1 << 30, 800_000], ids=["held", "streamed"])
@pytest.mark.parametrize("created_by", ["parquet-mr", "parquet-mr version 1.2.8", "parquet-mr version 1.2.9"])
def test_writers_that_leave_a_header_out_of_the_size_of_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, created_by: str
) -> None:
    """Arrow reads 100 bytes more of each chunk of their files."""
    monkeypatch.setattr(file_maker, "COLUMN_BYTES", 1000)
    monkeypatch.setattr(range_stream, "SMALLEST_PIECE", 1000)
    table = pa.table({f"c{number}": np.random.default_rng(number).random(60_000) for number in range(4)})
    file = tmp_path / "x.parquet"
    pq.write_table(table, file, row_group_size=20_000, use_dictionary=False, compression="none", data_page_size=30_000)
    content, writer = file.read_bytes(), pq.read_metadata(file).created_by.encode()
    file.write_bytes(content.replace(writer, created_by.encode().ljust(len(writer))))
    assert pq.read_metadata(file).created_by.strip() == created_by
    dataset = make_dataset(str(file), cache=CacheConfig(str(tmp_path / "cache"), "1GB"))
    dataset.rowstore.row_groups.memory.use(RankShare(memory, 2))
    needed = [59_999, 0, 30_000]
    assert found(dataset, needed) == expected(table.take(needed))
