"""One damaged body of a store, which has zeros from some byte on: no row of it is ever read."""

from __future__ import annotations

import io
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from clusters import Server, running_server, until  # noqa: F401
from faulty_store import Answer, Asked, Store, faulty_store
from row_groups import load

import dataload
from dataload.cache.config import CacheConfig
from dataload.cache.local import failpoints
from dataload.cli import app
from dataload.errors import DataError
from dataload.rows import row_group_plan

ROWS = 300_000  # of a row group: five blobs
PAGE_ROWS = 140_000  # The first page has rows of three blobs.
BORDER = 1 << 16  # the first row of the second blob
DAMAGE = 8 * (BORDER - 3_428)  # about the byte of the file from which on it is damaged


@pytest.fixture(autouse=True)
def small_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_group_plan, "BLOB_BYTES", 8 * BORDER)


def numbers() -> bytes:
    """Return a file of one row group, which neither dictionaries nor compression nor checksums protect."""
    sink = io.BytesIO()
    options = {"compression": "none", "use_dictionary": False, "write_batch_size": PAGE_ROWS}
    if "max_rows_per_page" in signature(pq.write_table).parameters:
        options["max_rows_per_page"] = PAGE_ROWS
    pq.write_table(pa.table({"x": np.arange(1, ROWS + 1)}), sink, data_page_size=8 * PAGE_ROWS, **options)
    return sink.getvalue()


@dataclass
class Damage:
    """The damage that a store does: `times` bodies of requests for its place have it, after `sound` others."""

    times: int = 1
    sound: int = 0

    seen: int = 0

    def spoil(self, asked: Asked, answer: Answer) -> Answer:
        span = asked.headers.get("Range", "")
        if asked.kind != "get" or not span.startswith("bytes=") or span.startswith("bytes=-"):
            return answer
        start, _, stop = span.removeprefix("bytes=").partition("-")
        if not int(start) < DAMAGE < int(stop):
            return answer
        self.seen += 1  # whatever the ranges, which depend on the requests under way
        if not self.sound < self.seen <= self.sound + self.times:
            return answer
        kept = DAMAGE - int(start)
        return replace(answer, body=answer.body[:kept].ljust(len(answer.body), b"\0"))


@contextmanager
def damaging_store(times: int) -> Iterator[tuple[Store, Damage]]:
    """Yield a store of one file, whose footer is right."""
    damage = Damage(times)
    with faulty_store() as store:
        store.put("d/0.parquet", numbers())
        yield store, damage


def opened(store: Store, cache: CacheConfig) -> Any:
    return dataload.make_dataset("s3://bucket/d", storage_options=store.options, cache=cache)


def negated(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": -row["x"]}


def values(dataset: Any) -> np.ndarray[Any, Any]:
    loader = dataload.make_loader(dataset, 50_000, shuffle=False, num_threads=1)
    return np.concatenate([batch["x"].numpy() for batch in loader])


RIGHT = np.arange(1, ROWS + 1)


@pytest.mark.parametrize("mapped", ["", "map", "flat_map"])
def test_a_damaged_body_leaves_no_row_in_the_cache(tmp_path: Path, cache: CacheConfig, mapped: str) -> None:
    with damaging_store(times=1) as (store, damage):
        dataset = opened(store, cache)
        if mapped:
            dataset = getattr(dataset, mapped)(negated, version="1")
        store.spoil = damage.spoil
        for _ in range(2):
            np.testing.assert_array_equal(values(dataset), -RIGHT if mapped else RIGHT)
        assert damage.seen


def test_no_blob_stays_of_a_row_group_that_cannot_be_decoded(cache: CacheConfig) -> None:
    with damaging_store(times=2) as (store, damage):
        dataset = opened(store, cache)
        store.spoil = damage.spoil
        with pytest.raises(DataError, match="row group 0 cannot be decoded"):
            values(dataset)
        np.testing.assert_array_equal(values(dataset), RIGHT)


def killed_once_it_has_published(store: Store, cache: CacheConfig, open_it: Callable[..., Any] = opened) -> None:
    """Let a process die once it has cached a blob of damaged bytes."""
    child = os.fork()
    if not child:
        try:
            dataset = open_it(store, cache)
            failpoints.watch(lambda name: name == "fill: published" and os.kill(os.getpid(), signal.SIGKILL))
            values(dataset)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@contextmanager
def paused_once_it_has_published(
    store: Store, cache: CacheConfig, read: Callable[[Any], object] = values, epochs: int = 1
) -> Iterator[Callable[[], object]]:
    """Run a process that pauses once it has cached the first blob of its last epoch. Yield what lets it go on."""
    (published, tell), (go_on, may_go_on) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(may_go_on)
            dataset = opened(store, cache)
            for _ in range(epochs - 1):
                read(dataset)

            def pause(name: str) -> None:
                if name == "fill: published":
                    failpoints.watch(lambda _: None)
                    dataset.blocks.settle()
                    os.write(tell, b".")
                    os.read(go_on, 1)

            failpoints.watch(pause)
            read(dataset)
            dataset.blocks.settle()
            os._exit(0)
        finally:
            os._exit(1)
    os.close(tell)
    try:
        assert os.read(published, 1)
        yield lambda: os.write(may_go_on, b".")
    finally:
        os.close(may_go_on)
        assert os.waitpid(child, 0)[1] == 0


def test_no_blob_stays_of_a_process_that_was_killed_before_it_found_the_damage(cache: CacheConfig) -> None:
    with damaging_store(times=1) as (store, damage):
        store.spoil = damage.spoil
        killed_once_it_has_published(store, cache)
        np.testing.assert_array_equal(values(opened(store, cache)), RIGHT)


def flat(store: Store, cache: CacheConfig) -> Any:
    return opened(store, cache).flat_map(negated, version="1")


def test_no_blob_stays_of_a_pass_that_was_killed_before_it_found_the_damage(cache: CacheConfig) -> None:
    with damaging_store(times=1) as (store, damage):
        flat(store, cache)  # the sample
        store.spoil = damage.spoil
        killed_once_it_has_published(store, cache, flat)
        np.testing.assert_array_equal(values(flat(store, cache)), -RIGHT)


def test_a_damaged_body_leaves_no_row_in_the_cluster(
    tmp_path: Path, cluster_server: Server, cache: CacheConfig
) -> None:
    with damaging_store(times=1) as (store, damage):
        dataset = opened(store, replace(cache, cluster=cluster_server.url))
        store.spoil = damage.spoil
        np.testing.assert_array_equal(values(dataset), RIGHT)
        dataset.blocks.settle()
        store.spoil = None
        store.fault = lambda asked: Answer.error(403) if asked.kind == "get" else None  # the cluster has all of it
        other = opened(store, CacheConfig(str(tmp_path / "other"), "1GB", cluster=cluster_server.url))
        np.testing.assert_array_equal(values(other), RIGHT)


@pytest.mark.slow
def test_a_host_completes_no_damaged_blob_with_those_of_others(
    tmp_path: Path, cluster_server: Server, cache: CacheConfig
) -> None:
    shared = replace(cache, cluster=cluster_server.url)
    with damaging_store(times=1) as (store, damage):
        store.spoil = damage.spoil
        killed_once_it_has_published(store, shared)
        other = opened(store, CacheConfig(str(tmp_path / "other"), "1GB", cluster=cluster_server.url))
        np.testing.assert_array_equal(values(other), RIGHT)
        other.blocks.settle()
        np.testing.assert_array_equal(values(opened(store, shared)), RIGHT)


def test_a_host_keeps_no_blob_of_a_row_group_that_another_host_has_not_finished(
    tmp_path: Path, cluster_server: Server, cache: CacheConfig
) -> None:
    """The other host finds the damage after this one has found its first blob."""
    with damaging_store(times=1) as (store, damage):
        store.spoil = damage.spoil
        with paused_once_it_has_published(
            store, CacheConfig(str(tmp_path / "other"), "1GB", cluster=cluster_server.url)
        ) as go_on:
            dataset = opened(store, replace(cache, cluster=cluster_server.url))
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(values, dataset)
                until(lambda: found.done() or dataset.blocks.stats()["cluster"]["waits"])
                go_on()
                np.testing.assert_array_equal(found.result(), RIGHT)
        assert dataset.blocks.stats()["cluster"]["bytes"] >= 8 * ROWS  # the other host's blobs


def test_makers_of_a_row_group_that_the_cache_does_not_keep_share_no_damaged_blob(cache: CacheConfig) -> None:
    small = replace(cache, cache_bytes=1_500_000)  # Two of the five blobs fit.

    def blobs(dataset: Any) -> list[bytes]:
        return [bytes(blob) for blob in load(dataset.rowstore.row_groups.caches[0], 0)]

    with damaging_store(times=1) as (store, damage):
        dataset = opened(store, small)
        expected = blobs(dataset)
        store.spoil, damage.sound = damage.spoil, 1
        with paused_once_it_has_published(store, small, blobs, epochs=2) as go_on:
            assert blobs(dataset) == expected
            go_on()


TEXTS = [f"{i}" * 200 for i in range(7)]


def small_file(form: str, first: int = 0) -> bytes:
    """Return a file of four small row groups, whose footer is not all of it."""
    ids = np.arange(first, first + 4000)
    noise = np.random.default_rng(first).random(4000)
    table = pa.table({"id": ids, "noise": noise, "text": [TEXTS[i % 7] for i in ids]})
    sink = io.BytesIO()
    if form == "parquet":
        pq.write_table(table, sink, 1000)
    else:
        with (pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream)(sink, table.schema) as file:
            file.write_table(table, 1000)
    return sink.getvalue()


def zeros(body: bytes) -> bytes:
    return bytes(len(body))


def zeros_before_the_magic(body: bytes) -> bytes:
    """Keep the length of the footer, and the magic."""
    return body[-10:].rjust(len(body), b"\0")


def web_page(body: bytes) -> bytes:
    return b"<html>Try again later</html>".ljust(len(body))


def long_footer(body: bytes) -> bytes:
    """Give a footer more bytes than the file."""
    return b"\x7f".rjust(len(body) - 6, b"\xff") + body[-6:]


class Once:
    """Damage to the first body of each object from now on."""

    def __init__(self, damage: Callable[[bytes], bytes] = zeros, times: int = 1) -> None:
        self.damage, self.times, self.seen = damage, times, Counter[str]()

    def __call__(self, asked: Asked, answer: Answer) -> Answer:
        if asked.kind != "get":
            return answer
        self.seen[asked.key] += 1
        if self.seen[asked.key] > self.times:
            return answer
        return replace(answer, body=self.damage(answer.body))


@pytest.mark.parametrize("damage", [zeros, zeros_before_the_magic, web_page, long_footer])
@pytest.mark.parametrize("form", ["parquet", "arrow", "stream"])
def test_a_damaged_footer_is_fetched_again_and_never_cached(
    cache: CacheConfig, form: str, damage: Callable[[bytes], bytes]
) -> None:
    with faulty_store() as store:
        for number in range(2):
            store.put(f"d/{number}.{form}", small_file(form, 4000 * number))
        store.spoil = Once(damage, times=100)
        with pytest.raises(DataError, match=rf"0\.{form} "):
            opened(store, cache)
        store.spoil = spoil = Once(damage)
        found = [batch["id"] for batch in dataload.make_loader(opened(store, cache), 500, shuffle=False)]
        assert np.concatenate(found).tolist() == list(range(8000))
        assert len(spoil.seen) == 2


@contextmanager
def with_small_file(cache: CacheConfig) -> Iterator[tuple[Store, Any, Once]]:
    """Yield a store of a file whose footer is cached, and whose next body is damaged; and its dataset."""
    with faulty_store() as store:
        store.put("d/0.parquet", small_file("parquet"))
        dataset, once = opened(store, cache), Once()
        store.spoil = once
        yield store, dataset, once
        assert once.seen


def test_damaged_bytes_that_a_filter_reads_are_fetched_again(cache: CacheConfig) -> None:
    with with_small_file(cache) as (_, dataset, _):
        rows = dataset.filter(pc.field("text") == TEXTS[3])
        found = [batch["id"] for batch in dataload.make_loader(rows, 500, shuffle=False)]
        assert np.concatenate(found).tolist() == list(range(3, 4000, 7))


def test_a_damaged_block_that_the_disk_does_not_keep_leaves_the_cluster(
    cluster_server: Server, cache: CacheConfig
) -> None:
    config = replace(cache, cache_bytes=50_000, cluster=cluster_server.url)
    with faulty_store() as store:
        store.put("d/0.parquet", small_file("parquet"))
        dataset = opened(store, config)
        store.spoil = once = Once()
        requests = []
        for row in (0, 1500, 2500):
            assert dataset[row]["id"] == row
            dataset.blocks.settle()
            requests.append(once.seen.total())
        assert requests[1] == requests[2], "the cluster has the block"


def halved(row: dict[str, Any]) -> dict[str, Any]:
    return {"half": row["noise"] / 2}


def test_damaged_bytes_that_map_samples_are_fetched_again(cache: CacheConfig) -> None:
    with with_small_file(cache) as (_, dataset, _):
        mapped = dataset.map(halved)
        assert mapped[0]["half"] == dataset[0]["noise"] / 2


@pytest.mark.parametrize("command", ["head", "warm"])
def test_damaged_bytes_that_a_command_reads_first_are_fetched_again(
    cache: CacheConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """`head` reads the first rows, and `warm` samples the sizes of values."""
    with with_small_file(cache) as (store, dataset, _):
        words = ["--json", "--storage-options", json.dumps(store.options), "--cache-dir", str(cache.cache_dir)]
        monkeypatch.setattr("sys.argv", ["dataload", command, "s3://bucket/d", *words])
        with pytest.raises(SystemExit, match="0"):
            app.main()
        if command == "head":
            assert [row["id"] for row in json.loads(capsys.readouterr().out)["first_rows"]] == [0, 1, 2, 3, 4]
        assert [int(dataset[row]["id"]) for row in (0, 3999)] == [0, 3999]
