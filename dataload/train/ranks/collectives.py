"""Values that the ranks of a training run exchange."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dataload.errors import ConfigError, DataloadError, as_sent

T = TypeVar("T")
N = TypeVar("N", int, float)


def is_first() -> bool:
    """Return whether this process is rank 0, or has no other ranks."""
    return process_number() == 0


def process_number() -> int:
    """Return the number of this process among all, data-parallel or not."""
    return dist.get_rank() if dist.is_initialized() else 0


def process_count() -> int:
    """Return the number of all processes, data-parallel or not."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any, mesh: DeviceMesh | None = None) -> list[Any]:
    """Return the `value` of each rank, in rank order.

    Args:
        value: The value of this rank.
        mesh: The data-parallel dimensions: only their ranks exchange values. None: all ranks do.
    """
    if not dist.is_initialized():
        return [value]
    coordinate: Any = () if mesh is None else mesh.get_coordinate()
    ranks = [(coordinate, value)]
    for group in [dist.group.WORLD] if mesh is None else mesh.get_all_groups():
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, ranks, group)
        ranks = list(itertools.chain(*parts))
    # A group lists its processes in ascending order, which need not be their order in the mesh.
    return [each for _, each in sorted(ranks, key=itemgetter(0))]


def gather_count(count: N, mesh: DeviceMesh | None = None) -> list[N]:
    """Return the `count` of each rank, all integers or all floats, in rank order, in half the time of `gather`."""
    if mesh is not None or not dist.is_initialized() or "cpu:" not in dist.get_backend_config():
        return gather(count, mesh)  # A group of the caller may have no CPU backend.
    own = torch.tensor([count], dtype=torch.float64 if isinstance(count, float) else torch.int64, device="cpu")
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return [type(count)(rank) for rank in ranks]


class Largest:
    """The largest number of all ranks, which must ask together.

    A program that has called init_process_group("nccl") has no group for numbers on the host, and over NCCL each would
    wait for the GPU. So the first call makes one.
    """

    def __init__(self) -> None:
        self._group: Any = None

    def __call__(self, value: int) -> int:
        """Return the largest `value`."""
        if process_count() == 1:
            return value
        if self._group is None:
            has_one = "cpu:" in dist.get_backend_config()
            self._group = dist.group.WORLD if has_one else dist.new_group(backend="gloo")
        found = torch.tensor(value, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return int(found)


def on_first(work: Callable[[], T]) -> T:
    """Call `work` on rank 0 only. Return its result or raise its error on every rank."""
    return on_each(lambda: work() if is_first() else None)[0]  # type: ignore[return-value]


def on_each(work: Callable[[], T]) -> list[T]:
    """Call `work` on every rank. Return the results in rank order, or raise the first error on every rank."""
    own: tuple[Any, Exception | None]
    raised: Exception | None = None
    try:
        own = work(), None
    except Exception as error:  # noqa: BLE001 (otherwise the other ranks would wait for this one)
        raised = error
        own = None, as_sent(error) or DataloadError(f"rank {process_number()} failed: {error!r}")
    answers = gather(own)
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            raise (raised if raised is not None and rank == process_number() else failure)
    return [result for result, _ in answers]


def on_all(work: Callable[[], T]) -> T:
    """Call `work` on every rank. Return this rank's result, or raise the first error on every rank."""
    return on_each(work)[process_number()]


def agree(what: str, value: Any) -> None:
    """Raise ConfigError on every rank unless all ranks have the same `value`."""
    ranks = ranks_by(gather(value))
    if len(ranks) > 1:
        listed = "; ".join(f"{other!r} on ranks {own}" for other, own in ranks.items())
        raise ConfigError(f"ranks do not agree on {what}: {listed}; pass the same on all ranks")


def ranks_by(values: Iterable[T]) -> dict[T, list[int]]:
    """Return the ranks that have each of the `values`, which are in rank order."""
    ranks: defaultdict[T, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return ranks


def share_buffers(model: nn.Module, mesh: DeviceMesh | None = None, ignored: Collection[str] = ()) -> None:
    """Broadcast the first data-parallel rank's buffers, such as running statistics, as DDP's next forward does.

    Args:
        model: The model.
        mesh: The data-parallel dimensions of the ranks; None if all ranks are data-parallel.
        ignored: Names of the buffers that stay those of each rank.
    """
    if dist.is_initialized():
        _broadcast_buffers(model, [dist.group.WORLD] if mesh is None else mesh.get_all_groups(), ignored)


def share_buffers_of(replica: DistributedDataParallel) -> None:
    """Broadcast the buffers of a model in DDP as its next forward would, which then does not."""
    if replica.broadcast_buffers:
        _broadcast_buffers(replica.module, [replica.process_group], replica.parameters_to_ignore)
        replica.require_forward_param_sync = False


def _broadcast_buffers(model: nn.Module, groups: Iterable[Any], ignored: Collection[str]) -> None:
    for group, (name, buffer) in itertools.product(groups, model.named_buffers()):
        if name in ignored or isinstance(buffer, DTensor):  # Each rank of a DTensor has its own part.
            continue
        dense = buffer.contiguous()  # as NCCL requires
        dist.broadcast(dense, group=group, group_src=0)
        if dense is not buffer:
            buffer.copy_(dense)
