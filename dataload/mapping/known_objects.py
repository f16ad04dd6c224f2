"""The state of objects of well-known libraries, none of which is imported for it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_DEVICE = re.compile(r"(cpu|cuda|hpu|mps|npu|xpu)(:\d+)?")
# Attributes of a transformers tokenizer that a call sets, that name where it was loaded from, or that its content has.
_NOT_COUNTED = frozenset(
    {
        *("_in_target_context_manager", "cache", "deprecation_warnings", "verbose"),
        *("files_loaded", "init_inputs", "init_kwargs", "name_or_path", "vocab_file"),
        *("_added_tokens_decoder", "_added_tokens_encoder", "tokens_trie"),
    }
)
_SET_BY_CALLS = {"truncation", "padding"}
_SHORT = 100  # members of a dict that is compared each time


def is_device(value: Any) -> bool:
    """Return whether a value names a device of torch, with or without a number."""
    if isinstance(value, str):
        return _DEVICE.fullmatch(value) is not None
    return _is_a(value, "torch", "device")


def is_plain_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or a parameter, and of no other subclass, which may have more state."""
    return _is_a(value, "torch", "Tensor") and type(value).__name__ in ("Tensor", "Parameter", "Buffer")


def state_of(value: Any) -> dict[str, Any] | None:
    """Return the state of an object that gives its results, by names; None for an object of an unknown kind."""
    for module, name, state in _KINDS:
        if _is_a(value, module, name):
            return state(value)
    kind = type(value)
    is_data = dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or hasattr(kind, "__pydantic_fields__")
    if is_data or f"{kind.__module__}.".startswith("torchvision."):
        return _attributes_of(value)
    return None


def stamp_of(value: Any) -> bytes | None:
    """Return what changes in this process with an object whose state takes long to read; None for other objects.

    Identities are compared each time that a blob is cached.
    """
    if is_plain_tensor(value) and not value.is_inference() and not value.is_sparse:
        return repr((value.data_ptr(), value._version, value.dtype, value.shape)).encode()  # noqa: SLF001 (autograd's)
    if _is_a(value, "tokenizers", "Tokenizer"):
        return repr((_parts_of(value), value.padding, value.truncation)).encode()
    if _is_a(value, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase"):
        state = {name: each for name, each in vars(value).items() if name not in _NOT_COUNTED and _is_short(each)}
        backend = getattr(value, "backend_tokenizer", None)
        return repr((state, len(value), None if backend is None else _parts_of(backend))).encode()
    return None


def _parts_of(tokenizer: Any) -> list[Any]:
    """Return the parts of a fast tokenizer besides its model, and the size of its vocabulary."""
    parts = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor, tokenizer.decoder
    return [*(part and part.__getstate__() for part in parts), tokenizer.get_vocab_size()]


def _is_short(value: Any) -> bool:
    return isinstance(value, (type(None), bool, int, float, str)) or (isinstance(value, dict) and len(value) < _SHORT)


def _is_a(value: Any, module: str, name: str) -> bool:
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return isinstance(kind, type) and isinstance(value, kind)


def _attributes_of(value: Any) -> dict[str, Any]:
    fields = [each.name for each in getattr(type(value), "__attrs_attrs__", ())]
    fields += getattr(type(value), "__dataclass_fields__", ())
    fields += ("__pydantic_extra__", "__pydantic_private__")
    found = {name: getattr(value, name) for name in fields if getattr(value, name, None) is not None}
    return found | getattr(value, "__dict__", {})


def _state_of_tokenizer(value: Any) -> dict[str, Any]:
    """Return vocabulary and settings. Calls of a fast tokenizer set truncation and padding anew, whatever they were."""
    plain = (type(None), bool, int, float, str, tuple, list, dict)
    state = {name: each for name, each in vars(value).items() if name not in _NOT_COUNTED}
    shown = {name: repr(each) for name, each in state.items() if isinstance(each, plain)}
    shown |= {"added tokens": repr(value.added_tokens_decoder)}
    if (backend := getattr(value, "backend_tokenizer", None)) is not None:
        content = json.loads(backend.to_str())
        counting = {name: content[name] for name in content.keys() - _SET_BY_CALLS}
        return {**shown, "json": json.dumps(counting, sort_keys=True)}
    pieces = [each for each in state.values() if _is_a(each, "sentencepiece", "SentencePieceProcessor")]
    return {**shown, "vocabulary": repr(sorted(value.get_vocab().items())), "pieces": pieces}


def _state_of_module(value: Any) -> dict[str, Any]:
    """Return what differs from a module without anything: parameters, buffers, modules, hooks and other attributes."""
    import torch  # which is there already

    usual = vars(torch.nn.Module())
    state = {name: each for name, each in vars(value).items() if name not in usual or each != usual[name]}
    # The keys of hooks count up in a process.
    return {name: [*each.values()] if isinstance(each, OrderedDict) else each for name, each in state.items()}


_KINDS: list[tuple[str, str, Callable[[Any], dict[str, Any]]]] = [
    ("tokenizers", "Tokenizer", lambda value: {"json": value.to_str()}),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", _state_of_tokenizer),
    ("sentencepiece", "SentencePieceProcessor", lambda value: {"model": value.serialized_model_proto()}),
    ("torch", "device", lambda value: {"device": str(value)}),
    ("torch.nn", "Module", _state_of_module),
]
