"""Tests of the wait statistics: each wait of a training loop is charged to its cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_groups import make_in_background
from timed_epoch import timed_epoch as epoch

from dataload import CacheConfig, World, make_dataset, make_loader, mix
from dataload.benchmarks.origin import Origin
from dataload.cache import blob_file
from dataload.loader import device_copy
from dataload.rows import row_group_cache, scheduler
from dataload.rows.making import file_maker, row_group_memory
from dataload.telemetry.loader_stats import ADVICE, MIN_STALL, LoaderStats
from dataload.telemetry.spans import recorded_by
from dataload.telemetry.wait_timeline import CAUSES, CHANGES_KEPT, IDLE, Timeline, doing, waited

ROWS, GROUPS = 10, 16


def slowly(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*args: Any, **options: Any) -> Any:
        threading.Event().wait(seconds)
        return call(*args, **options)

    return slow


class Slow:
    """A picklable callable that sleeps."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, batch: Any) -> Any:
        threading.Event().wait(self.seconds)
        return batch


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    path = tmp_path / "origin"
    (path / "bucket/data").mkdir(parents=True)
    noise = np.random.default_rng(0)
    with pq.ParquetWriter(path / "bucket/data/x.parquet", pa.schema({"a": pa.binary(), "b": pa.int64()})) as writer:
        for _ in range(GROUPS):
            pixels = pa.array([noise.bytes(60_000) for _ in range(ROWS)], pa.binary())
            writer.write_table(pa.table({"a": pixels, "b": np.arange(ROWS)}))
    with Origin(path) as origin:
        yield origin


@pytest.fixture
def dataset(origin: Origin, tmp_path: Path) -> Any:
    cache = CacheConfig(str(tmp_path / "cache"), "1GB")
    return make_dataset("s3://bucket/data", storage_options=origin.storage_options, cache=cache)


@pytest.fixture
def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread loads row groups, so that the seconds of their loads add up."""
    monkeypatch.setattr(scheduler, "LOADERS", 1)


# The loop waits for many slow calls. However busy the machine is, it waits for one of them from its start to its end.


@pytest.mark.variants
@pytest.mark.usefixtures("one_after_the_other")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_slow_origin(dataset: Any, origin: Origin, num_workers: int, background: bool, monkeypatch: Any) -> None:
    if background:
        monkeypatch.setattr(scheduler, "BACKGROUND_BYTES", 0)
        dataset.rowstore.prefetch([])
        make_in_background(dataset.rowstore.scheduler.decoder, 0)
        assert dataset.rowstore.scheduler.decoder._process.ready.wait(200)
    origin.behave(latency=0.1, bytes_per_second=4e6 if background else 1e7)  # the low-priority process decodes late
    options: dict[str, Any] = {"transform": Slow(0), "num_workers": num_workers} if num_workers else {}
    stats = epoch(make_loader(dataset, 4, window=2, **options))
    if background:
        dataset.rowstore.scheduler.decoder.end()
    assert stats.waits["origin"] >= 0.1


@pytest.mark.usefixtures("one_after_the_other")
def test_the_waits_for_a_source_are_its_own(dataset: Any, origin: Origin, tmp_path: Path) -> None:
    """The rows of the other source are cached before."""
    pq.write_table(pa.table({"a": [b"x"] * ROWS, "b": np.arange(ROWS)}), tmp_path / "near.parquet")
    near = make_dataset(tmp_path / "near.parquet", cache=CacheConfig(str(tmp_path / "cache"), "1GB"))
    assert len(epoch(make_loader(near, 4)).waits_by_source) == 0
    loader = make_loader(mix({"far": dataset, "near": near}, [0.5, 0.5]), 4, window=2)
    origin.behave(latency=0.1, bytes_per_second=1e7)
    stats = epoch(loader)
    assert stats.waits_by_source["far"] >= 0.1
    assert stats.waits_by_source.get("near", 0.0) < stats.waits_by_source["far"]


def test_the_limit_of_requests_is_told_from_a_slow_origin(dataset: Any, origin: Origin) -> None:
    loader = make_loader(dataset, 4, window=8)
    dataset.blocks.origin.limiter.share(dataset, 64)  # one request at a time
    origin.behave(latency=0.05)
    stats = epoch(loader)
    assert stats.requests_origin / 2 < stats.requests_limited <= stats.requests_origin
    # On a busy machine, decoding may take longer than the requests.
    assert ADVICE["in_flight"] in str(replace(stats, waits={"origin": 1.0}, wait_seconds=1.0, seconds=1.0))


@pytest.mark.variants
@pytest.mark.parametrize("cause", ["origin", "decode"])
def test_a_wait_for_memory_is_charged_to_the_cause_that_holds_it(
    dataset: Any, origin: Origin, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget has memory for one row group at a time, and decoder threads decode it."""
    monkeypatch.setattr(row_group_cache, "SMALL_BYTES", 0)
    monkeypatch.setattr(row_group_memory, "MIN_MEMORY", 1)
    memory = 2 * row_group_memory.TRAINER_DIVISOR * row_group_memory.MEMORY_DIVISOR * ROWS * 60_000
    monkeypatch.setattr(row_group_memory, "usable_memory", lambda: memory)
    if cause == "origin":
        origin.behave(latency=0.05, bytes_per_second=6e6)
    else:
        monkeypatch.setattr(file_maker, "decode", slowly(file_maker.decode, 0.1))
    loader = make_loader(dataset, 4, window=2, num_threads=1)
    maker = dataset.rowstore.row_groups.caches[0].maker
    assert maker.memory.held.total < 2 * maker.reservation(0)
    waits = epoch(loader).waits
    assert waits[cause] == max(waits["origin"], waits["decode"])


@pytest.mark.usefixtures("one_after_the_other")
def test_a_slow_disk(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_file, "write_whole", slowly(blob_file.write_whole, 0.05))
    assert epoch(make_loader(dataset, 4, window=2)).waits["disk"] >= 0.05


def test_a_wait_for_another_process_is_not_charged_to_the_disk(dataset: Any, origin: Origin, tmp_path: Path) -> None:
    """A rank that only finds on the disk what others make does not know what they wait for."""
    epoch(make_loader(dataset, 4, window=2))
    options = {"storage_options": origin.storage_options, "cache": CacheConfig(str(tmp_path / "cache"), "1GB")}
    again = make_loader("s3://bucket/data", 4, window=2, **options)
    epoch(again)
    assert again.dataset.rowstore.scheduler.usual_cause() == "origin"


@pytest.mark.usefixtures("one_after_the_other")
def test_slow_decoding(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_maker, "decode", slowly(file_maker.decode, 0.05))
    assert epoch(make_loader(dataset, 4, window=2)).waits["decode"] >= 0.05


@pytest.mark.variants
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_threads": 0}, {"num_threads": 2}])
def test_a_slow_transform(dataset: Any, options: dict[str, int]) -> None:
    stats = epoch(make_loader(dataset, 4, transform=Slow(0.02), **options))
    batches = ROWS * GROUPS // 4
    assert stats.waits["transform"] >= 0.02 * (batches if options == {"num_threads": 0} else 1)


@pytest.mark.variants
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_slow_collate(dataset: Any, num_workers: int) -> None:
    stats = epoch(make_loader(dataset, 4, collate_fn=Slow(0.02), num_workers=num_workers))
    assert stats.waits["collate"] >= 0.02


def test_slow_copies_to_the_device(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "on_device", slowly(device_copy.on_device, 0.02))
    assert epoch(make_loader(dataset, 4, device="cpu")).waits["transfer"] >= 0.02


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_most_waits_is_advised_against(cause: str) -> None:
    stats = LoaderStats(rows=100, seconds=10.0)
    stats.waited(dict.fromkeys(CAUSES, 0.1) | {cause: 1.0}, lambda: "origin")
    assert ADVICE[cause] in str(stats)
    assert ADVICE["in_flight"] not in str(stats)
    stats.seconds = 100.0
    assert stats.stall_fraction < MIN_STALL
    assert ADVICE[cause] not in str(stats)
    assert "% of it waiting: the loop itself is the limit; " in str(stats)


def test_a_loop_that_hardly_waited_gets_no_advice(dataset: Any) -> None:
    stats = epoch(make_loader(dataset, 4))
    waits = dict.fromkeys(CAUSES, 0.0) | {"collate": 0.004}
    short = replace(stats, seconds=0.004, wait_seconds=0.004, waits=waits)
    assert "100% of it waiting;" in str(short)
    assert not any(advice in str(short) for advice in ADVICE.values())


@pytest.mark.variants
@pytest.mark.parametrize(
    ("cause", "options", "says", "says_not"),
    [
        ("transform", {"transform": dict}, "use num_threads", "raise"),
        ("transform", {"transform": dict, "num_threads": 2}, "raise num_threads, or use", "use num_threads"),
        ("transform", {"transform": dict, "num_workers": 1}, "raise num_workers", "num_threads"),
        ("transfer", {"device": "cpu"}, "use pin_memory", "raise"),
        ("transfer", {"device": "cpu", "pin_memory": True}, "use smaller dtypes", "pin_memory"),
        ("origin", {}, "run `dataload warm`", "planning"),
        ("origin", {"cache": False}, "give the loader a cache", "dataload warm"),
        ("decode", {"cache": False}, "give the loader a cache", "dataload warm"),
        ("origin", {"share": 0.5}, "raise cache_bytes", "dataload warm"),
        ("decode", {"share": 0.5}, "raise cache_bytes", "dataload warm"),
        ("collate", {"collate_fn": list}, "use num_workers", "group="),
        ("collate", {}, "group=", "lists of text"),
        ("origin", {"map": None}, "call dataload.planning.warm.warm", "`dataload warm`"),
        ("decode", {"map": None}, "call dataload.planning.warm.warm", "`dataload warm`"),
        ("map", {"map": None}, "use processes=", "`dataload warm`"),
        ("map", {"map": 1}, "raise processes=", "use processes="),
        ("map", {"map": None, "cache": False}, "give the loader a cache", "warm"),
        ("map", {"map": None, "share": 0.5}, "raise cache_bytes", "warm"),
    ],
)
def test_the_advice_is_for_the_settings_in_use(
    cause: str, options: dict[str, Any], says: str, says_not: str, dataset: Any, origin: Origin, tmp_path: Path
) -> None:
    opened = partial(make_dataset, "s3://bucket/data", storage_options=origin.storage_options)

    in_loader = dict(options)
    if "share" in in_loader:
        limit = int(in_loader.pop("share") * dataset.rowstore.row_groups.num_bytes)
        dataset, in_loader["window"] = opened(cache=CacheConfig(str(tmp_path / "part"), limit)), 1
    if "cache" in in_loader:
        dataset = opened(cache=in_loader.pop("cache"))
    if "map" in in_loader:
        dataset = dataset.map(dict, version=1, processes=in_loader.pop("map"))
    loader = make_loader(dataset, 4 if "window" in in_loader else ROWS * GROUPS, **in_loader)
    batches = iter(loader)
    next(batches)
    stats = loader.stats()
    batches.close()
    for text in (str(replace(stats, waits={cause: 1.0}, wait_seconds=1.0, seconds=1.0)), stats.advice(cause)):
        assert says in text
        assert says_not not in text


@pytest.mark.parametrize(("ragged", "says"), [("list", "lists of text"), ("flat", "group=")])
def test_lists_of_text_are_named_as_what_makes_batches_slow(ragged: str, says: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"day": ["monday"] * 4}), tmp_path / "days.parquet")
    stats = epoch(make_loader(tmp_path / "days.parquet", 2, ragged=ragged))
    assert says in stats.advice("collate")


def test_the_line_names_the_rank_among_several(dataset: Any) -> None:
    for rank in (0, 1):
        assert str(epoch(make_loader(dataset, 4, world=World(rank, 2)))).startswith(f"epoch 0, rank {rank} of 2: ")
    assert str(epoch(make_loader(dataset, 4))).startswith("epoch 0: ")


def test_the_computing_of_a_loop_is_no_wait(dataset: Any) -> None:
    batches, computed = make_loader(dataset, 4), 0.0
    for batch in batches:
        begun = time.perf_counter()
        len(b"".join(batch["a"]))
        computed += time.perf_counter() - begun
    stats = batches.stats()
    assert stats.seconds - stats.wait_seconds >= computed > 0


class Clock:
    """A clock that the test sets."""

    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_innermost_cause_counts(clock: Clock) -> None:
    timeline = Timeline(clock=clock)
    clock.now = 11
    with timeline.here(), doing("decode"):
        clock.now = 12
        with doing("origin"):
            clock.now = 16
        clock.now = 18
    assert timeline.spent() == {IDLE: 1, "decode": 3, "origin": 4}
    assert timeline.longest() == "origin"


def test_a_wait_is_charged_to_the_causes_of_the_other_thread(clock: Clock) -> None:
    other, mine = Timeline(clock=clock), Timeline("collate", clock)
    with mine.here():
        clock.now = 11
        with other.here(), doing("disk"):
            clock.now = 14
        clock.now = 15
        waited(10, other, instead="origin")
    clock.now = 17
    expected = {"origin": 2, "disk": 3, "collate": 2}
    assert mine.seconds(10, 17) == expected
    assert mine.take(10, 17) == expected
    assert mine.seconds(10, 17) == {IDLE: 7}


def test_a_recorder_sees_the_stages_of_each_thread(dataset: Any) -> None:
    seen: set[tuple[str, str]] = set()

    @contextmanager
    def recorder(name: str) -> Iterator[None]:
        seen.add((threading.current_thread().name.partition("_")[0], name))
        yield

    with recorded_by(recorder):
        epoch(make_loader(dataset, 4, transform=Slow(0)))
    assert {
        ("dataload-ahead", "collate"),
        ("dataload-ahead", "transform"),
        ("dataload-blocks-read", "origin"),
        ("dataload-load", "decode"),
        ("dataload-load", "disk"),
    } <= seen


def test_a_batch_that_cannot_be_pickled_raises(dataset: Any) -> None:
    """The loop must not wait forever for the batch."""
    with pytest.raises(TypeError, match="cannot pickle"):
        next(iter(make_loader(dataset, 4, transform=lambda _: threading.Lock(), num_workers=1)))


def test_old_changes_are_forgotten(clock: Clock) -> None:
    timeline = Timeline("collate", clock)
    for _ in range(20_000):
        clock.now += 1
        with timeline.doing("transform"):
            clock.now += 2
    assert len(timeline._changes) <= 2 * CHANGES_KEPT
    spent = timeline.seconds(10, clock.now)
    assert sum(spent.values()) == clock.now - 10
    assert spent[IDLE] > 0  # forgotten
    assert timeline.seconds(clock.now - 300, clock.now) == {"collate": 100, "transform": 200}


def test_nothing_is_recorded_outside_of_a_timeline() -> None:
    timeline = Timeline("collate")
    with timeline.here():
        pass
    with doing("origin"):
        waited(0.0, Timeline(), "disk")
    assert len(timeline._changes) == 1
