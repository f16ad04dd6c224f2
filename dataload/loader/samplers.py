"""The samplers of loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataload.loader.integrations import TrainerEpochs
from dataload.mixture import Mixture
from dataload.samplers.mixture.sampler import MixtureSampler, with_next_weights
from dataload.samplers.mixture.weights import Weights, plain, weights_of
from dataload.samplers.position import Position
from dataload.samplers.rank_sampler import Rest
from dataload.samplers.sharded import ShardedSampler


class DatasetSampler(TrainerEpochs, ShardedSampler):
    """The sampler of a loader over a dataset."""


class MixedSampler(TrainerEpochs, MixtureSampler):
    """The sampler of a loader over a mixture, which follows the weights of the mixture.

    Args:
        mixture: The mixture.
        num_replicas: Number of ranks.
        rank: Number of this rank.
        **order: Other arguments of `MixtureSampler`.
    """

    def __init__(self, mixture: Mixture, num_replicas: int, rank: int, **order: Any) -> None:
        self._mixture = mixture
        super().__init__(mixture.sources, num_replicas, rank, **mixture.order, **order)

    @property
    def next_weights(self) -> list[Any] | None:
        """The weights of the mixture, which the next epoch will have, if they are others."""
        return None if self._mixture.weights == self.order.weights else plain(self._mixture.weights)

    @property
    def saved_position(self) -> Position:
        """The position that a state has, as in `RankSampler`, with the weights of the mixture as the next ones."""
        return with_next_weights(super().saved_position, self._mixture.weights)

    def renew(self) -> None:
        """Use the current weights of the mixture, as in `RankSampler`."""
        options = self.position.options
        if plain(self._mixture.weights) == (options["next_weights"] or options["weights"]):
            return
        self.end_if_over()
        if self.handed_out_in_epoch is None and not self.cursor:
            self.set_weights(self._mixture.weights)

    def load_state_dict(self, state: Mapping[str, Any], rest: Rest | None = None) -> None:
        """Restore a position and the weights. The mixture then has them, too, or those of the next epoch."""
        super().load_state_dict(state, rest)
        self._mixture.weights = weights_of(self.next_options["weights"])

    def _known_weights(self) -> list[Weights]:
        return [*super()._known_weights(), *self._mixture.earlier_weights]
