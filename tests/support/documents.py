"""Documents whose values tell where they are, and what batches of their sequences must hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather

PLACES = 1 << 20  # values of a document, at most
PAD, LABEL_PAD = -7, -100


def lengths_around(length: int, count: int, rng: np.random.Generator) -> list[int | None]:
    """Return lengths of documents: 0, 1, those around `length`, ten times it, nulls, and others."""
    usual = [0, 1, length - 1, length, length + 1, 10 * length, None]
    found = [usual[n] if n < len(usual) else int(rng.integers(0, 3 * length)) for n in rng.integers(0, 14, count)]
    return [1, *found[1:]]  # at least one value


def write(path: Path, lengths: Sequence[int | None], row_group_size: int) -> Path:
    """Write documents of these lengths, None for a null: Parquet or Arrow IPC, by the suffix."""
    tokens = [
        None if length is None else [row * PLACES + place for place in range(length)]
        for row, length in enumerate(lengths)
    ]
    labels = [None if each is None else [value % 1000 for value in each] for each in tokens]
    table = pa.table(
        {
            "id": range(len(lengths)),
            "tokens": pa.array(tokens, pa.list_(pa.int64())),
            "labels": pa.array(labels, pa.list_(pa.int32())),
        }
    )
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=row_group_size)
    else:
        feather.write_feather(table, path, chunksize=row_group_size, compression="uncompressed")
    return path


def segments_of(batch: dict[str, Any], length: int) -> list[list[tuple[int, int, int]]]:
    """Return the pieces of each sequence of a batch: the document, its first place, and the end. Check all else."""
    tokens, labels = batch["tokens"].numpy(), batch["labels"].numpy()
    segments, positions = batch["segment_ids"].numpy(), batch["position_ids"].numpy()
    assert tokens.dtype == np.int64
    assert labels.dtype == np.int32
    assert segments.dtype == positions.dtype == np.int32
    found: list[list[tuple[int, int, int]]] = []
    for row in range(len(tokens)):
        assert tokens[row].shape == labels[row].shape == segments[row].shape == positions[row].shape == (length,)
        filled = int((segments[row] > 0).sum())
        assert (segments[row, :filled] > 0).all()  # The padding comes last.
        assert (tokens[row, filled:] == PAD).all()
        assert (labels[row, filled:] == LABEL_PAD).all()
        assert not segments[row, filled:].any()
        assert not positions[row, filled:].any()
        assert (labels[row, :filled] == tokens[row, :filled] % 1000).all()
        borders = np.flatnonzero(np.diff(segments[row, :filled], prepend=0)).tolist()
        assert segments[row, borders].tolist() == list(range(1, len(borders) + 1))
        pieces = []
        for start, stop in itertools.pairwise([*borders, filled]):
            own = tokens[row, start:stop]
            document, place = divmod(int(own[0]), PLACES)
            assert own.tolist() == list(range(own[0], own[0] + len(own)))  # in document order
            assert positions[row, start:stop].tolist() == list(range(len(own)))
            pieces.append((document, place, place + len(own)))
        found.append(pieces)
    return found


def check_epoch(
    sequences: Iterable[Sequence[tuple[int, int, int]]], lengths: Sequence[int | None], length: int, *, split: bool
) -> None:
    """Check that each value comes once; and, without a split, that no document is cut that fits into a sequence."""
    pieces = sorted(piece for sequence in sequences for piece in sequence)
    ends = dict.fromkeys(range(len(lengths)), 0)
    for document, start, stop in pieces:
        assert start == ends[document]
        ends[document] = stop
        size = lengths[document]
        assert size is not None
        if not split:
            assert stop - start == min(length, size - start)
    assert ends == {row: size or 0 for row, size in enumerate(lengths)}
