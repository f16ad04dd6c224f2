"""Named ranges of time: what a thread is at, for whoever has asked to be told. Costs a call when nobody has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Recorder = Callable[[str], AbstractContextManager[object]]

_recorder: Recorder | None = None


def stage(name: str) -> AbstractContextManager[object]:
    """Inside, this thread is at `name`: "decode", "forward", …"""
    return _recorder(name) if _recorder is not None else nullcontext()


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Inside, each `stage` of any thread of this process is also `recorder(name)`, entered and left in that thread."""
    global _recorder  # noqa: PLW0603 - one for the process, as the threads are the loader's
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before
