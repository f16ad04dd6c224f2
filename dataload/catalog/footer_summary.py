"""What a manifest needs of the footer of a file, cached so that the footer need not be parsed again."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from dataload.cache.blocks.reader import Object
from dataload.catalog.manifest import VERSION
from dataload.errors import DataError
from dataload.formats.arrow_types import has_members
from dataload.formats.base import Footer
from dataload.formats.schema import flatten, hides_nulls, holds_nulls, is_ragged, structs_of
from dataload.formats.table_columns import TableColumns
from dataload.runtime.cached_property import cached_property

MOST = 1 << 48  # rows of a row group, or bytes


@dataclass(frozen=True, eq=False)
class FileSchema:
    """The columns of a file. Files with equal ones share this object.

    Attributes:
        own: The schema of the file.
        flat: Its flat form; of a file of a table, with the table's columns only.
        ragged: The columns of the flat form whose values vary in length.
        without_nulls: Those whose batches can hold no nulls.
        hiding: Those whose batches can hold no nulls inside of lists.
        renamed: As for `RowGroup`.
        content: What tells it from others: the schema in bytes and the renamed columns, as text.
    """

    own: pa.Schema
    flat: pa.Schema
    ragged: list[str]
    without_nulls: list[str]
    hiding: list[str]
    renamed: tuple[tuple[str, str], ...]
    content: tuple[str, str]

    @cached_property
    def structs(self) -> frozenset[str]:
        """The file's own columns that are structs."""
        return frozenset(field.name for field in self.own if has_members(field.type))


class GroupSummary(NamedTuple):
    """What a footer says of a row group.

    Attributes:
        rows: Its rows.
        bytes: Compressed bytes of all its columns.
        sizes: Uncompressed, encoded bytes of each of the schema's `ragged` columns.
        nulls: Nulls of each of the schema's columns `without_nulls`, None if unknown; then those inside the lists of
            each of its columns `hiding`, as far as they are known.
    """

    rows: int
    bytes: int
    sizes: list[int]
    nulls: list[int | None]


class FileSummary(NamedTuple):
    """What a footer says of its file.

    Attributes:
        schema: Its columns.
        groups: Its row groups.
        unreadable: As for `Footer`.
        mark: As for `Footer`.
    """

    schema: FileSchema
    groups: list[GroupSummary]
    unreadable: Mapping[str, str]
    mark: str


class Summarize:
    """Returns the summary of a footer. Thread-safe.

    Args:
        table: The columns of the table that has the files, if there is one.

    Attributes:
        name: That of the blobs with summaries.
    """

    def __init__(self, table: TableColumns | None) -> None:
        self.name = f"summary {VERSION} {'' if table is None else table.digest}"
        self._known = None if table is None else set(table.flat.names)
        self._latest: tuple[Mapping[str, str], FileSchema] | None = None
        self._schemas: dict[tuple[str, str], FileSchema] = {}  # by `content`

    def __call__(self, footer: Footer, obj: Object) -> FileSummary:
        latest = self._latest
        if latest is None or latest[0] != footer.renamed or not footer.schema.equals(latest[1].own):
            packed = base64.b64encode(footer.schema.serialize()).decode()
            latest = self._latest = footer.renamed, self._schema(packed, json.dumps(footer.renamed))
        schema = latest[1]
        groups = [
            GroupSummary(
                rows,
                footer.stored_bytes(number),
                footer.decoded_bytes(number, schema.ragged),
                [*footer.null_counts(number, schema.without_nulls), *footer.null_elements(number, schema.hiding)],
            )
            for number, rows in enumerate(footer.lengths)
        ]
        if not all(map(_has_numbers, groups)):
            raise DataError(f"{obj.name} has a footer with negative sizes, so it is damaged: write it again")
        return FileSummary(schema, groups, footer.unreadable, footer.mark)

    def _schema(self, packed: str, names: str) -> FileSchema:
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
        hiding = [field.name for field in flat if hides_nulls(field)]
        schema = FileSchema(own, flat, ragged, dense, hiding, called, (packed, names))
        return self._schemas.setdefault((packed, names), schema)

    def to_bytes(self, found: Mapping[int, FileSummary]) -> bytes:
        """Return summaries as JSON, without those of files that lack rows: only the footers may say that."""
        found = {number: file for number, file in found.items() if _have_rows(file.groups)}
        numbers: dict[tuple[str, str], int] = {}
        for file in found.values():
            numbers.setdefault(file.schema.content, len(numbers))
        files = [[number, numbers[schema.content], *rest] for number, (schema, *rest) in found.items()]
        return json.dumps([list(numbers), files], separators=(",", ":")).encode()

    def from_bytes(self, data: bytes) -> dict[int, FileSummary]:
        """Return what `to_bytes` was given. Raise an exception for what no footers have."""
        contents, files = json.loads(data)
        schemas, found = [self._schema(*content) for content in contents], dict[int, FileSummary]()
        for number, of, listed, unreadable, mark in files:
            schema, groups = schemas[of], [GroupSummary(*each) for each in listed]
            for group in groups:
                counted = len(schema.without_nulls) + len(schema.hiding)
                has_all = (len(group.sizes), len(group.nulls)) == (len(schema.ragged), counted)
                has_counts = all(each is None or type(each) is int for each in group.nulls)
                if not (has_all and has_counts and _has_numbers(group)):
                    raise ValueError(f"a row group of {tuple(group)}")
            if type(mark) is not str or not isinstance(unreadable, dict) or not _have_rows(groups):
                raise ValueError(f"a file with {unreadable} and {mark}")
            found[number] = FileSummary(schema, groups, unreadable, mark)
        return found


def _have_rows(groups: list[GroupSummary]) -> bool:
    """Return whether there are row groups, and each has rows."""
    return bool(groups) and all(group.rows for group in groups)


def _has_numbers(group: GroupSummary) -> bool:
    """Return whether the rows and the bytes of a row group are numbers that a footer may have."""
    return all(type(each) is int and 0 <= each < MOST for each in (group.rows, group.bytes, *group.sizes))
