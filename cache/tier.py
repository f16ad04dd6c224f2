"""The contract every tier keeps: get, or get-or-fill, and a read-only map of the bytes either way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from dataload.runtime.redact import redacted

Allocate = Callable[[int], memoryview]
"""`allocate(size)` gives the writable memory, of exactly `size` bytes, to write a blob into. Called once a fill."""

Span = tuple[int, int]
"""Bytes [start, stop) of a blob, 0 <= start <= stop; cut to its size."""

Fill = Callable[[Allocate], None]
"""Makes one blob: fetches or computes it, asks `allocate` for room as soon as the size is known, and writes it all.
What it raises reaches the caller of `get_or_fill`, and nothing is kept."""


@dataclass(frozen=True)
class BlobKey:
    """Which bytes: `what` of one version of one object. Equal keys mean equal bytes, for ever.

    name: what it is called in messages, and the prefix by which it can be evicted; holds no credentials.
    digest: 32 bytes, made from every part.
    """

    origin: str
    path: str
    version: str
    what: str
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(digest_size=32, person=b"dataload blob")
        for part in (self.origin, self.path, self.version, self.what):
            encoded = part.encode(errors="surrogateescape")  # A path on disk need not be UTF-8.
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        object.__setattr__(self, "digest", digest.digest())

    @property
    def name(self) -> str:
        return f"{redacted(self.path)}#{self.what}".encode(errors="replace").decode()


class NoRoomError(Exception):
    """What was to be kept would not be: there is no room for it, or the place is failing."""


class Tier(Protocol):
    """A place that keeps blobs of any size.

    Notes: every method may be called from any thread of any process. A blob is filled by one caller at a time; the
    others wait for it. Views stay valid after the blob is evicted. Trouble of the tier itself is never raised: it is
    counted, and the caller gets its bytes from `fill`.
    """

    def get(self, key: BlobKey, span: Span | None = None) -> memoryview | None:
        """The blob, or `span` of it, as a read-only view of bytes, or None when it is not kept here.

        Notes: a tier that checks what it reads checks what `span` touches, so a small one is cheap.
        """

    def get_or_fill(
        self, key: BlobKey, fill: Fill, span: Span | None = None, *, to_keep: int | None = None
    ) -> memoryview:
        """As `get`; when the blob is not kept here, `fill` makes all of it first.

        to_keep: bytes of the blob, where it is not to be made unless it will be kept. If it would not be, nothing is
            taken from anywhere: `allocate` raises NoRoomError, and so does this, unless `fill` catches it.
        """

    def key_lock(self, key: BlobKey, *, elect: bool = True) -> AbstractContextManager[Any]:
        """While it lasts, nobody else on this host is in it with the same key: to make several blobs at once.

        elect: of hosts that share them one is to be at it, too; gives, where another is, what to call to wait for it.
        Notes: best effort. Whoever has waited too long, or cannot lock, goes on all the same: twice the work, never a
        deadlock.
        """

    def fetch_from_cluster(self, keys: Iterable[BlobKey]) -> list[memoryview] | None:
        """These blobs, and keep them here, if other hosts that share them have made them all; else None."""

    def lease(self, keys: Iterable[BlobKey]) -> None:
        """Have those of these blobs that are kept stay as long as this process runs, where the tier can say so."""

    def is_transient(self, keys: Iterable[BlobKey]) -> bool:
        """Whether there is room that blobs pass through, and some of these, which do not stay, would find it there."""

    def stats(self) -> dict[str, Any]:
        """Totals of this process: hits, misses, waits, bytes, errors."""


def cut(blob: memoryview, span: Span | None) -> memoryview:
    """`span` of a whole blob; None: all of it."""
    return blob if span is None else blob[span[0] : span[1]]


class Draft:
    """A blob being filled, in memory; tiers that keep blobs elsewhere override `room` and `publish`."""

    def __init__(self, key: BlobKey) -> None:
        self.key = key
        self.payload: memoryview | None = None

    def allocate(self, size: int) -> memoryview:
        if self.payload is not None:
            raise RuntimeError(f"{self.key.name}: a fill allocates once")
        self.payload = self.room(size)
        return self.payload

    def room(self, size: int) -> memoryview:
        """Writable memory of `size` bytes."""
        return memoryview(bytearray(size))

    def publish(self, span: Span | None = None) -> memoryview:
        """The filled blob, or `span` of it, read-only."""
        if self.payload is None:
            raise RuntimeError(f"{self.key.name}: the fill allocated nothing")
        return cut(self.payload.toreadonly(), span)
