"""Whole programs: scripts with functions of their own, start methods, ranks, configs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tiny import sentences

SCRIPT = """
import multiprocessing, sys
import torch
from dataload import make_dataset, make_loader

LETTERS = {letter: number for number, letter in enumerate(" abcdefghijklmnopqrstuvwxyz")}

def encode(batch):
    return {"ids": [[LETTERS[letter] for letter in text] for text in batch["text"]], "row": batch["row"]}

def pad(batch):
    return {"ids": torch.nn.utils.rnn.pad_sequence(batch["ids"], batch_first=True), "row": batch["row"]}

def main():
    path, method, processes = sys.argv[1:]
    rows = make_dataset(path).map(encode, processes=int(processes) or None)
    options = {"multiprocessing_context": method, "num_workers": 2} if method != "none" else {}
    loader = make_loader(rows, 8, transform=pad, **options)
    print(sorted(int(row) for batch in loader for row in batch["row"]) == list(range(40)), loader.stats().rows)

MAIN
"""


def run(tmp_path, script, *arguments):
    program = tmp_path / "program.py"
    program.write_text(script)
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_script_with_workers(write, tmp_path, method):
    """`map` and a transform of functions in a script, with workers of each start method."""
    path = write({"text": sentences(40), "row": range(40)})
    script = SCRIPT.replace("MAIN", 'if __name__ == "__main__":\n    main()')
    done = run(tmp_path, script, path, method, "0")
    assert done.stdout == "True 40\n"
    assert "Traceback" not in done.stderr


def test_a_script_without_a_main_guard(write, tmp_path):
    """A notebook-style script: everything at module level, `map` in processes."""
    path = write({"text": sentences(40), "row": range(40)})
    done = run(tmp_path, SCRIPT.replace("MAIN", "main()"), path, "none", "2")
    assert done.stdout == "True 40\n"
    assert "Traceback" not in done.stderr


NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in sys.argv[2].split("#%%"):
    shell.run_cell(cell.replace("PATH", repr(sys.argv[1])), store_history=True).raise_error()
"""
CELLS = """
from dataload import make_dataset, make_loader
def lengths(batch):
    return {"length": [len(text) for text in batch["text"]], "row": batch["row"]}
#%%
rows = make_dataset(PATH).map(lengths, processes=2)
loader = make_loader(rows, 8, transform=lambda batch: batch, num_workers=1)
print(sum(len(batch["row"]) for batch in loader))
#%%
def lengths(batch):
    return {"length": [2 * len(text) for text in batch["text"]], "row": batch["row"]}
print(int(make_dataset(PATH).map(lengths)[0]["length"]) == 2 * int(rows[0]["length"]))
"""


def test_cells_of_a_notebook(write, tmp_path):
    """Functions of cells in `map`, processes and workers; an edited cell gives new rows."""
    pytest.importorskip("IPython", reason="needs IPython")
    path = write({"text": sentences(40), "row": range(40)})
    assert run(tmp_path, NOTEBOOK, path, CELLS).stdout == "40\nTrue\n"


RANKS = """
import json, os, sys
import torch.multiprocessing as mp
from dataload import World, make_dataset, make_loader

def train(rank, path):
    loader = make_loader(path, 4, world=World(rank, 2))
    rows = [int(row) for batch in loader for row in batch["row"]]
    open(f"{rank}.json", "w").write(json.dumps(rows))

if __name__ == "__main__":
    mp.spawn(train, args=(sys.argv[1],), nprocs=2)
    found = [json.load(open(f"{rank}.json")) for rank in range(2)]
    print(sorted(found[0] + found[1]) == list(range(40)), len(found[0]))
"""


def test_ranks_by_spawn(write, tmp_path):
    """`torch.multiprocessing.spawn` of two ranks with `world=`: each row once."""
    assert run(tmp_path, RANKS, write({"row": range(40)})).stdout == "True 20\n"


TRAINER = """
import json, os, sys
import torch
from transformers import Trainer, TrainingArguments
from dataload import make_dataset

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows = []

    def forward(self, row):
        self.rows.append(row.tolist())
        return {"loss": self.layer(row[:, None].float() / 40).square().mean()}

model = Model()
options = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none"}
arguments = TrainingArguments("out", disable_tqdm=True, dataloader_num_workers=1, **options)
Trainer(model, arguments, train_dataset=make_dataset(sys.argv[1])).train()
open(f"rank{os.environ['RANK']}.json", "w").write(json.dumps(model.rows))
"""


def test_trainer_on_two_ranks(write, tmp_path):
    """The Trainer of Hugging Face over our dataset on two ranks: sharded once, batches of the size asked for."""
    import json

    (tmp_path / "program.py").write_text(TRAINER)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(tmp_path / "program.py"), write({"row": range(40)})]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [[len(batch) for batch in batches] for batches in ranks] == [[4] * 5] * 2
    assert sorted(row for batches in ranks for batch in batches for row in batch) == list(range(40))


SFT = """
import json, os, sys
import datasets
from tiny import inputs_of, llama, quiet, tokenizer
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from dataload import make_dataset, make_loader

model, tokens, rows = llama(), tokenizer(), make_dataset(sys.argv[1])
seen = inputs_of(model)
args = SFTConfig(**quiet(num_train_epochs=1, per_device_train_batch_size=4, gradient_accumulation_steps=2))
loader = make_loader(rows, 4, collate_fn=DataCollatorForLanguageModeling(0))

class RowTrainer(SFTTrainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(loader)

sample = datasets.Dataset.from_list(rows.__getitems__([0]))
RowTrainer(model, args, train_dataset=sample, processing_class=tokens).train()
found = [row[row != 0].tolist() for batch in seen for row in batch]
open(f"rank{os.environ['RANK']}.json", "w").write(json.dumps(found))
"""


def test_sft_on_two_ranks(write, tmp_path):
    """SFTTrainer over our loader on two ranks, with accumulation: each row once."""
    import json
    from pathlib import Path

    rows = [[5 + row % 40] * (2 + row // 40) for row in range(60)]
    (tmp_path / "program.py").write_text(SFT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent / "support"), os.environ.get("PYTHONPATH")]))
    command = [*launcher, str(tmp_path / "program.py"), write({"input_ids": rows})]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [len(each) for each in ranks] == [30, 30]
    assert sorted(ranks[0] + ranks[1]) == sorted(rows)


def test_a_config_of_omegaconf(write, cache):
    """Lists and dicts of an OmegaConf config, wherever lists and dicts are taken."""
    from omegaconf import OmegaConf

    from dataload import make_loader

    paths = [write({"row": range(20), "a": [0.5] * 20, "b": [1.5] * 20}, name) for name in ("one", "two")]
    config = OmegaConf.create(
        {
            "source": paths,
            "columns": ["row", "a", "b"],
            "filters": [["row", "<", 10]],
            "group": {"x": ["a", "b"]},
            "batch_size": 4,
            "seed": 1,
        }
    )
    loader = make_loader(**config, cache=cache)
    batches = [*loader]
    assert sum(len(batch["row"]) for batch in batches) == 20
    assert batches[0]["x"].shape == (4, 2)
    loader.state_dict()


def test_settings_of_pydantic(write, cache):
    """A function of `map` with settings of pydantic: changed settings give new rows."""
    from pydantic import BaseModel

    from dataload import make_dataset

    class Settings(BaseModel):
        factor: int = 2

    rows = make_dataset(write({"row": range(20)}), cache=cache)

    def scaled(factor):
        settings = Settings(factor=factor)
        return rows.map(lambda batch: {"row": batch["row"] * settings.factor})

    assert [int(scaled(factor)[3]["row"]) for factor in (2, 5)] == [6, 15]
