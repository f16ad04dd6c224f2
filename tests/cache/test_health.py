"""A failing disk: no exceptions, correct bytes, and recovery once it works again."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import mmap
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest
from clusters import until
from maps import no_more_maps
from nightly import NIGHTLY
from tiers import LIMIT, PATIENCE, data_of, fill_of, key, put

from dataload.cache import blob_file
from dataload.cache.health import FIRST_PAUSE, LONGEST_PAUSE, READ_FAILURES, CircuitBreaker, Health
from dataload.cache.local import fsck
from dataload.cache.local.index import Index
from dataload.cache.local.key_locks import KeyLocks
from dataload.cache.local.lmdb_file import SMALL_MAP_BYTES
from dataload.cache.local.setup import default_limit, preflight, recovery
from dataload.cache.local.tier import LocalTier
from dataload.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_tries_again_after_pauses_that_grow() -> None:
    clock, changes = Clock(), []
    breaker = CircuitBreaker(2, clock, lambda: changes.append(breaker.tripped))
    breaker.failed()
    breaker.worked()
    breaker.failed()
    assert breaker.allows()
    assert changes == []
    breaker.failed()
    pause = FIRST_PAUSE
    for _ in range(10):
        breaker.failed()  # what was under way does not lengthen the pause
        clock.now += pause * 0.75
        assert not breaker.allows()
        clock.now += pause * 0.25
        assert breaker.allows()
        assert not breaker.allows(), "two at a time"
        breaker.failed()
        pause = min(2 * pause, LONGEST_PAUSE)
    clock.now += LONGEST_PAUSE
    assert breaker.allows()
    breaker.worked()
    assert breaker.allows()
    assert changes == [True, False]
    breaker.failed(for_good=True)
    assert not breaker.allows()
    clock.now += FIRST_PAUSE
    assert breaker.allows()


def test_each_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    health = Health("/c", Clock())
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            health.writes.failed()
        for _ in range(10):
            health.reads.failed()
        assert health.state == "off"
        health.writes.worked()
        health.writes.failed()
        health.reads.worked()
        health.writes.worked()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert health.stats() == {"state": "normal", "normal": 1, "degraded": 2, "off": 1}


def test_each_change_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """Each kind of error is logged once, which may be days before."""
    health = Health("/c", Clock())
    for code in (errno.ENOSPC, errno.EIO, errno.ENOSPC):
        caplog.clear()
        health.report("writing a blob", OSError(code, os.strerror(code)))
        health.writes.failed()
        assert "cannot be written to" in caplog.messages[-1]
        assert os.strerror(code) in caplog.messages[-1]
        health.writes.worked()


# One call after the other fails

CALLS = (
    *((os, name) for name in ("open", "posix_fallocate", "pwrite", "write", "fsync", "rename", "replace", "unlink")),
    *((os, name) for name in ("mkdir", "stat", "fstat", "listdir", "chmod")),
    *((fcntl, "fcntl"), (fcntl, "flock"), (mmap, "mmap"), (Index, "_ready")),
)
ERRNOS = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EDQUOT)


@contextmanager
def failing(fails: Callable[[int], bool], code: int) -> Iterator[list[str]]:
    """Make calls of the operating system and LMDB fail if `fails(number)`. Yield the names of all calls."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, counted(getattr(owner, name), name, made, fails, code))
        yield made


def counted(real: Callable[..., Any], name: str, made: list[str], fails: Callable[[int], bool], code: int) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        anonymous = name == "mmap" and arguments[0] == -1
        about_us = not isinstance(arguments[0], (str, Path)) or "cache" in str(arguments[0])
        if about_us and not anonymous:
            made.append(name)
            if fails(len(made) - 1):
                raise lmdb.DiskError(os.strerror(code)) if name == "_ready" else OSError(code, os.strerror(code))
        return real(*arguments, **options)

    return call


def use(tier: LocalTier) -> None:
    """Run a first fill, hits, a miss and an eviction."""
    for name in ("x/0", "x/3", "x/0", "z/5"):
        put(tier, name)
    for name in ("x/0", "y/3"):
        assert tier.get(key(name)) in (None, data_of(name))


def calls_of_a_use(path: Path) -> int:
    with failing(lambda _: False, 0) as made:
        use(LocalTier(path, LIMIT, "lru"))
    return len(made)


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True])
def test_every_call_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lasting: bool) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of them take their time
    monkeypatch.setattr(Index, "sync", Index.used_bytes)
    total = calls_of_a_use(tmp_path / "cache")
    assert total > 100
    for number, code in zip(range(0, total, 3 if lasting else 1), itertools.cycle(ERRNOS), strict=False):
        path = tmp_path / f"cache-{number}"
        clock = Clock()
        tier = LocalTier(path, LIMIT, "lru", clock)
        with failing(lambda at, n=number: at == n or (lasting and at > n), code):
            use(tier)
        for _ in range(3):
            clock.now += 2 * LONGEST_PAUSE
            use(tier)
        assert tier.stats()["health"]["state"] == "normal", f"call {number}"
        put(tier, "z/5")
        assert tier.get(key("z/5")) is not None, f"call {number}"
        fsck.verify(tier.folder, repair=True)
        assert fsck.verify(tier.folder).problems == [], f"call {number}"
        assert tier.folder.index.used_bytes() <= LIMIT


def test_a_call_that_never_works_again(tmp_path: Path) -> None:
    for owner, name in CALLS:
        path = tmp_path / f"cache-{name}"
        put(LocalTier(path, LIMIT, "lru"), "x/0")
        clock = Clock()
        tier = LocalTier(path, LIMIT, "lru", clock)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, counted(getattr(owner, name), name, [], lambda _: True, errno.EIO))
            for _ in range(3):
                use(tier)
                clock.now += 2 * LONGEST_PAUSE
        clock.now += 2 * LONGEST_PAUSE
        use(tier)
        clock.now += 2 * LONGEST_PAUSE
        use(tier)
        assert tier.stats()["health"]["state"] == "normal", name


# The meaning of the states


def test_degraded_serves_what_it_has_and_leaves_the_disk_alone(tmp_path: Path) -> None:
    clock = Clock()
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", clock)
    put(tier, "x/0")
    with pytest.MonkeyPatch.context() as patch:
        calls: list[str] = []
        real = counted(os.posix_fallocate, "posix_fallocate", calls, lambda _: True, errno.EIO)
        patch.setattr(os, "posix_fallocate", real)
        for _ in range(5):
            put(tier, "x/3")
        assert len(calls) == 1
        assert tier.stats()["health"]["state"] == "degraded"
        assert tier.get(key("x/0")) == data_of("x/0")
        assert tier.get(key("x/3")) is None
        assert tier.stats()["unkept"] == 4
        clock.now += FIRST_PAUSE
        put(tier, "x/3")
        put(tier, "x/3")
        assert len(calls) == 2
    clock.now += 2 * FIRST_PAUSE
    put(tier, "x/3")
    assert tier.stats()["health"]["state"] == "normal"
    assert tier.get(key("x/3")) == data_of("x/3")


def test_what_reports_no_result_leaves_the_attempt_of_a_pause_to_a_fill(tmp_path: Path) -> None:
    clock = Clock()
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", clock)
    put(tier, "x/0")
    tier.health.writes.failed()
    clock.now += FIRST_PAUSE
    with tier.key_lock(key("row group")), tier.bulk.lock_together([key("x/3")]) as locked:
        assert locked == [None]
        tier.discard([key("x/0")], [])
        put(tier, "x/3")
    assert tier.stats()["health"]["state"] == "normal"
    assert tier.get(key("x/3")) == data_of("x/3")


def test_the_limit_of_memory_maps_is_no_failing_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", Clock())
    put(tier, "x/0")
    with no_more_maps():
        found = [tier.get(key("x/0")) for _ in range(4 * READ_FAILURES)]  # Another thread may free a few maps.
        put(tier, "x/1")
    assert found[-READ_FAILURES:] == [None] * READ_FAILURES
    assert tier.stats()["health"]["state"] == "normal"
    [told] = [record.getMessage() for record in caplog.records if "error while reading" in record.getMessage()]
    assert "raise vm.max_map_count" in told
    assert tier.get(key("x/0")) == data_of("x/0")


def test_the_limit_of_open_files_is_no_failing_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", Clock())
    put(tier, "x/0")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(2)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        found = [tier.get(key("x/0")) for _ in range(4 * READ_FAILURES)]  # Another thread may close a few files.
        put(tier, "x/1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found[-READ_FAILURES:] == [None] * READ_FAILURES
    assert tier.stats()["health"]["state"] == "normal"
    [told] = [record.getMessage() for record in caplog.records if "error while reading" in record.getMessage()]
    assert "Too many open files" in told
    assert tier.get(key("x/0")) == data_of("x/0")


@pytest.mark.parametrize("is_small", [False, True])
def test_a_process_without_maps_removes_no_blob(tmp_path: Path, *, is_small: bool) -> None:
    """The other processes of the host can still read it."""
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", Clock())
    put(tier, "x/0")
    file = tier.folder.path_of(key("x/0").digest)
    before = file.stat()
    with no_more_maps():
        free = [tier.get(key("x/0")) for _ in range(4 * READ_FAILURES)]  # Another thread may free a few maps.
        assert free[-1] is None
        for _ in range(3):
            if is_small:
                [found] = tier.bulk.put_together([(key("x/0"), memoryview(data_of("x/0")))])
            else:
                found = tier.get_or_fill(key("x/0"), fill_of("x/0"))
            assert found == data_of("x/0")
    assert file.stat().st_ino == before.st_ino
    assert LocalTier(tmp_path / "cache", LIMIT, "lru").get(key("x/0")) == data_of("x/0")
    assert fsck.verify(tier.folder).problems == []


def test_a_process_without_maps_repairs_nothing(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", Clock())
    for name in ("x/0", "x/3"):
        put(tier, name)
    with no_more_maps(), pytest.raises(OSError, match=r"raise vm\.max_map_count"):
        found = [tier.get(key("x/0")) for _ in range(4 * READ_FAILURES)]  # Another thread may free a few maps.
        assert found[-1] is None
        fsck.verify(tier.folder, repair=True)
    report = fsck.verify(tier.folder)
    assert (report.blobs, report.problems) == (2, [])


def test_a_trial_that_meets_a_maker_at_work_reports_no_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After errors, a process tries to write without waiting."""
    clock = Clock()
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", clock)
    with tier.folder.locks.hold(key("x/0").digest, 0):
        tier.health.writes.failed(for_good=True)
        clock.now += FIRST_PAUSE
        put(tier, "x/0")
    assert "held its lock" not in caplog.text
    assert not tier._busy


def test_a_lock_that_an_eviction_holds_up_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that evicts was stopped. A fetch without caching must not make others wait."""
    monkeypatch.setattr("dataload.cache.local.key_locks.EVICTION_SECONDS", 0.01)
    monkeypatch.setattr("dataload.cache.local.key_locks.SILENCE_SECONDS", 0.01)
    tier, digest = LocalTier(tmp_path / "cache", LIMIT, "lru"), key("x/0").digest
    with KeyLocks(str(tier.folder.path / "locks")).hold_to_evict(digest) as evicts, ExitStack() as stack:
        assert evicts
        assert tier.acquire(key("x/0"), stack) is None
        assert tier.folder.locks.is_running(digest)  # True if no process holds the lock.


def test_a_cache_on_a_read_only_disk_is_an_error_at_once(tmp_path: Path) -> None:
    with failing(lambda _: True, errno.EROFS), pytest.raises(ConfigError, match=r"Read-only file system.*cache=False"):
        LocalTier(tmp_path / "cache", LIMIT).get(key("x/0"))


def test_off_passes_the_tier_over(tmp_path: Path) -> None:
    clock = Clock()
    tier = LocalTier(tmp_path / "cache", 10 * LIMIT, "lru", clock)
    names = [f"x/{number}" for number in range(6)]
    for name in names:
        put(tier, name)
    with failing(lambda _: True, errno.EIO) as calls:
        for name in names[:READ_FAILURES]:
            assert tier.get(key(name)) is None
        assert tier.stats()["health"]["state"] == "off"
        calls.clear()
        for name in names:
            put(tier, name)
        assert calls == []
    assert tier.get(key("x/0")) is None
    clock.now += FIRST_PAUSE
    assert tier.get(key("x/0")) == data_of("x/0")
    assert tier.stats()["health"]["state"] == "normal"


def test_a_cache_that_cannot_be_opened_is_off_at_once(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "cache", LIMIT)
    with failing(lambda _: True, errno.EIO):
        assert tier.get(key("x/0")) is None
    assert tier.stats()["health"]["state"] == "off"


def test_a_miss_ends_being_off_too(tmp_path: Path) -> None:
    clock = Clock()
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", clock)
    with failing(lambda _: True, errno.ENOSPC):
        put(tier, "x/0")
    assert tier.stats()["health"]["state"] == "off"
    clock.now += FIRST_PAUSE
    put(tier, "x/0")
    assert tier.stats()["health"]["state"] == "normal"
    assert tier.get(key("x/0")) == data_of("x/0")


def test_a_missing_blob_does_not_show_that_a_failing_disk_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", clock)
    put(tier, "x/0")
    file, real, attempts = tier.folder.path_of(key("x/0").digest), blob_file.open_map, list[float]()

    def open_map(path: str, *given: Any) -> Any:
        if path != str(file):
            return real(path, *given)
        attempts.append(clock.now)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(blob_file, "open_map", open_map)
    while clock.now < LONGEST_PAUSE:
        assert tier.get(key("y/3")) is None
        assert tier.get(key("x/0")) is None
        clock.now += FIRST_PAUSE / 4
    pauses = [after - before for before, after in itertools.pairwise(attempts[READ_FAILURES - 1 :])]
    assert pauses == [FIRST_PAUSE * 2**number for number in range(5)]
    assert tier.stats()["health"] == {"state": "off", "normal": 0, "degraded": 0, "off": 1}

    monkeypatch.undo()
    file.unlink()  # The new disk is empty: a blob must be written before one can be read.
    clock.now += LONGEST_PAUSE
    put(tier, "y/3")
    assert tier.get(key("y/3")) == data_of("y/3")
    assert tier.stats()["health"]["state"] == "normal"


def test_one_bad_blob_is_no_bad_disk(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru")
    put(tier, "x/0")
    file = tier.folder.path_of(key("x/0").digest)
    for _ in range(10):
        file.write_bytes(b"damaged")
        put(tier, "x/0")
    file.write_bytes(b"damaged")
    for _ in range(10):
        assert tier.get(key("x/0")) is None
    assert tier.stats()["health"]["state"] == "normal"
    assert tier.stats()["errors"] >= 20


def test_a_use_that_cannot_be_written_down_is_still_a_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru")
    put(tier, "x/0")
    monkeypatch.setattr("dataload.cache.local.recent_uses.FLUSH_SECONDS", 0)
    tier.folder.uses.flush()

    def touch(*_: object) -> None:
        raise lmdb.MapFullError("full")

    monkeypatch.setattr(Index, "touch", touch)
    for _ in range(3):
        assert tier.get(key("x/0")) == data_of("x/0")
    assert tier.stats()["health"]["state"] == "degraded"
    assert tier.stats()["errors"] == 1


def test_a_disk_that_does_not_say_how_full_it_is(tmp_path: Path) -> None:
    clock = Clock()
    tier = LocalTier(tmp_path / "cache", None, "lru", clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", counted(shutil.disk_usage, "", [], lambda _: True, errno.EIO))
        for _ in range(3):
            put(tier, "x/0")
            clock.now += 2 * LONGEST_PAUSE
        assert tier.stats()["health"]["state"] == "off"
    put(tier, "x/0")
    assert tier.get(key("x/0")) == data_of("x/0")
    assert tier.stats()["health"]["state"] == "normal"


def test_a_folder_that_others_are_long_in_opening_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    tier = LocalTier(tmp_path / "cache", LIMIT, "lru", clock)
    tier.path.mkdir()
    (tier.path / "locks").touch()
    monkeypatch.setattr("dataload.cache.local.directory.SETUP_SECONDS", 0)
    with KeyLocks(str(tier.path / "locks")).hold(b"\xff" * 32, timeout=0):
        put(tier, "x/0")
        assert tier.stats()["health"]["state"] == "off"
        assert not (tier.path / "index").exists()
    clock.now += 2 * LONGEST_PAUSE
    put(tier, "x/0")
    assert tier.get(key("x/0")) == data_of("x/0")


def test_a_folder_that_others_are_long_in_opening_delays_no_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = LocalTier(tmp_path / "slow", LIMIT), LocalTier(tmp_path / "other", LIMIT)
    begun, go_on, check = threading.Event(), threading.Event(), preflight.check

    def blocks(path: Path, **options: Any) -> None:
        if path == slow.path:
            begun.set()
            go_on.wait(PATIENCE)
        check(path, **options)

    monkeypatch.setattr(preflight, "check", blocks)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(slow.opened)
        try:
            assert begun.wait(PATIENCE)
            put(other, "x/0")
            assert not opening.done()
        finally:
            go_on.set()
        assert opening.result(PATIENCE) is not None
    assert other.get(key("x/0")) == data_of("x/0")


def test_threads_wait_together_for_a_folder_that_others_are_long_in_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt fails for all of them. Until the next one, nothing waits."""
    tier = LocalTier(tmp_path / "cache", clock=Clock())
    tier.path.mkdir()
    (tier.path / "locks").touch()
    monkeypatch.setattr("dataload.cache.local.directory.SETUP_SECONDS", 0.5)
    with KeyLocks(str(tier.path / "locks")).hold(b"\xff" * 32, timeout=0):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: tier.division().region, range(8))) == [0] * 8
        assert tier.stats()["errors"] == 1
        monkeypatch.setattr("dataload.cache.local.directory.SETUP_SECONDS", 3600)
        assert tier.division().region == 0
        assert tier.limit == sys.maxsize
        assert tier.stored_bytes(key("x/0")) == 0
        put(tier, "x/0")


def test_one_thread_tries_again_to_open_a_folder_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    tier = LocalTier(tmp_path / "cache", LIMIT, clock=clock)
    tier.path.mkdir()
    (tier.path / "locks").touch()
    monkeypatch.setattr("dataload.cache.local.directory.SETUP_SECONDS", 0)
    with ThreadPoolExecutor(1) as pool:
        with KeyLocks(str(tier.path / "locks")).hold(b"\xff" * 32, timeout=0):
            assert tier.get(key("x/0")) is None
            clock.now += FIRST_PAUSE
            monkeypatch.setattr("dataload.cache.local.directory.SETUP_SECONDS", 60)
            tries = pool.submit(tier.stored_bytes, key("x/0"))
            until(tier._opening.locked)
            assert tier.division().region == 0
            assert not tries.done()
        assert tries.result(200) == 0
    assert tier._folder is not None


def test_a_tier_is_open_to_other_threads_when_its_limit_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, fix, open_by_then = LocalTier(tmp_path / "cache"), default_limit.fix, []
    monkeypatch.setattr(default_limit, "fix", lambda *told: (open_by_then.append(tier._folder), fix(*told))[1])
    put(tier, "x/0")
    assert open_by_then == [None]


def test_where_address_space_is_short_the_index_takes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lmdb.open

    def short(path: str, *, map_size: int, **options: Any) -> Any:
        if map_size > SMALL_MAP_BYTES:
            raise lmdb.MemoryError("Cannot allocate memory")
        return real(path, map_size=map_size, **options)

    monkeypatch.setattr(lmdb, "open", short)
    tier = LocalTier(tmp_path / "cache", LIMIT)
    put(tier, "x/0")
    assert tier.get(key("x/0")) == data_of("x/0")


# A real disk


def fill_up(disk: Path) -> Path:
    other = disk / "other"
    with other.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(1 << 12))
    return other


def allow_no_more_files(disk: Path) -> None:
    entries = 1 + sum(1 for _ in disk.rglob("*"))
    subprocess.run(["mount", "-o", f"remount,nr_inodes={entries}", disk], check=True)
    with pytest.raises(OSError, match="No space"):
        (disk / "other").touch()


def test_a_disk_that_is_full_at_first_and_freed_later(small_disk: Path) -> None:
    clock = Clock()
    other = fill_up(small_disk)
    tier = LocalTier(small_disk / "c", 1 << 19, "lru", clock)
    for name in ("x/0", "x/3", "x/0"):
        put(tier, name)
        clock.now += 2 * LONGEST_PAUSE
    assert tier.limit == 1 << 19
    assert tier.stats()["health"]["state"] == "off"
    other.unlink()
    put(tier, "x/0")
    assert tier.get(key("x/0")) == data_of("x/0")
    assert tier.stats()["health"]["state"] == "normal"


def test_a_disk_with_next_to_no_room_kills_nobody(small_disk: Path) -> None:
    """Writing to mapped memory on a full disk raises SIGBUS; the test observes it in a child."""
    for pages in range(1, 40, 1 if NIGHTLY else 5):
        other = fill_up(small_disk)
        os.truncate(other, other.stat().st_size - pages * mmap.PAGESIZE)
        child = os.fork()
        if child == 0:
            try:
                use(LocalTier(small_disk / "c", LIMIT, "lru"))
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, f"{pages} pages free"
        other.unlink()
        shutil.rmtree(small_disk / "c")


@pytest.mark.parametrize("bulk", [False, True])
def test_a_cache_on_a_full_disk_evicts_what_its_policy_allows(small_disk: Path, *, bulk: bool) -> None:
    tier = LocalTier(small_disk / "c", 1 << 30, "lru")
    for name in ("x/3", "y/3", "z/3"):
        put(tier, name)
    fill_up(small_disk)
    if bulk:
        tier.bulk.put_together([(key("w/3"), memoryview(data_of("w/3")))])
    else:
        put(tier, "w/3")
    assert [name for name in ("w/3", "x/3", "y/3", "z/3") if tier.get(key(name))] == ["w/3", "y/3", "z/3"]
    assert tier.stats()["health"]["state"] == "normal"
    assert "errors" not in tier.stats()
    assert fsck.verify(tier.folder).problems == []


@pytest.mark.parametrize(
    ("error", "free"),
    [
        (lmdb.DiskError("mdb_txn_commit: No space left on device"), 0),
        (lmdb.Error("mdb_txn_commit: Input/output error"), 0),
        (lmdb.Error(f"mdb_txn_commit: {os.strerror(errno.EDQUOT)}"), 1 << 40),
    ],
    ids=["no space", "short write", "quota"],
)
@pytest.mark.parametrize("bulk", [False, True])
def test_an_index_that_has_no_space_for_a_row_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: lmdb.Error, free: int, *, bulk: bool
) -> None:
    tier = LocalTier(tmp_path / "c", 1 << 30, "lru")
    for name in ("x/3", "y/3"):
        put(tier, name)
    assert tier.get(key("y/3"))  # whose use has no space either
    failures, put_row = iter([True] * (3 if bulk else 2)), Index._put_row

    def fails_at_first(*given: Any) -> None:
        if next(failures, False):
            raise error
        put_row(*given)

    monkeypatch.setattr(Index, "_put_row", fails_at_first)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    if bulk:
        tier.bulk.put_together([(key("w/3"), memoryview(data_of("w/3")))])
    else:
        put(tier, "w/3")
    assert [name for name in ("w/3", "x/3", "y/3") if tier.get(key(name))] == ["w/3", "y/3"]
    assert tier.stats()["health"]["state"] == "normal"
    assert "errors" not in tier.stats()
    assert fsck.verify(tier.folder).problems == []


@pytest.mark.parametrize("bulk", [False, True])
def test_a_disk_that_has_no_space_for_more_files(small_disk: Path, *, bulk: bool) -> None:
    tier = LocalTier(small_disk / "c", 1 << 19, "lru")
    for number in range(6):
        put(tier, f"x/{number}")
    allow_no_more_files(small_disk)
    if bulk:
        tier.bulk.put_together([(key("w/3"), memoryview(data_of("w/3")))])
    else:
        put(tier, "w/3")
    assert tier.get(key("w/3")) == data_of("w/3")
    assert tier.stats()["health"]["state"] == "normal"
    assert "errors" not in tier.stats()
    assert fsck.verify(tier.folder).problems == []


@pytest.mark.parametrize("bulk", [False, True])
def test_a_full_cache_is_healthy_again_once_its_disk_works(small_disk: Path, *, bulk: bool) -> None:
    """What its policy keeps out shows that the disk works, too."""
    clock = Clock()
    tier = LocalTier(small_disk / "c", 50_000, "pin", clock)
    put(tier, "x/3")
    allow_no_more_files(small_disk)
    put(tier, "y/3")
    assert tier.stats()["health"]["state"] == "degraded"
    subprocess.run(["mount", "-o", "remount,nr_inodes=1000", small_disk], check=True)
    clock.now += LONGEST_PAUSE
    if bulk:
        tier.bulk.put_together([(key("y/3"), memoryview(data_of("y/3")))])
    else:
        put(tier, "y/3")
    assert tier.get(key("y/3")) is None
    assert tier.stats()["health"]["state"] == "normal"


@pytest.mark.parametrize("full", ["bytes", "files"])
def test_a_warm_cache_on_a_full_disk_is_opened(small_disk: Path, full: str) -> None:
    path = small_disk / "c"
    tier = LocalTier(path, 1 << 30, "lru")
    for name in ("x/3", "y/3", "z/3"):
        put(tier, name)
    tier.folder.close()
    if full == "bytes":
        fill_up(small_disk)
    else:
        allow_no_more_files(small_disk)
    tier = LocalTier(path, 1 << 30, "lru")
    assert len([name for name in ("x/3", "y/3", "z/3") if tier.get(key(name))]) == 2
    assert tier.stats()["health"]["state"] == "normal"
    assert fsck.verify(tier.folder).problems == []
    assert (path / "index" / "state").read_text() == recovery.boot_id()


def test_a_lost_index_on_a_full_disk_is_made_anew(small_disk: Path) -> None:
    path = small_disk / "c"
    tier = LocalTier(path, 1 << 30, "lru")
    for name in ("x/5", "y/5", "z/5"):
        put(tier, name)
    tier.folder.close()
    shutil.rmtree(path / "index")
    fill_up(small_disk)
    tier = LocalTier(path, 1 << 30, "lru")
    assert len([name for name in ("x/5", "y/5", "z/5") if tier.get(key(name))]) == 2
    assert tier.stats()["health"]["state"] == "normal"
    assert fsck.verify(tier.folder).problems == []


def test_a_disk_that_fills_up_and_is_freed(small_disk: Path) -> None:
    clock = Clock()
    tier = LocalTier(small_disk / "c", 1 << 19, "pin", clock)
    put(tier, "x/0")
    other = fill_up(small_disk)
    for number in range(20):
        put(tier, f"y/{number}")
        assert tier.get(key("x/0")) == data_of("x/0")
        clock.now += 2 * LONGEST_PAUSE
    assert tier.stats()["health"]["state"] == "degraded"
    other.unlink()
    put(tier, "z/3")
    assert tier.get(key("z/3")) == data_of("z/3")
    assert tier.stats()["health"]["state"] == "normal"
    assert fsck.verify(tier.folder).problems == []
