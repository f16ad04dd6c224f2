"""Threads share a filesystem of fsspec. If its calls share a cursor or a connection, one thread calls it at a time."""

from __future__ import annotations

import ftplib
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.ftp import FTPFileSystem

from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.origin.engine import Fsspec
from dataload.cache.origin.version import unwrapped, version_of

BLOCK = 4096
DATA = np.random.default_rng(3).bytes(256 * BLOCK + 17)


class OneCursor(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A folder of one file, whose calls share a cursor. It raises an error if a second thread calls it."""

    protocol = "one-cursor"
    cachable = False

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._inside = threading.RLock()
        self._cursor = os.open(path, os.O_RDONLY)
        self.is_lost = False

    def _connect(self) -> None:
        self.is_lost = False

    @contextmanager
    def _entered(self) -> Iterator[None]:
        assert self._inside.acquire(blocking=False), "two threads call it at a time"
        try:
            if self.is_lost:
                raise EOFError("the connection is lost")
            yield
        finally:
            self._inside.release()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        with self._entered():
            status = Path(self._path).stat()
            return {"name": path, "size": status.st_size, "type": "file", "mtime": status.st_mtime}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        with self._entered():
            return [self.info(f"{path}/x")] if detail else [f"{path}/x"]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with self._entered():
            os.lseek(self._cursor, start or 0, os.SEEK_SET)
            return os.read(self._cursor, (len(DATA) if end is None else end) - (start or 0))


@pytest.fixture(
    params=[lambda origin: origin, lambda origin: DirFileSystem("root", origin)], ids=["itself", "in dirfs"]
)
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> TierCacheFileSystem:
    (tmp_path / "x").write_bytes(DATA)
    origin = request.param(OneCursor(str(tmp_path / "x")))
    return TierCacheFileSystem(
        fs=origin, cache_dir=str(tmp_path / "cache"), block_bytes=BLOCK, skip_instance_cache=True
    )


def test_one_thread_at_a_time_reads(fs: TierCacheFileSystem) -> None:
    assert fs.cat_file("folder/x") == DATA


@pytest.mark.parametrize("call", [
    lambda fs: fs.info("folder/x", refresh=True)["size"],
    lambda fs: fs.ls("folder")[0]["size"],
])  # fmt: skip
def test_one_thread_at_a_time_lists(fs: TierCacheFileSystem, call: Callable[[Any], int]) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, [fs] * 500)) == [len(DATA)] * 500


def test_a_lost_connection_is_opened_again(fs: TierCacheFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the server is down at the first attempt."""
    monkeypatch.setattr("dataload.cache.origin.retries.FIRST_PAUSE", 0.001)
    origin = unwrapped(fs.fs)[0]
    origin.is_lost = True
    connect, failures = origin._connect, [ConnectionRefusedError("down")]

    def connect_later() -> None:
        if failures:
            raise failures.pop()
        connect()

    monkeypatch.setattr(origin, "_connect", connect_later)
    assert fs.cat_file("folder/x") == DATA
    assert not failures


class FtpConnection:
    """A connection to a server with one file, which cannot stop a transfer."""

    encrypts = False

    def prot_p(self) -> None:
        self.encrypts = True

    def mlsd(self, _path: str) -> list[tuple[str, dict[str, str]]]:
        return [("x", {"type": "file", "size": str(len(DATA))})]

    def retrbinary(self, _command: str, callback: Callable[[bytes], None], rest: int, **_: Any) -> None:
        callback(DATA[rest:])

    def abort(self) -> None:
        raise ftplib.error_perm("502 ABOR is not implemented")

    def close(self) -> None:
        pass


class FtpFilesystem(FTPFileSystem):  # type: ignore[misc]  # fsspec has no types
    def _connect(self) -> None:
        self.ftp = FtpConnection()


@pytest.mark.parametrize("tls", [False, True])
def test_all_connections_of_ftp_encrypt_their_data_like_the_first(*, tls: bool) -> None:
    filesystem = FtpFilesystem("host", tls=tls, block_size=BLOCK)
    engine = Fsspec(filesystem, "requested")
    connections = [filesystem.ftp]
    version = version_of(filesystem.info("/x"))
    found = b"".join(engine.parts("/x", BLOCK, 2 * BLOCK, version, 30.0))  # after which fsspec reconnects
    assert found == DATA[BLOCK : 2 * BLOCK]
    connections.append(filesystem.ftp)
    with suppress(EOFError), engine.lock:
        raise EOFError("the server closed the connection")
    for _ in range(2):
        with engine.lock:
            connections.append(filesystem.ftp)
    assert len(set(connections)) == 3
    assert [each.encrypts for each in connections] == [tls] * 4


def test_all_engines_of_a_filesystem_share_its_lock(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    one, another = OneCursor(str(tmp_path / "x")), OneCursor(str(tmp_path / "x"))
    engines = [Fsspec(each, "requested") for each in (one, DirFileSystem("a", one), DirFileSystem("b", one))]
    assert len({id(engine.lock) for engine in engines}) == 1
    assert Fsspec(another, "requested").lock is not engines[0].lock


def test_the_members_of_an_archive_are_read_whole(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("x.bin")
        member.size = len(DATA)
        archive.addfile(member, io.BytesIO(DATA))
    fs = TierCacheFileSystem(
        target_protocol="tar",
        target_options={"fo": str(tmp_path / "a.tar")},
        cache_dir=str(tmp_path / "cache"),
        block_bytes=BLOCK,
        skip_instance_cache=True,
    )
    assert fs.cat_file("x.bin") == DATA


@pytest.mark.parametrize("protocol", ["file", "memory", "http"])
def test_threads_call_other_filesystems_at_the_same_time(protocol: str) -> None:
    engine = Fsspec(fsspec.filesystem(protocol), "requested")
    with engine.lock, ThreadPoolExecutor(1) as pool:

        def other() -> bool:
            with engine.lock:
                return True

        assert pool.submit(other).result(200)
