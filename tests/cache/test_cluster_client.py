"""The cluster's client when servers fail, change roles or stop: which servers it contacts, and how often."""

from __future__ import annotations

import socket
import threading
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import valkey
from clusters import PATIENCE, Clock, Server, ServerCluster, running_cluster, running_server, standing_clock, until  # noqa: F401
from valkey.cluster import ValkeyCluster

from dataload.cache.cluster import client
from dataload.cache.cluster.client import Client, ClusterUnavailable
from dataload.cache.cluster.url import ClusterUrl
from dataload.runtime.counters import Counters

Clients = Callable[[str], Client]


@pytest.fixture
def clients(clock: Clock) -> Clients:
    return lambda url: Client(ClusterUrl.parse(url), Counters(), clock)


def test_a_sentinel_is_told_from_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_hello", lambda *_: {b"server": b"redis", b"mode": b"sentinel"})
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:26379 is a Sentinel: name the primary that it watches"):
        client.connect(ClusterUrl.parse("valkey://127.0.0.1:26379"))


@pytest.mark.slow
def test_a_node_that_stands_still_is_asked_once_and_the_others_go_on(
    three_primaries: ServerCluster, clients: Clients, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = clients(three_primaries.url)
    names = [f"{number}" for number in range(30)]
    for name in names:
        one.set(name, b"x")
    gone = three_primaries.primaries[0]
    here = [name for name in names if three_primaries.owner(name) is not gone]
    lost = [name for name in names if name not in here]
    asked, execute = [], ValkeyCluster._execute_command

    def spy(self: Any, node: Any, *args: Any, **options: Any) -> Any:
        asked.append(node.port)
        return execute(self, node, *args, **options)

    monkeypatch.setattr(ValkeyCluster, "_execute_command", spy)
    gone.stop()
    for _ in range(3):
        for name in lost:
            with pytest.raises(ClusterUnavailable):
                one.get(name)
        assert [one.get(name) for name in here] == [b"x"] * len(here)
    assert one.health.state == "normal"
    clock.now += 1.5
    with pytest.raises(ClusterUnavailable):
        one.get(lost[0])
    clock.now += 1.5
    assert one.get(here[0]) == b"x"
    with pytest.raises(ClusterUnavailable):
        one.get(lost[0])  # It is left alone for longer, though others have answered.
    assert asked.count(gone.port) == 2
    gone.go_on()

    def asked_again() -> bool:
        clock.now += 100
        with suppress(ClusterUnavailable):
            return one.get(lost[0]) == b"x"
        return False

    until(asked_again)


@pytest.mark.slow
def test_a_slot_that_no_node_holds_costs_no_connection(tmp_path: Path, clients: Clients, clock: Clock) -> None:
    """The requests for the other slots go on, and the slot is used again once a node holds it."""
    with ServerCluster(tmp_path / "servers", primaries=1) as servers:
        [server], one = servers.primaries, clients(servers.url)
        slot = server.ask("CLUSTER", "KEYSLOT", "lost")
        server.ask("CLUSTER", "DELSLOTS", slot)
        one.set("here", b"x")
        connected = one._client
        for _ in range(5):
            with pytest.raises(ClusterUnavailable):
                one.get("lost")
            assert one.get("here") == b"x"
        server.ask("CLUSTER", "ADDSLOTS", slot)
        clock.now += 2
        with pytest.raises(ClusterUnavailable):
            one.get("lost")
        assert one.get("lost") is None
        assert one._client is connected


def test_who_was_a_primary_is_left_for_who_is_one(cluster_server: Server, tmp_path: Path, clients: Clients) -> None:
    with Server(tmp_path / "other") as other:
        one = clients(f"{cluster_server.url},{other.address}")
        one.set("a", b"x")
        cluster_server.ask("REPLICAOF", "127.0.0.1", other.port)
        with pytest.raises(ClusterUnavailable):
            one.set("b", b"x")
        assert one.health.state == "degraded"
        one.set("b", b"x")
        assert other.ask("GET", "b") == b"x"


def test_a_write_that_takes_too_long_keeps_nobody_from_reading(
    cluster_server: Server, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = clients(cluster_server.url)
    one.set("a", b"x")

    def slow(*_: Any, **__: Any) -> None:
        raise valkey.TimeoutError("Timeout writing to socket")

    monkeypatch.setattr(valkey.Valkey, "set", slow)
    with pytest.raises(ClusterUnavailable):
        one.set("b", b"x")
    assert one.health.state == "degraded"
    assert one.get("a") == b"x"
    with pytest.raises(ClusterUnavailable):
        one.add("c", b"", 1.0)
    assert one.health.state == "off", "what is small arrives, if anybody is there"


def test_a_large_value_that_is_written_first_keeps_nobody_from_reading(
    cluster_server: Server, clients: Clients, clock: Clock
) -> None:
    """It takes the one attempt of a pause, and tells nothing about reads."""
    one = clients(cluster_server.url)
    one.set("a", b"x")
    cluster_server.kill()
    with pytest.raises(ClusterUnavailable):
        one.get("a")
    assert one.health.state == "off"
    cluster_server.start()
    clock.now += 2
    one.set("b", b"y")
    assert one.get("b") == b"y"
    assert one.health.state == "normal"


def test_nodes_are_asked_all_at_once_whether_they_answer(
    cluster_server: Server, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client uses the first server that answers, in the order of the URL."""
    nobody = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
    together, hello = threading.Barrier(4), client._hello

    def meet(*args: Any) -> Any:
        together.wait(PATIENCE)
        return hello(*args)

    monkeypatch.setattr(client, "_hello", meet)
    one = clients("valkey://" + ",".join([*nobody, cluster_server.address]))
    one.set("a", b"x")
    assert cluster_server.ask("GET", "a") == b"x"


def test_no_node_waits_for_another_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many nodes a partition hides, they take one timeout together."""
    together = threading.Barrier(9)
    monkeypatch.setattr(client, "_hello", lambda *_: together.wait(PATIENCE))
    answers = client._greet([("127.0.0.1", port) for port in range(9)], {})
    assert sorted(answer.result() for answer in answers) == [*range(9)]


@pytest.mark.slow
def test_a_partition_is_noticed_by_all_nodes_at_once(
    three_primaries: ServerCluster, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first timeout, no node is asked for the others before it has answered."""
    one = clients(three_primaries.url)
    one.set("a", b"x")
    together, hello = threading.Barrier(2), client._hello
    asked, execute = list[Any](), valkey.Valkey.execute_command

    def meet(*args: Any) -> Any:
        together.wait(PATIENCE)
        return hello(*args)

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(args[0])
        return execute(self, *args, **options)

    monkeypatch.setattr(client, "_hello", meet)
    monkeypatch.setattr(valkey.Valkey, "execute_command", spy)
    for primary in three_primaries.primaries:
        primary.stop()
    try:
        with pytest.raises(ClusterUnavailable):
            one.get("a")
        assert asked == ["HELLO", "HELLO"]
    finally:
        for primary in three_primaries.primaries:
            primary.go_on()


def test_a_node_that_stands_still_does_not_delay_the_look_for_the_others(
    three_primaries: ServerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, released = client.connect(ClusterUrl.parse(three_primaries.url)).nodes_manager, threading.Event()
    hello, gone = client._hello, three_primaries.primaries[0].port

    def stands_still(node: Any, options: Any) -> Any:
        return released.wait() if node[1] == gone else hello(node, options)

    monkeypatch.setattr(client, "_hello", stands_still)
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(manager.initialize).result(PATIENCE)
        finally:
            released.set()


@pytest.mark.slow
def test_a_name_that_is_looked_up_without_end_is_passed_over(
    cluster_server: Server, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the resolver hangs, no timeout of a socket ends the call."""
    released, look_up = threading.Event(), socket.getaddrinfo

    def hangs(host: Any, *args: Any, **options: Any) -> Any:
        if host == "valkey.test":
            released.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    lost, other = clients("valkey://valkey.test:6379"), clients(f"valkey://valkey.test:6379,{cluster_server.address}")
    with ThreadPoolExecutor(2) as pool:
        failed, written = pool.submit(lost.get, "a"), pool.submit(other.set, "a", b"x")
        try:
            with pytest.raises(ClusterUnavailable) as error:
                failed.result(PATIENCE)
            written.result(PATIENCE)
        finally:
            released.set()
    assert "valkey.test:6379 did not answer within 2 s: check its name and DNS" in str(error.value.__cause__)
    assert cluster_server.ask("GET", "a") == b"x"


@pytest.mark.slow
def test_nodes_whose_names_are_looked_up_without_end_do_not_hang_the_look_for_others(
    three_primaries: ServerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    with closing(client.connect(ClusterUrl.parse(three_primaries.url))) as one, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(client, "TIMEOUT_SECONDS", 0.05)
        monkeypatch.setattr(client, "_hello", lambda *_: released.wait())
        looked = pool.submit(one.nodes_manager.initialize)
        try:
            with pytest.raises(valkey.exceptions.ValkeyClusterException):
                looked.result(PATIENCE)
        finally:
            released.set()


def lose_state(server: Server) -> None:
    """Restart a node of a cluster without its nodes.conf: it answers and knows no other node."""
    server.kill()
    (server.folder / "nodes.conf").unlink()
    server.start()


def test_a_node_that_lost_its_state_is_passed_over(three_primaries: ServerCluster, clients: Clients) -> None:
    lost = three_primaries.primaries[0]
    name = next(name for name in map(str, range(100)) if three_primaries.owner(name) is not lost)
    lose_state(lost)
    one = clients(three_primaries.url)
    one.set(name, b"x")
    assert one.get(name) == b"x"


@pytest.mark.slow
def test_a_cluster_is_found_again_though_a_node_that_lost_its_state_answers_first(
    three_primaries: ServerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, hello, (lost, *others) = threading.Event(), client._hello, three_primaries.primaries

    def answers_later(node: Any, options: Any) -> Any:
        return hello(node, options) if node[1] == lost.port else released.wait()

    with closing(client.connect(ClusterUrl.parse(three_primaries.url))) as one:
        lose_state(lost)
        monkeypatch.setattr(client, "_hello", answers_later)
        monkeypatch.setattr(client, "wait", lambda *given: (released.set(), wait(*given)))
        one.nodes_manager.initialize()
        assert {other.address for other in others} <= {node.name for node in one.get_nodes()}


def test_a_client_that_lost_all_its_nodes_leaves_the_error_to_valkey() -> None:
    discovered = list[int]()
    manager = SimpleNamespace(startup_nodes={}, slots_cache={}, initialize=lambda: discovered.append(1))
    client._ask_answering_nodes(manager, {})
    manager.initialize()
    assert discovered == [1]


class CountedLock:
    """A lock that counts the threads that have tried to take it."""

    def __init__(self) -> None:
        self._lock, self.tries = allocate_lock(), 0

    def __enter__(self) -> None:
        self.tries += 1
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


@pytest.mark.slow
def test_threads_that_lose_their_connections_together_look_for_the_nodes_once(
    three_primaries: ServerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, mutex = client.connect(ClusterUrl.parse(three_primaries.url)), CountedLock()
    monkeypatch.setattr(client, "Lock", lambda: mutex)
    del one.nodes_manager.initialize
    client._ask_answering_nodes(one.nodes_manager, {})
    asked, go_on = list[Any](), threading.Event()
    monkeypatch.setattr(client, "_hello", lambda node, _: asked.append(node) or go_on.wait(PATIENCE))
    threads = [threading.Thread(target=one.nodes_manager.initialize) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: mutex.tries == len(threads))
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(asked) == len({*asked}) > 0


def test_who_waits_for_a_connection_that_fails_does_not_try_it_again(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = clients("valkey://127.0.0.1:1")
    tried, allowed = [], []
    allows = one.health.reads.allows
    monkeypatch.setattr(one.health.reads, "allows", lambda: allowed.append(1) or allows())

    def fails(*_: Any) -> None:
        tried.append(1)
        until(lambda: len(allowed) == 4)
        raise ConnectionError("no server answers")

    monkeypatch.setattr(client, "connect", fails)

    def get(_: int) -> None:
        with suppress(ClusterUnavailable):
            one.get("a")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(get, range(4)))
    assert len(tried) == 1


class Nodes:
    """A stand-in for a cluster's client after the cluster has changed."""

    def __init__(self, numbers: Iterator[int]) -> None:
        number = next(numbers)
        self.node = type("Node", (), {"host": f"10.0.0.{number}", "port": 1, "name": f"10.0.0.{number}:1"})

    def get_nodes(self) -> list[Any]:
        return [self.node]

    def get_node_from_key(self, _: str) -> Any:
        return self.node

    def get(self, _: str) -> None:
        raise OSError("it is gone")

    def close(self) -> None:
        pass


def test_nodes_that_are_gone_are_forgotten(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(100))
    monkeypatch.setattr(client, "connect", lambda *_: Nodes(numbers))
    one = clients("valkey://127.0.0.1:1")
    for _ in range(5):
        with pytest.raises(ClusterUnavailable):
            one.get("a")
    assert one._known == [("10.0.0.4", 1)]
    assert [*one._nodes] == ["10.0.0.4:1"]
