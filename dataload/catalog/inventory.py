"""Which rows a dataset has, by file and version: what is known of data that has changed since.

A row is its place in a row group of a file. Two snapshots have the same row if both have that file, unchanged.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from dataload.catalog.manifest import Manifest
from dataload.catalog.selected_rows import SelectedRows
from dataload.catalog.selection import Mask, Selection
from dataload.runtime.cached_property import cached_property
from dataload.runtime.redact import redacted

Int64 = npt.NDArray[np.int64]
MOST_BYTES: Final = 1 << 30  # of an inventory: one of a billion rows has a bit for each
MOST_ROWS: Final = 1 << 36
KINDS: Final = (str, int, str, int, int)  # of a key, and of a number of rows

Key = tuple[str, int, str, int]
"""The name, the size and the version of a file, and the number of a row group in it."""


@dataclass(frozen=True, eq=False)
class Inventory:
    """The row groups of a dataset, and which of their rows it has.

    Attributes:
        order_key: That of the dataset.
        keys: The row groups, in order.
        lengths: Rows of each, selected or not: int64 [M].
        selection: The rows that the dataset has; None: all.
    """

    order_key: str
    keys: tuple[Key, ...]
    lengths: Int64
    selection: Selection | None = None

    @classmethod
    def of(cls, manifest: Manifest, order_key: str) -> Inventory:
        """Return the inventory of a dataset."""
        return cls(order_key, keys_of(manifest), manifest.stored_lengths, manifest.selection)

    @property
    def block_lengths(self) -> Int64:
        """Rows of the dataset in each row group: int64 [M]."""
        return self.lengths if self.selection is None else self.selection.counts

    @cached_property
    def starts(self) -> Int64:
        """First row of each row group among all rows of them, then the number of these: int64 [M + 1]."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @cached_property
    def selected(self) -> SelectedRows | None:
        """The numbers of the dataset's rows among all rows of the row groups; None: they are the same."""
        return None if self.selection is None else SelectedRows(self.selection)

    def rows_in(self, keys: Collection[Key]) -> Int64:
        """Return the numbers of the dataset's rows in some row groups, ascending."""
        chosen = np.array([key in keys for key in self.keys], np.bool_)
        return np.flatnonzero(np.repeat(chosen, self.block_lengths))

    def part_of(self, manifest: Manifest) -> Manifest | None:
        """Return the manifest of these rows, of one that has further ones; None: it lacks some."""
        numbers = {key: number for number, key in enumerate(keys_of(manifest))}
        if any(key not in numbers for key in self.keys):
            return None
        found = manifest.only(numbers[key] for key in self.keys)
        return found if self.selection is None else found.selected(self.selection)

    def beside(self, manifest: Manifest) -> Inventory:
        """Return the inventory of the same files in the folder that those of a manifest are in, which has copies."""
        files = {key[:3] for key in keys_of(manifest)}
        if any(key[:3] in files for key in self.keys):
            return self
        # Of equal files, those are the same whose paths end alike the longest.
        ends: dict[tuple[Any, ...], str] = {}
        for path, *rest in sorted(files):
            for end in _ends(path):
                ends.setdefault((end, *rest), path)
        same = [
            (len(end), path[: -len(end)], ends[end, size, version][: -len(end)])
            for path, size, version in dict.fromkeys(key[:3] for key in self.keys)
            for end in _ends(path)
            if (end, size, version) in ends
        ]
        if not same:
            return self
        _, old, new = max(same)
        moved = ((new + path.removeprefix(old) if path.startswith(old) else path, *rest) for path, *rest in self.keys)
        return replace(self, keys=cast("tuple[Key, ...]", tuple(moved)))

    def to_bytes(self) -> bytes:
        """Return the inventory as bytes, without credentials."""
        files: dict[tuple[str, int, str], list[list[int]]] = {}
        for (path, size, version, number), rows in zip(self.keys, self.lengths.tolist(), strict=True):
            files.setdefault((path, size, version), []).append([number, rows])
        chosen = None if self.selection is None else base64.b64encode(self.selection.to_bytes()).decode()
        content = [self.order_key, [[*file, groups] for file, groups in files.items()], chosen]
        return zlib.compress(json.dumps(content, separators=(",", ":")).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Inventory:
        """Return the inventory that `to_bytes` wrote. Raise ValueError for other bytes."""
        try:
            order_key, files, chosen = json.loads(_unpacked(data))
            groups = [(path, size, version, number, rows) for path, size, version, of in files for number, rows in of]
            columns = list(zip(*groups, strict=True)) or [()] * len(KINDS)
            if any(type(value) is not kind for kind, column in zip(KINDS, columns, strict=True) for value in column):
                raise ValueError("a file with other values than its name, size and version")
            lengths = np.array(columns[-1], np.int64)
            if lengths.min(initial=0) < 0 or sum(columns[-1]) > MOST_ROWS:
                raise ValueError(f"row groups of a negative number of rows, or of more than {MOST_ROWS:,}")
            selection = None if chosen is None else Selection.from_bytes(base64.b64decode(chosen), lengths.tolist())
        except (TypeError, IndexError, OverflowError, RecursionError, zlib.error) as error:
            raise ValueError(f"no inventory ({error})") from error
        return cls(str(order_key), tuple(group[:4] for group in groups), lengths, selection)


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(data, MOST_BYTES)
    if not unpacker.eof:
        raise ValueError(f"it is cut short, or is longer than {MOST_BYTES:,} bytes")
    return found


def _ends(path: str) -> list[str]:
    """Return the name of a file, then with its folder, then with that of the folder, …"""
    parts = path.split("/")
    return ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def keys_of(manifest: Manifest) -> tuple[Key, ...]:
    """Return what each row group is known by."""
    paths: dict[str, str] = {}
    for group in manifest.row_groups:
        if group.file.path not in paths:
            paths[group.file.path] = redacted(group.file.stable_path)
    return tuple(
        (paths[group.file.path], group.file.size, group.mark or group.file.version, group.number)
        for group in manifest.row_groups
    )


class KnownRows:
    """Rows of files, whatever datasets have them: one bit for each row of their row groups."""

    def __init__(self) -> None:
        self._bits: dict[Key, npt.NDArray[np.uint8]] = {}

    def add(self, inventory: Inventory, parts: Iterable[Int64]) -> None:
        """Add rows of a dataset, by their numbers in it."""
        starts = inventory.starts
        borders = np.concatenate(([0], np.cumsum(-(-inventory.lengths // 8))))
        bits = np.zeros(int(borders[-1]), np.uint8)
        for numbers in parts:
            rows = numbers if inventory.selected is None else inventory.selected.rows(numbers)
            if not len(rows):
                continue
            rows = np.sort(rows)  # So the bits of a byte follow each other.
            groups = np.searchsorted(starts, rows, "right") - 1
            within = rows - starts[groups]
            places = borders[groups] + within // 8
            firsts = np.flatnonzero(np.diff(places, prepend=-1))
            bits[places[firsts]] |= np.bitwise_or.reduceat((1 << (within % 8)).astype(np.uint8), firsts)
        for key, own in zip(inventory.keys, np.split(bits, borders[1:-1]), strict=True):
            if own.any():
                self._bits[key] = own | self._bits[key] if key in self._bits else own

    def others(self, inventory: Inventory) -> Iterator[Mask]:
        """Yield which of the rows that a dataset has of each row group are not among these: bool [rows of it]."""
        for number, (key, rows) in enumerate(zip(inventory.keys, inventory.lengths.tolist(), strict=True)):
            mask = np.ones(rows, np.bool_)
            if (bits := self._bits.get(key)) is not None:
                mask = ~np.unpackbits(bits, count=rows, bitorder="little").view(np.bool_)
            yield mask if inventory.selection is None else mask[inventory.selection.mask(number)]

    def numbers(self, inventory: Inventory, keys: Collection[Key]) -> Int64:
        """Return the numbers of those rows among these that a dataset has in some row groups, ascending."""
        masks = zip(inventory.keys, self.others(inventory), strict=True)
        found = [~mask if key in keys else np.zeros(len(mask), np.bool_) for key, mask in masks]
        return np.flatnonzero(np.concatenate([np.empty(0, np.bool_), *found]))

    def and_also(self, inventory: Inventory, numbers: Int64) -> KnownRows:
        """Return these rows and others of a dataset, by their numbers in it."""
        found = KnownRows()
        found._bits.update(self._bits)
        found.add(inventory, [numbers])
        return found

    def excluded(self, manifest: Manifest) -> Manifest:
        """Return the manifest without these rows."""
        whole = Inventory("", keys_of(manifest), manifest.stored_lengths)
        return manifest.selected(Selection.of(self.others(whole)))


def inventories_to_bytes(inventories: Iterable[Inventory]) -> bytes:
    """Return the inventories of all sources of a loader as bytes."""
    return json.dumps([base64.b64encode(each.to_bytes()).decode() for each in inventories]).encode()


def inventories_from_bytes(data: Any) -> list[Inventory]:
    """Return what `inventories_to_bytes` wrote. Raise ValueError for other bytes."""
    try:
        return [Inventory.from_bytes(base64.b64decode(each)) for each in json.loads(bytes(data))]
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no inventories ({error})") from error
