"""Hugging Face Accelerate: `prepare` returns the loader unchanged.

    python train_accelerate.py TRAIN HELD_OUT
    accelerate launch --num-processes 8 train_accelerate.py TRAIN HELD_OUT          # or torchrun

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn

from dataload import make_loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("held_out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--cache-dir")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    options = {"columns": ["image", "label"], "cache_dir": args.cache_dir}
    loader = make_loader(args.train, args.batch_size, **options)  # after Accelerator, which starts the ranks
    held_out = make_loader(args.held_out, args.batch_size, shuffle=False, **options)

    numbers = loader.dataset.schema.field("image").type.list_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:  # each row once over all ranks, a new order each time
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["image"].float()), batch["label"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

        model.eval()
        right = rows = 0
        for batch in held_out:
            with torch.no_grad():
                guesses = model(batch["image"].float()).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, batch["label"]))  # without the padding
            right += (guesses == labels).sum().item()
            rows += len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {right / rows:.1%} of {rows} rows")
    accelerator.end_training()


if __name__ == "__main__":
    main()
