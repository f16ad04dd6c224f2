"""Functions over the tensors, columns or values of a batch, whatever containers it consists of."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from dataload.rows.collate import Flat

_PLAIN = frozenset((str, bytes, int, float, bool, type(None), memoryview))  # types that hold no tensor


def map_tensors(batch: Any, function: Callable[[Any], Any], method: str | None = None) -> Any:
    """Return the batch with `function` applied to every tensor in its dicts, lists, tuples and dataclasses.

    Args:
        batch: The batch.
        function: Returns what replaces a tensor.
        method: The name of a method. `function` also gets each object with this method, such as a graph or a
            TensorDict. Dicts and tuples are searched in any case, so that their tensors are copied one by one.
    """
    kind = type(batch)
    if kind is list or kind is dict:
        # Strings of a column or of a nested value: a call for each would take longer than making them.
        if _PLAIN.issuperset(map(type, batch.values() if kind is dict else batch)):
            return batch
    elif isinstance(batch, torch.Tensor):
        return function(batch)
    elif isinstance(batch, PackedSequence):
        data, sizes, *orders = batch  # The sizes stay on the host.
        return PackedSequence(function(data), sizes, *(None if order is None else function(order) for order in orders))
    elif method is not None and hasattr(kind, method) and not isinstance(batch, (dict, UserDict, tuple)):
        return function(batch)
    return map_values(batch, lambda value: map_tensors(value, function, method))


def on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors, and objects with a method `to`, on the device. Copies to a GPU may go on."""
    return map_tensors(batch, lambda value: moved(value, device), "to")


def moved(value: Any, device: torch.device) -> Any:
    """Return a tensor, or an object with a method `to`, on the device. A copy to the host is complete."""
    try:
        return value.to(device, non_blocking=device.type != "cpu")
    except TypeError:  # The method takes a device only.
        return value.to(device)


def map_columns(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return the batch with `function` applied to every column.

    Columns are the values of a dict or dataclass, at any depth, and the entries of an outermost list or tuple. A
    `Flat` is one column. A batch of another type is a column itself.
    """
    if isinstance(batch, (list, tuple)) and not isinstance(batch, Flat):
        return map_values(batch, lambda column: _map_dicts(column, function))
    return _map_dicts(batch, function)


def _map_dicts(batch: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Mapping):
        # Other mappings, such as a TensorDict, may not take columns of another length.
        columns = batch if isinstance(batch, (dict, UserDict)) else dict(batch)
        return map_values(columns, lambda value: _map_dicts(value, function))
    if _is_dataclass(batch):
        return map_values(batch, lambda value: _map_dicts(value, function))
    return function(batch)


def map_values(container: Any, function: Callable[[Any], Any]) -> Any:
    """Return a mapping, list, tuple or dataclass with `function` applied to every value; other values unchanged."""
    if isinstance(container, Mapping):
        by_name = {name: function(value) for name, value in container.items()}
        # Another class may share the copy's values with the original, unless it says how to copy.
        is_copied = isinstance(container, dict) or getattr(container, "__copy__", None) is not None
        if type(container) is dict or not isinstance(container, MutableMapping) or not is_copied:
            return by_name
        same = copy(container)  # such as the BatchEncoding of a tokenizer, which has the columns as attributes
        for name, value in by_name.items():
            same[name] = value
        return same
    if isinstance(container, tuple):
        values = map(function, container)
        return type(container)(*values) if hasattr(container, "_fields") else tuple(values)
    if isinstance(container, list):
        return [function(value) for value in container]
    return _map_fields(container, function) if _is_dataclass(container) else container


def _map_fields(container: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataclass with other values, which may be frozen; the same one if no value is another."""
    names = [field.name for field in fields(container) if hasattr(container, field.name)]
    given = {name: getattr(container, name) for name in names}
    others = {name: new for name, value in given.items() if (new := function(value)) is not value}
    if not others:
        return container
    same = copy(container)
    for name, value in others.items():
        object.__setattr__(same, name, value)
    return same


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
