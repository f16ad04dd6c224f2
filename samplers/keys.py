"""64-bit keys derived from tuples, and integer hashes derived from keys.

Golden vectors in the tests fix both: an interrupted epoch must resume in the same order years later. Python's `hash` is
salted, and the streams of numpy's Generator may change between versions.
"""

from __future__ import annotations

import operator
from hashlib import blake2b
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

PERSON = b"dataload.order"
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def derive_key(*parts: SupportsIndex | str | bytes) -> int:
    """Return a key in [0, 2**64) for integers, strings and bytes. Different tuples give unrelated keys."""
    digest = blake2b(digest_size=8, person=PERSON)
    for part in parts:
        kind, content = _encode(part)
        # Kind and length keep tuples apart: ("ab", "c") differs from ("a", "bc"), and 1 from "1".
        digest.update(kind + len(content).to_bytes(8, "little") + content)
    return int.from_bytes(digest.digest(), "little")


def mix(key: int, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return hashes of `numbers`: uint64 of the same shape. Distinct numbers have distinct hashes.

    Number i maps to output i of splitmix64 seeded with `key` (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, OOPSLA 2014).
    """
    hashes = (numbers + np.uint64(1)) * GAMMA
    hashes += np.uint64(key)
    hashes ^= hashes >> np.uint64(30)
    hashes *= MULTIPLIERS[0]
    hashes ^= hashes >> np.uint64(27)
    hashes *= MULTIPLIERS[1]
    hashes ^= hashes >> np.uint64(31)
    return hashes


def _encode(part: SupportsIndex | str | bytes) -> tuple[bytes, bytes]:
    if isinstance(part, bytes):
        return b"b", part
    if isinstance(part, str):
        return b"s", part.encode(errors="surrogateescape")  # A path on disk need not be UTF-8.
    return b"i", str(operator.index(part)).encode()
