"""The calls that made a dataset, as JSON for the ledger of a run; and made again, by it or on another snapshot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.catalog.inventory import Inventory, keys_of
from dataload.catalog.opening import Opening
from dataload.catalog.recipe import UNRECORDED, plain, rows_of
from dataload.dataset import Dataset, opened
from dataload.errors import ConfigError, DataError
from dataload.moved_rows import moved
from dataload.runtime.text import few

if TYPE_CHECKING:
    from dataload.catalog.inventory import KnownRows
    from dataload.catalog.opening import Excluded
    from dataload.rows.packing import Packing

log = logging.getLogger(__name__)


class Move(NamedTuple):
    """From one snapshot of a source to another.

    Attributes:
        former: The dataset whose calls are made again.
        whole: All rows of the other snapshot.
        is_newer: Whether that is the newest one.
    """

    former: Dataset
    whole: Dataset
    is_newer: bool


class Way(NamedTuple):
    """How a call is made again, given the dataset so far.

    Attributes:
        to_json: Returns what it was given, as JSON has it.
        from_json: Makes it again by this JSON. None: JSON cannot hold what it needs.
        again: Makes it again on another snapshot. None: it is of the rows of one snapshot.
    """

    to_json: Callable[[Any], Any] = plain
    from_json: Callable[[Dataset, Any], Dataset] | None = None
    again: Callable[[Dataset, Any, Move], Dataset] | None = None


def _excluded_again(dataset: Dataset, given: Excluded, move: Move) -> Dataset:
    """Return the rows without the excluded ones, also where a table has written these again."""
    here = Inventory.of(dataset.manifest, "")
    rows = given.known.numbers(here, set(here.keys))
    # Rows of an earlier snapshot may not be found, such as those of a later call. The digest of a state tells.
    with nullcontext() if move.is_newer else suppress(ConfigError, DataError):
        rows = np.union1d(rows, _written_again(dataset, given.known, move))
    return dataset.excluding(rows, given.known)


def _written_again(newer: Dataset, rows: KnownRows, move: Move) -> npt.NDArray[np.int64]:
    """Return the rows of new files that are some rows of files that the newer snapshot lacks."""
    whole = _whole(move.former)
    old, new = (Inventory.of(each.manifest, "") for each in (whole, newer))
    gone = rows.numbers(old, set(old.keys) - set(keys_of(move.whole.manifest)))
    added = added_rows(rows, old, new) if gone.size else gone
    if not added.size:
        return added
    if whole.manifest.pinned:
        hint = "So it is not known which rows exclude leaves out now: open the table again, and exclude them there"
        return moved(whole, gone, newer, added, hint)
    groups = np.searchsorted(np.cumsum(old.block_lengths), gone, "right").tolist()
    files = few(list(dict.fromkeys(old.keys[group][0] for group in groups)))
    log.warning("%s had excluded rows and is gone or replaced: exclude them again if new files have them", files)
    return added[:0]


def added_rows(known: KnownRows, old: Inventory, new: Inventory) -> npt.NDArray[np.int64]:
    """Return the numbers of the rows of new files, the known ones first.

    These files had been in the table before, and it has them again, such as after RESTORE. Of rows of equal values, the
    known ones are those that are written again, not further ones.
    """
    keys = set(new.keys) - set(old.keys)
    first, rows = known.numbers(new, keys), new.rows_in(keys)
    return np.concatenate((first, np.setdiff1d(rows, first, assume_unique=True)))


def _mapped_again(dataset: Dataset, _: Any, move: Move) -> Dataset:
    return _mapped(dataset, move.former) if move.is_newer else dataset  # It changes no row numbers.


def _mapped(dataset: Dataset, former: Dataset) -> Dataset:
    """Return rows of another snapshot with the next map of a dataset. A function may make others of other columns."""
    number = len(dataset.stages)
    stage, read = former.stages[number], map(former.manifest.schema.field, former.file_columns)
    if dataset.schema.equals(former.stages[number - 1].schema if number else pa.schema(read)):
        return dataset.mapped(stage)
    function = stage.function
    found = dataset.map(function.call, stage.columns, function.version, processes=stage.processes)
    return found.skipping() if stage.skips else found


def _inventory_to_json(inventory: Inventory) -> Any:
    return {UNRECORDED: f"{inventory.block_lengths.sum():,} rows"}  # which the file beside the ledger has


def _packing_to_json(packing: Packing) -> dict[str, Any]:
    names = "length", "column", "also", "split", "cu_seqlens", "lengths"
    pads = dict(zip(packing.columns, packing.pads, strict=True))
    return {**{name: plain(getattr(packing, name)) for name in names}, "pad": plain(pads)}


WAYS = {
    "make_dataset": Way(Opening.to_json),
    "filter": Way(from_json=Dataset.filter, again=lambda dataset, filters, _: dataset.filter(filters)),
    "select": Way(from_json=lambda dataset, rows: dataset.select(rows_of(rows))),
    "exclude": Way(lambda given: given.numbers, lambda dataset, rows: dataset.exclude(rows_of(rows)), _excluded_again),
    "split": Way(from_json=lambda dataset, how: dataset.split(how["fractions"], how["seed"])[how["part"]]),
    "part": Way(_inventory_to_json),
    "map": Way(lambda function: function.name, lambda dataset, _: dataset, _mapped_again),
    "flat_map": Way(lambda function: function.name),
    "pack": Way(_packing_to_json, lambda dataset, how: dataset.pack(**how)),
}
"""How each call is made again. A source is opened by `make_dataset` and `opened`."""


def calls_as_json(dataset: Dataset) -> list[dict[str, Any]]:
    """Return the calls that made a dataset, without credentials: a mapping of its name to what was given for each."""
    return [{name: WAYS[name].to_json(given)} for name, given in dataset.calls]


def at_newest(dataset: Dataset) -> Dataset:
    """Return what the calls of a dataset make of the newest snapshot of its source.

    Raises:
        ConfigError: A call is of the rows of one snapshot, or it is not known which rows `exclude` leaves out.
        DataError, OriginError: As `make_dataset` raises them.
    """
    return _again(dataset, partial(opened, newest=True), is_newer=True)


def at_version(dataset: Dataset, version: str, without_last: int = 0) -> Dataset:
    """Return what the calls of a dataset make of another version of its table, before `map`.

    Args:
        dataset: The dataset.
        version: The version, or a URL that ends in it.
        without_last: How many of its last calls of `exclude` are left out.

    Raises:
        ConfigError: A call cannot be made again.
        OriginNotFound: A file of the version is gone.
    """
    version = version.rpartition("@")[2]
    try:
        return _again(dataset, partial(opened, version=version), without_last, is_newer=False)
    except ConfigError as error:
        place = dataset.manifest.pinned.rpartition("@")[0]
        raise ConfigError(f"{place}@{version}, of which the epoch has rows: {error}") from error


def with_rows(dataset: Dataset, version: str | None, inventory: Inventory) -> Dataset:
    """Return the rows that a dataset had earlier, before `map`.

    Args:
        dataset: The dataset.
        version: The version of its table, or a URL that ends in it; None: the files of a folder, as they are now.
        inventory: The rows.

    Raises:
        ConfigError: The source has no such version.
        OriginNotFound: A file is gone.
    """
    whole = _whole(dataset) if version is None else opened(_opening(dataset), version.rpartition("@")[2])
    return whole.part(inventory)


def mapped_as(former: Dataset, dataset: Dataset) -> Dataset:
    """Return rows of an earlier snapshot as a dataset maps its own.

    Raises:
        ConfigError, DataError: As `map` raises them.
    """
    while len(former.stages) < len(dataset.stages):
        former = _mapped(former, dataset)
    return former


def lacking(dataset: Dataset, former: Dataset) -> list[str]:
    """Return the columns that are named for a dataset, or for its first map, and that an earlier snapshot lacks."""
    found = [name for name, names in _opening(dataset).names_in(former.manifest).items() if not names]
    given = dataset.stages[0].columns if dataset.stages else None
    own, others = set(dataset.manifest.schema.names), set(former.manifest.schema.names)
    return found + [name for name in given or () if name in own and name not in others]


def _again(
    dataset: Dataset,
    open_source: Callable[[Opening], Dataset],
    without_last: int = 0,
    *,
    is_newer: bool,
) -> Dataset:
    """Return what the calls of a dataset make of another snapshot, without its last calls of `exclude`."""
    opening, calls = _opening(dataset), dataset.calls[1:]
    excludes = [number for number, call in enumerate(calls) if call.name == "exclude"]
    left_out = excludes[len(excludes) - without_last :]
    kept = [call for number, call in enumerate(calls) if number not in left_out]
    steps = [(WAYS[name].again or _refused(name), given) for name, given in kept]
    found = whole = open_source(opening)
    for again, given in steps:
        found = again(found, given, Move(dataset, whole, is_newer))
    return found


def _refused(name: str) -> NoReturn:
    raise ConfigError(f"{name} is of the rows of one snapshot: call it again for those of the new one")


def _whole(dataset: Dataset) -> Dataset:
    """Return all rows of the snapshot of a dataset."""
    opening = _opening(dataset)
    if opening.base is None:  # in a copy of another process
        return opened(opening, dataset.manifest.pinned.rpartition("@")[2] or None)
    return Dataset(opening.base, dataset.blocks, dataset.file_columns, dataset.read_options, (), dataset.calls[:1])


def _opening(dataset: Dataset) -> Opening:
    if not dataset.calls or not isinstance(opening := dataset.calls[0].given, Opening):
        raise ConfigError("this dataset cannot be made again of a new snapshot: open the source again")
    return opening
