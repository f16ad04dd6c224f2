"""The manifest of a checkpoint: the size and the checksum of every other file. It is written last."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

MANIFEST = "manifest.json"
PIECE = 4 << 20  # bytes that are read at a time


class Entry(NamedTuple):
    """A file of a checkpoint."""

    size: int
    xxh3: str


def entries(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Return the entries of files. Reads each of them. Raises OSError."""
    return {name: _entry(folder / name) for name in names}


class HashedStream:
    """A stream to which a file is written from its beginning to its end.

    Args:
        stream: Gets the bytes.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._size, self._digest = 0, xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        count: int = self._stream.write(data)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def entry(self) -> Entry:
        """The entry of what was written."""
        return Entry(self._size, self._digest.hexdigest())


def _entry(file: Path) -> Entry:
    size, digest, piece = 0, xxhash.xxh3_64(), memoryview(bytearray(PIECE))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(piece):
            digest.update(piece[:count])
            size += count
    return Entry(size, digest.hexdigest())


def write_json(file: Path, content: Any) -> None:
    """Write `content` and sync it. Raises OSError."""
    with file.open("w", encoding="utf-8") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())


def write(folder: Path, files: dict[str, Entry]) -> None:
    """Write the manifest, which makes a checkpoint of a folder. Raises OSError."""
    write_json(folder / MANIFEST, {name: entry._asdict() for name, entry in sorted(files.items())})


def read(folder: Path) -> dict[str, Entry]:
    """Return the entries of the files in `folder`.

    Raises:
        OSError: The manifest cannot be read.
        ValueError: It is damaged.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        files = {name: Entry(int(each["size"]), str(each["xxh3"])) for name, each in content.items()}
    # OverflowError: an infinite number
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is no manifest ({error!r})") from error
    if strange := [name for name in files if name in ("", ".", "..") or "/" in name or "\0" in name]:
        raise ValueError(f"{MANIFEST} names files elsewhere: {strange}")
    return files


def damage(folder: Path, needed: Iterable[str], part: int, parts: int) -> str | None:
    """Return what is wrong with the files of one part of a checkpoint, of about the size of the others; else None.

    Args:
        folder: The checkpoint.
        needed: The files that each manifest names.
        part: Number of this part.
        parts: Number of parts.

    Raises:
        OSError: A file cannot be read, which says nothing about it.
    """
    try:
        files = read(folder)
        if lacking := [name for name in needed if name not in files]:
            return f"{MANIFEST} lacks {lacking[0]}"
        by_size = sorted(files, key=lambda name: (-files[name].size, name))
        for name in by_size[part::parts]:
            size, expected = (folder / name).stat().st_size, files[name].size
            if size != expected:
                return f"{name} has {size} bytes instead of {expected}"
            if _entry(folder / name) != files[name]:
                return f"{name} does not match its checksum"
    except ValueError as error:
        return str(error)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            error.add_note(f"while {folder} was read")
            raise
        return f"{Path(error.filename).name} is missing"
    return None
