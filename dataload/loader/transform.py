"""The user's transform, with the random numbers of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from dataload.samplers.keys import derive_key
from dataload.telemetry.wait_timeline import doing


class Transform:
    """Calls the user's function with a batch, and with a random generator if the function takes `rng`.

    Args:
        function: As `transform` of `make_loader`. None: batches stay as they are.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.function = function
        self.wants_rng = _takes_rng(function)

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
            return self.function(batch, rng=np.random.Generator(np.random.Philox(key)))


def _takes_rng(function: Callable[..., Any] | None) -> bool:
    try:
        return function is not None and "rng" in inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return False
