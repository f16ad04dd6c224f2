"""Decoding of Arrow columns into numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataload.errors import DataError
from dataload.formats.arrow_arrays import (
    as_in_dataset,
    bounds,
    elements,
    numbers,
    parts_of_tensors,
    plain,
    plain_type,
    unwrapped,
    valid,
)
from dataload.formats.arrow_types import NO_VALUE, is_bytes, is_list, storage
from dataload.formats.exact_values import array_of
from dataload.formats.schema import Field, fields_of, flatten_table, hides_nulls, mask_name, needs_mask
from dataload.formats.text import TextErrors, repaired
from dataload.rows.columns import Array, Coded, Column, Dense, Nested, Ragged, concatenate, spans_of, whole_bytes

MIN_SHARING = 2  # A dictionary is kept if it has at most one byte for so many bytes of the rows, spans included.


def decode(
    table: pa.Table,
    fields: Sequence[Field],
    fill_null: Any,
    where: str,
    schema: pa.Schema,
    needed: Array | None = None,
    errors: TextErrors = "raise",
) -> dict[str, Column]:
    """Return columns of an Arrow table as arrays, by name.

    Args:
        table: The table.
        fields: The columns to decode. A member of a struct has a dotted name. With the mask of a column, its nulls
            become zeros.
        fill_null: Replacement of nulls, for all columns that can hold it or, as a mapping, by column; or None.
        where: File and row group, for errors.
        schema: The flat schema of the dataset. Columns of other types are cast to its types: those without values in
            this table, see `null_types`, and those that `common_schema` promoted.
        needed: The rows that somebody reads, bool [rows]; None: all. Nulls of the others become zeros.
        errors: "replace" stores valid text in place of invalid text, "raise" the bytes as they are.

    Raises:
        DataError: A column has nulls that batches cannot represent, or the replacement has the wrong type. It names
            `where` and the column.
    """
    table = flatten_table(table)
    stored = dict(zip(table.column_names, table.itercolumns(), strict=True))
    columns: dict[str, Column] = {}
    names = {field.name for field in fields}
    for field in fields:
        if field.kind == "mask":
            continue
        by_column = isinstance(fill_null, Mapping)
        filling = fill_null.get(field.name) if by_column else fill_null
        mask = mask_name(field) if needs_mask(field) and mask_name(field) in names else None
        place, repairs = f"{where} column {field.name!r}", errors == "replace"
        decoder = _Decoder(field, place, filling, needed, must_fill=by_column, masks=mask is not None, repairs=repairs)
        # A member of a struct that has no members in this table has only nulls.
        column = stored[field.name] if field.name in stored else pa.chunked_array([pa.nulls(len(table))])
        columns[field.name], nulls = decoder.decode(column, schema.field(field.name).type)
        if mask is not None:
            columns[mask] = Dense(np.zeros(len(table), np.bool_) if nulls is None else nulls)
    return columns


def raises_for_nulls(field: pa.Field, fill_null: Any) -> bool:
    """Return whether `decode` raises for a null of a column, or inside of its lists if it `hides_nulls`."""
    a_null = pa.nulls(1, field.type)
    if hides_nulls(field):  # in a plain list of the same values, because Arrow makes those of any type
        field = field.with_type(pa.list_(field.type.field(0)))
        a_null = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), pa.nulls(1, field.type.value_type), field.type)
    schema = pa.schema([field])
    try:
        decode(pa.table([a_null], schema=schema), fields_of(schema), fill_null, "", schema)
    except DataError:
        return True
    return False


class _Decoder:
    """A decoder of one column.

    Args:
        field: The column.
        where: File, row group and column, for errors.
        filling: Replacement of nulls, or None.
        needed: The rows that somebody reads, bool [rows]; None: all.
        must_fill: Whether a replacement that the column cannot hold is an error, also where a null needs none.
        masks: Whether nulls become zeros that a mask marks.
        repairs: Whether text that is not UTF-8 is replaced.
    """

    def __init__(
        self,
        field: Field,
        where: str,
        filling: Any,
        needed: Array | None,
        *,
        must_fill: bool,
        masks: bool,
        repairs: bool,
    ) -> None:
        self._field = field
        self._where = where
        self._filling = filling
        self._needed = needed
        self._must_fill = must_fill
        self._masks = masks
        self._repairs = repairs

    def decode(self, chunks: pa.ChunkedArray, kind: pa.DataType) -> tuple[Column, Array | None]:
        """Return the column, and the rows that have nulls, bool [rows]; None: no row. kind: its type in the dataset."""
        try:
            chunks = as_in_dataset(chunks, kind)
            if self._field.kind == "nested":
                whole = pa.concat_arrays([plain(chunk) for chunk in chunks.chunks or [pa.nulls(0, chunks.type)]])
                common = plain_type(self._field.type)
                whole = whole if whole.type == common else whole.cast(common)
                if self._field.shape:
                    self._check_shapes(whole)
                return Nested(self._readable(whole)), None
            return self._ragged(chunks) if self._field.ragged else self._fixed(chunks)
        except MemoryError as error:  # Arrow's is also an ArrowException.
            error.add_note(f"{self._where} cannot be decoded")
            raise
        except pa.ArrowException as error:
            raise DataError(f"{self._where} cannot be decoded: {error}") from error

    def _readable(self, array: pa.Array) -> pa.Array:
        return repaired(array) if self._repairs else array

    def _check_shapes(self, tensors: pa.StructArray) -> None:
        """Raise DataError unless each tensor of a column has as many numbers as its shape says, and no null."""
        lengths, values, shapes = parts_of_tensors(tensors)
        counts = [math.prod(shape) for shape in shapes.tolist()]  # of Python: they may be too large for 64 bits
        if values.null_count or counts != lengths.tolist() or shapes.min(initial=0) < 0:
            raise DataError(f"{self._where} has nulls inside its tensors, or other numbers than their shapes tell")

    def _fixed(self, chunks: pa.ChunkedArray) -> tuple[Dense, Array | None]:
        kind = chunks.type
        column = _whole(unwrapped(chunks))
        if is_list(column.type):  # an array of Hugging Face datasets
            column = plain(column).cast(_fixed_lists(column.type, self._field.shape))
        values, nulls = self._dense(column)
        rows: Array | None = None
        if nulls is not None:
            rows = _any(nulls)
            what = "nulls" if nulls.ndim == 1 else "rows with nulls"
            values = self._without_nulls(values, nulls, column, what, self._needed)
        return Dense(_shaped(values, kind)), rows

    def _dense(self, column: pa.Array) -> tuple[Array, Array | None]:
        """Return the values, and which of them are null, [rows, …]; None: no value. That of a null is undefined."""
        if not pa.types.is_fixed_size_list(column.type):
            return numbers(column), ~valid(column) if column.null_count else None
        size, count = column.type.list_size, len(column)
        inner = unwrapped(column.values.slice(column.offset * size, count * size))
        values, nulls = self._dense(inner)
        values = values.reshape(count, size, *values.shape[1:])
        if nulls is not None:
            nulls = nulls.reshape(values.shape)
        if column.null_count:
            nulls = np.zeros(values.shape, np.bool_) if nulls is None else nulls
            nulls[~valid(column)] = True
        return values, nulls

    def _without_nulls(
        self,
        values: Array,
        nulls: Array,
        column: pa.Array,
        what: str,
        needed: Array | None,
        lists: pa.DataType | None = None,
    ) -> Array:
        """Return the values with nulls replaced.

        Args:
            values: The values, [rows, …].
            nulls: Which of them are null, of the same shape.
            column: The column that holds them.
            what: Names the nulls in errors.
            needed: The values that somebody reads, bool [rows]; None: all.
            lists: The type of the lists whose elements these are, or None.
        """
        values = values.copy()
        if needed is not None:
            needed = needed.reshape(-1, *(1 for _ in nulls.shape[1:]))
            values[nulls & ~needed] = 0
            nulls = nulls & needed
            if not nulls.any():
                return values
        filling = self._filling_of(column.type, lists)
        if filling is not None and np.ndim(filling):  # a whole row
            rows = ~valid(column)
            values[rows] = filling
            nulls = nulls.copy()
            nulls[rows] = False
        elif filling is not None:
            values[nulls] = filling
            return values
        if values.dtype.kind == "f":
            values[nulls] = np.nan
        elif self._masks:
            values[nulls] = 0
        elif count := int(_any(nulls).sum()):
            ways = "pass fill_null= to replace them, or null_masks=True to mark them"
            raise DataError(f"{self._where} has {count} {what}: {ways}")
        return values

    def _filling_of(self, kind: pa.DataType, lists: pa.DataType | None) -> Any:
        """Return the replacement of a null dense value: a value, one number for all of its elements, or None."""
        if self._filling is None:
            return None
        kinds = _accepted(kind)
        for candidate in kinds:
            try:
                return self._dense(unwrapped(array_of(self._filling, candidate)))[0][0]
            except NO_VALUE:
                continue
        replaces_lists = lists is not None and self._fits(lists)
        if (self._must_fill and not replaces_lists) or not (self._masks or pa.types.is_floating(kinds[-1])):
            raise self._no_filling(kind)
        return None

    def _ragged(self, chunks: pa.ChunkedArray) -> tuple[Column, Array | None]:
        if (coded := self._coded(chunks)) is not None:
            return coded, None
        column = self._readable(_whole(unwrapped(chunks)))
        rows = ~valid(column) if column.null_count else None
        found = None
        if rows is not None:
            filled = self._filled(column)
            found = None if filled is not column else ~rows
            column = filled
        if is_bytes(column.type):
            column = column if found is None else pc.fill_null(column, pa.scalar("", column.type))
            starts, data = bounds(column)
            return Ragged(data, starts, found), None
        lengths, inner = elements(column)
        kind, inner = inner.type, unwrapped(inner)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        values, nulls = self._dense(inner)
        if nulls is not None:
            needed = None if self._needed is None else np.repeat(self._needed, lengths)
            values = self._without_nulls(values, nulls, inner, "nulls inside its lists", needed, column.type)
            rows = np.zeros(len(column), np.bool_) if rows is None else rows
            rows[np.searchsorted(offsets, np.flatnonzero(_any(nulls)), side="right") - 1] = True
        return Ragged(_shaped(values, kind), offsets, found), rows

    def _coded(self, chunks: pa.ChunkedArray) -> Coded | None:
        """Return the column with its dictionary, or None if it has none, or if this would not be much smaller."""
        kind = chunks.type
        if not (pa.types.is_dictionary(kind) and is_bytes(kind.value_type)) or not chunks.num_chunks:
            return None
        if any(chunk.dictionary.null_count for chunk in chunks.chunks):
            return None
        if MIN_SHARING * sum(len(chunk.dictionary) for chunk in chunks.chunks) > len(chunks):
            return None
        null = unwrapped(pa.nulls(1, kind.value_type))
        null = self._filled(null) if chunks.null_count else null
        coded = concatenate(
            [_coded(chunk, self._readable(unwrapped(chunk.dictionary)), null) for chunk in chunks.chunks]
        )
        assert isinstance(coded, Coded)
        dictionary = coded.values.nbytes + coded.spans.nbytes
        pays = len(coded.spans) < len(chunks) and dictionary * MIN_SHARING <= whole_bytes(coded)
        return coded if pays else None

    def _filled(self, column: pa.Array) -> pa.Array:
        """Return the column with nulls replaced; the column itself if its nulls stay."""
        if self._filling is None:
            return column
        if self._fits(column.type):
            return pc.fill_null(column, array_of(self._filling, column.type)[0])
        element = storage(column.type.value_type) if is_list(column.type) else None
        replaces_elements = element is not None and any(map(self._fits, _accepted(element)))
        if self._must_fill and not replaces_elements:
            raise self._no_filling(column.type)
        return column

    def _fits(self, kind: pa.DataType) -> bool:
        """Return whether the type can hold the replacement."""
        try:
            array_of(self._filling, kind)
        except NO_VALUE:
            return False
        return True

    def _no_filling(self, kind: pa.DataType) -> DataError:
        way = f"pass a {kind}" if self._must_fill else f"pass it by column, as fill_null={{{self._field.name!r}: …}}"
        return DataError(f"{self._where}: fill_null={self._filling!r} is no {kind}: {way}")


def _any(nulls: Array) -> Array:
    """Return which values have a null, bool [n], given which of their numbers are null, [n, …]."""
    found: Array = np.asarray(nulls.any(axis=tuple(range(1, nulls.ndim))))
    return found


def _shaped(values: Array, kind: pa.DataType) -> Array:
    """Return values, [n, …], in the shape of the tensors that a type has."""
    if not isinstance(kind, pa.FixedShapeTensorType):
        return values
    axes = [1 + axis for axis in kind.permutation or range(len(kind.shape))]
    return values.reshape(len(values), *kind.shape).transpose(0, *axes)


def _coded(chunk: pa.DictionaryArray, values: pa.Array, null: pa.Array) -> Coded:
    """Return a chunk. values: its dictionary, without nulls. null: the value of a null, [1]."""
    codes = numbers(chunk.indices).astype(np.int64)
    if chunk.null_count:
        codes[~valid(chunk.indices)] = len(values)
        values = pa.concat_arrays([values, null])
    starts, data = bounds(values)
    distinct = Ragged(data[starts[0] : starts[-1]], starts, valid(values) if values.null_count else None)
    return Coded(distinct.values, spans_of(distinct), codes)


def _fixed_lists(kind: pa.DataType, shape: Sequence[int]) -> pa.DataType:
    """Return the type of nested lists with fixed sizes."""
    for _ in shape:
        kind = storage(kind.value_type)
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return kind


def _accepted(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types of a replacement of values of a type: of whole arrays, of their rows, and of their numbers."""
    kinds = [kind]
    while pa.types.is_fixed_size_list(kinds[-1]):
        kinds.append(storage(kinds[-1].value_type))
    return [*kinds, pa.float64()] if pa.types.is_decimal(kinds[-1]) else kinds


def _whole(chunks: pa.ChunkedArray) -> pa.Array:
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
