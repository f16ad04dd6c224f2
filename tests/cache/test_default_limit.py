"""The default limit of a cache is fixed at its creation, for all processes."""

from __future__ import annotations

import gc
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.filesize import decimal
from tiers import FORKSERVER, PATIENCE, end, fork_server, put, run, start

from dataload.cache.config import CacheConfig
from dataload.cache.local.setup import default_limit
from dataload.cache.local.tier import LocalTier
from dataload.cli import app
from dataload.dataset import make_dataset
from dataload.doctor import cache_dir
from dataload.doctor.finding import Case

PROCESSES = 6


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    with fork_server(__name__):
        yield


def report_limit(path: Path, found: Path, barrier: Any, number: int, limit: int | None = None) -> None:
    """Write the limit that this process uses after a fill."""
    tier = LocalTier(path, limit)
    barrier.wait(PATIENCE)
    put(tier, f"x/{number}")
    (found / str(number)).write_text(str(tier.limit))
    barrier.wait(PATIENCE)


@pytest.mark.slow
def test_processes_that_make_a_cache_at_once_agree(small_disk: Path, tmp_path: Path) -> None:
    barrier, path = FORKSERVER.Barrier(PROCESSES), small_disk / "c"
    processes = [start(report_limit, path, tmp_path, barrier, number) for number in range(PROCESSES)]
    assert [end(process) for process in processes] == [0] * PROCESSES
    [limit] = {int((tmp_path / str(number)).read_text()) for number in range(PROCESSES)}
    assert limit == LocalTier(path).limit == default_limit.stored(path)
    assert 0 < limit <= (1 << 20) // 2


@pytest.mark.slow
def test_the_limit_does_not_follow_what_the_disk_has_free(small_disk: Path) -> None:
    path = small_disk / "c"
    assert run(fill, path, "x/0") == 0
    limit = default_limit.stored(path)
    assert limit is not None
    (small_disk / "checkpoint").write_bytes(bytes(300_000))
    for _ in range(3):
        assert run(fill, path, "x/3") == 0
        assert LocalTier(path).limit == limit
    (small_disk / "checkpoint").unlink()
    assert LocalTier(path).limit == limit
    assert pickle.loads(pickle.dumps(LocalTier(path))).limit == limit


def fill(path: Path, name: str) -> None:
    put(LocalTier(path), name)


def test_forked_workers_take_the_same_limit(small_disk: Path) -> None:
    tier = LocalTier(small_disk / "c")
    put(tier, "x/0")
    (small_disk / "checkpoint").write_bytes(bytes(300_000))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(tier.limit).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 100)) == tier.limit
    os.close(read)
    os.close(write)


def test_a_limit_that_the_user_gives_is_his_alone(small_disk: Path) -> None:
    path = small_disk / "c"
    given = LocalTier(path, 123_456)
    put(given, "x/0")
    assert given.limit == 123_456
    found = LocalTier(path).limit
    assert found == default_limit.stored(path) != 123_456


def test_half_of_what_is_free_and_of_what_the_cache_holds(small_disk: Path) -> None:
    """A cache without a LIMIT file: its own bytes count as available."""
    path = small_disk / "c"
    assert run(fill, path, "x/5") == 0
    made = default_limit.stored(path)
    assert made is not None
    for damage in (None, b"", b"much", b"0", b"-7"):
        (path / default_limit.FILE).unlink()
        if damage is not None:
            (path / default_limit.FILE).write_bytes(damage)
        tier = LocalTier(path)
        used = tier.folder.index.used_bytes()
        assert used > 60_000
        assert abs(tier.limit - default_limit.proposed(path, used)) < 4096 * 4
        assert default_limit.stored(path) == tier.limit
        assert tier.limit > made - 100_000, "the bytes of the cache count as available"
        tier.folder.close()
        del tier


def test_a_config_opens_nothing(tmp_path: Path) -> None:
    config = pickle.loads(pickle.dumps(CacheConfig(str(tmp_path / "c"))))
    assert config.limit is None
    assert not (tmp_path / "c").exists()


def test_all_commands_tell_the_same_limit(
    tmp_path: Path, table_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, url = tmp_path / "c", str(tmp_path / "x.parquet")
    pq.write_table(table_of(0, 1000), url)
    make_dataset(url, cache=CacheConfig(str(path)))
    (path / default_limit.FILE).write_text("123456789")

    def told(*words: str, key: str = "cache_bytes") -> int:
        capsys.readouterr()
        app.app([*words, "--cache-dir", str(path), "--json"], standalone_mode=False)
        return int(json.loads(capsys.readouterr().out)[key])

    stats = told("cache", "stats", key="default_cache_bytes")
    assert [stats, told("plan", url), told("warm", url)] == [123456789] * 3
    gc.collect()  # An index is opened once in a process, and the commands' datasets are in cycles.
    assert f"the cache may use {decimal(123456789)}" in cache_dir.capacity(Case(CacheConfig(path))).what
    assert cache_dir.capacity(Case(CacheConfig(tmp_path / "none"))).status == "ok"
    assert not (tmp_path / "none").exists(), "doctor created a cache"
