"""The arena maps records of files and copies other records."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from maps import no_more_maps

from dataload.errors import ConfigError
from dataload.formats.schema import Layout, fields_of
from dataload.mapping.running import blob_of
from dataload.rows.arrow_decode import decode
from dataload.rows.collate import to_batch
from dataload.rows.mmap_arena import LONG_RECORD, MmapArena
from dataload.rows.open_row_groups import OpenRowGroups
from dataload.runtime.filemap import FileMap

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
        return FileMap(file.fileno(), path.stat().st_size).view[: rows * WORDS * 8]


def test_rows_of_all_slots_in_one_gather(blob: Path) -> None:
    arena = MmapArena(3, 1000, WORDS * 8)
    arena.put(0, memoryview(bytearray(records(10, 5000))))
    arena.put(2, view(blob, 1000))
    per = arena.rows_per_slot
    found = arena.take(np.array([2 * per + 999, 3, 2 * per]))
    assert words(found) == [[2997, 2998, 2999], [5009, 5010, 5011], [0, 1, 2]]


def test_long_records_take_few_addresses() -> None:
    """A common multiple of a page and of such a record has 512 MiB, of which a process has addresses for 262,144."""
    slots, size = 300_000, LONG_RECORD + 8
    arena = MmapArena(slots, 2, size)
    content = bytearray(2 * size)
    content[0], content[size : size + 3], content[-1] = 1, b"abc", 2
    arena.put(slots - 1, memoryview(content))
    arena.put(7, memoryview(b"def"))
    per = arena.rows_per_slot
    found = arena.take(np.array([per * (slots - 1) + 1, per * 7, per * (slots - 1)]))
    assert found.shape == (3, size)
    assert [bytes(record[:3]) for record in found] == [b"abc", b"def", bytes([1, 0, 0])]
    assert found[:, -1].tolist() == [2, 0, 0]


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


def test_a_file_that_can_no_longer_be_read_is_an_error(blob: Path) -> None:
    arena, content = MmapArena(1, 1000, WORDS * 8), view(blob, 1000)
    blob.write_bytes(b"")
    with pytest.raises(OSError, match="the disk cannot read the rows of an open row group"):
        arena.put(0, content)


def test_memory_that_is_no_map_of_a_blob_is_copied(blob: Path) -> None:
    """For private memory, older kernels return a map of other memory."""
    arena = MmapArena(1, 1000, WORDS * 8)
    with blob.open("rb") as file:
        shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    arena.put(0, memoryview(shared)[: 1000 * WORDS * 8])
    with blob.open("r+b") as file:
        file.write(np.int64(77).tobytes())
    assert words(arena.take(np.array([0])))[0][0] == 0


def test_a_shorter_blob_leaves_nothing_of_the_one_before(blob: Path) -> None:
    arena = MmapArena(1, 1000, WORDS * 8)
    arena.put(0, view(blob, 1000))
    arena.put(0, memoryview(b""))
    assert words(arena.take(np.array([999]))) == [[0, 0, 0]]


@pytest.mark.parametrize("is_file", [False, True])
def test_the_limit_of_memory_maps_is_named(blob: Path, *, is_file: bool) -> None:
    arena = MmapArena(100, 1000, WORDS * 8)
    content = view(blob, 1000) if is_file else memoryview(bytearray(records(10, 0)))
    with no_more_maps(), pytest.raises(ConfigError, match=r"no further memory map: raise vm\.max_map_count"):
        for slot in range(1, 100, 2):  # Another thread may free a few maps.
            arena.put(slot, content)
    arena.put(1, content)
    assert words(arena.take(np.array([arena.rows_per_slot + 9]))) == [[27, 28, 29]]


def open_row_groups() -> OpenRowGroups:
    """Return room for two row groups of two blobs of ten rows each."""
    layout = Layout(fields_of(pa.schema([("text", pa.string())])))
    return OpenRowGroups(2, np.array([0, 2, 4]), np.array([0, 10, 20, 30, 40]), layout)


def test_a_row_group_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    layout, path = Layout(fields_of(pa.schema([("text", pa.string())]))), tmp_path / "blob"
    table = pa.table({"text": [f"row {number}" for number in range(10)]})
    texts = decode(table, layout.fields, None, "", table.schema)
    path.write_bytes(blob_of(texts, 10, layout, ""))
    opened = open_row_groups()

    def content() -> memoryview:
        with path.open("rb") as file:
            return FileMap(file.fileno(), path.stat().st_size).view

    with pytest.raises(TypeError):
        opened.put(0, [content(), None])  # type: ignore[list-item]
    assert not mapped(path)
    assert 0 not in opened
    opened.put(0, [content(), content()])
    opened.put(1, [content(), content()])
    rows = np.array([0, 19, 39])
    taken = opened.take(rows, rows // 10)
    assert taken is not None
    assert to_batch(taken)["text"] == ["row 0", "row 9", "row 9"]


def test_records_of_odd_sizes() -> None:
    arena = MmapArena(2, 5000, 3)
    arena.put(1, memoryview(bytes(range(250)) * 60))
    assert arena.take(np.array([arena.rows_per_slot + 4999, arena.rows_per_slot])).tolist() == [
        [247, 248, 249],
        [0, 1, 2],
    ]
