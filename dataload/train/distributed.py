"""What ranks do together: one process group, one device each, one model, and values that they exchange."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from dataload.errors import ConfigError
from dataload.world import World

COMM_HOOKS = ("bf16", "fp16", "powersgd")

_GROUPS = itertools.count()  # process groups started so far, the same number on every rank


@contextmanager
def process_group(world: World, device: torch.device, timeout: float | None = None) -> Iterator[None]:
    """Inside, the ranks of `world` are one process group: gloo, and NCCL for what is on GPUs. Ends what it started.

    timeout: seconds that a rank waits for another, then its operation fails; None: torch's default.
    Raises ConfigError when the group is somebody else's and a timeout is asked for.
    """
    if timeout is not None and dist.is_initialized():
        raise ConfigError(f"timeout={timeout}: the process group is there already; give init_process_group its timeout")
    if world.world_size == 1 or dist.is_initialized():
        yield
        return
    # Values on the host cross by gloo: over NCCL each would wait for all that the GPU has been given to do.
    backend, only = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    waits: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    store, rank, world_size = next(rendezvous("env://", world.rank, world.world_size, **waits))
    # torchrun's store outlives a group: in a second fit the keys of the first would lead to closed connections.
    store = dist.PrefixStore(f"fit-{next(_GROUPS)}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=only, **waits)
    try:
        yield
    finally:
        dist.destroy_process_group()


def device_of(world: World, device: torch.device | str | None) -> torch.device:
    """The device of this rank: the one asked for, else its own GPU, else the CPU.

    Raises ConfigError for a GPU where there is none, and when this rank cannot know which of several is its own.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type != "cuda":
        return chosen
    gpus = torch.cuda.device_count()
    if not gpus:
        raise ConfigError(f"device={str(device)!r}: torch finds no GPU here; leave device out to train on the CPU")
    if chosen.index is None:
        if world.local_rank is None and world.world_size > 1 and gpus > 1:
            raise ConfigError(
                f"rank {world.rank} of {world.world_size} cannot tell which of the {gpus} GPUs here is its own: start "
                "the ranks with torchrun, which sets LOCAL_RANK, or pass device='cuda:N', another N on each rank of a "
                "host"
            )
        # Some launchers show each rank only its own GPU, which then is number 0 whatever the local rank.
        chosen = torch.device("cuda", (world.local_rank or 0) % gpus)
    torch.cuda.set_device(chosen)
    return chosen


def replicate(
    model: nn.Module, device: torch.device, *, comm_hook: str | None = None, static_graph: bool = False
) -> DistributedDataParallel:
    """`model` in DDP, its gradients views of what crosses ranks. Parameters and buffers become those of rank 0.

    Raises ConfigError for the hook "bf16" over gloo, for which torch does not have it.
    """
    if comm_hook == "bf16" and device.type != "cuda":
        raise ConfigError("comm_hook='bf16' needs GPUs: between CPUs use 'fp16' or 'powersgd'")
    replica = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # one copy of the gradients instead of two
        static_graph=static_graph,
    )
    replica.training = model.training
    if not static_graph:  # which DDP would learn from this very backward
        _settle_buckets(replica)
    if comm_hook == "powersgd":
        replica.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    elif comm_hook is not None:
        hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[comm_hook]
        replica.register_comm_hook(None, hook)
    # Attributes are freed in this order. Were DDP's reducer the last to hold the group, it would join gloo's threads
    # without giving up the GIL that they wait for, and hang.
    replica.group = dist.group.WORLD  # type: ignore[assignment]
    return replica


def _settle_buckets(replica: DistributedDataParallel) -> None:
    """DDP arranges gradients anew after the first backward, and three ranks or more then add them up in another order.

    A run that goes on elsewhere would have its first backward in another step than one that was never stopped. So the
    first is this one, without a meaning; gradients become ready in the reverse order of the parameters, as DDP expects.
    The model itself is not called, so no forward or backward hook of a module runs. Hooks on a parameter see one
    gradient of zeros: DDP waits for the gradients of these very parameters.
    """
    model = replica.module
    stand_in = _SumOfParameters(model)
    replica.module = stand_in
    try:
        (0 * replica.forward()).backward()  # type: ignore[no-untyped-call]
    finally:
        replica.module = model
    for parameter in stand_in.trained:
        parameter.grad = None


class _SumOfParameters(nn.Module):
    """Stands in for `model` inside DDP: same parameters and buffers, but its call runs no forward hook."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def __call__(self) -> Tensor:
        return reduce(torch.add, [parameter.sum().abs().double() for parameter in self.trained])

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Under the model's own names: DDP looks them up again in each forward, and leaves out those it is told to."""
        return self.model.named_buffers(*args, **kwargs)


def share_buffers(model: nn.Module) -> None:
    """Every rank's buffers (running statistics) become those of rank 0, as in DDP's next forward."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def is_first() -> bool:
    """Return whether this process is rank 0, or has no other ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order."""
    ranks = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(ranks, value)
    return ranks


def gather_count(count: int) -> list[int]:
    """Every rank's `count`, in rank order; in half the time that `gather` takes."""
    if not dist.is_initialized() or dist.get_backend() == "nccl":  # somebody else's group, in which nothing is on a CPU
        return gather(count)
    own = torch.tensor([count])
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return [int(rank) for rank in ranks]


def agree(what: str, value: Any) -> None:
    """Raises ConfigError, on every rank, when the ranks' values differ."""
    holders: dict[Any, list[int]] = {}
    for rank, other in enumerate(gather(value)):
        holders.setdefault(other, []).append(rank)
    if len(holders) > 1:
        listed = "; ".join(f"{other!r} on ranks {ranks}" for other, ranks in holders.items())
        raise ConfigError(f"ranks do not agree on {what}: {listed}")
