"""The process group of a training run, and the device of this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from dataload.errors import ConfigError
from dataload.world import World

ENDING_SECONDS = 5.0  # after an error, how long a rank waits for the end of its process group

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
    store = _meet(world, **waits)
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


def sampler_with(loader: Any, attribute: str) -> Any:
    """Return the sampler of a loader, its batch sampler, or the sampler in that one: the first with `attribute`."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return next((sampler for sampler in samplers if hasattr(sampler, attribute)), None)


def ranks_of(loader: Any) -> int:
    """Return how many ranks share the rows of a loader, of this package or with torch's DistributedSampler."""
    return int(getattr(sampler_with(loader, "num_replicas"), "num_replicas", 1))


def check_ranks_run(loader: Any) -> None:
    """Raise ConfigError if other ranks share the rows of a loader, and the process group does not have all of them."""
    ranks, running = ranks_of(loader), dist.get_world_size() if dist.is_initialized() else 1
    if ranks > running:
        raise ConfigError(
            f"the loader has the rows of one of {ranks} ranks, of which this process knows {running}: start them with "
            "torchrun, or call torch.distributed.init_process_group in each of them first, or make the loader without "
            "world= or a DistributedSampler"
        )


def _store_of(world: World, timeout: timedelta) -> Any:
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


def _meet(world: World, timeout: timedelta = default_pg_timeout) -> Any:
    """Wait until all ranks are here. Return a part of their store that only this process group uses.

    The store of torchrun outlives its ranks. A rank that finds the address of a killed one in it may listen for ever,
    while its peer listens, too. No variable of the launcher names an attempt: each node counts its own restarts. So
    rank 0 makes up the name of the group, and answers each rank under a name that this rank has made up. A rank that
    has read the name of an earlier group gets no answer, and reads again.

    Raises:
        RuntimeError: Another rank did not come within `timeout`.
    """
    store, own, deadline, pause = _store_of(world, timeout), uuid4().hex, monotonic() + timeout.total_seconds(), 0.01
    if world.rank == 0:
        store.set("group", own)
        places = {f"{own}/{rank}": rank for rank in range(1, world.world_size)}
        try:
            store.wait(list(places))
        except dist.DistStoreError as error:
            missing = [rank for place, rank in places.items() if not store.check([place])]
            raise _late(missing, world, timeout) from error
        for place in places:
            store.set(store.get(place).decode(), own)
        return dist.PrefixStore(own, store)  # type: ignore[attr-defined]
    while not store.check([own]):
        if monotonic() > deadline:
            raise _late([0], world, timeout)
        if store.check(["group"]):
            store.set(f"{store.get('group').decode()}/{world.rank}", own)
        sleep(pause)
        pause = min(1.0, 1.5 * pause)
    return dist.PrefixStore(store.get(own).decode(), store)  # type: ignore[attr-defined]


def _late(ranks: list[int], world: World, timeout: timedelta) -> RuntimeError:
    return RuntimeError(
        f"ranks {ranks} of {world.world_size} did not come within {timeout.total_seconds():g} s: see their output, or "
        "give fit a longer timeout"
    )


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
