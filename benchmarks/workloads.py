"""What is read: datasets as Parquet, made from a seed, and what a loader must have delivered after an epoch."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dataload.benchmarks.batches import batches_of
from dataload.benchmarks.consumer import Consumer
from dataload.errors import ConfigError

SEED = 20_26
VERSION = 2  # of what the functions here make: folders made by another are made anew
SIZES = {"tiny": 0.1, "small": 1, "full": 4, "large": 20, "huge": 80}
TOKENS, VOCABULARY = 1024, 50_257
FEATURES = tuple(f"f{number:02d}" for number in range(16))
PIXELS, CROP = 256, 224

Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """A dataset of `rows` rows, and how it is read.

    make: `make(rng, rows)` gives one row group.
    features: columns of one dtype that training wants as one contiguous array of shape (batch, len(features)).
    transform: what is done to each row before it is trained on, for every system alike.
    bytes_per_second: what one connection to S3 gives in the wire-limited setting.
    """

    name: str
    make: Callable[[np.random.Generator, int], pa.Table]
    rows: int
    rows_per_group: int
    groups_per_file: int
    batch_size: int
    compression: str
    bytes_per_second: float
    features: tuple[str, ...] = ()
    transform: Callable[[Row], Row] | None = None

    def consumer(self) -> Consumer:
        return Consumer(self.features)


@dataclass(frozen=True)
class Truth:
    """What a workload's files hold: an epoch that was delivered whole has this many rows and this digest.

    order: the consumer's checksum of the files' own order.
    """

    rows: int
    digest: int
    order: int
    decoded_bytes: int
    parquet_bytes: int
    version: int = VERSION


def images(rng: np.random.Generator, rows: int) -> pa.Table:
    sizes = rng.integers(90_000, 110_000, rows)
    pixels = [rng.bytes(int(size)) for size in sizes]
    return pa.table({"image": pa.array(pixels, pa.binary()), "label": rng.integers(0, 1000, rows)})


def tokens(rng: np.random.Generator, rows: int) -> pa.Table:
    values = rng.integers(0, VOCABULARY, rows * TOKENS, dtype=np.int32)
    return pa.table(
        {"tokens": pa.FixedSizeListArray.from_arrays(pa.array(values), TOKENS), "label": rng.integers(0, 1000, rows)}
    )


def table(rng: np.random.Generator, rows: int) -> pa.Table:
    columns: dict[str, Any] = {name: rng.standard_normal(rows, dtype=np.float32) for name in FEATURES}
    return pa.table(columns | {"user": rng.integers(0, 1 << 40, rows), "label": rng.integers(0, 2, rows)})


def text(rng: np.random.Generator, rows: int) -> pa.Table:
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     etaoinshr", np.uint8)
    lengths = np.clip(rng.lognormal(5.7, 0.8, rows), 8, 4096).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    characters = letters[rng.integers(0, len(letters), int(offsets[-1]))]
    strings = pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(characters))
    return pa.table({"text": strings, "label": rng.integers(0, 1000, rows)})


def jpeg(rng: np.random.Generator, rows: int) -> pa.Table:
    from PIL import Image

    def picture() -> bytes:
        coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC), np.int16)
        grain = rng.integers(-12, 13, smooth.shape, dtype=np.int16)
        encoded = io.BytesIO()
        Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(encoded, "jpeg", quality=85)
        return encoded.getvalue()

    pictures = pa.array([picture() for _ in range(rows)], pa.binary())
    return pa.table({"image": pictures, "label": rng.integers(0, 1000, rows)})


def decode_and_crop(row: Row) -> Row:
    """`image` becomes uint8 pixels of shape (CROP, CROP, 3): the middle, so that epochs can be compared."""
    from PIL import Image

    edge = (PIXELS - CROP) // 2
    with Image.open(io.BytesIO(row["image"])) as picture:
        pixels: npt.NDArray[np.uint8] = np.array(picture.crop((edge, edge, edge + CROP, edge + CROP)))
    return {**row, "image": pixels}


def workloads(size: str) -> dict[str, Workload]:
    """The workloads by name; size: of `SIZES`: "full" for figures, larger ones for long epochs. Raises ConfigError."""
    if size not in SIZES:
        raise ConfigError(f"size must be one of {', '.join(SIZES)}, not {size!r}")
    factor = SIZES[size]
    described = (
        Workload("images", images, int(500 * factor), 100, 5, 64, "none", 20e6),
        Workload("tokens", tokens, int(12_000 * factor), 1_000, 8, 256, "zstd", 6e6),
        Workload("table", table, int(250_000 * factor), 50_000, 5, 256, "zstd", 6e6, FEATURES),
        Workload("text", text, int(40_000 * factor), 4_000, 8, 256, "zstd", 6e6),
        Workload("jpeg", jpeg, int(250 * factor), 50, 5, 64, "none", 20e6, transform=decode_and_crop),
    )
    return {workload.name: workload for workload in described}


def write(workload: Workload, folder: Path) -> Truth:
    """The workload's files `part-000.parquet`, … in `folder`, made unless they are there already, and their truth.

    The truth is noted beside the folder.
    """
    noted = folder.with_suffix(".json")
    if noted.exists():
        found = json.loads(noted.read_text())
        if found["version"] == VERSION and found["rows"] == workload.rows:
            return Truth(**found)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    consumer = workload.consumer()
    for number, groups in enumerate(_files(workload)):
        with pq.ParquetWriter(
            folder / f"part-{number:03d}.parquet", groups[0].schema, compression=workload.compression
        ) as writer:
            for group in groups:
                writer.write_table(group, row_group_size=len(group))
                for batch in batches_of(group, workload):
                    consumer.take(batch)
    written = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    truth = Truth(consumer.rows, consumer.digest, consumer.order, consumer.num_bytes, written)
    noted.write_text(json.dumps(asdict(truth)))
    return truth


def _files(workload: Workload) -> Iterator[list[pa.Table]]:
    rng = np.random.default_rng([SEED, *workload.name.encode()])
    lengths = [
        min(workload.rows_per_group, workload.rows - first)
        for first in range(0, workload.rows, workload.rows_per_group)
    ]
    for first in range(0, len(lengths), workload.groups_per_file):
        yield [workload.make(rng, length) for length in lengths[first : first + workload.groups_per_file]]
