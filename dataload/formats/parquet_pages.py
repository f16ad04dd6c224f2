"""Some rows of a Parquet column by the index of its pages: nothing is fetched but the pages that hold them.

Arrow reads the pages of a column chunk one after the other. So it gets a chunk that has the dictionary, the pages that
are needed, and then one page of a kind that readers pass over, which takes the place of all others.

Notes: https://github.com/apache/parquet-format/blob/master/PageIndex.md
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.cache.tier import Span
from dataload.formats.parquet_thrift import Chunk, pages_of

# The header of a page of the type INDEX_PAGE: {1: type, 2: size before compression, 3: size}, these of five bytes each.
PASSED_OVER = b"\x15\x02\x15%b\x15%b\x00"
HEADER_BYTES = len(PASSED_OVER % (b"_" * 5, b"_" * 5))
MOST_BYTES = 1 << 30  # of a chunk: its size must fit into such a header

Int64 = npt.NDArray[np.int64]


def values_at(
    chunk: Chunk,
    rows: Int64,
    length: int,
    size: int,
    fetch: Callable[[Sequence[Span]], list[memoryview]],
    read: Callable[[Any], pa.ChunkedArray],
) -> pa.ChunkedArray | None:
    """Return the values of some rows.

    Args:
        chunk: The column chunk, of one leaf.
        rows: The rows, ascending: int64 [n].
        length: Rows of the row group.
        size: Bytes of the file.
        fetch: Returns the bytes of some ranges of the file.
        read: Returns the column, given a stream of the file.

    Returns:
        The values; None: the file has no index of the pages, or one that does not fit.

    Raises:
        pa.ArrowException, OSError, ValueError, IndexError: The file is damaged.
    """
    index = chunk.page_index
    if index is None or chunk.total_compressed_size > MOST_BYTES:
        return None
    [data] = fetch([index])
    pages = pages_of(bytes(data))
    firsts = np.array([page.first_row for page in pages] + [length])
    start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
    end = start + chunk.total_compressed_size
    edges = [start, *(edge for page in pages for edge in (page.offset, page.offset + page.size)), end]
    if not pages or firsts[0] or (np.diff(firsts) < 0).any() or edges != sorted(edges) or end > size:
        return None
    chosen = np.unique(np.searchsorted(firsts, rows, "right") - 1).tolist()
    spans = [(start, pages[0].offset)] if pages[0].offset > start else []
    spans += [(pages[number].offset, pages[number].offset + pages[number].size) for number in chosen]
    rest = chunk.total_compressed_size - sum(stop - first for first, stop in spans)
    if rest < HEADER_BYTES:
        return None
    passed_over = _varint((rest - HEADER_BYTES) << 1)
    content = b"".join([*fetch(spans), PASSED_OVER % (passed_over, passed_over)])
    values = read(_Chunk(content, start, end))
    if len(values) != sum(firsts[number + 1] - firsts[number] for number in chosen):
        return None
    held = np.concatenate([np.arange(firsts[number], firsts[number + 1]) for number in chosen])
    return values.take(pa.array(np.searchsorted(held, rows)))


def _varint(number: int) -> bytes:
    """Return a number in five bytes, of which the last ones may say nothing."""
    return bytes([*(number >> shift & 127 | 128 for shift in (0, 7, 14, 21)), number >> 28])


class _Chunk(io.RawIOBase):
    """A stream of a file that has nothing but a column chunk.

    Args:
        content: The first bytes of the chunk; zeros follow.
        start: Where the chunk begins in the file.
        end: Where it ends.
    """

    def __init__(self, content: bytes, start: int, end: int) -> None:
        super().__init__()
        self._content, self._start, self._end, self._position = content.ljust(end - start, b"\0"), start, end, start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        first = self._position - self._start
        found = self._content[first : len(self._content) if size < 0 else first + size]
        self._position += len(found)
        return found
