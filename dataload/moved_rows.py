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
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.recfunctions import repack_fields

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
from dataload.rows.row_block import Records
from dataload.runtime.decompression import decompressed
from dataload.runtime.text import counted

if TYPE_CHECKING:
    from dataload.catalog.manifest import Manifest

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

VERSION = 5
BYTES_AT_ONCE = 8 << 20  # of rows that are compared
HASH_BYTES = 16  # of a row: other rows have equal hashes less often than a disk returns wrong bytes

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
    key = secrets.token_bytes(HASH_BYTES)  # so that nobody can make other rows of equal hashes
    fields = newer.rowstore.layout.fields  # Those of the old rows are the same.
    try:
        hashes = _hashes(old, np.arange(len(old)), fields, key)
    except DataError as error:
        raise _OtherTypes(str(error)) from error
    found = np.sort(added[_equal(hashes, _hashes(newer, added, fields, key))])
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
    """Return which new hashes equal old ones, the first ones of as many: int64 [k]. Both are uint64 [2, rows]."""
    hashes = np.concatenate((old, new), axis=1)
    order = np.lexsort(hashes)  # stable: of equal ones, the old ones come first
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (hashes[:, order[1:]] != hashes[:, order[:-1]]).any(axis=0)
    firsts, is_new = np.flatnonzero(begins), order >= old.shape[1]
    counts = np.add.reduceat(~is_new, firsts, dtype=np.int64)  # of old ones
    ends = np.repeat(firsts + 2 * counts, np.diff(firsts, append=len(order)))
    found: Int64 = order[is_new & (np.arange(len(order)) < ends)] - old.shape[1]
    return found


def _hashes(dataset: Dataset, rows: Int64, columns: Sequence[Field], key: bytes) -> UInt64:
    """Return a hash of the values of each row: uint64 [2, rows]."""
    count = max(1, BYTES_AT_ONCE // dataset.rowstore.row_bytes)
    empty, hashes = hashlib.blake2b(key=key, digest_size=HASH_BYTES), bytearray()
    for first in range(0, len(rows), count):
        records = dataset.rowstore.gather(rows[first : first + count])
        for values in zip(*_values(records, columns), strict=True):
            digest = empty.copy()
            digest.update(b"".join(values))
            hashes += digest.digest()
    return np.frombuffer(hashes, np.uint64).reshape(-1, 2).T


def _values(records: Records, columns: Sequence[Field]) -> list[list[bytes | memoryview]]:
    """Return the values of rows as bytes, in parts: those of fixed length and the lengths of the others, then these."""
    fixed = [repack_fields(records.rows[[field.name for field in columns if not field.ragged]])]
    others: list[list[bytes | memoryview]] = []
    for field in columns:
        if field.kind == "nested":
            column = to_batch(records, columns=[field.name])[field.name]
            others.append([repr(_plain(value)).encode(errors="surrogateescape") for value in column])
            fixed.append(np.array([*map(len, others[-1])]))
        elif field.ragged:
            others.append([value or b"" for value in records.views(field)])
            fixed.append(records.spans(field)[:, 1])  # which tells a null, too
    parts = [np.frombuffer(each.tobytes(), np.uint8).reshape(len(records), -1) for each in fixed]
    whole = np.concatenate(parts, axis=1)
    return [whole.view(f"V{whole.shape[1]}")[:, 0].tolist(), *others]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return bytes(value) if isinstance(value, memoryview) else value
