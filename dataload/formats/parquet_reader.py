"""Readers of the rows of a Parquet row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pyarrow as pa
import pyarrow.parquet as pq

from dataload.formats.int96 import with_nanoseconds
from dataload.formats.range_stream import HeldBeginning, RangeStream

TOO_LONG = "chunked array"
"""In Arrow's error if the text of a nested column takes 2 GiB or more, for which it makes several arrays."""


class ParquetReader:
    """See `RowGroupReader`.

    Args:
        file: The file.
        number: Number of the row group.
        columns: Names of the columns. None: all, which Arrow need not look up.
        stream: Its bytes.
        at_once: Rows that Arrow decodes at a time, at most; None: as many as fit.
    """

    def __init__(
        self,
        file: pq.ParquetFile,
        number: int,
        columns: list[str] | None,
        stream: HeldBeginning | RangeStream,
        at_once: int | None = None,
    ) -> None:
        self._file = file
        self._number = number
        self._columns = columns
        self._at_once = at_once
        self._stream = stream
        self.wait = stream.wait

    @property
    def fetches(self) -> Sequence[Future[None]]:
        return self._stream.fetches

    def tables(self, rows: int) -> Iterator[pa.Table]:
        self.wait()
        left = self._file.metadata.row_group(self._number).num_rows
        for table in self._tables(rows):
            if len(table) != min(rows, left):
                break
            left -= len(table)
            yield table
        if left:
            raise pa.ArrowInvalid(f"its columns do not have the rows that its footer says: {left} are left")

    def _tables(self, rows: int) -> Iterator[pa.Table]:
        most = min(rows, self._at_once or rows)
        if self._at_once is None and self._file.metadata.row_group(self._number).num_rows <= rows:
            whole = self._whole()
            if whole is not None:
                yield whole
                return
            most = max(1, rows // 2)
        pending: list[pa.RecordBatch] = []
        for batch in self._batches(most):
            pending.append(batch)
            excess = sum(map(len, pending)) - rows
            if excess >= 0:
                yield pa.Table.from_batches(pending).slice(0, rows)
                pending = [batch.slice(len(batch) - excess)] if excess else []
        if pending:
            yield pa.Table.from_batches(pending)

    def _whole(self) -> pa.Table | None:
        """Return all rows, or None if their text is too long to be read at once."""
        try:
            return self._file.read_row_group(self._number, columns=self._columns, use_threads=False)
        except pa.ArrowNotImplementedError as error:
            if TOO_LONG not in str(error):
                raise
            return None

    def _batches(self, most: int, done: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield the rows from row `done` on in batches of at most `most`; of fewer if their text is too long.

        Batches may be shorter: pyarrow ends one early if its values are too long for one array.
        """
        group, read = [self._number], 0
        try:
            for batch in self._file.iter_batches(most, row_groups=group, columns=self._columns, use_threads=False):
                read += len(batch)
                if read > done:
                    yield batch.slice(len(batch) - (read - done))
                    done = read
        except pa.ArrowNotImplementedError as error:
            if TOO_LONG not in str(error) or most == 1:
                raise
        else:
            return
        yield from self._batches(most // 2, done)


class LongTimesReader:
    """A reader of a row group with times of 96 bits. See `RowGroupReader`.

    Args:
        reader: Reads all columns, and those times in us.
        in_ns: Reads the columns with those times in ns. Arrow wraps them around if 64 bits cannot hold them.
    """

    def __init__(self, reader: ParquetReader, in_ns: ParquetReader) -> None:
        self._reader = reader
        self._in_ns = in_ns
        self.wait = reader.wait

    @property
    def fetches(self) -> Sequence[Future[None]]:
        return self._reader.fetches

    def tables(self, rows: int) -> Iterator[pa.Table]:
        return map(with_nanoseconds, self._reader.tables(rows), self._in_ns.tables(rows))
