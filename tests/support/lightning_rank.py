"""Ranks that run Lightning with dataload loaders and write the rows of each epoch to a JSON file.

lightning_rank.py FOLDER_OF_PARQUET OUTPUT_FOLDER
"""

import itertools
import json
import sys
import warnings
from pathlib import Path

import torch
from forked import rank_of_this_process
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader

from dataload import make_dataset, make_loader, mix

warnings.filterwarnings("ignore", ".*does not have many workers.*")
folder, out = sys.argv[1], Path(sys.argv[2])
rank = rank_of_this_process()
dataset = make_dataset(folder, cache=False)
mixture = mix([dataset.select(range(100)), dataset.select(range(100, len(dataset)))])
seen = {}


class Model(LightningModule):
    """A module that records the rows of each epoch and saves checkpoints at given steps."""

    def __init__(self, save_at=None, data=dataset):
        super().__init__()
        self.data = data
        self.layer = torch.nn.Linear(1, 1)
        self.save_at = save_at
        self.trained, self.validated = {}, []

    def training_step(self, batch, number):
        self.trained.setdefault(self.current_epoch, []).extend(batch["row_id"].tolist())
        return self.layer(batch["half"][:, None].float()).mean()

    def on_train_batch_end(self, outputs, batch, number):
        if (self.current_epoch, number) == self.save_at:
            self.trainer.save_checkpoint(out / "checkpoint")

    def validation_step(self, batch, number):
        self.validated.append(batch["row_id"].tolist())

    def predict_step(self, batch, number):
        return batch["row_id"].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        return make_loader(self.data, 16)

    def val_dataloader(self):
        return make_loader(dataset, 100, shuffle=False)

    def predict_dataloader(self):
        return make_loader(dataset, 16)


class Writer(BasePredictionWriter):
    """A callback that records the rows of each prediction."""

    def __init__(self):
        super().__init__("batch")
        self.written = []

    def write_on_batch_end(self, trainer, model, prediction, rows, batch, number, loader):
        self.written.append((prediction, rows))


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu", devices=2, strategy="ddp", enable_checkpointing=False, **quiet, max_epochs=3, **options
    )


def rows_of(batches):
    return [row for batch in batches for row in batch["row_id"].tolist()]


whole = Model()
trainer(num_sanity_val_steps=2).fit(whole)
seen["trained"] = whole.trained
seen["validated"] = whole.validated

# Another model resumes from a checkpoint in the middle of an epoch, and from one on its last batch.
for name, save_at in (("middle", (1, 3)), ("last", (1, 9))):
    trainer(num_sanity_val_steps=0).fit(Model(save_at))
    resumed = Model()
    trainer(num_sanity_val_steps=0).fit(resumed, ckpt_path=out / "checkpoint")
    seen[name] = resumed.trained

mixed = Model((1, 3), mixture)
trainer(num_sanity_val_steps=0).fit(mixed)
resumed = Model(data=mix(mixture.datasets))
trainer(num_sanity_val_steps=0).fit(resumed, ckpt_path=out / "checkpoint")
seen["mixed"], seen["mixed resumed"] = mixed.trained, resumed.trained


# In each epoch of the trainer, a CombinedLoader begins several of the short loader, and leaves the last one early.
class Combined(Model):
    """A model that trains on pairs of batches of a long and a short loader."""

    mode = "max_size_cycle"

    def train_dataloader(self):
        return CombinedLoader([make_loader(dataset, 16), make_loader(mixture.datasets[0], 16)], self.mode)

    def training_step(self, batches, number):
        return sum(super(Combined, self).training_step(batch, number) for batch in batches)


for name, save_at in (("cycled", (1, 5)), ("cycled border", (1, 3))):
    cycled, resumed = Combined(save_at), Combined()
    trainer(num_sanity_val_steps=0).fit(cycled)
    trainer(num_sanity_val_steps=0).fit(resumed, ckpt_path=out / "checkpoint")
    seen[name], seen[f"{name} resumed"] = cycled.trained, resumed.trained

# Two batches of each epoch, of a loader that a hook returns, and of one that is passed to the trainer.
for name, given in (("overfitted hook", None), ("overfitted", make_loader(dataset, 16))):
    overfitted = Model()
    trainer(overfit_batches=2, num_sanity_val_steps=0).fit(overfitted, given)
    seen[name] = overfitted.trained

# A loader that a hook returns, and one that is passed to the trainer.
for name, options in (("hook", None), ("given", {}), ("workers", {"num_workers": 1})):
    writer = Writer()
    given = None if options is None else make_loader(dataset, 16, **options)
    trainer(callbacks=[writer]).predict(Model(), given, return_predictions=False)
    seen[name] = writer.written

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
loader = make_loader(dataset, 16)
fabric_loader = fabric.setup_dataloaders(loader)
seen["fabric"] = [rows_of(fabric_loader), rows_of(fabric_loader)]
batches = iter(fabric_loader)
begun = rows_of(itertools.islice(batches, 4))
fabric.save(out / "fabric", {"loader": fabric_loader})
batches.close()
fresh = fabric.setup_dataloaders(make_loader(dataset, 16))
fabric.load(out / "fabric", {"loader": fresh})
seen["fabric resumed"] = [begun + rows_of(fresh), rows_of(fresh)]
by_hand = make_loader(dataset, 16)
seen["by hand"] = []
for epoch in range(4):
    by_hand.set_epoch(epoch)
    seen["by hand"].append(rows_of(by_hand))

(out / f"{rank}.json").write_text(json.dumps(seen))
torch.distributed.destroy_process_group()
