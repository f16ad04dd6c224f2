"""What the log of a Delta table, or the metadata of an Iceberg table, says about listed files of the table.

A list of files has no rows that other files delete, and no names of columns that the files do not have. So files of
which the table's own metadata says otherwise are refused.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from dataload.cache.blocks.reader import Object
from dataload.errors import ConfigError
from dataload.runtime.decompression import decompressed
from dataload.runtime.redact import redacted

CHANGES = re.compile(r"/_change_data/")
VERSION = re.compile(r"_delta_log/(\d{20})\.")
COMMIT = re.compile(r"_delta_log/(\d{20})\.json$")
OTHER_CHECKPOINT = re.compile(r"_delta_log/(\d{20})\.checkpoint\.[^/]*-[^/]*\.(parquet|json)$")  # of the protocol's V2
CHECKPOINT = re.compile(r"_delta_log/(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet$")
ICEBERG_VERSION = re.compile(r"/v?(\d+)[^/]*\.metadata\.json$")
GZIP = b"\x1f\x8b"  # the first bytes of a compressed file
WITH_GZIP_HEADER = 31  # for zlib
MOST_BYTES = 64 << 20  # of a table's log that are read, the newest first; of metadata that are not compressed any more
DELETES = ("total-delete-files", "total-position-deletes", "total-equality-deletes")
COPY = 'such as by spark.table("t").write.parquet(copy), and name the copy'

DELTA = "a Delta", "write a checkpoint of the classic form by deltalake, DeltaTable(url).create_checkpoint()"
ICEBERG = "an Iceberg", "copy the rows that pyiceberg reads, table.scan().to_arrow()"

KINDS = ("add", "remove", "metaData")  # of the actions of a commit

Read = Callable[[Sequence[Object]], Iterable[bytes]]

logger = logging.getLogger(__name__)


def check_files(paths: Iterable[str]) -> None:
    """Raise ConfigError if a file has changes of a Delta table instead of rows."""
    for path in filter(CHANGES.search, paths):
        raise ConfigError(
            f"{redacted(path)} has changes of a Delta table, not its rows: list the files of a version, "
            "DeltaTable(url).file_uris()"
        )


def check_delta(folder: str, log: Mapping[str, Object], listed: Collection[str], read: Read) -> None:
    """Raise ConfigError if a Delta table deletes rows of listed files, or gives their columns other names.

    A list of an older version, of which the newest one has removed files, may have all rows: that is logged. So is a
    log of which commits are missing, or that is too large to be read as a whole. One that cannot be read is an error.

    Args:
        folder: Path of the table.
        log: The objects in `_delta_log/` by path.
        listed: Paths of files below the folder.
        read: Returns the bytes of objects.
    """
    objects, is_whole, checkpoint = _since_checkpoint(log)
    others = [path for path in log if (match := OTHER_CHECKPOINT.search(path)) and int(match[1]) > checkpoint]
    if others and not is_whole:
        raise _unreadable(max(others), *DELTA)
    commits = [_commit(folder, obj, data) for obj, data in zip(objects, read(objects), strict=True)]
    for name, stored in next((commit.renamed for commit in commits if commit.renamed is not None), ()):
        raise ConfigError(
            f"{redacted(folder)} is a Delta table with column mapping: its files call the column {name!r} {stored!r}: "
            f"copy it to plain Parquet, {COPY}"
        )
    if not is_whole:
        logger.warning(
            "%s is a Delta table whose log can be read in part only, so files with deleted rows may go unnoticed: copy "
            "it to plain Parquet, %s, if it may have deletion vectors",
            redacted(folder),
            COPY,
        )
    files: dict[str, bool | None] = {}
    for commit in reversed(commits):
        files.update(commit.files)
    marked = sorted(path for path in listed if files.get(path))
    if not marked:
        return
    more = f" and {len(marked) - 1} more of these files have" if len(marked) > 1 else " has"
    deleted = f"{redacted(marked[0])}{more} rows that its Delta table deleted by deletion vectors"
    purge = "run REORG TABLE … APPLY (PURGE), and list the files of the new version; or copy the table to plain Parquet"
    if gone := min((path for path in listed if files.get(path, None if is_whole else False) is None), default=""):
        logger.warning(
            "%s, in its newest version, which is without %s, so an older one is read: right if that is from before "
            "they were deleted; if not, %s, %s",
            deleted,
            redacted(gone),
            purge,
            COPY,
        )
        return
    raise ConfigError(f"{deleted}: {purge}, {COPY}")


def check_iceberg(folder: str, metadata: Mapping[str, Object], listed: Collection[str], read: Read) -> None:
    """Raise ConfigError if the current snapshot of an Iceberg table deletes rows of its files.

    Args:
        folder: Path of the table.
        metadata: The objects `metadata/*.metadata.json` by path.
        listed: As in `check_delta`.
        read: As in `check_delta`.
    """
    versions = {int(match[1]): obj for path, obj in metadata.items() if (match := ICEBERG_VERSION.search(path))}
    if versions and listed and _has_deletes(versions[max(versions)], read):
        raise ConfigError(
            f"{redacted(folder)} is an Iceberg table whose delete files delete rows of its data files: run "
            "rewrite_data_files with delete-file-threshold=1, and list the files of the new snapshot; or copy the "
            f"table to plain Parquet, {COPY}"
        )


def _has_deletes(metadata: Object, read: Read) -> bool:
    """Return whether the current snapshot of an Iceberg table has delete files."""
    try:
        [data] = read([metadata])
        table = json.loads(_uncompressed(data))
        current = table.get("current-snapshot-id")  # None: the table is empty
        summaries = [each.get("summary", {}) for each in table.get("snapshots", ()) if each["snapshot-id"] == current]
        return any(int(summary.get(name, 0)) for summary in summaries for name in DELETES)
    # OverflowError: an infinite number
    except (ValueError, AttributeError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise _unreadable(metadata.path, *ICEBERG) from error


def _uncompressed(data: bytes) -> bytes:
    """Return the bytes of a file that gzip may have compressed. Raise ValueError if these are too many, or not all."""
    if not data.startswith(GZIP):
        return data
    return decompressed(data, MOST_BYTES, WITH_GZIP_HEADER)


def _unreadable(path: str, table: str, way_out: str) -> ConfigError:
    return ConfigError(
        f"{redacted(path)} cannot be read, so rows that {table} table deleted may go unnoticed: {way_out}, or copy the "
        f"table to plain Parquet, {COPY}"
    )


class _Commit(NamedTuple):
    """What a commit or a checkpoint says.

    Attributes:
        files: By path, whether rows of the file are deleted; None: the table has the file no more.
        renamed: The columns that files call otherwise, if there is a schema.
    """

    files: dict[str, bool | None]
    renamed: list[tuple[str, str]] | None


def _since_checkpoint(log: Mapping[str, Object]) -> tuple[list[Object], bool, int]:
    """Return the commits since the last checkpoint, and its parts, the newest first; whether that is all; its version.

    Other forms of checkpoints are not read, and only `MOST_BYTES`.
    """
    versions = {int(match[1]) for path in log if (match := VERSION.search(path))}
    commits = {int(match[1]): obj for path, obj in log.items() if (match := COMMIT.search(path))}
    parts: dict[int, list[tuple[int, Object]]] = {}
    for path, obj in log.items():
        if match := CHECKPOINT.search(path):
            parts.setdefault(int(match[1]), []).append((int(match[2] or 1), obj))
    checkpoint = max((version for version, found in parts.items() if len(found) == found[0][0]), default=-1)
    newest = [version for version in sorted(commits, reverse=True) if version > checkpoint]
    needed = [*map(commits.__getitem__, newest), *(obj for _, obj in parts.get(checkpoint, ()))]
    sizes = itertools.accumulate(obj.size for obj in needed)
    kept = [obj for obj, size in zip(needed, sizes, strict=True) if size <= MOST_BYTES]
    is_whole = len(kept) == len(needed) and len(newest) == max(versions, default=checkpoint) - checkpoint
    return kept, is_whole, checkpoint


def _commit(folder: str, obj: Object, data: bytes) -> _Commit:
    """Return what a commit or a checkpoint says."""
    try:
        return _of_checkpoint(folder, data) if obj.path.endswith(".parquet") else _of_commit(folder, data)
    # pyarrow raises OSError for damaged pages.
    except (ValueError, TypeError, AttributeError, LookupError, OSError, RecursionError, pa.ArrowException) as error:
        raise _unreadable(obj.path, *DELTA) from error


def _of_commit(folder: str, data: bytes) -> _Commit:
    actions = [json.loads(line) for line in data.splitlines() if line.strip()]
    adds, removes, schemas = ([found for each in actions if (found := each.get(kind))] for kind in KINDS)
    files: dict[str, bool | None] = {_path_of(folder, each["path"]): None for each in removes}
    files |= {_path_of(folder, each["path"]): bool(each.get("deletionVector")) for each in adds}
    return _Commit(files, _renamed_of([each.get("schemaString") for each in schemas]))


def _of_checkpoint(folder: str, data: bytes) -> _Commit:
    path, vector, schema = "add.path", "add.deletionVector.storageType", "metaData.schemaString"
    sidecar = "sidecar.path"
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        table = file.read(columns=[path, vector, schema, sidecar]).flatten().flatten()
    if sidecar in table.column_names and table[sidecar].null_count < len(table):
        raise ValueError("a checkpoint of the protocol's V2, whose files are listed in sidecars")
    schemas = table[schema].drop_null().to_pylist() if schema in table.column_names else []
    table = table.filter(table[path].is_valid())
    marks = table[vector].is_valid().to_pylist() if vector in table.column_names else [False] * len(table)
    paths = [_path_of(folder, each) for each in table[path].to_pylist()]
    return _Commit(dict(zip(paths, marks, strict=True)), _renamed_of(schemas))


def _renamed_of(schemas: Sequence[str | None]) -> list[tuple[str, str]] | None:
    return list(_renamed(json.loads(schemas[-1]))) if schemas and schemas[-1] else None


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
