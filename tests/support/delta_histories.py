"""Random histories of Delta tables, some by deltalake and some, which it cannot write, by commits of their own."""

from __future__ import annotations

import json
import random
import struct
import uuid
import zlib
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyroaring import BitMap

WORDS = ["", "a", "b/c", "ü x", "%20", "=", None]
MAGIC = 1681511377  # of the bitmaps of Delta
DIGITS = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


class DeltaHistory:
    """A table that changes at random.

    Args:
        path: Its folder.
        seed: Chooses the changes.
        mapping: "none", "name" or "id".
        vectors: Whether deletion vectors delete rows.

    Attributes:
        told: The changes so far.
        since: The first version whose files are all there: a vacuum removes those of versions before it.
    """

    def __init__(self, path: Path, seed: int, mapping: str = "none", *, vectors: bool = False) -> None:
        self.path = path
        self.mapping = mapping
        self.draw = random.Random(seed)
        self._next = 0
        self.told: list[str] = []
        self.since = 0
        configuration = {} if mapping == "none" else {"delta.columnMapping.mode": mapping}
        self._vectors = vectors
        partitions = self.draw.choice([[], ["part"], ["part", "day"]])
        write_deltalake(str(path), self.rows(), partition_by=partitions, configuration=configuration)
        if vectors:  # Of two features, deltalake would name one in the protocol.
            features = ["deletionVectors", *(["columnMapping"] * (mapping != "none"))]
            protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
            self._commit([{"protocol": {**protocol, "readerFeatures": features, "writerFeatures": features}}])

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(str(self.path))

    def rows(self, count: int | None = None) -> pa.Table:
        """Return new rows of the columns that the table has now."""
        count = count or self.draw.randint(1, 20)
        ids = range(self._next, self._next + count)
        self._next += count
        columns = {
            "id": pa.array(ids, pa.int64()),
            "text": pa.array([self.draw.choice(WORDS) for _ in ids], pa.string()),
            "x": pa.array([self.draw.random() for _ in ids], pa.float64()),
            "part": pa.array([self.draw.choice(WORDS) or None for _ in ids], pa.string()),
            "day": pa.array([self.draw.choice([0, 1, 20_000, None]) for _ in ids], pa.date32()),
            "point": pa.array([self.draw.choice([None, {"a": each, "b": None}]) for each in ids], _POINT),
            "points": pa.array([[{"a": each, "b": "x"}] * self.draw.randint(0, 2) for each in ids], pa.list_(_POINT)),
        }
        whole = pa.table(columns)
        if not DeltaTable.is_deltatable(str(self.path)):
            return whole
        known = pa.schema(self.table.schema())
        kept = [
            _as(whole[each.name], each.type) if each.name in whole.column_names else pa.nulls(count, each.type)
            for each in known
        ]
        return pa.table(kept, schema=pa.schema([pa.field(each.name, each.type) for each in known]))

    def change(self) -> str:
        """Change the table in some way, rather in one that it has not been changed in. Return which."""
        possible = self.possible()
        name = self.draw.choice([each for each in possible if each not in self.told] or possible)
        getattr(self, name)()
        self.told.append(name)
        return name

    def possible(self) -> list[str]:
        """Return the changes that can be made to the table as it is."""
        found = ["append", "overwrite", "add", "add_member", "vacuum"]
        if self.table.version() > self.since:
            found += ["restore"]
        if self.mapping == "none":  # deltalake does these to no table with column mapping.
            found += ["compact", "repartition"]
        else:
            found += ["rename", "drop", "rename_member"]
        has_vectors = any("deletionVector" in add for add in self._adds().values())
        if has_vectors:  # which deltalake refuses to write again
            found = [each for each in found if each != "compact"]
        elif self._of("long"):
            found += ["delete", "merge", *(["update"] if self._of("double") else [])]
        return found + ["vector"] * self._vectors

    def append(self) -> None:
        write_deltalake(str(self.path), self.rows(), mode="append")

    def overwrite(self) -> None:
        write_deltalake(str(self.path), self.rows(), mode="overwrite")

    def delete(self) -> None:
        self.table.delete(f"{self._of('long')} % 5 = {self.draw.randint(0, 4)}")

    def _of(self, kind: str) -> str | None:
        """Return the name of the first column of a type, of which a rename may have made another one."""
        names = [each["name"] for each in self._schema()["fields"] if each["type"] == kind]
        return names[0] if names else None

    def update(self) -> None:
        changed = self._of("double")
        self.table.update(updates={changed: f"{changed} + 1"}, predicate=f"{self._of('long')} % 3 = 0")

    def merge(self) -> None:
        source, key = self.rows(), self._of("long")
        merger = self.table.merge(source, f"t.{key} = s.{key}", source_alias="s", target_alias="t")
        merger.when_not_matched_insert_all().execute()

    def add(self) -> None:
        if self.mapping != "none":  # deltalake adds none to a table with column mapping.
            self._add_mapped()
            return
        rows = self.rows()
        values = [(int, pa.int32()), (str, pa.string()), (Decimal, pa.decimal128(9, 2))]
        of, kind = self.draw.choice(values)
        added = pa.array([of(number) for number in range(len(rows))], kind)
        name = f"more{self.table.version()}"
        write_deltalake(str(self.path), rows.append_column(name, added), mode="append", schema_mode="merge")

    def _add_mapped(self) -> None:
        schema = self._schema()
        names = {each["name"] for each in schema["fields"]}
        number = 100 + self.table.version()
        mapped = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{uuid.uuid4()}"}
        again = [each for each in ("x", "text", "id", "point") if each not in names]  # was dropped or renamed
        name = self.draw.choice(again or [f"more{number}"])
        field = {"name": name, "type": self.draw.choice(["integer", "string", "date"]), "nullable": True}
        self._commit_schema({**schema, "fields": [*schema["fields"], {**field, "metadata": mapped}]})
        self.append()

    def add_member(self) -> None:
        """Add a member to a struct, or to those in a list."""
        schema = self._schema()
        kinds = [each["type"] for each in schema["fields"] if isinstance(each["type"], dict)]
        inner = [kind.get("elementType", kind) for kind in kinds]
        number = 500 + self.table.version()
        mapped = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{uuid.uuid4()}"}
        if structs := [each for each in inner if isinstance(each, dict) and "fields" in each]:
            field = {"name": f"m{number}", "type": self.draw.choice(["integer", "string"]), "nullable": True}
            fields = self.draw.choice(structs)["fields"]
            fields.append({**field, "metadata": mapped if self.mapping != "none" else {}})
            self._commit_schema(schema)
        self.append()

    def restore(self) -> None:
        """Bring back the files of an earlier version. Its columns do not come back."""
        self.table.restore(self.draw.randint(self.since, self.table.version() - 1))

    def compact(self) -> None:
        self.table.optimize.compact()

    def repartition(self) -> None:
        rows = self.rows()
        write_deltalake(str(self.path), rows, mode="overwrite", schema_mode="overwrite", partition_by=["part"])

    def vacuum(self) -> None:
        self.table.vacuum(0, dry_run=False, enforce_retention_duration=False)
        self.since = self.table.version()

    def rename(self) -> None:
        """Rename a column, or let two change their names. deltalake cannot read a table that renames a partition."""
        schema, partitions = self._schema(), self.table.metadata().partition_columns
        names = [each["name"] for each in schema["fields"] if each["name"] not in partitions]
        old = self.draw.choice(names)
        new = self.draw.choice([*(name for name in names if name != old), "renamed"])
        for field in schema["fields"]:
            field["name"] = {old: new, new: old}.get(field["name"], field["name"])
        self._commit_schema(schema)

    def rename_member(self) -> None:
        schema = self._schema()
        for field in schema["fields"]:
            kind = field["type"]
            inner = kind.get("elementType", kind) if isinstance(kind, dict) else None
            if isinstance(inner, dict) and self.draw.random() < 0.7:
                names = [each["name"] for each in inner["fields"]]
                for each, name in zip(inner["fields"], self.draw.sample(names, len(names)), strict=True):
                    each["name"] = name
        self._commit_schema(schema)

    def drop(self) -> None:
        schema = self._schema()
        partitions = self.table.metadata().partition_columns
        dropped = self.draw.choice([each["name"] for each in schema["fields"][1:] if each["name"] not in partitions])
        schema["fields"] = [each for each in schema["fields"] if each["name"] != dropped]
        self._commit_schema(schema)

    def vector(self) -> None:
        """Delete rows of a file by a deletion vector, in the log or in a file."""
        adds = self._adds()
        path = self.draw.choice(sorted(adds))
        add = adds[path]
        rows = json.loads(add["stats"])["numRecords"]
        deleted = set(self.draw.sample(range(rows), self.draw.randint(1, max(1, rows // 2))))
        kinds = ["i", "u", "p"]
        vector = deletion_vector(self.path, deleted, self.draw.choice(kinds))
        remove = {"path": path, "deletionTimestamp": 1, "dataChange": True}
        if "deletionVector" in add:
            remove["deletionVector"] = add["deletionVector"]
        self._commit([{"remove": remove}, {"add": {**add, "deletionVector": vector}}])

    def _adds(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for commit in sorted((self.path / "_delta_log").glob("*.json")):
            lines = [json.loads(line) for line in commit.read_text().splitlines()]
            for line in lines:
                if "remove" in line:
                    found.pop(line["remove"]["path"], None)
            for line in lines:
                if "add" in line:
                    found[line["add"]["path"]] = line["add"]
        return found

    def _actions(self) -> list[dict[str, Any]]:
        commits = sorted((self.path / "_delta_log").glob("*.json"))
        return [json.loads(line) for commit in commits for line in commit.read_text().splitlines()]

    def _schema(self) -> dict[str, Any]:
        return json.loads(self.table.schema().to_json())

    def _commit_schema(self, schema: dict[str, Any]) -> None:
        latest = [action["metaData"] for action in self._actions() if "metaData" in action][-1]
        self._commit([{"metaData": {**latest, "schemaString": json.dumps(schema)}}])

    def _commit(self, actions: Iterable[dict[str, Any]]) -> None:
        version = self.table.version() + 1
        text = "\n".join(map(json.dumps, actions))
        (self.path / "_delta_log" / f"{version:020}.json").write_text(text)
        self.table  # noqa: B018 (raises if it cannot be read)


_POINT = pa.struct([("a", pa.int64()), ("b", pa.string())])


def _as(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | pa.Array:
    """Return values as those of a column of a type; nulls if they are none."""
    if pa.types.is_nested(kind) and values.type != kind:
        return pa.nulls(len(values), kind)
    try:
        return values.cast(kind)
    except pa.ArrowException:
        return pa.nulls(len(values), kind)


def deletion_vector(folder: Path, rows: Iterable[int], kind: str) -> dict[str, Any]:
    """Return the descriptor of a deletion vector: in the log ("i"), or in a file ("u" and "p")."""
    rows = sorted(set(rows))
    keys = sorted({row >> 32 for row in rows})
    maps = [BitMap([row & 0xFFFFFFFF for row in rows if row >> 32 == key]).serialize() for key in keys]
    parts = [struct.pack("<I", key) + data for key, data in zip(keys, maps, strict=True)]
    data = struct.pack("<iq", MAGIC, len(keys)) + b"".join(parts)
    descriptor = {"sizeInBytes": len(data), "cardinality": len(rows)}
    if kind == "i":
        padded = data + b"\0" * (-len(data) % 4)
        return {"storageType": "i", "pathOrInlineDv": _base85(padded), **descriptor}
    name = uuid.uuid4()
    path = folder / f"deletion_vector_{name}.bin"
    path.write_bytes(b"\1" + struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data)))
    place = _base85(name.bytes) if kind == "u" else path.as_uri()
    return {"storageType": kind, "pathOrInlineDv": place, "offset": 1, **descriptor}


def _base85(data: bytes) -> str:
    """Return bytes as Z85 has them."""
    found = bytearray()
    for start in range(0, len(data), 4):
        value = int.from_bytes(data[start : start + 4], "big")
        found += bytes(DIGITS[value // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return found.decode()
