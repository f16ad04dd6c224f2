"""Random histories of Iceberg tables, some by pyiceberg, and delete files, which it cannot write."""

from __future__ import annotations

import json
import random
import struct
import uuid
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, TruncateTransform
from pyiceberg.types import (
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
)
from pyroaring import BitMap

WORDS = ["", "a", "b/c", "ü x", "%20", None]
WIDER = {IntegerType(): LongType(), FloatType(): DoubleType(), DecimalType(7, 2): DecimalType(12, 2)}
DELETE_SCHEMA = pa.schema(
    [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": "2147483546"}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": "2147483545"}),
    ]
)


def catalog_in(folder: Path, warehouse: str | None = None, **properties: str) -> SqlCatalog:
    """Return a new catalog in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    place = warehouse or f"file://{folder}/warehouse"
    catalog = SqlCatalog("lake", uri=f"sqlite:///{folder}/catalog.db", warehouse=place, **properties)
    catalog.create_namespace("space")
    return catalog


class IcebergHistory:
    """A table that changes at random.

    Args:
        folder: Where its catalog and its files are.
        seed: Chooses the changes.

    Attributes:
        told: The changes so far.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self._next = 0
        self.told: list[str] = []
        self.catalog = catalog_in(folder)
        self.folder = folder
        point = StructType(NestedField(8, "a", IntegerType(), False), NestedField(9, "b", StringType(), False))
        inner = StructType(NestedField(11, "a", IntegerType(), False), NestedField(12, "b", StringType(), False))
        fields = (
            NestedField(1, "id", IntegerType(), False),
            NestedField(2, "text", StringType(), False),
            NestedField(3, "x", FloatType(), False),
            NestedField(4, "day", DateType(), False),
            NestedField(5, "price", DecimalType(7, 2), False),
            NestedField(6, "point", point, False),
            NestedField(7, "points", ListType(10, inner, False), False),
        )
        self.table = self.catalog.create_table("space.table", Schema(*fields), properties={"format-version": "2"})
        self.table.append(self.rows())

    def rows(self) -> pa.Table:
        """Return new rows of the columns that the table has now."""
        count = self.draw.randint(1, 20)
        ids = range(self._next, self._next + count)
        self._next += count
        schema = self.table.schema().as_arrow()
        return pa.table(
            [pa.array([self._value(each.type, n) for n in ids], each.type) for each in schema], schema=schema
        )

    def _value(self, kind: pa.DataType, number: int) -> Any:
        if pa.types.is_struct(kind):
            return None if self.draw.random() < 0.3 else {each.name: self._value(each.type, number) for each in kind}
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return [self._value(kind.value_type, number) for _ in range(self.draw.randint(0, 2))]
        if pa.types.is_date(kind):
            return pa.scalar(self.draw.choice([0, 1, 20_000, None]), kind).as_py()
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return self.draw.choice(WORDS)
        if self.draw.random() < 0.1:
            return None
        return Decimal(number) if pa.types.is_decimal(kind) else float(number) if pa.types.is_floating(kind) else number

    def change(self) -> str:
        """Change the table in some way, rather in one that it has not been changed in. Return which."""
        possible = self.possible()
        name = self.draw.choice([each for each in possible if each not in self.told] or possible)
        getattr(self, name)()
        self.table = self.catalog.load_table("space.table")
        self.told.append(name)
        return name

    def possible(self) -> list[str]:
        """Return the changes that can be made to the table as it is."""
        found, fields = ["append", "overwrite", "delete", "rename"], self.table.schema().fields
        choices = {
            "upsert": isinstance(fields[0].field_type, IntegerType | LongType),
            "add": self._addable(),
            "widen": self._widenable(),
            "rename_member": self._structs(),
            "add_member": self._growable(),
            "roll_back": self._expirable(),
            "drop": self._droppable(),
            "repartition": self._partitionable(),
            "positions": self._tasks(),
            "vector": any(not task.delete_files for task in self._tasks()),
            "expire": self._expirable(),
        }
        return [*found, *(name for name, choice in choices.items() if choice)]

    def append(self) -> None:
        self.table.append(self.rows())

    def overwrite(self) -> None:
        self.table.overwrite(self.rows())

    def delete(self) -> None:
        first = self.table.schema().fields[0].name
        with catch_warnings(action="ignore"):  # It may delete nothing.
            self.table.delete(f"{first} > {self.draw.randint(0, self._next)} and {first} < {self._next - 3}")

    def upsert(self) -> None:
        first = self.table.schema().fields[0].name
        rows = self.rows()
        self.table.upsert(rows.filter(rows[first].is_valid()), join_cols=[first])

    def expire(self) -> None:
        """Remove the oldest snapshot, and with it the files that no other one has. pyiceberg leaves those."""
        self.table.maintenance.expire_snapshots().by_id(self._expirable()[0]).commit()

    def _expirable(self) -> list[int]:
        found = [each.snapshot_id for each in self.table.snapshots()]
        return [each for each in found if each != self.table.current_snapshot().snapshot_id]

    def roll_back(self) -> None:
        """Bring back another snapshot. Its columns do not come back."""
        other = self.draw.choice(self._expirable())
        self.table.manage_snapshots().set_current_snapshot(other).commit()

    def _addable(self) -> list[str]:
        return sorted({"id", "text", "x", "more", "day"} - {each.name for each in self.table.schema().fields})

    def add(self) -> None:
        kind = self.draw.choice([IntegerType(), StringType(), DateType()])
        with self.table.update_schema() as update:
            update.add_column(self.draw.choice(self._addable()), kind)

    def _widenable(self) -> list[NestedField]:
        return [each for each in self.table.schema().fields if each.field_type in WIDER]

    def widen(self) -> None:
        with self.table.update_schema() as update:
            each = self.draw.choice(self._widenable())
            update.update_column(each.name, WIDER[each.field_type])

    def rename(self) -> None:
        fields = [each.name for each in self.table.schema().fields]
        first, second = self.draw.sample(fields, 2)
        self._rename(first, "between")
        self._rename(second, first)
        self._rename("between", second)

    def _rename(self, old: str, new: str) -> None:
        with self.catalog.load_table("space.table").update_schema() as update:
            update.rename_column(old, new)

    def _structs(self) -> list[str]:
        """Return the structs, and the elements of lists, that have two members."""
        kinds = {each.name: each.field_type for each in self.table.schema().fields}
        kinds = {
            f"{name}.element" if isinstance(kind, ListType) else name: getattr(kind, "element_type", kind)
            for name, kind in kinds.items()
        }
        return [
            name
            for name, kind in kinds.items()
            if isinstance(kind, StructType) and {each.name for each in kind.fields} == {"a", "b"}
        ]

    def rename_member(self) -> None:
        place = self.draw.choice(self._structs())
        self._rename(f"{place}.a", "between")
        self._rename(f"{place}.b", "a")
        self._rename(f"{place}.between", "b")

    def _growable(self) -> list[tuple[str, str]]:
        """Return structs, and lists of them, that lack a member, and its name."""
        kinds = {
            each.name: getattr(each.field_type, "element_type", each.field_type) for each in self.table.schema().fields
        }
        return [
            (name, new)
            for name, kind in kinds.items()
            for new in ("b", "c", "d")
            if isinstance(kind, StructType) and new not in {each.name for each in kind.fields}
        ]

    def add_member(self) -> None:
        with self.table.update_schema() as update:
            update.add_column(self.draw.choice(self._growable()), self.draw.choice([IntegerType(), StringType()]))

    def _partitions(self) -> set[int]:
        """Return the ids of the columns by which the table was ever partitioned."""
        return {each.source_id for spec in self.table.specs().values() for each in spec.fields}

    def _droppable(self) -> list[str]:
        fields = self.table.schema().fields[1:]
        names = [each.name for each in fields if each.field_id not in self._partitions()]
        return names + [f"{name}.b" for name in self._structs() if name in names]

    def drop(self) -> None:
        with self.table.update_schema() as update:
            update.delete_column(self.draw.choice(self._droppable()))

    def _partitionable(self) -> list[str]:
        fields = self.table.schema().fields
        return [
            each.name for each in fields if each.field_type.is_primitive and each.field_id not in self._partitions()
        ]

    def repartition(self) -> None:
        name = self.draw.choice(self._partitionable())
        kind = self.table.schema().find_type(name)
        transforms = [IdentityTransform(), BucketTransform(3)]
        transforms += [DayTransform()] if isinstance(kind, DateType) else [TruncateTransform(2)]
        fits = [each for each in transforms if each.can_transform(kind)]
        with self.table.update_spec() as update:
            update.add_field(name, self.draw.choice(fits), f"part_{uuid.uuid4().hex[:6]}")

    def _tasks(self) -> list[Any]:
        """Return the files of the current partition spec: pyiceberg adds delete files of it alone."""
        return [task for task in self.table.scan().plan_files() if task.file.spec_id == self.table.spec().spec_id]

    def positions(self) -> None:
        """Delete rows of some files by a file of position deletes."""
        target = self.draw.choice([task.file for task in self._tasks()])
        rows = sorted(
            self.draw.sample(range(target.record_count), self.draw.randint(1, max(1, target.record_count // 2)))
        )
        path = self.folder / f"{uuid.uuid4()}-deletes.parquet"
        columns = {"file_path": [target.file_path] * len(rows), "pos": rows}
        pq.write_table(pa.table(columns, schema=DELETE_SCHEMA), path)
        add_deletes(self.table, path, target, FileFormat.PARQUET, len(rows))

    def vector(self) -> None:
        """Delete rows of a file by a deletion vector."""
        tasks = [task for task in self._tasks() if not task.delete_files]
        target = self.draw.choice(tasks).file
        rows = self.draw.sample(range(target.record_count), self.draw.randint(1, max(1, target.record_count // 2)))
        path = self.folder / f"{uuid.uuid4()}.puffin"
        path.write_bytes(puffin({target.file_path: rows}))
        add_deletes(self.table, path, target, FileFormat.PUFFIN, len(rows))


def add_deletes(table: Any, path: Path | str, target: DataFile, kind: FileFormat, count: int, **others: Any) -> None:
    """Add a delete file for a data file to a table. pyiceberg lists it in a manifest of data files."""
    url = path if isinstance(path, str) else f"file://{path}"
    arguments = {"content": DataFileContent.POSITION_DELETES, **others}
    file = DataFile.from_args(
        file_path=url,
        file_format=kind,
        partition=target.partition,
        record_count=count,
        file_size_in_bytes=1,
        _table_format_version=2,
        **arguments,
    )
    file.spec_id = target.spec_id
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.append_data_file(file)


def puffin(vectors: dict[str, list[int]]) -> bytes:
    """Return a Puffin file of deletion vectors: the deleted rows of each file."""
    body, blobs = b"PFA1", []
    for file, rows in vectors.items():
        content = bytes.fromhex("d1d33964") + struct.pack("<q", 1) + struct.pack("<I", 0) + BitMap(rows).serialize()
        blob = struct.pack(">I", len(content)) + content + struct.pack(">I", zlib.crc32(content))
        properties = {"referenced-data-file": file, "cardinality": str(len(rows))}
        place = {"offset": len(body), "length": len(blob), "snapshot-id": -1, "sequence-number": -1}
        blobs.append({"type": "deletion-vector-v1", "fields": [2147483546], **place, "properties": properties})
        body += blob
    footer = json.dumps({"blobs": blobs, "properties": {}}).encode()
    return body + b"PFA1" + footer + struct.pack("<i", len(footer)) + b"\0\0\0\0" + b"PFA1"
