"""Several loaders and many datasets in one process: room in one cache, threads and connections."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.filesize import decimal

from dataload import CacheConfig, World, make_dataset, make_loader, mix
from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.cache.division import FITS
from dataload.cache.local import needs
from dataload.errors import ConfigError
from dataload.loader.lookahead import lookahead_of
from dataload.rows.scheduler import LOADERS

SHARE = 1.2  # of one dataset: the size of the cache


def by_turns(*loaders: Any) -> Iterator[Any]:
    for loader in loaders:
        yield from loader


def together(*loaders: Any) -> Iterator[Any]:
    for batches in zip(*loaders, strict=True):
        yield from batches


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "workers"),
    [(by_turns, 0), *(pytest.param(together, workers, marks=pytest.mark.slow) for workers in (0, 1))],
)
def test_two_datasets_that_fit_singly_but_not_together(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path, read: Any, workers: int
) -> None:
    """Origin bytes of an epoch of both, counted at the server: at most 1.02 times those that cannot stay."""
    urls = [dataset_of([[2000] * 60], name) for name in "ab"]  # so large that the padding to whole pages is negligible
    decoded = make_dataset(urls[0], storage_options=bucket.options, cache=False).rowstore.row_groups.num_bytes
    cache = CacheConfig(str(tmp_path / "cache"), int(SHARE * decoded))
    datasets = [make_dataset(url, storage_options=bucket.options, cache=cache) for url in urls]
    size = sum(group.bytes for group in datasets[0].row_groups)
    given = {"num_workers": workers, "transform": as_it_is} if workers else {}
    loaders = [make_loader(dataset, 200, window=2, **given) for dataset in datasets]
    every, fetched = sorted([*range(120_000)] * 2), []
    for _ in range(4):
        bucket.server.reset()
        assert sorted(np.concatenate([batch["row_id"] for batch in read(*loaders)]).tolist()) == every
        fetched.append(bucket.server.stats()["get_bytes"] / size)
    tier = datasets[0].blocks.tier
    region = tier.division().region / decoded
    assert 0.1 < region < 0.2
    assert 0.5 < np.mean(fetched[1:]) <= 1.02 * (2 - FITS * SHARE + region)
    assert tier.folder.index.used_bytes() <= tier.limit
    assert sum(dataset.blocks.stats()["refused"] for dataset in datasets) == 0


def test_the_room_of_a_loader_ends_with_it(bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    urls = [dataset_of([[1000] * 20], name) for name in "ab"]
    decoded = make_dataset(urls[0], storage_options=bucket.options, cache=False).rowstore.row_groups.num_bytes
    cache = CacheConfig(str(tmp_path / "cache"), int(SHARE * decoded))
    first, second = (make_loader(url, 100, storage_options=bucket.options, cache=cache, window=1) for url in urls)
    assert first._capacity.ahead() == (first._capacity._working_set, 2)
    assert first.dataset.blocks.tier.division().region > 0
    del second
    gc.collect()
    assert first._capacity.ahead() == (20, 0)
    assert first.dataset.blocks.tier.division().region == 0


def test_row_groups_for_workers_take_half_of_the_region(file: str, tmp_path: Path) -> None:
    """Workers open row groups as they need them, so the other half is for those that they are reading."""
    decoded = make_dataset(file, cache=False).rowstore.row_groups.num_bytes
    cache = CacheConfig(str(tmp_path / "cache"), decoded // 2)
    loader = make_loader(file, 10, window=3, cache=cache, num_workers=2, transform=as_it_is)
    ahead, further = loader._capacity.ahead()
    assert (ahead > 6, further) == (True, 6)
    requested: list[int] = []
    loader.dataset.rowstore.prefetch = requested.extend
    lookahead_of(loader.dataset.rowstore, loader._capacity, loader.sampler.needs_from(0, 0), has_workers=True).reach(0)
    assert len(requested) == 3


@pytest.fixture
def file(tmp_path: Path) -> str:
    table = pa.table({"x": np.arange(4000), "kind": np.arange(4000) % 2})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=100)
    return str(tmp_path / "x.parquet")


def test_two_filters_of_a_dataset_share_their_row_groups(file: str, tmp_path: Path) -> None:
    """Both filters leave rows in all row groups. The cache has space for these once."""
    decoded = make_dataset(file, cache=False).rowstore.row_groups.num_bytes
    cache = CacheConfig(str(tmp_path / "cache"), int(1.3 * decoded))
    for shuffle in ("full", "block"):
        mixture = mix([make_dataset(file, filters=[("kind", "=", kind)], cache=cache) for kind in (0, 1)])
        loader = make_loader(mixture, 100, shuffle=shuffle)
        tier = mixture.datasets[0].blocks.tier
        assert (tier.division().region, tier.division().total) == (0, decoded)
        assert sorted(np.concatenate([batch["x"] for batch in loader]).tolist()) == [*range(4000)]
    small = CacheConfig(str(tmp_path / "small"), int(0.9 * decoded))
    mixture = mix([make_dataset(file, filters=[("kind", "=", kind)], cache=small) for kind in (0, 1)])
    with pytest.raises(ConfigError, match=rf"needs the whole dataset, {decimal(decoded)} decoded"):
        make_loader(mixture, 100, shuffle="full")


def test_two_loaders_over_one_dataset_count_it_once(file: str, tmp_path: Path) -> None:
    decoded = make_dataset(file, cache=False).rowstore.row_groups.num_bytes
    cache = CacheConfig(str(tmp_path / "cache"), int(1.3 * decoded))
    loaders = [make_loader(file, 100, seed=seed, window=1, cache=cache) for seed in (0, 1)]
    tier = loaders[0].dataset.blocks.tier
    assert (tier.division().region, tier.division().total) == (0, decoded)
    loaders.append(make_loader(file, 100, columns=["x"], window=1, cache=cache))
    assert tier.division().total > decoded  # Other columns are other blobs.


def test_a_loader_in_a_forked_child_has_room_when_that_of_its_parent_has_ended(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "LOOK_SECONDS", 0.0)
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    loader, unused = (make_loader(file, 100, seed=seed, window=1, cache=cache, columns=["x"]) for seed in (0, 1))
    other = make_loader(file, 100, window=1, cache=cache)
    tier = other.dataset.blocks.tier
    both, (ready, told), (wait, end) = tier.division().total, os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        signal.alarm(60)  # only a hang takes that long
        batches = iter(loader)
        next(batches)
        os.write(told, b"x")
        os.read(wait, 1)
        os._exit(0)
    for descriptor in (told, wait):
        os.close(descriptor)
    try:
        assert os.read(ready, 1) == b"x"
        del loader, unused
        gc.collect()
        assert tier.division().total == both
    finally:
        os.close(ready)
        os.close(end)
        os.waitpid(child, 0)
    assert tier.division().total < both


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.slow
def test_the_number_of_sources_costs_no_threads_and_no_open_files(tmp_path: Path) -> None:
    for number in range(200):
        table = pa.table({"x": np.arange(20) + 20 * number})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=10)
    files, threads = open_files(), threading.active_count()
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    mixture = mix([str(tmp_path / f"{number}.parquet") for number in range(200)], cache=cache)
    loader = make_loader(mixture, 50, window=1, world=World(0, 1))
    rows: list[int] = []
    for batch in loader:
        rows += batch["x"].tolist()
        cpus = len(os.sched_getaffinity(0))
        assert threading.active_count() - threads <= LOADERS + 2 * IN_FLIGHT + cpus + 3
        assert open_files() - files < 30
    assert sorted(rows) == [*range(4000)]


def test_datasets_of_a_store_share_its_client_and_the_threads_that_fetch(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig
) -> None:
    datasets = [
        make_dataset(dataset_of([[10]], name), storage_options=bucket.options, cache=cache) for name in ("a", "b")
    ]
    one, other = (dataset.blocks for dataset in datasets)
    assert one.origin.engine is other.origin.engine
    assert one._reads is other._reads
    child = os.fork()
    if child == 0:
        os._exit(one._reads is not other._reads or one.origin.engine is None)
    assert os.waitpid(child, 0)[1] == 0
    assert needs.host_needs(Path(str(cache.cache_dir))) is one.tier.needs
