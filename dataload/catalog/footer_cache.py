"""A cache of file footers. One blob holds many footers: caching each by itself takes longer than fetching it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.single_flight import fetch_once, make_once
from dataload.cache.tier import Allocate, BlobKey, Span, copy_into
from dataload.formats.base import Footer
from dataload.formats.detect import fetch_footer, parse_footer
from dataload.runtime.executor import DaemonExecutor, shared_executor

FOOTERS_IN_FLIGHT = 128
RUN = 64  # files per run, on average
RUNS_AT_ONCE = 4
FOOTERS_KEPT = 64  # parsed, by a reader
CHUNKS_KEPT = 32 << 10  # column chunks in them, at most: a footer of 2,000 of them takes about 16 MB
RUNS_KEPT = 1024  # mapped, by a reader

T = TypeVar("T")

_BOUND = np.dtype("<i8")


@dataclass(frozen=True)
class FooterLocation:
    """The location of a cached footer.

    Args:
        run: Names the run of files whose footers share a blob. This object has no bytes.
        number: Index of the footer in the run.
    """

    run: Object
    number: int


def read_footers(
    objects: Iterable[Object],
    blocks: Blocks,
    look: Callable[[Footer, Object], T],
    progress: Callable[[Object], object] = lambda _: None,
) -> list[tuple[T, FooterLocation]]:
    """Return the result of `look` for each object's footer, and where the footer is cached.

    Args:
        objects: Files, best in order of path: neighbours share a blob.
        blocks: Reads the files through the cache.
        look: Called with each footer and its file, from any thread. Not all footers are in memory at a time.
        progress: Called with each object whose footer has been read, from any thread.

    Raises:
        DataError: A file is neither Parquet nor Arrow IPC.
        OriginError: The origin failed.
        Exception: `look` raised it.

    Notes: each host fetches the footers once.
    """

    def fetch(obj: Object) -> bytes:
        if ended.is_set():  # Another run could not be read.
            raise CancelledError
        return fetch_footer(obj, blocks)

    def read(run: list[Object]) -> list[tuple[T, FooterLocation]]:
        name = _name(run)
        blob = blocks.tier.get_or_fill(run_key(name, blocks), lambda allocate: _join(fetches.map(fetch, run), allocate))
        found = []
        for number, obj in enumerate(run):
            found.append((look(parse_footer(_cut(blob, number), obj), obj), FooterLocation(name, number)))
            progress(obj)
        return found

    fetches = shared_executor(FOOTERS_IN_FLIGHT, "dataload-footers")  # with other datasets that are being opened
    runs = DaemonExecutor(RUNS_AT_ONCE, "dataload-runs")
    ended = threading.Event()
    try:
        return [result for results in runs.map(read, _runs(objects)) for result in results]
    finally:
        ended.set()


class FooterReader:
    """A reader of cached footers that keeps the last ones parsed, and the last runs of footers mapped.

    Args:
        blocks: Reader of the files, and the cache.
        chunks: Column chunks of a file, about.
    """

    def __init__(self, blocks: Blocks, chunks: int) -> None:
        runs = lru_cache(RUNS_KEPT)(partial(_cached_run, blocks))

        def read(obj: Object, location: FooterLocation) -> Footer:
            with suppress(KeyError):
                return parse_footer(_cut(runs(location.run), location.number), obj)
            return read_footer(obj, location, blocks)

        self.read = lru_cache(max(2, min(FOOTERS_KEPT, CHUNKS_KEPT // max(1, chunks))))(read)
        """Return a file's footer, as `read_footer` does."""


def read_footer(obj: Object, location: FooterLocation, blocks: Blocks) -> Footer:
    """Return the footer of one file. If its run was evicted, fetch the footer again and cache it by itself.

    Raises:
        DataError: The file is neither Parquet nor Arrow IPC.
        OriginError: The origin failed.
    """
    own_key = blocks.key(obj, "footer")
    found = blocks.tier.get(own_key) or stored_footer(location, blocks) or _footer_from_cluster(location, blocks)
    return parse_footer(found or get_or_make(blocks, own_key, lambda: fetch_footer(obj, blocks)), obj)


def get_or_make(blocks: Blocks, key: BlobKey, make: Callable[[], bytes]) -> memoryview:
    """Return a blob of the cache. On a miss, `make` returns its bytes, which are cached."""
    return blocks.tier.get_or_fill(key, lambda allocate: copy_into(make(), allocate))


def make_alone(blocks: Blocks, obj: Object, what: str, make: Callable[[], bytes]) -> memoryview:
    """Return a blob of the cache that takes long to make. One process of the host makes it, as long as it runs.

    `get_or_make` waits for another process for two minutes only, and then makes the blob as well.
    """
    key, lock, tier = blocks.key(obj, what), blocks.key(obj, f"lock of {what}"), blocks.tier
    found = tier.get(key)
    if found is None:
        fetching = blocks.key(obj, f"fetch {what}")
        found = fetch_once(tier, fetching, lambda: tier.get(key), lambda: _fetched(blocks, key))
    if found is None:
        found = make_once(tier, lock, lambda: tier.get(key), lambda: get_or_make(blocks, key, make), nullcontext)
    return found


def stored_footer(location: FooterLocation, blocks: Blocks) -> memoryview | None:
    """Return the bytes of a footer, or None if its run is not cached on this host."""
    key, offset = run_key(location.run, blocks), location.number * _BOUND.itemsize
    bounds = blocks.tier.get(key, (offset, offset + 2 * _BOUND.itemsize))
    return None if bounds is None else blocks.tier.get(key, _bounds(bounds, 0))


def _cached_run(blocks: Blocks, run: Object) -> memoryview:
    """Return the blob of a run of footers. Raise KeyError if this host has not cached it."""
    found = blocks.tier.get(run_key(run, blocks))
    if found is None:
        raise KeyError(run.path)
    return found


def _footer_from_cluster(location: FooterLocation, blocks: Blocks) -> memoryview | None:
    """Return the bytes of a footer, or None if no other host has its run."""

    def fetch() -> memoryview | None:
        run = _fetched(blocks, run_key(location.run, blocks))
        return None if run is None else _cut(run, location.number)

    lock = blocks.key(location.run, "fetch footers")
    return fetch_once(blocks.tier, lock, lambda: stored_footer(location, blocks), fetch)


def _fetched(blocks: Blocks, key: BlobKey) -> memoryview | None:
    """Fetch a blob from other hosts and cache it. Return None if no host has it."""
    fetched = blocks.tier.fetch_from_cluster([key])
    return None if fetched is None else fetched[0]


def run_key(run: Object, blocks: Blocks) -> BlobKey:
    """Return the key of the blob that holds the footers of a run of files."""
    return blocks.key(run, "footers")


def _runs(objects: Iterable[Object]) -> Iterator[list[Object]]:
    """Yield runs of neighbouring files.

    A file's name alone decides whether a run begins with it, so adding or removing a file changes one run. LBFS cuts
    files by content in the same way (Muthitacharoen, Chen, Mazières, SOSP 2001).
    """
    run: list[Object] = []
    for obj in objects:
        digest = hashlib.blake2b(obj.unsigned_path.encode(errors="surrogateescape"), digest_size=8).digest()
        if run and int.from_bytes(digest, "little") % RUN == 0:
            yield run
            run = []
        run.append(obj)
    if run:
        yield run


def _name(run: list[Object]) -> Object:
    content = json.dumps([[obj.unsigned_path, obj.size, obj.version] for obj in run]).encode()
    return Object(run[0].path, 0, hashlib.blake2b(content, digest_size=16, person=b"footers").hexdigest())


def _join(footers: list[bytes], allocate: Allocate) -> None:
    """Make a blob of the start of each footer, the end of the last one, and then the footers."""
    bounds = np.cumsum([_BOUND.itemsize * (len(footers) + 1), *map(len, footers)], dtype=_BOUND)
    ends = bounds.tolist()
    memory = allocate(ends[-1])
    for start, stop, part in zip([0, *ends], ends, [bounds.tobytes(), *footers], strict=False):
        memory[start:stop] = part


def _cut(blob: memoryview, number: int) -> memoryview:
    """Return one footer of a run's blob."""
    start, stop = _bounds(blob, number)
    return blob[start:stop]


def _bounds(table: memoryview, number: int) -> Span:
    start, stop = np.frombuffer(table, _BOUND, 2, number * _BOUND.itemsize).tolist()
    return start, stop
