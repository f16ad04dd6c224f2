"""Ranks that run accelerate with a dataload loader and write the rows of each step to a JSON file.

accelerate_rank.py FOLDER_OF_PARQUET OUTPUT_FOLDER
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from forked import rank_of_this_process

from dataload import World, make_dataset, make_loader, mix
from dataload.errors import ConfigError

folder, out = sys.argv[1], Path(sys.argv[2])
rank = rank_of_this_process()
seen = {}
dataset = make_dataset(folder, cache=False)
COLUMN = "row_id"


def accelerator_of(**config):
    plugin = GradientAccumulationPlugin(num_steps=4)
    return Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(**config), gradient_accumulation_plugin=plugin
    )


def rows_of(batches):
    return [row for batch in batches for row in batch[COLUMN].tolist()]


seen["once"], seen["itself"] = {}, []
for split, even, stateful in itertools.product([False, True], repeat=3):
    accelerator = accelerator_of(split_batches=split, even_batches=even, use_stateful_dataloader=stateful)
    loader = make_loader(dataset, 16)
    prepared = accelerator.prepare(loader)
    seen["itself"].append(prepared is loader)
    gathered = []
    for batch in prepared:
        gathered += accelerator.gather_for_metrics(batch[COLUMN]).tolist()
    seen["once"][f"split={split} even={even} stateful={stateful}"] = gathered

seen["sharded again"] = []
for options in ({}, {"use_seedable_sampler": True}, {"dispatch_batches": True, "put_on_device": True}):
    try:
        seen["sharded again"].append(rows_of(prepare_data_loader(make_loader(dataset, 16), **options)))
    except ConfigError as error:
        seen["sharded again"].append(str(error))

# A resumed epoch and one that drops its tail have a different padding from a whole epoch.
loader = accelerator.prepare(make_loader(dataset, 16))
loader.load_state_dict({**loader.state_dict(), "cursor": 101})
seen["from 101"] = [row for batch in loader for row in accelerator.gather_for_metrics(batch[COLUMN]).tolist()]
dropping = accelerator.prepare(make_loader(dataset, 16, drop_last=True))
seen["dropped"] = [row for batch in dropping for row in accelerator.gather_for_metrics(batch[COLUMN]).tolist()]

# Accumulation: the steps that synchronize, with an evaluation in the middle, and after an interrupted loop.
accelerator = accelerator_of()
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
train, evaluation = accelerator.prepare(make_loader(dataset, 16), make_loader(dataset, 100, shuffle=False))
next(iter(train))
seen["nothing active"] = GradientState().active_dataloader is None
steps, alike = [], []
for number, batch in enumerate(train):
    with accelerator.accumulate(model):
        accelerator.backward(model(batch["half"][:, None].float()).mean())
        steps.append(accelerator.sync_gradients)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        weights = accelerator.gather(next(model.parameters()).detach().ravel())
        alike.append(bool((weights == weights[0]).all()))
    if number == 5:
        seen["evaluated"] = sum(len(accelerator.gather_for_metrics(batch[COLUMN])) for batch in evaluation)
seen["synchronised"], seen["weights alike"] = steps, alike

# Save and load in the middle of epoch 1.
whole = make_loader(dataset, 16)
whole.set_epoch(1)
seen["wanted"] = rows_of(whole)
accelerator = accelerator_of()
loader = accelerator.prepare(make_loader(dataset, 16))
loader.set_epoch(1)
batches = iter(loader)
begun = rows_of(itertools.islice(batches, 4))
accelerator.save_state(str(out / "state"))
batches.close()
accelerator.wait_for_everyone()
accelerator = accelerator_of()
loader = accelerator.prepare(make_loader(dataset, 16))
accelerator.load_state(str(out / "state"))
seen["resumed"] = begun + rows_of(loader)
accelerator = accelerator_of()
loader = accelerator.prepare(make_loader(dataset, 16))
accelerator.load_state(str(out / "state"))
seen["resumed and skipped"] = begun + rows_of(skip_first_batches(loader, 4)), rows_of(loader)

# A mixture whose weights are set in an epoch, and its state.
for name in ("mixed", "mixed resumed"):
    mixture = mix([dataset.select(range(100)), dataset.select(range(100, len(dataset)))])
    accelerator = accelerator_of()
    loader = accelerator.prepare(make_loader(mixture, 16))
    if name == "mixed":
        seen["itself"].append(isinstance(loader.dataset, type(mixture)))
        batches = iter(loader)
        begun = [row for batch in itertools.islice(batches, 4) for row in accelerator.gather(batch[COLUMN]).tolist()]
        mixture.set_weights([1, 1])
        accelerator.save_state(str(out / "mixed"))
    else:
        accelerator.load_state(str(out / "mixed"))
        batches = iter(loader)
    rest = [row for batch in batches for row in accelerator.gather_for_metrics(batch[COLUMN]).tolist()]
    seen[name] = begun + rest, rows_of(loader)
    accelerator.wait_for_everyone()

# The Hugging Face Trainer sets the epoch of the batches that it skips, and takes as many batches as there are.
seen["continued"] = []
for workers in (0, 2):
    loader = make_loader(dataset, 16, transform=dict, num_workers=workers)
    list(loader)
    skipping = skip_first_batches(loader, 4)
    skipping.batch_sampler.batch_sampler.set_epoch(1)
    rows = rows_of(itertools.islice(skipping, len(skipping)))
    stats = loader.stats()
    seen["continued"].append([rows, (stats.epoch, stats.rows, stats.batches, stats.rank, stats.world_size)])
    loader.set_epoch(2)
    list(loader)
    seen["continued"][-1].append((loader.stats().epoch, loader.stats().rows))

loader = make_loader(dataset, 16, group={"x": ["half"]})
seen["skipped"] = [batch["x"].ravel().mul(2).int().tolist() for batch in skip_first_batches(loader, 3)]
loader.set_epoch(0)
seen["unskipped"] = [batch["x"].ravel().mul(2).int().tolist() for batch in loader]


def drawn(batch, rng):
    return {"x": (torch.rand(2).tolist(), rng.random())}


seen["drawn"] = []
for workers in (0, 2):
    loader = make_loader(dataset, 16, transform=drawn, num_workers=workers)
    skipped = [batch["x"] for batch in skip_first_batches(loader, 3)]
    loader.set_epoch(0)
    seen["drawn"].append([skipped, [batch["x"] for batch in loader]])

# Batches go to accelerate's device by default. The meta device exists on every machine.
from accelerate.state import PartialState  # noqa: E402

PartialState._shared_state["device"] = torch.device("meta")
seen["device"] = next(iter(make_loader(dataset, 16, world=World())))["half"].device.type
seen["asked for"] = next(iter(make_loader(dataset, 16, world=World(), device="cpu")))["half"].device.type
PartialState._shared_state["device"] = torch.device("cpu")

(out / f"{rank}.json").write_text(json.dumps(seen))
torch.distributed.destroy_process_group()
