"""Capacity is checked, and sizes are measured, before memory or the cache runs out."""

from __future__ import annotations

import gc
import json
import math
import pickle
import re
import resource
import threading
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.cache.config import parse_bytes
from dataload.cache.division import FITS
from dataload.cli.commands.doctor import _reads, _store
from dataload.errors import ConfigError, OriginError
from dataload.loader.capacity import check_shared_memory, need_of
from dataload.planning.warm import warm
from dataload.rows.making.pipeline import make_cached
from dataload.rows.read_options import USUAL
from dataload.rows.size_sampling import ValueSizes
from dataload.runtime.memory_budget import MemoryBudget, ReservationCancelled
from dataload.runtime.text import at_least
from dataload.samplers.order import Order

noise = np.random.default_rng(0)


def test_batches_that_shared_memory_cannot_hold(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_shared_memory(500_000, str(small_disk))
    check_shared_memory(2_000_000, str(small_disk / "nothing"))
    assert not caplog.records
    check_shared_memory(2_000_000, str(small_disk))
    assert re.search(r"2000000 bytes of batches in .*, which has \d+ free: lower batch_size", caplog.text)


def limit_files(_: int) -> None:
    """Let this process make no file of more than a megabyte, also in /dev/shm."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


def enlarged(batch: Any) -> Any:
    return {**batch, "large": np.zeros(4 << 20, np.uint8)}


def test_a_worker_without_shared_memory_for_its_batch_raises(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(100)}), tmp_path / "x.parquet")
    options: dict[str, Any] = {"num_workers": 1, "worker_init_fn": limit_files, "timeout": 60}
    with pytest.raises(RuntimeError, match=r"(?s)batch of 4194\d+ bytes: .*docker run --shm-size"):
        list(make_loader(tmp_path, 10, transform=enlarged, cache=False, **options))


def test_a_memory_budget_is_never_exceeded() -> None:
    budget, held, most = MemoryBudget(10), [0], [0]
    mutex = threading.Lock()

    def work(units: int) -> None:
        for _ in range(200):
            with budget.reserve(units):
                with mutex:
                    held[0] += min(units, 10)
                    most[0] = max(most[0], held[0])
                with mutex:
                    held[0] -= min(units, 10)

    threads = [threading.Thread(target=work, args=(units,)) for units in (1, 3, 4, 7, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] <= 10


def test_a_memory_budget_is_granted_in_request_order() -> None:
    """A small reservation waits behind a large one, even if it would fit."""
    budget, granted, threads = MemoryBudget(10), [], []

    def reserve(units: int) -> None:
        with budget.reserve(units):
            granted.append(units)

    with budget.reserve(6):
        for units in (8, 4, 7, 9):  # no two of them fit together
            threads.append(threading.Thread(target=reserve, args=(units,)))
            threads[-1].start()
            while len(budget._waiters) + len(granted) < len(threads):
                threading.Event().wait(0.001)
        assert granted == []
        assert not budget.fits(1)
    for thread in threads:
        thread.join(200)
    assert granted == [8, 4, 7, 9]
    assert budget.idle


def test_a_reservation_that_waits_gets_all_of_a_budget_that_became_smaller() -> None:
    budget, granted = MemoryBudget(10), threading.Event()
    looks = threading.Semaphore(0)  # one for each time that the waiter looks whether it fits

    def look() -> bool:
        looks.release()
        return False

    def reserve() -> None:
        with budget.reserve(25, look):
            granted.set()

    thread = threading.Thread(target=reserve)
    with budget.reserve(2):
        with budget.reserve(3):
            thread.start()
            assert looks.acquire(timeout=200)
            budget.resize(4)
            assert looks.acquire(timeout=200)
        assert looks.acquire(timeout=200)
        with budget._mutex:  # It looked, and waits again.
            assert not granted.is_set()  # 2 of 4 are free.
        budget.resize(6)
    thread.join(200)
    assert granted.is_set()
    assert budget.idle


def test_a_cancelled_reservation_blocks_no_other() -> None:
    budget, granted, cancelled = MemoryBudget(10), threading.Event(), threading.Event()
    caught: list[type[BaseException]] = []

    def reserve_then_cancel() -> None:
        try:
            with budget.reserve(10, cancelled.is_set):
                pass
        except ReservationCancelled as error:
            caught.append(type(error))

    def reserve() -> None:
        with budget.reserve(4):
            granted.set()

    threads = [threading.Thread(target=reserve_then_cancel), threading.Thread(target=reserve)]
    with budget.reserve(5):
        threads[0].start()
        while not budget._waiters:
            threading.Event().wait(0.001)
        cancelled.set()
        threads[1].start()
        assert granted.wait(200)
    for thread in threads:
        thread.join(200)
    assert caught == [ReservationCancelled]


def texts(folder: Path, groups: int, **options: Any) -> tuple[str, int]:
    """Return a file of repeated captions, and their bytes."""
    values = [f"{'hello world ' * (number % 100)}{number % 100}" for number in range(groups * 1000)]
    pq.write_table(pa.table({"text": values}), folder / "texts.parquet", row_group_size=1000, **options)
    return str(folder / "texts.parquet"), sum(map(len, values))


def test_capacity_is_for_values_not_for_their_codes(tmp_path: Path) -> None:
    url, _ = texts(tmp_path, 40)
    size = (
        40 * sum(len(f"{'hello world ' * number}{number}") for number in range(100)) + 40 * 8 * 100 + 2 * 40_000
    )  # shared values
    dataset = make_dataset(url, cache=CacheConfig(str(tmp_path / "cache"), size // 2))
    assert dataset.rowstore.row_groups.num_bytes != pytest.approx(size, rel=0.01)  # by the footers
    loader = make_loader(dataset, 100, window=2)
    assert dataset.rowstore.row_groups.num_bytes == pytest.approx(size, rel=0.01)
    assert size / 10 <= dataset.blocks.tier.division().region <= size / 9
    for _ in range(2):
        assert sum(len(batch["text"]) for batch in loader) == 40_000
    assert dataset.blocks.stats()["refused"] == 0


@hypothesis.given(st.integers(1, 10**17))
@hypothesis.example(32_300)  # 32.3 * 1000 is a little less in floating point
def test_sizes_as_text_are_rounded_up(size: int) -> None:
    assert size <= parse_bytes("cache_bytes", at_least(size)) <= 1.1 * size + 100


@pytest.mark.parametrize("shuffle", ["full", "block"])
@pytest.mark.parametrize("is_text", [False, True])
def test_sizes_in_the_error_of_a_small_cache_work_as_printed(shuffle: str, is_text: bool, tmp_path: Path) -> None:
    """The loader accepts the first size; the last one holds the whole dataset, as `dataload warm` needs."""
    if is_text:
        url, _ = texts(tmp_path, 10)
    else:
        url = str(tmp_path / "x.parquet")
        pq.write_table(pa.table({"x": noise.random(10_000)}), url, row_group_size=100)
    options: dict[str, Any] = {"window": 2, "shuffle": shuffle}
    with pytest.raises(ConfigError) as caught:
        make_loader(url, 32, cache=CacheConfig(str(tmp_path / "small"), 1000), **options)
    sizes = re.findall(r"'([^']*B)'", str(caught.value))
    assert len(sizes) == 1 + (shuffle == "block")
    make_loader(url, 32, cache=CacheConfig(str(tmp_path / "enough"), sizes[0]), **options)
    dataset = make_dataset(url, cache=CacheConfig(str(tmp_path / "whole"), sizes[-1]))
    assert warm(dataset.rowstore.row_groups, range(len(dataset.row_groups))) == len(dataset.row_groups)


def test_a_restored_epoch_whose_windows_exceed_the_cache_says_how_to_begin_another(tmp_path: Path) -> None:
    url = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"x": noise.random(2000)}), url, row_group_size=100)
    saved = make_loader(url, 10, window=8, cache=False)
    saved.load_state_dict({**saved.state_dict(), "cursor": 50})
    cache = CacheConfig(str(tmp_path / "cache"), 3 * saved.dataset.rowstore.row_groups.caches[0].bytes_of(0))
    with pytest.raises(ConfigError, match=r"lower window$"):
        make_loader(url, 10, window=8, cache=cache)
    loader = make_loader(url, 10, window=1, cache=cache)
    loader.load_state_dict(saved.state_dict())
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"lower window \(a restored epoch keeps .*set_epoch begins another\)$"):
            next(iter(loader))
    loader.set_epoch(1)
    assert sum(len(batch["x"]) for batch in loader) == 2000


@pytest.mark.parametrize(("groups", "further"), [(40, 4), (1000, 9), (4000, 16)])
def test_the_transient_region_grows_where_that_is_negligible(groups: int, further: int, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(groups * 10)}), tmp_path / "x.parquet", row_group_size=10)
    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=False)
    blobs, sizes = dataset.rowstore.row_groups.caches[0], [group.rows for group in dataset.row_groups]
    order = Order(sizes, shuffle="block", seed=0, window=2, num_streams=1)
    group_bytes = blobs.num_bytes // groups

    def region(limit: int) -> tuple[int, int]:
        need = need_of([(order, blobs)], limit, bytes(16))
        return need.transient_share(limit, need.total)

    window = math.ceil(4 * group_bytes / FITS)
    assert region(blobs.num_bytes // 2) == (window + (further - 4) * group_bytes, further)
    assert region(blobs.num_bytes * 2) == (0, 0)
    assert region(5 * group_bytes) == (window, 4)


def test_loaders_that_read_the_same_groups_in_the_same_order_have_needs_of_one_name(tmp_path: Path) -> None:
    """Ranks do, so their processes share a part of the region. Loaders of other columns read other blobs."""
    for name in range(8):
        pq.write_table(pa.table({"x": noise.random(2000), "y": noise.random(2000)}), tmp_path / f"{name}.parquet")
    cache = CacheConfig(str(tmp_path / "cache"), 150_000)

    def loader(column: str, rank: int = 0) -> Any:
        return make_loader(
            f"{tmp_path}/*.parquet", 10, columns=[column], window=1, cache=cache, world=World(rank, 2, rank, 2)
        )

    x, x_of_another_rank, y = loader("x"), loader("x", 1), loader("y")
    [[(_, need)], [(_, same)], [(_, other)]] = [each._capacity._needs for each in (x, x_of_another_rank, y)]
    assert need.name == same.name != other.name


def test_a_copy_of_a_loader_reserves_its_own_part_of_the_cache(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": noise.random(2000)}), tmp_path / "x.parquet")
    loader = make_loader(str(tmp_path / "x.parquet"), 10, cache=CacheConfig(str(tmp_path / "cache"), "1MB"))
    copied = pickle.loads(pickle.dumps(loader))
    [(tier, need)] = loader._capacity._needs
    del loader
    gc.collect()
    assert tier.division().total == 0
    list(copied)
    assert tier.division().total == need.total > 0


@pytest.mark.parametrize(
    ("cache_bytes", "options", "requests"),
    [("2MB", {}, 4), ("1GB", {}, 0), ("4MB", {"use_dictionary": False}, 0), ("2MB", {"compression": "none"}, 4)],
)
def test_values_are_measured_if_their_codes_might_fit_and_they_might_not(
    cache_bytes: str, options: dict[str, Any], requests: int, tmp_path: Path
) -> None:
    """Four row groups are sampled, once per host."""
    url, _ = texts(tmp_path, 6, **options)
    for expected in (requests, 0):
        dataset = make_dataset(url, cache=CacheConfig(str(tmp_path / "cache"), cache_bytes))
        before = dataset.blocks.stats()["requests_origin"]
        make_loader(dataset, 10, window=1)
        assert dataset.blocks.stats()["requests_origin"] - before == expected


def test_measured_sizes_are_shared_by_all_choices_of_columns(tmp_path: Path) -> None:
    url, _ = texts(tmp_path, 6)
    cache = CacheConfig(str(tmp_path / "cache"))
    make_dataset(url, cache=cache).rowstore.row_groups.caches[0].measure()
    dataset = make_dataset(url, columns=["text"], cache=cache)
    before = dataset.blocks.stats()["requests_origin"]
    dataset.rowstore.row_groups.caches[0].measure()
    assert dataset.blocks.stats()["requests_origin"] == before


def test_cached_rows_can_be_read_when_the_origin_is_down_and_sizes_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, size = texts(tmp_path, 6)
    dataset = make_dataset(url, cache=CacheConfig(str(tmp_path / "cache"), 2 * size))
    for group in range(len(dataset.row_groups)):
        make_cached(dataset.rowstore.row_groups.caches[0], group)

    def down(*_: Any) -> None:
        raise OriginError("no server answers")

    monkeypatch.setattr(ValueSizes, "means", down)
    assert sum(len(batch["text"]) for batch in make_loader(dataset, 100, window=1)) == 6000
    assert "going by the footers: no server answers" in caplog.text


def test_shared_memory_of_workers_is_estimated_with_measured_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    monkeypatch.setattr("dataload.loader.capacity.check_shared_memory", checked.append)
    url, size = texts(tmp_path, 6)
    dataset = make_dataset(url, cache=CacheConfig(str(tmp_path / "cache"), 2 * size))
    assert dataset.rowstore.row_bytes < size / 6000 / 4
    for world in World(0, 1), World(0, 16, 0, 8):
        make_loader(dataset, 10, window=1, num_workers=1, prefetch_factor=2, transform=dict, world=world)
    rank = 20 * (size / 6000 + 8)
    assert checked == pytest.approx([rank, 8 * rank], rel=0.05)


def test_large_values_are_not_mistaken_for_codes(tmp_path: Path) -> None:
    """All values are distinct, so a dictionary has all of them or only the first ones."""
    for rows, size in ((20, 5000), (2000, 5000), (40_000, 100)):
        values = [noise.bytes(size) for _ in range(rows)]
        pq.write_table(pa.table({"image": pa.array(values, pa.binary())}), tmp_path / "x.parquet")
        dataset = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache")))
        assert dataset.rowstore.row_groups.caches[0].maker.value_sizes.coded == []
        assert dataset.rowstore.row_groups.num_bytes == pytest.approx(rows * (size + 10), rel=0.05)


def test_values_of_dictionaries_in_arrow_files_are_measured_too(tmp_path: Path) -> None:
    values = pa.array([f"{'hello world ' * (number % 100)}" for number in range(3000)]).dictionary_encode()
    with pa.ipc.new_file(tmp_path / "x.arrow", pa.schema([("text", values.type)])) as writer:
        writer.write_table(pa.table({"text": values}))
    blobs = make_dataset(
        str(tmp_path / "x.arrow"), cache=CacheConfig(str(tmp_path / "cache"))
    ).rowstore.row_groups.caches[0]
    assert blobs.maker.value_sizes.coded == ["text"]
    blobs.measure()
    distinct = values.dictionary.to_pylist()
    assert blobs.num_bytes == pytest.approx(sum(map(len, distinct)) + 8 * len(distinct) + 2 * 3000, rel=0.01)
    assert blobs.row_bytes == pytest.approx(np.mean([len(value.as_py()) + 8 for value in values]), rel=0.01)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.dictionary(pa.int8(), pa.string()), pa.binary(1100)])
def test_values_with_nulls_are_measured(kind: pa.DataType, tmp_path: Path) -> None:
    """The fill value for nulls is an argument of the reader, and a plan has no reader."""
    values = pa.array([None if number % 2 else b"x" * 1100 for number in range(3000)])
    texts = values.cast(pa.string()).dictionary_encode() if pa.types.is_dictionary(kind) else values
    pq.write_table(pa.table({"text": texts.cast(kind)}), tmp_path / "x.parquet")
    blobs = make_dataset(
        str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache"))
    ).rowstore.row_groups.caches[0]
    blobs.measure()
    assert blobs.maker.value_sizes.coded == ["text"]
    assert blobs.row_bytes == pytest.approx(550 + 8, rel=0.01)


def test_the_doctor_estimates_with_values_too(bucket: Any) -> None:
    """Batches in shared memory have values instead of codes."""
    values = [f"{'hello world ' * (number % 100)}" for number in range(3000)]
    bucket.put_table("texts/0.parquet", pa.table({"text": values}))
    store = _store(f"s3://{bucket.name}/texts", json.dumps(bucket.options), CacheConfig(), "hive")
    reads, unreadable = _reads(store, (None, None), USUAL, {}, quiet=True)
    assert reads is not None, unreadable
    assert reads[1].row_bytes == pytest.approx(np.mean([len(value) + 8 for value in values]), rel=0.01)


def test_a_dataset_without_row_groups_has_no_samples(tmp_path: Path) -> None:
    pq.ParquetWriter(tmp_path / "x.parquet", pa.schema([("text", pa.string())])).close()
    blobs = make_dataset(
        str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache"))
    ).rowstore.row_groups.caches[0]
    blobs.measure()
    assert (blobs.maker.value_sizes.coded, blobs.num_bytes) == ([], 0)
