"""The calls that make a dataset, the first of which opens its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.config import CacheConfig
from dataload.cache.origin.source import checked_options, open_source
from dataload.catalog.footer_cache import FooterLocation
from dataload.catalog.inventory import KnownRows
from dataload.catalog.manifest import Manifest
from dataload.catalog.recipe import plain
from dataload.catalog.resolve import resolve
from dataload.catalog.sources import Source, source_paths
from dataload.catalog.tables import at_snapshot, is_table, read_table
from dataload.errors import ConfigError
from dataload.formats.hive_partitions import Partitioning
from dataload.formats.text import TextErrors
from dataload.runtime.cached_property import cached_property
from dataload.runtime.collection import rare_collections


class Call(NamedTuple):
    """A call that made a dataset. `dataload.lineage` tells how each is made again.

    Attributes:
        name: "make_dataset", or a method of `Dataset`.
        given: What it was given, or what stands for that: an `Opening`, filters, rows as JSON, …
    """

    name: str
    given: Any


class Excluded(NamedTuple):
    """The rows that `exclude` was given.

    Attributes:
        numbers: Their numbers, as JSON.
        known: The rows by file, and those of files that other snapshots have.
    """

    numbers: Any
    known: KnownRows


USUAL: Mapping[str, Any] = {
    "columns": None,
    "fill_null": None,
    "null_masks": False,
    "errors": "raise",
    "partitioning": "hive",
}
"""The arguments of `make_dataset` that decide rows and values, beside `source`, and their defaults."""


@dataclass(frozen=True)
class Opening:
    """What `make_dataset` was given.

    Attributes:
        source: As in `make_dataset`; None: this is a copy in another process, and the source has no name.
        storage_options: As in `make_dataset`.
        config: The cache.
        columns: As in `make_dataset`.
        fill_null: As in `make_dataset`.
        null_masks: As in `make_dataset`.
        errors: As in `make_dataset`.
        partitioning: As in `make_dataset`.
        base: All rows of the snapshot that was opened; None: this is a copy in another process.
        found: What was opened, without credentials: "source", the version of a table or the paths; "columns", also
            those that a scan selects; and "fill_null", by the names of that version.
    """

    source: Source | None = field(repr=False)
    storage_options: Mapping[str, Any] | None = field(repr=False)
    config: CacheConfig | None
    columns: list[str] | None
    fill_null: Any
    null_masks: bool
    errors: TextErrors
    partitioning: Partitioning
    base: Manifest | None = None
    found: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ConfigError as `checked_options` does."""
        checked_options(self.storage_options)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out tables, which have connections, and what a copy can read again."""
        named = isinstance(self.source, str) or not is_table(self.source)
        kept = vars(self).copy()
        kept.pop("_snapshot", None)
        return {**kept, "source": self.source if named else None, "base": None}

    @rare_collections()
    def open(self, version: str | None = None, *, newest: bool = False) -> tuple[Manifest, Blocks, list[str] | None]:
        """Return all rows of the source, a reader of its files, and the columns that are read; None: all.

        Args:
            version: Of a table, the version; None: that of the source.
            newest: Whether the version is the newest one that a table has now.

        Raises:
            ConfigError, DataError, OriginError: As `make_dataset` raises them.
        """
        source = self.source
        if source is None:
            raise ConfigError("this dataset is a copy of another process, which has the table: refresh it there")
        if is_table(source):
            if newest or version is not None:
                source = at_snapshot(source, version, self.storage_options)
            if version is None:
                return read_table(source, self.storage_options, self.config, self.columns, self.errors)
            manifest, blocks, _ = read_table(source, self.storage_options, self.config, None, self.errors)
            return manifest, blocks, [*chain.from_iterable(self.names_in(manifest).values())] or None
        paths = source_paths(source)
        blocks = Blocks.open(open_source(paths[0], self.storage_options, paths[1:]), self.config)
        manifest = resolve(paths, blocks, self.columns, self.partitioning, self.errors, self._footers)
        return manifest, blocks, self.columns

    def names_in(self, other: Manifest) -> dict[str, list[str]]:
        """Return what another version of the table calls each column that is named here; nothing for one it lacks."""
        columns = self.found.get("columns", self.columns) or ()
        if not columns or self._snapshot is None or (called := self._called_in(other)) is None:
            return {name: [name] for name in columns}
        return {name: [called[each] for each in self._snapshot.select([name]) if each in called] for name in columns}

    def fill_null_in(self, other: Manifest) -> Any:
        """Return `fill_null` by the names of another version of the table."""
        own = self.found.get("fill_null", self.fill_null)
        if not isinstance(own, Mapping) or (called := self._called_in(other)) is None:
            return own
        return {called[name]: value for name, value in own.items() if name in called}

    def _called_in(self, other: Manifest) -> dict[str, str] | None:
        """Return what another version of the table calls the columns that both have; None: the same."""
        own = None if self._snapshot is None else self._snapshot.table
        return None if own is None or other.table is None else own.called_in(other.table)

    @cached_property
    def _snapshot(self) -> Manifest | None:
        """The base. In a copy in another process, the version of a table that was opened, again; None for files."""
        if self.base is not None or self.source is None or not is_table(self.source) or not self.found:
            return self.base
        source = at_snapshot(self.source, self.found["source"].rpartition("@")[2], self.storage_options)
        return read_table(source, self.storage_options, self.config, None, self.errors)[0]

    def _footers(self) -> dict[Object, FooterLocation]:
        """Return where the footers of known files are cached."""
        return {} if self.base is None else {group.file: group.footer_at for group in self.base.row_groups}

    def to_json(self) -> dict[str, Any]:
        """Return the source and the arguments that are not the usual ones, without credentials."""
        given = {**{name: getattr(self, name) for name in USUAL}, **self.found}
        values = {name: plain(value) for name, value in given.items()}
        return {name: value for name, value in values.items() if value != USUAL.get(name)}
