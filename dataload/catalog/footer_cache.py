"""The footers of a dataset's files, kept many together: to keep each by itself takes longer than to fetch it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.tier import Allocate, BlobKey, Span
from dataload.formats.base import Footer
from dataload.formats.detect import fetch_footer, parse_footer

FOOTERS_IN_FLIGHT = 128
RUN = 64  # files, on average
RUNS_AT_ONCE = 4

T = TypeVar("T")

_BOUND = np.dtype("<i8")


@dataclass(frozen=True)
class Kept:
    """Where a file's footer is kept: as one of a run's, which `run` names. That object has no bytes."""

    run: Object
    number: int


def read_footers(
    objects: Iterable[Object],
    blocks: Blocks,
    look: Callable[[Footer], T],
    progress: Callable[[Object], object] = lambda _: None,
) -> list[tuple[T, Kept]]:
    """What is found in the footers of these objects, given in order of path, and where they are kept.

    look: called with each footer, from any thread; not all are in memory at a time. progress: called with each object
    whose footer is there, from any thread. Raises as `read_footer` does, and what `look` raises.

    Notes: they are fetched once a host.
    """

    def fetch(obj: Object) -> bytes:
        footer = fetch_footer(obj, blocks)
        progress(obj)
        return footer

    def read(run: list[Object]) -> list[tuple[T, Kept]]:
        name, untold = _name(run), run

        def fill(allocate: Allocate) -> None:
            nonlocal untold
            untold = []  # `fetch` tells of each
            _join(list(pool.map(fetch, run)), allocate)

        whole = blocks.tier.get_or_fill(run_key(name, blocks), fill)
        for obj in untold:
            progress(obj)
        return [(look(parse_footer(_cut(whole, number), obj)), Kept(name, number)) for number, obj in enumerate(run)]

    with (
        ThreadPoolExecutor(FOOTERS_IN_FLIGHT, "dataload-footers") as pool,
        ThreadPoolExecutor(RUNS_AT_ONCE, "dataload-runs") as runs,
    ):
        try:
            return [one for found in runs.map(read, _runs(objects)) for one in found]
        except BaseException:  # What has not begun is not to be waited for.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def read_footer(obj: Object, kept: Kept, blocks: Blocks) -> Footer:
    """The footer of one file; fetched anew, and kept by itself, where its run is gone.

    Raises DataError when the file is neither Parquet nor Arrow IPC, OriginError.
    """

    def fill(allocate: Allocate) -> None:
        footer = fetch_footer(obj, blocks)
        allocate(len(footer))[:] = footer

    alone = blocks.key(obj, "footer")
    found = blocks.tier.get(alone) or stored_footer(kept, blocks) or _brought_footer(kept, blocks)
    return parse_footer(found or blocks.tier.get_or_fill(alone, fill), obj)


def stored_footer(kept: Kept, blocks: Blocks) -> memoryview | None:
    """The bytes of a footer, if its run is kept."""
    key, at = run_key(kept.run, blocks), kept.number * _BOUND.itemsize
    bounds = blocks.tier.get(key, (at, at + 2 * _BOUND.itemsize))
    return None if bounds is None else blocks.tier.get(key, _bounds(bounds, 0))


def _brought_footer(kept: Kept, blocks: Blocks) -> memoryview | None:
    """The bytes of a footer, if another host has its run."""
    with blocks.tier.key_lock(blocks.key(kept.run, "bring footers"), elect=False):  # it locks what it keeps
        found = stored_footer(kept, blocks)
        if found is None and (brought := blocks.tier.fetch_from_cluster([run_key(kept.run, blocks)])):
            found = _cut(brought[0], kept.number)
    return found


def run_key(run: Object, blocks: Blocks) -> BlobKey:
    """Return the key of the blob that holds the footers of a run of files."""
    return blocks.key(run, "footers")


def _runs(objects: Iterable[Object]) -> Iterator[list[Object]]:
    """Neighbours. A name alone says whether a run begins with it, so that a file more, or less, changes one run.

    As files are cut by their content in LBFS (Muthitacharoen, Chen, Mazières, SOSP 2001).
    """
    run: list[Object] = []
    for obj in objects:
        digest = hashlib.blake2b(obj.path.encode(errors="surrogateescape"), digest_size=8).digest()
        if run and int.from_bytes(digest, "little") % RUN == 0:
            yield run
            run = []
        run.append(obj)
    if run:
        yield run


def _name(run: list[Object]) -> Object:
    made_of = json.dumps([[obj.path, obj.size, obj.version] for obj in run]).encode()
    return Object(run[0].path, 0, hashlib.blake2b(made_of, digest_size=16, person=b"footers").hexdigest())


def _join(footers: list[bytes], allocate: Allocate) -> None:
    """First where each footer begins, and where the last ends; then the footers."""
    bounds = np.cumsum([_BOUND.itemsize * (len(footers) + 1), *map(len, footers)], dtype=_BOUND)
    room = allocate(int(bounds[-1]))
    room[: bounds[0]] = bounds.tobytes()
    for footer, start, stop in zip(footers, bounds, bounds[1:], strict=False):
        room[start:stop] = footer


def _cut(whole: memoryview, number: int) -> memoryview:
    """One footer of a run's."""
    start, stop = _bounds(whole, number)
    return whole[start:stop]


def _bounds(table: memoryview, number: int) -> Span:
    start, stop = np.frombuffer(table, _BOUND, 2, number * _BOUND.itemsize).tolist()
    return start, stop
