"""Lightning: `train_dataloader` returns the loader. Lightning detects that it is sharded and does not replace it.

    python train_lightning.py TRAIN HELD_OUT
    torchrun --nproc-per-node 8 train_lightning.py TRAIN HELD_OUT

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from dataload import CacheConfig, World, make_dataset, make_loader


class Classifier(LightningModule):
    def __init__(self, train, held_out, batch_size):
        super().__init__()
        self.train_data, self.held_out, self.batch_size = train, held_out, batch_size
        numbers = train.schema.field("image").type.list_size
        self.layers = nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10))

    def train_dataloader(self):
        return make_loader(self.train_data, self.batch_size)

    def val_dataloader(self):
        return make_loader(self.held_out, self.batch_size, shuffle=False)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.layers(batch["image"].float()), batch["label"])

    def validation_step(self, batch, number):
        right = self.layers(batch["image"].float()).argmax(1) == batch["label"]
        loader = self.trainer.val_dataloaders
        if number == len(loader) - 1:  # whose last rows may repeat others, so that every rank has as many
            right = right[: len(right) - loader.padding]
        for name, count in (("right", right.sum().float()), ("rows", float(len(right)))):
            self.log(name, count, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True, batch_size=1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("train", "held_out", "--cache-dir"):
        parser.add_argument(name)
    for name, default in (("--epochs", 10), ("--batch-size", 256)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    world, cache = World.detect(), CacheConfig(cache_dir=args.cache_dir)
    data = (make_dataset(source, columns=["image", "label"], cache=cache) for source in (args.train, args.held_out))
    strategy, devices = "ddp" if world.world_size > 1 else "auto", world.local_world_size
    trainer = Trainer(strategy=strategy, devices=devices, num_nodes=world.num_nodes, max_epochs=args.epochs)
    trainer.fit(Classifier(*data, args.batch_size))
    right, rows = (trainer.callback_metrics[name].item() for name in ("right", "rows"))
    if trainer.is_global_zero:
        print(f"accuracy {right / rows:.1%} of {rows:.0f} rows")
