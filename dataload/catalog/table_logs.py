"""What the log of a Delta table, or the metadata of an Iceberg table, says about listed files of the table.

A list of files has no rows that other files delete, and no names of columns that the files do not have. So files of
which the table's own metadata says otherwise are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from dataload.cache.blocks.reader import Object
from dataload.errors import ConfigError, OriginError
from dataload.runtime.redact import redacted

CHANGES = re.compile(r"/_change_data/")
COMMIT = re.compile(r"_delta_log/(\d{20})\.json$")
CHECKPOINT = re.compile(r"_delta_log/(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet$")
ICEBERG_VERSION = re.compile(r"/v?(\d+)[^/]*\.metadata\.json$")
MOST_BYTES = 64 << 20  # of a table's log that are read, the newest first
DELETES = ("total-delete-files", "total-position-deletes", "total-equality-deletes")
COPY = 'such as by spark.table("t").write.parquet(copy), and name the copy'

Read = Callable[[Object], bytes]
Actions = list[dict[str, dict[str, Any]]]


def check_files(paths: Iterable[str]) -> None:
    """Raise ConfigError if a file has changes of a Delta table instead of rows."""
    for path in filter(CHANGES.search, paths):
        raise ConfigError(
            f"{redacted(path)} has changes of a Delta table, not its rows: list the files of a version, "
            "DeltaTable(url).file_uris()"
        )


def check_delta(folder: str, log: Mapping[str, Object], listed: Iterable[str], read: Read) -> None:
    """Raise ConfigError if a Delta table deletes rows of listed files, or gives their columns other names.

    Args:
        folder: Path of the table.
        log: The objects in `_delta_log/` by path.
        listed: Paths of files below the folder.
        read: Returns the bytes of an object.
    """
    commits = list(_commits(log, read))
    for name, stored in _renamed(_newest_schema(commits)):
        raise ConfigError(
            f"{redacted(folder)} is a Delta table with column mapping: its files call the column {name!r} {stored!r}: "
            f"copy it to plain Parquet, {COPY}"
        )
    marked: dict[str, bool] = {}  # whether rows of a file are deleted, by path; the newest commit counts
    for actions in commits:
        own = {action["remove"].get("path", ""): False for action in actions if "remove" in action}
        adds = [action["add"] for action in actions if "add" in action]
        marked = own | {each.get("path", ""): bool(each.get("deletionVector")) for each in adds} | marked
    deleted = {_path_of(folder, path) for path, is_marked in marked.items() if is_marked}
    if found := sorted(deleted.intersection(listed)):
        more = f" and {len(found) - 1} more of these files have" if len(found) > 1 else " has"
        raise ConfigError(
            f"{redacted(found[0])}{more} rows that its Delta table deleted by deletion vectors: run REORG TABLE … "
            f"APPLY (PURGE), and list the files of the new version; or copy the table to plain Parquet, {COPY}"
        )


def check_iceberg(folder: str, metadata: Mapping[str, Object], listed: Iterable[str], read: Read) -> None:
    """Raise ConfigError if the current snapshot of an Iceberg table deletes rows of its files.

    Args:
        folder: Path of the table.
        metadata: The objects `metadata/*.metadata.json` by path.
        listed: As in `check_delta`.
        read: As in `check_delta`.
    """
    versions = {int(match[1]): obj for path, obj in metadata.items() if (match := ICEBERG_VERSION.search(path))}
    if versions and any(listed) and _has_deletes(versions[max(versions)], read):
        raise ConfigError(
            f"{redacted(folder)} is an Iceberg table whose delete files delete rows of its data files: run "
            "rewrite_data_files with delete-file-threshold=1, and list the files of the new snapshot; or copy the "
            f"table to plain Parquet, {COPY}"
        )


def _has_deletes(metadata: Object, read: Read) -> bool:
    """Return whether the current snapshot of an Iceberg table has delete files. False if that is unknown."""
    with suppress(ValueError, OriginError, AttributeError, TypeError, KeyError):
        table = json.loads(read(metadata))
        current = table["current-snapshot-id"]
        summaries = [each.get("summary", {}) for each in table.get("snapshots", ()) if each["snapshot-id"] == current]
        return any(int(summary.get(name, 0)) for summary in summaries for name in DELETES)
    return False


def _commits(log: Mapping[str, Object], read: Read) -> Iterator[Actions]:
    """Yield the actions of the commits since the last checkpoint, and of that; the newest first.

    Those that cannot be read are left out, and what is before `MOST_BYTES`.
    """
    commits = {int(match[1]): obj for path, obj in log.items() if (match := COMMIT.search(path))}
    parts: dict[int, list[tuple[int, Object]]] = {}
    for path, obj in log.items():
        if match := CHECKPOINT.search(path):
            parts.setdefault(int(match[1]), []).append((int(match[2] or 1), obj))
    checkpoint = max((version for version, found in parts.items() if len(found) == found[0][0]), default=-1)
    newest = [obj for version, obj in sorted(commits.items(), reverse=True) if version > checkpoint]
    left = MOST_BYTES
    for obj in [*newest, *(obj for _, obj in parts.get(checkpoint, ()))]:
        left -= obj.size
        if left < 0:
            return
        with suppress(ValueError, OriginError, pa.ArrowException):
            data = read(obj)
            yield _of_checkpoint(data) if obj.path.endswith(".parquet") else _of_commit(data)


def _of_commit(data: bytes) -> Actions:
    return _actions(map(json.loads, data.splitlines()))


def _of_checkpoint(data: bytes) -> Actions:
    columns = ["add.path", "add.deletionVector.storageType", "metaData.schemaString"]
    return _actions(pq.ParquetFile(pa.BufferReader(data)).read(columns=columns).to_pylist())


def _actions(rows: Iterable[Any]) -> Actions:
    """Return the actions by kind, without what is null."""
    return [
        {
            kind: {name: value for name, value in action.items() if value is not None}
            for kind, action in row.items()
            if isinstance(action, dict)
        }
        for row in rows
        if isinstance(row, dict)
    ]


def _newest_schema(commits: Iterable[Actions]) -> Any:
    """Return the schema of a table as its log has it; None if these commits have none that can be read."""
    metadata = (action["metaData"] for actions in commits for action in actions if "metaData" in action)
    with suppress(ValueError, TypeError):
        return json.loads(next(metadata, {}).get("schemaString", "null"))
    return None


def _renamed(kind: Any) -> Iterator[tuple[str, str]]:
    """Yield the fields of a Delta type, at any depth, that files call otherwise."""
    if not isinstance(kind, dict):
        return
    for field in kind.get("fields", ()):
        name = field.get("name")
        stored = field.get("metadata", {}).get("delta.columnMapping.physicalName", name)
        if stored != name:
            yield name, stored
        yield from _renamed(field.get("type"))
    for part in ("elementType", "keyType", "valueType"):
        yield from _renamed(kind.get(part))


def _path_of(folder: str, path: str) -> str:
    """Return the path of a file that a log names: relative to the table, or as a URL."""
    plain = unquote(path)
    return plain.partition("://")[2] if "://" in plain else f"{folder}/{plain}"
