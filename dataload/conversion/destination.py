"""The folder that a conversion writes: its files, and the state from which it goes on after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dataload.cache.blocks.reader import Object
from dataload.cache.local.run_lock import LOCK, RunLock, wait_for
from dataload.cache.origin.lease import CHAIN, Lease
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.source import open_source
from dataload.cache.origin.store_path import StorePath
from dataload.conversion.source import PinnedFile
from dataload.errors import ConfigError, OriginNotFound
from dataload.runtime.durable_file import sync_folder
from dataload.runtime.redact import redacted

STATE = "_convert.json"
BUCKETS = "_buckets"
VERSION = 1


class Destination:
    """A folder for files that are complete as soon as they have their name.

    A file on this machine has another name while it is written. Object stores show none before it is complete.

    Args:
        url: The folder.
        storage_options: Options of its filesystem.

    Attributes:
        url: The URL without credentials.
        origin: The store.
        root: The path of the folder.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        self.url = redacted(url)
        self.origin = Origin(open_source(url, storage_options))
        self.root = self.origin.path_of(url).rstrip("/")
        self._lock = RunLock(Path(self.root)) if self.origin.is_local else Lease(StorePath(url, self.origin))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder, so that no other conversion writes into it. A killed one holds it no longer.

        Raises:
            ConfigError: Another conversion holds it.
            OriginError: The store failed.
        """
        if self.origin.is_local:
            Path(self.root).mkdir(parents=True, exist_ok=True)
        if (holder := wait_for(self._lock, f"{self.url} is that of another conversion")) is not None:
            raise ConfigError(
                f"{self.url} is that of another conversion, {holder}: wait for its end, or name another folder"
            )
        try:
            yield
        finally:
            self._lock.release()

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files below the folder, by name; without those of the lock."""
        try:
            found = self.origin.list(self.root, is_glob=False)
        except OriginNotFound:
            return {}
        sizes = {name.removeprefix(self.root).lstrip("/"): int(info["size"]) for name, info in found.items()}
        return {name: sizes[name] for name in sorted(sizes) if name != LOCK and not name.startswith(f"{CHAIN}/")}

    def state(self) -> dict[str, Any] | None:
        """Return the state that was written last; None: there is none.

        Raises:
            ConfigError: It is not one of this version.
        """
        try:
            text = self.origin.content(f"{self.root}/{STATE}")
        except OriginNotFound:
            return None
        try:
            found: dict[str, Any] = json.loads(text)
            is_known = _is_state(found)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_known = False
        if not is_known:
            raise ConfigError(f"{self.url}/{STATE} is of no conversion by this version: name an empty folder")
        return found

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state."""
        with self.create(STATE) as file:
            file.write(json.dumps({"version": VERSION, **state}).encode())

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Open a new file. It gets its name when the context ends; nothing of it stays if that raises.

        Raises:
            ConfigError: Another conversion has taken the folder over.
            OriginError: The store failed.
        """
        path = f"{self.root}/{name}"
        if not self.origin.is_local:
            with self.origin.upload(path) as file:
                yield file
                self._lock.check()
            return
        temporary = Path(self.root) / f"_{name}.tmp"
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(temporary.parent)

    def open(self, name: str) -> PinnedFile:
        """Open a file for reading. It can be sought."""
        return PinnedFile(self.origin, Object.of(self.origin.info(f"{self.root}/{name}")))


def part_name(number: int) -> str:
    """Return the name of a file."""
    return f"part-{number:05}.parquet"


def _is_state(found: dict[str, Any]) -> bool:
    """Return whether this is what `save` has written. Raise LookupError, TypeError or AttributeError if not."""
    files = found["files"]
    numbers = [*found["position"], found["rows"], found["sum"]]
    numbers += [each[name] for each in files for name in ("rows", "bytes", "sum")]
    return (
        found["version"] == VERSION
        and {"source", "format", "shuffle"} <= found.keys()
        and len(found["position"]) == 2
        and all(type(number) is int and number >= 0 for number in numbers)
        and (type(files), type(found["is_done"])) == (list, bool)
        and [each["name"] for each in files] == [part_name(number) for number in range(len(files))]
    )
