"""The sampler: a torch DistributedSampler whose order is a formula and whose position is a number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

from dataload.errors import ConfigError
from dataload.runtime.cached_property import cached_property
from dataload.samplers.keys import derive_key
from dataload.samplers.order import Order, Shuffle
from dataload.samplers.partition import check_locality
from dataload.samplers.share import Share
from dataload.world import World

Int64 = npt.NDArray[np.int64]

STATE_VERSION: Final = 1


class ShardedSampler(DistributedSampler[int]):
    """Each rank's rows of each epoch: every row exactly once over all ranks, in the same order whatever the world.

    11 positions of an epoch, in global batches of 4, on 2 ranks with a batch_size of 2 (* is padding):

        position                 0 1 2 3    4 5 6 7    8 9 10
        num_streams=1   rank 0   0 1        4 5        8 9
                        rank 1       2 3        6 7      10 0*
        drop_last=True  rank 0   0 1        4 5
                        rank 1       2 3        6 7
        num_streams=2   rank 0   0   2      4   6      8   10         node 0 owns stream 0, the even positions
        num_nodes=2     rank 1     1   3      5   7      9    0*      node 1 owns stream 1

    The row at a position is that of `Order`; it depends on the dataset, seed, epoch, shuffle, window and num_streams.
    So the rows of the t-th global batch are the same in every world with that global batch size, and an epoch begun in
    one world is finished in another. With several streams, nodes that divide num_streams, which divides the global
    batch, and ranks numbered node by node, each node reads its own row groups in every epoch, and no others.

    block_lengths, shuffle, seed, window, num_streams, dataset_key: as for `Order`.
    num_replicas, rank: this process among all; None: `World.detect()`.
    drop_last: leave out the last, partial global batch instead of padding it by at most num_replicas - 1 rows.
    batch_size: rows of one batch of one rank.
    num_nodes: hosts, with equal numbers of consecutive ranks; None: those of the detected world, where the world is
        detected and knows, else 1.

    Attributes: order; num_rows of the dataset; epoch and cursor, the global rows of it that are used up. `shuffle`,
    `num_samples` (= len()) and `total_size` are torch's, of a full epoch.

    Raises ConfigError for an argument that cannot work, or when streams on nodes are asked for and cannot be local.

    Notes: iterating never moves the cursor: whoever takes the batches does, by `advance` or `seek`, so that rows which
    were only prefetched are not counted. When an iteration comes to its end, the next one is of the next epoch.
    """

    VERSION: Final = "version"
    DATASET: Final = "dataset"
    SEED: Final = "seed"
    EPOCH: Final = "epoch"
    CURSOR: Final = "cursor"
    NUM_STREAMS: Final = "num_streams"
    SHUFFLE: Final = "shuffle"
    WINDOW: Final = "window"

    def __init__(
        self,
        block_lengths: Sequence[int] | npt.ArrayLike,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        shuffle: Shuffle | bool = "block",
        seed: int = 0,
        drop_last: bool = False,
        window: int | None = None,
        batch_size: int = 1,
        num_streams: int = 1,
        num_nodes: int | None = None,
        dataset_key: bytes = b"",
    ) -> None:
        if num_replicas is None or rank is None:
            world = World.detect()
            num_replicas = world.world_size if num_replicas is None else num_replicas
            rank = world.rank if rank is None else rank
            if num_nodes is None and num_replicas == world.world_size:
                num_nodes = world.num_nodes
        # As Python ints: what numpy's narrow integers come to in a product depends on its version.
        num_replicas, rank, batch_size = int(num_replicas), int(rank), int(batch_size)
        num_nodes = 1 if num_nodes is None else int(num_nodes)
        if not 0 <= rank < num_replicas:
            raise ConfigError(f"rank={rank} is not among num_replicas={num_replicas}: ranks count from 0")
        for name, number in (("batch_size", batch_size), ("num_nodes", num_nodes)):
            if number < 1:
                raise ConfigError(f"{name}={number}: must be at least 1")
        order = Order(
            block_lengths, shuffle=shuffle, seed=seed, window=window, num_streams=num_streams, dataset_key=dataset_key
        )
        super().__init__(cast("Any", range(order.n)), num_replicas, rank, bool(shuffle), seed, drop_last)
        self.batch_size = batch_size
        self.num_nodes = num_nodes
        if num_nodes > 1 and order.num_streams > 1:
            check_locality(order.num_streams, num_nodes, num_replicas, batch_size)
        self.cursor = 0
        self._follow(order)

    @property
    def num_rows(self) -> int:
        return self.order.n

    @property
    def global_batch_size(self) -> int:
        return self._share.global_batch_size

    @property
    def node_share(self) -> float:
        """Which part of the rows this rank's node reads, in (0, 1]: all of them, but where streams are local."""
        return len(self._share.node_streams()) / self.order.num_streams

    @property
    def padding(self) -> int:
        """How many of this rank's rows of a full epoch, its last ones, repeat others to make the ranks equal."""
        return self.padding_from(0)

    @property
    def finished(self) -> bool:
        """Whether no batch is left in this epoch."""
        return self.finished_at(self.cursor)

    def finished_at(self, cursor: int) -> bool:
        """As `finished`, were the sampler at `cursor`."""
        return self._share.num_batches(self.num_rows - self._checked(cursor)) == 0

    def padding_from(self, cursor: int) -> int:
        """As `padding`, of what is left of an epoch from `cursor` on."""
        return self._share.padding(self.num_rows - self._checked(cursor))

    def batches(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[Int64]:
        """The rank's batches, each the rows int64 [batch_size], the last one maybe shorter.

        epoch: None: the current one. cursor: where in it; None: the current one, or 0 of another epoch.
        Raises ConfigError when the cursor is not in [0, num_rows]. Does not move the sampler.
        """
        return (rows for run in self.runs(epoch, cursor) for rows in run)

    def runs(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[Int64]:
        """The rank's batches, more and more of them at a time: int64 [batches, rows]; arguments as for `batches`."""
        epoch, cursor = self._position(epoch, cursor)
        positions = self._share.runs(cursor, self.num_rows)
        return (self.order.rows(epoch, some.ravel()).reshape(some.shape) for some in positions)

    def blocks_from(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[int]:
        """Row groups in the order in which this rank's node first needs them, each once; arguments as for `batches`.

        Where streams are local to nodes, the few that the partial last batch takes from other nodes are not among them.
        """
        return (block for _, block in self.needs_from(epoch, cursor))

    def needs_from(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[tuple[int, int]]:
        """(position in the epoch, row group), as `blocks_from`, with the position that needs it first."""
        return self.order.needs_from(*self._position(epoch, cursor), streams=self._share.node_streams())

    def __iter__(self) -> Iterator[int]:
        """The rank's rows from the cursor on, as Python ints. Starts when the first is asked for."""
        epoch = self.epoch
        for run in self.runs(epoch, self.cursor):
            yield from run.ravel().tolist()
        if self.epoch == epoch:  # else somebody has set another epoch, or another iteration came to its end first
            self.seek(epoch + 1, 0)

    def __len__(self) -> int:
        """Rows of each rank in a full epoch, padding included."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration. A cursor restored or advanced in this very epoch is kept."""
        if epoch != self.epoch:
            self.seek(epoch, 0)

    def advance(self, batches: int = 1) -> None:
        """So many more global batches are used up."""
        self.seek(self.epoch, self.cursor + batches * self.global_batch_size)

    def seek(self, epoch: int, cursor: int) -> None:
        """The sampler is where `cursor` rows of `epoch` are used up; all of them where there are fewer."""
        self.epoch, self.cursor = int(epoch), self._checked(min(int(cursor), self.num_rows))

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler is: JSON-able, under 1 KB, and the same on every rank."""
        return {
            self.VERSION: STATE_VERSION,
            self.DATASET: self._dataset,
            self.SEED: self.order.seed,
            self.EPOCH: self.epoch,
            self.CURSOR: self.cursor,
            self.NUM_STREAMS: self.order.num_streams,
            self.SHUFFLE: self.order.shuffle,
            self.WINDOW: self.order.window,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, in its order, in whatever world this is.

        Raises ConfigError when it is of another dataset or version. Streams that cannot be local in this world are not.
        """
        if state.get(self.VERSION) != STATE_VERSION:
            raise ConfigError(f"the state has version {state.get(self.VERSION)!r}; this release reads {STATE_VERSION}")
        if state.get(self.DATASET) != self._dataset:
            raise ConfigError(
                f"the state is of another dataset ({state.get(self.DATASET)!r}, this is {self._dataset!r}): "
                "other files, other columns or filters, or row groups of other sizes"
            )
        if missing := self.state_dict().keys() - state.keys():
            raise ConfigError(f"the state lacks {', '.join(sorted(missing))}")
        cursor = self._checked(state[self.CURSOR])
        self._follow(
            Order(
                self.order.block_lengths,
                shuffle=state[self.SHUFFLE],
                seed=state[self.SEED],
                window=state[self.WINDOW],
                num_streams=state[self.NUM_STREAMS],
                dataset_key=self.order.dataset_key,
            )
        )
        self.seek(state[self.EPOCH], cursor)

    def _follow(self, order: Order) -> None:
        """Deal out this order from now on."""
        self.order = order
        self._share = Share(
            self.num_replicas, self.rank, self.batch_size, self.drop_last, order.num_streams, self.num_nodes
        )
        self.seed, self.shuffle = order.seed, bool(order.shuffle)
        self.num_samples = self._share.num_samples(order.n)
        self.total_size = self.num_samples * self.num_replicas

    def _position(self, epoch: int | None, cursor: int | None) -> tuple[int, int]:
        epoch = self.epoch if epoch is None else epoch
        if cursor is None:
            cursor = self.cursor if epoch == self.epoch else 0
        return epoch, self._checked(cursor)

    def _checked(self, cursor: int) -> int:
        if not 0 <= cursor <= self.num_rows:
            raise ConfigError(f"cursor {cursor} is not in an epoch of {self.num_rows} rows")
        return cursor

    @cached_property
    def _dataset(self) -> str:
        """Stands for the dataset's key and the sizes of its row groups: both decide which row is where."""
        lengths = self.order.block_lengths.astype("<i8").tobytes()
        return f"{derive_key('dataset', self.order.dataset_key, lengths):016x}"
