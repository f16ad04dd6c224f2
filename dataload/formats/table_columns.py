"""The columns of a table in its files, which may call them otherwise or lack them.

A table knows a column by a number or by a name that no rename changes. The footer of a file is read as if the file had
been written with the names that the table has now. So nothing that reads the file knows of others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import pyarrow as pa

from dataload.cache.blocks.reader import Object
from dataload.errors import DataError
from dataload.formats.arrow_types import children, has_elements, has_members, is_list, with_members
from dataload.formats.base import as_data_error
from dataload.formats.hive_partitions import Constants
from dataload.formats.parquet_thrift import DAMAGE, Element, schema_of, text_of
from dataload.formats.schema import flatten
from dataload.runtime.cached_property import cached_property

ID = b"PARQUET:field_id"  # in the metadata of a field: its number
STORED = b"stored"  # in the metadata of a field: the names that files without numbers have for it, as JSON
TRAILER = 8  # bytes: the length of the footer and the magic
HIDDEN = "\0"  # begins the names of columns that the table has no more, where it has others of their names

By = Literal["id", "name"]


@dataclass(frozen=True, eq=False)
class TableColumns:
    """The columns of a table.

    Args:
        schema: The columns. The metadata of each field, at any depth, has its `ID` and `STORED`; without these, files
            call it as the table does.
        by: "id": files have columns by number, and those without numbers by the names in `STORED`. "name": by these.
        outside: The columns whose values no file has, such as the partition columns of Delta.
        defaults: The values of columns in files that lack them; they are null otherwise.
    """

    schema: pa.Schema
    by: By = "name"
    outside: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def flat(self) -> pa.Schema:
        """The columns as a dataset has them: members of structs are dotted."""
        plain = [pa.field(each.name, with_fields(each.type, _plain)) for each in self.schema]
        return flatten(pa.schema(plain))

    @cached_property
    def identities(self) -> dict[str, str]:
        """What tells each column of `flat` from the others in every version of the table, whatever it is called."""
        found: dict[str, str] = {}
        for each in self.schema:
            for name, key in self._leaves(each):
                found.setdefault(name, json.dumps(key))
        own = set(self.flat.names)
        return {name: key for name, key in found.items() if name in own}

    def called_in(self, other: TableColumns) -> dict[str, str]:
        """Return what another version of the table calls the columns that both have, by their names here."""
        names = {key: name for name, key in other.identities.items()}
        return {name: names[key] for name, key in self.identities.items() if key in names}

    def _leaves(self, each: pa.Field) -> Iterator[tuple[str, list[Any]]]:
        own = _id_of(each) if self.by == "id" else (_names_of(each) or [each.name])[0]
        if not has_members(each.type):
            yield each.name, [own]
            return
        for member in each.type:
            for name, key in self._leaves(member):
                yield f"{each.name}.{name}", [own, *key]

    def says(self, name: str) -> bool:
        """Return whether the table, or the partition of a file, has the values of a column that files lack."""
        return name in self.outside or name in self.defaults

    @cached_property
    def digest(self) -> str:
        """Hex digest of the columns, and of how files call them."""
        content = [*map(_content, self.schema), self.by, sorted(self.outside), sorted(self.defaults.items())]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16, person=b"table columns").hexdigest()


@dataclass(frozen=True)
class TableFile(Object):
    """A file of a table.

    Attributes:
        columns: The columns of the table.
        constants: The values that the table says of columns in the file's rows: those of its partition.
    """

    columns: TableColumns = field(compare=False, repr=False, kw_only=True)
    constants: Constants = field(default=(), compare=False, repr=False, kw_only=True)

    def value_of(self, name: str) -> Any:
        """Return the value of a column that the file lacks."""
        return dict(self.constants).get(name, self.columns.defaults.get(name))


MOST_KNOWN = 8
# By the columns of a table, the bytes of a few footers up to the end of their schema, and what was found in them. Most
# files of a table have the same.
_KNOWN: WeakKeyDictionary[TableColumns, list[tuple[bytes, _Names]]] = WeakKeyDictionary()


def with_table_names(packed: memoryview, obj: TableFile) -> tuple[memoryview, dict[str, str]]:
    """Return the footer of a file as its table names the columns, and how the file calls those that it calls otherwise.

    The latter by the table's own name of a column: a text that tells how it, and what is inside, is called.

    Raises:
        DataError: The footer cannot be read, or the table cannot know what the file's columns are.
    """
    footer, known = bytes(packed[:-TRAILER]), _KNOWN.setdefault(obj.columns, [])
    names = next((names for schema, names in known if footer.startswith(schema)), None)
    if names is None:
        with as_data_error(f"{obj.name} has a Parquet footer whose schema cannot be read", *DAMAGE):
            elements, end = schema_of(footer)
            names = _Names(elements, obj)
        known[:] = [(footer[:end], names), *known[: MOST_KNOWN - 1]]
    if not names.changed:
        return packed, {}
    return memoryview(names.footer(footer) + packed[-4:]), names.texts()


class _Names:
    """Finds the columns of a table in the schema of a file."""

    def __init__(self, elements: list[Element], obj: TableFile) -> None:
        self._elements = elements
        table = obj.columns
        self._table_by = table.by
        self.by_id = table.by == "id" and any(each.field_id is not None for each in self._elements)
        self.changed: dict[int, str] = {}  # by node, its new name
        self._owner: dict[int, str] = {}  # by node, the column of the table
        nodes = list(self._below(0))
        fields = [each for each in table.schema if each.name not in table.outside]
        if table.by == "id" and not self.by_id and nodes and not any(map(_names_of, fields)):
            raise DataError(
                f"{obj.name} has columns without field ids, and its table has no name mapping: set the table's "
                "property schema.name-mapping.default"
            )
        self._match(fields, nodes, set(table.schema.names))

    def footer(self, footer: bytes) -> bytes:
        """Return a footer of this schema with the new names, and its length."""
        parts, last = [], 0
        for node, name in sorted(self.changed.items()):
            place = self._elements[node].name
            parts += [footer[last : place.start], text_of(name)]
            last = place.stop
        whole = b"".join([*parts, footer[last:]])
        return whole + len(whole).to_bytes(4, "little")

    def texts(self) -> dict[str, str]:
        """Return how the file calls the columns that have a node with another name, by the table's name."""
        found: dict[str, list[list[str]]] = {}
        for node, name in sorted(self.changed.items()):
            if node in self._owner:
                found.setdefault(self._owner[node], []).append([self._elements[node].text, name])
        return {owner: json.dumps(pairs) for owner, pairs in found.items()}

    def _below(self, node: int) -> Iterator[int]:
        """Yield the nodes right below a group."""
        child = node + 1
        for _ in range(self._elements[node].children):
            yield child
            child = self._after(child)

    def _after(self, node: int) -> int:
        """Return the node that follows all those below one."""
        left = 1
        while left:
            left += self._elements[node].children - 1
            node += 1
        return node

    def _match(self, fields: Iterable[pa.Field], nodes: Sequence[int], taken: set[str], owner: str = "") -> None:
        """Give each node of a struct the name that the table has for it."""
        first = {self._called(self._elements[node]): node for node in reversed(nodes)}  # A name may come twice.
        found: dict[int, pa.Field] = {}
        for each in fields:
            if places := [first[called] for called in self._calls(each) if called in first]:
                found[min(places)] = each
        for node in nodes:
            name = self._elements[node].text
            if node in found:
                own = owner or found[node].name
                self._rename(node, found[node].name, own)
                self._inside(found[node].type, node, own)
            elif name in taken:
                self._rename(node, f"{HIDDEN}{node}", owner)

    def _rename(self, node: int, name: str, owner: str) -> None:
        if self._elements[node].text != name:
            self.changed[node] = name
            if owner:
                self._owner[node] = owner

    def _called(self, element: Element) -> int | str | None:
        """Return what a node is known by."""
        return element.field_id if self.by_id else element.text

    def _calls(self, each: pa.Field) -> list[int] | list[str]:
        """Return what the node of a column may be known by."""
        if self.by_id:
            return [] if (number := _id_of(each)) is None else [number]
        # A column without names in the mapping is in no file without numbers, whatever the file calls its columns.
        return _names_of(each) or ([each.name] if self._table_by == "name" else [])

    def _inside(self, kind: pa.DataType, node: int, owner: str) -> None:
        """Give the nodes inside a column the names that the table has for them."""
        if pa.types.is_struct(kind):
            self._match(list(kind), list(self._below(node)), {each.name for each in kind}, owner)
        elif pa.types.is_map(kind):
            for entries in self._below(node):
                for each, part in zip((kind.key_type, kind.item_type), self._below(entries), strict=False):
                    self._inside(each, part, owner)
        elif is_list(kind):
            for repeated in self._below(node):
                parts, name = list(self._below(repeated)), self._elements[repeated].text
                # Old writers repeat the element itself.
                is_element = len(parts) != 1 or name in ("array", f"{self._elements[node].text}_tuple")
                self._inside(kind.value_type, repeated if is_element else parts[0], owner)


def with_fields(kind: pa.DataType, changed: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """Return a type in which `changed` has replaced each field, at any depth."""

    def of(each: pa.Field) -> pa.Field:
        return changed(each).with_type(with_fields(each.type, changed))

    parts = children(kind) if pa.types.is_struct(kind) or has_elements(kind) else []
    return with_members(kind, [of(each) for each in parts]) if parts else kind


def _plain(each: pa.Field) -> pa.Field:
    return pa.field(each.name, each.type)


def _id_of(each: pa.Field) -> int | None:
    number = (each.metadata or {}).get(ID)
    return None if number is None else int(number)


def _names_of(each: pa.Field) -> list[str]:
    names = (each.metadata or {}).get(STORED)
    return [] if names is None else list(json.loads(names))


def _content(each: pa.Field) -> list[Any]:
    inner = map(_content, children(each.type))
    return [each.name, str(each.type), _id_of(each), _names_of(each), *inner]
