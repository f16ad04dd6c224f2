"""The first rows of a dataset, and the form of each column in a batch. Needs no torch and decodes one row group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT, Blocks
from dataload.catalog.footer_cache import FooterReader, read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.errors import DataError
from dataload.formats.arrow_arrays import as_in_dataset
from dataload.formats.base import RowGroupReader, as_data_error, read_row_group
from dataload.formats.hive_partitions import constant
from dataload.formats.schema import Field, fields_of, flatten_table, holds_nulls
from dataload.runtime.executor import DaemonExecutor

COLUMN_BYTES = 1 << 20  # to fetch of each column at first: a large row group is not fetched for its first rows
RAGGED = {"string": "list[str]", "binary": "list[memoryview]"}


@dataclass(frozen=True)
class PreviewColumn:
    """A column of a dataset.

    Attributes:
        name: Name, dotted for a member of a struct.
        type: Arrow type.
        batch: Its form in a batch of B rows; None: no batch can hold it.
        problem: The reason why not, or None.
        nulls: Number of nulls; None: unknown.
        holds_nulls: Whether batches can represent a null.
        promoted: How files write it differently, such as with types that were promoted to `type`; None: they do not.
    """

    name: str
    type: str
    batch: str | None
    problem: str | None
    nulls: int | None
    holds_nulls: bool
    promoted: str | None


def preview_columns(
    manifest: Manifest, columns: Sequence[str], blocks: Blocks, progress: Callable[[], object] = lambda: None
) -> list[PreviewColumn]:
    """Return these columns with their form in a batch and their number of nulls.

    Args:
        manifest: The dataset.
        columns: Names of the columns.
        blocks: Reads the footers through the cache.
        progress: Called for each file whose nulls have been counted, from any thread.

    Raises:
        OriginError: The origin failed.
        DataError: A footer cannot be read.
    """
    described, nulls = [], _null_counts(manifest, columns, blocks, progress)
    for field in map(manifest.schema.field, columns):
        form, problem = None, None
        try:
            form = _form(*fields_of(pa.schema([field])))
        except DataError as error:
            problem = str(error)
        described.append(
            PreviewColumn(
                field.name,
                str(field.type),
                form,
                problem,
                nulls.get(field.name),
                holds_nulls(field),
                manifest.promoted.get(field.name),
            )
        )
    return described


def _null_counts(
    manifest: Manifest, columns: Sequence[str], blocks: Blocks, progress: Callable[[], object]
) -> dict[str, int]:
    """Return the nulls of each column by the statistics of the footers, without columns of which they are unknown."""
    footers, unknown = FooterReader(blocks, manifest.chunks_of_a_file), set[str]()

    def count(groups: Sequence[tuple[RowGroup, int]]) -> Counter[str]:
        """Count the nulls of one file, given how many rows of each row group are selected."""
        first, total = groups[0][0], sum(rows for _, rows in groups)
        constants = dict(first.constants)
        counts = Counter({name: total for name in columns if name in constants and constants[name] is None})
        stored = [name for name in columns if name not in constants and name not in unknown]
        footer = footers.of(first) if stored and total else None  # It may not be cached any more.
        for (group, rows), name in product(groups, stored):
            [nulls] = [0] if footer is None or not rows else footer.null_counts(group.number, [name])
            is_unclear = rows < group.rows or pa.types.is_nested(manifest.schema.field(name).type)
            if nulls is None or (nulls and is_unclear):  # perhaps, of rows that are not selected or of empty lists
                unknown.add(name)
            else:
                counts[name] += nulls
        progress()
        return counts

    selected = zip(manifest.row_groups, manifest.block_lengths.tolist(), strict=True)
    files = [list(groups) for _, groups in groupby(selected, lambda each: each[0].file)]
    total = Counter[str]()
    for counts in DaemonExecutor(IN_FLIGHT, "dataload-nulls").map(count, files):
        total.update(counts)
    return {name: total[name] for name in columns if name not in unknown}


def first_rows(manifest: Manifest, columns: Sequence[str], blocks: Blocks, count: int) -> list[dict[str, Any]]:
    """Return the first rows as dicts of Python values: `count` of them, if the first row group with rows has as many.

    Nothing but the footer and byte ranges of these columns in that row group is fetched.

    Raises:
        OriginError: The origin failed.
        DataError: The row group cannot be decoded.
    """
    first = next((rows for rows in manifest.block_lengths.tolist() if rows), 0)
    return rows_at(manifest, columns, blocks, np.arange(min(count, first)))


def rows_at(
    manifest: Manifest, columns: Sequence[str], blocks: Blocks, rows: npt.NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Return rows as dicts of Python values, by their numbers: int64 [n].

    Nothing but the footers and the pages of these columns that hold the rows is fetched; without an index of pages in a
    Parquet file, the columns of their row groups.

    Raises:
        OriginError: The origin failed.
        DataError: A row group cannot be decoded.
    """
    ends, found = np.cumsum(manifest.block_lengths), dict[int, dict[str, Any]]()
    groups = np.searchsorted(ends, rows, "right")
    for number in np.unique(groups).tolist():
        own = np.unique(rows[groups == number])
        within = own - (ends[number] - manifest.block_lengths[number])
        if manifest.selection is not None:
            within = np.flatnonzero(manifest.selection.mask(number))[within]
        found.update(zip(own.tolist(), _rows_of(manifest, number, columns, blocks, within), strict=True))
    return [found[row] for row in rows.tolist()]


def _rows_of(
    manifest: Manifest, number: int, columns: Sequence[str], blocks: Blocks, rows: npt.NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Return some rows of a row group, ascending."""
    group = manifest.row_groups[number]
    constants = {name: value for name, value in group.constants if name in columns}
    stored = [name for name in columns if name not in constants]
    known = {name: _value(constant(value, manifest.schema.field(name).type)) for name, value in constants.items()}
    found: dict[str, list[Any]] = {name: [value] * len(rows) for name, value in known.items()}
    if stored:
        footer, arrays = read_footer(group.file, group.footer_at, blocks), dict[str, pa.ChunkedArray]()
        for name in stored:
            if (values := footer.values_at(group.file, group.number, name, rows, blocks)) is not None:
                arrays[name] = values
        paged = set(arrays)
        if others := [name for name in stored if name not in arrays]:
            last, capacity = int(rows[-1]) + 1, len(others) * COLUMN_BYTES

            def first(reader: RowGroupReader) -> pa.Table:
                return next(iter(reader.tables(last)))

            table = read_row_group(footer, group.file, group.number, others, blocks.bypassing(), capacity, first)
            table = flatten_table(table.slice(0, last))
            arrays |= dict(zip(table.column_names, table.columns, strict=True))
        with as_data_error(f"{group.file.name} row group {group.number} cannot be decoded"):
            for name in arrays.keys() & {*stored}:
                promoted = as_in_dataset(arrays[name], manifest.schema.field(name).type)
                found[name] = [_value(promoted[row]) for row in (range(len(rows)) if name in paged else rows.tolist())]
    return [{name: found[name][at] if name in found else None for name in columns} for at in range(len(rows))]


def _value(scalar: pa.Scalar) -> Any:
    """Return a value for Python. Text that is not UTF-8 becomes bytes; a time outside of Python's range, text."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        with suppress(pa.ArrowException):  # a nested value
            return scalar.cast(pa.large_binary()).as_py()
    except (ValueError, OverflowError):
        with suppress(pa.ArrowException):
            return scalar.cast(pa.string()).as_py()
    return "a value that Python cannot hold"


def _form(field: Field) -> str:
    if field.kind == "dense":
        return f"Tensor[{', '.join(['B', *map(str, field.shape)])}] of {field.dtype}"
    if field.kind == "list":
        shape = f"[{', '.join(['n', *map(str, field.shape)])}]" if field.shape else ""
        return f"list[Tensor{shape}] of {field.dtype}"
    if field.shape:  # of a nested column
        return f"list[Tensor] of {field.dtype}, each of {len(field.shape)} dimensions"
    return RAGGED.get(field.kind, "list of Python values")
