"""Small models with random weights, and a tokenizer of a few words: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "sky",
    "is",
    "blue",
    "green",
    "yes",
    "no",
]
WORDS += ["because", "user", "assistant"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + ' [SEP] ' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' [SEP] ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words. more: further ones."""
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS, *more])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named: dict[str, Any] = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **named, eos_token="[SEP]", bos_token="[CLS]")
    fast.chat_template = TEMPLATE
    return fast


def sentences(number: int) -> list[str]:
    """Return sentences of two to nine words, each a function of its number."""
    return [" ".join(WORDS[(row * 7 + word * word) % 17] for word in range(2 + row % 8)) for row in range(number)]


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    return GPT2LMHeadModel(GPT2Config(**size, **tokens, **changes))


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    size |= {"intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**size, **tokens, **changes))


def quiet(**options: Any) -> dict[str, Any]:
    """Return arguments of a trainer of Hugging Face that writes nothing but checkpoints."""
    return {"output_dir": "out", "report_to": "none", "disable_tqdm": True, "use_cpu": True, **options}


def inputs_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a list that gets the `input_ids` of each forward."""
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, __, named: seen.append(named["input_ids"]), with_kwargs=True)
    return seen
