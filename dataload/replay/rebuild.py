"""A dataset and a loader made again from the record of a loop, by the same public functions, without its transforms."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dataload.catalog.opening import USUAL
from dataload.catalog.recipe import UNRECORDED
from dataload.dataset import Dataset, make_dataset
from dataload.errors import ConfigError
from dataload.lineage import WAYS
from dataload.loader.factory import make_loader
from dataload.loader.loader import Loader
from dataload.map_style import MapStyle
from dataload.mixture import Mixture, mix
from dataload.replay.recorded import Recorded, as_damage, calls_of, state_of, world_of
from dataload.samplers.mixture.weights import weights_of

OF_MIXTURE = ("stop", "num_rows", "batching")
OF_SEQUENCES = {"pack", "flat_map"}  # calls
log = logging.getLogger(__name__)

PROGRAM = "name what makes it in the run's program: --loader module:function"


def dataset_of(recipe: Any, options: Mapping[str, Any]) -> MapStyle:
    """Return the dataset, or the mixture, of a recipe. `map` is left out: it changes values and no rows.

    Args:
        recipe: As a ledger has it.
        options: Further arguments of `make_dataset`.

    Raises:
        ConfigError: A call cannot be made again from what the recipe says.
        OriginError: The source cannot be read.
    """
    if isinstance(recipe, Mapping):
        return mix({name: _dataset_of(calls, options) for name, calls in recipe.items()})
    return _dataset_of(recipe, options)


def _dataset_of(calls: Any, options: Mapping[str, Any]) -> Dataset:
    makers = {name: way.from_json for name, way in WAYS.items()}
    makers["make_dataset"] = lambda _, how: _opened(how, options)
    found: Any = None
    for call in calls or [{"a program": "of its own"}]:
        [(name, how)] = call.items()
        make, values = makers.get(name), [how, *(how.values() if isinstance(how, dict) else ())]
        if make is None or any(isinstance(value, dict) and UNRECORDED in value for value in values):
            raise ConfigError(f"the ledger cannot make the dataset again, because of {name}({how}): {PROGRAM}")
        found = make(found, how)
    return cast("Dataset", found)


def _opened(how: Mapping[str, Any], options: Mapping[str, Any]) -> Dataset:
    if unknown := how.keys() - {"source", *USUAL}:
        raise ConfigError(f"the ledger opens a dataset with {sorted(unknown)}, which no ledger has")
    return make_dataset(**how, **options)


def dataset_at(recipe: Any, options: Mapping[str, Any], data: Recorded) -> MapStyle:
    """Return the dataset, or the mixture, of the rows that a loop had, whatever its files are beside today.

    Args:
        recipe: As a ledger has it.
        options: Further arguments of `make_dataset`.
        data: The rows.

    Raises:
        ConfigError: A call cannot be made again from what the recipe says.
        OriginError: The source cannot be read, or a file is gone.
    """
    if dict(calls_of(recipe)).keys() & OF_SEQUENCES:  # whose rows are no rows of files
        return dataset_of(recipe, options)
    parts = recipe if isinstance(recipe, Mapping) else {"": recipe}
    found = {
        name: _dataset_of([call for call in calls if "make_dataset" in call], options).part(own)
        for (name, calls), own in zip(parts.items(), data.own, strict=True)
    }
    return mix(found) if isinstance(recipe, Mapping) else found[""]


def loader_of(record: Mapping[str, Any], options: Mapping[str, Any], data: Recorded | None = None) -> Loader:
    """Return the loader of the first rank at the start of a loop, as the ledger has it, without transforms.

    Args:
        record: The record.
        options: Further arguments of `make_dataset`.
        data: Which rows it had; None: those that its recipe makes now.

    Raises:
        ConfigError: The dataset has other rows than it had, or the record is damaged.
        OriginError: The source cannot be read.
    """
    with as_damage():
        try:
            return _loader_of(record, options, data)
        except ConfigError as error:
            if "map" not in dict(calls_of(record["recipe"])):
                raise
            raise ConfigError(
                f"{error}. The run called map, whose function the ledger does not have: {PROGRAM}"
            ) from error


def _loader_of(record: Mapping[str, Any], options: Mapping[str, Any], data: Recorded | None) -> Loader:
    order, given = record["order"], record.get("loader") or {}
    dataset = dataset_of(record["recipe"], options) if data is None else dataset_at(record["recipe"], options, data)
    given_order = record.get("next_order") or order  # which the loader had as arguments
    windows: Sequence[Any] = given_order.get("windows") or [given_order.get("window")]
    if isinstance(dataset, Mixture):
        dataset = mix(
            dict(zip(dataset.names, dataset.datasets, strict=True)),
            name_column=record.get("name_column"),
            **{name: order[name] for name in OF_MIXTURE},
        )
        dataset.weights = weights_of(order["weights"])
    kept = {name: given[name] for name in ("length", "pad_to_multiple", "group", "ragged", "row_ids") if name in given}
    if "batch_tokens" in given:
        kept["batch_tokens"] = given["batch_tokens"]
    else:
        kept |= {"batch_size": record["batch_size"], "num_streams": given_order["num_streams"]}
    loader = make_loader(
        dataset,
        **kept,
        shuffle=given_order["shuffle"],
        seed=given_order["seed"],
        window=windows[0] if len(set(windows)) == 1 else None,
        drop_last=record["drop_last"],
        world=world_of(record),
    )
    if dataset.fingerprint != record["fingerprint"] and "map" not in dict(calls_of(record["recipe"])):
        log.warning(
            "the objects have been written again since the run: rows have the same numbers, perhaps other values"
        )
    return placed(loader, record, data)


def loader_of_program(name: str, record: Mapping[str, Any], data: Recorded | None = None) -> Loader:
    """Return the loader of the first rank that a function of the run's program makes, at the start of a loop.

    Args:
        name: "module:function". The function takes the `World` of the rank.
        record: The record of the loop.
        data: Which rows it had; None: those that the loader has now.

    Raises:
        ConfigError: There is no such function, or it returns another loader than the run had.
    """
    module, _, function = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--loader={name}: {error}: name a module and a function in it, such as train:loader"
        ) from error
    loader = make(world_of(record))
    if not isinstance(loader, Loader):
        raise ConfigError(f"--loader={name} returns {type(loader).__name__}: let it return make_loader(…, world=world)")
    return placed(loader, record, data)


def placed(loader: Loader, record: Mapping[str, Any], data: Recorded | None) -> Loader:
    """Move a loader to the start of a loop, as the ledger has it. Return it.

    Raises:
        ConfigError: Its dataset or its order is another one.
    """
    sampler, rest = loader.rank_sampler, None if data is None else data.rest(record)
    if rest is None:
        loader.load_state_dict(state_of(record))
    else:
        sampler.load_state_dict(state_of(record), rest)
    if (sampler.num_replicas, sampler.batch_size) != (record["ranks"], record["batch_size"]):
        raise ConfigError(
            f"the loader has {sampler.num_replicas} ranks with a batch_size of {sampler.batch_size}, and the run had "
            f"{record['ranks']} with {record['batch_size']}: let it detect its world, and make it as the run did"
        )
    return loader
