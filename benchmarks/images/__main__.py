"""The decoder of `dataload.images`: `python -m dataload.benchmarks.images`.

All parts decode the same photographs, in turns, and report CPU-seconds per 1,000 images. Bare libjpeg-turbo is its
function that decodes into memory which is there already. A second table shows how much more two threads decode than
one, in time of the clock. It compares the fastest of many short runs, because other programs slow runs down.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, process_time
from typing import Annotated, Any

import numpy as np
import simplejpeg
import torch
import typer
from rich.console import Console
from rich.table import Table

from dataload import images
from dataload.benchmarks.images.photos import HEIGHT, WIDTH, photos
from dataload.benchmarks.summary import ranged

BATCH = 64
SIZE = 256
RUNS = 40  # of one and of two threads
BARE = "bare libjpeg-turbo"

Part = Callable[[list[bytes]], Any]


def bare(batch: list[bytes]) -> None:
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
            np.asarray(picture.resize((WIDTH * SIZE // HEIGHT, SIZE), Image.Resampling.BILINEAR))


def opencv(batch: list[bytes]) -> None:
    import cv2

    for image in batch:
        cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR_RGB)


def cropped() -> Part:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (BATCH, SIZE, SIZE, 3), np.uint8))
    rng = np.random.default_rng(0)
    return lambda _: images.random_resized_crop(pixels, rng)


def main(
    count: Annotated[int, typer.Option("--images", help="Photographs.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds of all parts.")] = 7,
) -> None:
    encoded = photos(np.random.default_rng(0), count)["image"].to_pylist()
    batches = [encoded[first : first + BATCH] for first in range(0, count - BATCH + 1, BATCH)]
    parts: dict[str, Part] = {
        BARE: bare,
        "images.decode": images.decode,
        f"images.decode, size={SIZE}": lambda batch: images.decode(batch, size=SIZE),
        "Pillow": pillow,
        f"Pillow, resized to {SIZE}": pillow_resized,
        "OpenCV": opencv,
        f"random_resized_crop of {SIZE} to 224": cropped(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(1 + rounds):
        for name, part in parts.items():
            seconds[name].append(cpu_seconds(part, batches))
    table = Table("part", "CPU-s per 1,000 images", f"x {BARE}")
    for name, each in seconds.items():
        ratios = [one / other for one, other in zip(each[1:], seconds[BARE][1:], strict=True)]
        table.add_row(name, ranged(each[1:], "{:.3f}"), ranged(ratios, "{:.2f}"))
    Console().print(table)
    table = Table("part", "two threads x one")
    for name in [*parts][:3]:
        table.add_row(name, f"{scaling(parts[name], batches, RUNS):.2f}")
    Console().print(table)


def cpu_seconds(part: Part, batches: list[list[bytes]]) -> float:
    """Return the CPU-seconds of this thread and all others per 1,000 images."""
    started = process_time()
    for batch in batches:
        part(batch)
    return (process_time() - started) / (len(batches) * BATCH) * 1000


def scaling(part: Part, batches: list[list[bytes]], runs: int) -> float:
    """Return how much faster two threads are than one, of their fastest runs."""
    fastest = {1: math.inf, 2: math.inf}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(runs):
            for threads, before in fastest.items():
                shares = [batches[first::threads][:2] for first in range(threads)]
                started = perf_counter()
                list(pool.map(lambda share: [part(batch) for batch in share], shares))
                fastest[threads] = min(before, (perf_counter() - started) / threads)
    return fastest[1] / fastest[2]


if __name__ == "__main__":
    typer.run(main)
