"""Times of 96 bits, as Spark, Impala and Hive write them to Parquet.

They have no unit. Those of writers that count microseconds are read in microseconds, which reach beyond the year 9999.
Others are read in nanoseconds, and those that 64 bits cannot hold are an error.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataload.formats.arrow_arrays import elements
from dataload.formats.arrow_types import has_elements, has_part

SPARK = b"org.apache.spark."  # Its keys begin so. Its times count microseconds.


def counts_microseconds(metadata: pq.FileMetaData) -> bool:
    """Return whether the writer of a file has no times finer than a microsecond: Spark, or Arrow by its schema."""
    known = metadata.metadata or {}
    if any(key.startswith(SPARK) for key in known):
        return True
    if b"ARROW:schema" not in known:
        return False
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(known[b"ARROW:schema"])))
    return not any(has_part(kind, is_ns) for kind in schema.types)


def is_ns(kind: pa.DataType) -> bool:
    """Return whether values are timestamps in ns."""
    return pa.types.is_timestamp(kind) and bool(kind.unit == "ns")


def with_nanoseconds(table: pa.Table, in_ns: pa.Table) -> pa.Table:
    """Return a table with its times in ns.

    Args:
        table: The table, with its times of 96 bits in us.
        in_ns: The columns that hold such times, which are in ns. A time that 64 bits cannot hold has wrapped around.

    Raises:
        pa.ArrowInvalid: 64 bits cannot hold a time in ns.
    """
    for name, exact in zip(in_ns.column_names, in_ns.columns, strict=True):
        place = table.schema.get_field_index(name)
        if not _is_in_range(table.column(place), exact):
            reason = f"column {name!r} has a time outside of the years 1678 to 2261, which ns cannot hold"
            raise pa.ArrowInvalid(f"{reason}: leave it out with columns=, or write it in us")
        table = table.set_column(place, in_ns.schema.field(name), exact)
    return table


def _is_in_range(in_us: pa.ChunkedArray, in_ns: pa.ChunkedArray) -> bool:
    try:
        least = in_us.cast(in_ns.type)
    except pa.ArrowInvalid:
        return False
    # The last time in us fits, and the times in ns that are less than one us later have wrapped around.
    pairs = zip(_times(in_ns.combine_chunks()), _times(least.combine_chunks()), strict=True)
    return all(pc.all(pc.greater_equal(*pair)).as_py() is not False for pair in pairs)


def _times(column: pa.Array) -> Iterator[pa.Array]:
    """Yield the times that are in a column, at any depth."""
    if pa.types.is_timestamp(column.type):
        yield column
    elif pa.types.is_struct(column.type):
        for member in column.flatten():
            yield from _times(member)
    elif has_elements(column.type):
        yield from _times(elements(column)[1])
