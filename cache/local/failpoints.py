"""Named points between which a process may be killed: where tests kill it, and look whether all promises hold."""

from __future__ import annotations

from collections.abc import Callable

STEPS = (
    "fill: locked",  # the key's lock is held, the blob is not there
    "fill: drafted",  # an empty file stands in tmp/
    "fill: reserved",  # its row is in the index
    "fill: allocated",  # its bytes are the disk's
    "fill: filled",  # its payload is made, and not yet sealed
    "fill: sealed",  # it is written whole, what proves it included
    "fill: published",  # it has its name in blobs/
    "discard: unlinked",  # a blob's file is gone, its row is not
    "evict: unlinked",  # a victim's file is gone, its row is not
    "evict: dropped",  # all victims' rows are gone, in a transaction not yet committed
    "recover: locked",  # the folder is being opened, what the dead left is still there
    "recover: swept",  # their files are emptied, their rows are there
    "recover: forgotten",  # their rows are gone
    "rebuild: dropped",  # a lost index is removed
    "rebuild: entered",  # the new one has its rows, but is not believed yet
    "adopt: entered",  # a blob that had none has a row again
    "close: synced",  # the index is on the disk, and not yet noted as closed
)

_watcher: Callable[[str], object] | None = None


def step(name: str) -> None:
    """The process has come to the step `name`."""
    if _watcher is not None:
        _watcher(name)


def watch(watcher: Callable[[str], object] | None) -> None:
    """Call `watcher(name)` at each step of this process from now on; None: no longer."""
    global _watcher  # noqa: PLW0603 - one process, one watcher, in tests alone
    _watcher = watcher
