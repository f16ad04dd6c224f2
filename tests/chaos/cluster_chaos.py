"""Two hosts with many threads and a cluster whose nodes are killed and stopped repeatedly, for `make chaos`."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clusters import ServerCluster

from dataload.cache import health
from dataload.cache.cluster import store
from dataload.cache.cluster.store import Cluster
from dataload.cache.cluster.tier import ClusterTier
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, Kind

EVENTS, BLOBS, THREADS = 60, 400, 12


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_is_right_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(health, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(store, "PART_BYTES", 64 << 10)
    over = threading.Event()

    def work(number: int) -> int:
        chance, tier, requests = random.Random(f"{seed} {number}"), tiers[number % 2], 0
        while not over.is_set():
            blob = chance.randrange(BLOBS)
            data = bytes([blob % 256]) * (1000 + blob * 700)
            key = BlobKey("origin", "bucket/x", "1", Kind.FOOTER, f"{blob}")

            def fill(allocate: Allocate, data: bytes = data) -> None:
                allocate(len(data))[:] = data

            with tier.key_lock(BlobKey("origin", "bucket/x", "1", Kind.FOOTER, f"group {blob}")) as other:
                if other is not None:
                    other()
                brought = tier.fetch_from_cluster([key])
                assert (tier.get_or_fill(key, fill) if brought is None else brought[0]) == data
            requests += 1
        return requests

    with ServerCluster(tmp_path / "servers") as servers, ThreadPoolExecutor(THREADS) as pool:
        tiers = [
            ClusterTier(LocalTier(tmp_path / f"host-{number}", 20_000_000, "lru"), Cluster(servers.url))
            for number in range(2)
        ]
        working = [pool.submit(work, number) for number in range(THREADS)]
        chance = random.Random(seed)
        try:
            for _ in range(EVENTS):
                one = chance.choice(servers.primaries)
                lose, regain = chance.choice([(one.kill, one.start), (one.stop, one.go_on)])
                lose()
                over.wait(2 * chance.random())
                regain()
                over.wait(chance.random())
        finally:
            over.set()
        assert min(one.result(120) for one in working) > 0
        for tier in tiers:
            tier.settle()
            counted = tier.stats()["cluster"]
            assert min(counted["hits"], counted["written"], counted["errors"]) > 0
