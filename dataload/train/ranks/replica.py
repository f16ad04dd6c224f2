"""A model in DDP, with what makes a resumed run end in the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel

from dataload.errors import ConfigError

COMM_HOOKS = ("bf16", "fp16", "powersgd")


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
        self.trained: dict[nn.Parameter, nn.Module] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    self.trained.setdefault(parameter, module)  # As for DDP, the first module counts.

    def __call__(self) -> Tensor:
        return reduce(torch.add, [_used(*each).sum().abs().double() for each in self.trained.items()])

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers under the model's own names, which DDP looks up in each forward and may ignore."""
        return self.model.named_buffers(*args, **kwargs)


def _used(parameter: Tensor, module: nn.Module) -> Tensor:
    """Return values of a parameter whose gradient has the layout that DDP expects: sparse for a sparse embedding."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        return embedding(torch.zeros(1, dtype=torch.long, device=parameter.device), parameter, sparse=True)
    return parameter
