"""The state of the random number generators that user code may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Return the states of the global generators of torch (CPU and current GPU), Python and NumPy as plain data."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state that `rng_state` returned. The state of a GPU is ignored on a machine without one."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
