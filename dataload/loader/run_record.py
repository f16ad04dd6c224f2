"""What a loop begins with, for the ledger of its run: what its batches follow from, but for the user's functions."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dataload.catalog.inventory import Inventory
from dataload.catalog.inventory_store import to_bytes
from dataload.catalog.recipe import plain
from dataload.lineage import calls_as_json
from dataload.loader.changes import left_of
from dataload.mixture import Mixture

if TYPE_CHECKING:
    from dataload.dataset import Dataset
    from dataload.loader.loader import Loader
    from dataload.map_style import MapStyle
    from dataload.samplers.position import Position

USUAL = {  # arguments of make_loader that decide batches, with their defaults
    "batch_tokens": None,
    "length": None,
    "pad_to_multiple": None,
    "group": None,
    "ragged": "list",
    "row_ids": False,
    "on_error": "raise",
}
PACKAGES = ("dataload", "torch", "numpy", "pyarrow")


def record_of(loader: Loader, start: Position, keep: Callable[[bytes], str | None]) -> dict[str, Any]:
    """Return the record of a loop that begins: JSON, without credentials.

    Args:
        loader: The loader of the loop.
        start: Where the loop begins.
        keep: Keeps bytes beside the ledger, and returns their name; None: they are too many.
    """
    sampler, dataset = loader.rank_sampler, loader.dataset
    record = {
        "versions": _versions(),
        "fingerprint": dataset.fingerprint,
        "recipe": recipe_of(dataset),
        "urls": [_prefix(each) for each in dataset.datasets],
        "name_column": next(iter(dataset.computed), None),
        "inventory": keep(_inventories(loader)),
        "data": start.dataset,
        "order": dict(start.options),
        "next_order": None if (coming := sampler.next_options) == start.options else dict(coming),
        "loader": loader.given,
        "batch_size": sampler.batch_size,
        "drop_last": sampler.drop_last,
        "rows": sampler.num_rows,
        "ranks": sampler.num_replicas,
        "nodes": sampler.num_nodes,
        "epoch": start.epoch,
        "cursor": start.cursor,
    }
    return {name: plain(value) for name, value in record.items()}


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # a source tree that was never installed
            found[name] = version(name)
    return found


def given_of(transform: Any, collate_fn: Any, **arguments: Any) -> dict[str, Any]:
    """Return those of these arguments of `make_loader` that are not the usual ones, and the names of the functions."""
    found = {name: plain(value) for name, value in arguments.items() if value != USUAL[name]}
    for name, function in (("transform", transform), ("collate_fn", collate_fn)):
        if function is not None:
            named = function if hasattr(function, "__qualname__") else type(function)
            found[name] = f"{named.__module__}:{named.__qualname__}"
    return found


def _inventories(loader: Loader) -> bytes:
    """Return which rows the data of a loop has, of each source; and, if the epoch had other data, which it still gets.

    The latter are numbered among the former.
    """
    own = [each.inventory for each in loader.dataset.datasets]
    left = [
        Inventory(of.order_key, of.keys, of.block_lengths, rows)
        for of, rows in zip(own, left_of(loader.rank_sampler.order), strict=False)
    ]
    return to_bytes([*own, *left])


def _prefix(dataset: Dataset) -> str:
    """Return what stands before the path of a file in its URL."""
    path = dataset.row_groups[0].file.path
    url = dataset.blocks.origin.url_of(path)
    return url.removesuffix(path) if url.endswith(path) else ""


def recipe_of(dataset: MapStyle) -> Any:
    """Return what made a dataset: a list of calls, or these of each source of a mixture, by name."""
    if isinstance(dataset, Mixture):
        return {name: calls_as_json(each) for name, each in zip(dataset.names, dataset.datasets, strict=True)}
    [only] = dataset.datasets
    return calls_as_json(only)
