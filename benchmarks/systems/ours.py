"""dataload, used as in its README."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dataload.benchmarks.batches import Batch, Row, transformed
from dataload.benchmarks.systems.base import Setting
from dataload.cache.config import CacheConfig
from dataload.dataset import make_dataset
from dataload.loader import make_loader


class Dataload:
    """`make_loader` with a cache in the folder of the measurement."""

    def __init__(self, setting: Setting) -> None:
        workload = setting.workload
        cache = CacheConfig(cache_dir=str(setting.cache_dir))
        dataset = make_dataset(setting.url, storage_options=setting.storage_options, cache=cache)
        if workload.prepare:
            dataset = dataset.map(partial(transformed, transform=workload.prepare), version=workload.name)
        self._loader = make_loader(
            dataset,
            setting.batch_size,
            seed=setting.seed,
            group={"x": list(workload.features)} if workload.features else None,
            **_parallel(setting),
            transform=partial(_transformed, workload.transform) if workload.transform else None,
        )

    def epoch(self, number: int) -> Iterator[Batch]:
        self._loader.set_epoch(number)
        return iter(self._loader)

    def close(self) -> None:
        del self._loader


def _parallel(setting: Setting) -> dict[str, Any]:
    if setting.workload.in_threads:
        return {"num_threads": max(1, setting.num_workers)}
    return {"num_workers": setting.num_workers, "persistent_workers": setting.num_workers > 0}


def _transformed(transform: Callable[[Row], Row], batch: Batch) -> Batch:
    rows = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    return transformed(rows, transform)
