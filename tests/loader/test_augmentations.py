"""Random augmentations of torchvision and albumentations: equal batches and losses in every way to run them."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import dropout

from dataload import make_dataset, make_loader
from dataload.dataset import Dataset
from dataload.loader import albumentations_draws

SIDE, BATCH, ROWS = 12, 8, 64
WAYS: list[dict[str, Any]] = [{}, {"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1}, {"num_workers": 2}]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, SIDE * SIDE * 3), np.uint8)
    images = pa.FixedSizeListArray.from_arrays(pixels.ravel(), SIDE * SIDE * 3)
    pq.write_table(pa.table({"image": images, "x": np.arange(ROWS)}), tmp_path / "x.parquet", row_group_size=16)
    return make_dataset(tmp_path / "x.parquet", cache_dir=tmp_path / "cache", cache_bytes="100MB")


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # torchvision of another build than torch
        pytest.skip(f"{name} cannot be imported: {error}")


class TorchVision:
    def __init__(self) -> None:
        v2 = imported("torchvision.transforms.v2")
        self._augment = v2.Compose(
            [v2.RandomCrop(8), v2.RandomHorizontalFlip(), v2.GaussianNoise(), v2.ColorJitter(0.5)]
        )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        images = batch["image"].reshape(-1, SIDE, SIDE, 3).permute(0, 3, 1, 2).float() / 255
        return {"y": self._augment(images)}


class Albumentations:
    def __init__(self) -> None:
        a = imported("albumentations")
        self._augment = a.Compose(
            [a.RandomCrop(8, 8), a.HorizontalFlip(p=0.5), a.CoarseDropout(p=0.5), a.GaussNoise(p=1)]
        )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        images = batch["image"].reshape(-1, SIDE, SIDE, 3).numpy()
        return {"y": torch.from_numpy(np.stack([self._augment(image=image)["image"] for image in images])).float()}


def trained(loader: Any, begin: Callable[[], object] = lambda: torch.manual_seed(5)) -> tuple[list[Any], list[float]]:
    """Return the batches of an epoch, and losses with dropout."""
    begin()
    batches, losses = [], []
    for batch in loader:
        batches.append(batch["y"].clone())
        losses.append(dropout(batch["y"]).sum().item())
    return batches, losses


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("augment", [TorchVision, Albumentations])
def test_ten_runs_are_equal_to_the_bit(dataset: Dataset, augment: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    runs = [trained(make_loader(dataset, BATCH, transform=augment(), **WAYS[run % len(WAYS)])) for run in range(10)]
    batches, losses = runs[0]
    assert len({batch.numpy().tobytes() for batch in batches}) == ROWS // BATCH
    for again, their_losses in runs[1:]:
        assert same(batches, again)
        assert losses == their_losses
    other, _ = trained(make_loader(dataset, BATCH, transform=augment(), shuffle=False, seed=1))
    plain, _ = trained(make_loader(dataset, BATCH, transform=augment(), shuffle=False, seed=2))
    assert not same(other, plain)
    assert not caplog.records


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("augment", [TorchVision, Albumentations])
def test_a_resumed_epoch_is_augmented_as_if_it_had_not_stopped(dataset: Dataset, augment: Any, options: Any) -> None:
    whole, losses = trained(make_loader(dataset, BATCH, transform=augment()))
    loader = make_loader(dataset, BATCH, transform=augment(), **options)
    torch.manual_seed(5)
    head = []
    for batch, _ in zip(loader, range(3), strict=False):
        head.append(dropout(batch["y"]).sum().item())
        state, generator = loader.state_dict(), torch.get_rng_state()
    resumed = make_loader(dataset, BATCH, transform=augment(), **options)
    resumed.load_state_dict(state)
    rest, their_losses = trained(resumed, lambda: torch.set_rng_state(generator))
    assert same(whole[3:], rest)
    assert head + their_losses == losses


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_pipeline_that_the_transform_seeds_draws_from_that_seed(dataset: Dataset, options: Any) -> None:
    """Two images of a row, such as those of a stereo pair, are cut alike."""
    a = imported("albumentations")
    augment = a.Compose([a.RandomCrop(8, 8), a.HorizontalFlip(p=0.5)])

    def pairs(batch: dict[str, Any]) -> dict[str, Any]:
        images, found = batch["image"].reshape(-1, SIDE, SIDE, 3).numpy(), []
        for row, image in zip(batch["x"].tolist(), images, strict=True):
            for _ in range(2):
                augment.set_random_seed(row)
                found.append(augment(image=image)["image"])
        crop = a.Compose([a.RandomCrop(8, 8)], seed=137)
        return {"y": torch.from_numpy(np.stack(found)), "z": torch.from_numpy(crop(image=images[0])["image"].copy())}

    image = np.arange(SIDE * SIDE * 3, dtype=np.uint8).reshape(SIDE, SIDE, 3)
    expected = pairs({"x": torch.zeros(1, dtype=torch.int64), "image": torch.from_numpy(image)})["z"]
    for batch in make_loader(dataset, BATCH, transform=pairs, **options):
        assert torch.equal(batch["y"][::2], batch["y"][1::2])
    [again] = make_loader(
        dataset.select([0]), 1, transform=lambda b: pairs({**b, "image": torch.from_numpy(image)}), **options
    )
    assert torch.equal(again["z"], expected)


def test_a_pipeline_has_its_own_draws_outside_of_the_loader(dataset: Dataset) -> None:
    a = imported("albumentations")
    image = np.arange(SIDE * SIDE * 3, dtype=np.uint8).reshape(SIDE, SIDE, 3)

    def pipeline() -> Any:
        return a.Compose([a.RandomCrop(4, 4), a.GaussNoise(p=1)], seed=3)

    alone = pipeline()
    expected = [alone(image=image)["image"] for _ in range(ROWS // BATCH)]
    shared = pipeline()
    loader = make_loader(dataset, BATCH, transform=lambda batch: {"y": batch["x"], "z": shared(image=image)["image"]})
    for batch, own in zip(loader, expected, strict=True):
        assert np.array_equal(shared(image=image)["image"], own)
        assert not np.array_equal(batch["z"], own)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A release whose generators are kept in another way."""
    module = ModuleType("albumentations")
    kind = type("BaseCompose", (), {"set_random_seed": lambda self, seed: None, "__call__": lambda self: None})
    vars(module).update(BaseCompose=kind, BasicTransform=kind, Compose=kind, __version__="9.9")
    monkeypatch.setitem(sys.modules, "albumentations", module)
    monkeypatch.setattr(albumentations_draws, "_done", set())
    yield module


def test_a_release_that_is_not_known_is_told_once(dataset: Dataset, unknown: Any, caplog: Any) -> None:
    for _ in range(2):
        list(make_loader(dataset, BATCH, transform=dict))
    [record] = caplog.records
    assert "albumentations 9.9 has generators that cannot be seeded for each batch" in record.message
    assert "pipeline.set_random_seed(int(rng.integers(2**32))) in transform(batch, rng)" in record.message


class Prepared(type):
    """The classes of a release, which call `begins` when they are about to be prepared."""

    begins: Callable[[], None] = staticmethod(lambda: None)

    def __getattribute__(cls, name: str) -> Any:
        if name == "set_random_state":
            Prepared.begins()
        return super().__getattribute__(name)


class NoticedLock:
    """A lock that tells who is about to wait for it."""

    def __init__(self, waits: Callable[[], None]) -> None:
        self._lock, self._waits = threading.Lock(), waits

    def __enter__(self) -> None:
        self._waits()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_threads_that_begin_at_once_find_the_classes_prepared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second thread arrives while the first one prepares them. It waits, or else makes its batch with own draws."""
    arrived, seen = threading.Event(), list[bool]()
    functions = {"set_random_state": dict, "set_random_seed": dict, "__call__": lambda self: None}
    kinds = [Prepared(name, (), functions) for name in ("Compose", "BasicTransform")]

    def make_batch() -> None:
        with albumentations_draws.seeded(2):
            seen.extend(hasattr(kind, "random_generator") for kind in kinds)
        arrived.set()

    def begins() -> None:
        if second.ident is None:
            second.start()
            assert arrived.wait(60)

    second = threading.Thread(target=make_batch)
    lock = NoticedLock(lambda: arrived.set() if threading.current_thread() is second else None)
    module = ModuleType("albumentations")
    vars(module).update(BaseCompose=kinds[0], BasicTransform=kinds[1], Compose=kinds[0])
    monkeypatch.setattr(Prepared, "begins", begins)
    monkeypatch.setitem(sys.modules, "albumentations", module)
    monkeypatch.setattr(albumentations_draws, "_done", set())
    monkeypatch.setattr(albumentations_draws, "_lock", lock, raising=False)
    with albumentations_draws.seeded(1):
        second.join(60)
    assert seen == [True, True]
    assert not caplog.records


def test_an_import_in_the_first_batch_is_told_once(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(albumentations_draws, "_done", set())
    module = ModuleType("albumentations")

    def importing(batch: dict[str, Any]) -> dict[str, Any]:
        monkeypatch.setitem(sys.modules, "albumentations", module)
        return batch

    for options in ({}, {"num_threads": 0}):
        monkeypatch.delitem(sys.modules, "albumentations", raising=False)
        list(make_loader(dataset, BATCH, transform=importing, **options))
    [record] = caplog.records
    assert "imports albumentations while it makes a batch" in record.message
