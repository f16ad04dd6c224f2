"""Hugging Face Trainer: it returns the loader of this package instead of its own, and does not shard it again.

    torchrun --nproc-per-node 8 train_huggingface.py TRAIN HELD_OUT

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9.
"""

import argparse

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from dataload import make_loader


class Classifier(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, image, label):
        logits = self.layers(image.float())
        return {"loss": nn.functional.cross_entropy(logits, label), "logits": logits}


class RowTrainer(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset=None):
        return self.accelerator.prepare(eval_dataset or self.eval_dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("held_out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--cache-dir")
    args = parser.parse_args()

    run = {"eval_strategy": "epoch", "label_names": ["label"], "report_to": "none", "ddp_find_unused_parameters": False}
    run |= {f"per_device_{part}_batch_size": args.batch_size for part in ("train", "eval")}  # which it logs
    run["use_cpu"] = not torch.cuda.is_available()  # else the ranks of a machine without GPUs train without DDP
    options = {"columns": ["image", "label"], "cache_dir": args.cache_dir}
    loader = make_loader(args.train, args.batch_size, **options)
    held_out = make_loader(args.held_out, args.batch_size, shuffle=False, **options)
    RowTrainer(
        Classifier(loader.dataset.schema.field("image").type.list_size),
        TrainingArguments("checkpoints", num_train_epochs=args.epochs, **run),
        train_dataset=loader,
        eval_dataset=held_out,
        compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
    ).train()


if __name__ == "__main__":
    main()
