"""The order of a loader that is only planned: of a dataset, a mixture, or one node's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.catalog.list_values import values_of
from dataload.catalog.manifest import Manifest
from dataload.errors import ConfigError
from dataload.mapping.stage import order_key_of
from dataload.rows.packing import Packing
from dataload.rows.row_group_cache import RowGroupCache
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.order import Order
from dataload.samplers.partition import stream_owners
from dataload.samplers.token_batches import TokenOrder
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


def order_of(manifest: Manifest, *, window: int | None = None, packed: Packed | None = None, **options: Any) -> Order:
    """Return the order in which a loader delivers a dataset.

    Args:
        manifest: The dataset.
        window: As for the loader; None: its default.
        packed: How its documents are packed; None: they are not.
        options: `shuffle`, `seed` and `num_streams` of `Order`.
    """
    key, lengths = order_key_of(manifest), manifest.block_lengths
    if packed is not None:
        key, lengths = packed.packing.digest("order", key), packed.sequences
    width = usual_window(manifest, lengths) if window is None else window
    return Order(lengths, window=width, dataset_key=key.encode(), **options)


@dataclass(frozen=True)
class Packed:
    """What the footers tell of packed documents.

    Args:
        packing: How they are packed.
        values: Values of the documents of each row group, int64 [row groups]; nulls and empty ones may count as one.
    """

    packing: Packing
    values: npt.NDArray[np.int64]

    @property
    def sequences(self) -> npt.NDArray[np.int64]:
        """Sequences of each row group, int64 [row groups]; documents that stay whole may need more."""
        found: npt.NDArray[np.int64] = self.packing.filled(self.values)
        return found

    @property
    def padding_share(self) -> float:
        """Fraction of padding in the sequences, in [0, 1]."""
        return float(1 - self.values.sum() / max(1, self.sequences.sum() * self.packing.length))


def packed_of(blobs: RowGroupCache, packing: Packing) -> Packed:
    """Return what the footers tell of the documents of a dataset.

    Raises:
        ConfigError: There is no such column of lists of numbers, or the footers do not tell.
    """
    field = next((each for each in blobs.plan.layout.fields if each.name == packing.column), None)
    if field is None or field.kind != "list" or field.shape:
        raise ConfigError(f"--pack-column={packing.column} is no column of lists of numbers: name one that is")
    manifest = blobs.manifest
    values = values_of(replace(manifest, selection=None), blobs.blocks, packing.column)
    if values is None:
        raise ConfigError(f"the files do not tell how many values {packing.column!r} has: only footers of Parquet do")
    kept = manifest.block_lengths / np.maximum(manifest.stored_lengths, 1)  # of a filter, about
    return Packed(packing, np.ceil(values * kept).astype(np.int64))


def token_batches_of(
    blobs: RowGroupCache, order: Order | MixtureOrder, tokens: int, length: str, multiple: int, ranks: int
) -> TokenOrder:
    """Return the batches of a token budget, for which the lengths of all rows are read. See `make_loader`.

    Args:
        blobs: The row groups of a dataset.
        order: The order of its rows.
        tokens: Most tokens of a batch.
        length: The column of the lengths.
        multiple: Lengths are padded to multiples of it.
        ranks: The number of ranks.

    Raises:
        ConfigError: The column has no lengths.
        DataError: A row is longer than a batch.
    """
    from dataload.dataset import Dataset  # imports torch, which few plans need
    from dataload.row_lengths import RowLengths, budget_of

    names = [length] if length in blobs.manifest.schema.names else None
    lengths = RowLengths([Dataset(blobs.manifest, blobs.blocks, names)], length)
    return TokenOrder(order, budget_of(lengths, tokens, multiple), ranks)


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
    windows = [usual_window(manifest, manifest.block_lengths) if window is None else window for manifest in manifests]
    return MixtureOrder(sources, weights, windows=windows, **options)


def usual_window(manifest: Manifest, lengths: npt.NDArray[np.int64]) -> int:
    """Return the default window of a dataset whose row groups have so many rows, or sequences."""
    return default_window(lengths, [group.bytes for group in manifest.row_groups])
