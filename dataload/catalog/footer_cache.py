"""A cache of file footers. One blob holds many footers: caching each by itself takes longer than fetching it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.origin.retries import abandoned
from dataload.cache.single_flight import fetch_once, make_once
from dataload.cache.tier import PROOF_BYTES, Allocate, BlobKey, Tier, copy_into
from dataload.errors import DataError
from dataload.formats.base import Footer
from dataload.formats.detect import fetch_footer, format_of, parse_footer
from dataload.runtime.executor import DaemonExecutor, shared_executor
from dataload.runtime.text import counted

if TYPE_CHECKING:
    from dataload.catalog.footer_summary import FileSummary, Summarize
    from dataload.catalog.manifest import RowGroup

FOOTERS_IN_FLIGHT = 128
RUN = 64  # files per run, on average
RUNS_AT_ONCE = 4
LOCAL_AT_ONCE = 8  # files that a thread reads one after the other: another thread would take longer to begin
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
    summarize: Summarize,
    progress: Callable[[Object], object],
    known: Mapping[Object, FooterLocation],
) -> list[tuple[FileSummary, FooterLocation]]:
    """Return the summary of each object's footer, and where the footer is cached.

    Args:
        objects: Files, best in order of path: neighbours share a blob.
        blocks: Reads the files through the cache.
        summarize: Summarizes each footer. Not all footers are in memory at a time.
        progress: Called with each object whose footer has been read, from any thread.
        known: Where footers may be cached already.

    Raises:
        DataError: A file is neither Parquet nor Arrow IPC.
        OriginError: The origin failed.

    Notes: each host fetches the footers once. Summaries are cached by run, so that the footers need not be parsed
    again.
    """
    objects = list(objects)
    runs = _Runs(blocks, summarize, progress)
    places = defaultdict[Object, dict[int, Object]](dict)
    for obj in objects if known else ():
        if (location := known.get(obj)) is not None:
            places[location.run][location.number] = obj
    old = {
        members[number]: (result, FooterLocation(run, number))
        for run, members in places.items()
        for number, result in runs.known(run, members).items()
        if number in members
    }
    executor = DaemonExecutor(RUNS_AT_ONCE, "dataload-runs")
    before = abandoned.set(runs.ended)
    try:
        made = (
            result
            for results in executor.map(runs.read, _runs(obj for obj in objects if obj not in old))
            for result in results
        )
        return [old[obj] if obj in old else next(made) for obj in objects]
    finally:
        runs.ended.set()
        abandoned.reset(before)


class _Runs:
    """The summaries of the footers of runs of files, see `read_footers`. Thread-safe."""

    def __init__(self, blocks: Blocks, summarize: Summarize, progress: Callable[[Object], object]) -> None:
        self._blocks, self._summarize, self._progress = blocks, summarize, progress
        self._fetches = shared_executor(FOOTERS_IN_FLIGHT, "dataload-footers")  # with other datasets that are opened
        self._run_of = runs_of(blocks)
        self.ended = threading.Event()

    def read(self, run: list[Object]) -> list[tuple[FileSummary, FooterLocation]]:
        """Return the summary of each footer of a run, and where that is cached. Those that are not are fetched."""
        name = _name(run)
        found = self._summaries(name).get() or {}
        if any(number not in found for number in range(len(run))):
            found = self._fetched(name, run)
            self._keep(name, found)
        for obj in run:
            self._progress(obj)
        return [(found[number], FooterLocation(name, number)) for number in range(len(run))]

    def known(self, run: Object, members: Mapping[int, Object]) -> dict[int, FileSummary]:
        """Return the summaries of some footers of a run, by their numbers; none if this host has not cached them."""
        found = self._summaries(run).get() or {}
        if members.keys() - found.keys():
            try:
                blob = self._run_of(run)
            except KeyError:
                return {}
            found = self._parsed(blob, members)
            self._keep(run, found)
        for obj in members.values():
            self._progress(obj)
        return found

    def _fetched(self, name: Object, run: list[Object]) -> dict[int, FileSummary]:
        key = run_key(name, self._blocks)
        found: dict[int, FileSummary] = {}

        def fetch(obj: Object) -> tuple[bytes, FileSummary]:
            if self.ended.is_set():  # Another run could not be read.
                raise CancelledError
            return _fetched_footer(obj, self._blocks, lambda footer: self._summarize(footer, obj))

        def fill(allocate: Allocate) -> None:
            files, size = iter(run), LOCAL_AT_ONCE if self._blocks.origin.is_local else 1
            parts = iter(lambda: list(islice(files, size)), [])
            fetched = list(chain.from_iterable(self._fetches.map(lambda part: list(map(fetch, part)), parts)))
            found.update(enumerate(result for _, result in fetched))
            _join(key, [data for data, _ in fetched], allocate)

        blob = self._blocks.tier.get_or_fill(key, fill)
        return found or self._parsed(blob, dict(enumerate(run)))

    def _parsed(self, blob: memoryview, members: Mapping[int, Object]) -> dict[int, FileSummary]:
        return {number: self._summarize(parse_footer(_cut(blob, number), obj), obj) for number, obj in members.items()}

    def _summaries(self, run: Object) -> Metadata[dict[int, FileSummary]]:
        return Metadata(self._blocks, run, self._summarize.name, lambda data: self._summarize.from_bytes(bytes(data)))

    def _keep(self, run: Object, found: Mapping[int, FileSummary]) -> None:
        self._summaries(run).put(lambda: self._summarize.to_bytes(found))


class FooterReader:
    """A reader of cached footers that keeps the last ones parsed, and the last runs of footers mapped.

    Args:
        blocks: Reader of the files, and the cache.
        chunks: Column chunks of a file, about.
    """

    def __init__(self, blocks: Blocks, chunks: int) -> None:
        runs = runs_of(blocks)

        def read(obj: Object, location: FooterLocation) -> Footer:
            with suppress(KeyError):
                return parse_footer(_cut(runs(location.run), location.number), obj)
            return read_footer(obj, location, blocks)

        self._read = lru_cache(max(2, min(FOOTERS_KEPT, CHUNKS_KEPT // max(1, chunks))))(read)

    def of(self, group: RowGroup) -> Footer:
        """Return the footer of a row group's file.

        Raises:
            DataError: As for `read_footer`; or the row group has other rows than the manifest says.
            OriginError: As for `read_footer`.
        """
        footer = self._read(group.file, group.footer_at)
        [rows] = footer.lengths[group.number : group.number + 1] or [0]
        if rows != group.rows:
            raise DataError(
                f"{group.name} has {counted(rows, 'row')} by its footer, and {group.rows:,} by the cache: the file was "
                "replaced, or the cache is damaged: remove what it has, by dataload cache evict --all"
            )
        return footer


def read_footer(obj: Object, location: FooterLocation, blocks: Blocks) -> Footer:
    """Return the footer of one file. If its run was evicted, fetch the footer again and cache it by itself.

    Raises:
        DataError: The file is neither Parquet nor Arrow IPC.
        OriginError: The origin failed.
    """
    own = Metadata(blocks, obj, "footer", lambda data: parse_footer(data, obj))
    if (footer := own.get()) is not None:
        return footer
    found = stored_footer(location, runs_of(blocks)) or _footer_from_cluster(location, blocks)
    if found is not None:
        return parse_footer(found, obj)
    return own.get_or_make(lambda: _fetched_footer(obj, blocks, lambda _: None)[0])


def _fetched_footer(obj: Object, blocks: Blocks, look: Callable[[Footer], T]) -> tuple[bytes, T]:
    """Fetch a footer, and return its bytes and what `look` returns for it: a damaged one must not be cached."""

    def fetch(blocks: Blocks) -> tuple[bytes, T]:
        data = fetch_footer(obj, blocks)
        return data, look(parse_footer(memoryview(data), obj))

    return blocks.undamaged(fetch, obj, lambda: [(0, obj.size)])


class Metadata(Generic[T]):
    """A small blob of the cache: what was found out about an object or a dataset.

    Args:
        blocks: The cache.
        obj: The object.
        what: What the blob tells of it.
        parse: Returns what the bytes of the blob mean. If it raises an exception for cached ones, they are made again.
    """

    def __init__(self, blocks: Blocks, obj: Object, what: str, parse: Callable[[memoryview], T]) -> None:
        checked: list[T] = []

        def check(key: BlobKey, blob: memoryview) -> None:  # no method, which would keep the cache open in a cycle
            checked[:] = [parse(key.proven(blob))]

        self._tier, self._checked, self._check = blocks.tier, checked, check
        self._key = blocks.key(obj, what, check=check)

    def get(self) -> T | None:
        """Return it, or None if this host has not cached it."""
        blob = self._tier.get(self._key)
        return None if blob is None else self._parsed(blob)

    def get_or_make(self, make: Callable[[], bytes]) -> T:
        """Return it. If it is not cached, `make` returns its bytes, which are cached."""
        return self._parsed(self._made(make))

    def put(self, make: Callable[[], bytes]) -> None:
        """Cache it, as `get_or_make` does, for a caller that knows it."""
        self._made(make)

    def get_or_make_once(self, make: Callable[[], bytes]) -> T:
        """Return it, as `get_or_make` does. One process of the host makes it, as long as it runs.

        `get_or_make` waits for another process for two minutes only, and then makes the blob as well.
        """
        tier, find = self._tier, partial(self._tier.get, self._key)
        lock = replace(self._key, what=f"lock of {self._key.what}", check=None)
        found = find()
        if found is None:
            found = fetch_once(tier, lock, find, lambda: _fetched(tier, self._key))
        if found is None:
            found = make_once(tier, lock, find, lambda: self._made(make))
        return self._parsed(found)

    def _made(self, make: Callable[[], bytes]) -> memoryview:
        def fill(allocate: Allocate) -> None:
            data = make()
            copy_into(self._key.proof(data) + data, allocate)

        return self._tier.get_or_fill(self._key, fill)

    def _parsed(self, blob: memoryview) -> T:
        if not self._checked:  # This process has made it, or checked it before.
            self._check(self._key, blob)
        return self._checked[0]


def stored_footer(location: FooterLocation, run_of: Callable[[Object], memoryview]) -> memoryview | None:
    """Return the bytes of a footer, or None if its run is not cached on this host: `run_of` raises KeyError."""
    with suppress(KeyError):
        return _cut(run_of(location.run), location.number)
    return None


def runs_of(blocks: Blocks) -> Callable[[Object], memoryview]:
    """Return what returns the blob of a run of footers and keeps it mapped; KeyError: this host has not cached it."""

    def run_of(run: Object) -> memoryview:
        found = blocks.tier.get(run_key(run, blocks))
        if found is None:
            raise KeyError(run.path)
        return found

    return lru_cache(RUNS_KEPT)(run_of)


def _footer_from_cluster(location: FooterLocation, blocks: Blocks) -> memoryview | None:
    """Return the bytes of a footer, or None if no other host has its run."""
    key = run_key(location.run, blocks)

    def fetch() -> memoryview | None:
        run = _fetched(blocks.tier, key)
        return None if run is None else _cut(run, location.number)

    return fetch_once(blocks.tier, key, lambda: stored_footer(location, runs_of(blocks)), fetch)


def _fetched(tier: Tier, key: BlobKey) -> memoryview | None:
    """Fetch a blob from other hosts and cache it. Return None if no host has it."""
    fetched = tier.fetch_from_cluster([key])
    return None if fetched is None else fetched[0]


def run_key(run: Object, blocks: Blocks) -> BlobKey:
    """Return the key of the blob that holds the footers of a run of files."""
    return blocks.key(run, "footers", check=lambda key, blob: _check_bounds(key.proven(blob)))


def _runs(objects: Iterable[Object]) -> Iterator[list[Object]]:
    """Yield runs of neighbouring files.

    A file's name alone decides whether a run begins with it, so adding or removing a file changes one run. LBFS cuts
    files by content in the same way (Muthitacharoen, Chen, Mazières, SOSP 2001).
    """
    run: list[Object] = []
    for obj in objects:
        digest = hashlib.blake2b(obj.stable_path.encode(errors="surrogateescape"), digest_size=8).digest()
        if run and int.from_bytes(digest, "little") % RUN == 0:
            yield run
            run = []
        run.append(obj)
    if run:
        yield run


def _name(run: list[Object]) -> Object:
    content = json.dumps([[obj.stable_path, obj.size, obj.version] for obj in run]).encode()
    return Object(run[0].path, 0, hashlib.blake2b(content, digest_size=16, person=b"footers").hexdigest())


def _join(key: BlobKey, footers: list[bytes], allocate: Allocate) -> None:
    """Make a blob of the start of each footer, the end of the last one, and then the footers, after their proof."""
    bounds = np.cumsum([_BOUND.itemsize * (len(footers) + 1), *map(len, footers)], dtype=_BOUND)
    ends = bounds.tolist()
    memory = allocate(PROOF_BYTES + ends[-1])
    data = memory[PROOF_BYTES:]
    for start, stop, part in zip([0, *ends], ends, [bounds.tobytes(), *footers], strict=False):
        data[start:stop] = part
    memory[:PROOF_BYTES] = key.proof(data)


def _cut(blob: memoryview, number: int) -> memoryview:
    """Return one footer of a run's blob, which is checked."""
    data = blob[PROOF_BYTES:]
    start, stop = np.frombuffer(data, _BOUND, 2, number * _BOUND.itemsize).tolist()
    return data[start:stop]


def _check_bounds(data: memoryview) -> None:
    """Raise ValueError unless each bound of a run, but the first one, is the end of a footer."""
    (first,) = np.frombuffer(data, _BOUND, 1).tolist()
    bounds = np.frombuffer(data[: max(0, first)], _BOUND).tolist()
    if len(bounds) < 2 or bounds[-1] != len(data) or any(start > stop for start, stop in pairwise(bounds)):
        raise ValueError("the bounds of the footers are out of order")
    if not all(format_of(data[start:stop]) for start, stop in pairwise(bounds)):
        raise ValueError("its parts are no footers")
