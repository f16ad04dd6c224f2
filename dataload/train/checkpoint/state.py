"""The state of a run: random generators, and state trees (nested dicts, lists, tuples), also as JSON."""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dataload.errors import ConfigError

SCALARS = (type(None), bool, int, float, str)
DICTS = {each.__name__: each for each in (dict, OrderedDict, Counter)}
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def map_leaves(state: Any, function: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return `state` with each leaf replaced by function(name, leaf).

    Dicts, lists and tuples keep their types. A leaf is any other value. Its name is its path, such as "model.0.weight".
    """
    if type(state) in DICTS.values():
        mapped = type(state)(
            {
                to_plain(name, key): map_leaves(value, function, f"{name}.{key}" if name else str(key))
                for key, value in state.items()
            }
        )
        if hasattr(state, "_metadata"):  # versions of modules: without it, a module converts the state as an old one
            vars(mapped)["_metadata"] = map_leaves(vars(state)["_metadata"], function, f"{name}._metadata")
        return mapped
    if type(state) in (list, tuple):
        return type(state)(map_leaves(value, function, f"{name}.{i}") for i, value in enumerate(state))
    return function(name, state)


def leaves(state: Any) -> dict[str, Any]:
    """Return the leaves of `state` by name."""
    found: dict[str, Any] = {}
    map_leaves(state, found.__setitem__)
    return found


def tensors(state: Any) -> dict[str, Any]:
    """Return the leaves of `state` that are tensors, by name.

    Raises:
        ConfigError: Two tensors have one name, such as those of the keys "a.b" and "a", "b".
    """
    found: dict[str, Any] = {}

    def add(name: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            if name in found:
                raise ConfigError(f"a checkpoint holds one tensor of a name, but two are called {name}: rename a key")
            found[name] = leaf

    map_leaves(state, add)
    return found


def to_plain(_: str, leaf: Any) -> Any:
    """Convert a NumPy scalar, such as a scheduler has, to a Python number, which JSON has."""
    return leaf.item() if isinstance(leaf, np.generic) else leaf


def to_meta(name: str, leaf: Any) -> Any:
    """Replace a tensor by a plain meta tensor of the same shape and dtype; convert other leaves by `to_plain`."""
    if isinstance(leaf, DTensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return leaf.to("meta") if isinstance(leaf, Tensor) else to_plain(name, leaf)


def host_copy(state: Any) -> Any:
    """Return a deep copy of `state` whose tensors are in host memory."""
    return map_leaves(state, _copy_leaf)


def _copy_leaf(_: str, leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else deepcopy(leaf)


def all_equal(states: Iterable[Any]) -> bool:
    """Return whether all states have the same names and equal leaves."""
    first, *others = map(leaves, states)
    return all(first.keys() == other.keys() and all(map(_equal, first.values(), other.values())) for other in others)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and first == second


def to_json(state: Any) -> Any:
    """Return `state` as JSON, from which `from_json` makes it again.

    Scalars and lists stand for themselves. Any other value is an object whose first key names its type. A tensor has
    its bytes; a meta tensor has none.

    Raises:
        ConfigError: Some of `state` is of another type. The message names these leaves.
    """
    unsafe: list[str] = []
    encoded = _encode("", state, unsafe)
    if unsafe:
        raise ConfigError(
            "a checkpoint holds tensors, numbers, strings, and dicts, lists and tuples of them, because no other type "
            f"can be read back safely: convert to plain data {', '.join(unsafe)}"
        )
    return encoded


def _encode(name: str, value: Any, unsafe: list[str]) -> Any:
    """Return `value` as JSON. Add leaves that have none to `unsafe`."""
    value = to_plain(name, value)
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind in (list, tuple):
        items = [_encode(f"{name}.{i}", each, unsafe) for i, each in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in DICTS.values():
        prefix = f"{name}." if name else ""
        items = [
            [_encode(f"{prefix}{key}", key, unsafe), _encode(f"{prefix}{key}", each, unsafe)]
            for key, each in value.items()
        ]
        named = all(type(key) is str for key, _ in items)
        versions = _encode(f"{prefix}_metadata", getattr(value, "_metadata", None), unsafe)
        return {kind.__name__: dict(items) if named else items} | ({"_metadata": versions} if versions else {})
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        described = {"tensor": str(value.dtype), "shape": list(value.shape)}
        if value.is_meta:
            return {**described, "stride": list(value.stride())}
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {**described, "bytes": b64encode(raw).decode()}
    unsafe.append(f"{name} ({kind.__qualname__})")
    return None


def from_json(value: Any) -> Any:
    """Return the state of which `value` is the JSON.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: `value` is no JSON of a state.
    """
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "tuple":
        return tuple(from_json(each) for each in content)
    if kind == "tensor":
        dtype, shape = DTYPES[content], value["shape"]
        if "bytes" in value:
            return _tensor(dtype, shape, value["bytes"])
        return torch.empty_strided(shape, value["stride"], dtype=dtype, device="meta")
    items = content.items() if isinstance(content, dict) else content
    found = DICTS[kind]({from_json(key): from_json(each) for key, each in items})
    if "_metadata" in value:
        vars(found)["_metadata"] = from_json(value["_metadata"])
    return found


def _tensor(dtype: torch.dtype, shape: list[int], encoded: str) -> Tensor:
    raw = bytearray(b64decode(encoded, validate=True))
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def check_plain(content: dict[str, Any]) -> None:
    """Raise ConfigError, which names the leaves, if a checkpoint with `content` could not be read back."""
    tensors(content)
    to_json(content)


def rng_state(more: Iterable[torch.Generator] = ()) -> dict[str, Any]:
    """Return the states of the global generators of torch (CPU and current CUDA GPU), Python and NumPy as plain data.

    Generators of other accelerators are left out.

    Args:
        more: Further generators.
    """
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    own = {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy}
    return {**own, "more": [each.get_state() for each in more]}


def check_rng_state(state: dict[str, Any]) -> None:
    """Raise an error unless `rng_state` may have returned this state. It may be of a GPU that is not here."""
    for each in (state["torch"], *state["more"]):
        torch.Generator().set_state(each)
    random.Random().setstate(state["python"])  # noqa: S311 (the global generator is one)
    np.random.RandomState().set_state(state["numpy"])


def set_rng_state(state: dict[str, Any], more: Iterable[torch.Generator] = ()) -> None:
    """Restore a state that `rng_state` returned. The state of a GPU is ignored on a machine without one."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    # A run may resume with another kind of loader.
    for each, own in zip(more, state["more"], strict=False):
        each.set_state(own)
