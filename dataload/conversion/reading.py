"""The rows of a source from a position on, in pieces of a chosen size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa

from dataload.conversion.source import Source
from dataload.conversion.writer import storable
from dataload.runtime.executor import DaemonExecutor, awaited


class Position(NamedTuple):
    """The next row.

    Attributes:
        part: Its part of the source.
        row: Its number in the part.
    """

    part: int
    row: int


class Reading:
    """Reads a source ahead on a thread of its own, and casts its columns to the types that Parquet has.

    Args:
        source: The rows.
        schema: The types.
        position: Where to begin.
        advance: Called with the bytes of the source that are read.

    Attributes:
        position: The row that the next call of `take` begins with.
    """

    def __init__(self, source: Source, schema: pa.Schema, position: Position, advance: Callable[[int], object]) -> None:
        self.position = position
        self._source, self._schema, self._advance = source, schema, advance
        self._held: deque[tuple[Position, pa.Table]] = deque()
        self._read = self._ahead()

    def peek(self, num_bytes: int) -> pa.Table:
        """Return the next rows of about this size in memory, without taking them."""
        self._hold(num_bytes, num_bytes)
        return self._table(self._held_rows)

    def take(self, rows: int, num_bytes: int) -> pa.Table:
        """Return and pass the next rows, as many as are asked for unless they are larger in memory; none at the end."""
        self._hold(rows, num_bytes)
        taken = self._table(rows)
        left = taken.num_rows
        while left:
            position, table = self._held.popleft()
            passed = min(left, table.num_rows)
            left -= passed
            self.position = Position(position.part, position.row + passed)
            if passed < table.num_rows:
                self._held.appendleft((self.position, table.slice(passed)))
        return taken

    @property
    def _held_rows(self) -> int:
        return sum(table.num_rows for _, table in self._held)

    def _hold(self, rows: int, num_bytes: int) -> None:
        held_rows, held_bytes = self._held_rows, sum(table.nbytes for _, table in self._held)
        while held_rows < rows and held_bytes < num_bytes:
            found = next(self._read, None)
            if found is None:
                return
            self._held.append(found)
            held_rows += found[1].num_rows
            held_bytes += found[1].nbytes

    def _table(self, rows: int) -> pa.Table:
        tables = [table for _, table in self._held] or [self._schema.empty_table()]
        return pa.concat_tables(tables).slice(0, rows)

    def _ahead(self) -> Iterator[tuple[Position, pa.Table]]:
        """Yield the tables, each of which a thread reads while the one before is used."""
        thread, tables = DaemonExecutor(1, "dataload-convert"), self._tables()
        try:
            pending = thread.submit(next, tables, None)
            while (found := awaited(pending)) is not None:
                pending = thread.submit(next, tables, None)
                yield found
        finally:
            del thread  # It ends now, and not when an error, whose traceback has this frame, is collected.

    def _tables(self) -> Iterator[tuple[Position, pa.Table]]:
        begin = self.position
        self._advance(sum(part.bytes for part in self._source.parts[: begin.part]))
        for part in range(begin.part, len(self._source.parts)):
            row, skipped = 0, begin.row if part == begin.part else 0
            for table in self._source.read(part):
                end = row + table.num_rows
                rest = table.slice(max(0, skipped - row))
                if rest.num_rows:
                    yield Position(part, end - rest.num_rows), storable(rest).cast(self._schema)
                row = end
            self._advance(self._source.parts[part].bytes)
