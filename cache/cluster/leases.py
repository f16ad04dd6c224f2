"""Leases in a Valkey: keys that tell other hosts that this one is at something, and end soon after it has died."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from dataload.cache.cluster.client import Client, ClusterUnavailable
from dataload.runtime.executor import DaemonExecutor
from dataload.telemetry.wait_timeline import doing

LEASE_SECONDS = 3.0  # that others wait for one that died
RENEWAL_SECONDS = 0.5
WAIT_SECONDS = 30.0  # for one that lives
SOONEST_LOOK, LATEST_LOOK = 0.01, 0.2  # seconds between two looks whether a lease has ended


class Leases:
    """Those that a process holds. Any thread may use it; after a fork the child makes another.

    clock: seconds, monotonic.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._held: dict[bytes, str] = {}  # by what is in them, different each time
        self._changed = threading.Condition()
        self._renewing = DaemonExecutor(1, "dataload-blocks-lease")

    def take(self, name: str) -> bytes | None:
        """What `end` has to be told; None: another has it. Raises TroubleError."""
        if self._client.health.writes.tripped:
            raise ClusterUnavailable
        token = os.urandom(8)
        if not self._client.add(name, token, LEASE_SECONDS):
            return None
        with self._changed:
            self._held[token] = name
            if len(self._held) == 1:
                self._renewing.submit(self._renew)
        return token

    def end(self, token: bytes) -> None:
        with self._changed:
            name = self._held.pop(token)
            self._changed.notify()
        with suppress(ClusterUnavailable):
            self._client.expire(name, token, 0)

    def wait(self, name: str) -> None:
        """Until another's has ended, or has lasted too long."""
        until, pause = self._clock() + WAIT_SECONDS, SOONEST_LOOK
        with suppress(ClusterUnavailable), doing("cluster"):
            while self._clock() < until and self._client.get(name) is not None:
                time.sleep(pause)
                pause = min(2 * pause, LATEST_LOOK)

    def _renew(self) -> None:
        """As long as any is held."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._held, RENEWAL_SECONDS):
                    return
                held = list(self._held.items())
            for token, name in held:
                with suppress(ClusterUnavailable):
                    self._client.expire(name, token, LEASE_SECONDS)
