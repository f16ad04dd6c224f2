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
MOST_GROUPS = 1 << 16  # of a need: a megabyte. A larger need has a sample of its groups.
FILTER_BITS = 1 << 24  # two megabytes. The filter of a million groups takes 6 % of all others for needed ones.

Bits = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.float64]

_HEADER = struct.Struct("<16sQQQQd")  # name, window, at_once, sample, number of groups, mean


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
        sample: Only the groups whose number is a multiple of it are in `groups`; 1: all.
        filter: The filter of all groups (`_filter_of`), if `groups` has only a sample of them.
    """

    name: bytes
    groups: Numbers
    sizes: Sizes
    window: int = 0
    at_once: int = 0
    mean: float = 0.0
    sample: int = 1
    filter: Bits | None = None

    @classmethod
    def of(
        cls, name: bytes, groups: Numbers, sizes: Sizes, window: int = 0, at_once: int = 0, node_share: float = 1.0
    ) -> Self:
        """Return the need of these groups. A group may come several times, such as in two filters of one dataset.

        Of more than `MOST_GROUPS` groups it has a sample, in this process too: all processes must divide alike.

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
        mean, sample = float(own.mean()) if len(own) else 0.0, 1
        while np.count_nonzero(distinct % np.uint64(sample) == 0) > MOST_GROUPS:
            sample *= 2
        kept = distinct % np.uint64(sample) == 0
        found = _filter_of(distinct) if sample > 1 else None
        window = int(min(window, own.sum()))
        return cls(name, distinct[kept], own[kept] * node_share, window, at_once, mean, sample, found)

    def __contains__(self, group: int) -> bool:
        return _is_in(group, self.groups, self.sample, self.filter)

    @property
    def total(self) -> float:
        """Bytes of all groups."""
        return float(self.sizes.sum()) * self.sample

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
        header = _HEADER.pack(self.name, self.window, self.at_once, self.sample, len(self.groups), self.mean)
        found = b"" if self.filter is None else self.filter.tobytes()
        return b"".join([header, self.groups.tobytes(), self.sizes.tobytes(), found])

    @classmethod
    def all_from(cls, content: bytes) -> list[Self]:
        """Return the needs in concatenated results of `to_bytes`.

        Raises:
            ValueError: The content is incomplete.
        """
        found, start = [], 0
        while start < len(content):
            try:
                name, window, at_once, sample, count, mean = _HEADER.unpack_from(content, start)
            except struct.error as error:
                raise ValueError(str(error)) from error
            start += _HEADER.size
            groups = np.frombuffer(content, np.uint64, count, start)
            sizes = np.frombuffer(content, np.float64, count, start + 8 * count)
            start += 16 * count
            bits = np.frombuffer(content, np.uint8, FILTER_BITS // 8, start) if sample > 1 else None
            start += 0 if bits is None else len(bits)
            found.append(cls(name, groups, sizes, window, at_once, mean, max(1, sample), bits))
        return found


def _is_in(group: int, groups: Numbers, sample: int, filtered: Bits | None) -> bool:
    """Return whether groups include a group; if they are a sample, by the filter of all."""
    if filtered is not None and group % sample:
        byte, bit = divmod(group // ((1 << 64) // FILTER_BITS), 8)
        return bool(filtered[byte] & (128 >> bit))
    place = int(np.searchsorted(groups, np.uint64(group)))
    return place < len(groups) and int(groups[place]) == group


def _filter_of(groups: Numbers) -> Bits:
    """Return one bit for each value of a number's highest bits: whether one of the groups has it."""
    bits = np.zeros(FILTER_BITS, np.bool_)
    bits[groups // np.uint64((1 << 64) // FILTER_BITS)] = True
    return np.packbits(bits)


@dataclass(frozen=True, eq=False)
class Division:
    """How the needs of a host share a cache. `divide` makes one.

    Attributes:
        region: Bytes that kept blobs leave free for the groups that do not stay. 0: all groups stay.
        total: Bytes that all needs have together; what several needs share counts once.
        stays_below: The groups with numbers below it stay.
        groups: Numbers of all needed groups, ascending, uint64 [n].
        sample: If a need has a sample, only multiples of this number are in `groups`.
        filter: The filter of all needed groups then.
    """

    region: int = 0
    total: float = 0.0
    stays_below: int = 1 << 64
    groups: Numbers = field(default_factory=lambda: np.empty(0, np.uint64))
    sample: int = 1
    filter: Bits | None = None

    def is_like(self, other: Division) -> bool:
        """Return whether the same groups stay, in the same space."""
        shares = (self.region, self.total, self.stays_below) == (other.region, other.total, other.stays_below)
        return shares and np.array_equal(self.groups, other.groups)

    def stays(self, group: int) -> bool:
        """Return whether a group of blobs is among those that stay.

        If a need has a sample, so do some groups that no loader needs.
        """
        return group < self.stays_below and _is_in(group, self.groups, self.sample, self.filter)


def divide(limit: int, processes: Iterable[Sequence[Need]]) -> Division:
    """Divide a cache among the needs of all processes of a host.

    A group that several loaders need counts once. The numbers of groups are digests, and those with the smallest
    numbers stay, as many as fit. So all processes agree on them, each dataset keeps the same part of its bytes, and a
    change of the shares moves only the groups between two borders.

    What is read at a time needs space besides. As some of it stays, kept groups may take K = (C - w) / (1 - w / D) of a
    cache of C bytes, for D bytes of data of which w are read at a time.

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
    sample = max(need.sample for need in needs)
    kept = [need.groups % np.uint64(sample) == 0 for need in needs]
    listed_groups = np.concatenate([need.groups[which] for need, which in zip(needs, kept, strict=True)])
    listed_sizes = np.concatenate([need.sizes[which] for need, which in zip(needs, kept, strict=True)])
    groups, which_group = np.unique(listed_groups, return_inverse=True)
    sizes = np.zeros(len(groups))
    np.maximum.at(sizes, which_group, listed_sizes * sample)  # the same for all processes, whatever they know
    total = float(sizes.sum())
    filtered = _joined_filter(needs) if sample > 1 else None
    window = _read_at_a_time(limit, total, listed)
    if not window:
        return Division(0, total, 1 << 64, groups, sample, filtered)
    staying = max(0.0, limit * FITS - window) / (1 - window / total) if window < total else 0.0
    count = int(np.searchsorted(np.cumsum(sizes), staying, side="right"))
    stays_below = int(groups[count]) if count < len(groups) else 1 << 64
    region = min(limit, math.ceil(window * (1 - staying / total)))
    return Division(region, total, stays_below, groups, sample, filtered)


def _joined_filter(needs: Iterable[Need]) -> Bits:
    joined = np.zeros(FILTER_BITS // 8, np.uint8)
    for need in needs:
        joined |= _filter_of(need.groups) if need.filter is None else need.filter
    return joined


def _read_at_a_time(limit: int, total: float, processes: Sequence[Sequence[Need]]) -> int:
    """Return the bytes that all needs read at a time. Ranks that read an epoch together count once."""
    windows: Counter[bytes] = Counter()
    for needs in processes:
        own: Counter[bytes] = Counter()
        for need in needs:
            own[need.name] += need.transient_share(limit, total)[0]
        windows |= own  # the larger count
    return windows.total()
