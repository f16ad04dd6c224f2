"""Hive partitions: what the names of folders say of the files below them, as in `label=cat/part.parquet`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from dataload.cache.blocks.reader import Object
from dataload.errors import DataError

NULL = "__HIVE_DEFAULT_PARTITION__"
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,19}")

Keys = tuple[tuple[str, str | None], ...]
"""Names and values, the outermost folder first; None: a null."""
Constants = tuple[tuple[str, int | str | None], ...]
"""Columns that have one value in all rows of a file, by name."""


def keys_of(relative: str) -> Keys:
    """What the folders of a path say; it starts below the folder that was asked for, and ends with the file's name."""
    pairs = (folder.split("=", 1) for folder in relative.split("/")[:-1] if folder.find("=") > 0)
    return tuple((unquote(key), None if value == NULL else unquote(value)) for key, value in pairs)


def partition_columns(files: Mapping[Object, Keys], own: Collection[str]) -> tuple[list[pa.Field], list[Constants]]:
    """The columns that the keys of files become, and for each file what they hold there.

    own: names of columns in the files, which win over keys. A column is int64 when all its values but nulls are whole
    numbers that fit, else string.

    Raises DataError naming two files that have different keys, or one that has the same key twice.
    """
    names: list[str] = []
    values: list[dict[str, str | None]] = []
    for number, (obj, keys) in enumerate(files.items()):
        found = [name for name, _ in keys if name not in own]
        if len(set(found)) < len(found):
            raise DataError(f"{obj.path}: two of its folders have the same key: rename one")
        names = names if number else found
        if set(found) != set(names):
            first = next(iter(files))
            raise DataError(
                f"{obj.path} and {first.path} lie in folders of different keys, {_listed(found)} and {_listed(names)}: "
                f"move one, or read them as two datasets"
            )
        values.append(dict(keys))
    columns = {name: _typed([of[name] for of in values]) for name in names}
    fields = [pa.field(name, column.type) for name, column in columns.items()]
    lists = {name: column.to_pylist() for name, column in columns.items()}
    return fields, [tuple((name, lists[name][number]) for name in names) for number in range(len(values))]


def _typed(values: Sequence[str | None]) -> Any:
    present = [value for value in values if value is not None]
    if present and all(map(_is_int64, present)):
        return pa.array([None if value is None else int(value) for value in values], pa.int64())
    return pa.array(values, pa.string())


def _is_int64(value: str) -> bool:
    return WHOLE_NUMBER.fullmatch(value) is not None and -(1 << 63) <= int(value) < 1 << 63


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names)) or "none"
