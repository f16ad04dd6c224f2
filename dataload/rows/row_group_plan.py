"""How row groups are stored as blobs of records: the names, lengths and sizes of the blobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.cache.tier import Kind
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.catalog.selection import Mask
from dataload.errors import ConfigError, DataError
from dataload.formats.hive_partitions import Constants
from dataload.formats.schema import CODE, SPAN, Field, Layout, field_or_none, fields_of
from dataload.rows import row_block
from dataload.rows.arrow_decode import decode, raises_for_nulls
from dataload.rows.columns import Array
from dataload.runtime.cached_property import cached_property

# Bounds of a blob. The footers give the bytes; where values have different lengths, the rows have a bound of their own,
# because a dictionary in a file may hide how large the values are, and a record has 16 bits for the number of a value.
BLOB_BYTES, BLOB_ROWS = 32 << 20, int(np.iinfo(CODE).max) + 1


class RowGroupPlan:
    """The blobs of each row group of a dataset, for the chosen columns.

    Args:
        manifest: The dataset.
        columns: Names of the columns to store.
        fill_null: The replacement of nulls, which is part of the names of the blobs.
        null_masks: Whether the layout has masks of nulls, see `fields_of`.
        made_by: Keys of what makes the rows, besides the decoding of files.

    Raises:
        ConfigError: `fill_null` names a column that is not in the dataset, cannot be filled, or cannot hold the value.
        DataError: A column has an unsupported type.

    Attributes:
        layout: Layout of a record.
        digest: Digest of the columns and of how they are made, without the constants of row groups.
        blob_rows: Rows of a full blob, by row group, int64 [groups]. A power of two, so that blobs of few columns are
            made of whole blobs of all columns.
        group_starts: Number of each row group's first blob, int64 [groups + 1].
        row_starts: Number of each blob's first row, int64 [blobs + 1].
        most_of_a_group: Blobs of the row group that has most.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Sequence[str],
        fill_null: Any = None,
        *,
        null_masks: bool = False,
        made_by: Sequence[str] = (),
    ) -> None:
        if isinstance(fill_null, Mapping):
            _check_filled(manifest, fill_null, columns)
        self._manifest = manifest
        self._columns = dict.fromkeys(columns)  # in order
        self._mean_sizes: Mapping[str, float] = {}
        schema = pa.schema([manifest.schema.field(name) for name in columns])
        self.layout = Layout(_fields(manifest, schema, null_masks=null_masks))
        self._with_table = {field.name for field in self.layout.fields if field.is_bytes}
        self.blob_rows = self._rows_per_blob()
        lengths = np.array([group.rows for group in manifest.row_groups], np.int64)
        counts = np.maximum(1, -(-lengths // self.blob_rows))
        self.group_starts = np.concatenate(([0], np.cumsum(counts)))
        self.most_of_a_group = int(counts.max(initial=1))
        self.row_starts = self._first_rows(lengths, counts)
        # Casts may round: a promoted column has other values than one that is read with its own type.
        promoted = [[name, str(manifest.schema.field(name).type)] for name in columns if name in manifest.promoted]
        self.digest = digest_of(fill_null, row_block.VERSION, self.layout.describe(), promoted, *made_by)
        self._fill_null = fill_null
        self._contents = dict[int, str]()  # by row group: see `_content`

    def use_mean_sizes(self, means: Mapping[str, float]) -> None:
        """Estimate sizes by the measured bytes of a value, by column, where the footers only tell those of codes."""
        self._mean_sizes = means

    def bytes_of(self, number: int) -> int:
        """Return an estimate of the bytes of a row group's blobs.

        It is too large where files have dictionary codes, unless `use_mean_sizes` was called.
        """
        group = self._manifest.row_groups[number]
        return group.rows * self.layout.dtype.itemsize + sum(self._heap_sizes(group))

    def blob_sizes(self, number: int) -> list[int]:
        """Return an estimate of the bytes of each blob of a row group."""
        group = self._manifest.row_groups[number]
        heaps = self._heap_sizes(group)
        return [
            row_block.packed_bytes(rows, [size * rows // max(1, group.rows) for size in heaps], self.layout)
            for rows in self.lengths(number)
        ]

    def lengths(self, number: int) -> list[int]:
        """Return the rows of each blob of a row group."""
        total, most = self._manifest.row_groups[number].rows, int(self.blob_rows[number])
        return [min(most, total - first) for first in range(0, max(1, total), most)]

    def parts(self, number: int) -> list[str]:
        """Return the name of each blob of a row group, within the row group."""
        total, most = self._manifest.row_groups[number].rows, int(self.blob_rows[number])
        return [f"rows {first}+{most}" for first in range(0, max(1, total), most)]

    def qualified(self, number: int, part: str) -> str:
        """Return the name of a part of a row group within its file. It identifies the content of the records."""
        return f"{Kind.RECORDS}{self._manifest.row_groups[number].number} {part} {self._content(number)}"

    def group_name(self, number: int) -> str:
        """Return the name of a row group's blobs together, within its file."""
        return f"{Kind.RECORDS}{self._manifest.row_groups[number].number} {self._content(number)}"

    def constants(self, number: int) -> Constants:
        """Return the names and values of the columns that a row group's file does not hold."""
        constants = self._manifest.row_groups[number].constants
        return tuple((name, value) for name, value in constants if name in self._columns)

    def renamed(self, number: int) -> list[tuple[str, str]]:
        """Return the names of the columns that a row group's file calls otherwise than its table, and how."""
        return [pair for pair in self._manifest.row_groups[number].renamed if pair[0] in self._columns]

    def _content(self, number: int) -> str:
        """Return what a name tells of the content of the records, besides the file.

        The constants are part of it: they depend on the source, so two datasets may have others for one file. So are
        the selected rows, if the nulls of the others become zeros.
        """
        content = self._contents.get(number)
        if content is None:
            constants = self.constants(number)
            content = f"{self.digest} {digest_of(None, constants)}" if constants else self.digest
            if renamed := self.renamed(number):
                content += f" as {digest_of(None, renamed)}"
            if self.zeroes_nulls(number) and self._manifest.selection is not None:
                content += f" for {self._manifest.selection.digest_of(number)}"
            self._contents[number] = content
        return content

    def needed(self, number: int) -> Mask | None:
        """Return which rows of a row group must have no null that batches cannot hold; None: all.

        Nulls of the other rows become zeros, which nobody reads.
        """
        selection = self._manifest.selection
        return selection.mask(number) if selection is not None and self.zeroes_nulls(number) else None

    def zeroes_nulls(self, number: int) -> bool:
        """Return whether a row group is selected in part, and may have nulls that batches cannot hold."""
        return bool(self._zeroing[number])

    @cached_property
    def _zeroing(self) -> Array:
        manifest = self._manifest
        may_have = np.zeros(len(manifest.row_groups), np.bool_)
        if not any(field.kind == "mask" for field in self.layout.fields):
            for name in manifest.nulls.keys() & self._columns.keys():
                if raises_for_nulls(manifest.schema.field(name), self._fill_null):
                    may_have |= manifest.nulls[name] != 0
        return may_have & (manifest.block_lengths < manifest.stored_lengths)

    def stored(self, group: RowGroup) -> list[str]:
        """Return the columns that a row group's file holds. The others are constants of its folder names."""
        constants = dict(group.constants)
        return [name for name in self._columns if name not in constants]

    def _rows_per_blob(self) -> Array:
        """It depends on the footers only, not on measured sizes, because it is part of the names of the blobs."""
        bounds = []
        for group in self._manifest.row_groups:
            row_bytes = self.layout.dtype.itemsize + sum(self._heap_sizes(group)) // max(1, group.rows)
            bounds.append(rows_in_a_blob(row_bytes, dense=not self.layout.ragged))
        return np.array(bounds, np.int64)

    def _heap_sizes(self, group: RowGroup) -> list[int]:
        """Return the estimated bytes of the values and spans of each ragged column."""
        sizes = zip(self._manifest.ragged, group.sizes, strict=False)
        return [self._heap(name, size, group.rows) for name, size in sizes if name in self._columns]

    def _heap(self, name: str, size: int, rows: int) -> int:
        mean = self._mean_sizes.get(name)
        if mean is not None:
            return round(mean * rows)
        return size + rows * SPAN.itemsize * (name in self._with_table)

    def _first_rows(self, lengths: Array, counts: Array) -> Array:
        firsts = np.concatenate(([0], np.cumsum(lengths)))
        within = np.arange(counts.sum()) - np.repeat(self.group_starts[:-1], counts)
        starts = np.repeat(firsts[:-1], counts) + within * np.repeat(self.blob_rows, counts)
        return np.append(starts, firsts[-1])


def rows_in_a_blob(row_bytes: int, *, dense: bool = False) -> int:
    """Return the rows of a full blob: a power of two.

    Args:
        row_bytes: Bytes of a row.
        dense: Whether these are exact, because no value has a length of its own.
    """
    most = BLOB_BYTES if dense else BLOB_ROWS
    return 1 << (min(most, max(1, BLOB_BYTES // max(1, row_bytes))).bit_length() - 1)


def _fields(manifest: Manifest, schema: pa.Schema, *, null_masks: bool) -> tuple[Field, ...]:
    """Return the columns of batches. Raise DataError, naming a file, if no batch can hold a column."""
    try:
        return fields_of(schema, null_masks=null_masks)
    except DataError as error:
        unsupported = next((field.name for field in schema if field_or_none(field) is None), None)
        files = (group.file.name for group in manifest.row_groups if unsupported not in dict(group.constants))
        raise DataError(f"{next(files, 'a file without rows')}: {error}") from error


def _check_filled(manifest: Manifest, fill_null: Mapping[str, Any], columns: Sequence[str]) -> None:
    read = set(columns)
    fill_null = {name: value for name, value in fill_null.items() if name in read or name not in manifest.conflicts}
    try:
        manifest.check_columns(fill_null)
    except ConfigError as error:
        raise ConfigError(f"fill_null: {error}") from None
    names = set(manifest.schema.names)
    for name in fill_null:
        if name not in names:
            raise ConfigError(f"fill_null: {name!r} is a struct, name its members: {manifest.select([name])}")
        field = manifest.schema.field(name)
        if (own := field_or_none(field)) is None or own.kind == "nested":
            raise ConfigError(f"fill_null is for flat columns, and {name!r} has the nested type {field.type}: omit it")
    # A replacement of the wrong type would otherwise fail at the first null, which may be far into an epoch.
    schema = pa.schema([manifest.schema.field(name) for name, value in fill_null.items() if value is not None])
    a_null = pa.table([pa.nulls(1, field.type) for field in schema], schema=schema)
    try:
        decode(a_null, fields_of(schema), fill_null, "the dataset's", schema)
    except DataError as error:
        raise ConfigError(f"fill_null: {error}") from None


def digest_of(fill_null: Any, *content: Any) -> str:
    """Return a digest of a replacement of nulls and of JSON-able values."""
    whole = json.dumps([*content, repr(_complete(fill_null))])
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


def _complete(value: Any) -> Any:
    """Return the value in a form whose repr is complete.

    The repr of a long array omits its middle, and the repr of an Arrow value may have its address.
    """
    if isinstance(value, Mapping):
        return {name: _complete(each) for name, each in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_complete(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return [str(value.dtype), _complete(value.tolist())]
    if isinstance(value, pa.Scalar):
        value = pa.repeat(value, 1)
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        table = pa.table([value], [""])
        with pa.BufferOutputStream() as sink:
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            return sink.getvalue().to_pybytes()
    return value
