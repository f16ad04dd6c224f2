"""Locations of rows: the file, the row group and the row in it of each row number."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataload.catalog.manifest import Manifest
from dataload.runtime.redact import redacted
from dataload.samplers.interval_index import IntervalIndex


class Location(NamedTuple):
    """The place of one row.

    Attributes:
        url: URL of the file.
        row_group: Number of the row group in the file, from 0.
        row: Number of the row in the row group, from 0.
    """

    url: str
    row_group: int
    row: int

    @property
    def text(self) -> str:
        """The location in words, without credentials."""
        return f"{redacted(self.url)} row group {self.row_group} row {self.row}"

    def look(self, row: int) -> str:
        """Return how to look at the row, given its number in the dataset of a loader."""
        place = f"loader.dataset.locate({row}) returns the file and row group of a row"
        return f"{place}, loader.dataset[{row}] reads it"


class MadeLocation(Location):
    """The place of a row that `flat_map` made: `row` is its number among those that it made of the row group.

    Which row of the file it was made of is not known.
    """

    __slots__ = ()

    @property
    def text(self) -> str:
        """The location in words, without credentials."""
        return f"{redacted(self.url)} row group {self.row_group}, row {self.row} of those that flat_map made of it"


class Locator:
    """Finds the rows of a dataset in its files, by binary search.

    Args:
        manifest: The dataset.
        url_of: Returns the URL of a file, given its path.
        kind: The class of the locations.
    """

    def __init__(self, manifest: Manifest, url_of: Callable[[str], str], kind: type[Location] = Location) -> None:
        self._kind = kind
        self._row_groups = manifest.row_groups
        self._selection = manifest.selection
        self._url_of = url_of
        self._starts = np.cumsum([0, *(group.rows for group in manifest.row_groups)], dtype=np.int64)
        self._index = IntervalIndex(self._starts)

    def locate(self, rows: npt.NDArray[np.int64]) -> list[Location]:
        """Return the location of each of these rows of the dataset: int64 [n]."""
        if self._selection is not None:
            rows = self._selection.rows_of(rows)
        groups = self._index.find(rows)
        within = (rows - self._starts[groups]).tolist()
        urls = {number: self._url_of(self._row_groups[number].file.path) for number in np.unique(groups).tolist()}
        return [
            self._kind(urls[group], self._row_groups[group].number, row)
            for group, row in zip(groups.tolist(), within, strict=True)
        ]
