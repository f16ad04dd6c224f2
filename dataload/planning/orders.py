"""The order of a loader that is only planned: of a dataset, a mixture, or one node's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError
from dataload.mapping.stage import order_key_of
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.order import Order
from dataload.samplers.partition import stream_owners
from dataload.samplers.window_size import default_window


def part_of(
    manifest: Manifest,
    node: int,
    num_nodes: int,
    num_streams: int | None = None,
    *,
    epoch: int = 0,
    seed: int = 0,
    window: int | None = None,
) -> list[int]:
    """Return the row groups that one node reads in every epoch, in the order in which one epoch needs them.

    Args:
        manifest: The dataset.
        node: Number of the node.
        num_nodes: Number of nodes.
        num_streams: As for the loader; None: one per node. It decides the row groups, whatever the seed.
        epoch: The epoch whose order is used.
        seed: As for the loader.
        window: As for the loader; None: its default.

    Raises:
        ConfigError: There is no such node, or num_streams is not a multiple of num_nodes.
    """
    streams = num_nodes if num_streams is None else num_streams
    if not 0 <= node < num_nodes:
        raise ConfigError(f"node {node} of {num_nodes}: nodes count from 0")
    if streams % num_nodes:
        raise ConfigError(f"num_streams={streams} is not a multiple of {num_nodes} nodes: use one, as the loader does")
    order = order_of(manifest, seed=seed, window=window, num_streams=streams)
    own = np.flatnonzero(stream_owners(streams, num_nodes) == node)
    return [group for _, group in order.needs_from(epoch, 0, own.tolist())]


def order_of(manifest: Manifest, *, window: int | None = None, **options: Any) -> Order:
    """Return the order in which a loader delivers a dataset.

    Args:
        manifest: The dataset.
        window: As for the loader; None: its default.
        options: `shuffle`, `seed` and `num_streams` of `Order`.
    """
    window = usual_window(manifest) if window is None else window
    key = order_key_of(manifest).encode()
    return Order(manifest.block_lengths, window=window, dataset_key=key, **options)


def order_of_mixture(
    manifests: Sequence[Manifest],
    weights: Sequence[Any] | None,
    *,
    window: int | None = None,
    **options: Any,
) -> MixtureOrder:
    """Return the order in which a loader delivers a mixture of a list of datasets. Otherwise like `order_of`."""
    sources = [
        MixtureSource(manifest.block_lengths, str(number), order_key_of(manifest).encode())
        for number, manifest in enumerate(manifests)
    ]
    windows = [usual_window(manifest) if window is None else window for manifest in manifests]
    return MixtureOrder(sources, weights, windows=windows, **options)


def usual_window(manifest: Manifest) -> int:
    """Return the default window of a dataset."""
    return default_window(manifest.block_lengths, [group.bytes for group in manifest.row_groups])
