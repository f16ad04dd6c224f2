"""Processes that need random datasets share one cache, while some of them are stopped, continued or killed."""

from __future__ import annotations

import os
import random
import signal
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataload.cache import blob_file
from dataload.cache.division import Need
from dataload.cache.local import fsck, needs
from dataload.cache.local import tier as local_tier
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, group_number

SIZE, GROUPS = 20_000, 24
DATASETS = "abcd"
PROCESSES = 4
PATIENCE = 200  # seconds; only a hang takes that long


def key(dataset: str, number: int, part: int) -> BlobKey:
    what = f"records {number} rows {part}+8 digest"
    return BlobKey("origin", f"bucket/{dataset}", "version", what, f"records {number}")


ON_DISK = blob_file.size_on_disk(SIZE, key("a", 0, 0).name)
LIMIT = int(1.3 * GROUPS * 2 * ON_DISK)


def content(dataset: str, number: int, part: int) -> bytes:
    return random.Random(f"{dataset} {number} {part}").randbytes(SIZE)


def need_of(dataset: str, window: int) -> Need:
    numbers = np.array([group_number(key(dataset, number, 0).digest) for number in range(GROUPS)], np.uint64)
    sizes = np.full(GROUPS, 2.0 * ON_DISK)
    return Need.of(dataset.ljust(16).encode(), numbers, sizes, window * 2 * ON_DISK, window)


def live(path: Path, seed: int, told: int) -> None:
    """Read random datasets, each as long as its lease lasts. Tell the parent of each epoch."""
    signal.alarm(PATIENCE)
    draw = random.Random(seed)
    limit = LIMIT + draw.choice((0, ON_DISK))
    tier = LocalTier(path, limit)
    local_tier.FILL_SECONDS = 2.0  # of this process, for a lock whose holder is stopped
    while True:
        leased = {dataset: tier.lease(need_of(dataset, draw.randint(1, 3))) for dataset in draw.sample(DATASETS, 2)}
        for number in draw.sample(range(GROUPS), GROUPS):
            for dataset in leased:
                for part in range(2):
                    read(tier, dataset, number, part)
            with suppress(TimeoutError):  # Another process was stopped while it held the index.
                assert tier.folder.index.used_bytes() <= LIMIT + ON_DISK
        del leased
        os.write(told, b"x")


def read(tier: LocalTier, dataset: str, number: int, part: int) -> None:
    expected = content(dataset, number, part)

    def fill(allocate: Allocate) -> None:
        allocate(SIZE)[:] = expected

    assert tier.get_or_fill(key(dataset, number, part), fill) == expected


def start(path: Path, seed: int, told: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            live(path, seed, told)
        except BaseException:
            traceback.print_exc()
        os.write(told, b"!")
        os._exit(1)
    return child


@pytest.mark.parametrize(
    ("seed", "events"), [(0, 4), *(pytest.param(seed, 12, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_rows_and_limits_hold_whatever_ends_or_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, events: int
) -> None:
    monkeypatch.setattr(needs, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr("dataload.cache.local.eviction.PAUSES", 0)
    draw, path = random.Random(seed), tmp_path / "cache"
    ready, told = os.pipe()
    running = {start(path, number, told): False for number in range(PROCESSES)}  # by process: whether it is stopped
    try:
        for number in range(PROCESSES, PROCESSES + events):
            assert os.read(ready, 1) == b"x"
            child = draw.choice([*running])
            if running[child]:
                os.kill(child, signal.SIGCONT)
                running[child] = False
            elif draw.random() < 0.5 and sum(running.values()) < PROCESSES - 1:
                os.kill(child, signal.SIGSTOP)
                running[child] = True
            else:
                end(child)
                del running[child]
                running[start(path, number, told)] = False
    finally:
        for child in running:
            end(child)
        os.close(told)
        assert b"!" not in iter(lambda: os.read(ready, 1), b"")
        os.close(ready)
    tier = LocalTier(path, LIMIT)
    assert not tier.division().groups.size
    assert not fsck.verify(tier.folder).problems
    assert tier.folder.index.owed_bytes() == 0
    assert on_disk(path / "blobs") <= LIMIT + ON_DISK
    assert [*(path / "tmp").iterdir()] == [tier.folder.staging._path]


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def on_disk(folder: Path) -> Any:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
