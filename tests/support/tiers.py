"""Helpers for tests of the local tier: blobs with verifiable content, and processes that can be killed."""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from dataload.cache import blob_file
from dataload.cache.local import failpoints, fsck
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, Kind

SIZES = (20_000, 1, 4096, 30_001, 0, 66_000)
ROOM = 6000  # bytes; larger than a footer and the rest of a disk's block, for every size in SIZES
LIMIT = 100_000
PATIENCE = 200  # seconds; only a hang takes that long
FORKSERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["pytest", "dataload.cache.local.tier", "dataload.cache.local.fsck"]


def key(name: str) -> BlobKey:
    return BlobKey("origin", f"bucket/{name}", "version", Kind.FOOTER)


class Filler:
    """A fill that writes `data` and counts its calls."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.calls = 0

    def __call__(self, allocate: Allocate) -> None:
        self.calls += 1
        allocate(len(self.data))[:] = self.data


@functools.cache
def data_of(name: str) -> bytes:
    """Return the bytes of a blob. The number in the name selects from SIZES; "huge" exceeds every limit."""
    number = name.rpartition("/")[2]
    size = SIZES[int(number) % len(SIZES)] if number.isdecimal() else 2 * LIMIT
    return hashlib.shake_128(name.encode()).digest(size)


def name_of(row_name: str) -> str:
    """Return the argument of `key` for a name in the index."""
    return row_name.removeprefix("bucket/").removesuffix("#footer")


def fill_of(name: str) -> Callable[[Allocate], None]:
    def fill(allocate: Allocate) -> None:
        data = data_of(name)
        allocate(len(data))[:] = data

    return fill


def put(tier: LocalTier, name: str) -> None:
    """Read a blob and check every byte."""
    assert tier.get_or_fill(key(name), fill_of(name)) == data_of(name), f"{name}: wrong bytes"


def look(tier: LocalTier, name: str) -> bool:
    """Return whether a blob is cached. Check every byte of a cached blob."""
    found = tier.get(key(name))
    assert found is None or found == data_of(name), f"{name}: wrong bytes"
    return found is not None


class OriginError(Exception):
    """A failure in the middle of a fill."""


def put_half(tier: LocalTier, name: str) -> None:
    """Read a blob whose fill fails after half of the bytes."""

    def fill(allocate: Allocate) -> None:
        half = data_of(name)[: len(data_of(name)) // 2]
        allocate(len(data_of(name)))[: len(half)] = half
        raise OriginError

    try:
        assert tier.get_or_fill(key(name), fill) == data_of(name), f"{name}: wrong bytes"
    except OriginError:
        return


def files_of(path: Path) -> dict[bytes, Path]:
    """Return the files of the blobs by digest."""
    return {bytes.fromhex(file.name): file for file in (path / "blobs").glob("*/*")}


def drafts_in(path: Path) -> list[Path]:
    """Return the files of unfinished fills and evictions, which begin with the digest of their blob."""
    return list((path / "tmp").glob(f"*/{'[0-9a-f]' * 64}*"))


def bytes_in(files: Any) -> int:
    return sum(blob_file.allocated(file.stat().st_size) for file in files)


def assert_sound(path: Path, limit: int, policy: str = "lru", *, alone: bool = True) -> set[str]:
    """Open a cache again, check its invariants, and return the names of its blobs.

    Args:
        path: Folder of the cache.
        limit: Limit of the cache in bytes.
        policy: Eviction policy.
        alone: Whether no other process has the cache open, so that temporary folders of others are stale.
    """
    tier = LocalTier(path, limit, policy)
    folder = tier.folder
    assert fsck.verify(folder).problems == []
    rows = folder.index.rows()
    assert {row.digest: row.size for row in rows} == {
        digest: blob_file.allocated(file.stat().st_size) for digest, file in files_of(path).items()
    }
    assert sum(row.size for row in rows) == folder.index.used_bytes() <= limit
    assert drafts_in(path) == []
    assert not alone or len(list((path / "tmp").iterdir())) == 1
    names = {name_of(row.name) for row in rows}
    assert all(look(tier, name) for name in names)
    return names


@contextmanager
def fork_server(*preloaded: str) -> Iterator[None]:
    """Preload modules in the `FORKSERVER` for the duration of the block, and stop the server afterwards.

    Its processes then import nothing. The server finds modules of tests by PYTHONPATH only.
    """
    FORKSERVER.set_forkserver_preload([*PRELOADED, *preloaded])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            forkserver.ensure_running()
        yield
    finally:
        forkserver._forkserver._stop()


def start(target: Callable[..., object], *arguments: object) -> Any:
    process = FORKSERVER.Process(target=target, args=arguments)
    process.start()
    return process


def end(process: Any) -> int:
    """Wait for a process. Return its exit code, negative for a signal."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("a process hangs")
    code = process.exitcode
    process.close()
    return code


def run(target: Callable[..., object], *arguments: object) -> int:
    """Run a function in its own process. Return the exit code, negative for a signal."""
    return end(start(target, *arguments))


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(number: int, name: str | None = None) -> None:
    """Kill this process at the `number`-th arrival at the failpoint `name`, or at any failpoint."""
    arrivals = itertools.count(1)

    def watcher(step: str) -> None:
        if name in (None, step) and next(arrivals) == number:
            kill_myself()

    failpoints.watch(watcher)
