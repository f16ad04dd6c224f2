"""One rank's share of an epoch: the positions of its batches and their padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataload.runtime.cached_property import cached_property
from dataload.samplers.partition import batch_slice, is_local, stream_owners

Int64 = npt.NDArray[np.int64]

RUN_ROWS = 1 << 14  # rows computed together: enough to hide numpy's overhead, few enough for the CPU's cache


def run_bounds(most: int, batches: int) -> Iterator[tuple[int, int]]:
    """Yield the (first, after) batches of each run of an epoch, which are computed and gathered together.

    The first runs are small, so that the first batch does not wait for many others.

    Args:
        most: Batches of a run, at most; but a run has at least 1.
        batches: Batches of the epoch.
    """
    first, size = 0, 1
    while first < batches:
        yield first, min(first + size, batches)
        first, size = first + size, min(2 * size, max(1, most))


@dataclass(frozen=True)
class Share:
    """One rank's share of global batches of num_replicas * batch_size consecutive positions.

    Each global batch is sorted by (owning node of the stream, stream, position) and cut into one equal slice per rank.
    So nodes share few row groups. The last, partial batch of m rows gives each rank ceil(m / num_replicas) rows, padded
    at its end by the first positions of the epoch, or of the partial batch itself; drop_last drops it instead.
    """

    num_replicas: int
    rank: int
    batch_size: int
    drop_last: bool = False
    num_streams: int = 1
    num_nodes: int = 1
    pads_with_tail: bool = False
    run_rows: int = RUN_ROWS

    @property
    def global_batch_size(self) -> int:
        """Rows of one batch of all ranks together."""
        return self.num_replicas * self.batch_size

    def num_batches(self, rows: int) -> int:
        """Return the batches of each rank when `rows` global rows are left."""
        full, tail = divmod(rows, self.global_batch_size)
        return full + (1 if tail and not self.drop_last else 0)

    def num_samples(self, rows: int) -> int:
        """Return the rows of each rank, padding included, when `rows` global rows are left."""
        full, tail = divmod(rows, self.global_batch_size)
        return full * self.batch_size + self._tail_size(tail)

    def padding(self, rows: int) -> int:
        """Return the number of this rank's padding rows when `rows` global rows are left."""
        tail = rows % self.global_batch_size
        size = self._tail_size(tail)
        return min(size, max(0, (self.rank + 1) * size - tail))

    def node_streams(self) -> list[int]:
        """Return the streams that full batches of this rank's node draw on: its own if streams are local, else all."""
        if not is_local(self.num_streams, self.num_nodes, self.num_replicas, self.batch_size):
            return list(range(self.num_streams))
        node = self.rank * self.num_nodes // self.num_replicas
        own: list[int] = np.flatnonzero(self._owners == node).tolist()
        return own

    def runs(self, start: int, n: int) -> Iterator[Int64]:
        """Yield the rank's positions from position `start` to the end of an epoch of n, several batches at a time.

        Yields:
            int64 [batches, batch_size]; the last may be [1, rows of the partial batch].
        """
        full, tail = divmod(n - start, self.global_batch_size)
        pattern, period = self._pattern(start, full)
        for first, after in run_bounds(self.run_rows // self.batch_size, full):
            repeats, batches = np.divmod(np.arange(first, after), len(pattern))
            yield pattern[batches] + repeats[:, None] * period
        if tail and not self.drop_last:
            yield self._tail(n - tail, n)[None]

    def _pattern(self, start: int, full: int) -> tuple[Int64, int]:
        """Return the positions of the first batches and the period after which they repeat, shifted by the period."""
        size, low = self.global_batch_size, self.rank * self.batch_size
        batches = min(full, self.num_streams // math.gcd(self.num_streams, size))
        slices = [
            batch_slice(start + t * size, size, self._by_owner, low, low + self.batch_size) for t in range(batches)
        ]
        return np.array(slices), batches * size

    def _tail(self, start: int, n: int) -> Int64:
        tail = n - start
        size = self._tail_size(tail)
        low, high = min(self.rank * size, tail), min((self.rank + 1) * size, tail)
        past_end = self.rank * size + np.arange(high - low, size) - tail  # numbers of this rank's pads among all
        pads = start + past_end % tail if self.pads_with_tail else past_end % n
        return np.concatenate((batch_slice(start, tail, self._by_owner, low, high), pads))

    def _tail_size(self, tail: int) -> int:
        return 0 if self.drop_last else -(-tail // self.num_replicas)

    @cached_property
    def _owners(self) -> Int64:
        return stream_owners(self.num_streams, self.num_nodes)

    @cached_property
    def _by_owner(self) -> Int64:
        """Streams sorted by owning node."""
        return np.argsort(self._owners, kind="stable")
