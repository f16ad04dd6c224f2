"""The collectives of a training run: the process group, DDP, and values that the ranks exchange."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dataload.errors import ConfigError, DataloadError
from dataload.world import World

COMM_HOOKS = ("bf16", "fp16", "powersgd")
ENDING_SECONDS = 5.0  # after an error, how long a rank waits for the end of its process group

T = TypeVar("T")

_GROUPS = itertools.count()  # process groups started so far; the same number on every rank
_STORES: dict[World, Any] = {}  # where the ranks of a world meet


@contextmanager
def process_group(world: World, device: torch.device, timeout: float | None = None) -> Iterator[None]:
    """Hold a process group of all ranks during the block, unless the caller has started one or there is one rank.

    CPU tensors use gloo, GPU tensors NCCL. The block must free what DDP has made. Freed after the group, it would wait
    for a thread of gloo while it holds the interpreter lock, which that thread may need
    (https://github.com/pytorch/pytorch/issues/56297).

    Args:
        world: This rank, and the number of ranks.
        device: The device of this rank.
        timeout: Seconds after which an operation that waits for another rank fails; None for torch's default. Over
            NCCL, torch then ends the process.

    Raises:
        ConfigError: `timeout` is given, but the caller has started the process group. Or no address is known at which
            the ranks meet.
    """
    if timeout is not None and dist.is_initialized():
        raise ConfigError(
            f"timeout={timeout}: the process group already exists, so pass the timeout to init_process_group"
        )
    if world.world_size == 1 or dist.is_initialized():
        yield
        return
    # Host values use gloo: over NCCL each exchange would wait for the work that is queued on the GPU.
    backend, only = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    waits: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    # The store outlives a group, and the keys of an earlier group point to closed connections.
    store = dist.PrefixStore(f"fit-{next(_GROUPS)}", _store_of(world, **waits))  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size, device_id=only, **waits)
    try:
        yield
    except BaseException:
        # NCCL may wait for ranks that wait for this one. The error, once it ends this process, ends their wait.
        end = Thread(target=dist.destroy_process_group, daemon=True)
        end.start()
        end.join(ENDING_SECONDS)
        raise
    dist.destroy_process_group()


def _store_of(world: World, timeout: timedelta = default_pg_timeout) -> Any:
    """Return the store where the ranks meet, which lives as long as the process.

    Rank 0 may be its server. If it ended with a process group, another rank could start its next group by a store that
    is about to end.
    """
    if world not in _STORES:
        try:
            _STORES[world], *_ = next(rendezvous("env://", world.rank, world.world_size, timeout=timeout))
        except ValueError as error:
            raise ConfigError(
                f"the {world.world_size} ranks do not know where to meet: start with torchrun, or export MASTER_ADDR, "
                f"the host of rank 0, and MASTER_PORT before srun or mpirun ({error})"
            ) from None
    _STORES[world].set_timeout(timeout)
    return _STORES[world]


def device_of(world: World, device: torch.device | str | None) -> torch.device:
    """Return the device of this rank: `device` if it is given, else this rank's GPU, else the CPU.

    Raises:
        ConfigError: A GPU is requested but torch finds none, or nothing says which of several GPUs is this rank's.
    """
    own = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if own.type != "cuda":
        return own
    gpus = torch.cuda.device_count()
    if not gpus:
        raise ConfigError(f"device={str(device)!r}: torch finds no GPU here; leave device out to train on the CPU")
    if own.index is None:
        if dist.is_initialized() and dist.group.WORLD.bound_device_id is not None:
            own = dist.group.WORLD.bound_device_id
        elif world.local_rank is None and world.world_size > 1 and gpus > 1:
            raise ConfigError(
                f"rank {world.rank} of {world.world_size} cannot tell which of the {gpus} GPUs here is its own: start "
                "the ranks with torchrun, which sets LOCAL_RANK, or pass device='cuda:N' with a different N on each "
                "rank of a host"
            )
        else:
            # Some launchers make only its own GPU visible to each rank. That GPU has index 0 on all ranks.
            own = torch.device("cuda", (world.local_rank or 0) % gpus)
    torch.cuda.set_device(own)
    return own


def replicate(
    model: nn.Module,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    *,
    comm_hook: str | None = None,
    static_graph: bool = False,
) -> DistributedDataParallel:
    """Return `model` in DDP. Every rank gets the parameters and buffers of rank 0.

    Args:
        model: The model, on `device`.
        device: The device of this rank.
        mesh: The data-parallel dimensions of the ranks; None if all ranks are data-parallel.
        comm_hook: How gradients are compressed: one of COMM_HOOKS, or None for no compression.
        static_graph: Promise that each step has the same graph.

    Raises:
        ConfigError: `comm_hook` is "bf16" on CPUs, because gloo does not support it, or DDP cannot use the mesh.
    """
    group = _group_of(mesh)
    if comm_hook == "bf16" and device.type != "cuda":
        raise ConfigError("comm_hook='bf16' needs GPUs: between CPUs use 'fp16' or 'powersgd'")
    replica = DistributedDataParallel(
        model,  # without device_ids, by which DDP would move batches that are on the device already
        process_group=group,
        gradient_as_bucket_view=True,  # keeps one copy of the gradients instead of two
        static_graph=static_graph,
    )
    replica.training = model.training
    if not static_graph:  # DDP would take the graph of this backward for the static one.
        _settle_buckets(replica)
    if comm_hook == "powersgd":
        replica.register_comm_hook(powerSGD_hook.PowerSGDState(group), powerSGD_hook.powerSGD_hook)
    elif comm_hook is not None:
        hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[comm_hook]
        replica.register_comm_hook(group, hook)
    # Attributes are freed in order. If DDP's reducer freed the group last, it would join gloo's threads while it holds
    # the GIL that they need: a deadlock.
    replica.group = group  # type: ignore[assignment]
    return replica


def _group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of all ranks of `mesh`."""
    if mesh is None or mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    if mesh.ndim > 1:
        raise ConfigError(
            f"DDP cannot use {mesh.ndim} dimensions of a mesh ({', '.join(mesh.mesh_dim_names or ())}): call "
            "fully_shard(model, mesh=mesh) before fit, or use a mesh with one data-parallel dimension"
        )
    return mesh.get_group()


def _settle_buckets(replica: DistributedDataParallel) -> None:
    """Run a backward with zero gradients, after which DDP has its final gradient buckets.

    DDP rebuilds its buckets after the first backward, and three or more ranks then sum in a different order. Without
    this backward, a resumed run would rebuild them in a later step than an uninterrupted run, and get different bits.

    Gradients become ready in the reverse order of the parameters, as DDP expects. The model is not called, so no hook
    of a module runs. Hooks on a parameter see one gradient of zeros, because DDP waits for each parameter's gradient.
    """
    model = replica.module
    parameter_sum = _SumOfParameters(model)
    replica.module = parameter_sum
    try:
        (0 * replica.forward()).backward()  # type: ignore[no-untyped-call]
    finally:
        replica.module = model
    for parameter in parameter_sum.trained:
        parameter.grad = None


class _SumOfParameters(nn.Module):
    """A module with the parameters and buffers of `model`, whose call runs no forward hook."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def __call__(self) -> Tensor:
        return reduce(torch.add, [parameter.sum().abs().double() for parameter in self.trained])

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers under the model's own names, which DDP looks up in each forward and may ignore."""
        return self.model.named_buffers(*args, **kwargs)


def share_buffers(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Broadcast the first data-parallel rank's buffers, such as running statistics, as DDP's next forward does."""
    if dist.is_initialized():
        groups = [dist.group.WORLD] if mesh is None else mesh.get_all_groups()
        for group, buffer in itertools.product(groups, model.buffers()):
            if not isinstance(buffer, DTensor):  # each of whose ranks has its own part
                dense = buffer.contiguous()  # as NCCL requires
                dist.broadcast(dense, group=group, group_src=0)
                if dense is not buffer:
                    buffer.copy_(dense)


def is_first() -> bool:
    """Return whether this process is rank 0, or has no other ranks."""
    return process_number() == 0


def process_number() -> int:
    """Return the number of this process among all, data-parallel or not."""
    return dist.get_rank() if dist.is_initialized() else 0


def on_first(work: Callable[[], T]) -> T:
    """Call `work` on rank 0 only. Return its result or raise its error on every rank."""
    own: tuple[Any, Exception | None] = (None, None)
    raised: Exception | None = None
    if is_first():
        try:
            own = work(), None
        except Exception as error:  # noqa: BLE001 (otherwise the other ranks would wait for this one)
            raised, own = error, (None, _portable(error))
    result, failure = gather(own)[0]
    if failure is not None:
        raise raised or failure
    return result  # type: ignore[no-any-return]


def _portable(error: Exception) -> Exception:
    """Return the error as the other ranks receive it. One that cannot be pickled becomes a DataloadError."""
    try:
        received: Exception = pickle.loads(pickle.dumps(error))  # noqa: S301 (ours)
    except Exception:  # noqa: BLE001 (pickling an arbitrary class may raise anything)
        return DataloadError(f"rank 0 failed: {error!r}")
    return received


def gather(value: Any, mesh: DeviceMesh | None = None) -> list[Any]:
    """Return the `value` of each rank, in rank order.

    Args:
        value: The value of this rank.
        mesh: The data-parallel dimensions: only their ranks exchange values. None: all ranks do.
    """
    if not dist.is_initialized():
        return [value]
    ranks = [value]
    for group in [dist.group.WORLD] if mesh is None else reversed(mesh.get_all_groups()):
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, ranks, group)
        ranks = list(itertools.chain(*parts))
    return ranks


def gather_count(count: int, mesh: DeviceMesh | None = None) -> list[int]:
    """Return the `count` of each rank, in rank order, in half the time that `gather` takes."""
    if mesh is not None or not dist.is_initialized() or "cpu:" not in dist.get_backend_config():
        return gather(count, mesh)  # A group of the caller may have no CPU backend.
    own = torch.tensor([count])
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return [int(rank) for rank in ranks]


def agree(what: str, value: Any) -> None:
    """Raise ConfigError on every rank unless all ranks have the same `value`."""
    ranks = ranks_by(gather(value))
    if len(ranks) > 1:
        listed = "; ".join(f"{other!r} on ranks {own}" for other, own in ranks.items())
        raise ConfigError(f"ranks do not agree on {what}: {listed}")


def ranks_by(values: Iterable[T]) -> dict[T, list[int]]:
    """Return the ranks that have each of the `values`, which are in rank order."""
    ranks: defaultdict[T, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return ranks
