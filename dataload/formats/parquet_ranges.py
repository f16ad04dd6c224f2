"""The byte ranges of column chunks in a Parquet file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from dataload.cache.tier import Span
from dataload.formats.base import joined
from dataload.formats.parquet_thrift import Chunk

UNCOUNTED_BYTES = 100  # of the header of a dictionary page, at most, as Arrow assumes
FIRST_COUNTED = [1, 2, 9]  # the first version of parquet-mr that counts them


@lru_cache(16)
def uncounted_bytes(created_by: str) -> int:
    """Return how many bytes Arrow reads after each column chunk of a writer.

    Old versions of parquet-mr, and writers that give its name alone, leave the header of the dictionary page out of the
    size of a chunk: https://issues.apache.org/jira/browse/PARQUET-816.
    """
    application, _, version = created_by.strip().partition(" version ")
    is_old = [int(part) for part in re.findall(r"\d+", version)[:3]] < FIRST_COUNTED
    return UNCOUNTED_BYTES if application == "parquet-mr" and is_old else 0


def ranges_of(chunks: Sequence[Chunk], capacity: int, uncounted: int, size: int) -> list[Span]:
    """Return the byte ranges that Arrow reads of these chunks, sorted.

    Args:
        chunks: The chunks.
        capacity: Bytes to hold in memory. Neighbours are merged if it holds all.
        uncounted: See `uncounted_bytes`. Neighbours that are not merged overlap by them.
        size: Size of the file in bytes.

    Raises:
        ValueError: A chunk is not inside of the file, or has a negative size.
    """
    spans = []
    for chunk in chunks:
        first = chunk.data_page_offset
        if chunk.dictionary_page_offset:
            first = min(first, chunk.dictionary_page_offset)
        stop = first + chunk.total_compressed_size
        if not 0 <= first <= stop <= size:
            raise ValueError(f"its footer names bytes {first} to {stop} of {size}, so it is damaged or cut short")
        spans.append((first, max(stop, min(stop + uncounted, size))))
    spans.sort()
    return joined(spans) if sum(stop - start for start, stop in spans) <= capacity else spans
