"""Several hosts train on one dataset: bytes read from the origin, and failures of the shared cluster."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from clusters import PATIENCE, Server, ServerCluster, running_server, until  # noqa: F401
from row_groups import make_in_background

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.cache.cluster import store
from dataload.cache.cluster.store import Cluster
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import BlobKey
from dataload.cli import app
from dataload.errors import ConfigError
from dataload.formats import parquet
from dataload.loader import capacity
from dataload.planning.orders import part_of
from dataload.planning.warm import warm as warm_from_python
from dataload.rows.background_decoder.client import BackgroundDecoder
from dataload.rows.making.pipeline import make_cached

WIDTH, ROWS = 64, 330


forked = multiprocessing.get_context("fork")  # four times as fast as importing torch again


@pytest.fixture(autouse=True)
def _each_row_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat small row groups as large ones: they share no blocks, and are not all loaded before the first batch."""
    monkeypatch.setattr(parquet, "SHARED_BYTES", 0)
    monkeypatch.setattr(capacity, "AHEAD_BYTES", 1, raising=False)


def rows_of(first: int, count: int) -> pa.Table:
    ids = np.arange(first, first + count)
    values = (ids[:, None] * WIDTH + np.arange(WIDTH)).astype(np.float32).ravel()
    return pa.table({"id": ids, "x": pa.FixedSizeListArray.from_arrays(pa.array(values), WIDTH)})


def write(bucket: Any, groups: int) -> str:
    """Write files of at most 20 row groups; return their URL."""
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    for first in range(0, groups, 20):
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, rows_of(0, 1).schema, **plain) as writer:
            for number in range(first, min(first + 20, groups)):
                writer.write_table(rows_of(number * ROWS, ROWS))
        bucket.put(f"data/{first:04d}.parquet", sink.getvalue().to_pybytes())
    bucket.server.reset()
    return bucket.url("data")


Hosts = Callable[..., Any]


@pytest.fixture
def hosts(bucket: Any, tmp_path: Path) -> Hosts:
    """Return a function that opens the dataset on a new host with an empty disk."""
    numbers = iter(range(100))

    def host(url: str, cache_bytes: int = 1 << 30, cluster: str | None = None) -> Any:
        cache = CacheConfig(str(tmp_path / f"host-{next(numbers)}"), cache_bytes, cluster=cluster)
        return make_dataset(url, storage_options=bucket.options, cache=cache)

    return host


def size_of(dataset: Any) -> int:
    return sum(group.bytes for group in dataset.row_groups)


def fetched(bucket: Any) -> int:
    """Return the bytes that the origin has sent since the last call."""
    sent = bucket.server.stats()["get_bytes"]
    bucket.server.reset()
    return int(sent)


def epoch(loader: Any) -> list[int]:
    """Return the rows of an epoch after checking their values."""
    return [row for batch in loader for row in checked(batch)]


def checked(batch: dict[str, torch.Tensor]) -> list[int]:
    expected = (batch["id"][:, None] * WIDTH + torch.arange(WIDTH)).to(torch.float32)
    assert torch.equal(batch["x"], expected), "a row has the bytes of another row"
    return batch["id"].tolist()


def on_node(dataset: Any, node: int, nodes: int, **options: Any) -> Any:
    world = World(node, nodes, 0, 1)
    return make_loader(dataset, 50, world=world, window=nodes, drop_last=True, seed=3, **options)


def work(requests: Connection, open_loader: Callable[[], Any]) -> None:
    """Run a rank: for each request, iterate over an epoch and send its rows."""
    loader = open_loader()
    while True:
        requests.recv()
        requests.send(epoch(loader))


@contextmanager
def processes(open_loaders: Iterable[Callable[[], Any]]) -> Iterator[list[Connection]]:
    """Run a process for each loader. They share a network, because namespaces need root and time."""
    with ExitStack() as stack:
        ends = []
        for open_loader in open_loaders:
            ours, theirs = map(stack.enter_context, forked.Pipe())
            process = forked.Process(target=work, args=(theirs, open_loader))
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            ends.append(ours)
        yield ends


def together(ranks: list[Connection]) -> list[list[int]]:
    """Run an epoch on all ranks at once; return the rows of each rank."""
    for rank in ranks:
        rank.send("an epoch")
    return [rank.recv() for rank in ranks]


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_private_caches_hold_a_part_each_and_nothing_is_fetched_twice(
    bucket: Any, hosts: Hosts, tmp_path: Path, nodes: int
) -> None:
    groups = 119
    url = write(bucket, groups)
    whole = hosts(url)
    decoded = whole.rowstore.row_groups.num_bytes
    size, footers = size_of(whole), fetched(bucket)
    limit = int(1.1 * decoded / nodes)

    def loader_of(node: int) -> Any:
        cache = CacheConfig(str(tmp_path / f"node-{node}"), limit)
        return on_node(make_dataset(url, storage_options=bucket.options, cache=cache), node, nodes)

    with processes(partial(loader_of, node) for node in range(nodes)) as running:
        seen = together(running)
        assert len(set().union(*seen)) == sum(map(len, seen)) == groups * ROWS // (50 * nodes) * 50 * nodes
        first = fetched(bucket) - nodes * footers
        assert 0.99 * size <= first <= size + (nodes - 1) * size / groups
        parts = [part_of(whole.manifest, node, nodes) for node in range(nodes)]
        assert first == sum(whole.row_groups[group].bytes for part in parts for group in part)

        assert together(running) != seen
        assert fetched(bucket) == 0
    if nodes == 4:  # A loader that assigns row groups to nodes in each epoch refetches most of them.
        peers = [hosts(url, limit) for _ in range(nodes)]
        for number in range(2):
            fetched(bucket)
            for node, dataset in enumerate(peers):
                sampler = torch.utils.data.DistributedSampler(range(groups), nodes, node)  # type: ignore[arg-type]
                sampler.set_epoch(number)
                for group in sampler:
                    make_cached(dataset.rowstore.row_groups.caches[0], group)
        assert fetched(bucket) > 0.6 * size


def test_nodes_that_join_move_few_row_groups(bucket: Any, hosts: Hosts) -> None:
    """The number of streams is divisible by each number of nodes."""
    manifest = hosts(write(bucket, 240)).manifest
    owners: dict[int, list[int]] = {}
    for nodes in (1, 2, 3, 4, 6):
        owner = [-1] * 240
        for node in range(nodes):
            for group in part_of(manifest, node, nodes, num_streams=12):
                owner[group] = node
        assert -1 not in owner
        owners[nodes] = owner
    for before, after in ((1, 2), (2, 3), (3, 4), (4, 6)):
        moved = sum(a != b for a, b in zip(owners[before], owners[after], strict=True)) / 240
        assert moved <= (after - before) / after + 12 / 240


def test_what_leaves_the_origin_does_not_grow_with_the_nodes(bucket: Any, hosts: Hosts) -> None:
    """Computed from the partition, which the runs on 1, 2 and 4 nodes match to the byte."""
    manifest = hosts(write(bucket, 240)).manifest
    size = sum(group.bytes for group in manifest.row_groups)
    for nodes in range(1, 9):
        parts = [
            sum(manifest.row_groups[group].bytes for group in part_of(manifest, node, nodes)) for node in range(nodes)
        ]
        assert size <= sum(parts) <= size + (nodes - 1) * size / 240
        assert max(parts) <= size / nodes + 2 * size / 240


def test_a_second_job_finds_everything_in_the_cluster(bucket: Any, hosts: Hosts, cluster_server: Server) -> None:
    url = write(bucket, 60)
    first = hosts(url, cluster=cluster_server.url)
    loader = make_loader(first, 50, seed=1)
    rows = sorted(epoch(loader))
    assert rows == list(range(60 * ROWS))
    first.blocks.settle()
    assert fetched(bucket) <= 1.05 * size_of(first)

    second = hosts(url, cluster=cluster_server.url)
    loader = make_loader(second, 50, seed=2)
    assert sorted(epoch(loader)) == rows
    assert fetched(bucket) <= 0.01 * size_of(first)
    assert loader.stats().bytes_cluster > 0.95 * size_of(first)
    assert "from the cluster, 0 bytes from the origin" in str(loader.stats())
    assert second.blocks.stats()["bytes_cluster"] >= loader.stats().bytes_cluster
    assert sorted(epoch(make_loader(second, 50, seed=2))) == rows
    assert fetched(bucket) == 0


def sent(server: Server) -> int:
    """Return the bytes that the server has sent to all clients so far."""
    return int(server.ask("INFO", "stats")["total_net_output_bytes"])


def test_the_ranks_of_a_host_transfer_each_row_group_once(
    bucket: Any, hosts: Hosts, tmp_path: Path, cluster_server: Server
) -> None:
    url, ranks = write(bucket, 60), 4
    first = hosts(url, cluster=cluster_server.url).rowstore.row_groups
    assert warm_from_python(first, range(60)) == 60

    def loader_of(rank: int) -> Any:
        cache = CacheConfig(str(tmp_path / "new host"), 1 << 30, cluster=cluster_server.url)
        dataset = make_dataset(url, storage_options=bucket.options, cache=cache)
        return make_loader(dataset, 50, world=World(rank, ranks, rank, ranks))

    before = sent(cluster_server)
    with processes(partial(loader_of, rank) for rank in range(ranks)) as running:
        assert set().union(*together(running)) == set(range(60 * ROWS))
    assert first.num_bytes < sent(cluster_server) - before < 1.2 * first.num_bytes


def transfers(monkeypatch: pytest.MonkeyPatch) -> list[BlobKey]:
    """Return the keys of the blobs that will arrive. The first arrives once another reader waits for it, or has it."""
    other_came, found = threading.Event(), list[BlobKey]()
    get, wait = Cluster.get, LocalTier.wait_for_holder

    def slow(self: Cluster, key: BlobKey) -> memoryview | None:
        blob = get(self, key)
        if blob is not None:
            found.append(key)
            if len(found) > 1:
                other_came.set()
            assert other_came.wait(PATIENCE)
        return blob

    monkeypatch.setattr(Cluster, "get", slow)
    monkeypatch.setattr(LocalTier, "wait_for_holder", lambda *given: (other_came.set(), wait(*given))[1])
    return found


@pytest.mark.parametrize("what", ["manifest", "row group"])
def test_readers_of_a_host_transfer_each_blob_once(
    bucket: Any, hosts: Hosts, tmp_path: Path, cluster_server: Server, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    url = write(bucket, 1)
    assert warm_from_python(hosts(url, cluster=cluster_server.url).rowstore.row_groups, range(1)) == 1
    cache = CacheConfig(str(tmp_path / "new host"), 1 << 30, cluster=cluster_server.url)
    read = partial(make_dataset, url, storage_options=bucket.options, cache=cache)
    reads = (
        [read] * 2
        if what == "manifest"
        else [partial(make_cached, read().rowstore.row_groups.caches[0], 0) for _ in range(2)]
    )
    arrived = transfers(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        for reader in [pool.submit(each) for each in reads]:
            assert reader.result(2 * PATIENCE)
    assert len(arrived) == len({*arrived}) > 0


def test_a_row_group_from_the_cluster_is_transferred_within_the_memory_budget(
    bucket: Any, hosts: Hosts, cluster_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write(bucket, 1)
    assert warm_from_python(hosts(url, cluster=cluster_server.url).rowstore.row_groups, range(1)) == 1
    blobs = hosts(url, cluster=cluster_server.url).rowstore.row_groups.caches[0]
    cluster, held, reserved, leases = blobs.tier.cluster, blobs.memory.held, list[int](), list[bytes]()
    get = cluster.get

    def noted(key: BlobKey) -> memoryview | None:
        reserved.append(held.reserved)
        leases.extend(cluster_server.ask("KEYS", "*:lease"))
        return get(key)

    monkeypatch.setattr(cluster, "get", noted)
    with ThreadPoolExecutor(1) as pool:
        with held.reserve(held.total):
            waits = pool.submit(make_cached, blobs, 0)
            until(lambda: held._waiters or waits.done())
            assert reserved == []
        assert waits.result(PATIENCE)
    assert reserved == [2 * size for size in blobs.sizes_on_disk(0)]
    assert leases == [], "no other host waits for a transfer"
    assert held.idle


def test_jobs_that_race_on_a_cold_dataset_fetch_it_once(bucket: Any, hosts: Hosts, cluster_server: Server) -> None:
    url = write(bucket, 60)
    size, footers = size_of(hosts(url)), fetched(bucket)
    together = threading.Barrier(2)

    def job(seed: int) -> list[int]:
        dataset = hosts(url, cluster=cluster_server.url)
        together.wait(PATIENCE)
        found = sorted(epoch(make_loader(dataset, 50, seed=seed, window=2)))
        dataset.blocks.settle()
        return found

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(job, (1, 1))] == [list(range(60 * ROWS))] * 2
    assert fetched(bucket) <= 1.05 * size + footers


def test_waiting_for_another_host_holds_no_memory(bucket: Any, hosts: Hosts, cluster_server: Server) -> None:
    blobs = hosts(write(bucket, 2), cluster=cluster_server.url).rowstore.row_groups.caches[0]
    lease = f"dataload:1:{blobs.key(0).digest.hex()}:lease"
    cluster_server.ask("SET", lease, "another's")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(make_cached, blobs, 0)
        until(lambda: blobs.blocks.tier.stats()["cluster"]["waits"])
        until(lambda: blobs.memory.held.idle)
        assert not waits.done()
        assert make_cached(blobs, 1), "others go on meanwhile"
        cluster_server.ask("DEL", lease)
        assert waits.result(PATIENCE)


def test_a_host_takes_no_lease_after_waiting_for_another_host(
    bucket: Any, hosts: Hosts, cluster_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = hosts(write(bucket, 1), cluster=cluster_server.url).rowstore.row_groups.caches[0]
    tier, lease, leased = blobs.blocks.tier, f"dataload:1:{blobs.key(0).digest.hex()}:lease", []
    bring = tier.fetch_from_cluster

    def looks(keys: Any) -> Any:
        leased.append(cluster_server.ask("EXISTS", lease))
        return bring(keys)

    monkeypatch.setattr(tier, "fetch_from_cluster", looks)
    cluster_server.ask("SET", lease, "another's")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(make_cached, blobs, 0)
        until(lambda: tier.stats()["cluster"]["waits"])
        cluster_server.ask("DEL", lease)
        assert waits.result(PATIENCE)
    assert leased == [1, 0], "the lease of the other host, and then none"


def test_files_are_shared_too(bucket: Any, tmp_path: Path, cluster_server: Server) -> None:
    data = np.random.default_rng(0).bytes(9_500_000)
    bucket.put("x", data)

    def host(name: str) -> Any:
        options = {"cache_dir": str(tmp_path / name), "block_bytes": "1MiB", "cluster": cluster_server.url}
        return fsspec.filesystem("tiercache", target_protocol="s3", target_options=bucket.options, **options)

    first, second, third = host("a"), host("b"), host("c")
    fetched(bucket)
    first.prefetch(f"{bucket.name}/x", wait=True)
    first.blocks.settle()
    assert fetched(bucket) == len(data)
    assert second.cat_file(f"{bucket.name}/x") == data
    third.prefetch(f"{bucket.name}/x", wait=True)
    assert third.cat_file(f"{bucket.name}/x", 1_000_000, 3_000_000) == data[1_000_000:3_000_000]
    assert fetched(bucket) == 0
    assert second.stats()["bytes_cluster"] == third.stats()["bytes_cluster"] == len(data)


def test_a_prefetch_takes_from_the_cluster_only_what_fits(bucket: Any, tmp_path: Path, cluster_server: Server) -> None:
    data = np.random.default_rng(0).bytes(9 << 20)
    bucket.put("x", data)

    def host(name: str, cache_bytes: str) -> Any:
        options = {"cache_dir": str(tmp_path / name), "block_bytes": "1MiB", "cluster": cluster_server.url}
        target = {"target_protocol": "s3", "target_options": bucket.options}
        return fsspec.filesystem("tiercache", cache_bytes=cache_bytes, **target, **options)

    large, small = host("large", "1GB"), host("small", "2.5MiB")
    large.prefetch(f"{bucket.name}/x", wait=True)
    large.blocks.settle()
    before = sent(cluster_server)
    small.prefetch(f"{bucket.name}/x", wait=True)
    assert small.stats()["bytes_cluster"] == 2 << 20
    assert sent(cluster_server) - before < 3 << 20
    assert small.cat_file(f"{bucket.name}/x") == data


def test_a_python_call_returns_when_the_cluster_has_the_rows(
    bucket: Any, hosts: Hosts, cluster_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write(bucket, 4)
    first = hosts(url, cluster=cluster_server.url)
    store, is_settling = first.blocks.tier.cluster, threading.Event()
    send, settle = store._write, store.settle
    monkeypatch.setattr(store, "_write", lambda *blob: (is_settling.wait(PATIENCE), send(*blob)))
    monkeypatch.setattr(store, "settle", lambda: (is_settling.set(), settle()))
    assert warm_from_python(first.rowstore.row_groups, range(4)) == 4
    assert is_settling.is_set()
    fetched(bucket)
    assert sorted(epoch(make_loader(hosts(url, cluster=cluster_server.url), 50))) == list(range(4 * ROWS))
    assert fetched(bucket) <= 0.01 * size_of(first)


def test_warming_waits_for_a_cluster_that_is_slower_than_the_origin(
    bucket: Any, hosts: Hosts, cluster_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_groups = hosts(write(bucket, 4), cluster=cluster_server.url).rowstore.row_groups
    [blobs] = row_groups.caches
    cluster = blobs.tier.cluster
    cluster.settle()
    monkeypatch.setattr(store, "WRITE_BEHIND_BYTES", 3 * sum(blobs.sizes_on_disk(0)) // 2)
    send = cluster._write

    def slow(*blob: Any) -> None:
        until(lambda: cluster._queue_changed._waiters or cluster.stats()["unkept"] or others.is_set())
        others.set()
        send(*blob)

    others = threading.Event()
    monkeypatch.setattr(cluster, "_write", slow)
    assert warm_from_python(row_groups, range(4)) == 4
    assert cluster.stats()["unkept"] == 0
    assert cluster_server.ask("DBSIZE") > 4


Warm = Callable[..., tuple[int, str, str]]


@pytest.fixture
def warm(bucket: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Warm:
    """Return a function that runs `dataload warm` and returns exit code, stdout and stderr."""
    for name in (name for name in os.environ if name.startswith("AWS_")):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")

    def dataload(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["dataload", "warm", *words])
        with pytest.raises(SystemExit) as end:
            app.main()
        return int(str(end.value.code)), *capsys.readouterr()

    return dataload


def test_each_node_is_warmed_with_its_part(bucket: Any, hosts: Hosts, tmp_path: Path, warm: Warm) -> None:
    url = write(bucket, 40)
    manifest = hosts(url).manifest
    for node in range(2):
        cache_dir = str(tmp_path / f"node-{node}")
        code, out, err = warm(url, "--shard", f"{node}/2", "--cache-dir", cache_dir, "--json")
        assert code == 0, err
        own = part_of(manifest, node, 2)
        assert json.loads(out)["rows"] == len(own) * ROWS
        cache = CacheConfig(cache_dir, 1 << 30)
        dataset = make_dataset(url, storage_options=bucket.options, cache=cache)
        kept = [group for group in range(40) if dataset.rowstore.row_groups.caches[0].find(group) is not None]
        assert kept == sorted(own)
        fetched(bucket)
        assert {row // ROWS for row in epoch(on_node(dataset, node, 2))} == {*own}
        assert fetched(bucket) == 0
    for words in (["--shard", "4/4"], ["--shard", "x"], ["--shard", "1/4", "--num-streams", "6"]):
        code, _, err = warm(url, "--cache-dir", str(tmp_path / "c"), *words)
        assert (code, err.count("\n")) == (2, 1), err


def test_warm_fills_the_cluster_or_reports_why_not(
    bucket: Any, tmp_path: Path, cluster_server: Server, warm: Warm
) -> None:
    url = write(bucket, 10)
    assert warm(url, "--cache-dir", str(tmp_path / "a"), "--cluster", cluster_server.url)[0] == 0
    fetched(bucket)
    assert warm(url, "--cache-dir", str(tmp_path / "b"), "--cluster", cluster_server.url)[0] == 0
    assert fetched(bucket) == 0, "the first command must have shared all row groups before it ended"

    cluster_server.ask("FLUSHALL")
    cluster_server.ask("ACL", "SETUSER", "default", "resetkeys", "~dataload:doctor:*")  # as if it was full later
    code, _, err = warm(url, "--cache-dir", str(tmp_path / "c"), "--cluster", cluster_server.url)
    assert (code, err.count("\n")) == (1, 1), err
    assert "did not reach the cluster" in err
    fetched(bucket)
    cluster_server.ask("CONFIG", "SET", "maxmemory", 1)
    code, _, err = warm(url, "--cache-dir", str(tmp_path / "e"), "--cluster", cluster_server.url)
    assert (code, err.count("\n")) == (1, 1), err
    assert "cannot be used: command not allowed when used memory > 'maxmemory'" in err
    code, _, err = warm(url, "--cache-dir", str(tmp_path / "d"), "--cluster", "valkey://user:s3cret@127.0.0.1:1")
    assert (code, err.count("\n")) == (1, 1), err
    assert "127.0.0.1:1 does not answer" in err
    assert "s3cret" not in err
    assert fetched(bucket) == 0


class Weather:
    """A failure of a server.

    Args:
        begin: Starts the failure.
        end: Ends it.
        makes: State of the cluster tier during the failure.
    """

    def __init__(self, begin: Callable[[Server], Any], end: Callable[[Server], Any], makes: str) -> None:
        self.begin, self.end, self.makes = begin, end, makes


def damage(server: Server) -> None:
    with server.client() as client:
        for name in client.scan_iter("dataload:*"):
            if not name.endswith(b":lease"):  # Hosts would wait for a damaged lease to expire.
                client.setrange(name, 5, b"damage")


def lock_out(server: Server) -> None:
    server.ask("CONFIG", "SET", "requirepass", "s3cret")
    server._access["password"] = "s3cret"
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


WEATHERS = {
    "killed": Weather(Server.kill, Server.start, "off"),
    "stopped": Weather(Server.stop, Server.go_on, "off"),
    "locked": Weather(lock_out, lambda server: server.ask("CONFIG", "SET", "requirepass", ""), "off"),
    "full": Weather(
        lambda server: server.ask("CONFIG", "SET", "maxmemory", 1),
        lambda server: server.ask("CONFIG", "SET", "maxmemory", 0),
        "degraded",
    ),
    "emptied": Weather(lambda server: server.ask("FLUSHALL"), lambda _: None, "normal"),
    "damaged": Weather(damage, lambda _: None, "normal"),
}


@pytest.mark.variants
@pytest.mark.parametrize("kind", WEATHERS)
def test_training_goes_on_in_any_weather(bucket: Any, hosts: Hosts, cluster_server: Server, kind: str) -> None:
    weather = WEATHERS[kind]
    url = write(bucket, 40)
    if kind != "full":
        other = hosts(url, cluster=cluster_server.url)
        epoch(make_loader(other, 50))
        other.blocks.settle()
    dataset = hosts(url, cluster=cluster_server.url)
    loader = make_loader(dataset, 50, window=1)
    rows: list[int] = []
    batches = iter(loader)
    for _ in range(20):
        rows += checked(next(batches))
    assert kind == "full" or dataset.blocks.stats()["bytes_cluster"] > 0
    weather.begin(cluster_server)
    for batch in batches:
        rows += checked(batch)
    assert sorted(rows) == list(range(40 * ROWS))

    tier = dataset.blocks.tier
    entered = tier.cluster.health.stats()
    assert weather.makes == "normal" or entered[weather.makes] > 0
    assert kind != "damaged" or tier.stats()["cluster"]["errors"] > 0
    if kind == "stopped":
        waits = loader.stats().waits
        assert max(waits, key=waits.__getitem__) == "cluster"
    weather.end(cluster_server)
    until(lambda: shared_again(tier))


@pytest.mark.slow
def test_training_goes_on_when_a_primary_is_lost(bucket: Any, hosts: Hosts, tmp_path: Path) -> None:
    url = write(bucket, 40)
    with ServerCluster(tmp_path / "servers", replicas=1) as servers:
        first, second = (hosts(url, cluster=servers.url) for _ in range(2))
        epoch(make_loader(first, 50))
        first.blocks.settle()
        primary, replica = servers.primaries[0], servers.replicas[0]
        until(lambda: replica.ask("DBSIZE") == primary.ask("DBSIZE"))
        batches = iter(make_loader(second, 50, window=1))
        rows = checked(next(batches))
        primary.kill()
        for batch in batches:
            rows += checked(batch)
        assert sorted(rows) == list(range(40 * ROWS))
        assert second.blocks.stats()["errors"]["cluster"] > 0
        until(lambda: replica.ask("INFO", "replication")["role"] == "master")
        until(lambda: shared_again(second.blocks.tier))
        third = hosts(url, cluster=servers.url)
        fetched(bucket)
        assert sorted(epoch(make_loader(third, 50))) == sorted(rows)
        assert fetched(bucket) <= 0.01 * size_of(third)


def shared_again(tier: Any) -> bool:
    """Return whether a new blob is written to the cluster."""
    written = tier.stats()["cluster"]["written"]
    shared_again.count += 1  # type: ignore[attr-defined]
    key = BlobKey("origin", "bucket/x", "1", f"{shared_again.count}")  # type: ignore[attr-defined]

    def fill(allocate: Callable[[int], memoryview]) -> None:
        allocate(3)[:] = b"one"

    assert tier.get_or_fill(key, fill) == b"one"
    tier.settle()
    return tier.cluster.health.state == "normal" and tier.stats()["cluster"]["written"] > written


shared_again.count = 0  # type: ignore[attr-defined]


def test_a_node_needs_capacity_only_for_its_own_windows(bucket: Any, hosts: Hosts) -> None:
    url = write(bucket, 28)
    limit = int(1.1 * hosts(url).rowstore.row_groups.num_bytes / 4)
    on_node(hosts(url, limit), 0, 4)
    with pytest.raises(ConfigError, match="two windows of 4 row groups"):
        on_node(hosts(url, limit), 0, 4, num_streams=1)


@pytest.mark.slow
def test_a_process_that_fills_shares_what_it_makes(bucket: Any, hosts: Hosts, cluster_server: Server) -> None:
    """Also the last row group that it makes."""
    url = write(bucket, 60)
    first, second = (hosts(url, cluster=cluster_server.url) for _ in range(2))
    decoder = BackgroundDecoder(first.rowstore.row_groups)
    until(lambda: make_in_background(decoder, 0))
    assert all(make_in_background(decoder, group) for group in range(60))
    decoder.end()
    first.blocks.settle()
    fetched(bucket)
    loader = make_loader(second, 50)
    assert sorted(epoch(loader)) == list(range(60 * ROWS))
    assert fetched(bucket) == 0
