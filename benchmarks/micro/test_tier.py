"""The local tier beside plain files: reads, hits, fills and the index.

All files are in the page cache, and no write is synced. Every read sums the bytes; every fill comes from memory.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataload.cache.local.index import Row
from dataload.cache.local.registry import open_folder
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import BlobKey, Kind

BLOB, SPAN = 4 << 20, 64 << 10  # bytes
BLOBS = 32
LIMIT = 1 << 50
STOPPED = """
import os, signal, sys
from dataload.cache.local.tier import LocalTier

tier = LocalTier(sys.argv[1], 1 << 50)
with tier.folder.index._transaction(write=True):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def key(name: object) -> BlobKey:
    return BlobKey("benchmark", str(name), "1", Kind.BLOCK)


def touch(read: Any) -> Any:
    return np.frombuffer(read, np.uint64).sum()


@dataclass
class Files:
    """The same bytes as blobs of a tier, and as plain files."""

    folder: Path
    tier: LocalTier
    data: Any

    def from_tier(self, number: int, start: int, size: int) -> Any:
        return self.tier.get(key(number), (start, start + size))

    def from_file(self, number: int, start: int, size: int) -> Any:
        descriptor = os.open(self.folder / f"{number}", os.O_RDONLY)
        try:
            return os.pread(descriptor, size, start)
        finally:
            os.close(descriptor)

    def fill_tier(self, name: str) -> None:
        def fill(allocate: Any) -> None:
            allocate(BLOB)[:] = self.data

        self.tier.get_or_fill(key(name), fill)

    def write_file(self, name: str) -> None:
        with (self.folder / name).open("wb", buffering=0) as file:
            file.write(self.data.copy())  # Bytes of an origin pass through memory, too.

    def remove(self, name: str) -> None:
        self.tier.discard([key(name)], [])
        (self.folder / name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tier")
    files = Files(folder, LocalTier(folder / "tier", LIMIT), np.random.default_rng(0).integers(0, 256, BLOB, np.uint8))
    for number in range(BLOBS):
        files.fill_tier(f"{number}")
        files.write_file(f"{number}")
    return files


@pytest.mark.parametrize("source", ["from_tier", "from_file"])
@pytest.mark.parametrize("size", [BLOB, SPAN])
def test_read(benchmark: Any, plain: Files, source: str, size: int, per_second: Any) -> None:
    benchmark.group = f"read of {size >> 10} KiB"
    rng = np.random.default_rng(1)
    numbers, starts = rng.integers(BLOBS, size=2000), rng.integers(BLOB // size, size=2000) * size
    spans = itertools.cycle(zip(numbers.tolist(), starts.tolist(), strict=True))
    read = getattr(plain, source)
    benchmark(lambda: touch(read(*next(spans), size)))
    per_second("MB", size / 1e6)


@pytest.mark.benchmark(group="hit")
@pytest.mark.parametrize("beside", ["nothing", "a stopped process"])
def test_hit(benchmark: Any, plain: Files, beside: str) -> None:
    numbers = itertools.cycle(range(BLOBS))
    if beside == "nothing":
        benchmark(lambda: plain.from_tier(next(numbers), 0, SPAN))
        return
    with subprocess.Popen([sys.executable, "-c", STOPPED, str(plain.tier.path)]) as process:  # in an index transaction
        try:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            benchmark(lambda: plain.from_tier(next(numbers), 0, SPAN))
        finally:
            process.kill()


@pytest.mark.benchmark(group="fill of 4 MiB")
@pytest.mark.parametrize("how", ["fill_tier", "write_file"])
def test_fill(benchmark: Any, plain: Files, how: str, per_second: Any) -> None:
    fill = getattr(plain, how)
    benchmark.pedantic(fill, ("new",), setup=lambda: plain.remove("new"), rounds=8 * BLOBS, warmup_rounds=BLOBS)
    plain.remove("new")
    per_second("MB", BLOB / 1e6)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, int]:
    """A cache with a million rows in its index, and no files."""
    folder = tmp_path_factory.mktemp("index")
    count = 1000 if request.config.getoption("size") == "tiny" else 1_000_000
    opened = open_folder(folder)
    digests = sorted(key(number).digest for number in range(count))
    names = {digest: f"bucket/folder/{digest.hex()}#block 0-4194304" for digest in digests}
    opened.index.enter(Row(digest, Kind.BLOCK, name, 1) for digest, name in names.items())
    opened.close()
    return folder, count


@pytest.mark.benchmark(group="look-up in the index")
def test_look_up(benchmark: Any, index: tuple[Path, int]) -> None:
    folder, count = index
    opened = open_folder(folder)
    chosen = itertools.cycle([key(number).digest for number in np.random.default_rng(2).integers(count, size=20_000)])
    benchmark(lambda: opened.index.size_of(next(chosen)))
    opened.close()


@pytest.mark.benchmark(group="opening a cache")
@pytest.mark.parametrize("state", ["closed", "without an index"])
def test_opening(benchmark: Any, index: tuple[Path, int], tmp_path: Path, state: str, per_second: Any) -> None:
    """The blobs of a cache without an index are entered again."""
    folder, count = index
    if state == "without an index":
        folder, count = tmp_path, count // 50
        small = LocalTier(folder, LIMIT)
        for number in range(count):
            small.get_or_fill(key(number), lambda allocate: allocate(5).__setitem__(slice(None), b"small"))
        small.folder.close()

    def closed() -> tuple[tuple[LocalTier], dict[str, Any]]:
        if folder == tmp_path:
            shutil.rmtree(folder / "index")
        return (LocalTier(folder, LIMIT),), {}

    benchmark.pedantic(lambda tier: tier.folder, setup=closed, teardown=lambda tier: tier.folder.close(), rounds=7)
    per_second("blobs", count)
