"""Selections hold the rows of bool masks in at most one bit a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dataload.catalog.selection import BLOCK_ROWS, Selection

lengths = st.one_of(st.integers(0, 40), st.sampled_from([BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 9, 3 * BLOCK_ROWS]))


@st.composite
def masks_of_row_groups(draw: Any) -> list[np.ndarray]:
    """Return masks with rows at random, and with runs."""
    masks = []
    for length in draw(st.lists(lengths, min_size=1, max_size=5)):
        if length <= 40:
            masks.append(draw(hnp.arrays(np.bool_, length)))
            continue
        dice = np.random.default_rng(draw(st.integers(0, 99)))
        mask = np.full(length, draw(st.booleans()))
        for first in dice.integers(0, length, draw(st.sampled_from([0, 3, 5000]))):
            mask[first : first + dice.integers(1, 20000)] ^= True
        masks.append(mask)
    return masks


@given(masks_of_row_groups())
def test_it_holds_the_rows_of_its_masks(masks: list[np.ndarray]) -> None:
    whole = np.concatenate(masks)
    selection = Selection.from_bytes(Selection.of(masks).to_bytes(), [len(mask) for mask in masks])
    assert selection.counts.tolist() == [mask.sum() for mask in masks]
    assert selection.is_whole == whole.all()
    for number, mask in enumerate(masks):
        np.testing.assert_array_equal(selection.mask(number), mask)
    numbers = np.random.default_rng(0).permutation(int(whole.sum()))[:500]
    np.testing.assert_array_equal(selection.rows_of(numbers), np.flatnonzero(whole)[numbers])
    np.testing.assert_array_equal(selection.only([len(masks) - 1]).mask(0), masks[-1])
    other = [np.arange(len(mask)) % 3 > 0 for mask in masks]
    common = selection.common(Selection.of(other))
    np.testing.assert_array_equal(common.mask(0), masks[0] & other[0])
    assert (selection.digest == Selection.of(other).digest) == all(map(np.array_equal, masks, other))


@pytest.mark.parametrize(
    ("share", "most_bits"), [(0.5, 1.005), (0.01, 0.35), (0.0, 0.01), (1.0, 0.01)], ids=["half", "few", "none", "all"]
)
def test_bits_of_a_row(share: float, most_bits: float) -> None:
    dice = np.random.default_rng(0)
    selection = Selection.of(dice.random(1 << 20) < share for _ in range(8))
    assert len(selection.to_bytes()) * 8 <= most_bits * 8 * (1 << 20)


def test_100_million_rows_take_less_than_13_megabytes() -> None:
    dice = np.random.default_rng(0)
    selection = Selection.of(dice.integers(0, 2, 1_000_000, np.uint8).view(np.bool_) for _ in range(100))
    assert selection.rows[-1] == 10**8
    assert len(selection.to_bytes()) <= 13e6
