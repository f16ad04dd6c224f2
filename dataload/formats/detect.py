"""Detection of a file's format by its first and last bytes."""

from __future__ import annotations

from dataload.cache.blocks.reader import Blocks, Object
from dataload.errors import DataError
from dataload.formats import parquet
from dataload.formats.arrow_ipc import messages
from dataload.formats.arrow_ipc.reader import ArrowFooter
from dataload.formats.base import SHARED_BYTES, Footer

# The part of a file that is fetched for its footer: a 64th of it, so that small files are not fetched whole.
LEAST_TAIL_BYTES, MOST_TAIL_BYTES, TAIL_SHARE = 8 << 10, 64 << 10, 64


def parse_footer(footer: memoryview, obj: Object) -> Footer:
    """Return the footer in the bytes that `fetch_footer` returned. Raise DataError if they cannot be read."""
    if bytes(footer[-len(parquet.MAGIC) :]) == parquet.MAGIC:
        return parquet.ParquetFooter.from_bytes(footer, obj)
    return ArrowFooter.from_bytes(footer, obj)


def tail_bytes(obj: Object) -> int:
    """Return how many bytes at a file's end the first request for its footer fetches."""
    return min(obj.size, MOST_TAIL_BYTES, max(LEAST_TAIL_BYTES, obj.size // TAIL_SHARE))


def fetched_beside_tail(obj: Object, footer: memoryview) -> list[int]:
    """Return the bytes of each further request that a file's footer took.

    Messages of an Arrow file that were read through blocks do not count: the blocks hold rows, too.
    """
    if bytes(footer[-len(parquet.MAGIC) :]) == parquet.MAGIC:
        rest = len(footer) - tail_bytes(obj)
        return [rest] if rest > 0 else []
    lengths = [len(message.metadata) for message in messages.unpack(footer)]
    return [] if obj.size < SHARED_BYTES * len(lengths) else lengths


def fetch_footer(obj: Object, blocks: Blocks) -> bytes:
    """Return the bytes of a file's footer: Parquet's own, or the packed metadata of Arrow messages.

    Raises:
        DataError: The file is neither Parquet nor Arrow IPC.
        OriginError: The origin failed.
    """
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
    if tail.endswith(messages.MAGIC) and len(tail) >= messages.TRAILER_BYTES:
        return messages.index_of_file(obj, blocks, last)
    if tail.endswith(messages.FEATHER_1):
        raise DataError(f"{obj.path} is Feather of version 1: rewrite it with pyarrow.feather.write_feather")
    if obj.size >= messages.PREFIX_BYTES and bytes(blocks.read(obj, 0, 4)) == messages.CONTINUATION:
        return messages.index_of_stream(obj, blocks)
    raise DataError(
        f"{obj.path} is not a Parquet file, nor Arrow IPC: remove it from the dataset, or name the files with a glob"
    )
