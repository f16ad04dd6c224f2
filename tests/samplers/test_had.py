"""Which rows an epoch has had before a position: those that its order gives for the positions before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from dataload.catalog.selected_rows import SelectedRows
from dataload.catalog.selection import Selection
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.order import Mask, Order
from dataload.samplers.rest import Continued, LeftOrder

LENGTHS = [[7, 0, 12, 1, 30, 5], [1], [0, 0, 3], [40] * 9]
SHUFFLES = ["block", "full", False]


def numbers(masks: Iterator[Mask], lengths: Sequence[int]) -> list[int]:
    """Return the row numbers of masks of row groups of these lengths."""
    found = list(masks)
    assert [len(mask) for mask in found] == list(lengths)
    return np.flatnonzero(np.concatenate(found)).tolist()


def positions(n: int) -> list[int]:
    return sorted({0, 1, min(2, n), n // 3, n // 2, n - 1, n})


@pytest.mark.parametrize("streams", [1, 2, 5])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_an_order_has_had_the_rows_of_the_positions_before(lengths: list[int], shuffle: Any, streams: int) -> None:
    order = Order(lengths, shuffle=shuffle, seed=3, window=2, num_streams=streams, dataset_key=b"k")
    for position in positions(order.n):
        [(source, masks, is_later)] = order.had(1, position)
        assert (source, is_later) == (0, False)
        assert numbers(masks, lengths) == sorted(order.rows(1, np.arange(position)).tolist())


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("is_long", [False, True])
def test_a_mixture_has_had_those_of_the_pass_that_goes_on(is_long: bool, shuffle: Any, streams: int) -> None:
    lengths = [[7, 12, 1, 30, 5], [4, 0, 7]] if not is_long else [[300, 700], [200] * 4]
    sources = [MixtureSource(each, name) for each, name in zip(lengths, "ab", strict=True)]
    rows = [sum(each) for each in lengths]
    order = MixtureOrder(sources, [1, 2], num_rows=4 * sum(rows), shuffle=shuffle, windows=[2, 2], num_streams=streams)
    for position in positions(order.n):
        found = {source: (numbers(masks, lengths[source]), later) for source, masks, later in order.had(1, position)}
        for source, first in enumerate(order.first_rows[:-1].tolist()):
            every = order.rows(1, np.arange(position))
            own = every[(every >= first) & (every < first + rows[source])] - first
            passes, begun = divmod(len(own), rows[source])
            if not len(own):
                assert source not in found
                continue
            latest = own[passes * rows[source] :] if begun else own[-rows[source] :]
            assert found[source] == (sorted(latest.tolist()), len(own) > rows[source])


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_the_rest_of_an_epoch_has_had_rows_of_the_dataset(shuffle: Any) -> None:
    lengths = [7, 12, 1, 30, 5]
    masks = [np.arange(end - length, end) % 3 > 0 for length, end in zip(lengths, np.cumsum(lengths), strict=True)]
    whole = Order(lengths, shuffle=shuffle, window=2)
    rest = SelectedRows(Selection.of(masks))
    order = Continued(whole, LeftOrder.of(whole, rest), 20, [rest])
    for position in (20, 21, 40, order.n):
        [(_, had, _)] = order.had(0, position)
        assert numbers(had, lengths) == sorted(order.rows(0, np.arange(20, position)).tolist())
