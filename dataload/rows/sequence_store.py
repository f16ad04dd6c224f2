"""Access to sequences of packed documents by number."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from dataload.catalog.locations import Location
from dataload.errors import DataError
from dataload.formats.schema import Field
from dataload.rows.columns import Array
from dataload.rows.packing import Line, Packing, line_of, ranges
from dataload.rows.row_groups import RowGroups
from dataload.rows.row_store import Draw, Loads, RowStore, Selected
from dataload.rows.sequences import Sequences, lengths_in
from dataload.samplers.interval_index import IntervalIndex
from dataload.samplers.keys import derive_key
from dataload.samplers.lru import LRU
from dataload.samplers.permutation import KeyedPermutation


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
        selected: Callable[[int], Selected] | None = None,
        *,
        by_use: bool = False,
    ) -> None:
        self._packing = packing
        self._documents, self._sequences, self._locate = documents, sequences, locate
        self._first_documents = np.concatenate(([0], np.cumsum(documents)))
        self._first_sequences = np.concatenate(([0], np.cumsum(sequences)))
        self._group_index = IntervalIndex(self._first_sequences)
        super().__init__(row_groups, capacity, selected, by_use=by_use)

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._keep_lines()

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(SequenceStore, by_use=self._by_use)
        own = self._packing, self._documents, self._sequences, self._locate
        _, how, state = super().__reduce__()
        return make, (*own, *how), state

    def serve(self, loader: object, working_set: int, ahead: int, transient_ahead: int = 0) -> tuple[int, int]:
        served = super().serve(loader, working_set, ahead, transient_ahead)
        self._keep_lines()
        return served

    def _keep_lines(self) -> None:
        """Keep the lines of the row groups of two windows: batches may be at the border of both."""
        self._lines: LRU[tuple[int, Draw], Line] = LRU(2 * max(1, self._working_set))

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
        numbers = rows - self._first_sequences[groups]
        by_group = np.argsort(groups, kind="stable")
        present, places = np.unique(groups[by_group], return_index=True)
        parts = list(zip(present.tolist(), np.split(by_group, places[1:]), strict=True))
        super().gather(self._first_documents[present], stop, loads)  # requests the row groups, all at once
        lines = [self._lines.get((group, draw), partial(self._line, stop)) for group, _ in parts]
        firsts, counts, starts, stops = (np.empty_like(rows) for _ in range(4))
        for line, (_, chosen) in zip(lines, parts, strict=True):
            of_line = numbers[chosen]
            firsts[chosen] = line.firsts[of_line]
            starts[chosen], stops[chosen] = line.borders[of_line], line.borders[of_line + 1]
            counts[chosen] = line.stops[of_line] - firsts[chosen]
        ends = np.concatenate(([0], np.cumsum(counts)))
        begins, documents = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int64)
        skipped = np.zeros(ends[-1], np.int64)
        for line, (group, chosen) in zip(lines, parts, strict=True):
            pieces, places = ranges(firsts[chosen], counts[chosen]), ranges(ends[chosen], counts[chosen])
            begins[places] = line.begins[pieces]
            documents[places] = line.documents[pieces] + self._first_documents[group]
            if line.skipped is not None:
                skipped[places] = line.skipped[pieces]
        found = super().gather(documents, stop)
        name = self._packing.column
        starts, stops = np.repeat(starts, counts), np.repeat(stops, counts)
        cut = np.maximum(starts - begins, 0)  # of the piece, which is of the sequence before
        sizes = found.spans(next(field for field in self._fields if field.name == name))[:, 1] - skipped
        lengths = np.minimum(begins + sizes, stops) - begins - cut
        return Sequences(self._packing, found, skipped + cut, lengths, ends, documents)

    def _line(self, stop: Future[None] | None, key: tuple[int, Draw]) -> Line:
        """Return the documents of a row group in the order of an epoch."""
        group, draw = key
        first, count = int(self._first_documents[group]), int(self._documents[group])
        documents = super().gather(np.arange(first, first + count), stop)
        lengths, differing = lengths_in(documents, self._packing)
        if differing is not None:
            row, how = differing
            raise DataError(f"{self._locate(first + row).text}: {how}: packed columns need equal lengths in each row")
        order = np.arange(count)
        if draw is not None:
            _, number = self.row_groups.of(group)  # as in the dataset alone, also in a mixture
            order = KeyedPermutation(count, derive_key("documents", *draw, number))[:]
        try:
            return line_of(lengths, order, int(self._sequences[group]), self._packing)
        except ValueError as error:
            raise DataError(
                f"{self._locate(first).text} and the rest of its row group have {error}, as were counted before: if a "
                "function of map made them, it must make the same values each time; else write the file again"
            ) from error
