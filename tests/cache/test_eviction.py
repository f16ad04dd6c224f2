"""What is evicted for a new blob, in which order, and how much of the index an admission reads for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataload.cache.division import Division, Need, divide
from dataload.cache.local.eviction import Eviction, release_if_enough
from dataload.cache.local.index import AFTER_ALL, Index, Row
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

    assert max(admit(number) for number in range(count, count + 100)) < 20
    assert [found.name for found in folder.index.transient()] == [row("a", 100 + place).name for place in range(count)]


def test_a_transient_row_is_as_old_as_its_admission(index: Index) -> None:
    """The fill of a row that is admitted last may have started first."""
    for number in (1, 0):
        new = row("a", number, 1 + number, pinned=True)
        assert index.admit(new, limit=1 << 20, region=1 << 20, allow_transient=True) is None
    assert [found.name for found in index.transient()] == [row("a", number).name for number in (1, 0)]


def pinned(dataset: str, *numbers: int, since: int) -> list[Row]:
    return [row(dataset, number, since + place, pinned=True) for place, number in enumerate(numbers)]


def parts(*names: str, since: int) -> list[Row]:
    keys = [BlobKey("origin", "bucket/a", "version", name) for name in names]
    return [Row(key.digest, key.name, SIZE, since + place) for place, key in enumerate(keys)]


NEED = need_of("a", 20, window=2)
IN_ORDER = sorted(range(20), key=lambda number: row("a", number).group)
STAY, PASS = IN_ORDER[:7], IN_ORDER[7:]
DIVIDED = Division(2 * SIZE, 20 * SIZE, row("a", PASS[0]).group, NEED.groups)
OTHERS = pinned("b", *range(8), since=30)  # no loader needs them
OLD, NEW = pinned("a", *STAY[:6], since=20), row("a", STAY[6], pinned=True)
LATE = [row("a", number, 40 + place) for place, number in enumerate(PASS[:2])]  # transient
EXTRA = pinned("a", *PASS[2:4], since=50)  # pinned before another loader began
BLOCKS, FOOTERS = parts("0-4096", "4096-8192", since=60), parts("footers", "info", "manifest", since=70)
PASSING = row("a", PASS[5])


@pytest.mark.parametrize(
    ("rows", "new", "before", "expected"),
    [
        pytest.param([*OLD, *LATE], NEW, 0, ([], "pinned"), id="it fits"),
        pytest.param([*OLD, *OTHERS[:4]], NEW, 23, (OLD[:3], "pinned"), id="no running process used them"),
        pytest.param([*OLD, *OTHERS[:4]], NEW, AFTER_ALL, (OLD[:3], "pinned"), id="lru"),
        pytest.param([*OLD, *OTHERS[:3], *BLOCKS[:1]], NEW, 22, (OTHERS[:3], "pinned"), id="no loader needs them"),
        pytest.param([*OLD, *EXTRA, *BLOCKS], NEW, 0, ([*EXTRA, BLOCKS[0]], "pinned"), id="above the share"),
        pytest.param([*OLD, *BLOCKS, *LATE], NEW, 0, (BLOCKS[:1], "pinned"), id="blocks"),
        pytest.param([*OTHERS, *LATE], PASSING, 0, (LATE[:1], "transient"), id="it passes"),
        pytest.param([*OTHERS, *EXTRA], PASSING, 0, (OTHERS[:1], "transient"), id="others fill the region"),
        pytest.param([*FOOTERS, NEW, *OLD], PASSING, 0, ([NEW], "transient"), id="the rest of a full region"),
    ],
)
def test_what_is_evicted_for_a_blob(
    index: Index, rows: list[Row], new: Row, before: int, expected: tuple[list[Row], str]
) -> None:
    limit, evicted = 10 * SIZE, list[bytes]()
    index.enter(rows)

    def remove(digests: Iterable[bytes]) -> int:
        evicted.extend(digests := [*digests])
        return index.drop(*digests)

    found = "pinned"
    if index.shortage(SIZE, limit=limit, region=DIVIDED.region).pinned > 0:
        choices = Eviction(index).choices(new, limit, DIVIDED, before)
        chosen = next(each for each in choices if release_if_enough(each.missing, each.victims, remove))
        found = "pinned" if chosen.pinned else "transient"
    names = {each.digest: each.name for each in rows}
    assert ([names[digest] for digest in evicted], found) == ([each.name for each in expected[0]], expected[1])


def test_nothing_is_evicted_for_a_blob_that_does_not_fit(index: Index) -> None:
    index.enter(OTHERS)
    choices = Eviction(index).choices(row("c", 0), 8 * SIZE, Division(), 0)
    assert not any(release_if_enough(each.missing, each.victims, index.drop) for each in choices)
    assert len(index.rows()) == len(OTHERS)
