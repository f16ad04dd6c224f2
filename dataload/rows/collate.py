"""Collation of gathered records into the tensors, lists and rows that users receive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from dataload.arguments import did_you_mean
from dataload.errors import ConfigError, DataError
from dataload.formats.arrow_arrays import bounds, elements, numbers, parts_of_tensors, valid
from dataload.formats.arrow_types import has_elements, has_members, is_bytes, is_text, number
from dataload.formats.schema import NULL, Field
from dataload.rows.columns import Array, Ragged
from dataload.rows.row_block import Records
from dataload.rows.row_errors import UnmappedError
from dataload.runtime.text import few

Batch = dict[str, Any]

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Returns an uninitialised, contiguous tensor of a shape and dtype."""


class Flat(NamedTuple):
    """A ragged column as values and offsets. Row i is values[offsets[i]:offsets[i + 1]]; a null is an empty row.

    Attributes:
        values: The values of all rows: a Tensor [total] of numbers or bytes, or [total, k] for lists of fixed-size
            lists, list[str], a `Flat` for lists of lists, or a dict of these for structs (by member) and maps ("key"
            and "value").
        offsets: Where each row starts, int64 [B + 1].
    """

    values: Any
    offsets: torch.Tensor


class Padded(NamedTuple):
    """Lists of numbers that become tensors of one length in each batch.

    Attributes:
        rows: The lists.
        multiple: The length is a multiple of it.
    """

    rows: Ragged
    multiple: int

    def part(self, span: slice, empty: Empty | None) -> torch.Tensor:
        """Return some of the rows as a tensor, padded with zeros."""
        bounds = self.rows.offsets[span.start : span.stop + 1]
        lengths, values = np.diff(bounds), self.rows.values[bounds[0] : bounds[-1]]
        longest = -(-max(1, int(lengths.max(initial=0))) // self.multiple) * self.multiple
        shape = len(lengths), longest, *values.shape[1:]
        padded = torch.from_numpy(np.zeros(shape, values.dtype))
        if empty is not None:
            padded = empty(shape, padded.dtype).zero_()
        places = np.arange(len(values)) + np.repeat(
            np.arange(len(lengths)) * longest - bounds[:-1] + bounds[0], lengths
        )
        padded.numpy().reshape(-1, *values.shape[1:])[places] = values
        return padded


def to_batch(records: Records, *, empty: Empty | None = None, **how: Any) -> Batch:
    """Return the rows as a batch: a dict of columns.

    Numbers become Tensor[B], fixed-size lists Tensor[B, k], binary values list[memoryview], strings list[str], lists of
    numbers list[Tensor[n]], lists of fixed-size lists list[Tensor[n, k]], tensors of varying shape list[Tensor], and
    all others Python values. In lists, a null is None.

    Args:
        records: The rows.
        empty: As in `columns_of`.
        **how: Other arguments of `columns_of`.

    Raises:
        ConfigError: A group has the name of a column, or its columns are not numbers of one dtype.
        DataError: A string is not UTF-8, or a nested value with nulls cannot be a tensor. It names the column.
        UnmappedError: A function of `map` failed with a row.

    Notes:
        Without `empty`, arrays, and groups of columns that are adjacent in a record, are views of the records, with
        gaps between rows. Binary values are read-only views of the cache. Other values are copied.
    """
    return with_strings(next(cut(columns_of(records, empty=empty, **how), [len(records)], empty)))


def columns_of(
    records: Records,
    *,
    ragged: str = "list",
    pad_to_multiple: int | None = None,
    group: Mapping[str, Sequence[str]] | None = None,
    empty: Empty | None = None,
    columns: Collection[str] | None = None,
) -> Batch:
    """Return what `to_batch` returns, but with Arrow arrays, which `cut` and, for strings, `with_strings` convert.

    Args:
        records: The rows.
        ragged: "list" as `to_batch` says, or "flat" to return binary values and lists, also nested ones, as `Flat`.
        pad_to_multiple: Return lists of numbers as Tensor[B, n], padded with zeros up to a multiple of this number,
            and their lengths as "<column>.length"; None: as `to_batch` says.
        group: Columns of one dtype to return as one Tensor[B, k], by the name of the group.
        empty: Allocates the memory that the values of all tensors are copied to. Each tensor is contiguous then.
        columns: Names of the columns to return; None: all. The others are not converted.
    """
    groups = group or {}
    for field in (field for field in records.layout.ragged if field.kind == "error"):
        check_mapped(records, field)
    own = (field for field in records.layout.fields if field.kind != "error")
    fields = {field.name: field for field in own if columns is None or field.name in columns}
    if clash := groups.keys() & fields.keys():
        raise ConfigError(f"group {min(clash)!r} has the name of a column: choose another name")
    grouped = {name for names in groups.values() for name in names}
    batch = {name: _user_column(records, field, ragged, empty) for name, field in fields.items() if name not in grouped}
    if pad_to_multiple is not None:
        for field in (field for name, field in fields.items() if field.kind == "list"):
            if (length := f"{field.name}.length") in fields:
                raise ConfigError(f"pad_to_multiple adds the column {length!r}, which there is already: rename it")
            batch[field.name] = column = Padded(records.ragged(field), pad_to_multiple)
            batch[length] = _copied(np.diff(column.rows.offsets), empty)
    for name, members in groups.items():
        batch[name] = _stack(records, _numbers_of_one_dtype(name, members, fields), empty)
    return batch


def check_mapped(records: Records, errors: Field) -> None:
    """Raise UnmappedError if a function of `map` failed with one of the rows. errors: the column that says so."""
    failed = np.flatnonzero(records.spans(errors)[:, 1] != NULL)
    if len(failed):
        first = int(failed[0])
        [text] = records[first : first + 1].views(errors)
        assert text is not None
        raise UnmappedError(str(text, "utf-8"))


def cut(batch: Batch, sizes: Sequence[int], empty: Empty | None = None) -> Iterator[Batch]:
    """Split a batch into smaller ones, as views of it. Arrow arrays become lists, except those of strings.

    Args:
        batch: The batch.
        sizes: Rows of each smaller batch.
        empty: Allocates the offsets of `Flat` columns, which cannot be views.
    """
    parts = [_cut(column, name, sizes, empty) for name, column in batch.items()]
    return (dict(zip(batch, columns, strict=True)) for columns in zip(*parts, strict=True))


def with_strings(batch: Batch) -> Batch:
    """Replace the Arrow arrays of a batch by lists of strings, in place. Return the batch."""
    for name, column in batch.items():
        if isinstance(column, pa.LargeStringArray):
            batch[name] = column.to_pylist()
    return batch


def spans(sizes: Sequence[int]) -> list[slice]:
    """Return the slice of each of several consecutive batches of these sizes."""
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _cut(column: Any, name: str, sizes: Sequence[int], empty: Empty | None) -> Iterable[Any]:
    if isinstance(column, pa.LargeStringArray):
        return (column[span] for span in spans(sizes))
    if isinstance(column, Padded):
        return (column.part(span, empty) for span in spans(sizes))
    if isinstance(column, pa.Array):  # Converted later: a few young objects cost the garbage collector less than many.
        return (_pylist(column[span], name) for span in spans(sizes))
    if len(sizes) == 1:
        return [column]
    if isinstance(column, torch.Tensor):
        # torch.split takes longer: it also keeps autograd's record of views.
        return torch.unsafe_split_with_sizes(column, list(sizes))
    return [_part(column, span, empty) for span in spans(sizes)]


def _pylist(array: pa.Array, name: str) -> list[Any]:
    values: list[Any] = _decoded(name, array.to_pylist)
    return values


def _part(column: Any, span: slice, empty: Empty | None = None) -> Any:
    """Return rows [start, stop) of a column, or of the values of a `Flat`. The bounds do not wrap around."""
    if isinstance(column, Flat):
        offsets = column.offsets[span.start : span.stop + 1]
        from_zero = torch.sub(offsets, offsets[0], out=None if empty is None else empty(offsets.shape, offsets.dtype))
        return Flat(_part(column.values, slice(int(offsets[0]), int(offsets[-1])), empty), from_zero)
    if isinstance(column, dict):
        return {name: _part(member, span, empty) for name, member in column.items()}
    return column[span]


def row_values(column: Any) -> Iterable[Any]:
    """Return the value of each row of a column."""
    if isinstance(column, torch.Tensor):
        return column.unbind()
    # torch cannot collate views of bytes.
    return (bytes(value) if isinstance(value, memoryview) else value for value in unflattened(column))


def with_lists(values: Iterable[Any]) -> Iterable[Any]:
    """Return values of a column of lists with Python lists of integers: collators of tokens join lists by `+`.

    Images and boxes, of more dimensions, stay tensors.
    """
    return (
        value.tolist()
        if isinstance(value, torch.Tensor) and value.ndim == 1 and not value.is_floating_point()
        else value
        for value in values
    )


def unflattened(column: Any) -> Any:
    """Return the rows of a `Flat` as a list of views of its values, and any other column as it is."""
    if not isinstance(column, Flat):
        return column
    bounds = column.offsets.tolist()
    return [_part(column.values, slice(start, stop)) for start, stop in pairwise(bounds)]


def _user_column(records: Records, field: Field, ragged: str, empty: Empty | None) -> Any:
    if not field.ragged:
        dense = records.dense(field)
        if empty is not None:
            return _copied(dense, empty)
        # Copy single numbers: a caller that keeps the labels of each batch must not keep whole records alive.
        return torch.from_numpy(dense if field.shape else dense.copy())
    if field.kind == "nested":
        return _nested_column(_nested(records, field), field, ragged, empty)
    if field.kind == "string":
        return _decoded(field.name, lambda: records.strings(field))
    if ragged == "list":
        return records.views(field) if field.kind == "binary" else _vectors(records.ragged(field), empty)
    column = records.ragged(field)
    return Flat(_copied(column.values, empty), _copied(column.offsets, empty))


def _nested_column(array: pa.Array, field: Field, ragged: str, empty: Empty | None) -> Any:
    if field.shape:
        return _tensors(array, empty)
    return array if ragged == "list" else _decoded(field.name, lambda: _flat(array, field, empty))


def _nested(records: Records, field: Field) -> pa.Array:
    try:
        return records.nested(field)
    except pa.ArrowInvalid as error:  # Arrow counts the bytes of strings inside lists with 32 bits.
        raise DataError(
            f"column {field.name!r} has too many values in one batch ({error}): use a smaller batch"
        ) from error


def _vectors(column: Ragged, empty: Empty | None) -> list[torch.Tensor | None]:
    lengths = np.diff(column.offsets).tolist()
    vectors: list[torch.Tensor | None] = list(torch.split(_copied(column.values, empty), lengths))
    if column.valid is not None:
        for row in np.flatnonzero(~column.valid).tolist():
            vectors[row] = None
    return vectors


def _tensors(array: pa.StructArray, empty: Empty | None) -> list[torch.Tensor | None]:
    """Return tensors of varying shape, whatever `ragged` is: values and offsets would not tell the shapes."""
    lengths, values, shapes = parts_of_tensors(array)
    joined = _copied(numbers(values) if empty else numbers(values).copy(), empty)
    parts = zip(torch.split(joined, lengths.tolist()), shapes.tolist(), valid(array).tolist(), strict=True)
    return [part.view(shape) if is_valid else None for part, shape, is_valid in parts]


def _flat(array: pa.Array, field: Field, empty: Empty | None) -> Any:
    """Return nested values as tensors, lists of strings, `Flat`s and dicts of these."""
    kind = array.type
    if has_members(kind):
        members = zip(kind, array.flatten(), strict=True)  # A null struct makes its members null.
        return {member.name: _flat(values, field, empty) for member, values in members}
    if has_elements(kind):
        lengths, inner = elements(array)
        return Flat(_flat(inner, field, empty), _copied(np.concatenate(([0], np.cumsum(lengths))), empty))
    if is_bytes(kind) and not is_text(kind):
        starts, data = bounds(array.cast(pa.large_binary()).fill_null(b""))
        return Flat(_copied(data[starts[0] : starts[-1]].copy(), empty), _copied(starts - starts[0], empty))
    dtype = number(kind)
    if dtype is None:
        return array.to_pylist()
    values = numbers(array).copy()
    if array.null_count and dtype.kind != "f":
        raise DataError(
            f"column {field.name!r} has nulls of {kind} inside, which ragged='flat' cannot hold: use 'list'"
        )
    if array.null_count:
        values[~valid(array)] = np.nan
    return _copied(values, empty)


def _decoded(name: str, values: Callable[[], Any]) -> Any:
    """Return values(). Raise DataError, naming the column, for a value that Python cannot hold."""
    try:
        return values()
    except UnicodeDecodeError as error:
        ways = "pass errors='replace', or write it as binary"
        raise DataError(f"column {name!r} has a string that is not UTF-8 ({error}): {ways}") from error
    except (DataError, MemoryError):  # Arrow's MemoryError is also an ArrowException.
        raise
    except (pa.ArrowException, ValueError, OverflowError) as error:  # times of nanoseconds, years after 9999
        ways = "leave it out with columns=, or read it with ragged='flat'"
        raise DataError(f"column {name!r} has a value that Python cannot hold ({error}): {ways}") from error


def _copied(array: Array, empty: Empty | None) -> torch.Tensor:
    """Return the array as a tensor, copied to memory of `empty`, or without a copy."""
    tensor = torch.from_numpy(array)
    if empty is None:
        return tensor
    copy = empty(array.shape, tensor.dtype)
    copy.numpy()[...] = array  # not by torch, whose threads are slow when the processors are busy
    return copy


def _numbers_of_one_dtype(name: str, members: Sequence[str], fields: Mapping[str, Field]) -> list[Field]:
    """Return the columns of a group. Raise ConfigError if one does not suit."""
    dtypes: dict[str, list[str]] = {}
    for member in members:
        if member not in fields:
            hint = did_you_mean(member, fields, f"there are {few(map(repr, fields))}")
            raise ConfigError(f"group {name!r}: column {member!r} is not read: {hint}")
        field = fields[member]
        if field.ragged or field.shape:
            raise ConfigError(f"group {name!r}: column {member!r} is not one number in each row: leave it out")
        dtypes.setdefault(str(np.dtype(field.dtype)), []).append(repr(member))
    if len(dtypes) != 1:
        found = ", ".join(
            f"{len(same):,} {'is' if len(same) == 1 else 'are'} {dtype} ({few(same, 3)})"
            for dtype, same in dtypes.items()
        )
        raise ConfigError(f"group {name!r} must have columns of one dtype: {found or 'there are none'}")
    return [fields[member] for member in members]


def _stack(records: Records, scalars: Sequence[Field], empty: Empty | None) -> torch.Tensor:
    neighbours = _neighbours(records, scalars)
    if neighbours is not None:
        return _copied(neighbours, empty)
    columns = [records.dense(member) for member in scalars]
    if empty is None:
        return torch.from_numpy(np.stack(columns, axis=1))
    stacked = empty((len(records), len(columns)), torch.from_numpy(columns[0]).dtype)
    np.stack(columns, axis=1, out=stacked.numpy())
    return stacked


def _neighbours(records: Records, scalars: Sequence[Field]) -> Array | None:
    """Return columns of one dtype as a strided view [n, len(scalars)]; None if they are not adjacent in the records."""
    dtype, layout = np.dtype(scalars[0].dtype), records.layout
    first = layout.offset(scalars[0])
    if [layout.offset(field) for field in scalars] != [first + dtype.itemsize * n for n in range(len(scalars))]:
        return None
    as_bytes = records.rows.view(np.uint8).reshape(len(records), layout.dtype.itemsize)
    return as_bytes[:, first : first + dtype.itemsize * len(scalars)].view(dtype)
