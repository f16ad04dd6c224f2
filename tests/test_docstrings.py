"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import inspect
import pkgutil

import pytest

DOCUMENTED = [
    "dataload.cache.config.CacheConfig",
    "dataload.cache.division.divide",
    "dataload.cache.filesystem.TierCacheFileSystem",
    "dataload.conversion.conversion.convert",
    "dataload.dataset.Dataset",
    "dataload.dataset.make_dataset",
    "dataload.mixture.mixture.mix",
    "dataload.samplers.mixture.sampler.MixtureSampler",
    "dataload.samplers.mixture.weights.integer_weights",
    "dataload.samplers.permutation.Permutation",
    "dataload.samplers.quality.shuffle_quality",
    "dataload.samplers.sharded.ShardedSampler",
    "dataload.train.evaluation.evaluate_over",
    "dataload.train.harness.fit",
    "dataload.world.World",
]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples(name: str) -> None:
    documented = pkgutil.resolve_name(name)
    module = inspect.getmodule(documented)
    tests = doctest.DocTestFinder().find(documented, name, module=module, globs={**vars(module)})
    assert any(test.examples for test in tests), f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
    for test in tests:
        runner.run(test)
    assert not runner.summarize(verbose=False).failed
