"""Filters in pyarrow's form that prune whole row groups, by partition keys and footer statistics.

For each row group, partition keys and statistics tell whether some rows may match and whether some may not. If both are
possible, the row group can be neither kept nor dropped, and the filters raise a ConfigError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import pyarrow as pa

from dataload.cache.blocks.reader import Blocks
from dataload.catalog.footer_cache import FOOTERS_IN_FLIGHT, read_footer
from dataload.catalog.manifest import Manifest, RowGroup
from dataload.errors import ConfigError
from dataload.formats.base import Bounds, Footer
from dataload.formats.schema import is_bytes, number, storage
from dataload.runtime.executor import DaemonExecutor

ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
OPERATORS = ("=", "==", "!=", *ORDERS, "in", "not in")

Filters = Sequence[Any]
"""Predicates (column, operator, value) that must all hold; or a list of such lists, of which one must hold."""


@dataclass(frozen=True)
class Predicate:
    """One predicate of a filter.

    Args:
        clause: (column, operator, value) as the caller wrote it.
        kind: Storage type of the column.
        values: The value, or the members of a set, as the column's statistics represent them.
    """

    clause: tuple[str, str, Any]
    kind: pa.DataType
    values: frozenset[Any]

    @property
    def column(self) -> str:
        return self.clause[0]


def narrow(manifest: Manifest, blocks: Blocks, filters: Filters) -> Manifest:
    """Return the manifest of the row groups that match. A null matches nothing, NaN only `!=` and `not in`.

    Footers are read only if partition keys do not decide.

    Raises:
        ConfigError: The filters are malformed or leave no row, or a row group has rows that may match and rows that may
            not. The message names the row group.
    """
    choices = parse(filters, manifest)

    def keep(file: Iterable[tuple[int, RowGroup]]) -> list[int]:
        groups = list(file)
        first = groups[0][1]
        footer = cache(lambda: read_footer(first.file, first.footer_at, blocks))
        return [number for number, group in groups if group.rows and _matches(choices, group, footer)]

    files = [list(file) for _, file in groupby(enumerate(manifest.row_groups), lambda item: item[1].file)]
    threads = DaemonExecutor(FOOTERS_IN_FLIGHT, "dataload-footers")
    kept = [number for numbers in threads.map(keep, files) for number in numbers]
    if not kept:
        raise ConfigError(f"filters={filters!r} leave none of {manifest.num_rows} rows")
    return manifest.only(kept)


def parse(filters: Filters, manifest: Manifest) -> list[list[Predicate]]:
    """Return lists of predicates; all predicates of one list must hold. Those on partition keys come first.

    Raises:
        ConfigError: A predicate is malformed, names no column, or has a value of another type.
    """
    if not _is_list(filters) or not filters or not all(_is_list(part) and part for part in filters):
        raise ConfigError(f"filters={filters!r} must be a list of (column, operator, value), or a list of such lists")
    keys = dict(manifest.row_groups[0].constants) if manifest.row_groups else {}
    choices = [filters] if isinstance(filters[0][0], str) else filters
    parsed = [[_predicate(part, manifest) for part in choice] for choice in choices]
    return [sorted(choice, key=lambda predicate: predicate.column not in keys) for choice in parsed]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _predicate(clause: Any, manifest: Manifest) -> Predicate:
    if not _is_list(clause) or len(clause) != 3 or not isinstance(clause[0], str) or clause[1] not in OPERATORS:
        raise ConfigError(f"filters: {clause!r} must be (column, operator, value), the operator one of {OPERATORS}")
    column, sign, value = clause
    if manifest.select([column]) != [column]:
        raise ConfigError(f"filters: {column!r} is a struct, name one of its members: {manifest.select([column])}")
    kind = storage(manifest.schema.field(column).type)
    if number(kind) is None and not is_bytes(kind):
        raise ConfigError(f"filters: column {column!r} has type {kind}, and filters compare only single values")
    if sign in {"in", "not in"} and (isinstance(value, (str, bytes)) or not isinstance(value, Iterable)):
        raise ConfigError(f"filters: {clause!r} needs a list of values")
    values = list(value) if sign in {"in", "not in"} else [value]
    try:
        return Predicate((column, sign, value), kind, frozenset(_comparable(member, kind) for member in values))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"filters: {clause!r} cannot be compared: column {column!r} has type {kind}, give a value of it"
        ) from error


def _comparable(value: Any, kind: pa.DataType) -> Any:
    """Return the value as statistics of this type represent it. Raise ValueError if it is no value of this type."""
    # Floats are compared as float64, as pyarrow does: 0.1 is not the nearest float32.
    scalar = pa.scalar(value, pa.float64() if pa.types.is_floating(kind) else kind)
    if value is None or scalar.as_py() != value:
        raise ValueError(value)
    return scalar.value if pa.types.is_temporal(kind) else scalar.as_py()


def _matches(choices: list[list[Predicate]], group: RowGroup, footer: Callable[[], Footer]) -> bool:
    constants = dict(group.constants)

    def known(predicate: Predicate) -> Bounds:
        if predicate.column in constants:
            value = constants[predicate.column]
            return Bounds(value, value, 0 if value is not None else group.rows)
        return footer().bounds(group.number, predicate.column, predicate.kind)

    doubts = []
    for choice in choices:
        match, doubt = _all_hold(choice, known, group.rows)
        if match and doubt is None:
            return True
        doubts += [doubt] if doubt else []
    if not doubts:
        return False
    raise ConfigError(
        f"{group.file.path} row group {group.number}: by its statistics some of its {group.rows} rows may match "
        f"{doubts[0].clause!r} and some may not (statistics ignore NaN, which matches nothing, so those of floats "
        f"prove no match): filter by a partition key, sort the data by {doubts[0].column!r} before writing it, or "
        "filter in a transform"
    )


def _all_hold(
    choice: list[Predicate], known: Callable[[Predicate], Bounds], rows: int
) -> tuple[bool, Predicate | None]:
    """Return whether rows may match all predicates, and if so the first predicate that some rows may fail."""
    doubt = None
    for predicate in choice:
        match, fail = _outcomes(predicate, known(predicate), rows)
        if not match:
            return False, None
        doubt = doubt or (predicate if fail else None)
    return True, doubt


def _outcomes(predicate: Predicate, known: Bounds, rows: int) -> tuple[bool, bool]:
    """Return whether some rows may match, and whether some may not."""
    if known.nulls == rows:
        return False, True
    if known.low is None:
        return True, True
    sign = predicate.clause[1]
    if sign in ORDERS:
        (value,) = predicate.values
        best, worst = (known.low, known.high) if sign in {"<", "<="} else (known.high, known.low)
        match, fail = ORDERS[sign](best, value), not ORDERS[sign](worst, value)
    else:
        match = any(known.low <= value <= known.high for value in predicate.values)
        fail = not _covers(predicate.values, known.low, known.high)
    negated = sign in {"!=", "not in"}
    if negated:
        match, fail = fail, match
    # Statistics of floats ignore NaN: there may be any number of them.
    nan = pa.types.is_floating(predicate.kind)
    return match or (nan and negated), fail or known.nulls != 0 or (nan and not negated)


def _covers(values: frozenset[Any], low: Any, high: Any) -> bool:
    """Return whether `values` contains everything between the bounds."""
    if isinstance(low, int):
        return all(value in values for value in range(low, high + 1))
    return bool(low == high) and low in values
