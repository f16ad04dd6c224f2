"""The workloads: Parquet datasets generated from a seed, and the truth that a complete epoch must match."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataload.benchmarks.accelerators import BERT, DLRM, LLAMA_8B, RESNET_50, UNET_3D, Accelerator
from dataload.benchmarks.batches import batches_of
from dataload.benchmarks.consumer import Consumer
from dataload.benchmarks.photos import cropped_at_random, decode_and_crop, decoded, photos
from dataload.errors import ConfigError

SEED = 20_26
VERSION = 4  # of the generated files and their digest; folders of another version are written again
SIZES = {"tiny": 0.1, "small": 1, "middle": 4, "full": 50}  # in units of about 50 MB of decoded rows
GROUP_MEGABYTES = 10
FILE_BYTES = 128 << 20  # at most, unless a row group is larger
LEAST_FILES = 4
TOKENS, VOCABULARY = 1024, 50_257
VOLUME_BYTES = 14_660_063  # a tenth of a sample of 3D U-Net in MLPerf Storage
FEATURES = tuple(f"f{number:02d}" for number in range(16))

Row = dict[str, Any]
Maker = Callable[[np.random.Generator, int], pa.Table]


@dataclass(frozen=True)
class Workload:
    """A dataset and the way to read it.

    Args:
        name: Name of the workload.
        make: `make(rng, rows)` returns one row group.
        accelerator: The accelerator that trains on it, for emulation.
        rows: Rows of the dataset.
        rows_per_group: Rows of a row group.
        groups_per_file: Row groups of a file.
        batch_size: Rows of a batch.
        compression: Compression of the Parquet files.
        features: Columns of one dtype that become one contiguous array of shape (batch, len(features)).
        prepare: Applied to each row first. Systems that keep rows apply it once, others in every epoch.
        transform: Applied to each row in every epoch.
        in_threads: Whether the transform releases the interpreter lock. dataload then runs it in as many threads as
            other systems have workers.
    """

    name: str
    make: Maker
    accelerator: Accelerator
    rows: int
    rows_per_group: int
    groups_per_file: int
    batch_size: int
    compression: str
    features: tuple[str, ...] = ()
    transform: Callable[[Row], Row] | None = None
    in_threads: bool = False
    prepare: Callable[[Row], Row] | None = None

    @property
    def from_file(self) -> Callable[[Row], Row] | None:
        """The function from a row of the files to a row of a batch."""
        prepare, transform = self.prepare, self.transform
        return partial(_both, prepare, transform) if prepare and transform else prepare or transform

    def consumer(self) -> Consumer:
        return Consumer(self.features)


@dataclass(frozen=True)
class Truth:
    """The content of a workload's files. A complete epoch has the same rows and digest.

    Args:
        rows: Rows of the dataset.
        digest: Digest of the rows by Consumer.
        order: Consumer's checksum of the order of the files.
        decoded_bytes: Bytes of the decoded rows.
        parquet_bytes: Bytes of the files.
        version: VERSION of the files.
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


def volumes(rng: np.random.Generator, rows: int) -> pa.Table:
    scans = [rng.bytes(VOLUME_BYTES) for _ in range(rows)]
    return pa.table({"image": pa.array(scans, pa.large_binary()), "label": rng.integers(0, 1000, rows)})


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


def _both(prepare: Callable[[Row], Row], transform: Callable[[Row], Row], row: Row) -> Row:
    return transform(prepare(row))


def check_names(names: Iterable[str], size: str) -> None:
    """Raise ConfigError if there is no workload of one of the names, or if the size is unknown."""
    known = workloads(size)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"no workload is called {', '.join(unknown)}; there are: {', '.join(known)}")


def workloads(size: str, group_megabytes: float = GROUP_MEGABYTES) -> dict[str, Workload]:
    """Return the workloads by name.

    Args:
        size: A key of SIZES.
        group_megabytes: Megabytes of decoded rows in a row group. A dataset has four files or more.

    Raises:
        ConfigError: The size is unknown.
    """
    if size not in SIZES:
        raise ConfigError(f"size must be one of {', '.join(SIZES)}, not {size!r}")

    def described(
        name: str, make: Maker, accelerator: Accelerator, rows: int, row_bytes: int, *rest: Any, **more: Any
    ) -> Workload:
        rows = max(1, int(rows * SIZES[size]))
        group_rows = max(1, min(int(group_megabytes * 1e6) // row_bytes, -(-rows // LEAST_FILES)))
        groups = max(1, min(FILE_BYTES // (group_rows * row_bytes), -(-rows // (LEAST_FILES * group_rows))))
        return Workload(name, make, accelerator, rows, group_rows, groups, *rest, **more)

    photo = (photos, RESNET_50, 1000, 80_000, 64, "none")
    found = (
        described("images", images, RESNET_50, 500, 100_000, 64, "none"),
        described("tokens", tokens, LLAMA_8B, 12_000, 4 * TOKENS, 256, "zstd"),
        described("table", table, DLRM, 625_000, 80, 256, "zstd", FEATURES),
        described("text", text, BERT, 120_000, 420, 256, "zstd"),
        described("photos", *photo, transform=decode_and_crop, in_threads=True),
        described("pixels", *photo, prepare=decoded, transform=cropped_at_random, in_threads=True),
        described("volumes", volumes, UNET_3D, 4, VOLUME_BYTES, 7, "none"),
    )
    return {workload.name: workload for workload in found}


def write(workload: Workload, folder: Path) -> Truth:
    """Write the files `part-000.parquet`, … to `folder`, unless they exist. Return their truth.

    A JSON file beside the folder stores the truth.
    """
    truth_file = folder.with_suffix(".json")
    if truth_file.exists():
        stored = json.loads(truth_file.read_text())
        if stored["version"] == VERSION and stored["rows"] == workload.rows:
            return Truth(**stored)
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
    truth_file.write_text(json.dumps(asdict(truth)))
    return truth


def _files(workload: Workload) -> Iterator[list[pa.Table]]:
    rng = np.random.default_rng([SEED, *workload.name.encode()])
    lengths = [
        min(workload.rows_per_group, workload.rows - first)
        for first in range(0, workload.rows, workload.rows_per_group)
    ]
    for first in range(0, len(lengths), workload.groups_per_file):
        yield [workload.make(rng, length) for length in lengths[first : first + workload.groups_per_file]]
