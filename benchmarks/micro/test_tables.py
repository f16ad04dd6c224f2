"""Opening a table beside what its own library takes to plan a scan of it, in CPU seconds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, make_dataset

COLUMNS, ROWS = 8, 100  # of a file
SHAPES = {"2k files": (2000, 1), "10k files": (10_000, 1), "1k versions": (2000, 1000)}  # files, versions


def rows() -> pa.Table:
    values = np.random.default_rng(0).random((ROWS, COLUMNS))
    return pa.table({f"x{number}": values[:, number] for number in range(COLUMNS)})


class Delta:
    """A table whose log is written by hand: deltalake would take minutes."""

    def __init__(self, folder: Path, files: int, versions: int) -> None:
        from deltalake import write_deltalake

        self.folder = folder
        write_deltalake(folder, rows())
        self._commit = (folder / "_delta_log" / f"{0:020}.json").read_text().splitlines()
        for _ in range(versions):
            self.append(files // versions)

    def append(self, files: int) -> None:
        [add] = [json.loads(line)["add"] for line in self._commit if '"add"' in line]
        lines, first, version = [], len(list(self.folder.iterdir())), len(list((self.folder / "_delta_log").iterdir()))
        for number in range(first, first + files):
            name = f"part-{number:06}.parquet"
            shutil.copyfile(self.folder / add["path"], self.folder / name)
            lines.append(json.dumps({"add": {**add, "path": name}}))
        (self.folder / "_delta_log" / f"{version:020}.json").write_text("\n".join(lines))

    def source(self) -> Any:
        return f"delta+{self.folder}"

    def files(self) -> int:
        from deltalake import DeltaTable

        return len(DeltaTable(self.folder).file_uris())

    def plan(self) -> int:
        from deltalake import DeltaTable

        return len(DeltaTable(self.folder).to_pyarrow_dataset().schema)


class Iceberg:
    """A table of a catalog in SQLite."""

    def __init__(self, folder: Path, files: int, versions: int) -> None:
        from pyiceberg.catalog import load_catalog

        folder.mkdir()
        self.folder = folder
        self._properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        catalog = load_catalog("bench", **self._properties)
        catalog.create_namespace("space")
        catalog.create_table("space.table", rows().schema)
        for _ in range(versions):
            self.append(files // versions)

    def append(self, files: int) -> None:
        pq.write_table(rows(), self.folder / "template.parquet")
        paths, first = [], len(list(self.folder.iterdir()))
        for number in range(first, first + files):
            paths.append(f"{self.folder}/part-{number:06}.parquet")
            shutil.copyfile(self.folder / "template.parquet", paths[-1])
        self.source().add_files(paths, check_duplicate_files=False)

    def source(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog("bench", **self._properties).load_table("space.table")

    def files(self) -> int:
        return len(self.source().inspect.files())

    def plan(self) -> int:
        return len(list(self.source().scan().plan_files()))


@contextmanager
def seconds(of: dict[str, float], name: str) -> Iterator[None]:
    began = process_time()
    yield
    of[name] = process_time() - began


def opened(table: Any, cache: CacheConfig, files: int) -> dict[str, float]:
    """Open the first version of a table, the same one again, and a newer one, beside a plan of each."""
    found: dict[str, float] = {}
    table.plan()  # imports
    table.files()
    with seconds(found, "the library's plan of a scan"):
        table.plan()
    with seconds(found, "its list of files alone"):
        table.files()
    with seconds(found, "first sight"):
        dataset = make_dataset(table.source(), cache=cache)
    with seconds(found, "warm"):
        make_dataset(table.source(), cache=cache)
    table.append(files)
    with seconds(found, "a newer version"):
        make_dataset(table.source(), cache=cache)
    table.append(files)
    with seconds(found, "refresh"):
        dataset.refresh()
    return found


def newer(table: Any, cache: CacheConfig) -> float:
    """Open a newer version in a process that has not read the table."""
    found: dict[str, float] = {}
    make_dataset(table.folder / "first.parquet", cache=cache)  # imports
    table.plan()
    with seconds(found, "open"):
        make_dataset(table.source(), cache=cache)
    return found["open"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [Delta, Iceberg])
def test_opening_a_table(
    kind: Any, shape: str, scaled: Any, tmp_path: Path, in_process: Callable[..., Any], record_property: Any
) -> None:
    files, versions = map(scaled, SHAPES[shape])
    table = kind(tmp_path / "table", files, versions)
    cache = CacheConfig(str(tmp_path / "cache"), "4GB")
    found, _ = in_process(opened, table, cache, max(1, files // 100))
    pq.write_table(rows(), table.folder / "first.parquet")
    table.append(max(1, files // 100))
    found["a newer version in a new process"], _ = in_process(newer, table, cache)
    plan = found["the library's plan of a scan"]
    for name, value in found.items():
        record_property(name, f"{value:.3f} s ({value / plan:.1f} x)")
