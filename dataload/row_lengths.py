"""The lengths of rows, by which batches of a token budget are cut: read once for each host, and mapped by its ranks.

They are counted as the lengths of documents that are packed whole, or are the numbers of a column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.arguments import did_you_mean
from dataload.cache.blocks.reader import Object
from dataload.catalog.footer_cache import Metadata
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.formats.schema import fields_of
from dataload.mapping.counting import UNKNOWN, LengthMaker, each_counted
from dataload.packed import PackedDataset
from dataload.runtime.cached_property import cached_property
from dataload.runtime.text import few
from dataload.samplers.interval_index import IntervalIndex
from dataload.samplers.token_batches import TokenBudget

Lengths = npt.NDArray[np.uint32]

VERSION = 1


class RowLengths:
    """The lengths of the rows of datasets, numbered one dataset after the other.

    Args:
        datasets: The datasets.
        column: The column of the lengths, or of lists whose values count.

    Raises:
        ConfigError: The column has no lengths.
    """

    def __init__(self, datasets: Sequence[Dataset], column: str) -> None:
        self._datasets, self.column = tuple(datasets), column
        for dataset in datasets:
            _check(dataset, column)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowLengths, (self._datasets, self.column)

    def __call__(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the lengths of rows, given their numbers: int64 [k] both."""
        if len(self._datasets) == 1:
            return self._each[0][rows].astype(np.int64)
        datasets, found = self._index.find(rows), np.empty_like(rows)
        for number, lengths in enumerate(self._each):
            chosen = datasets == number
            found[chosen] = lengths[rows[chosen] - self._firsts[number]]
        return found

    @property
    def digest(self) -> str:
        """Hex digest of all lengths."""
        found = hashlib.blake2b(digest_size=16)
        for each in self._each:
            found.update(each.data)
        return found.hexdigest()

    @property
    def means(self) -> tuple[float, ...]:
        """The mean length of each dataset."""
        return tuple(float(each.sum(dtype=np.int64)) / max(1, len(each)) for each in self._each)

    def check(self, most: int) -> None:
        """Raise DataError if a row is longer than a batch may be. It names the row."""
        for dataset, lengths in zip(self._datasets, self._each, strict=True):
            if len(lengths) and (longest := int(lengths.max())) > most:
                row = int(lengths.argmax())
                place = f"{dataset.locate(row).text}: column {self.column!r}"
                if longest == UNKNOWN:
                    raise DataError(f"{place} has no length: lengths are whole numbers from 0 to 2**32 - 2")
                raise DataError(
                    f"{place} has a length of {longest:,}, more than a batch of {most:,} tokens can hold: raise "
                    f"batch_tokens, leave such rows out with filter or select, or cut them with map"
                )

    @cached_property
    def _each(self) -> tuple[Lengths, ...]:
        return tuple(_lengths_of(dataset, self.column) for dataset in self._datasets)

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of each dataset."""
        return tuple(map(len, self._each))

    @cached_property
    def _firsts(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *self.rows])

    @cached_property
    def _index(self) -> IntervalIndex:
        return IntervalIndex(self._firsts)


def budget_of(lengths: RowLengths, tokens: int, multiple: int) -> TokenBudget:
    """Return what batches of rows of these lengths are cut by. The first call of a host reads all of them.

    Raises:
        DataError: A row is longer than a batch.
        OriginError: The origin failed.
    """
    lengths.check(tokens // multiple * multiple)
    means = lengths.means
    mean = float(np.average(means, weights=lengths.rows)) if any(lengths.rows) else 0.0
    return TokenBudget(tokens, lengths, mean, multiple, f"{lengths.column} {lengths.digest}", means)


def _check(dataset: Dataset, column: str) -> None:
    if isinstance(dataset, PackedDataset):
        length = dataset.packing.length
        raise ConfigError(
            f"batch_tokens: the sequences of a packed dataset all have {length:,} tokens: pass batch_size=batch_tokens "
            f"// {length}"
        )
    schema = _schema_of(dataset)
    if column not in schema.names:
        hint = did_you_mean(column, schema.names, f"there are {few(map(repr, schema.names))}")
        raise ConfigError(f"length={column!r} is not in the dataset: {hint}")
    [field] = fields_of(pa.schema([schema.field(column)]))
    is_number = field.kind == "dense" and not field.shape and np.dtype(field.dtype).kind in "iu"
    if not (is_number or field.kind == "list"):
        raise ConfigError(
            f"length={column!r} is {schema.field(column).type}: name a column of integers, or of lists of numbers"
        )


def _schema_of(dataset: Dataset) -> pa.Schema:
    """Return the columns that may have the lengths: of files, also those that batches do not have."""
    return dataset.schema if dataset.stages else dataset.manifest.schema


def _lengths_of(dataset: Dataset, column: str) -> Lengths:
    """Return the length of each row of a dataset. One process of the host reads them; the others map its file."""
    manifest, counts = dataset.manifest, dataset.block_lengths
    [field] = fields_of(pa.schema([_schema_of(dataset).field(column)]))
    # The other columns are read, too, and go into the cache, where that costs little or saves a second call of a map.
    alone = field.kind == "dense" and not dataset.stages
    cache = dataset.cached_row_groups([column] if alone or column not in dataset.schema.names else None)

    def parse(data: memoryview) -> Lengths:
        found = np.frombuffer(data, "<u4")
        if len(found) != counts.sum():
            raise ValueError("the lengths are of other rows")
        return found

    def count() -> bytes:
        found, starts = np.empty(counts.sum(), "<u4"), np.cumsum(counts) - counts
        filled = np.flatnonzero(counts).tolist()
        for number, lengths in each_counted(LengthMaker(cache, column), filled, f"the lengths of {column!r}"):
            selection = dataset.stored_selection
            own = lengths if selection is None else lengths[selection.mask(number)]
            found[starts[number] : starts[number] + counts[number]] = own
        return found.tobytes()

    if not len(counts):
        return np.empty(0, np.uint32)
    first = Object(manifest.row_groups[0].file.path, 0, dataset.fingerprint)
    return Metadata(
        cache.blocks, first, f"lengths {VERSION} of {column!r} {cache.plan.digest}", parse
    ).get_or_make_once(count)
