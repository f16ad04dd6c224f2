"""Seeds of random tests: some in the default run, the others in `make slow`."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(often: int, total: int) -> list[Any]:
    """Return the parameters 0, 1, …, total - 1. Those from `often` on are slow tests."""
    return [*range(often), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(often, total))]
