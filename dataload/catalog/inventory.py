"""Which rows a dataset has, by file and version: what is known of data that has changed since.

A row is its place in a row group of a file. Two snapshots have the same row if both have that file, unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dataload.catalog.manifest import Manifest
from dataload.catalog.selection import Mask, Selection
from dataload.runtime.redact import redacted

Int64 = npt.NDArray[np.int64]

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
        window: The default window of its loaders.
    """

    order_key: str
    keys: tuple[Key, ...]
    lengths: Int64
    selection: Selection | None = None
    window: int = 1

    @classmethod
    def of(cls, manifest: Manifest, order_key: str, window: int = 1) -> Inventory:
        """Return the inventory of a dataset."""
        return cls(order_key, keys_of(manifest), manifest.stored_lengths, manifest.selection, window)

    @property
    def block_lengths(self) -> Int64:
        """Rows of the dataset in each row group: int64 [M]."""
        return self.lengths if self.selection is None else self.selection.counts

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
        numbers = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
        ends = np.cumsum(inventory.block_lengths)
        for group, own in enumerate(np.split(numbers, np.searchsorted(numbers, ends[:-1]))):
            if own.size:
                rows = int(inventory.block_lengths[group])
                mask = np.zeros(rows, np.bool_)
                mask[own - (ends[group] - rows)] = True
                self._add(inventory, group, mask)

    def add_masks(self, inventory: Inventory, masks: Iterable[Mask]) -> None:
        """Add rows of a dataset: which of the rows that it has of each row group."""
        for group, mask in enumerate(masks):
            if mask.any():
                self._add(inventory, group, mask)

    def _add(self, inventory: Inventory, group: int, mask: Mask) -> None:
        whole = mask if inventory.selection is None else inventory.selection.within(group, mask)
        key, bits = inventory.keys[group], np.packbits(whole, bitorder="little")
        self._bits[key] = bits | self._bits[key] if key in self._bits else bits

    def others(self, inventory: Inventory) -> Iterator[Mask]:
        """Yield which of the rows that a dataset has of each row group are not among these: bool [rows of it]."""
        for number, (key, rows) in enumerate(zip(inventory.keys, inventory.lengths.tolist(), strict=True)):
            mask = np.ones(rows, np.bool_)
            if (bits := self._bits.get(key)) is not None:
                mask = ~np.unpackbits(bits, count=rows, bitorder="little").view(np.bool_)
            yield mask if inventory.selection is None else mask[inventory.selection.mask(number)]

    def numbers(self, inventory: Inventory, keys: Collection[Key]) -> Int64:
        """Return the numbers of those rows among these that a dataset has in some row groups, ascending."""
        first, found = 0, [np.empty(0, np.int64)]
        for key, mask in zip(inventory.keys, self.others(inventory), strict=True):
            if key in keys:
                found.append(np.flatnonzero(~mask) + first)
            first += len(mask)
        return np.concatenate(found)

    def and_also(self, inventory: Inventory, numbers: Int64) -> KnownRows:
        """Return these rows and others of a dataset, by their numbers in it."""
        found = KnownRows()
        found._bits.update(self._bits)
        found.add(inventory, [numbers])
        return found
