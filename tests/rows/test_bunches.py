"""Small row groups are made many at a time: the same rows, each fetched once, and an error concerns one of them."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
from dataload.cache.tier import BlobKey, Kind
from dataload.dataset import Dataset
from dataload.errors import DataError, OriginError
from dataload.formats.schema import Layout, fields_of
from dataload.rows import row_block, row_group_cache
from dataload.rows.arrow_decode import decode
from dataload.rows.background_decoder.worker import Done, _Worker
from dataload.rows.making import bunch_queue, bunches, row_group_maker, row_group_memory
from dataload.rows.making.bunches import Made
from dataload.rows.making.row_group_memory import RankShare
from dataload.rows.row_group_life import Lives, RowGroupLife, State
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.filemap import is_file_map
from dataload.runtime.turns import in_turn
from dataload.telemetry.wait_timeline import Timeline

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
    """Count how often each row group is made in a bunch."""
    counts: Counter[int] = Counter()
    pack = bunches._pack

    def counting(member: Any, columns: Any) -> Any:
        counts[member.number] += 1
        return pack(member, columns)

    monkeypatch.setattr(bunches, "_pack", counting)
    return counts


def rows_of(dataset: Dataset) -> list[Any]:
    """Return all rows in file order."""
    batches = list(make_loader(dataset, 64, shuffle=False))
    return [[[np.asarray(row).tolist() for row in batch[name]] for name in sorted(batch)] for batch in batches]


def request_all(dataset: Any) -> None:
    """Request all row groups before a thread begins to load them."""
    scheduler, count = dataset.rowstore.scheduler, len(dataset.row_groups)
    with scheduler._bunches._mutex:
        for number in range(count):
            scheduler.request(number, count)


def opened(folder: Path, cache: Path, **options: Any) -> Dataset:
    return make_dataset(str(folder), cache=CacheConfig(str(cache)), null_masks=True, **options)


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
    monkeypatch.setattr(bunch_queue, "MOST_IN_A_BUNCH", 1)
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


def lives_of(dataset: Dataset) -> dict[int, RowGroupLife]:
    return {number: RowGroupLife() for number in range(len(dataset.row_groups))}


def made_together(blobs: Any, lives: Lives) -> dict[int, Made]:
    return dict(blobs.load_together(lives, lambda: None))


def test_an_error_concerns_one_row_group(tmp_path: Path, write: Any) -> None:
    folder = write("numbers")
    columns = {"numbers": pa.array([1, None], pa.int32()), "id": pa.array([0, 1], pa.int32())}
    pq.write_table(pa.table(columns), folder / "013.parquet")
    dataset = make_dataset(str(folder), cache=CacheConfig(str(tmp_path / "cache")))
    lives = lives_of(dataset)
    found = made_together(dataset.rowstore.blobs, lives)
    assert len(found) == FILES
    assert [number for number, result in found.items() if not isinstance(result, list)] == [13]
    assert isinstance(error := found[13], DataError)
    assert "013.parquet row group 0 column 'numbers'" in str(error)
    assert {life.state for number, life in lives.items() if number != 13} == {State.CACHED}
    with pytest.raises(DataError, match=r"013\.parquet"):
        rows_of(dataset)


def test_a_file_that_is_gone_concerns_one_row_group(tmp_path: Path, write: Any) -> None:
    folder = write("numbers")
    dataset = opened(folder, tmp_path / "cache")
    (folder / "013.parquet").unlink()
    found = made_together(dataset.rowstore.blobs, lives_of(dataset))
    assert [number for number, result in found.items() if not isinstance(result, list)] == [13]
    assert "013.parquet" in str(found[13])


def test_a_row_group_that_another_process_makes_is_left_to_it(tmp_path: Path, write: Any) -> None:
    dataset = opened(write("numbers"), tmp_path / "cache")
    blobs, held, done = dataset.rowstore.blobs, threading.Event(), threading.Event()

    def hold() -> None:
        with blobs.tier.key_lock(blobs.lock_key(5)) as wait_for_other:
            assert wait_for_other is None
            held.set()
            done.wait()

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    try:
        found = made_together(blobs, lives_of(dataset))
    finally:
        done.set()
        other.join()
    assert [number for number, made in found.items() if not isinstance(made, list)] == [5]
    assert found[5] is None


def test_row_groups_are_fetched_once_by_several_loops(bucket: Any, dataset_of: Any, tmp_path: Path) -> None:
    """Each has its own cache object of one folder, as ranks have."""
    url = dataset_of([[5]] * 60)
    caches = [CacheConfig(str(tmp_path / "cache")) for _ in range(3)]
    datasets = [make_dataset(url, storage_options=bucket.options, cache=cache) for cache in caches]
    bucket.server.reset()
    found: list[list[int]] = []

    def read(dataset: Any) -> None:
        found.append(sorted(number for batch in make_loader(dataset, 10) for number in batch["row_id"].tolist()))

    threads = [threading.Thread(target=read, args=[dataset]) for dataset in datasets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(300))] * 3
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
    names, together, sources = ("a", "b"), bunches.make_together, list[set[int]]()

    def noting(members: Any, late: Any) -> Any:
        sources.append({id(member.blobs) for member in members})
        return together(members, late)

    monkeypatch.setattr("dataload.mixture.row_groups.make_together", noting)
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
    monkeypatch.setattr(bunch_queue, "MOST_IN_A_BUNCH", 1)
    assert rows("one by one") == together


def test_each_dataset_of_a_bunch_counts_its_own_misses(tmp_path: Path, write: Any) -> None:
    datasets = [opened(write("lists", folder=name), tmp_path / "cache") for name in ("a", "b")]
    before = [dataset.blocks.tier.stats()["misses"] for dataset in datasets]
    found = made_together(mix(datasets).rowstore.blobs, {number: RowGroupLife() for number in range(2 * FILES)})
    assert len(found) == 2 * FILES
    counted = [dataset.blocks.tier.stats()["misses"] for dataset in datasets]
    assert [after - base for after, base in zip(counted, before, strict=True)] == [FILES, FILES]


def test_an_error_of_one_dataset_leaves_the_others_of_a_mixture(tmp_path: Path, write: Any) -> None:
    mixture = mix([opened(write("lists", folder=name), tmp_path / "cache") for name in ("a", "b")])
    for file in (tmp_path / "b").iterdir():
        file.unlink()
    lives = {number: RowGroupLife() for number in reversed(range(2 * FILES))}
    found = made_together(mixture.rowstore.blobs, lives)
    assert sorted(number for number, made in found.items() if isinstance(made, list)) == list(range(FILES))
    with pytest.raises(OSError, match=r"b/\d+\.parquet"):
        list(make_loader(mixture, 16))


def test_an_error_of_one_cache_leaves_the_row_groups_of_another(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = mix([opened(write("lists", folder=name), tmp_path / f"cache {name}") for name in ("a", "b")])

    def fail(*_: Any) -> None:
        raise RuntimeError("no locks")

    monkeypatch.setattr(mixture.datasets[1].blocks.tier.folder.locks, "hold_free", fail)
    found = made_together(mixture.rowstore.blobs, {number: RowGroupLife() for number in range(2 * FILES)})
    assert [isinstance(made, list) for made in found.values()] == [True] * FILES + [False] * FILES
    assert {str(made) for made in found.values() if not isinstance(made, list)} == {"no locks"}


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
    found = made_together(mixture.rowstore.blobs, {number: RowGroupLife() for number in range(8)})
    assert all(isinstance(made, list) for made in found.values())
    rows = [batch["x"].tolist() for batch in make_loader(mixture, 8, shuffle=False)]
    assert sorted(itertools.chain.from_iterable(rows)) == sorted([*range(4)] * 2 + [7] * 4 + [8] * 4)


def test_a_bunch_that_fails_late_ends_each_of_its_row_groups(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(write("numbers"), tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(
            type(dataset.rowstore.blobs), "discard_source_blocks", lambda *_: 1 / 0
        )  # after the blobs were published
        with suppress(ZeroDivisionError):  # A loop that asks later finds the cached row groups.
            list(make_loader(dataset, 16))
    assert sum(len(batch[0]) for batch in rows_of(dataset)) == FILES * ROWS


def test_a_footer_that_cannot_be_read_concerns_one_row_group(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = (dataset := opened(write("numbers"), tmp_path / "cache")).rowstore.blobs
    footer = blobs.maker.footer

    def unreadable(group: Any) -> Any:
        if group is dataset.row_groups[13]:
            raise OriginError("not today")
        return footer(group)

    monkeypatch.setattr(blobs.maker, "footer", unreadable)
    found = made_together(blobs, lives_of(dataset))
    assert [number for number, made in found.items() if not isinstance(made, list)] == [13]
    assert found[13] is None  # Another thread loads it alone, and raises.


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
    return [
        (BlobKey("o", "p", "v", Kind.FOOTER, name), memoryview(name.encode() * (size // len(name)))) for name in names
    ]


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

    monkeypatch.setattr(tier.folder.index, "admit", failing)
    assert tier.bulk.put_together(blobs[:1]) == [blobs[0][1]]
    assert len(list(tier.folder.index.rows())) == len(list(tier.path.glob("blobs/*/*"))) == 4
    assert not drafts_in(tier.path)


def answers_of(dataset: Dataset) -> dict[int, Done]:
    """Return the answers of the background decoder's worker to requests for all row groups."""
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as client, Connection(theirs.detach()) as served:
        worker = _Worker(served, dataset.rowstore.blobs)
        with worker._bunches._mutex:  # All are requested before a thread begins.
            for number in range(len(dataset.row_groups)):
                assert worker._bunches.add(number, RowGroupLife(), worker._loading)
        return {done.group: done for done in (client.recv() for _ in dataset.row_groups)}


def test_the_background_decoder_makes_them_together(tmp_path: Path, write: Any, made: Counter[int]) -> None:
    dataset = opened(write("numbers", "lists"), tmp_path / "cache")
    answers = answers_of(dataset)
    assert answers.keys() == set(range(FILES))
    assert all(done.cached and done.error is None and done.account["decoded"] == 1 for done in answers.values())
    assert set(made.values()) == {1}
    assert len(made) > FILES // 2
    blobs = dataset.rowstore.blobs
    assert all(blobs.get_all(blobs.keys(number)) for number in answers)
    by_thread: dict[float, list[Done]] = {}
    for done in answers.values():
        by_thread.setdefault(done.making._changes[0][0], []).append(done)
    for bunch in by_thread.values():  # It counts the seconds of a thread once.
        last = max((done.making for done in bunch), key=lambda making: sum(making.spent().values()))
        spent = sum((Counter(done.spent) for done in bunch), Counter[str]())
        assert spent == pytest.approx(last.spent())


def test_the_background_decoder_tells_which_row_group_of_a_bunch_failed(tmp_path: Path, write: Any) -> None:
    folder = write("numbers")
    dataset = opened(folder, tmp_path / "cache")
    (folder / "013.parquet").unlink()
    answers = answers_of(dataset)
    assert [number for number, done in answers.items() if not done.cached] == [13]
    assert isinstance(answers[13].error, OriginError)
    assert "013.parquet" in str(answers[13].error)


def test_the_background_decoder_tells_which_row_groups_the_cache_did_not_keep(tmp_path: Path, write: Any) -> None:
    dataset = make_dataset(str(write("numbers")), cache=CacheConfig(str(tmp_path / "cache"), 60_000))
    answers = answers_of(dataset)
    assert {done.cached for done in answers.values()} == {True, False}
    blobs = dataset.rowstore.blobs
    assert all((blobs.get_all(blobs.keys(number)) is not None) == done.cached for number, done in answers.items())


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
    dataset.rowstore.blobs.memory.use(RankShare.of(1, 1))
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
        blobs, found = make_dataset(str(folder), cache=cache).rowstore.blobs, dict[int, Any]()
        for first in range(0, GROUPS, 10):
            found |= made_together(blobs, {number: RowGroupLife() for number in range(first, first + 10)})
        return [found[number][0] for number in range(GROUPS)]

    part = made(CacheConfig(str(tmp_path / "part"), 8 << 20))
    assert 0 < sum(map(is_file_map, part)) < GROUPS
    assert part == made(CacheConfig(str(tmp_path / "whole")))


@pytest.mark.parametrize(("host", "most"), [(12 << 30, 10), (6 << 30, 8), (2 << 30, 0)])
def test_bunches_fit_into_the_memory(
    tmp_path: Path, large: Any, made: Counter[int], monkeypatch: pytest.MonkeyPatch, host: int, most: int
) -> None:
    """Row groups that leave no room for others are made alone."""
    monkeypatch.setattr(row_group_memory, "usable_memory", lambda: host)
    folder, images = large
    blobs = (dataset := opened(folder, tmp_path / "cache")).rowstore.blobs
    blobs.memory.use(RankShare.of(1, 1))
    request_all(dataset)
    sizes, together = list[int](), bunches.make_together
    monkeypatch.setattr(
        row_group_cache, "make_together", lambda members, late: (sizes.append(len(members)), together(members, late))[1]
    )
    assert is_equal(dataset, images)
    assert max(sizes, default=0) == most


def test_a_late_request_does_not_hold_up_the_other_row_groups(
    tmp_path: Path, large: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = large
    dataset = opened(folder, tmp_path / "cache")
    blocks, arrives = dataset.blocks, threading.Event()
    first, fetch = min(start for start, _ in dataset.rowstore.blobs.maker.sources(5)[1]), blocks.fetch_into

    def fetch_into(obj: Any, start: int, memory: memoryview) -> None:
        if start == first:
            assert arrives.wait(200)
        fetch(obj, start, memory)

    monkeypatch.setattr(blocks, "fetch_into", fetch_into)
    order, blobs = [], dataset.rowstore.blobs
    other = LocalTier(tmp_path / "cache")  # as another process has it
    for number, found in blobs.load_together({number: RowGroupLife() for number in range(10)}, lambda: None):
        assert isinstance(found, list)
        order.append(number)
        if len(order) == 9:
            with other.key_lock(blobs.lock_key(0)) as done, other.key_lock(blobs.lock_key(5)) as late:
                assert (done is None, late is None) == (True, False)
            arrives.set()
    assert sorted(order) == list(range(10))
    assert order[-1] == 5


def test_late_requests_of_each_bunch_do_not_hold_up_the_next_ones(
    tmp_path: Path, large: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_group_memory, "usable_memory", lambda: 12 << 30)
    folder, _ = large
    dataset = opened(folder, tmp_path / "cache")
    scheduler, maker, blocks = dataset.rowstore.scheduler, dataset.rowstore.blobs.maker, dataset.blocks
    dataset.rowstore.blobs.memory.use(RankShare.of(1, 1))
    late, arrives, fetch = {0, 10, 18, 24}, threading.Event(), blocks.fetch_into  # one of each of the first bunches
    firsts = {min(start for start, _ in maker.sources(number)[1]) for number in late}

    def fetch_into(obj: Any, start: int, memory: memoryview) -> None:
        if start in firsts:
            assert arrives.wait(200)
        fetch(obj, start, memory)

    monkeypatch.setattr(blocks, "fetch_into", fetch_into)
    bunched, load = list[set[int]](), scheduler._made_together
    monkeypatch.setattr(
        scheduler, "_made_together", lambda lives, late: (bunched.append({*lives}), load(lives, late))[1]
    )
    request_all(dataset)
    lives = scheduler._lives.copy()
    for number in lives.keys() - late:
        assert lives[number].contents.result(200) is not None
    assert [len(bunch & late) for bunch in sorted(bunched, key=min)[:4]] == [1] * 4
    assert dataset.rowstore.blobs.memory.held.reserved < 5 * 4 * (1 << 20)  # of the late ones only
    arrives.set()
    assert all(lives[number].contents.result(200) is not None for number in late)


def test_row_groups_that_a_bunch_does_not_make_do_not_wait_for_it(
    tmp_path: Path, large: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = large
    dataset = opened(folder, tmp_path / "cache")
    blobs, blocks, arrives = dataset.rowstore.blobs, dataset.blocks, threading.Event()
    blobs.make(7)
    other, fetch = LocalTier(tmp_path / "cache"), blocks.fetch_into  # the first as another process has it

    def fetch_into(obj: Any, start: int, memory: memoryview) -> None:
        assert arrives.wait(200)
        fetch(obj, start, memory)

    monkeypatch.setattr(blocks, "fetch_into", fetch_into)
    with other.key_lock(blobs.lock_key(3)) as other_makes_it:
        assert other_makes_it is None
        loads = blobs.load_together({number: RowGroupLife() for number in range(10)}, lambda: None)
        assert next(loads) == (3, None)
    number, cached = next(loads)
    assert number == 7
    assert isinstance(cached, list)
    with other.key_lock(blobs.lock_key(7)) as done, other.key_lock(blobs.lock_key(5)) as being_made:
        assert (done is None, being_made is None) == (True, False)
    arrives.set()
    assert sorted(number for number, made in loads if isinstance(made, list)) == [0, 1, 2, 4, 5, 6, 8, 9]


def test_a_hit_does_not_say_that_the_cache_keeps_what_is_made(tmp_path: Path, write: Any) -> None:
    folder = write("numbers")
    rows_of(opened(folder, tmp_path / "cache"))
    dataset = opened(folder, tmp_path / "cache")
    scheduler = dataset.rowstore.scheduler
    scheduler.is_cached = False
    request_all(dataset)
    lives = scheduler._lives.copy()
    assert all(life.contents.result(200) is not None for life in lives.values())
    assert not scheduler.is_cached


def test_row_groups_larger_than_their_footers_tell_are_made_alone_later(tmp_path: Path) -> None:
    """Files may hide the size of texts in lists, which have a dictionary there."""
    texts = [[f"{number:04d}" * 500] * 400 for number in range(40)]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": texts}), tmp_path / "data" / "0.parquet", row_group_size=4)
    blobs = opened(tmp_path / "data", tmp_path / "cache").rowstore.blobs
    assert blobs.bunched_bytes(0)
    found = made_together(blobs, {number: RowGroupLife() for number in range(5)})
    assert all(len(blob) > row_group_maker.INLINE_BYTES for [blob] in found.values())
    assert not any(blobs.bunched_bytes(number) for number in range(10))


def test_a_row_group_that_the_cache_does_not_keep_is_made_alone_later(tmp_path: Path, write: Any) -> None:
    blobs = make_dataset(str(write("numbers")), cache=CacheConfig(str(tmp_path / "cache"), 60_000)).rowstore.blobs
    found = made_together(blobs, {number: RowGroupLife() for number in range(FILES)})
    kept = [is_file_map(found[number][0]) for number in range(FILES)]
    assert set(kept) == {True, False}
    assert [blobs.bunched_bytes(number) > 0 for number in range(FILES)] == kept


def test_a_process_with_too_many_maps_makes_them_in_other_memory(
    tmp_path: Path, large: Any, made: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, images = large

    def take(size: int) -> Any:
        raise OSError(errno.ENOMEM, f"no map of {size} bytes")

    monkeypatch.setattr(bunches.blob_buffers, "take", take)
    dataset = opened(folder, tmp_path / "cache")
    found = made_together(dataset.rowstore.blobs, {number: RowGroupLife() for number in range(10)})
    assert all(isinstance(each, list) for each in found.values())
    monkeypatch.undo()
    assert is_equal(dataset, images)


def test_a_loop_asks_again_for_row_groups_that_must_wait_for_memory(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, asked = opened(write("numbers"), tmp_path / "cache"), set[int]()
    reserve = dataset.rowstore.scheduler._reserve_uncached

    def reserve_later(group: int, life: RowGroupLife) -> bool:
        is_first = group not in asked
        asked.add(group)
        return not is_first and reserve(group, life)

    monkeypatch.setattr(dataset.rowstore.scheduler, "_reserve_uncached", reserve_later)
    request_all(dataset)
    assert sum(len(batch[0]) for batch in rows_of(dataset)) == FILES * ROWS
    assert asked == set(range(FILES))


def test_row_groups_that_share_blocks_of_a_remote_file_are_made_alone(
    bucket: Any, dataset_of: Any, cache: CacheConfig
) -> None:
    alone = make_dataset(dataset_of([[5]] * 3), storage_options=bucket.options, cache=cache).rowstore.blobs
    assert all(alone.bunched_bytes(number) for number in range(3))
    shared = make_dataset(
        dataset_of([[5, 5]] * 3, folder="two"), storage_options=bucket.options, cache=cache
    ).rowstore.blobs
    assert not any(shared.bunched_bytes(number) for number in range(6))


def test_an_error_after_some_row_groups_ends_each_of_the_others(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bunches, "CACHED_AT_ONCE", 1)
    put, calls = BulkWriter.put_together, itertools.count()

    def put_together(self: Any, blobs: Any) -> Any:
        if next(calls) % 3 == 2:
            raise RuntimeError("not today")
        return put(self, blobs)

    monkeypatch.setattr(BulkWriter, "put_together", put_together)
    dataset = opened(write("numbers"), tmp_path / "cache")
    request_all(dataset)
    lives = dataset.rowstore.scheduler._lives.copy()
    assert {str(life.contents.exception(60)) for life in lives.values()} == {"None", "not today"}
    answers = answers_of(opened(write("numbers", folder="more"), tmp_path / "cache"))
    assert {done.error is None for done in answers.values()} == {True, False}
    assert answers.keys() == set(range(FILES))


def test_a_row_group_that_is_requested_twice_is_in_two_bunches(tmp_path: Path, write: Any) -> None:
    dataset = opened(write("numbers"), tmp_path / "cache")
    threads, found = DaemonExecutor(8, "test"), list[list[int]]()

    def load(lives: Any, _: Any) -> Any:
        found.append([*lives])
        return ((number, []) for number in lives)

    queue = bunch_queue.BunchQueue(dataset.rowstore.blobs, threads)
    loading = bunch_queue.Loading(load, lambda *_: None, lambda group, _: found.append([group]))
    with queue._mutex:
        for number in [*range(8), *range(4), *sorted([*range(4, 8)] * 2), *range(4)]:
            assert queue.add(number, RowGroupLife(), loading)
    until(lambda: threads.idle)
    assert sorted(itertools.chain(*found)) == sorted([*range(8)] * 3)
    assert all(len(set(bunch)) == len(bunch) for bunch in found)


@pytest.mark.parametrize("at_once", [0, 1, 1000, 300_000])
def test_a_blob_is_whole_when_the_system_writes_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    payload = memoryview(np.random.default_rng(0).bytes(300_001))
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: os.write(descriptor, b"".join(parts)[:at_once]))
    descriptor = blob_file.create(tmp_path / "blob")
    size = blob_file.write_whole(descriptor, payload, Kind.RECORDS, b"d" * 32, "name")
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


def test_calls_of_a_bunch_keep_their_place_before_later_ones(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of a bunch have a turn. The row groups that it leaves to others, and the next bunch, have none."""
    dataset = opened(write("numbers"), tmp_path / "cache")
    monkeypatch.setattr(bunch_queue, "BUNCHES_AT_ONCE", 1)
    threads, order = DaemonExecutor(1, "test"), list[str]()
    bunches_of = itertools.count(1)

    def load(lives: Any, late: Any) -> Any:
        order.append(f"bunch {(number := next(bunches_of))}")
        if number == 1:
            late()
            yield next(iter(lives)), None
            with in_turn(0):
                threads.submit(order.append, "later")

    def alone(*_: Any) -> None:
        threads.submit(order.append, "alone")

    queue = bunch_queue.BunchQueue(dataset.rowstore.blobs, threads)
    with queue._mutex:
        for number in range(2 * bunch_queue.MOST_IN_A_BUNCH):
            assert queue.add(number, RowGroupLife(), bunch_queue.Loading(load, lambda *_: None, alone))
    until(lambda: threads.idle)
    assert order.index("later") > order.index("bunch 2")
    assert order.index("later") > order.index("alone")


def test_the_seconds_of_a_bunch_count_if_another_process_makes_its_first_row_group(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(write("numbers"), tmp_path / "cache")
    scheduler, blobs = dataset.rowstore.scheduler, dataset.rowstore.blobs
    other, count, load_alone = LocalTier(tmp_path / "cache"), 8, scheduler._load_alone
    monkeypatch.setattr(bunch_queue, "BUNCHES_AT_ONCE", 1)

    def alone(group: int, life: RowGroupLife) -> None:
        life.timeline = Timeline()  # as the thread does that loads it
        load_alone(group, life)

    monkeypatch.setattr(scheduler, "_load_alone", alone)
    with other.key_lock(blobs.lock_key(0)):
        with scheduler._bunches._mutex:
            for number in range(count):
                scheduler.request(number, count)
        lives = scheduler._lives.copy()
        for number in range(1, count):
            assert lives[number].contents.result(200) is not None
        until(lambda: scheduler._spent.snapshot().get("decode"))
    assert lives[0].contents.result(200) is not None
