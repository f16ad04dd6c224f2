"""DDP in a loop of your own: `make_loader` gives each rank its rows. Nothing else differs from a torch DataLoader.

    torchrun --nproc-per-node 8 train_plain_ddp.py TRAIN HELD_OUT

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds lists of equal length, `label` is 0 to 9.
"""

import argparse

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
    device = torch.accelerator.current_accelerator() or "cpu"
    options = {"columns": ["image", "label"], "cache_dir": args.cache_dir, "device": device}
    loader = make_loader(args.train, args.batch_size, **options)
    held_out = make_loader(args.held_out, args.batch_size, shuffle=False, **options)

    numbers = loader.dataset.schema.field("image").type.list_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(args.epochs):
        for batch in loader:  # each row once over all ranks, a new order each time
            loss = nn.functional.cross_entropy(model(batch["image"].float()), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scores = evaluate_over(model, held_out, right)  # over all ranks, without the padding
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {scores['accuracy']:.1%} of {scores['rows']} rows")
            torch.save({"model": model.module.state_dict(), "loader": loader.state_dict()}, "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
