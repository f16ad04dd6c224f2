"""Weights of sources as integers, so that all arithmetic on quotas is exact."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from dataload.errors import ConfigError
from dataload.runtime.text import few

MOST = 1 << 46  # sum of the integers: a block of 2**16 positions times it fits into int64
LAST_ROW = 1 << 40  # of a schedule
MOST_CHANGES = 1 << 10


class Schedule(NamedTuple):
    """Weights that change within an epoch.

    Attributes:
        rows: The rows of the epoch from which each weights hold, ascending. The first is 0.
        weights: The weights from each row on, as the smallest integers. A source may have 0 of some.
        ramp: Whether the shares change linearly from each row to the next, instead of at once.
    """

    rows: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    ramp: bool = False


Weights = tuple[int, ...] | Schedule
"""The weights of an epoch, one of each source, as the smallest integers; or those of each part of it."""


def weights_of(
    weights: Any, schedule: Mapping[Any, Any] | None = None, *, ramp: bool = False, names: Sequence[str] | None = None
) -> Weights:
    """Return the weights of an epoch, in the same form for all that mean the same.

    Args:
        weights: One positive number for each source; or what `plain` or this function returned.
        schedule: Row of the epoch -> weights from there on. At row 0 it may have those in place of `weights`.
        ramp: As in `Schedule`.
        names: Names of the sources, by which weights may be given; None: by position only.

    Raises:
        ConfigError: A weight or a row cannot work.
    """
    if not isinstance(ramp, bool):
        raise ConfigError(f"ramp={ramp!r} must be True or False")
    if schedule is not None:
        return _scheduled(weights, schedule, names, ramp=ramp)
    if ramp:
        raise ConfigError("ramp=True needs schedule={row: weights}: the rows between which the weights change")
    if not (isinstance(weights, Sequence) and len(weights) == len(Schedule._fields) and _is_list(weights[0])):
        return integer_weights(weights, names)
    rows, each, ramp = weights
    if not (_is_list(each) and len(each) == len(rows) and all(map(_is_list, each)) and isinstance(ramp, bool)):
        raise ConfigError(f"weights={weights!r} are no schedule: give all that state_dict() returned")
    return _scheduled(None, dict(zip(rows, each, strict=True)), names, ramp=ramp)


def plain(weights: Weights) -> list[Any]:
    """Return weights as a JSON-able list, from which `weights_of` makes them again."""
    if isinstance(weights, Schedule):
        return [list(weights.rows), [list(each) for each in weights.weights], weights.ramp]
    return list(weights)


def knots(weights: Weights) -> Schedule:
    """Return weights as a schedule, also if they do not change."""
    return weights if isinstance(weights, Schedule) else Schedule((0,), (weights,))


def given_as(weights: Weights) -> str:
    """Return the arguments of `mix` that give these weights, as text. Long ones are cut."""
    if not isinstance(weights, Schedule):
        return f"weights={reprlib.repr(list(weights))}"
    rows = dict(zip(weights.rows, map(list, weights.weights), strict=True))
    return f"schedule={reprlib.repr(rows)}" + ", ramp=True" * weights.ramp


def changes_of(weights: Weights) -> str | None:
    """Return where weights change as text, such as "change at row 500"; None: nowhere."""
    if not isinstance(weights, Schedule):
        return None
    rows = weights.rows[1:]
    verb, noun = "ramp to" if weights.ramp else "change at", "row" if len(rows) == 1 else "rows"
    return f"{verb} {noun} {few(f'{row:,}' for row in rows)}"


def integer_weights(weights: Any, names: Sequence[str] | None = None, *, zero: bool = False) -> tuple[int, ...]:
    """Return the smallest integers in the proportion of `weights`.

    A float counts as the decimal that it prints as, so 0.7 is 7/10. If the integers would sum to more than 2**46, they
    are rounded, to at least 1. With S sources, each share of the sum is then off by less than (S + 1) / 2**45.

    Args:
        weights: One positive number for each source: int, float, Fraction or Decimal, of Python or numpy.
        names: As for `weights_of`.
        zero: Whether some of them may be 0.

    Raises:
        ConfigError: There is no weight, or none of a source, or one is not a positive, finite number.

    Example:
        >>> from dataload.samplers.mixture.weights import integer_weights
        >>> integer_weights([0.7, 0.2, 0.1])
        (7, 2, 1)
    """
    if isinstance(weights, Mapping) and names is not None:
        if differing := ", ".join(map(repr, sorted({*names} ^ weights.keys(), key=str))):
            raise ConfigError(
                f"the names of the weights and of the sources differ in {differing}: name each source once"
            )
        weights = [weights[name] for name in names]
    weights = weights.tolist() if hasattr(weights, "tolist") else weights  # of NumPy or torch
    if isinstance(weights, str | bytes) or not isinstance(weights, Sequence):
        raise ConfigError(f"weights={weights!r}: give a number for each source, in a list or by name")
    if not len(weights):
        raise ConfigError("a mixture needs at least one source")
    if names is not None and len(weights) != len(names):
        raise ConfigError(f"{len(weights)} weights for {len(names)} sources: give one for each")
    exact = [_fraction(weight, _name(number, names), zero=zero) for number, weight in enumerate(weights)]
    if not any(exact):
        raise ConfigError(f"weights={weights!r}: at least one of them must be positive")
    denominator = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * denominator) for weight in exact]
    total = sum(integers)
    if total // math.gcd(*integers) > MOST:
        target = MOST - len(integers)
        integers = [max(integer > 0, (2 * integer * target + total) // (2 * total)) for integer in integers]
    divisor = math.gcd(*integers)
    return tuple(integer // divisor for integer in integers)


def _scheduled(weights: Any, schedule: Any, names: Sequence[str] | None, *, ramp: bool) -> Weights:
    if not isinstance(schedule, Mapping) or not schedule:
        raise ConfigError(f"schedule={schedule!r} must map rows of the epoch to weights, such as {{0: [3, 1], 500: …}}")
    if len(schedule) > MOST_CHANGES:
        raise ConfigError(
            f"the schedule has {len(schedule)} rows, more than {MOST_CHANGES:,}: use ramp=True between fewer of them"
        )
    by_row = {_row(row): each for row, each in schedule.items()}
    if weights is not None and 0 in by_row:
        raise ConfigError("weights and schedule both have the weights at row 0: leave out one of them")
    if 0 not in by_row:
        if weights is None:
            raise ConfigError("the schedule lacks row 0: add it, or pass weights")
        by_row[0] = weights
    rows = tuple(sorted(by_row))
    each = tuple(_from_row(row, by_row[row], names) for row in rows)
    counts = {len(one) for one in each}
    if len(counts) > 1:
        raise ConfigError(f"the schedule has weights for {min(counts)} and for {max(counts)} sources: one for each")
    if 0 in (sums := list(map(sum, zip(*each, strict=True)))):
        source = _name(sums.index(0), names)
        raise ConfigError(f"source {source} has the weight 0 at each row of the schedule: leave it out")
    if len(set(each)) == 1:
        return each[0]
    return Schedule(rows, each, ramp)


def _from_row(row: int, weights: Any, names: Sequence[str] | None) -> tuple[int, ...]:
    try:
        return integer_weights(weights, names, zero=True)
    except ConfigError as error:
        raise ConfigError(f"from row {row:,} of the schedule on: {error}") from None


def _row(row: Any) -> int:
    if isinstance(row, bool) or not hasattr(row, "__index__") or not 0 <= row < LAST_ROW:
        raise ConfigError(
            f"schedule={{{row!r}: …}}: rows of the epoch are whole numbers from 0 on, below 2**40, such as {{0: …}}"
        )
    return operator.index(row)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _name(number: int, names: Sequence[str] | None) -> str:
    return str(number) if names is None else repr(names[number])


def _fraction(weight: Any, source: str, *, zero: bool) -> Fraction:
    try:
        if isinstance(weight, float | np.floating):
            exact = Fraction(str(float(weight)))  # raises for NaN and infinity
        elif isinstance(weight, np.integer):
            exact = Fraction(operator.index(weight))
        else:
            exact = Fraction(-1 if isinstance(weight, str) else weight)
    except (TypeError, ValueError, OverflowError):
        exact = Fraction(-1)
    if exact < 0 or not (exact or zero):
        positive = "zero or positive" if zero else "positive"
        raise ConfigError(f"weight {weight!r} of source {source}: weights must be {positive}, finite numbers")
    return exact
