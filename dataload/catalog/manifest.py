"""The manifest of a dataset: its objects and row groups, as one listing found them, named by a fingerprint."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.arguments import did_you_mean
from dataload.cache.blocks.reader import Blocks, Object
from dataload.catalog.common_schema import as_in_table, common_schema, is_ragged, lacking, missing
from dataload.catalog.footer_cache import FooterLocation, Kept, Metadata, read_footers
from dataload.catalog.selection import Selection
from dataload.catalog.sources import Source, list_objects
from dataload.errors import ConfigError, DataError
from dataload.formats.arrow_types import has_members
from dataload.formats.base import Footer
from dataload.formats.hive_partitions import (
    NO_KEYS,
    Constants,
    Keys,
    Partitioning,
    partition_columns,
    with_valid_text,
)
from dataload.formats.schema import flatten, holds_nulls, structs_of
from dataload.formats.table_columns import TableColumns, TableFile
from dataload.formats.text import TextErrors
from dataload.runtime.cached_property import cached_property
from dataload.runtime.decompression import decompressed
from dataload.runtime.text import few

VERSION = f"16 of pyarrow {pa.__version__}"  # Another one may read other types of the same footers.
UNKNOWN = -1  # nulls
MOST_NULLS = 1 << 48  # of a row group; a footer with more is damaged
MOST = 1 << 48  # rows of a row group, or bytes

log = logging.getLogger(__name__)

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowGroup:
    """One row group of one object.

    Args:
        file: The object.
        footer_at: Location of the file's cached footer.
        number: Index of the row group in the file.
        rows: Number of rows.
        bytes: Compressed bytes of all its columns.
        sizes: Uncompressed, encoded bytes of each of the manifest's `ragged` columns.
        constants: Names and values of the partition columns, which come from folder names or from a table, and None or
            the table's default for each column that the file lacks.
        renamed: Of a table, its columns that the file calls otherwise, and how.
        mark: That of the file's footer, see `Footer`.
    """

    file: Object
    footer_at: FooterLocation
    number: int
    rows: int
    bytes: int
    sizes: tuple[int, ...] = ()
    constants: Constants = ()
    renamed: tuple[tuple[str, str], ...] = ()
    mark: str = ""

    @property
    def name(self) -> str:
        """The file and the number, for messages: without credentials."""
        return f"{self.file.name} row group {self.number}"


@dataclass(frozen=True)
class Manifest:
    """One generation of a dataset.

    Args:
        schema: The flat columns of all objects: struct members are dotted columns. Partition keys come last.
        row_groups: Row groups in file order, of the objects in the order of the source.
        fingerprint: Hex digest of the objects' paths, sizes, versions and partition keys, and of the selection. It does
            not depend on the endpoint, so it is the same on every host that sees the same objects.
        selection: The rows of these row groups that belong to the dataset; None: all.
        conflicts: By column that cannot be chosen, why: which files differ in its type, or cannot be read.
        partial: By column that some files lack, which file does. It is null there, for a caller that names the column.
        promoted: By column that files write differently, how: with types that were promoted to the schema's, or without
            it, as a member of a struct that other files have. It is null there.
        nulls: By column whose batches cannot hold nulls, and that has or may have some: how many each row group has by
            its footer, folder and schema, or `UNKNOWN`, int64 [row groups].
        pinned: The URL of the version of a table that has these rows; "": they are of no table.
    """

    schema: pa.Schema
    row_groups: tuple[RowGroup, ...]
    fingerprint: str
    selection: Selection | None = None
    conflicts: Mapping[str, str] = field(default_factory=dict, hash=False)
    partial: Mapping[str, str] = field(default_factory=dict, hash=False)
    promoted: Mapping[str, str] = field(default_factory=dict, hash=False)
    nulls: Mapping[str, Counts] = field(default_factory=dict, hash=False, compare=False)
    pinned: str = field(default="", compare=False)

    @cached_property
    def block_lengths(self) -> Counts:
        """Rows of the dataset in each row group: int64 [row groups]."""
        return self.stored_lengths if self.selection is None else self.selection.counts

    @cached_property
    def stored_lengths(self) -> Counts:
        """Rows of each row group, selected or not: int64 [row groups]."""
        return np.array([group.rows for group in self.row_groups], np.int64)

    @property
    def table(self) -> TableColumns | None:
        """The columns of the table that has these rows; None: they are of no table."""
        return _table_of(group.file for group in self.row_groups)

    @cached_property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.block_lengths.sum())

    @cached_property
    def chunks_of_a_file(self) -> int:
        """Column chunks of the first file."""
        return len(self.schema) * sum(group.file == self.row_groups[0].file for group in self.row_groups)

    @cached_property
    def ragged(self) -> tuple[str, ...]:
        """Columns whose values vary in length, in schema order, including those that no batch can hold."""
        return tuple(field.name for field in self.schema if is_ragged(field))

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check that each name is a column or a struct of columns.

        Raises:
            ConfigError: A name is neither.
            DataError: Files have different types for it.
        """
        for column in columns:
            if column not in self._chosen_by:
                raise ConfigError(f"column {column!r} is not in the dataset: {self._hint(column)}")
            for name in self._chosen_by[column]:
                if name in self.conflicts:
                    raise DataError(f"{self.conflicts[name]}; leave it out with columns=, or rewrite one")

    def _hint(self, column: str) -> str:
        """Return what to name instead of a column that the dataset lacks."""
        if any(f"/{column}=" in group.file.name.rpartition("/")[0] for group in self.row_groups):
            copies = "of a Delta table, copy a version's files with their folders, and name the folder of the copies"
            return f"it is a key of folders above the source: name the folder above {column}=… instead; {copies}"
        return did_you_mean(column, self.schema.names, f"there are {few(map(repr, self.schema.names))}")

    def select(self, columns: Sequence[str] | None) -> list[str]:
        """Return the columns that these names choose, in their order; None: all.

        The name of a struct chooses all its members.

        Raises:
            ConfigError: A name is not in the dataset, or a column is chosen twice.
            DataError: Files have different types for a column; or all are chosen, and a file lacks one.
        """
        if columns is None:
            self.check_columns(self.schema.names)
            if lacked := {name: file for name, file in self.partial.items() if name not in self.promoted}:
                raise DataError(lacking(lacked))
            return list(self.schema.names)
        self.check_columns(columns)
        chosen = [name for column in columns for name in self._chosen_by[column]]
        for name, times in Counter(chosen).items():
            if times > 1:
                raise ConfigError(f"columns= chooses {name!r} {times} times: name it once")
        return chosen

    @cached_property
    def _chosen_by(self) -> dict[str, list[str]]:
        chosen: dict[str, list[str]] = {}
        for name in self.schema.names:
            for struct in structs_of(name):
                chosen.setdefault(struct, []).append(name)
        return chosen | {name: [name] for name in self.schema.names}

    def only(self, numbers: Iterable[int]) -> Manifest:
        """Return the manifest of these row groups, in file order, with its own fingerprint."""
        chosen = sorted(set(map(int, numbers)))
        if len(chosen) == len(self.row_groups):
            return self
        row_groups = tuple(self.row_groups[number] for number in chosen)
        selection = None if self.selection is None else self.selection.only(chosen)
        nulls = {name: counts[chosen] for name, counts in self.nulls.items()}
        fingerprint = _digest([self.fingerprint, chosen])
        return replace(self, row_groups=row_groups, fingerprint=fingerprint, selection=selection, nulls=nulls)

    def selected(self, selection: Selection) -> Manifest:
        """Return the manifest of the rows that both selections have, without row groups that have none of them."""
        whole = self
        if self.selection is not None:
            selection = self.selection.common(selection)
            if selection.digest == self.selection.digest:
                return self
            whole = replace(self, selection=None)
        if selection.is_whole:
            return whole
        kept = np.flatnonzero(selection.counts)
        part = whole.only(kept)
        selection = selection if len(kept) == len(self.row_groups) else selection.only(kept)
        if selection.is_whole:
            return part
        return replace(part, fingerprint=_digest([part.fingerprint, selection.digest]), selection=selection)

    def at(self, table: str, version: int) -> Manifest:
        """Return the manifest of the same rows, as those of a version of a table.

        Args:
            table: The URL that opens this version again. Hosts may have other ones for it.
            version: What tells the version from the others of the table.
        """
        return replace(self, fingerprint=_digest([self.fingerprint, "version", version]), pinned=table)

    def to_bytes(self, known: Iterable[str] = ()) -> bytes:
        """Return the manifest as JSON, without a selection. Files, runs, constants and paths appear once.

        Args:
            known: Paths that the reader of the bytes knows, which are left out: they may have credentials.
        """
        known = list(known)
        paths = {path: number for number, path in enumerate(known)}
        files: dict[Object, tuple[int, int, int, str, list[Any]]] = {}
        runs: dict[Object, int] = {}
        constants: dict[tuple[Constants, tuple[tuple[str, str], ...]], int] = {}
        for group in self.row_groups:
            run = runs.setdefault(group.footer_at.run, len(runs))
            shared = constants.setdefault((group.constants, group.renamed), len(constants))
            *_, groups = files.setdefault(group.file, (run, group.footer_at.number, shared, group.mark, []))
            groups.append((group.number, group.rows, group.bytes, group.sizes))
        for obj in (*runs, *files):
            paths.setdefault(obj.path, len(paths))
        return json.dumps(
            {
                "version": VERSION,
                "paths": list(paths)[len(known) :],
                "schema": base64.b64encode(self.schema.serialize()).decode(),
                "fingerprint": self.fingerprint,
                "constants": list(constants),
                "nulls": {name: _packed(counts) for name, counts in self.nulls.items()},
                "runs": [[paths[run.path], run.version] for run in runs],
                "conflicts": self.conflicts,
                "partial": self.partial,
                "promoted": self.promoted,
                "files": [[paths[file.path], file.size, file.version, *entry] for file, entry in files.items()],
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes, known: Iterable[str] = (), files: Iterable[Object] = ()) -> Manifest:
        """Return the manifest that `to_bytes` wrote, given the same `known` paths, and `files` that it may have."""
        content = json.loads(data)
        groups = []
        paths = [*known, *content["paths"]]
        runs = [Object(paths[path], 0, version) for path, version in content["runs"]]
        pairs = [[tuple(map(tuple, part)) for part in shared] for shared in content["constants"]]
        own = {(file.path, file.size, file.version): file for file in files}
        for path, size, version, run, position, shared, mark, row_groups in content["files"]:
            file = own.get((paths[path], size, version)) or Object(paths[path], size, version)
            footer_at, (constants, renamed) = FooterLocation(runs[run], position), pairs[shared]
            groups += [
                RowGroup(file, footer_at, number, rows, size_bytes, tuple(sizes), constants, renamed, mark)
                for number, rows, size_bytes, sizes in row_groups
            ]
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content["schema"])))
        differing = {name: content[name] for name in ("conflicts", "partial", "promoted")}
        nulls = {name: _unpacked(len(groups), *packed) for name, packed in content["nulls"].items()}
        return cls(schema, tuple(groups), content["fingerprint"], **differing, nulls=nulls)


def _packed(counts: Counts) -> tuple[str, str]:
    """Return counts as the shortest dtype that holds them, and their compressed bytes as text."""
    kinds = np.min_scalar_type(counts.min(initial=0)), np.min_scalar_type(counts.max(initial=0))
    kind = np.result_type(*kinds).newbyteorder("<")
    return kind.str, base64.b64encode(zlib.compress(counts.astype(kind).tobytes())).decode()


def _unpacked(size: int, kind: str, packed: str) -> Counts:
    data = decompressed(base64.b64decode(packed), size * np.dtype(kind).itemsize)
    return np.frombuffer(data, kind).astype(np.int64)


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16, person=b"part").hexdigest()


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
    if (table := _table_of(objects)) is not None:
        digest.update(table.digest.encode())
    fingerprint = digest.hexdigest()
    first, paths = Object(next(iter(objects)).path, 0, fingerprint), [obj.path for obj in objects]
    what, args = f"manifest {VERSION}", (objects, blocks, fingerprint, progress, known)
    files = () if table is None else tuple(objects)
    found = Metadata(blocks, first, what, lambda data: Manifest.from_bytes(bytes(data), paths, files))
    return found.get_or_make_once(lambda: _read_footers(*args).to_bytes(paths))


def _table_of(objects: Iterable[Object]) -> TableColumns | None:
    """Return the columns of the table that has these files; None: they are of no table."""
    first = next(iter(objects), None)
    return first.columns if isinstance(first, TableFile) else None


def summary_name(objects: Iterable[Object]) -> str:
    """Return the name of the blobs with what is known of the footers of these files."""
    table = _table_of(objects)
    return f"summary {VERSION} {'' if table is None else table.digest}"


def _read_footers(
    objects: Mapping[Object, Keys],
    blocks: Blocks,
    fingerprint: str,
    progress: Callable[[Object], object],
    known: Callable[[], Mapping[Object, FooterLocation]],
) -> Manifest:
    table = _table_of(objects)
    look = _Summarize(table)
    kept = Kept(summary_name(objects), look.to_bytes, look.from_bytes)
    footers = read_footers(objects, blocks, look, progress, known(), kept)
    files = list(zip(objects.items(), footers, strict=True))
    # pandas writes a frame without rows with other types, or without columns.
    files = [(item, footer) for item, footer in files if any(rows for rows, *_ in footer[0][1])] or files
    objects, found = dict(item for item, _ in files), [footer for _, footer in files]
    members = {name for own in {own for (own, *_), _ in found} for name in {*own.flat.names} - {*own.own.names}}
    flat = [(obj, own.flat) for obj, ((own, *_), _) in zip(objects, found, strict=True)]
    schema, conflicts, promoted = common_schema(flat, members) if table is None else as_in_table(table.flat, flat)
    for (*_, unreadable, _), _ in found:
        conflicts = {**unreadable, **conflicts}
    own_names = found[0][0][0].own.names
    partitions, constants = partition_columns(objects, {*own_names, *schema.names})
    if not schema.names and not partitions:
        raise DataError(f"{next(iter(objects)).name} has no columns: remove it from the dataset, or write it with some")
    ragged = [field.name for field in schema if is_ragged(field)]
    lacked: dict[_Schema, list[str]] = {}
    partial: dict[str, str] = {}
    groups: list[RowGroup] = []
    counted: list[tuple[_Schema, list[int | None]]] = []
    for (obj, keys), ((own, row_groups, _, mark), footer_at), values in zip(
        objects.items(), found, constants, strict=True
    ):
        if own not in lacked:
            lacked[own] = missing(schema, own.flat)
            nulls = [name for name in lacked[own] if table is None or not table.says(name)]
            partial = dict.fromkeys(nulls, obj.name) | partial
            for name in nulls:
                is_member = name in members and not own.structs.isdisjoint(structs_of(name))
                if table is not None or is_member:
                    promoted.setdefault(name, f"missing in {obj.name}")
        given = tuple((name, obj.value_of(name) if isinstance(obj, TableFile) else None) for name in lacked[own])
        for name in dict(keys).keys() & dict(given).keys():
            conflicts.setdefault(
                name, f"{obj.name} has {name!r} as a key of its folders, and other files as a column; {NO_KEYS}"
            )
        texts = [
            str(value or "").encode() for (_, value), field in zip(values, partitions, strict=True) if is_ragged(field)
        ]
        for number, (rows, stored_bytes, own_sizes, counts) in enumerate(row_groups):
            by_name = {name: rows * len(str(value).encode()) for name, value in given if value is not None}
            by_name |= dict(zip(own.ragged, own_sizes, strict=True))
            sizes = (*(by_name.get(name, 0) for name in ragged), *(rows * len(text) for text in texts))
            counted.append((own, counts))
            groups.append(
                RowGroup(obj, footer_at, number, rows, stored_bytes, sizes, values + given, own.renamed, mark)
            )
    whole = pa.schema([*schema, *partitions])
    differing = conflicts, partial, promoted, _nulls(whole, groups, counted)
    return Manifest(whole, tuple(groups), fingerprint, None, *differing)


def _nulls(
    schema: pa.Schema, groups: Sequence[RowGroup], counted: Iterable[tuple[_Schema, list[int | None]]]
) -> dict[str, Counts]:
    """Return the nulls of a manifest. counted: by row group, the schema of its file and the nulls by its footer."""
    unable = {field.name for field in schema if not holds_nulls(field)}
    nulls: defaultdict[str, Counts] = defaultdict(lambda: np.zeros(len(groups), np.int64))
    for number, (group, (own, counts)) in enumerate(zip(groups, counted, strict=True)):
        without_values = ((name, group.rows) for name, value in group.constants if value is None)
        for name, count in [*zip(own.without_nulls, counts, strict=True), *without_values]:
            if count != 0 and name in unable:
                nulls[name][number] = UNKNOWN if count is None or not 0 <= count <= MOST_NULLS else count
    return dict(nulls)


@dataclass(frozen=True, eq=False)
class _Schema:
    """A file's own schema, its flat form, and the ragged columns of that and those whose batches can hold no nulls.

    Of a file of a table, the flat form has the table's columns only. renamed: see `RowGroup`. content: what makes it.
    """

    own: pa.Schema
    flat: pa.Schema
    ragged: list[str]
    without_nulls: list[str]
    renamed: tuple[tuple[str, str], ...]
    content: tuple[str, str]

    @cached_property
    def structs(self) -> frozenset[str]:
        """The file's own columns that are structs."""
        return frozenset(field.name for field in self.own if has_members(field.type))


_Groups = list[tuple[int, int, list[int], list[int | None]]]
_Summary = tuple[_Schema, _Groups, Mapping[str, str], str]


class _Summarize:
    """Returns a footer's schema, its row groups (rows, bytes, bytes by ragged column, nulls), unreadable columns, mark.

    Notes: thread-safe. Files of one schema share one `_Schema`.

    Args:
        table: The columns of the table that has the files, if there is one.
    """

    def __init__(self, table: TableColumns | None) -> None:
        self._known = None if table is None else set(table.flat.names)
        self._latest: tuple[Mapping[str, str], _Schema] | None = None
        self._schemas: dict[tuple[str, str], _Schema] = {}  # by their serialized form and their renamed columns

    def __call__(self, footer: Footer, obj: Object) -> _Summary:
        latest = self._latest
        if latest is None or latest[0] != footer.renamed or not footer.schema.equals(latest[1].own):
            packed = base64.b64encode(footer.schema.serialize()).decode()
            latest = self._latest = footer.renamed, self._schema(packed, json.dumps(footer.renamed))
        schema = latest[1]
        row_groups = [
            (
                rows,
                footer.stored_bytes(number),
                footer.decoded_bytes(number, schema.ragged),
                footer.null_counts(number, schema.without_nulls),
            )
            for number, rows in enumerate(footer.lengths)
        ]
        if not all(_is_number(each) for rows, size, sizes, _ in row_groups for each in (rows, size, *sizes)):
            raise DataError(f"{obj.name} has a footer with negative sizes, so it is damaged: write it again")
        return schema, row_groups, footer.unreadable, footer.mark

    def _schema(self, packed: str, names: str) -> _Schema:
        """Return a schema. names: the columns that the file calls otherwise, and how, as JSON."""
        if (found := self._schemas.get((packed, names))) is not None:
            return found
        own = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(packed)))
        flat, renamed = flatten(own), json.loads(names)
        if self._known is not None:
            flat = pa.schema([field for field in flat if field.name in self._known])
        holders = ((name, each) for name in flat.names for each in (name, *structs_of(name)))
        called = tuple((name, renamed[each]) for name, each in holders if each in renamed)
        ragged = [field.name for field in flat if is_ragged(field)]
        dense = [field.name for field in flat if not holds_nulls(field)]
        schema = _Schema(own, flat, ragged, dense, called, (packed, names))
        return self._schemas.setdefault((packed, names), schema)

    def to_bytes(self, found: Mapping[int, _Summary]) -> bytes:
        """Return summaries as JSON, without those of files that lack rows: only the footers may say that."""
        found = {number: file for number, file in found.items() if _has_rows(file[1])}
        numbers: dict[tuple[str, str], int] = {}
        for schema, *_ in found.values():
            numbers.setdefault(schema.content, len(numbers))
        files = [[number, numbers[schema.content], *rest] for number, (schema, *rest) in found.items()]
        return json.dumps([list(numbers), files], separators=(",", ":")).encode()

    def from_bytes(self, data: bytes) -> dict[int, _Summary]:
        """Return what `to_bytes` was given. Raise an exception for what no footers have."""
        contents, files = json.loads(data)
        schemas, found = [self._schema(*content) for content in contents], dict[int, _Summary]()
        for number, of, groups, unreadable, mark in files:
            schema = schemas[of]
            for rows, size, sizes, nulls in groups:
                has_all = (len(sizes), len(nulls)) == (len(schema.ragged), len(schema.without_nulls))
                has_counts = all(each is None or type(each) is int for each in nulls)
                if not (has_all and has_counts and all(map(_is_number, (rows, size, *sizes)))):
                    raise ValueError(f"a row group of {(rows, size, sizes, nulls)}")
            if type(mark) is not str or not isinstance(unreadable, dict) or not _has_rows(groups):
                raise ValueError(f"a file with {unreadable} and {mark}")
            found[number] = schema, groups, unreadable, mark
        return found


def _has_rows(groups: _Groups) -> bool:
    """Return whether each row group of a file has rows."""
    return bool(groups) and all(rows for rows, *_ in groups)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of rows or bytes that a footer may have."""
    return type(value) is int and 0 <= value < MOST
