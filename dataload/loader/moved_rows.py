"""Rows that a table has written again into other files, such as after a delete without deletion vectors, or OPTIMIZE.

A file that a snapshot has no more may have had rows that the epoch has had, and a new file may have them now. Nothing
in the metadata tells which, so they are compared by value: all columns that batches have. Rows of equal values are one
as good as the other.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from dataload.cache.blocks.reader import Object
from dataload.catalog.footer_cache import Metadata
from dataload.errors import OriginNotFound
from dataload.runtime.text import counted

if TYPE_CHECKING:
    from dataload.dataset import Dataset

Int64 = npt.NDArray[np.int64]

VERSION = 1
ROWS_AT_ONCE = 1 << 14

log = logging.getLogger(__name__)


def moved(former: Dataset, gone: Int64, newer: Dataset, added: Int64) -> Int64:
    """Return which rows of a newer snapshot are rows of a former one, as many of each value as these. Each host once.

    Args:
        former: The former snapshot.
        gone: Rows of it whose files the newer one lacks: int64 [n].
        newer: The newer snapshot.
        added: Rows of it in files that the former one lacks: int64 [m].

    Raises:
        OriginNotFound: A file of the former snapshot is gone.
    """
    names = [name for name in newer.schema.names if name in former.schema.names]
    if not names:
        return np.empty(0, np.int64)
    content = [former.fingerprint, newer.fingerprint, *names, gone.tobytes().hex(), added.tobytes().hex()]
    digest = hashlib.blake2b(repr(content).encode(), digest_size=16, person=b"moved rows").hexdigest()
    cached = Metadata(newer.blocks, Object("moved rows", 0, digest), f"moved {VERSION}", _unpacked)
    return cached.get_or_make_once(lambda: _found(former, gone, newer, added, names))


def _found(former: Dataset, gone: Int64, newer: Dataset, added: Int64, names: Sequence[str]) -> bytes:
    log.info("comparing %s of files that the table has no more with %d new ones", counted(len(gone), "row"), len(added))
    left = Counter[bytes]()
    try:
        for _, values in _values(former, gone, names):
            left[values] += 1
    except OriginNotFound as error:
        raise OriginNotFound(
            f"{error}. The epoch has had rows of it, which may be in new files now, so the rest of the epoch is not "
            "known: begin an epoch with set_epoch"
        ) from error
    found = []
    for number, values in _values(newer, added, names):
        if left[values]:
            found.append(number)
            left[values] -= 1
    return zlib.compress(np.array(found, "<i8").tobytes())


def _values(dataset: Dataset, rows: Int64, names: Sequence[str]) -> Iterator[tuple[int, bytes]]:
    """Yield each row, and a digest of its values."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[first : first + ROWS_AT_ONCE]
        columns = dataset.__getitems__(part).columns
        values = zip(*([_plain(value) for value in columns[name]] for name in names), strict=True)
        for number, row in zip(part.tolist(), values, strict=True):
            yield number, hashlib.blake2b(repr(row).encode(errors="surrogateescape"), digest_size=16).digest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return bytes(value) if isinstance(value, memoryview) else value


def _unpacked(data: memoryview) -> Int64:
    return np.frombuffer(zlib.decompress(data), "<i8").astype(np.int64)
