"""Named trace spans: the stage that a thread is in, for a recorder. Without a recorder a span costs one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Recorder = Callable[[str], AbstractContextManager[object]]

_recorder: Recorder | None = None


def stage(name: str) -> AbstractContextManager[object]:
    """Record a span for the duration of the block. `name` is the stage: "decode", "forward", …"""
    return _recorder(name) if _recorder is not None else nullcontext()


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Enter `recorder(name)` for each `stage` of any thread of this process, for the duration of the block."""
    global _recorder  # noqa: PLW0603 - one for the process, as the threads are the loader's
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before
