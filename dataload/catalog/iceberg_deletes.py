"""The rows that the files of deletes of an Iceberg table delete: files of positions, and deletion vectors in Puffin."""

from __future__ import annotations

import json
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataload.catalog.tables import Positions
from dataload.errors import DataError, OriginNotFound
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.redact import cause_of, redacted
from dataload.runtime.text import counted

DELETES_AT_ONCE = 16
COPY = "copy the rows, such as by spark.table(name).write.parquet(copy), and name the copy"
PUFFIN = b"PFA1"  # the first and the last bytes
TRAILER = 12  # bytes behind the footer of Puffin: its size, flags, and the magic
VECTOR = "deletion-vector-v1"  # a blob
VECTOR_MAGIC = bytes.fromhex("d1d33964")


def plain_url(url: str) -> str:
    """Return the URL of a file, or the path of a local one."""
    return url.removeprefix("file://") if url.startswith("file:///") else url.removeprefix("file:")


def deleted_rows(tasks: Iterable[Any], io: Any, url: str) -> dict[str, Positions]:
    """Return the deleted rows of each data file that has some."""
    wanted: dict[str, dict[str, int]] = {}  # by delete file, the data files and their rows
    formats: dict[str, str] = {}
    for task in tasks:
        for delete in task.delete_files:
            wanted.setdefault(delete.file_path, {})[task.file.file_path] = task.file.record_count
            formats[delete.file_path] = getattr(delete.file_format, "value", str(delete.file_format)).upper()

    def read(path: str) -> list[tuple[str, Positions]]:
        try:
            with io.new_input(path).open() as file:
                data = file.read()
        except FileNotFoundError as error:
            raise OriginNotFound(
                f"{redacted(path)} of {url} is gone, which expire_snapshots removes with old snapshots: open a newer "
                "snapshot"
            ) from cause_of(error)
        try:
            if formats[path] == "PARQUET":
                return list(_positions(data, wanted[path]))
            if formats[path] == "PUFFIN":
                return list(vectors_of(data, wanted[path]))
        except (ValueError, LookupError, TypeError, OSError, OverflowError, pa.ArrowException) as error:
            raise DataError(f"{redacted(path)}, a delete file of {url}, cannot be read: {redacted(error)}") from error
        raise DataError(f"{redacted(path)} has deletes in {formats[path]}, which dataload cannot read: {COPY}")

    parts: dict[str, list[Positions]] = {}
    read_all = DaemonExecutor(DELETES_AT_ONCE, "dataload-deletes").map(read, sorted(wanted))
    for file, rows in chain.from_iterable(read_all):
        parts.setdefault(file, []).append(rows)
    return {plain_url(file): np.unique(np.concatenate(rows)) for file, rows in parts.items()}


def _positions(data: bytes, files: Container[str]) -> Iterator[tuple[str, Positions]]:
    """Yield those of some data files that a file of position deletes names, and the rows that it deletes of each."""
    table = pq.read_table(pa.BufferReader(data), columns=["file_path", "pos"])
    paths = table["file_path"].combine_chunks().dictionary_encode()
    paths = paths.combine_chunks() if isinstance(paths, pa.ChunkedArray) else paths
    codes, rows = paths.indices.to_numpy(zero_copy_only=False), table["pos"].to_numpy()
    by_path = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(paths.dictionary)))
    for path, own in zip(paths.dictionary.to_pylist(), np.split(rows[by_path], ends[:-1]), strict=True):
        if path in files:
            yield path, own.astype(np.int64)


def vectors_of(data: bytes, files: Mapping[str, int]) -> Iterator[tuple[str, Positions]]:
    """Yield some data files, and the rows that a Puffin file of deletion vectors deletes of each.

    Args:
        data: The Puffin file.
        files: Names of the data files, and how many rows each has.

    Raises:
        ValueError: The bytes are no such file, or it deletes rows that a data file does not have.

    Notes: https://iceberg.apache.org/puffin-spec/
    """
    from pyroaring import BitMap64  # that of pyiceberg

    if len(data) < TRAILER + 8 or data[:4] != PUFFIN or data[-4:] != PUFFIN:
        raise ValueError("it is no Puffin file")
    size, flags = int.from_bytes(data[-TRAILER:-8], "little"), data[-8:-4]
    if flags[0] & 1:
        raise ValueError("its footer is compressed")
    if size > len(data) - TRAILER - 8:
        raise ValueError("its footer is cut short")
    footer = json.loads(data[-TRAILER - size : -TRAILER])
    blobs = {blob["properties"]["referenced-data-file"]: blob for blob in footer["blobs"] if blob["type"] == VECTOR}
    for name, blob in blobs.items():
        if (rows := files.get(name)) is None:
            continue
        start, length = int(blob["offset"]), int(blob["length"])
        if blob.get("compression-codec") or start < 0 or length < 12 or start + length > len(data):
            raise ValueError("a deletion vector is compressed or cut short")
        vector = data[start : start + length]
        inner = int.from_bytes(vector[:4], "big")
        content = vector[4 : 4 + inner]
        if (
            inner != length - 8
            or content[:4] != VECTOR_MAGIC
            or zlib.crc32(content) != int.from_bytes(vector[-4:], "big")
        ):
            raise ValueError("a deletion vector is damaged")
        bitmap = BitMap64.deserialize(content[4:])
        if bitmap and bitmap.max() >= rows:  # A few bytes may stand for billions of rows.
            raise ValueError(f"it deletes row {bitmap.max()} of {redacted(name)}, which has {counted(rows, 'row')}")
        yield name, np.fromiter(bitmap, np.int64, len(bitmap))
