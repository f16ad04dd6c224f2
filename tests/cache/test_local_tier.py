"""The local tier under kills, corruption, full disks and many processes."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
from tiers import drafts_in

from dataload.cache import blob_file
from dataload.cache.buffer_pool import BufferPool
from dataload.cache.division import Division
from dataload.cache.local import failpoints, fsck, staging, writer
from dataload.cache.local.directory import CacheFolder
from dataload.cache.local.index import Index, Row
from dataload.cache.local.key_locks import KeyLocks
from dataload.cache.local.registry import _open_folders, identity, open_folder
from dataload.cache.local.setup import default_limit, recovery
from dataload.cache.local.staging import StagingFolder, sweep
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, copy_into
from dataload.errors import ConfigError

SPAWN = multiprocessing.get_context("spawn")
SIZE = 100_000


def key(name: str) -> BlobKey:
    return BlobKey("origin", f"bucket/{name}", "version", "all")


def row_bytes(name: str) -> int:
    return blob_file.size_on_disk(SIZE, key(name).name)


ROW = row_bytes("a")


def data_of(name: str) -> bytes:
    return (name.encode() * SIZE)[:SIZE]


def put(tier: LocalTier, name: str) -> bytes:
    def fill(allocate: Allocate) -> None:
        allocate(SIZE)[:] = data_of(name)

    return bytes(tier.get_or_fill(key(name), fill))


def never(_: Allocate) -> None:
    raise AssertionError("filled again")


def files_of(tier: LocalTier) -> list[Path]:
    return [path for path in (tier.path / "blobs").glob("*/*") if path.is_file()]


def assert_sound(tier: LocalTier, names: set[str]) -> None:
    """Assert that exactly these blobs are cached and intact, and that every byte on disk is accounted for."""
    report = fsck.verify(tier.folder)
    assert report.problems == []
    assert {row.name for row in tier.folder.index.rows()} == {key(name).name for name in names}
    assert (
        tier.folder.index.used_bytes()
        == sum(blob_file.allocated(path.stat().st_size) for path in files_of(tier))
        == sum(map(row_bytes, names))
    )


def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    put(LocalTier(folder, 10**6), "x")
    assert LocalTier(folder, 10**6).get_or_fill(key("x"), never) == data_of("x")


def test_a_second_process_is_served_what_the_first_kept(tmp_path: Path) -> None:
    put(LocalTier(tmp_path / "c"), "a")
    with SPAWN.Pool(1) as pool:
        assert pool.apply(read_elsewhere, (str(tmp_path / "c"),)) == data_of("a")
        pool.close()
        pool.join()


def read_elsewhere(path: str) -> bytes:
    return bytes(LocalTier(path).get_or_fill(key("a"), never))


# Kills


def stop_in_fill(path: str, ready: Any) -> None:
    def fill(allocate: Allocate) -> None:
        allocate(SIZE)[: SIZE // 2] = data_of("a")[: SIZE // 2]
        ready.set()
        signal.pause()

    LocalTier(path).get_or_fill(key("a"), fill)


def stop_before_rename(path: str, ready: Any) -> None:
    failpoints.watch(lambda name: name == "fill: sealed" and (ready.set(), signal.pause()))
    put(LocalTier(path), "a")


@pytest.mark.parametrize("stopping", [stop_in_fill, stop_before_rename])
def test_a_killed_filler_leaves_nothing(tmp_path: Path, stopping: Any) -> None:
    path = tmp_path / "c"
    ready = SPAWN.Event()
    victim = SPAWN.Process(target=stopping, args=(str(path), ready))
    victim.start()
    assert ready.wait(200)
    assert len(list((path / "tmp").glob("*/*"))) == 1
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()

    tier = LocalTier(path)
    assert_sound(tier, set())
    assert list((path / "tmp").glob("*/*")) == []
    assert put(tier, "a") == data_of("a")
    assert_sound(tier, {"a"})


def test_a_living_filler_is_not_swept(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")

    def fill(allocate: Allocate) -> None:
        room = allocate(SIZE)
        with SPAWN.Pool(1) as pool:
            pool.apply(open_elsewhere, (str(tier.path),))
            pool.close()
            pool.join()
        room[:] = data_of("a")

    tier.get_or_fill(key("a"), fill)
    assert_sound(tier, {"a"})


def open_elsewhere(path: str) -> None:
    _ = LocalTier(path).folder


def test_a_waiter_takes_over_from_a_killed_filler(tmp_path: Path) -> None:
    path = tmp_path / "c"
    ready = SPAWN.Event()
    victim = SPAWN.Process(target=stop_in_fill, args=(str(path), ready))
    victim.start()
    assert ready.wait(200)
    tier = LocalTier(path)
    with tier.folder.locks.hold(key("a").digest, timeout=0) as alone:
        assert not alone
    os.kill(victim.pid, signal.SIGKILL)
    assert put(tier, "a") == data_of("a")
    victim.join()
    assert_sound(tier, {"a"})


def test_a_blob_whose_remover_died_before_removing_it_stays(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    dead = tier.path / "tmp" / "0-0"
    dead.mkdir()
    (dead / f"{key('a').digest.hex()}-0").touch()
    tier.folder.close()
    tier = LocalTier(tier.path)
    assert_sound(tier, {"a"})
    assert not dead.exists()


def test_the_row_of_a_blob_that_is_filled_while_the_dead_are_swept_stays(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")

    def fill(allocate: Allocate) -> None:
        room = allocate(SIZE)
        recovery._forget(
            tier.path, tier.folder.index, tier.folder.locks, {tier.path / "tmp" / "0-0": {key("a").digest}}
        )
        assert tier.folder.index.size_of(key("a").digest) == ROW
        room[:] = data_of("a")

    tier.get_or_fill(key("a"), fill)
    assert_sound(tier, {"a"})


def test_who_cannot_drop_the_row_of_a_removed_file_leaves_a_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill at this point, the next process that opens the cache drops the row."""
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")

    def fails(*_: object) -> None:
        raise lmdb.MapFullError("full")

    monkeypatch.setattr(tier.folder.index, "_drop", fails)
    with pytest.raises(lmdb.MapFullError):
        fsck.evict(tier.folder)
    assert [file.name[:64] for file in drafts_in(tier.path)] == [key("a").digest.hex()]


# Many processes


def fill_and_count(path: str, counter: str, start: Any, answers: Any) -> None:
    tier = LocalTier(path)

    def fill(allocate: Allocate) -> None:
        with Path(counter).open("a") as file:
            file.write("filled\n")
        allocate(SIZE)[:] = data_of("a")

    start.wait(200)
    answers.put(bytes(tier.get_or_fill(key("a"), fill)) == data_of("a"))


def test_many_processes_fill_once(tmp_path: Path) -> None:
    start, answers, counter = SPAWN.Event(), SPAWN.Queue(), tmp_path / "fills"
    arguments = (str(tmp_path / "c"), str(counter), start, answers)
    processes = [SPAWN.Process(target=fill_and_count, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    assert [answers.get(timeout=200) for _ in processes] == [True] * 4
    for process in processes:
        process.join()
    answers.close()
    answers.join_thread()
    assert counter.read_text() == "filled\n"


def test_a_forked_child_does_not_end_its_parents_lock(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    locks = tier.folder.locks
    with locks.hold(key("a").digest, timeout=0):
        child = os.fork()
        if child == 0:
            with locks.hold(key("a").digest, timeout=0) as alone:
                os._exit(int(alone))
        assert os.waitpid(child, 0)[1] == 0, "the child got a lock that its parent holds"
        with SPAWN.Pool(1) as pool:
            assert not pool.apply(can_lock, (str(tier.path),)), "the child's end dropped its parent's lock"
            pool.close()
            pool.join()


def test_a_forked_child_that_leaves_a_lock_does_nothing(tmp_path: Path) -> None:
    """The child's copy was closed at the fork, so another file may have the descriptor number by now."""
    locks, child = LocalTier(tmp_path / "c").folder.locks, 0
    try:
        with locks.hold(key("a").digest, timeout=0):
            child = os.fork()
            other = os.open(os.devnull, os.O_RDONLY)
        os.close(other)
        if child == 0:
            os._exit(0)
    finally:
        if child == 0:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_living_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    locks = tier.folder.locks
    read, write = os.pipe()
    with locks.hold(key("a").digest, timeout=0):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    with SPAWN.Pool(1) as pool:
        assert pool.apply(can_lock, (str(tier.path),))
        pool.close()
        pool.join()
    os.close(read)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0


def opened(name: str) -> int:
    """Return the number of open descriptors of files with `name` in their paths."""
    links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(name in link for link in links)


def take_a_lock(path: Path) -> None:
    with KeyLocks(str(path / "locks")).hold(bytes(32), timeout=0) as alone:
        assert alone


def take_a_scratch_folder(path: Path) -> None:
    StagingFolder(path, 0).close()


def test_a_process_that_looks_at_a_new_folder_does_not_stop_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, real = iter([True]), fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if next(looks, False):
            raise BlockingIOError(errno.EAGAIN, "it is looked at")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    StagingFolder(tmp_path, 0).close()


@pytest.mark.parametrize("take", [take_a_lock, take_a_scratch_folder])
def test_a_child_forked_while_a_lock_is_taken_has_no_copy_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Any
) -> None:
    """Another thread may fork at this moment."""
    real, ends = os.open, []
    (tmp_path / "locks").touch()

    def open_then_fork(*given: Any) -> int:
        descriptor, child = real(*given), os.fork()
        if child == 0:
            os._exit(opened(str(tmp_path)))
        ends.append(os.waitpid(child, 0)[1])
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_then_fork)
        take(tmp_path)
    assert ends == [0]


def test_a_fork_leaves_alone_what_has_the_number_of_a_closed_descriptor(tmp_path: Path) -> None:
    folder = LocalTier(tmp_path / "c").folder
    folder.close()
    others = [os.open(tmp_path / "other", os.O_RDONLY | os.O_CREAT) for _ in range(20)]
    child = os.fork()
    if child == 0:
        os._exit(opened("other"))
    for other in others:
        os.close(other)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(others)


def test_a_lock_ends_though_a_child_has_yet_to_close_its_copy(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    locks = KeyLocks(str(path))
    with locks.hold(bytes(32), timeout=0):
        (held,) = (int(entry.name) for entry in Path("/proc/self/fd").iterdir() if entry.resolve() == path)
        copy = os.dup(held)
    with locks.hold(bytes(32), timeout=0) as alone:
        assert alone
    os.close(copy)


def test_threads_of_one_process_do_not_poll_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = LocalTier(tmp_path / "c").folder.locks
    with locks.hold(bytes(32), timeout=0), monkeypatch.context() as patch:
        patch.setattr(os, "open", never)
        with locks.hold(bytes(32), timeout=0) as second:
            assert not second


def can_lock(path: str) -> bool:
    with LocalTier(path).folder.locks.hold(key("a").digest, timeout=0) as alone:
        return alone


def test_many_threads_fork_at_once(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")

    def fork_often() -> None:
        for _ in range(6):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            assert tier.get(key("a")) == data_of("a")

    threads = [threading.Thread(target=fork_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads)


def test_tiers_of_one_folder_share_what_is_open(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    tiers = [LocalTier(tmp_path / "c"), LocalTier(tmp_path / "link" / "c"), LocalTier(tmp_path / "c")]
    for tier in tiers:
        put(tier, "a")
    assert len({id(tier.folder) for tier in tiers}) == 1
    assert len(list((tmp_path / "c" / "tmp").iterdir())) == 1


def test_a_child_opens_a_folder_of_its_own(tmp_path: Path) -> None:
    """The parent has the folder open, and another thread of the parent is opening one during the fork."""
    folder = open_folder(tmp_path / "c")
    with _open_folders._opening.hold(identity(tmp_path / "c")):
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(20)
                os._exit(int(LocalTier(tmp_path / "c").folder is folder))
            finally:
                os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_index_does_not_cross_a_fork(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    child = os.fork()
    if child == 0:
        os._exit(opened(str(tmp_path / "c" / "index")))
    assert os.waitpid(child, 0)[1] == 0
    assert tier.get(key("a")) == data_of("a")


def test_past_the_deadline_a_waiter_fetches_without_keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LocalTier(tmp_path / "c")
    monkeypatch.setattr("dataload.cache.local.tier.FILL_SECONDS", 0.01)
    with CacheFolder(tier.path).locks.hold(key("a").digest, timeout=0):
        assert put(tier, "a") == data_of("a")
    assert_sound(tier, set())


def test_a_disk_error_while_blobs_are_discarded_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    put(tier, "made")

    def fails(_: Path) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", fails)
        tier.discard([key("a")], [key("made")])
    assert tier.stats()["errors"] == 1
    assert tier.get(key("a")) == data_of("a")


# Corruption


def damage(kind: str, path: Path, other: Path) -> None:
    whole = bytearray(path.read_bytes())
    if kind == "bit":
        whole[SIZE // 3] ^= 1
    elif kind == "footer":
        whole[-1] ^= 1
    elif kind == "length":
        whole[-blob_file.FOOTER_BYTES + 48 : -blob_file.FOOTER_BYTES + 56] = b"\xff" * 8
    elif kind == "short":
        whole = whole[: SIZE // 2]
    elif kind == "empty":
        whole = bytearray()
    elif kind == "zeros":
        whole = bytearray(len(whole))
    elif kind == "swapped":
        whole = bytearray(other.read_bytes())
    path.write_bytes(whole)


@pytest.mark.parametrize("kind", ["bit", "footer", "length", "short", "empty", "zeros", "swapped", "gone"])
def test_damage_is_found_and_mended(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "c"
    first = LocalTier(path)
    put(first, "a")
    put(first, "b")
    target = first.folder.path_of(key("a").digest)
    if kind == "gone":
        target.unlink()
    else:
        damage(kind, target, first.folder.path_of(key("b").digest))

    tier = LocalTier(path)
    assert len(fsck.verify(tier.folder).problems) == 1
    assert tier.get(key("a")) is None
    assert put(tier, "a") == data_of("a")
    assert put(tier, "b") == data_of("b")
    assert_sound(tier, {"a", "b"})


def test_a_cache_removed_under_a_reader(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    view = tier.get(key("a"))
    shutil.rmtree(tier.path)
    assert view == data_of("a")
    assert put(tier, "a") == data_of("a")
    assert put(tier, "b") == data_of("b")
    assert tier.stats()["errors"] > 0


@pytest.mark.parametrize("damaged", [b"x" * 8192, b""])
def test_a_damaged_index_is_started_anew(tmp_path: Path, damaged: bytes) -> None:
    fill_elsewhere(tmp_path / "c", "ab")
    (tmp_path / "c" / "index" / "data.mdb").write_bytes(damaged)
    tier = LocalTier(tmp_path / "c")
    assert put(tier, "a") == data_of("a")
    assert put(tier, "b") == data_of("b")
    assert_sound(tier, {"a", "b"})


def test_a_damaged_name_of_an_empty_blob_is_found(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    assert tier.get_or_fill(key("a"), lambda allocate: allocate(0)) is not None
    file = tier.folder.path_of(key("a").digest)
    file.write_bytes(file.read_bytes().replace(b"bucket", b"bukkit"))
    assert len(fsck.verify(tier.folder).problems) == 1


@pytest.mark.parametrize("changed", [{"name": "bucket/b#all"}, {"size": ROW + 1}])
def test_an_index_that_differs_from_its_files_is_found(tmp_path: Path, changed: dict[str, Any]) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    tier.folder.index.enter([replace(row, **changed) for row in tier.folder.index.rows()])
    assert len(fsck.verify(tier.folder, repair=True).problems) == 1
    assert_sound(tier, set())


def test_repair_removes_what_is_wrong(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    for name in "abc":
        put(tier, name)
    damage("bit", tier.folder.path_of(key("a").digest), Path())
    tier.folder.index.drop(key("b").digest)
    assert len(fsck.verify(tier.folder).problems) == 2
    report = fsck.verify(tier.folder, repair=True)
    assert len(report.problems) == 2
    assert key("a").name in report.problems[0]
    assert_sound(tier, {"c"})


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("wrong", ["file", "row"])
def test_what_others_put_right_while_a_cache_is_looked_over_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, *, filled: bool
) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    folder, hold = tier.folder, KeyLocks.hold
    if wrong == "file":
        damage("bit", folder.path_of(key("a").digest), Path())
    else:
        folder.index.drop(key("a").digest)

    def hold_when_right(self: KeyLocks, digest: bytes, timeout: float) -> Any:
        if digest == key("a").digest:
            monkeypatch.undo()
            folder.discard(digest)
            if filled:
                put(tier, "a")
        return hold(self, digest, timeout)

    monkeypatch.setattr(KeyLocks, "hold", hold_when_right)
    assert fsck.verify(folder, repair=True).problems == []
    assert_sound(tier, {"a"} if filled else set())


def test_a_link_in_place_of_a_blob_is_found(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    (file,) = files_of(tier)
    file.symlink_to(file.rename(tmp_path / "elsewhere"))
    assert len(fsck.verify(tier.folder, repair=True).problems) == 1
    assert_sound(tier, set())


def test_a_blob_that_the_disk_does_not_give_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(blob_file, "open_map", fails)
    assert len(fsck.verify(tier.folder).problems) == 1


def test_what_is_no_blob_is_told_and_stays(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    (stranger := files_of(tier)[0].with_name("notes.txt")).write_text("the only copy")
    assert fsck.verify(tier.folder, repair=True).problems == [f"{stranger}: not in the index"]
    assert stranger.read_text() == "the only copy"


def test_looking_a_cache_over_says_how_far_it_is(tmp_path: Path) -> None:
    tier, told = LocalTier(tmp_path / "c"), []
    for name in "ab":
        put(tier, name)
    report = fsck.verify(tier.folder, progress=told.append)
    assert told == [ROW, ROW]
    assert (report.blobs, report.bytes) == (2, 2 * ROW)


# Limit


@pytest.mark.parametrize("policy", ["pin", "lru"])
def test_the_limit_holds(tmp_path: Path, policy: str) -> None:
    tier = LocalTier(tmp_path / "c", 3 * ROW, policy)
    for name in "abcdefg":
        assert put(tier, name) == data_of(name)
        assert sum(blob_file.allocated(path.stat().st_size) for path in files_of(tier)) <= 3 * ROW
    assert_sound(tier, {"a", "b", "c"} if policy == "pin" else {"e", "f", "g"})


def test_without_a_limit_a_fill_evicts_as_much_as_it_writes(tmp_path: Path) -> None:
    """Another process has given the cache a limit above the default one."""
    large = LocalTier(tmp_path / "c", 10 * ROW)
    for name in "abcde":
        put(large, name)
    large.folder.close()
    (tmp_path / "c" / default_limit.FILE).write_text(str(2 * ROW))
    tier = LocalTier(tmp_path / "c", policy="lru")
    assert put(tier, "f") == data_of("f")
    assert tier.limit == 2 * ROW
    assert_sound(tier, {*"bcdef"})


def test_a_blob_being_filled_is_neither_evicted_nor_a_problem(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", 2 * ROW, "lru")

    def fill(allocate: Allocate) -> None:
        room = allocate(SIZE)
        put(tier, "b")
        put(tier, "c")
        assert fsck.verify(tier.folder, repair=True).problems == []
        room[:] = data_of("a")

    tier.get_or_fill(key("a"), fill)
    assert_sound(tier, {"a", "c"})


def test_a_blob_over_the_limit_evicts_nothing(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", 2 * ROW, "lru")
    put(tier, "a")
    put(tier, "b")

    def huge(allocate: Allocate) -> None:
        allocate(3 * SIZE)[:] = bytes(3 * SIZE)

    assert len(tier.get_or_fill(key("huge"), huge)) == 3 * SIZE
    assert_sound(tier, {"a", "b"})


@pytest.mark.parametrize("fills", [False, True])
def test_processes_that_evict_at_once_evict_for_one_shortage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fills: bool
) -> None:
    """Ranks that restart with a lower limit all find the whole shortage."""
    folder = LocalTier(tmp_path / "c").folder
    folder.index.enter(Row(key(str(number)).digest, key(str(number)).name, ROW, 1 + number) for number in range(160))
    remove = folder.remove

    def act(name: str) -> None:
        if fills:
            new = Row(key(name).digest, key(name).name, ROW)
            assert folder.reserve(new, "", 120 * ROW, Division(), pin=False)
        else:
            folder.evict(120 * ROW)

    def remove_after_another(digests: list[bytes]) -> int:
        monkeypatch.undo()
        act("another")
        return remove(digests)

    monkeypatch.setattr(folder, "remove", remove_after_another)
    act("first")
    assert folder.index.used_bytes() == 120 * ROW


def test_files_that_somebody_deleted_make_room(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", 2 * ROW, "lru")
    put(tier, "a")
    put(tier, "b")
    for file in files_of(tier):
        file.unlink()
    put(tier, "c")
    put(tier, "d")
    assert_sound(tier, {"c", "d"})


def test_uses_are_written_down_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LocalTier(tmp_path / "c", 3 * ROW, "lru")
    for name in "abc":
        put(tier, name)
    monkeypatch.setattr("dataload.cache.local.recent_uses.FLUSH_SECONDS", 0)
    tier.folder.uses.flush()
    tier.get(key("a"))
    assert tier.folder.index.rows()[-1].name == key("a").name


def test_the_first_use_is_not_written_down_alone(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", 3 * ROW, "lru")
    for name in "abc":
        put(tier, name)
    tier.get(key("a"))
    assert tier.folder.index.rows()[-1].name == key("c").name
    tier.folder.uses.flush()
    assert tier.folder.index.rows()[-1].name == key("a").name


def test_a_process_that_ends_at_once_writes_its_uses(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", 3 * ROW, "lru")
    for name in "abc":
        put(tier, name)
    with SPAWN.Pool(1) as pool:
        assert pool.apply(read_elsewhere, (str(tier.path),)) == data_of("a")
        pool.close()
        pool.join()
    assert tier.folder.index.rows()[-1].name == key("a").name


def test_lru_keeps_what_was_used_last(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", 3 * ROW, "lru")
    for name in "abc":
        put(tier, name)
    tier.get(key("a"))
    put(tier, "d")
    assert_sound(tier, {"a", "c", "d"})


def test_pin_gives_way_to_a_later_job(tmp_path: Path) -> None:
    path = tmp_path / "c"
    fill_elsewhere(path, "abc")
    tier = LocalTier(path, 3 * ROW, "pin")
    tier.get(key("c"))
    for name in "xyz":
        put(tier, name)
    assert_sound(tier, {"c", "x", "y"})


def test_pin_keeps_nothing_for_a_killed_process(tmp_path: Path) -> None:
    """No process has opened the cache since, so the folder of the dead one is still there."""
    path = tmp_path / "c"
    fill_elsewhere(path, "abc")
    tier = LocalTier(path, 3 * ROW, "pin")
    assert tier.folder
    dead = path / "tmp" / f"{1:020d}-1@host-0"
    dead.mkdir()
    with staging._locked(dead):  # as another process does that looks which ones run
        put(tier, "x")
    assert_sound(tier, {"b", "c", "x"})


def fill_elsewhere(path: Path, names: str) -> None:
    """Fill blobs in a process that ends then."""
    with SPAWN.Pool(1) as pool:
        pool.apply(fill_here, (str(path), names))
        pool.close()
        pool.join()


def fill_here(path: str, names: str) -> None:
    for name in names:
        put(LocalTier(path, 3 * ROW, "pin"), name)


def test_a_full_cache_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = LocalTier(tmp_path / "c", ROW)
    with caplog.at_level(logging.WARNING):
        for name in "abcd":
            put(tier, name)
    assert len([record for record in caplog.records if "is full" in record.getMessage()]) == 1
    assert tier.stats()["refused"] == 3


def test_a_process_that_opens_a_full_cache_again_tells_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = LocalTier(tmp_path / "c", ROW)
    put(kept, "a")
    with caplog.at_level(logging.WARNING):
        for name in "bcd":  # as each new loader does
            put(LocalTier(tmp_path / "c", ROW), name)
    assert len([record for record in caplog.records if "is full" in record.getMessage()]) == 1


def hold_open(path: Path, limit: int, is_open: Any, done: Any) -> None:
    tier = LocalTier(path, limit)
    put(tier, "a")
    is_open.set()
    done.wait()


@pytest.mark.parametrize("limit", [5 * ROW, 3 * ROW, None])
def test_two_jobs_that_limit_one_cache_differently_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int | None
) -> None:
    is_open, done = SPAWN.Event(), SPAWN.Event()
    job = SPAWN.Process(target=hold_open, args=(tmp_path / "c", 5 * ROW, is_open, done))
    job.start()
    try:
        assert is_open.wait(200)
        with caplog.at_level(logging.WARNING):
            for name in "bc":
                put(LocalTier(tmp_path / "c", limit), name)
        told = [record.getMessage() for record in caplog.records if "limits it to" in record.getMessage()]
        if limit == 3 * ROW:
            [message] = told
            assert f"to {3 * ROW} bytes, and process {job.pid} of " in message
            assert f" to {5 * ROW}: " in message
        else:
            assert not told
    finally:
        done.set()
        job.join()


def test_two_limits_of_one_process_are_not_told_as_those_of_two(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = LocalTier(tmp_path / "c", 5 * ROW), LocalTier(tmp_path / "c", 3 * ROW)
    with caplog.at_level(logging.WARNING):
        put(first, "a")
        put(second, "b")
    assert not caplog.records


def test_limits_that_cannot_be_compared_leave_the_cache_on(tmp_path: Path) -> None:
    put(LocalTier(tmp_path / "c"), "a")
    (tmp_path / "c" / "tmp" / "loop").symlink_to("loop")  # whose content is an OSError
    tier = LocalTier(tmp_path / "c", 3 * ROW)
    put(tier, "b")
    assert tier.get(key("a")) == data_of("a")
    assert tier.stats()["health"]["state"] == "normal"


def test_the_limit_of_a_job_that_has_ended_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill_elsewhere(tmp_path / "c", "a")
    with caplog.at_level(logging.WARNING):
        put(LocalTier(tmp_path / "c", 5 * ROW), "b")
    assert not caplog.records


def test_a_full_disk_is_no_error(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = LocalTier(small_disk / "c", 1 << 30)
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            assert put(tier, f"blob {number}") == data_of(f"blob {number}")
    assert tier.stats()["errors"] > 0
    assert len([record for record in caplog.records if "error while" in record.getMessage()]) == 1
    report = fsck.verify(tier.folder)
    assert report.problems == []
    assert 0 < report.blobs < 20


@pytest.mark.parametrize("failing", ["-", "-swept"])
def test_what_a_full_disk_has_no_marks_for_goes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    dead = tier.path / "tmp" / "0-0"
    dead.mkdir()
    (dead / f"{key('b').digest.hex()}-0").write_bytes(bytes(100))
    real = os.open

    def full(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if flags & os.O_CREAT and failing in Path(path).name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", full)
    assert sweep(tier.path / "tmp") == {dead: {key("b").digest}}
    assert list(dead.glob("*-0")) == []
    assert fsck.evict(tier.folder) == row_bytes("a")
    assert_sound(tier, set())


# The folder


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_folder_that_another_thread_is_closing_is_opened_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """No user is left, but LMDB still has the file open and cannot open it twice."""
    closing, go_on = threading.Event(), threading.Event()
    shut = Index.shut

    def slowly(index: Index, **options: bool) -> None:
        closing.set()
        assert go_on.wait(200)
        shut(index, **options)

    monkeypatch.setattr(Index, "shut", slowly)
    monkeypatch.setattr("dataload.cache.local.registry.CLOSE_SECONDS", 30)
    folders = [open_folder(tmp_path / "c")]
    let_go = folders[0].close if how == "closed" else folders.clear
    with ThreadPoolExecutor(2) as pool:
        ending = pool.submit(let_go)
        del let_go
        assert closing.wait(200)
        if how == "closed":
            folders.clear()
        opening = pool.submit(open_folder, tmp_path / "c")
        with pytest.raises(TimeoutError):  # The opening waits; LMDB would raise at once.
            opening.result(0.2)
        go_on.set()
        assert opening.result(200).index.rows() == []
        ending.result(200)


def test_nothing_is_opened_before_the_first_use(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    assert not tier.path.exists()
    assert "not opened" in repr(tier)


def test_modes(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    assert tier.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in [*files_of(tier), tier.path / "locks"]} == {0o600}


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("the only copy")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        put(LocalTier(tmp_path), "a")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_is_just_being_made_is_none_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "locks").touch()
    (tmp_path / "locks.FORMAT").write_text("{")
    assert put(LocalTier(tmp_path), "a") == data_of("a")


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    put(LocalTier(tmp_path / "c"), "a")
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    (tmp_path / "d" / "FORMAT").write_text(json.dumps({"format": 7}))
    with pytest.raises(ConfigError, match="format 7"):
        put(LocalTier(tmp_path / "d"), "a")


@pytest.mark.parametrize("place", ["file/cache", "/proc/cache"])
def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used .*cache=False"):
        put(LocalTier(tmp_path / place), "a")


def test_evict_by_path(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    for name in ("x/1", "x/2", "xy/1"):
        put(tier, name)
    assert fsck.evict(tier.folder, path="bucket/x") == row_bytes("x/1") + row_bytes("x/2")
    assert_sound(tier, {"xy/1"})
    assert fsck.evict(tier.folder) == row_bytes("xy/1")
    assert_sound(tier, set())


def test_evict_a_url_with_a_query(tmp_path: Path) -> None:
    """Blobs are named without it."""
    tier, url = LocalTier(tmp_path / "c"), "https://host/x?id=7"
    tier.get_or_fill(BlobKey("origin", url, "version", "all"), lambda allocate: copy_into(b"1", allocate))
    put(tier, "x/1")
    put(tier, "x/22")
    assert fsck.evict(tier.folder, path=url) > 0
    assert_sound(tier, {"x/1", "x/22"})
    fsck.evict(tier.folder, path="bucket/x/?")
    assert_sound(tier, {"x/22"})


def test_the_caches_of_a_process_share_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = BufferPool()
    monkeypatch.setattr(writer, "blob_buffers", buffers)
    for number in range(8):
        put(LocalTier(tmp_path / str(number)), "a")
    assert len(buffers._free) == 1


def test_evict_counts_its_own_bytes_beside_a_process_that_fills(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "x/1")
    assert fsck.evict(tier.folder, path="bucket/x", progress=lambda _: put(tier, "y/1")) == row_bytes("x/1")


def test_evict_does_not_count_what_another_process_evicts_meanwhile(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "x/1")
    put(tier, "x/2")
    first = fsck.evict(tier.folder, path="bucket/x", progress=lambda _: fsck.evict(tier.folder))
    assert first in (row_bytes("x/1"), row_bytes("x/2"))


def test_evict_keeps_what_was_used_last(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    for name in "abc":
        put(tier, name)
    fsck.evict(tier.folder, keep_bytes=ROW)
    assert_sound(tier, {"c"})


def test_looking_at_a_cache_does_not_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no cache at {tmp_path}/c: pass the folder of a cache as path$"):
        fsck.open_existing(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_sweeping_twice_finds_nothing(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    assert sweep(tier.path / "tmp") == {}


@pytest.mark.parametrize(
    "look",
    [
        lambda tier: [tier.folder.unlink(key("a").digest), tier.folder.remove([key("a").digest])],
        lambda tier: sweep(tier.path / "tmp"),
    ],
)
def test_a_process_may_end_while_another_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Any) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "a")
    ending, listdir = tier.path / "tmp" / "0-0", os.listdir
    ending.mkdir()

    def list_then_end(path: Any) -> list[str]:
        found = listdir(path)
        if Path(path) == ending.parent:
            shutil.rmtree(ending, ignore_errors=True)
        return found

    monkeypatch.setattr(os, "listdir", list_then_end)
    look(tier)
    assert not ending.exists()
    assert "errors" not in tier.stats()


def test_locks_that_are_held_together_leave_those_of_others(tmp_path: Path) -> None:
    """One that another process holds, or one that comes twice, is not held until all are released."""
    CacheFolder(tmp_path / "cache")
    path = str(tmp_path / "cache" / "locks")
    ours, theirs = KeyLocks(path), KeyLocks(path)  # the second as another process has it
    first, second = key("a").digest, key("b").digest
    with theirs.hold(first, timeout=0) as held:
        assert held
        together = ours.hold_free([first, second, second])
        found = together.__enter__()
    assert [lock is not None for lock in found] == [False, True, False]
    with ours.hold(first, timeout=0) as held:
        assert held
    with theirs.hold(second, timeout=0) as held:
        assert not held
    together.__exit__(None, None, None)
    with theirs.hold(second, timeout=0) as held:
        assert held
