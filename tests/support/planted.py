"""Blobs with valid checksums that no writer of ours wrote."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataload import CacheConfig, make_dataset
from dataload.cache import blob_file
from dataload.cache.tier import PROOF_BYTES, BlobKey, Kind
from dataload.formats.schema import NULL, SPAN, Layout
from dataload.rows.row_group_cache import RowGroupCache

WILD = (0, 1, 63, 64, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 62) + 1, 1 << 63, (1 << 64) - 1)
ROWS = 60  # of a file, in two row groups
WORDS = ["", "a", "é" * 5, "long " * 20]

Places = list[tuple[int, int]]
"""(first byte, bytes) of numbers in a payload that are no values."""


def table(first: int) -> pa.Table:
    """Return rows with a column of each kind."""
    ids = range(first, first + ROWS)
    nested = pa.list_(pa.struct([("a", pa.string()), ("b", pa.list_(pa.int64()))]))
    columns = {
        "id": pa.array(ids, pa.int64()),
        "even": [number % 2 == 0 for number in ids],
        "vector": pa.array([[number, number + 0.5] for number in ids], pa.list_(pa.float32(), 2)),
        "text": [None if number % 7 == 0 else f"row {number}" * (number % 5) for number in ids],
        "shared": pa.array([WORDS[number % 4] for number in ids]).dictionary_encode(),
        "bytes": pa.array([bytes([number % 256]) * (number % 9) for number in ids], pa.binary()),
        "list": pa.array([list(range(number % 6)) for number in ids], pa.list_(pa.int32())),
        "nested": pa.array([[{"a": str(number), "b": [number] * (number % 3)}] for number in ids], nested),
    }
    return pa.table(columns)


def write_files(folder: Path, files: int = 3) -> Path:
    """Write a dataset of Parquet files."""
    folder.mkdir()
    for number in range(files):
        pq.write_table(table(number * ROWS), folder / f"{number}.parquet", row_group_size=ROWS // 2)
    return folder


def doubled(rows: Any) -> Any:
    return {"twice": rows["id"] * 2, "words": rows["shared"]}


class Reading:
    """All rows of a dataset: of the whole, filtered, mapped, and of fewer columns."""

    def __init__(self, folder: Path, cache: CacheConfig) -> None:
        whole = make_dataset(str(folder), cache=cache)
        filtered = make_dataset(str(folder), cache=cache, filters=[("id", ">", 70)])
        few = make_dataset(str(folder), cache=cache, columns=["shared", "list"])
        self.blocks = whole.blocks
        self._datasets = [whole, filtered, whole.map(doubled, version=1), few]

    def rows(self) -> list[Any]:
        """Return the rows as Python objects."""
        return [
            {name: _plain(value) for name, value in row.items()}
            for dataset in self._datasets
            for row in dataset.__getitems__(range(len(dataset)))
        ]

    def records(self) -> Iterator[tuple[BlobKey, int, Layout]]:
        """Yield the key, the rows and the layout of each blob of records."""
        for dataset in self._datasets:
            blobs: RowGroupCache = dataset.cached_row_groups()
            for number in range(len(blobs.manifest.row_groups)):
                for key, rows in zip(blobs.keys(number), blobs.plan.lengths(number), strict=True):
                    yield key, rows, blobs.plan.layout


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return bytes(value) if isinstance(value, memoryview) else value


def blobs_in(cache: Path) -> Iterator[tuple[Path, str, bytes, bytes]]:
    """Yield the file, the name, the digest and the payload of each blob."""
    for path in sorted(cache.glob("blobs/*/*")):
        footer, name, _ = blob_file.read_footer(path)
        yield path, name, footer.digest, path.read_bytes()[: footer.payload]


def sealed(payload: bytes, digest: bytes, name: str, draft: Path) -> bytes:
    """Return a blob with valid checksums."""
    descriptor = blob_file.create(draft)
    kind = Kind[name.rpartition("#")[2].partition(" ")[0].upper()]
    blob_file.write_whole(descriptor, memoryview(payload), kind, digest, name)
    os.close(descriptor)
    whole = draft.read_bytes()
    draft.unlink()
    return whole


def plant(path: Path, payload: bytes, digest: bytes, name: str) -> None:
    """Replace a blob in a cache folder."""
    draft = path.with_name("draft")
    draft.write_bytes(sealed(payload, digest, name, path.with_name("seal")))
    draft.chmod(0o600)
    draft.replace(path)


def offsets_of(payload: bytes, rows: int, layout: Layout) -> Places:
    """Return the offsets and lengths in a blob of records."""
    ragged, size = layout.ragged, layout.dtype.itemsize
    end, stop = len(payload) - 32 - 24 * len(ragged), len(payload) - 32
    starts = np.frombuffer(payload[end:stop], np.int64).reshape(-1, 3)
    found = [(place, 8) for place in range(end, len(payload), 8)]
    for field, (start, table_bytes, _) in zip(ragged, starts.tolist(), strict=True):
        places = [row * size + layout.offset(field) for row in range(rows)]
        spans = range(start, start + table_bytes, SPAN.itemsize)
        if field.kind == "nested" or len(spans) == rows:
            found += [(place, 2) for place in places]  # Codes of values that rows share are values.
        for place in [*spans, *(places if field.kind == "list" else [])]:
            found.append((place, 4))
            if int.from_bytes(payload[place + 4 : place + 8], "little") not in (0, NULL):  # An empty one may be null.
                found.append((place + 4, 4))
    return found


def changed(payload: bytes, places: Places, dice: random.Random, others: Iterable[bytes]) -> bytes:
    """Return another payload: cut, longer, of another kind, random, or with wild numbers at some places."""
    ways: list[Callable[[], bytes]] = [
        lambda: payload[: dice.randrange(max(1, len(payload)))],
        lambda: payload + dice.choice([bytes(1), bytes(8), bytes(64), bytes(4096), dice.randbytes(64)]),
        lambda: dice.choice([other for other in others if other != payload]),
        lambda: dice.randbytes(dice.choice([0, 1, 8, 64, len(payload)])),
    ]
    if not places or dice.random() < 0.3:
        return dice.choice(ways)()
    whole = bytearray(payload)
    while whole == payload:
        for start, size in dice.choices(places, k=dice.choice([1, 1, 1, 3])):
            old = int.from_bytes(whole[start : start + size], "little")
            new = dice.choice([*WILD, old + 1, old - 1, old + 64, old - 64, old ^ (1 << dice.randrange(8 * size))])
            whole[start : start + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(whole)


def proven(payload: bytes, digest: bytes) -> bytes:
    """Return the payload of metadata with the proof of its data."""
    key = BlobKey("", "", "", Kind.FOOTERS)
    object.__setattr__(key, "digest", digest)
    return key.proof(payload[PROOF_BYTES:]) + payload[PROOF_BYTES:]
