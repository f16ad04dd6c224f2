"""A stopped process (SIGSTOP, a frozen cgroup) blocks other processes only briefly, at any point of its work."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from clusters import until
from tiers import FORKSERVER, LIMIT, PATIENCE, assert_sound, end, fork_server, key, look, put, start

from dataload.cache.local import failpoints, fsck, index, key_locks
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Waited

NAMES = ("x/0", "x/2", "x/3")


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    with fork_server(__name__):
        yield


@contextmanager
def stopped(act: Callable[[LocalTier], object], path: Path) -> Iterator[None]:
    """Run `act`, which stops its own process, in a child until the block ends."""
    child = os.fork()
    if child == 0:
        try:
            act(LocalTier(path, LIMIT, "lru"))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    try:
        yield
    finally:
        os.kill(child, signal.SIGCONT)
        assert os.waitpid(child, 0)[1] == 0


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_a_transaction(tier: LocalTier) -> None:
    with tier.folder.index._transaction(write=True):
        stop_myself()


def stop_at(step: str, act: Callable[[LocalTier], object]) -> Callable[[LocalTier], None]:
    def until_there(tier: LocalTier) -> None:
        arrivals = itertools.count()
        failpoints.watch(lambda name: stop_myself() if name == step and next(arrivals) == 0 else None)
        act(tier)

    return until_there


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    tier = LocalTier(tmp_path / "c", LIMIT, "lru")
    for name in NAMES:
        put(tier, name)
    return tier


def test_hits_do_not_wait_for_a_process_stopped_in_the_index(tier: LocalTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(_: float) -> None:
        raise AssertionError("a hit waited for another process")

    with stopped(stop_in_a_transaction, tier.path):
        monkeypatch.setattr(index.time, "sleep", waits)
        for _ in range(1000):
            tier.folder.uses._flush_at = 0.0  # Every hit would record uses.
            assert all(look(tier, name) for name in NAMES)
        monkeypatch.undo()
    assert "errors" not in tier.stats()
    tier.folder.uses.flush()


def test_a_fill_gives_up_on_a_process_stopped_in_the_index(tier: LocalTier, caplog: pytest.LogCaptureFixture) -> None:
    """It reads without caching, and later fills do not wait. Once the other process resumes, fills are cached."""
    now = [time.monotonic()]
    tier.health.writes._clock = lambda: now[0]
    with stopped(stop_in_a_transaction, tier.path):
        put(tier, "y/0")
        assert tier.health.state == "degraded"
        assert "(stopped)" in caplog.text
        waited = tier.stats()["errors"]
        for name in ("y/1", "y/2", "y/3"):
            put(tier, name)
        assert tier.stats()["errors"] == waited, "each later fill waited"
        assert all(look(tier, name) for name in NAMES)
        assert not look(tier, "y/0")
    now[0] += 100
    put(tier, "y/0")
    assert tier.health.state == "normal"
    assert look(tier, "y/0")
    assert fsck.verify(tier.folder).problems == []


@pytest.mark.slow
def test_sizes_of_blobs_wait_once_for_a_process_stopped_in_the_index(tier: LocalTier) -> None:
    """A plan adds up the sizes of thousands of blobs. Reads go on: they do not need the index."""
    with stopped(stop_in_a_transaction, tier.path):
        assert [tier.stored_bytes(key(name)) for name in NAMES] == [0] * len(NAMES)
        assert tier.stats()["errors"] == 1
        assert tier.health.state == "degraded"
        assert all(look(tier, name) for name in NAMES)


@pytest.mark.slow
def test_a_process_that_comes_later_reads_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "c"
    child = os.fork()
    if child == 0:
        mine = LocalTier(path, LIMIT, "lru")
        for name in NAMES:
            put(mine, name)
        stop_in_a_transaction(mine)
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    late = LocalTier(path, LIMIT, "lru")
    assert all(look(late, name) for name in NAMES)
    os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("step", ["evict: unlinked", "evict: dropped"])
def test_a_process_stopped_in_an_eviction_holds_nobody_up(
    tier: LocalTier, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Files are removed outside transactions, so other processes keep filling, evicting and reading."""
    monkeypatch.setattr(key_locks, "EVICTION_SECONDS", 0.01)
    evicting = stop_at(step, lambda other: fsck.evict(other.folder, keep_bytes=LIMIT // 4))
    with stopped(evicting, tier.path):
        for name in ("y/0", "y/1", "y/2", "z/0"):
            put(tier, name)
            assert look(tier, name)
        assert tier.health.state == "normal"
        assert "errors" not in tier.stats()
        put(tier, "x/0")  # The eviction holds its lock, so the blob is read without caching after a short wait.
        assert not look(tier, "x/0")
        assert tier.health.state == "normal", "the disk works"
        monkeypatch.setattr(key_locks, "EVICTION_SECONDS", 3600)
        put(tier, "x/0")  # The next attempt does not wait.
    put(tier, "x/0")
    assert look(tier, "x/0")
    path = tier.path
    del tier
    assert assert_sound(path, LIMIT)


def test_a_fill_that_was_waited_for_in_vain_is_not_waited_for_again(
    tier: LocalTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataload.cache.local.tier.FILL_SECONDS", 0.01)
    stop = stop_at("fill: drafted", lambda other: put(other, "y/0"))
    with stopped(stop, tier.path):
        put(tier, "y/0")
        monkeypatch.setattr("dataload.cache.local.tier.FILL_SECONDS", 3600)
        for _ in range(3):
            put(tier, "y/0")
        assert tier.stats()["unkept"] == 4
        put(tier, "y/1")
        assert look(tier, "y/1"), "the disk works"
        assert tier.health.state == "normal"
    put(tier, "y/0")
    assert look(tier, "y/0")


def hold(path: Path, name: str, pipe: Any) -> None:
    """Hold the lock of a key until the parent sends something."""
    with LocalTier(path, LIMIT).key_lock(key(name)) as other:
        pipe.send(other is None)
        pipe.recv()


@contextmanager
def held(path: Path, name: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """Hold the lock of a key in another process. Yield its process number, and a function that ends it."""
    ours, theirs = FORKSERVER.Pipe()
    process = start(hold, path, name, theirs)
    assert ours.recv()
    try:
        yield process.pid, lambda: ours.send(None)
    finally:
        with suppress(OSError):  # It has ended.
            os.kill(process.pid, signal.SIGCONT)
            ours.send(None)
        assert end(process) == 0


def test_a_slow_maker_is_waited_for(
    tier: LocalTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its row group is not made twice, and the locks of all others work meanwhile."""
    monkeypatch.setattr("dataload.cache.local.tier.FILL_SECONDS", 0.01)
    checked, is_running = [], key_locks.KeyLocks.is_running
    monkeypatch.setattr(
        key_locks.KeyLocks, "is_running", lambda *given: (checked.append(is_running(*given)), checked[-1])[1]
    )
    with held(tier.path, "slow") as (_, release), held(tier.path, "another"), ThreadPoolExecutor(1) as pool:
        with tier.key_lock(key("slow")) as wait:
            pass
        waited = pool.submit(wait)
        until(lambda: len(checked) >= 3 or waited.done())
        assert not waited.done()
        assert tier.health.state == "normal"
        with tier.key_lock(key("another")) as busy:
            assert busy is not None
        put(tier, "y/1")
        assert look(tier, "y/1")
        release()
        assert waited.result(PATIENCE) is Waited.FOR_PROCESS
    assert [record.args[1] for record in caplog.records] == [key("slow").name], "said once"


def test_a_process_that_makes_many_row_groups_together_shows_that_it_runs(
    tier: LocalTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_locks, "SILENCE_SECONDS", PATIENCE)
    keys = [key("a"), key("b")]
    with tier.bulk.lock_together(keys) as held:
        assert None not in held
        assert all(tier.folder.locks.is_running(one.digest) for one in keys)


def test_a_stopped_maker_is_waited_for_in_vain(
    tier: LocalTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dataload.cache.local.tier.FILL_SECONDS", 0.01)
    monkeypatch.setattr(key_locks, "SILENCE_SECONDS", 1)
    with held(tier.path, "slow") as (process, _):
        os.kill(process, signal.SIGSTOP)
        until(lambda: ") T " in Path(f"/proc/{process}/stat").read_text())
        with tier.key_lock(key("slow")) as wait:
            assert wait is not None
        assert wait() is Waited.IN_VAIN
        assert f"open in process {process} of {socket.gethostname()} (stopped)" in caplog.text
        assert tier.health.state == "normal"
        put(tier, "y/1")
        assert look(tier, "y/1")


def test_a_process_that_comes_later_waits_for_the_index_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of processes that died in a fill, and of their rows to check, does not matter."""
    path = tmp_path / "c"
    timeouts: list[int] = []
    real = index.Index._transaction

    @contextmanager
    def transaction(self: index.Index, **options: Any) -> Iterator[Any]:
        try:
            with real(self, **{**options, "timeout": 0.01}) as txn:
                yield txn
        except TimeoutError:
            timeouts.append(1)
            raise

    child = os.fork()
    if child == 0:
        mine = LocalTier(path, LIMIT, "lru")
        put(mine, "y/0")
        for number in range(3):
            (path / "tmp" / f"0{number}-dead").mkdir()
            (path / "tmp" / f"0{number}-dead" / f"{key(f'x/{number}').digest.hex()}-0").touch()
        stop_in_a_transaction(mine)
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    monkeypatch.setattr(index.Index, "_transaction", transaction)
    late = LocalTier(path, LIMIT, "lru")
    assert look(late, "y/0")
    late_waits = sum(timeouts)
    os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0
    assert late_waits <= 3  # to open the cache


def test_no_transaction_handles_more_than_its_share(tier: LocalTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction and scan of a cache of many blobs use many short transactions."""
    monkeypatch.setattr(index, "BATCH_ROWS", 2)
    rows: list[int] = []
    real_row, real_transaction = index.Index._row, index.Index._transaction

    @contextmanager
    def transaction(self: index.Index, **options: Any) -> Iterator[Any]:
        rows.append(0)
        with real_transaction(self, **options) as txn:
            yield txn

    def row(self: index.Index, txn: object, digest: bytes) -> object:
        rows[-1] += 1
        return real_row(self, txn, digest)

    monkeypatch.setattr(index.Index, "_transaction", transaction)
    monkeypatch.setattr(index.Index, "_row", row)
    monkeypatch.setattr("dataload.cache.local.eviction.EVICTED_TOGETHER", 2)
    for number in range(6):
        put(tier, f"a/{6 * number + 1}")
    tier.touch(key(f"a/{6 * number + 1}") for number in range(6))
    assert len(tier.folder.index.rows()) == 9
    fsck.evict(tier.folder)
    assert tier.folder.index.rows() == []
    assert max(rows) <= 8  # the first batch of a scan
