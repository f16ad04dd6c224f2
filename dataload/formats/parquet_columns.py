"""The columns of a Parquet file, by its Arrow schema."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.formats.arrow_types import (
    children,
    has_elements,
    has_members,
    has_part,
    is_bytes,
    is_list,
    leaf_count,
    list_elements,
    number,
    storage,
    varying_shape,
)
from dataload.formats.int96 import is_ns
from dataload.formats.schema import ambiguous, flat_fields, flatten
from dataload.runtime.cached_property import cached_property

SCHEMAS_KEPT = 16


class ParquetColumns:
    """The columns of a file, by its schema.

    Args:
        schema: The schema of the file.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def stored(self, schema: pa.Schema) -> pa.Schema:
        """Return a file's schema, which equals this one, without structs that have no members.

        Parquet stores no values of them, so Arrow's reader leaves them out.
        """
        if self._are_all_stored:
            return schema
        return pa.schema([field for field in schema if leaf_count(field.type)])

    @cached_property
    def _are_all_stored(self) -> bool:
        return all(map(leaf_count, self._schema.types))

    @cached_property
    def ambiguous(self) -> dict[str, str]:
        """By name that several columns would have, a text."""
        return ambiguous(self._schema)

    @cached_property
    def numbers(self) -> dict[str, np.dtype[Any]]:
        """The dtype in batches of each column that holds lists of numbers, or of arrays of one shape."""
        lists = ((field.name, storage(field.type)) for field in flatten(self._schema))
        found = ((name, list_elements(kind)) for name, kind in lists if is_list(kind))
        return {name: dtype for name, elements in found if elements and (dtype := number(elements[1])) is not None}

    @cached_property
    def has_ns(self) -> bool:
        """Whether there are timestamps in ns."""
        return any(has_part(kind, is_ns) for kind in self._schema.types)

    @cached_property
    def lists(self) -> frozenset[str]:
        """The columns that have lists."""
        return frozenset(
            field.name
            for field in flatten(self._schema)
            if has_part(field.type, lambda kind: has_elements(storage(kind)))
        )

    @cached_property
    def texts(self) -> frozenset[str]:
        """The columns of strings and bytes that are no members of structs."""
        plain = (field for field in self._schema if storage(field.type) == field.type)
        variable = (field for field in plain if is_bytes(field.type) and not pa.types.is_fixed_size_binary(field.type))
        return frozenset(field.name for field in variable)

    def likely_cause(self, columns: Collection[str]) -> str:
        """Return what is likely to be wrong if these columns cannot be decoded, for errors; "" in most cases."""
        if name := next((name for name in self._without_length if name in columns), None):
            return (
                f": column {name!r} has lists of the fixed length 0, which Arrow writes to Parquet but cannot read: "
                "leave it out with columns=, or write lists of varying length. It"
            )
        if name := next((name for name in columns if name.partition(".")[0] in self._with_empty_structs), None):
            own = name.partition(".")[0]
            return (
                f": column {own!r} holds structs without members, which Arrow cannot read: leave it out with columns=, "
                "or write it without them. It"
            )
        return ""

    @cached_property
    def _without_length(self) -> tuple[str, ...]:
        """The columns with lists of the fixed length 0."""
        return tuple(field.name for field in flatten(self._schema) if has_part(field.type, _is_without_length))

    @cached_property
    def _with_empty_structs(self) -> frozenset[str]:
        """The file's own columns that hold structs without members."""
        return frozenset(field.name for field in self._schema if has_part(field.type, _is_without_members))

    def own(self, columns: Iterable[str]) -> list[str]:
        """Return the file's own columns that hold these: for a member, a column that is a struct in other files."""
        leaves = self.leaves
        return list(dict.fromkeys([name if name in leaves else self._holder(name) for name in columns]))

    def _holder(self, member: str) -> str:
        return next(own for own in self.leaves if member.startswith(f"{own}."))

    def read_with(self, columns: Iterable[str]) -> list[str]:
        """Return the file's own columns that Arrow reads for these: all members of an extension type, or none."""
        return list(dict.fromkeys(name for own in self.own(columns) for name in self._together.get(own, [own])))

    @cached_property
    def _together(self) -> dict[str, list[str]]:
        """The members of an extension type, by each of them."""
        extensions = itertools.chain.from_iterable(map(_extensions, self._schema))
        together = [flatten(pa.schema([field])).names for field in extensions]
        return {name: names for names in together for name in names}

    @cached_property
    def leaves(self) -> dict[str, range]:
        """The range of Parquet leaf columns that holds each column of the flat schema."""
        fields, found = flat_fields(self._schema), dict[str, range]()
        stops = list(itertools.accumulate(leaf_count(field.type) for field in fields))
        for field, start, stop in zip(fields, [0, *stops], stops, strict=False):
            found.setdefault(field.name, range(start, stop))
        return found

    @cached_property
    def leaf_count(self) -> int:
        """The number of leaf columns of the file. Raise UnicodeDecodeError if a name in the schema is no text."""
        for field in self._schema:
            _check_names(field)
        return sum(leaf_count(field.type) for field in self._schema)


columns_of = lru_cache(SCHEMAS_KEPT)(ParquetColumns)  # The files of a dataset have equal schemas.


def _check_names(field: pa.Field) -> None:
    _ = field.name
    for child in children(storage(field.type)):
        _check_names(child)


def _extensions(field: pa.Field) -> Iterator[pa.Field]:
    """Yield the columns and members of structs whose type is an extension with members, by their dotted names."""
    if not has_members(field.type) or varying_shape(field) is not None:
        return
    if isinstance(field.type, pa.BaseExtensionType):
        yield field
        return
    for member in storage(field.type):
        yield from _extensions(member.with_name(f"{field.name}.{member.name}"))


def _is_without_members(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(storage(kind)) and not storage(kind).num_fields)


def _is_without_length(kind: pa.DataType) -> bool:
    """Return whether values are lists of the fixed length 0."""
    kind = storage(kind)
    return bool(pa.types.is_fixed_size_list(kind) and not kind.list_size)
