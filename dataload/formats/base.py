"""What a file says of its row groups, whatever its format."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.tier import Span

SHARED_BYTES = 512 << 10  # of a row group with all its columns; smaller ones are not worth a request each
GAP_BYTES = 256 << 10  # between ranges that are fetched all the same rather than with one more request


@dataclass(frozen=True)
class Bounds:
    """What is known of the values of one column in one row group. nulls: how many; None, like a bound: unknown."""

    low: Any
    high: Any
    nulls: int | None


class RowGroupReader(Protocol):
    """Decodes some columns of one row group."""

    def tables(self, rows: int) -> Iterator[pa.Table]:
        """Its rows in tables of `rows` rows; the last may be smaller."""


class Footer(Protocol):
    """A file's schema, without metadata, and its row groups by number. lengths: rows of each."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def lengths(self) -> Sequence[int]: ...

    def stored_bytes(self, number: int) -> int:
        """Bytes of a row group in the file, all its columns."""

    def decoded_bytes(self, number: int, columns: Collection[str]) -> list[int]:
        """About how many bytes these columns, dotted where they are members of structs, take once decompressed."""

    def coded(self, number: int, columns: Collection[str]) -> list[str]:
        """Those of these columns, of bytes or text, of which the file has codes: `decoded_bytes` may be far too few."""

    def held_bytes(self, number: int, columns: Sequence[str]) -> int:
        """Bytes of a row group that are in memory at a time while these columns are decoded, as they are stored."""

    def fetched(self, number: int, columns: Sequence[str]) -> tuple[list[Span], list[Span]]:
        """What `open_row_group` has fetched of the file: from the blocks that the cache keeps; in requests of its own.

        Of the second kind each span is a request, unless blocks that hold it are kept.
        """

    def bounds(self, number: int, column: str, kind: pa.DataType) -> Bounds:
        """What is known of a column's values, which are of the type `kind`."""

    def open_row_group(
        self, obj: Object, number: int, columns: Sequence[str], blocks: Blocks
    ) -> AbstractContextManager[RowGroupReader]:
        """Some columns of one row group of the file, which is `obj`.

        Notes: row groups of less than `SHARED_BYTES` go through the cache, in blocks, which neighbours share; but not
        where the cache is so small that these would be gone by then.
        Raises DataError when the data cannot be decoded, OriginError.
        """


def joined(spans: Sequence[Span], gap: int = GAP_BYTES) -> list[Span]:
    """Spans [start, stop) in order of their start, made one where no more than `gap` lies between them."""
    found: list[Span] = []
    for start, stop in spans:
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found
