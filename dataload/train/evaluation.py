"""Metrics over a dataset that ranks share: each row once, sums of counts exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.rows.collate import map_tensors
from dataload.train.distributed import gather
from dataload.train.module_modes import evaluating

RUN = 1 << 14  # values added up at a time; so many torch adds up in one thread, in one order

MetricFn = Callable[[nn.Module, Any], Mapping[str, Tensor]]


@torch.no_grad()
def evaluate_over(model: nn.Module, loader: Iterable[Any], metric_fn: MetricFn) -> dict[str, float]:
    """Means over all rows that the ranks' loaders give, and "rows", how many these are; the same on every rank.

    metric_fn(model, batch): a value for each row of the batch, as name -> Tensor[B]. Booleans and integers are added up
        as integers, so that their sum is that of one process, to the last bit; other numbers in float64, in an order
        that is the same whatever the batches are. The values are not kept.
    Batches are on the device of the model's parameters. The last `loader.padding` rows, which repeat others, are left
    out. Meanwhile all modules are in eval mode; afterwards, also after an exception, each has its own mode again.
    Loaders of unequal length are fine.

    Raises ConfigError when a metric does not have one value for each row or is named "rows", or there are no rows.
    """
    padding = getattr(loader, "padding", 0)  # asked before the loop, which moves the loader
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    batches = loader.batches_on(device) if isinstance(loader, Loader) and device.type != "cpu" else loader
    own: dict[str, _Sum] = {}
    with evaluating(model):
        for batch in batches:
            here = map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
            for name, value in metric_fn(model, here).items():
                if name == "rows":
                    raise ConfigError("a metric named 'rows' would hide the number of rows: rename it")
                if value.ndim != 1:
                    raise ConfigError(f"metric {name!r} has shape {tuple(value.shape)}: give one value for each row")
                own.setdefault(name, _Sum(padding)).add(value)
    ranks = gather({name: one.total() for name, one in own.items()})
    names = {name: None for rank in ranks for name in rank}
    if not names:
        raise ConfigError("no rows to evaluate on")
    sums = {name: [rank[name] for rank in ranks if name in rank] for name in names}
    rows = {name: sum(count for _, count in parts) for name, parts in sums.items()}
    if len(set(rows.values())) > 1:
        raise ConfigError(f"metrics of unequal numbers of rows: {rows}")
    means = {name: sum(total for total, _ in parts) / rows[name] for name, parts in sums.items()}
    return {**means, "rows": next(iter(rows.values()))}


class _Sum:
    """Of all values but the last `padding`: in runs of RUN, wherever batches end, so that these change no last bit."""

    def __init__(self, padding: int) -> None:
        self._padding = padding
        self._held: list[Tensor] = []  # one tensor, of what is in no run yet
        self._total: float = 0
        self._count = 0

    def add(self, values: Tensor) -> None:
        held = torch.cat([*self._held, values])
        if whole := max(0, len(held) - self._padding) // RUN * RUN:
            self._add_up(held[:whole])
        self._held = [held[whole:]]

    def total(self) -> tuple[float, int]:
        """(sum, how many)."""
        for held in self._held:
            self._add_up(held[: len(held) - self._padding])
        return self._total, self._count

    def _add_up(self, values: Tensor) -> None:
        dtype = torch.float64 if values.is_floating_point() else torch.int64
        for run in torch.split(values, RUN):
            self._total += run.sum(dtype=dtype).item()
        self._count += len(values)
