"""Which objects a dataset is made of: one listing, one footer each, pinned and named by a fingerprint."""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from fsspec.core import has_magic

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.tier import Allocate
from dataload.catalog.footer_cache import Kept, read_footers
from dataload.errors import ConfigError, DataError, OriginNotFound
from dataload.formats.base import Footer
from dataload.formats.hive_partitions import Constants, Keys, keys_of, partition_columns
from dataload.formats.schema import fields_of, flatten
from dataload.runtime.cached_property import cached_property
from dataload.runtime.redact import redacted

VERSION = 3

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class RowGroup:
    """One row group of one object. rows: how many; bytes: compressed, of all its columns.

    sizes: bytes, uncompressed but encoded as the file has them, of each of the manifest's `ragged` columns.
    constants: names and values of the columns that its file does not hold, for the folders' names say them.
    kept: where the footer of its file is.
    """

    file: Object
    kept: Kept
    number: int
    rows: int
    bytes: int
    sizes: tuple[int, ...] = ()
    constants: Constants = ()


@dataclass(frozen=True)
class Manifest:
    """A generation of a dataset: its objects in order of path, their row groups in file order, their common schema.

    schema: flat: the members of structs are dotted columns; then the keys of partitions.
    fingerprint: hex digest of the objects' paths, sizes, versions and partition keys; the same on every host that sees
        the same objects, whatever the endpoint.
    """

    schema: pa.Schema
    row_groups: tuple[RowGroup, ...]
    fingerprint: str

    @cached_property
    def num_rows(self) -> int:
        return sum(group.rows for group in self.row_groups)

    @cached_property
    def ragged(self) -> tuple[str, ...]:
        """The columns whose values vary in length, in the schema's order, those that no batch can hold among them."""
        return tuple(field.name for field in self.schema if _is_ragged(field))

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises ConfigError naming the first that is neither a column nor a struct of some."""
        for column in columns:
            if column not in self._chosen_by:
                near = difflib.get_close_matches(column, self.schema.names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, self.schema.names))}"
                raise ConfigError(f"column {column!r} is not in the dataset: {hint}")

    def select(self, columns: Sequence[str] | None) -> list[str]:
        """The columns that these names choose, in their order; a struct's name chooses all its members. None: all.

        Raises ConfigError for a name that is not there and for a column chosen twice.
        """
        if columns is None:
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
            for dot in re.finditer(r"\.", name):
                chosen.setdefault(name[: dot.start()], []).append(name)
        return chosen | {name: [name] for name in self.schema.names}

    def only(self, numbers: Iterable[int]) -> Manifest:
        """The part of it that has these of its `row_groups`, in file order, with a fingerprint of its own."""
        chosen = sorted(set(map(int, numbers)))
        if len(chosen) == len(self.row_groups):
            return self
        digest = hashlib.blake2b(json.dumps([self.fingerprint, chosen]).encode(), digest_size=16, person=b"part")
        return Manifest(self.schema, tuple(self.row_groups[number] for number in chosen), digest.hexdigest())

    def to_bytes(self) -> bytes:
        files: dict[Object, tuple[int, int, Constants, list[Any]]] = {}
        runs: dict[Object, int] = {}
        for group in self.row_groups:
            run = runs.setdefault(group.kept.run, len(runs))
            *_, groups = files.setdefault(group.file, (run, group.kept.number, group.constants, []))
            groups.append((group.number, group.rows, group.bytes, group.sizes))
        return json.dumps(
            {
                "version": VERSION,
                "schema": base64.b64encode(self.schema.serialize()).decode(),
                "fingerprint": self.fingerprint,
                "runs": [[run.path, run.version] for run in runs],
                "files": [[file.path, file.size, file.version, *of] for file, of in files.items()],
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        known = json.loads(data)
        groups = []
        runs = [Object(path, 0, version) for path, version in known["runs"]]
        for path, size, version, run, place, constants, row_groups in known["files"]:
            file, shared = Object(path, size, version), tuple((name, value) for name, value in constants)
            kept = Kept(runs[run], place)
            groups += [
                RowGroup(file, kept, number, rows, size_bytes, tuple(sizes), shared)
                for number, rows, size_bytes, sizes in row_groups
            ]
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(known["schema"])))
        return cls(schema, tuple(groups), known["fingerprint"])


def resolve(source: Source, blocks: Blocks) -> Manifest:
    """The dataset at `source`: a path, folder or glob at the origin of `blocks`, or a list of them.

    The objects are listed now; their footers are read once a host for each listing.

    Raises OriginNotFound when nothing is there, DataError for objects that are neither Parquet nor Arrow IPC and for
    schemas that differ.
    """
    return pin(list_objects(source, blocks), blocks)


def pin(
    objects: Mapping[Object, Keys], blocks: Blocks, progress: Callable[[Object], object] = lambda _: None
) -> Manifest:
    """The dataset that these objects, at least one, in order of path, make up. Raises DataError as `resolve` does.

    progress: called with each object whose footer has been read, from any thread.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"dataload files")
    for obj, keys in objects.items():
        digest.update(json.dumps([obj.path, obj.size, obj.version, *([keys] if keys else [])]).encode())
    fingerprint = digest.hexdigest()

    def fill(allocate: Allocate) -> None:
        data = _read_footers(objects, blocks, fingerprint, progress).to_bytes()
        allocate(len(data))[:] = data

    pinned = Object(next(iter(objects)).path, 0, fingerprint)
    return Manifest.from_bytes(bytes(blocks.tier.get_or_fill(blocks.key(pinned, f"manifest {VERSION}"), fill)))


def source_paths(source: Source) -> list[str]:
    """The URLs or paths that `source` names. Raises ConfigError when there are none."""
    paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    if not paths:
        raise ConfigError("the source is an empty list: name at least one file, folder or glob")
    return [os.fspath(path) for path in paths]


def list_objects(source: Source, blocks: Blocks) -> dict[Object, Keys]:
    """The objects that `source` names, in order of path, with the partition keys between them and what was named.

    Names that start with "_" or "." are passed over, as Spark writes them.

    Raises OriginNotFound when there are none.
    """
    found: dict[str, tuple[Object, Keys]] = {}
    for path in source_paths(source):
        listed = _list(path, blocks)
        if not listed:
            hint = "; a glob names objects, not folders: add /* for what is in them" if has_magic(path) else ""
            raise OriginNotFound(
                f"no objects at {redacted(path)} ({blocks.origin.address}): check bucket, prefix and endpoint{hint}"
            )
        for obj, keys in listed.items():
            # One object may be named by itself and by a folder above it, which knows more of its keys.
            if obj.path not in found or len(keys) > len(found[obj.path][1]):
                found[obj.path] = obj, keys
    return dict(found[path] for path in sorted(found))


def _list(path: str, blocks: Blocks) -> dict[Object, Keys]:
    origin = blocks.origin
    root = origin.path_of(path.rpartition("::")[2])
    folder = re.split(r"[*?\[]", root, maxsplit=1)[0].rpartition("/")[0] if has_magic(root) else root
    listed = {Object.of(info): name.removeprefix(folder) for name, info in origin.list(root).items()}
    return {obj: keys_of(relative) for obj, relative in listed.items() if not _hidden(relative)}


def _hidden(relative: str) -> bool:
    return any(part.startswith(("_", ".")) for part in relative.split("/"))


def _read_footers(
    objects: Mapping[Object, Keys], blocks: Blocks, fingerprint: str, progress: Callable[[Object], object]
) -> Manifest:
    found = read_footers(objects, blocks, _Look(), progress)
    first, ((schema, _), _) = next(iter(objects)), found[0]
    partitions, constants = partition_columns(objects, {*schema.own.names, *schema.flat.names})
    groups = []
    for obj, ((other, row_groups), kept), values in zip(objects, found, constants, strict=True):
        if other is not schema:
            _check_schema(first, schema.flat, obj, other.flat)
        for number, (rows, stored_bytes, sizes) in enumerate(row_groups):
            named = [
                str(value or "") for field, (_, value) in zip(partitions, values, strict=True) if _is_ragged(field)
            ]
            sizes += [rows * len(value.encode()) for value in named]
            groups.append(RowGroup(obj, kept, number, rows, stored_bytes, tuple(sizes), values))
    return Manifest(pa.schema([*schema.flat, *partitions]), tuple(groups), fingerprint)


@dataclass(frozen=True)
class _Schema:
    """A file's own, and flat; and which columns of that are ragged."""

    own: pa.Schema
    flat: pa.Schema
    ragged: list[str]


class _Look:
    """What a manifest has of footers: the schema, and each row group's rows, stored bytes, and bytes by ragged column.

    Notes: may be called from any thread. Files of one schema, one after the other, share what is made of it.
    """

    _latest: _Schema | None = None

    def __call__(self, footer: Footer) -> tuple[_Schema, list[tuple[int, int, list[int]]]]:
        schema = self._latest
        if schema is None or not footer.schema.equals(schema.own):
            flat = flatten(footer.schema)
            schema = _Schema(footer.schema, flat, [field.name for field in flat if _is_ragged(field)])
            self._latest = schema
        return schema, [
            (rows, footer.stored_bytes(number), footer.decoded_bytes(number, schema.ragged))
            for number, rows in enumerate(footer.lengths)
        ]


def _is_ragged(field: pa.Field) -> bool:
    try:
        return fields_of(pa.schema([field]))[0].ragged
    except DataError:
        return True  # Nobody can choose it, so that it may be in the way of nobody.


def _check_schema(first: Object, schema: pa.Schema, other: Object, found: pa.Schema) -> None:
    if [(field.name, field.type) for field in found] == [(field.name, field.type) for field in schema]:
        return
    for name in [*schema.names, *found.names]:
        ours, theirs = (_type_of(name, which) for which in (schema, found))
        if ours != theirs:
            raise DataError(
                f"{other.path} and {first.path} differ in column {name!r}: {theirs} there, {ours} here; "
                f"read them as two datasets or rewrite one"
            )
    raise DataError(f"{other.path} and {first.path} hold the same columns in another order: rewrite one of them")


def _type_of(name: str, schema: pa.Schema) -> Any:
    return schema.field(name).type if name in schema.names else "missing"
