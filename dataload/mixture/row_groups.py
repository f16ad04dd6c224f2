"""The row groups of several datasets, numbered one dataset after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dataload.catalog.selected_rows import SelectedRows
from dataload.catalog.selection import Selection
from dataload.formats.schema import Layout
from dataload.rows.columns import Array
from dataload.rows.making.bunches import Made, Member, make_together
from dataload.rows.making.row_group_memory import MemoryNeed, RowGroupMemory
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_group_life import Lives, RowGroupLife
from dataload.samplers.interval_index import IntervalIndex


@dataclass(frozen=True)
class MixedPlan:
    """The blobs of all datasets. Attributes are those of `RowGroupPlan`."""

    layout: Layout
    group_starts: Array
    row_starts: Array
    most_of_a_group: int


class MixedRowGroups:
    """The cached row groups of several datasets with one layout. See `RowGroups` for attributes and methods.

    A `RowStore` over it has one set of open row groups, one scheduler, one memory budget and one background decoder,
    whatever the number of datasets.

    Args:
        by_dataset: The row groups of each dataset.
    """

    def __init__(self, by_dataset: Sequence[RowGroupCache]) -> None:
        self.by_dataset = tuple(by_dataset)
        plans = [blobs.plan for blobs in by_dataset]
        self.plan = MixedPlan(
            plans[0].layout,
            _joined([plan.group_starts for plan in plans]),
            _joined([plan.row_starts for plan in plans]),
            max(plan.most_of_a_group for plan in plans),
        )
        self._firsts = np.cumsum([0, *(len(plan.group_starts) - 1 for plan in plans)])
        need = MemoryNeed.of_all(blobs.maker.need for blobs in by_dataset)
        self.memory = RowGroupMemory(need, by_dataset[0].memory.rank)
        for blobs in by_dataset:
            blobs.maker.share(self.memory)
        self.is_mapped = any(blobs.is_mapped for blobs in by_dataset)

    def __reduce__(self) -> tuple[type[MixedRowGroups], tuple[tuple[RowGroupCache, ...]]]:
        return MixedRowGroups, (self.by_dataset,)

    def find(self, number: int) -> list[memoryview] | None:
        blobs, own = self._of(number)
        return blobs.find(own)

    def load(self, number: int, life: RowGroupLife) -> list[memoryview]:
        blobs, own = self._of(number)
        return blobs.load(own, life)

    def bunched_bytes(self, number: int) -> int:
        blobs, own = self._of(number)
        return blobs.bunched_bytes(own)

    def load_together(self, lives: Lives, late: Callable[[], None]) -> Iterator[tuple[int, Made]]:
        by_cache: dict[tuple[str, int], dict[Member, int]] = {}
        for number, life in lives.items():
            blobs, own = self._of(number)
            by_cache.setdefault((blobs.tier.location, blobs.tier.limit), {})[Member(blobs, own, life)] = number
        for numbers in by_cache.values():
            try:
                for member in make_together([*numbers], late):
                    yield numbers.pop(member), member.made
            except Exception as error:  # noqa: BLE001 (raised where the row groups of this cache are awaited)
                for number in numbers.values():
                    yield number, error

    def make(self, number: int, life: RowGroupLife | None = None) -> bool:
        blobs, own = self._of(number)
        return blobs.make(own, life)

    def reservation(self, number: int) -> int:
        blobs, own = self._of(number)
        return blobs.reservation(own)

    def touch(self) -> None:
        for blobs in self.by_dataset:
            blobs.touch()

    def is_transient(self, number: int) -> bool:
        blobs, own = self._of(number)
        return blobs.is_transient(own)

    def bytes_of(self, number: int) -> int:
        blobs, own = self._of(number)
        return blobs.bytes_of(own)

    def describe(self, number: int) -> str:
        blobs, own = self._of(number)
        return blobs.describe(own)

    @property
    def shared(self) -> bool:
        return all(blobs.shared for blobs in self.by_dataset)

    @property
    def caches_everything(self) -> bool:
        return all(blobs.caches_everything for blobs in self.by_dataset)

    @property
    def num_bytes(self) -> int:
        return sum(blobs.num_bytes for blobs in self.by_dataset)

    @property
    def row_bytes(self) -> int:
        return max(blobs.row_bytes for blobs in self.by_dataset)

    def _of(self, number: int) -> tuple[RowGroupCache, int]:
        """Return the dataset of a row group and the row group's number in it."""
        source = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.by_dataset[source], number - int(self._firsts[source])


class MixedSelectedRows:
    """The rows of several datasets, of which some have only some rows of their row groups. See `SelectedRows`.

    Args:
        selections: The selected rows of each dataset; None: all rows.
        first_rows: Number of the first row of each dataset, then the number of all rows: int64 [S + 1].
        first_stored: The same, where all rows of all row groups count.
        groups: Row groups that are open at a time; see `keep`.
    """

    def __init__(
        self, selections: Sequence[Selection | None], first_rows: Array, first_stored: Array, groups: int
    ) -> None:
        self._selected = [None if selection is None else SelectedRows(selection, groups) for selection in selections]
        self._first_rows, self._first_stored = first_rows, first_stored
        self._sources = IntervalIndex(first_rows)

    def keep(self, groups: int) -> None:
        """Keep the rows of this many row groups in memory, of each dataset."""
        for selected in self._selected:
            if selected is not None:
                selected.keep(groups)

    def rows(self, numbers: Array) -> Array:
        """Return the rows' numbers in the row groups, by their numbers in the datasets: int64 [n] both."""
        sources = self._sources.find(numbers)
        rows = numbers - self._first_rows[sources]
        for source, selected in enumerate(self._selected):
            if selected is not None and (chosen := sources == source).any():
                rows[chosen] = selected.rows(rows[chosen])
        return rows + self._first_stored[sources]


def _joined(starts: Sequence[Array]) -> Array:
    """Return the starts of the parts of several wholes, one whole after the other. Each has its end as the last one."""
    ends = np.cumsum([0, *(each[-1] for each in starts)])
    return np.append(np.concatenate([each[:-1] + end for each, end in zip(starts, ends[:-1], strict=True)]), ends[-1])
