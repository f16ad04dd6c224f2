"""Blob files: detected damage, undetected damage, and the parts that a read verifies."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from dataload.cache import blob_file
from dataload.cache.buffer_pool import BufferPool
from dataload.cache.local import fsck
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, Kind
from dataload.errors import CorruptEntry
from dataload.runtime.filemap import FileMap

SEGMENT = blob_file.SEGMENT_BYTES
DATA = b"".join(number.to_bytes(4, "little") for number in range(SEGMENT))  # four segments
NAME = "seaux/été/данные-0.parquet#block 0-262144"
DIGEST = bytes(range(32))
SUMS = len(DATA)
NAMED = SUMS + 4 * 8
FOOTER = NAMED + len(NAME.encode())


def write(path: Path, data: bytes = DATA, name: str = NAME, digest: bytes = DIGEST) -> Path:
    size = blob_file.file_bytes(len(data), name)
    buffer = mmap.mmap(-1, size)
    buffer[: len(data)] = data
    blob_file.seal(buffer, len(data), Kind.BLOCK, digest, name)
    descriptor = blob_file.create(path)
    blob_file.write(descriptor, buffer, size)
    os.close(descriptor)
    assert path.stat().st_size == size
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "blob")


@pytest.mark.parametrize("size", [0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT])
def test_any_size_and_name(tmp_path: Path, size: int) -> None:
    file = write(tmp_path / "blob", DATA[:size])
    assert blob_file.open_map(file, DIGEST, blob_file.VerifiedSegments()) == DATA[:size]
    footer, name, status = blob_file.read_footer(file)
    assert (footer.payload, footer.size, name, footer.digest) == (size, status.st_size, NAME, DIGEST)
    assert footer.kind is Kind.BLOCK


def flip(file: Path, at: int) -> None:
    whole = bytearray(file.read_bytes())
    whole[at] ^= 1
    file.write_bytes(whole)


@pytest.mark.parametrize(
    "at", [0, SEGMENT, SUMS - 1, SUMS, NAMED - 1, NAMED, FOOTER - 1, *range(FOOTER, FOOTER + 72, 4), -1]
)
def test_a_flipped_bit_is_found(file: Path, at: int) -> None:
    flip(file, at)
    with pytest.raises(CorruptEntry):
        blob_file.open_map(file, DIGEST, blob_file.VerifiedSegments())


@pytest.mark.parametrize("at", [SUMS, NAMED - 1, NAMED, FOOTER - 1, FOOTER, -1])
def test_a_flipped_bit_is_found_without_a_look_at_the_payload(file: Path, at: int) -> None:
    flip(file, at)
    with pytest.raises(CorruptEntry):
        blob_file.read_footer(file)


@pytest.mark.parametrize("size", [0, 1, 71, 72, SUMS, NAMED, FOOTER, FOOTER + 71])
def test_a_file_cut_short_is_found(file: Path, size: int) -> None:
    os.truncate(file, size)
    with pytest.raises(CorruptEntry):
        blob_file.open_map(file, DIGEST, blob_file.VerifiedSegments())
    with pytest.raises(CorruptEntry):
        blob_file.read_footer(file)


@pytest.mark.parametrize(("field", "at"), [("<I", 12), ("<Q", 16)])
@pytest.mark.parametrize("value", [2**64 - 1, 2**63, len(DATA) + 1, 0])
def test_lengths_that_cannot_be_are_harmless(file: Path, field: str, at: int, value: int) -> None:
    """Even if the footer's own checksum matches."""
    whole = bytearray(file.read_bytes())
    struct.pack_into(field, whole, FOOTER + at, value & (2 ** (8 * struct.calcsize(field)) - 1))
    whole[-8:] = xxhash.xxh3_64_digest(whole[FOOTER:-8])
    file.write_bytes(whole)
    for read in (
        lambda: blob_file.open_map(file, DIGEST, blob_file.VerifiedSegments()),
        lambda: blob_file.read_footer(file),
    ):
        with pytest.raises(CorruptEntry):
            read()


def test_another_blob_or_format_is_never_misread(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptEntry, match="another blob"):
        blob_file.open_map(write(tmp_path / "other", digest=bytes(32)), DIGEST, blob_file.VerifiedSegments())
    good = file.read_bytes()
    for at in (0, 8):  # magic and version
        whole = bytearray(good)
        whole[FOOTER + at] ^= 2
        whole[-8:] = xxhash.xxh3_64_digest(whole[FOOTER:-8])
        file.write_bytes(whole)
        with pytest.raises(CorruptEntry, match="another format"):
            blob_file.open_map(file, DIGEST, blob_file.VerifiedSegments())


def test_a_symbolic_link_is_no_blob(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(CorruptEntry, match="symbolic link"):
        blob_file.open_map(tmp_path / "link", DIGEST, blob_file.VerifiedSegments())
    with pytest.raises(OSError, match="symbolic"), blob_file.opened(tmp_path / "link"):
        pass


def test_a_span_looks_only_at_its_pieces(file: Path) -> None:
    flip(file, 2 * SEGMENT)
    proven = blob_file.VerifiedSegments()
    for start, stop in (
        (0, 10),
        (SEGMENT - 1, 2 * SEGMENT),
        (3 * SEGMENT, 9 * SEGMENT),
        (5, 5),
        (2 * SEGMENT, 2 * SEGMENT),
    ):
        assert blob_file.open_map(file, DIGEST, proven, (start, stop)) == DATA[start:stop]
    for start, stop in ((2 * SEGMENT, 2 * SEGMENT + 1), (2 * SEGMENT - 1, 2 * SEGMENT + 1), (0, 4 * SEGMENT)):
        with pytest.raises(CorruptEntry, match=f"byte {2 * SEGMENT} on"):
            blob_file.open_map(file, DIGEST, proven, (start, stop))


def test_what_is_proven_is_not_hashed_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    digest = xxhash.xxh3_64_digest
    monkeypatch.setattr(blob_file.xxhash, "xxh3_64_digest", lambda data: (hashed.append(len(data)), digest(data))[1])

    def segments(*span: int) -> int:
        hashed.clear()
        blob_file.open_map(file, DIGEST, proven, span or None)
        return hashed.count(SEGMENT)

    proven = blob_file.VerifiedSegments()
    assert [segments(0, 1), segments(0, SEGMENT), segments(1, SEGMENT + 1), segments(), segments(), segments(5, 9)] == [
        1,
        0,
        1,
        2,
        0,
        0,
    ]
    os.utime(file, ns=(0, 0))
    assert segments() == 4
    shutil.copy(file, file.with_name("copy"))
    os.utime(file.with_name("copy"), ns=(0, 0))
    file.with_name("copy").replace(file)
    assert segments() == 4


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_file, "MOST_BLOBS", 3)
    proven, status = blob_file.VerifiedSegments(), SimpleNamespace(st_ino=1, st_mtime_ns=2)
    for number in range(5):
        proven.add(bytes([number]), status, 1)
    assert [proven.bits(bytes([number]), status) for number in range(5)] == [0, 0, 1, 1, 1]


def test_a_fill_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    digest = xxhash.xxh3_64_digest
    monkeypatch.setattr(blob_file.xxhash, "xxh3_64_digest", lambda data: (hashed.append(len(data)), digest(data))[1])
    tier, key = LocalTier(tmp_path / "c"), BlobKey("origin", "été/x", "v", Kind.FOOTER)
    assert tier.get_or_fill(key, filler(DATA)) == DATA
    assert tier.get(key) == DATA
    assert hashed.count(SEGMENT) == 4
    assert tier.get_or_fill(key, filler(b""), (SEGMENT, SEGMENT + 5)) == DATA[SEGMENT : SEGMENT + 5]
    assert fsck.verify(tier.folder).problems == []
    assert fsck.evict(tier.folder, path="été") == blob_file.size_on_disk(len(DATA), "été/x#footer")


def filler(data: bytes) -> Any:
    def fill(allocate: Allocate) -> None:
        allocate(len(data))[:] = data

    return fill


def test_a_disk_that_cannot_read_is_an_error_and_no_signal(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is truncated after `fstat`, which the kernel reports like an unreadable sector."""
    real = os.fstat

    def fstat(descriptor: int) -> Any:
        status = real(descriptor)
        if status.st_ino == file.stat().st_ino and status.st_size > 2 * SEGMENT:
            os.truncate(file, 2 * SEGMENT)
            with file.open("r+b") as whole:
                whole.seek(FOOTER)
                whole.write(tail)  # leaves a hole, which reads as zeros
        return status

    tail = file.read_bytes()[FOOTER:]
    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(CorruptEntry):
        blob_file.open_map(file, DIGEST, blob_file.VerifiedSegments())


@pytest.mark.parametrize(("left", "proven"), [(2 * SEGMENT, False), (SUMS, False), (2 * SEGMENT, True)])
def test_a_disk_that_fails_while_a_blob_is_read_is_an_error_and_no_signal(
    file: Path, left: int, *, proven: bool
) -> None:
    """The kernel reports a truncated file like an unreadable sector. A SIGBUS would kill only the child."""
    known = blob_file.VerifiedSegments()
    if proven:
        blob_file.open_map(file, DIGEST, known)
    child = os.fork()
    if child == 0:
        blob_file.FileMap = lambda *given: (FileMap(*given), os.truncate(file, left))[0]
        try:
            blob_file.open_map(file, DIGEST, known)
        except OSError as error:
            os._exit(int(error.errno != errno.EIO))
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_write_may_take_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: real(descriptor, data[:SEGMENT], at))
    assert blob_file.open_map(write(tmp_path / "blob"), DIGEST, blob_file.VerifiedSegments()) == DATA


def test_buffers_are_used_again_unless_somebody_holds_a_view() -> None:
    buffers = BufferPool()
    first = buffers.take(1000)
    buffers.give_back(first)
    assert buffers.take(600) is first
    view = memoryview(first)[5:10]
    buffers.give_back(first)
    assert buffers.take(1000) is not first
    view.release()
    buffers.give_back(first)
    assert buffers.take(100) is not first, "the buffer is far too large"
    assert buffers.take(1000) is first


def test_a_pool_without_a_limit_takes_no_more_than_was_in_use_at_a_time() -> None:
    buffers = BufferPool(kept_bytes=None)
    small = [buffers.take(1000) for _ in range(3)]
    for buffer in small:
        buffers.give_back(buffer)
    large = buffers.take(2500)  # with two of the free buffers it would exceed the most that was in use
    assert buffers.take(1000) not in small[:2]
    buffers.give_back(large)
    assert buffers.take(2500) is large
    buffers.clear()
    assert buffers.take(1000) not in small


def test_a_buffer_is_not_much_larger_than_requested() -> None:
    buffers = BufferPool(kept_bytes=None, loose_fit=1.25)
    large = buffers.take(10 << 20)
    buffers.give_back(large)
    assert len(buffers.take(5 << 20)) == 6 << 20, "whole huge pages"


def test_a_garbage_collection_may_give_a_buffer_back_while_another_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = BufferPool()
    first, second = buffers.take(1000), buffers.take(1000)
    buffers.give_back(first)

    class Collecting(list[Any]):
        def remove(self, buffer: Any) -> None:
            buffers.give_back(second)  # as the finalizer of a stream does, in the same thread
            super().remove(buffer)

    buffers._free = Collecting(buffers._free)
    assert buffers.take(1000) is first
    assert buffers.take(1000) is second


def test_a_view_that_a_fill_kept_stays_as_it_was(tmp_path: Path) -> None:
    tier, kept = LocalTier(tmp_path / "c"), []

    def fill(allocate: Allocate) -> None:
        room = allocate(len(DATA))
        room[:] = DATA
        kept.append(room[:])

    tier.get_or_fill(BlobKey("origin", "x", "v", Kind.FOOTER), fill)
    tier.get_or_fill(BlobKey("origin", "y", "v", Kind.FOOTER), filler(bytes(len(DATA))))
    assert kept[0] == DATA
