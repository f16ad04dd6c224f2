"""Data that grows and loses rows while it is read: folders, Delta and Iceberg tables of rows with a number each."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataload.catalog import inventory_store

GROUP = 7  # rows of a row group of a folder


def as_a_new_process() -> None:
    """Forget what this process knows of earlier data."""
    inventory_store._kept.clear()


class Growing:
    """Rows with the numbers 0, 1, 2, …, of which some are deleted.

    Attributes:
        alive: The numbers of the rows that are there now.
    """

    def __init__(self, folder: Path, first: int = 0, count: int = 40) -> None:
        self.folder = folder
        self.alive: set[int] = set()
        self._next = first
        self._create(self._rows(count))

    def source(self) -> Any:
        """Return the source as `make_dataset` takes it."""
        raise NotImplementedError

    def change(self, draw: random.Random) -> None:
        """Change the rows in some way, and add some."""
        draw.choice(self.changes())(draw)
        self.append(draw.randint(1, 12))

    def changes(self) -> list[Callable[[random.Random], object]]:
        """Return the changes that delete rows, or write them again."""
        raise NotImplementedError

    def append(self, count: int) -> None:
        """Add rows."""
        raise NotImplementedError

    def _create(self, rows: pa.Table) -> None:
        raise NotImplementedError

    def _rows(self, count: int) -> pa.Table:
        numbers = range(self._next, self._next + count)
        self._next += count
        self.alive.update(numbers)
        return pa.table({"id": pa.array(numbers, pa.int64()), "text": [f"row {number}" for number in numbers]})

    def _some(self, draw: random.Random) -> list[int]:
        return draw.sample(sorted(self.alive), max(1, len(self.alive) // 6))


class GrowingFolder(Growing):
    """Files in a folder."""

    def source(self) -> str:
        return str(self.folder)

    def changes(self) -> list[Callable[[random.Random], object]]:
        return [self.remove, self.replace, lambda _: None]

    def append(self, count: int) -> None:
        self._write(f"{len(list(self.folder.iterdir())):03}-{uuid.uuid4().hex[:4]}.parquet", self._rows(count))

    def remove(self, draw: random.Random) -> None:
        """Remove a file, unless it is the only one."""
        if len(files := sorted(self.folder.iterdir())) > 1:
            gone = draw.choice(files)
            self.alive -= set(pq.read_table(gone)["id"].to_pylist())
            gone.unlink()

    def replace(self, draw: random.Random) -> None:
        """Replace a file by one of as many other rows."""
        file = draw.choice(sorted(self.folder.iterdir()))
        before = pq.read_table(file)["id"].to_pylist()
        self.alive -= set(before)
        self._write(file.name, self._rows(len(before)))

    def _create(self, rows: pa.Table) -> None:
        self.folder.mkdir(parents=True)
        self._write("000.parquet", rows.slice(0, len(rows) // 2))
        self._write("001.parquet", rows.slice(len(rows) // 2))

    def _write(self, name: str, rows: pa.Table) -> None:
        draft = self.folder.with_name(f"{self.folder.name}.draft")
        pq.write_table(rows, draft, row_group_size=GROUP)
        draft.rename(self.folder / name)


class GrowingDelta(Growing):
    """A Delta table."""

    def source(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(str(self.folder))

    def changes(self) -> list[Callable[[random.Random], object]]:
        return [self.vector, self.rewrite, self.restore, lambda _: self.source().optimize.compact()]

    def append(self, count: int) -> None:
        from deltalake import write_deltalake

        write_deltalake(str(self.folder), self._rows(count), mode="append")

    def vector(self, draw: random.Random) -> None:
        """Delete rows of a file by a deletion vector, if none has one already."""
        from delta_histories import deletion_vector

        adds = self._adds()
        name = draw.choice(sorted(adds))
        if "deletionVector" in adds[name]:
            return
        numbers = pq.read_table(self.folder / name)["id"].to_pylist()
        rows = draw.sample(range(len(numbers)), len(numbers) // 3)
        self.alive -= {numbers[row] for row in rows}
        remove = {"path": name, "deletionTimestamp": 1, "dataChange": True}
        vector = deletion_vector(self.folder, rows, "i")
        self._commit([{"remove": remove}, {"add": {**adds[name], "deletionVector": vector}}])

    def rewrite(self, draw: random.Random) -> None:
        """Delete rows as deltalake does: it writes the others of their files again."""
        if any("deletionVector" in add for add in self._adds().values()):
            return  # which deltalake would not apply
        gone = self._some(draw)
        self.alive -= set(gone)
        self.source().delete(f"id in ({', '.join(map(str, gone))})")

    def restore(self, draw: random.Random) -> None:
        """Bring back an earlier version, and with it files and rows that were deleted."""
        if (newest := self.source().version()) < 2:
            return
        self.source().restore(draw.randint(1, newest - 1))
        self.alive = set(pa.table(self.source().scan())["id"].to_pylist())

    def _create(self, rows: pa.Table) -> None:
        from deltalake import write_deltalake

        write_deltalake(str(self.folder), rows.slice(0, len(rows) // 2))
        write_deltalake(str(self.folder), rows.slice(len(rows) // 2), mode="append")

    def _adds(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for commit in sorted((self.folder / "_delta_log").glob("*.json")):
            lines = [json.loads(line) for line in commit.read_text().splitlines()]
            for line in lines:
                found.pop(line.get("remove", {}).get("path"), None)
            found |= {line["add"]["path"]: line["add"] for line in lines if "add" in line}
        return found

    def _commit(self, actions: list[dict[str, Any]]) -> None:
        features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
        protocol = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}
        version = self.source().version() + 1
        text = "\n".join(map(json.dumps, [protocol, *actions]))
        (self.folder / "_delta_log" / f"{version:020}.json").write_text(text)


class GrowingIceberg(Growing):
    """An Iceberg table."""

    def source(self) -> Any:
        return self._catalog.load_table("space.table")

    def changes(self) -> list[Callable[[random.Random], object]]:
        return [self.positions, self.rewrite, self.roll_back]

    def append(self, count: int) -> None:
        self.source().append(self._rows(count))

    def positions(self, draw: random.Random) -> None:
        """Delete rows of a file by a file of positions."""
        from iceberg_histories import DELETE_SCHEMA, add_deletes
        from pyiceberg.manifest import FileFormat

        table = self.source()
        target = draw.choice([task.file for task in table.scan().plan_files()])
        numbers = pq.read_table(target.file_path.removeprefix("file://"))["id"].to_pylist()
        rows = sorted(draw.sample(range(len(numbers)), len(numbers) // 3))
        self.alive -= {numbers[row] for row in rows}
        path = self.folder / f"{uuid.uuid4()}-deletes.parquet"
        columns = {"file_path": [target.file_path] * len(rows), "pos": rows}
        pq.write_table(pa.table(columns, schema=DELETE_SCHEMA), path)
        add_deletes(table, path, target, FileFormat.PARQUET, len(rows))

    def rewrite(self, draw: random.Random) -> None:
        """Delete rows as pyiceberg does: it writes the others of their files again, and would lose older deletes."""
        if any(task.delete_files for task in self.source().scan().plan_files()):
            return
        gone = self._some(draw)
        self.alive -= set(gone)
        self.source().delete(f"id in ({', '.join(map(str, gone))})")

    def roll_back(self, draw: random.Random) -> None:
        """Bring back an earlier snapshot, and with it files and rows that were deleted."""
        table = self.source()
        earlier = [each.snapshot_id for each in table.snapshots()[1:]]  # The first has half of the rows.
        table.manage_snapshots().set_current_snapshot(draw.choice(earlier)).commit()
        self.alive = set(self.source().scan().to_arrow()["id"].to_pylist())

    def _create(self, rows: pa.Table) -> None:
        from iceberg_histories import catalog_in

        self._catalog = catalog_in(self.folder)
        table = self._catalog.create_table("space.table", rows.schema)
        table.append(rows.slice(0, len(rows) // 2))
        table.append(rows.slice(len(rows) // 2))


KINDS = {"folder": GrowingFolder, "delta": GrowingDelta, "iceberg": GrowingIceberg}
