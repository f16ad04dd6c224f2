"""A torch DistributedSampler over any order, whose position is a number of rows."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

from dataload.arguments import whole_number
from dataload.errors import ConfigError
from dataload.runtime.text import few
from dataload.samplers.budget_steps import BudgetSteps
from dataload.samplers.partition import check_locality, is_local
from dataload.samplers.position import EARLIER, Position
from dataload.samplers.row_iterator import RowIterator
from dataload.samplers.share import Share
from dataload.samplers.steps import EpochPlace, EvenSteps, PositionOrder, Steps
from dataload.samplers.token_batches import OPTIONS, TokenBudget, TokenOrder
from dataload.world import World

Int64 = npt.NDArray[np.int64]
Rest = Callable[["PositionOrder"], "PositionOrder"]

CUT_BY_TOKENS = (
    "other files or filters, row groups of other sizes, another length=, or batch_size in place of batch_tokens"
)
STATE = -1  # in place of the number of an epoch: those before the one of a state had the order of the state, if any

log = logging.getLogger(__name__)


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
        budget: What batches are cut by, instead of `batch_size`, which is then their expected size. None: nothing.

    Attributes:
        position: Where the next iteration begins.
        order: The order of its epoch.
        steps: The steps of its epoch.
        handed_out: The last position up to which rows were handed out since `position` was set, if that is another
            place: in an iteration that goes on, or at the end of the epoch before. None: there is none.
        entered: Whether an iteration of torch has taken rows of the epoch, which `position` does not count.
        restored: Whether the number of the epoch is from a state, and not from the caller.
        since: The first epoch of this data: those before had other rows.
    """

    position: Position
    order: PositionOrder
    steps: Steps
    handed_out: Position | None = None
    entered = False
    restored = False
    since = 0
    _continued: PositionOrder | None = None  # that of a state
    _past: Mapping[int, Position] = MappingProxyType({})  # where epochs began that are over, by their numbers
    _differences: str = (
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
        budget: TokenBudget | None = None,
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
        if budget is not None:
            order = cast("PositionOrder", TokenOrder(cast("Any", order), budget, num_replicas))
            self._differences = CUT_BY_TOKENS
        self.order, self._given = order, order.options
        self.position = Position(order.digest, 0, 0, self._given)
        self.num_replicas, self.rank, self.batch_size, self.drop_last = num_replicas, rank, batch_size, drop_last
        self.num_nodes = num_nodes
        self.steps = self._made(order)
        super().__init__(cast("Any", range(order.n)), num_replicas, rank, bool(order.shuffle), order.seed, drop_last)
        self._node_share = node_share or 0.0
        if num_nodes > 1 and order.num_streams > 1:
            check_locality(order.num_streams, num_nodes, num_replicas, batch_size)
        self._advances = False  # whether the consumer marks batches
        self._follow(self.steps)  # torch has its own numbers of rows

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
        return self._order_of(self.next_options)

    @property
    def next_options(self) -> Mapping[str, Any]:
        """The options of the order from the next epoch on."""
        return self._options_after(self.position.options)

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
        options = {**self.next_options, "shuffle": False}
        self._begin(self.epoch, 0, options, self._order_of(options))
        self.handed_out = None

    @property
    def here(self) -> EpochPlace:
        """The place of the next iteration."""
        return EpochPlace(self.steps, self.epoch, self.cursor)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self.order.n

    @property
    def global_batch_size(self) -> int:
        """Rows of one batch of all ranks together."""
        return self.steps.share.global_batch_size

    @property
    def node_share(self) -> float:
        """Share of the rows that this rank's node reads, in (0, 1]: below 1 only if streams are local."""
        return max(len(self.steps.share.node_streams()) / self.order.num_streams, self._node_share)

    @property
    def padding(self) -> int:
        """Number of padding rows at the end of this rank's full epoch; they repeat rows to make the ranks equal."""
        return self.padding_from(0)

    def finished_at(self, cursor: int) -> bool:
        """Return whether no batch is left after `cursor` rows of the epoch."""
        return self.steps.is_over(self.epoch, cursor)

    def padding_from(self, cursor: int) -> int:
        """Return the number of this rank's padding rows in the rest of the epoch from `cursor` on."""
        self.steps.check(self.epoch, cursor)
        return self.steps.padding(self.epoch, cursor)

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
        return (rows for run, _, _ in self.runs(epoch, cursor) for rows in run)

    def runs(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[tuple[Int64, int, int]]:
        """Yield the rank's batches in groups, and where they are, as `Steps.runs` does. Arguments are as in `batches`.

        The order may change before the last group.
        """
        steps, *place = self._place(epoch, cursor)
        return steps.runs(*place)

    def at(self, epoch: int, step: int) -> EpochPlace:
        """Return the place of a step, a batch of each rank, of an epoch.

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
        before, rest = found.steps.number_at(epoch, found.cursor)  # Those of a state may begin within a step.
        found._check_known(step, before if rest else 0)  # noqa: SLF001
        cursor = found.steps.after_units(epoch, 0, rest + step * found.steps.units)
        if found.steps.is_over(epoch, cursor):
            raise IndexError(f"epoch {epoch} has no step {step}: steps count from 0")
        if cursor < (taken := found.order.taken):
            former = found._earlier_at(cursor)  # noqa: SLF001
            raise ConfigError(
                f"step {step} of epoch {epoch} had rows of data that has changed since, {former}, and this loader "
                f"knows the epoch from row {taken} on: ask a loader of that data"
            )
        if found.restored:  # A state does not tell the size of the batches before it.
            found._check_known(step, before)  # noqa: SLF001
        return EpochPlace(found.steps, epoch, cursor)

    def _return_to(self, epoch: int) -> None:
        """Begin with an epoch before the current one, as it began then."""
        begun = self._past.get(epoch)
        options = self.position.options if begun is None else begun.options
        known = [self.next_options, *(each.options for each in self._past.values())]
        if epoch < self.since or (begun is None and any(each != options for each in known)):
            raise ConfigError(
                f"epoch {epoch} came before those that this loader has had, perhaps in another order, because the "
                "data, the weights or the arguments have changed since: ask a loader like the one that had it, or "
                "`dataload rows`, which reads the ledger of a run"
            )
        cursor = 0 if begun is None else begun.cursor
        self._begin(epoch, cursor, options, self._order_of(options))
        self.handed_out, self.restored = None, cursor > 0

    def blocks_from(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[int]:
        """Yield each row group once, in the order in which this rank's node first needs it.

        Arguments are those of `batches`. If streams are local, the row groups that the partial last batch takes from
        other nodes' streams are left out.
        """
        return (block for _, block in self.needs_from(epoch, cursor))

    def needs_from(self, epoch: int | None = None, cursor: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (position, row group) as `blocks_from` does, with the first position that needs the row group."""
        steps, *place = self._place(epoch, cursor)
        order: PositionOrder = steps.order
        return order.needs_from(place[0], place[1], self.steps.share.node_streams())

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
        options = self.next_options
        self._begin(self.epoch + 1, 0, options, self._order_of(options))

    def end_if_over(self) -> None:
        """Begin the next epoch if the last batch of this one is handed out: its loop took exactly len(loader)."""
        begun = self.handed_out_in_epoch
        if begun is not None and self.finished_at(begun.cursor):
            self.end_epoch()

    def begin_loop(self) -> None:
        """Begin a loop of batches that are handed out: a new epoch, or the rest of one."""
        self.end_if_over()
        if not self.cursor:
            self.handed_out, self.entered = None, False  # The epoch begins, perhaps for a second time.

    def hand_out(self, epoch: int, cursor: int) -> None:
        """Note that the rows up to a cursor are handed out, unless the sampler is in another epoch by now."""
        if self.epoch == epoch:
            self.handed_out = self.position.at(cursor)

    def advance(self, batches: int = 1) -> None:
        """Mark the next `batches` global batches as consumed: of an epoch that is iterated, as long as it has any."""
        self._advances = True
        late = self.handed_out
        here = self.position if late is None else late
        steps = self._steps_of(self._order_of(here.options))
        moved = here.at(steps.after(here.epoch, here.cursor, whole_number("batches", batches)))
        if late is None:
            self.position = moved
        else:
            self.handed_out = None if steps.is_over(moved.epoch, moved.cursor) else moved

    def seek(self, epoch: int, cursor: int) -> None:
        """Move to where `cursor` global rows of `epoch` are consumed, at most all of them."""
        number, rows = whole_number("epoch", epoch), whole_number("cursor", cursor)
        options = self.position.options if number == self.epoch else self.next_options
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
        self._check_start(order, position.epoch, cursor)
        if (later := self._options_after(options)) is not options:
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
        steps, rows = self.steps, skipped
        if steps.is_even:  # The first batches need not be computed.
            batches, rows = divmod(skipped, self.batch_size)
            cursor = steps.after(epoch, cursor, batches)
        runs = (run.ravel().tolist() for run, _, _ in self.runs(epoch, cursor))
        yield from islice(chain.from_iterable(runs), rows, None)
        if self.epoch == epoch:  # The caller may have set another epoch, or another iteration may have ended first.
            # torch takes the last rows of an epoch before the consumer has had all its batches.
            self.handed_out = None if self.finished_at(self.cursor) else self.position
            self.end_epoch()

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

    def _options_after(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of the epoch after one with these options."""
        if EARLIER in options:
            options = {name: value for name, value in options.items() if name != EARLIER}
        return self._with_given(options)

    def _with_given(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options with the arguments of this sampler, if any that it may choose differ."""
        given = self._given
        changed = {name: given[name] for name in self.order.chosen if options[name] != given[name]}
        if changed:
            changed["num_streams"] = given["num_streams"]
        changed |= {name: given[name] for name in OPTIONS if name in given and options[name] != given[name]}
        return {**options, **changed} if changed else options

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

    def _steps_of(self, order: PositionOrder) -> Steps:
        """Return the steps of an order."""
        if order is self.order:
            return self.steps
        return self._made(order)

    def _check_start(self, order: Any, epoch: int, cursor: int) -> None:
        """Raise ConfigError unless this sampler can continue an epoch of `order` at `cursor`."""
        self._steps_of(order).check(epoch, cursor)

    def _begin(self, epoch: int, cursor: int, options: Mapping[str, Any], order: PositionOrder) -> None:
        """Let the next iteration begin here, in the order with these options."""
        steps = self._steps_of(order)
        steps.check(epoch, cursor)
        if steps is not self.steps:
            options = {**options, **order.options}
            self._follow(steps)
        self.entered = False
        if epoch != self.epoch:
            begun = self.position.at(self.cursor if self.restored else 0)
            self._past = {**self._past, self.epoch: begun}
        self.position = Position(self.position.dataset, epoch, cursor, options)

    def _made(self, order: PositionOrder) -> Steps:
        world = self.num_replicas, self.rank, self.batch_size, self.drop_last
        share = Share(
            *world, order.num_streams, self.num_nodes, pads_with_tail=order.homogeneous, run_rows=order.run_rows
        )
        return BudgetSteps(order, share) if isinstance(order, TokenOrder) else EvenSteps(order, share)

    def _follow(self, steps: Steps) -> None:
        """Use these steps from now on."""
        self.order, self.steps = steps.order, steps
        self.seed, self.shuffle = self.order.seed, bool(self.order.shuffle)
        self.num_samples = steps.share.num_samples(self.order.n)
        self.total_size = self.num_samples * self.num_replicas

    def _place(self, epoch: int | None, cursor: int | None) -> tuple[Steps, int, int]:
        """Return the steps of an epoch, its number and a cursor in it: those of the next iteration, if None."""
        epoch = self.epoch if epoch is None else epoch
        if cursor is None:
            cursor = self.cursor if epoch == self.epoch else 0
        # A later epoch has no rest of others.
        is_here = epoch == self.epoch or EARLIER not in self.position.options
        steps = self.steps if is_here else self._steps_of(self.next_order)
        steps.check(epoch, cursor)
        return steps, epoch, cursor


def shown(names: Iterable[str], options: Mapping[str, Any]) -> str:
    """Return the options of these names as text for a message. Long values are cut."""
    return ", ".join(f"{name}={reprlib.repr(options[name])}" for name in names)
