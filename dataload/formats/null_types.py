"""Types of columns without values: the null type, and types with parts of it, such as `list<null>`."""

from __future__ import annotations

import pyarrow as pa

from dataload.formats.arrow_types import children, has_part, is_list, with_members


def has_null_type(kind: pa.DataType) -> bool:
    """Return whether a type or a part of it is the null type."""
    return has_part(kind, pa.types.is_null)


def filled(field: pa.Field, other: pa.Field) -> pa.Field:
    """Return a column whose parts of the null type have the type of the same part of another column."""
    if pa.types.is_null(field.type):
        return other
    kind = _filled(field.type, other.type)
    return field if kind is field.type else field.with_type(kind)


def _filled(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    if pa.types.is_null(kind):
        return other
    if not has_null_type(kind) or not _are_alike(kind, other):
        return kind
    pairs = zip(children(kind), children(other), strict=True)
    # Offsets of 32 or 64 bits, or a fixed size: those of the other.
    return with_members(other, [mine.with_type(_filled(mine.type, theirs.type)) for mine, theirs in pairs])


def _are_alike(kind: pa.DataType, other: pa.DataType) -> bool:
    """Return whether both are lists, or maps, or structs with the same members. Others' lists may have a fixed size."""
    types = pa.types
    if types.is_struct(kind) and types.is_struct(other):
        return [field.name for field in kind] == [field.name for field in other]
    if types.is_map(kind):
        return bool(types.is_map(other))
    return is_list(kind) and (is_list(other) or bool(types.is_fixed_size_list(other)))
