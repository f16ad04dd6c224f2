"""DDP with `fit`: a single process, a process for each GPU of a machine, or several machines.

    python train_ddp.py TRAIN HELD_OUT
    torchrun --nproc-per-node 8 train_ddp.py TRAIN HELD_OUT
    torchrun --nproc-per-node 8 --nnodes 2 --node-rank 0 --master-addr HOST train_ddp.py TRAIN HELD_OUT   # on HOST
    torchrun --nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr HOST train_ddp.py TRAIN HELD_OUT   # on the other

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9.
All machines must share the folder of checkpoints. A run that is killed and restarted resumes from the last checkpoint.
"""

import argparse

import torch
from torch import nn

from dataload import World, fit, make_loader
from dataload.train import evaluate_over


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["image"].float()), batch["label"])


def right(model, batch):
    return {"accuracy": model(batch["image"].float()).argmax(1) == batch["label"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("held_out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--cache-dir")
    parser.add_argument("--checkpoints", default="checkpoints/")
    parser.add_argument("--checkpoint-every", type=int, default=500, help="optimizer steps")
    args = parser.parse_args()
    options = {"columns": ["image", "label"], "cache_dir": args.cache_dir}
    options["device"] = "cuda" if torch.cuda.is_available() else None
    loader = make_loader(args.train, args.batch_size, **options)
    held_out = make_loader(args.held_out, args.batch_size, **options)  # shuffled: each machine reads only its part

    def evaluate(model):
        held_out.set_epoch(0)  # the same order in each evaluation, also after a resume
        return evaluate_over(model, held_out, right)

    numbers = loader.dataset.schema.field("image").type.list_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    run = {"epochs": args.epochs, "precision": "bf16", "clip_grad_norm": 1.0, "timeout": 600}
    run |= {"evaluate": evaluate, "checkpoint_dir": args.checkpoints, "checkpoint_every": args.checkpoint_every}
    history = fit(model, optimizer, loader, loss, **run)
    if World.detect().rank == 0:
        print(f"accuracy {history[-1]['accuracy']:.1%}, {history[-1]['rows_per_second']:,.0f} rows/s")


if __name__ == "__main__":
    main()
