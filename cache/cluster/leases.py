"""Leases in a Valkey: keys that mark work in progress on a host and expire soon after the host dies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from dataload.cache.cluster.client import Client, ClusterUnavailable
from dataload.runtime.executor import DaemonExecutor
from dataload.telemetry.wait_timeline import doing

LEASE_SECONDS = 3.0  # time to live; other hosts wait this long for a dead host
RENEWAL_SECONDS = 0.5
WAIT_SECONDS = 30.0  # longest wait for a live host
MIN_POLL, MAX_POLL = 0.01, 0.2  # seconds between polls of another host's lease


class Leases:
    """The leases that a process holds. Thread-safe; a forked child creates its own.

    Args:
        client: The connection to the cluster.
        clock: Monotonic time in seconds.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._held: dict[bytes, str] = {}  # names of leases by their unique tokens
        self._changed = threading.Condition()
        self._renewing = DaemonExecutor(1, "dataload-blocks-lease")

    def take(self, name: str) -> bytes | None:
        """Acquire a lease and return its token for `end`. Return None if another process holds it.

        Raises:
            ClusterUnavailable: The cluster cannot be used now.
        """
        if self._client.health.writes.tripped:
            raise ClusterUnavailable
        token = os.urandom(8)
        if not self._client.add(name, token, LEASE_SECONDS):
            return None
        with self._changed:
            self._held[token] = name
            first = len(self._held) == 1
        if first:
            try:
                self._renewing.submit(self._renew)
            except RuntimeError as error:  # No thread can be started, so nothing would renew the lease.
                self.end(token)
                raise ClusterUnavailable from error
        return token

    def end(self, token: bytes) -> None:
        """Release a lease."""
        with self._changed:
            name = self._held.pop(token)
            self._changed.notify()
        with suppress(ClusterUnavailable):
            self._client.expire(name, token, 0)

    def wait(self, name: str) -> None:
        """Wait until another process's lease ends, `WAIT_SECONDS` at most."""
        deadline, pause = self._clock() + WAIT_SECONDS, MIN_POLL
        with suppress(ClusterUnavailable), doing("cluster"):
            while self._clock() < deadline and self._client.get(name) is not None:
                time.sleep(pause)
                pause = min(2 * pause, MAX_POLL)

    def _renew(self) -> None:
        """Renew all held leases until none is left."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._held, RENEWAL_SECONDS):
                    return
                held = list(self._held.items())
            for token, name in held:
                with suppress(ClusterUnavailable):
                    self._client.expire(name, token, LEASE_SECONDS)
