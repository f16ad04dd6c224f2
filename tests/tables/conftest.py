from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_threads_of_pyiceberg() -> Iterator[None]:
    """End the threads of pyiceberg, which it keeps for the life of the process."""
    yield
    module = sys.modules.get("pyiceberg.utils.concurrent")
    if module is not None and (pool := module.ExecutorFactory._instance) is not None:
        pool.shutdown()
        module.ExecutorFactory._instance = None
