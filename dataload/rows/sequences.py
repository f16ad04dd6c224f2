"""Batches of sequences of packed documents, whose values are copied from where the documents are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dataload.errors import ConfigError
from dataload.formats.schema import Field
from dataload.rows.collate import Batch, Empty, spans
from dataload.rows.columns import Array, lengths_of
from dataload.rows.packing import BOUNDS, LONGEST, POSITIONS, SEGMENTS, Packing, ranges
from dataload.rows.row_block import Records
from dataload.runtime.cached_property import cached_property


@dataclass(frozen=True)
class Sequences:
    """A batch of n sequences, whose values are still where the documents are.

    Args:
        packing: How they are packed.
        documents: The document of each piece, [pieces]: those of the first sequence, then those of the second, …
        starts: Values of the document before the piece: int64 [pieces].
        lengths: Values of the piece: int64 [pieces].
        firsts: The first piece of each sequence, then the number of pieces: int64 [n + 1].
        numbers: The numbers of the documents in their dataset: int64 [pieces].
    """

    packing: Packing
    documents: Records
    starts: Array
    lengths: Array
    firsts: Array
    numbers: Array

    @classmethod
    def none(cls, packing: Packing, documents: Records) -> Sequences:
        """Return an empty batch. documents: an empty batch of documents."""
        nothing = np.empty(0, np.int64)
        return cls(packing, documents, nothing, nothing, np.zeros(1, np.int64), nothing)

    @property
    def place(self) -> str:
        """Names the files that hold the values, see `reading`."""
        return self.documents.place

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def __getitem__(self, part: slice) -> Sequences:
        start, stop, _ = part.indices(len(self))
        firsts = self.firsts[start : max(start, stop) + 1]
        pieces = slice(int(firsts[0]), int(firsts[-1]))
        return replace(
            self,
            documents=self.documents[pieces],
            starts=self.starts[pieces],
            lengths=self.lengths[pieces],
            firsts=firsts - firsts[0],
            numbers=self.numbers[pieces],
        )

    @cached_property
    def filled(self) -> Array:
        """Values of each sequence that are no padding: int64 [n]."""
        return np.diff(np.concatenate(([0], np.cumsum(self.lengths)))[self.firsts])

    def columns(
        self,
        *,
        ragged: str = "list",  # noqa: ARG002 (no column is)
        group: Mapping[str, Sequence[str]] | None = None,
        empty: Empty | None = None,
    ) -> Batch:
        """Return the columns, each a Tensor [n, length], as `columns_of` does.

        Args:
            ragged: As in `to_batch`.
            group: As in `to_batch`.
            empty: As in `to_batch`.

        Raises:
            ConfigError: `group` is not empty.
        """
        if group:
            raise ConfigError(f"group={dict(group)!r} joins single numbers to one tensor, and sequences have none")
        fields = {field.name: field for field in self.documents.layout.fields}
        batch = {}
        for name, pad in zip(self.packing.columns, self.packing.pads, strict=True):
            batch[name] = self._copied(fields[name], pad, empty)
        batch[SEGMENTS] = self._tensor(self._segments(), empty)
        batch[POSITIONS] = self._tensor(self._positions(), empty)
        return batch

    def with_bounds(self, batches: Iterator[Batch], sizes: Sequence[int], empty: Empty | None) -> Iterator[Batch]:
        """Add the bounds of the segments to batches of these sizes, if they are wanted."""
        if not self.packing.cu_seqlens:
            return batches
        return (
            {**batch, **self[span]._bounds(empty)}  # noqa: SLF001 (of this class)
            for batch, span in zip(batches, spans(sizes), strict=True)
        )

    def _bounds(self, empty: Empty | None) -> Batch:
        lengths = self._placed[1]
        bounds = np.concatenate(([0], np.cumsum(lengths)), dtype=np.int32)
        return {BOUNDS: _tensor(bounds, bounds.shape, empty), LONGEST: int(lengths.max(initial=0))}

    @cached_property
    def _placed(self) -> tuple[Array, Array, Array]:
        """The pieces and, after those of a sequence, its padding: blob, length, and number in the sequence from 1.

        The padding has the number 0, and the blob after all others.
        """
        counts = np.diff(self.firsts)
        numbers = ranges(np.ones(len(self), np.int64), counts)
        which, lengths = self.documents.which, self.lengths
        rest = self.packing.length - self.filled
        short = np.flatnonzero(rest)
        if len(short):
            ends = self.firsts[short + 1]
            which = np.insert(which, ends, len(self.documents.blobs))
            lengths, numbers = np.insert(lengths, ends, rest[short]), np.insert(numbers, ends, 0)
        return which, lengths, numbers

    def _copied(self, field: Field, pad: Any, empty: Empty | None) -> torch.Tensor:
        """Return the values of a column, Tensor [n, length]."""
        which, lengths, numbers = self._placed
        heaps = [blob.heap(field) for blob in self.documents.blobs]
        heaps.append(memoryview(np.full(self.packing.length, pad, field.dtype).tobytes()))
        firsts = np.zeros(len(which), np.int64)
        firsts[numbers > 0] = self.documents.spans(field)[:, 0] + self.starts
        size, shape = field.element_bytes, (len(self), self.packing.length)
        dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
        tensor = torch.empty(shape, dtype=dtype, device="cpu") if empty is None else empty(shape, dtype)
        memory = tensor.numpy().reshape(-1).view(np.uint8).data
        ends = np.cumsum(lengths)
        places = np.stack((firsts, firsts + lengths, ends - lengths, ends), axis=1) * size
        # A slice that is copied and dropped at once: a list of them would wake the garbage collector.
        for blob, (start, stop, here, end) in zip(which.tolist(), places.tolist(), strict=True):
            memory[here:end] = heaps[blob][start:stop]
        return tensor

    def _segments(self) -> Array:
        """Return the number of each value's segment in its sequence, from 1; 0 is padding."""
        _, lengths, numbers = self._placed
        return np.repeat(numbers.astype(np.int32), lengths)

    def _positions(self) -> Array:
        """Return the place of each value in its segment, from 0."""
        _, lengths, numbers = self._placed
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
        positions -= np.repeat((ends - lengths).astype(np.int32), lengths)
        padding = np.flatnonzero(numbers == 0)
        for start, stop in zip((ends - lengths)[padding].tolist(), ends[padding].tolist(), strict=True):
            positions[start:stop] = 0
        return positions

    def _tensor(self, values: Array, empty: Empty | None) -> torch.Tensor:
        return _tensor(values, (len(self), self.packing.length), empty)


def _tensor(values: Array, shape: tuple[int, ...], empty: Empty | None) -> torch.Tensor:
    tensor = torch.from_numpy(values.reshape(shape))
    if empty is None:
        return tensor
    copy = empty(shape, tensor.dtype)
    copy.numpy()[...] = tensor.numpy()
    return copy


def lengths_in(documents: Records, packing: Packing) -> tuple[Array, tuple[int, str] | None]:
    """Return the values of each document, int64 [n]; and the first one whose columns differ in them, and how."""
    fields = {field.name: field for field in documents.layout.fields}
    lengths, *others = (lengths_of(documents.spans(fields[name]))[0] for name in packing.columns)
    for name, other in zip(packing.also, others, strict=True):
        if not np.array_equal(lengths, other):
            row = int(np.flatnonzero(lengths != other)[0])
            return lengths, (row, f"column {packing.column!r} has {lengths[row]:,} values, and {name!r} {other[row]:,}")
    return lengths, None
