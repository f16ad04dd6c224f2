"""Pipeline parallelism: the stages of a pipeline get equal batches, because the loader has the mesh.

    torchrun --nproc-per-node 8 train_pipeline.py TRAIN --stages 2

TRAIN is a URL or a folder of Parquet files. `image` holds fixed-size lists of numbers, `label` is 0 to 9.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from dataload import make_loader


def main():
    parser = argparse.ArgumentParser()
    for name in ("train", "--cache-dir"):
        parser.add_argument(name)
    for name, default in (("--epochs", 10), ("--batch-size", 256), ("--stages", 2), ("--microbatches", 4)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size() // args.stages, args.stages), mesh_dim_names=("dp", "pp"))
    options = {"columns": ["image", "label"], "cache_dir": args.cache_dir, "mesh": mesh["dp"], "device": device}
    loader = make_loader(args.train, args.batch_size, drop_last=True, **options)  # all microbatches have one shape

    numbers = loader.dataset.schema.field("image").type.list_size
    torch.manual_seed(0)  # each rank makes the whole model, and keeps its stage
    layers = [nn.Linear(numbers, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    number = mesh.get_local_rank("pp")
    ends = [len(layers) * stage // args.stages for stage in range(args.stages + 1)]
    model = nn.Sequential(*layers[ends[number] : ends[number + 1]]).to(device)
    stage = PipelineStage(model, number, args.stages, torch.device(device), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, args.microbatches, nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(args.epochs):
        total, losses = 0.0, []  # the last stage has the losses of the microbatches of a step
        for batch in loader:  # each row once over all pipelines
            inputs = (batch["image"].float(),) if stage.is_first else ()
            schedule.step(*inputs, **({"target": batch["label"], "losses": losses} if stage.is_last else {}))
            total += sum(loss.item() for loss in losses) / args.microbatches
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
                parameter.grad /= mesh["dp"].size()
            optimizer.step()
            optimizer.zero_grad()
        if stage.is_last and mesh.get_local_rank("dp") == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
