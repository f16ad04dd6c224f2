"""The cache folders that this process has open."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

from dataload.cache.local.directory import CLOSE_SECONDS, CacheFolder
from dataload.runtime.forks import ForkAware

Identity = tuple[int, int]  # device and inode


class _OpenFolders(ForkAware):
    """The folders that this process has open, each once: LMDB must not open a file twice in a process."""

    def __init__(self) -> None:
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._opening = threading.Lock()
        self._folders: weakref.WeakValueDictionary[Identity, CacheFolder] = weakref.WeakValueDictionary()
        self._ends: dict[Identity, threading.Event] = {}

    def open(self, path: Path, *, allow_network_filesystem: bool = False) -> CacheFolder:
        """Return the open cache folder at `path`; open it if necessary. Raises as `CacheFolder` does."""
        with self._opening:
            folder = self._folders.get(_identity(path))
            if folder is None or folder.closed:
                # Another thread may be closing the folder. Wait until LMDB has closed its file.
                if ended := self._ends.pop(_identity(path), None):
                    ended.wait(2 * CLOSE_SECONDS)
                folder = CacheFolder(path, allow_network_filesystem=allow_network_filesystem)
                self._folders[_identity(path)], self._ends[_identity(path)] = folder, folder.ended
            return folder


def _identity(path: Path) -> Identity:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_dev, status.st_ino


_open_folders = _OpenFolders()
open_folder = _open_folders.open
