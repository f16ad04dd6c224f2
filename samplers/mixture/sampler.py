"""A torch DistributedSampler over the rows of a mixture."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataload.errors import ConfigError
from dataload.samplers.mixture.order import Batching, MixtureOrder, Stop
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.mixture.weights import Weights, given_as, plain, weights_of
from dataload.samplers.order import Shuffle
from dataload.samplers.position import Position
from dataload.samplers.rank_sampler import RankSampler, Rest, shown
from dataload.samplers.token_batches import TokenBudget

TOLERANCE = 0.1  # part of the rows by which streams and whole batches may change the length of an epoch without a word

# The arguments of a mixture that a state brings with it for all later epochs, each with a way to change it.
FIXES = {
    "weights": "the weights of the next epochs, call set_weights after load_state_dict (with fit: in its evaluate=)",
    **dict.fromkeys(("stop", "num_rows", "batching"), "the others, call set_epoch instead of load_state_dict"),
}

log = logging.getLogger(__name__)


class MixtureSampler(RankSampler):
    """A sampler that shards the epochs of a mixture over the ranks, as `ShardedSampler` does for one dataset.

    Args:
        sources: The datasets.
        num_replicas: Number of ranks; None: `World.detect()`.
        rank: Number of this rank; None: `World.detect()`.
        weights: One positive number for each source, or a `Schedule`; None: by rows.
        stop: "first_exhausted" or "all_exhausted"; see `MixtureOrder`.
        num_rows: Rows of an epoch, instead of `stop`.
        batching: "mixed", or "homogeneous": each global batch is of one source.
        shuffle: As for `Order`, in each source.
        seed: Seed of the mixture.
        windows: Window of each source; None: the defaults.
        drop_last: Drop the last, partial global batch instead of padding it.
        batch_size: Rows of one batch of one rank.
        num_streams: Number of streams of each source.
        num_nodes: As for `ShardedSampler`.
        node_share: As for `ShardedSampler`.
        budget: As for `ShardedSampler`.

    Attributes:
        order: The `MixtureOrder`. Rows and row groups are numbered through all sources.

    Raises:
        ConfigError: An argument cannot work.

    Example:
        >>> from dataload.samplers.mixture.source import MixtureSource
        >>> from dataload.samplers.mixture.sampler import MixtureSampler
        >>> sources = [MixtureSource([4, 4], "books"), MixtureSource([3], "code")]
        >>> sampler = MixtureSampler(sources, 1, 0, weights=[3, 1], num_rows=8, batch_size=4, shuffle=False)
        >>> [sorted(batch.tolist()) for batch in sampler.batches()]  # code has rows 8 to 10
        [[0, 1, 2, 8], [3, 4, 5, 9]]
    """

    order: MixtureOrder
    _differences = (
        "sources of other names, in another number or in another order, or with other files or filters, or row groups "
        "of other sizes"
    )

    def __init__(
        self,
        sources: Sequence[MixtureSource],
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        weights: Sequence[Any] | Weights | None = None,
        stop: Stop = "first_exhausted",
        num_rows: int | None = None,
        batching: Batching = "mixed",
        shuffle: Shuffle | bool = "block",
        seed: int = 0,
        windows: Sequence[int | None] | None = None,
        drop_last: bool = False,
        batch_size: int = 1,
        num_streams: int = 1,
        num_nodes: int | None = None,
        node_share: float | None = None,
        budget: TokenBudget | None = None,
    ) -> None:
        order = MixtureOrder(
            sources,
            weights,
            stop=stop,
            num_rows=num_rows,
            shuffle=shuffle,
            seed=seed,
            windows=windows,
            num_streams=num_streams,
        )
        super().__init__(
            order,
            num_replicas,
            rank,
            drop_last=drop_last,
            batch_size=batch_size,
            num_nodes=num_nodes,
            node_share=node_share,
            budget=budget,
        )
        options, order = {**self.position.options, "next_weights": None}, self.order
        if batching != "mixed":  # The size of a global batch is known now.
            order = order.with_options(batching=batching, batch_rows=self.global_batch_size)
        self._begin(0, 0, options, order)
        if self.rank == 0:
            _warn_of_length(self.order)

    @property
    def next_weights(self) -> list[Any] | None:
        """The weights from the next epoch on, as a plain list, if they are others."""
        weights: list[Any] | None = self.position.options["next_weights"]
        return weights

    def set_weights(self, weights: Sequence[Any] | Weights) -> None:
        """Use other weights from the next epoch on, or from this one if it has not begun. All ranks must do the same.

        Raises:
            ConfigError: A weight cannot work.
        """
        order = self.order.with_options(weights=weights)
        if self.handed_out is not None:
            self.handed_out = with_next_weights(self.handed_out, order.weights)
        if not (self.cursor or self.entered) and self.next_options is self.position.options:
            self._begin(self.epoch, 0, self.position.options, order)
            return
        self.position = with_next_weights(self.position, order.weights)
        if self.finished_at(self.cursor):
            self.end_epoch()

    def load_state_dict(self, state: Mapping[str, Any], rest: Rest | None = None) -> None:
        """Continue where `state` was taken, in its order and with its weights. The world may differ.

        Raises:
            ConfigError: The state is of another mixture or version, or incomplete; or it has digests of other weights
                or windows; or its batches are of one source each, and those from its position on would not be in this
                world.
        """
        given = self._own_options(self.next_weights or plain(self.order.weights))
        super().load_state_dict(state, rest)
        if self.rank == 0:
            _warn_of_kept(self._own_options(self.next_options["weights"]), given)

    def known_lists(self) -> dict[str, list[Sequence[Any]]]:
        """Return the lists that a digest in a state may stand for, as in `RankSampler`."""
        known = [plain(weights) for weights in self._known_weights()]
        return {"weights": known, "next_weights": known, "windows": [self._given["windows"]]}

    def _own_options(self, weights: list[Any]) -> dict[str, Any]:
        """Return the arguments that a state brings with it for all later epochs, with the weights of those."""
        return {**{name: getattr(self.order, name) for name in FIXES}, "weights": weights}

    def _with_given(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        options = super()._with_given(options)
        if options["batching"] == "mixed" or options["batch_rows"] == self.global_batch_size:
            return options
        return {**options, "batch_rows": self.global_batch_size}  # No batch of the epoch has been taken.

    def _options_after(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        options = super()._options_after(options)
        weights = options["next_weights"]
        return options if weights is None else {**options, "weights": weights, "next_weights": None}

    def _known_weights(self) -> list[Weights]:
        """Return the weights that a digest in a state may mean."""
        return [self.order.weights, *([] if self.next_weights is None else [weights_of(self.next_weights)])]

    def _check_start(self, order: MixtureOrder, epoch: int, cursor: int) -> None:
        super()._check_start(order, epoch, cursor)
        if order.batching != "homogeneous" or cursor >= order.n:
            return
        if order.unit % self.global_batch_size:
            raise ConfigError(
                f'the state has batching="homogeneous" with global batches of {order.unit} rows, which '
                f"{self.global_batch_size} rows do not divide: choose batch_size such that all ranks together have "
                f"{order.unit}, or a divisor of it"
            )
        done = cursor % order.unit
        if done % self.global_batch_size and cursor - done + order.unit < order.n:
            raise ConfigError(
                f"the state is {done} rows into a batch of {order.unit} rows of one source, which "
                f"{self.global_batch_size} rows do not divide: choose batch_size such that all ranks together have "
                f"{math.gcd(done, order.unit)} rows, or a divisor of it"
            )


def with_next_weights(position: Position, weights: Weights) -> Position:
    """Return the position with these weights from its next epoch on."""
    later = plain(weights)
    return position.with_options(next_weights=None if later == position.options["weights"] else later)


def _warn_of_kept(kept: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Log the arguments of a state that differ from those of this process and replace them."""
    if changed := [name for name in kept if kept[name] != given[name]]:
        saved, passed = ", ".join(_given_as(changed, kept)), ", ".join(_given_as(changed, given))
        fixes = "; ".join(dict.fromkeys(f"to change {FIXES[name]}" for name in changed))
        log.warning("the state has %s, which the loader keeps instead of %s, as passed here: %s", saved, passed, fixes)


def _given_as(names: Sequence[str], options: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments of a mixture as `mix` takes them."""
    for name in names:
        yield given_as(weights_of(options[name])) if name == "weights" else shown([name], options)


def _warn_of_length(order: MixtureOrder) -> None:
    """Log a source that is so small that it decides where the epoch ends, because it comes in whole units."""
    (rows, source), (expected, _) = order.length(order.unit), order.length(1)
    if source is not None and abs(rows - expected) > TOLERANCE * expected:
        unit = "a global batch" if order.homogeneous else "one of each of the num_streams"
        log.warning(
            "an epoch of the mixture has %d rows, not about %d: source %r has %d rows and comes %d rows at a time "
            "(%s); num_rows=%d in mix gives an epoch of that length, in which this source may repeat or lack some rows",
            rows,
            expected,
            order.sources[source].name,
            order.orders[source].n,
            order.unit,
            unit,
            expected,
        )
