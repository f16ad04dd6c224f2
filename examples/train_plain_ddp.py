"""DDP in your own loop: `make_loader` gives each rank its rows. Nothing else differs from a torch DataLoader.

    torchrun --nproc-per-node 8 train_plain_ddp.py TRAIN HELD_OUT

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9.
To resume a killed run at its last save, start the same command again, with any number of ranks.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dataload import evaluate_over, make_loader


def right(model, batch):
    return {"accuracy": model(batch["image"].float()).argmax(1) == batch["label"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("held_out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--cache-dir")
    args = parser.parse_args()

    dist.init_process_group()
    train(args)  # a separate function frees DDP before the group: otherwise torch may hang
    dist.destroy_process_group()


def train(args):
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options = {"columns": ["image", "label"], "cache_dir": args.cache_dir, "device": device}
    loader = make_loader(args.train, args.batch_size, **options)
    held_out = make_loader(args.held_out, args.batch_size, shuffle=False, **options)

    numbers = loader.dataset.schema.field("image").type.list_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    first = 0
    if Path("last.pt").exists():
        saved = torch.load("last.pt", map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # the next loop begins at the next row: no set_epoch
        first = saved["epoch"]

    def save(epoch):
        states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "loader": loader.state_dict(), "epoch": epoch}, "last.tmp")
        Path("last.tmp").replace("last.pt")  # a kill leaves the old file or the new one

    for epoch in range(first, args.epochs):
        for step, batch in enumerate(loader, 1):  # each row once over all ranks, a new order each time
            loss = nn.functional.cross_entropy(model(batch["image"].float()), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 100 == 0 and dist.get_rank() == 0:
                save(epoch)
        scores = evaluate_over(model, held_out, right)  # over all ranks, without the padding
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {scores['accuracy']:.1%} of {scores['rows']} rows")
            save(epoch + 1)


if __name__ == "__main__":
    main()
