"""Row groups of which a filter keeps all rows or none, as partition keys and footer statistics tell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import chain, combinations, groupby
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from pyarrow.fs import LocalFileSystem

from dataload.cache.blocks.reader import Blocks
from dataload.catalog.filters import Filter, paths_of
from dataload.catalog.footer_cache import FOOTERS_IN_FLIGHT, read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.formats.arrow_types import has_part, is_text
from dataload.formats.base import Footer
from dataload.formats.hive_partitions import Constants, constant
from dataload.formats.schema import flatten
from dataload.runtime.executor import DaemonExecutor

MOST_NANS = 4  # columns that may be NaN in a row that matches: all combinations of them are tried
TRUSTED_CALLS = {"invert", "is_nan", "is_null", "is_valid"}


def decide(manifest: Manifest, blocks: Blocks, chosen: Filter) -> list[bool | None]:
    """Return for each row group whether the filter keeps all its rows (True) or none (False); None: unknown.

    Footers are read only where partition keys do not decide.
    """
    files = [list(file) for _, file in groupby(manifest.row_groups, lambda group: group.file)]
    nans = _may_be_nan(chosen)
    promoted = [name for name in chosen.columns if name in manifest.promoted]

    def decide_file(item: tuple[list[RowGroup], bool | None]) -> list[bool | None]:
        groups, decision = item
        if decision is not None:
            return [decision] * len(groups)
        footer = read_footer(groups[0].file, groups[0].footer_at, blocks)
        if promoted and _has_other_types(footer, promoted, manifest.schema):  # Its statistics have these types, too.
            return [None] * len(groups)
        return list(_by_statistics(footer, groups, chosen, nans))

    items = zip(files, _by_keys([file[0].constants for file in files], chosen), strict=True)
    decisions = chain.from_iterable(DaemonExecutor(FOOTERS_IN_FLIGHT, "dataload-footers").map(decide_file, items))
    # A row group without rows has none to keep.
    return [decision if group.rows else False for group, decision in zip(manifest.row_groups, decisions, strict=True)]


def _has_other_types(footer: Footer, columns: Iterable[str], schema: pa.Schema) -> bool:
    """Return whether one of these columns has another type in a file than in the dataset."""
    own = flatten(footer.schema)
    return any(own.field(name).type != schema.field(name).type for name in columns if name in own.names)


def _by_keys(files: Sequence[Constants], chosen: Filter) -> list[bool | None]:
    """Return the decision for each file by its partition keys."""
    if not chosen.columns:  # such as pyarrow.compute.scalar(True)
        return [bool(_satisfiable(chosen, [pc.scalar(True)]))] * len(files)
    keys = [dict(constants) for constants in files]
    found: dict[int, bool | None] = {n: False for n, known in enumerate(keys) if known.keys() >= set(chosen.columns)}
    if found:
        rows = [{name: _key(name, keys[number][name], chosen).as_py() for name in chosen.columns} for number in found]
        found = dict(zip(found, map(bool, chosen.mask(pa.Table.from_pylist(rows, chosen.schema))), strict=True))
    others = [number for number in range(len(files)) if number not in found]
    possible = _satisfiable(chosen, [_guarantee(files[number], chosen) for number in others])
    found |= {number: None if position in possible else False for position, number in enumerate(others)}
    return [found[number] for number in range(len(files))]


def _by_statistics(
    footer: Footer, groups: Sequence[RowGroup], chosen: Filter, nans: Sequence[pc.Expression]
) -> Iterator[bool | None]:
    """Yield the decision for each row group of a file by its statistics.

    Statistics ignore NaN. So the expression is tried with the bounds of each column, and with NaN in the columns by
    which a row with NaN may match. Row groups are never decided to match as a whole if floats are compared.
    """
    guarantee = _guarantee(groups[0].constants, chosen)
    constants = dict(groups[0].constants)
    stored = [name for name in chosen.columns if name not in constants]
    footers = footer.for_statistics(guarantee, stored)
    floats = bool(list(_floats(chosen)))
    # Statistics bound the stored bytes, and replaced ones may be beyond.
    is_other = chosen.errors == "replace" and any(has_part(kind, is_text) for kind in chosen.schema.types)
    if is_other or footers is None or len(nans) > MOST_NANS or not _trusts_statistics(chosen.expression, floats=floats):
        yield from [None] * len(groups)
        return
    possible = _kept(footers, chosen.expression, chosen.schema)
    for count in range(1, len(nans) + 1):
        for some in combinations(nans, count):
            with_nan = footer.for_statistics(reduce(and_, some, guarantee), stored)
            possible |= _kept(with_nan, chosen.expression, chosen.schema)
    proves = not floats and None not in (constants.get(name, "") for name in chosen.columns)
    failing = _kept(footers, ~chosen.expression, chosen.schema) if proves and possible else set()
    for group in groups:
        if group.number not in possible:
            yield False
        elif proves and group.number not in failing and set(footer.null_counts(group.number, stored)) <= {0}:
            yield True
        else:
            yield None


def _trusts_statistics(expression: pc.Expression, *, floats: bool) -> bool:
    """Return whether Arrow's decisions by statistics agree with the rows.

    Arrow orders NaN in a comparison, for example of an integer that is cast, and takes casts that may overflow for
    monotonic. The bounds of zeros are -0.0 and 0.0: Arrow takes them for one value, -0.0, which is not in a list that
    has 0.0, and whose text and quotient differ.

    Args:
        expression: The filter.
        floats: Whether it reads columns of floats.
    """
    text = re.sub(r'"(\\.|[^"\\])*"', "", str(expression))
    others = set(re.findall(r"\b([a-z]\w*)\(", text)) - TRUSTED_CALLS
    if re.search(r"(?<!\w)nan(?!\w)", text) or (floats and others):
        return False
    return others <= {"cast", "is_in"} and not re.search(r"to_type=(halffloat|float|double)\b|=true", text)


def _kept(footers: pads.ParquetFileFragment, expression: pc.Expression, schema: pa.Schema) -> set[int]:
    """Return the row groups for which statistics do not prove that the expression is false or null in all rows."""
    with suppress(pa.ArrowException):  # Arrow cannot compare statistics of some types, or cast NaN.
        footers = footers.subset(expression, schema=schema)
    return {info.id for info in footers.row_groups}


def _guarantee(constants: Constants, chosen: Filter) -> pc.Expression:
    """Return an expression that holds in all rows of a file, by its partition keys."""
    known = [(pc.field(name), _key(name, value, chosen)) for name, value in constants if name in chosen.columns]
    return reduce(
        and_, (field == value if value.is_valid else field.is_null() for field, value in known), pc.scalar(True)
    )


def _key(name: str, value: int | str | None, chosen: Filter) -> pa.Scalar:
    return pa.scalar(None) if value is None else constant(value, chosen.schema.field(name).type)


def _may_be_nan(chosen: Filter) -> list[pc.Expression]:
    """Return, for each column of floats by which a row with NaN may match, the expression that it is NaN."""
    nans = [field == pa.scalar(math.nan, kind) for field, kind in _floats(chosen)]
    possible = _satisfiable(chosen, nans)
    return [nan for number, nan in enumerate(nans) if number in possible]


def _floats(chosen: Filter) -> Iterable[tuple[pc.Expression, pa.DataType]]:
    for path, kind in paths_of(chosen.schema).values():
        if pa.types.is_floating(kind):
            yield pc.field(*path), kind


def _satisfiable(chosen: Filter, guarantees: Sequence[pc.Expression]) -> set[int]:
    """Return the numbers of the guarantees that do not prove that the filter is false or null."""
    files, parquet = LocalFileSystem(), pads.ParquetFileFormat()
    fragments = [
        parquet.make_fragment(str(number), files, partition_expression=guarantee)  # Nothing opens it.
        for number, guarantee in enumerate(guarantees)
    ]
    if not fragments:
        return set()
    known = pads.FileSystemDataset(fragments, chosen.schema, parquet, files)
    try:
        return {int(fragment.path) for fragment in known.get_fragments(chosen.expression)}
    except pa.ArrowException:  # such as a cast of NaN to an integer
        return set(range(len(guarantees)))
