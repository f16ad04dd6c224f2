"""A Valkey or Redis as one process asks it: connected when it is needed, left alone for a while after trouble."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

from dataload.cache.cluster.url import PASSWORD, USERNAME, ClusterUrl, Node
from dataload.cache.health import CircuitBreaker, Health
from dataload.runtime.counters import Counters
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.redact import redacted
from dataload.telemetry.wait_timeline import doing

SECONDS = 1.0  # for a connection, and for each part of a value: what takes longer comes sooner from the origin
ASKED_AT_ONCE = 8  # nodes, when one is looked for that answers
# In one step: between two, the key may end and be another's. No time at all deletes it.
EXPIRE_OWN = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('pexpire', KEYS[1], ARGV[2]) end"

log = logging.getLogger(__name__)


class ClusterUnavailable(Exception):
    """It cannot be asked just now."""


class Client:
    """One server or a cluster. Any thread may use it; after a fork the child makes another.

    health: its reads are off when nobody answers, its writes when something could not be written: a server that is
    full, or too far away for large values, is still read. A node of a cluster that fails is left alone by itself.
    counters: where errors are counted. clock: seconds, monotonic.

    Notes: each method raises TroubleError, and nothing else.
    """

    def __init__(self, address: ClusterUrl, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self.health = Health(str(address), clock)
        self._address = address
        self._counters = counters
        self._clock = clock
        self._reported: set[str] = set()
        self._connecting = threading.Lock()
        self._failures = 0
        self._client: Any = None
        self._known: list[Node] = []
        self._nodes: dict[str, CircuitBreaker] = {}

    def get(self, name: str) -> Any:
        """The value, bytes; None: there is none."""
        return self._ask("get", name, name)

    def set(self, name: str, value: bytes | memoryview) -> None:
        self._ask("set", name, name, value, large=True)

    def add(self, name: str, value: bytes, seconds: float) -> bool:
        """Set it for so long, unless it is there; whether that was done."""
        return bool(self._ask("set", name, name, value, nx=True, px=int(1000 * seconds)))

    def expire(self, name: str, value: bytes, seconds: float) -> None:
        """Have it end in so long, 0: now, if that is still its value."""
        self._ask("eval", name, EXPIRE_OWN, 1, name, value, int(1000 * seconds))

    def report(self, doing_what: str, error: Exception) -> None:
        """Count an error, and log the first of its kind."""
        self._counters.add(errors=1)
        kind = f"{doing_what} {type(error).__name__}"
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("cluster %s: trouble, going on without it: %s: %s", self._address, kind, redacted(error))

    def _ask(self, command: str, name: str, *args: Any, large: bool = False, **options: Any) -> Any:
        """What is answered to a method of valkey's client, about the key `name`.

        large: that it takes too long does not say that nobody is there.
        """
        with doing("cluster"):
            client = self._connected()
            breaker = self._breaker_of(client, name)
            if breaker is not self.health.reads and not breaker.allows():  # That one was asked before connecting.
                raise ClusterUnavailable
            try:
                answer = getattr(client, command)(*args, **options)
            except Exception as error:  # A client that several threads use while nodes come and go raises anything.
                self._failed(command, client, breaker, error, large=large)
                raise ClusterUnavailable from error
        breaker.worked()
        return answer

    def _connected(self) -> Any:
        client, failures = self._client, self._failures
        if client is not None:
            return client
        if not self.health.reads.allows():
            raise ClusterUnavailable
        with self._connecting:
            if self._client is None:
                if self._failures != failures:  # while this waited for its turn
                    raise ClusterUnavailable
                try:
                    self._client = connect(self._address, self._known)
                except Exception as error:
                    self._failures += 1
                    self.report("connecting", error)
                    self.health.reads.failed(for_good=True)
                    raise ClusterUnavailable from error
                self._known = nodes_of(self._client)
                known = {f"{host}:{port}" for host, port in self._known}
                self._nodes = {name: breaker for name, breaker in self._nodes.items() if name in known}
                if self._known:  # Of a single server it says nothing yet: large values may take it too long.
                    self.health.reads.worked()
            return self._client

    def _breaker_of(self, client: Any, name: str) -> CircuitBreaker:
        """Of who has that key: the server, or a node of the cluster."""
        if not _is_cluster(client):
            return self.health.reads
        node = ""  # Nobody has it, or the nodes are just changing.
        with suppress(Exception):
            node = client.get_node_from_key(name).name
        found = self._nodes.get(node)
        return found or self._nodes.setdefault(node, CircuitBreaker(1, self._clock, lambda: None))

    def _failed(self, command: str, client: Any, breaker: CircuitBreaker, error: Exception, *, large: bool) -> None:
        import valkey
        from valkey.exceptions import ClusterDownError

        self.report(command, error)
        refused = isinstance(error, valkey.ResponseError) and not isinstance(error, ClusterDownError)
        if large or (refused and command != "get"):
            self.health.writes.failed()
            if not isinstance(error, valkey.ReadOnlyError):  # One that was a primary: there is another now.
                return
        else:
            breaker.failed(for_good=True)
        if _is_cluster(client) and type(error) in (valkey.ConnectionError, valkey.TimeoutError):
            return  # It has asked the other nodes how things stand.
        with self._connecting:
            if self._client is client:
                self._client = None  # One that lost all its nodes would not find them again.
        with suppress(Exception):  # Other threads are still at it, and will hear that it is gone.
            client.close()


def connect(address: ClusterUrl, known: Iterable[Node] = ()) -> Any:
    """Valkey's client of the cluster, or of the one server, that answers there; of a primary, if any does.

    known: nodes that the cluster was seen to have, to be asked when those of the address are gone.
    Raises whatever valkey raises.
    """
    import valkey
    import valkey.cluster

    cluster: Any = valkey.cluster
    options = {
        "username": os.environ.get(USERNAME),
        "password": os.environ.get(PASSWORD),
        "socket_timeout": SECONDS,
        "socket_connect_timeout": SECONDS,
        **address.options,
    }
    nodes = list(dict.fromkeys([*address.nodes, *known]))
    threads = DaemonExecutor(ASKED_AT_ONCE, "dataload-blocks-connect")
    asked = [threads.submit(_hello, node, options) for node in nodes]
    failure: Exception = ConnectionError(f"{address} does not answer")
    replica = None
    try:
        for (host, port), one in zip(nodes, asked, strict=True):
            wait([one])
            try:
                said = one.result()
            except (valkey.ValkeyError, OSError) as error:
                failure = error
                continue
            if said[b"mode"] == b"cluster":
                client = cluster.ValkeyCluster(startup_nodes=[cluster.ClusterNode(host, port)], **options)
                # To connect, it may turn from a node that is stopped to another. A key has one: it would be asked anew.
                client.cluster_error_retry_attempts = 0
                return client
            if said[b"role"] == b"master":
                return valkey.Valkey(host=host, port=port, **options)
            replica = replica or (host, port)
    finally:
        for one in asked:
            one.cancel()
    if replica is None:
        raise failure
    return valkey.Valkey(host=replica[0], port=replica[1], **options)


def nodes_of(client: Any) -> list[Node]:
    """The nodes that a client of a cluster knows; none of a single server's."""
    return [(node.host, node.port) for node in client.get_nodes()] if _is_cluster(client) else []


def _is_cluster(client: Any) -> bool:
    return hasattr(client, "get_nodes")


def _hello(node: Node, options: dict[str, Any]) -> dict[bytes, Any]:
    """What a server says of itself: its mode ("standalone", "cluster" or "sentinel"), its role, and more."""
    import valkey

    one: Any = valkey.Valkey(host=node[0], port=node[1], **options)
    try:
        said = one.execute_command("HELLO")
    finally:
        one.close()
    return said if isinstance(said, dict) else dict(zip(said[::2], said[1::2], strict=True))
