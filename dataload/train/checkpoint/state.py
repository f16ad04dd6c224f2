"""The state of a run: random generators, state trees (nested dicts, lists, tuples), and files that run no code."""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import is_dataclass
from enum import EnumType
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dataload.errors import ConfigError

NOT_PLAIN = (pickle.PickleError, TypeError, AttributeError)  # what torch.save and load_plain raise for other types


def map_leaves(state: Any, function: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return `state` with each leaf replaced by function(name, leaf).

    Dicts, lists and tuples keep their types. A leaf is any other value. Its name is its path, such as "model.0.weight".
    """
    if type(state) in (dict, OrderedDict, Counter):  # torch.load(weights_only=True) allows no other dicts
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
    """Convert a NumPy scalar, such as a scheduler has, to a Python number, which `load_plain` accepts."""
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


def save_plain(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`, sync it and read it back.

    Raises:
        ConfigError: Some of `content` cannot be read back. The message names these leaves.
    """
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        load_plain(path)
    except NOT_PLAIN as error:
        raise _not_plain(content, error) from error


def check_plain(content: dict[str, Any]) -> None:
    """Raise ConfigError, which names the leaves, if a checkpoint with `content` could not be read back."""
    tensors(content)
    if error := _load_error(content):
        raise _not_plain(content, error) from error


def _not_plain(content: dict[str, Any], error: Exception) -> ConfigError:
    unsafe = [f"{name} ({type(leaf).__qualname__})" for name, leaf in leaves(content).items() if _load_error(leaf)]
    return ConfigError(
        "a checkpoint holds tensors, numbers, strings, and dicts, lists and tuples of them, because no other type can "
        f"be read back safely: convert to plain data {', '.join(unsafe) or error}"
    )


def load_plain(file: Path | BytesIO) -> dict[str, Any]:
    """Read a file that `save_plain` wrote.

    Raises:
        pickle.UnpicklingError: The file contains a type that torch does not allow.
    """
    content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return content


def _load_error(content: Any) -> Exception | None:
    """Return the error of a round trip through `torch.save` and `load_plain`; None if there is none."""
    file = BytesIO()
    try:
        torch.save(content, file)
        file.seek(0)
        load_plain(file)
    except NOT_PLAIN as error:
        return error
    return None


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler of DCP's metadata. It allows DCP's own records, and dtypes, sizes and paths."""

    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    LAYOUT = ("torch.serialization", "_get_layout")  # the only function that the metadata calls

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a record on the allow-list.

        Raises:
            pickle.UnpicklingError: The class is not on the allow-list.
        """
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == self.LAYOUT:
            return lambda _: torch.strided
        if (module.split(".", maxsplit=1)[0], name) == ("pathlib", "PosixPath"):
            return PurePosixPath
        if module in self.MODULES:
            found = super().find_class(module, name)
            if is_dataclass(found) or isinstance(found, EnumType):
                return found
        raise pickle.UnpicklingError(f"the metadata of a checkpoint may not contain {module}.{name}")


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


def set_rng_state(state: dict[str, Any], more: Iterable[torch.Generator] = ()) -> None:
    """Restore a state that `rng_state` returned. The state of a GPU is ignored on a machine without one."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    # A run may resume with another kind of loader, and older checkpoints have no further states.
    for each, own in zip(more, state.get("more", ()), strict=False):
        each.set_state(own)
