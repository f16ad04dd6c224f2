"""Lightning: fit, validate, resume, data modules, several loaders, Fabric."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from dataload import make_dataset, make_loader

ROWS = 75


class Model(LightningModule):
    """A model that records the rows of its steps, and saves a checkpoint after one of them."""

    def __init__(self, save_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.save_at, self.trained, self.validated = save_at, {}, []

    def training_step(self, batch, number):
        batches = batch if isinstance(batch, dict) and "x" not in batch else {"": batch}
        seen = {name: each["row"].tolist() for name, each in batches.items()}
        self.trained[self.current_epoch, number] = seen
        loss = sum(self.layer(each["x"][:, None]).square().mean() for each in batches.values())
        self.log("loss", loss, batch_size=8)
        return loss

    def on_train_batch_end(self, outputs, batch, number):
        if (self.current_epoch, number) == self.save_at:
            self.trainer.save_checkpoint("middle.ckpt")

    def validation_step(self, batch, number, dataloader_idx=0):
        self.validated.append((dataloader_idx, batch["row"].tolist()))
        self.log("val", self.layer(batch["x"][:, None]).mean(), batch_size=len(batch["row"]))

    def predict_step(self, batch, number):
        return batch["row"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, max_epochs=3, **quiet, **options)


@pytest.fixture
def rows(write, cache):
    return make_dataset(write({"x": np.linspace(0, 1, ROWS, dtype=np.float32), "row": range(ROWS)}), cache=cache)


@pytest.fixture
def short(rows):
    return rows.select(range(20))


def resumed(loaders, save_at):
    """Return the steps of a whole run after `save_at`, and those of a run that resumes there."""
    runs = []
    for resume in (None, "middle.ckpt"):
        model = Model(None if resume else save_at)
        trainer(num_sanity_val_steps=0).fit(model, loaders(), ckpt_path=resume)
        runs.append(model.trained)
    return {step: seen for step, seen in runs[0].items() if step > save_at}, runs[1]


def test_fit_and_validate(rows, short):
    """Each row once an epoch, validation in file order, and another order in each epoch."""
    model = Model()
    trainer().fit(model, make_loader(rows, 8), make_loader(short, 8, shuffle=False))
    epochs = [[row for (e, _), seen in model.trained.items() if e == epoch for row in seen[""]] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [row for _, batch in model.validated[-3:] for row in batch] == list(range(20))


def test_resume_in_the_middle_of_an_epoch(rows):
    """The steps after a checkpoint within an epoch are those of the run that went on."""
    expected, found = resumed(lambda: make_loader(rows, 8), (1, 4))
    assert found == expected


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_combined_loader(rows, short, mode):
    """A long and a short loader together, and an exact resume, also while the short one cycles."""

    def loaders():
        loaders = {"long": make_loader(rows, 8), "short": make_loader(short, 8)}
        return CombinedLoader(loaders, mode)

    steps = {"max_size_cycle": 10, "min_size": 3}[mode]
    expected, found = resumed(loaders, (1, 4 if mode == "max_size_cycle" else 1))
    assert found == expected
    assert len(expected) == 2 * steps - (5 if mode == "max_size_cycle" else 2)


def test_combined_loader_in_sequence(rows, short):
    """`sequential` validates one loader after the other."""
    model = Model()
    held_out = CombinedLoader([make_loader(part, 8, shuffle=False) for part in (rows, short)], "sequential")
    trainer().validate(model, held_out, verbose=False)
    assert [sum(len(batch) for each, batch in model.validated if each == loader) for loader in range(2)] == [ROWS, 20]


@pytest.mark.limit("Lightning saves no loader that has ended: resume `max_size` from the end of an epoch")
def test_combined_loader_of_the_longest(rows, short):
    """`max_size` gives None after the short loader; a run resumed after that reads the short one again."""

    def loaders():
        return CombinedLoader({"long": make_loader(rows, 8), "short": make_loader(short, 8)}, "max_size")

    class Longest(Model):
        def training_step(self, batch, number):
            return super().training_step({name: each for name, each in batch.items() if each is not None}, number)

    runs = []
    for resume in (None, "middle.ckpt"):
        model = Longest(None if resume else (1, 4))
        trainer().fit(model, loaders(), ckpt_path=resume)
        runs.append(model.trained)
    assert {*runs[0][1, 5]} == {"long"}
    assert {*runs[1][1, 5]} == {"long", "short"}


class Rows(LightningDataModule):
    """A data module that makes its loaders where the ranks are known."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def setup(self, stage):
        self.train, self.held_out = make_dataset(self.path).split([0.8, 0.2])

    def train_dataloader(self):
        return make_loader(self.train, 8)

    def val_dataloader(self):
        return make_loader(self.held_out, 8, shuffle=False)

    def predict_dataloader(self):
        return self.val_dataloader()


def test_data_module(write):
    """A LightningDataModule with a split; training, validation and prediction."""
    path = write({"x": np.linspace(0, 1, ROWS, dtype=np.float32), "row": range(ROWS)}, row_group_size=5)
    model, data = Model(), Rows(path)
    trainer().fit(model, data)
    assert sum(len(seen[""]) for (epoch, _), seen in model.trained.items() if epoch == 0) == 60
    assert sum(map(len, trainer().predict(model, data))) == 15


def test_fabric(rows):
    """Fabric's `setup_dataloaders` returns each row once."""
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(make_loader(rows, 8))
    model, optimizer = fabric.setup(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
    seen = []
    for batch in loader:
        fabric.backward(model(batch["x"][:, None]).mean())
        optimizer.step()
        seen += batch["row"].tolist()
    assert sorted(seen) == list(range(ROWS))
