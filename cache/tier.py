"""The interface of a cache tier: `get` and `get_or_fill` return read-only views of immutable blobs."""

# ruff: noqa: ARG002 (default bodies use no argument)

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Any, Protocol

from dataload.cache.division import Division, Need
from dataload.errors import CorruptEntry
from dataload.runtime.cached_property import cached_property
from dataload.runtime.redact import redacted

GROUP_BYTES = 8
PROOF_BYTES = 16
FILL_SECONDS = 120.0  # Then a thread that waits for a lock asks whether the lock's holder was stopped.
MAKE_SECONDS = 3600.0  # A process or host that runs, and makes a result for longer, hangs.

Allocate = Callable[[int], memoryview]
"""`allocate(size)` returns writable memory of exactly `size` bytes for the blob. A fill calls it once."""

Span = tuple[int, int]
"""Bytes [start, stop) of a blob, 0 <= start <= stop; clipped to its size."""

Check = Callable[["BlobKey", memoryview], object]
"""check(key, payload) raises any exception for a payload that does not have the structure of the blob."""

Fill = Callable[[Allocate], None]
"""Makes one blob: calls `allocate` as soon as the size is known, then writes all bytes.
If it raises, the error reaches the caller of `get_or_fill`, and the tier caches nothing."""


class Kind(StrEnum):
    """What a blob holds, as far as caches treat it differently, by `BlobKey.what`."""

    RECORDS = "records "  # of a row group: `what` begins with it
    INFO = "info"  # the first info of an object: it may be out of date, so hosts do not share it
    BLOCK = "block"  # of an object: `what` is START-STOP, in bytes
    OTHER = "other"

    @classmethod
    def of(cls, what: str) -> Kind:
        if what.startswith(cls.RECORDS):
            return cls.RECORDS
        return cls.INFO if what == cls.INFO else cls.BLOCK if re.fullmatch(r"\d+-\d+", what) else cls.OTHER


@dataclass(frozen=True)
class BlobKey:
    """The identity of a blob: `what` of one version of one object. Equal keys always mean equal bytes.

    Attributes:
        origin: Identity of the store.
        path: Path of the object in the store.
        version: Version of the object.
        what: Part or derivative of the object, such as a byte range. It tells the `Kind` of the blob.
        group: Name of the blobs of the object that are read together, such as those of a row group. "": none.
        check: Checks the structure of the blob, where a process first reads all of it; None: any bytes will do.
        size: Bytes of the blob; None: unknown.
        digest: Digest of all parts, 32 bytes. The last 8 are the number of the group, see `group_number`.
    """

    origin: str
    path: str
    version: str
    what: str
    group: str = ""
    check: Check | None = field(default=None, repr=False, compare=False)
    size: int | None = field(default=None, repr=False, compare=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        digest = _digest_of(32, self.origin, self.path, self.version, self.what)
        if self.group:
            digest = digest[:-GROUP_BYTES] + _digest_of(GROUP_BYTES, self.origin, self.path, self.version, self.group)
        object.__setattr__(self, "digest", digest)

    def __repr__(self) -> str:
        return f"BlobKey({self.name!r})"

    @cached_property
    def name(self) -> str:
        """See `blob_name`."""
        return blob_name(self.path, self.what)

    def proof(self, data: bytes | memoryview) -> bytes:
        """Return a digest of data and of this key. Each blob of metadata begins with it."""
        return hashlib.blake2b(data, digest_size=PROOF_BYTES, key=self.digest, person=b"dataload proof").digest()

    def proven(self, blob: memoryview) -> memoryview:
        """Return the data after its proof. Raise ValueError if the proof is of other data, or of another key."""
        proof, data = blob[:PROOF_BYTES], blob[PROOF_BYTES:]
        if proof != self.proof(data):
            raise ValueError("its proof is of other data, or of another key")
        return data

    def check_size(self, size: int, where: object) -> None:
        """Raise CorruptEntry if the blob cannot have `size` bytes. where: names it."""
        if self.size not in (None, size):
            raise CorruptEntry(f"{where} has {size} bytes of {self.name}, not {self.size}")

    def check_structure(self, payload: memoryview, where: object) -> None:
        """Raise CorruptEntry unless bytes, whose checksums match, have the structure of this blob. where: names it."""
        self.check_size(len(payload), where)
        if self.check is not None:
            try:
                self.check(self, payload)
            except Exception as error:  # whatever a parser raises
                raise CorruptEntry(f"{where} does not have the structure of {self.name}: {error!r}") from error


def blob_name(path: str, what: str) -> str:
    """Return the name of a blob in messages and in its file, and the prefix for eviction; without credentials."""
    return f"{redacted(path)}#{what}".encode(errors="replace").decode()


def group_number(digest: bytes) -> int:
    """Return the number of a blob's group, 64 bits, from the digest of its key. It is a digest itself."""
    return int.from_bytes(digest[-GROUP_BYTES:], "little")


def _digest_of(size: int, *parts: str) -> bytes:
    encoded = [part.encode(errors="surrogateescape") for part in parts]  # A path on disk need not be UTF-8.
    content = b"".join([len(part).to_bytes(8, "little") + part for part in encoded])
    return hashlib.blake2b(content, digest_size=size, person=b"dataload blob").digest()


class Waited(Enum):
    """The result of a wait for another maker of a blob."""

    FOR_PROCESS = auto()  # of this host; it has released the lock
    FOR_HOST = auto()  # it has released its lease, or died, or hangs
    IN_VAIN = auto()  # The process that holds the lock was stopped, or hangs.


class CacheFullError(Exception):
    """The tier cannot cache the blob: it is full or its disk fails."""


class Notes(Protocol):
    """What running processes that share a cache show each other, by name."""

    def show(self, name: str, content: bytes) -> None:
        """Show some content as long as this process runs."""

    def read(self, name: str) -> list[tuple[str, bytes]]:
        """Return what other running processes show under a name, each with the name of its process."""


class Tier(Protocol):
    """A cache of blobs of any size.

    Notes:
        Any thread of any process may call every method. One caller fills a blob at a time; the others wait for it.
        Views stay valid after the blob is evicted. A tier never raises its own failures: it counts them, and the
        caller gets the bytes from `fill`. The methods with a body are those of a tier without other hosts, a
        transient region or an index.
    """

    @property
    def shared(self) -> bool:
        """Whether other processes read the blobs of this tier."""

    @property
    def clustered(self) -> bool:
        """Whether other hosts read the blobs of this tier."""
        return False

    @property
    def read_only(self) -> bool:
        """Whether this tier serves the blobs of a folder that this process cannot write."""
        return False

    @property
    def on_disk(self) -> bool:
        """Whether this tier serves the blobs of a folder, at `location`."""
        return self.shared or self.read_only

    @property
    def bulk(self) -> BulkTier | None:
        """This tier for many blobs at a time; None: it has no faster way for these."""
        return None

    @property
    def limit(self) -> int:
        """The capacity in bytes."""

    @property
    def limiting_disk(self) -> Path | None:
        """The folder whose disk the capacity depends on; None: the user chose the capacity."""
        return None

    @property
    def used_bytes(self) -> int | None:
        """The bytes of the cached blobs; None while the cache cannot tell."""

    def holder(self, key: BlobKey) -> int | None:
        """Return the other process of this host that holds the lock of a key; None: none is known."""

    @property
    def location(self) -> str:
        """Identifies the cache in this process: tiers of one location share their blobs."""

    @property
    def retains_blobs(self) -> bool:
        """Whether a blob that is filled now stays cached until its neighbours are needed."""
        return True

    def get(self, key: BlobKey, span: Span | None = None) -> memoryview | None:
        """Return the blob, or `span` of it, as a read-only view of bytes. Return None if the blob is not cached.

        Notes:
            A tier that verifies checksums verifies only the segments that `span` touches, so a small span is cheap.
        """

    def get_or_fill(
        self, key: BlobKey, fill: Fill, span: Span | None = None, *, to_keep: int | None = None
    ) -> memoryview:
        """Return the blob, or `span` of it, as `get` does. On a miss, `fill` makes the whole blob first.

        Args:
            key: The key of the blob.
            fill: Makes the blob. Its errors reach the caller, and the tier then caches nothing.
            span: The bytes to return; None: all of them.
            to_keep: Size of the blob in bytes, if an uncached blob is of no use to the caller.

        Raises:
            CacheFullError: `to_keep` is given and the tier cannot cache the blob. Nothing is fetched.
        """

    def key_lock(self, key: BlobKey, *, elect: bool = True) -> AbstractContextManager[Any]:
        """Lock the key on this host for the duration of the block, to make several blobs at once.

        Args:
            key: The key to lock.
            elect: Elect one of the hosts that share blobs, too.

        Returns:
            A context manager. Its value is None if the caller has the lock. Otherwise another process or host has it,
            and the value is a function that waits until that one has released it, as long as that one runs. The
            function returns a `Waited`; after `IN_VAIN`, the caller should go on without the lock.

        Notes:
            Best effort: after a timeout, or without working locks, the block runs without the lock. Two callers may
            then do the same work, but no caller deadlocks.
        """

    def fetch_from_cluster(self, keys: Iterable[BlobKey]) -> list[memoryview] | None:
        """Fetch these blobs from other hosts and cache them. Return None unless all of them are available.

        They are made together, the last one last. Those that this host has already are replaced.
        """
        return None

    def touch(self, keys: Iterable[BlobKey]) -> None:
        """Protect these blobs, where they are cached, from eviction while this process runs. Best effort."""
        return

    def is_transient(self, keys: Iterable[BlobKey]) -> bool:
        """Return whether a tier with a transient region caches one of these blobs only there, or not at all."""
        return False

    @property
    def notes(self) -> Notes | None:
        """What running processes of this host show each other; None: they cannot."""
        return None

    def lease(self, need: Need) -> object:
        """Announce a need to all processes of the host. It lasts as long as the returned object, or this process."""
        return None

    def division(self) -> Division:
        """Return how the needs of the host share this tier now."""
        return Division()

    def discard(self, keys: Iterable[BlobKey], made: Iterable[BlobKey]) -> None:
        """Remove blobs of this host from which others were made, if it caches all of these. Best effort.

        Args:
            keys: The blobs to remove.
            made: The blobs that replace them.
        """

    def retract(self, keys: Iterable[BlobKey]) -> None:
        """Remove blobs that may be wrong, on this host and where other hosts read them. Best effort."""
        self.discard(keys, ())

    def stored_bytes(self, key: BlobKey) -> int:
        """Return the bytes that a cached blob takes; 0 if it is not cached."""

    def settle(self) -> None:
        """Wait until blobs that other hosts will read are written, or given up."""
        return

    def stats(self) -> dict[str, Any]:
        """Return the totals of this process: hits, misses, waits, bytes, errors."""


class BulkTier(Protocol):
    """A tier that caches many blobs at a time, such as those of 16 row groups."""

    def lock_together(self, keys: Sequence[BlobKey]) -> AbstractContextManager[Sequence[ExitStack | None]]:
        """Lock those keys that are free for the duration of the block.

        Returns:
            A context manager. Its value has a stack for each key that is locked, which releases it early when it is
            closed, and None for each other key.
        """

    def put_together(self, blobs: Sequence[tuple[BlobKey, memoryview]]) -> list[memoryview]:
        """Cache blobs that are missing, as far as they fit. Return a read-only view of each, as `get` does."""


def cut(blob: memoryview, span: Span | None) -> memoryview:
    """Return `span` of a blob; None: all of it."""
    return blob if span is None else blob[span[0] : span[1]]


def fill_in_memory(key: BlobKey, fill: Fill) -> memoryview:
    """Return the blob that `fill` makes, read-only, in the memory of this process."""
    draft = Draft(key)
    fill(draft.allocate)
    return draft.publish()


def copy_into(data: bytes | memoryview, allocate: Allocate) -> None:
    """Make a blob that is a copy of `data`."""
    allocate(len(data))[:] = data


class Draft:
    """A blob during its fill, in memory. Tiers that cache blobs elsewhere override `memory_for` and `publish`."""

    def __init__(self, key: BlobKey) -> None:
        self.key = key
        self.payload: memoryview | None = None

    def allocate(self, size: int) -> memoryview:
        """Return the memory for the blob. Raise RuntimeError on a second call."""
        if self.payload is not None:
            raise RuntimeError(f"{self.key.name}: a fill allocates once")
        self.payload = self.memory_for(size)
        return self.payload

    def memory_for(self, size: int) -> memoryview:
        """Return writable memory of `size` bytes."""
        return memoryview(bytearray(size))

    def publish(self, span: Span | None = None) -> memoryview:
        """Return the filled blob, or `span` of it, read-only."""
        if self.payload is None:
            raise RuntimeError(f"{self.key.name}: the fill allocated nothing")
        return cut(self.payload.toreadonly(), span)
