"""Rows that a table has written again into other files, such as after a delete without deletion vectors, or OPTIMIZE.

A file that a snapshot has no more may have had rows that the epoch has had, or that were excluded, and a new file may
have them now. Nothing in the metadata tells which, so they are compared by value: all columns of the files that are
read. Rows of equal values are one as good as the other.
"""

from __future__ import annotations

import hashlib
import json
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
from dataload.dataset import Dataset
from dataload.errors import ConfigError, OriginNotFound
from dataload.runtime.text import counted

if TYPE_CHECKING:
    from dataload.catalog.manifest import Manifest

Int64 = npt.NDArray[np.int64]

VERSION = 2
ROWS_AT_ONCE = 1 << 14

log = logging.getLogger(__name__)


def moved(former: Dataset, gone: Int64, newer: Dataset, added: Int64, hint: str) -> Int64:
    """Return which rows of a newer snapshot are rows of a former one, as many of each value as these. Each host once.

    Args:
        former: The former snapshot.
        gone: Rows of it whose files the newer one lacks: int64 [n].
        newer: The newer snapshot.
        added: Rows of it in files that the former one lacks, ascending: int64 [m].
        hint: What these rows are and what to do, for the error.

    Raises:
        ConfigError: It cannot be told: a file of the former snapshot is gone, or the columns are others.
        OriginError: The origin failed.
        DataError: A row group cannot be decoded.
    """
    pairs = _common(former.manifest, newer.manifest, newer.file_columns)
    if pairs is None:
        raise ConfigError(
            f"{newer.manifest.pinned} has written rows of {former.manifest.pinned} again, and columns were dropped and "
            f"added since, so equal rows cannot be found. {hint}"
        )
    old, new = _of_files(former, [own for own, _ in pairs]), _of_files(newer, [own for _, own in pairs])
    how = repr((pairs, newer.fill_null, newer.null_masks, newer.errors))
    digest = hashlib.blake2b(digest_size=16, person=b"moved rows")
    digest.update(json.dumps([old.fingerprint, new.fingerprint, how, len(gone)]).encode())
    digest.update(np.ascontiguousarray(gone, "<i8").data)
    digest.update(np.ascontiguousarray(added, "<i8").data)

    def parsed(data: memoryview) -> Int64:
        found = np.frombuffer(zlib.decompress(data), "<i8").astype(np.int64)
        if len(found) > len(gone) or np.any(np.diff(found) <= 0) or not np.all(np.isin(found, added)):
            raise ValueError("no rows of the new files")
        return found

    cached = Metadata(new.blocks, Object("moved rows", 0, digest.hexdigest()), f"moved {VERSION}", parsed)
    try:
        return cached.get_or_make_once(lambda: _found(old, gone, new, added))
    except OriginNotFound as error:
        raise ConfigError(f"{error}. The table may have written its rows again into new files. {hint}") from error


def _common(former: Manifest, newer: Manifest, read: Sequence[str]) -> list[tuple[str, str]] | None:
    """Return the columns to compare, by their former and their newer names; None: others would be taken for equal.

    Args:
        former: The former snapshot.
        newer: The newer snapshot.
        read: The columns that are read of it.
    """
    if former.table is None or newer.table is None:
        return None
    own, other = ({key: name for name, key in each.table.identities.items()} for each in (former, newer) if each.table)
    pairs = [(own[key], name) for key, name in other.items() if key in own]
    chosen = [pair for pair in pairs if pair[1] in read]
    if len(chosen) == len(read):
        return chosen
    # Batches have columns that the former snapshot lacked. So what both have must tell the rows of the former one.
    return pairs if len(pairs) == len(own) else None


def _of_files(dataset: Dataset, columns: Sequence[str]) -> Dataset:
    """Return the same rows with columns of the files, before `map`."""
    how = dataset.fill_null, dataset.null_masks
    return Dataset(dataset.manifest, dataset.blocks, columns, *how, errors=dataset.errors)


def _found(former: Dataset, gone: Int64, newer: Dataset, added: Int64) -> bytes:
    log.info("comparing %s of files that the table has no more with %d new ones", counted(len(gone), "row"), len(added))
    left = Counter(values for _, values in _values(former, gone))
    found = []
    for number, values in _values(newer, added):
        if left[values]:
            found.append(number)
            left[values] -= 1
    return zlib.compress(np.array(found, "<i8").tobytes())


def _values(dataset: Dataset, rows: Int64) -> Iterator[tuple[int, bytes]]:
    """Yield each row, and a digest of its values."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[first : first + ROWS_AT_ONCE]
        columns = dataset.__getitems__(part).columns
        masks = [name for name in map("{}.is_null".format, dataset.file_columns) if name in columns]
        plain = ([_plain(value) for value in columns[name]] for name in (*dataset.file_columns, *masks))
        for number, row in zip(part.tolist(), zip(*plain, strict=True), strict=True):
            yield number, hashlib.blake2b(repr(row).encode(errors="surrogateescape"), digest_size=16).digest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return bytes(value) if isinstance(value, memoryview) else value
