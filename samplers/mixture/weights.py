"""Weights of sources as integers, so that all arithmetic on quotas is exact."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dataload.errors import ConfigError

MOST = 1 << 46  # sum of the integers: a block of 2**16 positions times it fits into int64


def integer_weights(weights: Sequence[Any]) -> tuple[int, ...]:
    """Return the smallest integers in the proportion of `weights`.

    A float counts as the decimal that it prints as, so 0.7 is 7/10. If the integers would sum to more than 2**46, they
    are rounded, to at least 1. With S sources, each share of the sum is then off by less than (S + 1) / 2**45.

    Args:
        weights: One positive number for each source: int, float, Fraction or Decimal, of Python or numpy.

    Raises:
        ConfigError: There is no weight, or one is not a positive, finite number.

    Example:
        >>> from dataload.samplers.mixture.weights import integer_weights
        >>> integer_weights([0.7, 0.2, 0.1])
        (7, 2, 1)
    """
    weights = weights.tolist() if hasattr(weights, "tolist") else weights  # of NumPy or torch
    if isinstance(weights, str | bytes) or not isinstance(weights, Sequence):
        raise ConfigError(f"weights={weights!r}: give a number for each source, in a list or by name")
    if not len(weights):
        raise ConfigError("a mixture needs at least one source")
    exact = [_fraction(weight, number) for number, weight in enumerate(weights)]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * denominator) for weight in exact]
    total = sum(integers)
    if total // math.gcd(*integers) > MOST:
        target = MOST - len(integers)
        integers = [max(1, (2 * integer * target + total) // (2 * total)) for integer in integers]
    divisor = math.gcd(*integers)
    return tuple(integer // divisor for integer in integers)


def _fraction(weight: Any, number: int) -> Fraction:
    try:
        if isinstance(weight, float | np.floating):
            exact = Fraction(str(float(weight)))  # raises for NaN and infinity
        elif isinstance(weight, np.integer):
            exact = Fraction(operator.index(weight))
        else:
            exact = Fraction(0 if isinstance(weight, str) else weight)
    except (TypeError, ValueError, OverflowError):
        exact = Fraction(0)
    if exact <= 0:
        raise ConfigError(f"weight {weight!r} of source {number}: weights must be positive, finite numbers")
    return exact
