"""What epochs will have fetched, foretold: the order is a formula, so all that happens can be gone through before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, groupby, takewhile

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.local.blob_file import size_on_disk
from dataload.cache.tier import Span
from dataload.catalog.footer_cache import run_key, stored_footer
from dataload.catalog.manifest import VERSION, Manifest
from dataload.formats.detect import fetched_beside_tail, tail_bytes
from dataload.loader.capacity import drawn_on_at_a_time, gathered_at_once, region_of
from dataload.loader.lookahead import Lookahead
from dataload.rows.row_group_cache import RowGroupCache
from dataload.samplers.lru import LRU
from dataload.samplers.order import Order
from dataload.samplers.share import RUN_ROWS


@dataclass(frozen=True)
class Fetched:
    """What is fetched from the origin: bytes, in so many requests."""

    bytes: int = 0
    requests: int = 0

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(self.bytes + other.bytes, self.requests + other.requests)

    def __sub__(self, other: Fetched) -> Fetched:
        return Fetched(self.bytes - other.bytes, self.requests - other.requests)


@dataclass(frozen=True)
class Cost:
    """What a row group takes. blocks: bytes of its file that are read through blocks; alone: in a request each.

    sizes: bytes on disk of each of its blobs.
    """

    file: Object
    blocks: list[Span]
    alone: list[Span]
    sizes: list[int]


class Costs:
    """What the row groups of a dataset take, and its footers: found once, file by file, for any number of readers."""

    def __init__(self, manifest: Manifest, blobs: RowGroupCache, blocks: Blocks) -> None:
        self.blobs = blobs
        self.block_bytes = blocks.block_bytes
        self.footer_bytes = _footer_bytes(manifest, blocks)
        self.row_bytes = blobs.num_bytes // max(1, manifest.num_rows)
        self._groups = [
            Cost(group.file, *blobs.sources(number), blobs.sizes_on_disk(number))
            for number, group in enumerate(manifest.row_groups)
        ]

    def __getitem__(self, number: int) -> Cost:
        return self._groups[number]

    def __len__(self) -> int:
        return len(self._groups)


class Reader:
    """Row groups as they are read through an empty cache of `limit` bytes that some pass through if need be.

    Where small record batches of Arrow files were fetched to find out what is in them, less is fetched than that.

    Raises ConfigError when the cache is too small for what the order needs at a time.
    """

    def __init__(self, costs: Costs, order: Order, limit: int) -> None:
        self._costs, self._order = costs, order
        region, self._further = region_of(order, costs.blobs, limit)
        self._cache = Cache(limit, region, costs.footer_bytes)
        self._fetched = Fetched()
        self._needs: LRU[int, list[tuple[int, int]]] = LRU(2)  # by epoch: to find them takes a look at each row

    def all_rows(self) -> Fetched:
        """What is fetched to have each row group once."""
        for number in range(len(self._costs)):
            self._read(number)
        return self._fetched

    def first_rows(self, rows: int) -> Fetched:
        """What is fetched before the first so many rows of the first epoch are there."""
        for _, group in takewhile(lambda need: need[0] < rows, self._order.needs_from(0)):
            self._read(group)
        return self._fetched

    @property
    def kept_bytes(self) -> int:
        """Bytes that are in the cache by now."""
        return self._cache.used

    def epochs(self, batch_size: int) -> Iterator[Fetched]:
        """What each epoch fetches, without end. What one fetches in advance for the next is its own."""
        at_once = gathered_at_once(self._costs.row_bytes * batch_size)
        ahead = drawn_on_at_a_time(self._order, at_once * batch_size)
        beyond = -self._order.n % batch_size  # positions of the next epoch, that the last batch counts as its own
        room = 2 * ahead
        opened: OrderedDict[int, None] = OrderedDict()  # row groups, as in `Shelf`
        asked: set[int] = set()  # that are not open yet

        def ask(groups: Iterable[int]) -> None:
            for group in groups:
                if group not in opened and group not in asked:
                    asked.add(group)
                    self._read(group)

        for epoch in count():
            before = self._fetched
            lookahead = Lookahead(self._needs_from(epoch), ask, ahead, self._further, self._passes)
            for gathered in self._gathered(epoch, batch_size, at_once):
                together = {group for _, group in gathered}
                lookahead.reach(gathered[-1][0] + 1)
                room = max(room, len(together))
                for group in sorted(together):  # as `RowStore.gather` puts them there
                    ask([group])
                    asked.discard(group)
                    if group not in opened:
                        while len(opened) >= room:
                            del opened[next(old for old in opened if old not in together)]
                        opened[group] = None
            lookahead.reach(self._order.n + beyond)
            yield self._fetched - before

    def _gathered(self, epoch: int, batch_size: int, at_once: int) -> Iterator[list[tuple[int, int]]]:
        """(position, row group), those that each gather is the first to need. Gathers grow, as `Share.runs` does."""
        most = max(1, RUN_ROWS // batch_size)
        doublings = (most - 1).bit_length()

        def gather(need: tuple[int, int]) -> tuple[int, int]:
            batch = need[0] // batch_size
            run = min(doublings, (batch + 1).bit_length() - 1)
            more, within = divmod(batch + 1 - (1 << run), most)
            return run + more, within // at_once

        for _, needs in groupby(self._needs_of(epoch), gather):
            yield list(needs)

    def _needs_from(self, epoch: int) -> Iterator[tuple[int, int]]:
        """As a loader has them."""
        yield from self._needs_of(epoch)
        for position, group in self._needs_of(epoch + 1):
            yield self._order.n + position, group

    def _passes(self, number: int) -> bool:
        return not all(self._cache.stays((number, part)) for part in range(len(self._costs[number].sizes)))

    def _needs_of(self, epoch: int) -> list[tuple[int, int]]:
        return self._needs.get(epoch, lambda epoch: list(self._order.needs_from(epoch)))

    def _read(self, number: int) -> None:
        """A row group's records are made, unless they are kept; then they are, as far as they find room."""
        cost, cache = self._costs[number], self._cache
        if all((number, part) in cache for part in range(len(cost.sizes))):
            return
        file = cost.file
        for start, stop in [] if cache.region else cost.blocks:
            for first, last in self._blocks_of(file, start, stop):
                if (file.path, first) not in cache:
                    self._fetched += Fetched(last - first, 1)
                    cache.put((file.path, first), size_on_disk(last - first, f"{file.path}#{first}-{last}"))
        for start, stop in [*cost.blocks, *cost.alone] if cache.region else cost.alone:
            if not all((file.path, first) in cache for first, _ in self._blocks_of(file, start, stop)):
                self._fetched += Fetched(stop - start, 1)
        for part, size in enumerate(cost.sizes):
            cache.put((number, part), size)

    def _blocks_of(self, file: Object, start: int, stop: int) -> Iterator[Span]:
        """The blocks that hold some of [start, stop)."""
        size = self._costs.block_bytes
        return ((first, min(first + size, file.size)) for first in range(start // size * size, stop, size))


def footers(manifest: Manifest, blobs: RowGroupCache, blocks: Blocks) -> Fetched:
    """What is fetched to know what is there: of each file, and where files have codes of values, of some row groups.

    The files are listed before, which is not counted: S3 names 1,000 in a request.
    """
    sizes = []
    for file, kept in {group.file: group.kept for group in manifest.row_groups}.items():
        footer = stored_footer(kept, blocks)
        sizes += [tail_bytes(file), *([] if footer is None else fetched_beside_tail(file, footer))]
    for column in blobs.value_sizes.coded:
        for number in blobs.value_sizes.samples:
            sizes += [stop - start for spans in blobs.sources(number, [column]) for start, stop in spans]
    return Fetched(sum(sizes), len(sizes))


def _footer_bytes(manifest: Manifest, blocks: Blocks) -> int:
    """Bytes that the footers of a dataset take in the cache, and its manifest."""
    tier = blocks.tier
    if not tier.shared:
        return 0
    runs = {group.kept.run for group in manifest.row_groups}
    footers = (tier.stored_bytes(run_key(run, blocks)) for run in runs)
    name = f"{manifest.row_groups[0].file.path}#manifest {VERSION}" if runs else ""
    return sum(footers) + size_on_disk(len(manifest.to_bytes()), name)


class Cache:
    """A cache as its index accounts for it, under "pin"; see `Index.reserve`. Nothing in it is of an earlier job."""

    def __init__(self, limit: int, region: int, used: int) -> None:
        self._limit, self.region, self.used = limit, region, used
        self._kept: set[tuple[object, int]] = set()
        self._passing: OrderedDict[tuple[object, int], int] = OrderedDict()
        self._passing_bytes = 0

    def __contains__(self, blob: tuple[object, int]) -> bool:
        return blob in self._kept or blob in self._passing

    def stays(self, blob: tuple[object, int]) -> bool:
        return blob in self._kept

    def put(self, blob: tuple[object, int], size: int) -> None:
        stays = self.used - self._passing_bytes + size <= self._limit - self.region or not self.region
        over = self.used + size - self._limit
        if over > self._passing_bytes:
            return
        while over > 0:
            _, freed = self._passing.popitem(last=False)
            self._passing_bytes -= freed
            self.used -= freed
            over -= freed
        self.used += size
        if stays:
            self._kept.add(blob)
        else:
            self._passing[blob] = size
            self._passing_bytes += size
