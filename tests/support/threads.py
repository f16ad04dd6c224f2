"""A process that can start no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

TOO_LARGE = 1 << 47  # bytes of a stack that no process has addresses for


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Make every start of a thread fail in the kernel, as at a limit of processes."""
    before = threading.stack_size(TOO_LARGE)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=int).start()
        yield
    finally:
        threading.stack_size(before)
