"""One damaged body of a store, which has zeros from some byte on: no row of it is ever read."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import Server, running_server  # noqa: F401
from faulty_store import Answer, Asked, Store, faulty_store

import dataload
from dataload.cache.config import CacheConfig
from dataload.cache.local import failpoints
from dataload.errors import DataError

ROWS = 300_000  # of a row group: five blobs
PAGE_ROWS = 140_000  # The first page has rows of three blobs.
BORDER = 1 << 16  # the first row of the second blob
DAMAGE = 8 * (BORDER - 3_428)  # about the byte of the file from which on it is damaged


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
    """The damage that a store does: the bodies of the first `times` requests for each range of rows have it."""

    times: int = 1

    def __post_init__(self) -> None:
        self.seen = dict[str, int]()

    def spoil(self, asked: Asked, answer: Answer) -> Answer:
        span = asked.headers.get("Range", "")
        if asked.kind != "get" or not span.startswith("bytes=") or span.startswith("bytes=-"):
            return answer
        start, _, stop = span.removeprefix("bytes=").partition("-")
        if not int(start) < DAMAGE < int(stop):
            return answer
        self.seen[span] = self.seen.get(span, 0) + 1
        if self.seen[span] > self.times:
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


@pytest.mark.parametrize("mapped", [False, True])
def test_a_damaged_body_leaves_no_row_in_the_cache(tmp_path: Path, cache: CacheConfig, *, mapped: bool) -> None:
    with damaging_store(times=1) as (store, damage):
        dataset = opened(store, cache)
        if mapped:
            dataset = dataset.map(negated, version="1")
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


def test_no_blob_stays_of_a_process_that_was_killed_before_it_found_the_damage(cache: CacheConfig) -> None:
    with damaging_store(times=1) as (store, damage):
        store.spoil = damage.spoil
        child = os.fork()
        if not child:
            try:
                dataset = opened(store, cache)
                failpoints.watch(lambda name: name == "fill: published" and os.kill(os.getpid(), signal.SIGKILL))
                values(dataset)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        np.testing.assert_array_equal(values(opened(store, cache)), RIGHT)


def test_a_damaged_body_leaves_no_row_in_the_cluster(
    tmp_path: Path, cluster_server: Server, cache: CacheConfig
) -> None:
    with damaging_store(times=1) as (store, damage):
        dataset = opened(store, replace(cache, cluster=cluster_server.url))
        store.spoil = damage.spoil
        np.testing.assert_array_equal(values(dataset), RIGHT)
        dataset.rowstore.blobs.blocks.settle()
        store.spoil = None
        store.fault = lambda asked: Answer.error(403) if asked.kind == "get" else None  # the cluster has all of it
        other = opened(store, CacheConfig(str(tmp_path / "other"), "1GB", cluster=cluster_server.url))
        np.testing.assert_array_equal(values(other), RIGHT)
