"""The rows of the index that an admission reads and changes, to evict what passes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataload.cache.division import Need, divide
from dataload.cache.local.eviction import Pin
from dataload.cache.local.index import Index, Row
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import BlobKey, Kind, group_number

SIZE, WINDOW = 4096, 100
COUNT = 1000  # row groups that fit


def key(number: int) -> BlobKey:
    return BlobKey("origin", "bucket/a", "version", Kind.RECORDS, f"{number}", f"{number}")


def need_of(count: int) -> Need:
    groups = [group_number(key(number).digest) for number in range(count)]
    return Need.of(bytes(16), np.array(groups, np.uint64), np.full(count, SIZE), WINDOW * SIZE, 16)


def test_an_admission_reads_few_rows_of_the_index_whatever_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, read = COUNT * SIZE, []
    tier = LocalTier(tmp_path / "cache", limit)
    folder = tier.folder
    policy = Pin(folder, divide(limit, [[need_of(3000)]]), limit)
    row_of = Index._row

    def counted(*given: Any) -> Row | None:
        read.append(given)
        return row_of(*given)

    monkeypatch.setattr(Index, "_row", counted)

    def admit(number: int) -> int:
        read.clear()
        assert folder.reserve(policy.admit(key(number), SIZE), "", limit, policy)
        return len(read)

    assert max(admit(number) for number in range(COUNT)) == 0
    assert COUNT <= admit(COUNT) < 1.1 * COUNT  # once for a division: which rows it keeps
    assert max(admit(number) for number in range(COUNT + 1, 2000)) < 20
    kept = {row.name for row in folder.index.kept()}
    assert kept == {key(n).name for n in range(2000) if policy.admit(key(n), SIZE).kept}
    passing = [key(number).name for number in range(2000) if key(number).name not in kept]
    assert [row.name for row in folder.index.transient()] == passing[len(kept) - COUNT :]


def test_a_transient_row_is_as_old_as_its_admission(tmp_path: Path) -> None:
    """The fill of a row that is admitted last may have started first."""
    tier = LocalTier(tmp_path / "cache", 1 << 30)
    index = tier.folder.index
    for number in (1, 0):
        new = Row(key(number).digest, Kind.RECORDS, key(number).name, SIZE, 1 + number, kept=False)
        assert index.admit([new], limit=1 << 20)
    assert [found.name for found in index.transient()] == [key(number).name for number in (1, 0)]


def test_kept_rows_leave_space_for_what_is_read_at_a_time(tmp_path: Path) -> None:
    """Even if they are larger than the footers told."""
    limit = COUNT * SIZE
    tier = LocalTier(tmp_path / "cache", limit)
    folder = tier.folder
    policy = Pin(folder, divide(limit, [[need_of(3000)]]), limit)
    for number in range(3000):
        assert folder.reserve(policy.admit(key(number), 3 * SIZE), "", limit, policy)
    assert sum(row.size for row in folder.index.transient()) >= policy.region - 3 * SIZE > 50 * SIZE
    assert folder.index.used_bytes() <= limit
