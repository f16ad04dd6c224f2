"""Accelerate, and torch's own parts over our dataset and loader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, DistributedSampler

from dataload import fit, make_dataset, make_loader

ROWS = 75


@pytest.fixture
def rows(write, cache):
    return make_dataset(write({"x": np.linspace(0, 1, ROWS, dtype=np.float32), "row": range(ROWS)}), cache=cache)


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_accelerate_with_gradient_accumulation(rows):
    """`prepare` and `accumulate`: the last, incomplete step of an epoch synchronizes."""
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts(), make_loader(rows, 8))
    synchronized, seen = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"][:, None]).square().mean())
            synchronized.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
        seen += batch["row"].tolist()
    assert sorted(seen) == list(range(ROWS))
    assert synchronized == [number % 4 == 3 or number == 9 for number in range(10)]


def test_accelerate_saves_and_loads(rows):
    """`save_state` in the middle of an epoch, and `load_state`: the loop continues at the next row."""

    def rest(load):
        accelerator = Accelerator(cpu=True)
        _, _, loader = accelerator.prepare(*parts(), make_loader(rows, 8))
        if load:
            accelerator.load_state("state")
            return [batch["row"].tolist() for batch in loader]
        found = []
        for number, batch in enumerate(loader):
            found.append(batch["row"].tolist())
            if number == 3:
                accelerator.save_state("state")
        return found[4:]

    assert rest(False) == rest(True)


def test_gather_for_metrics(rows):
    """`gather_for_metrics` gives each row once."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make_loader(rows, 8, shuffle=False))
    assert [int(row) for batch in loader for row in accelerator.gather_for_metrics(batch["row"])] == list(range(ROWS))


def test_distributed_sampler(rows):
    """A DistributedSampler of torch and DataLoader over our dataset, with workers: each row once over two ranks."""
    found = []
    for rank in range(2):
        sampler = DistributedSampler(rows, 2, rank, shuffle=True, drop_last=True)
        found += [int(row) for b in DataLoader(rows, 8, sampler=sampler, num_workers=1) for row in b["row"]]
    assert len(set(found)) == len(found) == 74


def test_stateful_data_loader(rows):
    """A StatefulDataLoader over our dataset resumes at the next batch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = make_loader(rows, 8).sampler
    loader = StatefulDataLoader(rows, 8, sampler=sampler)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = [batch["row"].tolist() for batch in batches]
    again = StatefulDataLoader(rows, 8, sampler=make_loader(rows, 8).sampler)
    again.load_state_dict(state)
    assert [batch["row"].tolist() for batch in again] == expected


def test_fit_resumes_from_its_checkpoint(rows):
    """`fit` stops, starts again from its checkpoint, and ends in the same bits."""

    def loss(model, batch):
        return model(batch["x"][:, None]).square().mean()

    def run(epochs, folder):
        model, optimizer = parts()
        fit(model, optimizer, make_loader(rows, 8), loss, epochs=epochs, checkpoint_dir=folder, progress=False)
        return model.weight.detach().clone()

    whole = run(3, "whole")
    run(1, "parts")
    assert torch.equal(run(3, "parts"), whole)


def test_batches_move_to_the_device(rows):
    """A transform returns a dataclass of tensors, and the loader moves it to the device."""
    from dataclasses import dataclass

    @dataclass
    class Batch:
        x: torch.Tensor
        row: torch.Tensor

    loader = make_loader(rows, 8, transform=lambda batch: Batch(**batch), device="meta", num_threads=0)
    assert next(iter(loader)).x.device.type == "meta"


def test_compiled_model(rows):
    """A compiled step over batches of one size (`drop_last`)."""
    model, optimizer = parts()

    def loss(model, batch):
        return model(batch["x"][:, None]).square().mean()

    options = {"compile": {"backend": "eager"}, "epochs": 1, "progress": False}
    assert fit(model, optimizer, make_loader(rows, 8, drop_last=True), loss, **options)[0]["rows"] == 72
