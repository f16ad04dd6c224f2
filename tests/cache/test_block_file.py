"""Files over blocks: the contract of `io`, and few block lookups for small reads."""

from __future__ import annotations

import gzip
import io
import pickle
import random
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.cache.blocks.file import FIRST_WINDOW, BlockFile
from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.config import CacheConfig
from dataload.cache.memory import MemoryTier
from dataload.cache.origin.origin import Origin

LINES = b"".join(b"line %d of many\n" % number for number in range(40_000))  # 0.7 MB
BLOCK = 150_000


@pytest.fixture
def path() -> Any:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/file/lines.txt", LINES)
    yield "/file/lines.txt"
    memory.rm("/file", recursive=True)


@pytest.fixture
def file(path: str) -> BlockFile:
    return opened(path, BLOCK)


def opened(path: str, block: int) -> BlockFile:
    origin = Origin(fsspec.filesystem("memory"))
    return BlockFile(Blocks(origin, MemoryTier(1 << 30), CacheConfig(block_bytes=block)), Object.of(origin.info(path)))


@given(seed=st.integers(0, 1 << 30), block=st.sampled_from([1000, 65_536, BLOCK, 1 << 22]))
def test_any_sequence_of_calls_is_as_on_a_plain_file(seed: int, block: int) -> None:
    fsspec.filesystem("memory").pipe_file("/file/any.txt", LINES)
    draw, plain, file = random.Random(seed), io.BytesIO(LINES), opened("/file/any.txt", block)
    for _ in range(60):
        size = draw.choice([0, 1, 17, 5000, FIRST_WINDOW, 100_000, 400_000])
        call = draw.choice(["read", "seek", "back", "readinto", "readline", "read_buffer", "peek"])
        if call == "seek":
            assert plain.seek(position := draw.randrange(len(LINES) + 10)) == file.seek(position)
        elif call == "back":
            assert plain.seek(-size, io.SEEK_END) == file.seek(-size, io.SEEK_END)
        elif call == "readinto":
            one, other = bytearray(size), bytearray(size)
            assert plain.readinto(one) == file.readinto(other)
            assert one == other
        elif call == "read_buffer":
            assert file.read_buffer(size).to_pybytes() == plain.read(size)
        elif call == "peek":
            ahead = file.peek(1)
            assert LINES[plain.tell() :].startswith(ahead)
            assert ahead or plain.tell() >= len(LINES)
        else:
            assert getattr(plain, call)(size) == getattr(file, call)(size)
        assert plain.tell() == file.tell()


def test_small_reads_look_blocks_up_seldom(file: BlockFile) -> None:
    read = b"".join(iter(lambda: file.read(100), b""))
    assert read == LINES
    assert file._blocks.tier.stats()["hits"] < 20  # of 7,000 reads


def test_lines(file: BlockFile) -> None:
    assert b"".join(file) == LINES
    assert file._blocks.tier.stats()["hits"] < 20
    file.seek(0)
    assert file.readlines() == LINES.splitlines(keepends=True)
    file.seek(5)
    assert file.readline(3) == LINES[5:8]
    file.seek(0)
    assert io.TextIOWrapper(file).readline() == "line 0 of many\n"


def test_lines_longer_than_what_is_looked_at_at_once(path: str) -> None:
    long = b"x" * 300_000 + b"\n" + b"y" * 10
    fsspec.filesystem("memory").pipe_file("/file/long.txt", long)
    assert list(opened("/file/long.txt", BLOCK)) == [long[:300_001], b"y" * 10]


def test_a_jump_reads_little(file: BlockFile) -> None:
    file.seek(300_000)
    file.read(10)
    assert file._blocks.tier.stats()["misses"] == 1
    assert len(file._window[2]) <= FIRST_WINDOW


def test_a_closed_file_is_closed(file: BlockFile) -> None:
    file.read(10)
    file.close()
    file.close()
    assert file.closed
    assert len(file._window[2]) == 0  # the view holds a map and a descriptor
    for ask in (
        lambda: file.read(1),
        lambda: file.read(0),
        lambda: file.readline(),
        lambda: file.peek(),
        lambda: file.seek(0),
        lambda: file.tell(),
        lambda: file.readinto(bytearray(1)),
        lambda: file.read_buffer(1),
        lambda: next(file),
        lambda: pickle.dumps(file),
    ):
        with pytest.raises(ValueError, match="closed"):
            ask()


def test_it_is_a_file_for_reading(file: BlockFile) -> None:
    assert isinstance(file, io.BufferedIOBase)
    assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
    with pytest.raises(io.UnsupportedOperation):
        file.write(b"x")
    with pytest.raises(ValueError, match=r"lines\.txt: cannot seek"):
        file.seek(0, 7)
    buffer = bytearray(10)
    assert file.readinto1(buffer) == 10
    assert bytes(buffer) == LINES[:10]
    assert LINES.startswith(file.read1(0) or b"line")
    assert io.BufferedReader(file).read(5) == LINES[10:15]


def test_a_pickled_file_stands_where_it_stood(file: BlockFile) -> None:
    file.seek(1234)
    copy = pickle.loads(pickle.dumps(file))
    assert copy.read(100) == LINES[1234:1334]
    assert file.tell() == 1234


def test_what_readers_of_compressed_files_do(path: str, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/file/lines.txt.gz", gzip.compress(LINES))
    fs = fsspec.filesystem("tiercache", fs=memory, cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)
    with fs.open("/file/lines.txt.gz", compression="infer") as file:
        assert file.read() == LINES
    with fs.open("/file/lines.txt.gz", "rt", compression="gzip") as file:
        assert file.readline() == "line 0 of many\n"
    with fs.open("/file/lines.txt", "r", encoding="ascii", newline="\n", block_size=0) as file:
        assert file.read() == LINES.decode()
