"""The consumer of batches in the benchmarks. It reads every byte and checks that an epoch is complete."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, which spreads neighbouring labels


class Consumer:
    """A consumer of batches: dicts of arrays or tensors, of lists of bytes-like objects, or of lists of strings.

    Args:
        features: Columns to stack into one contiguous array of shape (batch, len(features)). A batch with "x" is
            stacked already.

    Attributes:
        rows: Rows so far.
        num_bytes: Their bytes.
        digest: A sum over the rows modulo 2^64, independent of their order and batches. It changes if a row is missing
            or duplicated, a value is wrong, or a label belongs to another row.
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
        for value in batch.values():
            self._touch(value, labels)
        self.rows += len(labels)
        self.order = zlib.crc32(labels.tobytes(), self.order)

    def _touch(self, value: Any, labels: npt.NDArray[Any]) -> None:
        if isinstance(value, list):
            for item, label in zip(value, labels.tolist(), strict=True):
                data = item.encode() if isinstance(item, str) else item
                self.digest = (self.digest + xxh3_64_intdigest(data, label)) & MASK
                self.num_bytes += len(data)
        else:
            array = np.ascontiguousarray(_array(value))
            self.digest = (self.digest + _total(array, labels)) & MASK
            self.num_bytes += array.nbytes


def _array(value: Any) -> npt.NDArray[Any]:
    """Return an array or tensor as a numpy array."""
    array: npt.NDArray[Any] = value if isinstance(value, np.ndarray) else value.numpy()
    return array


def _total(array: npt.NDArray[Any], labels: npt.NDArray[Any]) -> int:
    """Return the sum over all rows of the sum of a row's words times an odd number for its label."""
    if not len(array):
        return 0
    row_bytes = array.nbytes // len(array)
    word = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    sums = array.reshape(len(array), -1).view(f"u{word}").sum(axis=1, dtype=np.uint64)
    return int(np.dot(sums, labels.astype(np.uint64) * np.uint64(ODD) | np.uint64(1)))
