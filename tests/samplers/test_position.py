"""A position is a value, whose JSON is the state of samplers and loaders."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from dataload.errors import ConfigError
from dataload.samplers import ShardedSampler
from dataload.samplers.position import Position

OPTIONS = {"shuffle": "block", "seed": 3, "window": 4, "num_streams": 1}
PLACE = Position("0123456789abcdef", 2, 640, OPTIONS)


def test_a_position_is_a_value():
    assert Position.from_state(json.loads(json.dumps(PLACE.state_dict()))) == PLACE
    assert pickle.loads(pickle.dumps(PLACE)) == PLACE
    assert PLACE.at(640) == PLACE != PLACE.at(641)
    with pytest.raises(AttributeError):
        PLACE.cursor = 1  # type: ignore[misc]


def test_samplers_of_all_ranks_have_equal_positions():
    positions = [ShardedSampler([9, 9], 3, rank, batch_size=2, seed=3).position for rank in range(3)]
    assert positions[0] == positions[1] == positions[2]


def test_a_sampler_keeps_the_positions_that_it_had():
    sampler = ShardedSampler([9, 9], 1, 0, batch_size=2)
    before = sampler.position
    sampler.advance(3)
    assert (before.cursor, sampler.position.cursor) == (0, 6)
    sampler.seek(1, 0)
    assert before.epoch == 0
    sampler.load_state_dict(before.at(6).state_dict())
    assert sampler.position == before.at(6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; this release reads 1: give a state_dict"),
        ({"epoch": "2"}, "epoch='2' must be a whole number"),
        ({"cursor": 1.5}, r"cursor=1\.5 must be a whole number"),
        ({"weights": 7}, "the state has weights=7"),
        ({"cursor": ...}, "the state lacks cursor: give all"),
        ({"dataset": ..., "epoch": ...}, "the state lacks dataset, epoch: give all"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    state = {name: value for name, value in {**PLACE.state_dict(), **change}.items() if value is not ...}
    with pytest.raises(ConfigError, match=message):
        Position.from_state(state)


@pytest.mark.parametrize("change", [{"shuffle": []}, {"window": "x"}, {"seed": None}, {"num_streams": 10**30}])
def test_options_that_make_no_order_are_refused(change: dict[str, Any]) -> None:
    sampler = ShardedSampler([9, 9], 1, 0)
    before = sampler.state_dict()
    with pytest.raises(ConfigError):
        sampler.load_state_dict({**before, "cursor": 5, **change})
    assert sampler.state_dict() == before


@pytest.mark.parametrize("numbers", [10, 300, 5000])
def test_the_state_of_long_lists_is_small_and_restores_what_is_known(numbers: int) -> None:
    lists = {"weights": [*range(numbers)], "next_weights": [*range(1, numbers + 1)], "windows": [1000] * numbers}
    long = PLACE.with_options(**lists)
    state = json.loads(json.dumps(long.state_dict()))
    assert len(json.dumps(state)) <= 4096
    known = {name: [[1], values] for name, values in lists.items()}
    assert Position.from_state(state).restored(long, known, "other files") == long
    if numbers > 10:
        with pytest.raises(ConfigError, match=r"only a digest of its \w+, which are too long for it"):
            Position.from_state(state).restored(long, {name: [[1]] for name in lists}, "other files")
