"""Where a row group is made: in this process, in the background decoder, or later."""

from __future__ import annotations

from itertools import product

import pytest

from dataload.rows.scheduler import Place, choose

KEPT = {
    "is_kept": True,
    "is_awaited": False,
    "fits": True,
    "has_decoder": True,
    "has_started": False,
    "is_mapped": False,
    "is_waiting": False,
}
UNKEPT = {**KEPT, "is_kept": False, "has_decoder": False}


@pytest.mark.parametrize(
    ("situation", "place"),
    [
        pytest.param(KEPT, Place.DECODER, id="beside training steps"),
        pytest.param(KEPT | {"is_waiting": True}, Place.HERE, id="the loop waits: start no decoder beside it"),
        pytest.param(KEPT | {"is_waiting": True, "has_started": True}, Place.DECODER, id="it runs already"),
        pytest.param(KEPT | {"is_waiting": True, "is_mapped": True}, Place.DECODER, id="a map may hold the lock"),
        pytest.param(KEPT | {"is_awaited": True}, Place.DECODER, id="the decoder itself looks at the demand"),
        pytest.param(KEPT | {"has_decoder": False}, Place.HERE, id="a small dataset"),
        pytest.param(UNKEPT, Place.HERE, id="uncached, and there is memory"),
        pytest.param(UNKEPT | {"fits": False}, Place.ON_DEMAND, id="uncached, and no memory"),
        pytest.param(UNKEPT | {"fits": False, "is_awaited": True}, Place.HERE, id="uncached, but a batch needs it"),
        pytest.param(KEPT | {"is_kept": False, "fits": False}, Place.ON_DEMAND, id="uncached, with a decoder"),
    ],
)
def test_choices(situation: dict[str, bool], place: Place) -> None:
    assert choose(**situation) is place


def test_a_row_group_that_a_batch_needs_is_never_made_later() -> None:
    for values in product([False, True], repeat=len(KEPT)):
        now = dict(zip(KEPT, values, strict=True)) | {"is_awaited": True}
        assert choose(**now) is not Place.ON_DEMAND
        assert (choose(**now) is Place.DECODER) <= now["has_decoder"]
