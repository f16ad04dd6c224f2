"""One blob on disk: its bytes from offset 0, so that they can be mapped, and a footer behind them that proves them.

Footer, little-endian, 80 bytes: magic (8), format version (u32), reserved (u32), digest of the key (32), payload bytes
(u64), XXH3-128 of the payload (16), XXH3-64 of the footer up to here (8).
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import xxhash

from dataload.errors import CorruptEntry

MAGIC = b"dataload"
VERSION = 0
_FIELDS = struct.Struct("<8sII32sQ16s")
FOOTER_BYTES = _FIELDS.size + 8


def create(path: Path) -> int:
    """Descriptor of a new, empty file. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def allocate(descriptor: int, size: int) -> mmap.mmap:
    """Room for `size` payload bytes and a footer, mapped writable. Raises OSError, also when the disk is full."""
    # Writing through a map of a sparse file on a full disk is a SIGBUS; running out of room here is an error.
    os.posix_fallocate(descriptor, 0, size + FOOTER_BYTES)
    return mmap.mmap(descriptor, size + FOOTER_BYTES)


def seal(written: mmap.mmap, digest: bytes) -> None:
    """Write the footer behind the payload of a map made by `allocate`."""
    with memoryview(written) as whole, whole[:-FOOTER_BYTES] as payload:
        fields = _FIELDS.pack(MAGIC, VERSION, 0, digest, len(payload), xxhash.xxh3_128_digest(payload))
        whole[-FOOTER_BYTES:] = fields + xxhash.xxh3_64_digest(fields)


def open_map(path: Path, digest: bytes, proven: set[tuple[bytes, int, int]]) -> memoryview:
    """The payload as a read-only view that stays valid when the file is unlinked.

    proven: (digest, inode, mtime) of the files whose payload this process has checked; added to.
    Raises OSError when there is no such file and CorruptEntry when it is not, byte for byte, what was sealed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_size < FOOTER_BYTES:
            raise CorruptEntry(f"{path} is cut short: {status.st_size} bytes are less than a footer")
        whole = memoryview(mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
    payload = whole[:-FOOTER_BYTES]
    checksum = _read_footer(path, bytes(whole[-FOOTER_BYTES:]), digest, len(payload))
    identity = (digest, status.st_ino, status.st_mtime_ns)
    if identity not in proven:
        if xxhash.xxh3_128_digest(payload) != checksum:
            raise CorruptEntry(f"{path} does not match its checksum")
        proven.add(identity)
    return payload


def _read_footer(path: Path, footer: bytes, digest: bytes, size: int) -> bytes:
    magic, version, _, key, length, checksum = _FIELDS.unpack_from(footer)
    if magic != MAGIC or footer[_FIELDS.size :] != xxhash.xxh3_64_digest(footer[: _FIELDS.size]):
        raise CorruptEntry(f"{path} has no valid footer")
    if (version, key, length) != (VERSION, digest, size):
        raise CorruptEntry(f"{path} holds another blob: version {version}, key {key.hex()}, {length} bytes")
    return bytes(checksum)
