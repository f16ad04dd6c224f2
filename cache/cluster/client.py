"""A lazy connection to a Valkey or Redis, with circuit breakers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, as_completed, wait
from contextlib import suppress
from threading import Lock
from typing import Any

from dataload.cache.cluster.pace import Pace
from dataload.cache.cluster.url import PASSWORD, USERNAME, ClusterUrl, Node
from dataload.cache.health import CircuitBreaker, Health
from dataload.runtime.counters import Counters
from dataload.runtime.executor import DaemonExecutor
from dataload.telemetry.wait_timeline import doing

TIMEOUT_SECONDS = 1.0  # to connect, and to read or write a part of a value: the origin is faster than a slower cluster
SLOTS = 16_384  # of each cluster
# Atomic: between two commands the key may expire and belong to another process. An expiry of 0 deletes the key.
EXPIRE_OWN = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('pexpire', KEYS[1], ARGV[2]) end"


class ClusterUnavailable(Exception):
    """The cluster cannot be used now."""


class Client:
    """A client of one server or a cluster. Thread-safe; a forked child creates its own.

    Args:
        address: The servers.
        counters: Counts the errors.
        clock: Monotonic time in seconds.

    Attributes:
        health: Reads trip when no server answers. Writes trip on their own: a server that is full, or too slow for
            large values, is still read. Each node of a cluster has its own breaker.
        pace: Reads also trip if the origin answers sooner.

    Notes:
        Every command raises ClusterUnavailable and no other error.
    """

    def __init__(self, address: ClusterUrl, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self.health = Health(str(address), clock, counters)
        self._address = address
        self._clock = clock
        self._connecting = Lock()
        self._failures = 0
        self._client: Any = None
        self._known: list[Node] = []
        self._nodes: dict[str, CircuitBreaker] = {}
        self.pace = Pace()

    def get(self, name: str) -> Any:
        """Return the value as bytes, or None if the key does not exist."""
        return self._call("get", name, name)

    def set(self, name: str, value: bytes | memoryview) -> None:
        """Write a value."""
        self._call("set", name, name, value, large=True)

    def delete(self, name: str) -> None:
        """Delete a key, without the right to DEL."""
        self._call("pexpire", name, name, 0)

    def add(self, name: str, value: bytes, seconds: float) -> bool:
        """Set a key that expires after `seconds`, unless it exists. Return whether it was set."""
        return bool(self._call("set", name, name, value, nx=True, px=int(1000 * seconds)))

    def expire(self, name: str, value: bytes, seconds: float) -> None:
        """Let a key expire after `seconds`, or delete it if 0, provided it still has this value."""
        self._call("eval", name, EXPIRE_OWN, 1, name, value, int(1000 * seconds))

    def _call(self, command: str, name: str, *args: Any, large: bool = False, **options: Any) -> Any:
        """Call a method of valkey's client for the key `name`, and return its result.

        Args:
            command: Name of the method.
            name: The key; it selects the node.
            *args: Arguments of the method.
            large: The value may be large, so a timeout trips the writes only, not the node.
            **options: Keyword arguments of the method.
        """
        with doing("cluster"):
            client = self._connected()
            breaker = self._breaker_of(client, name)
            if breaker is not self.health.reads and not breaker.allows():  # `_connected` checked health.reads.
                raise ClusterUnavailable
            since = time.perf_counter()
            try:
                answer = getattr(client, command)(*args, **options)
            except Exception as error:  # During a failover, a client shared by threads raises arbitrary errors.
                self._failed(command, client, breaker, error, large=large)
                raise ClusterUnavailable from error
            finally:
                if large:  # Its time tells nothing about reads, for which it may have taken the attempt of a pause.
                    self.health.reads.inconclusive()
        if breaker is not self.health.reads:
            breaker.worked()
        if not large:
            self._compare(time.perf_counter() - since, len(answer) if isinstance(answer, bytes) else 0)
        return answer

    def _compare(self, seconds: float, num_bytes: int) -> None:
        """Leave out the cluster for a pause if the origin answers sooner."""
        reads = self.health.reads
        if self.pace.is_late(seconds, num_bytes, alone=reads.tripped):
            known = ", and the origin less" if self.pace.has_figures else ""
            self.health.reason = f"it takes {seconds:.2f} s to answer{known}"
            reads.failed(for_good=True)
        else:
            reads.worked()

    def _connected(self) -> Any:
        client, failures = self._client, self._failures
        if client is not None and not self.health.reads.tripped:
            return client
        if not self.health.reads.allows():
            raise ClusterUnavailable
        with self._connecting:
            if self._client is None:
                if self._failures != failures:  # another thread failed to connect while this one waited
                    raise ClusterUnavailable
                try:
                    self._client = connect(self._address, self._known)
                except Exception as error:
                    self._failures += 1
                    self.health.report("connecting", error)
                    self.health.reads.failed(for_good=True)
                    raise ClusterUnavailable from error
                nodes = self._client.get_nodes() if _is_cluster(self._client) else []
                self._known = [(node.host, node.port) for node in nodes]
                known = {f"{host}:{port}" for host, port in self._known}
                self._nodes = {name: breaker for name, breaker in self._nodes.items() if name in known}
                if self._known:  # A single server may still be too slow for large values.
                    self.health.reads.worked()
            return self._client

    def _breaker_of(self, client: Any, name: str) -> CircuitBreaker:
        """Return the breaker of the server, or of the cluster node, that holds the key."""
        if not _is_cluster(client):
            return self.health.reads
        node = ""  # No node holds the key, or the nodes are changing.
        with suppress(Exception):
            node = client.get_node_from_key(name).name
        found = self._nodes.get(node)
        return found or self._nodes.setdefault(node, CircuitBreaker(1, self._clock, lambda: None))

    def _failed(self, command: str, client: Any, breaker: CircuitBreaker, error: Exception, *, large: bool) -> None:
        """Pause what an error of a command concerns: all of its server, or writes alone."""
        import valkey
        from valkey.exceptions import ClusterDownError

        self.health.report(f"calling {command}", error)
        is_rejected = isinstance(error, valkey.ResponseError) and not isinstance(error, ClusterDownError)
        if not (large or (is_rejected and command != "get")):
            breaker.failed(for_good=True)
            self._recover(client, error)
            return
        self.health.writes.failed()
        if isinstance(error, valkey.ReadOnlyError):  # A failover: this server is no longer the primary.
            self._recover(client, error)
        else:
            self.health.reads.inconclusive()

    def _recover(self, client: Any, error: Exception) -> None:
        """Look for the nodes again after an error. If that does not help, the next command connects anew."""
        import valkey
        from valkey.exceptions import SlotNotCoveredError

        if _is_cluster(client) and type(error) in (valkey.ConnectionError, valkey.TimeoutError):
            return  # The client has already refreshed its view of the nodes.
        if isinstance(error, SlotNotCoveredError):  # The other nodes still serve their slots.
            with suppress(Exception):
                client.nodes_manager.initialize()
                return
        with self._connecting:
            if self._client is client:
                self._client = None  # A client that lost all its nodes would not find them again.
        with suppress(Exception):  # Other threads may still use it; their commands fail.
            client.close()


def connect(address: ClusterUrl, known: Iterable[Node] = ()) -> Any:
    """Connect to the first server that answers, and prefer a primary to a replica.

    Args:
        address: The configured servers.
        known: Nodes seen earlier, in case the configured ones are gone.

    Returns:
        Valkey's client of the cluster or the single server.

    Raises:
        Exception: Any error of valkey, from the last server that failed.
    """
    import valkey

    options = {
        "username": os.environ.get(USERNAME),
        "password": os.environ.get(PASSWORD),
        "socket_timeout": TIMEOUT_SECONDS,
        "socket_connect_timeout": TIMEOUT_SECONDS,
        **address.options,
    }
    nodes = list(dict.fromkeys([*address.nodes, *known]))
    answers = _greet(nodes, options)
    patience = 2 * TIMEOUT_SECONDS  # to connect and to answer; a look-up of a host's name has no timeout
    deadline = time.monotonic() + patience
    failure: Exception = ConnectionError(f"{address} does not answer")
    replica = None
    try:
        for (host, port), answer in zip(nodes, answers, strict=True):
            if wait([answer], deadline - time.monotonic()).not_done:
                failure = TimeoutError(f"{host}:{port} did not answer within {patience:g} s: check its name and DNS")
                continue
            try:
                info = answer.result()
                if info[b"mode"] == b"cluster":
                    return _connect_to_cluster((host, port), options)
            except Exception as error:  # noqa: BLE001 (valkey raises errors of many types)
                failure = error
                continue
            if info[b"mode"] == b"sentinel":
                failure = ConnectionError(f"{host}:{port} is a Sentinel: name the primary that it watches")
                continue
            if info[b"role"] == b"master":
                return valkey.Valkey(host=host, port=port, **options)
            replica = replica or (host, port)
    finally:
        for answer in answers:
            answer.cancel()
    if replica is None:
        raise failure
    return valkey.Valkey(host=replica[0], port=replica[1], **options)


def _connect_to_cluster(node: Node, options: dict[str, Any]) -> Any:
    """Return valkey's client of the cluster of this node. Raise an exception if the node knows no primary."""
    import valkey.cluster

    cluster: Any = valkey.cluster
    client = cluster.ValkeyCluster(startup_nodes=[cluster.ClusterNode(*node)], **options)
    # Connecting may skip a stopped node. For a key, retries would only ask the same node again.
    client.cluster_error_retry_attempts = 0
    _ask_answering_nodes(client.nodes_manager, options)
    return client


def _ask_answering_nodes(manager: Any, options: dict[str, Any]) -> None:
    """Make valkey refresh its list of nodes through nodes that answer HELLO alone.

    Valkey refreshes its list after each lost connection. It asks one node after the other, until it knows the nodes of
    all slots. In a network partition, each takes a timeout.
    """
    discover, mutex, done = manager.initialize, Lock(), 0

    def initialize() -> None:
        nonlocal done
        before = done
        with mutex:
            if done > before:  # Another thread, which lost its connection at the same time, has asked meanwhile.
                return
            nodes = list(manager.startup_nodes.values())
            answers = _greet([(node.host, node.port) for node in nodes], options)

            def ask() -> bool:
                answered = [node for node, answer in zip(nodes, answers, strict=True) if _has_answered(answer)]
                manager.startup_nodes = {node.name: node for node in answered}
                discover()
                return len(manager.slots_cache) == SLOTS

            knows_all, patience = False, 2 * TIMEOUT_SECONDS  # as for `connect`
            with suppress(Exception):
                if any(_has_answered(answer) for answer in as_completed(answers, patience)):
                    knows_all = ask()
            if not knows_all:  # A node that lost its state answers, too, but knows no other node.
                wait(answers, patience)
                ask()
            done += 1

    manager.initialize = initialize


def _has_answered(answer: Future[dict[bytes, Any]]) -> bool:
    return answer.done() and answer.exception() is None


def _is_cluster(client: Any) -> bool:
    return hasattr(client, "get_nodes")


def _greet(nodes: Sequence[Node], options: dict[str, Any]) -> list[Future[dict[bytes, Any]]]:
    """Send HELLO to all nodes at the same time."""
    threads = DaemonExecutor(len(nodes), "dataload-blocks-connect")
    return [threads.submit(_hello, node, options) for node in nodes]


def _hello(node: Node, options: dict[str, Any]) -> dict[bytes, Any]:
    """Return a server's reply to HELLO: its mode ("standalone", "cluster" or "sentinel"), role, and more."""
    import valkey

    client: Any = valkey.Valkey(host=node[0], port=node[1], **options)
    try:
        reply = client.execute_command("HELLO")
    finally:
        client.close()
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
