"""Tables as sources: a snapshot of a Delta or an Iceberg table becomes a manifest.

The table's own library reads the metadata: which files a version has, what they call the columns, and which of their
rows are deleted. The files are read as those of any dataset, through the cache.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.config import CacheConfig
from dataload.cache.origin.source import open_source
from dataload.cache.origin.version import OF_TABLE
from dataload.catalog.footer_cache import FooterLocation, Metadata
from dataload.catalog.manifest import VERSION, Manifest
from dataload.catalog.resolve import manifest_of
from dataload.catalog.selection import Mask, Selection
from dataload.catalog.sources import TABLE_URLS
from dataload.catalog.table_options import scheme_of
from dataload.errors import ConfigError, DataError
from dataload.formats.arrow_types import is_bytes, is_text
from dataload.formats.hive_partitions import Constants
from dataload.formats.table_columns import TableColumns, TableFile
from dataload.formats.text import TextErrors
from dataload.runtime.redact import redacted
from dataload.runtime.text import counted

if TYPE_CHECKING:
    import pyarrow.compute as pc

DELTA_URL, ICEBERG_URL = TABLE_URLS

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FileOfTable:
    """A file of a snapshot, as the metadata of the table have it.

    Attributes:
        url: Its URL or path.
        size: Its size in bytes.
        stamp: A text that differs if a file of the same name has been written again; "" if the table says none.
        constants: As for `TableFile`.
    """

    url: str
    size: int
    stamp: str = ""
    constants: Constants = ()


@dataclass(frozen=True)
class Snapshot:
    """One version of a table.

    Attributes:
        url: The URL that opens it again, without credentials.
        version: What tells it from other versions of the table.
        root: URL of the table's folder.
        files: Its files.
        columns: Its columns.
        earlier: The versions before it, the newest first; perhaps not all.
        deleted: By file, the rows of it that the table has deleted, ascending.
        storage_options: Options of fsspec for the files, as the table has them.
        chosen: The names of the columns that are read; None: all.
        filters: An expression that holds in the rows that are read; None: all are.
        undecided: Returns one of the columns that a file lacks if the filters do not tell which of its rows are read.
    """

    url: str
    version: int
    root: str
    files: Sequence[FileOfTable]
    columns: TableColumns
    earlier: Sequence[int] = ()
    deleted: Mapping[str, Positions] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    chosen: Sequence[str] | None = None
    filters: pc.Expression | None = None
    undecided: Callable[[frozenset[str]], str | None] | None = None


def is_table(source: object) -> bool:
    """Return whether a source is a table, or the URL of one."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source).startswith(TABLE_URLS)
    return _is_of("deltalake", "DeltaTable", source) or _is_of_iceberg(source)


def snapshot_of(source: Any, storage_options: Mapping[str, Any] | None) -> Snapshot:
    """Return the snapshot that a table, its scan or its URL names.

    Raises:
        ConfigError: There is no such version, or the package that reads such tables is not installed.
        OriginError: The catalog or the store fails.
        DataError: The table has a feature that cannot be applied.
    """
    # Each needs a package that few programs have.
    if _is_of("deltalake", "DeltaTable", source) or str(source).startswith(DELTA_URL):
        from dataload.catalog.delta import delta_snapshot

        return delta_snapshot(source, storage_options)
    from dataload.catalog.iceberg import iceberg_snapshot

    return iceberg_snapshot(source, storage_options)


def folder_of(url: str) -> str:
    """Return the URL of the folder of a table that a URL names.

    Raises:
        ConfigError: As for `snapshot_of`.
        OriginError: The catalog fails.
    """
    if url.startswith(DELTA_URL):
        return at_version(url.removeprefix(DELTA_URL))[0]
    from dataload.catalog.iceberg import location_of

    return location_of(url)


def at_snapshot(source: Any, version: str | None, storage_options: Mapping[str, Any] | None) -> Any:
    """Return a table as a source at another version; None: the one that it has now, by the name of the source.

    Raises:
        ConfigError: There is no such version, or the catalog of a table is not known.
        OriginError: The catalog or the store fails.
    """
    if isinstance(source, (str, os.PathLike)):
        url = os.fspath(source)
        table = at_version(url)[0] if url.startswith(DELTA_URL) else url.partition("@")[0]  # "@main" names a branch
        return url if version is None else f"{table}@{version}"
    if _is_of("deltalake", "DeltaTable", source):
        from dataload.catalog.delta import delta_at

        return delta_at(source, version, storage_options)
    from dataload.catalog.iceberg import iceberg_at

    return iceberg_at(source, version)


def read_table(
    source: Any,
    storage_options: Mapping[str, Any] | None,
    config: CacheConfig | None,
    columns: list[str] | None = None,
    errors: TextErrors = "raise",
) -> tuple[Manifest, Blocks, list[str] | None]:
    """Return the rows of a table, a reader of its files, and the columns that are read; None: all.

    Args:
        source: The table, its scan or its URL.
        storage_options: As in `make_dataset`.
        config: The cache.
        columns: As in `make_dataset`.
        errors: As in `make_dataset`.

    Raises:
        ConfigError: As for `snapshot_of`; or both the scan and the caller choose columns.
        DataError: As for `snapshot_of` and `manifest_of_table`.
        OriginError: As for these.
    """
    snapshot = snapshot_of(source, storage_options)
    if columns is not None and snapshot.chosen is not None:
        raise ConfigError("the scan selects columns, and columns= too: select them in one place")
    blocks, files = open_table(snapshot, storage_options, config)
    manifest = manifest_of_table(snapshot, blocks, files, errors)
    chosen = columns if snapshot.chosen is None else list(snapshot.chosen)
    return manifest, blocks, chosen


def open_table(
    snapshot: Snapshot,
    storage_options: Mapping[str, Any] | None,
    config: CacheConfig | None,
) -> tuple[Blocks, list[TableFile]]:
    """Return a reader of the files of a snapshot, and the files.

    Args:
        snapshot: The snapshot.
        storage_options: Options of fsspec; None: those that the table has.
        config: The cache.

    Raises:
        ConfigError: The options cannot work, or the files are in several stores.
        DataError: The snapshot has no files.
    """
    if not snapshot.files:
        what = "name a version that has some" if snapshot.filters is None else "none may match the scan's row filter"
        raise DataError(f"{snapshot.url} has no files, so no rows: {what}")
    for each in snapshot.files:  # The log of a table may come from anybody who writes to its store.
        if scheme_of(each.url) != scheme_of(snapshot.root):
            raise DataError(
                f"{snapshot.url} names the file {redacted(each.url)}, which is not in the store of the table: if you "
                "trust it, copy the file there"
            )
    first, *others = {_store_of(each.url): each.url for each in snapshot.files}.values()
    options = dict(snapshot.storage_options if storage_options is None else storage_options)
    blocks = Blocks.open(open_source(first, options, others), config)
    path_of = _paths(snapshot, blocks)
    files = [
        TableFile(
            path_of(each.url),
            each.size,
            f"{OF_TABLE}{each.stamp or each.size}",
            columns=snapshot.columns,
            constants=each.constants,
        )
        for each in snapshot.files
    ]
    if twice := next((one.name for one, other in pairwise(files) if one.path == other.path), None):
        raise DataError(f"{snapshot.url} lists {twice} twice, so its rows come twice: delete one of the two entries")
    return blocks, files


def manifest_of_table(
    snapshot: Snapshot,
    blocks: Blocks,
    files: Sequence[TableFile],
    errors: TextErrors = "raise",
    progress: Callable[[Object], object] = lambda _: None,
) -> Manifest:
    """Return the manifest of a snapshot: its rows, without those that are deleted.

    Args:
        snapshot: The snapshot.
        blocks: Reads the files through the cache.
        files: As `open_table` returned them.
        errors: As in `make_dataset`.
        progress: As for `manifest_of`.

    Raises:
        DataError: A file is not as the table says, or all rows are deleted.
        OriginError: The origin failed.
    """
    is_new = False

    def known() -> dict[Object, FooterLocation]:
        nonlocal is_new
        is_new = True
        return _known_footers(snapshot, blocks, files)

    manifest = manifest_of(dict.fromkeys(files, ()), blocks, progress, errors, known)
    if is_new and snapshot.filters is None:
        _files_at(snapshot, snapshot.version, blocks).get_or_make(lambda: _listed(manifest))
    manifest = manifest.at(snapshot.url, snapshot.version)
    if snapshot.deleted:
        path_of = _paths(snapshot, blocks)
        deleted = {path_of(url): rows for url, rows in snapshot.deleted.items()}
        if others := deleted.keys() - {file.path for file in files}:
            raise DataError(f"{snapshot.url} deletes rows of {redacted(min(others))}, which is none of its files")
        manifest = manifest.selected(Selection.of(_kept(manifest, deleted)))
    if not manifest.num_rows:
        raise DataError(f"{snapshot.url} has no rows: all are deleted, or its files are empty")
    if snapshot.filters is not None:
        from dataload.catalog.filtering import narrow  # imports pyarrow.dataset, which few programs need

        _check_decided(snapshot, manifest)
        manifest = narrow(manifest, blocks, snapshot.filters, errors=errors, name="row_filter")
    return manifest


def _check_decided(snapshot: Snapshot, manifest: Manifest) -> None:
    """Raise ConfigError if the filters of a scan do not tell which rows of a file without some columns are read."""
    if snapshot.undecided is None:
        return
    files = {
        frozenset(name for name, value in group.constants if value is None): group.file for group in manifest.row_groups
    }
    for lacked, file in files.items():
        if (name := snapshot.undecided(lacked)) is not None:
            raise ConfigError(
                f"{snapshot.url}: the row_filter leaves open whether rows without a value of {name!r} are read, and "
                f"{file.name} lacks it: add `and {name} is not null` to that condition, or `or {name} is null`"
            )


def _store_of(url: str) -> str:
    """Return the beginning of a URL, up to its bucket; "" of a path."""
    return "/".join(url.split("/", 3)[:3]) if "://" in url else ""


def _paths(snapshot: Snapshot, blocks: Blocks) -> Callable[[str], str]:
    """Return what returns the path of a file's URL at the origin. fsspec itself would take seconds for all files."""
    root, path_of = f"{snapshot.root}/", blocks.origin.path_of
    folder = path_of(snapshot.root) + "/"
    return lambda url: folder + url.removeprefix(root) if url.startswith(root) else path_of(url)


def _known_footers(snapshot: Snapshot, blocks: Blocks, files: Sequence[TableFile]) -> dict[Object, FooterLocation]:
    """Return where the newest earlier version of a table that this host has read has the footers of files."""
    for version in snapshot.earlier:
        if (found := _files_at(snapshot, version, blocks).get()) is not None:
            places = {(path, size, stamp): place for path, size, stamp, *place in found}
            named = ((file, places.get((file.path, file.size, file.version))) for file in files)
            return {file: FooterLocation(Object(place[0], 0, place[1]), place[2]) for file, place in named if place}
    return {}


def _files_at(snapshot: Snapshot, version: int, blocks: Blocks) -> Metadata[list[Any]]:
    """Return the cached list of the files of a version, and of where their footers are cached."""
    table = Object(blocks.origin.path_of(snapshot.root), 0, f"{OF_TABLE}{version}")
    return Metadata(blocks, table, f"files {VERSION}", lambda data: _checked(json.loads(bytes(data))))


def _listed(manifest: Manifest) -> bytes:
    places = {group.file: group.footer_at for group in manifest.row_groups}
    content = [
        [file.path, file.size, file.version, place.run.path, place.run.version, place.number]
        for file, place in places.items()
    ]
    return json.dumps(content, separators=(",", ":")).encode()


def _checked(listed: Any) -> list[Any]:
    if not all(list(map(type, each)) == [str, int, str, str, str, int] and each[-1] >= 0 for each in listed):
        raise ValueError("no list of files and footers")
    return list(listed)


def _kept(manifest: Manifest, deleted: Mapping[str, Positions]) -> Iterable[Mask]:
    """Yield which rows of each row group the table has."""
    file, first = "", 0
    for group in manifest.row_groups:  # Those of a file follow each other, and all of them are there.
        if group.file.path != file:
            _check_end(file, first, deleted)
            file, first = group.file.path, 0
        mask = np.ones(group.rows, np.bool_)
        if (rows := deleted.get(file)) is not None:
            start, stop = np.searchsorted(rows, [first, first + group.rows])
            mask[rows[start:stop] - first] = False
        first += group.rows
        yield mask
    _check_end(file, first, deleted)


def _check_end(file: str, rows: int, deleted: Mapping[str, Positions]) -> None:
    found = deleted.get(file)
    if found is not None and found.size and (found[0] < 0 or found[-1] >= rows):
        raise DataError(
            f"{file} has {counted(rows, 'row')}, and its table deletes row {found[-1]} of it: the delete file or the "
            "data file is damaged, or not that of the table"
        )


def text_of(values: pa.Array | pa.ChunkedArray) -> list[int | str | None]:
    """Return values of one type as `hive_partitions.constant` takes them."""
    kind = values.type
    if pa.types.is_time(kind):
        return list(values.cast(pa.int64() if kind.bit_width == 64 else pa.int32()).to_pylist())
    if isinstance(kind, pa.BaseExtensionType):
        values, kind = (
            values.storage if isinstance(values, pa.Array) else values.cast(kind.storage_type),
            kind.storage_type,
        )
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind):
        return list(values.to_pylist())
    if is_bytes(kind):
        return [None if value is None else value.decode("latin-1") for value in values.to_pylist()]
    return list(values.cast(pa.string()).to_pylist())


def shown(url: str) -> str:
    """Return the URL of a table without credentials."""
    return redacted(url) if "://" in url else url


def at_version(url: str) -> tuple[str, str | None]:
    """Return the URL of a table, and the number that it names behind an "@"; None: it names none."""
    table, _, version = url.rpartition("@")
    return (table, version) if table and version.isdecimal() else (url, None)


def _is_of(package: str, name: str, source: object) -> bool:
    """Return whether an object is of a class of a package, or of one that derives from it, without importing it."""
    found = getattr(sys.modules.get(package), name, None)
    return isinstance(found, type) and isinstance(source, found)


def _is_of_iceberg(source: object) -> bool:
    return any(_is_of("pyiceberg.table", name, source) for name in ("Table", "BaseScan", "TableScan"))
