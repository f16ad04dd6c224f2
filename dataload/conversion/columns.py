"""Sources of Parquet, and of Arrow IPC or Feather: `pyarrow.dataset` reads files, and `pyarrow.ipc` streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT, Object
from dataload.conversion.source import Files, Part
from dataload.errors import DataError, DataloadError
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.redact import redacted

PART_BYTES = 64 << 20
BATCH_ROWS = 4096
STATE = "state.json"  # of Hugging Face


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


class ArrowStreams:
    """Arrow IPC streams, as Hugging Face's `save_to_disk` writes them, which have no footer.

    Args:
        files: The files, in order.

    Raises:
        DataError: A file cannot be read, or has other columns than the others.
    """

    def __init__(self, files: Files) -> None:
        self._files, self._objects = files, list(files.objects.values())
        self.parts = [Part(each.name, each.size) for each in self._objects]
        schemas = DaemonExecutor(IN_FLIGHT, "dataload-footers").map(self._schema, self._objects)
        self.schema = schemas[0]
        for each, schema in zip(self._objects, schemas, strict=True):
            if not schema.equals(self.schema):
                raise DataError(f"{each.name} has other columns than {self._objects[0].name}: convert it on its own")

    def read(self, part: int) -> Iterator[pa.Table]:
        each = self._objects[part]
        with reading(each.name), self._files.open(each) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                yield pa.Table.from_batches([batch], self.schema)

    def _schema(self, each: Object) -> pa.Schema:
        with reading(each.name), self._files.open(each) as file, pa.ipc.open_stream(file) as stream:
            return stream.schema


def arrow(files: Files) -> ColumnFiles | ArrowStreams:
    """Return a source of Arrow files, or of streams if the first one is a stream."""
    with files.open(next(iter(files.objects.values()))) as file:
        is_file = file.read(6) in (b"ARROW1", b"FEA1")
    return ColumnFiles(files, "ipc") if is_file else ArrowStreams(files)


def saved_to_disk(files: Files) -> ArrowStreams:
    """Return a source of what Hugging Face's `save_to_disk` has written.

    Raises:
        DataError: The folder lacks a file, or an older release has written it with an index of rows.
    """
    try:
        state = json.loads(files.content(files.objects[STATE]))
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{files.objects[STATE].name} does not list the files: save the dataset again") from error
    if state.get("_indices_data_files"):
        raise DataError(f"{files.url} has an index of its rows: load it, and save dataset.flatten_indices()")
    if lost := [name for name in names if name not in files.objects]:
        raise DataError(f"{files.url} lacks {lost[0]}, which {STATE} names: copy it there")
    if not names:
        raise DataError(f"{files.url} has no rows: check what the files hold")
    files.keep(names)
    return ArrowStreams(files)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise errors of pyarrow as a DataError that names the file."""
    try:
        yield
    except (DataloadError, MemoryError):  # of the store; and of this host, which is also an ArrowException
        raise
    except (pa.ArrowException, OSError) as error:  # the latter: a file is cut short, or cannot be decompressed
        if isinstance(error, OSError) and error.errno:  # of this host
            raise
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
