"""The folder that a conversion writes: its files, and the state from which it goes on after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dataload.cache.origin.origin import Origin
from dataload.cache.origin.source import open_source
from dataload.errors import ConfigError, OriginNotFound
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
        self.origin = Origin(open_source(url, dict(storage_options or {}) or None))
        self.root = self.origin.path_of(url).rstrip("/")

    def names(self) -> list[str]:
        """Return the names of all files below the folder, sorted."""
        try:
            found = self.origin.list(self.root, is_glob=False)
        except OriginNotFound:
            return []
        return sorted(name.removeprefix(self.root).lstrip("/") for name in found)

    def state(self) -> dict[str, Any] | None:
        """Return the state that was written last; None: there is none.

        Raises:
            ConfigError: It is not one of this version.
        """
        if STATE not in self.names():
            return None
        with self.origin.map_errors(f"{self.root}/{STATE}"):
            text = self.origin.filesystem.cat_file(f"{self.root}/{STATE}")
        try:
            found = json.loads(text)
            is_known = found["version"] == VERSION
        except (ValueError, TypeError, KeyError):
            is_known = False
        if not is_known:
            raise ConfigError(f"{self.url}/{STATE} is of no conversion by this version: name an empty folder")
        return found  # type: ignore[no-any-return]

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state."""
        with self.create(STATE) as file:
            file.write(json.dumps({"version": VERSION, **state}).encode())

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        """Open a new file. It gets its name when the context ends, and none if that raises.

        Raises:
            OriginError: The store failed.
        """
        path = f"{self.root}/{name}"
        if self.origin.is_local:
            temporary = Path(self.root) / f"_{name}.tmp"
            temporary.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file
            temporary.replace(path)
            return
        with self.origin.map_errors(path):
            file = self.origin.filesystem.open(path, "wb")
        try:
            yield file
        except BaseException:
            file.discard()
            raise
        with self.origin.map_errors(path):
            file.close()

    def open(self, name: str) -> Any:
        """Open a file for reading. It can be sought."""
        with self.origin.map_errors(f"{self.root}/{name}"):
            return self.origin.filesystem.open(f"{self.root}/{name}", "rb")
