"""One call of `Dataset.map`: its function, and the rows and columns that it makes."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.catalog.manifest import Manifest
from dataload.catalog.selection import Selection
from dataload.errors import ConfigError
from dataload.formats.schema import ERRORS, Field, Layout, needs_mask
from dataload.formats.schema import mask_name as mask_of
from dataload.formats.text import TextErrors
from dataload.mapping.identity import find_code, identity, name_of
from dataload.mapping.pickling import dumps
from dataload.mapping.sources import Sources, add_cells
from dataload.runtime.cached_property import cached_property

if TYPE_CHECKING:
    from dataload.mapping.forms import Made
    from dataload.mapping.running import Function, Runner

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class UserFunction:
    """The user's function, with its identity. It can be pickled if cloudpickle can pickle the function.

    Args:
        call: The function.
        version: Its version, which stands for what its identity cannot cover; None: it covers all.
        digest: Its identity.
        sources: The sources of the function, and of the functions and classes that it refers to.
    """

    call: Function
    version: Any
    digest: str
    sources: Sources = field(default_factory=Sources, compare=False)

    @classmethod
    def of(cls, call: Function, version: Any) -> UserFunction:
        """Return a function with its identity.

        Raises:
            ConfigError: It cannot be called, it needs a version, or its version or name cannot identify it.
        """
        if not callable(call):
            raise ConfigError(f"map needs a function, not {call!r}")
        if version is not None:
            _check_version(version, name_of(call))
        return cls(call, version, identity(call, version, sources := Sources()), sources)

    @property
    def is_same(self) -> bool:
        """Whether the function, and what it refers to, still have the identity."""
        return self.version is not None or identity(self.call, None, self.sources) == self.digest

    def check_same(self, known: Mapping[str, AbstractSet[str]] | None = None) -> None:
        """Raise ConfigError if the function, or an object that it refers to, has changed.

        Args:
            known: The sources of the process that called `map`. They tell whether code has changed under a version.
        """
        found = self.sources.found if known else {}
        is_changed = any(not found[name] <= texts for name, texts in (known or {}).items() if name in found)
        if is_changed or not self.is_same:
            raise ConfigError(
                f"{self.name}, or something that it refers to, has changed since map was called: call map again, or "
                "start the program again if a file has changed"
            )

    @property
    def name(self) -> str:
        """The qualified name, for people."""
        return name_of(self.call)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            data = dumps(self.call, *self.sources.texts())
        except Exception as error:
            raise ConfigError(
                f"map {self.name}: another process cannot get the function ({type(error).__name__}: {error}): make "
                "that object inside the function"
            ) from error
        known = None if self.version is None else self.sources.found
        return _unpickled, (data, self.version, self.digest, self.sources.cells, known)


def _check_version(version: Any, name: str) -> None:
    """Raise ConfigError unless the representation of a version, and the name of a function, tell it from others."""
    values = [version]
    for value in values:
        if type(value) is tuple:
            values += value
        elif type(value) not in (str, bytes, int, float, bool, type(None)):
            raise ConfigError(
                f"version= has a {type(value).__qualname__}: pass a string, a number, or a tuple of them, that changes "
                "with the function's results, such as a hash of a model's weights"
            )
    if name.endswith("<lambda>"):
        raise ConfigError(f"map with version= needs a function with a name, but every lambda is {name!r}: use def")


def _unpickled(
    data: bytes, version: Any, digest: str, cells: Mapping[str, str], known: Mapping[str, AbstractSet[str]] | None
) -> UserFunction:
    """Return a function of another process. Functions of modules are imported, so their files may have changed."""
    add_cells(cells)
    call, *texts = pickle.loads(data)  # noqa: S301 (of the training process)
    function = UserFunction(call, version, digest, Sources(*texts))
    if known is not None:
        find_code(function.call, function.sources)
    function.check_same(known)
    function.sources.forget()
    return function


@dataclass(frozen=True)
class Counts:
    """How many rows a function of `flat_map` makes.

    Args:
        ratio: Rows that it makes of a row of the sample, on average.
        rows: Rows that it makes of each row group, int64 [row groups]; None: they are not counted yet.
    """

    ratio: float
    rows: Array | None = None

    def of(self, given: Array) -> list[int]:
        """Return the rows of each row group, or an estimate, for the rows that the function gets: int64 [groups]."""
        found = np.ceil(given * self.ratio).astype(np.int64) if self.rows is None else self.rows
        counts: list[int] = found.tolist()
        return counts


@dataclass(frozen=True)
class Stage:
    """A map of a dataset.

    Args:
        function: The function.
        columns: Names of the columns that the function gets; None: all.
        processes: Number of processes that call the function; None: it is called in threads.
        manifest: The rows that are mapped.
        schema: The mapped columns.
        row_bytes: Mean bytes of a value, by column.
        made: Names of the columns that the function returns, in which members of structs are columns.
        masks: Names of the columns that mark the nulls of these.
        fill_null: Replacement of their nulls.
        failed: Why the function failed with a row of the sample; None: it did not.
        skips: Whether rows with which the function fails are stored as errors. Otherwise they end the loop.
        errors: What to do about text that is not UTF-8.
        counts: How many rows `flat_map` makes; None: it is `map`, which makes one of each.
    """

    function: UserFunction
    columns: tuple[str, ...] | None
    processes: int | None
    manifest: Manifest
    schema: pa.Schema
    row_bytes: Mapping[str, float]
    made: tuple[str, ...]
    masks: tuple[str, ...] = ()
    fill_null: Any = None
    failed: str | None = None
    skips: bool = False
    errors: TextErrors = "raise"
    counts: Counts | None = field(default=None, compare=False)

    @property
    def is_flat(self) -> bool:
        """Whether the function makes more or fewer rows than it gets."""
        return self.counts is not None

    @property
    def title(self) -> str:
        """What was called, and the name of the function, for messages."""
        return f"{'flat_map' if self.is_flat else 'map'} {self.function.name}"

    @property
    def stored_schema(self) -> pa.Schema:
        """The columns that are stored."""
        return self.schema.append(ERRORS) if self.skips else self.schema

    @property
    def key(self) -> str:
        """Digest of the function and of the columns that it gets."""
        return key_of(self.function, self.columns, is_flat=self.is_flat)

    @property
    def selection(self) -> Selection | None:
        """The rows that are mapped of each row group; None: all."""
        return self.manifest.selection

    @property
    def stored_selection(self) -> Selection | None:
        """Which rows of each row group are stored, among those that its numbers count; None: all."""
        return None if self.is_flat else self.manifest.selection

    def only(self, manifest: Manifest) -> Stage:
        """Return the map of the row groups of another manifest, which has no others."""
        groups = {(group.file.path, group.number): number for number, group in enumerate(self.manifest.row_groups)}
        chosen = [groups[group.file.path, group.number] for group in manifest.row_groups]
        counts = self.counts
        if counts is not None and counts.rows is not None:
            counts = replace(counts, rows=counts.rows[sorted(chosen)])
        return replace(self, manifest=self.manifest.only(chosen), counts=counts)

    def runner(self, fields: Sequence[Field]) -> Runner:
        """Return what calls the function with rows of these columns."""
        from dataload.mapping.running import Runner  # imports torch, which most background decoders do not need

        given, kept = given_and_kept(fields, self.columns, is_flat=self.is_flat)
        return Runner(self.function.call, given, kept, self.schema, is_flat=self.is_flat, errors=self.errors)

    @cached_property
    def makes(self) -> Made:
        """The columns that the function makes."""
        from dataload.mapping.forms import Made

        schema = pa.schema([self.schema.field(name) for name in self.made])
        return Made(schema, self.masks, self.fill_null, self.skips, self.errors)

    def stored(self) -> Manifest:
        """Return the mapped rows as a dataset: its row groups have these rows and no others."""
        given = self.manifest.block_lengths
        counts = given.tolist() if self.counts is None else self.counts.of(given)
        whole = Manifest(self.stored_schema, (), self.manifest.fingerprint)
        groups = tuple(
            replace(
                group,
                rows=rows,
                sizes=tuple(round(self.row_bytes.get(name, 0.0) * rows) for name in whole.ragged),
                constants=(),
            )
            for group, rows in zip(self.manifest.row_groups, counts, strict=True)
        )
        return replace(whole, row_groups=groups)

    def flattened(self, fingerprint: str) -> Manifest:
        """Return the rows that `flat_map` makes as rows of the files: each row group has as many as were counted."""
        assert self.counts is not None
        rows = self.counts.of(self.manifest.block_lengths)
        groups = (replace(group, rows=count) for group, count in zip(self.manifest.row_groups, rows, strict=True))
        return replace(self.manifest, row_groups=tuple(groups), fingerprint=fingerprint, selection=None)


def key_of(function: UserFunction, columns: Sequence[str] | None, *, is_flat: bool = False) -> str:
    """Return a digest of a function and of the columns that it gets."""
    content = [function.digest, None if columns is None else list(columns), *(["flat"] if is_flat else [])]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16, person=b"map").hexdigest()


def fingerprint_of(manifest: Manifest, stages: Sequence[Stage], last: str | None = None) -> str:
    """Return the fingerprint of a dataset that is mapped by these stages, one after the other.

    Args:
        manifest: The rows.
        stages: The stages.
        last: The key of a further stage, or None.
    """
    keys = [*(stage.key for stage in stages[up_to_flat(stages) :]), *([] if last is None else [last])]
    if not keys:  # The fingerprint of flat rows covers the maps that made them.
        return manifest.fingerprint
    content = [manifest.fingerprint, *keys]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16, person=b"mapped").hexdigest()


def up_to_flat(stages: Sequence[Stage]) -> int:
    """Return how many stages there are up to the last one of `flat_map`, which made the rows of the manifest."""
    return max((number for number, stage in enumerate(stages, 1) if stage.is_flat), default=0)


def order_key_of(manifest: Manifest) -> str:
    """Return the digest of a dataset that decides the order of its rows. Copies of the files elsewhere have the same.

    It covers the files' sizes, their footers, and their names below the folder that they share, the row groups, the
    selected rows, and what a table calls its columns: a version that renames some has other values in the same rows.
    Nodes may have copies of their own, so it covers neither that folder nor versions. It covers no maps, so that ranks
    read each row once even if their maps differ, which only `fit` refuses.
    """
    paths = {group.file.path: group.file.stable_path for group in manifest.row_groups}
    folders = [path[: path.rfind("/") + 1] for path in paths.values()]
    shared = os.path.commonprefix(folders).rfind("/") + 1  # noqa: RUF071 (it is cut at a slash)
    groups = [
        [paths[group.file.path][shared:], group.file.size, group.mark, group.number, group.rows, group.constants]
        for group in manifest.row_groups
    ]
    selected = None if manifest.selection is None else manifest.selection.digest
    table = manifest.table
    content = [groups, selected, *([] if table is None else [table.digest])]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16, person=b"order").hexdigest()


def given_and_kept(
    fields: Sequence[Field], columns: Sequence[str] | None, *, is_flat: bool = False
) -> tuple[list[str], list[Field]]:
    """Return the names of the columns that a function gets, and the other columns. `flat_map` keeps no others.

    The mask of a column goes with it.
    """
    fields = [field for field in fields if field.kind != "error"]
    if columns is None:
        return [field.name for field in fields], []
    chosen = {*columns}
    masks = {mask_of(field) for field in fields if field.name in chosen and needs_mask(field)}
    chosen.update(field.name for field in fields if field.kind == "mask" and field.name in masks)
    given = [field.name for field in fields if field.name in chosen]
    return given, [] if is_flat else [field for field in fields if field.name not in chosen]


def schema_of(source: pa.Schema, layout: Layout, kept: Sequence[Field], made: pa.Schema) -> pa.Schema:
    """Return the schema of mapped rows: the columns of the source in their order, then new ones.

    Args:
        source: Schema of the source.
        layout: Its columns with their masks.
        kept: The columns that the function did not get.
        made: The columns that it returned, and their masks.
    """
    names, returned = {each.name for each in kept}, set(made.names)
    fields = []
    for each in layout.fields:
        if each.name in returned:
            fields.append(made.field(each.name))
        elif each.name in names:
            fields.append(pa.field(each.name, pa.bool_()) if each.kind == "mask" else source.field(each.name))
    known = {each.name for each in fields}
    return pa.schema([*fields, *(field for field in made if field.name not in known)])
