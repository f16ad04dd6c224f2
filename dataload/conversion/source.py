"""What a conversion reads: a `Source` of tables, made of the files at a URL."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from dataload.cache.blocks.reader import Object
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.source import open_source
from dataload.catalog.sources import METADATA
from dataload.errors import OriginNotFound
from dataload.runtime.redact import redacted


@dataclass(frozen=True)
class Part:
    """A part of a source that is read on its own.

    Attributes:
        name: What it is part of, for errors.
        bytes: How much of the source it is, for progress.
    """

    name: str
    bytes: int


class Source(Protocol):
    """Rows in an order that does not change.

    Attributes:
        schema: The columns of all its tables.
        parts: Its parts, in order.
    """

    schema: pa.Schema

    @property
    def parts(self) -> Sequence[Part]: ...

    def read(self, part: int) -> Iterator[pa.Table]:
        """Yield the rows of a part as tables of at most some dozens of megabytes.

        Raises:
            DataError: A file cannot be read.
            OriginError: The store failed.
        """
        ...


class Files:
    """The files at a URL, without those whose names say that they are hidden or metadata.

    Args:
        url: A file, a folder or a glob.
        storage_options: Options of its filesystem.

    Attributes:
        url: The URL without credentials.
        origin: The store.
        root: The path of the URL.
        objects: The files by their name below `root`, sorted.

    Raises:
        OriginNotFound: There are none.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        self.url = redacted(url)
        self.origin = Origin(open_source(url, dict(storage_options or {}) or None))
        self.root = self.origin.path_of(url).rstrip("/")
        listed = [Object.of(info) for info in self.origin.list(self.root).values()]
        above = self.root if all(each.path.startswith(f"{self.root}/") for each in listed) else _folder(self.root)
        names = {each.path.removeprefix(above).lstrip("/"): each for each in listed}
        self.objects = {name: names[name] for name in sorted(names) if not METADATA.search(name)}
        self.folder = above
        if not self.objects:
            raise OriginNotFound(f"no files at {self.url} ({self.origin.address}): check the path")

    def keep(self, names: Sequence[str]) -> None:
        """Leave out all but these files."""
        self.objects = {name: self.objects[name] for name in names}

    @property
    def identity(self) -> str:
        """A digest of the names, sizes and versions of the files."""
        digest = hashlib.blake2b(digest_size=16)
        for name, each in self.objects.items():
            digest.update(repr((name, each.size, each.version)).encode(errors="surrogateescape"))
        return digest.hexdigest()

    @property
    def for_arrow(self) -> Any:
        """The filesystem as pyarrow takes it."""
        from pyarrow import fs

        return (
            fs.LocalFileSystem() if self.origin.is_local else fs.PyFileSystem(fs.FSSpecHandler(self.origin.filesystem))
        )

    def content(self, each: Object) -> bytes:
        """Return the bytes of a file."""
        return bytes(self.origin.read(each.path, 0, each.size, each.version)) if each.size else b""


def _folder(path: str) -> str:
    """Return the folder of a file, or the one above the first wildcard of a glob."""
    fixed = path
    for mark in "*?[":
        fixed = fixed.split(mark, 1)[0]
    return fixed.rpartition("/")[0]
