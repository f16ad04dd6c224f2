"""The start of torch's workers: they end with their parent, and signals to its process group are for it alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from dataload.runtime.child_process import end_with

T = TypeVar("T")

TO_THE_GROUP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}

_persistent: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()  # whose workers have been started


def started(loader: DataLoader[T]) -> Iterator[T]:
    """Return an iterator of a DataLoader. Signals are held back from its workers until each calls `begin_worker`.

    Those of a fork server start with its mask, so a signal may end one before that. Persistent workers start once.
    """
    if not loader.num_workers or loader in _persistent:
        return iter(loader)
    if loader.persistent_workers:
        _persistent.add(loader)
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "forkserver":
        return iter(loader)
    if method == "spawn":  # Started here, the tracker would end the hold.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TO_THE_GROUP)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker(init: Callable[[int], object] | None, number: int) -> None:
    """Begin a worker. torch's own look for a dead parent is no help to one that writes to a full pipe.

    Args:
        init: The `worker_init_fn` of the DataLoader.
        number: Number of the worker.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with(parent.pid)
    with suppress(PermissionError):  # of the leader of a session
        os.setpgid(0, 0)  # Signals to the group, as of `timeout` and Ctrl-C, are for the parent only.
    while signal.sigtimedwait(TO_THE_GROUP, 0) is not None:  # which came before
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_THE_GROUP)
    if init is not None:
        init(number)
