"""Activation checkpointing: what some modules computed is forgotten, and computed again when the gradient needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from dataload.errors import ConfigError

Which = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]


@contextmanager
def recomputed(model: nn.Module, which: Which | None) -> Iterator[None]:
    """Inside, the modules of `model` that are of the classes `which`, or for which it is true, keep only their inputs.

    Raises ConfigError when there are none. Parameters, their names and the gradients stay as they are.
    """
    if which is None:
        yield
        return
    chosen = [module for module in model.modules() if _is_one(module, which)]
    if not chosen:
        raise ConfigError(f"activation_checkpointing={which!r}: no module of {type(model).__name__} is meant by that")
    before = [vars(module).get("forward") for module in chosen]
    for module in chosen:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module, forward in zip(chosen, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _is_one(module: nn.Module, which: Which) -> bool:
    return isinstance(module, which) if isinstance(which, (type, tuple)) else which(module)
