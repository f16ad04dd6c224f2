"""The consumer of batches in the benchmarks. It reads every byte and checks that an epoch is complete."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

MASK = (1 << 64) - 1
ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, which spreads neighbouring numbers


class Consumer:
    """A consumer of batches: dicts of arrays or tensors, of lists of bytes-like objects, or of lists of strings.

    Args:
        features: Columns to stack into one contiguous array of shape (batch, len(features)). A batch with "x" is
            stacked already.

    Attributes:
        rows: Rows so far.
        num_bytes: Their bytes.
        digest: A sum over the rows modulo 2^64, independent of their order and batches. It changes if a row is missing
            or duplicated, or if a value is wrong, at another position, or in another row.
        order: A checksum of the labels in their order.
    """

    def __init__(self, features: tuple[str, ...] = ()) -> None:
        self._features = features
        self.rows = 0
        self.num_bytes = 0
        self.digest = 0
        self.order = 0

    def take(self, batch: dict[str, Any]) -> None:
        if self._features and "x" not in batch:
            features = [_array(batch[name]) for name in self._features]
            batch = {name: value for name, value in batch.items() if name not in self._features}
            batch["x"] = np.stack(features, axis=1)
        labels = np.ascontiguousarray(_array(batch["label"]))
        rows = np.zeros(len(labels), np.uint64)
        for name in sorted(batch):
            rows = rows * ODD + self._hashes(batch[name])
        self.digest = (self.digest + int(_mixed(rows).sum())) & MASK
        self.rows += len(labels)
        self.order = zlib.crc32(labels.tobytes(), self.order)

    def _hashes(self, column: Any) -> npt.NDArray[np.uint64]:
        """Return a hash of each value of a column. Count their bytes."""
        if isinstance(column, list):
            data = [item.encode() if isinstance(item, str) else item for item in column]
            self.num_bytes += sum(map(len, data))
            return np.fromiter(map(xxh3_64_intdigest, data), np.uint64)
        array = np.ascontiguousarray(_array(column))
        self.num_bytes += array.nbytes
        words = _words(array)
        return words @ _weights(words.shape[1])


def _array(value: Any) -> npt.NDArray[Any]:
    """Return an array or tensor as a numpy array."""
    array: npt.NDArray[Any] = value if isinstance(value, np.ndarray) else value.numpy()
    return array


def _words(array: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return the bytes of each row as numbers, as large as its length allows."""
    row_bytes = array.nbytes // max(1, len(array))  # an empty batch has no rows
    word = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    return array.reshape(len(array), array[:1].size).view(f"u{word}").astype(np.uint64, copy=False)


@cache
def _weights(length: int) -> npt.NDArray[np.uint64]:
    """Return an odd number for each position in a row."""
    return np.cumprod(np.full(length, ODD), dtype=np.uint64)


def _mixed(rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return hashes whose sum shows from which row each part came, which a sum of sums does not."""
    rows = (rows ^ rows >> np.uint64(32)) * ODD
    return rows ^ rows >> np.uint64(29)
