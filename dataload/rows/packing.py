"""How documents are packed into sequences: which parts of which documents a sequence has.

The documents of a row group stand in a line, in the order of the epoch. Sequence k of the row group is the part
[k * length, (k + 1) * length) of the line: a list of pieces of documents, whose values stay where they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
        lengths: The column that has the number of values of each document; None: the values are counted.
    """

    length: int
    column: str
    also: tuple[str, ...] = ()
    split: bool = True
    pads: tuple[Any, ...] = (0,)
    cu_seqlens: bool = False
    lengths: str | None = None

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
    """The documents of a row group in a line, in the order of an epoch, cut into the pieces of its sequences.

    Args:
        pieces: The document of each piece, by its number in the row group; the values of the document before the piece;
            and those of the piece, at least 1: uint32 [3, pieces].
        firsts: The first piece of each sequence, then the number of pieces: int64 [sequences + 1].
    """

    pieces: Array
    firsts: Array

    @classmethod
    def of(cls, documents: Array, starts: Array, lengths: Array, firsts: Array) -> Line:
        """Return the line of these pieces. A blob holds fewer than 2**32 values, and so does a document."""
        return cls(np.stack((documents, starts, lengths), dtype=np.uint32, casting="unsafe"), firsts)


class Lines:
    """The lines of several row groups, one after the other, so that one look finds the pieces of any sequences.

    Args:
        lines: The line of each row group.

    Attributes:
        of: The same lines, in the same order, as views.
    """

    def __init__(self, lines: Mapping[int, Line]) -> None:
        groups = sorted(lines)
        own = [lines[group] for group in groups]
        before = np.cumsum([0, *(line.firsts[-1] for line in own)])
        self._groups = np.array(groups)
        self._starts = np.cumsum([0, *(len(line.firsts) for line in own[:-1])])
        self._firsts = np.concatenate([line.firsts + pieces for line, pieces in zip(own, before[:-1], strict=True)])
        self._pieces = np.concatenate([line.pieces for line in own], axis=1)
        parts = dict(zip(groups, np.split(self._pieces, before[1:-1], axis=1), strict=True))
        self.of = {group: Line(parts[group], line.firsts) for group, line in lines.items()}

    def pieces_of(self, groups: Array, numbers: Array) -> tuple[Array, Array]:
        """Return the pieces of sequences, given their row groups and their numbers in them.

        Returns: the pieces as in `Line`, int64 [3, pieces]; how many each sequence has, int64 [n].
        """
        places = self._starts[np.searchsorted(self._groups, groups)] + numbers
        firsts = self._firsts[places]
        counts = self._firsts[places + 1] - firsts
        return self._pieces[:, ranges(firsts, counts)].astype(np.int64), counts


def sequences_of(lengths: Array, packing: Packing) -> int:
    """Return how many sequences documents of these lengths make, int64 [documents]."""
    if packing.split:
        return int(packing.filled(lengths.sum()))
    rests = lengths % packing.length
    return int((lengths // packing.length).sum()) + fewest(rests[rests > 0], packing.length)


def shift_of(lengths: Array, count: int, packing: Packing) -> int:
    """Return which shift of `best_fit.SHIFTS` to try first in all epochs: that which works in file order.

    Args:
        lengths: As for `line_of`.
        count: The same.
        packing: The same.
    """
    if packing.split:
        return 0
    rests = lengths % packing.length
    full = int((lengths // packing.length).sum())
    return shuffled(rests[rests > 0], packing.length, count - full)[1]


def line_of(lengths: Array, order: Array, count: int, packing: Packing, shift: int) -> Line:
    """Return the line of the documents of a row group.

    Args:
        lengths: Values of each document, int64 [documents].
        order: Numbers of the documents in the order of the epoch, int64 [documents].
        count: Number of sequences.
        packing: How they are packed.
        shift: That of `shift_of`.

    Raises:
        ValueError: They make another number of sequences.
    """
    if packing.split:
        return _split(lengths, order, count, packing.length)
    return _whole(lengths, order, count, packing.length, shift)


def _split(lengths: Array, order: Array, count: int, length: int) -> Line:
    """Return the documents one after the other."""
    order = order[lengths[order] > 0]
    sizes = lengths[order]
    total = int(sizes.sum())
    if total > count * length:
        raise ValueError(f"{-(-total // length):,} sequences and not {count:,}")
    # The footer counts empty documents, too. Then all sequences are a little shorter, and none has padding only, of
    # which the mean loss would be NaN.
    numbers = np.arange(count)
    borders = numbers * length if total > (count - 1) * length else numbers * total // max(1, count)
    begins = np.cumsum(sizes) - sizes
    starts = np.sort(np.concatenate((begins, borders[borders < total])), kind="stable")  # two runs: faster than unique
    starts = starts[np.diff(starts, prepend=-1) > 0]
    which = np.searchsorted(begins, starts, "right") - 1
    firsts = np.append(np.searchsorted(starts, borders), len(starts))
    return Line.of(order[which], starts - begins[which], np.diff(starts, append=total), firsts)


def _whole(lengths: Array, order: Array, count: int, length: int, shift: int) -> Line:
    """Return the sequences that documents fill alone, and those of their rests that fit, by the first document."""
    sizes = lengths[order]
    rests, full = sizes % length, sizes // length
    short, alone = np.flatnonzero(rests), np.repeat(np.arange(len(order)), full)  # places in the order
    bins, _ = shuffled(rests[short], length, count - len(alone), shift)
    if (needed := int(bins.max(initial=-1)) + 1 + len(alone)) != count:
        raise ValueError(f"{needed:,} sequences and not {count:,}")
    places = np.concatenate((alone, short))
    sequences = np.concatenate((np.arange(len(alone)), len(alone) + bins))
    first_places = places[np.unique(sequences, return_index=True)[1]]
    sequences = np.argsort(np.argsort(first_places, kind="stable"))[sequences]
    by_sequence = np.argsort(sequences, kind="stable")
    firsts = np.searchsorted(sequences[by_sequence], np.arange(count + 1))
    before = np.concatenate((length * ranges(np.zeros_like(full), full), (sizes - rests)[short]))
    values = np.concatenate((np.full(len(alone), length), rests[short]))
    return Line.of(order[places[by_sequence]], before[by_sequence], values[by_sequence], firsts)


def ranges(firsts: Array, counts: Array) -> Array:
    """Return the numbers firsts[0], firsts[0] + 1, …: counts[0] of them, then those from firsts[1] on, and so on."""
    ends = np.cumsum(counts)
    numbers: Array = np.arange(ends[-1] if len(ends) else 0) + np.repeat(firsts - ends + counts, counts)
    return numbers
