"""The needs of the loaders of a host: each process announces its own, and reads those of the others."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from itertools import count
from pathlib import Path

from dataload.cache.division import Division, Need, divide
from dataload.cache.local.directory import CacheFolder
from dataload.runtime.forks import ForkAware
from dataload.runtime.instances import Instances

LOOK_SECONDS = 0.5  # between two looks at the needs of other processes
NOTE = "needs"  # the name under which a process shows its own


class Lease:
    """A need of this process. It lasts as long as this object."""

    def __init__(self, needs: HostNeeds, need: Need) -> None:
        self._end = weakref.finalize(self, needs.release, needs.add(need))
        self._end.atexit = False  # the end of the process ends it


class HostNeeds(ForkAware):
    """The needs of the loaders of all processes that use a cache folder.

    A process announces its needs in its staging folder, so they end with the process. Each process reads those of the
    others again after `LOOK_SECONDS`, and all compute the same division.

    Notes:
        Any thread may call it. A forked child starts without needs and reads those that its parent announced. A loader
        that the child uses announces its need again.
    """

    def __init__(self) -> None:
        self._tokens = count()  # of a child, they follow those of its parent
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._mutex = threading.Lock()  # guards all but `_own`
        self._own: dict[int, Need] = {}  # by token
        self._folder: CacheFolder | None = None  # where the needs of this process are announced
        self._announced: tuple[Need, ...] = ()
        self._hidden = False  # whether the last announcement failed, so that the others do not see these needs
        self._contents: list[bytes] = []  # what the other processes announce
        self._others: list[list[Need]] = []
        self._divided: dict[int, Division] = {}  # by limit: tiers in one folder may have several
        self._look_at = 0.0

    def add(self, need: Need) -> int:
        """Add a need of this process. Return a token for `release`."""
        token = next(self._tokens)
        self._own[token] = need
        self._look_at = 0.0
        return token

    def release(self, token: int) -> None:
        """End a need. The garbage collector may call it in any thread, so it never blocks."""
        self._own.pop(token, None)
        self._look_at = 0.0
        while (folder := self._folder) is not None and not folder.closed and self._changed:
            if not self._mutex.acquire(blocking=False):
                return  # The thread that holds it looks again afterwards.
            try:
                self._announce(folder)
            finally:
                self._mutex.release()

    def division(self, folder: CacheFolder, limit: int) -> Division:
        """Return how all needs share a cache of `limit` bytes in `folder`."""
        divided = self._divided.get(limit)
        if divided is not None and time.monotonic() < self._look_at and folder is self._folder:
            return divided
        while True:
            with self._mutex:
                self._announce(folder)
                with suppress(OSError):  # such as too many open files: the needs seen last hold
                    self._look(folder)
                divided = self._divided.get(limit)
                if divided is None:
                    divided = self._divided[limit] = divide(limit, [self._announced, *self._others])
                self._look_at = time.monotonic() + LOOK_SECONDS
            if not self._changed:  # else a need has ended meanwhile
                return divided

    @property
    def _changed(self) -> bool:
        """Whether the announcement of this process is out of date."""
        return self._announced != tuple(self._own.copy().values())

    def _announce(self, folder: CacheFolder) -> None:
        """Announce the needs of this process, if they have changed."""
        if not self._changed and folder is self._folder and not self._hidden:
            return
        own = tuple(self._own.copy().values())
        if own or self._announced:
            try:
                folder.staging.show(NOTE, b"".join(need.to_bytes() for need in own))
                self._hidden = False
            except OSError:  # The disk is full, or the folder was removed.
                self._hidden = True
        self._announced, self._folder, self._divided = own, folder, {}

    def _look(self, folder: CacheFolder) -> None:
        """Read the needs of the other processes, if they have changed."""
        contents = [content for _, content in folder.staging.read(NOTE)]
        if contents != self._contents:
            self._contents, self._divided = contents, {}
            self._others = [_needs_in(content) for content in sorted({*contents})]  # Ranks of a job show the same.


def _needs_in(content: bytes) -> list[Need]:
    try:
        return Need.all_from(content)
    except (ValueError, OverflowError):  # written by another version
        return []


_needs: Instances[Path, HostNeeds] = Instances(inherited=True)


def host_needs(path: Path) -> HostNeeds:
    """Return the needs of this process for the cache folder at a path."""
    return _needs.get(path.resolve(), HostNeeds)
