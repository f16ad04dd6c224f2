"""Parquet through the cache: footers and row groups."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from dataload.cache.blocks import Blocks, Object
from dataload.cache.file import BlockFile
from dataload.cache.tier import Allocate
from dataload.errors import DataError, DataloadError

MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
_TRAILER_BYTES = 8  # footer length (u32, little-endian), magic


def read_footer(obj: Object, blocks: Blocks) -> pq.FileMetaData:
    """The footer of a Parquet file, fetched once a host. Raises DataError when it is no Parquet file."""

    def fill(allocate: Allocate) -> None:
        footer = _fetch_footer(obj, blocks)
        allocate(len(footer))[:] = footer

    footer = blocks.tier.get_or_fill(blocks.key(obj, "footer"), fill)
    try:
        return pq.read_metadata(pa.BufferReader(pa.py_buffer(footer)))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{obj.path} has a Parquet footer that cannot be read: {str(error).strip()}") from error


def read_row_group(
    obj: Object, number: int, columns: Sequence[str], footer: pq.FileMetaData, blocks: Blocks
) -> pa.Table:
    """The columns of one row group, decoded. Raises DataError when the data cannot be decoded."""
    try:
        with BlockFile(blocks, obj) as file, pq.ParquetFile(file, metadata=footer) as parquet:
            return parquet.read_row_group(number, columns=list(columns), use_threads=False)
    except DataloadError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{obj.path} row group {number} cannot be decoded: {str(error).strip()}") from error


def _fetch_footer(obj: Object, blocks: Blocks) -> bytes:
    start = max(0, obj.size - TAIL_BYTES)
    tail = bytes(blocks.origin.read(obj.path, start, obj.size, obj.version)) if obj.size else b""
    if len(tail) < _TRAILER_BYTES or not tail.endswith(MAGIC):
        raise DataError(f"{obj.path} is not a Parquet file: take it out of the dataset, or name the files with a glob")
    size = int.from_bytes(tail[-_TRAILER_BYTES:-4], "little") + _TRAILER_BYTES
    if size > obj.size:
        raise DataError(f"{obj.path} is cut short: its footer says {size} bytes and the object has {obj.size}")
    if size > len(tail):
        tail = bytes(blocks.origin.read(obj.path, obj.size - size, start, obj.version)) + tail
    return tail[-size:]
