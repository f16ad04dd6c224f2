"""The order in which transient rows are evicted, and how much of the index an admission reads for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataload.cache.division import Need, divide
from dataload.cache.local.index import Index, Row
from dataload.cache.local.surplus import TransientRows
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import BlobKey, group_number

SIZE = 4096


def row(dataset: str, number: int, used_at: int = 0, *, pinned: bool = False) -> Row:
    key = BlobKey("origin", f"bucket/{dataset}", "version", f"records {number}", f"records {number}")
    return Row(key.digest, key.name, SIZE, used_at, pinned=pinned)


def need_of(dataset: str, count: int, window: int) -> Need:
    groups = [group_number(row(dataset, number).digest) for number in range(count)]
    return Need.of(dataset.ljust(16).encode(), np.array(groups, np.uint64), np.full(count, SIZE), window * SIZE, 16)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    tier = LocalTier(tmp_path / "cache", 1 << 30)
    yield tier.folder.index


def test_an_admission_reads_few_rows_of_the_index_whatever_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, read = 900, []
    tier = LocalTier(tmp_path / "cache", count * SIZE)
    folder = tier.folder
    division = divide(count * SIZE, [[need_of("a", 3000, window=count)]])
    folder.index.enter(row("a", number, 1 + number) for number in range(count))
    row_of = Index._row

    def counted(*given: Any) -> Row | None:
        read.append(given)
        return row_of(*given)

    monkeypatch.setattr(Index, "_row", counted)

    def admit(number: int) -> int:
        read.clear()
        new = row("a", number, pinned=True)
        assert folder.reserve(new, "", count * SIZE, division, pin=True)
        return len(read)

    assert admit(count) < 1.1 * count
    assert max(admit(number) for number in range(count + 1, count + 100)) < 20
    assert [found.name for found in folder.index.transient()] == [row("a", 100 + place).name for place in range(count)]


def test_what_other_processes_evict_and_admit_counts(index: Index) -> None:
    division = divide(30 * SIZE, [[need_of("a", 40, window=10), need_of("b", 40, window=10)]])
    rows = [row(name, number, 1 + number) for name in "ab" for number in range(6)]
    index.enter(rows)
    transient, new = TransientRows(index), row("a", 30)
    assert list(islice(transient.victims(division, new), 1)) == rows[:1]
    index.drop(*(found.digest for found in rows[:4]))
    index.enter(row("b", number, 100 + number) for number in range(6, 9))
    expected = list(TransientRows(index).victims(division, new))
    assert expected[:6] == rows[6:]
    assert len(expected) == 11
    assert list(transient.victims(division, new)) == expected


def test_rows_that_could_not_be_evicted_come_again(index: Index) -> None:
    division = divide(30 * SIZE, [[need_of("a", 40, window=10)]])
    rows = [row("a", number, 1 + number) for number in range(6)]
    index.enter(rows)
    transient = TransientRows(index)
    for _ in range(2):
        assert list(transient.victims(division, row("a", 30))) == rows


def test_a_transient_row_is_as_old_as_its_admission(index: Index) -> None:
    """The fill of a row that is admitted last may have started first."""
    for number in (1, 0):
        new = row("a", number, 1 + number, pinned=True)
        assert index.admit(new, limit=1 << 20, region=1 << 20, allow_transient=True) is None
    assert [found.name for found in index.transient()] == [row("a", number).name for number in (1, 0)]
