"""A cache smaller than the dataset: the part that fits stays, and only the rest is fetched again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import key

from dataload import CacheConfig, make_dataset, make_loader
from dataload.cache import blob_file
from dataload.cache.division import MAX_TRANSIENT, Need
from dataload.cache.local import directory
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate
from dataload.loader import capacity

SIZE = 10_000
ON_DISK = blob_file.size_on_disk(SIZE, key("x/0").name)


def put(tier: LocalTier, *names: int) -> None:
    def fill(allocate: Allocate) -> None:
        allocate(SIZE)[:] = bytes(SIZE)

    for name in names:
        tier.get_or_fill(key(f"x/{name}"), fill)


def kept(tier: LocalTier) -> list[int]:
    return [name for name in range(10) if tier.get(key(f"x/{name}"), (0, 0)) is not None]


def tier_of(path: Path, blobs: int, region: int) -> LocalTier:
    """Return a tier of a process that needs a large dataset, `region` blobs at a time."""
    tier = LocalTier(path, blobs * ON_DISK)
    need = Need.of(bytes(16), np.array([1], np.uint64), np.array([1e12]), region * ON_DISK, MAX_TRANSIENT)
    leases[:] = [tier.lease(need)]
    return tier


leases: list[Any] = []


@pytest.fixture(autouse=True)
def _leases_end() -> Iterator[None]:
    yield
    leases.clear()


def test_what_does_not_fit_passes_through_in_the_order_in_which_it_came(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 5, region=2)
    put(tier, 0, 1, 2, 3, 4)
    assert kept(tier) == [0, 1, 2, 3, 4]
    tier.folder.uses.flush()  # All were used just now; that does not make any of them the last to have come.
    put(tier, 5)
    assert kept(tier) == [0, 1, 2, 4, 5]
    put(tier, 6, 7)
    assert kept(tier) == [0, 1, 2, 6, 7]
    assert tier.folder.index.used_bytes() <= tier.limit
    assert tier.folder.index.owed_bytes() == 0
    assert tier.stats().get("refused", 0) == 0


def test_what_passes_through_is_told_from_what_stays(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 5, region=2)
    put(tier, *range(5))
    keys = [key(f"x/{name}") for name in range(6)]
    assert [tier.is_transient([one]) for one in keys] == [False, False, False, True, True, True]
    assert not tier.is_transient(keys[:3])
    assert tier.is_transient(keys[1:4])


@pytest.mark.parametrize("case", ["no region", "lru", "reads fail", "writes fail"])
def test_where_there_is_no_room_to_pass_through_nothing_does(tmp_path: Path, case: str) -> None:
    """Otherwise the loader would prefetch row groups that are evicted before use, or held in memory."""
    tier = tier_of(tmp_path, 5, region=2)
    put(tier, *range(5))
    assert tier.is_transient([key("x/4")])
    if case == "no region":
        leases.clear()
    elif case == "lru":
        tier.policy = "lru"
    elif case == "reads fail":
        tier.health.reads.failed(for_good=True)
    else:
        tier.health.writes.failed()
    assert not tier.is_transient([key("x/4")])


def test_without_a_region_what_does_not_fit_is_not_kept(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 5, region=0)
    put(tier, *range(7))
    assert kept(tier) == [0, 1, 2, 3, 4]
    assert tier.stats()["refused"] == 2


def test_what_no_running_process_uses_makes_room_for_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier_of(tmp_path, 5, region=2), *range(6))
    tier = tier_of(tmp_path, 5, region=2)  # another process, as far as it can tell
    monkeypatch.setattr(directory, "oldest_start", lambda _: 1 << 62)
    put(tier, 6, 7, 8)
    assert {6, 7, 8} <= set(kept(tier))
    monkeypatch.setattr(directory, "oldest_start", lambda _: 0)
    put(tier, 9)
    assert {6, 7, 8, 9} <= set(kept(tier))


def test_blobs_in_use_stay_though_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may start with a wrong clock. Blobs of an earlier process are evicted, whatever the clock said."""
    tier, clock = LocalTier(tmp_path, 3 * ON_DISK), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + 3600 * 10**9)
    put(tier, 0)
    monkeypatch.undo()
    put(tier, 1, 2, 3, 4)
    assert kept(tier) == [0, 1, 2]
    tier.folder.close()
    later = LocalTier(tmp_path, 3 * ON_DISK)
    put(later, 5, 6)
    assert {5, 6} <= set(kept(later))


def test_what_is_touched_stays_though_it_was_not_used_lately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tier_of(tmp_path, 5, region=2)
    put(first, 0, 1, 2)
    tier = tier_of(tmp_path, 5, region=2)
    started = max(row.used_at for row in tier.folder.index.rows()) + 1
    monkeypatch.setattr(directory, "oldest_start", lambda _: started)
    tier.touch([key(f"x/{name}") for name in (0, 1, 9)])
    put(tier, 3, 4, 5)
    assert kept(tier) == [0, 1, 3, 4, 5]  # no process used 2


def test_who_had_no_region_does_not_take_it_from_who_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache was warmed to its limit, and all blobs are in use."""
    put(tier_of(tmp_path, 5, region=0), *range(5))
    tier = tier_of(tmp_path, 5, region=2)
    monkeypatch.setattr(directory, "oldest_start", lambda _: 0)
    for name in (5, 6, 7, 8):
        put(tier, name)
        assert {name - 1, name} & set(range(5, 10)) <= set(kept(tier))
    assert len(set(kept(tier)) & set(range(5))) == 3
    assert tier.stats().get("refused", 0) == 0


def test_a_copy_of_the_tier_has_the_region(tmp_path: Path) -> None:
    import pickle

    assert pickle.loads(pickle.dumps(tier_of(tmp_path, 5, region=2))).division().region == 2 * ON_DISK


@pytest.mark.variants
@pytest.mark.parametrize(("share", "workers"), [(0.5, 0), (0.75, 0), (0.9, 0), (0.5, 1)])
def test_an_epoch_fetches_what_the_cache_has_no_room_for(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path, share: float, workers: int
) -> None:
    """Workers read blobs that another process cached before they are evicted."""
    rows = 4000 if workers else 1000  # a file's last page is nothing beside them
    url = dataset_of([[rows] * 60])
    whole = make_dataset(url, storage_options=bucket.options, cache=CacheConfig(str(tmp_path / "x"), "1GB"))
    decoded = sum(sum(whole.rowstore.row_groups.caches[0].sizes_on_disk(number)) for number in range(60))
    cache = CacheConfig(str(tmp_path / "cache"), int(share * decoded))
    dataset = make_dataset(url, storage_options=bucket.options, cache=cache)
    given = {"num_workers": workers, "transform": _as_it_is} if workers else {}
    loader = make_loader(dataset, rows // 10, window=2, **given)
    fetched = []
    for _ in range(4):
        bucket.server.reset()
        assert sorted(np.concatenate([batch["row_id"] for batch in loader]).tolist()) == list(range(60 * rows))
        fetched.append(bucket.server.stats()["get_bytes"] / dataset_bytes(dataset))
    region = dataset.blocks.tier.division().region / decoded
    assert 0 < region < 0.2
    # Of later epochs, whose first window is fetched at the end of the one before: all but what stays.
    assert 1 - share - 5 / 60 <= np.mean(fetched[1:]) <= 1.02 * (1 - (share - region)) + 1 / 60
    assert dataset.blocks.stats()["refused"] == 0


def test_what_passes_through_is_asked_for_before_what_stays(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region is full of row groups when the first batch of an epoch is ready."""
    monkeypatch.setattr(capacity, "RUN_BYTES", 1)
    url = dataset_of([[1000] * 60])
    decoded = make_dataset(url, storage_options=bucket.options, cache=False).rowstore.row_groups.num_bytes
    cache = CacheConfig(str(tmp_path / "cache"), decoded * 3 // 4)
    dataset = make_dataset(url, storage_options=bucket.options, cache=cache)
    loader = make_loader(dataset, 100, window=2)
    for _ in loader:
        pass
    asked: list[int] = []
    monkeypatch.setattr(dataset.rowstore, "prefetch", asked.extend)
    needs = [group for _, group in loader.sampler.needs_from(1, 0)]
    passing = [group for group in needs if dataset.rowstore.is_transient(group)]
    assert 10 < len(passing) < 30
    batches = iter(loader)
    next(batches)
    batches.close()
    assert dataset.rowstore.transient_ahead == 4
    assert set(passing[:4]) <= set(asked)
    assert needs.index(passing[3]) > 8


def _as_it_is(batch: Any) -> Any:
    return batch


def dataset_bytes(dataset: Any) -> int:
    return sum(group.bytes for group in dataset.row_groups)
