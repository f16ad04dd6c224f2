"""Cached blocks of small row groups: kept while a row group needs them, and discarded once its rows are cached.

Where no cache would keep them, row groups are fetched by themselves.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, make_dataset
from dataload.cache.blocks import reader
from dataload.cache.local import fsck
from dataload.dataset import Dataset
from dataload.rows.making.pipeline import make_cached

BLOCK = 64 << 10
GROUPS, ROWS = 6, 2000  # of 16 KB a row group: four of them touch a block


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Dataset]:
    rows = GROUPS * ROWS
    table = pa.table({"a": range(rows), "b": [number % 3 for number in range(rows)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=ROWS, use_dictionary=False, compression="none")

    def opened(cache_bytes: str = "100MB", **options: Any) -> Dataset:
        cache = CacheConfig(str(tmp_path / "cache"), cache_bytes, block_bytes=BLOCK)
        return make_dataset(tmp_path / "x.parquet", cache=cache, **options)

    return opened


def cached_blocks(dataset: Dataset) -> list[int]:
    """Return the numbers of the cached blocks of the file."""
    file, blocks = dataset.row_groups[0].file, dataset.blocks
    return [
        number for number in range(-(-file.size // BLOCK)) if blocks.tier.stored_bytes(blocks._key_of(file, number))
    ]


def users(dataset: Dataset, block: int) -> set[int]:
    """Return the row groups that have bytes of a block."""
    maker, blocks = dataset.rowstore.row_groups.caches[0].maker, dataset.blocks
    return {group for group in range(GROUPS) if block in blocks.numbers(maker.sources(group)[0])}


@pytest.mark.parametrize("order", [range(GROUPS), [3, 0, 5, 1, 4, 2]])
def test_a_block_stays_until_the_rows_of_all_its_row_groups_are_cached(
    opened: Callable[..., Dataset], order: Any
) -> None:
    dataset = opened()
    assert any(len(users(dataset, block)) > 2 for block in range(3))
    made: set[int] = set()
    fetched: set[int] = set()
    for group in order:
        assert make_cached(dataset.rowstore.row_groups.caches[0], group)
        made.add(group)
        fetched |= {block for block in range(10) if group in users(dataset, block)}
        assert cached_blocks(dataset) == sorted(block for block in fetched if not users(dataset, block) <= made)
    assert cached_blocks(dataset) == []
    assert dataset.blocks.stats()["bytes_origin"] <= 1.1 * dataset.row_groups[0].file.size + (64 << 10)
    assert not fsck.verify(dataset.blocks.tier.folder).problems
    few = opened(columns=["b"], fill_null=None)
    before = few.blocks.stats()["bytes_origin"]
    assert few.__getitems__([0, 7000]).columns["b"].tolist() == [0, 1]
    assert few.blocks.stats()["bytes_origin"] == before


@pytest.mark.parametrize(
    "options",
    [{"columns": ["a"]}, {"fill_null": 0}, {"null_masks": True}, {"filters": [("a", ">=", ROWS)]}],
    ids=str,
)
def test_blocks_stay_that_other_datasets_of_the_file_may_need(
    opened: Callable[..., Dataset], options: dict[str, Any]
) -> None:
    dataset = opened(**options)
    for group in range(len(dataset.row_groups)):
        assert make_cached(dataset.rowstore.row_groups.caches[0], group)
    assert cached_blocks(dataset)


def test_blocks_stay_if_the_rows_do_not_fit(opened: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = opened()
    for group in range(GROUPS - 1):
        assert make_cached(dataset.rowstore.row_groups.caches[0], group)
    last = cached_blocks(dataset)
    assert last
    monkeypatch.setattr(dataset.blocks.tier, "can_write", lambda: False)
    assert not make_cached(dataset.rowstore.row_groups.caches[0], GROUPS - 1)
    assert cached_blocks(dataset) == last


def test_two_threads_look_up_the_blocks_of_a_file(
    opened: Callable[..., Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second thread makes a row group of the file while the first one looks up the others."""
    blobs = opened().rowstore.row_groups.caches[0]
    maker = blobs.maker
    sources, threads = maker.sources, ThreadPoolExecutor(1)
    begun: list[int] = []

    def sources_seen_halfway(number: int, *given: Any) -> Any:
        if number == GROUPS // 2 and not begun:
            begun.append(number)
            threads.submit(maker.discard_sources, 0, blobs.keys).result(200)
        return sources(number, *given)

    monkeypatch.setattr(maker, "sources", sources_seen_halfway)
    with threads:
        maker.discard_sources(1, blobs.keys)
    assert begun


IMAGE_GROUPS, IMAGES_OF_A_GROUP, IMAGE_BYTES = 64, 4, 64 << 10


@pytest.fixture
def images(bucket: Any) -> int:
    """Write a file of 64 row groups of 256 KiB, 16 in a block of 4 MiB. Return its size."""
    rng = np.random.default_rng(0)
    table = pa.table({"image": [rng.bytes(IMAGE_BYTES) for _ in range(IMAGE_GROUPS * IMAGES_OF_A_GROUP)]})
    size: int = bucket.put_table(
        "x.parquet", table, row_group_size=IMAGES_OF_A_GROUP, use_dictionary=False, compression="none"
    )
    return size


def make_shuffled(dataset: Dataset) -> None:
    """Make the row groups of `images` in random order, so that the next one is seldom of the same block."""
    for number in np.random.default_rng(1).permutation(IMAGE_GROUPS).tolist():
        make_cached(dataset.rowstore.row_groups.caches[0], number)


@contextmanager
def no_large_files() -> Iterator[None]:
    """Let writes of this process fail from the 100th kilobyte of a file on, as on a disk without space for a blob."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize(("held", "is_in_blocks"), [(8 << 20, False), (64 << 20, True)])
def test_without_a_cache_blocks_are_fetched_only_if_memory_holds_all_data(
    bucket: Any, images: int, held: int, is_in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "UNCACHED_BYTES", held)
    dataset = make_dataset(bucket.url("x.parquet"), storage_options=bucket.options, cache=False)
    bucket.server.reset()
    make_shuffled(dataset)
    assert bucket.server.stats()["get_bytes"] <= images
    assert (bucket.server.stats()["get_requests"] == 5) == is_in_blocks


def test_no_blocks_are_fetched_for_a_cache_that_cannot_be_written_to(
    bucket: Any, images: int, cache: CacheConfig
) -> None:
    dataset = make_dataset(bucket.url("x.parquet"), storage_options=bucket.options, cache=cache)
    with no_large_files():
        assert not make_cached(dataset.rowstore.row_groups.caches[0], 0)  # It shows that the cache keeps nothing.
        bucket.server.reset()
        make_shuffled(dataset)
    assert dataset.blocks.stats()["health"]["state"] == "degraded"
    assert bucket.server.stats()["get_bytes"] <= images
