"""The formats that a dataset's files may have, told by their first and last bytes."""

from __future__ import annotations

from dataload.cache.blocks.reader import Blocks, Object
from dataload.errors import DataError
from dataload.formats import arrow_ipc, parquet
from dataload.formats.base import SHARED_BYTES, Footer

# What is fetched of a file's end, where its footer is: a 64th of it, so that small files are not fetched for it.
LEAST_TAIL_BYTES, MOST_TAIL_BYTES, TAIL_SHARE = 8 << 10, 64 << 10, 64


def parse_footer(footer: memoryview, obj: Object) -> Footer:
    """What `fetch_footer` has fetched, understood. Raises DataError when it cannot be."""
    if bytes(footer[-len(parquet.MAGIC) :]) == parquet.MAGIC:
        return parquet.ParquetFooter.from_bytes(footer, obj)
    return arrow_ipc.ArrowFooter.from_bytes(footer, obj)


def tail_bytes(obj: Object) -> int:
    """How much of a file's end is fetched in one request, in the hope that its footer is there."""
    return min(obj.size, MOST_TAIL_BYTES, max(LEAST_TAIL_BYTES, obj.size // TAIL_SHARE))


def fetched_beside_tail(obj: Object, footer: memoryview) -> list[int]:
    """Bytes of each further request that the footer of a file took, which is known by now.

    Arrow's, but for what was read through blocks, which hold rows, too.
    """
    if bytes(footer[-len(parquet.MAGIC) :]) == parquet.MAGIC:
        beyond = len(footer) - tail_bytes(obj)
        return [beyond] if beyond > 0 else []
    messages = arrow_ipc.message_bytes(footer)
    return [] if obj.size < SHARED_BYTES * len(messages) else messages


def fetch_footer(obj: Object, blocks: Blocks) -> bytes:
    """What is kept of a file to know its row groups by. Raises DataError when it is neither Parquet nor Arrow IPC."""
    start = max(0, obj.size - tail_bytes(obj))
    tail = bytes(blocks.origin.read(obj.path, start, obj.size, obj.version)) if obj.size else b""

    def last(size: int) -> bytes:
        if size > obj.size:
            raise DataError(f"{obj.path} is cut short: its footer says {size} bytes and the object has {obj.size}")
        if size <= len(tail):
            return tail[-size:]
        return bytes(blocks.origin.read(obj.path, obj.size - size, start, obj.version)) + tail

    if tail.endswith(parquet.MAGIC) and len(tail) >= parquet.TRAILER_BYTES:
        return parquet.fetch_footer(last)
    if tail.endswith(arrow_ipc.MAGIC) and len(tail) >= arrow_ipc.TRAILER_BYTES:
        return arrow_ipc.index_of_file(obj, blocks, last)
    if tail.endswith(arrow_ipc.FEATHER_1):
        raise DataError(f"{obj.path} is Feather of version 1: rewrite it with pyarrow.feather.write_feather")
    if obj.size >= arrow_ipc.PREFIX_BYTES and bytes(blocks.read(obj, 0, 4)) == arrow_ipc.CONTINUATION:
        return arrow_ipc.index_of_stream(obj, blocks)
    raise DataError(
        f"{obj.path} is not a Parquet file, nor Arrow IPC: take it out of the dataset, or name the files with a glob"
    )
