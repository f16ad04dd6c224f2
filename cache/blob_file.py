"""The file of one blob: the payload at offset 0, so that it can be mapped, followed by checksums, name and footer.

All numbers are little-endian. After the payload come:

- an XXH3-64 for each 64 KiB of the payload (the last segment may be shorter), so that a small read verifies little;
- the blob's name in UTF-8, for rebuilding a lost index;
- a footer of 72 bytes: magic (8), format version (u16), kind of the blob (u16), bytes of the name (u32), bytes of the
  payload (u64), digest of the key (32), XXH3-64 of checksums and name (8), XXH3-64 of the preceding footer fields (8).
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from dataload.cache.tier import BlobKey, Kind, Span
from dataload.errors import CorruptEntry
from dataload.runtime.filemap import FileMap

MAGIC = b"dataload"
VERSION = 2
SEGMENT_BYTES = 64 << 10
DISK_BLOCK = 4 << 10  # the unit in which disks allocate
ENTRY_BYTES = 1 << 10  # of a file in its folder and in the index, at most, unless its name is long
# Bytes of one write call. For a large write the kernel allocates a large folio, from memory that is cold in the CPU's
# caches. Small folios come from recently freed memory.
WRITTEN_BYTES = 32 << 10
_KINDS = {kind.value: kind for kind in Kind}
_SUM_BYTES = 8
_FIELDS = struct.Struct("<8sHHIQ32s8s")
FOOTER_BYTES = _FIELDS.size + _SUM_BYTES
MOST_BLOBS = 1 << 17  # about 40 MB; beyond it, the oldest entry is dropped and verified again on the next read
STRUCTURE = 1  # the bit of a blob whose structure is checked
WHOLE = -1  # every bit set
OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # the permissions of other users to write
FILE_NAME = re.compile(r"[0-9a-f]{64}")  # the digest of the blob's key
_trusted: set[int] = set()  # numbers of filesystems, see `trust`


class Footer(NamedTuple):
    """The footer of a blob file.

    Attributes:
        kind: What the blob holds.
        payload: Bytes of the payload.
        name: Bytes of the name.
        digest: Digest of the blob's key.
        checksum: XXH3-64 of the payload's checksums and the name.
    """

    kind: Kind
    payload: int
    name: int
    digest: bytes
    checksum: bytes

    @property
    def size(self) -> int:
        """Size in bytes that the whole file must have."""
        return self.payload + _num_segments(self.payload) * _SUM_BYTES + self.name + FOOTER_BYTES


class VerifiedSegments:
    """A thread-safe record of what was verified: the lowest bit is `STRUCTURE`, the next one is that of segment 0.

    A file whose inode or modification time has changed counts as unverified. The record has at most `MOST_BLOBS` blobs.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._known: dict[bytes, tuple[int, int, int]] = {}

    def bits(self, digest: bytes, status: os.stat_result) -> int:
        """Return what is verified of a file, as bits; `WHOLE`: all of it."""
        inode, modified_at, bits = self._known.get(digest, (0, 0, 0))
        return bits if (inode, modified_at) == (status.st_ino, status.st_mtime_ns) else 0

    def add(self, digest: bytes, status: os.stat_result, bits: int) -> None:
        """Add what was verified of a file."""
        with self._mutex:
            bits |= self.bits(digest, status)
            self._known[digest] = (status.st_ino, status.st_mtime_ns, bits)
            if len(self._known) > MOST_BLOBS:
                del self._known[next(iter(self._known))]


def path_in(blobs: str | Path, digest: bytes) -> str:
    """Return the path of a blob's file below the folder `blobs`."""
    name = digest.hex()
    return f"{blobs}/{name[0]}/{name}"


def file_bytes(payload: int, name: str) -> int:
    """Return the size in bytes of the file of a blob with a payload of `payload` bytes."""
    return Footer(Kind.RECORDS, payload, len(name.encode()), b"", b"").size


def allocated(size: int) -> int:
    """Return the bytes that a disk allocates for a file of `size` bytes, with its entries in folder and index."""
    return -(-size // DISK_BLOCK) * DISK_BLOCK + ENTRY_BYTES


def size_on_disk(payload: int, name: str) -> int:
    """Return the bytes that a disk allocates for a blob with a payload of `payload` bytes."""
    return allocated(file_bytes(payload, name))


def create(path: str | Path) -> int:
    """Create an empty file and return a descriptor of it. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def seal(written: mmap.mmap, payload: int, kind: Kind, digest: bytes, name: str) -> None:
    """Write checksums, name and footer after the first `payload` bytes of a map of at least `file_bytes` bytes."""
    with memoryview(written)[: file_bytes(payload, name)] as whole:
        whole[payload:] = _end(whole[:payload], kind, digest, name)


def write_whole(descriptor: int, payload: memoryview, kind: Kind, digest: bytes, name: str) -> int:
    """Write a whole sealed blob into an empty open file. Return its size in bytes.

    Raises:
        OSError: The file cannot be written.
    """
    parts: list[bytes | memoryview] = [payload, _end(payload, kind, digest, name)]
    size = sum(map(len, parts))
    done = os.writev(descriptor, parts)
    while done < size:  # The disk is full, or a signal came.
        done += os.write(descriptor, b"".join(parts)[done:])
    return done


def map_written(descriptor: int, size: int, payload: int, digest: bytes, verified: VerifiedSegments) -> memoryview:
    """Return the payload of an open file that this process has just sealed, as `open_map` does.

    Raises:
        OSError: The kernel cannot map the file.
    """
    verified.add(digest, os.fstat(descriptor), WHOLE)
    return FileMap(descriptor, size).view[:payload]


def _end(payload: memoryview, kind: Kind, digest: bytes, name: str) -> bytes:
    """Return the checksums, the name and the footer that follow a payload."""
    encoded = name.encode()
    proof = _sums(payload) + encoded
    fields = _FIELDS.pack(MAGIC, VERSION, kind.value, len(encoded), len(payload), digest, xxhash.xxh3_64_digest(proof))
    return proof + fields + xxhash.xxh3_64_digest(fields)


def _sums(payload: memoryview) -> bytes:
    segments = (payload[start : start + SEGMENT_BYTES] for start in range(0, len(payload), SEGMENT_BYTES))
    return b"".join(map(xxhash.xxh3_64_digest, segments))


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """Open an existing file to write it and to map it, for the duration of the block. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write(descriptor: int, sealed: mmap.mmap, size: int) -> None:
    """Write the first `size` bytes of a map into an open file. Raises OSError."""
    done = 0
    with memoryview(sealed) as whole:
        while done < size:
            with whole[done : min(size, done + WRITTEN_BYTES)] as chunk:
                done += os.pwrite(descriptor, chunk, done)


def size_from(end: bytes, where: str) -> int:
    """Return the size in bytes of the sealed blob that ends in `end`.

    Raises:
        CorruptEntry: `end` has no valid footer.
    """
    return _parse(where, end[-FOOTER_BYTES:], None).size


def payload_of(sealed: memoryview, digest: bytes, where: str) -> memoryview:
    """Verify a whole sealed blob in memory and return its payload.

    Raises:
        CorruptEntry: The footer, the key or a checksum does not match.
    """
    footer = _parse(where, sealed[-FOOTER_BYTES:], len(sealed))
    payload, proof = sealed[: footer.payload], sealed[footer.payload : -FOOTER_BYTES]
    if footer.digest != digest:
        raise CorruptEntry(f"{where} holds another blob, with key {footer.digest.hex()}")
    sums = _sums(payload)
    if xxhash.xxh3_64_digest(proof) != footer.checksum or sums != proof[: len(sums)]:
        raise CorruptEntry(f"{where} does not match its checksums")
    return payload


def open_map(
    path: str | Path, digest: bytes, verified: VerifiedSegments, span: Span | None = None, key: BlobKey | None = None
) -> memoryview:
    """Return the payload, or `span` of it, as a read-only view that stays valid when the file is unlinked.

    Args:
        path: The blob's file.
        digest: Digest of the blob's key.
        verified: What this process has verified. The other segments that `span` touches are verified now.
        span: First byte and end of the range to return. None: the whole payload.
        key: The blob's key, which knows the size and, for the whole payload, the structure. None: any will do.

    Raises:
        OSError: The file is missing or unreadable.
        CorruptEntry: The file differs from the sealed blob.
    """
    descriptor = _open(path)
    try:
        footer, status = _footer(path, descriptor)
        mapped = FileMap(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    if footer.digest != digest:
        raise CorruptEntry(f"{path} holds another blob, with key {footer.digest.hex()}")
    if key is not None:
        key.check_size(footer.payload, path)
    payload = mapped.view[: footer.payload]
    start, stop = (0, footer.payload) if span is None else (span[0], min(span[1], footer.payload))
    if stop > start:
        mapped.read_in(start, stop, path)
        _check(path, mapped, footer, range(start // SEGMENT_BYTES, _num_segments(stop)), status, verified)
    if key is not None and span is None and not verified.bits(digest, status) & STRUCTURE:
        key.check_structure(payload, path)
        verified.add(digest, status, WHOLE)
    return payload[start:stop]


def read_footer(path: str | Path) -> tuple[Footer, str, os.stat_result]:
    """Return the footer and name of a blob, and the status of its file, without reading the payload.

    Raises:
        OSError: The file is missing or unreadable.
        CorruptEntry: The file has no valid footer.
    """
    descriptor = _open(path)
    try:
        footer, status = _footer(path, descriptor)
        proof = os.pread(descriptor, footer.size - footer.payload - FOOTER_BYTES, footer.payload)
    finally:
        os.close(descriptor)
    if xxhash.xxh3_64_digest(proof) != footer.checksum:
        raise CorruptEntry(f"{path} has damaged checksums")
    try:
        return footer, proof[len(proof) - footer.name :].decode(), status
    except UnicodeDecodeError as error:
        raise CorruptEntry(f"{path} has no valid name") from error


def _open(path: str | Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptEntry(f"{path} is a symbolic link, not a blob") from error
        raise


def _footer(path: str | Path, descriptor: int) -> tuple[Footer, os.stat_result]:
    status = os.fstat(descriptor)
    is_of_others = status.st_mode & OF_OTHERS or status.st_uid not in (0, os.geteuid())
    if is_of_others and status.st_dev not in _trusted and not _is_read_only(descriptor):
        raise CorruptEntry(
            f"{path} is of user {status.st_uid} with mode {status.st_mode:o}: others may have written it"
        )
    found = os.pread(descriptor, FOOTER_BYTES, max(0, status.st_size - FOOTER_BYTES))
    return _parse(path, found, status.st_size), status


def trust(folder: Path) -> None:
    """Use the blobs of this folder's filesystem whatever owner and mode they have."""
    _trusted.add(folder.stat().st_dev)


def _is_read_only(descriptor: int) -> bool:
    """Return whether a file is on a read-only mount, such as an image, whose users are those of another machine."""
    return bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)


def _parse(path: str | Path, found: bytes | memoryview, file_bytes: int | None) -> Footer:
    if found[_FIELDS.size :] != xxhash.xxh3_64_digest(found[: _FIELDS.size]):
        raise CorruptEntry(f"{path} has no valid footer")
    magic, version, kind, name, payload, digest, checksum = _FIELDS.unpack_from(found)
    if (magic, version) != (MAGIC, VERSION) or kind not in _KINDS:
        raise CorruptEntry(f"{path} has another format: {magic!r} {version}, kind {kind}")
    footer = Footer(_KINDS[kind], payload, name, digest, checksum)
    if file_bytes is not None and footer.size != file_bytes:
        raise CorruptEntry(f"{path} has {file_bytes} bytes, its footer says {footer.size}")
    return footer


def _check(
    path: str | Path,
    mapped: FileMap,
    footer: Footer,
    segments: range,
    status: os.stat_result,
    verified: VerifiedSegments,
) -> None:
    requested = ((1 << len(segments)) - 1) << segments.start
    known = verified.bits(footer.digest, status) >> 1
    if known & requested == requested:
        return
    mapped.read_in(footer.payload, footer.size, path)
    whole = mapped.view
    proof = whole[footer.payload : -FOOTER_BYTES]
    if not known and xxhash.xxh3_64_digest(proof) != footer.checksum:
        raise CorruptEntry(f"{path} has damaged checksums")
    for segment in segments:
        if not known >> segment & 1:
            start, offset = segment * SEGMENT_BYTES, segment * _SUM_BYTES
            found = xxhash.xxh3_64_digest(whole[start : min(start + SEGMENT_BYTES, footer.payload)])
            if found != proof[offset : offset + _SUM_BYTES]:
                raise CorruptEntry(f"{path} does not match its checksum from byte {start} on")
    verified.add(footer.digest, status, requested << 1)


def _num_segments(size: int) -> int:
    return -(-size // SEGMENT_BYTES)
