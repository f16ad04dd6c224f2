"""What the files say about columns besides their types: features of Hugging Face, categories, metadata of Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT, Blocks, Object
from dataload.catalog.footer_cache import FooterLocation, read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.errors import ConfigError, DataError
from dataload.formats.base import RowGroupReader, read_row_group
from dataload.formats.schema import structs_of
from dataload.formats.text import TextErrors, repaired
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.text import few

HELD_BYTES = 8 << 20  # of a column whose dictionary is read; the rest is streamed
OF_TYPES = (b"ARROW:", b"PARQUET:")  # metadata of fields that tell their types


def features_of(manifest: Manifest, blocks: Blocks, columns: Iterable[str]) -> dict[str, Any]:
    """Return what the first file says about columns, by name; nothing of columns that it says nothing about.

    Args:
        manifest: The dataset.
        blocks: Reads the footer through the cache.
        columns: The columns. Features of Hugging Face have the names of structs, not of their members.
    """
    if not manifest.row_groups:
        return {}
    first = manifest.row_groups[0]
    if first.renamed:  # What the file says is of other names than its table's.
        return {}
    says = read_footer(first.file, first.footer_at, blocks).key_values
    listed = _json(says, b"pandas").get("columns")
    described = [column for column in listed if isinstance(column, dict)] if isinstance(listed, list) else []
    of_pandas = {column["name"]: column for column in described if isinstance(column.get("name"), str)}
    features = _features_in(says)
    found = {}
    for column in columns:
        name = next((name for name in (column, *structs_of(column)) if name in features), None)
        if name is not None:
            found[name] = features[name]
        elif own := _of_field(manifest.schema.field(column), of_pandas.get(column)):
            found[column] = own
    return found


def class_names(
    manifest: Manifest, blocks: Blocks, column: str, features: Mapping[str, Any], errors: TextErrors
) -> list[str]:
    """Return the names of the classes of a column: of a ClassLabel, or else the values of its dictionary.

    Args:
        manifest: The dataset.
        blocks: Reads the files through the cache.
        column: The column.
        features: The features of the dataset.
        errors: As in `make_dataset`, of the values of dictionaries.

    Raises:
        ConfigError: The column has none, or files name them differently.
        OriginError: The origin failed.
        DataError: A file cannot be read.
    """
    names = _labels(features, column)
    if names is None:
        return _categories(manifest, blocks, column, features, errors)
    files = list(dict.fromkeys((group.file, group.footer_at) for group in manifest.row_groups))
    read = partial(_labels_of_file, blocks=blocks, column=column)
    for (file, _), own in zip(files, DaemonExecutor(IN_FLIGHT, "dataload-labels").map(read, files), strict=True):
        if own is not None and own != names:
            raise ConfigError(
                f"column {column!r} has other names of classes in {files[0][0].name} than in {file.name}, "
                f"{few(map(repr, names))} and {few(map(repr, own))}: read them as two datasets, or cast one"
            )
    return names


def _labels_of_file(at: tuple[Object, FooterLocation], *, blocks: Blocks, column: str) -> list[str] | None:
    file, footer_at = at
    return _labels(_features_in(read_footer(file, footer_at, blocks).key_values), column)


def _labels(features: Mapping[str, Any], column: str) -> list[str] | None:
    """Return the names of a ClassLabel, also of one in a list or a struct; None if the column is no such one."""
    found: Any = features.get(column)
    if found is None and "." in column:
        struct, *path = column.split(".")
        found = features.get(struct)
        for name in path:
            found = _element(found)
            found = found.get(name) if isinstance(found, Mapping) else None
    found = _element(found)
    if isinstance(found, Mapping) and found.get("_type") == "ClassLabel" and isinstance(found.get("names"), list):
        return list(found["names"])
    return None


def _element(feature: Any) -> Any:
    """Return the feature of the elements of lists, or the feature itself."""
    while True:
        if isinstance(feature, list) and len(feature) == 1:
            [feature] = feature
        elif isinstance(feature, Mapping) and feature.get("_type") in ("Sequence", "List", "LargeList"):
            feature = feature.get("feature")
        else:
            return feature


def _categories(
    manifest: Manifest, blocks: Blocks, column: str, features: Mapping[str, Any], errors: TextErrors
) -> list[str]:
    """Return the values of a column's dictionaries. Raise ConfigError if it is not stored as a dictionary."""
    stored = [group for group in manifest.row_groups if column not in dict(group.constants)]
    read = partial(_dictionary, blocks=blocks, column=column, errors=errors)
    found = list(DaemonExecutor(IN_FLIGHT, "dataload-categories").map(read, stored))
    names = dict.fromkeys(value for values in found for value in values or ())
    ways = f"numpy.unique(dataset[{column!r}]) finds its values"
    if not names:
        labelled = [name for name in features if _labels(features, name) is not None]
        have = f"those with names are {few(map(repr, labelled))}" if labelled else "no column has a ClassLabel"
        raise ConfigError(
            f"column {column!r} has no names of classes, neither a ClassLabel nor a dictionary: {have}; {ways}"
        )
    if None in found:
        plain = stored[found.index(None)].file.name
        raise ConfigError(f"column {column!r} has a dictionary in some files, and none in {plain}: {ways}")
    return list(names)


def _dictionary(group: RowGroup, *, blocks: Blocks, column: str, errors: TextErrors) -> list[str] | None:
    """Return the dictionary of a column in a row group; nothing if the file lacks the column; None: another type."""
    footer = read_footer(group.file, group.footer_at, blocks)
    if column not in footer.schema.names:
        return []
    kind = footer.schema.field(column).type
    if not pa.types.is_dictionary(kind) or pa.types.is_nested(kind.value_type):
        return None

    def values(reader: RowGroupReader) -> list[str]:
        reader.wait()
        chunks: Iterator[pa.Array] = (chunk for table in reader.tables(1 << 16) for chunk in table.column(0).chunks)
        dictionaries = (repaired(chunk.dictionary) if errors == "replace" else chunk.dictionary for chunk in chunks)
        found: list[str] = list(dict.fromkeys(value for each in dictionaries for value in each.to_pylist()))
        return found

    try:
        found = read_row_group(footer, group.file, group.number, [column], blocks, HELD_BYTES, values)
    except UnicodeDecodeError as error:
        where = f"{group.file.name} row group {group.number} column {column!r}"
        raise DataError(f"{where} has a dictionary that is not UTF-8 ({error}): pass errors='replace'") from error
    return [value for value in found if value is not None]


def _of_field(field: pa.Field, of_pandas: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metadata of a column in Arrow's schema, and its metadata by pandas if they say more than the type."""
    metadata = {key: value for key, value in (field.metadata or {}).items() if not key.startswith(OF_TYPES)}
    found: dict[str, Any] = {
        key.decode(errors="replace"): value.decode(errors="replace") for key, value in metadata.items()
    }
    if of_pandas is not None and (more := _object(of_pandas.get("metadata"))):
        found |= {"pandas_type": of_pandas.get("pandas_type"), **more}
    return found


def _features_in(says: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the features of Hugging Face in the metadata of a file; nothing if it has none."""
    return _object(_object(_json(says, b"huggingface").get("info")).get("features"))


def _json(says: Mapping[bytes, bytes], key: bytes) -> dict[str, Any]:
    """Return an object of JSON of a file; nothing if it is none."""
    with suppress(ValueError, RecursionError):
        return _object(json.loads(says.get(key, b"{}")))
    return {}


def _object(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}
