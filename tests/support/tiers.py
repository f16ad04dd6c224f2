"""What the tests of the local tier share: blobs that show whether they are whole, and processes that can be killed."""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from dataload.cache.local import failpoints, fsck
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey

SIZES = (20_000, 1, 4096, 30_001, 0, 66_000)
ROOM = 300  # more than a footer takes, for every size in SIZES
LIMIT = 100_000
PATIENCE = 60  # seconds that nothing here comes near, unless something hangs
FORKSERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["pytest", "dataload.cache.local.tier", "dataload.cache.local.fsck"]


def key(name: str) -> BlobKey:
    return BlobKey("origin", f"bucket/{name}", "version", "all")


class Filler:
    """Fills with `data`, and counts how often it was asked to."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.calls = 0

    def __call__(self, allocate: Allocate) -> None:
        self.calls += 1
        allocate(len(self.data))[:] = self.data


@functools.cache
def data_of(name: str) -> bytes:
    """The bytes of a blob: `SIZES` by the number behind the name, "huge" over any limit here."""
    number = name.rpartition("/")[2]
    size = SIZES[int(number) % len(SIZES)] if number.isdecimal() else 2 * LIMIT
    return hashlib.shake_128(name.encode()).digest(size)


def name_of(row_name: str) -> str:
    """What `key` was told, from the name in the index."""
    return row_name.removeprefix("bucket/").removesuffix("#all")


def fill_of(name: str) -> Callable[[Allocate], None]:
    def fill(allocate: Allocate) -> None:
        data = data_of(name)
        allocate(len(data))[:] = data

    return fill


def put(tier: LocalTier, name: str) -> None:
    """Ask for a blob, and see that every byte of it is right."""
    assert tier.get_or_fill(key(name), fill_of(name)) == data_of(name), f"{name}: wrong bytes"


def look(tier: LocalTier, name: str) -> bool:
    """Whether a blob is kept; if so, every byte of it is right."""
    found = tier.get(key(name))
    assert found is None or found == data_of(name), f"{name}: wrong bytes"
    return found is not None


class OriginError(Exception):
    """A fill failed half-way."""


def put_half(tier: LocalTier, name: str) -> None:
    """Ask for a blob whose fill fails when half of it is written."""

    def fill(allocate: Allocate) -> None:
        half = data_of(name)[: len(data_of(name)) // 2]
        allocate(len(data_of(name)))[: len(half)] = half
        raise OriginError

    try:
        assert tier.get_or_fill(key(name), fill) == data_of(name), f"{name}: wrong bytes"
    except OriginError:
        return


def files_of(path: Path) -> dict[bytes, Path]:
    """The blobs' files by digest."""
    return {bytes.fromhex(file.name): file for file in (path / "blobs").glob("*/*")}


def bytes_in(files: Any) -> int:
    return sum(file.stat().st_size for file in files)


def assert_sound(path: Path, limit: int, policy: str = "lru", *, alone: bool = True) -> set[str]:
    """Opens a cache anew and asserts all that it promises; the names of the blobs it keeps.

    alone: no other process has it open; what it left would be a dead one's.
    """
    tier = LocalTier(path, limit, policy)
    folder = tier.folder
    assert fsck.verify(folder).problems == []
    rows = folder.index.rows()
    assert {row.digest: row.size for row in rows} == {
        digest: file.stat().st_size for digest, file in files_of(path).items()
    }
    assert sum(row.size for row in rows) == folder.index.used_bytes() <= limit
    assert list((path / "tmp").glob("*/*")) == []
    assert not alone or len(list((path / "tmp").iterdir())) == 1
    names = {name_of(row.name) for row in rows}
    assert all(look(tier, name) for name in names)
    return names


@contextmanager
def fork_server(*preloaded: str) -> Iterator[None]:
    """Processes of `FORKSERVER` start warm inside, with these modules too; the server is gone afterwards."""
    FORKSERVER.set_forkserver_preload([*PRELOADED, *preloaded])
    try:
        yield
    finally:
        forkserver._forkserver._stop()


def start(target: Callable[..., object], *arguments: object) -> Any:
    process = FORKSERVER.Process(target=target, args=arguments)
    process.start()
    return process


def end(process: Any) -> int:
    """Wait until a process ends; its exit code, negative for a signal."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("a process hangs")
    code = process.exitcode
    process.close()
    return code


def run(target: Callable[..., object], *arguments: object) -> int:
    """Run something in a process of its own; its exit code, negative for a signal."""
    return end(start(target, *arguments))


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(number: int, name: str | None = None) -> None:
    """Kill this process when it comes for the `number`-th time to the step `name`, or to any step."""
    arrivals = itertools.count(1)

    def watcher(step: str) -> None:
        if name in (None, step) and next(arrivals) == number:
            kill_myself()

    failpoints.watch(watcher)
