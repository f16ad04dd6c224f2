"""Power failures, lost and damaged indexes, and folders removed while processes run."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
from tiers import LIMIT, assert_sound, bytes_in, data_of, files_of, key, look, name_of, put

from dataload.cache import blob_file
from dataload.cache.health import READ_FAILURES
from dataload.cache.local import failpoints, fsck, index
from dataload.cache.local.key_locks import KeyLocks
from dataload.cache.local.registry import open_folder
from dataload.cache.local.setup import recovery
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate
from dataload.errors import ConfigError

NAMES = ("x/0", "x/2", "x/3", "y/0")


def never(_: Allocate) -> None:
    raise AssertionError("fetched again")


def is_kept(tier: LocalTier, name: str) -> bool:
    return tier.get_or_fill(key(name), never) == data_of(name)


def in_child(act: Callable[[], object], *, killed_at: str = "") -> None:
    """Run `act` in a child that exits without cleanup, or is killed at a step."""
    child = os.fork()
    if child == 0:
        try:
            if killed_at:
                failpoints.watch(lambda name: name == killed_at and os.kill(os.getpid(), signal.SIGKILL))
            act()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == (signal.SIGKILL if killed_at else 0)


def keep(path: Path, *names: str) -> None:
    tier = LocalTier(path, LIMIT, "lru")
    for name in names:
        put(tier, name)
    # Referenced beyond the end of the child, so that nothing is closed.
    held.append(tier)


held: list[LocalTier] = []


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A cache of four blobs, left by a process that did not close it."""
    in_child(lambda: keep(tmp_path / "c", *NAMES))
    return tmp_path / "c"


@contextmanager
def neighbour(path: Path, then: Callable[[LocalTier], object] = lambda _: None) -> Iterator[Callable[[], None]]:
    """Keep the cache open in another process. Yield a function that runs `then` there and waits for it."""
    (there, ready), (order, go) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(go)
            tier = LocalTier(path, LIMIT, "lru")
            held.append(tier)
            put(tier, "x/0")
            os.write(ready, b"r")
            while os.read(order, 1):
                then(tier)
                os.write(ready, b"d")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(ready)
    os.close(order)
    assert os.read(there, 1) == b"r"

    def act() -> None:
        os.write(go, b"g")
        assert os.read(there, 1) == b"d"

    try:
        yield act
    finally:
        os.close(go)
        assert os.waitpid(child, 0)[1] == 0
        os.close(there)


@pytest.fixture
def rebuilds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The indexes that are rebuilt from here on."""
    found, rebuild = list[Path](), recovery._rebuild
    monkeypatch.setattr(
        recovery, "_rebuild", lambda index, path, blobs: (found.append(path), rebuild(index, path, blobs))[1]
    )
    return found


# Power failures


@pytest.fixture
def after_reboot(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")


@pytest.mark.variants
@pytest.mark.usefixtures("after_reboot")
@pytest.mark.parametrize("torn", ["", "zeros", "short", "empty", "garbage", "gone"])
def test_after_a_power_failure_the_index_is_made_anew(
    left: Path, torn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data, files = left / "index" / "data.mdb", files_of(left)
    size = data.stat().st_size
    if torn == "gone":
        data.unlink()
    elif torn:
        lost = {"zeros": bytes(size), "short": data.read_bytes()[:9000], "empty": b"", "garbage": os.urandom(size)}
        data.write_bytes(lost[torn])
    zeroed, cut, unsynced, removed = (files[key(name).digest] for name in NAMES)
    zeroed.write_bytes(bytes(zeroed.stat().st_size))
    os.truncate(cut, 100)
    unsynced.write_bytes(bytes(100) + unsynced.read_bytes()[100:])
    removed.unlink()
    in_child(lambda: None)

    seen: list[str] = []
    failpoints.watch(seen.append)
    opened = lmdb.open
    monkeypatch.setattr(lmdb, "open", lambda *given, **options: (seen.append("lmdb"), opened(*given, **options))[1])
    tier = LocalTier(left, LIMIT, "lru")
    folder = tier.folder
    failpoints.watch(None)
    assert seen.index("rebuild: dropped") < seen.index("lmdb"), "a torn index was opened"
    assert {row.digest for row in folder.index.rows()} == {key("x/3").digest}
    assert not zeroed.exists()
    assert not cut.exists()
    assert tier.get(key("x/3")) is None, "zeros were served"
    for name in NAMES:
        put(tier, name)
    del tier, folder
    assert assert_sound(left, LIMIT) == set(NAMES)


def test_a_rebuild_is_announced_and_reads_many_footers_at_a_time(
    left: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a reboot the footers are not in the page cache, so the disk's latency counts."""
    (left / "index" / "data.mdb").unlink()
    together, read = threading.Barrier(len(files_of(left)), timeout=200), blob_file.read_footer

    def read_together(file: Path) -> Any:
        assert "rebuilding it from 4 blobs" in caplog.text
        together.wait()
        return read(file)

    monkeypatch.setattr(blob_file, "read_footer", read_together)
    folder = LocalTier(left, LIMIT, "lru").folder
    assert len(folder.index.rows()) == len(NAMES)


def test_what_was_closed_is_believed_after_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rebuilds: list[Path]
) -> None:
    put(LocalTier(tmp_path, LIMIT), "x/0")
    assert (tmp_path / "index" / "state").read_text() == "closed"
    rebuilds.clear()
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    tier = LocalTier(tmp_path, LIMIT)
    assert look(tier, "x/0")
    assert not rebuilds
    assert (tmp_path / "index" / "state").read_text() == "another boot"


def test_the_index_is_on_the_disk_before_it_is_noted_as_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    sync, noted = index.Index.sync, recovery.note_closed
    monkeypatch.setattr(index.Index, "sync", lambda self: (said.append("sync"), sync(self)))
    monkeypatch.setattr(recovery, "note_closed", lambda path: (said.append("noted"), noted(path)))
    put(LocalTier(tmp_path, LIMIT), "x/0")
    assert said == ["sync", "noted"]


def test_a_killed_process_is_no_power_failure(left: Path, rebuilds: list[Path]) -> None:
    tier = LocalTier(left, LIMIT, "lru")
    assert all(look(tier, name) for name in NAMES)
    assert not rebuilds


def test_a_state_that_nobody_wrote(left: Path, rebuilds: list[Path]) -> None:
    (left / "index" / "state").write_bytes(b"\xff\xfe")
    folder = open_folder(left)
    assert len(rebuilds) == 1
    (left / "index" / "state").write_bytes(b"\xff\xfe")
    folder.close()
    open_folder(left).close()
    assert len(rebuilds) == 2
    assert assert_sound(left, LIMIT) == set(NAMES)


def test_only_the_last_one_closes(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with neighbour(path):
        put(LocalTier(path, LIMIT), "x/2")
        assert (path / "index" / "state").read_text() == recovery.boot_id()
    LocalTier(path).folder.close()
    assert (path / "index" / "state").read_text() == "closed"


def test_nothing_is_noted_as_closed_while_another_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataload.cache.local.directory.CLOSE_SECONDS", 0)
    folder = LocalTier(tmp_path, LIMIT).folder
    with KeyLocks(str(tmp_path / "locks")).hold(b"\xff" * 32, timeout=0):
        folder.close()
    assert (tmp_path / "index" / "state").read_text() == recovery.boot_id()


def test_a_child_does_not_close_for_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LocalTier(tmp_path, LIMIT)
    put(tier, "x/0")
    folder = tier.folder
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.delattr(KeyLocks, "hold")  # A thread of the parent may have held the lock.
            folder.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "index" / "state").read_text() == recovery.boot_id()
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    put(tier, "x/2")


@pytest.mark.parametrize("step", ["rebuild: dropped", "rebuild: entered", "close: synced"])
def test_a_kill_while_an_index_is_made_or_closed(left: Path, step: str) -> None:
    recovery.doubt(left / "index")
    in_child(lambda: LocalTier(left, LIMIT).folder.close(), killed_at=step)
    assert assert_sound(left, LIMIT) == set(NAMES)


def test_without_a_boot_id_nothing_left_open_is_believed(
    left: Path, monkeypatch: pytest.MonkeyPatch, rebuilds: list[Path]
) -> None:
    monkeypatch.setattr(recovery, "boot_id", lambda: "")
    for count in (1, 2):
        open_folder(left).close()
        assert len(rebuilds) == count
    assert assert_sound(left, LIMIT) == set(NAMES)


# A lost index


@pytest.mark.parametrize("lost", ["index", "data.mdb", "zeros", "short", "empty", "garbage", "state"])
def test_a_lost_index_is_made_anew(left: Path, rebuilds: list[Path], lost: str) -> None:
    lose_index(left, lost)
    tier = LocalTier(left, LIMIT, "lru")
    assert all(is_kept(tier, name) for name in NAMES)
    assert rebuilds
    del tier
    assert assert_sound(left, LIMIT) == set(NAMES)


def test_a_cache_without_its_format_is_made_anew(left: Path, rebuilds: list[Path]) -> None:
    """A program that cleans up may have removed it."""
    (left / "FORMAT").unlink()
    (left / "LIMIT").unlink(missing_ok=True)
    open_folder(left).close()
    assert rebuilds
    assert assert_sound(left, LIMIT) == set(NAMES)


@pytest.mark.parametrize("other", ["thesis.tex", "blobs/thesis.tex", "blobs/0/thesis.tex", "tmp/thesis", "index/x.db"])
def test_a_folder_without_a_format_that_holds_another_file_is_no_cache(left: Path, other: str) -> None:
    (left / "FORMAT").unlink()
    (left / other).parent.mkdir(exist_ok=True)
    (left / other).write_text("the only copy")
    with pytest.raises(ConfigError, match=f"holds other files .{other}"):
        open_folder(left)
    assert (left / other).exists()


def test_what_others_may_have_planted_is_no_cache(left: Path) -> None:
    (left / "FORMAT").unlink()
    left.chmod(0o777)
    with pytest.raises(ConfigError, match="holds other files"):
        open_folder(left)


def lose_index(path: Path, lost: str) -> None:
    data = path / "index" / "data.mdb"
    if lost == "index":
        shutil.rmtree(path / "index")
    elif lost in ("data.mdb", "state"):
        data.with_name(lost).unlink()
    elif lost == "short":
        os.truncate(data, 2 * 4096)
    else:
        size = data.stat().st_size
        data.write_bytes({"zeros": bytes(size), "empty": b"", "garbage": os.urandom(size)}[lost])


def test_a_new_index_knows_what_was_used_last(left: Path) -> None:
    for age, name in enumerate(NAMES):
        then = time.time_ns() - (age + 1) * 10**12
        os.utime(files_of(left)[key(name).digest], ns=(then, then))
    shutil.rmtree(left / "index")
    folder = open_folder(left)
    assert [row.digest for row in folder.index.rows()] == [key(name).digest for name in NAMES[::-1]]


def test_a_new_index_keeps_the_limit(left: Path) -> None:
    shutil.rmtree(left / "index")
    tier = LocalTier(left, 25_000, "lru")
    assert tier.folder.index.used_bytes() <= 25_000
    assert bytes_in(files_of(left).values()) == tier.folder.index.used_bytes()


def test_a_lower_limit_holds_for_a_process_that_only_reads(tmp_path: Path) -> None:
    first = LocalTier(tmp_path / "c", LIMIT)
    for name in NAMES:
        put(first, name)
    del first
    tier = LocalTier(tmp_path / "c", 65_000)
    assert [name for name in NAMES if look(tier, name)] == ["x/2", "x/3", "y/0"]
    assert tier.folder.index.used_bytes() <= 65_000


def test_a_process_with_a_lower_limit_leaves_what_others_use(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with neighbour(path):
        put(LocalTier(path, LIMIT), "x/2")
        tier = LocalTier(path, 100)
        assert look(tier, "x/0")
        assert look(tier, "x/2")


def test_a_new_index_takes_nothing_for_a_blob_that_is_none(left: Path) -> None:
    good = files_of(left)[key("x/0").digest]
    shutil.copy(good, good.with_name("f" * 64))
    (left / "blobs" / "00").mkdir(exist_ok=True)
    shutil.copy(good, left / "blobs" / "00" / good.name)
    (good.parent / ("e" * 64)).write_bytes(b"")
    (left / "blobs" / "stray").write_text("")
    shutil.rmtree(left / "index")
    folder = open_folder(left)
    assert len(folder.index.rows()) == len(NAMES)
    assert len(list((left / "blobs").glob("*/*"))) == len(NAMES)


def test_a_new_index_leaves_alone_what_lies_elsewhere_or_is_no_file(left: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").write_text("the only copy")
    (left / "blobs" / "zz").symlink_to(tmp_path / "elsewhere")
    (left / "blobs" / "00").mkdir(exist_ok=True)
    (left / "blobs" / "00" / ("0" * 64)).mkdir()
    shutil.rmtree(left / "index")
    assert len(open_folder(left).index.rows()) == len(NAMES)
    assert (tmp_path / "elsewhere" / "thesis.tex").exists()


def test_a_new_index_takes_nobody_to_have_used_a_blob_tomorrow(left: Path) -> None:
    os.utime(files_of(left)[key("x/0").digest], (2**33, 2**33))
    shutil.rmtree(left / "index")
    folder = open_folder(left)
    assert max(row.used_at for row in folder.index.rows()) <= time.time_ns()


def test_a_blob_may_go_while_a_new_index_is_made(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, going = blob_file.read_footer, files_of(left)[key("x/0").digest]
    monkeypatch.setattr(blob_file, "read_footer", lambda path: (going.unlink(missing_ok=True), real(path))[1])
    shutil.rmtree(left / "index")
    assert len(open_folder(left).index.rows()) == len(NAMES) - 1


def test_blobs_that_cannot_be_opened_just_now_stay(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    shutil.rmtree(left / "index")
    with monkeypatch.context() as patch:
        patch.setattr(blob_file, "read_footer", fails)
        put(LocalTier(left, LIMIT, "lru"), "x/0")
    assert assert_sound(left, LIMIT) == set(NAMES)


def test_an_index_is_not_dropped_under_others(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with neighbour(path, lambda tier: put(tier, "y/3")) as act:
        shutil.rmtree(path / "index")
        tier = LocalTier(path, LIMIT, "lru")
        put(tier, "x/2")
        assert tier.stats()["health"]["state"] == "off"
        assert not (path / "index" / "data.mdb").exists()
        act()  # It detects the loss and, with the folder to itself, rebuilds the index.
        assert bytes_in(files_of(path).values()) <= LIMIT
    del tier
    tier = LocalTier(path, LIMIT, "lru")
    assert is_kept(tier, "x/0")
    del tier
    assert_sound(path, LIMIT)


def test_damage_that_shows_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rebuilds: list[Path]) -> None:
    tier = LocalTier(tmp_path, LIMIT, "lru")
    put(tier, "x/0")
    rebuilds.clear()
    real, first = index.Index.admit, tier.folder
    broken: list[int] = [1]

    def admit(self: index.Index, *given: Any, **options: Any) -> Any:
        if broken:
            broken.pop()
            raise lmdb.CorruptedError("a page is not what it was")
        return real(self, *given, **options)

    monkeypatch.setattr(index.Index, "admit", admit)
    put(tier, "y/0")
    assert is_kept(tier, "x/0")
    put(tier, "y/0")
    assert is_kept(tier, "y/0")
    assert tier.folder is not first
    assert rebuilds


def test_an_index_cut_short_is_filled_up_to_its_last_page(left: Path) -> None:
    file = left / "index" / "data.mdb"
    size = file.stat().st_size
    os.truncate(file, size - mmap.PAGESIZE)
    cut = index.Index(file.parent)
    cut.used_bytes()
    cut.shut()
    assert file.stat().st_size == size


def test_an_index_that_is_damaged_again_and_again_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = LocalTier(tmp_path / "c", LIMIT)

    def damaged(*_: object, **__: object) -> None:
        raise lmdb.CorruptedError("damaged")

    monkeypatch.setattr(index.Index, "admit", damaged)
    for _ in range(READ_FAILURES):
        put(tier, "x/0")
    assert tier.stats()["health"]["state"] == "off"


def test_who_finds_the_folder_closed_by_another_thread_opens_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = LocalTier(tmp_path / "c", LIMIT)
    folder, admit = tier.folder, index.Index.admit

    def admit_when_closed(self: index.Index, *given: Any, **options: Any) -> Any:
        folder.close()
        return admit(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(index.Index, "admit", admit_when_closed)
        put(tier, "x/0")
    assert tier.stats()["health"]["state"] == "normal"
    put(tier, "x/0")
    assert is_kept(tier, "x/0")


def test_threads_that_outlive_the_folder_at_the_end_of_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They count no errors, log none, and do not doubt the index."""
    tier = LocalTier(tmp_path / "c", LIMIT)
    put(tier, "x/0")
    tier.folder._close()  # as at the end of the interpreter
    put(tier, "x/1")
    assert tier.get(key("x/0")) is not None
    assert not caplog.records
    assert tier.stats()["health"]["state"] == "normal"
    assert (tmp_path / "c" / "index" / "state").read_text() == "closed"
    tier.folder.close()
    put(tier, "x/2")
    assert is_kept(tier, "x/2")


def test_a_thread_that_outlives_the_folder_changes_no_index_that_is_noted_as_closed(tmp_path: Path) -> None:
    """Its change may not be on the disk."""
    path = tmp_path / "c"
    tier = LocalTier(path, LIMIT)
    folder, late = tier.folder, []

    def fill(allocate: Allocate) -> None:
        room = allocate(len(data_of("x/0")))  # Its draft keeps the staging folder.
        failpoints.watch(lambda name: name == "close: synced" and (late.append(name), put(tier, "x/2")))
        folder._close()  # as at the end of the interpreter
        failpoints.watch(None)
        room[:] = data_of("x/0")

    tier.get_or_fill(key("x/0"), fill)
    assert late
    assert (path / "index" / "state").read_text() == "closed"
    folder.close()
    folder = open_folder(path)
    assert [name_of(row.name) for row in folder.index.rows()] == ["x/0"]


def test_an_index_that_cannot_be_opened_is_let_go(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB must not open the file twice, even while a caller holds the error."""
    opened = index.Index(left / "index")

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input") as caught:
        patch.setattr(index.Index, "_fill_up", fails)
        opened.used_bytes()
    assert opened.used_bytes() > 0
    assert caught.value.errno == 5
    opened.shut()


def test_a_folder_that_cannot_be_opened_is_let_go(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input") as caught:
        patch.setattr(recovery, "note_open", fails)
        open_folder(left)
    assert open_folder(left).index.used_bytes() > 0
    assert caught.value.errno == 5


def test_who_still_uses_an_index_that_was_let_go_hears_so(left: Path) -> None:
    folder = open_folder(left)
    folder.close()
    with pytest.raises(OSError, match="closed"):
        folder.index.used_bytes()


# Folders removed while a process runs


def test_an_index_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", LIMIT, "lru")
    put(tier, "x/0")
    first = tier.folder
    shutil.move(tmp_path / "c" / "index", tmp_path / "index")
    shutil.copytree(tmp_path / "index", tmp_path / "c" / "index")
    put(tier, "x/2")  # This fill detects the removal.
    put(tier, "x/3")
    assert tier.folder is not first
    assert is_kept(tier, "x/3")


@pytest.mark.variants
@pytest.mark.parametrize(
    "removed", ["", "blobs", "tmp", "locks", "index", "FORMAT", "blobs/*", "tmp/*", "index/*", "*"]
)
def test_what_is_removed_under_a_reader(tmp_path: Path, removed: str) -> None:
    path = tmp_path / "c"
    tier = LocalTier(path, LIMIT, "lru")
    put(tier, "x/0")
    view = tier.get(key("x/0"))
    with neighbour(path, lambda tier: put(tier, "y/0")) as act:
        for victim in [path] if not removed else list(path.glob(removed)):
            shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
        assert view == data_of("x/0")
        for _ in range(2):
            for name in NAMES:
                put(tier, name)
                look(tier, name)
            act()
        assert view == data_of("x/0")
        assert bytes_in(files_of(path).values()) <= 2 * LIMIT
    del tier
    tier = LocalTier(path, LIMIT, "lru")
    put(tier, "x/0")
    assert is_kept(tier, "x/0")
    del tier
    assert "x/0" in assert_sound(path, LIMIT)


def test_new_fills_work_again_in_a_folder_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "c"
    tier = LocalTier(path, LIMIT, "lru")
    for removed in ("", "blobs", "tmp", "locks", "index"):
        put(tier, "x/0")
        shutil.rmtree(path / removed) if removed != "locks" else (path / removed).unlink()
        put(tier, f"new{removed}/1")  # This fill detects the removal.
        put(tier, f"new{removed}/2")
        assert is_kept(tier, f"new{removed}/2"), f"{removed or 'all'} removed"
        assert (path / "index" / "data.mdb").exists()
        assert len(list((path / "tmp").iterdir())) == 1
        assert tier.stats()["health"]["state"] == "normal"


@pytest.mark.parametrize("removed", ["", "tmp", "index"])
def test_a_draft_belongs_to_the_folder_it_began_in(tmp_path: Path, removed: str) -> None:
    """Its end does not affect the reopened folder, which has other drafts."""
    path = tmp_path / "c"
    tier = LocalTier(path, LIMIT, "lru")
    put(tier, "x/0")
    folders = [tier.folder]

    def fill(allocate: Allocate) -> None:
        room = allocate(len(data_of("x/2")))
        shutil.rmtree(path / removed)
        put(tier, "y/0")  # This fill detects the removal.
        put(tier, "y/2")
        folders.append(tier.folder)
        room[:] = data_of("x/2")

    assert tier.get_or_fill(key("x/2"), fill) == data_of("x/2")
    assert tier.folder is folders[1]
    assert tier.folder is not folders[0]
    assert tier.stats()["health"]["state"] == "normal"
    put(tier, "y/3")
    assert {"y/2", "y/3"} <= {name_of(row.name) for row in tier.folder.index.rows()}


def test_a_folder_that_cannot_be_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "c"
    now = [0.0]
    tier = LocalTier(path, LIMIT, "lru", lambda: now[0])
    put(tier, "x/0")
    shutil.rmtree(path)
    path.write_text("a file stands in the way")
    for _ in range(5):
        put(tier, "x/0")
        now[0] += 100
    assert tier.stats()["health"]["state"] == "off"
    assert path.read_text() == "a file stands in the way"
    path.unlink()
    put(tier, "x/0")
    assert is_kept(tier, "x/0")


def test_what_made_it_doubtful_who_lives_is_put_right_later(tmp_path: Path, rebuilds: list[Path]) -> None:
    """Two processes with different lock files may lose a row; the next process with the folder to itself rebuilds."""
    path = tmp_path / "c"
    with neighbour(path):
        (path / "locks").unlink()
        tier = LocalTier(path, LIMIT, "lru")
        tier.folder.index.drop(key("x/0").digest)
        del tier
    assert not rebuilds
    folder = open_folder(path)
    assert rebuilds
    assert {row.digest for row in folder.index.rows()} == {key("x/0").digest}


# Blobs without a row


@pytest.fixture
def orphaned(tmp_path: Path) -> LocalTier:
    """A cache in which x/0 has a file but no row."""
    tier = LocalTier(tmp_path / "c", LIMIT, "lru")
    put(tier, "x/0")
    tier.folder.index.drop(key("x/0").digest)
    return tier


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda whole: bytes(len(whole)), lambda _: b""])
def test_a_damaged_blob_without_a_row_is_made_again(orphaned: LocalTier, damage: Callable[[bytes], bytes]) -> None:
    file = files_of(orphaned.path)[key("x/0").digest]
    file.write_bytes(damage(file.read_bytes()))
    assert orphaned.get(key("x/0")) is None
    assert orphaned.folder.index.size_of(key("x/0").digest) is None
    put(orphaned, "x/0")
    assert is_kept(orphaned, "x/0")


def test_another_blob_without_a_row_is_not_served(orphaned: LocalTier) -> None:
    put(orphaned, "y/0")
    files = files_of(orphaned.path)
    shutil.copy(files[key("y/0").digest], files[key("x/0").digest])
    assert orphaned.get(key("x/0")) is None
    assert orphaned.folder.index.size_of(key("x/0").digest) is None
    put(orphaned, "x/0")
    assert is_kept(orphaned, "x/0")


# Accounts


def test_accounts_that_are_off_are_found_and_put_right(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", LIMIT, "lru")
    put(tier, "x/0")
    with tier.folder.index._transaction(write=True) as txn:
        tier.folder.index._set_account(txn, b"used", 5)
    assert "accounts" in fsck.verify(tier.folder).problems[0]
    assert len(fsck.verify(tier.folder, repair=True).problems) == 1
    assert fsck.verify(tier.folder).problems == []


def test_a_row_entered_twice_counts_once(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", LIMIT, "lru")
    for _ in range(2):
        assert tier.reserve(tier.folder, key("x/0"), 1000, tmp_path / "draft")
    assert tier.folder.index.used_bytes() == 1000


def test_evicting_what_is_mapped(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c", LIMIT, "lru")
    put(tier, "x/0")
    view = tier.get(key("x/0"))
    assert fsck.evict(tier.folder) > 0
    assert files_of(tier.path) == {}
    assert view == data_of("x/0")


@pytest.mark.parametrize(
    ("table", "value"),
    [("rows", b"\x01"), ("rows", b"\x00" * 16 + b"\xff\xfe"), ("accounts", b"\x00" * 8)],
    ids=["a short row", "a name that is no text", "accounts of nothing"],
)
def test_a_value_that_makes_no_sense_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, value: bytes
) -> None:
    """With any damage to the index, the bytes are correct and no error is raised."""
    monkeypatch.setattr("dataload.cache.local.recent_uses.FLUSH_SECONDS", 0)  # so that a hit reads the index at once
    tier = LocalTier(tmp_path / "c", LIMIT, "lru")
    put(tier, "x/0")
    index = tier.folder.index
    with index._transaction(write=True) as txn:
        name = key("x/0").digest if table == "rows" else b"used"
        txn.put(name, value, db=index._tables[table.encode()])
    for _ in range(2):
        put(tier, "x/0")
        put(tier, "z/5")
        put(tier, "y/5")
    assert tier.stats()["errors"] > 0
