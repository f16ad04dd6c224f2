"""Hive partitions: columns from folder names, as in `label=cat/part.parquet`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa

from dataload.cache.blocks.reader import Object
from dataload.errors import DataError
from dataload.formats.arrow_types import is_bytes, is_text

NO_KEYS = "if its folders are no keys, pass partitioning=None"
NULL = "__HIVE_DEFAULT_PARTITION__"
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,19}")

PARTITIONINGS = ("hive", None)
Partitioning = Literal["hive"] | None
"""Whether folder names have keys."""
Keys = tuple[tuple[str, str | None], ...]
"""(name, value) of each key, the outermost folder first; None: a null."""
Constants = tuple[tuple[str, int | str | None], ...]
"""(name, value) of each column that has one value in all rows of a file; see `constant`."""


def keys_of(relative: str) -> Keys:
    """Return the keys in a path's folders. The path starts below the source's folder and ends with a file name."""
    pairs = (folder.split("=", 1) for folder in relative.split("/")[:-1] if folder.find("=") > 0)
    # As the names of folders on a disk have them, bytes that are not UTF-8 are refused or replaced later.
    text = partial(unquote, errors="surrogateescape")
    return tuple((text(key), None if value == NULL else text(value)) for key, value in pairs)


def with_valid_text(keys: Keys) -> Keys:
    """Return keys with U+FFFD in place of bytes that are not UTF-8, as a folder on a disk may have them."""
    return tuple((_readable(name), None if value is None else _readable(value)) for name, value in keys)


def _readable(text: str) -> str:
    return text.encode(errors="surrogateescape").decode(errors="replace")


def partition_columns(files: Mapping[Object, Keys], own: Collection[str]) -> tuple[list[pa.Field], list[Constants]]:
    """Return the columns that the files' keys become, and their values for each file.

    A column is int64 if all its values except nulls are integers that fit, else string.

    Args:
        files: The files and their keys.
        own: Names of columns in the files. They win over keys.

    Raises:
        DataError: Two files have different keys, or one file has the same key twice. The message names them.
    """
    if not any(files.values()):
        return [], [()] * len(files)
    names: list[str] = []
    values: list[dict[str, str | None]] = []
    for number, (obj, keys) in enumerate(files.items()):
        found = [name for name, _ in keys if name not in own]
        if len(set(found)) < len(found):
            raise DataError(f"{obj.name}: two of its folders have the same key: rename one; {NO_KEYS}")
        own_values = dict(keys)
        _check_text(obj, found, own_values)
        names = names if number else found
        if set(found) != set(names):
            first = next(iter(files))
            raise DataError(
                f"{obj.name} and {first.name} have different partition keys, {_listed(found)} and {_listed(names)}: "
                f"move one, or read them as two datasets; {NO_KEYS}"
            )
        values.append(own_values)
    columns = {name: _typed([by_name[name] for by_name in values]) for name in names}
    fields = [pa.field(name, column.type) for name, column in columns.items()]
    lists = {name: column.to_pylist() for name, column in columns.items()}
    return fields, [tuple((name, lists[name][number]) for name in names) for number in range(len(values))]


def _check_text(obj: Object, names: Iterable[str], values: Mapping[str, str | None]) -> None:
    """Raise DataError unless the names and the values of keys are text. The name of a folder on a disk may be none."""
    try:
        "".join(f"{name}{values[name]}" for name in names).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{obj.name}: a key in the names of its folders is not UTF-8: rename the folder, or pass "
            f"errors='replace'; {NO_KEYS}"
        ) from error


def with_constants(table: pa.Table, constants: Constants, rows: int, schema: pa.Schema) -> pa.Table:
    """Return a table of `rows` rows with the columns of `schema` that are constants. Nulls have the null type."""
    if not constants:
        return table
    columns, names = dict(zip(table.column_names, table.columns, strict=True)), set(schema.names)
    for name, value in constants:
        if name in names:
            kind = schema.field(name).type
            columns[name] = pa.nulls(rows) if value is None else pa.repeat(constant(value, kind), rows)
    return pa.table(columns)


def constant(value: int | str | None, kind: pa.DataType) -> pa.Scalar:
    """Return the value of a constant column. Dates, decimals and so on are text; of bytes, each is a character."""
    if not isinstance(value, str):
        return pa.scalar(value, kind)
    if is_text(kind):
        return pa.scalar(value, kind)
    if isinstance(kind, pa.BaseExtensionType):  # such as UUIDs
        return pa.ExtensionScalar.from_storage(kind, constant(value, kind.storage_type))
    return pa.scalar(value.encode("latin-1"), kind) if is_bytes(kind) else pa.scalar(value).cast(kind)


def _typed(values: Sequence[str | None]) -> Any:
    present = [value for value in values if value is not None]
    if present and all(map(_is_int64, present)):
        return pa.array([None if value is None else int(value) for value in values], pa.int64())
    return pa.array(values, pa.string())


def _is_int64(value: str) -> bool:
    return WHOLE_NUMBER.fullmatch(value) is not None and -(1 << 63) <= int(value) < 1 << 63


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names)) or "none"
