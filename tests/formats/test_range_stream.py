"""Byte ranges are read while the next ones are fetched, within a memory limit."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.buffer_pool import BufferPool
from dataload.cache.config import CacheConfig
from dataload.cache.memory import MemoryTier
from dataload.cache.origin.origin import Origin
from dataload.errors import DataError
from dataload.formats import range_stream
from dataload.formats.range_stream import HeldBeginning, RangeStream

SIZE = 10_000
CONTENT = np.random.default_rng(0).bytes(SIZE)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Blocks, Object]:
    path = tmp_path_factory.mktemp("stream") / "x"
    path.write_bytes(CONTENT)
    blocks = Blocks(Origin(fsspec.filesystem("file")), MemoryTier(1 << 20), CacheConfig(block_bytes=1000))
    return blocks, Object.of(blocks.origin.info(str(path)))


def opened(blocks: Blocks, obj: Object, ranges: list[tuple[int, int]], room: int) -> RangeStream:
    return RangeStream(partial(blocks.submit, blocks.fetch_into, obj), obj, ranges, room)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_stream, "LARGEST_PIECE", 128)
    monkeypatch.setattr(range_stream, "SMALLEST_PIECE", 16)


@given(
    borders=st.lists(st.integers(0, SIZE), min_size=2, max_size=8).map(sorted),
    room=st.integers(0, 2 * SIZE),
    data=st.data(),
)
def test_each_range_reads_forward_beside_the_others(origin: Any, borders: list[int], room: int, data: Any) -> None:
    check_reads(origin, list(zip(borders[::2], borders[1::2], strict=False)), room, data)


@given(room=st.integers(0, 20), data=st.data())
def test_ranges_that_overlap(origin: Any, room: int, data: Any) -> None:
    """As those of chunks whose size lacks a header. Pieces of two ranges may begin at the same byte."""
    check_reads(origin, [(0, 26), (16, 60)], room, data, again=True)


def check_reads(origin: Any, ranges: list[tuple[int, int]], room: int, data: Any, *, again: bool = False) -> None:
    """Check reads of the ranges in turns. again: some go back to the first byte of their range."""
    at = [start for start, _ in ranges]
    with opened(*origin, ranges, room) as file:
        for _ in range(data.draw(st.integers(1, 12))):
            number = data.draw(st.integers(0, len(ranges) - 1))
            if again and data.draw(st.booleans()):
                at[number] = ranges[number][0]
            size = data.draw(st.integers(0, ranges[number][1] - at[number]))
            file.seek(at[number])
            assert bytes(file.read_buffer(size)) == CONTENT[at[number] : at[number] + size]
            assert file.tell() == at[number] + size
            at[number] += size


@pytest.mark.parametrize("room", [0, 1, 10])
@pytest.mark.parametrize("ranges", [[], [(7, 7)], [(7, 7), (7, 9), (9, 9), (9, 12), (SIZE, SIZE)]])
def test_ranges_without_bytes(origin: Any, ranges: list[tuple[int, int]], room: int) -> None:
    assert [span for span in range_stream.pieces(ranges, room) if span[0] >= span[1]] == []
    with opened(*origin, ranges, room) as file:
        file.wait()
        for start, stop in ranges:
            file.seek(start)
            assert bytes(file.read_buffer(stop - start)) == CONTENT[start:stop]


def test_it_holds_no_more_than_it_may(origin: Any) -> None:
    ranges, held = [(0, 4000), (5000, 9000)], []
    with opened(*origin, ranges, 1000) as file:
        for _ in range(80):
            assert len(file.read(50)) == 50
            held.append(sum(len(piece.memory) for piece in file._pieces.values()))
    assert max(held) <= 1000
    assert min(held[:40]) > 500


def test_what_fits_is_fetched_once(origin: Any) -> None:
    blocks, obj = origin
    before = blocks.stats()["bytes_origin"]
    with opened(blocks, obj, [(100, 1100), (2000, 2100)], 2000) as file:
        file.wait()
        for _ in range(2):
            file.seek(100)
            assert file.read(1000) == CONTENT[100:1100]
    assert blocks.stats()["bytes_origin"] == before + 1100


def test_blocks_that_are_kept_are_read(origin: Any) -> None:
    blocks, obj = origin
    blocks.read(obj, 3000, 5000)
    before = blocks.stats()["bytes_origin"]
    with opened(blocks, obj, [(3500, 4500)], 2000) as file:
        file.seek(3500)
        assert file.read(1000) == CONTENT[3500:4500]
    assert blocks.stats()["bytes_origin"] == before


def test_more_pieces_than_threads_from_kept_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a block in a thread must not wait for a thread."""
    monkeypatch.setattr(range_stream, "LARGEST_PIECE", 150)
    (tmp_path / "x").write_bytes(CONTENT)
    blocks = Blocks(Origin(fsspec.filesystem("file")), MemoryTier(1 << 20), CacheConfig(block_bytes=100))
    obj = Object.of(blocks.origin.info(str(tmp_path / "x")))
    blocks.read(obj, 0, SIZE)
    with opened(blocks, obj, [(0, SIZE)], SIZE) as file:
        assert file.read(SIZE) == CONTENT


def test_bytes_of_no_range(origin: Any) -> None:
    with opened(*origin, [(0, 100)], 1000) as file:
        file.seek(-SIZE, 2)
        assert file.read(10) == CONTENT[:10]
        file.seek(95)
        with pytest.raises(DataError, match="bytes 95 to 105 belong to no column"):
            file.read(10)


@pytest.mark.parametrize("room", [1000, 2 * SIZE])
def test_ranges_beyond_the_end_of_the_object(origin: Any, room: int) -> None:
    blocks, obj = origin
    blocks.read(obj, 0, SIZE)  # Cached blocks would fill only a part of the memory.
    with pytest.raises(DataError, match=f"bytes up to {SIZE + 1}, it has {SIZE}"):
        opened(blocks, obj, [(0, 100), (SIZE - 10, SIZE + 1)], room)


def test_a_failed_piece_is_told_where_it_is_read(tmp_path: Path) -> None:
    blocks = Blocks(Origin(fsspec.filesystem("file")), MemoryTier(1 << 20), CacheConfig(block_bytes=1000))
    (tmp_path / "x").write_bytes(CONTENT)
    obj = Object.of(blocks.origin.info(str(tmp_path / "x")))
    (tmp_path / "x").unlink()
    with opened(blocks, obj, [(0, 100)], 1000) as file, pytest.raises(OSError, match="x"):
        file.read(10)


def test_a_stream_that_cannot_start_returns_its_memory(origin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = BufferPool(kept_bytes=None)
    monkeypatch.setattr(range_stream, "LEAST_POOLED", 0)
    monkeypatch.setattr(range_stream, "fetched_buffers", buffers)
    _, obj = origin

    def fail(start: int, memory: memoryview) -> Future[None]:
        raise OSError("no network")

    for ranges, error in (([(0, 1000)], OSError), ([(0, SIZE + 1)], DataError)):
        with pytest.raises(error):
            RangeStream(fail, obj, ranges, 2 * SIZE)
    buffers.clear()
    assert buffers._in_use == 0


def test_the_memory_of_held_ranges_is_used_again_unless_a_table_or_a_request_has_a_view_of_it(
    origin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_stream, "LEAST_POOLED", 0)
    monkeypatch.setattr(range_stream, "fetched_buffers", BufferPool(kept_bytes=None))
    blocks, obj = origin
    ranges = [(0, 1000), (5000, 6000)]

    def memory_of(stream: RangeStream) -> int:
        return pa.py_buffer(stream._memory[0]).address

    with opened(blocks, obj, ranges, SIZE) as stream:
        stream.wait()
        first = memory_of(stream)
        assert bytes(stream._memory[5000]) == CONTENT[5000:6000]
    with opened(blocks, obj, ranges, SIZE) as stream:
        stream.wait()
        assert memory_of(stream) == first
        kept = stream.read_buffer(100)
    with opened(blocks, obj, ranges, SIZE) as stream:
        stream.wait()
        assert memory_of(stream) != first, "a table that reads the memory would change"
    assert bytes(kept) == CONTENT[:100]

    pending, under_way = Future[None](), list[memoryview]()
    pending.set_running_or_notify_cancel()

    def fetch(start: int, memory: memoryview) -> Future[None]:
        under_way.append(memory)
        return pending

    with RangeStream(fetch, obj, ranges, SIZE) as stream:
        written = memory_of(stream)
    with opened(blocks, obj, ranges, SIZE) as stream:
        stream.wait()
        assert memory_of(stream) != written, "the request would overwrite another row group"
    under_way.clear()


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_bytes_that_nobody_fetched_are_zeros(size: int) -> None:
    """Memory is used again: a damaged footer must not make a decoder read what an earlier file left there."""
    for _ in range(8):
        memoryview(pa.allocate_buffer(size)).cast("B")[:] = b"\xaa" * size

    def fetch(_start: int, memory: memoryview) -> Future[None]:
        memory[:] = b"\x01" * len(memory)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    with HeldBeginning(fetch, Object("x", size, "1"), [(100, 200), (size - 10, size)]) as beginning:
        found = beginning.source.read()
    assert found == bytes(100) + b"\x01" * 100 + bytes(size - 210) + b"\x01" * 10


ENDING = """
import atexit, sys
import subprocess
import sys
from concurrent.futures import Future
from itertools import count
import pyarrow as pa, pyarrow.parquet as pq
from dataload.cache.blocks.reader import Object
from dataload.formats.range_stream import RangeStream
from dataload.runtime.executor import DaemonExecutor

sink = pa.BufferOutputStream()
pq.write_table(pa.table({"x": range(1000)}), sink)
content = sink.getvalue().to_pybytes()
has_begun, call = Future(), None

def fetch(position, memory):
    done = Future()
    if "stalled" not in sys.argv:
        memory[:] = content[position : position + len(memory)]
        done.set_result(None)
    has_begun.done() or has_begun.set_result(None)
    return done

def read():
    for _ in count():
        pq.ParquetFile(RangeStream(fetch, Object("x", len(content), "v"), [(0, len(content))], 0)).read()

atexit.register(lambda: print("reads" if not call.done() else type(call.exception()).__name__))  # after the others
call = DaemonExecutor(1, "reads").submit(read)
has_begun.result()
raise SystemExit(3)
"""


@pytest.mark.parametrize("origin_is", ["fast", "stalled"])
def test_reads_by_arrow_end_before_the_interpreter_does(origin_is: str) -> None:
    """Python unwinds a thread that comes back from C++ later, which aborts the process."""
    ran = subprocess.run([sys.executable, "-c", ENDING, origin_is], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "CancelledError\n", "")
