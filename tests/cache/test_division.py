"""Several datasets share one cache: by need, whatever the number of loaders, until their process ends."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataload.cache import blob_file
from dataload.cache import division as dividing
from dataload.cache.division import Division, Need, divide
from dataload.cache.local import needs
from dataload.cache.local.staging import StagingFolder
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, group_number

SIZE = 10_000
PATIENCE = 200  # seconds; only a hang takes that long


def key(dataset: str, number: int, part: str = "rows 0+8") -> BlobKey:
    return BlobKey("origin", f"bucket/{dataset}", "version", f"records {number} {part} digest", f"records {number}")


ON_DISK = blob_file.size_on_disk(SIZE, key("a", 0).name)


def need_of(dataset: str, count: int = 40, window: int = 1, name: str = "") -> Need:
    numbers = [group_number(key(dataset, number).digest) for number in range(count)]
    sizes = np.full(count, float(ON_DISK))
    return Need.of((name or dataset).ljust(16).encode(), np.array(numbers, np.uint64), sizes, window * ON_DISK, 16)


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("dataload.cache.local.eviction.PAUSES", 0)


def read(tier: LocalTier, dataset: str, numbers: Any) -> int:
    """Read blobs and return how many were filled."""
    filled = []

    def fill(allocate: Allocate) -> None:
        filled.append(1)
        allocate(SIZE)[:] = bytes(SIZE)

    for number in numbers:
        tier.get_or_fill(key(dataset, number), fill)
        assert tier.folder.index.used_bytes() <= tier.limit
    return len(filled)


def kept(tier: LocalTier, dataset: str, count: int = 40) -> set[int]:
    return {number for number in range(count) if tier.get(key(dataset, number), (0, 0)) is not None}


def shuffled(epoch: int, count: int = 40) -> Any:
    return np.random.default_rng(epoch).permutation(count)


def test_blobs_of_a_group_share_its_number_and_nothing_else_changes() -> None:
    one, other = key("a", 1), key("a", 1, "rows 8+8")
    alone = BlobKey("origin", "bucket/a", "version", one.what)
    assert group_number(one.digest) == group_number(other.digest)
    assert one.digest[:24] != other.digest[:24]
    assert one.digest[:24] == alone.digest[:24]
    assert len({group_number(key(name, number).digest) for name in "ab" for number in range(100)}) == 200


def test_without_needs_nothing_stays_and_nothing_passes() -> None:
    assert divide(100, []).region == divide(100, [[], []]).region == 0
    assert not Division().stays(1)


def test_all_that_fits_stays() -> None:
    division = divide(100 * ON_DISK, [[need_of("a")], [need_of("b")]])
    assert (division.region, division.total) == (0, 80 * ON_DISK)
    assert all(division.stays(group_number(key(name, number).digest)) for name in "ab" for number in range(40))
    assert not division.stays(group_number(key("c", 0).digest))


def test_what_several_loaders_need_counts_once() -> None:
    """Two ranks, and two filters of one dataset that overlap, in one loader or in two."""
    a, overlapping = need_of("a"), need_of("a", 30, name="filter")
    assert divide(1, [[a], [need_of("a")], [overlapping]]).total == 40 * ON_DISK
    twice = Need.of(
        bytes(16), np.concatenate([a.groups, overlapping.groups]), np.concatenate([a.sizes, overlapping.sizes])
    )
    assert twice.total == 40 * ON_DISK


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_shares_are_by_need(share: float) -> None:
    sizes = {"a": 2000, "b": 1000, "c": 500}
    wanted = [[need_of(name, count)] for name, count in sizes.items()]
    limit = int(share * 3500 * ON_DISK)
    division = divide(limit, wanted)
    staying = {
        name: sum(division.stays(group_number(key(name, number).digest)) for number in range(count))
        for name, count in sizes.items()
    }
    assert limit * dividing.FITS - division.region - ON_DISK < sum(staying.values()) * ON_DISK <= limit * dividing.FITS
    for name, count in sizes.items():
        assert staying[name] / count == pytest.approx(sum(staying.values()) / 3500, abs=0.05)
    assert divide(limit, wanted[::-1]).stays_below == division.stays_below


def test_the_region_is_for_all_loaders_but_once_for_the_ranks_of_one() -> None:
    def region(*processes: list[Need]) -> int:
        return divide(10 * ON_DISK, processes).region // ON_DISK

    a, b = need_of("a", window=2), need_of("b", window=3)
    assert region([a]) == region([a], [a]) == 2
    assert region([a, b]) == region([a], [b]) == region([a, b], [a]) == 5
    assert region([a, a]) == 4  # two loaders of a process may be at different places
    assert region([a, a, a, b, b, b]) == 10


def test_a_need_reaches_other_processes_whole() -> None:
    a, b = need_of("a", 3000), need_of("b", 50)
    for sent, found in zip((a, b), Need.all_from(a.to_bytes() + b.to_bytes()), strict=True):
        assert (found.name, found.window, found.at_once, found.mean) == (
            sent.name,
            sent.window,
            sent.at_once,
            sent.mean,
        )
        assert [*found.groups] == [*sent.groups]
        assert [*found.sizes] == [*sent.sizes]


def test_a_dataset_takes_the_room_of_data_that_no_loader_needs(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "cache", 50 * ON_DISK)
    read(tier, "a", range(40))
    lease = tier.lease(need_of("b", 45))
    read(tier, "b", range(45))
    assert read(tier, "b", range(45)) == 0
    assert tier.stats().get("refused", 0) == 0
    del lease


def test_tiers_of_several_limits_divide_a_cache_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[int] = []
    monkeypatch.setattr(needs, "divide", lambda limit, *given: divided.append(limit) or divide(limit, *given))
    small, large = (LocalTier(tmp_path / "cache", count * ON_DISK) for count in (50, 60))
    leases = [small.lease(need_of("a")), small.lease(need_of("b"))]
    divided.clear()
    for _ in range(3):
        assert large.division() is large.division()
        assert small.division() is small.division()
    assert divided == [60 * ON_DISK]
    del leases


@pytest.mark.parametrize("content", [b"x", b"x" * 70, b"\xff" * 70])
def test_a_need_of_another_version_is_skipped(content: bytes) -> None:
    assert needs._needs_in(content) == []


def test_two_datasets_that_do_not_fit_together_keep_their_shares(tmp_path: Path) -> None:
    """The first one fills the cache alone, then both are read by turns."""
    tier = LocalTier(tmp_path / "cache", 50 * ON_DISK)
    leases = [tier.lease(need_of("a"))]
    assert tier.division().region == 0
    assert read(tier, "a", shuffled(0)) == 40
    assert read(tier, "a", shuffled(1)) == 0
    leases.append(tier.lease(need_of("b")))
    assert tier.division().region == 2 * ON_DISK
    assert kept(tier, "a") == set(range(40))  # Nothing is evicted before its space is needed.
    read(tier, "b", shuffled(2))
    filled = [read(tier, name, shuffled(epoch)) for epoch in range(3, 6) for name in "ab"]
    staying = {name: kept(tier, name) for name in "ab"}
    division = tier.division()
    for name in "ab":
        should = {number for number in range(40) if division.stays(group_number(key(name, number).digest))}
        assert should <= staying[name]
    assert sum(filled[2:]) / 2 <= 1.02 * (80 - 48) + 1
    assert tier.stats().get("refused", 0) == 0


def test_what_no_loader_needs_passes_in_its_turn(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "cache", 30 * ON_DISK)
    leases = [tier.lease(need_of("a", window=4))]
    read(tier, "a", range(40))
    passing = [number for number in range(40) if tier.is_transient([key("a", number)])]
    read(tier, "c", [0])
    assert tier.get(key("c", 0)) is not None
    read(tier, "a", passing[:2])
    assert tier.get(key("c", 0)) is not None
    read(tier, "a", passing[2:])
    assert tier.get(key("c", 0)) is None
    del leases


def test_the_share_of_an_ended_loader_is_free(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "cache", 50 * ON_DISK)
    leases = [tier.lease(need_of("a")), tier.lease(need_of("b"))]
    for epoch in range(2):
        for name in "ab":
            read(tier, name, shuffled(epoch))
    leases.pop(0)
    assert tier.division().region == 0
    read(tier, "b", shuffled(2))
    assert read(tier, "b", shuffled(3)) == 0
    leases.clear()
    assert not tier.division().groups.size


def test_blocks_make_room_for_rows_if_not_all_rows_fit(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "cache", 50 * ON_DISK)

    def fill(allocate: Allocate) -> None:
        allocate(20 * SIZE)[:] = bytes(20 * SIZE)

    block = BlobKey("origin", "bucket/a", "version", "0-200000")
    tier.get_or_fill(block, fill)
    footer = BlobKey("origin", "bucket/a", "version", "footers 0-200000 x")
    tier.get_or_fill(footer, fill)
    lease = tier.lease(need_of("a", 60))
    read(tier, "a", range(60))
    assert tier.get(block, (0, 0)) is None
    assert tier.get(footer, (0, 0)) is not None
    assert tier.folder.index.used_bytes() <= tier.limit
    del lease


def test_other_processes_see_a_need_until_its_process_is_killed(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "cache", 50 * ON_DISK)
    lease = tier.lease(need_of("a"))
    with Child("b", tmp_path / "cache") as child:
        assert tier.division().total == 80 * ON_DISK
        assert tier.division().region == 2 * ON_DISK
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert tier.division().total == 40 * ON_DISK
        assert tier.division().region == 0
    [dead] = {file.parent for file in (tmp_path / "cache" / "tmp").rglob("note-*")} - {tier.folder.staging._path}
    with Child("a", tmp_path / "cache"):
        assert not dead.exists()
    fresh = LocalTier(tmp_path / "cache", 50 * ON_DISK)
    assert fresh.division().total == 40 * ON_DISK
    del lease
    assert fresh.division().total == 0


def test_needs_of_other_processes_are_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = LocalTier(tmp_path / "cache", 50 * ON_DISK)
    other = StagingFolder(tier.folder.staging._path.parent, 0)
    reads, read_bytes = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read_bytes(path))
    for datasets in ("a", "ab", "b"):
        other.show(needs.NOTE, b"".join(need_of(dataset).to_bytes() for dataset in datasets))
        totals = {tier.division().total for _ in range(5)}
        assert totals == {len(datasets) * 40 * ON_DISK}
    assert len(reads) == 3
    other.close()
    assert tier.division().total == 0


def test_needs_by_two_paths_of_a_folder_are_announced_together(tmp_path: Path) -> None:
    path, link = tmp_path / "cache", tmp_path / "link"
    tier = LocalTier(path, 50 * ON_DISK)
    tier.folder.index.used_bytes()
    link.symlink_to(path)
    leases = [tier.lease(need_of("a")), LocalTier(link, 50 * ON_DISK).lease(need_of("b"))]
    child = os.fork()
    if child == 0:
        os._exit(LocalTier(path, 50 * ON_DISK).division().total != 80 * ON_DISK)
    assert os.waitpid(child, 0)[1] == 0
    assert tier.division().total == 80 * ON_DISK
    del leases


def test_a_forked_child_does_not_prolong_a_need(tmp_path: Path) -> None:
    """The child inherits the file of the need, and outlives the process that announced it."""
    tier = LocalTier(tmp_path / "cache", 50 * ON_DISK)
    assert tier.division().total == 0
    with Child("b", tmp_path / "cache", then_fork=True) as child:
        assert tier.division().total == 40 * ON_DISK
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert tier.division().total == 0


class Child:
    """A forked process that leases the need of a dataset, until it is killed or this block ends."""

    def __init__(self, dataset: str, path: Path, *, then_fork: bool = False) -> None:
        ready, announced = os.pipe()
        wait, self._end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._end)
            signal.alarm(PATIENCE)
            tier = LocalTier(path, 50 * ON_DISK)
            lease = tier.lease(need_of(dataset))
            if then_fork and os.fork() == 0:
                signal.alarm(PATIENCE)
                os.write(announced, b"x")
                os.read(wait, 1)
                os._exit(0)
            if not then_fork:
                os.write(announced, b"x")
            os.read(wait, 1)
            os._exit(lease is None)
        os.close(wait)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        os.close(announced)

    def __enter__(self) -> int:
        return self.pid

    def __exit__(self, *_: object) -> None:
        os.close(self._end)
        with suppress(ChildProcessError):  # The test has waited for a child that it killed.
            os.waitpid(self.pid, 0)
