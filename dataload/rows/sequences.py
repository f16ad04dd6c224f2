"""Batches of sequences of packed documents, whose values are copied from where the documents are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dataload.errors import ConfigError
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
        left_out: Documents that a function of `map` failed with, which each sequence counts: int64 [n].
    """

    packing: Packing
    documents: Records
    starts: Array
    lengths: Array
    firsts: Array
    numbers: Array
    left_out: Array

    @classmethod
    def none(cls, packing: Packing, documents: Records) -> Sequences:
        """Return an empty batch. documents: an empty batch of documents."""
        nothing = np.empty(0, np.int64)
        return cls(packing, documents, nothing, nothing, np.zeros(1, np.int64), nothing, nothing)

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
            left_out=self.left_out[part],
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
            ragged: As in `columns_of`.
            group: As in `columns_of`.
            empty: As in `columns_of`.

        Raises:
            ConfigError: `group` is not empty.
        """
        if group:
            raise ConfigError(f"group={dict(group)!r} joins single numbers to one tensor, and sequences have none")
        which, lengths, numbers = self._placed
        fields = {field.name: field for field in self.documents.layout.fields}
        starts, is_value, batch = np.zeros_like(lengths), numbers > 0, {}
        for name, pad in zip(self.packing.columns, self.packing.pads, strict=True):
            field, size = fields[name], fields[name].element_bytes
            starts[is_value] = self.documents.spans(field)[:, 0] + self.starts
            padding = np.full(lengths[~is_value].max(initial=0), pad, field.dtype).view(np.uint8).data
            heaps = [*(blob.heap(field) for blob in self.documents.blobs), padding]
            bounds = which.tolist(), (starts * size).tolist(), ((starts + lengths) * size).tolist()
            # Writable, and faster than a slice assignment for each piece.
            joined = bytearray().join([heaps[heap][start:stop] for heap, start, stop in zip(*bounds, strict=True)])
            batch[name] = self._tensor(np.frombuffer(joined, field.dtype), empty)
        batch[SEGMENTS] = self._tensor(np.repeat(numbers, lengths), empty)
        batch[POSITIONS] = self._tensor(self._positions(), empty)
        return batch

    def _positions(self) -> Array:
        """Return the place of each value in its segment, from 0; of padding, 0: int32 [n, length]."""
        length, lengths = self.packing.length, self._placed[1]
        begins = (np.cumsum(lengths) - lengths) % length
        positions = np.repeat(begins.astype(np.int32), lengths).reshape(-1, length)
        np.subtract(np.arange(length, dtype=np.int32), positions, out=positions)
        short = np.flatnonzero(self.filled < length)
        for row, stop in zip(short.tolist(), self.filled[short].tolist(), strict=True):
            positions[row, stop:] = 0
        return positions

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
        """The pieces and, after those of a sequence, its padding: blob, length, and segment in the sequence from 1.

        The padding is segment 0, and its blob the one after all others.
        """
        counts = np.diff(self.firsts)
        numbers = ranges(np.ones(len(self), np.int64), counts).astype(np.int32)
        which, lengths = self.documents.which, self.lengths
        rest = self.packing.length - self.filled
        short = np.flatnonzero(rest)
        if len(short):
            ends = self.firsts[short + 1]
            which = np.insert(which, ends, len(self.documents.blobs))
            lengths, numbers = np.insert(lengths, ends, rest[short]), np.insert(numbers, ends, 0)
        return which, lengths, numbers

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
