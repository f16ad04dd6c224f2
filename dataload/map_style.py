"""Rows by number, as torch's map-style datasets have them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
import torch

from dataload.catalog.locations import Location
from dataload.catalog.manifest import RowGroup
from dataload.rows.numbered_rows import NumberedRows
from dataload.rows.row_store import RowStore

if TYPE_CHECKING:
    from dataload.dataset import Dataset


class MapStyle(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows by number: a `Dataset` or a mixture of several.

    Attributes:
        num_rows: Number of rows.
        rowstore: The rows.
        computed: Columns of each batch that are computed from the numbers of its rows, by name.
    """

    num_rows: int
    rowstore: RowStore
    computed: Mapping[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {}

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return one row as a dict. A negative number counts from the end.

        Raises:
            IndexError: The dataset has no such row.
            TypeError: The number is not an integer.
            OriginError: The origin failed.
            DataError: The row group cannot be decoded.
        """
        try:
            number = operator.index(row)
        except TypeError:
            several = "use __getitems__(numbers) for several rows, and .columns of its result for whole columns"
            raise TypeError(f"a dataset takes a row number, not {type(row).__name__}: {several}") from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of a dataset of {len(self)} rows")
        return self.__getitems__([range(len(self))[number]])[0]

    def __getitems__(self, rows: Any) -> NumberedRows:
        """Return a batch of rows: a sequence of row dicts whose `.columns` is the batch by column.

        Args:
            rows: Row numbers, int64 [B], each in [0, len(self)).

        Raises:
            IndexError: The batch is empty, or the dataset lacks one of the rows.
            TypeError: The numbers are not integers.
            OriginError: The origin failed.
            DataError: A row group cannot be decoded.
        """
        numbers = np.asarray(rows)
        if numbers.size and numbers.dtype.kind not in "iu":
            raise TypeError(f"row numbers must be integers, not {numbers.dtype}: select(mask) takes a mask")
        numbers = numbers.astype(np.int64, copy=False)
        if not numbers.size or numbers.min() < 0 or numbers.max() >= len(self):
            raise IndexError(f"a batch needs at least one row, and each row must be in 0 to {len(self) - 1}")
        return NumberedRows(self.rowstore.gather(numbers), numbers, self.locate, computed=self.computed)

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The datasets that have the rows, one after the other."""
        raise NotImplementedError

    @property
    def row_groups(self) -> tuple[RowGroup, ...]:
        """All row groups in the order of their rows."""
        return tuple(group for dataset in self.datasets for group in dataset.manifest.row_groups)

    def rows_by_source(self, numbers: npt.NDArray[np.int64], sizes: Sequence[int]) -> list[dict[str, int]]:  # noqa: ARG002 (a mixture's)
        """Return the number of rows of each source, by name, in consecutive batches; nothing if this is no mixture.

        Args:
            numbers: The rows of all batches, int64 [n].
            sizes: Rows of each batch.
        """
        return [{} for _ in sizes]

    def rows_around(self, row: int) -> range:  # noqa: ARG002 (a mixture's)
        """Return the rows of the source that has a row; all rows if this is no mixture."""
        return range(len(self))

    def source_of(self, group: int) -> str | None:  # noqa: ARG002 (a mixture's)
        """Return the name of a row group's source; None if this is no mixture."""
        return None

    @overload
    def locate(self, row_ids: int) -> Location: ...
    @overload
    def locate(self, row_ids: Sequence[int] | npt.NDArray[Any] | torch.Tensor) -> list[Location]: ...
    def locate(self, row_ids: int | Sequence[int] | npt.NDArray[Any] | torch.Tensor) -> Location | list[Location]:
        """Return the file, the row group and the row in it of rows, such as those of the column "row_id" of a batch.

        Args:
            row_ids: A row number, or several. A dataset numbers its own rows from 0, in file order, and so does each
                split of it. A mixture numbers the rows of all sources, one source after the other.

        Returns:
            The `Location` of one number; a list of them for a sequence or a tensor [n].

        Raises:
            IndexError: The dataset has no such row.
            TypeError: The numbers are not integers.

        Notes: a search takes O(log(row groups)) and fetches nothing.
        """
        numbers = as_array(row_ids)
        if not numbers.size:
            return []
        if numbers.dtype.kind not in "iuO":  # numpy makes objects of integers that exceed 64 bits
            raise TypeError(f"row numbers must be integers, not {numbers.dtype}")
        for outside in (numbers.min(), numbers.max()):
            if not 0 <= outside < len(self):
                raise IndexError(f"row {outside} of a dataset of {len(self)} rows: row numbers count from 0")
        found = self._located(numbers.astype(np.int64).ravel())
        return found if numbers.ndim else found[0]

    def _located(self, rows: npt.NDArray[np.int64]) -> list[Location]:
        raise NotImplementedError


def as_array(numbers: Any) -> npt.NDArray[Any]:
    """Return numbers, of a tensor on any device too, as an array."""
    return np.asarray(numbers.cpu() if isinstance(numbers, torch.Tensor) else numbers)
