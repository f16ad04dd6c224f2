"""`Dataset.pack`: sequences of packed documents as a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rich.filesize import decimal

from dataload.arguments import did_you_mean, whole_number
from dataload.catalog.description import cache_text, columns_text, source_text
from dataload.catalog.inventory import Inventory, keys_of
from dataload.catalog.list_values import values_of
from dataload.catalog.locations import Location
from dataload.catalog.manifest import Manifest
from dataload.catalog.opening import Call
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.formats.schema import Field, fields_of
from dataload.mapping.counting import UNKNOWN, LengthMaker, counted_once, each_counted
from dataload.mapping.stage import Stage
from dataload.rows.packing import OF_BATCHES, POSITIONS, SEGMENTS, Packing, sequences_of
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_store import Draw, RowStore
from dataload.rows.sequence_store import SequenceStore
from dataload.runtime.cached_property import cached_property
from dataload.runtime.text import counted, few

VERSION = 3
LONGEST_SEQUENCE = (1 << 31) - 1


class Piece(NamedTuple):
    """The part of a document that a sequence has.

    Attributes:
        document: Where the document is.
        start: Values of the document before the piece.
        stop: Values of the document up to its end.
    """

    document: Location
    start: int
    stop: int


class SequenceLocation(Location):
    """The place of a sequence: `row` is its number among the sequences of the row group. See `documents`."""

    dataset: PackedDataset
    number: int

    @property
    def text(self) -> str:
        """The location in words, without credentials."""
        return f"{super().text.rpartition(' row ')[0]}, sequence {self.row} of those packed of it"

    def look(self, row: int) -> str:
        """Return how to look at the documents of the sequence, which depend on the epoch."""
        return f"loader.dataset.locate({row}).documents(epoch, seed) returns the documents that it had in an epoch"

    def documents(self, epoch: int | None, seed: int = 0) -> list[Piece]:
        """Return the pieces of documents that the sequence has in an epoch, in order.

        Args:
            epoch: Number of the epoch; None: without a shuffle.
            seed: That of the loader.

        Raises:
            OriginError: The origin failed.
            DataError: The row group cannot be decoded.
        """
        return self.dataset.pieces(self.number, None if epoch is None else (seed, epoch))


class PackedDataset(Dataset):
    """Sequences of the documents of a dataset. `Dataset.pack` returns one.

    Rows are sequences: `len`, `block_lengths`, the order, splits over ranks and the state count them.

    Args:
        documents: The dataset of the documents.
        packing: How they are packed.

    Attributes:
        packing: As above.
    """

    packing: Packing

    def __init__(self, documents: Dataset, packing: Packing) -> None:
        self._documents, self.packing = documents, packing
        self.calls = (*documents.calls, Call("pack", packing))
        self.blocks, self._columns, self.read_options = documents.blocks, documents.file_columns, documents.read_options
        fields = [documents.schema.field(name) for name in packing.columns]
        ids = [pa.field(name, pa.int32()) for name in (SEGMENTS, POSITIONS)]
        values = [pa.field(field.name, field.type.value_type) for field in fields]
        self.schema = pa.schema([pa.field(each.name, pa.list_(each.type, packing.length)) for each in values + ids])

    def __reduce__(self) -> tuple[Any, ...]:
        known = {"_counts": self._counts} if "_counts" in vars(self) else {}
        return PackedDataset, (self._documents, self.packing), known

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]
        """The documents: the first look at those of `flat_map` counts them."""
        return self._documents.manifest

    @property
    def stages(self) -> tuple[Stage, ...]:  # type: ignore[override]
        """The maps that make the documents."""
        return self._documents.stages

    @cached_property
    def _counts(self) -> npt.NDArray[np.int64]:
        """The sequences of each row group, and the values in them: int64 [2, row groups].

        Footers count null and empty documents as a value.
        """
        manifest, packing = self.manifest, self.packing
        if (values := self._by_footers) is not None:
            return np.stack((packing.filled(values), values))
        counted = packing.lengths or packing.column
        cache = self._documents.cached_row_groups([counted] if packing.lengths else packing.columns)
        firsts = np.cumsum(manifest.block_lengths) - manifest.block_lengths

        def of(number: int, lengths: npt.NDArray[np.int64]) -> tuple[int, int]:
            selection = self.stored_selection
            own = lengths if selection is None else lengths[selection.mask(number)]
            if own.max(initial=0) == UNKNOWN:
                place = self._documents.locate(int(firsts[number] + own.argmax())).text
                raise DataError(f"{place}: column {counted!r} has no length: lengths are whole numbers from 0 on")
            return sequences_of(own, packing), int(own.sum())

        def count() -> bytes:
            found = np.zeros((2, len(manifest.row_groups)), "<i8")
            filled, maker = np.flatnonzero(manifest.block_lengths).tolist(), LengthMaker(cache, counted)
            for number, counts in each_counted(maker, filled, f"the values of {packing.column!r}", of):
                found[:, number] = counts
            return found.tobytes()

        return counted_once(cache, f"sequences {VERSION} {packing.key} {cache.plan.digest}", manifest, count)

    @property
    def padding_share(self) -> float:
        sequences, values = map(int, self._counts.sum(axis=1))
        return 1 - values / max(1, sequences * self.packing.length)

    @cached_property
    def _by_footers(self) -> npt.NDArray[np.int64] | None:
        """The values of each row group, as far as the footers tell, int64 [row groups]; None: they do not."""
        fill_null = self.read_options.fill_null
        filled = fill_null is not None and (not isinstance(fill_null, Mapping) or self.packing.column in fill_null)
        is_whole = not self.stages and self.manifest.selection is None and not filled
        return values_of(self.manifest, self.blocks, self.packing.column) if self.packing.split and is_whole else None

    @property
    def known_nulls(self) -> str | None:
        """Which columns are known to have nulls that end a loop. See `Dataset.known_nulls`."""
        return self.cached_row_groups().maker.known_nulls

    @cached_property
    def block_lengths(self) -> npt.NDArray[np.int64]:
        """Sequences of each row group, int64 [row groups]."""
        if not self._counts.any():
            raise ConfigError(f"column {self.packing.column!r} has no value in any document: there is nothing to pack")
        sequences: npt.NDArray[np.int64] = self._counts[0]
        return sequences

    def cached_row_groups(self, columns: Sequence[str] | None = None) -> RowGroupCache:  # noqa: ARG002
        """Return the row groups of the documents in the cache, with the columns that are packed."""
        return self._documents.cached_row_groups(self.packing.columns)

    def store_of(self, datasets: Sequence[Any], *how: Any, **more: Any) -> RowStore:
        """Return the sequences of several datasets that are packed as this one. See `Dataset.store_of`."""
        documents = np.concatenate([each.manifest.block_lengths for each in datasets])
        sequences = np.concatenate([each.block_lengths for each in datasets])
        locate = partial(_located_in, [each._documents for each in datasets])  # noqa: SLF001 (of this class)
        return SequenceStore(self.packing, documents, sequences, locate, *how, **more)

    @property
    def fingerprint(self) -> str:
        """Hex digest of the documents, as `Dataset.fingerprint` covers them, and of how they are packed."""
        return self.packing.digest(
            "rows", self._documents.fingerprint, self.packing.also, *map(repr, self.packing.pads)
        )

    @cached_property
    def order_key(self) -> str:
        """Hex digest that decides the order of the sequences; see `order_key_of`."""
        return self.packing.digest("order", self._documents.order_key)

    @property
    def inventory(self) -> Inventory:
        """Which sequences the dataset has: their numbers in each row group. The documents in them differ by epoch."""
        return Inventory(self.order_key, keys_of(self.manifest), self.block_lengths)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a whole column, of documents in file order; see `__getitem__`."""
        if name not in self.schema.names:
            hint = did_you_mean(name, self.schema.names, f"there are {few(map(repr, self.schema.names))}")
            raise ConfigError(f"column {name!r} is not in the dataset: {hint}")
        return self.gathered_column(name)

    def pieces(self, number: int, draw: Draw) -> list[Piece]:
        """Return the pieces of documents in a sequence, in the order that `draw` draws."""
        found = self.rowstore.gather(np.array([number]), draw=draw)
        places = self._documents.locate(found.numbers)
        starts, stops = found.starts.tolist(), (found.starts + found.lengths).tolist()
        return [Piece(*each) for each in zip(places, starts, stops, strict=True)]

    def _located(self, rows: npt.NDArray[np.int64]) -> list[Location]:
        starts = np.concatenate(([0], np.cumsum(self.block_lengths)))
        groups = np.searchsorted(starts, rows, "right") - 1
        found: list[Location] = []
        for number, group, within in zip(rows.tolist(), groups.tolist(), (rows - starts[groups]).tolist(), strict=True):
            of = self.manifest.row_groups[group]
            place = SequenceLocation(self.blocks.origin.url_of(of.file.path), of.number, within)
            place.dataset, place.number = self, number
            found.append(place)
        return found

    def skipping(self) -> Dataset:
        """Return the same sequences without the documents with which `map` fails. See `Dataset.skipping`."""
        documents = self._documents.skipping()
        return self if documents is self._documents else PackedDataset(documents, self.packing)

    def split(self, fractions: Sequence[float], seed: int = 0) -> list[Dataset]:
        """Return disjoint datasets that together pack every document. See `Dataset.split`."""
        return [PackedDataset(part, self.packing) for part in self._documents.split(fractions, seed)]

    def _of(self, *_: Any, **__: Any) -> Dataset:
        raise ConfigError(
            "the sequences of a packed dataset have other documents in each epoch: filter, select, exclude or map the "
            "documents before pack, or change batches by make_loader(transform=)"
        )

    filter = map = flat_map = select = exclude = pack = _of

    @property
    def uncounted(self) -> Dataset | None:
        """The dataset that is read to count the sequences; None: that is done, or takes no pass."""
        if "_counts" in vars(self):
            return None
        return self._documents.uncounted or (self._documents if self._by_footers is None else None)

    def __repr__(self) -> str:
        if self._documents.uncounted is not None:
            return (
                f"Dataset(sequences of {self.packing.length:,} values of {self.packing.column!r}: {self._documents!r})"
            )
        groups = self.manifest.row_groups
        urls = sorted({self.blocks.origin.url_of(group.file.path) for group in groups})
        of = f"of {self.packing.length:,} values of {self.packing.column!r}"
        files = f"{counted(len(groups), 'row group')} of {counted(len(urls), 'file')}"
        documents = counted(self.manifest.num_rows, "document")
        if self.uncounted is None:
            what = f"{counted(int(self._counts[0].sum()), 'sequence')} {of} from {documents} in {files}"
        else:
            size = decimal(sum(group.bytes for group in groups))
            what = f"sequences {of}, not counted yet: {documents} in {files}, {size}, will be read once for that"
        return f"Dataset({source_text(urls)}: {what}; {columns_text(self.schema)}; {cache_text(self.blocks.tier)})"


def _located_in(datasets: Sequence[Dataset], number: int) -> Location:
    """Return the location of a document of several datasets, numbered one dataset after the other."""
    for dataset in datasets:
        if number < len(dataset):
            return dataset.locate(number)
        number -= len(dataset)
    raise IndexError(number)


def packing_of(
    documents: Dataset, length: Any, column: Any, also: Any, *, split: Any, pad: Any, cu_seqlens: Any, lengths: Any
) -> Packing:
    """Return how documents are packed. See `Dataset.pack`.

    Raises:
        ConfigError: An argument cannot work.
    """
    length = whole_number("length", length, least=1)
    if length > LONGEST_SEQUENCE:
        raise ConfigError(f"length={length:,} is more than {LONGEST_SEQUENCE:,}, which position_ids can count")
    if not isinstance(also, list | tuple) or not all(isinstance(name, str) for name in also):
        raise ConfigError(f"also={also!r} must be a list of names of columns")
    _check_flags(split=split, cu_seqlens=cu_seqlens)
    names = (column, *also)
    schema = documents.schema
    for name in names:
        if name not in schema.names:
            hint = did_you_mean(str(name), schema.names, f"there are {few(map(repr, schema.names))}")
            raise ConfigError(f"pack: column {name!r} is not in the dataset: {hint}")
        if name in (SEGMENTS, POSITIONS, *OF_BATCHES) or names.count(name) > 1:
            raise ConfigError(f"pack: {name!r} would be two columns of the sequences: leave it out, or rename it")
    fields = fields_of(pa.schema([schema.field(name) for name in names]))
    for field in fields:
        if field.kind != "list" or field.shape:
            raise ConfigError(
                f"pack: column {field.name!r} is {schema.field(field.name).type}, and sequences are made of lists of "
                "numbers: make such a column with map, such as by a tokenizer"
            )
    given = dict(pad) if isinstance(pad, Mapping) else {column: pad}
    if unknown := given.keys() - set(names):
        raise ConfigError(f"pad= names {min(unknown, key=str)!r}, which is not packed: name {few(map(repr, names))}")
    pads = tuple(_pad(field, given.get(field.name, 0)) for field in fields)
    _check_lengths(schema, lengths)
    return Packing(length, column, tuple(also), split, pads, cu_seqlens, lengths)


def _check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"{name}={flag!r} must be True or False")


def _check_lengths(schema: pa.Schema, lengths: Any) -> None:
    """Raise ConfigError unless `lengths` is None or a column of integers."""
    known = [field for field in fields_of(schema) if field.kind == "dense" and not field.shape]
    numbers = [field.name for field in known if np.dtype(field.dtype).kind in "iu"]
    if lengths is not None and lengths not in numbers:
        there = few(map(repr, numbers)) if numbers else "none"
        raise ConfigError(f"lengths={lengths!r} is no column of integers of the dataset, of which there are: {there}")


def _pad(field: Field, value: Any) -> Any:
    """Return what fills a column, as a number of Python. Raise ConfigError if the column cannot hold it."""
    dtype, held = np.dtype(field.dtype), None
    with suppress(TypeError, ValueError, OverflowError, FloatingPointError), np.errstate(all="raise"):
        held = np.array([value]).astype(dtype)[0].item()
    if held is None or (dtype.kind != "f" and held != value):
        raise ConfigError(f"pad={value!r} is no number of column {field.name!r}, which has {dtype}: choose another one")
    return held
