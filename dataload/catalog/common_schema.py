"""The schema that the files of a dataset share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from dataload.cache.blocks.reader import Object
from dataload.errors import DataError
from dataload.formats.arrow_types import is_bytes, is_list, storage
from dataload.formats.null_types import filled, has_null_type
from dataload.formats.schema import fields_of

_Column = tuple[Object, pa.Field]  # and a file that has it


def common_schema(schemas: Iterable[tuple[Object, pa.Schema]]) -> pa.Schema:
    """Return the flat columns that all files have, in the order of the first file.

    Files may differ in the order of their columns, and in types that are the same in batches, such as strings with
    32-bit and 64-bit offsets. A column without values in some files, of the null type or with parts of it such as
    `list<null>`, has its type of the others. A column of the null type may be a struct in the others.
    Decimals of other digits differ, because filters would compare other values.

    Args:
        schemas: Each file and its flat schema. There is at least one.

    Raises:
        DataError: Two files differ in a column. It names both.
    """
    (first, latest), *others = schemas
    columns: dict[str, _Column] = {field.name: (first, field) for field in latest}
    for obj, schema in others:
        if schema is latest:  # Consecutive files of one schema share the object.
            continue
        latest, found = schema, {field.name: (obj, field) for field in schema}
        columns, found = _with_members(columns, found), _with_members(found, columns)
        for name in {**columns, **found}:
            source, here = columns.get(name, (first, None))
            _, there = found.get(name, (obj, None))
            if here is None or there is None or not _is_like(filled(here, there), filled(there, here)):
                raise DataError(
                    f"{obj.name} and {source.name} differ in column {name!r}: {_type(there)} there, "
                    f"{_type(here)} here; read them as two datasets or rewrite one"
                )
            if has_null_type(here.type):
                columns[name] = obj, filled(here, there)
    return pa.schema([field for _, field in columns.values()])


def _with_members(columns: Mapping[str, _Column], others: Mapping[str, _Column]) -> dict[str, _Column]:
    """Return the columns with the members of each column that is of the null type here and a struct in the others."""
    whole: dict[str, _Column] = {}
    for name, (obj, field) in columns.items():
        is_missing = pa.types.is_null(field.type) and name not in others
        members = [other for other in others if other.startswith(f"{name}.")] if is_missing else []
        whole |= {member: (obj, field.with_name(member)) for member in members or [name]}
    return whole


def _is_like(here: pa.Field, there: pa.Field) -> bool:
    """Return whether the values of two columns of one name are the same in batches and in filters."""
    if here.type == there.type:
        return True
    kinds = storage(here.type), storage(there.type)
    are_lists = all(map(is_list, kinds)) and kinds[0].value_type == kinds[1].value_type
    if not (are_lists or all(map(is_bytes, kinds))):
        return False
    try:
        return fields_of(pa.schema([here])) == fields_of(pa.schema([there]))
    except DataError:  # No batch can hold the column.
        return False


def _type(field: pa.Field | None) -> str:
    return "missing" if field is None else str(field.type)
