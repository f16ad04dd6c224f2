"""Where the checkpoints of a run are: a folder, or an object store. Both name them alike, and their files, too."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, cast
from uuid import uuid4

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from dataload.arguments import is_url, local_folder
from dataload.cache.local.run_lock import RunLock
from dataload.cache.origin.lease import Lease
from dataload.cache.origin.store_path import BLOCK_BYTES, StorePath
from dataload.errors import ConfigError
from dataload.runtime.durable_file import sync_folder
from dataload.runtime.redact import redacted
from dataload.train.checkpoint import manifest
from dataload.train.checkpoint.shared_folder import require_shared
from dataload.train.ranks.collectives import is_first, on_each, on_first, process_number

STATE = "state.json"
TENSORS = ".metadata"  # which DCP writes for other readers of the tensors
OWNER = "owner.json"  # which an object store has first: the run that writes the checkpoint
NAME = re.compile(r"checkpoint-(\d{6,})")
PROBE = ".probe-"  # begins the name of an object that is there while the ranks look for it
UNFINISHED = ".checkpoint-"  # prefix of folders that a killed process may have left half written or half removed

AnyPath: TypeAlias = Path | StorePath

log = logging.getLogger(__name__)


def name_of(number: int) -> str:
    """Return the name of a checkpoint."""
    return f"checkpoint-{number:06d}"


def path_of(name: str, value: str | os.PathLike[str]) -> AnyPath:
    """Return the path that an argument names, which may be a URL.

    Raises:
        ConfigError: The value is no path, or its store cannot be used.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ""
    if is_url(text) and not text.startswith(("file:", "local:")):
        return StorePath(text)
    return local_folder(name, value)


def place_of(path: AnyPath) -> Place:
    """Return the place of the checkpoints in a folder."""
    return Store(path) if isinstance(path, StorePath) else Disk(path)


class Place(Protocol):
    """Where checkpoints are.

    Attributes:
        path: Their folder.
    """

    @property
    def path(self) -> AnyPath: ...

    def open(self) -> None:
        """Make the folder. Raise ConfigError on every rank unless all ranks see the same one."""

    def lock(self) -> RunLock | Lease:
        """Return the lock that one run has."""

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints, oldest first. Raises OSError."""

    def claim(self, number: int, run: str) -> int:
        """Return the number of the next checkpoint of a run: this one, or a later one that nobody has begun."""

    def draft(self, number: int, run: str) -> AnyPath:
        """Return where the files of a checkpoint are written."""

    def filesystem(self) -> FileSystemBase:
        """Return the filesystem for DCP, which has the entries of the files that it has written as `written`."""

    def publish(self, number: int, run: str, state: bytes, files: dict[str, manifest.Entry]) -> None:
        """Complete a checkpoint by its state and the manifest. Raise ConfigError if another run has done so.

        Args:
            number: Number of the checkpoint.
            run: The run.
            state: Content of its file of JSON.
            files: Entries of the files that DCP has written.
        """

    def remove(self, numbers: list[int]) -> None:
        """Remove checkpoints, as far as they are there. Raises OSError."""

    def abandon(self, number: int, run: str) -> None:
        """Remove the files of a checkpoint that cannot be completed, as far as it goes."""

    def sweep(self) -> None:
        """Remove what killed runs have left, as far as it goes."""


def taken(path: AnyPath) -> ConfigError:
    """Return the error about a checkpoint that another run has written."""
    return ConfigError(
        f"{path} is the checkpoint of another run: end that run, or give each a checkpoint_dir of its own"
    )


class Disk:
    """A folder that all ranks see, under a path of its own on each. A rename publishes a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        require_shared(self.path, f"{UNFINISHED}probe-")

    def lock(self) -> RunLock:
        return RunLock(self.path)

    def numbers(self) -> list[int]:
        """As for `Place`. Other programs use such names, too."""
        if not self.path.is_dir():
            return []
        matches = ((path, NAME.fullmatch(path.name)) for path in self.path.iterdir())
        return sorted(int(match[1]) for path, match in matches if match and has_parts(path))

    def claim(self, number: int, run: str) -> int:  # noqa: ARG002 (drafts have the name of the run)
        return number

    def draft(self, number: int, run: str) -> Path:
        return self.path / f".{name_of(number)}-{run}"

    def filesystem(self) -> FileSystemBase:
        return _HashingFileSystem()

    def publish(self, number: int, run: str, state: bytes, files: dict[str, manifest.Entry]) -> None:
        draft, published = self.draft(number, run), self.path / name_of(number)
        _write(draft / STATE, state)
        _write(draft / manifest.MANIFEST, manifest.content_of({**files, STATE: manifest.entry_of(state)}))
        sync_folder(draft)
        try:
            draft.rename(published)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise taken(published) from None
        sync_folder(self.path)

    def remove(self, numbers: list[int]) -> None:
        for number in numbers:
            with suppress(FileNotFoundError):  # The user may have removed it.
                (self.path / name_of(number)).rename(self.path / f"{UNFINISHED}{number}-leaving")
        self._sweep(f"{UNFINISHED}*-leaving")

    def abandon(self, number: int, run: str) -> None:
        self._sweep(self.draft(number, run).name)  # which may make room for what the user does next

    def sweep(self) -> None:
        self._sweep(f"{UNFINISHED}*")

    def _sweep(self, pattern: str) -> None:
        """Remove folders. On NFS, files that are open elsewhere stay until later."""
        for folder in self.path.glob(pattern):
            try:
                shutil.rmtree(folder)
            except OSError as error:
                log.info("%s cannot be removed yet: %s", folder, error)


class Store:
    """A folder in an object store. The manifest completes a checkpoint; what has none is not one."""

    def __init__(self, path: StorePath) -> None:
        self.path = path

    def open(self) -> None:
        """As for `Place`. Each rank writes, reads and removes an object: it may have credentials of its own."""
        nonce = on_first(lambda: uuid4().hex)
        first, own = (self.path / f"{PROBE}{nonce}-{rank}" for rank in (0, process_number()))

        def look() -> None:
            try:
                first.read_bytes()
            except FileNotFoundError as error:
                raise ConfigError(
                    f"checkpoint_dir {str(self.path)!r}: rank {process_number()} does not see what rank 0 "
                    "writes there: give all ranks the same URL, endpoint and credentials"
                ) from error

        try:
            on_each(lambda: own.create(PROBE.encode()))  # None or a wrong credential, or no such bucket, ends here.
            if on_first(lambda: own.create(nonce.encode())) and is_first():
                log.warning(
                    "%s: this store ignores If-None-Match, by which runs exclude each other: let no other run use it",
                    self.path,
                )
            on_each(look)
        finally:
            on_each(lambda: self.path.remove([own.name]))  # as `keep` will have to

    def lock(self) -> Lease:
        return Lease(self.path)

    def numbers(self) -> list[int]:
        return [number for number, files in self._folders().items() if manifest.MANIFEST in files]

    def _folders(self) -> dict[int, list[str]]:
        """Return the names of the files of all checkpoints, whole or not, by number."""
        found: dict[int, list[str]] = {}
        for path in self.path.files():
            folder, _, name = path.partition("/")
            if match := NAME.fullmatch(folder):
                found.setdefault(int(match[1]), []).append(name)
        return dict(sorted(found.items()))

    def claim(self, number: int, run: str) -> int:
        while True:
            folder = self.draft(number, run)
            files = folder.files()
            if (OWNER in files or not files) and (folder / OWNER).create(_owned_by(run)):
                return number
            number += 1  # This one is another program's, or another run's, perhaps of one that has lost its lease.

    def draft(self, number: int, run: str) -> StorePath:  # noqa: ARG002 (it has claimed the number)
        return self.path / name_of(number)

    def filesystem(self) -> FileSystemBase:
        return StoreFileSystem()

    def publish(self, number: int, run: str, state: bytes, files: dict[str, manifest.Entry]) -> None:
        draft = self.draft(number, run)
        with (draft / STATE).upload() as stream:
            stream.write(state)
        files = {**files, STATE: manifest.entry_of(state), OWNER: manifest.entry_of(_owned_by(run))}
        if not (draft / manifest.MANIFEST).create(manifest.content_of(files)):
            raise taken(draft)

    def remove(self, numbers: list[int]) -> None:
        for number in numbers:
            folder = self.path / name_of(number)
            files = list(folder.files())
            folder.remove([manifest.MANIFEST])  # first: what is left of it is no checkpoint
            self._clear(number, files)

    def abandon(self, number: int, run: str) -> None:
        with self._told():
            if manifest.MANIFEST not in (files := list(self.draft(number, run).files())):
                self._clear(number, files)

    def sweep(self) -> None:
        """As for `Place`. A folder without an owner is another program's.

        What comes after the latest checkpoint stays: its run may only stand still, and would complete what is left.
        """
        with self._told():
            folders = self._folders()
            latest = max((number for number, files in folders.items() if manifest.MANIFEST in files), default=0)
            for number, files in folders.items():
                if number < latest and manifest.MANIFEST not in files and OWNER in files:
                    self._clear(number, files)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.info("%s cannot be swept yet: %s", self.path, redacted(error))

    def _clear(self, number: int, files: list[str]) -> None:
        """Remove the files of a checkpoint; its owner last, without whom nobody may sweep what is left."""
        folder = self.path / name_of(number)
        folder.remove([name for name in files if name != OWNER])
        if OWNER in files:
            folder.remove([OWNER])


def _owned_by(run: str) -> bytes:
    return json.dumps({"run": run}).encode()


def _write(file: Path, content: bytes) -> None:
    """Write a file and sync it. Raises OSError."""
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, manifest.Entry] = {}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashed = manifest.HashedStream(stream)
            yield hashed
        self.written[Path(path).name] = hashed.entry


class StoreFileSystem(FileSystemBase):
    """The files of checkpoints in an object store, for DCP. Its paths are a `StorePath` each.

    Args:
        files: The files of the checkpoint that is read.

    Attributes:
        written: The entries of the files that it has written, by name.
        wanted: Spans of bytes of each file that is read, by name.
    """

    def __init__(self, files: Mapping[str, manifest.Entry] = MappingProxyType({})) -> None:
        self._files = files
        self.written: dict[str, manifest.Entry] = {}
        self.wanted: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with path.reader(self._files[path.name].blocks, self.wanted[path.name]) as reader:
                yield reader
            return
        with path.upload() as stream:
            hashed = manifest.HashedStream(stream, BLOCK_BYTES)
            yield hashed
        self.written[path.name] = hashed.entry

    def init_path(self, path: Any) -> Any:
        return path

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def rename(self, path: Any, new_path: Any) -> None:
        """Copy the small file of DCP's metadata, which DCP writes under another name first."""
        with new_path.upload() as stream:
            stream.write(path.read_bytes())
        self.rm_file(path)
        self.written[new_path.name] = self.written.pop(path.name)._replace(blocks=())  # It is read as a whole.

    def mkdir(self, path: Any) -> None:
        """Do nothing: an object store has no folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, StorePath)

    def exists(self, path: Any) -> bool:
        return cast(bool, path.is_file())

    def rm_file(self, path: Any) -> None:
        path.parent.remove([path.name])


def has_parts(folder: AnyPath) -> bool:
    """Return whether a folder has any file of a checkpoint, which may have lost the others."""
    return any((folder / name).is_file() for name in (manifest.MANIFEST, STATE, TENSORS)) or has_tensors(folder)


def has_tensors(folder: AnyPath) -> bool:
    """Return whether a folder has files of tensors."""
    if isinstance(folder, StorePath):
        return any(name.endswith(".distcp") for name in folder.files())
    return any(folder.glob("__*.distcp"))


def sizes_in(folder: AnyPath) -> dict[str, int]:
    """Return the sizes of the files in a folder, by name. Raises OSError."""
    if isinstance(folder, StorePath):
        return folder.files()
    return {file.name: file.stat().st_size for file in folder.iterdir()}
