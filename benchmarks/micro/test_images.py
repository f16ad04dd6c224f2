"""JPEG decoders beside bare libjpeg-turbo, and warm epochs with random crops beside torch's DataLoader. In CPU time."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dataload import CacheConfig, images, make_loader
from dataload.benchmarks.batches import values
from dataload.benchmarks.machine.usage import cpu_seconds, in_shared_memory
from dataload.benchmarks.photos import CROP, HEIGHT, WIDTH, photos, random_crop

BATCH, SIDE = 64, 256
BARE = "bare libjpeg-turbo"
PIXELS = torch.zeros(BATCH, SIDE, SIDE, 3, dtype=torch.uint8)


def bare(batch: list[bytes]) -> None:
    import simplejpeg

    memory = np.empty(WIDTH * HEIGHT * 3, np.uint8)
    for image in batch:
        simplejpeg.decode_jpeg(image, buffer=memory)


def pillow(batch: list[bytes]) -> None:
    from PIL import Image

    for image in batch:
        with Image.open(io.BytesIO(image)) as picture:
            np.asarray(picture.convert("RGB"))


def pillow_resized(batch: list[bytes]) -> None:
    from PIL import Image

    for image in batch:
        with Image.open(io.BytesIO(image)) as picture:
            np.asarray(picture.resize((WIDTH * SIDE // HEIGHT, SIDE), Image.Resampling.BILINEAR))


def opencv(batch: list[bytes]) -> None:
    import cv2

    for image in batch:
        cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR_RGB)


def cropped(_: list[bytes]) -> None:
    images.random_resized_crop(PIXELS, np.random.default_rng(0))


PARTS: dict[str, Callable[[list[bytes]], Any]] = {
    BARE: bare,
    "images.decode": images.decode,
    f"images.decode, size={SIDE}": lambda batch: images.decode(batch, size=SIDE),
    "Pillow": pillow,
    f"Pillow, resized to {SIDE}": pillow_resized,
    "OpenCV": opencv,
    f"random_resized_crop of {SIDE} to 224": cropped,
}


@pytest.fixture(scope="module")
def batches() -> list[list[bytes]]:
    encoded = photos(np.random.default_rng(0), 4 * BATCH)["image"].to_pylist()
    return [encoded[first : first + BATCH] for first in range(0, len(encoded), BATCH)]


@pytest.mark.benchmark(group="64 photographs", timer=process_time)
@pytest.mark.parametrize("part", PARTS)
def test_decoder(benchmark: Any, batches: list[list[bytes]], part: str, per_second: Any) -> None:
    endless = itertools.cycle(batches)
    benchmark(lambda: PARTS[part](next(endless)))
    per_second("images", BATCH)


@pytest.mark.parametrize("part", [*PARTS][:3])
def test_two_threads(batches: list[list[bytes]], part: str, scaled: Any, record_property: Any) -> None:
    """Compare the fastest of many short runs: other programs slow runs down."""
    fastest = {1: math.inf, 2: math.inf}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(min(40, scaled(40))):
            for threads in (1, 2):
                shares = [batches[first::threads][:2] for first in range(threads)]
                started = perf_counter()
                list(pool.map(lambda share: [PARTS[part](batch) for batch in share], shares))
                fastest[threads] = min(fastest[threads], (perf_counter() - started) / threads)
    record_property("x one thread", f"{fastest[1] / fastest[2]:.2f}")


def by_pillow(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "image": torch.from_numpy(np.stack([random_crop(image, rng) for image in batch["image"]]))}


def by_images(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "image": images.random_resized_crop(batch["image"], rng, CROP)}


class Photos(Dataset[Any]):
    """Photographs in memory, decoded one by one."""

    def __init__(self, file: str) -> None:
        table = pq.read_table(file)
        self._columns = {name: values(table[name].combine_chunks()) for name in table.column_names}
        self._rng = np.random.default_rng()

    def __len__(self) -> int:
        return len(self._columns["label"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: column[index] for name, column in self._columns.items()}
        return {**row, "image": torch.from_numpy(random_crop(row["image"], self._rng).copy())}


EPOCHS: dict[str, Callable[[str, str], Any]] = {
    f"dataload, {threads} threads, {transform.__name__}": lambda file, cache, threads=threads, transform=transform: (
        make_loader(file, BATCH, transform=transform, num_threads=threads, cache=CacheConfig(cache, "4GB"))
    )
    for threads, transform in ((0, by_pillow), (1, by_pillow), (2, by_pillow), (2, by_images))
}
EPOCHS["DataLoader, 2 workers, by_pillow"] = lambda file, _: DataLoader(
    Photos(file), BATCH, shuffle=True, num_workers=2, persistent_workers=True
)


def epochs(system: str, file: str, cache: str) -> dict[str, float]:
    """Return the figures of two warm epochs."""
    loader = EPOCHS[system](file, cache)
    for _ in loader:
        pass
    rows, shared, before, cpu, started = 0, 0, in_shared_memory(), cpu_seconds(), perf_counter()
    for batch in itertools.chain(loader, loader):
        rows += len(batch["label"])
        shared = max(shared, in_shared_memory() - before)
    seconds, used = perf_counter() - started, cpu_seconds() - cpu
    return {"images/s": rows / seconds, "CPU-s per 1,000": used / rows * 1000, "MB in /dev/shm": shared / 1e6}


@pytest.mark.parametrize("system", EPOCHS)
def test_epochs_of_crops(system: str, scaled: Any, tmp_path: Path, in_process: Any, record_property: Any) -> None:
    """Memory counts each page of a process and its workers once, without the page cache."""
    file = tmp_path / "photos.parquet"
    pq.write_table(photos(np.random.default_rng(0), scaled(400)), file, row_group_size=100, compression="none")
    found, memory = in_process(epochs, system, str(file), str(tmp_path / "cache"))
    for name, value in {**found, "MB of memory": memory / 1e6}.items():
        record_property(name, f"{value:,.2f}")
