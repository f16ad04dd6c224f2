"""Preflight checks of a cache folder: filesystem, owner, mode, and planted files and links."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest
from tiers import LIMIT, key, look, put

from dataload.cache import blob_file
from dataload.cache.config import CacheConfig
from dataload.cache.local import fsck
from dataload.cache.local.key_locks import KeyLocks
from dataload.cache.local.setup import preflight
from dataload.cache.local.tier import LocalTier
from dataload.cli import app
from dataload.dataset import make_dataset
from dataload.errors import ConfigError, CorruptEntry

MOUNTS = """\
22 21 0:40 / {home} rw - {kind} server:/export rw
23 21 0:41 / {home}\\040local rw - xfs /dev/nvme0n1 rw
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
"""


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that fakes the type of the filesystem of `tmp_path`."""
    mounts, real = tmp_path / "mountinfo", preflight.filesystem_of
    monkeypatch.setattr(preflight, "filesystem_of", lambda path: real(path, mounts))

    def mount(kind: str) -> None:
        mounts.write_text(MOUNTS.format(home=tmp_path, kind=kind))

    return mount


NETWORK = ["nfs4", "cifs", "9p", "fuse", "fuse.sshfs", "ceph", "lustre"]
FORMERLY_MISSED = ["wekafs", "panfs", "pvfs2", "ocfs2", "gfs2", "virtiofs", "of-next-year"]


@pytest.mark.parametrize("kind", [*NETWORK, *FORMERLY_MISSED])
def test_only_filesystems_known_to_be_local_hold_a_cache(
    tmp_path: Path, mounted: Callable[[str], None], kind: str
) -> None:
    mounted(kind)
    says = rf"{tmp_path}/c is on a filesystem of type {kind}, .*local disk.*allow_network_filesystem=True"
    with pytest.raises(ConfigError, match=says):
        put(LocalTier(tmp_path / "c"), "x/0")
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay"])
def test_local_filesystems_hold_a_cache(tmp_path: Path, mounted: Callable[[str], None], kind: str) -> None:
    mounted(kind)
    put(LocalTier(tmp_path / "c"), "x/0")


def test_a_filesystem_that_cannot_be_told_holds_no_cache(tmp_path: Path, mounted: Callable[[str], None]) -> None:
    with pytest.raises(ConfigError, match="a filesystem of unknown type"):
        put(LocalTier(tmp_path / "c"), "x/0")


def test_any_filesystem_holds_a_cache_where_the_user_says_so(
    tmp_path: Path, mounted: Callable[[str], None], table_of: Any
) -> None:
    """The option works on the filesystem and on a dataset, and survives pickling."""
    mounted("wekafs")
    (tmp_path / "x.bin").write_bytes(b"some bytes")
    told = {"cache_dir": str(tmp_path / "c"), "allow_network_filesystem": True}
    fs = fsspec.filesystem("tiercache", target_protocol="file", skip_instance_cache=True, **told)
    assert fs.cat_file(str(tmp_path / "x.bin")) == b"some bytes"
    copy = pickle.loads(pickle.dumps(fs))
    assert copy.cat_file(str(tmp_path / "x.bin")) == b"some bytes"
    assert copy.stats()["hits"] == 1
    pq.write_table(table_of(0, 10), tmp_path / "x.parquet")
    for cluster in (None, "valkey://127.0.0.1:1"):
        dataset = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(**told, cluster=cluster))
        again = pickle.loads(pickle.dumps(dataset.blocks.tier))
        put(again, "x/0")
        assert again.stats()["health"]["state"] == "normal"


def test_commands_look_at_a_cache_on_any_filesystem_when_told_to(
    tmp_path: Path, mounted: Callable[[str], None]
) -> None:
    mounted("ext4")
    put(LocalTier(tmp_path / "c"), "x/0")
    mounted("wekafs")
    options = ["cache", "stats", "--cache-dir", str(tmp_path / "c")]
    with pytest.raises(ConfigError, match="wekafs"):
        app.app(options, standalone_mode=False)
    app.app([*options, "--allow-network-filesystem"], standalone_mode=False)


def test_the_innermost_mount_counts(tmp_path: Path) -> None:
    home, mounts = tmp_path / "home", tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(home=home, kind="nfs4"))
    for name, kind in (("home", "nfs4"), ("home local", "xfs"), ("homes", "ext4")):
        (tmp_path / name).mkdir()
        assert preflight.filesystem_of(tmp_path / name, mounts) == kind
    (tmp_path / "link").symlink_to(home)
    assert preflight.filesystem_of(tmp_path / "link", mounts) == "nfs4"
    assert preflight.filesystem_of(home, tmp_path / "none") == ""
    assert preflight.filesystem_of(tmp_path)


@pytest.mark.parametrize("filled", [False, True])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, filled: bool) -> None:
    if filled:
        put(LocalTier(tmp_path / "c"), "x/0")
    else:
        (tmp_path / "c").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "c").stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"belongs to user \d+, this process runs as \d+"):
        put(LocalTier(tmp_path / "c"), "x/0")


def test_root_too_is_refused_in_a_folder_of_another_user(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    (tmp_path / "c").mkdir()
    os.chown(tmp_path / "c", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345, this process runs as 0"):
        put(LocalTier(tmp_path / "c"), "x/0")


def test_a_command_names_the_owner_of_the_cache_of_another_user() -> None:
    """It may not even look for the FORMAT of a folder that is closed to it."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    code = """
import os, sys
from pathlib import Path
from dataload.cache.local.fsck import open_existing
os.seteuid(65534)
open_existing(Path(sys.argv[1]))
"""
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are closed to others
        Path(folder).chmod(0o711)
        put(LocalTier(cache := Path(folder) / "c"), "x/0")
        done = subprocess.run([sys.executable, "-c", code, cache], capture_output=True, text=True, check=False)
    assert "belongs to user 0, this process runs as 65534" in done.stderr


@pytest.mark.parametrize("opened", ["c", "c/blobs", "c/index/data.mdb", "**/*"])
def test_a_cache_that_others_may_write_is_refused_until_it_is_closed_to_them(tmp_path: Path, opened: str) -> None:
    put(LocalTier(path := tmp_path / "c"), "x/0")
    for entry in tmp_path.glob(opened):
        entry.chmod(entry.stat().st_mode | 0o066)
    with pytest.raises(ConfigError, match=r"other users may write to .* `chmod -R go-w .*/c` .*OnRootMismatch$"):
        put(LocalTier(path), "x/0")
    subprocess.run(["chmod", "-R", "go-w", path], check=True)
    assert look(LocalTier(path), "x/0")


def test_a_part_of_a_cache_that_another_user_owns_is_refused_until_it_is_given_back(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    put(LocalTier(path := tmp_path / "c"), "x/0")
    os.chown(path / "blobs", 12345, -1)
    with pytest.raises(ConfigError, match=r"blobs belongs to user 12345, .* run `chown -R 0 .*/c` as root$"):
        put(LocalTier(path), "x/0")
    subprocess.run(["chown", "-R", "0", path], check=True)
    assert look(LocalTier(path), "x/0")


@pytest.mark.parametrize("owner", [None, 12345])
@pytest.mark.parametrize("filled", [False, True])
def test_a_mount_that_shows_one_owner_and_mode_for_all_files_holds_a_cache_where_the_user_says_so(
    tmp_path: Path,
    mounted: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: int | None,
    *,
    filled: bool,
) -> None:
    """As CIFS, drvfs and FUSE do. `chmod` has no effect there."""
    mounted("cifs")
    (path := tmp_path / "c").mkdir(mode=0o700)
    if filled:
        put(LocalTier(path, allow_network_filesystem=True), "x/0")
    real, real_stat = os.fstat, Path.stat
    user = os.geteuid() if owner is None else owner

    def shown(status: os.stat_result) -> os.stat_result:
        named = {name: getattr(status, name) for name in ("st_mtime_ns", "st_ctime_ns", "st_atime_ns")}
        return os.stat_result((status.st_mode | 0o777, *status[1:4], user, *status[5:]), named)

    monkeypatch.setattr(os, "fstat", lambda descriptor: shown(real(descriptor)))
    monkeypatch.setattr(Path, "stat", lambda path, **options: shown(real_stat(path, **options)))
    monkeypatch.setattr(blob_file, "_trusted", set())
    for _ in range(2):
        tier = LocalTier(path, allow_network_filesystem=True)
        put(tier, "x/1")
        assert look(tier, "x/1")
        assert look(tier, "x/0") == filled
        assert tier.stats()["health"]["state"] == "normal"
        del tier
    [message] = [record.getMessage() for record in caplog.records]
    says = "other users may write to" if owner is None else "belongs to user 12345"
    assert says in message
    assert message.endswith("; it is used, as allow_network_filesystem=True says")
    with pytest.raises(ConfigError):
        put(LocalTier(path), "x/0")


def test_a_blob_that_others_may_have_written_is_fetched_again(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "c")
    put(tier, "x/0")
    put(tier, "x/2")
    tier.folder.path_of(key("x/0").digest).chmod(0o602)
    if not os.geteuid():
        os.chown(tier.folder.path_of(key("x/2").digest), 12345, 12345)
    for name in ("x/0", "x/2"):
        assert look(tier, name) == (os.geteuid() != 0 and name == "x/2")
        put(tier, name)
        assert look(tier, name)


@pytest.mark.parametrize("made_by_user", [False, True])
def test_nobody_else_may_look_into_a_cache(tmp_path: Path, *, made_by_user: bool) -> None:
    path, mask = tmp_path / "c", os.umask(0)
    try:
        if made_by_user:
            path.mkdir(mode=0o777)
        tier = LocalTier(path)
        put(tier, "x/0")
        modes = {entry: entry.stat().st_mode & 0o777 for entry in [path, *path.rglob("*")]}
    finally:
        os.umask(mask)
    assert {mode for entry, mode in modes.items() if entry.is_dir()} == {0o700}
    assert {mode for entry, mode in modes.items() if entry.is_file()} == {0o600}


@pytest.mark.parametrize("name", preflight.OUR_NAMES)
def test_planted_links_are_refused(tmp_path: Path, name: str) -> None:
    path, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    put(LocalTier(path), "x/0")
    shutil.move(path / name, elsewhere)
    (path / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"symbolic link, {name}"):
        put(LocalTier(path), "x/0")


def test_a_cache_that_another_process_creates_during_the_look_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a host start together on an empty folder."""
    made, path = tmp_path / "made", tmp_path / "c"
    put(LocalTier(made), "x/0")
    path.mkdir(0o700)
    other_file = preflight._other_file
    monkeypatch.setattr(
        preflight, "_other_file", lambda path: (shutil.copytree(made, path, dirs_exist_ok=True), other_file(path))[1]
    )
    preflight.check(path)
    assert (path / "FORMAT").exists()


def test_a_link_planted_just_after_the_look_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user could write to the folder before it became a cache."""
    path, victim = tmp_path / "c", tmp_path / "victim"
    monkeypatch.setattr(preflight, "check", lambda path, **_: (path / "locks").symlink_to(victim))
    with pytest.raises(ConfigError, match="symbolic links"):
        put(LocalTier(path), "x/0")
    assert not victim.exists()
    victim.touch()
    with pytest.raises(OSError, match="symbolic links"), KeyLocks(str(path / "locks")).hold(bytes(32), timeout=0):
        pass


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    tier, victim, folder = LocalTier(tmp_path / "c", LIMIT), tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    folder.mkdir()
    target = tier.folder.path_of(key("x/0").digest)
    target.parent.symlink_to(folder)
    put(tier, "x/0")
    assert list(folder.iterdir()) == []
    target.parent.unlink()
    target.parent.mkdir()
    target.symlink_to(victim)
    tier = LocalTier(tmp_path / "c", LIMIT)
    put(tier, "x/0")
    assert not target.is_symlink()
    assert look(tier, "x/0")
    (tmp_path / "draft").symlink_to(victim)
    with pytest.raises(FileExistsError):
        blob_file.create(tmp_path / "draft")
    assert victim.read_text() == "precious"


def test_links_in_tmp_are_not_swept(tmp_path: Path) -> None:
    put(LocalTier(tmp_path / "c"), "x/0")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("the only copy")
    (tmp_path / "c" / "tmp" / "0-0").symlink_to(tmp_path / "folder")
    (tmp_path / "c" / "tmp" / "1-1").mkdir()
    (tmp_path / "c" / "tmp" / "1-1" / "what is this").write_text("")
    (tmp_path / "c" / "tmp" / "stray").write_text("")
    tier = LocalTier(tmp_path / "c", LIMIT)
    assert look(tier, "x/0")
    put(tier, "huge")
    assert fsck.evict(tier.folder, path="bucket/x") > 0
    assert (tmp_path / "folder" / "thesis.tex").exists()


def test_the_first_format_is_refused_by_name(tmp_path: Path) -> None:
    put(LocalTier(tmp_path / "c"), "x/0")
    (tmp_path / "c" / "FORMAT").write_text(json.dumps({"format": 0}))
    with pytest.raises(ConfigError, match="has format 0, this version reads 4: remove it or name another"):
        put(LocalTier(tmp_path / "c"), "x/0")


@pytest.mark.parametrize("found", ["", "{", "[]", "{}", "7"])
def test_a_format_that_cannot_be_read_is_refused(tmp_path: Path, found: str) -> None:
    put(LocalTier(tmp_path / "c"), "x/0")
    (tmp_path / "c" / "FORMAT").write_text(found)
    with pytest.raises(ConfigError, match="has format unreadable"):
        put(LocalTier(tmp_path / "c"), "x/0")


def test_a_format_that_a_power_failure_took_back_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    )
    tier = LocalTier(tmp_path / "c")
    assert tier.folder
    assert synced[:2] == ["locks.FORMAT", "c"]


def test_a_cache_that_cannot_be_opened_just_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(LocalTier(tmp_path / "c"), "x/0")

    def mkdir(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(ConfigError, match=r"cannot be opened just now \(.*Input/output error\): end the processes"):
        fsck.open_existing(tmp_path / "c")


def test_corrupt_entries_are_no_user_error(tmp_path: Path) -> None:
    assert issubclass(CorruptEntry, OSError)
