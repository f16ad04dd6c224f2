"""The manifest of files: of those that a source names, as their footers describe them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dataload.cache.blocks.reader import Blocks, Object
from dataload.catalog.common_schema import as_in_table, common_schema, missing
from dataload.catalog.footer_cache import FooterLocation, Metadata, read_footers
from dataload.catalog.footer_summary import FileSchema, FileSummary, Summarize
from dataload.catalog.manifest import MOST_NULLS, UNKNOWN, VERSION, Counts, Manifest, RowGroup, table_of
from dataload.catalog.sources import Source, list_objects
from dataload.errors import DataError
from dataload.formats.hive_partitions import NO_KEYS, Constants, Keys, Partitioning, partition_columns, with_valid_text
from dataload.formats.schema import hides_nulls, holds_nulls, is_ragged, structs_of
from dataload.formats.table_columns import TableFile
from dataload.formats.text import TextErrors
from dataload.runtime.text import few

log = logging.getLogger(__name__)


def resolve(
    source: Source,
    blocks: Blocks,
    columns: Sequence[str] | None = None,
    partitioning: Partitioning = "hive",
    errors: TextErrors = "raise",
    known: Callable[[], Mapping[Object, FooterLocation]] = dict,
) -> Manifest:
    """Return the manifest of `source`: a path, folder or glob at the origin of `blocks`, or a list of them.

    Each call lists the objects. Each host reads the footers once per distinct listing. Chosen columns that some files
    lack are logged.

    Args:
        source: The files.
        blocks: Reads them through the cache.
        columns: As in `make_dataset`.
        partitioning: As in `make_dataset`.
        errors: As in `make_dataset`.
        known: As in `manifest_of`.

    Raises:
        OriginNotFound: There is no object at `source`.
        DataError: An object is neither Parquet nor Arrow IPC, or files differ in the chosen columns.
        ConfigError: A column cannot be chosen.
    """
    manifest = manifest_of(list_objects(source, blocks, partitioning), blocks, errors=errors, known=known)
    expected = manifest.promoted
    if nulls := [name for name in manifest.select(columns) if name in manifest.partial and name not in expected]:
        names, file = few(map(repr, nulls)), manifest.partial[nulls[0]]
        log.warning("%s: null in the files that lack it, such as %s", names, file)
    return manifest


def manifest_of(
    objects: Mapping[Object, Keys],
    blocks: Blocks,
    progress: Callable[[Object], object] = lambda _: None,
    errors: TextErrors = "raise",
    known: Callable[[], Mapping[Object, FooterLocation]] = dict,
) -> Manifest:
    """Return the manifest of these objects.

    Args:
        objects: At least one object, with its partition keys.
        blocks: Reads the objects through the cache.
        progress: Called with each object whose footer has been read, from any thread.
        errors: As in `make_dataset`, of the keys.
        known: Returns where footers may be cached already.

    Raises:
        DataError: An object is neither Parquet nor Arrow IPC, or schemas differ.
    """
    if errors == "replace":
        objects = {obj: with_valid_text(keys) for obj, keys in objects.items()}
    digest = hashlib.blake2b(digest_size=16, person=b"dataload files")
    for obj, keys in objects.items():
        said = obj.constants if isinstance(obj, TableFile) else keys
        digest.update(json.dumps([obj.stable_path, obj.size, obj.version, *([said] if said else [])]).encode())
    if (table := table_of(objects)) is not None:
        digest.update(table.digest.encode())
    fingerprint = digest.hexdigest()
    first, paths = Object(next(iter(objects)).path, 0, fingerprint), [obj.path for obj in objects]
    what, args = f"manifest {VERSION}", (objects, blocks, fingerprint, progress, known)
    files = () if table is None else tuple(objects)
    found = Metadata(blocks, first, what, lambda data: Manifest.from_bytes(bytes(data), paths, files))
    return found.get_or_make_once(lambda: _read_footers(*args).to_bytes(paths))


class _File(NamedTuple):
    """A file, and what its footer says.

    Attributes:
        obj: The object.
        keys: Its partition keys.
        summary: What its footer says.
        footer_at: Where that is cached.
    """

    obj: Object
    keys: Keys
    summary: FileSummary
    footer_at: FooterLocation

    @property
    def schema(self) -> FileSchema:
        return self.summary.schema


def _read_footers(
    objects: Mapping[Object, Keys],
    blocks: Blocks,
    fingerprint: str,
    progress: Callable[[Object], object],
    known: Callable[[], Mapping[Object, FooterLocation]],
) -> Manifest:
    table = table_of(objects)
    footers = read_footers(objects, blocks, Summarize(table), progress, known())
    files = [_File(obj, keys, *found) for (obj, keys), found in zip(objects.items(), footers, strict=True)]
    # pandas writes a frame without rows with other types, or without columns.
    files = [file for file in files if any(group.rows for group in file.summary.groups)] or files
    first_of: dict[FileSchema, _File] = {}
    for file in files:
        first_of.setdefault(file.schema, file)
    members = {name for own in first_of for name in {*own.flat.names} - {*own.own.names}}
    flat = [(file.obj, file.schema.flat) for file in files]
    schema, conflicts, promoted = common_schema(flat, members) if table is None else as_in_table(table.flat, flat)
    for file in files:
        conflicts = {**file.summary.unreadable, **conflicts}
    keys = {file.obj: file.keys for file in files}
    partitions, values = partition_columns(keys, {*files[0].schema.own.names, *schema.names})
    if not schema.names and not partitions:
        raise DataError(f"{files[0].obj.name} has no columns: remove it from the dataset, or write it with some")
    lacked = {own: missing(schema, own.flat) for own in first_of}
    partial: dict[str, str] = {}
    for own, first in first_of.items():
        nulls = [name for name in lacked[own] if table is None or not table.says(name)]
        partial = dict.fromkeys(nulls, first.obj.name) | partial
        for name in nulls:
            is_member = name in members and not own.structs.isdisjoint(structs_of(name))
            if table is not None or is_member:
                promoted.setdefault(name, f"missing in {first.obj.name}")
    ragged = [field.name for field in schema if is_ragged(field)]
    ragged_keys = {field.name for field in partitions if is_ragged(field)}
    groups: list[RowGroup] = []
    for file, of_keys in zip(files, values, strict=True):
        others = _values_of(lacked[file.schema], file.obj)
        for name in dict(file.keys).keys() & dict(others).keys():
            conflicts.setdefault(
                name, f"{file.obj.name} has {name!r} as a key of its folders, and other files as a column; {NO_KEYS}"
            )
        groups += _row_groups(file, of_keys, others, ragged, ragged_keys)
    whole = pa.schema([*schema, *partitions])
    differing = conflicts, partial, promoted, _nulls(whole, groups, files)
    return Manifest(whole, tuple(groups), fingerprint, None, *differing)


def _values_of(lacked: Iterable[str], obj: Object) -> Constants:
    """Return the values of columns that a file lacks: those that its table says, or None."""
    return tuple((name, obj.value_of(name) if isinstance(obj, TableFile) else None) for name in lacked)


def _row_groups(
    file: _File, of_keys: Constants, others: Constants, ragged: Sequence[str], ragged_keys: Collection[str]
) -> Iterator[RowGroup]:
    """Yield the row groups of a file.

    Args:
        file: The file.
        of_keys: Its values of the partition columns.
        others: Its values of the columns that it lacks.
        ragged: The columns of the dataset, but its partition columns, whose values vary in length.
        ragged_keys: Such partition columns.
    """
    value_bytes = {name: len(str(value).encode()) for name, value in others if value is not None}
    key_bytes = [len(str(value or "").encode()) for name, value in of_keys if name in ragged_keys]
    for number, group in enumerate(file.summary.groups):
        sizes = {name: group.rows * size for name, size in value_bytes.items()}
        sizes |= zip(file.schema.ragged, group.sizes, strict=True)
        yield RowGroup(
            file.obj,
            file.footer_at,
            number,
            group.rows,
            group.bytes,
            sizes=(*(sizes.get(name, 0) for name in ragged), *(group.rows * size for size in key_bytes)),
            constants=of_keys + others,
            renamed=file.schema.renamed,
            mark=file.summary.mark,
        )


def _nulls(schema: pa.Schema, groups: Sequence[RowGroup], files: Iterable[_File]) -> dict[str, Counts]:
    """Return the nulls of a manifest, by the footers of the files that have its row groups."""
    unable = {field.name for field in schema if not holds_nulls(field)}
    known = unable | {field.name for field in schema if hides_nulls(field)}
    nulls: defaultdict[str, Counts] = defaultdict(lambda: np.zeros(len(groups), np.int64))
    counted = (
        ([*file.schema.without_nulls, *file.schema.hiding], group.nulls)
        for file in files
        for group in file.summary.groups
    )
    for number, (group, (names, counts)) in enumerate(zip(groups, counted, strict=True)):
        without_values = ((name, group.rows) for name, value in group.constants if value is None and name in unable)
        for name, count in [*zip(names, counts, strict=True), *without_values]:
            if count != 0 and name in known:
                nulls[name][number] = UNKNOWN if count is None or not 0 <= count <= MOST_NULLS else count
    return dict(nulls)
