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
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from dataload.cache.blocks.reader import Object
from dataload.catalog.footer_cache import Metadata
from dataload.catalog.inventory import Inventory, KnownRows, inventories_from_bytes, inventories_to_bytes
from dataload.catalog.selected_rows import SelectedRows
from dataload.catalog.selection import Selection
from dataload.errors import ConfigError, DataError, OriginError
from dataload.mixture import Mixture
from dataload.moved_rows import moved
from dataload.runtime.text import few
from dataload.samplers.mixture.order import MixtureOrder
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.mixture.weights import Schedule, plain, weights_of
from dataload.samplers.order import Order
from dataload.samplers.position import EARLIER, Position
from dataload.samplers.rest import Continued, Left, LeftOrder
from dataload.samplers.token_sampler import TokenSampler

if TYPE_CHECKING:
    from dataload.dataset import MapStyle
    from dataload.samplers.rank_sampler import PositionOrder, RankSampler

Int64 = npt.NDArray[np.int64]
OnChange = Literal["error", "next_epoch", "continue"]

VERSION: Final = 1  # of cached inventories
TABLES: Final = "tables"  # in a state and in its segments: the versions of the tables that it is of
MOST_TABLE_CHARACTERS: Final = 400  # of their URLs: a state has at most 4 KB
MOST_EARLIER_CHARACTERS: Final = 2000  # of the earlier segments of a state
REST_UNKNOWN: Final = "So the rest of the epoch is not known: begin an epoch with set_epoch"
KEPT: Final = 64  # inventories of this process

_kept: OrderedDict[str, bytes] = OrderedDict()


def check_choice(on_change: str) -> None:
    """Raise ConfigError unless `on_change` has one of its values."""
    if on_change not in get_args(OnChange):
        raise ConfigError(f'on_change={on_change!r}: use "error", "next_epoch" or "continue"')


def versions_of(dataset: MapStyle) -> list[str]:
    """Return the versions of tables that a dataset has, for a state: as URLs, or as numbers if these are too long."""
    found = [each.manifest.pinned for each in dataset.datasets if each.manifest.pinned]
    if sum(map(len, found)) > MOST_TABLE_CHARACTERS:
        found = [each.rpartition("@")[2] for each in found]
    return found if sum(map(len, found)) <= MOST_TABLE_CHARACTERS else []


def keep(dataset: MapStyle, digest: str) -> None:
    """Keep which rows a dataset has, for states that outlive it. digest: that of its order."""
    if digest not in _kept and not _unsupported(dataset):
        data = inventories_to_bytes(each.inventory for each in dataset.datasets)
        _cached(dataset, digest).get_or_make(lambda: data)
        _keep(digest, data)


def known_as_text(dataset: MapStyle, digests: Sequence[str]) -> dict[str, str]:
    """Return the inventories of data with these digests as texts, the first of which is that of a dataset."""
    keep(dataset, digests[0])
    return {each: _kept[each].decode() for each in digests if each in _kept}


def learn(texts: Mapping[str, str]) -> None:
    """Keep the inventories that `known_as_text` returned. Raise ConfigError for others."""
    for digest, text in texts.items():
        try:
            inventories_from_bytes(text.encode())
            _keep(digest, text.encode())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the inventory of {digest} cannot be read: {error}") from error


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
    segments = list(position.options.get(EARLIER, ()))
    _check(segments)
    tables = position.options.get(TABLES)
    rows = position.cursor - sum(each["rows"] for each in segments)
    if position.dataset != sampler.position.dataset and rows:
        versions = [str(each).rpartition("@")[2] for each in tables or ()]
        segments.append({"dataset": position.dataset, "rows": rows, **({TABLES: versions} if versions else {})})
    if len(json.dumps(segments)) > MOST_EARLIER_CHARACTERS:
        raise ConfigError(
            f"the data has changed {len(segments)} times within one epoch, more than a state holds: on_change="
            '"next_epoch" ends the epoch first'
        )
    inventories = [_inventories(each, dataset) for each in segments]
    latest = inventories[-1] if position.dataset != sampler.position.dataset and inventories else None
    options = {name: value for name, value in position.options.items() if name not in (EARLIER, TABLES)}
    if latest is None:
        latest = [each.inventory for each in dataset.datasets]
    by_rows = isinstance(dataset, Mixture) and dataset.by_rows and options["weights"] == _by_rows(latest)
    order, had = sampler.order.with_options(), [KnownRows() for _ in dataset.datasets]
    here = [each.inventory for each in dataset.datasets]
    taken = 0
    for number, (segment, found) in enumerate(zip(segments, inventories, strict=True)):
        of = _order_over(order, found, options, by_rows=by_rows)
        first = of if not taken else _rest(of, found, had, taken)
        _add(had, found, first, position.epoch, taken + segment["rows"])
        taken += segment["rows"]
        is_last = number == len(segments) - 1
        following = (None, here) if is_last else (segments[number + 1], inventories[number + 1])
        _add_moved(had, (segment, found), following, dataset)
    if by_rows:
        options["weights"] = _by_rows(here)
    whole = _order_over(order, here, options, by_rows=by_rows)
    moved = Position(sampler.position.dataset, position.epoch, position.cursor, {**options, EARLIER: segments})
    return moved, _rest(whole, here, had, taken)


def earlier_dataset(position: Position, dataset: MapStyle, sampler: RankSampler) -> MapStyle:
    """Return a dataset as it was when a state was saved.

    Raises:
        ConfigError: It cannot be told which rows it had.
        OriginError: A file of it is gone.
    """
    check_supported(dataset, sampler)
    tables = list(position.options.get(TABLES) or [])
    segment = {"dataset": position.dataset, TABLES: tables}
    found = _known(segment, dataset)
    urls = _urls(segment, dataset)
    if urls is None or (found is None and None in urls):
        raise _unknown(segment)
    each = [
        one.as_of(url, None if found is None else found[number])
        for number, (one, url) in enumerate(zip(dataset.datasets, urls, strict=True))
    ]
    names = dataset.names if isinstance(dataset, Mixture) else ("",)
    if _digest([one.inventory for one in each], names) != position.dataset:
        raise _unknown(segment)
    return dataset.over(each) if isinstance(dataset, Mixture) else each[0]


def check_supported(dataset: MapStyle, sampler: RankSampler) -> None:
    """Raise ConfigError for a loader that cannot continue with other data."""
    what = _unsupported(dataset)
    if isinstance(sampler, TokenSampler):
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


def _check(segments: Sequence[Any]) -> None:
    for each in segments:
        rows = each.get("rows") if isinstance(each, Mapping) else None
        if not (isinstance(rows, int) and rows > 0 and isinstance(each.get("dataset"), str)):
            raise ConfigError(f"the state has {EARLIER}={segments!r}: give all that state_dict() returned")


def _inventories(segment: Mapping[str, Any], dataset: MapStyle) -> list[Inventory]:
    """Return which rows the data of a segment had, of each source."""
    if (found := _known(segment, dataset)) is not None:
        return found
    urls = _urls(segment, dataset)
    if urls is None or None in urls:
        raise _unknown(segment)
    try:
        former = [one.as_of(url, None) for one, url in zip(dataset.datasets, urls, strict=True)]
    except (OriginError, DataError) as error:
        raise ConfigError(f"{few(map(str, urls))}, of which the epoch has rows, cannot be opened: {error}") from error
    found = [each.inventory for each in former]
    names = dataset.names if isinstance(dataset, Mixture) else ("",)
    if _digest(found, names) != segment["dataset"]:
        raise _unknown(segment)
    _keep(segment["dataset"], inventories_to_bytes(found))
    return found


def _known(segment: Mapping[str, Any], dataset: MapStyle) -> list[Inventory] | None:
    """Return what this process or the cache knows of the data of a segment."""
    digest = segment["dataset"]
    if digest in _kept:
        found = inventories_from_bytes(_kept[digest])
    elif (cached := _cached(dataset, digest).get()) is not None:
        found = cached
        _keep(digest, inventories_to_bytes(found))
    else:
        return None
    if len(found) != len(dataset.datasets):
        raise ConfigError(
            f"the state is of {len(found)} sources, and this loader has {len(dataset.datasets)}: use those"
        )
    return [own.beside(each.manifest) for own, each in zip(found, dataset.datasets, strict=True)]


def _keep(digest: str, data: bytes) -> None:
    _kept[digest] = data
    while len(_kept) > KEPT:
        _kept.popitem(last=False)


def _cached(dataset: MapStyle, digest: str) -> Metadata[list[Inventory]]:
    blocks = dataset.datasets[0].blocks
    return Metadata(blocks, Object("inventories", 0, digest), f"inventory {VERSION}", inventories_from_bytes)


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
        "has had are not known: use the cache_dir of the run that saved it; for a table, with its filters; or begin an "
        "epoch with set_epoch"
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


def _by_rows(found: Iterable[Inventory]) -> list[Any]:
    """Return the weights by rows, as a state has them."""
    return plain(weights_of([int(each.block_lengths.sum()) for each in found]))


def _order_over(order: Any, found: Sequence[Inventory], options: Mapping[str, Any], *, by_rows: bool) -> PositionOrder:
    """Return the order of data with these rows. options: those of a state."""
    own = {name: options[name] for name in order.options}
    if not isinstance(order, MixtureOrder):
        [only] = found
        return Order(only.block_lengths, dataset_key=only.order_key.encode(), **own)
    if by_rows:
        own["weights"] = _by_rows(found)
    return MixtureOrder(_sources(found, [source.name for source in order.sources]), **own)


def _rest(order: Any, found: Sequence[Inventory], had: Sequence[KnownRows], taken: int) -> PositionOrder:
    """Return the order of an epoch that goes on with data that has these rows, after `taken` rows of others."""
    window = max(1, *(each.window for each in order.orders))
    left = []
    for own, known in zip(found, had, strict=True):
        selection = Selection.of(known.others(own))
        left.append(Left(selection.counts, _Rows(selection, 2 * window)))
    if not isinstance(order, MixtureOrder):
        return cast("PositionOrder", Continued(order, LeftOrder.of(order, left[0]), taken))
    options = dict(order.options)
    is_over = False
    if options["num_rows"] is not None:
        options["num_rows"], is_over = max(1, options["num_rows"] - taken), options["num_rows"] <= taken
    rest = MixtureOrder(order.sources, **options, left=left)
    rest.n = 0 if is_over else rest.n
    return cast("PositionOrder", Continued(order, rest, taken))


def _add(had: list[KnownRows], found: Sequence[Inventory], order: PositionOrder, epoch: int, end: int) -> None:
    """Add the rows that an epoch has had up to a position. A new pass over a source has had none before."""
    if end > order.n:
        raise ConfigError(f"the state has had {end} rows of an epoch of {order.n}: give all that state_dict() returned")
    for source, rows, is_new_pass in order.had(epoch, end):
        if is_new_pass:
            had[source] = KnownRows()
        had[source].add(found[source], [rows])


def _add_moved(
    had: list[KnownRows],
    former: tuple[Mapping[str, Any], Sequence[Inventory]],
    newer: tuple[Mapping[str, Any] | None, Sequence[Inventory]],
    dataset: MapStyle,
) -> None:
    """Add the rows that a table has written again into other files, from one snapshot of each source to another."""
    for source, (each, old, new) in enumerate(zip(dataset.datasets, former[1], newer[1], strict=True)):
        if not each.manifest.pinned:  # The files of a folder are gone, and no one else writes their rows again.
            continue
        gone = had[source].numbers(old, set(old.keys) - set(new.keys))
        added = new.rows_in(set(new.keys) - set(old.keys))
        if gone.size and added.size:
            of, to = (
                each if segment is None else each.as_of(_url(segment, dataset, source), inventory)
                for segment, inventory in ((former[0], old), (newer[0], new))
            )
            had[source].add(new, [moved(of, gone, to, added, REST_UNKNOWN)])


def _url(segment: Mapping[str, Any], dataset: MapStyle, source: int) -> str:
    urls = _urls(segment, dataset)
    if urls is None or (url := urls[source]) is None:
        raise _unknown(segment)
    return url


class _Rows:
    """Returns the numbers of selected rows in a dataset, by their numbers in the selection."""

    def __init__(self, selection: Selection, groups: int) -> None:
        self._selection, self._groups = selection, groups
        self._table: SelectedRows | None = None

    def __reduce__(self) -> Any:
        return _Rows, (self._selection, self._groups)

    def __call__(self, numbers: Int64) -> Int64:
        if self._table is None:
            self._table = SelectedRows(self._selection, self._groups)
        rows: Int64 = self._table.rows(numbers)
        return rows
