"""The schema that the files of a dataset share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import pyarrow as pa

from dataload.cache.blocks.reader import Object
from dataload.formats.arrow_types import canonical, children, is_bytes, is_text, storage, varying_shape
from dataload.formats.null_types import filled, has_null_type
from dataload.formats.schema import field_or_none, is_ragged, structs_of
from dataload.runtime.text import counted

_Column = tuple[Object, pa.Field]  # and a file that has it


def common_schema(
    schemas: Iterable[tuple[Object, pa.Schema]], members: Collection[str]
) -> tuple[pa.Schema, dict[str, str], dict[str, str]]:
    """Return the flat columns that files have, in order of appearance, and how the types of some columns differ.

    Files may differ in the order of their columns, and in types that are the same in batches, such as strings with
    32-bit and 64-bit offsets, or times of other zones. A column without values in some files, of the null type or with
    parts of it such as `list<null>`, has its type of the others. A column of the null type may be a struct in the
    others. Types that differ otherwise are promoted to a common one, as `pyarrow.unify_schemas` does permissively.

    Args:
        schemas: Each file and its flat schema. There is at least one.
        members: The columns that are members of structs in a file. Others may have dots in their names, too.

    Returns:
        The schema; by column whose types have none in common, a text that names two files; and by column with a
        promoted type, a text that names two types.
    """
    (first, latest), *others = schemas
    columns: dict[str, _Column] = {field.name: (first, field) for field in latest}
    conflicts: dict[str, str] = {}
    promotions: dict[str, str] = {}
    for obj, schema in others:
        if schema is latest:  # Consecutive files of one schema share the object.
            continue
        latest, found = schema, {field.name: (obj, field) for field in schema}
        columns, found = _with_members(columns, found), _with_members(found, columns)
        for name, (_, there) in found.items():
            source, here = columns.setdefault(name, (obj, there))
            if is_like(filled(here, there), filled(there, here)):
                if has_null_type(here.type):
                    columns[name] = obj, filled(here, there)
            elif (common := promoted(here, there)) is None:
                conflicts.setdefault(name, _conflict(name, (obj, str(there.type)), (source, str(here.type))))
            else:
                columns[name] = source, common
                promotions.setdefault(name, f"{here.type} in {source.name}, {there.type} in {obj.name}")
    for name, (obj, _) in columns.items():
        for struct in structs_of(name) if name in members else ():
            if struct in columns:  # a column of this name in one file, a struct in the other
                source, field = columns[struct]
                text = _conflict(struct, (obj, "a struct"), (source, str(field.type)))
                conflicts |= {struct: text, name: text}
    return pa.schema([field for _, field in columns.values()]), conflicts, promotions


def as_in_table(
    table: pa.Schema, schemas: Iterable[tuple[Object, pa.Schema]]
) -> tuple[pa.Schema, dict[str, str], dict[str, str]]:
    """Return the same as `common_schema` for the files of a table, whose columns have the types that the table says.

    Args:
        table: The flat columns of the table.
        schemas: Each file and its flat schema.
    """
    promotions: dict[str, str] = {}
    latest: pa.Schema | None = None
    for obj, schema in schemas:
        if schema is latest:  # Consecutive files of one schema share the object.
            continue
        latest = schema
        for there in schema:
            here = table.field(there.name)
            if not is_like(here, there):
                promotions.setdefault(there.name, f"{there.type} in {obj.name}, {here.type} in the table")
    return table, {}, promotions


def promoted(here: pa.Field, there: pa.Field) -> pa.Field | None:
    """Return a column with the type to which the types of two files are promoted, or None if there is none.

    pyarrow promotes text beside bytes to bytes: the text of all files would be other values because of one file.
    """
    kinds = canonical(here.type), canonical(there.type)
    if _mixes_text(*kinds):
        return None
    schemas = [pa.schema([pa.field("", kind)]) for kind in kinds]
    try:
        kind = pa.unify_schemas(schemas, promote_options="permissive").types[0]
    except pa.ArrowException:
        return None
    common = pa.field(here.name, kind, metadata=here.metadata if varying_shape(here) else None)
    # Arrays of different shapes become lists. Their sizes are not estimated as those of lists.
    return common if is_ragged(here) == is_ragged(there) == is_ragged(common) else None


def _mixes_text(here: pa.DataType, there: pa.DataType) -> bool:
    """Return whether one of two types has text where the other has bytes, at any depth."""
    here, there = storage(here), storage(there)
    if is_bytes(here) and is_bytes(there):
        return is_text(here) != is_text(there)
    is_by_name = pa.types.is_struct(here) and pa.types.is_struct(there)
    others = {child.name if is_by_name else number: child.type for number, child in enumerate(children(there))}
    mine = {child.name if is_by_name else number: child.type for number, child in enumerate(children(here))}
    return any(_mixes_text(mine[part], others[part]) for part in mine.keys() & others.keys())


def missing(schema: pa.Schema, own: pa.Schema) -> list[str]:
    """Return the columns of a flat schema that a file with the flat schema `own` lacks."""
    names = set(own.names)
    nulls = {field.name for field in own if pa.types.is_null(field.type)}  # They may be structs in other files.
    return [name for name in schema.names if name not in names and nulls.isdisjoint(structs_of(name))]


def lacking(partial: Mapping[str, str]) -> str:
    """Return the message about columns that some files lack, given such a file for each."""
    name, file = next(iter(partial.items()))
    others = f" (and {counted(len(partial) - 1, 'other column')})" if len(partial) > 1 else ""
    fix = "leave it out with columns=, or name it there to read nulls where it is missing"
    if name.startswith("__index_level_"):
        fix = f"it is an index of pandas: write the files again by to_parquet(index=False), or {fix}"
    return f"{file} lacks column {name!r}, which other files have{others}; {fix}"


def _conflict(name: str, there: tuple[Object, str], here: tuple[Object, str]) -> str:
    return f"{there[0].name} and {here[0].name} differ in column {name!r}: {there[1]} there, {here[1]} here"


def _with_members(columns: Mapping[str, _Column], others: Mapping[str, _Column]) -> dict[str, _Column]:
    """Return the columns with the members of each column that is of the null type here and a struct in the others."""
    whole: dict[str, _Column] = {}
    for name, (obj, field) in columns.items():
        is_missing = pa.types.is_null(field.type) and name not in others
        members = [other for other in others if other.startswith(f"{name}.")] if is_missing else []
        whole |= {member: (obj, field.with_name(member)) for member in members or [name]}
    return whole


def is_like(here: pa.Field, there: pa.Field) -> bool:
    """Return whether the values of two columns of one name are the same in batches and in filters."""
    if here.type == there.type:
        return True
    if canonical(here.type) != canonical(there.type) and not all(
        is_bytes(storage(field.type)) for field in (here, there)
    ):
        return False
    mine, others = field_or_none(here), field_or_none(there)
    return mine is not None and others is not None and replace(mine, type=None) == replace(others, type=None)
