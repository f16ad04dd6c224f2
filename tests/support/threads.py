"""A process that can start no thread, and a wait for a thread that Ctrl-C interrupts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

TOO_LARGE = 1 << 47  # bytes of a stack that no process has addresses for


class AskedFirst(Future[Any]):
    """A future that is done after the first call of `done`. A wait for the result before that ignores Ctrl-C."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def done(self) -> bool:
        was_done = super().done()
        if not was_done:
            self.set_result(self._value)
        return was_done

    def result(self, timeout: float | None = None) -> Any:
        assert super().done(), "Ctrl-C does not interrupt this wait"
        return super().result(timeout)


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
