"""Paths in object stores, with some of the methods of pathlib's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import xxhash

from dataload.cache.origin.origin import Origin, Upload
from dataload.cache.origin.source import open_source
from dataload.cache.origin.version import version_of
from dataload.errors import ConfigError, OriginNotFound
from dataload.runtime.executor import DaemonExecutor, awaited, shared_executor
from dataload.runtime.redact import redacted
from dataload.runtime.seekable import Seekable

BLOCK_BYTES = 8 << 20  # of a request, and of what has a checksum of its own
BLOCKS_AHEAD = 12  # of a file, that are fetched side by side and held


class DamagedFile(ConfigError):
    """A file of a checkpoint is not what its manifest says."""


class StorePath:
    """A path in an object store.

    Args:
        url: Its URL.
        origin: Its store; None: that of the URL, with the credentials of the environment.

    Raises:
        ConfigError: As `open_source` does.
    """

    def __init__(self, url: str, origin: Origin | None = None) -> None:
        self._url = url.rstrip("/")
        self.origin = origin or Origin(open_source(self._url, None))
        self._path = self.origin.path_of(self._url)

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self._url}/{name}", self.origin)

    def __str__(self) -> str:
        return redacted(self._url)

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The folder."""
        return StorePath(self._url.rpartition("/")[0], self.origin)

    def with_name(self, name: str) -> StorePath:
        """Return the path of another name in the same folder."""
        return self.parent / name

    def size(self) -> int:
        """Return the size of the object. Raises OriginError."""
        return int(self.origin.info(self._path)["size"])

    def files(self) -> dict[str, int]:
        """Return the sizes of all objects below this folder, by path in it. Raises OriginError."""
        listed = self.origin.list(self._path, is_glob=False)
        inside = f"{self._path}/"
        return {name.removeprefix(inside): info["size"] for name, info in listed.items() if name.startswith(inside)}

    def is_file(self) -> bool:
        """Return whether there is an object. Raises OriginError."""
        try:
            return bool(self.origin.info(self._path)["type"] == "file")
        except OriginNotFound:
            return False

    def read_bytes(self) -> bytes:
        """Return the content of a small object. Raises OriginError."""
        return self.origin.content(self._path)

    def create(self, data: bytes) -> bool:
        """Write a small object unless there is one. Return whether it has these bytes now. Raises OriginError."""
        return self.origin.create(self._path, data)

    def upload(self) -> Upload:
        """Return a stream that writes the object. Raises OriginError."""
        return self.origin.upload(self._path)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in this folder, as far as they are there. Raises OriginError."""
        self.origin.remove([f"{self._path}/{name}" for name in names])

    def reader(self, checksums: Sequence[str] = (), spans: Iterable[tuple[int, int]] | None = None) -> BlockReader:
        """Open the object to read it. The arguments are those of `BlockReader`. Raises OriginError."""
        return BlockReader(self.origin, self._path, checksums, spans)


class BlockReader(Seekable):
    """Reads an object by blocks, each of which is fetched once, and verified, if spans are read one after the other.

    Within a span, torch.load reads the end first. So the blocks of a short span are held until the next one is read; of
    a long one, those from the latest block on, and the end. `BLOCKS_AHEAD` are held or under way, and two of the end.

    Args:
        origin: The store.
        path: The path of the object.
        checksums: Those of the blocks; none: they are not verified.
        spans: Spans of bytes that will be read; None: the whole object.

    Raises:
        OriginError: The object cannot be read.
        DamagedFile: A block has another checksum.
    """

    def __init__(
        self, origin: Origin, path: str, checksums: Sequence[str], spans: Iterable[tuple[int, int]] | None = None
    ) -> None:
        info = origin.info(path)
        super().__init__(int(info["size"]))
        self._origin, self._path, self._checksums = origin, path, checksums
        self._version = version_of(info)
        self._requests: DaemonExecutor = shared_executor(BLOCKS_AHEAD, "dataload-checkpoint")
        self._blocks: dict[int, Future[memoryview]] = {}  # held or under way
        given = [(0, self._size)] if spans is None else sorted(spans)
        # The first and the last block of each span.
        self._spans = [(start // BLOCK_BYTES, max(start, stop - 1) // BLOCK_BYTES) for start, stop in given]
        self._starts = [start for start, _ in given]
        self._wanted = {number for first, last in self._spans for number in range(first, last + 1)}
        self._base = 0

    def readinto(self, buffer: Any) -> int:
        target, done = memoryview(buffer).cast("B"), 0
        while done < len(target) and self._position < self._size:
            number, start = divmod(self._position, BLOCK_BYTES)
            part = self._block(number)[start : start + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)
            self._position += len(part)
        return done

    def _block(self, number: int) -> memoryview:
        """Return a block. Fetch what is needed next, and forget what is not."""
        first, last = self._spans[max(0, bisect_right(self._starts, self._position) - 1)]
        if last - first < BLOCKS_AHEAD // 2:
            self._base = first
        elif number < last - 1:
            self._base = number
        end = (last - 1, last) if first <= self._base <= last else ()
        needed = dict.fromkeys([number, *range(self._base, self._base + BLOCKS_AHEAD), *end])
        for each in self._blocks.keys() - needed.keys():
            self._blocks.pop(each).cancel()
        for each in needed:
            if each not in self._blocks and (each == number or each in self._wanted):
                self._blocks[each] = self._requests.submit(self._fetch, each)
        return awaited(self._blocks[number])

    def _fetch(self, number: int) -> memoryview:
        start = number * BLOCK_BYTES
        found = self._origin.read(self._path, start, min(start + BLOCK_BYTES, self._size), self._version)
        if self._checksums and xxhash.xxh3_64_hexdigest(found) != self._checksums[number]:
            raise DamagedFile(f"{self._path.rpartition('/')[2]} does not match its checksum")
        return found
