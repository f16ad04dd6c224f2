"""The arena maps records of files and copies other records."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dataload.rows.mmap_arena import MmapArena

WORDS = 3  # a record of 24 bytes divides no page


def records(rows: int, first: int) -> bytes:
    return np.arange(first, first + rows * WORDS, dtype=np.int64).tobytes()


def mapped(path: Path) -> str:
    return "\n".join(line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line)


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(records(1000, 0) + b"what lies behind the records")
    return path


def words(found: npt.NDArray[np.uint8]) -> list[list[int]]:
    rows: list[list[int]] = found.view(np.int64).tolist()
    return rows


def view(path: Path, rows: int) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))[: rows * WORDS * 8]


def test_rows_of_all_slots_in_one_gather(blob: Path) -> None:
    arena = MmapArena(3, 1000, WORDS * 8)
    arena.put(0, memoryview(bytearray(records(10, 5000))))
    arena.put(2, view(blob, 1000))
    per = arena.rows_per_slot
    found = arena.take(np.array([2 * per + 999, 3, 2 * per]))
    assert words(found) == [[2997, 2998, 2999], [5009, 5010, 5011], [0, 1, 2]]


def test_a_file_is_mapped_and_memory_copied(blob: Path) -> None:
    arena, memory = MmapArena(2, 1000, WORDS * 8), bytearray(records(4, 0))
    arena.put(0, view(blob, 1000))
    arena.put(1, memoryview(memory))
    with blob.open("r+b") as file:
        file.write(np.int64(77).tobytes())
    memory[:8] = np.int64(77).tobytes()
    assert [row[0] for row in words(arena.take(np.array([0, arena.rows_per_slot])))] == [77, 0]


def test_a_cleared_slot_unmaps_its_file(blob: Path) -> None:
    arena = MmapArena(2, 1000, WORDS * 8)
    arena.put(1, view(blob, 1000))
    assert mapped(blob).count("\n") == 0
    assert mapped(blob)
    arena.put(1, memoryview(bytearray(records(1, 9))))
    assert not mapped(blob)
    assert words(arena.take(np.array([arena.rows_per_slot]))) == [[9, 10, 11]]
    arena.put(0, view(blob, 1000))
    del arena
    assert not mapped(blob)


def test_a_shorter_blob_leaves_nothing_of_the_one_before(blob: Path) -> None:
    arena = MmapArena(1, 1000, WORDS * 8)
    arena.put(0, view(blob, 1000))
    arena.put(0, memoryview(b""))
    assert words(arena.take(np.array([999]))) == [[0, 0, 0]]


def test_records_of_odd_sizes() -> None:
    arena = MmapArena(2, 5000, 3)
    arena.put(1, memoryview(bytes(range(250)) * 60))
    assert arena.take(np.array([arena.rows_per_slot + 4999, arena.rows_per_slot])).tolist() == [
        [247, 248, 249],
        [0, 1, 2],
    ]
