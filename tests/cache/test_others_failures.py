"""Failures of fsspec's own caches that `tiercache` does not have. Each test first shows the failure in fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from attempts import fail_at_once
from fsspec.implementations.cached import SimpleCacheFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dataload.cache.filesystem import TierCacheFileSystem
from dataload.errors import OriginError

BLOCK = 1000
DATA = bytes(range(1, 251)) * 20  # no zeros
PATH = "/broken/x.bin"


@pytest.fixture
def memory() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    memory.pipe_file(PATH, DATA)
    yield memory
    memory.rm("/broken", recursive=True)


def ours(memory: Any, folder: Path, **options: Any) -> TierCacheFileSystem:
    return TierCacheFileSystem(
        fs=memory, cache_dir=str(folder / "ours"), block_bytes=BLOCK, skip_instance_cache=True, **options
    )


def simple(memory: Any, folder: Path) -> SimpleCacheFileSystem:
    return SimpleCacheFileSystem(fs=memory, cache_storage=str(folder / "simple"), skip_instance_cache=True)


def read(fs: Any, path: str) -> bytes:
    with fs.open(path) as file:
        return bytes(file.read())


# A file that another process is still writing, or whose writer was killed


def half_written(fs: SimpleCacheFileSystem) -> None:
    local = Path(fs.storage[-1]) / fs._mapper(PATH)
    local.parent.mkdir(parents=True, exist_ok=True)
    local.write_bytes(DATA[:100])


def test_simplecache_serves_half_a_file(memory: Any, tmp_path: Path) -> None:
    fs = simple(memory, tmp_path)
    half_written(fs)
    assert read(fs, PATH) == DATA[:100]


def test_half_a_file_is_not_served(memory: Any, tmp_path: Path) -> None:
    assert ours(memory, tmp_path).cat_file(PATH) == DATA
    files = [file for file in (tmp_path / "ours").rglob("*") if file.is_file() and "index" not in file.parts]
    blobs = [file for file in files if file.stat().st_size > BLOCK]
    assert len(blobs) == len(DATA) // BLOCK
    for blob in blobs:
        blob.write_bytes(blob.read_bytes()[:100])
    assert ours(memory, tmp_path).cat_file(PATH) == DATA


# An object that has changed since


def test_simplecache_is_stale_for_ever(memory: Any, tmp_path: Path) -> None:
    assert read(simple(memory, tmp_path), PATH) == DATA
    memory.pipe_file(PATH, DATA[::-1])
    assert read(simple(memory, tmp_path), PATH) == DATA


def test_a_new_generation_reads_what_is_there_now(memory: Any, tmp_path: Path) -> None:
    assert ours(memory, tmp_path).cat_file(PATH) == DATA
    memory.pipe_file(PATH, DATA[::-1])
    assert ours(memory, tmp_path).cat_file(PATH) == DATA[::-1]


# A limit


def test_simplecache_has_no_limit(memory: Any, tmp_path: Path) -> None:
    fs = simple(memory, tmp_path)
    for number in range(40):
        memory.pipe_file(f"/broken/{number}", bytes(50_000))
        read(fs, f"/broken/{number}")
    assert bytes_in(tmp_path / "simple") >= 40 * 50_000


def test_the_limit_holds(memory: Any, tmp_path: Path) -> None:
    fs = ours(memory, tmp_path, cache_bytes=1_000_000)
    for number in range(40):
        memory.pipe_file(f"/broken/{number}", bytes(50_000))
        assert fs.cat_file(f"/broken/{number}") == bytes(50_000)
    assert fs.stats()["refused"] > 0
    assert bytes_in(tmp_path / "ours") <= 1_000_000


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and "index" not in file.parts)


# Failed fetches


class _BrokenOnce:
    """The first read of the second block fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed = False
        read = MemoryFileSystem.cat_file

        def broken(fs: Any, path: str, start: Any = None, end: Any = None, **rest: Any) -> bytes:
            if start == BLOCK and not self.failed:
                self.failed = True
                raise OSError("the line is cut")
            return read(fs, path, start=start, end=end, **rest)

        monkeypatch.setattr(MemoryFileSystem, "cat_file", broken)


def test_nothing_is_kept_of_a_failed_fetch(memory: Any, tmp_path: Path, monkeypatch: Any) -> None:
    fail_at_once(monkeypatch)
    broken = _BrokenOnce(monkeypatch)
    fs = ours(memory, tmp_path)
    with pytest.raises(OriginError, match="bytes 1000-1999"):
        fs.cat_file(PATH)
    assert broken.failed
    assert fs.cat_file(PATH) == DATA
    assert ours(memory, tmp_path).cat_file(PATH) == DATA


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # It leaves its file open, too.
def test_blockcache_keeps_zeros_of_a_failed_fetch(tmp_path: Path) -> None:
    """The cache file of fsspec is sparse, and fsspec marks blocks as cached before they are written."""
    from fsspec.caching import MMapCache

    fails = True

    def fetch(start: int, end: int) -> bytes:
        if fails:
            raise OSError("the line is cut")
        return DATA[start:end]

    blocks: set[int] = set()
    cache = MMapCache(BLOCK, fetch, len(DATA), str(tmp_path / "sparse"), blocks)
    with pytest.raises(OSError, match="cut"):
        cache._fetch(0, 100)
    fails = False
    assert cache._fetch(0, 100) == bytes(100)
