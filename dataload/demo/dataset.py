"""The demo's data: scikit-learn's handwritten digits, shifted and noised into Parquet files, the same bytes every time.

An original digit is either held out or augmented for training, never both, so that held-out accuracy means something.
Pixels are fixed_size_list<uint8>[4096] in dictionary encoding: Parquet stores uint8 as int32, so plain encoding would
take four bytes a pixel; 256 values take one-byte dictionary indices.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

SIDE = 64  # pixels of an image's edge
PIXELS = SIDE * SIDE
SCALE = SIDE // 8  # the originals are 8 x 8
MAX_SHIFT = 6  # pixels, each way
NOISE = 16  # grey levels, exclusive
HELD_OUT = 0.2  # of the originals
SCHEMA = pa.schema(
    [
        pa.field("image", pa.list_(pa.field("element", pa.uint8(), nullable=False), PIXELS), nullable=False),
        pa.field("label", pa.int64(), nullable=False),
        pa.field("row_id", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Digits:
    """images: uint8[n, 4096], each 64 x 64; labels: int64[n], 0 to 9; originals: int64[n], where in the bundled set."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    originals: NDArray[np.int64]


def load_split(seed: int = 0) -> tuple[Digits, Digits]:
    """(training originals, held-out originals), stratified by label and without an original in common."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bundle = load_digits()
    grey = (bundle.images * 15).astype(np.uint8)  # 0…16 becomes 0…240; noise fills up to 255
    images = grey.repeat(SCALE, axis=1).repeat(SCALE, axis=2).reshape(-1, PIXELS)
    labels = bundle.target.astype(np.int64)
    places = np.arange(len(labels))
    return tuple(  # type: ignore[return-value]
        Digits(images[part], labels[part], part)
        for part in train_test_split(places, test_size=HELD_OUT, random_state=seed, stratify=labels)
    )


def augmented(
    train: Digits, num_rows: int, num_files: int, *, shuffled_labels: bool = False, seed: int = 0
) -> Iterator[pa.Table]:
    """`num_files` tables of SCHEMA with `num_rows` rows in all: random originals, shifted, noised.

    row_id counts from 0 in file order. With shuffled_labels every image keeps its pixels and the labels are
    dealt out anew, so that there is nothing to learn.
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
        yield pa.table([_fixed_lists(pixels), labels[rows], rows], schema=SCHEMA)


def parquet_bytes(table: pa.Table, row_group_rows: int) -> bytes:
    """`table` as one uncompressed Parquet file without statistics."""
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
    """(name, content) of each training file, about 4.1 kB a row; the same arguments give the same bytes."""
    train, _ = load_split(seed)
    row_group_rows = max(1, -(-num_rows // (num_files * row_groups_per_file)))
    for number, table in enumerate(augmented(train, num_rows, num_files, shuffled_labels=shuffled_labels, seed=seed)):
        yield f"digits-{number:02d}.parquet", parquet_bytes(table, row_group_rows)


def _fixed_lists(pixels: NDArray[np.uint8]) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(pixels), type=SCHEMA.field("image").type)
