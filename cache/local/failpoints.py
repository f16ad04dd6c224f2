"""Failpoints: named steps at which tests kill the process and then check the guarantees of the cache."""

from __future__ import annotations

from collections.abc import Callable

STEPS = (
    "fill: locked",  # the key's lock is held, the blob is missing
    "fill: drafted",  # tmp/ holds an empty file
    "fill: reserved",  # the index has its row
    "fill: allocated",  # its disk space is allocated
    "fill: filled",  # its payload is complete, but not sealed
    "fill: sealed",  # the file is complete, checksums included
    "fill: published",  # the file is in blobs/
    "discard: unlinked",  # a blob's file is removed, its row is not
    "evict: unlinked",  # a victim's file is removed, its row is not
    "evict: dropped",  # the rows of all victims are dropped
    "recover: locked",  # the set-up lock is held, files of dead processes remain
    "recover: swept",  # these files are replaced by empty ones, their rows remain
    "recover: forgotten",  # these rows are dropped
    "rebuild: dropped",  # the old index is removed
    "rebuild: entered",  # the new index has its rows, but is not trusted yet
    "close: synced",  # the index is synced and shut, but not recorded as closed
)

_watcher: Callable[[str], object] | None = None


def step(name: str) -> None:
    """Call the watcher of this process, if there is one, at the step `name`."""
    if _watcher is not None:
        _watcher(name)


def watch(watcher: Callable[[str], object] | None) -> None:
    """Call `watcher(name)` at each step of this process from now on. None removes the watcher."""
    global _watcher  # noqa: PLW0603 - one watcher per process, only in tests
    _watcher = watcher
