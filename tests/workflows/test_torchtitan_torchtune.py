"""The data parts of torchtitan and torchtune, with our loader and our dataset in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch.distributed.checkpoint as dcp
from torchtitan.components.dataloader import BaseDataLoader

from dataload import World, make_loader


class RowLoader(BaseDataLoader):
    """What a config of torchtitan names as its dataloader."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        column: str = "tokens"

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **kwargs):
        self.column = config.column
        self.loader = make_loader(config.dataset_path, local_batch_size, world=World(dp_rank, dp_world_size))

    def __iter__(self):
        while True:
            for batch in self.loader:
                tokens = batch[self.column].long()
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self):
        return {"loader": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state):
        self.loader.load_state_dict(json.loads(state["loader"]))


def test_torchtitan(write, tmp_path):
    """A dataloader of torchtitan's config: shards by its ranks, and resumes from its checkpoint."""
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(40 * 5, dtype=np.int32)), 5)
    config = RowLoader.Config(dataset_path=write({"tokens": tokens}))
    ranks = [config.build(dp_world_size=2, dp_rank=rank, local_batch_size=4, seq_len=4) for rank in range(2)]
    epochs = [iter(rank) for rank in ranks]
    first = [[next(epoch) for _ in range(5)] for epoch in epochs]
    starts = sorted(int(row[0]) for rank in first for batch, _ in rank for row in batch["input"])
    assert starts == list(range(0, 200, 5))
    following = [next(epochs[0]) for _ in range(2)]
    dcp.save({"dataloader": ranks[0]}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    expected = next(epochs[0])
    again = config.build(dp_world_size=2, dp_rank=0, local_batch_size=4, seq_len=4)
    dcp.load({"dataloader": again}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    found = next(iter(again))
    assert found[0]["input"].tolist() == expected[0]["input"].tolist()
    assert following[0][1].tolist() != following[1][1].tolist()


TORCHTUNE = """
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torchtune
from omegaconf import OmegaConf
from torchtune.models.llama2 import llama2

from dataload import make_dataset


def tokenize(batch):
    tokens = [[len(word) for word in text.split()] for text in batch["text"]]
    return {"tokens": tokens, "labels": tokens}


def documents(tokenizer, *, source):
    return make_dataset(source).map(tokenize)


recipes = Path(torchtune.__file__).parent.parent / "recipes"
Recipe = runpy.run_path(str(recipes / "full_finetune_single_device.py"))["FullFinetuneRecipeSingleDevice"]
recipe = SimpleNamespace(_tokenizer=SimpleNamespace(pad_id=0), _loss_fn=SimpleNamespace(ignore_index=-100))
config = OmegaConf.create({"_component_": "__main__.documents", "source": sys.argv[1]})
loader = Recipe._setup_data(recipe, config, True, 8, "torchtune.data.padded_collate_sft")
model = llama2(vocab_size=32, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=64)
rows = 0
for batch in loader:
    logits = model(batch["tokens"])
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"])
    loss.backward()
    rows += len(batch["tokens"])
print("rows", rows)
"""


@pytest.mark.limit("torchtune 0.6.1, its last release, imports with torchao < 0.14 only")
def test_torchtune(write, tmp_path):
    """`dataset: {_component_: module.function}` of a config returns our dataset: torchtune's own loader reads it."""
    old = Path(sys.prefix) / "torchao-for-torchtune" / "site-packages"
    if not old.is_dir():
        pytest.skip("needs the torchao of torchtune, which `make workflows` installs")
    (tmp_path / "program.py").write_text(TORCHTUNE)
    from tiny import sentences

    command = [sys.executable, "program.py", write({"text": sentences(40)})]
    paths = os.pathsep.join(filter(None, [str(old), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=200)
    assert "rows 40" in done.stdout, done.stderr
