"""Access to sequences of packed documents by number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from dataload.catalog.locations import Location
from dataload.errors import DataError
from dataload.formats.schema import NULL, Field
from dataload.rows.columns import Array
from dataload.rows.open_row_groups import evictions
from dataload.rows.packing import Line, Lines, Packing, line_of, shift_of
from dataload.rows.row_block import Records
from dataload.rows.row_groups import RowGroups
from dataload.rows.row_store import Draw, Loads, RowStore, Selected
from dataload.rows.sequences import Sequences, lengths_in
from dataload.samplers.interval_index import IntervalIndex
from dataload.samplers.keys import derive_key
from dataload.samplers.permutation import KeyedPermutation

log = logging.getLogger(__name__)

MOST_DRAWS = 4  # of which lines are kept: those of other loaders, and of the epoch before


class SequenceStore(RowStore):
    """The sequences of a packed dataset, or of several with one packing, by number: those of row group 0 come first.

    Args:
        packing: How documents become sequences.
        documents: Documents of each row group, int64 [row groups].
        sequences: Sequences of each row group, int64 [row groups].
        locate: Returns the location of a document, given its number.
        row_groups: The row groups of the documents.
        capacity: As for `RowStore`.
        selected: As for `RowStore`.
        by_use: As for `RowStore`.
    """

    def __init__(
        self,
        packing: Packing,
        documents: Array,
        sequences: Array,
        locate: Callable[[int], Location],
        row_groups: RowGroups,
        capacity: int,
        selected: Selected | None = None,
        *,
        by_use: bool = False,
    ) -> None:
        self._packing = packing
        self._documents, self._sequences, self._locate = documents, sequences, locate
        self._first_documents = np.concatenate(([0], np.cumsum(documents)))
        self._first_sequences = np.concatenate(([0], np.cumsum(sequences)))
        self._group_index = IntervalIndex(self._first_sequences)
        self._shifts = np.full(len(sequences), -1, np.int8)  # of each row group; -1: not known yet
        super().__init__(row_groups, capacity, selected, by_use=by_use)

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._lines: Mapping[Draw, Lines] = {}
        # A sequence for each document that a function of `map` failed with, which counts it: ascending, int64 [failed].
        self._left_out = np.empty(0, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(SequenceStore, by_use=self._by_use)
        own = self._packing, self._documents, self._sequences, self._locate
        _, how, state = super().__reduce__()
        return make, (*own, *how), state

    @property
    def row_bytes(self) -> int:
        sizes = (field.element_bytes for field in self._fields)
        return self._packing.length * (sum(sizes) + 2 * np.dtype(np.int32).itemsize)

    @property
    def names(self) -> tuple[str, ...]:
        return self._packing.names

    @property
    def _fields(self) -> list[Field]:
        return [field for field in self.layout.fields if field.name in self._packing.columns]

    def none(self) -> Any:
        return Sequences.none(self._packing, super().none())

    def gather(
        self, rows: Array, stop: Future[None] | None = None, loads: Loads | None = None, draw: Draw = None
    ) -> Any:
        """Return sequences by their numbers, in the order given. See `RowStore.gather`.

        Raises:
            DataError: The columns of a document have different lengths. It names the document.
        """
        groups = self._group_index.find(rows)
        needed, lines = sorted(set(groups.tolist())), self._lines.get(draw)
        if lines is None or not lines.of.keys() >= set(needed):
            super().gather(self._first_documents[needed], stop, loads)  # requests the row groups, all at once
            lines, loads = self._with_lines(needed, draw, stop), None
        (documents, starts, lengths), counts = lines.pieces_of(groups, rows - self._first_sequences[groups])
        documents += np.repeat(self._first_documents[groups], counts)
        firsts = np.concatenate(([0], np.cumsum(counts)))
        left_out = np.searchsorted(self._left_out, rows, "right") - np.searchsorted(self._left_out, rows)
        found = super().gather(documents, stop, loads)
        return Sequences(self._packing, found, starts, lengths, firsts, documents, left_out)

    def _with_lines(self, needed: Sequence[int], draw: Draw, stop: Future[None] | None) -> Lines:
        """Return the lines of these row groups, and those that were kept. Threads may do so at once."""
        kept = dict(self._lines[draw].of) if draw in self._lines else {}
        kept |= {group: self._line(group, draw, stop) for group in needed if group not in kept}
        # Those of two windows: batches may be at the border of both.
        for group in evictions(kept, 2 * max(1, self._working_set), needed):
            del kept[group]
        lines = Lines(kept)
        others = {other: those for other, those in self._lines.items() if other != draw}
        self._lines = dict([*others.items(), (draw, lines)][-MOST_DRAWS:])
        return lines

    def _line(self, group: int, draw: Draw, stop: Future[None] | None) -> Line:
        """Return the documents of a row group in the order of an epoch."""
        first, count = int(self._first_documents[group]), int(self._documents[group])
        documents = super().gather(np.arange(first, first + count), stop)
        lengths, differing = lengths_in(documents, self._packing)
        if differing is not None:
            row, how = differing
            raise DataError(f"{self._locate(first + row).text}: {how}: packed columns need equal lengths in each row")
        self._note_failed(group, documents)
        order = np.arange(count)
        if draw is not None:
            _, number = self.row_groups.of(group)  # as in the dataset alone, also in a mixture
            order = KeyedPermutation(count, derive_key("documents", *draw, number))[:]
        sequences = int(self._sequences[group])
        if self._shifts[group] < 0:
            self._shifts[group] = shift_of(lengths, sequences, self._packing)
        try:
            return line_of(lengths, order, sequences, self._packing, int(self._shifts[group]))
        except ValueError as error:
            column, counted = self._packing.lengths, "were counted before"
            advice = "if a function of map made them, it must make the same values each time; else write the file again"
            if column is not None:
                counted = f"the column {column!r} says"
                advice = "it must have the number of values of each document: correct it, or pack without lengths="
            raise DataError(
                f"{self._locate(first).text} and the rest of its row group make {error}, as {counted}: {advice}"
            ) from error

    def _note_failed(self, group: int, documents: Records) -> None:
        """Divide the documents of a row group that are left out among its sequences. Warn of the first one."""
        for errors in (field for field in documents.layout.ragged if field.kind == "error"):
            failed = np.flatnonzero(documents.spans(errors)[:, 1] != NULL)
            if not len(failed):
                continue
            if not len(self._left_out):
                [text] = documents[failed[0] : failed[0] + 1].views(errors)
                log.warning(
                    'on_error="skip": %s: %s; the document is left out, and stats() counts such as skipped_rows',
                    self._locate(int(self._first_documents[group] + failed[0])).text,
                    str(text or b"", "utf-8"),
                )
            first, end = self._first_sequences[group : group + 2]
            others = self._left_out[(self._left_out < first) | (self._left_out >= end)]
            own = first + failed * (end - first) // len(documents)
            self._left_out = np.sort(np.concatenate((others, own)))
