"""Readers of the rows of a Parquet row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pyarrow as pa
import pyarrow.parquet as pq

from dataload.formats.int96 import with_nanoseconds
from dataload.formats.range_stream import HeldBeginning, RangeStream


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
        if self._at_once is None and self._file.metadata.row_group(self._number).num_rows <= rows:
            yield self._file.read_row_group(self._number, columns=self._columns, use_threads=False)
            return
        pending: list[pa.RecordBatch] = []
        most = min(rows, self._at_once or rows)
        # Batches may be shorter than `most`: pyarrow ends one early if its values are too long for one array.
        for batch in self._file.iter_batches(most, row_groups=[self._number], columns=self._columns, use_threads=False):
            pending.append(batch)
            excess = sum(map(len, pending)) - rows
            if excess >= 0:
                yield pa.Table.from_batches(pending).slice(0, rows)
                pending = [batch.slice(len(batch) - excess)] if excess else []
        if pending:
            yield pa.Table.from_batches(pending)


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
