"""The cache folders that this process has open."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

from dataload.cache.folder import CacheFolder
from dataload.cache.forks import ForkAware


class _OpenFolders(ForkAware):
    """The folders that this process has open: one of each, however many tiers name it (LMDB allows no second)."""

    def __init__(self) -> None:
        self._forget_all()

    def _forget_all(self) -> None:
        self._opening = threading.Lock()
        self._folders: weakref.WeakValueDictionary[tuple[int, int], CacheFolder] = weakref.WeakValueDictionary()

    def after_fork_in_child(self) -> None:
        self._forget_all()

    def open(self, path: Path) -> CacheFolder:
        super().__init__()  # Here and not at import: from the first folder on, forks matter. Again does no harm.
        with self._opening:
            folder = self._folders.get(_identity(path))
            if folder is None or folder.closed:
                folder = CacheFolder(path)
                self._folders[_identity(path)] = folder
            return folder


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_dev, status.st_ino


_open_folders = _OpenFolders()


def open_folder(path: Path) -> CacheFolder:
    """The cache folder at `path`, open in this process. Raises as `CacheFolder` does."""
    return _open_folders.open(path)
