"""Row groups are made a list at a time: the same rows as one by one, each fetched once, and an error concerns one."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import until
from tiers import bytes_in, drafts_in

from dataload import CacheConfig, make_dataset, make_loader, mix
from dataload.cache import blob_file
from dataload.cache.local import failpoints
from dataload.cache.local.tier import LocalTier
from dataload.cache.local.writer import BulkWriter
from dataload.cache.tier import BlobKey
from dataload.dataset import Dataset
from dataload.errors import DataError, OriginError
from dataload.formats.schema import Layout, fields_of
from dataload.rows import row_block, row_group_cache, scheduler
from dataload.rows.arrow_decode import decode
from dataload.rows.background_decoder.worker import Done, _Worker
from dataload.rows.making import load_queue, pipeline, row_group_memory
from dataload.rows.making.file_maker import FileMaker
from dataload.rows.making.load_queue import Result
from dataload.rows.making.pipeline import make_cached
from dataload.rows.making.row_group_memory import RankShare
from dataload.rows.row_group_load import RowGroupLoad, State
from dataload.rows.row_groups import RowGroups
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.filemap import is_file_map

FILES, ROWS = 40, 7


def column_of(first: int, kind: str) -> pa.Array:
    """Return a column that is a function of the row number, which counts from `first`."""
    numbers = list(range(first, first + ROWS))
    values: dict[str, Callable[[], pa.Array]] = {
        "numbers": lambda: pa.array(numbers, pa.int32()),
        "floats with nulls": lambda: pa.array([n / 2 if n % 5 else None for n in numbers], pa.float32()),
        "integers with nulls": lambda: pa.array([n if n % 5 else None for n in numbers]),
        "lists": lambda: pa.array([list(range(n % 4)) for n in numbers], pa.list_(pa.int16())),
        "text": lambda: pa.array([f"row {n}" for n in numbers]),
        "few texts": lambda: pa.array([f"label {n % 2 + first % 3}" for n in numbers]),
        "nested": lambda: pa.array([[{"a": n}] * (n % 3) for n in numbers]),
    }
    return values[kind]()


KINDS = ("numbers", "floats with nulls", "integers with nulls", "lists", "text", "few texts", "nested")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*kinds: str, folder: str = "data") -> Path:
        (tmp_path / folder).mkdir()
        for number in range(FILES):
            first = number * ROWS
            columns = {kind: column_of(first, kind) for kind in kinds} | {"id": column_of(first, "numbers")}
            pq.write_table(pa.table(columns), tmp_path / folder / f"{number:03d}.parquet")
        return tmp_path / folder

    return write


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count how often each row group is fetched in a list of several."""
    counts: Counter[int] = Counter()
    start = pipeline._Job.open

    def counting(job: Any) -> None:
        start(job)
        if job.lock is not None and job.columns is None:
            counts[job.number] += 1

    monkeypatch.setattr(pipeline._Job, "open", counting)
    return counts


def rows_of(dataset: Dataset) -> list[Any]:
    """Return all rows in file order."""
    batches = list(make_loader(dataset, 64, shuffle=False))
    return [[[np.asarray(row).tolist() for row in batch[name]] for name in sorted(batch)] for batch in batches]


def request_all(dataset: Any) -> None:
    """Request all row groups before a thread begins to load them."""
    scheduler, count = dataset.rowstore.scheduler, len(dataset.row_groups)
    with scheduler._queue._mutex:
        for number in range(count):
            scheduler.request(number, count)


def opened(folder: Path, cache: Path, **options: Any) -> Dataset:
    return make_dataset(str(folder), cache=CacheConfig(str(cache)), null_masks=True, **options)


@pytest.mark.variants
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS])
def test_the_rows_are_the_same(
    tmp_path: Path, write: Any, made: Counter[int], monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    folder = write(*kinds)
    dataset = opened(folder, tmp_path / "together")
    request_all(dataset)
    together = rows_of(dataset)
    assert set(made.values()) == {1}
    made.clear()
    again = rows_of(opened(folder, tmp_path / "together"))  # from the cache
    assert not made
    monkeypatch.setattr(load_queue, "MOST_TOGETHER", 1)
    one_by_one = rows_of(opened(folder, tmp_path / "one by one"))
    assert not made
    assert repr(together) == repr(one_by_one) == repr(again)  # NaN equals NaN here


def test_columns_are_taken_from_cached_rows_of_all_columns(tmp_path: Path, write: Any, made: Counter[int]) -> None:
    folder = write("lists", "floats with nulls")
    rows_of(opened(folder, tmp_path / "cache"))
    made.clear()
    found = rows_of(opened(folder, tmp_path / "cache", columns=["id"]))
    assert not made
    assert [number for batch in found for number in batch[0]] == list(range(FILES * ROWS))


class Reported:
    """What `make` reports of row groups: their results, in order, and those that it leaves to be made alone."""

    def __init__(self) -> None:
        self.results: dict[int, Result] = {}
        self.left: list[int] = []
        self.loads: list[RowGroupLoad] = []

    def make(self, row_groups: RowGroups, numbers: Iterable[int]) -> Self:
        self.loads = [RowGroupLoad(number, *row_groups.of(number)) for number in numbers]
        try:
            pipeline.make(self.loads, self.report, self.leave, lambda: None)
        except Exception as error:
            for load in self.loads:
                if load.group not in self.results:
                    self.report(load, error)
        return self

    def report(self, load: RowGroupLoad, result: Result) -> None:
        assert load.group not in self.results
        self.results[load.group] = result

    def leave(self, load: RowGroupLoad) -> None:
        self.left.append(load.group)

    @property
    def made(self) -> list[int]:
        return [number for number, result in self.results.items() if isinstance(result, list)]

    @property
    def errors(self) -> dict[int, BaseException]:
        return {number: result for number, result in self.results.items() if isinstance(result, BaseException)}

    def blob(self, number: int) -> memoryview:
        result = self.results[number]
        assert isinstance(result, list)
        return result[0]


def made_of(dataset: Any, numbers: Iterable[int] | None = None) -> Reported:
    """Make row groups of a dataset, all of them by default."""
    row_groups = dataset.rowstore.row_groups
    return Reported().make(row_groups, range(len(row_groups.group_starts) - 1) if numbers is None else numbers)


def test_an_error_concerns_one_row_group(tmp_path: Path, write: Any) -> None:
    folder = write("numbers")
    columns = {"numbers": pa.array([1, None], pa.int32()), "id": pa.array([0, 1], pa.int32())}
    pq.write_table(pa.table(columns), folder / "013.parquet")
    dataset = make_dataset(str(folder), cache=CacheConfig(str(tmp_path / "cache")))
    found = made_of(dataset)
    assert sorted(found.made) == [number for number in range(FILES) if number != 13]
    assert isinstance(error := found.errors[13], DataError)
    assert "013.parquet row group 0 column 'numbers'" in str(error)
    assert {load.state for load in found.loads if load.group != 13} == {State.CACHED}
    with pytest.raises(DataError, match=r"013\.parquet"):
        rows_of(dataset)


def test_a_file_that_is_gone_concerns_one_row_group(tmp_path: Path, write: Any) -> None:
    folder = write("numbers")
    dataset = opened(folder, tmp_path / "cache")
    (folder / "013.parquet").unlink()
    found = made_of(dataset)
    assert (len(found.made), found.errors.keys()) == (FILES - 1, {13})
    assert "013.parquet" in str(found.errors[13])


def test_a_row_group_that_another_process_makes_is_left_to_it(tmp_path: Path, write: Any) -> None:
    dataset = opened(write("numbers"), tmp_path / "cache")
    [cache], held, done = dataset.rowstore.row_groups.caches, threading.Event(), threading.Event()

    def hold() -> None:
        with cache.tier.key_lock(cache.key(5)) as wait_for_other:
            assert wait_for_other is None
            held.set()
            done.wait()

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    try:
        found = made_of(dataset)
    finally:
        done.set()
        other.join()
    assert (len(found.made), found.left) == (FILES - 1, [5])


def test_a_row_group_that_cannot_be_fetched_waits_for_no_decoder(tmp_path: Path) -> None:
    file = tmp_path / "large.parquet"
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(400_000)}), file)
    dataset = make_dataset(str(file), cache=CacheConfig(str(tmp_path / "cache")))
    [cache] = dataset.rowstore.row_groups.caches
    file.unlink()
    failed, load = list[BaseException](), RowGroupLoad(0, cache, 0)

    def make() -> None:
        try:
            pipeline.make([load], lambda *_: None, lambda _: None, lambda: None)
        except OriginError as error:
            failed.append(error)

    thread = threading.Thread(target=make)
    with cache.memory.decoding.reserve(cache.memory.decoding.total):
        thread.start()
        until(lambda: failed or load.state is State.DECODING)
        assert failed
    thread.join()


def test_row_groups_are_fetched_once_by_several_loops(bucket: Any, dataset_of: Any, tmp_path: Path) -> None:
    """Each has its own cache object of one folder, as ranks have."""
    url = dataset_of([[300]] * 60)  # of more than 8 KiB
    caches = [CacheConfig(str(tmp_path / "cache")) for _ in range(3)]
    datasets = [make_dataset(url, storage_options=bucket.options, cache=cache) for cache in caches]
    bucket.server.reset()
    found: list[list[int]] = []

    def read(dataset: Any) -> None:
        found.append(sorted(number for batch in make_loader(dataset, 300) for number in batch["row_id"].tolist()))

    threads = [threading.Thread(target=read, args=[dataset]) for dataset in datasets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(18_000))] * 3
    assert bucket.server.stats()["get_requests"] == 60


def test_a_cache_that_is_too_small_keeps_a_part(tmp_path: Path, write: Any, made: Counter[int]) -> None:
    folder = write("numbers", "lists", "text")
    whole = opened(folder, tmp_path / "whole")
    expected = rows_of(whole)
    limit = int(0.7 * whole.blocks.tier.folder.index.used_bytes())  # type: ignore[attr-defined]
    made.clear()
    dataset = make_dataset(str(folder), cache=CacheConfig(str(tmp_path / "part"), limit), null_masks=True)
    request_all(dataset)
    for _ in range(2):
        assert rows_of(dataset) == expected
        assert dataset.blocks.tier.folder.index.used_bytes() <= limit  # type: ignore[attr-defined]
    assert made


@pytest.mark.parametrize("kinds", [("numbers", "lists"), ("text",)])
def test_a_mixture_makes_small_row_groups_of_several_datasets_together(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    names, run, sources = ("a", "b"), pipeline._run, list[set[int]]()

    def noting(jobs: Any, *rest: Any) -> None:
        sources.append({id(job.cache) for job in jobs})
        run(jobs, *rest)

    monkeypatch.setattr(pipeline, "_run", noting)
    folders = [write(*kinds, folder=name) for name in names]

    def rows(cache: str) -> Any:
        mixture = mix([opened(folder, tmp_path / cache) for folder in folders])
        request_all(mixture)
        batches = list(make_loader(mixture, 16))
        return sorted(
            repr([np.asarray(row).tolist() for row in column]) for each in batches for column in each.values()
        )

    together = rows("together")
    assert max(map(len, sources)) == len(names)
    monkeypatch.setattr(load_queue, "MOST_TOGETHER", 1)
    assert rows("one by one") == together


def test_each_dataset_counts_its_own_misses(tmp_path: Path, write: Any) -> None:
    datasets = [opened(write("lists", folder=name), tmp_path / "cache") for name in ("a", "b")]
    before = [dataset.blocks.tier.stats()["misses"] for dataset in datasets]
    assert len(made_of(mix(datasets)).made) == 2 * FILES
    counted = [dataset.blocks.tier.stats()["misses"] for dataset in datasets]
    assert [after - base for after, base in zip(counted, before, strict=True)] == [FILES, FILES]


def test_an_error_of_one_dataset_leaves_the_others_of_a_mixture(tmp_path: Path, write: Any) -> None:
    mixture = mix([opened(write("lists", folder=name), tmp_path / "cache") for name in ("a", "b")])
    for file in (tmp_path / "b").iterdir():
        file.unlink()
    assert sorted(made_of(mixture, reversed(range(2 * FILES))).made) == list(range(FILES))
    with pytest.raises(OSError, match=r"b/\d+\.parquet"):
        list(make_loader(mixture, 16))


def test_an_error_of_one_cache_leaves_the_row_groups_of_another(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = mix([opened(write("lists", folder=name), tmp_path / f"cache {name}") for name in ("a", "b")])

    def fail(*_: Any) -> None:
        raise RuntimeError("no locks")

    monkeypatch.setattr(mixture.datasets[1].blocks.tier.folder.locks, "hold_free", fail)
    request_all(mixture)
    loads = [load for _, load in sorted(mixture.rowstore.scheduler._loads.items())]
    errors = [load.contents.exception(60) for load in loads]
    assert [str(error) for error in errors] == ["None"] * FILES + ["no locks"] * FILES


def test_sources_that_fill_nulls_in_other_ways_are_decoded_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            pq.write_table(pa.table({"x": [None, number]}), tmp_path / name / f"{number}.parquet")
    fills = {"a": 7, "b": 8}
    cache = CacheConfig(str(tmp_path / "cache"))
    mixture = mix(
        {name: make_dataset(str(tmp_path / name), fill_null=fill, cache=cache) for name, fill in fills.items()}
    )
    assert len(made_of(mixture).made) == 8
    rows = [batch["x"].tolist() for batch in make_loader(mixture, 8, shuffle=False)]
    assert sorted(itertools.chain.from_iterable(rows)) == sorted([*range(4)] * 2 + [7] * 4 + [8] * 4)


def test_a_failure_after_the_blobs_are_published_ends_each_row_group(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(write("numbers"), tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(FileMaker, "discard_sources", lambda *_: 1 / 0)
        with suppress(ZeroDivisionError):  # A loop that asks later finds the cached row groups.
            list(make_loader(dataset, 16))
    assert sum(len(batch[0]) for batch in rows_of(dataset)) == FILES * ROWS


def test_a_footer_that_cannot_be_read_concerns_one_row_group(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(write("numbers"), tmp_path / "cache")
    maker = dataset.rowstore.row_groups.caches[0].maker
    footer = maker.footer

    def unreadable(group: Any) -> Any:
        if group is dataset.row_groups[13]:
            raise OriginError("not today")
        return footer(group)

    monkeypatch.setattr(maker, "footer", unreadable)
    found = made_of(dataset)
    assert (len(found.made), found.left) == (FILES - 1, [13])
    assert "not today" in str(made_of(dataset, [13]).errors[13])


def test_a_cached_row_group_is_one_hit(tmp_path: Path, write: Any) -> None:
    folder = write("numbers")
    rows_of(opened(folder, tmp_path / "cache"))
    dataset = opened(folder, tmp_path / "cache")
    before = dataset.blocks.tier.stats()["hits"]
    rows_of(dataset)
    assert dataset.blocks.tier.stats()["hits"] == before + FILES


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "tier", 100_000)


def blobs_of(count: int, size: int) -> list[tuple[BlobKey, memoryview]]:
    names = [f"{size} {number}" for number in range(count)]
    return [(BlobKey("o", "p", "v", name), memoryview(name.encode() * (size // len(name)))) for name in names]


def test_blobs_are_cached_together_as_far_as_they_fit(tier: LocalTier) -> None:
    blobs = blobs_of(8, 20_000)
    found = tier.bulk.put_together(blobs)
    assert found == [payload for _, payload in blobs]
    assert all(view.readonly for view in found)
    cached = [tier.get(key) for key, _ in blobs]
    assert cached.count(None) == 4
    assert tier.folder.index.used_bytes() <= tier.limit
    assert not drafts_in(tier.path)


@pytest.fixture
def steps() -> Iterator[Counter[str]]:
    seen: Counter[str] = Counter()
    failpoints.watch(lambda name: seen.update([name]))
    yield seen
    failpoints.watch(None)


def test_blobs_share_a_transaction_of_the_index(tier: LocalTier, steps: Counter[str]) -> None:
    tier.folder.index.used_bytes()
    before = _transactions(tier)
    tier.bulk.put_together(blobs_of(16, 1000))
    assert _transactions(tier) == before + 1
    assert steps["fill: published"] == 16
    tier.bulk.put_together(blobs_of(16, 1000))  # They are cached: each replaces the earlier one.
    assert tier.folder.index.used_bytes() == bytes_in(tier.path.glob("blobs/*/*"))
    assert tier.folder.index.owed_bytes() == 0


def _transactions(tier: LocalTier) -> int:
    with tier.folder.index._transaction() as txn:
        return int(txn.id())


def test_a_failed_transaction_leaves_the_rows_of_files_that_stay(
    tier: LocalTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = blobs_of(4, 1000)
    tier.bulk.put_together(blobs)

    def failing(*_: Any, **__: Any) -> bool:
        raise TimeoutError("the index is locked")

    monkeypatch.setattr(tier.folder.index, "admit_all", failing)
    assert tier.bulk.put_together(blobs[:1]) == [blobs[0][1]]
    assert len(list(tier.folder.index.rows())) == len(list(tier.path.glob("blobs/*/*"))) == 4
    assert not drafts_in(tier.path)


def answers_of(dataset: Dataset) -> dict[int, Done]:
    """Return the answers of the background decoder's worker to requests for all row groups."""
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as client, Connection(theirs.detach()) as served:
        worker = _Worker(served, dataset.rowstore.row_groups)
        with worker._queue._mutex:  # All are requested before a thread begins.
            for number in range(len(dataset.row_groups)):
                worker.add(number)
        return {done.group: done for done in (client.recv() for _ in dataset.row_groups)}


def test_the_background_decoder_makes_them_together(tmp_path: Path, write: Any, made: Counter[int]) -> None:
    dataset = opened(write("numbers", "lists"), tmp_path / "cache")
    answers = answers_of(dataset)
    assert answers.keys() == set(range(FILES))
    assert all(done.cached and done.error is None and done.account["decoded"] == 1 for done in answers.values())
    assert set(made.values()) == {1}
    assert len(made) > FILES // 2
    [cache] = dataset.rowstore.row_groups.caches
    assert all(cache.find(number) for number in answers)
    by_thread: dict[float, list[Done]] = {}
    for done in answers.values():
        by_thread.setdefault(done.making._changes[0][0], []).append(done)
    for together in by_thread.values():  # It counts the seconds of a thread once.
        last = max((done.making for done in together), key=lambda making: sum(making.spent().values()))
        spent = sum((Counter(done.spent) for done in together), Counter[str]())
        assert spent == pytest.approx(last.spent())


def test_the_background_decoder_tells_which_row_group_failed(tmp_path: Path, write: Any) -> None:
    folder = write("numbers")
    dataset = opened(folder, tmp_path / "cache")
    (folder / "013.parquet").unlink()
    answers = answers_of(dataset)
    assert [number for number, done in answers.items() if not done.cached] == [13]
    assert isinstance(answers[13].error, OriginError)
    assert "013.parquet" in str(answers[13].error)


def test_the_background_decoder_tells_which_row_groups_the_cache_did_not_keep(tmp_path: Path, write: Any) -> None:
    dataset = make_dataset(str(write("numbers")), cache=CacheConfig(str(tmp_path / "cache"), 120_000))
    answers = answers_of(dataset)
    assert {done.cached for done in answers.values()} == {True, False}
    [cache] = dataset.rowstore.row_groups.caches
    assert all((cache.find(number) is not None) == done.cached for number, done in answers.items())


GROUPS, LARGE_ROWS = 40, 40


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, list[Any]]:
    """A file whose row groups take 0.7 MB each, and its rows as `rows_of` returns them."""
    rng = np.random.default_rng(0)
    images = [np.frombuffer(rng.bytes(int(rng.integers(16_000, 19_000))), np.uint8) for _ in range(GROUPS * LARGE_ROWS)]
    table = pa.table({"image": [image.tobytes() for image in images], "id": np.arange(len(images))})
    (tmp_path / "large").mkdir()
    pq.write_table(table, tmp_path / "large" / "0.parquet", row_group_size=LARGE_ROWS, use_dictionary=False)
    return tmp_path / "large", images


def is_equal(dataset: Dataset, images: list[Any], **options: Any) -> bool:
    """Return whether a shuffled epoch has each row once, with its own values."""
    seen = []
    for batch in make_loader(dataset, 64, **options):
        for image, number in zip(batch["image"], batch["id"].tolist(), strict=True):
            seen.append(number)
            assert np.array_equal(np.asarray(image), images[number])
    return sorted(seen) == list(range(len(images)))


def test_row_groups_of_a_megabyte_are_made_together(
    tmp_path: Path, large: Any, made: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_group_memory, "usable_memory", lambda: 12 << 30)
    folder, images = large
    dataset = opened(folder, tmp_path / "cache")
    dataset.rowstore.row_groups.memory.use(RankShare.of(1, 1))
    request_all(dataset)
    assert is_equal(dataset, images)
    assert set(made.values()) == {1}
    assert len(made) > GROUPS // 2  # The last one of the queue is made alone.
    made.clear()
    assert is_equal(opened(folder, tmp_path / "cache"), images)
    assert not made


def test_memory_is_not_used_again_for_a_blob_that_the_cache_did_not_keep(tmp_path: Path, large: Any) -> None:
    folder, _ = large

    def made(cache: CacheConfig) -> list[memoryview]:
        dataset, blobs = make_dataset(str(folder), cache=cache), list[memoryview]()
        for first in range(0, GROUPS, 10):
            found = made_of(dataset, range(first, first + 10))
            blobs += [found.blob(number) for number in range(first, first + 10)]
        return blobs

    part = made(CacheConfig(str(tmp_path / "part"), 8 << 20))
    assert 0 < sum(map(is_file_map, part)) < GROUPS
    assert part == made(CacheConfig(str(tmp_path / "whole")))


@pytest.mark.variants
@pytest.mark.parametrize(("host", "most"), [(12 << 30, 10), (6 << 30, 8), (2 << 30, 1)])
def test_lists_fit_into_the_memory(
    tmp_path: Path, large: Any, made: Counter[int], monkeypatch: pytest.MonkeyPatch, host: int, most: int
) -> None:
    """Row groups that leave no room for others are made alone."""
    monkeypatch.setattr(row_group_memory, "usable_memory", lambda: host)
    folder, images = large
    dataset = opened(folder, tmp_path / "cache")
    dataset.rowstore.row_groups.memory.use(RankShare.of(1, 1))
    sizes, make = list[int](), pipeline.make
    monkeypatch.setattr(pipeline, "make", lambda loads, *rest: [sizes.append(len(loads)), make(loads, *rest)])
    request_all(dataset)
    assert is_equal(dataset, images)
    assert max(sizes) == most


def test_a_late_request_does_not_hold_up_the_other_row_groups(
    tmp_path: Path, large: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = large
    dataset = opened(folder, tmp_path / "cache")
    blocks, arrives = dataset.blocks, threading.Event()
    first, fetch = (
        min(start for start, _ in dataset.rowstore.row_groups.caches[0].maker.sources(5)[1]),
        blocks.fetch_into,
    )

    def fetch_into(obj: Any, start: int, memory: memoryview) -> None:
        if start == first:
            assert arrives.wait(200)
        fetch(obj, start, memory)

    monkeypatch.setattr(blocks, "fetch_into", fetch_into)
    [cache] = dataset.rowstore.row_groups.caches
    other, order = LocalTier(tmp_path / "cache"), list[int]()  # the former as another process has it

    class Noting(Reported):
        def report(self, load: RowGroupLoad, result: Result) -> None:
            super().report(load, result)
            order.append(load.group)
            if len(order) == 9:
                with other.key_lock(cache.key(0)) as done, other.key_lock(cache.key(5)) as late:
                    assert (done is None, late is None) == (True, False)
                arrives.set()

    assert sorted(Noting().make(dataset.rowstore.row_groups, range(10)).made) == list(range(10))
    assert order[-1] == 5


def test_late_requests_of_each_list_do_not_hold_up_the_next_one(
    tmp_path: Path, large: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_group_memory, "usable_memory", lambda: 12 << 30)
    folder, _ = large
    dataset = opened(folder, tmp_path / "cache")
    scheduler, maker, blocks = dataset.rowstore.scheduler, dataset.rowstore.row_groups.caches[0].maker, dataset.blocks
    dataset.rowstore.row_groups.memory.use(RankShare.of(1, 1))
    late, arrives, fetch = {0, 10, 18, 24}, threading.Event(), blocks.fetch_into  # one of each of the first lists
    firsts = {min(start for start, _ in maker.sources(number)[1]) for number in late}

    def fetch_into(obj: Any, start: int, memory: memoryview) -> None:
        if start in firsts:
            assert arrives.wait(200)
        fetch(obj, start, memory)

    monkeypatch.setattr(blocks, "fetch_into", fetch_into)
    lists, make = list[set[int]](), pipeline.make

    def noting(loads: Any, *rest: Any) -> None:
        lists.append({load.group for load in loads})
        make(loads, *rest)

    monkeypatch.setattr(pipeline, "make", noting)
    request_all(dataset)
    loads = scheduler._loads.copy()
    for number in loads.keys() - late:
        assert loads[number].contents.result(200) is not None
    assert [len(made & late) for made in sorted(lists, key=min)[:4]] == [1] * 4
    assert dataset.rowstore.row_groups.memory.held.reserved < 5 * 4 * (1 << 20)  # of the late ones only
    arrives.set()
    assert all(loads[number].contents.result(200) is not None for number in late)


def test_cached_and_locked_row_groups_do_not_wait_for_the_others_of_their_list(
    tmp_path: Path, large: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = large
    dataset = opened(folder, tmp_path / "cache")
    [cache], blocks, arrives = dataset.rowstore.row_groups.caches, dataset.blocks, threading.Event()
    assert make_cached(cache, 7)
    other, fetch = LocalTier(tmp_path / "cache"), blocks.fetch_into  # the first as another process has it

    def fetch_into(obj: Any, start: int, memory: memoryview) -> None:
        assert arrives.wait(200)
        fetch(obj, start, memory)

    class Noting(Reported):
        def report(self, load: RowGroupLoad, result: Result) -> None:
            super().report(load, result)
            if load.group == 7:
                assert (self.left, self.made, load.is_hit) == ([3], [7], True)
                with other.key_lock(cache.key(7)) as done, other.key_lock(cache.key(5)) as being_made:
                    assert (done is None, being_made is None) == (True, False)
                arrives.set()

    monkeypatch.setattr(blocks, "fetch_into", fetch_into)
    with other.key_lock(cache.key(3)) as other_makes_it:
        assert other_makes_it is None
        found = Noting().make(dataset.rowstore.row_groups, range(10))
    assert sorted(found.made) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_a_hit_does_not_say_that_the_cache_keeps_what_is_made(tmp_path: Path, write: Any) -> None:
    folder = write("numbers")
    rows_of(opened(folder, tmp_path / "cache"))
    dataset = opened(folder, tmp_path / "cache")
    scheduler = dataset.rowstore.scheduler
    scheduler.is_cached = False
    request_all(dataset)
    loads = scheduler._loads.copy()
    assert all(load.contents.result(200) is not None for load in loads.values())
    assert not scheduler.is_cached


def test_row_groups_larger_than_their_footers_tell_are_made_alone_later(tmp_path: Path) -> None:
    """Files may hide the size of texts in lists, which have a dictionary there."""
    texts = [[f"{number:04d}" * 500] * 400 for number in range(40)]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "data" / "0.parquet", row_group_size=4)
    dataset = opened(tmp_path / "data", tmp_path / "cache")
    [cache] = dataset.rowstore.row_groups.caches
    assert cache.small_bytes(0)
    found = made_of(dataset, range(5))
    assert all(len(found.blob(number)) > row_group_cache.SMALL_BYTES for number in range(5))
    assert not any(cache.small_bytes(number) for number in range(10))


def test_a_row_group_that_the_cache_does_not_keep_is_made_alone_later(tmp_path: Path, write: Any) -> None:
    dataset = make_dataset(str(write("numbers")), cache=CacheConfig(str(tmp_path / "cache"), 120_000))
    [cache], found = dataset.rowstore.row_groups.caches, made_of(dataset)
    kept = [is_file_map(found.blob(number)) for number in range(FILES)]
    assert set(kept) == {True, False}
    assert [cache.small_bytes(number) > 0 for number in range(FILES)] == kept


def test_a_process_with_too_many_maps_makes_them_in_other_memory(
    tmp_path: Path, large: Any, made: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, images = large

    def take(size: int) -> Any:
        raise OSError(errno.ENOMEM, f"no map of {size} bytes")

    monkeypatch.setattr(pipeline.blob_buffers, "take", take)
    dataset = opened(folder, tmp_path / "cache")
    assert len(made_of(dataset, range(10)).made) == 10
    monkeypatch.undo()
    assert is_equal(dataset, images)


def test_a_loop_asks_again_for_row_groups_that_must_wait_for_memory(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(write("numbers"), tmp_path / "cache")
    choose = scheduler.choose

    def choose_later(*, is_awaited: bool, **now: bool) -> scheduler.Place:
        place = choose(is_awaited=is_awaited, **now)
        if place is scheduler.Place.HERE and not is_awaited:
            return scheduler.Place.ON_DEMAND
        return place

    monkeypatch.setattr(scheduler, "choose", choose_later)
    request_all(dataset)
    assert sum(len(batch[0]) for batch in rows_of(dataset)) == FILES * ROWS


def test_row_groups_that_share_blocks_of_a_remote_file_are_made_alone(
    bucket: Any, dataset_of: Any, cache: CacheConfig
) -> None:
    [alone] = make_dataset(
        dataset_of([[5]] * 3), storage_options=bucket.options, cache=cache
    ).rowstore.row_groups.caches
    assert all(alone.small_bytes(number) for number in range(3))
    [shared] = make_dataset(
        dataset_of([[5, 5]] * 3, folder="two"), storage_options=bucket.options, cache=cache
    ).rowstore.row_groups.caches
    assert not any(shared.small_bytes(number) for number in range(6))


def test_an_error_after_some_row_groups_ends_each_of_the_others(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "PUBLISHED_BYTES", 1)
    put, calls = BulkWriter.put_together, itertools.count()

    def put_together(self: Any, blobs: Any) -> Any:
        if next(calls) % 3 == 2:
            raise RuntimeError("not today")
        return put(self, blobs)

    monkeypatch.setattr(BulkWriter, "put_together", put_together)
    dataset = opened(write("numbers"), tmp_path / "cache")
    request_all(dataset)
    loads = dataset.rowstore.scheduler._loads.copy()
    assert {str(load.contents.exception(60)) for load in loads.values()} == {"None", "not today"}
    answers = answers_of(opened(write("numbers", folder="more"), tmp_path / "cache"))
    assert {done.error is None for done in answers.values()} == {True, False}
    assert answers.keys() == set(range(FILES))


def test_a_row_group_that_is_requested_twice_is_in_two_lists(tmp_path: Path, write: Any) -> None:
    row_groups = opened(write("numbers"), tmp_path / "cache").rowstore.row_groups
    threads, found = DaemonExecutor(8, "test"), list[list[int]]()

    def run(loads: Any, *_: Any) -> None:
        found.append([load.group for load in loads])

    queue = load_queue.LoadQueue(threads, row_groups.memory)
    with queue._mutex:
        for number in [*range(8), *range(4), *sorted([*range(4, 8)] * 2), *range(4)]:
            queue.add(RowGroupLoad(number, *row_groups.of(number)), load_queue.Work(run, lambda *_: None))
    until(lambda: threads.idle)
    assert sorted(itertools.chain(*found)) == sorted([*range(8)] * 3)
    assert all(len(set(each)) == len(each) for each in found)


@pytest.mark.parametrize("at_once", [0, 1, 1000, 300_000])
def test_a_blob_is_whole_when_the_system_writes_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    payload = memoryview(np.random.default_rng(0).bytes(300_001))
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: os.write(descriptor, b"".join(parts)[:at_once]))
    descriptor = blob_file.create(tmp_path / "blob")
    size = blob_file.write_whole(descriptor, payload, b"d" * 32, "name")
    os.close(descriptor)
    content = (tmp_path / "blob").read_bytes()
    assert len(content) == size
    assert blob_file.payload_of(memoryview(content), b"d" * 32, "blob") == payload


@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS])
def test_equal_rows_make_equal_blobs(kinds: tuple[str, ...]) -> None:
    """Whatever the memory held before."""
    table = pa.table({kind: column_of(0, kind) for kind in kinds} | {"flag": pa.array([True] * ROWS)})
    layout = Layout(fields_of(table.schema, null_masks=True))
    columns = decode(table, layout.fields, None, "here", table.schema)
    made = []
    for byte in (0, 255):
        memory = bytearray()

        def allocate(size: int, byte: int = byte, memory: bytearray = memory) -> memoryview:
            memory.extend([byte] * size)
            return memoryview(memory)

        row_block.pack(columns, ROWS, layout, row_block.NO_KEY, "here", allocate)
        made.append(memory)
    assert made[0] == made[1]


def test_row_groups_that_a_list_leaves_come_before_later_ones(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of a list have a priority. Before them come those that it leaves to others, and the next list."""
    row_groups = opened(write("numbers"), tmp_path / "cache").rowstore.row_groups
    monkeypatch.setattr(load_queue, "LISTS_AT_ONCE", 1)
    threads, order = DaemonExecutor(1, "test"), list[str]()

    def run(loads: Any, report: Any, leave: Any, stalled: Any) -> None:
        order.append("left" if len(loads) == 1 else f"list from {loads[0].group}")
        if loads[0].group == 0 and len(loads) > 1:
            threads.submit(order.append, "later")
            stalled()
            leave(loads[0])

    queue = load_queue.LoadQueue(threads, row_groups.memory)
    with queue._mutex:
        for number in range(2 * load_queue.MOST_TOGETHER):
            queue.add(RowGroupLoad(number, *row_groups.of(number)), load_queue.Work(run, lambda *_: None))
    until(lambda: threads.idle)
    assert order == ["list from 0", f"list from {load_queue.MOST_TOGETHER}", "left", "later"]


def test_the_seconds_of_a_list_count_if_another_process_makes_its_first_row_group(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(write("numbers"), tmp_path / "cache")
    scheduler, [cache] = dataset.rowstore.scheduler, dataset.rowstore.row_groups.caches
    other, count, queue = LocalTier(tmp_path / "cache"), 8, scheduler._queue
    monkeypatch.setattr(load_queue, "LISTS_AT_ONCE", 1)

    with other.key_lock(cache.key(0)):
        with queue._mutex:
            for number in range(count):
                scheduler.request(number, count)
        loads = scheduler._loads.copy()
        for number in range(1, count):
            assert loads[number].contents.result(200) is not None
        until(lambda: scheduler._spent.snapshot().get("decode"))
    assert loads[0].contents.result(200) is not None
