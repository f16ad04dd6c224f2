"""A source in another order: its rows are dealt to buckets on disk, and each bucket is shuffled when it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.conversion.reading import Position, Reading, Told
from dataload.conversion.row_sums import GOLDEN, mixed, row_sum
from dataload.conversion.source import Part, Source
from dataload.errors import DataError

BUCKET_BYTES = 32 << 20  # of the source
MOST_BUCKETS = 4096
DEALT_BYTES = 128 << 20  # in memory, between two writes to the buckets
TABLE_BYTES = 16 << 20  # that are dealt at a time
STATE = "dealt.json"


@contextmanager
def damaged(folder: Path) -> Iterator[None]:
    """Raise a DataError that names the folder of the buckets if they cannot be read."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise DataError(f"{folder} cannot be read ({error}): remove it and empty the destination") from error


class Shuffled:
    """The rows of a source in a random order that depends on the source and the seed only.

    A bucket is a part. A kill loses no more than what was in memory.

    Args:
        source: The rows.
        schema: Their types, as Parquet has them.
        seed: The seed.
        folder: A folder on this machine for the buckets, which take as much as the rows do in memory, or less.

    Attributes:
        schema: As above.
        parts: The buckets.
    """

    def __init__(self, source: Source, schema: pa.Schema, seed: int, folder: Path) -> None:
        self.schema = schema
        total = sum(part.bytes for part in source.parts)
        count = max(1, min(MOST_BUCKETS, -(-total // BUCKET_BYTES)))
        bounds = [total * number // count for number in range(count + 1)]
        self.parts = [Part(f"bucket {number}", stop - start) for number, (start, stop) in enumerate(pairwise(bounds))]
        self._source, self._folder = source, folder
        self._seed = mixed(np.array([seed % (1 << 64)], np.uint64))
        self._dealt: dict[str, Any] = {
            "position": [0, 0],
            "rows": 0,
            "sum": 0,
            "lengths": [0] * count,
            "is_done": False,
        }

    def deal(self, told: Told) -> tuple[int, int]:
        """Deal the rows of the source to the buckets, or go on with it. Return how many there are, and their checksum.

        Args:
            told: Tells of progress, see `Files.told`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        state = self._folder / STATE
        if state.exists():
            self._dealt = self._checked(state.read_text())
        dealt = self._dealt
        reading = Reading(self._source, self.schema, Position(*dealt["position"]), told)
        while not dealt["is_done"]:
            held: list[tuple[pa.Table, list[int]]] = []
            while sum(rows.nbytes for rows, _ in held) < DEALT_BYTES:
                rows = reading.take(1 << 62, TABLE_BYTES)
                if not rows.num_rows:
                    dealt["is_done"] = True
                    break
                held.append(self._by_bucket(rows))
                dealt["sum"] = (dealt["sum"] + row_sum(rows)) % (1 << 64)
                dealt["rows"] += rows.num_rows
            self._append(held)
            dealt["position"] = list(reading.position)
            temporary = state.with_suffix(".tmp")
            temporary.write_text(json.dumps(dealt))
            temporary.replace(state)
        return dealt["rows"], dealt["sum"]

    def read(self, part: int) -> Iterator[pa.Table]:
        if self._dealt["lengths"][part]:
            yield self._shuffled(part)  # without what it was made of

    def _shuffled(self, bucket: int) -> pa.Table:
        tables, length = [], self._dealt["lengths"][bucket]
        with damaged(self._folder), pa.memory_map(str(self._path(bucket))) as file:
            while file.tell() < length:
                tables.append(pa.ipc.open_stream(file).read_all())
        rows = pa.concat_tables(tables).unify_dictionaries()
        key = mixed(self._seed + np.uint64(bucket + 1))
        order = mixed(np.arange(rows.num_rows, dtype=np.uint64) * GOLDEN + key)
        return rows.take(np.argsort(order, kind="stable"))

    def _checked(self, text: str) -> dict[str, Any]:
        """Return the state of a text. Raise DataError if it is not one of these buckets."""
        with damaged(self._folder):
            found = json.loads(text)
            if {*found} != {*self._dealt} or len(found["lengths"]) != len(self.parts):
                raise ValueError("it has another form")
            return found  # type: ignore[no-any-return]

    def _path(self, bucket: int) -> Path:
        return self._folder / f"bucket-{bucket:04}.arrows"

    def _by_bucket(self, rows: pa.Table) -> tuple[pa.Table, list[int]]:
        """Return the rows in the order of their buckets, and where each bucket begins, and the last one ends."""
        numbers = np.arange(self._dealt["rows"], self._dealt["rows"] + rows.num_rows, dtype=np.uint64)
        buckets = (mixed(numbers * GOLDEN + self._seed) % np.uint64(len(self.parts))).astype(np.uint16)  # a radix sort
        order = np.argsort(buckets, kind="stable")
        bounds = np.searchsorted(buckets[order], np.arange(len(self.parts) + 1))
        return rows.unify_dictionaries().take(order), bounds.tolist()

    def _append(self, dealt: Sequence[tuple[pa.Table, list[int]]]) -> None:
        """Write the rows of each bucket to its file, after what the state says that it has."""
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        for bucket, length in enumerate(self._dealt["lengths"]):
            parts = [rows.slice(bounds[bucket], bounds[bucket + 1] - bounds[bucket]) for rows, bounds in dealt]
            if not any(part.num_rows for part in parts):
                continue
            rows = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
            with self._path(bucket).open("ab") as file:
                os.truncate(file.fileno(), length)
                with pa.ipc.new_stream(file, rows.schema, options=options) as stream:
                    stream.write_table(rows)
                self._dealt["lengths"][bucket] = file.seek(0, os.SEEK_END)
