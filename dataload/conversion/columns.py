"""A source of Parquet, Arrow IPC or Feather files: `pyarrow.dataset` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.conversion.source import Files, Part
from dataload.errors import DataError
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.redact import redacted

PART_BYTES = 64 << 20
BATCH_ROWS = 4096


class ColumnFiles:
    """Parquet or Arrow files, whose folders may be named key=value.

    Args:
        files: The files.
        format: The format of all of them, as pyarrow.dataset calls it: "parquet" or "ipc".

    Raises:
        DataError: A file cannot be read, or has other types of a column than the others.
    """

    def __init__(self, files: Files, format: str) -> None:  # noqa: A002 (as pyarrow calls it)
        from pyarrow import dataset

        sizes = {each.path: each.size for each in files.objects.values()}
        first = next(iter(files.objects.values()))
        with reading(first.name):
            found = dataset.dataset(
                [*sizes],
                filesystem=files.for_arrow,
                format=format,
                partitioning=dataset.partitioning(flavor="hive"),
                partition_base_dir=files.folder,
            )
        fragments = list(found.get_fragments())
        schemas = DaemonExecutor(IN_FLIGHT, "dataload-footers").map(_schema, fragments)
        self.schema = found.schema
        for fragment, schema in zip(fragments, schemas, strict=True):
            with reading(fragment.path):
                self.schema = pa.unify_schemas([self.schema, schema], promote_options="permissive")
        self.schema = self.schema.with_metadata(schemas[0].metadata)
        units = [unit for each in fragments for unit in _units(each, sizes[each.path])]
        self._fragments = [fragment for fragment, _ in units]
        self.parts = [Part(redacted(fragment.path), share) for fragment, share in units]

    def read(self, part: int) -> Iterator[pa.Table]:
        with reading(self.parts[part].name):
            batches = self._fragments[part].to_batches(
                schema=self.schema, batch_size=BATCH_ROWS, batch_readahead=2, fragment_readahead=1
            )
            for batch in batches:
                yield pa.Table.from_batches([batch], self.schema)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise errors of pyarrow as a DataError that names the file."""
    try:
        yield
    except pa.ArrowException as error:
        fix = "write it again, or leave it out"
        raise DataError(f"{redacted(name)} cannot be read: {redacted(error)}: {fix}") from error


def _schema(fragment: Any) -> pa.Schema:
    with reading(fragment.path):
        return fragment.physical_schema


def _units(fragment: Any, size: int) -> Iterator[tuple[Any, int]]:
    """Yield parts of a file with their share of its bytes: runs of row groups of Parquet, or the whole file."""
    groups = getattr(fragment, "row_groups", None)
    if not groups:
        yield fragment, size
        return
    total = sum(group.total_byte_size for group in groups) or 1
    run: list[int] = []
    held = 0
    for group in groups:
        run.append(group.id)
        held += group.total_byte_size
        if held >= PART_BYTES or group is groups[-1]:
            yield fragment.subset(row_group_ids=run), size * held // total
            run, held = [], 0
