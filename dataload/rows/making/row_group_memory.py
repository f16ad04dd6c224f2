"""The memory in which the row groups of one or several datasets are made, and the threads that decode them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.formats.range_stream import LARGEST_PIECE, fetched_buffers
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.forks import ForkAware
from dataload.runtime.instances import Largest
from dataload.runtime.memory_budget import MemoryBudget
from dataload.runtime.resource_limits import MEMORY_DIVISOR, host_cores, usable_cores, usable_memory

TRAINER_DIVISOR = 4  # A quarter of that is for the process that trains, the rest for its background decoder.
MIN_MEMORY = 64 << 20
UNSHARED_MEMORY = 512 << 20  # at most, for a dataset without a loader that knows the ranks of the host
DECODED_COPIES = 3  # of a blob: Arrow has its columns, may copy them to join their parts, and they are packed
RELEASED_BYTES = 16 << 20  # at least, of row groups, between two returns of Arrow's unused memory


def packing_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that packing takes besides the decompressed columns. sizes: of the blobs of a row group."""
    return (DECODED_COPIES - 1) * max(sizes)


class MemoryNeed(NamedTuple):
    """The memory that the row groups of a dataset need.

    Attributes:
        held: Bytes of fetched row groups that must fit, whatever the memory of the rank.
        largest: Stored bytes of the largest row group.
        decoding: Bytes that a decoder thread takes.
    """

    held: int
    largest: int
    decoding: int

    @classmethod
    def of_all(cls, needs: Iterable[Self]) -> Self:
        """Return the need of several datasets in one memory."""
        return cls(*map(max, zip(*needs, strict=True)))


class RankShare(NamedTuple):
    """The memory and the threads of a rank for making row groups.

    Attributes:
        memory: Bytes, of this process and its background decoder together.
        decoders: Threads that decode, in each of the two.
    """

    memory: int
    decoders: int

    @classmethod
    def of(cls, ranks: int, processes: int) -> Self:
        """Return the share of one of the `processes` of each of the host's ranks."""
        memory = usable_memory() // MEMORY_DIVISOR // (ranks * processes)
        decoders = min(usable_cores(), host_cores() // ranks)  # A launcher may have bound this rank to its own cores.
        return cls(max(MIN_MEMORY, memory), max(1, decoders))


class RowGroupMemory(ForkAware):
    """The memory of one rank for row groups that are made, of which this process has a part.

    The other part is that of its background decoder.

    Args:
        need: The need of the row groups.
        rank: The share of this rank. None: a default, until `share`.

    Attributes:
        rank: The share of this rank. `limit` may be more than its memory.
        held: The budget of this process for row groups that it fetches and holds, and for small ones that it makes.
        decoding: The budget of this process for row groups that it decodes. One that waits for a decoder reserves
            nothing of it.
        decoders: The threads that decode. Few, apart from those that wait for the origin: Arrow keeps memory for each
            thread that decodes.

    Notes:
        Any thread may call it.
    """

    held: MemoryBudget
    decoding: MemoryBudget
    decoders: DaemonExecutor

    def __init__(self, need: MemoryNeed, rank: RankShare | None = None) -> None:
        self._need = need
        self._shares = Largest()
        whole = RankShare.of(1, 1)
        self.rank = rank or whole._replace(memory=min(UNSHARED_MEMORY, whole.memory))
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        """Start with empty budgets and new threads."""
        held, decoding = self._parts(self._of_trainer)
        self.held, self.decoding = MemoryBudget(held), MemoryBudget(decoding)
        self.decoders = DaemonExecutor(self.rank.decoders, "dataload-decode")
        self._unreleased = 0  # bytes that Arrow may have kept since it last returned its unused memory

    def share(self, loader: object, ranks: int, processes: int) -> None:
        """Divide the host's memory for row groups and its cores among its ranks.

        With several loaders, the largest numbers apply. Each one counts until the first call after its end.

        Args:
            loader: Identifies the loader.
            ranks: Ranks of the host.
            processes: Processes of each rank: its own, which decodes on its share of the cores, and its workers.
        """
        self.use(RankShare.of(*self._shares.of(loader, ranks, processes)))

    def use(self, rank: RankShare) -> None:
        """Set the share of this rank."""
        before, self.rank = self.rank, rank
        if rank.decoders != before.decoders:
            self.decoders = DaemonExecutor(rank.decoders, "dataload-decode")  # The old threads end with their calls.
        if rank != before:
            self._divide(self._of_trainer)

    def use_decoder_share(self) -> None:
        """Take the part of the rank's memory that the training process leaves to its background decoder."""
        self._divide(self.rank.memory - self._of_trainer)

    @property
    def limit(self) -> int:
        """The most that is in use for this rank: up to its memory, or more if row groups have very many columns."""
        return sum(self._parts(self._of_trainer)) + sum(self._parts(self.rank.memory - self._of_trainer))

    @contextmanager
    def hold(self, size: int, is_cancelled: Callable[[], bool]) -> Iterator[Callable[[int], None]]:
        """Hold memory for the bytes of row groups for the duration of the block. See `MemoryBudget.reserve`.

        Raises:
            ReservationCancelled: `is_cancelled()` became true before the memory was reserved.
        """
        try:
            with self.held.reserve(size, is_cancelled) as give_back:
                self._unreleased += size
                yield give_back
        finally:
            self._release_unused()

    @property
    def _of_trainer(self) -> int:
        return self.rank.memory // TRAINER_DIVISOR

    def _divide(self, size: int) -> None:
        held, decoding = self._parts(size)
        self.held.resize(held)  # Other loaders may have reserved parts of it.
        self.decoding.resize(decoding)

    def _parts(self, size: int) -> tuple[int, int]:
        """Return the bytes for fetched row groups, and those for decoding, which has a part for each decoder thread.

        Fetched bytes fill all requests, or a row group for each decoder thread and the next one. More of them would
        only wait for a decoder, in fresh memory, which is slow.
        """
        decoding = min(size // 2, self._need.decoding * self.rank.decoders)
        useful = max(IN_FLIGHT * LARGEST_PIECE, (self.rank.decoders + 1) * self._need.largest)
        return max(min(size - decoding, useful), self._need.held), decoding

    def _release_unused(self) -> None:
        """Return unused memory once no row group is held. Not between row groups: fresh memory is slow."""
        if self._unreleased >= RELEASED_BYTES and self.held.idle:
            self._unreleased = 0
            fetched_buffers.clear()
            pa.default_memory_pool().release_unused()
