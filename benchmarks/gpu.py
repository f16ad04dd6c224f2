"""Does the loader keep a GPU busy? Steps on its batches beside steps on a batch that is there already.

Started as `python -m dataload.benchmarks.gpu`; ends within 8 minutes. Without a GPU it runs at a tiny size on the CPU,
which shows that it runs, and no more.

What is asked: a step with the loader takes at most 1.01 times that on a resident batch; copies to the device reach 0.9
of what copies from pinned memory reach in the same run, and 95 % of their time kernels run beside them; no step waits
for the device; the batches are, byte for byte, those of a loader that leaves them on the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dataload.cache.config import CacheConfig
from dataload.dataset import Dataset, make_dataset
from dataload.loader import Loader, make_loader
from dataload.rows.collate import map_tensors
from dataload.train.loss_monitor import LossMonitor
from dataload.train.optimizer_step import OptimizerStep
from dataload.train.profiling import traced

ROUNDS = 7  # of each kind, in turns
PATCH, CLASSES = 16, 10
LARGE = 1 << 16  # bytes; smaller copies are of labels and the like


@dataclass(frozen=True)
class Size:
    """side: pixels of an image's edge. width, depth: of the model. steps: of a round."""

    rows: int
    side: int
    batch: int
    width: int
    depth: int
    steps: int


SIZES = {"cuda": Size(8192, 224, 256, 384, 8, 30), "cpu": Size(512, 32, 32, 32, 1, 14)}


@dataclass(frozen=True)
class Row:
    """One line of the table. asked: None where nothing is; ok: None where it cannot be told."""

    what: str
    figure: str
    asked: str = ""
    ok: bool | None = None


class Classifier(nn.Module):
    """uint8[B, 3 · side · side] to float[B, 10]: patches, a transformer, a mean."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.side = size.side
        self.patches = nn.Conv2d(3, size.width, PATCH, PATCH)
        layer = nn.TransformerEncoderLayer(size.width, 4, 4 * size.width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, size.depth, enable_nested_tensor=False)
        self.out = nn.Linear(size.width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.view(-1, 3, self.side, self.side).float() / 255
        scores: Tensor = self.out(self.layers(self.patches(pixels).flatten(2).mT).mean(1))
        return scores


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def write(folder: Path, size: Size) -> None:
    """Random images, in row groups of 256."""
    draw = np.random.default_rng(0)
    numbers = 3 * size.side**2
    kind = pa.list_(pa.uint8(), numbers)
    with pq.ParquetWriter(folder / "images.parquet", pa.schema([("image", kind), ("label", pa.int64())])) as file:
        for _ in range(0, size.rows, 256):
            pixels = pa.array(np.frombuffer(draw.bytes(256 * numbers), np.uint8))
            images = pa.FixedSizeListArray.from_arrays(pixels, type=kind)
            file.write_table(pa.table({"image": images, "label": draw.integers(CLASSES, size=256)}), 256)


def measure(size: Size, device: torch.device, dataset: Dataset) -> Iterator[Row]:
    """The lines of the table, one after the other."""
    cuda = device.type == "cuda"
    loader = make_loader(dataset, size.batch, drop_last=True, device=device if cuda else None)
    model = Classifier(size).to(device)
    steps = OptimizerStep(model, torch.optim.AdamW(model.parameters()), loss, device, "bf16")
    losses = LossMonitor(0)
    *_, resident = loader  # a whole epoch, which decodes
    with closing(forever(loader)) as endless:

        def alone() -> float:
            return run(steps, losses, (resident for _ in range(size.steps)))

        def fed() -> float:
            return run(steps, losses, (next(endless) for _ in range(size.steps)))

        alone()  # warms up
        fed()
        pairs = [(alone(), fed()) for _ in range(ROUNDS)]
        ratio = median(after / before for before, after in pairs)
        yield Row("step on a resident batch", f"{median(before for before, _ in pairs) * 1e3:.2f} ms")
        yield Row("step with the loader", f"{median(after for _, after in pairs) * 1e3:.2f} ms")
        yield Row("  of the step on a resident batch", f"{ratio:.3f} x", "at most 1.01 x", ratio <= 1.01)
        if cuda:
            yield from copies(steps, losses, endless, size, pinned_speed(resident["image"], device))
            yield waits(steps, losses, resident)
    yield same_batches(dataset, size, loader)


def forever(loader: Loader) -> Generator[Any, None, None]:
    while True:
        yield from loader


def run(steps: OptimizerStep, losses: LossMonitor, batches: Iterable[Any]) -> float:
    """Seconds a step."""
    if steps.device.type == "cuda":
        torch.cuda.synchronize()
    started, number = perf_counter(), 0
    for number, batch in enumerate(batches, 1):  # noqa: B007
        take(steps, losses, batch)
    losses.settle()
    if steps.device.type == "cuda":
        torch.cuda.synchronize()
    return (perf_counter() - started) / number


def take(steps: OptimizerStep, losses: LossMonitor, batch: Any) -> None:
    rows = len(batch["label"])
    losses.add(steps.add(batch, rows, rows, last=True)[0], "benchmark")


def pinned_speed(batch: Tensor, device: torch.device) -> float:
    """Bytes per second of copies from pinned memory, of a batch's size: the best of twenty."""
    host, there = torch.empty_like(batch, device="cpu", pin_memory=True), torch.empty_like(batch, device=device)
    best = float("inf")
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        there.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return batch.nbytes / best


def copies(steps: OptimizerStep, losses: LossMonitor, batches: Iterator[Any], size: Size, ceiling: float) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        with traced(folder, 0) as step:
            for batch in islice(batches, size.steps):
                take(steps, losses, batch)
                step()
        losses.settle()
        return copied_in(json.loads(next(Path(folder).iterdir()).read_text())["traceEvents"], ceiling)


def copied_in(events: list[dict[str, Any]], ceiling: float) -> list[Row]:
    """Copies to the device in a trace: how fast, beside `ceiling`, and how much of them is hidden behind kernels."""
    copied = [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"] and e["args"]["bytes"] >= LARGE]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    if not copied:
        return [Row("the loader's copies", "none in the trace", "at least 0.9 x", ok=False)]
    seconds = sum(e["dur"] for e in copied) / 1e6
    speed = sum(e["args"]["bytes"] for e in copied) / seconds
    hidden = sum(overlap(e["ts"], e["ts"] + e["dur"], kernels) for e in copied) / 1e6 / seconds
    return [
        Row("copy from pinned memory", f"{ceiling / 1e9:.1f} GB/s"),
        Row("the loader's copies", f"{speed / 1e9:.1f} GB/s", "at least 0.9 x", speed >= 0.9 * ceiling),
        Row("  hidden behind kernels", f"{hidden:.1%}", "at least 95 %", hidden >= 0.95),
    ]


def overlap(start: float, end: float, spans: list[tuple[float, float]]) -> float:
    """How much of [start, end] is covered by the union of `spans`."""
    covered, reached = 0.0, start
    for first, last in sorted(spans):
        begin, stop = max(first, reached), min(last, end)
        if stop > begin:
            covered, reached = covered + stop - begin, stop
    return covered


def waits(steps: OptimizerStep, losses: LossMonitor, batch: Any) -> Row:
    torch.cuda.set_sync_debug_mode("error")
    try:
        take(steps, losses, batch)
    except RuntimeError as error:
        return Row("waiting for the device in a step", str(error).splitlines()[0], "none", ok=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Row("waiting for the device in a step", "none", "none", ok=True)


def same_batches(dataset: Dataset, size: Size, loader: Loader) -> Row:
    """A whole epoch, by a checksum of each batch."""
    plain = make_loader(dataset, size.batch, drop_last=True)
    for some in (loader, plain):
        some.set_epoch(1)
    here, there = ([checksum(batch) for batch in some] for some in (plain, loader))
    return Row("batches as on the host", f"{len(there)} of {len(here)}", "all", here == there)


def checksum(batch: dict[str, Tensor]) -> int:
    host = map_tensors(batch, Tensor.cpu)
    return zlib.crc32(b"".join(np.ascontiguousarray(column.numpy()).tobytes() for column in host.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else "no GPU here: a tiny size on the CPU, to see it run"
    )
    size = SIZES[device.type]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "data")
        place.mkdir()
        write(place, size)
        dataset = make_dataset(str(place), cache=CacheConfig(cache_dir=str(Path(folder, "cache"))))
        rows = list(measure(size, device, dataset))
    if args.json:
        sys.stdout.write(json.dumps({"device": name, "rows": [vars(row) for row in rows]}) + "\n")
    else:
        table = Table("what", "measured", "asked", "", title=f"{name}; torch {torch.__version__}")
        for row in rows:
            said = "" if row.ok is None or device.type == "cpu" else "yes" if row.ok else "NO"
            table.add_row(row.what, row.figure, row.asked, said)
        Console().print(table)
    sys.exit(device.type == "cuda" and any(row.ok is False for row in rows))


if __name__ == "__main__":
    main()
