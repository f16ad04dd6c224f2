"""Ray Train: the function of a worker makes its loader. Ray has started torch.distributed by then.

    python train_ray.py TRAIN HELD_OUT --workers 8

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9.
"""

import argparse

import torch
from torch import nn

from dataload import evaluate_over, make_loader


def right(model, batch):
    return {"accuracy": model(batch["image"].float()).argmax(1) == batch["label"]}


def train(config):
    from ray.train import get_context, report
    from ray.train.torch import prepare_model

    options = {"columns": ["image", "label"], "cache_dir": config["cache_dir"]}
    options["device"] = "cuda" if torch.cuda.is_available() else None
    loader = make_loader(config["train"], config["batch_size"], **options)  # no prepare_data_loader
    held_out = make_loader(config["held_out"], config["batch_size"], shuffle=False, **options)

    numbers = loader.dataset.schema.field("image").type.list_size
    model = prepare_model(nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(config["epochs"]):
        for batch in loader:  # each row once over all workers, a new order each time
            nn.functional.cross_entropy(model(batch["image"].float()), batch["label"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        scores = evaluate_over(model, held_out, right)
        report(scores)
    if get_context().get_world_rank() == 0:
        print(f"accuracy {scores['accuracy']:.1%} of {scores['rows']} rows")


def main():
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("held_out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--cache-dir")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    scaling = ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available())
    TorchTrainer(train, train_loop_config=vars(args), scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
