"""Activation checkpointing: selected modules compute their activations again for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from dataload.errors import ConfigError

ModuleSelector = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]


@contextmanager
def recomputed(model: nn.Module, selector: ModuleSelector | None) -> Iterator[None]:
    """Checkpoint the activations of the selected modules during the block.

    Parameters, their names and the gradients do not change.

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
        raise ConfigError(f"activation_checkpointing={selector!r} matched no module in {type(model).__name__}")
    originals = [vars(module).get("forward") for module in selected]
    for module in selected:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module, forward in zip(selected, originals, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _matches(module: nn.Module, selector: ModuleSelector) -> bool:
    return isinstance(module, selector) if isinstance(selector, (type, tuple)) else selector(module)
