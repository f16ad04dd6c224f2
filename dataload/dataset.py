"""A map-style dataset of Parquet or Arrow IPC files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from dataload.cache.blocks.reader import Blocks
from dataload.cache.config import CacheConfig, chosen
from dataload.cache.filesystem import open_source
from dataload.catalog.locations import Location, Locator
from dataload.catalog.manifest import Manifest, RowGroup, Source, resolve, source_paths
from dataload.catalog.selected_rows import SelectedRows
from dataload.catalog.splits import split as split_manifest
from dataload.catalog.subset import subset
from dataload.errors import ConfigError
from dataload.formats.schema import is_flat
from dataload.rows.numbered_rows import NumberedRows
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_store import RowStore
from dataload.runtime.cached_property import cached_property
from dataload.samplers.window_size import default_window

if TYPE_CHECKING:
    from dataload.catalog.filters import Filters


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
            OriginError: The origin failed.
            DataError: The row group cannot be decoded.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a dataset of {len(self)} rows")
        return self.__getitems__([range(len(self))[row]])[0]

    def __getitems__(self, rows: Any) -> NumberedRows:
        """Return a batch of rows: a sequence of row dicts whose `.columns` is the batch by column.

        Args:
            rows: Row numbers, int64 [B], each in [0, len(self)).

        Raises:
            IndexError: The batch is empty, or the dataset lacks one of the rows.
            OriginError: The origin failed.
            DataError: A row group cannot be decoded.
        """
        numbers = np.asarray(rows, np.int64)
        if not numbers.size or numbers.min() < 0 or numbers.max() >= len(self):
            raise IndexError(f"a batch needs at least one row, and each row must be in 0 to {len(self) - 1}")
        return NumberedRows(self.rowstore.gather(numbers), numbers, computed=self.computed)

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
        numbers = _array(row_ids)
        found = self._located(numbers)
        return found if numbers.ndim else found[0]

    def _located(self, numbers: npt.NDArray[Any]) -> list[Location]:
        raise NotImplementedError


class Dataset(MapStyle):
    """Rows of Parquet or Arrow IPC files, numbered in file order.

    The dataset is map-style and picklable, and rows have the same numbers in every process. `make_dataset` builds one.

    Attributes:
        schema: Arrow schema of the chosen columns.
        row_groups: The row groups that have rows of the dataset, in file order.
        fingerprint: Digest of the objects, their versions and the selected rows.
        window: Default number of row groups that a loader shuffles together.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> from dataload import make_dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name) / "rows.parquet"
        >>> pq.write_table(pa.table({"id": range(6)}), path, row_group_size=2)
        >>> dataset = make_dataset(path, cache=False)
        >>> dataset
        Dataset(6 rows in 3 row groups, id)
        >>> len(dataset), int(dataset[-1]["id"])
        (6, 5)
        >>> dataset.__getitems__([4, 0]).columns["id"].tolist()
        [4, 0]
        >>> dataset.locate([1, 5])[1]._replace(url="rows.parquet")
        Location(url='rows.parquet', row_group=2, row=1)
        >>> train, val = dataset.split([0.67, 0.33])
        >>> len(train), len(val)
        (4, 2)
        >>> folder.cleanup()
    """

    def __init__(
        self,
        manifest: Manifest,
        blocks: Blocks,
        columns: Sequence[str] | None = None,
        fill_null: Any = None,
        null_masks: bool = False,
    ) -> None:
        if columns is not None and (isinstance(columns, str) or not columns):
            raise ConfigError(f"columns={columns!r} must be a list of at least one name")
        if isinstance(fill_null, Mapping):
            _check_filled(manifest, fill_null)
        self.manifest = manifest
        self.blocks = blocks
        self.fill_null = fill_null
        self.null_masks = null_masks
        self.schema: pa.Schema = pa.schema([manifest.schema.field(name) for name in manifest.select(columns)])
        self.block_lengths = manifest.block_lengths
        # From the bytes of whole row groups: the order must not depend on the chosen columns.
        self.window = default_window(self.block_lengths, [group.bytes for group in manifest.row_groups])
        blobs = RowGroupCache(manifest, self.schema.names, blocks, fill_null, null_masks)
        selected = None if manifest.selection is None else partial(SelectedRows, manifest.selection)
        self.rowstore = RowStore(blobs, 2 * self.window, selected)

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """Number of rows."""
        return self.manifest.num_rows

    @property
    def row_groups(self) -> tuple[RowGroup, ...]:
        """The row groups that have rows of the dataset, in file order."""
        return self.manifest.row_groups

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """This dataset."""
        return (self,)

    @property
    def fingerprint(self) -> str:
        """Hex digest of the objects' paths, sizes, versions and partition keys, and of the selected rows."""
        return self.manifest.fingerprint

    def __repr__(self) -> str:
        return f"Dataset({self.num_rows} rows in {len(self.row_groups)} row groups, {', '.join(self.schema.names)})"

    def _located(self, numbers: npt.NDArray[Any]) -> list[Location]:
        return self._locator.locate(numbers)

    @cached_property
    def _locator(self) -> Locator:
        return Locator(self.manifest, self.blocks.origin.url_of)

    def split(self, fractions: Sequence[float], seed: int = 0) -> list[Dataset]:
        """Return disjoint datasets of whole row groups that together hold every row.

        Each process gets the same splits. Each split has its own fingerprint and numbers its own rows from 0; `locate`
        of the split says where they are.

        Args:
            fractions: Share of the rows for each split. Whole row groups approximate it.
            seed: Draws the row groups of each split.

        Raises:
            ConfigError: The fractions are not positive or do not sum to 1, or there are fewer row groups than splits.
        """
        return [self._of(part) for part in split_manifest(self.manifest, fractions, seed)]

    def filter(self, filters: Filters) -> Dataset:
        """Return the dataset of the rows that match, in file order.

        The columns that the filter reads need not be columns of the dataset. Each host fetches them once, where
        partition keys and statistics do not decide. The new dataset has its own fingerprint and
        numbers its own rows from 0. It shares cached row groups with this one.

        Args:
            filters: As in `make_dataset`.

        Raises:
            ConfigError: The filters are malformed, or no row matches.
            OriginError: The origin failed.
            DataError: A row group cannot be decoded.
        """
        return self._of(_narrowed(self.manifest, self.blocks, filters))

    def select(self, rows: Sequence[int] | npt.NDArray[Any] | torch.Tensor) -> Dataset:
        """Return the dataset of some rows, in file order.

        Args:
            rows: Row numbers, each at most once, in any order: integers [n]. Or which rows to keep: bool [len(self)].

        Raises:
            ConfigError: There are no rows, a number comes twice, or the mask is not as long as the dataset.
            IndexError: The dataset has no such row.
        """
        return self._of(subset(self.manifest, _array(rows)))

    def _of(self, manifest: Manifest) -> Dataset:
        return Dataset(manifest, self.blocks, self.schema.names, self.fill_null, self.null_masks)


def _narrowed(manifest: Manifest, blocks: Blocks, filters: Filters) -> Manifest:
    from dataload.catalog.filtering import narrow  # imports pyarrow.dataset, which few programs need

    return narrow(manifest, blocks, filters)


def _check_filled(manifest: Manifest, names: Iterable[str]) -> None:
    try:
        manifest.check_columns(names)
    except ConfigError as error:
        raise ConfigError(f"fill_null: {error}") from None
    for name in names:
        if name not in manifest.schema.names:
            raise ConfigError(f"fill_null: {name!r} is a struct, name its members: {manifest.select([name])}")
        if not is_flat(field := manifest.schema.field(name)):
            raise ConfigError(f"fill_null is for flat columns, and {name!r} has the nested type {field.type}: omit it")


def _array(numbers: Any) -> npt.NDArray[Any]:
    return np.asarray(numbers.cpu() if isinstance(numbers, torch.Tensor) else numbers)


def make_dataset(
    source: Source,
    *,
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    storage_options: dict[str, Any] | None = None,
    fill_null: Any = None,
    null_masks: bool = False,
    cache: CacheConfig | Literal[False] | None = None,
    cache_dir: str | None = None,
    cache_bytes: int | str | None = None,
    cluster: str | None = None,
) -> Dataset:
    """Return the dataset at `source`.

    Args:
        source: URL or path of a Parquet or Arrow IPC file, a folder or a glob; or a list of them.
        columns: Names of the columns to read, in this order; None: all. The name of a struct selects all its members.
            Keys in folder names (`label=cat/…`) are columns, too.
        filters: Rows to read, in pyarrow's form. All predicates of [("label", "=", "cat"), ("year", ">=", 2020)] must
            hold; of a list of such lists, one must hold; a null matches no predicate. Or an expression of
            `pyarrow.compute`, such as `field("year") > 2020`. See `Dataset.filter`.
        storage_options: Options of the URL's filesystem, as fsspec takes them.
        fill_null: Replacement for nulls, for all columns that can hold it or by column. Nulls of nested values stay.
            Without one, nulls of strings, bytes and nested values are None, those of floats are NaN, and those of
            integers, booleans and times raise a DataError.
        null_masks: Instead of that error, make these nulls zeros, and add "<column>.is_null": a bool Tensor[B] of the
            rows that have nulls. Each column of integers, booleans or times, or of lists of these, has a mask.
        cache: The host's cache: a `CacheConfig`, or None for the default one. False: cache nothing outside this
            process's memory.
        cache_dir: As in `CacheConfig`; not with `cache`.
        cache_bytes: As in `CacheConfig`; not with `cache`.
        cluster: As in `CacheConfig`; not with `cache`.

    Raises:
        ConfigError: An argument cannot work, or the filters leave no row.
        OriginNotFound: There is no object at `source`.
        DataError: An object is neither Parquet nor Arrow IPC, schemas differ, or batches cannot hold a column's type.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> from dataload import make_dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> for label in ("cat", "dog"):
        ...     path = Path(folder.name) / f"label={label}" / "rows.parquet"
        ...     path.parent.mkdir()
        ...     pq.write_table(pa.table({"id": range(3), "weight": [1.0, 2.5, 4.0]}), path)
        >>> dogs = [("label", "=", "dog")]
        >>> dataset = make_dataset(folder.name, columns=["weight", "label"], filters=dogs, cache=False)
        >>> dataset
        Dataset(3 rows in 1 row groups, weight, label)
        >>> dataset[1]["label"], float(dataset[1]["weight"])
        ('dog', 2.5)
        >>> folder.cleanup()
    """
    config = chosen(cache, cache_dir=cache_dir, cache_bytes=cache_bytes, cluster=cluster)
    blocks = open_source(source_paths(source)[0], storage_options, config)
    manifest = resolve(source, blocks)
    if filters is not None:
        manifest.select(columns)  # raises before the filter fetches anything
        manifest = _narrowed(manifest, blocks, filters)
    return Dataset(manifest, blocks, columns, fill_null, null_masks)
