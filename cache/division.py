"""Divide a cache among the datasets that the loaders of a host read."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

import numpy as np
import numpy.typing as npt

FITS = 0.95  # usable part of a cache; the rest is footers and the padding of files to whole pages
MAX_TRANSIENT = 16  # row groups: longer runs of missing ones are rare, and few threads load them
NEGLIGIBLE = 0.01  # of the bytes that are fetched in each epoch

Numbers = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.float64]

_HEADER = struct.Struct("<16sQQQd")  # name, window, at_once, number of groups, mean


@dataclass(frozen=True, eq=False)
class Need:
    """The bytes that a loader needs in a cache.

    Args:
        name: Identifies the groups and their order, 16 bytes. Ranks that read one epoch together have the same name.
        groups: Numbers of the groups of blobs that an epoch reads, ascending and distinct, uint64 [n]; see
            `group_number`.
        sizes: Bytes of each group, float64 [n].
        window: Bytes on disk that are read at a time.
        at_once: How many groups these are.
        mean: Mean bytes of a group.
    """

    name: bytes
    groups: Numbers
    sizes: Sizes
    window: int = 0
    at_once: int = 0
    mean: float = 0.0

    @classmethod
    def of(
        cls, name: bytes, groups: Numbers, sizes: Sizes, window: int = 0, at_once: int = 0, node_share: float = 1.0
    ) -> Self:
        """Return the need of these groups. A group may come several times, such as in two filters of one dataset.

        Args:
            name: As above.
            groups: Numbers of groups, uint64 [n].
            sizes: Bytes of each group, float64 [n].
            window: As above.
            at_once: As above.
            node_share: Part of the groups that this host reads.
        """
        distinct, firsts = np.unique(groups, return_index=True)
        own = sizes[firsts]
        window = int(min(window, own.sum()))
        return cls(name, distinct, own * node_share, window, at_once, float(own.mean()) if len(own) else 0.0)

    @property
    def total(self) -> float:
        """Bytes of all groups."""
        return float(self.sizes.sum())

    def transient_share(self, limit: int, total: float) -> tuple[int, int]:
        """Return the part of the transient region for this need: its bytes, and the groups to prefetch into it.

        It has space for what is read at a time. It grows to at most `MAX_TRANSIENT` groups if that is negligible beside
        the bytes that are fetched in each epoch.

        Args:
            limit: Size of the cache in bytes.
            total: Bytes of all groups that loaders of the host need.

        Returns:
            (bytes, groups); (0, 0) if all groups fit into the cache together.
        """
        if total <= limit * FITS:
            return 0, 0
        fetched = (total - limit) * min(1.0, self.total / total)
        spare = min(fetched * NEGLIGIBLE, limit - self.window)
        more = max(0, min(MAX_TRANSIENT - self.at_once, int(spare / max(1.0, self.mean))))
        return self.window + math.ceil(more * self.mean), min(MAX_TRANSIENT, self.at_once + more)

    def to_bytes(self) -> bytes:
        """Return the need as bytes."""
        header = _HEADER.pack(self.name, self.window, self.at_once, len(self.groups), self.mean)
        return header + self.groups.tobytes() + self.sizes.tobytes()

    @classmethod
    def all_from(cls, content: bytes) -> list[Self]:
        """Return the needs in concatenated results of `to_bytes`.

        Raises:
            ValueError: The content is incomplete.
        """
        found, start = [], 0
        while start < len(content):
            try:
                name, window, at_once, count, mean = _HEADER.unpack_from(content, start)
            except struct.error as error:
                raise ValueError(str(error)) from error
            start += _HEADER.size
            groups = np.frombuffer(content, np.uint64, count, start)
            sizes = np.frombuffer(content, np.float64, count, start + 8 * count)
            start += 16 * count
            found.append(cls(name, groups, sizes, window, at_once, mean))
        return found


@dataclass(frozen=True, eq=False)
class Division:
    """How the needs of a host share a cache. `divide` makes one.

    Attributes:
        region: Bytes of the transient region: the groups that do not stay evict each other there. 0: all groups stay.
        total: Bytes that all needs have together; what several needs share counts once.
        stays_below: The groups with numbers below it stay.
        groups: Numbers of all needed groups, ascending, uint64 [n].
    """

    region: int = 0
    total: float = 0.0
    stays_below: int = 1 << 64
    groups: Numbers = field(default_factory=lambda: np.empty(0, np.uint64))

    def is_needed(self, group: int) -> bool:
        """Return whether a loader needs a group of blobs."""
        place = int(np.searchsorted(self.groups, np.uint64(group)))
        return place < len(self.groups) and int(self.groups[place]) == group

    def stays(self, group: int) -> bool:
        """Return whether a group of blobs is among those that stay."""
        return group < self.stays_below and self.is_needed(group)


def divide(limit: int, processes: Iterable[Sequence[Need]]) -> Division:
    """Divide a cache among the needs of all processes of a host.

    A group that several loaders need counts once. If not all groups fit, each dataset keeps the same part of its bytes,
    so the shares are by need. The numbers of groups are digests, and those with the smallest numbers stay. So all
    processes agree on the groups that stay, and a change of the shares moves no other groups.

    Args:
        limit: Size of the cache in bytes.
        processes: The needs of each process.

    Example:
        >>> numbers = np.array([1, 2, 3, 4, 5, 6], np.uint64)
        >>> one, other = (Need.of(bytes(16), some, np.full(4, 10.0), window=5) for some in (numbers[:4], numbers[2:]))
        >>> divide(100, [[one], [other]]).total
        60.0
        >>> division = divide(40, [[one], [other]])
        >>> [group for group in range(8) if division.stays(group)]
        [1, 2, 3]
    """
    listed = [list(needs) for needs in processes]
    needs = list(chain.from_iterable(listed))
    if not needs:
        return Division()
    groups, which_group = np.unique(np.concatenate([need.groups for need in needs]), return_inverse=True)
    sizes = np.zeros(len(groups))
    listed_sizes = np.concatenate([need.sizes for need in needs])
    np.maximum.at(sizes, which_group, listed_sizes)  # the same for all processes, whatever they know
    total = float(sizes.sum())
    region = min(limit, _region(limit, total, listed))
    stays_below = 1 << 64
    if region and any(len(need.groups) != len(groups) for need in needs):  # A single dataset may fill the cache freely.
        count = int(np.searchsorted(np.cumsum(sizes), limit * FITS - region, side="right"))
        stays_below = int(groups[count]) if count < len(groups) else stays_below
    return Division(region, total, stays_below, groups)


def _region(limit: int, total: float, processes: Sequence[Sequence[Need]]) -> int:
    """Return the bytes of the transient region. Ranks that read an epoch together share a part of it."""
    parts = Counter[bytes]()  # by need
    for needs in processes:
        own = Counter[bytes]()
        for need in needs:
            own[need.name] += need.transient_share(limit, total)[0]
        parts |= own  # the larger count
    return parts.total()
