"""DeepSpeed with ZeRO-2: the engine owns the step, `make_loader` the rows and their position in the checkpoint.

    deepspeed train_deepspeed.py TRAIN HELD_OUT        # or torchrun, or srun

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9.
"""

import argparse

import deepspeed
import torch
from torch import nn

from dataload import evaluate_over, make_loader


def right(model, batch):
    return {"accuracy": model(batch["image"].to(model.device).float()).argmax(1) == batch["label"].to(model.device)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("held_out")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--cache-dir")
    parser.add_argument("--local_rank")  # which the launcher adds
    args = parser.parse_args()

    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    options = {"columns": ["image", "label"], "cache_dir": args.cache_dir}
    loader = make_loader(args.train, args.batch_size, **options)  # after init_distributed, which starts the ranks
    held_out = make_loader(args.held_out, args.batch_size, shuffle=False, **options)

    numbers = loader.dataset.schema.field("image").type.list_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10))
    config = {"train_micro_batch_size_per_gpu": args.batch_size, "zero_optimization": {"stage": 2}}
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    path, saved = engine.load_checkpoint("checkpoints")  # without a checkpoint, both are None
    if path:
        loader.load_state_dict(saved["loader"])
    for epoch in range(saved["epoch"] if path else 0, args.epochs):
        for batch in loader:  # each row once over all ranks, a new order each time
            image, label = (batch[name].to(engine.device) for name in ("image", "label"))
            engine.backward(nn.functional.cross_entropy(engine(image.float()), label))
            engine.step()
        engine.save_checkpoint("checkpoints", client_state={"loader": loader.state_dict(), "epoch": epoch + 1})
        scores = evaluate_over(engine, held_out, right)
        if engine.global_rank == 0:
            print(f"epoch {epoch}: accuracy {scores['accuracy']:.1%} of {scores['rows']} rows")
    engine.destroy()


if __name__ == "__main__":
    main()
