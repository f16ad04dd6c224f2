"""The user's transform, with the random numbers of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from dataload.errors import ConfigError
from dataload.samplers.keys import derive_key
from dataload.telemetry.wait_timeline import doing

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Transform:
    """Calls the user's function with a batch, and with a random generator if the function takes one.

    Args:
        function: As `transform` of `make_loader`. None: batches stay as they are.

    Raises:
        ConfigError: The function needs other arguments.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.function = function
        self._rng = None if function is None else _rng_of(function)

    @property
    def wants_rng(self) -> bool:
        """Whether the function takes a random generator."""
        return self._rng is not None

    def __call__(self, batch: Any, stream: tuple[int, ...] = (), cursor: int = 0) -> Any:
        """Return the transformed batch.

        Args:
            batch: A batch.
            stream: (seed, epoch, rank). Together with `cursor` it determines the random numbers.
            cursor: Rows of the epoch before the global batch.
        """
        if self.function is None:
            return batch
        with doing("transform"):
            if not self.wants_rng:
                return self.function(batch)
            seed, epoch, rank = stream
            key = derive_key("transform", seed, epoch, cursor, rank)
            rng = np.random.Generator(np.random.Philox(key))
            return self.function(batch, rng=rng) if self._rng == "keyword" else self.function(batch, rng)


def _rng_of(function: Callable[..., Any]) -> Literal["keyword", "position"] | None:
    """Return how a function takes the generator; None: not at all.

    Raises:
        ConfigError: The function needs other arguments than a batch and a generator.
    """
    try:
        signature = inspect.signature(_implementation(function))
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    others = [*signature.parameters.values()][1:]
    bound = function.keywords if isinstance(function, partial) else {}
    way: Literal["keyword", "position"] | None = None
    if any(each.name == "rng" and each.kind in NAMED and "rng" not in bound for each in others):
        way = "keyword"
    elif any(each.kind in POSITIONAL and each.default is each.empty for each in others[:1]):
        way = "position"
    try:
        signature.bind(*[None] * (2 if way == "position" else 1), **({"rng": None} if way == "keyword" else {}))
    except TypeError as error:
        taken = ", ".join(signature.parameters)
        raise ConfigError(
            f"transform({taken}) is called with a batch, or with a batch and a generator: {error}; bind others with "
            "functools.partial"
        ) from error
    return way


def _implementation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable that has the signature: `forward` of a module."""
    if isinstance(function, partial):
        return partial(_implementation(function.func), *function.args, **function.keywords)
    return function.forward if isinstance(function, torch.nn.Module) else function
