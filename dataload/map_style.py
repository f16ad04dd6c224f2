"""Rows by number, as torch's map-style datasets have them: of files, or of several datasets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast, overload

import numpy as np
import numpy.typing as npt
import torch

from dataload.catalog.inventory import keys_of
from dataload.catalog.locations import Location
from dataload.catalog.manifest import RowGroup
from dataload.rows.numbered_rows import NumberedRows, PlacedRows
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
    _refreshes = 0
    _newer: MapStyle | None = None  # a later snapshot, perhaps not the latest
    _raising: MapStyle | None = None  # of which this one is `as_skipping`
    computed: Mapping[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {}

    def __len__(self) -> int:
        return self.num_rows

    @overload
    def __getitem__(self, row: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, row: str) -> npt.NDArray[Any]: ...
    def __getitem__(self, row: int | str) -> dict[str, Any] | npt.NDArray[Any]:
        """Return one row as a dict, with values as in a batch; or a whole column, by its name.

        Args:
            row: The number of a row; a negative one counts from the end. Or the name of a column. Its values are an
                array [len(self), …], for stratified splits and weights: numbers and arrays with the dtype of batches,
                and objects for all others, such as strings. Of the files, only this column is read. The whole array is
                in memory: 8 bytes a row for int64, about 60 bytes and the text for a string.

        Raises:
            IndexError: The dataset has no such row.
            TypeError: The number is not an integer.
            ConfigError: The dataset has no such column.
            OriginError: The origin failed.
            DataError: The row group cannot be decoded.
        """
        if isinstance(row, str):
            if row in self.computed:
                return self.computed[row](np.arange(len(self)))
            return np.concatenate([each.column(row) for each in self.datasets])
        try:
            number = operator.index(row)
        except TypeError:
            several = "use __getitems__(numbers) for several rows, and .columns of its result for whole columns"
            raise TypeError(f"a dataset takes a row number, not {type(row).__name__}: {several}") from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of a dataset of {len(self)} rows")
        return self.__getitems__([range(len(self))[number]]).single()

    def __getitems__(self, rows: Any) -> NumberedRows:
        """Return a batch of rows: a list of row dicts, whose `.columns` is the batch by column.

        In a row, numbers and arrays are tensors, and lists of integers are Python lists, as collators of tokens expect.
        The dicts are made at the first look at the list: `.columns` alone makes none.

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
        place, draw = (rows.place, rows.draw) if isinstance(rows, PlacedRows) else (None, None)
        records = self.rowstore.gather(numbers, draw=draw)
        found = NumberedRows(records, numbers, self.locate, computed=self.computed)
        found.place, found.draw = place, draw
        return found

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

    def skipping(self) -> MapStyle:
        """Return the same rows, of which those with which `map` fails end no others."""
        return self

    @property
    def fingerprint(self) -> str:
        """Hex digest of the rows."""
        raise NotImplementedError

    @property
    def order_key(self) -> str:
        """Hex digest that decides the order of the rows."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Leave out other snapshots."""
        others = ("_newer", "_raising")
        return {name: value for name, value in vars(self).copy().items() if name not in others}

    @property
    def newest(self) -> Self:
        """The rows that loaders read from their next epoch on: those of the last `refresh`, or these."""
        if self._newer is None and self._raising is not None:
            newest = self._raising.newest
            self._newer = None if newest is self._raising else newest.as_skipping()
        if self._newer is None:
            return self
        self._newer = self._newer.newest
        return cast("Self", self._newer)

    @property
    def refreshes(self) -> int:
        """How often a newer snapshot was looked for, up to this one."""
        return self._refreshes if self._raising is None else self._raising.refreshes

    def as_skipping(self) -> MapStyle:
        """Return the rows as `skipping` does. A refresh of these holds for them."""
        found = self.skipping()
        if found is not self:
            found._raising = self  # noqa: SLF001 (of the same class)
        return found

    def precede(self, newer: MapStyle) -> None:
        """Let loaders of this snapshot read a newer one from their next epoch on."""
        self._newer = newer

    def refresh(self) -> Changes:
        """Look for a newer snapshot of the source: folders are listed again, and tables opened at their newest version.

        Loaders of this dataset read it from their next epoch on, without a restart. `loader.dataset` is then the
        dataset of that snapshot, and this one stays as it is. What is cached stays valid: only new files are fetched.
        Filters, `map` and `exclude` hold for the new rows, too. Datasets that were made of this one before, such as by
        `exclude` or `mix`, do not follow: refresh those that loaders read. Call it on each rank: ranks that read
        different snapshots, such as because only some have called it, get an error in the next epoch.

        Returns:
            What has changed since the last snapshot. It is false if nothing has.

        Raises:
            ConfigError: Rows were chosen by number, as by `select`, `split` or a `Subset`, or made by `flat_map` or
                `pack`; or the table has written excluded rows again and cannot tell which.
            OriginError: The source cannot be read.
            DataError: A file is not supported.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import pyarrow as pa, pyarrow.parquet as pq
            >>> from dataload import make_dataset, make_loader
            >>> folder = tempfile.TemporaryDirectory()
            >>> pq.write_table(pa.table({"id": range(4)}), Path(folder.name) / "a.parquet")
            >>> loader = make_loader(folder.name, 2, cache=False)
            >>> len(loader)
            2
            >>> pq.write_table(pa.table({"id": range(2)}), Path(folder.name) / "b.parquet")
            >>> loader.dataset.refresh()
            Changes(rows=2, files_added=1, files_removed=0)
            >>> len(loader)
            3
            >>> folder.cleanup()
        """
        before: MapStyle = self.newest
        if before._raising is not None:
            return before._raising.refresh()
        after = before.reopened()
        before._refreshes += 1
        if after.fingerprint == before.fingerprint:
            return Changes()
        after._refreshes = before._refreshes  # noqa: SLF001
        before.precede(after)
        return Changes.between(before, after)

    def reopened(self) -> Self:
        """Return the newest snapshot of the source, with what was made of this one."""
        raise NotImplementedError

    @property
    def known_failure(self) -> str | None:
        """Why a function of `map` is known to fail with a row; None: it is not."""
        return None

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


class Changes(NamedTuple):
    """What a refresh has found. It is false if nothing has changed.

    Attributes:
        rows: Rows that the dataset has more than before; negative: fewer.
        files_added: Files that are new, or replaced.
        files_removed: Files that are gone, or replaced.
    """

    rows: int = 0
    files_added: int = 0
    files_removed: int = 0
    changed: bool = False

    @classmethod
    def between(cls, before: MapStyle, after: MapStyle) -> Changes:
        """Return what has changed."""
        old, new = (
            {key[:3] for dataset in each.datasets for key in keys_of(dataset.manifest)} for each in (before, after)
        )
        return cls(len(after) - len(before), len(new - old), len(old - new), changed=True)

    def __bool__(self) -> bool:
        return self.changed

    def __repr__(self) -> str:
        return f"Changes(rows={self.rows}, files_added={self.files_added}, files_removed={self.files_removed})"


def as_array(numbers: Any) -> npt.NDArray[Any]:
    """Return numbers, of a tensor on any device too, as an array."""
    return np.asarray(numbers.cpu() if isinstance(numbers, torch.Tensor) else numbers)
