"""The folder of a cache: its layout, its format, and what a process needs open to work in it."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import uuid
import weakref
from pathlib import Path

import lmdb

from dataload.cache.forks import ForkAware
from dataload.cache.index import Index
from dataload.cache.locks import KeyLocks
from dataload.cache.scratch import Scratch, oldest_start, sweep
from dataload.errors import ConfigError

FORMAT = 0
SETUP_SECONDS = 60.0
_SETUP = b"\xff" * 32  # the lock under which a folder is made, opened and swept

log = logging.getLogger(__name__)


class CacheFolder:
    """A cache folder, open in this process.

        FORMAT   version and identity, as JSON      locks    one byte a key, never unlinked
        index/   LMDB                               tmp/     a folder for each running process
        blobs/   ab/<digest>

    Made when missing, with mode 0700. What dead processes left half-written is removed on opening.

    Raises ConfigError when the folder cannot be used, or holds something that is not a cache of this format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_foreign()
            (path / "locks").touch(mode=0o600)
            self.locks = KeyLocks(str(path / "locks"))
            with self.locks.hold(_SETUP, SETUP_SECONDS):
                self._check_format()
                for name in ("index", "tmp", "blobs"):
                    (path / name).mkdir(mode=0o700, exist_ok=True)
                self.index = self._open_index()
                self._forget(sweep(path / "tmp"))
                self.scratch = Scratch(path / "tmp")
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cache_dir {path} cannot be used ({reason}): name a folder you may write to") from error

    def path_of(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.path / "blobs" / name[:2] / name

    def unlink(self, digest: bytes) -> bool:
        """Remove a blob's file; whether there was one."""
        try:
            self.path_of(digest).unlink()
        except FileNotFoundError:
            return False
        return True

    def discard(self, digest: bytes) -> None:
        """Remove a blob, file before row. Its lock must be held."""
        self.unlink(digest)
        self.index.drop(digest)

    def release(self, digest: bytes) -> bool:
        """Remove a blob's file; True when its row covers nothing any more, and nobody is filling it just now."""
        if self.unlink(digest):
            return True
        with self.locks.hold(digest, timeout=0) as alone:
            return alone and not self.path_of(digest).exists()

    def oldest_process(self) -> int:
        """When the oldest process at work here started, in ns since the Unix epoch."""
        return oldest_start(self.path / "tmp")

    def room(self) -> int:
        """Bytes a cache may take here when nobody says: what it holds, and 90 % of what the disk has free."""
        return self.index.used_bytes() + shutil.disk_usage(self.path).free * 9 // 10

    def _check_foreign(self) -> None:
        # Another process may be making this very cache: it writes these names first, and the others after FORMAT.
        strangers = sorted(child.name for child in self.path.iterdir() if not child.name.startswith("locks"))
        if strangers and not (self.path / "FORMAT").exists():
            raise ConfigError(f"cache_dir {self.path} holds other files ({strangers[0]}, …): name an empty folder")

    def _check_format(self) -> None:
        file = self.path / "FORMAT"
        if not file.exists():
            draft = file.with_name("locks.FORMAT")
            draft.write_text(json.dumps({"format": FORMAT, "uuid": str(uuid.uuid4())}))
            draft.replace(file)
            return
        try:
            found = json.loads(file.read_text())["format"]
        except (ValueError, KeyError, TypeError):
            found = "unreadable"
        if found != FORMAT:
            raise ConfigError(
                f"cache_dir {self.path} has format {found}, this version reads {FORMAT}: remove it or name another"
            )

    def _open_index(self) -> Index:
        index = Index(str(self.path / "index"))
        try:
            index.used_bytes()
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            log.warning("cache %s: its index is damaged (%s); starting with an empty one", self.path, error)
            for name in ("index", "blobs"):
                shutil.rmtree(self.path / name)
                (self.path / name).mkdir(mode=0o700)
        return index

    def _forget(self, unfinished: list[bytes]) -> None:
        for digest in unfinished:
            with self.locks.hold(digest, timeout=0) as alone:
                if alone and not self.path_of(digest).exists():
                    self.index.drop(digest)


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
            if folder is None:
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
    """The cache folder at `path`, open in this process. Raises ConfigError as `CacheFolder` does."""
    return _open_folders.open(path)
