"""Train on a folder of photographs: decode once, crop and flip on threads, evaluate exactly, resume.

    dataload convert photos/ train/ --shuffle 0     # photos/cat/1.jpg, photos/dog/2.jpg, …
    python train_images.py train/                   # or: torchrun --nproc-per-node 8 train_images.py train/

To resume a killed run at its last save, start the same command again, with any number of ranks.
"""

import argparse
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dataload import evaluate_over, fit, images, make_dataset, make_loader


def augment(batch, rng):  # the same batch always gets the same rng
    pixels = images.random_resized_crop(batch["image"], rng, 56)
    flipped = torch.from_numpy(rng.random(len(pixels)) < 0.5)
    return {**batch, "image": torch.where(flipped[:, None, None, None], pixels.flip(2), pixels)}


def middle(batch):
    return {**batch, "image": batch["image"][:, 4:60, 4:60]}


def logits(model, batch):
    return model(batch["image"].permute(0, 3, 1, 2).float() / 255)


def loss(model, batch):
    return cross_entropy(logits(model, batch), batch["label"].long())


def right(model, batch):
    return {"accuracy": logits(model, batch).argmax(1) == batch["label"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    photos = make_dataset(args.data, columns=["image", "label"])
    classes = len(photos.class_names("label"))
    photos = photos.map(images.decode("image", size=64), columns=["image"])
    train, held_out = photos.split([0.9, 0.1], seed=0)
    skip = {"on_error": "skip"}  # photographs that cannot be decoded: `print(loader.stats())` counts them
    loader = make_loader(train, 64, transform=augment, num_threads=2, **skip)
    validation = make_loader(held_out, 64, shuffle=False, transform=middle, **skip)

    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 32, 5, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    options = {"epochs": args.epochs, "checkpoint_dir": "checkpoints", "checkpoint_every": 100}
    options["evaluate"] = partial(evaluate_over, loader=validation, metric_fn=right)
    for epoch in fit(model, torch.optim.AdamW(model.parameters()), loader, loss, **options):
        print(f"epoch {epoch['epoch']}: accuracy {epoch['accuracy']:.1%} of {epoch['evaluate.rows']:.0f} photographs")


if __name__ == "__main__":
    main()
