"""Helpers for conversions to another format: the rows of a workload, and the size of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataload.benchmarks.batches import Row, rows_of, transformed, values
from dataload.benchmarks.workloads import Workload

MOST_BYTES = 64 << 20  # the default of MosaicML and LitData
FEWEST_FILES = 8  # enough to distribute over workers and to shuffle


def file_bytes(workload: Workload, files: Path) -> int:
    """Return the bytes of rows to write to one file."""
    return min(MOST_BYTES, _stored_bytes(workload, files) // FEWEST_FILES)


def file_rows(workload: Workload, files: Path) -> int:
    """Return the rows to write to one file.

    If possible, the number of files is even and their size equal, so that two workers read whole files.
    """
    fewest = max(FEWEST_FILES, -(-_stored_bytes(workload, files) // MOST_BYTES))
    even = (count for count in range(fewest, 4 * fewest) if count % 2 == 0 and workload.rows % count == 0)
    return -(-workload.rows // next(even, fewest))


def _stored_bytes(workload: Workload, files: Path) -> int:
    if workload.prepare:
        return workload.rows * sum(np.asarray(value).nbytes for value in next(rows(workload, files)).values())
    decoded = 0
    for path in files.glob("*.parquet"):
        metadata = pq.read_metadata(path)
        decoded += sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return decoded


def columns(workload: Workload, files: Path) -> Iterator[dict[str, Any]]:
    """Yield each row group as a dict of arrays, or of lists of bytes or strings. Features become one array `x`.

    The rows are prepared, but not transformed.
    """
    for path in sorted(files.glob("*.parquet")):
        yield from columns_of_file(workload, path)


def columns_of_file(workload: Workload, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the same of one file."""
    source = pq.ParquetFile(path)
    for number in range(source.num_row_groups):
        group = source.read_row_group(number).combine_chunks()
        unprepared = {name: _values(group[name]) for name in group.column_names}
        yield _features_joined(transformed(unprepared, workload.prepare), workload.features)


def rows(workload: Workload, files: Path) -> Iterator[Row]:
    """Yield each row, prepared, but not transformed."""
    for group in columns(workload, files):
        yield from rows_of(group)


def _values(column: pa.ChunkedArray) -> Any:
    rows = values(column.chunk(0))
    return [value.to_pybytes() for value in rows] if isinstance(rows, list) and _is_binary(column.type) else rows


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _features_joined(group: dict[str, Any], features: tuple[str, ...]) -> dict[str, Any]:
    if not features:
        return group
    rest = {name: column for name, column in group.items() if name not in features}
    return {"x": np.stack([group[name] for name in features], axis=1)} | rest
