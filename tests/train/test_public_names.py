"""The public names of training, and the examples in their docstrings."""

from __future__ import annotations

import doctest

import pytest

import dataload
from dataload import train
from dataload.train import ending, evaluation, harness


@pytest.mark.parametrize("name", train.__all__)
def test_training_is_exported_at_the_top(name):
    assert name in dataload.__all__
    assert name in dir(dataload)
    assert getattr(dataload, name) is getattr(train, name)


@pytest.mark.parametrize("module", [ending, evaluation, harness])
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert not result.failed
