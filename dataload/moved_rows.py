"""Rows that a table has written again into other files, such as after a delete without deletion vectors, or OPTIMIZE.

A file that a snapshot has no more may have had rows that the epoch has had, or that were excluded, and a new file may
have them now. Nothing in the metadata tells which, so they are compared by value: all columns of the files that are
read. The old files are read with the columns that the table has now, as the table itself read them when it wrote their
rows again: so a renamed column, a wider type or a member that was added makes no other values. Rows of equal values are
one as good as the other. A row takes 16 bytes of memory, whatever its values are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from dataload.cache.blocks.reader import Object
from dataload.catalog.footer_cache import Metadata
from dataload.catalog.inventory import Inventory, KnownRows
from dataload.catalog.resolve import manifest_of
from dataload.catalog.selection import Selection
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError, OriginNotFound
from dataload.formats.hive_partitions import Keys
from dataload.formats.schema import Field
from dataload.formats.table_columns import TableColumns, TableFile
from dataload.rows.collate import to_batch
from dataload.rows.columns import Array, Ragged, lengths_of
from dataload.rows.row_block import Records
from dataload.runtime.decompression import decompressed
from dataload.runtime.text import counted
from dataload.samplers.keys import mix

if TYPE_CHECKING:
    from dataload.catalog.manifest import Manifest

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

VERSION = 5
BYTES_AT_ONCE = 8 << 20  # of rows that are compared
LANES = 2  # hashes of 64 bits for a row: other rows have equal ones less often than a disk returns wrong bytes
MASK = (1 << 64) - 1

log = logging.getLogger(__name__)


def moved(former: Dataset, gone: Int64, newer: Dataset, added: Int64, hint: str) -> Int64:
    """Return which rows of a newer snapshot are rows of a former one, as many of each value as these. Each host once.

    Args:
        former: The former snapshot.
        gone: Rows of it whose files the newer one lacks: int64 [n].
        newer: The newer snapshot.
        added: Rows of it in files that the former one lacks: int64 [m]. Of equal ones, the first are taken.
        hint: What these rows are and what to do, for the error.

    Raises:
        ConfigError: It cannot be told: a file of the former snapshot is gone, or the columns are others.
        OriginError: The origin failed.
        DataError: A row group cannot be decoded.
    """
    own, table = former.manifest.table, newer.manifest.table
    called = {} if own is None or table is None else own.called_in(table)
    names = _common(called, own, newer.file_columns)
    if table is None or names is None:
        raise ConfigError(
            f"{newer.manifest.pinned} has written rows of {former.manifest.pinned} again, and columns were dropped and "
            f"added since, so equal rows cannot be found. {hint}"
        )
    # The loader says what to do about nulls in the columns that it reads, not about those in others.
    null_masks = newer.read_options.null_masks or not {*names} <= {*newer.file_columns}
    read_options = replace(newer.read_options, null_masks=null_masks)
    new = Dataset(newer.manifest, newer.blocks, names, read_options)
    digest = hashlib.blake2b(digest_size=16, person=b"moved rows")
    how = repr((names, read_options))
    digest.update(json.dumps([former.manifest.fingerprint, new.fingerprint, how, len(gone)]).encode())
    digest.update(np.ascontiguousarray(gone, "<i8").data)
    digest.update(np.ascontiguousarray(added, "<i8").data)

    def parsed(data: memoryview) -> Int64:
        found = np.cumsum(np.frombuffer(decompressed(data, 8 * len(gone)), "<i8").astype(np.int64))
        if len(found) > len(gone) or np.any(np.diff(found) <= 0) or not np.all(np.isin(found, added)):
            raise ValueError("no rows of the new files")
        return found

    cached = Metadata(new.blocks, Object("moved rows", 0, digest.hexdigest()), f"moved {VERSION}", parsed)
    try:
        return cached.get_or_make_once(lambda: _found(former.manifest, gone, new, added, table, called))
    except OriginNotFound as error:
        raise ConfigError(f"{error}. The table may have written its rows again into new files. {hint}") from error
    except _OtherTypes as error:
        raise ConfigError(
            f"{newer.manifest.pinned} has written rows of {former.manifest.pinned} again, and they cannot be compared, "
            f"because {error}. {hint}"
        ) from error


class _OtherTypes(Exception):
    """Rows of a former snapshot do not have the types that the table has now."""


def _common(called: Mapping[str, str], former: TableColumns | None, read: Sequence[str]) -> list[str] | None:
    """Return the columns to compare, by their newer names; None: others would be taken for equal.

    Args:
        called: What the newer snapshot calls the columns that both have.
        former: The columns of the former one.
        read: The columns that are read of the newer one.
    """
    if {*read} <= {*called.values()}:
        return list(read)
    # Batches have columns that the former snapshot lacked. So what both have must tell the rows of the former one.
    return list(called.values()) if former is not None and len(called) == len(former.identities) else None


def _found(
    former: Manifest, gone: Int64, newer: Dataset, added: Int64, table: TableColumns, called: Mapping[str, str]
) -> bytes:
    log.info("comparing %s of files that the table has no more with %d new ones", counted(len(gone), "row"), len(added))
    old = _with_columns(former, gone, newer, table, called)
    keys = [secrets.randbits(64) for _ in range(LANES)]  # so that nobody can make other rows of equal hashes
    fields = newer.rowstore.layout.fields  # Those of the old rows are the same.
    try:
        hashes = _hashes(old, np.arange(len(old)), fields, keys)
    except DataError as error:
        raise _OtherTypes(str(error)) from error
    found = np.sort(added[_equal(hashes, _hashes(newer, added, fields, keys))])
    return zlib.compress(np.diff(found, prepend=0).astype("<i8").tobytes(), 1)


def _with_columns(
    former: Manifest, gone: Int64, newer: Dataset, table: TableColumns, called: Mapping[str, str]
) -> Dataset:
    """Return rows of a former snapshot as a dataset that reads them with the columns that the table has now."""
    inventory, known = Inventory.of(former, ""), KnownRows()
    known.add(inventory, [gone])
    groups = np.unique(np.searchsorted(np.cumsum(inventory.block_lengths), gone, "right"))
    places = {group.file: group.footer_at for group in map(former.row_groups.__getitem__, groups.tolist())}
    files: dict[Object, Keys] = {}
    outside = frozenset[str]() if former.table is None else former.table.outside  # It may have other partitions now.
    columns = replace(table, outside=frozenset(called[name] for name in outside if name in called))
    for file in places:
        values = tuple((called[name], value) for name, value in getattr(file, "constants", ()) if name in called)
        files[TableFile(file.path, file.size, file.version, columns=columns, constants=values)] = ()
    manifest = manifest_of(files, newer.blocks, errors=newer.read_options.errors, known=lambda: places)
    here = Inventory.of(manifest, "")
    # Only these rows, because others may have nulls that batches cannot hold.
    selection = Selection.of(~others for others in known.others(here))
    if selection.counts.sum() < len(gone):
        raise _OtherTypes("a footer of an old file has changed")
    return Dataset(manifest.selected(selection), newer.blocks, newer.file_columns, newer.read_options)


def _equal(old: UInt64, new: UInt64) -> Int64:
    """Return which new hashes equal old ones, the first ones of as many: int64 [k]. Both are uint64 [lanes, rows]."""
    hashes = np.concatenate((old, new), axis=1)
    order = np.lexsort(hashes)  # stable: of equal ones, the old ones come first
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (hashes[:, order[1:]] != hashes[:, order[:-1]]).any(axis=0)
    firsts, is_new = np.flatnonzero(begins), order >= old.shape[1]
    counts = np.add.reduceat(~is_new, firsts, dtype=np.int64)  # of old ones
    ends = np.repeat(firsts + 2 * counts, np.diff(firsts, append=len(order)))
    found: Int64 = order[is_new & (np.arange(len(order)) < ends)] - old.shape[1]
    return found


def _hashes(dataset: Dataset, rows: Int64, columns: Sequence[Field], keys: Sequence[int]) -> UInt64:
    """Return hashes of the values of rows: uint64 [keys, rows].

    Args:
        dataset: The dataset.
        rows: The rows.
        columns: The columns.
        keys: The key of each hash.
    """
    count = max(1, BYTES_AT_ONCE // dataset.rowstore.row_bytes)
    hashes = np.zeros((len(keys), len(rows)), np.uint64)
    for first in range(0, len(rows), count):
        part = hashes[:, first : first + count]
        records = dataset.rowstore.gather(rows[first : first + count])
        for field in columns:
            for hashed, own, key in zip(part, _of_column(records, field, keys), keys, strict=True):
                hashed[:] = mix(key, hashed + own)
    return hashes


def _of_column(records: Records, field: Field, keys: Sequence[int]) -> UInt64:
    """Return hashes of the values of a column: uint64 [keys, rows]."""
    if field.is_bytes:
        found, codes = np.empty((len(keys), len(records)), np.uint64), records.rows[field.name]
        for number, blob in enumerate(records.blobs):
            here, (lengths, valid) = records.which == number, lengths_of(blob.spans(field))
            found[:, here] = _of_bytes(blob.heap(field), lengths, valid, keys)[:, codes[here]]
        return found
    if field.kind != "nested":
        lists = records.ragged(field) if field.ragged else Ragged(records.dense(field), np.arange(len(records) + 1))
        values = lists.values
        words = values.astype(np.float64 if values.dtype.kind == "f" else np.int64).view(np.uint64).ravel()
        each = math.prod(values.shape[1:])
        return _of_words(words, each * lists.offsets, np.diff(lists.offsets), lists.valid, keys)
    column = to_batch(records, columns=[field.name])[field.name]
    texts = [repr(_plain(value)).encode(errors="surrogateescape") for value in column]
    return _of_bytes(b"".join(texts), np.array([*map(len, texts)]), None, keys)


def _of_bytes(content: Any, lengths: Int64, valid: Array | None, keys: Sequence[int]) -> UInt64:
    """Return hashes of consecutive byte strings of these lengths: uint64 [keys, strings]."""
    buffer = np.concatenate((np.frombuffer(content, np.uint8), np.zeros(8, np.uint8)))
    at_byte: UInt64 = np.ndarray(len(content) + 1, "<u8", buffer, strides=(1,))  # the 8 bytes from each byte on
    counts = -(-lengths // 8)
    starts = np.concatenate(([0], np.cumsum(counts)))
    words = at_byte[8 * np.arange(starts[-1]) + np.repeat(np.cumsum(lengths) - lengths - 8 * starts[:-1], counts)]
    cut = lengths % 8 > 0
    words[starts[1:][cut] - 1] &= (np.uint64(1) << (8 * (lengths[cut] % 8)).astype(np.uint64)) - np.uint64(1)
    return _of_words(words, starts, lengths, valid, keys)


def _of_words(words: UInt64, starts: Int64, lengths: Int64, valid: Array | None, keys: Sequence[int]) -> UInt64:
    """Return hashes of lists of words: uint64 [keys, lists].

    Args:
        words: All words.
        starts: Where each list begins in them, then their number: int64 [lists + 1].
        lengths: What tells lists of equal words apart: int64 [lists].
        valid: Which lists are not null; None: all.
        keys: The key of each hash.
    """
    places = (np.arange(len(words)) - np.repeat(starts[:-1], np.diff(starts))).astype(np.uint64)
    found = np.empty((len(keys), len(lengths)), np.uint64)
    said = lengths if valid is None else np.where(valid, lengths, -1)
    for hashes, key in zip(found, keys, strict=True):
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(mix(key, words ^ mix(~key & MASK, places)))))
        hashes[:] = mix(key, sums[starts[1:]] - sums[starts[:-1]] + mix(key, said.astype(np.uint64)))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return bytes(value) if isinstance(value, memoryview) else value
