"""How mapped row groups are stored: the names, lengths and sizes of their blobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataload.catalog.manifest import Manifest
from dataload.formats.hive_partitions import Constants
from dataload.mapping.stage import Stage
from dataload.rows.columns import Array
from dataload.rows.row_group_plan import RowGroupPlan, rows_in_a_blob

VERSION = 1


class MappedPlan(RowGroupPlan):
    """The blobs of a mapped dataset. Their names tell the function, and which rows of the file are mapped.

    Args:
        manifest: The mapped rows, `Stage.stored`.
        columns: Names of the columns to store.
        stage: The map.
        source: The plan of the rows that are mapped.
    """

    def __init__(self, manifest: Manifest, columns: Sequence[str], stage: Stage, source: RowGroupPlan) -> None:
        self._stage = stage
        super().__init__(manifest, columns, made_by=[f"map {VERSION}", stage.key, source.digest])
        self._source = source
        self._selection = stage.selection
        self._digests: dict[int, str] = {}

    def qualified(self, number: int, part: str) -> str:
        """Return the name of a part of a row group within its file."""
        return super().qualified(number, part) + self._rows_of(number)

    def group_name(self, number: int) -> str:
        """Return the name of a row group's blobs together, within its file."""
        return super().group_name(number) + self._rows_of(number)

    def constants(self, number: int) -> Constants:
        """Return the constants of the rows that are mapped."""
        return self._source.constants(number)

    def renamed(self, number: int) -> list[tuple[str, str]]:
        """Return the names of the columns, among those that are mapped, that a file calls otherwise."""
        return self._source.renamed(number)

    def _rows_per_blob(self) -> Array:
        """It depends on the sample only for row groups of several blobs. Files that are added change the sample."""
        whole = [1 << max(0, group.rows - 1).bit_length() for group in self._manifest.row_groups]
        most = self.most_rows if self._stage.is_flat else super()._rows_per_blob()
        return np.minimum(most, np.array(whole, np.int64))

    @property
    def most_rows(self) -> int:
        """The rows of a full blob of `flat_map`. It does not depend on the rows of a row group, which are counted."""
        values = sum(self._heap(name, round(size), 1) for name, size in self._stage.row_bytes.items())
        return rows_in_a_blob(self.layout.dtype.itemsize + values)

    def part(self, first: int, rows: int) -> str:
        """Return the name of a blob of `flat_map`, given its first row, and the rows of the row group, which are known.

        They need not be known if the blob is full, and another one follows.
        """
        return f"rows {first}+{min(self.most_rows, 1 << max(0, rows - 1).bit_length())}"

    def _rows_of(self, number: int) -> str:
        """Return the part of a name that tells which rows are mapped."""
        if self._selection is None:
            return ""
        if number not in self._digests:
            self._digests[number] = self._selection.digest_of(number)
        return f" of {self._digests[number]}"
