"""What hosts share: blobs in a Valkey or Redis, one server or a cluster.

A blob is there as it is on disk, payload, checksums, name and footer, cut into parts of 8 MiB:

    dataload:1:<digest>:0      its first 8 MiB
    dataload:1:<digest>:1      the next
    dataload:1:<digest>        the rest, where the footer is: it tells how many parts there are, and is written last
    dataload:1:<digest>:lease  while some host makes it
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import mmap
import os
import posixpath
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from typing import Any

from dataload.cache import blob
from dataload.cache.address import Address, connect, nodes_of
from dataload.cache.buffers import Buffers
from dataload.cache.forks import ForkAware
from dataload.cache.health import Health
from dataload.cache.redact import redacted
from dataload.cache.threads import PATIENCE_SECONDS, Threads
from dataload.cache.tier import BlobKey
from dataload.errors import ConfigError, CorruptEntry
from dataload.metrics import Counters
from dataload.timeline import doing

PART_BYTES = 8 << 20
TRANSFERS = 4  # blobs that are read at a time: more do not make it faster, and each is in memory twice
BEHIND_BYTES = 256 << 20  # of blobs that are made and not written yet
BEHIND_SECONDS = 1.0  # that a blob waits for room among them; then it is not written
LEASE_SECONDS = 30.0
SOONEST_LOOK, LATEST_LOOK = 0.01, 0.2  # seconds between two looks whether a lease has ended

log = logging.getLogger(__name__)


class _TroubleError(Exception):
    """The cluster cannot be asked just now."""


class Cluster(ForkAware):
    """What the hosts share, as one process sees it. Any thread may use it; it connects when it is first asked.

    url: with the credentials in it, if any; never shown.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        if importlib.util.find_spec("valkey") is None:
            raise ConfigError("cluster: needs the package valkey: pip install 'dataload[cluster]'")
        self.url = url
        self.address = Address.parse(url)
        self._clock = clock
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        self.health = Health(str(self.address), self._clock)
        self._by_folder: dict[str, Counters] = {}
        self._reported: set[str] = set()
        self._connecting = threading.Lock()
        self._attempts = 0
        self._client: Any = None
        self._known: set[tuple[str, int]] = set()
        self._reading = threading.BoundedSemaphore(TRANSFERS)
        self._buffers = Buffers()
        self._behind = threading.Condition()
        self._behind_bytes = 0
        self._leases: dict[bytes, tuple[str, float]] = {}  # by token: those to be ended; the writer's alone
        self._ends = False
        self._writer = Threads(1, "dataload-blocks-cluster")  # One: a lease ends after what was made under it is there.

    def __repr__(self) -> str:
        return f"Cluster({str(self.address)!r}, {self.health.state})"

    def get(self, key: BlobKey) -> memoryview | None:
        """A blob, read-only, each byte of it checked. None: it is not there, or not sound, or nobody answers."""
        name = _name(key)
        try:
            with doing("cluster"), self._reading:
                whole = self._read(name)
        except _TroubleError:
            return None
        if whole is None:
            return None
        try:
            payload = blob.payload_of(whole, key.digest, name)
        except CorruptEntry as error:  # Who asked makes it anew, and puts that in its place.
            self._report("reading", error)
            return None
        self._count(key, hits=1, bytes=len(payload))
        return payload

    def put(self, key: BlobKey, payload: memoryview) -> None:
        """Have a blob written soon, if there is room among those that wait for it; `payload` may change meanwhile."""
        if self.health.reads.tripped or not self.health.writes.allows():
            self.counters.add(unkept=1)
            return
        size = blob.size_on_disk(len(payload), key.name)
        with doing("cluster"), self._behind:
            if not self._behind.wait_for(lambda: self._behind_bytes + size <= BEHIND_BYTES, BEHIND_SECONDS):
                self.counters.add(unkept=1)
                return
            self._behind_bytes += size
        sealed = self._buffers.take(size)
        with memoryview(sealed) as room:
            room[: len(payload)] = payload
        self._writer.submit(self._write, key, sealed, len(payload), size)
        if not self._ends:
            self._ends = True
            atexit.register(_end, weakref.ref(self))

    @contextmanager
    def alone(self, key: BlobKey) -> Iterator[None]:
        """While it lasts, other hosts that come for the same key wait, for a lease at most.

        Notes: best effort. Who has waited goes on without a lease: what was made meanwhile is there, or is made twice.
        """
        name, token, until = f"{_name(key)}:lease", os.urandom(8), self._clock() + LEASE_SECONDS
        asked = not self.health.reads.tripped and not self.health.writes.tripped
        with suppress(_TroubleError):
            if asked and not self._ask("set", name, token, nx=True, px=int(LEASE_SECONDS * 1000)):
                self._wait_for(name, token, until)
        try:
            yield
        finally:
            if asked:
                self._writer.submit(self._end_lease, name, token, until)

    def settle(self, patience: float | None = None) -> None:
        """What was put is there when this returns, or given up, or so many seconds have passed."""
        wait([self._writer.submit(lambda: None)], patience)

    def stats(self) -> dict[str, Any]:
        """Totals of this process: hits, waits, errors, unkept (blobs not written); bytes read and written (payload).

        datasets: these, by folder of the origin. health: see `Health`.
        """
        return {
            **dict.fromkeys(("hits", "waits", "errors", "unkept", "bytes", "written"), 0),
            **self.counters.snapshot(),
            "datasets": {folder: counted.snapshot() for folder, counted in list(self._by_folder.items())},
            "health": self.health.stats(),
        }

    def _read(self, name: str) -> memoryview | None:
        last = self._ask("get", name)
        if last is None:
            return None
        parts = []
        try:
            for number in range((blob.size_from(last, name) - len(last)) // PART_BYTES):
                part = self._ask("get", f"{name}:{number}")
                if part is None:  # Evicted, and so is all of it.
                    return None
                parts.append(part)
        except CorruptEntry:
            pass  # So says whoever looks at all of it.
        return memoryview(b"".join([*parts, last]) if parts else last)

    def _write(self, key: BlobKey, sealed: mmap.mmap, payload: int, size: int) -> None:
        name, last = _name(key), (size - blob.FOOTER_BYTES) // PART_BYTES * PART_BYTES
        try:
            blob.seal(sealed, payload, key.digest, key.name)
            with memoryview(sealed) as whole:
                for start in range(0, last, PART_BYTES):
                    self._ask("set", f"{name}:{start // PART_BYTES}", whole[start : start + PART_BYTES])
                self._ask("set", name, whole[last:size])
            self._count(key, written=payload)
            self.health.writes.worked()
        except _TroubleError:
            self.counters.add(unkept=1)
        finally:
            self._buffers.give_back(sealed)
            with self._behind:
                self._behind_bytes -= size
                self._behind.notify_all()

    def _end_lease(self, name: str, token: bytes, until: float) -> None:
        """And those whose end nobody heard of: others would wait for them."""
        self._leases[token] = name, until
        for known, (lease, ends) in list(self._leases.items()):
            with suppress(_TroubleError):
                if self._clock() < ends and self._ask("get", lease) == known:  # Or it is another's by now.
                    self._ask("delete", lease)
                del self._leases[known]

    def _wait_for(self, lease: str, token: bytes, until: float) -> None:
        """Until that lease has ended, or would have if it was taken just now."""
        self.counters.add(waits=1)
        pause = SOONEST_LOOK
        with doing("cluster"):
            # Its own token: the client asked twice, and the first answer was lost.
            while self._clock() < until and self._ask("get", lease) not in (None, token):
                time.sleep(pause)
                pause = min(2 * pause, LATEST_LOOK)

    def _ask(self, command: str, *args: Any, **options: Any) -> Any:
        """What the cluster answers to a method of the client. Raises _TroubleError."""
        if not self.health.reads.allows():
            raise _TroubleError
        client = None
        with doing("cluster"):
            try:
                client = self._connected()
                answer = getattr(client, command)(*args, **options)
            except Exception as error:  # A client that several threads use while nodes come and go raises anything.
                self._failed(command, client, error)
                raise _TroubleError from error
        self.health.reads.worked()
        return answer

    def _connected(self) -> Any:
        attempts = self._attempts
        with self._connecting:
            if self._client is None:
                if self._attempts != attempts:
                    raise ConnectionError("it could not be connected to a moment ago")
                self._attempts += 1
                self._client = connect(self.address, self._known)
            return self._client

    def _failed(self, command: str, client: Any, error: Exception) -> None:
        from valkey.exceptions import ClusterDownError, ResponseError

        self._report(command, error)
        if command == "set" and isinstance(error, ResponseError) and not isinstance(error, ClusterDownError):
            self.health.writes.failed()  # It is full, or only to be read.
            return
        self.health.reads.failed(for_good=True)
        with self._connecting:
            if client is None or self._client is not client:
                return
            self._known |= nodes_of(client)
            self._client = None  # One that lost all its nodes would not find them again.
        with suppress(Exception):  # Other threads are still at it, and will hear that it is gone.
            client.close()

    def _report(self, doing_what: str, error: Exception) -> None:
        self.counters.add(errors=1)
        kind = f"{doing_what} {type(error).__name__}"
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("cluster %s: trouble, going on without it: %s: %s", self.address, kind, redacted(error))

    def _count(self, key: BlobKey, **amounts: float) -> None:
        self.counters.add(**amounts)
        folder = redacted(posixpath.dirname(key.path))
        self._by_folder.setdefault(folder, Counters()).add(**amounts)


def _end(one: weakref.ref[Cluster]) -> None:
    """The program ends: what it has made should not be lost to others, if that takes no time."""
    cluster = one()
    if cluster is not None:
        cluster.settle(PATIENCE_SECONDS)


def _name(key: BlobKey) -> str:
    return f"dataload:{blob.VERSION}:{key.digest.hex()}"
