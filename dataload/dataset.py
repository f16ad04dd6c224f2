"""Rows of files: `make_dataset` and the dataset that it returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from dataload.arguments import did_you_mean, known_keywords, with_plain_arguments
from dataload.cache.blocks.reader import Blocks
from dataload.cache.config import CacheConfig, chosen
from dataload.cache.options import CacheOptions
from dataload.catalog.description import cache_text, columns_text, source_text
from dataload.catalog.features import class_names, features_of
from dataload.catalog.inventory import Inventory, KnownRows, keys_of
from dataload.catalog.locations import Location, Locator, MadeLocation
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.catalog.opening import Call, Excluded, Opening
from dataload.catalog.recipe import public_name, rows_as_json
from dataload.catalog.selected_rows import SelectedRows
from dataload.catalog.selection import Selection
from dataload.catalog.sources import Source, source_paths
from dataload.catalog.splits import split as split_manifest
from dataload.catalog.subset import excluded, subset
from dataload.catalog.tables import is_table
from dataload.errors import ConfigError, OriginNotFound
from dataload.formats.hive_partitions import PARTITIONINGS, Partitioning
from dataload.formats.schema import mask_name, needs_mask, structs_of
from dataload.formats.text import TextErrors, checked_errors
from dataload.map_style import MapStyle, as_array
from dataload.mapping.map_maker import MapMaker
from dataload.mapping.places import stored_of
from dataload.mapping.stage import Stage, fingerprint_of, order_key_of, up_to_flat
from dataload.rows.making.file_maker import FileMaker
from dataload.rows.numbered_rows import NumberedRows
from dataload.rows.read_options import USUAL, ReadOptions
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_groups import RowGroups
from dataload.rows.row_store import RowStore, Selected
from dataload.rows.whole_column import BYTES_AT_ONCE, whole_column
from dataload.runtime.cached_property import cached_property
from dataload.runtime.text import counted, few
from dataload.samplers.window_size import default_window

if TYPE_CHECKING:
    from dataload.catalog.filters import Filters
    from dataload.mapping.probe import Probe
    from dataload.mapping.running import Function
    from dataload.rows.packing import Packing


class Dataset(MapStyle):
    """Rows of Parquet or Arrow IPC files, numbered in file order.

    The dataset is map-style and picklable, and rows have the same numbers in every process. `make_dataset` builds one.

    Attributes:
        schema: Arrow schema of the chosen columns.
        row_groups: The row groups that have rows of the dataset, in file order.
        block_lengths: Rows of the dataset in each of these row groups, as a `ShardedSampler` takes them: int64 [M].
        fingerprint: Digest of the objects, their versions, the selected rows and the maps.
        calls: The calls that made it, in order.
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
        >>> dataset  # doctest: +ELLIPSIS
        Dataset(file:///...: 6 rows in 3 row groups of 1 file; id: int64; no cache)
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

    packing: Packing | None = None

    def __init__(
        self,
        manifest: Manifest,
        blocks: Blocks,
        columns: Sequence[str] | None = None,
        read_options: ReadOptions = USUAL,
        stages: Sequence[Stage] = (),
        calls: tuple[Call, ...] = (),
    ) -> None:
        self.manifest = manifest
        self.calls = calls
        self.blocks = blocks
        self.read_options = read_options
        self.stages = tuple(stages)
        self._columns = manifest.select(columns)
        read = pa.schema([manifest.schema.field(name) for name in self._columns])
        self.schema: pa.Schema = stages[-1].schema if stages else read
        _ = self.rowstore  # It raises for columns that batches cannot hold.

    @cached_property
    def block_lengths(self) -> npt.NDArray[np.int64]:
        """Rows of the dataset in each row group, int64 [row groups]."""
        return self.manifest.block_lengths

    @cached_property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.block_lengths.sum())

    @cached_property
    def window(self) -> int:
        """Default number of row groups that a loader shuffles together."""
        # From the bytes of whole row groups: the order must not depend on the chosen columns.
        return default_window(self.block_lengths, [group.bytes for group in self.manifest.row_groups])

    @cached_property
    def rowstore(self) -> RowStore:
        """The rows."""
        selection = self.stored_selection
        selected = None if selection is None else SelectedRows(selection)
        return self.store_of([self], RowGroups([self.cached_row_groups()]), 2 * self.window, selected)

    def store_of(
        self,
        datasets: Sequence[Dataset],  # noqa: ARG002 (of sequences)
        row_groups: RowGroups,
        capacity: int,
        selected: Selected | None,
        *,
        by_use: bool = False,
    ) -> RowStore:
        """Return the rows of several datasets that are like this one. The other arguments are those of `RowStore`."""
        return RowStore(row_groups, capacity, selected, by_use=by_use)

    def cached_row_groups(self, columns: Sequence[str] | None = None) -> RowGroupCache:
        """Return the row groups in the cache. columns: those to store, in this order; None: all."""
        own = self._columns if self.stages or columns is None else columns
        cache = RowGroupCache(FileMaker(self._decoded, own, self.blocks, self.read_options))
        for stage in self.stages:
            chosen = columns if stage is self.stages[-1] else None
            cache = RowGroupCache(MapMaker(cache, stage, chosen))
        return cache

    @property
    def _decoded(self) -> Manifest:
        """The rows that are read of the files: those of the first map, which may be more than the dataset has."""
        return self.stages[0].manifest if self.stages else self.manifest

    @cached_property
    def stored_selection(self) -> Selection | None:
        """The rows of the dataset among those that are stored; None: all."""
        stored = self.stages[-1].stored_selection if self.stages else None
        return stored_of(self.manifest.selection, stored, len(self.manifest.row_groups))

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
        """Hex digest of the objects' paths, sizes, versions and partition keys, the selected rows and the maps."""
        return fingerprint_of(self.manifest, self.stages)

    @cached_property
    def order_key(self) -> str:
        """Hex digest that decides the order of the rows; see `order_key_of`."""
        return order_key_of(self.manifest)

    @property
    def padding_share(self) -> float:
        """Fraction of padding in the sequences of a packed dataset, in [0, 1]; 0 of rows."""
        return 0.0

    @property
    def known_nulls(self) -> str | None:
        """Which columns are known to have nulls that end a loop; None: none. See `known_nulls.known_nulls`."""
        [own] = self.rowstore.row_groups.caches
        return own.maker.known_nulls

    @property
    def known_failure(self) -> str | None:
        """Why a function of `map` is known to fail with a row of its sample; None: it is not."""
        return next((stage.failed for stage in self.stages if stage.failed is not None), None)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a whole column; see `__getitem__`."""
        stored = self._stored_with(name)
        rows: Dataset = self
        if len(self.schema) > 1 and stored in self._of_files:
            rows = Dataset(self.manifest, self.blocks, [stored], self.read_options)
        return rows.gathered_column(name)

    def gathered_column(self, name: str) -> npt.NDArray[Any]:
        """Return a whole column, as batches have it."""
        count = max(1, BYTES_AT_ONCE // self.rowstore.row_bytes)
        starts = range(0, max(1, len(self)), count)
        numbers = (np.arange(first, min(first + count, len(self))) for first in starts)
        batches = (NumberedRows(self.rowstore.gather(part), part, self.locate) for part in numbers)
        return whole_column((batch.batch()[name] for batch in batches), len(self))

    def _stored_with(self, name: str) -> str:
        """Return the column that a column of batches is, or marks the nulls of. Raise ConfigError if there is none."""
        fields = [field for field in self.rowstore.layout.fields if field.kind != "error"]
        names = [field.name for field in fields]
        if name in names:
            masks = {mask_name(field): field.name for field in fields if needs_mask(field)}
            return name if name in self.schema.names else masks.get(name, name)
        if members := [each for each in names if name in structs_of(each)]:
            raise ConfigError(f"column {name!r} is a struct: name one of its members, {few(map(repr, members))}")
        hint = did_you_mean(name, names, f"there are {few(map(repr, names))}")
        raise ConfigError(f"column {name!r} is not in the dataset: {hint}")

    @cached_property
    def features(self) -> dict[str, Any]:
        """What the files say about the columns, by name, besides their types.

        For files of Hugging Face datasets, the features as its schema has them: {"label": {"names": ["cat", "dog"],
        "_type": "ClassLabel"}, …}. For others, the metadata of a column in Arrow's schema, and of pandas' categories.
        Columns that `map` made have none. The first file decides.
        """
        return features_of(self.manifest, self.blocks, filter(self._of_files.__contains__, self.schema.names))

    @cached_property
    def _of_files(self) -> set[str]:
        """The columns that the files have. Functions of `map` have made the others."""
        made = (name for stage in self.stages for name in (*stage.made, *stage.masks))
        return set(self.manifest.schema.names).difference(made)

    def class_names(self, column: str) -> list[str]:
        """Return the names of the classes of a column, in order: `names[label]` is the name of a label.

        Those of a ClassLabel of Hugging Face, also in a list. Of a column with an Arrow dictionary, as pandas writes
        categories: the values of its dictionaries. Each row group may have another, so the whole column is read. Its
        batches have the names themselves.

        Raises:
            ConfigError: The dataset has no such column, or the column has no names, or files name them differently. The
                message says which have.
            OriginError: The origin failed.
            DataError: A dictionary cannot be read.
        """
        if self._stored_with(column) not in self._of_files:
            raise ConfigError(
                f"column {column!r} has no names of classes, because a function of map returned it: ask the dataset "
                "before map; or name the columns that the function needs by columns=, and the others stay as they are"
            )
        return class_names(self.manifest, self.blocks, column, self.features, self.read_options.errors)

    def skipping(self) -> Dataset:
        """Return the same rows, of which those with which `map` fails end no others.

        They are stored as errors, which are raised when they are read, and they are cached apart. The dataset itself
        raises while it makes the row group of such a row.
        """
        flat = up_to_flat(self.stages)
        if len(self.stages) == flat:  # The rows before it are counted, so none of them may be missing.
            return self
        after = [replace(stage, skips=True) for stage in self.stages[flat:]]
        return self._of(self.manifest, None, [*self.stages[:flat], *after])

    def __repr__(self) -> str:
        urls = sorted({self.blocks.origin.url_of(group.file.path) for group in self.row_groups})
        groups, files = counted(len(self.row_groups), "row group"), counted(len(urls), "file")
        size = f"{counted(self.num_rows, 'row')} in {groups} of {files}"
        source = self.manifest.pinned or source_text(urls)
        return f"Dataset({source}: {size}; {columns_text(self.schema)}; {cache_text(self.blocks.tier)})"

    def _located(self, rows: npt.NDArray[np.int64]) -> list[Location]:
        return self._locator.locate(rows)

    @cached_property
    def _locator(self) -> Locator:
        return Locator(self.manifest, self.blocks.origin.url_of, MadeLocation if self._is_flat else Location)

    @property
    def _is_flat(self) -> bool:
        return any(stage.is_flat for stage in self.stages)

    def split(self, fractions: Sequence[float], seed: int = 0) -> list[Dataset]:
        """Return disjoint datasets that together hold every row: of whole row groups, or of rows if these are too few.

        Each process gets the same splits. Each split has its own fingerprint and numbers its own rows from 0; `locate`
        of the split says where they are.

        Args:
            fractions: Share of the rows for each split. Whole row groups meet it to within 2 % of the rows. If they
                cannot, those at the borders are divided row by row, and both splits fetch them.
            seed: Draws the row groups, or the rows, of each split.

        Raises:
            ConfigError: The fractions are not positive or do not sum to 1, or there are fewer rows than splits.
        """
        parts = split_manifest(self.manifest, fractions, seed)
        how = {"fractions": list(map(float, fractions)), "seed": seed}
        return [self._of(part, Call("split", {**how, "part": number})) for number, part in enumerate(parts)]

    @with_plain_arguments
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
        from dataload.catalog.filtering import narrow  # imports pyarrow.dataset, which few programs need
        from dataload.catalog.filters import in_form

        if self._is_flat:
            raise ConfigError(
                "filters read the rows of the files, and flat_map has made others: filter before flat_map"
            )
        made = {name for stage in self.stages for name in stage.made}
        try:
            filters = in_form(filters)
            found = narrow(self.manifest, self.blocks, filters, made, self.read_options.errors)
            return self._of(found, Call("filter", filters))
        except ConfigError as error:
            hint = "; filters read the files, not the columns that map made: filter before map" if made else ""
            raise ConfigError(f"{error}{hint}") from error

    def select(self, rows: Sequence[int] | npt.NDArray[Any] | torch.Tensor) -> Dataset:
        """Return the dataset of some rows, in file order.

        Args:
            rows: Row numbers, each at most once, in any order: integers [n]. Negative ones count from the end. Or which
                rows to keep: bool [len(self)].

        Raises:
            ConfigError: There are no rows, a number comes twice, or the mask is not as long as the dataset.
            IndexError: The dataset has no such row.
        """
        numbers = as_array(rows)
        return self._of(subset(self.manifest, numbers), Call("select", rows_as_json(numbers, len(self))))

    @property
    def file_columns(self) -> list[str]:
        """The names of the columns that are read of the files."""
        return list(self._columns)

    def exclude(self, row_ids: Sequence[int] | npt.NDArray[Any] | torch.Tensor) -> Dataset:
        """Return the dataset without some rows, in file order, such as bad ones or those of a request for erasure.

        Its fingerprint tells which rows are left. Cached row groups stay valid, and the rows stay in the files and in
        the cache; no batch has them.

        Args:
            row_ids: Row numbers of this dataset, such as those of the column "row_id" of batches, in any order:
                integers [n]. Negative ones count from the end, and a number may come several times.

        Raises:
            ConfigError: No row is left, or these are no row numbers.
            IndexError: The dataset has no such row.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import pyarrow as pa, pyarrow.parquet as pq
            >>> from dataload import make_dataset
            >>> folder = tempfile.TemporaryDirectory()
            >>> pq.write_table(pa.table({"id": range(6)}), Path(folder.name) / "rows.parquet")
            >>> dataset = make_dataset(folder.name, cache=False).exclude([4, 0])
            >>> dataset["id"].tolist()
            [1, 2, 3, 5]
            >>> folder.cleanup()
        """
        return self.excluding(as_array(row_ids), KnownRows())

    def excluding(self, numbers: npt.NDArray[Any], known: KnownRows) -> Dataset:
        """Return the dataset without some rows. See `exclude`.

        Args:
            numbers: Row numbers, as in `exclude`.
            known: The rows that were excluded in files of other snapshots.
        """
        left, rows = excluded(self.manifest, numbers), numbers.astype(np.int64)
        known = known.and_also(Inventory.of(self.manifest, ""), np.where(rows < 0, rows + len(self), rows))
        return self._of(left, Call("exclude", Excluded(rows_as_json(rows, len(self)), known)))

    def map(
        self,
        function: Function,
        columns: Sequence[str] | None = None,
        version: Any = None,
        *,
        processes: int | None = None,
    ) -> Dataset:
        """Return the dataset of the rows that a deterministic function makes. Each host runs it once for each row.

        The function gets a dict of columns, as batches of a loader are: tensors [n, …], list[str], list[memoryview],
        list[Tensor], Python values. It returns a dict of columns of n rows: arrays or tensors [n, …], or lists of n
        values of any type that a column of a file may have. It runs on chunks of a row group, ahead of the loop. The
        results are cached like decoded rows, and later epochs read them. Each row must depend on its own row only.

        Args:
            function: The function.
            columns: Names of the columns that the function gets. It replaces them by those that it returns, and the
                other columns stay. None: it gets all columns, and those that it returns are all that there are.
                (`map` of Hugging Face datasets keeps the columns that are not returned: here, return
                `{**batch, "new": …}`.)
            version: The function's source, default and closure values, and those of all that it refers to in the
                project, identify it; installed packages count by version, tokenizers and models by their state.
                Comments and docstrings do not count. A version adds to it: a string, a number, or a tuple of them, for
                an object that cannot be identified. Change it with that object.
            processes: Number of processes that run the function, if it holds the interpreter lock. None: threads.

        Raises:
            ConfigError: An argument cannot work, or the function needs a version.
            DataError: The function raised for all rows of a sample, or it returned what no column can hold. If it
                raises for some, reading these raises; `make_loader(on_error="skip")` replaces them.
            OriginError: The origin failed.

        Notes:
            `map` runs the function on a sample of at most 128 rows at once, to know the columns and their sizes. All
            rows are mapped that the dataset has now. If few are needed, call `filter` or `select` first.
        """
        readable = self if self.known_failure is None else self.skipping()
        probe = readable._probe(columns)  # noqa: SLF001 (of the same class)
        return self.mapped(probe.stage(function, version, processes))

    def mapped(self, stage: Stage) -> Dataset:
        """Return the dataset of the rows that a map makes, of these rows or of other ones of the same columns."""
        stages = [*self.stages, replace(stage, manifest=self.manifest)]
        return self._of(self.manifest, Call("map", stage.function), stages)

    @with_plain_arguments
    def flat_map(
        self,
        function: Function,
        columns: Sequence[str] | None = None,
        version: Any = None,
        *,
        processes: int | None = None,
    ) -> Dataset:
        """Return the dataset of the rows that a deterministic function makes: as `map`, with more or fewer rows.

        It suits windows of a series, overflowing tokens and chunks of documents. A row for which the function returns
        nothing is left out. The rows that it makes are in the order in which it returns them, row after row. Each must
        depend on one row only: the function gets chunks of any size.

        Args:
            function: The function. As that of `map`, but the columns that it returns may have any one length.
            columns: Names of the columns that the function gets; None: all. The dataset has the columns that it
                returns and no others: these have other rows. Let it return what is to be kept, repeated.
            version: As for `map`.
            processes: As for `map`.

        Raises:
            ConfigError: An argument cannot work, the function needs a version, or it returns no row at all.
            DataError: The function raised in a sample of the rows, or it returned what no column can hold.
            OriginError: The origin failed.

        Notes:
            The number of rows is not known before the function has seen all of them. So the first look at `len`, rows
            or row groups calls it for all, once for each host, or once for a cluster, and `print` tells before what
            that will read. The rows go into the cache on the way, so that the first epoch finds them there. The counts
            are cached: a pass that was killed goes on where it was, and later jobs need none. `filter` must come
            first. `locate` tells the row group that a row was made of.
        """
        from dataload.flat import FlatDataset

        return FlatDataset(self, self._probe(columns, is_flat=True).stage(function, version, processes))

    @with_plain_arguments
    def pack(
        self,
        length: int,
        column: str = "tokens",
        *,
        also: Sequence[str] = (),
        split: bool = True,
        pad: Any = 0,
        cu_seqlens: bool = False,
        lengths: str | None = None,
    ) -> Dataset:
        """Return the dataset of sequences of `length` values, in which the documents stand one after the other.

        Loaders count sequences as rows: `batch_size`, the state, the shares of ranks and the weights of mixtures. In
        each epoch the documents of a row group stand in another order, so each meets other neighbours. No value is
        stored a second time: a batch copies its values from the decoded documents.

        A batch has the column and each of `also` as Tensor[B, length]. It also has `segment_ids`, which number the
        documents of a sequence 1, 2, … and are 0 in the padding, and `position_ids`, which count the values of each
        segment from 0: int32 Tensor[B, length]. What was cut off a document is a segment of the next sequence.

        Args:
            length: Values of a sequence.
            column: The column of the documents' values, lists of numbers.
            also: Columns with as many values in each row, such as labels or a mask of the loss.
            split: True: documents are cut at the end of a sequence, and only the last sequence of a row group is
                padded (all of them a little, if the row group has many empty documents). Each value comes once in an
                epoch. False: documents of up to `length` values stay whole, and the
                rest of each sequence is padded. Longer ones are cut into sequences, and their rest stays whole.
            pad: What fills the column, and 0 fills each of `also`; or what fills each column, by name.
            cu_seqlens: Add what attention of variable length takes: `cu_seqlens`, the bounds of the segments of the
                batch, int32 Tensor[segments + 1], and `max_seqlen`, the longest segment. Padding is a segment.
            lengths: A column of integers that has the number of values of each document, such as "n_tokens". It is read
                in place of the documents where footers do not tell the sequences.

        Raises:
            ConfigError: An argument cannot work.

        Notes:
            The footers of Parquet files tell how many sequences there are. If they cannot, because of `map`, `filter`,
            `select` or `split=False`, the first look at `len`, rows or row groups reads the lengths of all documents,
            once for each host, or once for a cluster. The rows go into the cache on the way.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> import pyarrow as pa, pyarrow.parquet as pq
            >>> from dataload import make_dataset, make_loader
            >>> folder = tempfile.TemporaryDirectory()
            >>> pq.write_table(pa.table({"tokens": [[1, 2, 3], [4, 5], [6]]}), Path(folder.name) / "a.parquet")
            >>> packed = make_dataset(folder.name, cache=False).pack(4)
            >>> [batch] = make_loader(packed, batch_size=2, shuffle=False)
            >>> batch["tokens"].tolist(), batch["segment_ids"].tolist()
            ([[1, 2, 3, 4], [5, 6, 0, 0]], [[1, 1, 1, 2], [1, 2, 0, 0]])
            >>> folder.cleanup()
        """
        from dataload.packed import PackedDataset, packing_of

        packing = packing_of(self, length, column, also, split=split, pad=pad, cu_seqlens=cu_seqlens, lengths=lengths)
        return PackedDataset(self, packing)

    def _probe(self, columns: Sequence[str] | None, *, is_flat: bool = False) -> Probe:
        """Return what finds out which map of these rows a function is."""
        from dataload.mapping.probe import Probe

        [own] = self.rowstore.row_groups.caches
        return Probe(own, self.manifest, self.schema, self.blocks, columns, self.read_options, is_flat)

    @property
    def uncounted(self) -> Dataset | None:
        """The dataset that a function of `flat_map` will be called for, to count its rows; None: that is done."""
        return None

    @property
    def inventory(self) -> Inventory:
        """Which rows the dataset has."""
        return Inventory.of(self.manifest, self.order_key, self.window)

    def part(self, inventory: Inventory) -> Dataset:
        """Return the rows of an inventory.

        Raises:
            OriginNotFound: A file of them is gone.
        """
        manifest = inventory.part_of(self.manifest)
        if manifest is None:
            known = set(keys_of(self.manifest))
            gone = list(dict.fromkeys(path for path, *rest in inventory.keys if (path, *rest) not in known))
            raise OriginNotFound(
                f"{few(gone)} of the interrupted epoch {'is' if len(gone) == 1 else 'are'} gone, or replaced: "
                'on_change="continue" goes on without the rows, or begin an epoch with set_epoch'
            )
        found = self._of(manifest, Call("part", inventory))
        vars(found)["order_key"] = inventory.order_key  # Other files may have columns that these lack.
        return found

    def reopened(self) -> Dataset:
        """Return the newest snapshot of the source, with what was made of this one. See `refresh`."""
        from dataload.lineage import at_newest

        return at_newest(self)

    def _of(self, manifest: Manifest, call: Call | None = None, stages: Sequence[Stage] | None = None) -> Dataset:
        """Return a dataset of other rows or stages.

        Args:
            manifest: The rows.
            call: The call that makes it; None: one that is not made again.
            stages: The stages; None: those of this one.
        """
        kept = [stage.only(manifest) for stage in self.stages] if stages is None else stages
        calls = self.calls if call is None else (*self.calls, call)
        return Dataset(manifest, self.blocks, self._columns, self.read_options, kept, calls)


@known_keywords(CacheConfig)
def make_dataset(
    source: Source,
    *,
    columns: Sequence[str] | None = None,
    filters: Filters | None = None,
    storage_options: dict[str, Any] | None = None,
    fill_null: Any = None,
    null_masks: bool = False,
    errors: TextErrors = "raise",
    partitioning: Partitioning = "hive",
    cache: CacheConfig | Literal[False] | None = None,
    **cache_options: Unpack[CacheOptions],
) -> Dataset:
    """Return the dataset at `source`.

    Args:
        source: URL or path of a Parquet or Arrow IPC file, a folder or a glob; or a list. The order is that of paths.
            Or a table, at the version that it has now: a `deltalake.DeltaTable`, a table of pyiceberg or a scan of one,
            "delta+URL", "delta+URL@version", or "iceberg://catalog/namespace.table@snapshot".
        columns: Names of the columns to read, in this order; None: all. The name of a struct selects all its members.
            Keys in folder names (`label=cat/…`) are columns, too; see `partitioning`. A column that some files lack is
            null there, if it is named.
        filters: Rows to read, in pyarrow's form. All predicates of [("label", "=", "cat"), ("year", ">=", 2020)] must
            hold; of a list of such lists, one must hold. Or an expression of `pyarrow.compute`, such as
            `field("year") > 2020`. See `Dataset.filter`.
        storage_options: Options of the URL's filesystem, as fsspec takes them. None: those of the table, if it is one.
        fill_null: Replacement for nulls, for all columns that can hold it or by column. Nulls of nested values stay.
            Without one, nulls of strings, bytes and nested values are None, those of floats are NaN, and those of
            integers, booleans and times raise a DataError.
        null_masks: Instead of that error, make these nulls zeros, and add "<column>.is_null": a bool Tensor[B] of the
            rows that have nulls. Each column of integers, booleans or times, or of lists of these, has a mask.
        errors: What to do about text that is not UTF-8, at any depth and in the keys of folders. "raise" raises a
            DataError once a batch has it. "replace" puts U+FFFD in its place, as `bytes.decode` does, also for filters
            and `map`; such rows are cached apart.
        partitioning: "hive": folders named `key=value` below the source are keys. None: they are not.
        cache: The host's cache: a `CacheConfig`, or None for the default one. False: cache nothing outside this
            process's memory. Each of a loader's `num_workers` has its own memory, so each fetches every row group then.
        **cache_options: Instead of `cache`, arguments of `CacheConfig`, such as `cache_dir` and `cache_bytes`.

    Raises:
        ConfigError: An argument cannot work, or the filters leave no row.
        OriginNotFound: There is no object at `source`.
        DataError: An object is neither Parquet nor Arrow IPC, files differ in the chosen columns, or batches cannot
            hold a column's type.

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
        >>> dataset  # doctest: +ELLIPSIS
        Dataset(file:///...: 3 rows in 1 row group of 1 file; weight: double, label: string; no cache)
        >>> dataset[1]["label"], float(dataset[1]["weight"])
        ('dog', 2.5)
        >>> folder.cleanup()
    """
    config = chosen(cache, cache_options)
    if partitioning not in PARTITIONINGS:
        raise ConfigError(f"partitioning={partitioning!r} is unknown: use 'hive', or None")
    how = fill_null, null_masks, checked_errors(errors), partitioning
    if filters is not None:
        from dataload.catalog.filters import in_form  # imports pyarrow.dataset, which few programs need

        filters = in_form(filters)  # before files are read
    found = opened(Opening(_kept(source), storage_options, config, _listed(columns), *how))
    return found if filters is None else found.filter(filters)


def opened(opening: Opening, version: str | None = None, *, newest: bool = False) -> Dataset:
    """Return all rows of a source. See `Opening.open`."""
    manifest, blocks, columns = opening.open(version, newest=newest)
    source = manifest.pinned or [public_name(path) for path in source_paths(cast("Source", opening.source))]
    fill_null = opening.fill_null if version is None else opening.fill_null_in(manifest)
    found = {"source": source, "columns": columns, "fill_null": fill_null}
    calls = (Call("make_dataset", replace(opening, base=manifest, found=found)),)
    read_options = ReadOptions(fill_null, opening.null_masks, opening.errors)
    return Dataset(manifest, blocks, columns, read_options, (), calls)


def _kept(source: Source) -> Source:
    """Return a source that can be read twice: a list in place of an iterator of paths."""
    return source if is_table(source) or isinstance(source, (str, os.PathLike)) else source_paths(source)


def _listed(columns: Any) -> list[str] | None:
    """Return the names of columns as a list; None: all. Raise ConfigError for anything else."""
    if columns is None:
        return None
    names = list(columns) if isinstance(columns, Iterable) and not isinstance(columns, (str, bytes)) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"columns={columns!r} must be a list of at least one name")
    return names
