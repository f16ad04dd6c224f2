"""A torch DistributedSampler over any order, whose position is a number of rows."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from typing import Any, ClassVar, Final, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

from dataload.arguments import whole_number
from dataload.errors import ConfigError
from dataload.samplers.order import Order
from dataload.samplers.partition import check_locality, is_local
from dataload.samplers.row_iterator import RowIterator
from dataload.samplers.share import Share
from dataload.world import World

Int64 = npt.NDArray[np.int64]

STATE_VERSION: Final = 1

log = logging.getLogger(__name__)


class PositionOrder(Protocol):
    """A mapping from the positions of an epoch to rows: an `Order` or a `MixtureOrder`.

    Attributes:
        n: Rows of an epoch.
        num_streams: Position p of an epoch belongs to stream p mod num_streams.
        seed: Seed of the shuffle.
        homogeneous: Whether a global batch must not have rows of other positions, such as the epoch's first ones.
        run_rows: Rows that a rank computes together.
        chosen: Names of the options that an epoch takes from the arguments of the sampler, not from a state.
    """

    chosen: ClassVar[tuple[str, ...]]
    n: int
    num_streams: int
    seed: int
    homogeneous: bool
    run_rows: int

    @property
    def orders(self) -> tuple[Order, ...]:
        """The order of each dataset."""

    def most_rows(self, rows: int) -> list[int]:
        """Return how many rows of each dataset may be in `rows` consecutive positions."""

    @property
    def shuffle(self) -> Any:
        """Kind of the shuffle; False for file order."""

    @property
    def options(self) -> dict[str, Any]:
        """JSON-able values that give the same order of the same data."""

    @property
    def digest(self) -> str:
        """Identifies the data."""

    def with_options(self, **options: Any) -> Self:
        """Return the order of the same data with other options."""

    def rows(self, epoch: int, positions: npt.ArrayLike) -> Int64:
        """Return the rows at these positions of the epoch: int64 [k]."""

    def needs_from(
        self, epoch: int, position: int = 0, streams: Sequence[int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) for the row groups that the rest of the epoch needs, in ascending order."""


class RankSampler(DistributedSampler[int]):
    """The share of one rank in the epochs of an order. `ShardedSampler` and `MixtureSampler` make the order.

    Args:
        order: The order.
        num_replicas: Number of ranks; None: `World.detect()`.
        rank: Number of this rank; None: `World.detect()`.
        drop_last: Drop the last, partial global batch instead of padding it by at most num_replicas - 1 rows.
        batch_size: Rows of one batch of one rank.
        num_nodes: Number of equal groups of consecutive ranks that share a host; None: that of the detected world if
            `num_replicas` or `rank` is None and it is known, else 1.
        node_share: Part of the rows that this rank's host reads, if it has several groups. None: detected, too.

    Attributes:
        order: The order of the current epoch.
        next_order: The order from the next epoch on.
    """

    order: PositionOrder
    next_order: PositionOrder
    _differences: ClassVar[str] = "other files or filters, or row groups of other sizes"  # between two datasets

    def __init__(
        self,
        order: PositionOrder,
        num_replicas: int | None,
        rank: int | None,
        *,
        drop_last: bool,
        batch_size: int,
        num_nodes: int | None,
        node_share: float | None,
    ) -> None:
        if num_replicas is None or rank is None:
            world = World.detect()
            num_replicas = world.world_size if num_replicas is None else num_replicas
            rank = world.rank if rank is None else rank
            needed = order.num_streams > 1 or world.num_nodes is not None  # A single stream works on any nodes.
            if num_nodes is None and num_replicas == world.world_size and needed:
                num_nodes, node_share = world.num_streams, node_share or world.node_share
        num_replicas, rank = whole_number("num_replicas", num_replicas), whole_number("rank", rank)
        batch_size = whole_number("batch_size", batch_size, least=1)
        num_nodes = 1 if num_nodes is None else whole_number("num_nodes", num_nodes, least=1)
        if not 0 <= rank < num_replicas:
            raise ConfigError(f"rank={rank} is not among num_replicas={num_replicas}: ranks count from 0")
        super().__init__(cast("Any", range(order.n)), num_replicas, rank, bool(order.shuffle), order.seed, drop_last)
        self.batch_size = batch_size
        self.num_nodes = num_nodes
        self._node_share = node_share or 0.0
        if num_nodes > 1 and order.num_streams > 1:
            check_locality(order.num_streams, num_nodes, num_replicas, batch_size)
        self.cursor = 0
        self._given = order.options
        self._advances = False  # whether the consumer marks batches
        # torch takes the last rows of an epoch before the consumer has had all its batches. The sampler is then in the
        # next epoch, and this copy of it is at the consumer's position.
        self._draining: RankSampler | None = None
        self._follow(order)

    def use_file_order(self) -> None:
        """Begin the epoch in file order, without a shuffle."""
        self._given = {**self._given, "shuffle": False}
        self._follow(self.next_order.with_options(shuffle=False))
        self.seek(self.epoch, 0)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self.order.n

    @property
    def global_batch_size(self) -> int:
        """Rows of one batch of all ranks together."""
        return self._share.global_batch_size

    @property
    def node_share(self) -> float:
        """Share of the rows that this rank's node reads, in (0, 1]: below 1 only if streams are local."""
        return max(len(self._share.node_streams()) / self.order.num_streams, self._node_share)

    @property
    def padding(self) -> int:
        """Number of padding rows at the end of this rank's full epoch; they repeat rows to make the ranks equal."""
        return self.padding_from(0)

    def finished_at(self, cursor: int) -> bool:
        """Return whether no batch is left after `cursor` rows of an epoch."""
        return self._share.num_batches(self.num_rows - _checked(cursor, self.order)) == 0

    def padding_from(self, cursor: int) -> int:
        """Return the number of this rank's padding rows in the rest of an epoch from `cursor` on."""
        return self._share.padding(self.num_rows - _checked(cursor, self.order))

    def batches(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[Int64]:
        """Yield the rank's batches of row numbers without moving the sampler.

        Args:
            epoch: Number of the epoch; None: the current one.
            cursor: Rows of it to skip; None: the sampler's cursor, or 0 for another epoch.

        Yields:
            int64 [batch_size]; the last batch may be shorter.

        Raises:
            ConfigError: The cursor is not in [0, num_rows].
        """
        return (rows for run in self.runs(epoch, cursor) for rows in run)

    def runs(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[Int64]:
        """Yield the rank's batches in growing groups: int64 [batches, rows]. Arguments are those of `batches`."""
        epoch, cursor = self._position(epoch, cursor)
        order, runs = self.order, self._share.runs(cursor, self.num_rows)  # The order may change before the last run.
        return (order.rows(epoch, positions.ravel()).reshape(positions.shape) for positions in runs)

    def blocks_from(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[int]:
        """Yield each row group once, in the order in which this rank's node first needs it.

        Arguments are those of `batches`. If streams are local, the row groups that the partial last batch takes from
        other nodes' streams are left out.
        """
        return (block for _, block in self.needs_from(epoch, cursor))

    def needs_from(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) as `blocks_from` does, with the first position that needs the row group."""
        return self.order.needs_from(*self._position(epoch, cursor), streams=self._share.node_streams())

    def __iter__(self) -> Iterator[int]:
        """Yield the rank's rows from the cursor on, as Python ints. The cursor is read at the first `next`."""
        return RowIterator(lambda: (self.epoch, self.cursor), self._rows_from)

    def __len__(self) -> int:
        """Return the rows of each rank in a full epoch, padding included."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The cursor stays if the epoch is already the current one."""
        self._draining = None
        if epoch != self.epoch:
            self.seek(epoch, 0)

    def advance(self, batches: int = 1) -> None:
        """Mark the next `batches` global batches as consumed: of an epoch that is iterated, as long as it has any."""
        self._advances, draining = True, self._draining
        here = self if draining is None else draining
        here.seek(here.epoch, here.cursor + batches * here.global_batch_size)
        if draining is not None and draining.finished_at(draining.cursor):
            self._draining = None

    def seek(self, epoch: int, cursor: int) -> None:
        """Move to where `cursor` global rows of `epoch` are consumed, at most all of them."""
        number, position = whole_number("epoch", epoch), whole_number("cursor", cursor)
        if number != self.epoch:
            self._follow(self.next_order)
        self.epoch, self.cursor = number, _checked(min(position, self.num_rows), self.order)
        self._draining = None

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position and order as a small JSON-able dict, the same on every rank."""
        draining = self._draining if self._advances else None
        return self._state() if draining is None else draining.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. The world may differ.

        An epoch that has begun ends in the order of the state. If this sampler has another shuffle, seed or window, it
        uses them from the next epoch on, or at once if the epoch has not begun. Otherwise the order of the state stays;
        its streams may then not be local to the nodes of this world.

        Raises:
            ConfigError: The state is of another dataset or version, or incomplete.
        """
        if (version := state.get("version") if isinstance(state, Mapping) else None) != STATE_VERSION:
            raise ConfigError(
                f"the state has version {version!r}; this release reads {STATE_VERSION}: give a state_dict() of it"
            )
        if state.get("dataset") != self.order.digest:
            raise ConfigError(
                f"the state is of another dataset ({state.get('dataset')!r}, this is {self.order.digest!r}): "
                f"{self._differences}. Use those of the state, or begin an epoch with set_epoch instead of "
                "load_state_dict"
            )
        if missing := self.state_dict().keys() - state.keys():
            raise ConfigError(f"the state lacks {', '.join(sorted(missing))}: give all that state_dict() returned")
        epoch, cursor = (whole_number(name, state[name]) for name in ("epoch", "cursor"))
        order, later = self._orders_of(state)
        self._check_start(order, cursor)
        given, next_order = self._given, order
        changed = {name: given[name] for name in order.chosen if order.options[name] != given[name]}
        if changed:
            self._warn(changed, order, epoch + bool(cursor))
            next_order = order.with_options(**changed, num_streams=given["num_streams"])
        elif self.rank == 0 and self._shares(given["num_streams"]) and not self._shares(order.num_streams):
            log.warning(
                "the state has num_streams=%d, which stays, so each of the %d nodes reads the whole dataset: to change "
                "it, begin an epoch with set_epoch instead of load_state_dict",
                order.num_streams,
                self.num_nodes,
            )
        after = next_order.with_options(**later) if later else next_order  # raises before anything has changed
        self._follow(order if cursor else next_order)
        self.seek(epoch, cursor)
        self.next_order = after

    def _rows_from(self, epoch: int, cursor: int, skipped: int) -> Iterator[int]:
        """Yield the rank's rows from `cursor` on, except the first `skipped`. Move to the next epoch at the end."""
        self._draining = None
        batches, rows = divmod(skipped, self.batch_size)
        runs = self.runs(epoch, min(cursor + batches * self.global_batch_size, self.num_rows))
        yield from islice(chain.from_iterable(run.ravel().tolist() for run in runs), rows, None)
        if self.epoch == epoch:  # The caller may have set another epoch, or another iteration may have ended first.
            draining = copy(self)
            self.seek(epoch + 1, 0)
            self._draining = None if draining.finished_at(draining.cursor) else draining

    def _state(self) -> dict[str, Any]:
        place = {"epoch": self.epoch, "cursor": self.cursor}
        return {"version": STATE_VERSION, "dataset": self.order.digest, **place, **self.order.options}

    def _shares(self, num_streams: int) -> bool:
        """Return whether several nodes share the dataset with these streams."""
        return self.num_nodes > 1 and is_local(num_streams, self.num_nodes, self.num_replicas, self.batch_size)

    def _warn(self, changed: Mapping[str, Any], order: PositionOrder, epoch: int) -> None:
        """Log once for all ranks which arguments differ from a state, and from which epoch on they hold."""
        if self.rank == 0:
            saved, given = shown(changed, order.options), shown(changed, changed)
            log.warning("the state has %s: %s, as passed here, holds from epoch %d on", saved, given, epoch)

    def _orders_of(self, state: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the order of a complete state of this data, and options that later epochs have instead."""
        return self.order.with_options(**{name: state[name] for name in self.order.options}), {}

    def _check_start(self, order: Any, cursor: int) -> None:
        """Raise ConfigError unless this sampler can continue an epoch of `order` at `cursor`."""
        _checked(cursor, order)

    def _follow(self, order: PositionOrder) -> None:
        """Use this order from now on."""
        self.order = self.next_order = order
        world = self.num_replicas, self.rank, self.batch_size, self.drop_last
        self._share = Share(*world, order.num_streams, self.num_nodes, order.homogeneous, order.run_rows)
        self.seed, self.shuffle = order.seed, bool(order.shuffle)
        self.num_samples = self._share.num_samples(order.n)
        self.total_size = self.num_samples * self.num_replicas

    def _position(self, epoch: int | None, cursor: int | None) -> tuple[int, int]:
        epoch = self.epoch if epoch is None else epoch
        if cursor is None:
            cursor = self.cursor if epoch == self.epoch else 0
        return epoch, _checked(cursor, self.order)


def shown(names: Iterable[str], options: Mapping[str, Any]) -> str:
    """Return the options of these names as text for a message. Long values are cut."""
    return ", ".join(f"{name}={reprlib.repr(options[name])}" for name in names)


def _checked(cursor: int, order: PositionOrder) -> int:
    if not 0 <= cursor <= order.n:
        raise ConfigError(f"cursor {cursor} is not in an epoch of {order.n} rows")
    return cursor
