"""The GPU utilization of the loader: steps on its batches beside steps on a batch that is resident on the device.

`python -m dataload.benchmarks.gpu` takes up to 8 minutes. Without a GPU it runs a tiny model on the CPU.

The targets: a step with the loader takes at most 1.01 times the step on a resident batch. Copies to the device reach
0.9 of the bandwidth from pinned memory, and overlap with kernels for 95 % of their time. No step synchronizes with the
device. The batches are equal, byte for byte, to those of a loader without a device.
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
from dataload.rows.batch_tree import map_tensors
from dataload.train.loss_monitor import LossMonitor, Where
from dataload.train.optimizer_step import OptimizerStep
from dataload.train.profiling import traced
from dataload.train.ranks.exchange import Exchange

ROUNDS = 7
PATCH, CLASSES = 16, 10
LARGE = 1 << 16  # bytes; ignores the copies of labels


@dataclass(frozen=True)
class Size:
    """The size of the dataset and the model.

    Args:
        rows: Rows of the dataset.
        side: Width and height of an image in pixels.
        batch: Rows of a batch.
        width: Channels of the model.
        depth: Layers of the model.
        steps: Steps of a round.
    """

    rows: int
    side: int
    batch: int
    width: int
    depth: int
    steps: int


SIZES = {"cuda": Size(8192, 224, 256, 384, 8, 30), "cpu": Size(512, 32, 32, 32, 1, 14)}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        what: Name of the figure.
        figure: Its value with a unit.
        asked: The target, or "".
        ok: Whether the target is met; None without a target.
    """

    what: str
    figure: str
    asked: str = ""
    ok: bool | None = None


class Classifier(nn.Module):
    """A vision transformer from uint8[B, 3 · side · side] to float[B, 10] logits."""

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


def write(folder: Path, rows: int, side: int) -> None:
    """Write random images in row groups of 256 rows."""
    rng = np.random.default_rng(0)
    numbers = 3 * side**2
    kind = pa.list_(pa.uint8(), numbers)
    with pq.ParquetWriter(folder / "images.parquet", pa.schema([("image", kind), ("label", pa.int64())])) as file:
        for _ in range(0, rows, 256):
            pixels = pa.array(np.frombuffer(rng.bytes(256 * numbers), np.uint8))
            images = pa.FixedSizeListArray.from_arrays(pixels, type=kind)
            file.write_table(pa.table({"image": images, "label": rng.integers(CLASSES, size=256)}), 256)


def measure(size: Size, device: torch.device, dataset: Dataset) -> Iterator[Row]:
    """Measure one line of the table after the other."""
    cuda = device.type == "cuda"
    loader = make_loader(dataset, size.batch, drop_last=True, device=device if cuda else None)
    model = Classifier(size).to(device)
    steps = OptimizerStep(Exchange(model), torch.optim.AdamW(model.parameters()), loss, device, "bf16")
    losses = LossMonitor(0)
    *_, resident = loader  # a whole epoch, which fills the cache
    with closing(forever(loader)) as endless:

        def resident_step() -> float:
            return run(steps, losses, (resident for _ in range(size.steps)))

        def loader_step() -> float:
            return run(steps, losses, (next(endless) for _ in range(size.steps)))

        resident_step()  # warm-up
        loader_step()
        pairs = [(resident_step(), loader_step()) for _ in range(ROUNDS)]
        ratio = median(with_loader / without for without, with_loader in pairs)
        yield Row("step on a resident batch", f"{median(without for without, _ in pairs) * 1e3:.2f} ms")
        yield Row("step with the loader", f"{median(with_loader for _, with_loader in pairs) * 1e3:.2f} ms")
        yield Row("  of the step on a resident batch", f"{ratio:.3f} x", "at most 1.01 x", ratio <= 1.01)
        if cuda:
            yield from copies(steps, losses, endless, size, pinned_speed(resident["image"], device))
            yield waits(steps, losses, resident)
    yield same_batches(dataset, size, loader)


def forever(loader: Loader) -> Generator[Any, None, None]:
    while True:
        yield from loader


def run(steps: OptimizerStep, losses: LossMonitor, batches: Iterable[Any]) -> float:
    """Return the mean time of a step in seconds."""
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
    losses.add(steps.add(batch, rows, rows, last=True)[0], Where(0, 1))


def pinned_speed(batch: Tensor, device: torch.device) -> float:
    """Return the best bandwidth of twenty copies of a batch from pinned memory, in bytes per second."""
    host, target = torch.empty_like(batch, device="cpu", pin_memory=True), torch.empty_like(batch, device=device)
    best = float("inf")
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return batch.nbytes / best


def copies(steps: OptimizerStep, losses: LossMonitor, batches: Iterator[Any], size: Size, ceiling: float) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        with traced(Path(folder), 0) as step:
            for batch in islice(batches, size.steps):
                take(steps, losses, batch)
                step()
        losses.settle()
        return copied_in(json.loads(next(Path(folder).iterdir()).read_text())["traceEvents"], ceiling)


def copied_in(events: list[dict[str, Any]], ceiling: float) -> list[Row]:
    """Return the lines for the copies to the device in a trace.

    Args:
        events: Events of the trace.
        ceiling: Bandwidth of copies from pinned memory in bytes per second.
    """
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
    """Return the length of the part of [start, end] that the union of `spans` covers."""
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
    """Compare the checksums of all batches of an epoch with those of a loader without a device."""
    plain = make_loader(dataset, size.batch, drop_last=True)
    for each in (loader, plain):
        each.set_epoch(1)
    expected, actual = ([checksum(batch) for batch in each] for each in (plain, loader))
    return Row("batches as on the host", f"{len(actual)} of {len(expected)}", "all", expected == actual)


def checksum(batch: dict[str, Tensor]) -> int:
    host = map_tensors(batch, Tensor.cpu)
    return zlib.crc32(b"".join(np.ascontiguousarray(column.numpy()).tobytes() for column in host.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else "no GPU here: a smoke test of tiny size on the CPU"
    )
    size = SIZES[device.type]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        write(data, size.rows, size.side)
        dataset = make_dataset(str(data), cache=CacheConfig(cache_dir=str(Path(folder, "cache"))))
        rows = list(measure(size, device, dataset))
    if args.json:
        sys.stdout.write(json.dumps({"device": name, "rows": [vars(row) for row in rows]}) + "\n")
    else:
        table = Table("figure", "measured", "target", "", title=f"{name}; torch {torch.__version__}")
        for row in rows:
            verdict = "" if row.ok is None or device.type == "cpu" else "yes" if row.ok else "NO"
            table.add_row(row.what, row.figure, row.asked, verdict)
        Console().print(table)
    sys.exit(device.type == "cuda" and any(row.ok is False for row in rows))


if __name__ == "__main__":
    main()
