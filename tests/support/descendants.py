"""The processes that another one has started, and what is left of them after its end."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

SECONDS = 2.0  # the most that a process may outlive its parent


@contextmanager
def descendants_of(pid: int) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns the commands of those descendants of a process that do not end soon."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            found.append((each, os.pidfd_open(each.pid), " ".join(each.cmdline())))
    assert found
    try:
        yield lambda: [command for _, descriptor, command in found if not _ends(descriptor)]
    finally:
        for process, descriptor, _ in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
            os.close(descriptor)


def _ends(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], SECONDS)[0])
