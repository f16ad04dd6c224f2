"""How a dataset was made of its source, so that other snapshots of it can be read alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.config import CacheConfig
from dataload.cache.origin.source import open_source
from dataload.catalog.footer_cache import FooterLocation
from dataload.catalog.manifest import Manifest, resolve
from dataload.catalog.sources import Source, source_paths
from dataload.catalog.tables import at_snapshot, is_table, read_table
from dataload.errors import ConfigError
from dataload.formats.hive_partitions import Partitioning
from dataload.formats.text import TextErrors

if TYPE_CHECKING:
    from collections.abc import Mapping


class Step(NamedTuple):
    """A call that made a dataset of another one.

    Attributes:
        name: The method of `Dataset`.
        argument: What it needs to be repeated: filters, or the rows to exclude.
    """

    name: str
    argument: Any = None


@dataclass(frozen=True)
class Opening:
    """The source of a dataset, and what was made of it.

    Attributes:
        source: As in `make_dataset`; None: this is a copy in another process, and the source has no name.
        storage_options: As in `make_dataset`.
        config: The cache.
        columns: As in `make_dataset`.
        partitioning: As in `make_dataset`.
        errors: As in `make_dataset`.
        steps: What was made of it, in order.
        base: All rows of the source.
    """

    source: Source | None
    storage_options: Mapping[str, Any] | None = field(repr=False)
    config: CacheConfig | None
    columns: list[str] | None
    partitioning: Partitioning
    errors: TextErrors
    steps: tuple[Step, ...] = ()
    base: Manifest | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out tables, which have connections, and what a copy can read again."""
        named = isinstance(self.source, str) or not is_table(self.source)
        return {**vars(self), "source": self.source if named else None, "base": None}

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
            return read_table(source, self.storage_options, self.config, self.columns, self.errors)
        paths = source_paths(source)
        blocks = Blocks.open(open_source(paths[0], dict(self.storage_options or {}) or None, paths[1:]), self.config)
        manifest = resolve(paths, blocks, self.columns, self.partitioning, self.errors, self._footers)
        return manifest, blocks, self.columns

    def _footers(self) -> dict[Object, FooterLocation]:
        """Return where the footers of known files are cached."""
        return {} if self.base is None else {group.file: group.footer_at for group in self.base.row_groups}

    def then(self, steps: Sequence[Step]) -> Opening:
        """Return the opening with further steps."""
        return replace(self, steps=(*self.steps, *steps)) if steps else self
