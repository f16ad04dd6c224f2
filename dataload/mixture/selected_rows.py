"""The selected rows of several datasets, numbered one dataset after the other."""

from __future__ import annotations

from collections.abc import Sequence

from dataload.catalog.selected_rows import SelectedRows
from dataload.catalog.selection import Selection
from dataload.rows.columns import Array
from dataload.samplers.interval_index import IntervalIndex


class MixedSelectedRows:
    """The rows of several datasets, of which some have only some rows of their row groups. See `SelectedRows`.

    Args:
        selections: The selected rows of each dataset; None: all rows.
        first_rows: Number of the first row of each dataset, then the number of all rows: int64 [S + 1].
        first_stored: The same, where all rows of all row groups count.
    """

    def __init__(self, selections: Sequence[Selection | None], first_rows: Array, first_stored: Array) -> None:
        self._selected = [None if selection is None else SelectedRows(selection) for selection in selections]
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
