"""One blob on disk: its bytes from offset 0, so that they can be mapped, and behind them what proves them.

Behind the payload, little-endian: an XXH3-64 for each 64 KiB of it (the last piece may be shorter), so that a small
read checks little; the blob's name in UTF-8, from which a lost index is made anew; and a footer of 72 bytes: magic (8),
format version (u32), bytes of the name (u32), bytes of the payload (u64), digest of the key (32), XXH3-64 of checksums
and name (8), XXH3-64 of the footer up to here (8).
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from dataload.cache.local.verified import WHOLE, VerifiedPieces
from dataload.cache.tier import Span
from dataload.errors import CorruptEntry
from dataload.runtime.filemap import FileMap

MAGIC = b"dataload"
VERSION = 1
PIECE_BYTES = 64 << 10
# In one call. A kernel that keeps files in large folios makes one of what comes at once, of memory that nobody had
# for long; small ones are of memory that was in use a moment ago.
WRITTEN_BYTES = 32 << 10
_SUM_BYTES = 8
_FIELDS = struct.Struct("<8sIIQ32s8s")
FOOTER_BYTES = _FIELDS.size + _SUM_BYTES


class Footer(NamedTuple):
    """What a blob's file says of itself. payload, name: bytes of each; checksum: of what lies between them and it."""

    payload: int
    name: int
    digest: bytes
    checksum: bytes

    @property
    def size(self) -> int:
        """Bytes that the whole file must have."""
        return self.payload + _pieces(self.payload) * _SUM_BYTES + self.name + FOOTER_BYTES


def size_on_disk(payload: int, name: str) -> int:
    """Bytes of the file that holds a blob of `payload` bytes called `name`."""
    return Footer(payload, len(name.encode()), b"", b"").size


def create(path: Path) -> int:
    """Descriptor of a new, empty file. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def seal(written: mmap.mmap, payload: int, digest: bytes, name: str) -> None:
    """Write behind the first `payload` bytes of a map, of `size_on_disk` bytes at least, what proves them."""
    with memoryview(written)[: size_on_disk(payload, name)] as whole:
        sums = _sums(whole[:payload])
        proof, encoded = sums + name.encode(), len(name.encode())
        fields = _FIELDS.pack(MAGIC, VERSION, encoded, payload, digest, xxhash.xxh3_64_digest(proof))
        whole[payload:] = proof + fields + xxhash.xxh3_64_digest(fields)


def _sums(payload: memoryview) -> bytes:
    pieces = (payload[start : start + PIECE_BYTES] for start in range(0, len(payload), PIECE_BYTES))
    return b"".join(map(xxhash.xxh3_64_digest, pieces))


def write(path: Path, sealed: mmap.mmap, size: int) -> None:
    """Write the first `size` bytes of a map into an existing file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        done = 0
        with memoryview(sealed) as whole:
            while done < size:
                with whole[done : min(size, done + WRITTEN_BYTES)] as some:
                    done += os.pwrite(descriptor, some, done)
    finally:
        os.close(descriptor)


def size_from(end: bytes, where: str) -> int:
    """Bytes of the whole sealed blob that ends in `end`. Raises CorruptEntry when no valid footer is there."""
    return _parse(where, end[-FOOTER_BYTES:], None).size


def payload_of(sealed: memoryview, digest: bytes, where: str) -> memoryview:
    """The payload of a sealed blob in memory, each byte of it checked. Raises CorruptEntry."""
    footer = _parse(where, sealed[-FOOTER_BYTES:], len(sealed))
    payload, proof = sealed[: footer.payload], sealed[footer.payload : -FOOTER_BYTES]
    if footer.digest != digest:
        raise CorruptEntry(f"{where} holds another blob, with key {footer.digest.hex()}")
    sums = _sums(payload)
    if xxhash.xxh3_64_digest(proof) != footer.checksum or sums != proof[: len(sums)]:
        raise CorruptEntry(f"{where} does not match its checksums")
    return payload


def open_map(
    path: str | Path, digest: bytes, proven: VerifiedPieces, span: Span | None = None, *, just_sealed: bool = False
) -> memoryview:
    """The payload, or `span` of it, as a read-only view that stays valid when the file is unlinked.

    proven: what this process has checked; only the pieces that `span` touches and that are not in it are checked.
    just_sealed: this process wrote the checksums a moment ago: what they prove needs no second look.
    Raises OSError when there is no such file or it cannot be read, and CorruptEntry when it is not, byte for byte, what
    was sealed.
    """
    descriptor = _open(path)
    try:
        footer, status = _footer(path, descriptor)
        mapped = FileMap(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    if footer.digest != digest:
        raise CorruptEntry(f"{path} holds another blob, with key {footer.digest.hex()}")
    if just_sealed:
        proven.add(digest, status, WHOLE)
    start, stop = (0, footer.payload) if span is None else (span[0], min(span[1], footer.payload))
    if stop > start:
        _read_in(mapped, start, stop)
        _check(path, mapped, footer, range(start // PIECE_BYTES, _pieces(stop)), status, proven)
    return mapped.view[: footer.payload][start:stop]


def read_footer(path: str | Path) -> tuple[Footer, str, os.stat_result]:
    """Footer and name of a blob, and its file's status, without a look at the payload.

    Raises OSError when the file cannot be read, CorruptEntry when it ends in no valid footer.
    """
    descriptor = _open(path)
    try:
        footer, status = _footer(path, descriptor)
        proof = os.pread(descriptor, footer.size - footer.payload - FOOTER_BYTES, footer.payload)
    finally:
        os.close(descriptor)
    if xxhash.xxh3_64_digest(proof) != footer.checksum:
        raise CorruptEntry(f"{path} has damaged checksums")
    return footer, proof[len(proof) - footer.name :].decode(), status


def _open(path: str | Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptEntry(f"{path} is a symbolic link, not a blob") from error
        raise


def _footer(path: str | Path, descriptor: int) -> tuple[Footer, os.stat_result]:
    status = os.fstat(descriptor)
    found = os.pread(descriptor, FOOTER_BYTES, max(0, status.st_size - FOOTER_BYTES))
    return _parse(path, found, status.st_size), status


def _parse(path: str | Path, found: bytes | memoryview, file_bytes: int | None) -> Footer:
    if found[_FIELDS.size :] != xxhash.xxh3_64_digest(found[: _FIELDS.size]):
        raise CorruptEntry(f"{path} has no valid footer")
    magic, version, name, payload, digest, checksum = _FIELDS.unpack_from(found)
    footer = Footer(payload, name, digest, checksum)
    if (magic, version) != (MAGIC, VERSION):
        raise CorruptEntry(f"{path} is of another format: {magic!r} {version}")
    if (
        file_bytes is not None and footer.size != file_bytes
    ):  # Python's numbers have no end: a length of 2^64 - 1 is only wrong.
        raise CorruptEntry(f"{path} has {file_bytes} bytes, its footer says {footer.size}")
    return footer


def _read_in(mapped: FileMap, start: int, stop: int) -> None:
    """Have the disk read these bytes now: where it cannot, an error is raised instead of a SIGBUS at first touch."""
    try:
        mapped.populate(start, stop)
    except OSError as error:
        if error.errno != errno.EINVAL:  # An older kernel does not know how.
            raise OSError(errno.EIO, f"the disk cannot read bytes {start}-{stop - 1} of a blob") from error


def _check(
    path: str | Path, mapped: FileMap, footer: Footer, pieces: range, status: os.stat_result, proven: VerifiedPieces
) -> None:
    asked = ((1 << len(pieces)) - 1) << pieces.start
    known = proven.bits(footer.digest, status)
    if known & asked == asked:
        return
    _read_in(mapped, footer.payload, footer.size)
    whole = mapped.view
    proof = whole[footer.payload : -FOOTER_BYTES]
    if not known and xxhash.xxh3_64_digest(proof) != footer.checksum:
        raise CorruptEntry(f"{path} has damaged checksums")
    for piece in pieces:
        if not known >> piece & 1:
            start, at = piece * PIECE_BYTES, piece * _SUM_BYTES
            found = xxhash.xxh3_64_digest(whole[start : min(start + PIECE_BYTES, footer.payload)])
            if found != proof[at : at + _SUM_BYTES]:
                raise CorruptEntry(f"{path} does not match its checksum from byte {start} on")
    every = (1 << _pieces(footer.payload)) - 1
    proven.add(footer.digest, status, WHOLE if (known | asked) == every else asked)


def _pieces(size: int) -> int:
    return -(-size // PIECE_BYTES)
