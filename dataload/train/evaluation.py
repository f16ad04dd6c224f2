"""Evaluation: the means of per-row metrics over a dataset that the ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DistributedSampler

from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.rows.batch_tree import on_device
from dataload.samplers.rank_sampler import RankSampler
from dataload.train.modules import evaluating
from dataload.train.rank_batches import batches_on
from dataload.train.ranks.collectives import gather, share_buffers_of
from dataload.train.ranks.process_group import check_ranks_run, process_group, ranks_of, sampler_with
from dataload.world import World

CHUNK = 1 << 14  # values per sum; torch sums this many in one thread, in a fixed order

MetricFn = Callable[[nn.Module, Any], Mapping[str, Tensor]]


@torch.no_grad()
def evaluate_over(model: nn.Module, loader: Iterable[Any], metric_fn: MetricFn) -> dict[str, float]:
    """Return the mean of each metric over the rows of all ranks, and their number as "rows".

    Every rank returns the same values. Loaders may have different lengths on different ranks. The last `loader.padding`
    rows of a loader repeat other rows and are left out. So are those that stand in for rows that raised
    (`loader.replaced`), and the rows that the sampler of a DataLoader repeats.
    All modules are in eval mode during the evaluation. Afterwards, also after an exception, each module is in its
    previous mode. With a loader of `make_loader(..., mesh=mesh)` all ranks are those of the mesh. A model that is
    sharded (FSDP) needs loaders of equal lengths. If a launcher's ranks share the rows of the loader and there is no
    process group, the evaluation starts one and destroys it at its end, so all ranks have to call it.

    Args:
        model: The model. Batches are moved to the device of its parameters.
        loader: This rank's batches.
        metric_fn: Returns one value per row as name -> Tensor[B], given the model and a batch. Booleans and integers
            are summed as integers, so their mean does not depend on the number of ranks. Other dtypes are summed in
            float64, in an order that does not depend on the batch size.

    Raises:
        ConfigError: `metric_fn` returns no dict, a metric is no tensor, has another shape than [B] or is named "rows",
            metrics have different numbers of rows, there are no rows, or other ranks share the rows of the loader and
            there is no process group of them. Or a transform changes the number of rows, and a rank has rows that
            repeat others or stand in for them.

    Example:
        >>> import torch
        >>> from dataload import evaluate_over
        >>> batches = [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]
        >>> evaluate_over(torch.nn.Identity(), batches, lambda model, batch: {"mean": model(batch)})
        {'mean': 3.0, 'rows': 3}
    """
    padding = _padding(loader)  # read before the loop, because iterating changes it
    device = _device_of(next(model.parameters(), torch.empty(0)))
    own: dict[str, _Sum] = {}
    mesh = getattr(loader, "mesh", None)
    exchange = process_group(World.detect(), torch.device("cpu")) if ranks_of(loader) > 1 else nullcontext()
    with exchange, evaluating(model):
        check_ranks_run(loader)
        if isinstance(model, DistributedDataParallel):  # Its first forward waits for all ranks. One may have no batch.
            share_buffers_of(model)
        for batch in batches_on(loader, device):
            for name, value in _metrics_of(metric_fn(model, on_device(batch, device))).items():
                own.setdefault(name, _Sum(padding)).add(value, loader.replaced if isinstance(loader, Loader) else ())
        totals = {name: metric.total() for name, metric in own.items()}
        gathered = gather((totals, _repeats_unknown_rows(loader, padding, own.values())), mesh)
    if any(is_unknown for _, is_unknown in gathered):
        raise ConfigError(
            "the transform or metric_fn changes the number of rows, so it is unknown which of them repeat others: keep "
            "all rows, and return metrics that count a bad row as 0"
        )
    ranks = [totals for totals, _ in gathered]
    names = {name: None for rank in ranks for name in rank}
    sums = {name: [rank[name] for rank in ranks if name in rank] for name in names}
    rows = {name: sum(count for _, count in parts) for name, parts in sums.items()}
    if not any(rows.values()):
        raise ConfigError("no rows to evaluate on: give a loader of at least one row on one rank")
    if len(set(rows.values())) > 1:
        raise ConfigError(f"metrics of unequal numbers of rows: {rows}: give each one value for each row of a batch")
    means = {name: sum(total for total, _ in parts) / rows[name] for name, parts in sums.items()}
    return {**means, "rows": next(iter(rows.values()))}


def _metrics_of(metrics: Any) -> Mapping[str, Tensor]:
    """Return the result of the user's `metric_fn`. Raise ConfigError unless it has one value for each row by name."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metric_fn returned {type(metrics).__name__}: return a dict of tensors with one value for each row"
        )
    for name, value in metrics.items():
        if name == "rows":
            raise ConfigError("a metric named 'rows' would hide the number of rows: rename it")
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"metric {name!r} is of type {type(value).__name__}: give a tensor with one value for each row"
            )
        if value.ndim != 1:
            raise ConfigError(f"metric {name!r} has shape {tuple(value.shape)}: give one value for each row")
    return metrics


def _padding(loader: Any) -> int:
    """Return how many rows at the end of this rank's batches repeat other rows."""
    if isinstance(loader, Loader):
        return loader.rank_sampler.padding_ahead()  # `padding` may still be that of an earlier loop
    if hasattr(loader, "padding"):
        return int(loader.padding)
    sampler = sampler_with(loader, "num_replicas")
    if not isinstance(sampler, DistributedSampler):
        return 0
    return max(0, _repeated(sampler) - _dropped(loader, sampler))


def _repeated(sampler: DistributedSampler[Any]) -> int:
    """Return how many rows at the end of this rank's share repeat other rows."""
    if isinstance(sampler, RankSampler):
        return sampler.padding_from(sampler.cursor)
    repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
    return int(sampler.rank >= sampler.num_replicas - repeated)


def _dropped(loader: Any, sampler: DistributedSampler[Any]) -> int:
    """Return how many rows at the end of this rank's share are in no batch."""
    batches = getattr(loader, "batch_sampler", None)
    return len(sampler) % batches.batch_size if isinstance(batches, BatchSampler) and batches.drop_last else 0


def _repeats_unknown_rows(loader: Any, padding: int, sums: Iterable[_Sum]) -> bool:
    """Return whether this rank repeats rows, and its metrics have another number of values than it read rows."""
    if not isinstance(loader, Loader):
        return False
    return any((padding or each.replaced) and each.values != loader.stats().rows - padding for each in sums)


def _device_of(parameter: Tensor) -> torch.device:
    """Return where a parameter computes: FSDP may keep shards on the host and move them for each forward."""
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


class _Sum:
    """The sum of all values except the last `padding`, and those of rows that stand in for others.

    Values are summed in chunks of CHUNK that do not depend on batch boundaries, so the batch size changes no bit.

    Attributes:
        values: The number of values so far, as far as they are summed.
        replaced: The numbers of those that do not count.
    """

    def __init__(self, padding: int) -> None:
        self._padding = padding
        self._held: Tensor | None = None  # the values that are in no chunk yet
        self._total: float = 0
        self._count = 0
        self.values = 0
        self.replaced: set[int] = set()

    def add(self, values: Tensor, replaced: Iterable[int]) -> None:
        held = torch.cat([values] if self._held is None else [self._held, values])
        self.replaced |= {self.values + len(held) - len(values) + position for position in replaced}
        if whole := max(0, len(held) - self._padding) // CHUNK * CHUNK:
            self._add_up(held[:whole])
        self._held = held[whole:]

    def total(self) -> tuple[float, int]:
        """Return the sum and the number of values that count."""
        if self._held is not None:
            self._add_up(self._held[: len(self._held) - self._padding])
        return self._total, self._count

    def _add_up(self, values: Tensor) -> None:
        dtype = torch.float64 if values.is_floating_point() else torch.int64
        for chunk in torch.split(values, CHUNK):
            if left_out := [number - self.values for number in self.replaced if 0 <= number - self.values < len(chunk)]:
                counts = torch.ones(len(chunk), dtype=torch.bool, device=chunk.device)
                counts[left_out] = False
                counting = chunk[counts]
            else:
                counting = chunk
            self._total += counting.sum(dtype=dtype).item()
            self._count += len(counting)
            self.values += len(chunk)
