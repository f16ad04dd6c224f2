"""Metrics over a dataset that ranks share: each row once, sums of counts exact."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dataload.batch import map_tensors
from dataload.distributed import gather
from dataload.errors import ConfigError

MetricFn = Callable[[nn.Module, Any], Mapping[str, Tensor]]


@torch.no_grad()
def evaluate_over(model: nn.Module, loader: Iterable[Any], metric_fn: MetricFn) -> dict[str, float]:
    """Means over all rows that the ranks' loaders give, and "rows", how many these are; the same on every rank.

    metric_fn(model, batch): a value for each row of the batch, as name -> Tensor[B]. Booleans and integers are added up
        as integers, so that their sum is that of one process, to the last bit; other numbers in float64.
    Batches are on the device of the model's parameters. The last `loader.padding` rows, which repeat others, are left
    out. The model is in eval mode meanwhile. Loaders of unequal length are fine.

    Raises ConfigError when a metric does not have one value for each row, or there are no rows.
    """
    padding = getattr(loader, "padding", 0)  # asked before the loop, which moves the loader
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    values = defaultdict[str, list[Tensor]](list)
    training = model.training
    model.eval()
    try:
        for batch in loader:
            here = map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
            for name, value in metric_fn(model, here).items():
                if value.ndim != 1:
                    raise ConfigError(f"metric {name!r} has shape {tuple(value.shape)}: give one value for each row")
                values[name].append(value)
    finally:
        model.train(training)
    own = {name: _sum(torch.cat(parts), padding) for name, parts in values.items()}
    ranks = gather(own)
    names = {name: None for rank in ranks for name in rank}
    if not names:
        raise ConfigError("no rows to evaluate on")
    sums = {name: [rank[name] for rank in ranks if name in rank] for name in names}
    rows = {name: sum(count for _, count in parts) for name, parts in sums.items()}
    if len(set(rows.values())) > 1:
        raise ConfigError(f"metrics of unequal numbers of rows: {rows}")
    means = {name: _total([total for total, _ in parts]) / rows[name] for name, parts in sums.items()}
    return {**means, "rows": next(iter(rows.values()))}


def _sum(values: Tensor, padding: int) -> tuple[float, int]:
    """(sum, how many) without the last `padding` ones."""
    kept = values[: len(values) - padding]
    return kept.sum(dtype=torch.float64 if kept.is_floating_point() else torch.int64).item(), len(kept)


def _total(sums: list[float]) -> float:
    return sum(sums) if all(isinstance(part, int) for part in sums) else math.fsum(sums)
