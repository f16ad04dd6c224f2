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
import mmap
import multiprocessing
import posixpath
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from dataload.cache.buffer_pool import BufferPool
from dataload.cache.cluster.client import Client, ClusterUnavailable
from dataload.cache.cluster.leases import Leases
from dataload.cache.cluster.url import ClusterUrl
from dataload.cache.local import blob_file
from dataload.cache.tier import BlobKey
from dataload.errors import ConfigError, CorruptEntry
from dataload.runtime.counters import Counters, charge
from dataload.runtime.executor import PATIENCE_SECONDS, DaemonExecutor
from dataload.runtime.forks import ForkAware
from dataload.runtime.redact import redacted
from dataload.telemetry.wait_timeline import doing

PART_BYTES = 8 << 20
TRANSFERS = 4  # blobs that are read at a time: more do not make it faster, and each is in memory twice
BEHIND_BYTES = 256 << 20  # of blobs that are made and not written yet
BEHIND_SECONDS = 1.0  # that a blob waits for room among them; then it is not written


class Cluster(ForkAware):
    """What the hosts share, as one process sees it. Any thread may use it; it connects when it is first asked.

    url: with the credentials in it, if any; never shown.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        if importlib.util.find_spec("valkey") is None:
            raise ConfigError("cluster: needs the package valkey: pip install 'dataload[cluster]'")
        self.url = url
        self.address = ClusterUrl.parse(url)
        self._clock = clock
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        self._client = Client(self.address, self.counters, self._clock)
        self.health = self._client.health
        self._leases = Leases(self._client, self._clock)
        self._by_folder: dict[str, Counters] = {}
        self._reading = threading.BoundedSemaphore(TRANSFERS)
        self._buffers = BufferPool()
        self._behind = threading.Condition()
        self._behind_bytes = 0
        self._ends = False
        self._writer = DaemonExecutor(
            1, "dataload-blocks-cluster"
        )  # One: a lease ends after what was made under it is there.

    def __repr__(self) -> str:
        return f"Cluster({str(self.address)!r}, {self.health.state})"

    def get(self, key: BlobKey) -> memoryview | None:
        """A blob, read-only, each byte of it checked. None: it is not there, or not sound, or nobody answers."""
        name = _name(key)
        try:
            with doing("cluster"), self._reading:
                whole = self._read(name)
        except ClusterUnavailable:
            return None
        if whole is None:
            return None
        try:
            payload = blob_file.payload_of(whole, key.digest, name)
        except CorruptEntry as error:  # Who asked makes it anew, and puts that in its place.
            self._client.report("reading", error)
            return None
        self._count(key, hits=1, bytes=len(payload))
        charge(bytes_cluster=len(payload))
        return payload

    def put(self, key: BlobKey, payload: memoryview) -> None:
        """Have a blob written soon, if there is room among those that wait for it; `payload` may change meanwhile."""
        size = blob_file.size_on_disk(len(payload), key.name)
        sealed = None if self.health.reads.tripped else self._room(size)
        if sealed is None:
            self.counters.add(unkept=1)
            return
        with memoryview(sealed) as room:
            room[: len(payload)] = payload
        self._later(self._write, key, sealed, len(payload), size)

    @contextmanager
    def key_lease(self, key: BlobKey) -> Iterator[Callable[[], None] | None]:
        """While it lasts, other hosts that come for the same key find that this one is at it.

        Gives None or, where another host is at it, what to call to wait for that one; 30 s at most.
        Notes: best effort. What was made meanwhile is there, or is made twice.
        """
        name, token, other = f"{_name(key)}:lease", None, None
        with suppress(ClusterUnavailable):
            token = self._leases.take(name)
            other = partial(self._wait, name) if token is None else None
        try:
            yield other
        finally:
            if token is not None:
                self._later(self._leases.end, token)

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
        last = self._client.get(name)
        if last is None:
            return None
        parts = []
        try:
            for number in range((blob_file.size_from(last, name) - len(last)) // PART_BYTES):
                part = self._client.get(f"{name}:{number}")
                if part is None:  # Evicted, and so is all of it.
                    return None
                parts.append(part)
        except CorruptEntry:
            pass  # So says whoever looks at all of it.
        return memoryview(b"".join([*parts, last]) if parts else last)

    def _write(self, key: BlobKey, sealed: mmap.mmap, payload: int, size: int) -> None:
        name, last = _name(key), (size - blob_file.FOOTER_BYTES) // PART_BYTES * PART_BYTES
        try:
            if not self.health.writes.allows():
                raise ClusterUnavailable  # noqa: TRY301 (as when it is asked)
            blob_file.seal(sealed, payload, key.digest, key.name)
            with memoryview(sealed) as whole:
                for start in range(0, last, PART_BYTES):
                    self._client.set(f"{name}:{start // PART_BYTES}", whole[start : start + PART_BYTES])
                self._client.set(name, whole[last:size])
            self._count(key, written=payload)
            self.health.writes.worked()
        except ClusterUnavailable:
            self.counters.add(unkept=1)
        finally:
            self._buffers.give_back(sealed)
            with self._behind:
                self._behind_bytes -= size
                self._behind.notify_all()

    def _room(self, size: int) -> mmap.mmap | None:
        """Memory for a blob that is to be written, if there is some among those that wait."""
        if size > BEHIND_BYTES:
            return None
        with doing("cluster"), self._behind:
            if not self._behind.wait_for(lambda: self._behind_bytes + size <= BEHIND_BYTES, BEHIND_SECONDS):
                return None
            try:
                sealed = self._buffers.take(size)
            except OSError:
                return None
            self._behind_bytes += size
            return sealed

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        """Have the writer do it; it is given a little time for it when the program ends."""
        self._writer.submit(call, *args)
        if not self._ends:
            self._ends = True
            if multiprocessing.parent_process() is None:
                atexit.register(_end, weakref.ref(self))
            else:  # Those end without.
                Finalize(None, _end, (weakref.ref(self),), exitpriority=0)

    def _wait(self, lease: str) -> None:
        self.counters.add(waits=1)
        self._leases.wait(lease)

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
    return f"dataload:{blob_file.VERSION}:{key.digest.hex()}"
