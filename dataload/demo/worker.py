"""A rank of the demo, the program `python -m dataload.demo.worker job.json`."""

from __future__ import annotations

import json
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataload.cache.config import CacheConfig
from dataload.demo import model as digit_model
from dataload.loader import make_loader
from dataload.train.harness import fit
from dataload.world import World

ORIGIN_ID = "dataload-demo"  # identifies the store to a kept cache: the server's port differs between runs
PEAK_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Job:
    """The task of the ranks.

    Args:
        url: Folder of the training files.
        storage_options: Options of its filesystem.
        stats_url: URL of the server's totals.
        cache_dir: Folder of the cache.
        cache_bytes: Limit of the cache in bytes.
        scratch: Folder for the input and output of the ranks.
        epochs: Epochs of training.
        batch_size: Rows of each rank's batch.
        seed: Seed of the shuffle and the model.
    """

    url: str
    storage_options: dict[str, Any]
    stats_url: str
    cache_dir: str
    cache_bytes: int
    scratch: str
    epochs: int
    batch_size: int
    seed: int


def row_ids_file(scratch: Path, epoch: int, rank: int) -> Path:
    """Return the file of the row ids of a rank and epoch, in training order: int64[rows], without padding."""
    return scratch / f"rows-{epoch}-{rank}.npy"


def held_out_file(scratch: Path) -> Path:
    """Return the npz file of the held-out digits: images uint8[n, 4096], labels int64[n]."""
    return scratch / "held-out.npz"


def history_file(scratch: Path) -> Path:
    """Return the JSON file of the history that `fit` returns, with accuracy, get_requests and get_bytes by epoch."""
    return scratch / "history.json"


def run(job: Job) -> None:
    """Train on this rank's share of every epoch. Write the results to `job.scratch`."""
    torch.set_num_threads(1)
    rank, scratch = World.detect().rank, Path(job.scratch)
    cache = CacheConfig(cache_dir=job.cache_dir, cache_bytes=job.cache_bytes, origin_id=ORIGIN_ID)
    loader = make_loader(
        job.url,
        job.batch_size,
        columns=["image", "label", "number"],
        storage_options=job.storage_options,
        cache=cache,
        seed=job.seed,
    )
    held_out = np.load(held_out_file(scratch))
    images, labels = torch.from_numpy(held_out["images"]), torch.from_numpy(held_out["labels"])
    torch.manual_seed(job.seed)
    model = digit_model.DigitNet()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=job.epochs * len(loader))
    seen: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    epochs = iter(range(job.epochs))

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch["number"].numpy().copy())  # a view would keep the memory of many batches alive
        return digit_model.loss(model, batch)

    def evaluate(model: nn.Module) -> dict[str, float]:
        rows = np.concatenate(seen)
        seen.clear()
        np.save(row_ids_file(scratch, next(epochs), rank), rows[: len(rows) - loader.padding])
        return {**_served(job.stats_url), "accuracy": digit_model.accuracy(model, images, labels)}

    history = fit(
        model,
        optimizer,
        loader,
        loss_fn,
        epochs=job.epochs,
        precision="fp32",
        scheduler=scheduler,
        evaluate=evaluate,
        device="cpu",
        progress=False,
    )
    if rank == 0:
        history_file(scratch).write_text(json.dumps(history))


def _served(stats_url: str) -> dict[str, float]:
    """Return the server's totals between two epochs, while no rank sends requests."""
    dist.barrier()  # all ranks have ended this epoch
    with urllib.request.urlopen(stats_url) as answer:  # noqa: S310 - our own server's
        totals = json.load(answer)
    dist.barrier()  # all ranks have read the totals
    return {name: totals[name] for name in ("get_requests", "get_bytes")}


def main() -> None:
    """Run the job."""
    run(Job(**json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
