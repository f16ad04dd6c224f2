"""`Dataset.map` under kills of the trainer and of the background decoder: the rows are right afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiers
from row_groups import make_in_background

from dataload import CacheConfig, make_dataset, make_loader
from dataload.cache.local import failpoints, fsck
from dataload.cache.local.tier import LocalTier
from dataload.dataset import Dataset
from dataload.rows.background_decoder.client import BackgroundDecoder

ROWS, GROUP = 200, 20
FILLS = ("fill: locked", "fill: drafted", "fill: reserved", "fill: allocated", "fill: filled", "fill: sealed")
STEPS = ("function", *FILLS, "fill: published")
OFTEN = ("function", "fill: filled")
EACH_STEP = [pytest.param(step, marks=[] if step in OFTEN else pytest.mark.slow) for step in STEPS]


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    with tiers.fork_server(__name__):
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"id": range(ROWS)}), tmp_path / "rows.parquet", row_group_size=GROUP)
    return tmp_path / "rows.parquet"


class Fatal:
    """A function that kills another process than that of the test once: at a step of the cache, or in the middle."""

    def __init__(self, step: str, marker: Path) -> None:
        self.step, self.marker, self.safe = step, str(marker), os.getpid()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if os.getpid() != self.safe and 130 in batch["id"]:
            if self.step == "function":
                self.kill_once("function")
            failpoints.watch(self.kill_once)
        return {"id": batch["id"], "cube": batch["id"] ** 3}

    def kill_once(self, step: str) -> None:
        if step == self.step and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def mapped(file: Path, cache: CacheConfig, function: Fatal) -> Dataset:
    return make_dataset(file, cache=cache).map(function, version="1")


def check(dataset: Dataset) -> None:
    for _ in range(2):
        batches = list(make_loader(dataset, 16))
        assert sorted(number for batch in batches for number in batch["id"].tolist()) == list(range(ROWS))
        assert all((batch["cube"] == batch["id"] ** 3).all() for batch in batches)


def check_folder(cache: CacheConfig) -> None:
    """Open the cache, as the next job does. Check that the kill left nothing in it, and that every blob is sound."""
    tier = LocalTier(Path(cache.cache_dir), 10**9, "lru")
    assert fsck.verify(tier.folder).problems == []
    assert not tiers.drafts_in(Path(cache.cache_dir))


def train(file: Path, cache: CacheConfig, function: Fatal) -> None:
    check(mapped(file, cache, function))


@pytest.mark.parametrize("step", EACH_STEP)
def test_a_kill_of_the_trainer(file: Path, cache: CacheConfig, tmp_path: Path, step: str) -> None:
    function = Fatal(step, tmp_path / "killed")
    trainer = tiers.start(train, file, cache, function)
    assert tiers.end(trainer) == -signal.SIGKILL
    assert (tmp_path / "killed").exists()
    check(mapped(file, cache, function))
    assert tiers.end(tiers.start(check_folder, cache)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", EACH_STEP)
def test_a_kill_of_the_background_decoder(file: Path, cache: CacheConfig, tmp_path: Path, step: str) -> None:
    dataset = mapped(file, cache, Fatal(step, tmp_path / "killed"))
    decoder = BackgroundDecoder(dataset.rowstore.row_groups)
    decoder.begin()
    process = decoder._process
    assert process.ready.wait(200)
    assert make_in_background(decoder, 0)
    assert not make_in_background(decoder, 6)
    assert process.ended.wait(200)
    assert (tmp_path / "killed").exists()
    check(dataset)
    decoder.end()
    assert tiers.end(tiers.start(check_folder, cache)) == 0
