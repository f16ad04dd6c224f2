"""A simulation of what epochs fetch. The order is a formula, so each request is known in advance."""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, groupby, product, takewhile
from pathlib import Path

import numpy as np

from dataload.cache.blob_file import size_on_disk
from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.local.index import Shortage
from dataload.cache.tier import Span, blob_name
from dataload.catalog.footer_cache import run_key, runs_of, stored_footer
from dataload.catalog.footer_summary import Summarize
from dataload.catalog.manifest import VERSION, Manifest
from dataload.formats.detect import fetched_beside_tail, tail_bytes
from dataload.loader.capacity import gathered_at_once, need_of, working_set
from dataload.loader.lookahead import Lookahead
from dataload.rows.open_row_groups import evictions
from dataload.rows.row_group_cache import RowGroupCache
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.order import Order
from dataload.samplers.share import run_bounds


@dataclass(frozen=True)
class Fetched:
    """Bytes fetched from the origin, and the number of requests."""

    bytes: int = 0
    requests: int = 0

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(self.bytes + other.bytes, self.requests + other.requests)


@dataclass(frozen=True)
class Request:
    """A row group that is fetched.

    Args:
        position: Position in the epoch that the loader has come to.
        needed: The first position that needs the row group; beyond the epoch, one of the next.
        fetched: What is fetched.
    """

    position: int
    needed: int
    fetched: Fetched


@dataclass(frozen=True)
class Epoch:
    """What an epoch fetches. Prefetches for the next epoch count for this one."""

    requests: tuple[Request, ...] = ()

    @property
    def fetched(self) -> Fetched:
        return sum((request.fetched for request in self.requests), Fetched())


@dataclass(frozen=True)
class Cost:
    """The cost of reading one row group.

    Args:
        file: Its file.
        shared: Byte ranges that are read through cached blocks.
        own: Byte ranges that are fetched in one request each.
        sizes: Bytes on disk of each of its blobs.
    """

    file: Object
    shared: list[Span]
    own: list[Span]
    sizes: list[int]


class Costs:
    """The costs of row groups and footers, computed once for any number of readers.

    Args:
        sources: The row groups of the dataset, or of each dataset of a mixture.
    """

    def __init__(self, sources: Sequence[RowGroupCache]) -> None:
        for blobs in sources:
            blobs.measure()
        self.blobs = sources
        self.block_bytes = sources[0].blocks.block_bytes
        self.footer_bytes = sum(_footer_bytes(blobs.manifest, blobs.blocks) for blobs in sources)
        self.row_bytes = max(blobs.row_bytes for blobs in sources)
        self.groups = [
            Cost(group.file, *blobs.maker.sources(number), blobs.sizes_on_disk(number))
            for blobs in sources
            for number, group in enumerate(blobs.manifest.row_groups)
        ]


class _OpenRowGroups:
    """The row groups of a simulated loader that are open or requested.

    Args:
        read: Reads a row group. Returns what is fetched for it.

    Attributes:
        position: Position in the epoch that the loader has come to.
    """

    def __init__(self, read: Callable[[int], Fetched]) -> None:
        self._read = read
        self._open: dict[int, None] = {}  # as in `RowStore`
        self._requested: set[int] = set()  # that are not open yet
        self._needed_at: dict[int, int] = {}
        self._requests: list[Request] = []
        self.position = 0

    def needed(self, need: tuple[int, int]) -> tuple[int, int]:
        """Note the position that needs a row group. Return both."""
        self._needed_at[need[1]] = need[0]
        return need

    def request(self, groups: Iterable[int]) -> None:
        """Read the row groups that are neither open nor requested."""
        for group in groups:
            if group in self._open:
                self._open[group] = self._open.pop(group)  # It is closed after all others.
            elif group not in self._requested:
                self._requested.add(group)
                if (fetched := self._read(group)).requests:
                    self._requests.append(Request(self.position, self._needed_at[group], fetched))

    def open(self, groups: set[int], capacity: int) -> None:
        """Open row groups that a gather at the position needs, and close others."""
        missing = sorted(groups - self._open.keys())  # the order of `RowStore.gather`
        self._needed_at |= dict.fromkeys(missing, self.position)
        self.request(missing)
        for old in evictions(self._open, capacity - len(missing), groups):
            del self._open[old]
        self._open |= dict.fromkeys(missing)
        self._requested -= groups

    def epoch(self) -> Epoch:
        """Return what was requested since the last call."""
        requests, self._requests = self._requests, []
        return Epoch(tuple(requests))


class Reader:
    """A simulated loader that reads row groups through an initially empty cache of `limit` bytes. disk: see `need_of`.

    An order of several streams has a node for each. The loader is that of the first node.

    Row groups that do not fit are cached in a transient region. The result is an upper bound for Arrow files whose
    small record batches were already fetched with the messages.

    Raises:
        ConfigError: The cache is too small for what the order needs at a time.
    """

    def __init__(self, costs: Costs, order: Order | MixtureOrder, limit: int, disk: Path | None = None) -> None:
        self._costs, self._order = costs, order
        sources = list(zip(order.orders, costs.blobs, strict=True))
        need = need_of(sources, limit, bytes(16), 1 / order.num_streams, disk)
        region, self._further = need.transient_share(limit, need.total)
        self._cache = Cache(limit, region, costs.footer_bytes)
        self._streams = None if order.num_streams == 1 else [0]
        self._needs_of = lru_cache(2)(lambda epoch: list(order.needs_from(epoch, streams=self._streams)))

    def all_rows(self) -> Fetched:
        """Return what reading each row group of the node once fetches. Nothing reads those without rows."""
        every = np.flatnonzero(self._order.block_lengths).tolist()
        numbers = sorted({group for _, group in self._needs_of(0)}) if self._streams else every
        return sum(map(self._read, numbers), Fetched())

    def first_rows(self, rows: int) -> Fetched:
        """Return what the first `rows` rows of the first epoch fetch."""
        needs = takewhile(lambda need: need[0] < rows, self._order.needs_from(0, streams=self._streams))
        return sum((self._read(group) for _, group in needs), Fetched())

    @property
    def kept_bytes(self) -> int:
        """Bytes in the cache so far."""
        return self._cache.used

    def epochs(self, batch_size: int) -> Iterator[Epoch]:
        """Yield the epochs, without end."""
        at_once = gathered_at_once(self._costs.row_bytes * batch_size)
        most = self._order.most_rows(at_once * batch_size)
        ahead = sum(map(working_set, self._order.orders, most))
        capacity = 2 * ahead
        groups = _OpenRowGroups(self._read)
        for epoch in count():
            needs = map(groups.needed, self._needs_from(epoch))
            lookahead = Lookahead(needs, groups.request, ahead, self._further, self._is_transient)
            for gathered in self._gathered(epoch, batch_size, at_once):
                groups.position = gathered[0][0]
                needed = {group for _, group in gathered}
                lookahead.reach(gathered[-1][0] + 1)
                capacity = max(capacity, len(needed))
                groups.open(needed, capacity)
            groups.position = self._order.n
            lookahead.reach(self._order.n)
            yield groups.epoch()

    def _gathered(self, epoch: int, batch_size: int, at_once: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the (position, row group) that each gather needs first. A gather has `at_once` batches of a run."""
        runs = run_bounds(self._order.run_rows // batch_size, -(-self._order.n // batch_size))
        firsts = [batch * batch_size for run in runs for batch in range(*run, at_once)]
        for _, needs in groupby(self._needs_of(epoch), lambda need: bisect(firsts, need[0])):
            yield list(needs)

    def _needs_from(self, epoch: int) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) of this epoch and then of the next one, as a loader does."""
        yield from self._needs_of(epoch)
        for position, group in self._needs_of(epoch + 1):
            yield self._order.n + position, group

    def _is_transient(self, number: int) -> bool:
        return not all((number, part) in self._cache.pinned for part in range(len(self._costs.groups[number].sizes)))

    def _read(self, number: int) -> Fetched:
        """Decode a row group unless it is cached, and cache as much of it as fits. Return what is fetched for it."""
        cost, cache, fetched = self._costs.groups[number], self._cache, Fetched()
        if all((number, part) in cache for part in range(len(cost.sizes))):
            return fetched
        file = cost.file
        for start, stop in [] if cache.region else cost.shared:
            for first, last in self._blocks_of(file, start, stop):
                if (file.path, first) not in cache:
                    fetched += Fetched(last - first, 1)
                    cache.put((file.path, first), size_on_disk(last - first, blob_name(file.path, f"{first}-{last}")))
        for start, stop in [*cost.shared, *cost.own] if cache.region else cost.own:
            if not all((file.path, first) in cache for first, _ in self._blocks_of(file, start, stop)):
                fetched += Fetched(stop - start, 1)
        for part, size in enumerate(cost.sizes):
            if (number, part) not in cache:
                cache.put((number, part), size)
        return fetched

    def _blocks_of(self, file: Object, start: int, stop: int) -> Iterator[Span]:
        """Return the blocks that overlap [start, stop)."""
        size = self._costs.block_bytes
        return ((first, min(first + size, file.size)) for first in range(start // size * size, stop, size))


def footers(sources: Sequence[RowGroupCache]) -> Fetched:
    """Return what reading the footers fetches, and the sampled row groups of dictionary-encoded columns.

    Listing the files is not counted: S3 lists 1,000 per request.
    """
    sizes = []
    for blobs in sources:
        run_of = runs_of(blobs.blocks)
        for file, footer_at in {group.file: group.footer_at for group in blobs.manifest.row_groups}.items():
            footer = stored_footer(footer_at, run_of)
            sizes += [tail_bytes(file), *([] if footer is None else fetched_beside_tail(file, footer))]
        if (sampled := blobs.maker.value_sizes) is not None:
            for column, number in product(sampled.coded, sampled.samples):
                sizes += [stop - start for spans in blobs.maker.sources(number, [column]) for start, stop in spans]
    return Fetched(sum(sizes), len(sizes))


def _footer_bytes(manifest: Manifest, blocks: Blocks) -> int:
    """Return the bytes of a dataset's footers, of what is known of them, and of its manifest in the cache."""
    tier = blocks.tier
    if not tier.shared:
        return 0
    runs = {group.footer_at.run for group in manifest.row_groups}
    summary = Summarize(manifest.table).name
    stored = (tier.stored_bytes(key) for run in runs for key in (run_key(run, blocks), blocks.key(run, summary)))
    name = blob_name(manifest.row_groups[0].file.path, f"manifest {VERSION}") if runs else ""
    known = dict.fromkeys([*(group.file.path for group in manifest.row_groups), *(run.path for run in runs)])
    return sum(stored) + size_on_disk(len(manifest.to_bytes(known)), name)


class Cache:
    """A cache as its index accounts for it under the "pin" policy, without blobs of earlier jobs.

    See `CacheFolder.reserve`.

    Args:
        limit: Size limit in bytes.
        region: Bytes reserved for transient blobs.
        used: Bytes in use.

    Attributes:
        pinned: The blobs that are cached for good.
    """

    def __init__(self, limit: int, region: int, used: int) -> None:
        self._limit, self.region, self.used = limit, region, used
        self.pinned: set[tuple[object, int]] = set()
        self._transient: OrderedDict[tuple[object, int], int] = OrderedDict()
        self._transient_bytes = 0

    def __contains__(self, blob: tuple[object, int]) -> bool:
        return blob in self.pinned or blob in self._transient

    def put(self, blob: tuple[object, int], size: int) -> None:
        """Cache a blob if it fits. Evict the oldest transient blobs for it."""
        missing = Shortage.of(
            size, used=self.used, transient=self._transient_bytes, limit=self._limit, region=self.region
        )
        if missing.total > self._transient_bytes:
            return
        excess = missing.total
        while excess > 0:
            _, freed = self._transient.popitem(last=False)
            self._transient_bytes -= freed
            self.used -= freed
            excess -= freed
        self.used += size
        if missing.pinned <= 0:
            self.pinned.add(blob)
        else:
            self._transient[blob] = size
            self._transient_bytes += size
