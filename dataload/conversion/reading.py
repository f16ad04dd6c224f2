"""The rows of a source from a position on, in pieces of a chosen size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import pyarrow as pa

from dataload.conversion.source import Source
from dataload.conversion.writer import storable
from dataload.runtime.executor import DaemonExecutor, awaited

AHEAD_BYTES, MOST_AHEAD = 32 << 20, 64  # of tables that are read ahead, and how many

T = TypeVar("T")


class Told(Protocol):
    """Yields what is read of some bytes, and tells of progress. See `Files.told`."""

    def __call__(self, items: Iterable[T], num_bytes: int, /) -> Iterator[T]: ...


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
        told: Tells of progress.

    Attributes:
        position: The row that the next call of `take` begins with.
    """

    def __init__(self, source: Source, schema: pa.Schema, position: Position, told: Told) -> None:
        self.position = position
        self._source, self._schema, self._told = source, schema, told
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
        """Yield the tables, which a thread reads ahead."""
        thread, tables = DaemonExecutor(1, "dataload-convert-read"), self._tables()
        pending, wanted = deque([thread.submit(next, tables, None)]), 1
        try:
            while (found := awaited(pending.popleft())) is not None:
                wanted = max(1, min(MOST_AHEAD, AHEAD_BYTES // max(1, found[1].nbytes)))
                while len(pending) < wanted:
                    pending.append(thread.submit(next, tables, None))
                yield found
        finally:
            while pending:
                pending.pop().cancel()
            del thread  # It ends now, and not when an error, whose traceback has this frame, is collected.

    def _tables(self) -> Iterator[tuple[Position, pa.Table]]:
        begin, parts = self.position, self._source.parts
        yield from self._told((), sum(part.bytes for part in parts[: begin.part]))
        for part in range(begin.part, len(parts)):
            row, skipped = 0, begin.row if part == begin.part else 0
            for table in self._told(self._source.read(part), parts[part].bytes):
                end = row + table.num_rows
                rest = table.slice(max(0, skipped - row))
                if rest.num_rows:
                    yield Position(part, end - rest.num_rows), storable(rest).cast(self._schema)
                row = end
