"""Looking a cache over: is every blob what was sealed, and is every byte on the disk accounted for; and emptying it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dataload.cache import blob
from dataload.cache.folder import CacheFolder
from dataload.cache.index import Row
from dataload.errors import ConfigError, CorruptEntry


@dataclass
class Report:
    """What `verify` found. bytes: on disk, footers included; problems: one line each, naming the blob."""

    blobs: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


def open_existing(path: Path) -> CacheFolder:
    """The cache at `path`. Raises ConfigError when there is none: looking at a cache must not make one."""
    if not (path / "FORMAT").exists():
        raise ConfigError(f"no cache at {path}: name its folder with cache_dir")
    return CacheFolder(path)


def verify(folder: CacheFolder, *, repair: bool = False, progress: Callable[[int], object] = lambda _: None) -> Report:
    """Read every blob and check it against its key and checksum, and the index against the files.

    repair: remove what is wrong; it will be fetched again. Blobs being filled just now are passed over.
    progress: called with the bytes of each blob.
    """
    report = Report()
    known = {row.digest: row for row in folder.index.rows()}
    for row in known.values():
        problem = _problem(folder, row)
        if problem is None:
            report.blobs += 1
            report.bytes += row.size
        elif _removed(folder, row.digest, really=repair):
            report.problems.append(f"{row.name}: {problem}")
        progress(row.size)
    for file in (folder.path / "blobs").glob("*/*"):
        digest = bytes.fromhex(file.name)
        if digest not in known and folder.index.size_of(digest) is None and _removed(folder, digest, really=repair):
            report.problems.append(f"{file}: not in the index")
    return report


def evict(folder: CacheFolder, *, path: str | None = None, keep_bytes: int = 0) -> int:
    """Remove blobs: those of one object or of all below a folder, or those used longest ago; how many bytes went.

    path: as the origin names it, such as "bucket/folder"; None: all.
    keep_bytes: of these, how many may stay; 0: none.
    """
    before = folder.index.used_bytes()
    if path is None:
        folder.index.evict(keep_bytes, folder.unlink)
    else:
        below = (f"{path.rstrip('/')}/", f"{path}#")
        for row in folder.index.rows():
            if row.name.startswith(below):
                _removed(folder, row.digest, really=True)
    return before - folder.index.used_bytes()


def _problem(folder: CacheFolder, row: Row) -> str | None:
    try:
        payload = blob.open_map(folder.path_of(row.digest), row.digest, set())
    except FileNotFoundError:
        return "in the index, but its file is gone"
    except (OSError, CorruptEntry) as error:
        return str(error)
    size = len(payload) + blob.FOOTER_BYTES
    return None if size == row.size else f"takes {size} bytes, the index says {row.size}"


def _removed(folder: CacheFolder, digest: bytes, *, really: bool) -> bool:
    """Whether nobody is filling the blob just now; then it is removed, if `really`."""
    with folder.locks.hold(digest, timeout=0) as alone:
        if alone and really:
            folder.discard(digest)
        return alone
