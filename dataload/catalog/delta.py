"""Snapshots of Delta tables, whose log deltalake reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from dataload.catalog.table_options import of_delta, to_delta
from dataload.catalog.tables import DELTA_URL, FileOfTable, Positions, Snapshot, at_version, shown, text_of
from dataload.errors import ConfigError, DataError, OriginError, OriginNotFound
from dataload.extras import required
from dataload.formats.hive_partitions import Constants
from dataload.formats.table_columns import ID, STORED, By, TableColumns, with_fields
from dataload.runtime.redact import cause_of, redacted, secrets_of

READER_VERSION = 3  # the newest that is known
VARIANTS = {"variantType", "variantType-preview", "variantShredding", "variantShredding-preview"}
FEATURES = {  # of readers
    *VARIANTS,  # of which columns are refused
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
MAPPING = b"delta.columnMapping."

COPY = "copy its rows to plain Parquet, such as by spark.table(name).write.parquet(copy), and name the copy"
EARLIER = 256  # versions, among which to look for footers
COLOURS = re.compile(r"\x1b\[[\d;]*m")  # of a terminal, in errors

T = TypeVar("T")


def delta_snapshot(source: Any, storage_options: Mapping[str, Any] | None) -> Snapshot:
    """Return the snapshot of a `DeltaTable` at the version that it has now, or of a URL.

    Args:
        source: The table, or "delta+URL", perhaps with "@version".
        storage_options: Options of fsspec.

    Raises:
        ConfigError: deltalake is not installed, or there is no such version.
        OriginError: The log cannot be read.
        DataError: The table has a feature of readers that is not known.
    """
    table = source
    if isinstance(source, (str, os.PathLike)):
        table = _opened(os.fspath(source).removeprefix(DELTA_URL), storage_options)
    root, version = unquote(table.table_uri).rstrip("/"), int(table.version())
    root = root.removeprefix("file://")
    url = f"{DELTA_URL}{shown(root)}@{version}"
    return _reading(url, lambda: _snapshot(table, url, root, version), _secrets_of(table))


def delta_at(table: Any, version: str | None, storage_options: Mapping[str, Any] | None) -> Any:
    """Return a table at another version; None: the newest."""
    named = "" if version is None else f"@{version}"
    options = table._storage_options or storage_options  # noqa: SLF001 (nothing public has them)
    return _opened(f"{unquote(table.table_uri).rstrip('/')}{named}", options)


def _opened(url: str, storage_options: Mapping[str, Any] | None) -> Any:
    """Return a DeltaTable at the version that a URL names."""
    deltalake = required("deltalake", "delta", "a Delta table")
    place, named = at_version(url)
    place = place.removeprefix("file://")
    options = to_delta(place, storage_options)
    secrets = secrets_of([storage_options, options])

    def opened(version: int | None = None) -> Any:
        return deltalake.DeltaTable(place, version=version, storage_options=options)

    if named is None:
        return _reading(f"{DELTA_URL}{shown(place)}", opened, secrets)
    try:
        return opened(int(named))
    except Exception as error:  # noqa: BLE001 (deltalake raises those of many kinds)
        newest = _reading(f"{DELTA_URL}{shown(place)}", opened, secrets).version()
        if int(named) > newest:
            raise ConfigError(
                f"{DELTA_URL}{shown(place)} has no version {named}: its newest is {newest}; leave out @{named} for it"
            ) from None
        raise ConfigError(
            f"{DELTA_URL}{shown(place)}: version {named} cannot be read any more, of {newest + 1} versions: the "
            f"log of old ones is removed after delta.logRetentionDuration: {_line(error, secrets)}"
        ) from cause_of(error, secrets)


def _secrets_of(table: Any) -> set[str]:
    """Return the credentials of the store of a table."""
    return secrets_of(table._storage_options)  # noqa: SLF001 (nothing public has them)


def _reading(url: str, call: Callable[[], T], secrets: Iterable[str]) -> T:
    """Return what a call of deltalake returns, with its errors as those of dataload, without some secrets."""
    try:
        return call()
    except (ConfigError, OriginError, DataError):
        raise
    except Exception as error:  # noqa: BLE001 (deltalake raises those of many kinds)
        text, cause = _line(error, secrets), cause_of(error, secrets)
        if type(error).__name__ == "TableNotFoundError" or "no files in log segment" in text.lower():
            raise OriginNotFound(f"{url}: there is no Delta table, no _delta_log: check the URL") from cause
        if "unsupported" in text.lower() or "not supported" in text.lower():
            raise DataError(f"{url} has something that deltalake cannot read: {text}; {COPY}") from cause
        raise OriginError(f"{url}: the log of the table cannot be read by deltalake: {text}") from cause


def _line(error: BaseException, secrets: Iterable[str]) -> str:
    return redacted(COLOURS.sub("", str(error)), secrets)


def _snapshot(table: Any, url: str, root: str, version: int) -> Snapshot:
    protocol, metadata = table.protocol(), table.metadata()
    unknown = sorted(set(protocol.reader_features or ()) - FEATURES)
    if unknown or protocol.min_reader_version > READER_VERSION:
        what = f"the feature {unknown[0]!r}" if unknown else f"version {protocol.min_reader_version}"
        raise DataError(f"{url} asks its readers for {what}, which dataload does not have: {COPY}")
    if variant := _variant(json.loads(table.schema().to_json())):
        raise DataError(
            f"{url} has the column {variant!r} of the type variant, which dataload cannot read: cast it to text"
        )
    partitions, mode = list(metadata.partition_columns), metadata.configuration.get("delta.columnMapping.mode", "none")
    by: By = "id" if mode == "id" else "name"
    schema = pa.schema(table.schema())
    # A table whose protocol lacks column mapping calls its columns as they are, whatever its configuration says.
    if mode == "none" or (protocol.min_reader_version != 2 and "columnMapping" not in (protocol.reader_features or ())):
        by, schema = (
            "name",
            pa.schema([each.with_metadata({}).with_type(with_fields(each.type, _bare)) for each in schema]),
        )
    stored = {each.name: _physical(each) for each in schema}
    columns = TableColumns(
        pa.schema([_as_named(each).with_type(with_fields(each.type, _as_named)) for each in schema]),
        by,
        frozenset(partitions),
    )
    actions = pa.RecordBatchReader.from_stream(table.get_add_actions()).read_all()  # pa.table would import pandas
    constants = _constants(actions, {stored[name]: name for name in partitions})
    paths = [_joined(root, path) for path in actions["path"].to_pylist()]
    sizes, times = actions["size_bytes"].to_pylist(), actions["modification_time"].to_pylist()
    files = [
        FileOfTable(path, size, f"{time}/{size}", values)
        for path, size, time, values in zip(paths, sizes, times, constants, strict=True)
    ]
    has_vectors = "deletionVectors" in (protocol.reader_features or ())
    return Snapshot(
        url,
        version,
        root,
        sorted(files, key=lambda file: file.url),
        columns,
        range(version - 1, max(-1, version - 1 - EARLIER), -1),
        _deleted(table, url) if has_vectors else {},
        of_delta(root, table._storage_options),  # noqa: SLF001 (nothing public has them)
    )


def _variant(kind: Any, name: str = "") -> str | None:
    """Return the name of a column of a schema that is a variant, or has one inside; None: there is none."""
    if kind == "variant":
        return name
    if not isinstance(kind, dict):
        return None
    parts = [(each["type"], name or each["name"]) for each in kind.get("fields", ())]
    parts += [(kind.get(part), name) for part in ("elementType", "keyType", "valueType")]
    return next((found for part, own in parts if (found := _variant(part, own)) is not None), None)


def _bare(each: pa.Field) -> pa.Field:
    return each.with_metadata({})


def _physical(each: pa.Field) -> str:
    return str(((each.metadata or {}).get(MAPPING + b"physicalName") or each.name.encode()).decode())


def _as_named(each: pa.Field) -> pa.Field:
    """Return a field of Delta's schema with what `TableColumns` needs of its metadata."""
    found = {STORED: json.dumps([_physical(each)])}
    if (number := (each.metadata or {}).get(MAPPING + b"id")) is not None:
        found[ID] = number
    return each.with_metadata(found)


def _joined(root: str, path: str) -> str:
    """Return the URL of a file, whose path is relative to the table or, in a clone of another table, a URL."""
    plain = unquote(path)
    return plain.removeprefix("file://") if "://" in plain or plain.startswith(("file:", "/")) else f"{root}/{plain}"


def _constants(actions: pa.Table, partitions: Mapping[str, str]) -> list[Constants]:
    """Return the partition values of each file. partitions: the name of each column, by the name that the log has."""
    if not partitions:
        return [()] * len(actions)
    struct = actions["partition"].combine_chunks()
    names = [each.name for each in struct.type]
    texts = {partitions.get(name, name): text_of(struct.field(number)) for number, name in enumerate(names)}
    return list(zip(*([(name, value) for value in values] for name, values in texts.items()), strict=True))


def _deleted(table: Any, url: str) -> dict[str, Positions]:
    """Return the deleted rows of each file that has a deletion vector."""
    found: dict[str, Positions] = {}
    try:
        for vectors in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
            for path, kept in zip(vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True):
                # It ends with the last deleted row.
                mask = kept.values.to_numpy(zero_copy_only=False)
                found[unquote(path).removeprefix("file://")] = np.flatnonzero(~mask).astype(np.int64)
    except Exception as error:
        if "not found" not in str(error).lower():
            raise
        secrets = _secrets_of(table)
        raise OriginNotFound(
            f"{url}: a file of its deletion vectors is gone, perhaps because VACUUM has removed it: open a newer "
            f"version: {_line(error, secrets)}"
        ) from cause_of(error, secrets)
    return found
