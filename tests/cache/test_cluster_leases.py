"""Leases of live, dead and interrupting hosts."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
from clusters import PATIENCE, Server, running_server, until  # noqa: F401
from threads import no_more_threads

from dataload.cache.cluster import leases
from dataload.cache.cluster.client import Client, ClusterUnavailable
from dataload.cache.cluster.store import Cluster
from dataload.cache.cluster.tier import ClusterTier
from dataload.cache.cluster.url import ClusterUrl
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, Kind
from dataload.runtime.counters import Counters

KEY = BlobKey("origin", "bucket/object", "version", Kind.FOOTER)
NAME = f"dataload:2:{KEY.digest.hex()}"
LEASE = f"{NAME}:lease"
GONE = -2  # what PTTL says of what is not there; -1: of what has no end

forked = multiprocessing.get_context("fork")


def host(folder: Path, server: Server) -> ClusterTier:
    return ClusterTier(LocalTier(folder / "host", 1 << 30), Cluster(server.url))


def test_a_lease_is_short_and_renewed_while_it_is_held(
    cluster_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.01)
    tier = host(tmp_path, cluster_server)
    with tier.cluster.key_lease(KEY) as other:
        assert other is None
        for _ in range(2):
            cluster_server.ask("PEXPIRE", LEASE, 1_000_000)
            until(lambda: 0 < cluster_server.ask("PTTL", LEASE) <= 3000)
    tier.cluster.settle()
    assert cluster_server.ask("EXISTS", LEASE) == 0


def hold(folder: Path, server: Server, ready: Any) -> None:
    with host(folder, server).cluster.key_lease(KEY):
        ready.set()
        signal.pause()


def test_who_is_killed_holds_nobody_up_for_long(cluster_server: Server, tmp_path: Path) -> None:
    ready = forked.Event()
    holder = forked.Process(target=hold, args=(tmp_path, cluster_server, ready))
    holder.start()
    assert ready.wait(PATIENCE)
    holder.kill()
    holder.join()
    left = cluster_server.ask("PTTL", LEASE)
    assert left == GONE or 0 <= left <= 3000


def make(folder: Path, server: Server) -> None:
    """Make one blob that is written only when the process exits."""
    tier, ends = host(folder, server), threading.Event()
    tier.cluster._writer.submit(ends.wait, PATIENCE)
    Finalize(None, ends.set, exitpriority=100)

    def fill(allocate: Allocate) -> None:
        allocate(1_000_000)

    with tier.key_lock(BlobKey("origin", "bucket/object", "version", Kind.FOOTER, "group")):
        tier.get_or_fill(KEY, fill)


def test_a_worker_that_was_forked_hands_over_what_it_has_made(cluster_server: Server, tmp_path: Path) -> None:
    worker = forked.Process(target=make, args=(tmp_path, cluster_server))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert cluster_server.ask("EXISTS", NAME) == 1
    assert cluster_server.ask("DBSIZE") == 1, "its leases have ended"


def test_a_lease_of_another_that_comes_in_between_is_not_ended(
    cluster_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own lease may expire just before the command that releases it."""
    tier = host(tmp_path, cluster_server)
    with tier.cluster.key_lease(KEY):
        asked: Any = tier.cluster._client._client
        execute, ended = asked.execute_command, []

        def late(*words: Any, **options: Any) -> Any:
            if words[0] != "GET":
                ended.append(words[0])
                cluster_server.ask("SET", LEASE, "another's")
            return execute(*words, **options)

        monkeypatch.setattr(asked, "execute_command", late)
    tier.cluster.settle()
    assert ended
    assert cluster_server.ask("GET", LEASE) == b"another's"


def test_a_lease_that_no_thread_can_renew_is_not_taken(cluster_server: Server) -> None:
    """The process falls back to fetching alone, and its next lease is renewed again."""
    client = Client(ClusterUrl.parse(cluster_server.url), Counters())
    client.get("connected before threads run out")
    held = leases.Leases(client)
    with no_more_threads(), pytest.raises(ClusterUnavailable):
        held.take("x:lease")
    assert client.get("x:lease") is None
    assert held._held == set()
    token = held.take("x:lease")
    assert token is not None
    held.end("x:lease", token)


def test_a_blob_that_no_thread_can_write_is_written_at_once(cluster_server: Server) -> None:
    cluster = Cluster(cluster_server.url)
    key = BlobKey("origin", "bucket/x", "1", Kind.FOOTER)
    assert cluster.get(key) is None
    with no_more_threads():
        cluster.put(key, memoryview(b"x" * 1000))
    assert cluster.get(key) == b"x" * 1000
    assert cluster._queued_bytes == 0
