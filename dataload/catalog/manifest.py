"""The manifest of a dataset: its objects and row groups, as one listing found them, named by a fingerprint."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.arguments import did_you_mean
from dataload.cache.blocks.reader import Object
from dataload.catalog.common_schema import lacking
from dataload.catalog.footer_cache import FooterLocation
from dataload.catalog.selection import Selection
from dataload.errors import ConfigError, DataError
from dataload.formats.hive_partitions import Constants
from dataload.formats.schema import is_ragged, structs_of
from dataload.formats.table_columns import TableColumns, TableFile
from dataload.runtime.cached_property import cached_property
from dataload.runtime.decompression import decompressed
from dataload.runtime.text import few

VERSION = f"17 of pyarrow {pa.__version__}"  # Another one may read other types of the same footers.
UNKNOWN = -1  # nulls
MOST_NULLS = 1 << 48  # of a row group; a footer with more is damaged

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
            its footer, folder and schema, or `UNKNOWN`, int64 [row groups]. Those inside of lists count if the footer
            tells them from empty lists.
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
        return table_of(group.file for group in self.row_groups)

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


def table_of(objects: Iterable[Object]) -> TableColumns | None:
    """Return the columns of the table that has these files; None: they are of no table."""
    first = next(iter(objects), None)
    return first.columns if isinstance(first, TableFile) else None
