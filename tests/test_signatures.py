"""Public functions have the arguments that users rely on: names, order, kinds and defaults. Others may be added."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import pytest

import dataload
from dataload import samplers
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.dataset import Dataset
from dataload.loader.loader import Loader

OF_DATASETS = (
    "columns=None, filters=None, storage_options=None, fill_null=None, null_masks=False, errors='raise', cache=None, "
    "cache_dir=None, cache_bytes=None, cluster=None"
)
OF_CONVERT = "shuffle=None, format=None, storage_options=None, to_storage_options=None, scratch_dir=None"
OF_LOADERS = (
    "shuffle=True, seed=0, drop_last=False, window=None, num_streams=None, num_workers=0, num_threads=None, "
    "group=None, ragged='list', transform=None, collate_fn=None, device=None, pin_memory=None, prefetch=None, "
    "row_ids=False, on_error='raise', stats_dir=None, metrics_port=None, stall_warning=60.0, world=None, mesh=None"
)
OF_SAMPLERS = (
    "shuffle='block', seed=0, drop_last=False, window=None, batch_size=1, num_streams=1, num_nodes=None, "
    "dataset_key=b''"
)
OF_TRAINING = (
    "epochs, precision='auto', accumulate=1, clip_grad_norm=None, scheduler=None, activation_checkpointing=None, "
    "comm_hook=None, compile=False, evaluate=None, checkpoint_dir=None, checkpoint_every=None, resume='auto', "
    "log_dir=None, profile=None, timeout=None, loss_weight=None"
)
OF_FILESYSTEMS = (
    "target_protocol=None, target_options=None, fs=None, cache_dir=None, cache_bytes=None, block_bytes='4MiB', "
    "policy='pin', consistency='generation', engine='auto', cluster=None"
)
SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (dataload.make_dataset, f"source, *, {OF_DATASETS}"),
    (dataload.make_loader, f"source, batch_size=None, *, {OF_LOADERS}, {OF_DATASETS}, **dataloader_kwargs"),
    (
        dataload.mix,
        "sources, weights=None, *, stop='first_exhausted', batching='mixed', num_rows=None, name_column=None",
    ),
    (
        dataload.convert,
        f"source, destination, *, {OF_CONVERT}",
    ),
    (dataload.fit, f"model, optimizer, loader, loss_fn, *, {OF_TRAINING}"),
    (dataload.evaluate_over, "model, loader, metric_fn"),
    (dataload.World, "rank=0, world_size=1, local_rank=None, local_world_size=None"),
    (dataload.World.detect, ""),
    (dataload.World.from_mesh, "mesh"),
    (Dataset.split, "self, fractions, seed=0"),
    (Dataset.select, "self, rows"),
    (Dataset.filter, "self, filters"),
    (Dataset.map, "self, function, columns=None, version=None"),
    (Dataset.locate, "self, row_ids"),
    (Dataset.__getitem__, "self, row"),
    (Dataset.__getitems__, "self, rows"),
    (Loader.set_epoch, "self, epoch"),
    (Loader.state_dict, "self"),
    (Loader.load_state_dict, "self, state"),
    (Loader.stats, "self"),
    (samplers.Permutation, "n, seed, epoch"),
    (samplers.ShardedSampler, f"block_lengths, num_replicas=None, rank=None, *, {OF_SAMPLERS}"),
    (samplers.shuffle_quality, "order, block_lengths, batch_size"),
    (TierCacheFileSystem.prefetch, "self, paths, wait=False"),
    (TierCacheFileSystem.stats, "self"),
]


def signature_of(text: str) -> Signature:
    return inspect.signature(eval(f"lambda {text}: None"))


def shown(each: Parameter) -> tuple[str, Any, Any]:
    return each.name, each.kind, each.default


def names_by_position(signature: Signature) -> list[str]:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in signature.parameters.values() if each.kind in kinds]


@pytest.mark.parametrize(("function", "text"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_the_arguments(function: Callable[..., Any], text: str) -> None:
    found, wanted = inspect.signature(function), signature_of(text)
    others = [each for name, each in found.parameters.items() if name not in wanted.parameters]
    assert [shown(found.parameters[name]) for name in wanted.parameters] == list(map(shown, wanted.parameters.values()))
    first = names_by_position(wanted)
    assert names_by_position(found)[: len(first)] == first
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    assert all(each.default is not each.empty or each.kind in variadic for each in others)


def test_the_options_of_the_filesystem() -> None:
    found, wanted = inspect.signature(TierCacheFileSystem.__init__), signature_of(OF_FILESYSTEMS)
    defaults = {name: each.default for name, each in wanted.parameters.items()}
    assert {name: found.parameters[name].default for name in defaults} == defaults
