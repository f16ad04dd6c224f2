"""A small regression in float64, on loaders whose t-th batch over all ranks is the t-th run of rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dataload.train.harness import fit
from dataload.world import World


class Rows(Dataset):
    """A dataset of rows as dicts."""

    def __init__(self, num_rows=40, fingerprint=None):
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_rows, 3, generator=draw, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True) ** 2
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i], "name": f"row {i}"}


def in_order(batch_size, num_rows=40, **kwargs):
    world = World.detect()
    dataset = Rows(num_rows, **kwargs)
    sampler = DistributedSampler(dataset, world.world_size, world.rank, shuffle=False)
    return DataLoader(dataset, batch_size, sampler=sampler)


def build(dropout=0.0):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def squared_error(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def parameters_of(model):
    """Return all parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train_in_order(batch_size, num_rows=40, epochs=2, **options):
    """Return the parameters of a new model after training on rows in order."""
    model, optimizer = build()
    loader = in_order(batch_size, num_rows)
    fit(model, optimizer, loader, squared_error, epochs=epochs, precision="fp32", progress=False, **options)
    return parameters_of(model)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
