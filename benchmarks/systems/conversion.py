"""What writing a workload in another system's format needs: its rows, and how large a file should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataload.benchmarks.batches import Row, rows_of, values
from dataload.benchmarks.workloads import Workload

MOST_BYTES = 64 << 20  # what MosaicML and LitData advise, and make when they are told nothing
FEWEST_FILES = 8  # so that workers have something to share, and a shuffle of files something to shuffle


def file_bytes(files: Path) -> int:
    """How many bytes of rows to write to one file."""
    return min(MOST_BYTES, _decoded_bytes(files) // FEWEST_FILES)


def file_rows(workload: Workload, files: Path) -> int:
    """How many rows to write to one file, so that there is an even number of files, all alike, if the rows allow it.

    Then two workers have whole files to themselves.
    """
    fewest = max(FEWEST_FILES, -(-_decoded_bytes(files) // MOST_BYTES))
    even = (count for count in range(fewest, 4 * fewest) if count % 2 == 0 and workload.rows % count == 0)
    return -(-workload.rows // next(even, fewest))


def _decoded_bytes(files: Path) -> int:
    decoded = 0
    for path in files.glob("*.parquet"):
        metadata = pq.read_metadata(path)
        decoded += sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return decoded


def columns(workload: Workload, files: Path) -> Iterator[dict[str, Any]]:
    """Each row group in turn, by column: arrays by row, or lists of bytes or strings; the features as one `x`."""
    for path in sorted(files.glob("*.parquet")):
        source = pq.ParquetFile(path)
        for number in range(source.num_row_groups):
            group = source.read_row_group(number).combine_chunks()
            yield _features_joined({name: _values(group[name]) for name in group.column_names}, workload.features)


def rows(workload: Workload, files: Path) -> Iterator[Row]:
    """Each row in turn, not transformed."""
    for group in columns(workload, files):
        yield from rows_of(group)


def _values(column: pa.ChunkedArray) -> Any:
    found = values(column.chunk(0))
    return [value.to_pybytes() for value in found] if isinstance(found, list) and _is_binary(column.type) else found


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _features_joined(group: dict[str, Any], features: tuple[str, ...]) -> dict[str, Any]:
    if not features:
        return group
    rest = {name: column for name, column in group.items() if name not in features}
    return {"x": np.stack([group[name] for name in features], axis=1)} | rest
