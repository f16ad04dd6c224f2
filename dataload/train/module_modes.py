"""The train or eval mode of each module of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
        yield
