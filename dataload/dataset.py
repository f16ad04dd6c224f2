"""A dataset of files, by row number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dataload.cache.blocks.reader import Blocks
from dataload.cache.config import CacheConfig
from dataload.cache.filesystem import open_source
from dataload.catalog.manifest import Manifest, RowGroup, Source, resolve, source_paths
from dataload.catalog.pruning import Filters, narrow
from dataload.catalog.splits import split as parts_of
from dataload.errors import ConfigError
from dataload.rows.collate import Rows
from dataload.rows.row_store import RowStore
from dataload.samplers.window_size import default_window


class Dataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of Parquet or Arrow IPC files, numbered in file order. Map-style, picklable, the same in every process.

    schema: Arrow schema of the chosen columns; row_groups: all of them in file order; fingerprint: names the
    objects and their versions; window: row groups that a loader shuffles together unless told otherwise.
    """

    def __init__(
        self, manifest: Manifest, blocks: Blocks, columns: Sequence[str] | None = None, fill_null: Any = None
    ) -> None:
        if columns is not None and (isinstance(columns, str) or not columns):
            raise ConfigError(f"columns={columns!r} must be a list of at least one name")
        self.manifest = manifest
        self.blocks = blocks
        self.fill_null = fill_null
        self.schema: pa.Schema = pa.schema([manifest.schema.field(name) for name in manifest.select(columns)])
        self.block_lengths = np.array([group.rows for group in manifest.row_groups], np.int64)
        # Of whole row groups, whatever the columns: who reads others should see the same order.
        self.window = default_window(self.block_lengths, [group.bytes for group in manifest.row_groups])
        self.rowstore = RowStore(manifest, self.schema.names, blocks, 2 * self.window, fill_null)

    @property
    def num_rows(self) -> int:
        return self.manifest.num_rows

    @property
    def row_groups(self) -> tuple[RowGroup, ...]:
        return self.manifest.row_groups

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Dataset({self.num_rows} rows in {len(self.row_groups)} row groups, {', '.join(self.schema.names)})"

    def __getitem__(self, row: int) -> dict[str, Any]:
        """One row as a dict. Raises IndexError, OriginError, DataError."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a dataset of {len(self)} rows")
        return self.__getitems__([range(len(self))[row]])[0]

    def __getitems__(self, rows: Any) -> Rows:
        """A batch of rows, by their numbers: a sequence of row dicts whose `.columns` is the batch by column."""
        numbers = np.asarray(rows, np.int64)
        if not numbers.size or numbers.min() < 0 or numbers.max() >= len(self):
            raise IndexError(f"a batch is of one row at least, each of 0 to {len(self) - 1}")
        return Rows(self.rowstore.gather(numbers))

    def split(self, fractions: Sequence[float], seed: int = 0) -> list[Dataset]:
        """Datasets of whole row groups, disjoint and together this one, of as near these fractions of the rows as can.

        The same ones in every process; each has a fingerprint of its own. Raises ConfigError for fractions that are not
        positive or do not sum to 1, and when there are fewer row groups than parts.
        """
        parts = parts_of(self.manifest, fractions, seed)
        return [Dataset(part, self.blocks, self.schema.names, self.fill_null) for part in parts]


def make_dataset(
    source: Source,
    *,
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    storage_options: dict[str, Any] | None = None,
    cache: CacheConfig | None = CacheConfig(),  # noqa: B008 (frozen)
    fill_null: Any = None,
) -> Dataset:
    """The dataset at `source`: a URL or path of a file, Parquet or Arrow IPC, of a folder or a glob, or a list.

    columns: those to read, in this order; a struct's name stands for its members; None: all. Keys in folders' names
        (`label=cat/…`) are columns, too.
    filters: which row groups to read, by partition keys and the footers' statistics, in pyarrow's form:
        [("label", "=", "cat"), ("year", ">=", 2020)] must all hold, of a list of such lists one. A null matches none.
    storage_options: for the filesystem of the URL, as fsspec takes them.
    cache: where bytes are kept on this host; None: nowhere but in this process's memory.
    fill_null: what stands for nulls, for all columns or by column; None: a null is an error.

    Raises ConfigError for arguments that cannot work, for filters that leave no row and for those that would take some
    rows of a row group and not others, or might for all that its statistics tell. OriginNotFound when nothing is there,
    DataError for objects that are neither Parquet nor Arrow IPC, whose schemas differ, or of types that batches cannot
    hold.
    """
    blocks = open_source(source_paths(source)[0], storage_options, cache)
    manifest = resolve(source, blocks)
    if filters is not None:
        manifest = narrow(manifest, blocks, filters)
    return Dataset(manifest, blocks, columns, fill_null)
