"""The contract of every tier. Add a new tier to `TIERS`."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lock_waits import announce_waits
from tiers import Filler, drafts_in

from dataload.cache.cluster.store import Cluster
from dataload.cache.cluster.tier import ClusterTier
from dataload.cache.local.read_only import ReadOnlyTier
from dataload.cache.local.tier import LocalTier
from dataload.cache.memory import MemoryTier
from dataload.cache.tier import Allocate, BlobKey, Tier

LIMIT = 1 << 20
TIERS: dict[str, Callable[[Path], Tier]] = {
    "local-pin": lambda path: LocalTier(path, LIMIT, "pin"),
    "local-lru": lambda path: LocalTier(path, LIMIT, "lru"),
    "memory": lambda _: MemoryTier(LIMIT),
    "read-only": lambda path: read_only(path),
    "cluster-gone": lambda path: ClusterTier(LocalTier(path, LIMIT), Cluster("valkey://127.0.0.1:1")),
}


def read_only(path: Path) -> ReadOnlyTier:
    assert not LocalTier(path, LIMIT).folder.closed  # creates the cache
    return ReadOnlyTier(path, LIMIT)


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return TIERS[request.param](tmp_path / "cache")


def key(name: str) -> BlobKey:
    return BlobKey("origin", "bucket/object", "version", name)


def test_a_missing_blob_is_none(tier: Tier) -> None:
    assert tier.get(key("a")) is None


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 300_001])
def test_what_was_filled_is_served(tier: Tier, size: int) -> None:
    filler = Filler(os.urandom(size))
    assert tier.get_or_fill(key("a"), filler) == filler.data
    assert tier.get_or_fill(key("a"), filler) == filler.data
    assert tier.get(key("a")) == filler.data
    assert filler.calls == 1
    assert tier.get(key("b")) is None


def test_a_tier_tells_how_much_it_holds(tier: Tier) -> None:
    assert not tier.used_bytes
    blob = tier.get_or_fill(key("a"), Filler(os.urandom(10_000)))
    assert len(blob) <= (tier.used_bytes or 0) <= tier.limit


def test_views_are_read_only(tier: Tier) -> None:
    filled = tier.get_or_fill(key("a"), Filler(b"bytes"))
    found = tier.get(key("a"))
    assert found is not None
    for view in (filled, found):
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1


def test_a_failed_fill_keeps_nothing(tier: Tier) -> None:
    def fails(allocate: Allocate) -> None:
        allocate(100)[:50] = b"x" * 50
        raise ConnectionResetError("half-way")

    with pytest.raises(ConnectionResetError, match="half-way"):
        tier.get_or_fill(key("a"), fails)
    assert tier.get(key("a")) is None
    if isinstance(tier, LocalTier):
        assert tier.folder.index.used_bytes() == 0
        assert not drafts_in(tier.path)
    assert tier.get_or_fill(key("a"), Filler(b"whole")) == b"whole"


def test_a_fill_allocates_exactly_once(tier: Tier) -> None:
    def twice(allocate: Allocate) -> None:
        allocate(1)
        allocate(1)

    with pytest.raises(RuntimeError, match="once"):
        tier.get_or_fill(key("a"), twice)
    with pytest.raises(RuntimeError, match="nothing"):
        tier.get_or_fill(key("a"), lambda _: None)
    assert tier.get(key("a")) is None


def test_many_threads_fill_once(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, calls = threading.Semaphore(0), []
    announce_waits(waits.release, monkeypatch.setattr)

    def fill(allocate: Allocate) -> None:
        calls.append(1)
        for _ in range(7):  # A thread that starts a second fill does not wait.
            assert waits.acquire(timeout=200)
        allocate(3)[:] = b"one"

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: bytes(tier.get_or_fill(key("a"), fill)), range(8))) == {b"one"}
    assert len(calls) == 1
    assert tier.stats()["misses"] == 1
    assert tier.stats()["hits"] == 7


def test_other_keys_are_not_held_up(tier: Tier) -> None:
    def nested(allocate: Allocate) -> None:
        inner = tier.get_or_fill(key("b"), Filler(b"inner"))
        allocate(len(inner))[:] = inner

    assert tier.get_or_fill(key("a"), nested) == b"inner"


def test_a_view_outlives_its_blob(tier: Tier) -> None:
    first = Filler(os.urandom(LIMIT // 2))
    view = tier.get_or_fill(key("first"), first)
    for number in range(8):
        tier.get_or_fill(key(f"other {number}"), Filler(os.urandom(LIMIT // 3)))
    assert view == first.data


def test_a_blob_over_the_limit_is_served_all_the_same(tier: Tier) -> None:
    filler = Filler(os.urandom(LIMIT + 1))
    assert tier.get_or_fill(key("a"), filler) == filler.data
    assert tier.get_or_fill(key("a"), filler) == filler.data
    assert filler.calls == 2


def test_blobs_are_discarded_once_those_made_of_them_are_cached(tier: Tier) -> None:
    for name in ("a", "b", "made 1"):
        tier.get_or_fill(key(name), Filler(b"bytes of " + name.encode()))
    view = tier.get(key("a"))
    made = [key("made 1"), key("made 2")]
    tier.discard([key("a"), key("absent")], made)
    assert tier.get(key("a")) is not None
    tier.get_or_fill(key("made 2"), Filler(b"more"))
    tier.discard([key("a"), key("absent")], made)
    assert tier.get(key("a")) is None
    assert tier.stored_bytes(key("a")) == 0
    assert view == b"bytes of a"
    for name in ("b", "made 1", "made 2"):
        assert tier.get(key(name)) is not None
    again = Filler(b"again")
    assert tier.get_or_fill(key("a"), again) == b"again"
    assert again.calls == 1


def test_a_tier_that_cannot_write_retains_no_blobs(tier: Tier) -> None:
    assert tier.retains_blobs
    local = tier.local if isinstance(tier, ClusterTier) else tier
    if isinstance(local, LocalTier):
        local.health.writes.failed()
        assert not tier.retains_blobs


def test_it_pickles(tier: Tier) -> None:
    tier.get_or_fill(key("a"), Filler(b"bytes"))
    copy: Tier = pickle.loads(pickle.dumps(tier))
    assert copy.get_or_fill(key("a"), Filler(b"bytes")) == b"bytes"


def test_a_local_tier_pickles_as_its_settings(tmp_path: Path) -> None:
    copy = pickle.loads(pickle.dumps(LocalTier(tmp_path, 123_456, "lru")))
    assert (copy.path, copy.limit, copy.policy) == (tmp_path, 123_456, "lru")


def test_it_works_in_a_forked_child(tier: Tier) -> None:
    tier.get_or_fill(key("a"), Filler(b"before"))
    child = os.fork()
    if child == 0:
        right = tier.get_or_fill(key("a"), Filler(b"before")) == b"before"
        right &= tier.get_or_fill(key("b"), Filler(b"child")) == b"child"
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert tier.get_or_fill(key("a"), Filler(b"before")) == b"before"
    assert tier.get_or_fill(key("c"), Filler(b"after")) == b"after"
