"""The one way to make row groups, a list at a time.

    hold memory → lock → look up → fetch → decode → pack → publish

The row groups of a list are small ones of one cache: they share a reservation of memory, their requests are under way
together, and their blobs are published in one transaction of the index. A large row group, and one of a cache that
cannot publish several blobs at a time, is a list of one. Its blobs stream: each is decoded and published before the
next one.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from time import perf_counter
from typing import Any

from dataload.cache.blocks.reader import Blocks, cancel_if_failed, wait_for_origin
from dataload.cache.buffer_pool import blob_buffers
from dataload.cache.single_flight import fetch_once, make_once
from dataload.cache.tier import fill_in_memory
from dataload.errors import DamagedError, DataloadError
from dataload.rows import row_block
from dataload.rows.making.compute_lock import computing
from dataload.rows.making.load_queue import Leave, Report, Result, Stalled
from dataload.rows.making.maker import Columns, Opened
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_group_load import RowGroupLoad, State
from dataload.runtime.counters import charged_to
from dataload.runtime.priority import next_priority
from dataload.telemetry.wait_timeline import Timeline, doing, waited

POOLED_BYTES = 128 << 10  # of a blob; malloc keeps less without a map of its own
PUBLISHED_BYTES = 8 << 20  # of blobs in one transaction
STALLED_SECONDS = 0.2  # Row groups whose bytes come later do not hold up the others of their list.
FETCHED_COPIES = 2  # of a blob from the cluster, in memory: its parts are joined, and then copied to be written


def make(loads: Sequence[RowGroupLoad], report: Report, leave: Leave, stalled: Stalled) -> None:
    """Make row groups that this host has not cached, and report each as soon as it is made. See `load_queue.Run`.

    A list of one waits until another process or host that makes the row group has done it.

    Args:
        loads: The row groups. Several are small ones of one cache and one memory.
        report: Takes the blobs of a row group, or why it cannot be made.
        leave: Takes those of several that would hold up the others.
        stalled: Called when nothing has arrived for a while. Row groups that still wait keep this thread and their
            memory.

    Raises:
        OriginError: The origin does not answer, or the file does not exist.
        DataError: The row group cannot be decoded.
        ReservationCancelled: All loads were cancelled before their memory was reserved.
    """
    if len(loads) == 1:
        report(loads[0], _make_one(loads[0], stalled))
    else:
        _make_several(loads, report, leave, stalled)


def make_cached(cache: RowGroupCache, number: int) -> bool:
    """Cache a row group if space allows. Return whether it is cached. Cached blobs are not read.

    Raises:
        OriginError: The origin does not answer, or the file does not exist.
        DataError: The row group cannot be decoded.
    """
    load = RowGroupLoad(number, cache, number, span=(0, 0))
    with next_priority():
        if load.find() is None:
            _make_one(load, lambda: None)
            return load.find() is not None
        return True


def made(cache: RowGroupCache, number: int) -> list[memoryview]:
    """Return the blobs of a row group: cached ones, or those that this or another process makes. Raises as `make`."""
    load = RowGroupLoad(number, cache, number)
    with next_priority():
        found = load.find()
        return _make_one(load, lambda: None) if found is None else found


# Locks and memory


def _make_one(load: RowGroupLoad, stalled: Stalled) -> list[memoryview]:
    """Return the blobs of a row group. Make them, unless another process or host does: then wait for these."""
    cache, number = load.cache, load.number
    tier, memory, lock, alone = cache.tier, cache.memory, cache.key(number), cache.is_refused(number)

    def fetch() -> list[memoryview] | None:
        return tier.fetch_from_cluster(load.keys)

    def hold_fetched() -> AbstractContextManager[Any]:
        size = FETCHED_COPIES * max(cache.sizes_on_disk(number))  # One blob after the other is fetched.
        return memory.held.reserve(size, load.is_cancelled)

    def transfer_or_make(*, is_kept: bool = True) -> list[memoryview]:
        if fetched := fetch():  # Another host may have made it meanwhile.
            return fetched
        results: list[Result] = []
        _run([_Job(load, is_kept=is_kept)], lambda job: results.append(job.result()), stalled)
        [result] = results
        if isinstance(result, BaseException):
            raise result
        return result

    with charged_to(load.account):
        found = fetch_once(tier, lock, load.find, fetch, hold_fetched, alone=alone)

        def hold() -> AbstractContextManager[Any]:
            return memory.hold(load.small_bytes or cache.maker.reservation(number), load.is_cancelled)

        if found is None and alone:
            # Others make it, too. One of them uses the cache, in case there is space now: the first blobs of another
            # one may be damaged.
            with hold(), tier.key_lock(lock, elect=False) as others:
                found = load.find() or transfer_or_make(is_kept=others is None)
        elif found is None:
            found = make_once(tier, lock, load.find, transfer_or_make, hold)
    load.mark_cached(found)
    return found


def _make_several(loads: Sequence[RowGroupLoad], report: Report, leave: Leave, stalled: Stalled) -> None:
    """Make small row groups of one cache. See `make`."""
    cache, size = loads[0].cache, sum(load.small_bytes for load in loads)
    bulk = cache.tier.bulk
    assert bulk is not None
    keys = [load.cache.key(load.number) for load in loads]
    with (
        cache.memory.hold(size, lambda: all(load.is_cancelled() for load in loads)) as give_back,
        bulk.lock_together(keys) as locks,
    ):
        jobs: list[_Job] = []
        for load, lock in zip(loads, locks, strict=True):
            found = None
            if lock is not None and _opens_at_once(load):
                if (found := load.find()) is None:
                    jobs.append(_Job(load, lock))
                    continue
                load.hit()
            if lock is not None:
                lock.close()
            give_back(load.small_bytes)
            if found is None:
                leave(load)
            else:
                report(load, found)

        def on_done(job: _Job) -> None:
            job.close()  # Another process may wait for the lock.
            give_back(job.load.small_bytes)
            if not isinstance(result := job.result(), BaseException):
                job.load.mark_cached(result)
            report(job.load, result)

        _run(jobs, on_done, stalled)


def _opens_at_once(load: RowGroupLoad) -> bool:
    try:
        return load.cache.maker.opens_at_once(load.number)
    except DataloadError:  # It concerns this row group alone, and is raised again when it is made alone.
        return False


# Steps of row groups whose locks this thread has


class _Job:
    """A row group that this thread makes.

    Args:
        load: Its load.
        lock: Releases its lock before those of its list; None: `_make_one` does.
        is_kept: Whether its blobs are for the cache.

    Attributes:
        opened: Its requests; None once its columns are there without any.
        columns: Its columns, where they do not come from `opened`.
        stack: Holds it open. Errors in a block of it become those of the file's format, such as DamagedError.
        outcome: Its blobs, or why it cannot be made. None: not yet.
    """

    def __init__(self, load: RowGroupLoad, lock: ExitStack | None = None, *, is_kept: bool = True) -> None:
        self.load, self.cache, self.number, self.is_kept = load, load.cache, load.number, is_kept
        self.group = self.cache.manifest.row_groups[self.number]
        self.lock, self.stack = lock, ExitStack()
        self.opened: Opened | None = None
        self.columns: Iterator[Columns] | None = None
        self.outcome: Result | None = None
        self._is_second_try = False

    @property
    def is_fetched(self) -> bool:
        """Whether all its bytes are there, or it cannot be made."""
        return self.outcome is not None or self.opened is None or all(fetch.done() for fetch in self.opened.fetches)

    def result(self) -> Result:
        assert self.outcome is not None
        return self.outcome

    def open(self) -> None:
        """Start to fetch the row group, unless its columns can be made of cached blobs of others."""
        self.load.state = State.FETCHING
        with self.catching():
            columns = self.columns = self.cache.maker.from_cache(self.number)
            if columns is not None:
                self.stack.callback(columns.close)
            else:
                self.load.account.add(decoded=1)
                self._fetch(self.cache.blocks)

    def _fetch(self, blocks: Blocks) -> None:
        self.opened = self.stack.enter_context(self.cache.maker.open(self.number, blocks))

    def refetch_if_damaged(self) -> bool:
        """Fetch damaged bytes again, past the cache, once. Return whether they were damaged."""
        if not isinstance(self.outcome, DamagedError) or self._is_second_try:
            return False
        self._is_second_try, self.outcome, self.columns = True, None, None
        self.stack.close()
        self.load.state = State.FETCHING
        with self.catching():
            blocks, maker = self.cache.blocks, self.cache.maker
            # Other row groups would be made of the same bytes.
            blocks.remove_damaged(self.group.file, itertools.chain(*maker.sources(self.number)))
            self._fetch(blocks.past_the_cache())
        return True

    def decoded(self) -> Iterator[Columns]:
        """Return the columns of each blob, once the row group is fetched."""
        if self.columns is not None:
            return self.columns
        assert self.opened is not None
        return self.opened.columns()

    def decoded_whole(self) -> Columns:
        """Return the columns of the only blob, once the row group is fetched. Release the fetched bytes."""
        with self.stack:
            [columns] = self.decoded()
        return columns

    def published(self, made: list[memoryview]) -> None:
        """Note the blobs, and discard the cached blocks that they were made of."""
        self.outcome = made
        if self.columns is None:
            self.cache.maker.discard_sources(self.number, self.cache.keys)

    def close(self) -> None:
        self.stack.close()
        if self.lock is not None:
            self.lock.close()

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Keep an error of the block, which concerns this row group alone."""
        try:
            with charged_to(self.load.account):
                yield
        except Exception as error:  # noqa: BLE001 (raised where the row group is awaited)
            self.outcome = error


def _run(jobs: list[_Job], on_done: Callable[[_Job], None], stalled: Stalled) -> None:
    """Fetch, decode, pack and publish row groups. Call `on_done` with each once there is a result."""
    with ExitStack() as stack:
        for job in jobs:
            stack.callback(job.close)
            job.open()
        missing = list(jobs)
        while missing:
            fetched = _fetched(missing, stalled)
            missing = [job for job in missing if job not in fetched]

            def settle(job: _Job, missing: list[_Job] = missing) -> None:
                if job.refetch_if_damaged():
                    missing.append(job)
                else:
                    on_done(job)

            if fetched[0].load.small_bytes:
                _publish_together(fetched, settle)
            else:
                for job in fetched:
                    _publish_streamed(job)
                    settle(job)


def _fetched(jobs: Sequence[_Job], stalled: Stalled) -> list[_Job]:
    """Wait for requests. Return the row groups that are fetched, or cannot be."""
    while True:
        opened = [job.opened for job in jobs if job.outcome is None and job.opened is not None]
        with doing("origin"):
            wait([fetch for each in opened for fetch in each.fetches], STALLED_SECONDS)
        for each in opened:
            cancel_if_failed(each.fetches)
        if fetched := [job for job in jobs if job.is_fetched]:
            return fetched
        stalled()


# Row groups whose blobs stream


def _publish_streamed(job: _Job) -> None:
    """Decode, pack and publish one blob after the other, in a decoder thread if they are large."""
    if job.outcome is not None:
        return
    cache, memory = job.cache, job.cache.memory
    with job.catching():
        if job.opened is not None:
            wait_for_origin(job.opened.fetches)  # A failed one needs no memory and no decoder.
        job.load.state = State.DECODING
        decoding = memory.decoding.reserve(cache.decoding_bytes(job.number))
        if cache.is_decoded_inline(job.number):
            # A function of the user may wait, and other threads call it meanwhile.
            with doing("decode"), decoding, nullcontext() if cache.is_mapped else computing():
                blobs = _stream(job)
        else:
            blobs = _stream_in_thread(job, decoding)
        job.published(blobs)


def _stream_in_thread(job: _Job, decoding: AbstractContextManager[Any]) -> list[memoryview]:
    since, timeline = perf_counter(), Timeline()

    def stream() -> list[memoryview]:
        with timeline.here(), doing("decode"), decoding:
            return _stream(job)

    streamed = job.cache.memory.decoders.submit(stream)
    wait([streamed])
    waited(since, timeline, instead=timeline.longest())
    return streamed.result()


def _stream(job: _Job) -> list[memoryview]:
    cache, number, tier = job.cache, job.number, job.cache.tier
    keys, blobs = job.load.keys, []
    if len(keys) > 1 and job.is_kept:  # A process may have died before it found out that it had packed damaged bytes.
        tier.retract(keys)
    get_or_fill = tier.get_or_fill if job.is_kept else fill_in_memory
    try:
        with job.stack:
            for key, rows, columns in zip(keys, cache.plan.lengths(number), job.decoded(), strict=True):
                fill = partial(row_block.pack, columns, rows, cache.plan.layout, key.digest, job.group.name)
                blobs.append(get_or_fill(key, fill))
    except BaseException:
        if job.is_kept:
            tier.retract(keys)  # The first blobs are of the same bytes as the one that cannot be made.
        raise
    return blobs


# Small row groups


class _Packed:
    """A blob in memory, which is used again for others once the cache has a copy.

    Args:
        job: The row group.
        columns: Its columns.

    Attributes:
        blob: Its key, and the blob.
    """

    def __init__(self, job: _Job, columns: Columns) -> None:
        self.job = job
        self._buffer: mmap.mmap | None = None
        self._memory = memoryview(b"")
        [key] = job.load.keys
        row_block.pack(columns, job.group.rows, job.cache.plan.layout, key.digest, job.group.name, self._allocate)
        self.size = len(self._memory)
        self.blob = key, self._memory.toreadonly()

    def _allocate(self, size: int) -> memoryview:
        if size >= POOLED_BYTES:
            with suppress(OSError):  # The process has too many memory maps.
                self._buffer = blob_buffers.take(size)
        self._memory = memoryview(bytearray(size) if self._buffer is None else self._buffer)[:size]
        return self._memory

    def give_back(self) -> None:
        """Let other blobs use the memory, unless a view of it remains because the blob is not cached."""
        buffer, self._buffer = self._buffer, None
        del self.blob, self._memory
        if buffer is not None:
            blob_buffers.give_back(buffer)


def _publish_together(jobs: Sequence[_Job], settle: Callable[[_Job], None]) -> None:
    """Decode, pack and publish row groups of one blob each."""
    packed: list[_Packed] = []
    for job in jobs:
        if job.outcome is None:
            job.load.state = State.DECODING
            with job.catching(), computing(), doing("decode"):
                packed.append(_Packed(job, job.decoded_whole()))
        if job.outcome is not None:
            settle(job)
        elif sum(each.size for each in packed) >= PUBLISHED_BYTES:
            _put(packed, settle)
            packed = []
    _put(packed, settle)


def _put(packed: Sequence[_Packed], settle: Callable[[_Job], None]) -> None:
    """Publish blobs, those of each dataset by its own tier, which counts the misses."""
    with computing():
        for tier in dict.fromkeys(each.job.cache.tier.bulk for each in packed):
            assert tier is not None
            own = [each for each in packed if each.job.cache.tier.bulk == tier]
            blobs = tier.put_together([each.blob for each in own])
            for each, blob in zip(own, blobs, strict=True):
                with each.job.catching():
                    each.give_back()
                    each.job.published([blob])
    for each in packed:
        settle(each.job)
