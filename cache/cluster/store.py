"""The blob store that hosts share: a Valkey or Redis, one server or a cluster.

A blob has the same format as on disk (payload, checksums, name, footer), split into parts of 8 MiB. With a key, the
digest is keyed, and a tag of 32 bytes follows the footer; see `Mac`:

    dataload:2:<digest>:0      its first 8 MiB
    dataload:2:<digest>:1      the next 8 MiB
    dataload:2:<digest>        the rest, with the footer: it gives the number of parts and is written last
    dataload:2:<digest>:lease  exists while a host makes the blob
"""

from __future__ import annotations

import atexit
import importlib.util
import mmap
import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from dataload.cache import blob_file
from dataload.cache.buffer_pool import blob_buffers
from dataload.cache.cluster.client import Client, ClusterUnavailable
from dataload.cache.cluster.leases import Leases
from dataload.cache.cluster.mac import Mac
from dataload.cache.cluster.url import ClusterUrl
from dataload.cache.tier import BlobKey, Waited
from dataload.errors import ConfigError, CorruptEntry
from dataload.runtime.counters import Counters, charge
from dataload.runtime.executor import PATIENCE_SECONDS, DaemonExecutor
from dataload.runtime.forks import ForkAware
from dataload.runtime.instances import Instances
from dataload.runtime.turns import in_turn
from dataload.telemetry.wait_timeline import doing

PART_BYTES = 8 << 20
TRANSFERS = 4  # concurrent reads of blobs: more are not faster, and each is in memory twice
WRITE_BEHIND_BYTES = 256 << 20  # capacity of the write-behind queue

_waits_for_space: ContextVar[bool] = ContextVar("waits_for_space", default=False)


@contextmanager
def waiting_for_space() -> Iterator[None]:
    """Make the blobs of the block wait for space in the write-behind queue. Other blobs without space are dropped.

    A wait ends: each write before it succeeds or times out.
    """
    token = _waits_for_space.set(True)
    try:
        yield
    finally:
        _waits_for_space.reset(token)


class Cluster(ForkAware):
    """A process's view of the shared store. Thread-safe; it connects at the first request.

    Args:
        url: URL with the credentials, if any; never logged.
        clock: Monotonic time in seconds.
        key: Key of the values; see `Mac`. Never logged.

    Raises:
        ConfigError: The URL or the key is invalid, or the package valkey is missing.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic, key: str | None = None) -> None:
        if importlib.util.find_spec("valkey") is None:
            raise ConfigError("cluster: needs the package valkey: pip install 'dataload[cluster]'")
        self.url, self.key = url, key
        self._mac = Mac(key)
        self.address = ClusterUrl.parse(url)
        self._clock = clock
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self.counters = Counters()
        self._client = Client(self.address, self.counters, self._clock)
        self.health = self._client.health
        self._leases = Leases(self._client, self._clock)
        self._reading = threading.BoundedSemaphore(TRANSFERS)
        self._queue_changed = threading.Condition()
        self._queued_bytes = 0
        self._exit_registered = False
        # One thread: a lease must end after the blobs made under it are written.
        self._writer = DaemonExecutor(1, "dataload-blocks-cluster")

    def __repr__(self) -> str:
        return f"Cluster({str(self.address)!r}, {self.health.state})"

    def get(self, key: BlobKey) -> memoryview | None:
        """Return a verified, read-only blob. Return None if it is missing or corrupt, or no server answers."""
        name = self._name(key)
        try:
            with doing("cluster"), self._reading:
                read = self._read(name)
        except ClusterUnavailable:
            return None
        if read is None:
            return None
        try:
            if not self._mac.is_valid(name, *read):
                what = "is damaged, or was not written with this cluster key"
                raise CorruptEntry(f"{name} {what}")  # noqa: TRY301 (as below)
            payload = blob_file.payload_of(read[0], key.digest, name)
            key.check_structure(payload, name)
        except CorruptEntry as error:  # The caller makes the blob again and overwrites this one.
            self.health.report("reading", error)
            return None
        self.counters.add(hits=1, bytes=len(payload))
        charge(bytes_cluster=len(payload))
        return payload

    def put(self, key: BlobKey, payload: memoryview) -> None:
        """Queue a copy of a blob for writing, if the write-behind queue has space; see `waiting_for_space`."""
        size = blob_file.file_bytes(len(payload), key.name) + self._mac.tag_bytes
        sealed = None if self.health.reads.tripped else self._queue_buffer(size)
        if sealed is None:
            self.counters.add(unkept=1)
            return
        with memoryview(sealed) as copy:
            copy[: len(payload)] = payload
        self._later(self._write, key, sealed, len(payload), size)

    def remove(self, key: BlobKey) -> None:
        """Queue the removal of a blob, after the writes before it. Best effort."""
        self._later(self._remove, self._name(key))

    @contextmanager
    def key_lease(self, key: BlobKey) -> Iterator[Callable[[], Waited] | None]:
        """Hold a lease on the key for the duration of the block, visible to other hosts.

        Yields:
            None; or, if another host holds the lease, a function that waits as long as that host renews it.

        Notes:
            Best effort: two hosts may make the same blob.
        """
        name, token, wait_for_other = f"{self._name(key)}:lease", None, None
        with suppress(ClusterUnavailable):
            token = self._leases.take(name)
            wait_for_other = partial(self._wait, name, key.name) if token is None else None
        try:
            yield wait_for_other
        finally:
            if token is not None:
                self._later(self._leases.end, name, token)

    def origin_took(self, seconds: float, num_bytes: int) -> None:
        """Record a request to the origin for some bytes: a cluster that takes longer is left out."""
        self._client.pace.origin_took(seconds, num_bytes)

    def settle(self, patience: float | None = None) -> None:
        """Wait until queued blobs are written or given up, `patience` seconds at most."""
        with in_turn(0):
            wait([self._writer.submit(lambda: None)], patience)

    def stats(self) -> dict[str, Any]:
        """Return the totals of this process.

        Returns:
            hits, waits, errors: counts.
            unkept: blobs that were not written.
            bytes, written: bytes of payload read and written.
            health: see `Health`.
        """
        return {
            **dict.fromkeys(("hits", "waits", "errors", "unkept", "bytes", "written"), 0),
            **self.counters.snapshot(),
            "health": self.health.stats(),
        }

    def _name(self, key: BlobKey) -> str:
        return f"dataload:{blob_file.VERSION}:{self._mac.name(key.digest)}"

    def _read(self, name: str) -> tuple[memoryview, bytes] | None:
        """Return a value and its tag, both unverified."""
        tagged = self._client.get(name)
        if tagged is None:
            return None
        end = max(0, len(tagged) - self._mac.tag_bytes)
        last, tag = memoryview(tagged)[:end], tagged[end:]
        parts = []
        try:
            size = blob_file.size_from(bytes(last[-blob_file.FOOTER_BYTES :]), name)
            for number in range((size - len(last)) // PART_BYTES):
                part = self._client.get(f"{name}:{number}")
                if part is None:  # A part was evicted: the blob is incomplete.
                    return None
                parts.append(part)
        except CorruptEntry:
            pass  # `get` verifies the whole blob and reports the error.
        return memoryview(b"".join([*parts, last])) if parts else last, tag

    def _write(self, key: BlobKey, sealed: mmap.mmap, payload: int, size: int) -> None:
        name, end = self._name(key), size - self._mac.tag_bytes
        last = (end - blob_file.FOOTER_BYTES) // PART_BYTES * PART_BYTES
        try:
            if not self.health.writes.allows():
                raise ClusterUnavailable  # noqa: TRY301 (handled below like a failed command)
            blob_file.seal(sealed, payload, key.kind, key.digest, key.name)
            with memoryview(sealed) as whole:
                whole[end:size] = self._mac.tag(name, whole[:end])
                for start in range(0, last, PART_BYTES):
                    self._client.set(f"{name}:{start // PART_BYTES}", whole[start : start + PART_BYTES])
                self._client.set(name, whole[last:size])
            self.counters.add(written=payload)
            self.health.writes.worked()
        except ClusterUnavailable:
            self.counters.add(unkept=1)
        finally:
            blob_buffers.give_back(sealed)
            with self._queue_changed:
                self._queued_bytes -= size
                self._queue_changed.notify_all()

    def _remove(self, name: str) -> None:
        with suppress(ClusterUnavailable):
            self._client.delete(name)

    def _queue_buffer(self, size: int) -> mmap.mmap | None:
        """Return memory for a blob in the write-behind queue; None if the queue is full."""
        if size > WRITE_BEHIND_BYTES:
            return None
        with doing("cluster"), self._queue_changed:
            while self._queued_bytes + size > WRITE_BEHIND_BYTES:
                if not _waits_for_space.get():  # Training goes on.
                    return None
                self._queue_changed.wait()
            try:
                sealed = blob_buffers.take(size)
            except OSError:
                return None
            self._queued_bytes += size
            return sealed

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        """Run `call` in the writer thread, or here if no thread can be started. The program's exit waits a little."""
        try:
            with in_turn(0):  # in submission order, whatever the turn of the caller
                self._writer.submit(call, *args)
        except RuntimeError:
            call(*args)
            return
        if not self._exit_registered:
            self._exit_registered = True
            if multiprocessing.parent_process() is None:
                atexit.register(_flush_at_exit, weakref.ref(self))
            else:  # multiprocessing children skip atexit.
                Finalize(None, _flush_at_exit, (weakref.ref(self),), exitpriority=0)

    def _wait(self, lease: str, what: str) -> Waited:
        self.counters.add(waits=1)
        self._leases.wait(lease, what)
        return Waited.FOR_HOST


def _flush_at_exit(reference: weakref.ref[Cluster]) -> None:
    """Give queued blobs a little time to be written before the process exits."""
    cluster = reference()
    if cluster is not None:
        cluster.settle(PATIENCE_SECONDS)


_clusters: Instances[tuple[str, str, str | None], Cluster] = Instances(inherited=True)


def shared_cluster(url: str, cache: str, key: str | None = None) -> Cluster:
    """Return this process's view of the store at a URL, for all datasets of a cache: they share connections and queue.

    Args:
        url: URL of the store; see `Cluster`.
        cache: The location of the cache of this host; see `Tier`.
        key: Key of the values; see `Mac`.

    Raises:
        ConfigError: As for `Cluster`.
    """
    return _clusters.get((url, cache, key), lambda: Cluster(url, key=key))
