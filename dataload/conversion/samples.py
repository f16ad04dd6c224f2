"""Samples of other libraries, dicts of values of Python and NumPy, as tables."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.errors import DataError

TABLE_BYTES, TABLE_ROWS = 16 << 20, 4096

Sample = Mapping[str, Any]


def schema_of(samples: Iterable[Sample], name: str) -> pa.Schema:
    """Return the columns of samples. Arrays of one shape have a fixed one; others are lists.

    Args:
        samples: The samples.
        name: Where they are, for errors.

    Raises:
        DataError: A column has values of two types.
    """
    found: dict[
        str, tuple[pa.DataType, tuple[int, ...], bool]
    ] = {}  # type of a value, shape, whether it is that of all
    for sample in samples:
        for column, value in sample.items():
            kind, shape = _type_of(value, name, column), getattr(value, "shape", ())
            known, first, is_fixed = found.setdefault(column, (kind, shape, True))
            if kind != known or len(shape) != len(first):
                raise DataError(
                    f"{name}: column {column!r} has {kind} of {len(shape)} dimensions and {known} of {len(first)}: "
                    "give it one type"
                )
            found[column] = known, first, is_fixed and shape == first
    return pa.schema([pa.field(column, array_type(*each)) for column, each in found.items()])


def array_type(kind: pa.DataType, shape: Sequence[int], is_fixed: bool = True) -> pa.DataType:
    """Return the type of arrays of a shape, or of its number of dimensions only."""
    if not is_fixed or 0 in shape:
        for _ in shape:
            kind = pa.list_(kind)
        return kind
    if len(shape) < 2:
        return pa.list_(kind, shape[0]) if shape else kind
    return pa.fixed_shape_tensor(kind, list(shape))


def tables(samples: Iterable[Sample], schema: pa.Schema, name: str) -> Iterator[pa.Table]:
    """Yield samples as tables of a limited size.

    Raises:
        DataError: They have other columns or types than the schema.
    """
    held: list[Sample] = []
    size = 0
    for sample in samples:
        held.append(sample)
        size += sum(getattr(value, "nbytes", None) or sys.getsizeof(value) for value in sample.values())
        if size >= TABLE_BYTES or len(held) == TABLE_ROWS:
            yield _table(held, schema, name)
            held, size = [], 0
    if held:
        yield _table(held, schema, name)


def png(image: Any) -> bytes:
    """Return an image of Pillow as a PNG, which loses nothing. Raise OSError if PNG has no such pixels."""
    sink = io.BytesIO()
    image.save(sink, "PNG", compress_level=1)
    return sink.getvalue()


def _type_of(value: Any, name: str, column: str) -> pa.DataType:
    if dtype := getattr(value, "dtype", None):
        try:
            return pa.from_numpy_dtype(dtype)
        except (pa.ArrowException, TypeError) as error:
            raise DataError(f"{name}: column {column!r} has values of the type {dtype}: cast them") from error
    for kind, found in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64()), (str, pa.string())):
        if isinstance(value, kind):
            return found
    if isinstance(value, bytes):
        return pa.binary()
    raise DataError(f"{name}: column {column!r} has values of the type {type(value).__name__}: write them as bytes")


def _table(samples: Sequence[Sample], schema: pa.Schema, name: str) -> pa.Table:
    for sample in samples:
        if new := sample.keys() - set(schema.names):
            raise DataError(
                f"{name}: a sample has {min(new)!r}, which no sample of the first and the last file has: convert files "
                "of other columns on their own"
            )
    columns = []
    for field in schema:
        try:
            columns.append(_array([sample.get(field.name) for sample in samples], field.type))
        except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError) as error:
            raise DataError(
                f"{name}: column {field.name!r} is {field.type} in the first and the last file, and not everywhere "
                f"({error}): convert files of other types on their own"
            ) from error
    return pa.Table.from_arrays(columns, schema=schema)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _fixed(values, tuple(kind.shape), kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return _fixed(values, (kind.list_size,), kind.value_type)
    if pa.types.is_list(kind):
        return _lists(values, kind)
    return pa.array(values, kind)


def _fixed(values: list[np.ndarray[Any, Any]], shape: tuple[int, ...], kind: pa.DataType) -> pa.Array:
    if others := {value.shape for value in values} - {shape}:
        raise ValueError(f"shape {others.pop()}")
    flat = pa.array(np.concatenate([value.ravel() for value in values])).cast(kind)
    return pa.FixedSizeListArray.from_arrays(flat, prod(shape))


def _lists(values: list[np.ndarray[Any, Any]], kind: pa.DataType) -> pa.Array:
    """Return arrays of any shape as lists of lists, from the values outwards."""
    depth = 0
    while pa.types.is_list(kind):
        depth, kind = depth + 1, kind.value_type
    if others := {value.shape for value in values if value.ndim != depth}:
        raise ValueError(f"shape {others.pop()}")
    array = pa.array(np.concatenate([value.ravel() for value in values])).cast(kind)
    for axis in reversed(range(depth)):
        lengths = np.repeat([value.shape[axis] for value in values], [prod(value.shape[:axis]) for value in values])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        array = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), array)
    return array
