"""nn.DataParallel: one process for all GPUs of a machine. DDP (train_ddp.py) is faster, also on one machine.

    python train_dataparallel.py TRAIN HELD_OUT

DataParallel copies the model to all GPUs in each step. The first GPU gathers outputs and gradients and runs out of
memory first. One Python process drives all GPUs, whose threads share the interpreter lock; DDP has a process for each.
DataParallel reduces gradients after backward; DDP overlaps both. DataParallel cannot use several machines. Its
advantage is that it needs no launcher and no ranks.

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9.
"""

import argparse

import torch
from torch import nn

from dataload import fit, make_loader
from dataload.train import evaluate_over


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["image"].float()), batch["label"])


def right(model, batch):
    return {"accuracy": model(batch["image"].float()).argmax(1) == batch["label"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("held_out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--cache-dir")
    args = parser.parse_args()

    options = {"columns": ["image", "label"], "cache_dir": args.cache_dir}
    loader = make_loader(args.train, args.batch_size, **options)
    held_out = make_loader(args.held_out, args.batch_size, shuffle=False, **options)

    numbers = loader.dataset.schema.field("image").type.list_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10))
    model = nn.DataParallel(model)  # a batch is cut into as many parts as there are GPUs
    optimizer = torch.optim.AdamW(model.parameters())
    history = fit(
        model,
        optimizer,
        loader,
        loss,
        epochs=args.epochs,
        evaluate=lambda model: evaluate_over(model, held_out, right),
    )
    print(f"accuracy {history[-1]['accuracy']:.1%} on {max(1, torch.cuda.device_count())} devices")


if __name__ == "__main__":
    main()
