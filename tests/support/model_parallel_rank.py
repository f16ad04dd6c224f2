"""Four ranks in tensor-parallel pairs, under accelerate or Lightning. They write their rows to JSON files.

model_parallel_rank.py FOLDER_OF_PARQUET OUTPUT_FOLDER accelerate|lightning
"""

import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from forked import rank_of_this_process
from torch.distributed.fsdp import fully_shard

from dataload import ConfigError, make_dataset, make_loader

warnings.filterwarnings("ignore")
folder, out, trainer = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
rank = rank_of_this_process()
dataset = make_dataset(folder, cache=False)
seen = {"rows": []}


def step(model, batch):
    seen["rows"].append(batch["row_id"].tolist())
    return model(batch["half"][:, None].float()).square().mean()


def refused():
    try:
        make_loader(dataset, 16)
    except ConfigError as error:
        return str(error)


def with_accelerate():
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig

    handler = None
    if find_spec("transformers") is None:
        print("accelerate's TorchTensorParallelConfig needs transformers, which is not installed: a stand-in is used")
        handler = SimpleNamespace()

    class OnCPUs(ParallelismConfig):
        def _validate_accelerator(self, accelerator):
            """Allow processes without GPUs, which accelerate does not."""

    accelerator = Accelerator(cpu=True, parallelism_config=OnCPUs(tp_size=2, dp_shard_size=2, tp_handler=handler))
    seen["error"] = refused()
    mesh = accelerator.torch_device_mesh
    loader = accelerator.prepare(make_loader(dataset, 16, mesh=mesh["dp_shard"]))
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(1, 1), mesh=mesh["dp_shard"])
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for batch in loader:
        loss = step(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def with_lightning():
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Model(LightningModule):
        def configure_model(self):
            if not hasattr(self, "layer"):
                self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, number):
            return step(self.layer, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-6)

        def train_dataloader(self):
            seen["error"] = refused()
            return make_loader(dataset, 16, mesh=self.device_mesh["data_parallel"])

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=1, enable_checkpointing=False, **quiet).fit(
        Model()
    )


{"accelerate": with_accelerate, "lightning": with_lightning}[trainer]()
(out / f"{rank}.json").write_text(json.dumps(seen))
torch.distributed.destroy_process_group()
