"""A torch DistributedSampler over any order, whose position is a number of rows."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

from dataload.arguments import whole_number
from dataload.errors import ConfigError
from dataload.runtime.text import few
from dataload.samplers.order import Mask, Order
from dataload.samplers.partition import check_locality, is_local
from dataload.samplers.position import EARLIER, Position
from dataload.samplers.row_iterator import RowIterator
from dataload.samplers.share import Share
from dataload.world import World

Int64 = npt.NDArray[np.int64]
Rest = Callable[["PositionOrder"], "PositionOrder"]

STATE = -1  # in place of the number of an epoch: those before the one of a state had the order of the state, if any

log = logging.getLogger(__name__)


class PositionOrder(Protocol):
    """A mapping from the positions of an epoch to rows: an `Order` or a `MixtureOrder`.

    Attributes:
        n: Rows of an epoch.
        num_streams: Position p of an epoch belongs to stream p mod num_streams.
        seed: Seed of the shuffle.
        homogeneous: Whether a global batch must not have rows of other positions, such as the epoch's first ones.
        run_rows: Rows that a rank computes together.
        taken: First position that can be read: those before are of data that has changed since, see `Continued`.
        chosen: Names of the options that an epoch takes from the arguments of the sampler, not from a state.
    """

    chosen: ClassVar[tuple[str, ...]]
    n: int
    num_streams: int
    seed: int
    homogeneous: bool
    run_rows: int
    taken: int

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

    def positions_of(self, epoch: int, row: int) -> Int64:
        """Return where a row comes in an epoch, ascending: int64 [k]."""

    def had(self, epoch: int, position: int) -> Iterator[tuple[int, Iterator[Mask], bool]]:
        """Yield (dataset, which rows of each of its row groups, whether a later pass has them) before a position."""

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
        position: Where the next iteration begins.
        order: The order of its epoch.
        handed_out: The last position up to which rows were handed out since `position` was set, if that is another
            place: in an iteration that goes on, or at the end of the epoch before. None: there is none.
        entered: Whether an iteration of torch has taken rows of the epoch, which `position` does not count.
        restored: Whether the number of the epoch is from a state, and not from the caller.
        since: The first epoch of this data: those before had other rows.
    """

    position: Position
    order: PositionOrder
    handed_out: Position | None = None
    entered = False
    restored = False
    since = 0
    _continued: PositionOrder | None = None  # that of a state
    _past: Mapping[int, Position] = MappingProxyType({})  # where epochs began that are over, by their numbers
    is_even: ClassVar[bool] = True  # whether all batches but the last have `batch_size` rows
    _differences: ClassVar[str] = (
        "other files or filters, row groups of other sizes, or batches that are cut otherwise"  # between two datasets
    )

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
        order = self._cut(order, num_replicas)
        self.order, self._given = order, order.options
        self.position = Position(order.digest, 0, 0, self._given)
        super().__init__(cast("Any", range(order.n)), num_replicas, rank, bool(order.shuffle), order.seed, drop_last)
        self.batch_size = batch_size
        self.num_nodes = num_nodes
        self._node_share = node_share or 0.0
        if num_nodes > 1 and order.num_streams > 1:
            check_locality(order.num_streams, num_nodes, num_replicas, batch_size)
        self._advances = False  # whether the consumer marks batches
        self._follow(order)

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next iteration."""
        return self.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def cursor(self) -> int:
        """Rows of the epoch, of all ranks, before the next iteration."""
        return self.position.cursor

    @property
    def next_order(self) -> PositionOrder:
        """The order from the next epoch on."""
        return self._order_of(self._next_options())

    @property
    def next_options(self) -> Mapping[str, Any]:
        """The options of the order from the next epoch on."""
        return self._next_options()

    @property
    def handed_out_in_epoch(self) -> Position | None:
        """Up to where rows of the current epoch were handed out; None: no iteration has begun."""
        return None if self.handed_out is None or self.handed_out.epoch != self.epoch else self.handed_out

    @property
    def saved_position(self) -> Position:
        """The position that a state has: up to where rows were handed out, or where the next iteration begins."""
        # With `advance`, torch takes rows beyond the end of an epoch whose last batches are not consumed yet: what was
        # handed out may be of the epoch before.
        return (self.handed_out if self._advances else self.handed_out_in_epoch) or self.position

    def use_file_order(self) -> None:
        """Begin the epoch in file order, without a shuffle."""
        self._given = {**self._given, "shuffle": False}
        options = {**self._next_options(), "shuffle": False}
        self._begin(self.epoch, 0, options, self._order_of(options))
        self.handed_out = None

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
        return self._is_over(self.order, self.position.at(_checked(cursor, self.order)))

    def padding_from(self, cursor: int, epoch: int | None = None) -> int:  # noqa: ARG002
        """Return the number of this rank's padding rows in the rest of an epoch from `cursor` on.

        Args:
            cursor: Rows of the epoch.
            epoch: Number of the epoch; None: the current one.
        """
        return self._share.padding(self.num_rows - _checked(cursor, self.order))

    def padding_of_loop(self, cursor: int) -> int | Callable[[], int]:
        """Return the padding of an iteration from `cursor` on, or a function that finds it."""
        return self.padding_from(cursor)

    def remainder_from(self, cursor: int) -> int:
        """Return the rows of the last global batch of an epoch from `cursor` on if it may have padding, else 0."""
        return 0 if self.drop_last else (self.num_rows - cursor) % self.global_batch_size

    @property
    def batch_text(self) -> str:
        """The size of a batch in words."""
        return f"{self.batch_size:,} rows a batch"

    def filled(self, rows: Int64) -> tuple[int, int] | None:  # noqa: ARG002
        """Return the tokens, and the places of padding beside them, of a batch of these rows; None: unknown."""
        return None

    def num_batches(self, by_rows: Callable[[], int]) -> int:
        """Return the batches of a full epoch of this rank. by_rows: returns them for batches of `batch_size` rows."""
        return by_rows()

    def in_batches(self, by_rows: Callable[[], Iterator[list[int]]]) -> Iterator[tuple[list[int], int]]:
        """Yield the rows of `iter(self)`, which begins with the epoch, in batches, each with its cursor.

        Args:
            by_rows: Returns batches of `batch_size` rows of it.
        """
        return ((rows, number * self.global_batch_size) for number, rows in enumerate(by_rows()))

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
        order = self._order_in(epoch)
        runs = self._share.runs(cursor, order.n)  # The order may change before the last run.
        return (order.rows(epoch, positions.ravel()).reshape(positions.shape) for positions in runs)

    def steps(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[tuple[Int64, int, int]]:
        """Yield the rank's batches in growing groups, as `runs` does, and where they are. Arguments are the same.

        Yields:
            (rows, rows of the epoch before the first batch, rows of each global batch)
        """
        epoch, cursor = self._position(epoch, cursor)
        step = self.global_batch_size
        for run in self.runs(epoch, cursor):
            yield run, cursor, step
            cursor += step * len(run)

    def at(self, epoch: int, step: int) -> Self:
        """Return a sampler that begins with a step, a batch of each rank, of an epoch. This one stays where it is.

        Args:
            epoch: Number of the epoch.
            step: Number of the step in the epoch, from 0. An epoch that a state has restored goes on at the number that
                its rows have on these ranks.

        Raises:
            IndexError: The epoch has no such step.
            ConfigError: It came before the state was saved, on ranks that this sampler doesn't know, or in an epoch of
                which it doesn't know the order, or it had rows of data that has changed since.
        """
        found, step, epoch = copy(self), whole_number("step", step), whole_number("epoch", epoch)
        if epoch < self.epoch:
            found._return_to(epoch)  # noqa: SLF001 (of the same class)
        else:
            if epoch != self.epoch:
                found.seek(epoch, 0)
            found.renew()
        cursor = found._cursor_of(step)  # noqa: SLF001 (of the same class)
        if cursor is None or found.finished_at(cursor):
            raise IndexError(f"epoch {epoch} has no step {step}: steps count from 0")
        if cursor < (taken := found.order.taken):
            former = found._earlier_at(cursor)  # noqa: SLF001
            raise ConfigError(
                f"step {step} of epoch {epoch} had rows of data that has changed since, {former}, and this loader "
                f"knows the epoch from row {taken} on: ask a loader of that data"
            )
        if found.restored:  # A state does not tell the size of the batches before it.
            found._check_known(step, found.step_of(found.cursor)[0])  # noqa: SLF001
        found.seek(epoch, cursor)
        return found

    def _return_to(self, epoch: int) -> None:
        """Begin with an epoch before the current one, as it began then."""
        begun = self._past.get(epoch)
        options = self.position.options if begun is None else begun.options
        known = [self._next_options(), *(each.options for each in self._past.values())]
        if epoch < self.since or (begun is None and any(each != options for each in known)):
            raise ConfigError(
                f"epoch {epoch} came before those that this loader has had, perhaps in another order, because the "
                "data, the weights or the arguments have changed since: ask a loader like the one that had it, or "
                "`dataload rows`, which reads the ledger of a run"
            )
        cursor = 0 if begun is None else begun.cursor
        self._begin(epoch, cursor, options, self._order_of(options))
        self.handed_out, self.restored = None, cursor > 0

    def at_row(self, cursor: int) -> Self:
        """Return a sampler that begins after `cursor` rows of the epoch. This one stays where it is."""
        found = copy(self)
        found.seek(self.epoch, cursor)
        return found

    def later(self, batches: int) -> Self:
        """Return a sampler that begins so many global batches later in the epoch. This one stays where it is."""
        return self.at_row(self._advanced(self.order, self.position, batches)) if batches else self

    def batches_left(self) -> int:
        """Return the batches of each rank in the rest of the epoch."""
        return self._share.num_batches(self.num_rows - self.cursor)

    def batch_with(self, position: int) -> int:
        """Return the number, counted from here, of the global batch that has a position of the epoch."""
        return (position - self.cursor) // self.global_batch_size

    def step_of(self, cursor: int) -> tuple[int, int]:
        """Return the number of whole steps in `cursor` rows of an epoch, and what is left over."""
        return divmod(cursor, self.global_batch_size)

    def of_rank(self, rank: int) -> Self:
        """Return the sampler of another rank at the same place."""
        found = copy(self)
        found.rank = whole_number("rank", rank)
        if found.rank >= self.num_replicas:
            raise ConfigError(f"rank={rank} is not among the {self.num_replicas} ranks: they count from 0")
        found._follow(self.order)  # noqa: SLF001 (of the same class)
        return found

    def last_cursor(self, epoch: int) -> Callable[[int], bool]:
        """Return a function that tells of a number of rows of this epoch whether no batch is left after them."""
        order, here = self.order, self.position._replace(epoch=epoch)  # The order may change before the last batch.
        return lambda cursor: self._is_over(order, here.at(min(cursor, order.n)))

    def seeds(self, epoch: int) -> tuple[tuple[int, int, int], tuple[int, int] | None]:
        """Return what draws the random numbers of transforms in an epoch, and the documents of packed sequences."""
        return (self.seed, epoch, self.rank), (self.seed, epoch) if self.shuffle else None

    def blocks_from(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[int]:
        """Yield each row group once, in the order in which this rank's node first needs it.

        Arguments are those of `batches`. If streams are local, the row groups that the partial last batch takes from
        other nodes' streams are left out.
        """
        return (block for _, block in self.needs_from(epoch, cursor))

    def needs_from(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) as `blocks_from` does, with the first position that needs the row group."""
        epoch, cursor = self._position(epoch, cursor)
        return self._order_in(epoch).needs_from(epoch, cursor, streams=self._share.node_streams())

    def __iter__(self) -> Iterator[int]:
        """Yield the rank's rows from the cursor on, as Python ints. The cursor is read at the first `next`."""
        return self._iterator(lambda: (self.epoch, self.cursor))

    def __len__(self) -> int:
        """Return the rows of each rank in a full epoch, padding included."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The cursor stays if the epoch is already the current one."""
        self.seek(epoch, self.cursor if epoch == self.epoch else 0)

    def end_epoch(self) -> None:
        """Begin the next epoch, because an iteration has ended."""
        options = self._next_options()
        self._begin(self.epoch + 1, 0, options, self._order_of(options))

    def advance(self, batches: int = 1) -> None:
        """Mark the next `batches` global batches as consumed: of an epoch that is iterated, as long as it has any."""
        self._advances = True
        late = self.handed_out
        here = self.position if late is None else late
        order = self._order_of(here.options)
        moved = here.at(self._advanced(order, here, whole_number("batches", batches)))
        if late is None:
            self.position = moved
        else:
            self.handed_out = None if self._is_over(order, moved) else moved

    def seek(self, epoch: int, cursor: int) -> None:
        """Move to where `cursor` global rows of `epoch` are consumed, at most all of them."""
        number, rows = whole_number("epoch", epoch), whole_number("cursor", cursor)
        options = self.position.options if number == self.epoch else self._next_options()
        order = self._order_of(options)
        restored = self.restored and number == self.epoch
        self._begin(number, min(max(rows, order.taken), order.n), options, order)
        self.handed_out, self.restored = None, restored

    def replace_data(self, other: Self) -> None:
        """Read what another sampler reads, which is new, from the beginning of the epoch on."""
        epoch, advances = self.epoch, self._advances
        vars(self).update(vars(other), handed_out=None, restored=False, _advances=advances, _continued=None)
        self.seek(epoch, 0)
        self._past, self.since = {}, epoch

    def renew(self) -> None:
        """Follow changes of the data, such as new weights of a mixture, unless an epoch goes on."""

    def padding_ahead(self) -> int:
        """Return the number of this rank's padding rows in the iteration that goes on or comes next."""
        self.renew()
        return self.padding_from(self.cursor)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position and order as a small JSON-able dict, the same on every rank."""
        return self.saved_position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], rest: Rest | None = None) -> None:
        """Continue where `state` was taken. The world may differ.

        An epoch that has begun ends in the order of the state. If this sampler has another shuffle, seed or window, it
        uses them from the next epoch on, or at once if the epoch has not begun. Otherwise the order of the state stays;
        its streams may then not be local to the nodes of this world.

        Args:
            state: What `state_dict` returned.
            rest: Returns the order of the rest of an epoch whose data has changed, given that of a whole epoch.

        Raises:
            ConfigError: The state is of another dataset or version, or incomplete, or `rest` is missing.
        """
        position = Position.from_state(state).restored(self.position, self.known_lists(), self._differences)
        if (rest is None) != (EARLIER not in position.options):
            raise ConfigError("the data has changed within the epoch of the state: load it by loader.load_state_dict")
        cursor, saved = position.cursor, position.options
        renewed = self._with_given(saved)
        options = saved if cursor else renewed
        whole = {name: value for name, value in options.items() if name != EARLIER} if rest else options
        try:
            order = self._order_of(whole)
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"the state makes no order ({error}): give all that state_dict() returned") from error
        order = order if rest is None else rest(order)
        self._check_start(order, cursor)
        if (later := self._next_options(options)) is not options:
            self._order_of(later)  # raises before anything has changed
        streams = self._given["num_streams"]
        by_size = ("window", "windows") if rest is not None else ()  # Other data has another default.
        if changed := [name for name in order.chosen if renewed[name] != saved[name] and name not in by_size]:
            self._warn(changed, saved, position.epoch + bool(cursor))
        elif self.rank == 0 and self._shares(streams) and not self._shares(order.num_streams):
            log.warning(
                "the state has num_streams=%d, which stays, so each of the %d nodes reads the whole dataset: to change "
                "it, begin an epoch with set_epoch instead of load_state_dict",
                order.num_streams,
                self.num_nodes,
            )
        self._continued = None if rest is None else order
        self._begin(position.epoch, cursor, options, order)
        self.handed_out, self.restored = None, True
        self._past, self.since = {STATE: position}, position.epoch if EARLIER in options else 0

    def known_lists(self) -> dict[str, list[Sequence[Any]]]:
        """Return the lists that a digest in a state may stand for, by the name of the option."""
        return {}

    def _iterator(self, begin: Callable[[], tuple[int, int]]) -> Iterator[int]:
        """Return an iterator of the rank's rows from an epoch and a cursor on, which `begin` returns."""
        return RowIterator(begin, self._rows_from, [self.num_replicas, self.batch_size])

    def _rows_from(self, epoch: int, cursor: int, skipped: int) -> Iterator[int]:
        """Yield the rank's rows from `cursor` on, except the first `skipped`. Move to the next epoch at the end."""
        if self.handed_out is not None and self.handed_out.epoch != epoch:
            self.handed_out = None
        self.entered = self.entered or epoch == self.epoch
        runs, rows = self._runs_after(epoch, cursor, skipped)
        yield from islice(chain.from_iterable(run.ravel().tolist() for run in runs), rows, None)
        if self.epoch == epoch:  # The caller may have set another epoch, or another iteration may have ended first.
            # torch takes the last rows of an epoch before the consumer has had all its batches.
            self.handed_out = None if self.finished_at(self.cursor) else self.position
            self.end_epoch()

    def _runs_after(self, epoch: int, cursor: int, skipped: int) -> tuple[Iterator[Int64], int]:
        """Return runs from `cursor` on without some of the first batches, and how many of their rows to skip."""
        batches, rows = divmod(skipped, self.batch_size)
        return self.runs(epoch, min(cursor + batches * self.global_batch_size, self.num_rows)), rows

    def _cut(self, order: PositionOrder, num_replicas: int) -> PositionOrder:  # noqa: ARG002
        """Return the order of the rows, batch by batch."""
        return order

    def _cursor_of(self, step: int) -> int | None:
        """Return the rows of the epoch before a step. None: it has fewer."""
        before, rest = self.step_of(self.cursor)
        self._check_known(step, before if rest else 0)
        return min(rest + step * self.global_batch_size, self.num_rows)

    def _check_known(self, step: int, first: int) -> None:
        if step < first:
            raise ConfigError(
                f"step {step} of epoch {self.epoch} came before the state was saved, on other ranks or with batches of "
                f"another size, and this loader knows those from {first} on: ask a loader like the one that saved it"
            )

    def _earlier_at(self, cursor: int) -> str:
        """Return of which earlier data a row of the epoch was, as text."""
        end = 0
        for each in self.position.options[EARLIER]:
            end += each["rows"]
            if cursor < end:
                break
        versions = f" at version {few(each['tables'])}" if each.get("tables") else ""
        return f"dataset={each['dataset']!r}{versions}"

    def _is_over(self, order: PositionOrder, position: Position) -> bool:
        """Return whether no batch is left after a position of an order."""
        return self._share.num_batches(order.n - position.cursor) == 0

    def _advanced(self, order: PositionOrder, position: Position, batches: int) -> int:
        """Return the rows of the epoch up to the end of so many more global batches."""
        return min(position.cursor + batches * self.global_batch_size, order.n)

    def _next_options(self, options: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Return the options of the epoch after one with these options; None: after the current one."""
        options = self.position.options if options is None else options
        if EARLIER in options:
            options = {name: value for name, value in options.items() if name != EARLIER}
        return self._with_given(options)

    def _with_given(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options with the arguments of this sampler, if any that it may choose differ."""
        given = self._given
        changed = {name: given[name] for name in self.order.chosen if options[name] != given[name]}
        return {**options, **changed, "num_streams": given["num_streams"]} if changed else options

    def _shares(self, num_streams: int) -> bool:
        """Return whether several nodes share the dataset with these streams."""
        return self.num_nodes > 1 and is_local(num_streams, self.num_nodes, self.num_replicas, self.batch_size)

    def _warn(self, changed: Iterable[str], options: Mapping[str, Any], epoch: int) -> None:
        """Log once for all ranks which arguments differ from a state, and from which epoch on they hold."""
        if self.rank == 0:
            saved, given = shown(changed, options), shown(changed, self._given)
            log.warning("the state has %s: %s, as passed here, holds from epoch %d on", saved, given, epoch)

    def _order_of(self, options: Mapping[str, Any]) -> PositionOrder:
        """Return the order of this data with these options."""
        if options is self.position.options:
            return self.order
        if EARLIER in options and self._continued is not None:
            return self._continued
        return self.order.with_options(**{name: options[name] for name in self.order.options})

    def _order_in(self, epoch: int) -> PositionOrder:
        """Return the order of an epoch: the current one, or a later one, which has no rest of others."""
        return self.order if epoch == self.epoch or EARLIER not in self.position.options else self.next_order

    def _check_start(self, order: Any, cursor: int) -> None:
        """Raise ConfigError unless this sampler can continue an epoch of `order` at `cursor`."""
        _checked(cursor, order)

    def _begin(self, epoch: int, cursor: int, options: Mapping[str, Any], order: PositionOrder) -> None:
        """Let the next iteration begin here, in the order with these options."""
        _checked(cursor, order)
        if order is not self.order:
            options = {**options, **order.options}
            self._follow(order)
        self.entered = False
        if epoch != self.epoch:
            begun = self.position.at(self.cursor if self.restored else 0)
            self._past = {**self._past, self.epoch: begun}
        self.position = Position(self.position.dataset, epoch, cursor, options)

    def _follow(self, order: PositionOrder) -> None:
        """Use this order from now on."""
        self.order = order
        world = self.num_replicas, self.rank, self.batch_size, self.drop_last
        self._share = Share(
            *world, order.num_streams, self.num_nodes, pads_with_tail=order.homogeneous, run_rows=order.run_rows
        )
        self.seed, self.shuffle = order.seed, bool(order.shuffle)
        self.num_samples = self._share.num_samples(order.n)
        self.total_size = self.num_samples * self.num_replicas

    def _position(self, epoch: int | None, cursor: int | None) -> tuple[int, int]:
        epoch = self.epoch if epoch is None else epoch
        if cursor is None:
            cursor = self.cursor if epoch == self.epoch else 0
        return epoch, _checked(cursor, self._order_in(epoch))


def shown(names: Iterable[str], options: Mapping[str, Any]) -> str:
    """Return the options of these names as text for a message. Long values are cut."""
    return ", ".join(f"{name}={reprlib.repr(options[name])}" for name in names)


def _checked(cursor: int, order: PositionOrder) -> int:
    if not 0 <= cursor <= order.n:
        raise ConfigError(f"cursor {cursor} is not in an epoch of {order.n} rows")
    return cursor
