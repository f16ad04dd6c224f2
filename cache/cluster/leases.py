"""Leases in a Valkey: keys that mark work in progress on a host and expire soon after the host dies."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from dataload.cache.cluster.client import Client, ClusterUnavailable
from dataload.cache.tier import FILL_SECONDS, MAKE_SECONDS
from dataload.runtime.renewals import Renewals
from dataload.telemetry.wait_timeline import doing

LEASE_SECONDS = 3.0  # time to live; other hosts wait this long for a dead host
RENEWAL_SECONDS = 0.5
MIN_POLL, MAX_POLL = 0.01, 0.2  # seconds between polls of another host's lease

WAITS = "waiting for another host, which runs and has been making %s for more than %g s"

log = logging.getLogger(__name__)


class Leases(Renewals[tuple[str, bytes]]):
    """The leases that a process holds. Thread-safe; a forked child creates its own.

    Args:
        client: The connection to the cluster.
        clock: Monotonic time in seconds.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(RENEWAL_SECONDS, "dataload-blocks-lease")
        self._client = client
        self._clock = clock

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
        try:
            self.hold((name, token))
        except RuntimeError as error:
            self._delete(name, token)
            raise ClusterUnavailable from error
        return token

    def end(self, name: str, token: bytes) -> None:
        """Release a lease."""
        if self.release((name, token)):
            self._delete(name, token)

    def wait(self, name: str, what: str) -> None:
        """Wait until another process's lease ends, `MAKE_SECONDS` at most. It ends soon after its host dies.

        Args:
            name: Name of the lease.
            what: Name of the result that the other process makes, for the log.
        """
        begun, pause, is_told, is_bounded = self._clock(), MIN_POLL, False, False
        with suppress(ClusterUnavailable), doing("cluster"):
            while (waited := self._clock() - begun) < MAKE_SECONDS and (token := self._client.get(name)) is not None:
                if waited > LEASE_SECONDS and not is_bounded:
                    is_bounded = True
                    self._client.expire(name, token, LEASE_SECONDS)  # A host that holds it renews it sooner.
                if waited > FILL_SECONDS and not is_told:
                    is_told = True
                    log.warning(WAITS, what, FILL_SECONDS)
                time.sleep(pause)
                pause = min(2 * pause, MAX_POLL)

    def renew(self, held: Iterable[tuple[str, bytes]]) -> None:
        """Extend leases before they expire."""
        for name, token in held:
            with suppress(ClusterUnavailable):
                self._client.expire(name, token, LEASE_SECONDS)

    def _delete(self, name: str, token: bytes) -> None:
        with suppress(ClusterUnavailable):
            self._client.expire(name, token, 0)
