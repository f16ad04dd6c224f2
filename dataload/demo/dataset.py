"""The demo's dataset: scikit-learn's handwritten digits with random shifts and noise, as reproducible Parquet files.

An original digit is either held out or used for training, never both.
Pixels are fixed_size_list<uint8>[4096] with dictionary encoding, which takes one byte a pixel. Plain encoding takes
four bytes, because Parquet stores uint8 as int32.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

SIDE = 64  # pixels
PIXELS = SIDE * SIDE
SCALE = SIDE // 8  # the originals are 8 x 8
MAX_SHIFT = 6  # pixels in each direction
NOISE = 16  # grey levels, exclusive
HELD_OUT = 0.2  # share of the originals
SCHEMA = pa.schema(
    [
        pa.field("image", pa.list_(pa.field("element", pa.uint8(), nullable=False), PIXELS), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Digits:
    """Images of digits with their labels.

    Args:
        images: uint8[n, 4096], each 64 x 64 pixels.
        labels: int64[n], 0 to 9.
        originals: int64[n], positions in scikit-learn's dataset.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    originals: NDArray[np.int64]


def load_split(seed: int = 0) -> tuple[Digits, Digits]:
    """Return disjoint training and held-out originals, stratified by label."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bundle = load_digits()
    grey = (bundle.images * 15).astype(np.uint8)  # scales 0…16 to 0…240; noise adds up to 15
    images = grey.repeat(SCALE, axis=1).repeat(SCALE, axis=2).reshape(-1, PIXELS)
    labels = bundle.target.astype(np.int64)
    positions = np.arange(len(labels))
    return tuple(  # type: ignore[return-value]
        Digits(images[part], labels[part], part)
        for part in train_test_split(positions, test_size=HELD_OUT, random_state=seed, stratify=labels)
    )


def augmented(
    train: Digits, num_rows: int, num_files: int, *, shuffled_labels: bool = False, seed: int = 0
) -> Iterator[pa.Table]:
    """Yield tables of random originals with random shifts and noise.

    Args:
        train: Training originals.
        num_rows: Rows of all tables together. The column `number` counts them from 0 in file order.
        num_files: Number of tables.
        shuffled_labels: Whether to permute the labels, so that a model cannot learn. Pixels stay the same.
        seed: Seed of all random numbers.

    Yields:
        Tables of SCHEMA.
    """
    choice = np.random.default_rng([seed, 0])
    picked = choice.integers(len(train.labels), size=num_rows)
    labels = train.labels[picked]
    if shuffled_labels:
        labels = choice.permutation(labels)
    padded = np.pad(train.images.reshape(-1, SIDE, SIDE), ((0, 0), (MAX_SHIFT, MAX_SHIFT), (MAX_SHIFT, MAX_SHIFT)))
    crops = np.lib.stride_tricks.sliding_window_view(padded, (SIDE, SIDE), axis=(1, 2))
    for number, rows in enumerate(np.array_split(np.arange(num_rows), num_files)):
        rng = np.random.default_rng([seed, 1, number])
        down, right = rng.integers(2 * MAX_SHIFT + 1, size=(2, len(rows)))
        pixels = crops[picked[rows], down, right].reshape(-1)
        pixels += np.frombuffer(rng.bytes(len(pixels)), np.uint8) % NOISE
        images = pa.FixedSizeListArray.from_arrays(pa.array(pixels), type=SCHEMA.field("image").type)
        yield pa.table([images, labels[rows], rows], schema=SCHEMA)


def parquet_bytes(table: pa.Table, row_group_rows: int) -> bytes:
    """Return `table` as an uncompressed Parquet file without statistics."""
    file = io.BytesIO()
    pq.write_table(
        table,
        file,
        row_group_size=row_group_rows,
        compression="none",
        use_dictionary=["image.list.element"],
        write_statistics=False,
    )
    return file.getvalue()


def files(
    num_rows: int = 50_000,
    num_files: int = 8,
    row_groups_per_file: int = 5,
    *,
    shuffled_labels: bool = False,
    seed: int = 0,
) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each training file.

    The same arguments give the same bytes, about 4.1 kB a row.
    """
    train, _ = load_split(seed)
    row_group_rows = max(1, -(-num_rows // (num_files * row_groups_per_file)))
    for number, table in enumerate(augmented(train, num_rows, num_files, shuffled_labels=shuffled_labels, seed=seed)):
        yield f"digits-{number:02d}.parquet", parquet_bytes(table, row_group_rows)
