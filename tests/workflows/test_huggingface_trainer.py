"""The Trainer of Hugging Face: over a dataset of ours, and over a loader."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from tiny import gpt2, quiet, sentences, tokenizer
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dataload import make_dataset, make_loader

ROWS = 70


class Classifier(nn.Module):
    """A model that records the rows that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 3)
        self.trained: list[list[int]] = []

    def forward(self, x: Any, row: Any, labels: Any) -> dict[str, Any]:
        if self.training:
            self.trained.append(row.tolist())
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture
def dataset(write: Any, cache: Any) -> Any:
    x = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
    columns = {"x": list(x), "row": range(ROWS), "labels": np.arange(ROWS) % 3}
    import pyarrow as pa

    table = pa.table(columns).set_column(0, "x", pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 2))
    return make_dataset(write(table), cache=cache)


class RowTrainer(Trainer):
    """The Trainer over loaders."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(eval_dataset or self.eval_dataset)


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer_over_a_dataset(dataset: Any, workers: int) -> None:
    """`train_dataset` is our dataset: each row once an epoch, in batches of the size asked for."""
    model = Classifier()
    options = quiet(per_device_train_batch_size=8, num_train_epochs=2, dataloader_num_workers=workers)
    trainer = Trainer(model, TrainingArguments(**options), train_dataset=dataset)
    trainer.train()
    assert [len(batch) for batch in model.trained] == [8] * 8 + [6] + [8] * 8 + [6]
    epochs = [list(chain(*model.trained[:9])), list(chain(*model.trained[9:]))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS))
    assert epochs[0] != epochs[1]


def test_trainer_over_a_dataset_evaluates_and_resumes(dataset: Any) -> None:
    """`eval_dataset` as well, and a run that resumes from a checkpoint ends in the same weights."""

    def run(**resume: Any) -> tuple[Classifier, Trainer]:
        model = Classifier()
        options = quiet(per_device_train_batch_size=8, num_train_epochs=2, save_steps=5, eval_strategy="epoch")
        trainer = Trainer(model, TrainingArguments(**options), train_dataset=dataset, eval_dataset=dataset)
        trainer.train(**resume)
        return model, trainer

    whole, trainer = run()
    assert any("eval_loss" in line for line in trainer.state.log_history)
    resumed, _ = run(resume_from_checkpoint="out/checkpoint-5")
    assert resumed.trained == whole.trained[5:]
    torch.testing.assert_close(resumed.layer.weight, whole.layer.weight)


def test_trainer_over_a_loader_evaluates_and_resumes(dataset: Any) -> None:
    """The loader's order, by `get_train_dataloader`; a resumed run has the rest of the epoch."""

    def run(**resume: Any) -> tuple[Classifier, Trainer]:
        model = Classifier()
        options = quiet(per_device_train_batch_size=8, num_train_epochs=2, save_steps=5, eval_strategy="epoch")
        loader = make_loader(dataset, 8)
        held_out = make_loader(dataset, 8, shuffle=False)
        trainer = RowTrainer(model, TrainingArguments(**options), train_dataset=loader, eval_dataset=held_out)
        trainer.train(**resume)
        return model, trainer

    whole, trainer = run()
    assert any("eval_loss" in line for line in trainer.state.log_history)
    resumed, _ = run(resume_from_checkpoint="out/checkpoint-5")
    assert resumed.trained == whole.trained[5:]
    assert sorted(chain(*whole.trained[9:])) == list(range(ROWS))


def test_trainer_pads_our_rows(write: Any, cache: Any) -> None:
    """A collator of transformers over our dataset in the Trainer, with columns that the model does not take."""
    made = tokenizer()

    def tokenize(batch: Any) -> Any:
        ids = made(batch["text"])["input_ids"]
        return {"input_ids": [np.array(each) for each in ids], "number": batch["number"]}

    path = write({"text": sentences(64), "number": range(64)})
    rows = make_dataset(path, cache=cache).map(tokenize)
    losses: list[float] = []

    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    options = quiet(per_device_train_batch_size=8, num_train_epochs=4, learning_rate=3e-2, logging_steps=8)
    arguments = TrainingArguments(**options)
    collator = DataCollatorForLanguageModeling(made, mlm=False)
    trainer = Trainer(gpt2(), arguments, train_dataset=rows, data_collator=collator)
    trainer.add_callback(Losses())
    trainer.train()
    assert losses[-1] < losses[0]


@pytest.mark.limit("a loader is no dataset of rows: return it from `get_train_dataloader`")
def test_trainer_is_given_a_loader(dataset: Any) -> None:
    """Without `get_train_dataloader`, a loader as `train_dataset` is an error that says what to write."""
    trainer = Trainer(Classifier(), TrainingArguments(**quiet()), train_dataset=make_loader(dataset, 8))
    with pytest.raises(TypeError, match="get_train_dataloader"):
        trainer.train()


def test_trainer_with_lora(write: Any, cache: Any) -> None:
    """Adapters of peft train on our rows, and nothing else does."""
    from peft import LoraConfig, get_peft_model

    made = tokenizer()
    path = write({"input_ids": made(sentences(32))["input_ids"]})
    model = get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    before = {name: value.clone() for name, value in model.named_parameters()}
    Trainer(
        model,
        TrainingArguments(**quiet(per_device_train_batch_size=8, num_train_epochs=1)),
        train_dataset=make_dataset(path, cache=cache),
        data_collator=DataCollatorForLanguageModeling(made, mlm=False),
    ).train()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora" in name for name in changed)
