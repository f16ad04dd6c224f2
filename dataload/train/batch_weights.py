"""What a batch weighs in the gradient of an optimizer step: the number of what its loss averages over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from dataload.errors import ConfigError
from dataload.rows.collate import Flat

IGNORED = -100  # the label that losses of torch and transformers leave out
LossWeight = Literal["tokens"] | Callable[[Any], Any]


def check_loss_weight(loss_weight: Any) -> None:
    """Raise ConfigError unless `fit` can have this `loss_weight`."""
    if loss_weight is not None and loss_weight != "tokens" and not callable(loss_weight):
        raise ConfigError(
            f"loss_weight={loss_weight!r} must be 'tokens', a function of the batch, or None for the number of rows"
        )


def weight_of(loss_weight: LossWeight, batch: Any) -> float:
    """Return what a batch weighs.

    Raises:
        ConfigError: The batch has no labels to count, or the function returned no weight.
    """
    if loss_weight == "tokens":
        return float(_counted_labels(batch))
    value = loss_weight(batch)
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ConfigError(
            f"loss_weight returned {value!r}: return the number of what the loss averages over, at least 0"
        )
    return weight


def _counted_labels(batch: Any) -> int:
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise ConfigError(
            'loss_weight=\'tokens\' counts the batch\'s "labels" that are not -100, and this batch has no "labels": '
            "pass a function of the batch"
        )
    labels = batch["labels"]
    while isinstance(labels, Flat):
        labels = labels.values
    rows = labels if isinstance(labels, (list, tuple)) else [labels]
    try:
        return sum(int((torch.as_tensor(row) != IGNORED).sum()) for row in rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "loss_weight='tokens' counts the batch's \"labels\" that are not -100, and these are no numbers: "
            f"{error}: pass a function of the batch"
        ) from error
