"""FSDP2 with tensor parallelism: tensor-parallel peers get equal batches, because the loader has the mesh.

    torchrun --nproc-per-node 8 train_fsdp2.py TRAIN HELD_OUT --tensor-parallel 2

TRAIN and HELD_OUT are URLs or folders of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9. A
run that is restarted on another number of ranks resumes from the last checkpoint.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dataload import evaluate_over, fit, make_loader


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["image"].float()), batch["label"])


def right(model, batch):
    return {"accuracy": model(batch["image"].float()).argmax(1) == batch["label"]}


def main():
    parser = argparse.ArgumentParser()
    for name in ("train", "held_out", "--cache-dir"):
        parser.add_argument(name)
    for name, default in (("--epochs", 10), ("--batch-size", 256), ("--tensor-parallel", 2)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    shape = (dist.get_world_size() // args.tensor_parallel, args.tensor_parallel)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    options = {"columns": ["image", "label"], "cache_dir": args.cache_dir, "mesh": mesh["dp"]}
    loader = make_loader(args.train, args.batch_size, **options)
    held_out = make_loader(args.held_out, args.batch_size, shuffle=False, **options)

    numbers = loader.dataset.schema.field("image").type.list_size
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model.register_forward_hook(lambda *call: call[-1].float())  # fp32 logits; FSDP2 warns of a view
    fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
    run = {"epochs": args.epochs, "precision": "fp32", "evaluate": lambda model: evaluate_over(model, held_out, right)}
    history = fit(model, torch.optim.AdamW(model.parameters()), loader, loss, checkpoint_dir="checkpoints", **run)
    if dist.get_rank() == 0:
        print(f"accuracy {history[-1]['accuracy']:.1%} of {history[-1]['rows']} rows")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
