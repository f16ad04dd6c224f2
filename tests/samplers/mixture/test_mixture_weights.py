"""Weights become integers exactly, or with a stated error."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.errors import ConfigError
from dataload.samplers.mixture.weights import MOST, integer_weights


@pytest.mark.parametrize(
    ("weights", "integers"),
    [
        ([3, 1], (3, 1)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([1e-3, 1], (1, 1000)),
        ([np.float64(0.7), np.int64(2), np.float32(0.5)], (7, 20, 5)),
        ([Fraction(1, 3), Decimal("0.5")], (2, 3)),
        ([10**30, 5 * 10**30], (1, 5)),
        ([1e300, 2e300], (1, 2)),
        ([5], (1,)),
    ],
)
def test_weights_are_exact_integers(weights, integers):
    assert integer_weights(weights) == integers


@given(st.lists(st.floats(1e-30, 1e30) | st.integers(1, 10**30), min_size=1, max_size=50))
def test_many_digits_are_rounded_within_the_stated_error(weights):
    integers = integer_weights(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    assert sum(integers) <= MOST
    assert min(integers) >= 1
    assert math.gcd(*integers) == 1
    assert integer_weights(integers) == integers
    for integer, weight in zip(integers, exact, strict=True):
        error = abs(Fraction(integer, sum(integers)) - weight / sum(exact))
        assert error < Fraction(len(weights) + 1, 2**45)


@pytest.mark.parametrize("weight", [0, -1, 0.0, -0.5, math.nan, math.inf, "half", None, 1j])
def test_weights_that_cannot_work(weight):
    with pytest.raises(ConfigError, match="of source 1"):
        integer_weights([1, weight, 2])
    with pytest.raises(ConfigError, match="at least one source"):
        integer_weights([])
