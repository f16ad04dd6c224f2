"""Models whose parameters are sharded over ranks: by FSDP2 (`fully_shard`), also with tensor parallelism."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from dataload.errors import ConfigError
from dataload.train.ranks.collectives import gather, on_first

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPTIMIZER_STATE = re.compile(r"optimizer\.state\.(\d+)\.")


def is_sharded(model: nn.Module) -> bool:
    """Return whether `model` has a parameter that is sharded over ranks."""
    return bool(_fsdp_modules(model)) or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that FSDP keeps after a forward without a backward, such as that of an evaluation."""
    for module in _fsdp_modules(model):
        module.reshard()


def move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move a model to a device, with the state that its optimizer has. `fully_shard` has placed its own models."""
    if _fsdp_modules(model):
        return
    before = [parameter.device for parameter in model.parameters()]
    model.to(device)
    if optimizer.state and before != [parameter.device for parameter in model.parameters()]:
        optimizer.load_state_dict(optimizer.state_dict())  # moves each state to the device of its parameter


def check_sharded(model: nn.Module, comm_hook: str | None, mesh: DeviceMesh | None, world_size: int) -> None:
    """Raise ConfigError unless the data-parallel ranks exchange the gradient of each parameter of a sharded model.

    Args:
        model: The model.
        comm_hook: The argument of `fit`, which is for DDP.
        mesh: The data-parallel dimensions of the ranks; None if all ranks are data-parallel.
        world_size: Number of data-parallel ranks.
    """
    if comm_hook is not None:
        raise ConfigError(f"comm_hook={comm_hook!r} is for DDP: leave it out for a model that is sharded")
    ranks = set(range(world_size)) if mesh is None else _ranks_in(mesh)
    partial = [
        name
        for name, each in model.named_parameters()
        if each.requires_grad and not (isinstance(each, DTensor) and ranks <= _ranks_in(each.device_mesh))
    ]
    fsdp = _fsdp_modules(model)
    if world_size > 1 and (partial or not fsdp):
        kind = f"parameter {partial[0]!r} is not sharded over them" if fsdp else "fully_shard has not been called"
        raise ConfigError(
            f"{kind}, so the {world_size} data-parallel ranks would not exchange its gradient: call "
            "fully_shard(model, mesh=mesh) on the whole model, with the mesh of its data-parallel dimensions"
        )


def check_replicated(model: nn.Module) -> None:
    """Raise ConfigError on every rank if a plain parameter is not the same on all ranks, up to rounding.

    A checkpoint has one copy of it, but a share of each DTensor. DDP gives its ranks equal parameters, except those it
    ignores. Peers of a data-parallel rank may have replicas, or shares of a larger parameter.
    """
    if not dist.is_initialized():
        return
    own = {name: _sums(each) for name, each in model.named_parameters() if type(each) is nn.Parameter}
    first = on_first(lambda: own)
    others = gather(next((name for name in {**first, **own} if not _are_close(first.get(name), own.get(name))), None))
    if different := [rank for rank, name in enumerate(others) if name is not None]:
        raise ConfigError(
            f"parameter {others[different[0]]!r} of ranks {different} is not that of rank 0, but a checkpoint has one "
            "copy of it: shard it by parallelize_module or fully_shard, or leave out checkpoint_dir"
        )


def _sums(parameter: Tensor) -> tuple[Any, ...]:
    """Return the shape of a parameter, its sum and its norm."""
    if parameter.dtype not in FLOATS:  # such as quantized weights, of which torch may have no sum
        return parameter.shape, 0.0, 0.0
    values = parameter.detach()
    return values.shape, float(values.sum(dtype=torch.float32)), float(values.norm())


def _are_close(first: tuple[Any, ...] | None, second: tuple[Any, ...] | None) -> bool:
    """Return whether two parameters differ by rounding at most. The sums of random shares differ by about the norm."""
    if first is None or second is None or first[0] != second[0]:
        return False
    return not abs(first[1] - second[1]) > 0.01 * max(first[2], second[2])


def check_overflows_are_shared(model: nn.Module) -> None:
    """Raise ConfigError unless all ranks of a sharded model would skip the same steps in fp16.

    GradScaler shares an overflow between the ranks over which the first gradient is sharded, and no others.
    """
    layouts: dict[Any, str] = {}
    for name, each in model.named_parameters():
        if each.requires_grad:
            layouts.setdefault(_layout(each), name)
    if len(layouts) > 1:
        first, second, *_ = layouts.values()
        raise ConfigError(
            f"precision='fp16': parameters {first!r} and {second!r} are sharded over different ranks, so some ranks "
            "would skip a step that the others take: use precision='bf16'"
        )


def _layout(parameter: Tensor) -> Any:
    """Return the ranks of a parameter's mesh and which of its dimensions shard the parameter; None without a mesh."""
    if not isinstance(parameter, DTensor):
        return None
    dims = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    sharded = tuple((size, not placement.is_replicate()) for size, placement in dims if size > 1)
    return frozenset(_ranks_in(parameter.device_mesh)), sharded


def exchange_gradients(model: nn.Module, exchange: bool) -> None:
    """Set whether the next backward exchanges gradients between ranks, or only accumulates them."""
    for module in _fsdp_modules(model):
        module.set_requires_gradient_sync(exchange, recurse=False)


def _ranks_in(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a plain tensor. For a sharded one, all ranks of its mesh must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dim in reversed(range(len(placements))):  # One at a time: torch warns of two reductions in one call.
        if placements[dim].is_partial():
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def clip_grad_norm(parameters: Iterable[Tensor], limit: float) -> None:
    """Scale the gradients of `parameters` such that their norm over all shards is at most `limit`."""
    meshes: defaultdict[Any, list[Tensor]] = defaultdict(list)  # torch clips tensors of one mesh at a time
    for parameter in parameters:
        meshes[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    if not meshes:
        return
    norms = [
        full_tensor(nn.utils.get_total_norm([each.grad for each in alike if each.grad is not None]))
        for alike in meshes.values()
    ]
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for alike in meshes.values():
        nn.utils.clip_grads_with_norm_(alike, limit, total)


def allocator(live: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> Callable[[str, Any], Any]:
    """Return a function that replaces a meta tensor of a checkpoint by an uninitialized tensor to load it into.

    It is sharded like the tensor of this name, or like the parameter whose optimizer state it is. So each rank
    allocates and reads only its own part. Other tensors are in host memory.

    Args:
        live: The tensors of this run by name.
        optimizer: The optimizer that is loaded, if one is.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]] if optimizer is not None else []

    def allocate(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        target = live.get(name)
        if (match := OPTIMIZER_STATE.match(name)) and int(match[1]) < len(parameters):
            target = parameters[int(match[1])]
        if isinstance(target, DTensor) and target.shape == leaf.shape:
            return torch.empty_like(target, dtype=leaf.dtype)
        return torch.empty_like(leaf, device="cpu")

    return allocate
