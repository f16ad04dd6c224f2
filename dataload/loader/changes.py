"""Data that changes between the save and the load of a loader's state.

The epoch of a state is a list of segments. Each is a number of rows in the order of what was left of one snapshot:

    segment 0:  the first n0 rows of an order of snapshot A
    segment 1:  the first n1 rows of an order of (snapshot B without those n0)
    the rest:   an order of (snapshot C without those n0 + n1)

All orders have the options of the state. So the state has the snapshots and the numbers, and this module computes from
them which rows the epoch has had. The row groups of an earlier snapshot are in its `Inventory`, which is kept in the
cache; a table's version can be opened again instead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from dataload.catalog import inventory_store
from dataload.catalog.inventory import Inventory, KnownRows
from dataload.catalog.selected_rows import SelectedRows
from dataload.catalog.selection import Selection
from dataload.errors import ConfigError, DataError, OriginError
from dataload.lineage import added_rows, at_version, lacking, mapped_as, with_rows
from dataload.mixture import Mixture
from dataload.moved_rows import moved
from dataload.runtime.text import counted, few
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.mixture.weights import Schedule, plain, weights_of
from dataload.samplers.order import Order
from dataload.samplers.position import CHOICE, EARLIER, TABLES, Position, listed, require
from dataload.samplers.rest import Continued, LeftOrder

if TYPE_CHECKING:
    from dataload.dataset import Dataset
    from dataload.map_style import MapStyle
    from dataload.samplers.rank_sampler import RankSampler
    from dataload.samplers.steps import PositionOrder

Int64 = npt.NDArray[np.int64]
OnChange = Literal["error", "next_epoch", "continue"]

BY_ROWS: Final = "by_rows"  # in a state, and its first segment: the mixture weighs each snapshot by its rows
MOST_URL_CHARACTERS: Final = 400  # of the tables of a state; their numbers stand for longer ones
MOST_TABLE_CHARACTERS: Final = 1600  # of the versions of tables in a state, which has at most 4 KB
MOST_EARLIER_CHARACTERS: Final = 2000  # of the earlier segments of a state
MOST_TRIES: Final = 256  # of which calls of `exclude` are newer than a state
REST_UNKNOWN: Final = "So the rest of the epoch is not known: begin an epoch with set_epoch"

_weights_of = lru_cache(8)(weights_of)  # of thousands of sources, in the state after each batch

log = logging.getLogger(__name__)


def check_choice(on_change: str) -> None:
    """Raise ConfigError unless `on_change` has one of its values."""
    if on_change not in get_args(OnChange):
        raise ConfigError(f'on_change={on_change!r}: use "error", "next_epoch" or "continue"')


def for_state(position: Position, dataset: MapStyle) -> Position:
    """Return a position in a dataset with what a state says of the data, for those that go on with other data."""
    tables = _versions_of(dataset)
    by_rows = isinstance(dataset, Mixture) and position.options.get("weights") == _by_rows(map(len, dataset.datasets))
    return position.with_options(**({TABLES: tables} if tables else {}), **({BY_ROWS: True} if by_rows else {}))


def _versions_of(dataset: MapStyle) -> list[str]:
    """Return the versions of tables that a dataset has, for a state: as URLs, or as numbers if these are too long."""
    found = [each.manifest.pinned for each in dataset.datasets if each.manifest.pinned]
    if len(json.dumps(found)) > MOST_URL_CHARACTERS:
        found = [each.rpartition("@")[2] for each in found]
    return found if len(json.dumps(found)) <= MOST_TABLE_CHARACTERS else []


def other_version(position: Position, dataset: MapStyle) -> str | None:
    """Return of which version of a table a position in other data is, if that is none of a dataset, and what to do."""
    saved = position.options.get(TABLES)
    own = [each.manifest.pinned for each in dataset.datasets if each.manifest.pinned]
    if not isinstance(saved, list):
        return None
    if len(saved) == len(own):  # A state of many tables has no more than the versions.
        places = [each.rpartition("@")[0] for each in own]
        saved = [text if "@" in (text := str(each)) else f"{at}@{each}" for each, at in zip(saved, places, strict=True)]
    others = [str(each) for each in saved if each not in own]
    if not others:
        return None
    here = few(each for each in own if each not in saved) if own else "no table"
    return (
        f"{few(others)}, and this loader reads {here}: {CHOICE}, or open the version of the state, "
        f"make_loader({others[0]!r}, …), until its epoch ends; then load a state of the end of an epoch, or none"
    )


def keep(dataset: MapStyle, digest: str) -> None:
    """Keep which rows a dataset has, for states that outlive it. digest: that of its order."""
    if not inventory_store.is_kept(digest) and not _unsupported(dataset):
        inventory_store.keep(digest, [each.inventory for each in dataset.datasets], dataset.datasets[0].blocks)


def at_start(position: Position, dataset: MapStyle, sampler: RankSampler) -> Position:
    """Return a position at the start of an epoch in other data. A mixture that weighs by rows weighs by those of it."""
    own, options = sampler.position.options, dict(position.options)
    options |= {name: own[name] for name in ("window", "windows") if name in own}  # Other data has other defaults.
    if _is_by_rows(position, dataset):
        options["weights"] = _by_rows(map(len, dataset.datasets))
    return Position(sampler.position.dataset, position.epoch, 0, options)


def continued(position: Position, dataset: MapStyle, sampler: RankSampler) -> tuple[Position, PositionOrder]:
    """Return a position in other data, and the order of its epoch: of the rows that it has not had.

    Args:
        position: That of a state. If it is of other data than the sampler's, these are its latest segment.
        dataset: The data that the epoch goes on with.
        sampler: The sampler of this data.

    Raises:
        ConfigError: It cannot be told which rows the epoch has had.
    """
    check_supported(dataset, sampler)
    _check_calls(dataset)
    names = sampler.position.options.keys() - {EARLIER}
    require(names, position.options)
    options, known = {name: position.options[name] for name in names}, sampler.known_lists()
    segments, tables = _segments(position), _tables(position)
    had_here = position.cursor - sum(each["rows"] for each in segments)
    if had_here < 0:
        raise ConfigError(
            f"the state has had {position.cursor} rows, fewer than those before the data changed: give all that "
            "state_dict() returned"
        )
    if position.dataset != sampler.position.dataset and had_here:
        segments.append(_latest(position, had_here, tables, dataset, is_first=not segments))
    by_rows = isinstance(dataset, Mixture) and bool(segments) and BY_ROWS in segments[0]
    snapshots = [*(_inventories(each, dataset) for each in segments), [each.inventory for each in dataset.datasets]]
    if by_rows:
        options["weights"] = _by_rows(map(len, dataset.datasets))
    options = listed(options, {**known, "windows": [*known.get("windows", ()), *map(_windows, snapshots)]})
    orders = [_order_over(sampler.order.with_options(), found, options, by_rows=by_rows) for found in snapshots]
    had, taken, compared = [KnownRows() for _ in dataset.datasets], 0, set()
    for number, segment in enumerate(segments):
        found, order = snapshots[number], orders[number]
        rest = order if not taken else rest_of(order, _others(had, found), taken, by_rows=by_rows)
        taken += segment["rows"]
        _add(had, found, rest, position.epoch, taken)
        if _add_moved(had, (segment, found), ((*segments, None)[number + 1], snapshots[number + 1]), dataset):
            compared |= {number, number + 1}
    _shorten(segments, compared, dataset)
    moved = Position(sampler.position.dataset, position.epoch, position.cursor, {**options, EARLIER: segments})
    return moved, rest_of(orders[-1], _others(had, snapshots[-1]), taken, by_rows=by_rows)


def _shorten(segments: Sequence[dict[str, Any]], compared: Collection[int], dataset: MapStyle) -> None:
    """Leave out versions of tables until a state holds the segments, the oldest first: the cache stands for them.

    Each host has cached what the segments had, so the states of all ranks leave out the same.

    Args:
        segments: The segments.
        compared: Which of them are opened to compare rows. So is the last one if the data changes before it is read.
        dataset: The data that the epoch goes on with.

    Raises:
        ConfigError: They are too long even so.
    """
    has_cache = dataset.datasets[0].blocks.tier.shared
    for number, segment in enumerate(segments[:-1]):
        if has_cache and number not in compared and len(json.dumps(segments)) > MOST_EARLIER_CHARACTERS:
            segment.pop(TABLES, None)
    if len(json.dumps(segments)) > MOST_EARLIER_CHARACTERS:
        raise ConfigError(
            f"the data has changed {len(segments)} times within one epoch, more than a state holds: on_change="
            '"next_epoch" ends the epoch first'
        )


def _check_calls(dataset: MapStyle) -> None:
    """Raise ConfigError for rows that were chosen by number."""
    for step in ("select", "split"):
        if any(call.name == step for each in dataset.datasets for call in each.calls):
            raise ConfigError(
                f'{step} is of the rows of one snapshot, and on_change="continue" goes on with another, in which it '
                'has others: use on_change="next_epoch", or choose rows by filters'
            )


def _latest(
    position: Position, rows: int, tables: Sequence[str], dataset: MapStyle, *, is_first: bool
) -> dict[str, Any]:
    """Return the segment of the data that a state is of. rows: that the epoch has had of it."""
    versions = [each.rpartition("@")[2] for each in tables]
    segment = {"dataset": position.dataset, "rows": rows, **({TABLES: versions} if versions else {})}
    return {**segment, BY_ROWS: True} if is_first and _is_by_rows(position, dataset) else segment


def earlier_dataset(position: Position, dataset: MapStyle, sampler: RankSampler) -> MapStyle:
    """Return a dataset as it was when a state was saved.

    Raises:
        ConfigError: It cannot be told which rows it had.
        OriginError: A file of it is gone.
    """
    check_supported(dataset, sampler)
    segment = {"dataset": position.dataset, TABLES: _tables(position)}
    if (found := _known(segment, dataset)) is None:
        each = _reopened(segment, dataset)
    elif (urls := _urls(segment, dataset)) is None:
        raise _unknown(segment)
    else:
        each = [with_rows(*of) for of in zip(dataset.datasets, urls, found, strict=True)]
    for one, former in zip(dataset.datasets, each, strict=True):
        if gone := lacking(one, former):
            raise ConfigError(
                f"{former.manifest.pinned}, on which the epoch would end, lacks the column {gone[0]!r}: leave it out, "
                'or use on_change="continue"'
            )
    mapped = [mapped_as(former, one) for one, former in zip(dataset.datasets, each, strict=True)]
    return dataset.over(mapped) if isinstance(dataset, Mixture) else mapped[0]


def check_supported(dataset: MapStyle, sampler: RankSampler) -> None:
    """Raise ConfigError for a loader that cannot continue with other data."""
    what = _unsupported(dataset)
    if not sampler.steps.is_even:
        what = "batch_tokens"
    elif isinstance(sampler.order, MixtureOrder | Continued) and (order := sampler.order).options.get("weights"):
        if order.batching == "homogeneous":
            what = 'batching="homogeneous"'
        elif isinstance(order.weights, Schedule):
            what = "a schedule of weights"
    if what:
        raise ConfigError(
            f"a loader with {what} cannot go on with other data within an epoch: read that of the state until the "
            "epoch ends, or begin an epoch with set_epoch"
        )


def _unsupported(dataset: MapStyle) -> str:
    for each in dataset.datasets:
        if each.packing is not None:
            return "packed sequences"
        if any(stage.is_flat for stage in each.stages):
            return "flat_map"
    return ""


def _segments(position: Position) -> list[dict[str, Any]]:
    """Return what an epoch has had of earlier data. Raise ConfigError unless `continued` has made it."""
    given = position.options.get(EARLIER, [])
    if not isinstance(given, list | tuple) or not all(map(_is_segment, given)):
        raise ConfigError(f"the state has {EARLIER}={given!r}: give all that state_dict() returned")
    names = "dataset", "rows", TABLES, BY_ROWS
    return [{name: each[name] for name in names if name in each} for each in given]


def _is_segment(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("dataset"), str):
        return False
    rows, by_rows = value.get("rows"), value.get(BY_ROWS, True)
    return type(rows) is int and rows > 0 and by_rows is True and _are_texts(value.get(TABLES, []))


def _tables(position: Position) -> list[str]:
    """Return of which versions of tables a state is. Raise ConfigError for anything else."""
    given = position.options.get(TABLES, [])
    if not _are_texts(given):
        raise ConfigError(f"the state has {TABLES}={given!r}: give all that state_dict() returned")
    return list(given)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(each, str) for each in values)


def _inventories(segment: Mapping[str, Any], dataset: MapStyle) -> list[Inventory]:
    """Return which rows the data of a segment had, of each source."""
    if (found := _known(segment, dataset)) is not None:
        return found
    try:
        former = _reopened(segment, dataset)
    except (OriginError, DataError) as error:
        tables = [each.manifest.pinned.rpartition("@")[0] for each in dataset.datasets]
        named = [f"{table}@{url.rpartition('@')[2]}" for table, url in zip(tables, segment[TABLES], strict=True)]
        raise ConfigError(f"{few(named)}, of which the epoch has rows, cannot be opened: {error}") from error
    found = [each.inventory for each in former]
    inventory_store.keep(segment["dataset"], found, dataset.datasets[0].blocks)
    return found


def _reopened(segment: Mapping[str, Any], dataset: MapStyle) -> list[Dataset]:
    """Return what the data of a segment was, of each source, by the versions of the tables."""
    urls = _urls(segment, dataset)
    if urls is None or None in urls:
        raise _unknown(segment)
    at = cache(lambda source, newer: at_version(dataset.datasets[source], str(urls[source]), newer))
    # Rows may have been excluded since, such as bad ones that ended the run.
    calls = [sum(call.name == "exclude" for call in each.calls) for each in dataset.datasets]
    for newer_calls in _newer_calls(calls):
        each = [at(source, newer) for source, newer in enumerate(newer_calls)]
        if _digest([one.inventory for one in each], _names(dataset)) == segment["dataset"]:
            return each
    raise _unknown(segment)


def _newer_calls(calls: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield how many calls of `exclude` of each source may be newer than a state: as many of each, or of one source.

    calls: how many each source has.
    """
    for newer in range(max(calls) + 1):
        yield tuple(min(newer, each) for each in calls)
    of_one = ((source, newer) for source, own in enumerate(calls) for newer in range(1, own + 1))
    for source, newer in islice(of_one, MOST_TRIES):
        yield tuple(newer if each == source else 0 for each in range(len(calls)))


def _known(segment: Mapping[str, Any], dataset: MapStyle) -> list[Inventory] | None:
    """Return what this process or the cache knows of the data of a segment, if it has the digest of that."""
    digest, blocks = segment["dataset"], dataset.datasets[0].blocks
    for found in inventory_store.recorded(digest, blocks):
        if len(found) != len(dataset.datasets):
            raise ConfigError(
                f"the state is of {len(found)} sources, and this loader has {len(dataset.datasets)}: use those"
            )
        if _digest(found, _names(dataset)) == digest:
            inventory_store.keep(digest, found, blocks)
            return [own.beside(each.manifest) for own, each in zip(found, dataset.datasets, strict=True)]
    inventory_store.forget(digest)
    return None


def _names(dataset: MapStyle) -> Sequence[str]:
    return dataset.names if isinstance(dataset, Mixture) else ("",)


def _urls(segment: Mapping[str, Any], dataset: MapStyle) -> list[str | None] | None:
    """Return the version that the segment had of each source, None for one that is no table; None: not known."""
    tables = list(segment.get(TABLES) or [])
    is_table = [bool(each.manifest.pinned) for each in dataset.datasets]
    if sum(is_table) != len(tables):
        return None
    return [tables.pop(0) if each else None for each in is_table]


def _unknown(segment: Mapping[str, Any]) -> ConfigError:
    return ConfigError(
        f"which rows the data of the state had ({segment['dataset']}) is not in this cache, so the rows that the epoch "
        "has had are not known: use the cache_dir of the run that saved it; for a table, with its filters and exclude; "
        "or begin an epoch with set_epoch"
    )


def _digest(found: Sequence[Inventory], names: Sequence[str]) -> str:
    """Return the digest of the order of data with these rows."""
    if names == ("",):
        [only] = found
        return Order(only.block_lengths, dataset_key=only.order_key.encode(), shuffle=False).digest
    return MixtureOrder(_sources(found, names), shuffle=False).digest


def _sources(found: Iterable[Inventory], names: Iterable[str]) -> list[MixtureSource]:
    return [
        MixtureSource(each.block_lengths, name, each.order_key.encode())
        for each, name in zip(found, names, strict=True)
    ]


def _windows(found: Iterable[Inventory]) -> list[int]:
    return [each.window for each in found]


def _by_rows(rows: Iterable[int]) -> list[Any]:
    """Return the weights by the rows of each source, as a state has them."""
    return plain(_weights_of(tuple(rows)))


def _is_by_rows(position: Position, dataset: MapStyle) -> bool:
    """Return whether a mixture weighs by its rows, and that of a state did, whose rows may not be known any more."""
    return isinstance(dataset, Mixture) and dataset.by_rows and position.options.get(BY_ROWS) is True


def _order_over(order: Any, found: Sequence[Inventory], options: Mapping[str, Any], *, by_rows: bool) -> PositionOrder:
    """Return the order of data with these rows. options: those of a state."""
    own = {name: options[name] for name in order.options}
    try:
        if not isinstance(order, MixtureOrder):
            [only] = found
            return Order(only.block_lengths, dataset_key=only.order_key.encode(), **own)
        if by_rows:
            own["weights"] = _by_rows(int(each.block_lengths.sum()) for each in found)
        return MixtureOrder(_sources(found, [source.name for source in order.sources]), **own)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"the state makes no order ({error}): give all that state_dict() returned") from error


def rest_of(order: Any, left: Sequence[Selection], taken: int, *, by_rows: bool) -> PositionOrder:
    """Return the order of an epoch that goes on with some rows of each dataset, after `taken` rows of other data.

    Args:
        order: The order of a whole epoch of the datasets.
        left: The rows of each dataset that the epoch has not had.
        taken: Rows that the epoch has had.
        by_rows: Whether a mixture weighs by rows.
    """
    window = max(1, *(each.window for each in order.orders))
    parts = [SelectedRows(each, 2 * window) for each in left]
    if not isinstance(order, MixtureOrder):
        return cast("PositionOrder", Continued(order, LeftOrder.of(order, parts[0]), taken, parts))
    options = dict(order.options)
    is_over = False
    if options["num_rows"] is not None:
        options["num_rows"], is_over = max(1, options["num_rows"] - taken), options["num_rows"] <= taken
    rest = MixtureOrder(order.sources, **options, left=parts, left_by_rows=by_rows)
    rest.n = 0 if is_over else rest.n
    return cast("PositionOrder", Continued(order, rest, taken, parts))


def left_of(order: PositionOrder) -> list[Selection]:
    """Return which rows of each dataset the rest of an epoch has whose data has changed; nothing for a whole epoch."""
    return [cast("SelectedRows", each).selection for each in order.parts] if isinstance(order, Continued) else []


def _others(had: Sequence[KnownRows], found: Sequence[Inventory]) -> list[Selection]:
    """Return the rows of each dataset that an epoch has not had."""
    return [Selection.of(known.others(own)) for known, own in zip(had, found, strict=True)]


def _add(had: list[KnownRows], found: Sequence[Inventory], order: PositionOrder, epoch: int, end: int) -> None:
    """Add the rows that an epoch has had up to a position. A new pass over a source has had none before."""
    if end > order.n:
        raise ConfigError(f"the state has had {end} rows of an epoch of {order.n}: give all that state_dict() returned")
    for source, masks, is_new_pass in order.had(epoch, end):
        if is_new_pass:
            had[source] = KnownRows()
        had[source].add_masks(found[source], masks)


def _add_moved(
    had: list[KnownRows],
    former: tuple[Mapping[str, Any], Sequence[Inventory]],
    newer: tuple[Mapping[str, Any] | None, Sequence[Inventory]],
    dataset: MapStyle,
) -> bool:
    """Add the rows that a table has written again into other files, from one snapshot of each source to another.

    Returns:
        Whether versions of tables were opened for it.
    """
    opened = False
    for source, (each, old, new) in enumerate(zip(dataset.datasets, former[1], newer[1], strict=True)):
        gone = had[source].numbers(old, set(old.keys) - set(new.keys))
        added = added_rows(had[source], old, new) if gone.size else gone
        if added.size and not each.manifest.pinned:
            log.warning(
                "files that the epoch had %s of are gone, renamed or replaced, such as %s: if new files have these "
                "rows, they come again",
                counted(len(gone), "row"),
                old.keys[int(np.searchsorted(np.cumsum(old.block_lengths), gone[0], "right"))][0],
            )
        elif added.size:
            of, to = (
                each if segment is None else with_rows(each, _url(segment, dataset, source), inventory)
                for segment, inventory in ((former[0], old), (newer[0], new))
            )
            had[source].add(new, [moved(of, gone, to, added, REST_UNKNOWN)])
            opened = True
    return opened


def _url(segment: Mapping[str, Any], dataset: MapStyle, source: int) -> str:
    urls = _urls(segment, dataset)
    if urls is None or (url := urls[source]) is None:
        raise _unknown(segment)
    return url
