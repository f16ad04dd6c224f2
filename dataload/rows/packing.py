"""How documents are packed into sequences: which parts of which documents a sequence has.

The documents of a row group stand in a line, in the order of the epoch. Sequence k of the row group is the part
[k * length, (k + 1) * length) of the line: a list of pieces of documents, whose values stay where they are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload.rows.best_fit import fewest, shuffled
from dataload.rows.columns import Array

SEGMENTS, POSITIONS = "segment_ids", "position_ids"
BOUNDS, LONGEST = "cu_seqlens", "max_seqlen"
OF_BATCHES = frozenset((BOUNDS, LONGEST))
"""What batches of sequences have, and single sequences do not."""


@dataclass(frozen=True)
class Packing:
    """How documents become sequences.

    Args:
        length: Values of a sequence.
        column: The column of the documents' values.
        also: Columns with as many values, which are packed alike.
        split: Whether documents are cut at the end of a sequence. Otherwise only those longer than one are.
        pads: What fills the rest of a sequence, for each column.
        cu_seqlens: Whether batches have the bounds of their segments.
    """

    length: int
    column: str
    also: tuple[str, ...] = ()
    split: bool = True
    pads: tuple[Any, ...] = (0,)
    cu_seqlens: bool = False

    @property
    def key(self) -> list[Any]:
        """What decides the sequences, as JSON-able values."""
        return [self.length, self.column, self.split]

    def digest(self, what: str, *content: Any) -> str:
        """Return a hex digest of something and of how it is packed."""
        whole = json.dumps([*content, *self.key]).encode()
        return hashlib.blake2b(whole, digest_size=16, person=f"packed {what}".encode()).hexdigest()

    def filled(self, values: Array) -> Array:
        """Return how many sequences so many values fill if documents are cut, int64 [...] both."""
        sequences: Array = -(-values // self.length)
        return sequences

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are packed."""
        return (self.column, *self.also)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of a batch."""
        added = (BOUNDS, LONGEST) if self.cu_seqlens else ()
        return (*self.columns, SEGMENTS, POSITIONS, *added)


@dataclass(frozen=True)
class Line:
    """The documents of a row group in a line, in the order of an epoch.

    Args:
        begins: Where each piece of a document begins in the line, ascending: int64 [pieces].
        documents: The document of each piece, by its number in the row group: int64 [pieces].
        skipped: Values of the document before the piece; None: a piece is a whole document.
        borders: Where each sequence begins in the line, and where the last one ends: int64 [sequences + 1].
        firsts: The first piece that each sequence has a part of: int64 [sequences].
        stops: One more than the last such piece: int64 [sequences].
    """

    begins: Array
    documents: Array
    skipped: Array | None
    borders: Array
    firsts: Array
    stops: Array

    @classmethod
    def of(cls, begins: Array, sizes: Array, documents: Array, skipped: Array | None, borders: Array) -> Line:
        """Return the line of these pieces, none of them empty."""
        firsts = np.searchsorted(begins + sizes, borders[:-1], "right")
        return cls(begins, documents, skipped, borders, firsts, np.searchsorted(begins, borders[1:], "left"))


def sequences_of(lengths: Array, packing: Packing) -> int:
    """Return how many sequences documents of these lengths make, int64 [documents]."""
    if packing.split:
        return int(packing.filled(lengths.sum()))
    rests = lengths % packing.length
    return int((lengths // packing.length).sum()) + fewest(rests[rests > 0], packing.length)


def line_of(lengths: Array, order: Array, count: int, packing: Packing) -> Line:
    """Return the line of the documents of a row group.

    Args:
        lengths: Values of each document, int64 [documents].
        order: Numbers of the documents in the order of the epoch, int64 [documents].
        count: Number of sequences.
        packing: How they are packed.

    Raises:
        ValueError: They make another number of sequences.
    """
    return (_split if packing.split else _whole)(lengths, order, count, packing.length)


def _split(lengths: Array, order: Array, count: int, length: int) -> Line:
    """Return the documents one after the other."""
    order = order[lengths[order] > 0]
    sizes = lengths[order]
    total = int(sizes.sum())
    if total > count * length:
        raise ValueError(f"{total:,} values, for which {count:,} sequences are too few")
    # The footer counts empty documents, too. Then all sequences are a little shorter, and none has padding only, of
    # which the mean loss would be NaN.
    numbers = np.arange(count + 1)
    borders = numbers * length if total > (count - 1) * length else numbers * total // max(1, count)
    return Line.of(np.cumsum(sizes) - sizes, sizes, order, None, borders)


def _whole(lengths: Array, order: Array, count: int, length: int) -> Line:
    """Return the rest of each document, after the sequences that it fills alone, with those that fit; then these."""
    rests = lengths[order] % length
    order, rests = order[rests > 0], rests[rests > 0]
    full = lengths // length
    bins = shuffled(rests, length, count - int(full.sum()))
    by_bin = np.argsort(bins, kind="stable")
    order, rests, bins = order[by_bin], rests[by_bin], bins[by_bin]
    ends = np.cumsum(rests)
    starts = ends - rests
    first_of_bin = np.searchsorted(bins, bins)
    alone = np.repeat(np.arange(len(lengths)), full)
    if (needed := int(bins.max(initial=-1)) + 1 + len(alone)) != count:
        raise ValueError(f"documents for {needed:,} sequences, and not for {count:,}")
    borders = np.arange(count + 1) * length
    begins = np.concatenate((bins * length + starts - starts[first_of_bin], borders[count - len(alone) : count]))
    skipped = np.concatenate((lengths[order] - rests, length * ranges(np.zeros(len(full), np.int64), full)))
    sizes = np.concatenate((rests, np.full(len(alone), length)))
    return Line.of(begins, sizes, np.concatenate((order, alone)), skipped, borders)


def ranges(firsts: Array, counts: Array) -> Array:
    """Return the numbers firsts[0], firsts[0] + 1, …: counts[0] of them, then those from firsts[1] on, and so on."""
    ends = np.cumsum(counts)
    numbers: Array = np.arange(ends[-1] if len(ends) else 0) + np.repeat(firsts - ends + counts, counts)
    return numbers
