"""The state of objects of well-known libraries, none of which is imported for it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sized
from contextlib import suppress
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
_SHORT = 100  # members of a collection that is compared each time
MOST_BYTES = 16 << 20  # of an array; a larger one takes long to hash
_WHOLE_BYTES = 1 << 20  # of a tensor that is hashed each time; a model has hundreds
_SPREAD = 256  # parts of a large object that are compared each time
_GRAD_MODE, _GRAD_MODES = "torch.autograd.grad_mode", ("no_grad", "enable_grad", "set_grad_enabled", "inference_mode")
_BY_ATTRIBUTES = ("torchvision.", "transformers.")


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
    if is_data or f"{kind.__module__}.".startswith(_BY_ATTRIBUTES):
        return _attributes_of(value)
    return None


def stamp_of(value: Any) -> bytes | None:
    """Return what changes in this process with an object whose state takes long to read; None for other objects.

    Identities are compared each time that a blob is cached. Of a large object, a sample is compared.
    """
    if is_plain_tensor(value):
        return _stamp_of_tensor(value)
    if _is_a(value, "tokenizers", "Tokenizer"):
        return repr((_parts_of(value), value.padding, value.truncation)).encode()
    if (backend := _backend_of(value)) is not None:
        state = {name: each for name, each in vars(value).items() if name not in _NOT_COUNTED and _is_short(each)}
        return repr((state, len(value), _parts_of(backend))).encode()
    return None


def _stamp_of_tensor(tensor: Any) -> bytes | None:
    with suppress(RuntimeError):  # such as of a sparse one
        if tensor.nbytes > _WHOLE_BYTES and not tensor.is_inference():
            some = tensor.detach().reshape(-1)[:: tensor.numel() // _SPREAD].tolist()
            return repr((tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, some)).encode()  # noqa: SLF001
    return None


def _backend_of(value: Any) -> Any:
    """Return the tokenizer in Rust of a fast tokenizer of transformers; None for other objects."""
    is_tokenizer = _is_a(value, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase")
    return getattr(value, "backend_tokenizer", None) if is_tokenizer else None


def _parts_of(tokenizer: Any) -> list[Any]:
    """Return the parts of a fast tokenizer, of its model the settings and a sample of the vocabulary."""
    parts = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor, tokenizer.decoder
    model, size = tokenizer.model, tokenizer.get_vocab_size()
    settings = {name: getattr(model, name) for name in dir(model) if not name.startswith("_")}
    shown = {name: each for name, each in settings.items() if not callable(each)}
    words = [tokenizer.id_to_token(number) for number in range(0, size, max(1, size // _SPREAD))]
    return [*(part and part.__getstate__() for part in parts), type(model), shown, size, words]


def _is_short(value: Any) -> bool:
    return not isinstance(value, Sized) or isinstance(value, str) or len(value) < _SHORT


def _is_a(value: Any, module: str, name: str) -> bool:
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return isinstance(kind, type) and isinstance(value, kind)


def _attributes_of(value: Any) -> dict[str, Any]:
    fields = [each.name for each in getattr(type(value), "__attrs_attrs__", ())]
    fields += getattr(type(value), "__dataclass_fields__", ())
    fields += ("__pydantic_extra__", "__pydantic_private__")
    found = {name: getattr(value, name) for name in fields if getattr(value, name, None) is not None}
    return found | getattr(value, "__dict__", {})


def _slots_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__slots__ if not name.startswith("_")}


def _state_of_tokenizer(value: Any) -> dict[str, Any]:
    """Return vocabulary and settings. Calls of a fast tokenizer set truncation and padding anew, whatever they were."""
    backend = _backend_of(value)
    state = {name: each for name, each in vars(value).items() if name not in _NOT_COUNTED and each is not backend}
    state["added tokens"] = repr(value.added_tokens_decoder)
    if backend is not None:
        content = json.loads(backend.to_str())
        state["json"] = json.dumps({name: content[name] for name in content.keys() - _SET_BY_CALLS}, sort_keys=True)
    return state


def _state_of_module(value: Any) -> dict[str, Any]:
    """Return what differs from a module without anything: parameters, buffers, modules, hooks and other attributes."""
    import torch  # which is there already

    usual = vars(torch.nn.Module())
    state = {name: each for name, each in vars(value).items() if name not in usual or each != usual[name]}
    hooks = {name: each for name, each in state.items() if name in usual and "hooks" in name}
    keys = sorted(key for each in hooks.values() for key in each)  # They count up in a process.
    return state | {name: {keys.index(key): hook for key, hook in each.items()} for name, each in hooks.items()}


_KINDS: list[tuple[str, str, Callable[[Any], dict[str, Any]]]] = [
    ("tokenizers", "Tokenizer", lambda value: {"json": value.to_str()}),
    ("tokenizers", "AddedToken", lambda value: {"shown": repr(value)}),
    ("regex", "Pattern", lambda value: {"pattern": value.pattern, "flags": value.flags, "lists": value.named_lists}),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", _state_of_tokenizer),
    ("sentencepiece", "SentencePieceProcessor", lambda value: {"model": value.serialized_model_proto()}),
    ("torch", "device", lambda value: {"device": str(value)}),
    *((_GRAD_MODE, name, lambda value: {"mode": getattr(value, "mode", None)}) for name in _GRAD_MODES),
    ("argparse", "Namespace", vars),
    ("string", "Template", vars),
    ("types", "SimpleNamespace", vars),
    *(("attr", name, _slots_of) for name in ("Attribute", "Converter", "Factory")),
    ("typing", "ForwardRef", lambda value: {"name": value.__forward_arg__}),
    ("typing", "NewType", lambda value: {"name": value.__name__, "type": value.__supertype__}),
    ("typing", "TypeVar", lambda value: {"name": value.__name__}),
    ("torch.nn", "Module", _state_of_module),
]
