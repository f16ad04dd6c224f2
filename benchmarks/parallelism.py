"""Each way to use several devices, with one model and dataset: `python -m dataload.benchmarks.parallelism`.

One device, DataParallel, DistributedDataParallel (DDP) and DDP with mixed precision; then DDP with mixed precision and
activation checkpointing, accumulation, or a communication hook. Each row runs `dataload.fit` in processes of its own: a
rank for each GPU, or without a GPU, where a smaller model trains, one for each core. The global batch is the same in
all rows.

Busy is the time of an epoch's steps on a batch that is resident on the device, over the time of the epoch with the
loader. The target on GPUs: at least 98 % with DDP and bf16. DataParallel needs several GPUs to be more than one device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor, nn

from dataload.benchmarks.gpu import CLASSES, loss, write
from dataload.cache.config import CacheConfig
from dataload.loader import make_loader
from dataload.runtime.resource_limits import usable_cores
from dataload.train.harness import fit

EPOCHS = 3  # the first epoch fills the cache and warms the device, the last one counts
TARGET = 0.98


@dataclass(frozen=True)
class Size:
    """The size of the dataset and the model.

    Args:
        rows: Rows of the dataset.
        side: Width and height of an image in pixels.
        batch: Rows of a batch of all ranks.
        width: Channels of the first stage; each further one has twice as many.
        blocks: Blocks of each of the four stages.
    """

    rows: int
    side: int
    batch: int
    width: int
    blocks: int


SIZES = {"cuda": Size(8192, 224, 256, 64, 3), "cpu": Size(256, 32, 64, 8, 1)}


@dataclass(frozen=True)
class Way:
    """A way to train.

    Args:
        name: Its name in the table.
        ranks: Whether each device has a rank of its own, in DDP.
        parallel: Whether the model is in DataParallel.
        options: Further arguments of `fit`.
    """

    name: str
    ranks: bool = True
    parallel: bool = False
    options: dict[str, Any] = field(default_factory=dict)


BF16 = {"precision": "bf16"}
WAYS = [
    Way("one device", ranks=False),
    Way("DataParallel", ranks=False, parallel=True),
    Way("DDP"),
    Way("DDP, bf16", options=BF16),
    Way("DDP, bf16, activation checkpointing", options={**BF16, "activation_checkpointing": True}),
    Way("DDP, bf16, 4 batches a step", options={**BF16, "accumulate": 4}),
    *(Way(f"DDP, bf16, {hook} hook", options={**BF16, "comm_hook": hook}) for hook in ("bf16", "fp16", "powersgd")),
]


class Block(nn.Module):
    """A residual block (He et al. 2015, https://arxiv.org/abs/1512.03385): [B, i, H, W] to [B, o, H/s, W/s]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


class Classifier(nn.Module):
    """A residual network from uint8[B, 3 · side · side] to float[B, 10] logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.side = size.side
        widths = [size.width << stage for stage in range(4)]
        inputs = [3, *widths[:-1]]
        stages = [
            nn.Sequential(Block(i, o, 2), *(Block(o, o, 1) for _ in range(size.blocks - 1)))
            for i, o in zip(inputs, widths, strict=True)
        ]
        self.stages = nn.Sequential(*stages)
        self.out = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.view(-1, 3, self.side, self.side).float() / 255
        scores: Tensor = self.out(self.stages(pixels).mean((2, 3)))
        return scores


def train(way: Way, folder: Path) -> dict[str, float]:
    """Train as one rank. Return the seconds of the last epoch, those with a resident batch, and the peak of memory."""
    size, ranks = SIZES[_device()], int(os.environ.get("WORLD_SIZE", "1"))
    options = dict(way.options)
    if options.pop("activation_checkpointing", False):
        options["activation_checkpointing"] = [Block]
    cache = CacheConfig(str(folder / "cache"))
    loader = make_loader(str(folder / "data"), size.batch // ranks, drop_last=True, cache=cache)
    batch = next(iter(loader))
    resident = {name: values.to(_device()) for name, values in batch.items()}

    def seconds(batches: Any) -> float:
        model: nn.Module = Classifier(size)
        model = nn.DataParallel(model) if way.parallel else model
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        history = fit(model, optimizer, batches, loss, epochs=EPOCHS, progress=False, **options)
        return float(history[-1]["seconds"])

    with_loader = seconds(loader)
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _peak_bytes()
    return {"seconds": with_loader, "resident": seconds([resident] * len(loader)), "memory": memory}


def _peak_bytes() -> int:
    """Return the most memory of this process that was in RAM at a time."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def measured(way: Way, ranks: int, folder: Path) -> dict[str, float]:
    """Train in one process for each rank. Return the figures of rank 0.

    Raises:
        CalledProcessError: A rank failed.
    """
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if way.ranks else []
    program = [sys.executable, "-m", *launch, __spec__.name, "--way", way.name, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, usable_cores() // (ranks if way.ranks else 1)))}
    subprocess.run(program, env=environment, check=True)
    found: dict[str, float] = json.loads((folder / "figures.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        [way] = [each for each in WAYS if each.name == args.way]
        figures = train(way, args.folder)
        if os.environ.get("RANK", "0") == "0":
            (args.folder / "figures.json").write_text(json.dumps(figures))
        return
    cuda = torch.cuda.is_available()
    ranks = torch.cuda.device_count() if cuda else min(4, usable_cores())
    device = f"{ranks} × {torch.cuda.get_device_name()}" if cuda else f"{ranks} ranks on CPU, a small model"
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        write(data, SIZES[_device()].rows, SIZES[_device()].side)
        for way in WAYS if cuda else [way for way in WAYS if way.options.get("comm_hook") != "bf16"]:  # gloo has none
            figures = measured(way, ranks, Path(folder))
            rows.append({"way": way.name, **figures, "busy": figures["resident"] / figures["seconds"]})
    if args.json:
        sys.stdout.write(json.dumps({"device": device, "rows": rows}) + "\n")
    else:
        table = Table("way", "memory a rank", "seconds an epoch", "busy", title=f"{device}; torch {torch.__version__}")
        for row in rows:
            memory = decimal(int(row["memory"]))
            table.add_row(row["way"], memory, f"{row['seconds']:.2f}", f"{min(1.0, row['busy']):.0%}")
        Console().print(table)
    [busy] = [row["busy"] for row in rows if row["way"] == "DDP, bf16"]
    sys.exit(cuda and busy < TARGET)


if __name__ == "__main__":
    main()
