"""A list of row groups, of one dataset or of several: what a row store reads, and a scheduler loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataload.rows.columns import Array
from dataload.rows.making.row_group_memory import MemoryNeed, RowGroupMemory
from dataload.rows.row_group_cache import RowGroupCache


class RowGroups:
    """The row groups of one or several datasets with one layout, numbered one dataset after the other.

    Args:
        caches: The cached row groups of each dataset.

    Attributes:
        caches: As above.
        memory: The memory in which all of them are made.
        layout: Layout of a record.
        group_starts: Number of each row group's first blob, int64 [groups + 1].
        row_starts: Number of each blob's first row, int64 [blobs + 1].
        most_of_a_group: Blobs of the row group that has most.
        is_mapped: Whether a function of the user makes rows.
    """

    def __init__(self, caches: Sequence[RowGroupCache]) -> None:
        self.caches = tuple(caches)
        plans = [cache.plan for cache in caches]
        self.layout = plans[0].layout
        self.group_starts = _joined([plan.group_starts for plan in plans])
        self.row_starts = _joined([plan.row_starts for plan in plans])
        self.most_of_a_group = max(plan.most_of_a_group for plan in plans)
        self.is_mapped = any(cache.is_mapped for cache in caches)
        self._firsts = np.cumsum([0, *(len(plan.group_starts) - 1 for plan in plans)])
        self.memory = caches[0].memory
        if len(caches) > 1:
            self.memory = RowGroupMemory(MemoryNeed.of_all(cache.maker.need for cache in caches), self.memory.rank)
            for cache in caches:
                cache.maker.share(self.memory)

    def __reduce__(self) -> tuple[type[RowGroups], tuple[tuple[RowGroupCache, ...]]]:
        return RowGroups, (self.caches,)

    def of(self, number: int) -> tuple[RowGroupCache, int]:
        """Return the dataset of a row group, and the row group's number in it."""
        source = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.caches[source], number - int(self._firsts[source])

    @property
    def shared(self) -> bool:
        """Whether other processes can read the cached blobs."""
        return all(cache.shared for cache in self.caches)

    @property
    def num_bytes(self) -> int:
        """Estimate of the bytes of the blobs of all row groups."""
        return sum(cache.num_bytes for cache in self.caches)

    @property
    def row_bytes(self) -> int:
        """Estimate of the mean bytes of a row in batches, at least 1."""
        return max(cache.row_bytes for cache in self.caches)


def _joined(starts: Sequence[Array]) -> Array:
    """Return the starts of the parts of several wholes, one whole after the other. Each has its end as the last one."""
    ends = np.cumsum([0, *(each[-1] for each in starts)])
    return np.append(np.concatenate([each[:-1] + end for each, end in zip(starts, ends[:-1], strict=True)]), ends[-1])
