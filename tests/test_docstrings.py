"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import inspect
import pkgutil

import pytest

DOCUMENTED = [
    "dataload.dataset.Dataset",
    "dataload.dataset.make_dataset",
    "dataload.samplers.mixture.sampler.MixtureSampler",
    "dataload.samplers.mixture.weights.integer_weights",
    "dataload.samplers.permutation.Permutation",
    "dataload.samplers.quality.shuffle_quality",
    "dataload.samplers.sharded.ShardedSampler",
    "dataload.world.World",
]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples(name: str) -> None:
    documented = pkgutil.resolve_name(name)
    tests = doctest.DocTestFinder().find(documented, name, module=inspect.getmodule(documented), globs={})
    assert any(test.examples for test in tests), f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
    for test in tests:
        runner.run(test)
    assert not runner.summarize(verbose=False).failed
