"""Filters: lists of predicates or Arrow expressions, with the columns that they read."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from operator import and_, eq, ge, gt, le, lt, ne, or_
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError
from dataload.formats.arrow_arrays import as_comparable
from dataload.formats.arrow_types import NO_VALUE, comparable, comparable_fields, has_members, is_bytes, is_text, number
from dataload.formats.text import TextErrors, repaired

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": eq,
    "==": eq,
    "!=": ne,
    "<": lt,
    ">": gt,
    "<=": le,
    ">=": ge,
}
SHOWN_CHARACTERS = 300  # of a filter in a message
OPERATORS = (*COMPARISONS, "in", "not in")
OF_SECONDS = ("W", "D", "h", "m")  # units of NumPy that Arrow lacks

Filters: TypeAlias = Sequence[Any] | pc.Expression
"""Predicates (column, operator, value) that must all hold; a list of such lists, of which one must hold; or an Arrow
expression."""

_ERRORS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowKeyError)
_MISSING = re.compile(r"No match for FieldRef\.(?:Nested\(FieldRef\.Name\((.+?)\)\)|Name\((.+?)\)) in ")  # of Arrow


@dataclass(frozen=True)
class Filter:
    """A filter that is valid for one schema.

    Args:
        expression: Its Arrow expression.
        schema: The columns that it reads, in the dataset's own schema, with structs, but with `comparable` types.
        columns: Their names in the flat schema.
        errors: "replace": it reads valid text in place of invalid text.
    """

    expression: pc.Expression
    schema: pa.Schema
    columns: tuple[str, ...]
    errors: TextErrors = "raise"

    def __str__(self) -> str:
        return shown(self.expression)

    @property
    def digest(self) -> str:
        """Hex digest of the expression. Its text would not do, because it omits most members of a long list."""
        how = b"" if self.errors == "raise" else self.errors.encode()
        return hashlib.blake2b(pickle.dumps(self.expression, 5) + how, digest_size=16, person=b"filter").hexdigest()

    def mask(self, table: pa.Table, tried: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.bool_]:
        """Return which of the rows of a table that are tried match: bool [tried rows]. A null result is no match.

        Args:
            table: Its columns may have any of the types of the files.
            tried: Which rows are tried, bool [rows]; None tries all. The expression does not see the others.

        Raises:
            ConfigError: The expression cannot be evaluated, such as a division by zero.
        """
        try:
            columns = [as_comparable(table.column(field.name), field.type) for field in self.schema]
            if self.errors == "replace":
                columns = [
                    pa.chunked_array([repaired(chunk) for chunk in column.chunks], column.type) for column in columns
                ]
            known = pa.table(columns, schema=self.schema)
            if tried is not None and not tried.all():
                known = known.filter(pa.array(tried))  # after the cast: Arrow cannot gather views
            scanner = pads.InMemoryDataset(known).scanner(columns={"matches": self.expression}, use_threads=False)
            found = scanner.to_table().column(0)
        except MemoryError:  # Arrow's is also an ArrowException.
            raise
        except (pa.ArrowException, KeyError) as error:
            raise ConfigError(f"filters={self} cannot be evaluated: {shown(error)}") from error
        parts = [chunk.to_numpy(zero_copy_only=False) for chunk in found.fill_null(False).chunks]
        return np.concatenate([np.empty(0, np.bool_), *parts])


def shown(filters: object) -> str:
    """Return a filter or an error as one line for messages, cut off if it is long."""
    text = " ".join(str(filters).split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def in_form(filters: Filters) -> Filters:
    """Return a filter with lists of its own, which change no more and can be read twice.

    Raises:
        ConfigError: The filter is neither an expression nor lists of predicates with known operators.
    """
    if isinstance(filters, pc.Expression):
        return filters
    found = [[_predicate(clause) for clause in part] for part in _lists(filters)]
    return found[0] if isinstance(filters[0][0], str) else found


def _predicate(clause: Any) -> tuple[str, str, Any]:
    if not _is_list(clause) or len(clause) != 3 or not isinstance(clause[0], str) or clause[1] not in OPERATORS:
        raise ConfigError(
            f"filters: {shown(clause)} must be (column, operator, value), the operator one of {OPERATORS}"
        )
    column, sign, value = clause
    if sign in COMPARISONS:
        return column, sign, value
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigError(f"filters: {shown(clause)} needs a list of values")
    # A set of strings has another order in each process, and the digest must not.
    return column, sign, sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)


def filter_of(filters: Filters, manifest: Manifest, schema: pa.Schema, errors: TextErrors = "raise") -> Filter:
    """Return the filter for a dataset.

    Args:
        filters: As the caller wrote them.
        manifest: The dataset.
        schema: Its own schema, with structs and with the partition keys.
        errors: As in `make_dataset`.

    Raises:
        ConfigError: A predicate is malformed, names no column, or compares a column with a value of another type.
        DataError: The files have different types for a column.
    """
    filters = in_form(filters)
    schema = pa.schema(comparable_fields(schema))
    paths = {name: path for name, (path, _) in paths_of(schema).items()}
    if isinstance(filters, pc.Expression):
        expression = filters
    else:
        expression = reduce(
            or_, [reduce(and_, (_of(part, manifest, schema, paths) for part in all_)) for all_ in _lists(filters)]
        )
    problem = _problem(expression, schema)
    if problem and (missing := _MISSING.match(problem)):
        name = (missing[1] or missing[2]).replace(") FieldRef.Name(", ".")
        if lacking := [column for column in manifest.select([name]) if column in manifest.partial]:
            raise lacks_member(lacking[0], manifest)
        if len(path := paths.get(name, ())) > 1:
            problem = f"{name!r} is a member of a struct: write pyarrow.compute.field{path}"
    if problem:
        raise ConfigError(f"filters={shown(filters)}: {problem}")
    columns, reduced = _read(expression, schema, paths)
    manifest.check_columns(columns)
    return Filter(expression, reduced, columns, errors)


def lacks_member(name: str, manifest: Manifest) -> ConfigError:
    """Return the error of a filter that reads a member of a struct which a file lacks."""
    file = manifest.partial[name]
    return ConfigError(f"no filter can use {name!r}, because {file} lacks this member: filter the rows by others")


def _lists(filters: Any) -> list[Sequence[Any]]:
    """Return lists of predicates, of which one must hold. Raise ConfigError for anything else."""
    if not _is_list(filters) or not filters or not all(_is_list(part) and part for part in filters):
        raise ConfigError(
            f"filters={shown(filters)} must be a list of (column, operator, value), a list of such lists, or an "
            'expression such as pyarrow.compute.field("year") > 2020'
        )
    return [filters] if isinstance(filters[0][0], str) else list(filters)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _of(clause: Any, manifest: Manifest, schema: pa.Schema, paths: dict[str, tuple[str, ...]]) -> pc.Expression:
    """Return the expression of a predicate that has the right form."""
    column, sign, value = clause
    if manifest.select([column]) != [column]:
        raise ConfigError(f"filters: {column!r} is a struct, name one of its members: {manifest.select([column])}")
    kind = comparable(manifest.schema.field(column).type)
    if number(kind) is None and not is_bytes(kind) and not pa.types.is_null(kind):
        raise ConfigError(f"filters: column {column!r} has type {kind}, and filters compare only single values")
    if value is None:
        instead = "not in" if sign == "!=" else "in"
        raise ConfigError(
            f"filters: {shown(clause)} matches no row, not even nulls: write ({column!r}, {instead!r}, [None])"
        )
    if pa.types.is_null(kind):  # Arrow finds no null in a list of them.
        return pc.scalar(sign not in COMPARISONS and (None in value) == (sign == "in"))
    # 0.1 is no float32. Arrow casts it to the type of the column.
    kind = pa.float64() if pa.types.is_floating(kind) else kind
    field = pc.field(*paths[column])
    problem: object
    try:
        if sign not in COMPARISONS:
            among = field.isin(_held(value, kind))
            expression = among if sign == "in" else ~among
        elif (exact := _number(value, kind)) is not None:
            expression = _number_compared(field, COMPARISONS[sign], exact, kind)
        else:
            expression = COMPARISONS[sign](field, _array([value], kind)[0])
        problem = _problem(expression, schema)
    except NO_VALUE as error:
        problem = error
    if problem is not None:
        raise ConfigError(
            f"filters: {shown(clause)} cannot be compared: column {column!r} has type {kind}, give a value of it "
            f"({shown(problem)})"
        )
    return expression


def _number(value: Any, kind: pa.DataType) -> int | float | Fraction | None:
    """Return a number that is compared exactly with integers or decimals, as one of Python; None for other values.

    A float beside decimals is the shortest decimal of its value: 0.57 equals the decimal 0.57.
    """
    if isinstance(value, np.generic) and value.dtype.kind in "iuf":
        value = value.item()
    if isinstance(value, bool) or not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
        return None
    if isinstance(value, float) and pa.types.is_decimal(kind):
        value = Decimal(float.__repr__(value))
    if isinstance(value, Decimal):
        return Fraction(value) if value.is_finite() else float(value)
    return value if isinstance(value, (int, float)) else None


def _number_compared(
    field: pc.Expression, compare: Callable[[Any, Any], Any], value: float | Fraction, kind: pa.DataType
) -> pc.Expression:
    """Return the comparison of a column of integers or decimals with a number, by one of the column's type.

    Arrow would cast integers to floats, and raises if the column has an integer that they cannot hold, or if decimals
    have fewer digits than the number.
    """
    with suppress(*NO_VALUE):
        rounded = _rounded(value, kind, math.ceil if compare in {ge, lt} else math.floor)
        if rounded.as_py() == value or compare not in {eq, ne}:
            return compare(field, rounded)
    return field.is_valid() if compare(0, value) else pc.scalar(False)  # All numbers of the type compare like 0.


def _rounded(value: float | Fraction, kind: pa.DataType, rounding: Callable[[Any], int]) -> pa.Scalar:
    """Return the number of a type of integers or decimals that a number is rounded to.

    Raises:
        Exception: One of `NO_VALUE`, for infinity, NaN, and numbers outside of the type.
    """
    if pa.types.is_integer(kind):
        return pa.scalar(rounding(value), kind)
    return pa.scalar(Decimal(f"{rounding(value * Fraction(10) ** kind.scale)}e{-kind.scale}"), kind)


def _held(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return the values that a type has, as an array of it. Arrow would round the others.

    Raises:
        Exception: One of `NO_VALUE`. Arrow cannot compare the values with those of the type.
    """
    array = _exact(values, kind)
    if array is None:
        array = _array(list(_without_other_numbers(values, kind)), kind)
    if array.type == kind:
        return array
    if is_text(array.type):  # Arrow reads "2024-01-01" as a date, and raises for what it cannot read.
        return array.cast(kind)
    rounded = array.cast(kind, safe=False)
    return rounded.filter(pc.fill_null(pc.equal(rounded, array), True))


def _without_other_numbers(values: Iterable[Any], kind: pa.DataType) -> Iterator[Any]:
    """Yield the values without the numbers that a type of integers or decimals does not have."""
    for value in values:
        if (exact := _number(value, kind)) is None:
            yield value
            continue
        with suppress(*NO_VALUE):
            rounded = _rounded(exact, kind, math.floor).as_py()
            if rounded == exact:
                yield rounded


def _exact(values: list[Any], kind: pa.DataType) -> pa.Array | None:
    """Return values as an array of a type, or None if it does not have all of them."""
    with suppress(*NO_VALUE):
        array = pa.array(values, kind)
        if array.to_pylist() == values:
            return array
    return None


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return values with the type of the column if that is exact, else with their own, which Arrow casts."""
    if (array := _exact(values, kind)) is not None:
        return array
    if pa.types.is_floating(kind):
        values = [float(value) if isinstance(value, (int, Decimal)) else value for value in values]
    return pa.array(list(map(_in_unit_of_arrow, values)))


def _in_unit_of_arrow(value: Any) -> Any:
    """Return a time of NumPy in seconds if Arrow lacks its unit and these are exact; any other value as it is."""
    if isinstance(value, (np.datetime64, np.timedelta64)):
        exact = ("Y", "M", *OF_SECONDS) if isinstance(value, np.datetime64) else OF_SECONDS
        if np.datetime_data(value.dtype)[0] in exact:
            return value.astype(f"{value.dtype.kind}8[s]")
    return value


def _problem(expression: pc.Expression, schema: pa.Schema) -> str | None:
    """Return why the expression is no filter for this schema, or None."""
    if "FieldPath(" in re.sub(r'"[^"]*"', "", str(expression)):
        return "name the columns, do not number them"
    try:
        found = pads.InMemoryDataset(schema.empty_table()).scanner(columns={"": expression}).projected_schema.types[0]
    except _ERRORS as error:
        return str(error).strip().partition("\n")[0]
    return None if found == pa.bool_() else f"its values are {found}, not bool"


def _read(
    expression: pc.Expression, schema: pa.Schema, paths: dict[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], pa.Schema]:
    """Return the columns without which the expression is not valid, and their schema. pyarrow does not tell them."""
    text = str(expression)
    named = [name for name, path in paths.items() if all(part in text for part in path)]
    schema_of_named = _only(schema, {paths[name] for name in named})
    others = {name: {paths[other] for other in named if other != name} for name in named}
    needed = [name for name in named if _problem(expression, _only(schema_of_named, others[name]))]
    reduced = _only(schema, {paths[name] for name in needed})
    if _problem(expression, reduced):  # It reads whole structs.
        needed = [name for name, path in paths.items() if re.search(rf"(?<!\w){re.escape(path[0])}(?!\w)", text)]
        reduced = _only(schema, {paths[name] for name in needed})
    return tuple(needed), reduced


def paths_of(fields: Iterable[pa.Field]) -> dict[str, tuple[tuple[str, ...], pa.DataType]]:
    """Return the path and the type of each column by its flat name; see `dataload.formats.schema.flatten`."""
    found: dict[str, tuple[tuple[str, ...], pa.DataType]] = {}
    for field in fields:
        if has_members(field.type):
            members = paths_of(field.type).items()
            found |= {f"{field.name}.{name}": ((field.name, *path), kind) for name, (path, kind) in members}
        else:
            found[field.name] = (field.name,), field.type
    return found


def _only(fields: Iterable[pa.Field], paths: set[tuple[str, ...]]) -> pa.Schema:
    """Return the schema of the columns at these paths. A struct stays if it has members."""
    kept = []
    for field in fields:
        inner = {path[1:] for path in paths if path[0] == field.name}
        if () in inner:
            kept.append(field)
        elif inner:
            kept.append(field.with_type(pa.struct(list(_only(field.type, inner)))))
    return pa.schema(kept)
