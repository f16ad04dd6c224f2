"""The cache folders that this process has open."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from pathlib import Path

from dataload.cache.local.directory import CLOSE_SECONDS, CacheFolder
from dataload.cache.local.key_locks import ThreadLocks
from dataload.runtime.forks import ForkAware


class _OpenFolders(ForkAware):
    """The folders that this process has open, each once: LMDB must not open a file twice in a process."""

    def __init__(self) -> None:
        self._opening = ThreadLocks()
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._folders: weakref.WeakValueDictionary[bytes, CacheFolder] = weakref.WeakValueDictionary()
        self._ends: dict[bytes, threading.Event] = {}

    def open(self, path: Path, *, allow_network_filesystem: bool = False) -> CacheFolder:
        """Return the open cache folder at `path`; open it if necessary. Raises as `CacheFolder` does."""
        with suppress(OSError):  # `CacheFolder` meets the error, too, and raises it.
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One lock for each folder: opening takes a minute if a stopped process holds the folder's set-up lock.
        with self._opening.hold(identity(path)):
            folder = self._folders.get(identity(path))
            if folder is None or folder.closed:
                # Another thread may be closing the folder. Wait until LMDB has closed its file.
                if ended := self._ends.pop(identity(path), None):
                    ended.wait(2 * CLOSE_SECONDS)
                folder = CacheFolder(path, allow_network_filesystem=allow_network_filesystem)
                self._folders[identity(path)], self._ends[identity(path)] = folder, folder.ended
            return folder


def identity(path: Path) -> bytes:
    """Return the device and inode of a folder, whatever path leads to it."""
    try:
        status = path.stat()
    except OSError:
        return b""
    return b"%d %d" % (status.st_dev, status.st_ino)


_open_folders = _OpenFolders()
open_folder = _open_folders.open
