"""Calls of the user's function with the rows of a chunk."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from dataload.catalog.selection import Mask
from dataload.errors import DataError, RowError
from dataload.formats.arrow_arrays import plain
from dataload.formats.schema import ERRORS, Field, Layout, fields_of
from dataload.formats.text import TextErrors
from dataload.mapping.forms import Made
from dataload.mapping.identity import name_of
from dataload.mapping.values import Returned, Values
from dataload.rows import row_block
from dataload.rows.arrow_decode import decode
from dataload.rows.collate import to_batch
from dataload.rows.columns import Array, Coded, Column, Dense, Nested, Ragged, concatenate, spans_of
from dataload.rows.row_block import Blob, Records
from dataload.rows.row_errors import UnmappedError, is_of_a_row
from dataload.runtime.executor import DaemonExecutor, awaited
from dataload.runtime.exhaustion import with_causes

T = TypeVar("T")
_LATER = (ConnectionError, TimeoutError)
Function = Callable[[dict[str, Any]], Mapping[str, Any]]


class ChunkError(Exception):
    """The function failed with some rows.

    Args:
        row: The first row of the chunk that fails when it is alone; None: no row does.
        text: What failed.
    """

    def __init__(self, row: int | None, text: str) -> None:
        super().__init__(row, text)
        self.row, self.text = row, text


class Runner:
    """Calls the function, and returns the columns of the mapped rows.

    Args:
        function: The function.
        given: Names of the columns that it gets, with their masks of nulls.
        kept: The columns that stay as they are.
        known: Columns by name, one of which a returned column of that name may equal.
        is_flat: Whether it may return more or fewer rows than it gets.
        errors: What to do about returned text that is not UTF-8, as for `make_dataset`.
    """

    def __init__(
        self,
        function: Function,
        given: Sequence[str],
        kept: Sequence[Field],
        known: pa.Schema,
        *,
        is_flat: bool = False,
        errors: TextErrors = "raise",
    ) -> None:
        self._function = function
        self._is_flat = is_flat
        self._errors = errors
        self._given = dict.fromkeys(given)
        self._kept = kept
        self._known = {field.name: field for field in known}

    def columns(self, records: Records, made: Made) -> dict[str, Column]:
        """Return the mapped rows.

        Args:
            records: The rows of a chunk.
            made: The columns that the function makes.

        Raises:
            ChunkError: The function raised, or it returned other columns. If it skips rows, errors are stored if other
                rows may work.
        """

        def fit(part: Records) -> dict[str, Column]:
            found = self._call(part)
            if self._is_flat and not rows_in(found):
                return no_rows(made.columns)
            return made.fitted(found)

        parts = list(self._parts(fit, records, skips=made.skips))
        found = with_errors(parts, made.columns) if made.skips else parts[0][0] or {}
        return found | {field.name: column_of(records, field) for field in self._kept}

    def each(
        self, chunks: Iterable[Records], made: Made, threads: DaemonExecutor, ahead: int
    ) -> Generator[dict[str, Column], None, None]:
        """Return the mapped rows of each chunk, in order. See `columns`.

        Args:
            chunks: The chunks.
            made: The columns that the function makes.
            threads: They call the function.
            ahead: Calls that are under way, besides the one whose result comes next.
        """
        return in_flight(chunks, lambda records: threads.submit(self.columns, records, made), ahead)

    def sample(self, records: Records, *, of_working: bool = False) -> Iterator[tuple[dict[str, Returned], int]]:
        """Yield the columns that the function makes of some rows, and their number.

        Args:
            records: The rows of a chunk.
            of_working: Yield those of parts of the rows that the function works with.

        Raises:
            ChunkError: The function raised, or no column can hold a value of it.
        """

        def call(part: Records) -> dict[str, Returned]:
            found = self._call(part)
            for field in self._kept:
                if field.name in found:
                    raise DataError(f"it returned the column {field.name!r}, which it did not get: add it to columns=")
            if not found and not self._kept and not self._is_flat:
                raise DataError("it returned no column: return at least one")
            return found

        for found, _, rows in self._parts(call, records, skips=of_working):
            if found is not None:
                yield found, rows

    def kept_bytes(self, records: Records) -> dict[str, float]:
        """Return the mean bytes of a value of each kept column that is ragged."""
        ragged = (field for field in self._kept if field.ragged)
        return {field.name: bytes_of(column_of(records, field)) / len(records) for field in ragged}

    def _call(self, records: Records) -> dict[str, Returned]:
        batch = to_batch(records, empty=_empty, columns=self._given)
        result = self._function({name: batch[name] for name in self._given})
        if not isinstance(result, Mapping):
            raise DataError(f"it returned a {type(result).__qualname__}: return a dict of columns")
        if unnamed := [name for name in result if not isinstance(name, str)]:
            raise DataError(f"it returned a column {unnamed[0]!r}: name columns by strings")
        found = {
            name: Values(name, self._known.get(name), self._errors).column(value) for name, value in result.items()
        }
        if self._is_flat and len({len(column) for column in found.values()}) > 1:
            sizes = " and ".join(f"{name!r} has {len(column)}" for name, column in found.items())
            raise DataError(f"its columns have other numbers of rows ({sizes}): return columns of one length")
        for name, column in found.items():
            if len(column) != len(records) and not self._is_flat:
                raise DataError(
                    f"column {name!r} has {len(column)} rows, and the batch {len(records)}: return a row for each row"
                )
        return found

    def _parts(
        self, call: Callable[[Records], T], records: Records, first: int = 0, *, skips: bool
    ) -> Iterator[tuple[T | None, str | None, int]]:
        """Yield what a call returns for some rows, or why it fails with a row, and the number of rows: in their order.

        Args:
            call: The call.
            records: The rows.
            first: The number of the first one in the chunk.
            skips: Whether a row with which it fails is yielded. Otherwise it ends the iteration.

        Raises:
            ChunkError: It fails with a row, or with whatever rows.
        """
        failed: BaseException | None = None
        try:
            found = call(records)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (also SystemExit, and the panics of libraries in Rust)
            failed = error
        if failed is None:
            yield found, None, len(records)
            return
        if not _is_of_a_row(failed):
            raise ChunkError(None, shown(failed)) from failed
        if len(records) > 1:
            middle = len(records) // 2
            yield from self._parts(call, records[:middle], first, skips=skips)
            yield from self._parts(call, records[middle:], first + middle, skips=skips)
            if not skips:  # Each half works.
                raise ChunkError(None, shown(failed)) from failed
            return
        text = failed.without_row if isinstance(failed, RowError) else shown(failed)
        if not skips:
            raise ChunkError(first, text) from failed
        yield None, text if isinstance(failed, UnmappedError) else f"map {name_of(self._function)}: {text}", 1


def _is_of_a_row(error: BaseException) -> bool:
    """Return whether other rows may work. A service that does not answer now may answer later."""
    return is_of_a_row(error) and not any(isinstance(each, _LATER) for each in with_causes(error))


def rows_in(found: Mapping[str, Returned]) -> int:
    """Return the number of rows of columns of one length."""
    return len(next(iter(found.values()))) if found else 0


def with_errors(
    parts: Iterable[tuple[dict[str, Column] | None, str | None, int]], fields: Sequence[Field]
) -> dict[str, Column]:
    """Return the columns of consecutive parts, and why there are none: then the row is blank."""
    found: list[dict[str, Column]] = []
    texts: list[str | None] = []
    for columns, reason, rows in parts:
        found.append({field.name: blank(field) for field in fields} if columns is None else columns)
        texts += [reason] * rows
    joined = {field.name: concatenate([columns[field.name] for columns in found]) for field in fields}
    return joined | {ERRORS.name: column_of_texts(texts)}


def blank(field: Field) -> Column:
    """Return a column of one row without a value."""
    if field.kind == "nested":
        return Nested(plain(pa.nulls(1, field.type)))
    if not field.ragged:
        return Dense(np.zeros((1, *field.shape), field.dtype))
    return Ragged(np.empty((0, *field.shape), field.dtype), np.zeros(2, np.int64), np.zeros(1, np.bool_))


def column_of_texts(texts: Sequence[str | None]) -> Column:
    """Return a column of strings, of which many are equal."""
    schema = pa.schema([ERRORS])
    valid = [None if text is None else text.encode(errors="backslashreplace").decode() for text in texts]
    table = pa.table([pa.array(valid, ERRORS.type).dictionary_encode()], [ERRORS.name])
    return decode(table, fields_of(schema), None, "", schema)[ERRORS.name]


def in_flight(
    chunks: Iterable[Records], submit: Callable[[Records], Future[T]], ahead: int
) -> Generator[T, None, None]:
    """Yield the result of each chunk, in order. `ahead` calls, and another one, are under way.

    If a call raises, or the generator is closed, the queued calls are cancelled and the running ones are waited for.
    """
    calls = deque[Future[T]]()
    try:
        for records in chunks:
            calls.append(submit(records))
            if len(calls) > ahead:
                yield awaited(calls.popleft())
        while calls:
            yield awaited(calls.popleft())
    except BaseException as error:
        running = [call for call in calls if not call.cancel()]
        if not isinstance(error, KeyboardInterrupt):
            wait(running)  # They use memory that the caller has reserved.
        raise


def blob_of(columns: Mapping[str, Column], rows: int, layout: Layout, where: str) -> bytearray:
    """Return columns as a blob of records. Raise DataError if a column has too many values."""
    memory = bytearray()

    def allocate(size: int) -> memoryview:
        memory.extend(bytes(size))
        return memoryview(memory)

    row_block.pack(columns, rows, layout, row_block.NO_KEY, where, allocate)
    return memory


def mapped_blobs(
    columns_of_blobs: Iterable[tuple[Mapping[str, Column], int]], mask: Mask | None, layout: Layout, where: str
) -> Iterator[tuple[memoryview, int, Array]]:
    """Yield each blob that has rows to map, its number of rows, and the rows to map, int64 [n].

    Args:
        columns_of_blobs: The columns of consecutive blobs, and their rows.
        mask: Which of all their rows are mapped; None: all.
        layout: Layout of a record.
        where: File and row group, for errors.
    """
    first = 0
    for columns, rows in columns_of_blobs:
        chosen = np.arange(rows) if mask is None else np.flatnonzero(mask[first : first + rows])
        first += rows
        if len(chosen):
            # The function gets views of the bytes, which equal values share.
            yield memoryview(blob_of(columns, rows, layout, where)).toreadonly(), rows, chosen


def records_of(blob: memoryview, rows: int, layout: Layout, chosen: Any = slice(None)) -> Records:
    """Return copies of the rows of a blob; chosen: which of them."""
    view = Blob(blob, rows, layout)
    records = np.frombuffer(view.records, layout.dtype)[chosen].copy()
    blobs = [view] if layout.ragged else []
    return Records(layout, records, blobs, np.zeros(len(records) if blobs else 0, np.int64))


def no_rows(fields: Sequence[Field]) -> dict[str, Column]:
    """Return columns without rows."""
    fields = [Field(field.name, "dense", field.dtype) if field.kind == "mask" else field for field in fields]
    return {field.name: column_of(Records.none(Layout(fields)), field) for field in fields}


def bytes_of(column: Column) -> int:
    """Return the bytes of the values of a column."""
    return int(column.values.nbytes)


def column_of(records: Records, field: Field) -> Column:
    """Return a column of some rows as it is stored. Equal strings of a blob stay shared."""
    if field.kind == "nested":
        return Nested(records.nested(field))
    if not field.ragged:
        return Dense(records.dense(field))
    if field.is_bytes and len(records.blobs) == 1:
        codes, firsts, inverse = np.unique(records.rows[field.name], return_index=True, return_inverse=True)
        if 2 * len(codes) <= len(records):
            distinct = Records(records.layout, records.rows[firsts], records.blobs, records.which[firsts])
            values = distinct.ragged(field)
            return Coded(values.values, spans_of(values), inverse.astype(np.int64))
    found: Ragged = records.ragged(field)
    return found


def shown(error: BaseException) -> str:
    """Return an error as text, with the line of the user's function that raised it."""
    if isinstance(error, DataError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")
