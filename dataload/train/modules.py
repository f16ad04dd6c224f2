"""The modules of a model during a run: their train or eval modes, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dataload.errors import ConfigError
from dataload.train.ranks.sharded import reshard

ModuleSelector = type[nn.Module] | Sequence[type[nn.Module]] | Callable[[nn.Module], bool]


def check_not_wrapped(model: nn.Module) -> None:
    """Raise ConfigError if a part of the model is in DDP or FSDP1, whose forward and backward wait for other ranks."""
    if any(isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)) for module in model.modules()):
        raise ConfigError(
            "the model is in DistributedDataParallel or FullyShardedDataParallel: pass the module inside, which fit "
            "replicates, or shard it by fully_shard"
        )


def begin_training(model: nn.Module) -> None:
    """Call `model.train()` if all modules are in the same mode; otherwise keep the modes that the user has chosen.

    A new model is in training mode throughout, but its class may override `train()` to freeze some of its modules.
    """
    if len({module.training for module in model.modules()}) == 1:
        model.train()


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore each module's own mode at the end of the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:  # parents before children, because train() is recursive
            if module.training != training:
                module.train(training)  # A module may override train(), for example to split weights merged by eval().
        for module, training in modes:  # train() of its last parent has set the mode of a module of several parents.
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold all modules in eval mode during the block; restore each module's own mode afterwards."""
    with modes_kept(model):
        model.eval()
        try:
            yield
        finally:
            reshard(model)


class BuffersKept:
    """A context in which modules have copies of their buffers, such as running statistics. It may be entered again.

    Args:
        model: The modules.
        but: A class of modules whose buffers are not copied.
    """

    def __init__(self, model: nn.Module, but: type[nn.Module] | tuple[()] = ()) -> None:
        self._model = model
        self._but = but
        self._own: list[list[tuple[nn.Module, str, torch.Tensor]]] = []

    def __enter__(self) -> None:
        # Copying values back into the buffers instead would fail a backward that needs them.
        modules = [module for module in self._model.modules() if not isinstance(module, self._but)]
        own = [(each, *named) for each in modules for named in each.named_buffers("", False, False)]
        copies = {id(buffer): buffer.clone() for _, _, buffer in own}  # Modules may share a buffer.
        for module, name, buffer in own:
            setattr(module, name, copies[id(buffer)])
        self._own.append(own)

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self._own.pop():
            setattr(module, name, buffer)


@contextmanager
def recomputed(model: nn.Module, selector: ModuleSelector | None) -> Iterator[None]:
    """Checkpoint the activations of the selected modules during the block.

    Parameters, their names, the gradients and the buffers do not change. Only a module whose output depends on buffers
    that its forward changes, such as one with `spectral_norm`, gets other gradients. A recomputation copies the buffers
    of the module.

    Args:
        model: The model that trains.
        selector: The class or classes of the modules, or a predicate of a module; None for no modules.

    Raises:
        ConfigError: No module matches.
    """
    if selector is None:
        yield
        return
    selected = [module for module in model.modules() if _matches(module, selector)]
    if not selected:
        raise ConfigError(
            f"activation_checkpointing={selector!r} matched no module in {type(model).__name__}: pass a class of its "
            "modules"
        )
    originals = [vars(module).get("forward") for module in selected]
    for module in selected:
        module.forward = partial(_checkpointed, module, module.forward)
    try:
        yield
    finally:
        for module, forward in zip(selected, originals, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _checkpointed(module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `forward`, whose activations the backward computes again without a change to the module's buffers."""
    # A graph that is differentiated twice enters its context twice.
    once: dict[str, Any] = {"context_fn": lambda: (nullcontext(), BuffersKept(module))}
    if torch.compiler.is_compiling():  # AOTAutograd changes them once anyway, and supports no such contexts.
        once = {}
    return checkpoint(forward, *args, use_reentrant=False, **once, **kwargs)


def _matches(module: nn.Module, selector: ModuleSelector) -> bool:
    if isinstance(selector, (type, Sequence)):
        return isinstance(module, selector if isinstance(selector, type) else tuple(selector))
    return selector(module)
