"""Opening a dataset leaves the garbage collector as it was."""

from __future__ import annotations

import gc

import pytest

from dataload.runtime.collection import OBJECTS, rare_collections


@pytest.fixture(autouse=True)
def restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_in_the_block_and_as_before_after_it():
    gc.set_threshold(700, 10, 10)
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold() == (OBJECTS, 10, 10)
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


def test_blocks_of_two_threads_may_end_in_any_order():
    gc.set_threshold(700, 10, 10)
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [0, 10**6])
def test_a_program_that_collects_more_seldom_keeps_its_rule(own):
    gc.set_threshold(own, 5, 5)
    with rare_collections():
        assert gc.get_threshold() == (own, 5, 5)
    assert gc.get_threshold() == (own, 5, 5)
