"""The manifest of a checkpoint: the size and the checksum of every other file. It is written last."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from dataload.cache.origin.store_path import BLOCK_BYTES, StorePath
from dataload.errors import OriginNotFound

MANIFEST = "manifest.json"
PIECE = 4 << 20  # bytes that are read at a time


class Entry(NamedTuple):
    """A file of a checkpoint."""

    size: int
    xxh3: str
    blocks: tuple[str, ...] = ()  # checksums of its blocks, if it is read by blocks


def entries(folder: Path | StorePath, names: Iterable[str]) -> dict[str, Entry]:
    """Return the entries of files. Reads each of them. Raises OSError."""
    return {name: _entry(folder / name) for name in names}


def entry_of(content: bytes) -> Entry:
    """Return the entry of a file that is to have this content."""
    return Entry(len(content), xxhash.xxh3_64(content).hexdigest())


class HashedStream:
    """A stream to which a file is written from its beginning to its end.

    Args:
        stream: Gets the bytes.
        block_bytes: Size of the blocks that have a checksum each; None: there are no blocks.
    """

    def __init__(self, stream: Any, block_bytes: int | None = None) -> None:
        self._stream = stream
        self._size, self._digest = 0, xxhash.xxh3_64()
        self._block_bytes, self._block, self._blocks = block_bytes, xxhash.xxh3_64(), list[str]()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        if self._block_bytes is not None:
            self._add_blocks(view, self._block_bytes)
        self._size += len(view)
        count: int = self._stream.write(data)
        return count

    def _add_blocks(self, view: memoryview, block_bytes: int) -> None:
        done = 0
        while done < len(view):
            part = view[done : done + block_bytes - (self._size + done) % block_bytes]
            self._block.update(part)
            done += len(part)
            if not (self._size + done) % block_bytes:
                self._blocks.append(self._block.hexdigest())
                self._block.reset()

    def tell(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def entry(self) -> Entry:
        """The entry of what was written."""
        cut = self._block_bytes is not None and self._size % self._block_bytes
        blocks = [*self._blocks, self._block.hexdigest()] if cut else self._blocks
        return Entry(self._size, self._digest.hexdigest(), tuple(blocks))


def _entry(file: Path | StorePath) -> Entry:
    size, digest, piece = 0, xxhash.xxh3_64(), memoryview(bytearray(PIECE))
    with file.open("rb", buffering=0) if isinstance(file, Path) else file.reader() as opened:
        while count := opened.readinto(piece):
            digest.update(piece[:count])
            size += count
    return Entry(size, digest.hexdigest())


def content_of(files: dict[str, Entry]) -> bytes:
    """Return the content of a manifest of these files."""
    listed = {
        name: {key: value for key, value in entry._asdict().items() if value != ()}
        for name, entry in sorted(files.items())
    }
    return json.dumps(listed).encode()


def read(folder: Path | StorePath) -> dict[str, Entry]:
    """Return the entries of the files in `folder`.

    Raises:
        OSError: The manifest cannot be read.
        ValueError: It is damaged.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        files = {
            name: Entry(int(each["size"]), str(each["xxh3"]), tuple(map(str, each.get("blocks", ()))))
            for name, each in content.items()
        }
    # OverflowError: an infinite number
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is no manifest ({error!r})") from error
    if strange := [name for name in files if name in ("", ".", "..") or "/" in name or "\0" in name]:
        raise ValueError(f"{MANIFEST} names files elsewhere: {strange}")
    return files


def damage(
    folder: Path | StorePath, needed: Iterable[str], part: int, parts: int, *, blocks: bool = True
) -> str | None:
    """Return what is wrong with the files of one part of a checkpoint, of about the size of the others; else None.

    Args:
        folder: The checkpoint.
        needed: The files that each manifest names.
        part: Number of this part.
        parts: Number of parts.
        blocks: Whether to read files whose blocks are verified when they are loaded.

    Raises:
        OSError: A file cannot be read, which says nothing about it.
    """
    try:
        files = read(folder)
        if lacking := [name for name in needed if name not in files]:
            return f"{MANIFEST} lacks {lacking[0]}"
        by_size = sorted(files, key=lambda name: (-files[name].size, name))
        problems = (_problem(folder / name, files[name], blocks=blocks) for name in by_size[part::parts])
        return next(filter(None, problems), None)
    except ValueError as error:
        return str(error)
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            error.add_note(f"while {folder} was read")
            raise
        return f"{Path(error.filename or MANIFEST).name} is missing"


def _problem(file: Path | StorePath, entry: Entry, *, blocks: bool) -> str | None:
    """Return what is wrong with a file. Raises OSError."""
    try:
        size = file.stat().st_size if isinstance(file, Path) else file.size()
    except OriginNotFound:
        return f"{file.name} is missing"
    if size != entry.size:
        return f"{file.name} has {size} bytes instead of {entry.size}"
    if entry.blocks and not blocks:
        right = len(entry.blocks) == -(-size // BLOCK_BYTES)
        return None if right else f"{MANIFEST} has {len(entry.blocks)} blocks of {file.name}, which has {size} bytes"
    return None if _entry(file)[:2] == entry[:2] else f"{file.name} does not match its checksum"
