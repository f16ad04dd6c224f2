"""The training step of the benchmarks: it touches every byte it is given, and can tell whether the epoch was whole."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

MASK = (1 << 64) - 1
ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: neighbouring labels come out far apart


class Consumer:
    """Takes batches, each a dict of arrays or tensors by row, of lists of bytes-like objects, or of lists of strings.

    features: columns that are made one contiguous array of shape (batch, len(features)), as a model wants them;
        a batch that has "x" in their place has done so already.

    After an epoch `rows` rows of `num_bytes` bytes went by, and `digest` is a sum over them modulo 2^64: the same in
    any order and any batches, another one when a row is missing or doubled, a value wrong, or beside another label.
    `order` is a checksum of the labels as they came: another one in another order.
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
    """What arrives as a tensor, as numpy array."""
    array: npt.NDArray[Any] = value if isinstance(value, np.ndarray) else value.numpy()
    return array


def _total(array: npt.NDArray[Any], labels: npt.NDArray[Any]) -> int:
    """A sum over the words of each row, times an odd number for its label, so that it is the same in any order."""
    if not len(array):
        return 0
    of_a_row = array.nbytes // len(array)
    word = next(size for size in (8, 4, 2, 1) if of_a_row % size == 0)
    sums = array.reshape(len(array), -1).view(f"u{word}").sum(axis=1, dtype=np.uint64)
    return int(np.dot(sums, labels.astype(np.uint64) * np.uint64(ODD) | np.uint64(1)))
