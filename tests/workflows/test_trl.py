"""TRL: its collators over our rows, and its trainers over a loader of ours."""

from __future__ import annotations

import datasets
import pytest
import torch
from tiny import inputs_of, llama, quiet, sentences, tokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.reward_trainer import DataCollatorForPreference as DataCollatorForRewards
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from dataload import fit, make_dataset, make_loader

ROWS = 40
tokens = tokenizer()


def with_template(batch):
    """Apply the chat template. The loss ignores all tokens but those of the assistant."""
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    chats = [tokens.apply_chat_template(messages, **options) for messages in batch["messages"]]
    pairs = [list(zip(chat["input_ids"], chat["assistant_masks"], strict=True)) for chat in chats]
    labels = [[token if said else -100 for token, said in pair] for pair in pairs]
    return {"input_ids": [chat["input_ids"] for chat in chats], "labels": labels}


def tokenize_pairs(batch):
    """Tokenize a prompt and its two answers."""
    return {f"{name}_ids": tokens(batch[name]).input_ids for name in ("prompt", "chosen", "rejected")}


@pytest.fixture
def chats(write, cache):
    asked, said = sentences(ROWS), sentences(2 * ROWS)[::2]
    roles = ("user", "assistant")
    messages = [
        [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]
        for pair in zip(asked, said, strict=True)
    ]
    return make_dataset(write({"messages": messages}), cache=cache).map(with_template)


@pytest.fixture
def texts(write, cache):
    columns = {"prompt": sentences(ROWS), "chosen": sentences(ROWS)[::-1], "rejected": sentences(2 * ROWS)[ROWS:]}
    return make_dataset(write(columns), cache=cache)


def unpadded(rows):
    return sorted(row[row != 0].tolist() for row in rows)


def test_chat_messages_with_a_loss_on_the_assistant(chats):
    """Messages become tokens in `map`, TRL's collator pads them, and `fit(loss_weight=…)` weighs by tokens."""
    loader = make_loader(chats, 8, collate_fn=DataCollatorForLanguageModeling(tokens.pad_token_id))
    batch = next(iter(loader))
    assert (batch["labels"] == -100).any()
    model = llama()

    def loss(model, batch):
        return model(**batch).loss

    def predicted(batch):
        return (batch["labels"][:, 1:] != -100).sum()

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"epochs": 4, "accumulate": 2, "loss_weight": predicted, "progress": False}
    history = fit(model, optimizer, loader, loss, **options)
    assert history[-1]["loss"] < history[0]["loss"]


def test_sft_trainer(chats):
    """SFTTrainer over our loader: each row once an epoch, with labels as `map` made them."""
    model = llama()
    seen = inputs_of(model)
    loader = make_loader(chats, 8, collate_fn=DataCollatorForLanguageModeling(tokens.pad_token_id))

    class RowTrainer(SFTTrainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(loader)

    sample = datasets.Dataset.from_list(chats.__getitems__([0]))  # a row in the type that TRL asks for
    args = SFTConfig(**quiet(num_train_epochs=1, per_device_train_batch_size=8))
    trainer = RowTrainer(model, args, train_dataset=sample, processing_class=tokens)
    assert trainer.train().global_step == 5
    assert [len(batch) for batch in seen] == [8] * 5
    rows = chats.__getitems__(range(ROWS))
    assert unpadded(row for batch in seen for row in batch) == sorted(row["input_ids"] for row in rows)


def test_dpo_trainer(texts):
    """DPOTrainer over our loader of tokenized pairs: each pair once an epoch."""
    model = llama()
    seen = inputs_of(model)
    pairs = texts.map(tokenize_pairs)
    loader = make_loader(pairs, 8, collate_fn=DataCollatorForPreference(tokens.pad_token_id))

    class PairTrainer(DPOTrainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(loader)

    sample = datasets.Dataset.from_list(texts.__getitems__([0]))  # a row of texts in the type that TRL asks for
    args = DPOConfig(**quiet(num_train_epochs=1, per_device_train_batch_size=8))
    trainer = PairTrainer(model, llama(), args, train_dataset=sample, processing_class=tokens)
    assert trainer.train().global_step == 5
    found = unpadded(row for batch in seen if len(batch) == 16 for row in batch[:8])
    rows = pairs.__getitems__(range(ROWS))
    assert found == sorted(row["prompt_ids"] + row["chosen_ids"] for row in rows)


@pytest.mark.limit("TRL takes its own type only: override `get_train_dataloader`, and pass a sample of one row")
@pytest.mark.parametrize(("trainer", "config"), [(SFTTrainer, SFTConfig), (DPOTrainer, DPOConfig)])
def test_trl_is_given_our_dataset(texts, trainer, config):
    """A trainer of TRL takes datasets of Hugging Face only, and says so: the guide on trainers has the recipe."""
    with pytest.raises(TypeError, match="must be a `Dataset` or `IterableDataset`"):
        trainer(llama(), args=config(**quiet()), train_dataset=texts, processing_class=tokens)


def test_sft_trainer_over_row_numbers(chats):
    """A Hugging Face dataset of row numbers, whose transform reads our rows: TRL shuffles and shards it."""

    def read(batch):
        rows = chats.__getitems__(batch["row"])
        return {name: [row[name] for row in rows] for name in rows[0]}

    numbers = datasets.Dataset.from_dict({"row": range(ROWS)}).with_transform(read)
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    args = SFTConfig(**quiet(num_train_epochs=1, per_device_train_batch_size=8, **options))
    assert SFTTrainer(llama(), args, train_dataset=numbers, processing_class=tokens).train().global_step == 5


def test_preferences_by_hand(texts):
    """TRL's collator of preferences joins the prompts and answers of our rows."""
    pairs = texts.map(tokenize_pairs)
    batch = next(iter(make_loader(pairs, 8, shuffle=False, collate_fn=DataCollatorForPreference(0))))
    rows = pairs.__getitems__(range(8))
    assert unpadded(batch["input_ids"][:8]) == sorted(row["prompt_ids"] + row["chosen_ids"] for row in rows)
    assert batch["completion_mask"][0].sum() == len(rows[0]["chosen_ids"])


def test_reward_pairs(texts):
    """TRL's collator of reward models over our rows."""

    def answers(batch):
        return {f"{name}_ids": tokens(batch[name]).input_ids for name in ("chosen", "rejected")}

    loader = make_loader(texts.map(answers), 8, collate_fn=DataCollatorForRewards(0))
    assert sum(len(batch["input_ids"]) for batch in loader) == 2 * ROWS


def test_unpaired_preferences(texts):
    """TRL's collator of KTO: one answer for each prompt, and whether it is good."""
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    def judged(batch):
        ids = {
            f"{name}_ids": tokens(batch[text]).input_ids
            for name, text in (("prompt", "prompt"), ("completion", "chosen"))
        }
        return {**ids, "label": torch.tensor([len(text) % 2 == 0 for text in batch["chosen"]])}

    rows = texts.map(judged)
    batch = next(iter(make_loader(rows, 8, shuffle=False, collate_fn=DataCollatorForUnpairedPreference(0))))
    first = rows[0]
    joined = [*first["prompt_ids"].tolist(), *first["completion_ids"].tolist()]
    assert batch["input_ids"][0, : len(joined)].tolist() == joined


@pytest.mark.parametrize("padding_free", [False, True])
def test_language_modeling_of_trl(chats, padding_free):
    """TRL's collator for language models: padded, and padding-free as one packed sequence."""
    collator = DataCollatorForLanguageModeling(0, padding_free=padding_free)
    batch = next(iter(make_loader(chats, 8, shuffle=False, collate_fn=collator)))
    assert len(batch["input_ids"]) == (1 if padding_free else 8)
    assert (batch["input_ids"] != 0).sum() == sum(len(row["input_ids"]) for row in chats.__getitems__(range(8)))
