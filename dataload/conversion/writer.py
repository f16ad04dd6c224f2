"""The `Writer` of Parquet files of a shape that trains well."""

from __future__ import annotations

import io
from types import TracebackType
from typing import Any, NamedTuple, Self

import pyarrow as pa

from dataload.errors import DataError
from dataload.formats.arrow_arrays import plain, plain_type
from dataload.formats.arrow_types import has_part, is_list_view

ROW_GROUP_BYTES = 32 << 20  # as they are stored
FILE_BYTES = 512 << 20
GATHERED_BYTES = 128 << 20  # of a row group in memory
MOST_ROWS = 1 << 20  # of a row group
SAMPLE_BYTES = 8 << 20
CODED, COMPRESSED = 0.95, 0.8  # what a dictionary, and a codec, may leave: floats take 3 times as long through zstd


class Storage(NamedTuple):
    """How columns are stored.

    Attributes:
        compression: The codec by leaf column: NONE where zstd gains little, as for JPEG and noise.
        dictionary: The leaf columns whose values repeat.
        row_bytes: Stored bytes of a row, about.
    """

    compression: dict[str, str]
    dictionary: list[str]
    row_bytes: float


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return the types that Parquet returns for those of a schema, such as milliseconds for seconds.

    Raises:
        DataError: Parquet cannot hold a column.
    """
    from pyarrow import parquet

    found = []
    for field in schema:
        sink = io.BytesIO()
        try:
            parquet.write_table(storable(pa.schema([field]).empty_table()), sink)
        except (pa.ArrowException, NotImplementedError) as error:
            raise DataError(f"column {field.name!r}: Parquet cannot hold {field.type} ({error}): cast it") from error
        found.append(parquet.read_schema(sink).field(0))
    return pa.schema(found, schema.metadata)


def storable(table: pa.Table) -> pa.Table:
    """Return a table without the views and runs that pyarrow cannot write, shuffle or cast."""
    columns = {
        name: pa.chunked_array([plain(chunk) for chunk in column.chunks], plain_type(column.type))
        for name, column in zip(table.schema.names, table.columns, strict=True)
        if has_part(column.type, _is_unwritable)
    }
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _is_unwritable(kind: pa.DataType) -> bool:
    types = pa.types
    is_view = types.is_string_view(kind) or types.is_binary_view(kind) or is_list_view(kind)
    return bool(is_view or types.is_run_end_encoded(kind))


def storage_of(sample: pa.Table) -> Storage:
    """Return how to store a table, by trying it on some rows of it."""
    plain, coded = _tried(sample, use_dictionary=False), _tried(sample, use_dictionary=True)
    compression, dictionary, stored = {}, [], 0
    for number in range(plain.num_columns):
        column, other = plain.column(number), coded.column(number)
        name = column.path_in_schema
        if other.total_uncompressed_size < CODED * column.total_uncompressed_size:
            dictionary.append(name)
            column = other
        size, compressed = column.total_uncompressed_size, column.total_compressed_size
        gains = compressed < COMPRESSED * size
        compression[name] = "ZSTD" if gains else "NONE"
        stored += compressed if gains else size
    return Storage(compression, dictionary, stored / max(1, sample.num_rows))


def _tried(sample: pa.Table, **options: Any) -> Any:
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(sample, sink, compression="ZSTD", row_group_size=max(1, sample.num_rows), **options)
    return parquet.read_metadata(sink).row_group(0)


class Writer:
    """Writes one Parquet file, by a `with` block, which writes the footer unless it raises.

    Args:
        sink: The file, open for writing.
        schema: Its columns.
        storage: How they are stored.

    Attributes:
        bytes: What the row groups take so far.
    """

    def __init__(self, sink: Any, schema: pa.Schema, storage: Storage) -> None:
        from pyarrow import parquet

        self._writer = parquet.ParquetWriter(
            sink,
            schema,
            compression=storage.compression or "NONE",
            use_dictionary=storage.dictionary or False,
            write_statistics=True,
            write_page_index=True,
            write_page_checksum=True,
        )
        self._sink = sink
        self._row_bytes = storage.row_bytes
        self._started = sink.tell()
        self.bytes = 0

    @property
    def wanted_rows(self) -> int:
        """How many rows the next row group should have, by the size of those before."""
        return max(1, min(MOST_ROWS, round(ROW_GROUP_BYTES / max(self._row_bytes, 1e-3))))

    @property
    def is_full(self) -> bool:
        """Whether another row group would make the file too large."""
        return self.bytes + ROW_GROUP_BYTES / 2 > FILE_BYTES

    def write(self, rows: pa.Table) -> None:
        """Write a row group."""
        before = self._sink.tell()
        self._writer.write_table(rows, row_group_size=rows.num_rows)
        taken = self._sink.tell() - before
        self._row_bytes = max(taken, 1) / rows.num_rows
        self.bytes += taken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._writer.is_open = False  # else its finalizer would write the footer
        self._writer.close()
