"""What a conversion reads: a `Source` of tables, made of the files at a URL."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from fsspec.spec import AbstractBufferedFile
from pyarrow import fs

from dataload.cache.blocks.reader import Object
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.source import open_source
from dataload.catalog.sources import METADATA, infos_at
from dataload.errors import DataError, OriginNotFound
from dataload.runtime.redact import redacted

BLOCK_BYTES = 8 << 20  # of a request

T = TypeVar("T")


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
        advance: Called with the bytes that were read, see `told`.

    Raises:
        OriginNotFound: There are none.
        DataError: A name is not UTF-8.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        self.url = redacted(url)
        self.origin = Origin(open_source(url, storage_options))
        self.root = self.origin.path_of(url).rstrip("/")
        infos, above = infos_at(self.origin, self.root)
        above = self.root.rpartition("/")[0] if self.root in infos else above
        names = {each.path.removeprefix(above).lstrip("/"): each for each in map(Object.of, infos.values())}
        self.objects = {name: names[name] for name in sorted(names) if not METADATA.search(name)}
        if strange := [name for name in self.objects if not _is_text(name)]:
            raise DataError(f"{self.url}: the name {strange[0]!r} is not UTF-8: rename the file")
        self.folder = above
        self.advance: Callable[[int], object] = lambda _: None
        self._by_path = {each.path: each for each in self.objects.values()}
        if not self.objects:
            raise OriginNotFound(f"no files at {self.url} ({self.origin.address}): check the path")

    def at(self, path: str) -> Object:
        """Return the file of a path."""
        return self._by_path[path]

    def keep(self, names: Sequence[str]) -> None:
        """Leave out all but these files."""
        self.objects = {name: self.objects[name] for name in names}

    @property
    def num_bytes(self) -> int:
        """Their size."""
        return sum(each.size for each in self.objects.values())

    def told(self, items: Iterable[T], num_bytes: int) -> Iterator[T]:
        """Yield what is read of `num_bytes` bytes. Tell `advance` of those that have come, and at the end of all."""
        before, told = self._received, 0
        for item in items:
            yield item
            if (come := min(num_bytes, self._received - before)) > told:
                self.advance(come - told)
                told = come
        self.advance(num_bytes - told)

    @property
    def _received(self) -> int:
        return int(self.origin.stats().get("bytes", 0))

    @property
    def identity(self) -> str:
        """A digest of the names, sizes and versions of the files."""
        digest = hashlib.blake2b(digest_size=16)
        for name, each in self.objects.items():
            digest.update(repr((name, each.size, each.version)).encode(errors="surrogateescape"))
        return digest.hexdigest()

    @property
    def for_arrow(self) -> fs.FileSystem:
        """A filesystem of pyarrow that opens these versions of the files."""
        return fs.PyFileSystem(_Pinned(self))

    def open(self, each: Object) -> PinnedFile:
        """Open this version of a file."""
        return PinnedFile(self.origin, each)

    def read_into(self, each: Object, memory: memoryview) -> None:
        """Fill `memory`, which is as large as a file, with its bytes."""
        self.origin.read_into(memory, each.path, 0, each.version)

    def content(self, each: Object) -> bytes:
        """Return the bytes of a file."""
        return bytes(self.origin.read(each.path, 0, each.size, each.version)) if each.size else b""


class PinnedFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file open for reading. A read raises ObjectChanged once the file has another version.

    Args:
        origin: The store.
        each: The file.
    """

    def __init__(self, origin: Origin, each: Object) -> None:
        self._origin, self._object = origin, each
        super().__init__(None, each.path, "rb", block_size=BLOCK_BYTES, size=each.size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self._origin.read(self._object.path, start, end, self._object.version)) if start < end else b""


class _Pinned(fs.FSSpecHandler):  # type: ignore[misc]
    def __init__(self, files: Files) -> None:
        super().__init__(files.origin.filesystem)
        self._files = files

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(self._files.open(self._files.at(path)), mode="r")

    open_input_stream = open_input_file


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
