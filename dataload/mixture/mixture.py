"""Several datasets as one: `mix` and the map-style dataset that it returns."""

from __future__ import annotations

import copy
import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.arguments import known_keywords
from dataload.catalog.description import cache_text, columns_text
from dataload.catalog.locations import Location
from dataload.catalog.same_columns import check_same_columns
from dataload.catalog.sources import Source
from dataload.dataset import Dataset, make_dataset
from dataload.errors import ConfigError
from dataload.formats.schema import mask_name
from dataload.map_style import MapStyle
from dataload.mixture.selected_rows import MixedSelectedRows
from dataload.rows.packing import Packing
from dataload.rows.row_groups import RowGroups
from dataload.rows.row_store import RowStore
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.text import counted, few
from dataload.samplers.interval_index import IntervalIndex
from dataload.samplers.mixture.order import Batching, MixtureOrder, Stop, check_choices
from dataload.samplers.mixture.source import MixtureSource
from dataload.samplers.mixture.weights import Weights, changes_of, knots, weights_of

SOURCES_AT_ONCE = 16  # that are listed at the same time; all of them share one pool of threads for footers
SHOWN = 4  # weights of a source
MOST_WEIGHTS = 100  # that a mixture remembers; a pickled one, such as that of a worker, has all of them

GivenWeights = Mapping[str, Any] | Sequence[Any] | None


@dataclass
class _Weights:
    """The weights of a mixture, which its loaders share. See `Mixture`. by_rows: they follow its rows."""

    current: Weights = ()
    by_rows: bool = False
    latest: tuple[Weights, ...] = ()


class Mixture(MapStyle):
    """Rows of several datasets. `mix` makes one, and `make_loader` takes it in place of a dataset.

    Rows are numbered through all sources, one source after the other. Like a dataset, a mixture is map-style and
    picklable. The weights take effect in loaders only.

    Args:
        sources: The dataset of each name.
        weights: As for `mix`.
        name_column: As for `mix`.
        schedule: As for `mix`.
        ramp: As for `mix`.
        **order: Other arguments of `MixtureSampler`: `stop`, `batching` and `num_rows`.

    Attributes:
        names: Names of the sources.
        num_rows: Number of rows of all sources.
        schema: Arrow schema of the columns, that of the first source.
        order: Arguments of `MixtureSampler`.

    Raises:
        ConfigError: An argument cannot work, or the columns of the sources differ.
    """

    def __init__(
        self,
        sources: Mapping[str, Dataset],
        weights: GivenWeights = None,
        name_column: str | None = None,
        *,
        schedule: Mapping[int, Mapping[str, Any] | Sequence[Any]] | None = None,
        ramp: bool = False,
        **order: Any,
    ) -> None:
        if not sources:
            raise ConfigError("a mixture needs at least one source")
        self.names = tuple(sources)
        self._order, self._name_column = order, name_column
        self._hold(tuple(sources.values()))
        self._used = _Weights()
        self.set_weights(weights, schedule=schedule, ramp=ramp)

    def _hold(self, datasets: Sequence[Dataset]) -> None:
        """Have the rows of these datasets."""
        self._datasets = tuple(datasets)
        self.schema: pa.Schema = self._datasets[0].schema
        self._first_groups = np.cumsum([0, *(len(each.row_groups) for each in self._datasets)]).tolist()
        self._first_rows: npt.NDArray[np.int64] = np.cumsum([0, *map(len, self._datasets)])
        self._sources = IntervalIndex(self._first_rows)
        self.num_rows = int(self._first_rows[-1])
        if self._name_column is not None:
            self.computed = {self._name_column: self._sources_of}
        self._check_columns(self._name_column)
        self.rowstore = self._row_store()

    @property
    def weights(self) -> Weights:
        """The weights as the smallest integers of the same proportion; or a `Schedule`: rows, weights, ramp."""
        return self._used.current

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._used.current = weights

    @property
    def earlier_weights(self) -> tuple[Weights, ...]:
        """The latest `MOST_WEIGHTS` weights, the current ones first. States of many sources have their digests."""
        return self._used.latest

    @property
    def known_failure(self) -> str | None:
        """Why a function of `map` is known to fail with a row; None: it is not."""
        return next((each.known_failure for each in self._datasets if each.known_failure is not None), None)

    def skipping(self) -> Mixture:
        """Return the same rows and weights; see `Dataset.skipping`.

        Raises:
            ConfigError: Only some of the sources are mapped.
        """
        mapped = [name for name, each in zip(self.names, self._datasets, strict=True) if each.stages]
        if not mapped:
            return self
        if others := [name for name in self.names if name not in mapped]:
            raise ConfigError(
                f'on_error="skip": source {mapped[0]!r} is mapped, and {others[0]!r} is not: map all sources or none, '
                "such as by a function that returns its batch"
            )
        found = copy.copy(self)  # set_weights of the mixture holds for the loader, too.
        found._datasets = tuple(each.skipping() for each in self._datasets)  # noqa: SLF001
        found.rowstore = found._row_store()  # noqa: SLF001
        return found

    def reopened(self) -> Mixture:
        """Return the mixture of the newest snapshots of its sources. See `refresh`."""
        newest = [each.reopened() for each in self._datasets]
        pairs = zip(newest, self._datasets, strict=True)
        return self.over([new if new.fingerprint != old.fingerprint else old for new, old in pairs])

    def over(self, datasets: Sequence[Dataset]) -> Mixture:
        """Return the same mixture of other datasets, whose weights `set_weights` of either of them sets."""
        found = copy.copy(self)
        found._hold(datasets)  # noqa: SLF001
        return found

    @property
    def by_rows(self) -> bool:
        """Whether the weights are the rows of each source because no others were given."""
        return self._used.by_rows

    def follow(self, former: Mixture) -> None:
        """Follow the same mixture at another snapshot, whose weights this one has: those by rows are others here."""
        if self.by_rows and former.weights == weights_of(list(map(len, former.datasets))):
            self.set_weights(None)

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The datasets of the sources."""
        return self._datasets

    @property
    def sources(self) -> tuple[MixtureSource, ...]:
        """The sources as the sampler takes them."""
        return tuple(
            MixtureSource(dataset.block_lengths, name, dataset.order_key.encode())
            for name, dataset in zip(self.names, self._datasets, strict=True)
        )

    @property
    def order(self) -> dict[str, Any]:
        """The arguments of `MixtureSampler` that the mixture determines."""
        return {**self._order, "weights": self.weights}

    @property
    def fingerprint(self) -> str:
        """Hex digest of the names and the fingerprints of the sources."""
        parts = [[name, dataset.fingerprint] for name, dataset in zip(self.names, self._datasets, strict=True)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @property
    def order_key(self) -> str:
        """Hex digest of the names and the order keys of the sources; see `Dataset.order_key`."""
        parts = [[source.name, source.dataset_key.decode()] for source in self.sources]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        each = zip(*knots(self.weights).weights, strict=True)  # the weights of each source
        sources = few(
            f"{name}: {counted(len(dataset), 'row')}, weight {_weight_text(weights)}"
            for name, dataset, weights in zip(self.names, self._datasets, each, strict=True)
        )
        if (changes := changes_of(self.weights)) is not None:
            sources += f"; weights {changes}"
        return f"Mixture({sources}; {columns_text(self.schema)}; {cache_text(self._datasets[0].blocks.tier)})"

    def set_weights(
        self,
        weights: GivenWeights = None,
        *,
        schedule: Mapping[int, Mapping[str, Any] | Sequence[Any]] | None = None,
        ramp: bool = False,
    ) -> None:
        """Use other weights, in place of the weights and the schedule. Loaders follow at the start of their next epoch.

        The state of a loader has the weights of its epoch, and those of the next epoch if they are others. A state that
        is restored brings its weights with it. If it is of hundreds of sources it has digests of them: set the same
        weights before. All ranks must set the same weights; `fit` checks this.

        Args:
            weights: As for `mix`.
            schedule: As for `mix`.
            ramp: As for `mix`.

        Raises:
            ConfigError: A weight is not a positive, finite number, or names differ from those of the sources.
        """
        lengths = dict(zip(self.names, map(len, self._datasets), strict=True))
        exact = _weights_of(lengths, weights, schedule, ramp=ramp)
        # Without a shuffle, an order costs nothing to make. It raises for whatever the loader's order would raise for.
        rows = 1 if self._order.get("batching") == "homogeneous" else None
        order = MixtureOrder(self.sources, exact, **self._order, batch_rows=rows, shuffle=False)
        self._used.current, self._used.by_rows = order.weights, weights is None and schedule is None
        self._used.latest = tuple(dict.fromkeys((order.weights, *self.earlier_weights)))[:MOST_WEIGHTS]

    def _of_sources(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError("a mixture has the rows of its sources: filter, map, pack or split these, before mix")

    filter = map = flat_map = select = exclude = pack = split = _of_sources

    def rows_by_source(self, numbers: npt.NDArray[np.int64], sizes: Sequence[int]) -> list[dict[str, int]]:
        """Return the number of rows of each source, by name, in consecutive batches. See `MapStyle`."""
        shape = len(sizes), len(self.names)
        cells = self._sources_of(numbers)
        if len(sizes) > 1:
            cells += np.repeat(np.arange(shape[0]) * shape[1], sizes)
        counts = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
        return [dict(zip(self.names, batch, strict=True)) for batch in counts.tolist()]

    def rows_around(self, row: int) -> range:
        """Return the rows of the source that has a row."""
        source = int(self._sources_of(np.array([row]))[0])
        return range(int(self._first_rows[source]), int(self._first_rows[source + 1]))

    def source_of(self, group: int) -> str:
        """Return the name of a row group's source."""
        return self.names[bisect_right(self._first_groups, group) - 1]

    def _sources_of(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        return self._sources.find(numbers)

    def _located(self, rows: npt.NDArray[np.int64]) -> list[Location]:
        sources = self._sources_of(rows)
        by_source = np.argsort(sources, kind="stable")
        present, starts = np.unique(sources[by_source], return_index=True)
        found: list[Location] = []
        for source, places in zip(present.tolist(), np.split(by_source, starts[1:]), strict=True):
            found += self._datasets[source].locate(rows[places] - self._first_rows[source])
        return [found[position] for position in np.argsort(by_source).tolist()]

    def _row_store(self) -> RowStore:
        caches = [each.cached_row_groups(self.schema.names) for each in self._datasets]
        selected, selections = None, [each.stored_selection for each in self._datasets]
        if any(selection is not None for selection in selections):
            first_rows = np.cumsum([0, *(each.manifest.num_rows for each in self._datasets)])  # documents, if packed
            first_stored = np.cumsum([0, *(int(cache.plan.row_starts[-1]) for cache in caches)])
            selected = MixedSelectedRows(selections, first_rows, first_stored)
        capacity = 2 * sum(each.window for each in self._datasets)
        return self._datasets[0].store_of(self._datasets, RowGroups(caches), capacity, selected, by_use=True)

    def _check_columns(self, name_column: str | None) -> None:
        """Raise ConfigError unless the batches of all sources have the same columns of the same types."""
        first = {field.name: field for field in self._datasets[0].rowstore.layout.fields}
        if name_column is not None and (not isinstance(name_column, str) or not name_column):
            raise ConfigError(f"name_column={name_column!r} must be a string of at least one character")
        masks = {mask_name(field) for field in first.values()}
        if name_column in first.keys() | masks:
            kind = "a column of the sources" if name_column in first else "the name of a mask of nulls"
            raise ConfigError(f"name_column={name_column!r} is {kind}: choose another name")
        packing = self._datasets[0].packing
        for name, dataset in zip(self.names, self._datasets, strict=True):
            if repr(dataset.packing) != repr(packing):  # A pad may be NaN.
                here, there = _how_packed(packing, dataset.packing), _how_packed(dataset.packing, packing)
                raise ConfigError(
                    f"source {self.names[0]!r} is {here}, and {name!r} is {there}: pack all alike, before mix"
                )
        layouts = [dataset.rowstore.layout for dataset in self._datasets]
        check_same_columns(self.names, layouts, [dataset.schema for dataset in self._datasets])


@known_keywords(make_dataset)
def mix(
    sources: Mapping[str, Dataset | Source] | Sequence[Dataset | Source],
    weights: GivenWeights = None,
    *,
    schedule: Mapping[int, Mapping[str, Any] | Sequence[Any]] | None = None,
    ramp: bool = False,
    stop: Stop = "first_exhausted",
    batching: Batching = "mixed",
    num_rows: int | None = None,
    name_column: str | None = None,
    **dataset_options: Any,
) -> Mixture:
    """Return a mixture of datasets by weight, for `make_loader`.

    In each prefix of an epoch each source has its share of the rows, with an error of less than one row, or of less
    than `num_streams` rows. A source that is exhausted before the end of the epoch begins again in a new order: each of
    its rows comes once before any comes twice. The loader gives all guarantees of one dataset.

    Args:
        sources: Name -> dataset, or a source as `make_dataset` takes it. A sequence has the names "0", "1", …
        weights: A positive number for each source, by name or by position, in any unit. None: the rows of the sources.
        schedule: Row of the epoch -> weights from there on, for weights that change within an epoch, such as
            `{0: [3, 1], 100_000: [1, 1]}`. Weights may be 0 for a while. Without row 0, `weights` are those at the
            start. Each epoch begins at row 0 again. Rows count those of all ranks, and up to whole units where a
            source comes several rows at a time.
        ramp: True: the share of each source changes linearly from each row of the schedule to the next. False: at once.
        stop: "first_exhausted": an epoch ends before a source would repeat a row. "all_exhausted": an epoch ends when
            each row has come. Both are exact for weights by rows on one node; otherwise the epoch is shorter or longer
            by less than the distance between two rows of a source, so that its length is always the same. With several
            nodes or homogeneous batches, it is the distance between `num_streams` rows or batches, which is large for a
            very small source: a warning names it.
        batching: "mixed", or "homogeneous": all rows of a global batch are of one source, and quotas count batches.
        num_rows: Rows of an epoch, instead of `stop`.
        name_column: Name of a column to add to each batch: the number of each row's source, int64 Tensor[B].
        **dataset_options: Arguments of `make_dataset` and `CacheConfig`, for the sources that are not datasets.

    Raises:
        ConfigError: A weight or another argument cannot work, or the sources differ in a column. No row has been read.
        OriginError: A source cannot be read.
        DataError: A file or a column type is not supported.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> from dataload import make_loader, mix
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name in ("books", "code"):
        ...     pq.write_table(pa.table({"id": range(6)}), Path(folder.name) / f"{name}.parquet")
        >>> sources = {name: f"{folder.name}/{name}.parquet" for name in ("books", "code")}
        >>> mixture = mix(sources, {"books": 2, "code": 1}, name_column="source", cache=False)
        >>> mixture
        Mixture(books: 6 rows, weight 2, code: 6 rows, weight 1; id: int64; no cache)
        >>> [sorted(batch["source"].tolist()) for batch in make_loader(mixture, 3)]
        [[0, 0, 1], [0, 0, 1], [0, 0, 1]]
        >>> folder.cleanup()
    """
    if isinstance(sources, Mapping):
        given = dict(sources)
    elif isinstance(sources, Sequence) and not isinstance(sources, str):
        given = {str(number): source for number, source in enumerate(sources)}
    else:
        raise ConfigError("sources must be a mapping from names to datasets or URLs, or a list of these")
    if nested := [name for name, source in given.items() if isinstance(source, Mixture)]:
        raise ConfigError(f"source {nested[0]!r} is a mixture: name its own sources here, with weights of their own")
    if unnamed := [name for name in given if not isinstance(name, str)]:
        raise ConfigError(f"the name {unnamed[0]!r} of a source must be a string")
    check_choices(stop, batching)  # This and the next raise before any source is opened.
    _weights_of(dict.fromkeys(given, 1), weights, schedule, ramp=ramp)
    if given and dataset_options and all(isinstance(source, Dataset) for source in given.values()):
        raise ConfigError(f"{min(dataset_options)} cannot be combined with datasets: pass it to make_dataset")
    open_one = partial(_opened, options=dataset_options)
    opened = DaemonExecutor(SOURCES_AT_ONCE, "dataload-sources").map(open_one, given.values())
    datasets = dict(zip(given, opened, strict=True))
    order = {"stop": stop, "batching": batching, "num_rows": num_rows}
    return Mixture(datasets, weights, name_column, schedule=schedule, ramp=ramp, **order)


def _weight_text(weights: Sequence[int]) -> str:
    """Return the weights of a source, one after the other."""
    return " to ".join(map(str, weights if len(weights) <= SHOWN else [*weights[: SHOWN - 2], "…", weights[-1]]))


def _how_packed(packing: Packing | None, other: Packing | None) -> str:
    """Return how a source is packed, as far as another one is packed differently."""
    if packing is None or other is None:
        return "not packed" if packing is None else "packed"
    pairs = zip(vars(packing).items(), vars(other).values(), strict=True)
    return "packed with " + ", ".join(f"{name}={own!r}" for (name, own), its in pairs if repr(own) != repr(its))


def _weights_of(rows: Mapping[str, int], weights: GivenWeights, schedule: Any, *, ramp: bool) -> Weights | None:
    """Return the weights of sources of so many rows; None: they follow the rows. Arguments are those of `mix`."""
    if weights is None and schedule is None and not ramp:
        return None
    if weights is None and isinstance(schedule, Mapping) and 0 not in schedule:
        weights = rows
    return weights_of(weights, schedule, ramp=ramp, names=tuple(rows))


def _opened(source: Dataset | Source, options: Mapping[str, Any]) -> Dataset:
    return source if isinstance(source, Dataset) else make_dataset(source, **options)
