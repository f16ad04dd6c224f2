"""Gathered columns as the tensors, lists and rows that users are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from dataload.columns import Column, Dense, Ragged
from dataload.errors import ConfigError, DataError

Batch = dict[str, Any]


class Flat(NamedTuple):
    """A ragged column as two tensors: row i is values[offsets[i]:offsets[i + 1]].

    values: [total]; offsets: int64 [B + 1].
    """

    values: torch.Tensor
    offsets: torch.Tensor


def to_batch(
    columns: Mapping[str, Column], *, ragged: str = "list", group: Mapping[str, Sequence[str]] | None = None
) -> Batch:
    """Columns as a user sees them.

    Numbers: Tensor[B]; fixed-size lists: Tensor[B, k]; binary: list[bytes]; strings: list[str]; lists of numbers:
    list[Tensor]. With ragged="flat", binary and lists are `Flat` instead. `group`: name -> columns of one dtype that
    come as one Tensor[B, k].
    """
    if clash := (group or {}).keys() & columns.keys():
        raise ConfigError(f"group {min(clash)!r} has the name of a column: name it otherwise")
    grouped = {name for names in (group or {}).values() for name in names}
    batch = {name: _user_column(column, ragged) for name, column in columns.items() if name not in grouped}
    for name, members in (group or {}).items():
        batch[name] = _stack(name, [columns.get(member) for member in members])
    return batch


class Rows(Sequence[dict[str, Any]]):
    """A batch as a sequence of row dicts, made when asked for. columns: the whole batch, as `to_batch` shapes it."""

    def __init__(
        self,
        gathered: Mapping[str, Column],
        length: int,
        ragged: str = "list",
        group: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._gathered = gathered
        self._length = length
        self._ragged = ragged
        self._group = group

    @cached_property
    def columns(self) -> Batch:
        return to_batch(self._gathered, ragged=self._ragged, group=self._group)

    def shaped(self, *, ragged: str, group: Mapping[str, Sequence[str]] | None) -> Rows:
        """The same rows in another shape."""
        return Rows(self._gathered, self._length, ragged, group)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, row: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, row: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(self._length))]
        if not -self._length <= row < self._length:
            raise IndexError(f"row {row} of a batch of {self._length}")
        return {name: column[row] for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(self._length))


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with `function` applied to every tensor in its dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple):
        values = (map_tensors(value, function) for value in batch)
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, list):
        return [map_tensors(value, function) for value in batch]
    return batch


class Packed(NamedTuple):
    """Tensors side by side, as they leave a worker: each tensor that is sent alone takes a file descriptor."""

    values: torch.Tensor
    sizes: list[int]


def pack(batch: Any) -> Any:
    """The batch with its lists of one-dimensional tensors of one dtype packed."""
    if isinstance(batch, dict):
        return {name: pack(value) for name, value in batch.items()}
    if isinstance(batch, list) and batch and all(isinstance(one, torch.Tensor) and one.ndim == 1 for one in batch):
        one_dtype = len({one.dtype for one in batch}) == 1
        return Packed(torch.cat(batch), [len(one) for one in batch]) if one_dtype else batch
    return batch


def unpack(batch: Any) -> Any:
    """What `pack` packed, as it was."""
    if isinstance(batch, dict):
        return {name: unpack(value) for name, value in batch.items()}
    return list(torch.split(batch.values, batch.sizes)) if isinstance(batch, Packed) else batch


def _user_column(column: Column, ragged: str) -> Any:
    if isinstance(column, Dense):
        return torch.from_numpy(column.values)
    if ragged == "flat" and column.kind != "string":
        return Flat(torch.from_numpy(column.values), torch.from_numpy(column.offsets))
    return [_user_value(column, start, stop) for start, stop in zip(column.offsets, column.offsets[1:], strict=False)]


def _user_value(column: Ragged, start: int, stop: int) -> Any:
    values = column.values[start:stop]
    if column.kind == "list":
        return torch.from_numpy(values)
    if column.kind == "binary":
        return values.tobytes()
    try:
        return values.tobytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"a string is not UTF-8 ({error}): write the column as binary") from error


def _stack(name: str, members: Sequence[Column | None]) -> torch.Tensor:
    dense = [member.values for member in members if isinstance(member, Dense) and member.values.ndim == 1]
    if len(dense) != len(members) or len({values.dtype for values in dense}) != 1:
        raise ConfigError(f"group {name!r} must name columns that are read, of numbers, of one dtype")
    return torch.from_numpy(np.stack(dense, axis=1))
