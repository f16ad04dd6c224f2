"""What ranks do together: one process group, one device each, and values that they exchange."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dataload.errors import ConfigError
from dataload.world import World

_GROUPS = itertools.count()  # process groups started so far, the same number on every rank


@contextmanager
def process_group(world: World, device: torch.device) -> Iterator[None]:
    """Inside, the ranks of `world` are one process group: NCCL on GPUs, gloo on CPUs. Ends what it started."""
    if world.world_size == 1 or dist.is_initialized():
        yield
        return
    backend, only = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    store, rank, world_size = next(rendezvous("env://", world.rank, world.world_size))
    # torchrun's store outlives a group: in a second fit the keys of the first would lead to closed connections.
    store = dist.PrefixStore(f"fit-{next(_GROUPS)}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=only)
    try:
        yield
    finally:
        dist.destroy_process_group()


def device_of(world: World, device: torch.device | str | None) -> torch.device:
    """The device of this rank: the one asked for, else its own GPU, else the CPU."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        # Some launchers show each rank only its own GPU, which then is number 0 whatever the local rank.
        own = (world.local_rank or 0) % torch.cuda.device_count()
        chosen = torch.device("cuda", own if chosen.index is None else chosen.index)
        torch.cuda.set_device(chosen)
    return chosen


def gather(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order."""
    ranks = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(ranks, value)
    return ranks


def agree(what: str, value: Any) -> None:
    """Raises ConfigError, on every rank, when the ranks' values differ."""
    holders: dict[Any, list[int]] = {}
    for rank, other in enumerate(gather(value)):
        holders.setdefault(other, []).append(rank)
    if len(holders) > 1:
        listed = "; ".join(f"{other!r} on ranks {ranks}" for other, ranks in holders.items())
        raise ConfigError(f"ranks do not agree on {what}: {listed}")
