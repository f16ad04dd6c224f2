"""Permutations as formulas: each element is computed on demand, and none is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from dataload.arguments import whole_number
from dataload.runtime.cached_property import cached_property
from dataload.samplers.keys import derive_key, mix

Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]

SMALL = 1 << 16
ROUNDS = 6
CHUNK = 1 << 14  # elements at a time, so that a round's temporaries stay in the CPU's cache
MULTIPLIERS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


class Images:
    """The images of 0..n-1 under a formula, indexed like an array but never stored.

    Args:
        n: Number of elements.
        formula: Maps int64 [k] to int64 [k]. It may overwrite its argument.
    """

    def __init__(self, n: int, formula: Callable[[Int64], Int64]) -> None:
        self._n = n
        self._formula = formula

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: slice | npt.NDArray[Any] | Sequence[int]) -> Int64: ...
    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> int: ...
    def __getitem__(self, index: Any) -> int | Int64:
        if isinstance(index, slice):
            return self._formula(np.arange(*index.indices(self._n)))
        indices = np.asarray(index)
        if indices.size and indices.dtype.kind not in "iu":
            raise IndexError(f"a permutation needs integer indices, not {indices.dtype}")
        images = self._formula(self._checked(indices.astype(np.int64).ravel()))
        return int(images[0]) if indices.ndim == 0 else images.reshape(indices.shape)

    def _checked(self, indices: Int64) -> Int64:
        low, high = (indices.min(), indices.max()) if indices.size else (0, -1)
        if low < -self._n or high >= self._n:
            raise IndexError(f"index {high if high >= self._n else low} is not in a permutation of {self._n}")
        return np.where(indices < 0, indices + self._n, indices) if low < 0 else indices


class KeyedPermutation(Images):
    """The permutation of 0..n-1 that a 64-bit key draws (see `derive_key`); otherwise like `Permutation`."""

    def __init__(self, n: int, key: int) -> None:
        n = whole_number("n", n, least=0)  # An integer of NumPy has a limited width, and no bit_length.
        formula = _Sorted(n, key) if n < SMALL else _Feistel(n, key)
        super().__init__(n, formula.forward)
        self.inverse = Images(n, formula.backward)


class Permutation(KeyedPermutation):
    """A permutation of 0..n-1, drawn by (seed, epoch); the permutations of (0, 1) and (1, 0) are unrelated.

    `p[i]` is an int. `p[array]` and `p[slice]` are int64 arrays of the index's shape. Negative indices count from the
    end. `p.inverse[p[i]] == i`. Memory does not grow with n, and each element costs the same.

    Args:
        n: Number of elements.
        seed: Seed of the shuffle.
        epoch: Number of the epoch.

    Raises:
        ConfigError: n is negative or not a whole number.
        IndexError: On indexing: an index is out of range or not an integer.

    Example:
        >>> from dataload.samplers import Permutation
        >>> shuffled = Permutation(10**12, seed=0, epoch=3)
        >>> rows = shuffled[[0, 1, -1]]
        >>> rows.shape, rows.dtype
        ((3,), dtype('int64'))
        >>> shuffled.inverse[rows].tolist()
        [0, 1, 999999999999]
        >>> sorted(Permutation(5, seed=0, epoch=0)[:].tolist())
        [0, 1, 2, 3, 4]

    Notes: arrays of thousands cost 10-15 ns per element on one core. Below 2**16 elements, the first use builds a table
    of 2 bytes per element. Threads may share one permutation.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        super().__init__(n, derive_key("permutation", seed, epoch))


class _Sorted:
    """For small n: the numbers sorted by hash. A Feistel network is far from uniform on small domains."""

    def __init__(self, n: int, key: int) -> None:
        self._n = n
        self._key = key

    def forward(self, numbers: Int64) -> Int64:
        return self._table[numbers].astype(np.int64)

    def backward(self, images: Int64) -> Int64:
        return self._inverse_table[images].astype(np.int64)

    @cached_property
    def _table(self) -> npt.NDArray[np.uint16]:
        hashes = mix(self._key, np.arange(self._n, dtype=np.uint64))
        # The upper 32 bits as two digits of 16: numpy sorts these by radix, in a fifth of the time of whole hashes.
        digits = (hashes >> np.uint64(32)).astype(np.uint16), (hashes >> np.uint64(48)).astype(np.uint16)
        return np.lexsort(digits).astype(np.uint16)

    @cached_property
    def _inverse_table(self) -> npt.NDArray[np.uint16]:
        return np.argsort(self._table, kind="stable").astype(np.uint16)


class _Feistel:
    """For large n: an alternating Feistel network with cycle walking until the image is below n.

    A number has a low half of `bits` bits and a high half below `radix`. The domain, radix * 2**bits, is the smallest
    one that holds n, so fewer than one number in a hundred takes a second step. Each round hashes one half and adds
    the hash to the other half: by xor to the low one, modulo radix to the high one. The inverse subtracts the hashes in
    reverse order. (Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002.)
    """

    def __init__(self, n: int, key: int) -> None:
        self._n = n
        self._bits = ((n - 1).bit_length() + 1) // 2
        self._radix = np.uint32(-(-n >> self._bits))
        self._keys = (mix(key, np.arange(ROUNDS, dtype=np.uint64)) >> np.uint64(32)).astype(np.uint32)

    def forward(self, numbers: Int64) -> Int64:
        return self._walk(numbers, self._encipher)

    def backward(self, images: Int64) -> Int64:
        return self._walk(images, self._decipher)

    def _walk(self, numbers: Int64, step: Callable[[Int64], Int64]) -> Int64:
        for start in range(0, len(numbers), CHUNK):
            numbers[start : start + CHUNK] = step(numbers[start : start + CHUNK])
        outside = np.flatnonzero(numbers >= self._n)
        while outside.size:
            numbers[outside] = step(numbers[outside])
            outside = outside[numbers[outside] >= self._n]
        return numbers

    # Sums modulo radix: the result is the smaller of the sum and the sum minus radix. If the sum is below radix, the
    # difference wraps to the top of the 32 bits.

    def _encipher(self, numbers: Int64) -> Int64:
        low, high = self._halves(numbers)
        for key_high, key_low in self._keys.reshape(-1, 2):
            high += self._high_hash(low, key_high)
            np.minimum(high, high - self._radix, out=high)
            low ^= self._low_hash(high, key_low)
        return self._whole(low, high)

    def _decipher(self, images: Int64) -> Int64:
        low, high = self._halves(images)
        for key_high, key_low in self._keys.reshape(-1, 2)[::-1]:
            low ^= self._low_hash(high, key_low)
            high -= self._high_hash(low, key_high)
            np.minimum(high, high + self._radix, out=high)
        return self._whole(low, high)

    def _halves(self, numbers: Int64) -> tuple[UInt32, UInt32]:
        return (numbers & ((1 << self._bits) - 1)).astype(np.uint32), (numbers >> self._bits).astype(np.uint32)

    def _whole(self, low: UInt32, high: UInt32) -> Int64:
        whole = high.astype(np.int64)
        whole <<= self._bits
        whole |= low
        return whole

    def _low_hash(self, high: UInt32, key: np.uint32) -> UInt32:
        hashes = _hash(high, key)
        hashes >>= np.uint32(32 - self._bits)
        return hashes

    def _high_hash(self, low: UInt32, key: np.uint32) -> UInt32:
        # The dtype is explicit: NumPy 1 keeps uint32 * np.uint64(radix) in 32 bits, and the upper half is lost.
        products = np.multiply(_hash(low, key), self._radix, dtype=np.uint64)
        products >>= np.uint64(32)
        return products.astype(np.uint32)


def _hash(halves: UInt32, key: np.uint32) -> UInt32:
    """Return 32-bit hashes with good upper bits: C. Wellons's prospected hash functions without the last shift."""
    hashes = halves + key
    hashes *= MULTIPLIERS[0]
    hashes ^= hashes >> np.uint32(15)
    hashes *= MULTIPLIERS[1]
    return hashes
