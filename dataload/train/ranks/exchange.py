"""How the data-parallel ranks exchange the gradients of a model: not at all, by DDP, or by FSDP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dataload.train.ranks.replica import replicate
from dataload.train.ranks.sharded import check_sharded, exchange_gradients, is_sharded
from dataload.world import World


class Exchange:
    """A model on one rank, which exchanges no gradients.

    Args:
        model: The model as the loss function gets it: the module itself, in DDP, or compiled.
        ranks: Number of data-parallel ranks, over which gradients are averaged.

    Attributes:
        ignored: Names of the buffers that stay those of each rank.
        waits_in_forward: Whether ranks wait for each other in each forward, too, and not only in the last backward.
    """

    ignored: Collection[str] = ()
    waits_in_forward = False

    def __init__(self, model: Callable[..., Any], ranks: int = 1) -> None:
        self.model = model
        self._uncompiled: Any = model
        self.ranks = ranks

    def compile(self, options: bool | Mapping[str, Any]) -> None:
        """Compile the model, with the arguments of torch.compile if `options` has them. False: do nothing."""
        if options:
            self.model = torch.compile(self.model, **(options if isinstance(options, Mapping) else {}))

    def during(self, *, last: bool) -> AbstractContextManager[None]:
        """Hold during forward and backward of a batch. Gradients are exchanged in the `last` batch of a step only."""
        del last
        return nullcontext()


class Replicated(Exchange):
    """A model in DDP.

    Args:
        replica: The DDP.
        ranks: Number of data-parallel ranks.
    """

    def __init__(self, replica: DistributedDataParallel, ranks: int) -> None:
        super().__init__(replica, ranks)
        self.ignored = replica.parameters_to_ignore
        self._exchanges = bool(replica.static_graph)  # DDP must exchange in the first backward of a static graph.

    def during(self, *, last: bool) -> AbstractContextManager[None]:
        exchanges, self._exchanges = last or self._exchanges, False
        return nullcontext() if exchanges else self._uncompiled.no_sync()


class Sharded(Exchange):
    """A model that the caller has sharded by FSDP2."""

    waits_in_forward = True

    def during(self, *, last: bool) -> AbstractContextManager[None]:
        exchange_gradients(self._uncompiled, last)
        return nullcontext()


def exchange_between(
    world: World,
    model: nn.Module,
    device: torch.device,
    mesh: DeviceMesh | None,
    *,
    comm_hook: str | None,
    static_graph: bool,
) -> Exchange:
    """Return how the ranks of `world` train the model: one that is sharded as it is, another one in DDP.

    Args:
        world: This rank, and the number of ranks.
        model: The model, on `device`.
        device: The device of this rank.
        mesh: The data-parallel dimensions of the ranks; None if all ranks are data-parallel.
        comm_hook: As for `replicate`.
        static_graph: As for `replicate`.

    Raises:
        ConfigError: The ranks would not exchange the gradient of each parameter, or DDP cannot use the arguments.
    """
    if is_sharded(model):
        check_sharded(model, comm_hook, mesh, world.world_size)
        return Sharded(model, world.world_size)
    if world.world_size == 1:
        return Exchange(model)
    return Replicated(replicate(model, device, mesh, comm_hook=comm_hook, static_graph=static_graph), world.world_size)
