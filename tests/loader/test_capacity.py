"""What does not fit is said before it goes wrong."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, make_dataset, make_loader
from dataload.cli.commands.doctor import _row_bytes, _store
from dataload.errors import OriginError
from dataload.loader.capacity import check_shared_memory, region_of
from dataload.rows.size_sampling import ValueSizes
from dataload.runtime.memory_budget import MemoryBudget, ReservationCancelled
from dataload.samplers.order import Order

noise = np.random.default_rng(0)


def test_batches_that_shared_memory_cannot_hold(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_shared_memory(500_000, str(small_disk))
    check_shared_memory(2_000_000, str(small_disk / "nothing"))
    assert not caplog.records
    check_shared_memory(2_000_000, str(small_disk))
    assert re.search(r"2000000 bytes of batches in .*, which has \d+ free: lower batch_size", caplog.text)


def test_a_budget_is_never_overdrawn() -> None:
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
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] <= 10


def test_reservations_are_granted_in_request_order() -> None:
    """Row groups come in the order of need: a small one behind a large one waits, though there is room for it."""
    budget, given, asking = MemoryBudget(10), [], []

    def ask(units: int) -> None:
        with budget.reserve(units):
            given.append(units)

    with budget.reserve(6):
        for units in (8, 4, 7, 9):  # no two of which it has room for
            asking.append(threading.Thread(target=ask, args=(units,)))
            asking[-1].start()
            while len(budget._waiters) + len(given) < len(asking):
                threading.Event().wait(0.001)
        assert given == []
        assert not budget.fits(1)
    for one in asking:
        one.join(60)
    assert given == [8, 4, 7, 9]
    assert budget.idle


def test_a_cancelled_reservation_blocks_no_other() -> None:
    budget, given, unwanted = MemoryBudget(10), threading.Event(), threading.Event()
    caught: list[type[BaseException]] = []

    def give_up() -> None:
        try:
            with budget.reserve(10, unwanted.is_set):
                pass
        except ReservationCancelled as error:
            caught.append(type(error))

    def ask() -> None:
        with budget.reserve(4):
            given.set()

    threads = [threading.Thread(target=give_up), threading.Thread(target=ask)]
    with budget.reserve(5):
        threads[0].start()
        while not budget._waiters:
            threading.Event().wait(0.001)
        unwanted.set()
        threads[1].start()
        assert given.wait(60)
    for thread in threads:
        thread.join(60)
    assert caught == [ReservationCancelled]


def texts(folder: Path, groups: int, **options: Any) -> tuple[str, int]:
    """A file of captions of which a few are repeated, and how many bytes they have."""
    values = [f"{'hello world ' * (number % 100)}{number % 100}" for number in range(groups * 1000)]
    pq.write_table(pa.table({"text": values}), folder / "texts.parquet", row_group_size=1000, **options)
    return str(folder / "texts.parquet"), sum(map(len, values))


def test_the_room_is_for_values_not_for_their_codes(tmp_path: Path) -> None:
    url, size = texts(tmp_path, 40)
    dataset = make_dataset(url, cache=CacheConfig(str(tmp_path / "cache"), size // 2))
    assert dataset.rowstore.blobs.num_bytes < size / 4  # as the footers have it
    loader = make_loader(dataset, 100, window=2)
    assert dataset.rowstore.blobs.num_bytes == pytest.approx(size + 8 * 40_000, rel=0.01)
    assert size / 10 <= dataset.blocks.tier.region <= size / 9
    for _ in range(2):
        assert sum(len(batch["text"]) for batch in loader) == 40_000
    assert dataset.blocks.stats()["refused"] == 0


@pytest.mark.parametrize(("groups", "further"), [(40, 4), (1000, 9), (4000, 16)])
def test_more_than_two_windows_pass_through_where_it_makes_next_to_no_difference(
    groups: int, further: int, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"x": np.arange(groups * 10)}), tmp_path / "x.parquet", row_group_size=10)
    dataset = make_dataset(str(tmp_path / "x.parquet"), cache=None)
    blobs, sizes = dataset.rowstore.blobs, [group.rows for group in dataset.row_groups]
    order = Order(sizes, shuffle="block", seed=0, window=2, num_streams=1)
    group_bytes = blobs.num_bytes // groups
    assert region_of(order, blobs, blobs.num_bytes // 2) == (further * group_bytes, further)
    assert region_of(order, blobs, blobs.num_bytes * 2) == (0, 0)
    assert region_of(order, blobs, 5 * group_bytes) == (min(5, further) * group_bytes, min(5, further))


@pytest.mark.parametrize(
    ("cache_bytes", "options", "requests"),
    [("2MB", {}, 4), ("1GB", {}, 0), ("4MB", {"use_dictionary": False}, 0), ("2MB", {"compression": "none"}, 4)],
)
def test_values_are_measured_where_codes_leave_it_open_what_fits(
    cache_bytes: str, options: dict[str, Any], requests: int, tmp_path: Path
) -> None:
    """Of four row groups, whatever else there is; and once a host."""
    url, _ = texts(tmp_path, 6, **options)
    for asked in (requests, 0):
        dataset = make_dataset(url, cache=CacheConfig(str(tmp_path / "cache"), cache_bytes))
        before = dataset.blocks.stats()["requests_origin"]
        make_loader(dataset, 10, window=1)
        assert dataset.blocks.stats()["requests_origin"] - before == asked


def test_what_is_measured_is_known_to_every_choice_of_columns(tmp_path: Path) -> None:
    url, _ = texts(tmp_path, 6)
    cache = CacheConfig(str(tmp_path / "cache"))
    make_dataset(url, cache=cache).rowstore.blobs.measure()
    dataset = make_dataset(url, columns=["text"], cache=cache)
    before = dataset.blocks.stats()["requests_origin"]
    dataset.rowstore.blobs.measure()
    assert dataset.blocks.stats()["requests_origin"] == before


def test_rows_that_are_there_need_no_origin_to_measure_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, size = texts(tmp_path, 6)
    dataset = make_dataset(url, cache=CacheConfig(str(tmp_path / "cache"), 2 * size))
    for group in range(len(dataset.row_groups)):
        dataset.rowstore.blobs.make(group)

    def down(*_: Any) -> None:
        raise OriginError("nobody answers")

    monkeypatch.setattr(ValueSizes, "means", down)
    assert sum(len(batch["text"]) for batch in make_loader(dataset, 100, window=1)) == 6000
    assert "going by the footers: nobody answers" in caplog.text


def test_memory_that_workers_share_is_reckoned_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("dataload.loader.loader.check_shared_memory", asked.append)
    url, size = texts(tmp_path, 6)
    dataset = make_dataset(url, cache=CacheConfig(str(tmp_path / "cache"), 2 * size))
    assert dataset.rowstore.row_bytes < size / 6000 / 4
    make_loader(dataset, 10, window=1, num_workers=1, prefetch_factor=2, transform=dict)
    assert asked == [pytest.approx(20 * (size / 6000 + 8), rel=0.05)]


def test_large_values_are_not_taken_for_codes(tmp_path: Path) -> None:
    """Of each there is one: a dictionary that has all of them, or the first of them only."""
    for rows, size in ((20, 5000), (2000, 5000), (40_000, 100)):
        values = [noise.bytes(size) for _ in range(rows)]
        pq.write_table(pa.table({"image": pa.array(values, pa.binary())}), tmp_path / "x.parquet")
        dataset = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache")))
        assert dataset.rowstore.blobs.value_sizes.coded == []
        assert dataset.rowstore.blobs.num_bytes == pytest.approx(rows * (size + 8), rel=0.05)


def test_values_of_dictionaries_in_arrow_files_are_measured_too(tmp_path: Path) -> None:
    values = pa.array([f"{'hello world ' * (number % 100)}" for number in range(3000)]).dictionary_encode()
    with pa.ipc.new_file(tmp_path / "x.arrow", pa.schema([("text", values.type)])) as writer:
        writer.write_table(pa.table({"text": values}))
    blobs = make_dataset(str(tmp_path / "x.arrow"), cache=CacheConfig(str(tmp_path / "cache"))).rowstore.blobs
    assert blobs.value_sizes.coded == ["text"]
    blobs.measure()
    assert blobs.num_bytes == pytest.approx(sum(len(value.as_py()) + 8 for value in values), rel=0.01)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.dictionary(pa.int8(), pa.string()), pa.binary(1100)])
def test_nulls_are_in_nobodys_way_who_measures_values(kind: pa.DataType, tmp_path: Path) -> None:
    """What stands for them is said by who reads them, and a plan does not."""
    values = pa.array([None if number % 2 else b"x" * 1100 for number in range(3000)])
    texts = values.cast(pa.string()).dictionary_encode() if pa.types.is_dictionary(kind) else values
    pq.write_table(pa.table({"text": texts.cast(kind)}), tmp_path / "x.parquet")
    blobs = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache"))).rowstore.blobs
    blobs.measure()
    assert blobs.value_sizes.coded == ["text"]
    assert blobs.num_bytes == pytest.approx(3000 * (550 + 8), rel=0.01)


def test_the_doctor_reckons_with_values_too(bucket: Any) -> None:
    """In memory that processes share, batches have no codes."""
    values = [f"{'hello world ' * (number % 100)}" for number in range(3000)]
    bucket.put_table("texts/0.parquet", pa.table({"text": values}))
    store = _store(f"s3://{bucket.name}/texts", json.dumps(bucket.options))
    assert _row_bytes(store, None) == pytest.approx(np.mean([len(value) + 8 for value in values]), rel=0.01)


def test_a_dataset_without_row_groups_has_no_samples(tmp_path: Path) -> None:
    pq.ParquetWriter(tmp_path / "x.parquet", pa.schema([("text", pa.string())])).close()
    blobs = make_dataset(str(tmp_path / "x.parquet"), cache=CacheConfig(str(tmp_path / "cache"))).rowstore.blobs
    blobs.measure()
    assert (blobs.value_sizes.coded, blobs.num_bytes) == ([], 0)
