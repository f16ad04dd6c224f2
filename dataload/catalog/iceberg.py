"""Snapshots of Iceberg tables, whose metadata pyiceberg reads."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataload.catalog.table_options import of_fsspec, of_iceberg
from dataload.catalog.tables import ICEBERG_URL, FileOfTable, Positions, Snapshot, at_version, text_of
from dataload.errors import ConfigError, DataError, OriginError, OriginNotFound
from dataload.extras import required
from dataload.formats.schema import flatten
from dataload.formats.table_columns import ID, STORED, TableColumns, with_fields
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.redact import cause_of, redacted

DELETES_AT_ONCE = 16
NO_SUCH = {"NoSuchTableError", "NoSuchNamespaceError", "NoSuchIdentifierError", "NoSuchPropertyException"}
COPY = "copy the rows, such as by spark.table(name).write.parquet(copy), and name the copy"
PUFFIN = b"PFA1"  # the first and the last bytes
TRAILER = 12  # bytes behind the footer of Puffin: its size, flags, and the magic
VECTOR = "deletion-vector-v1"  # a blob
VECTOR_MAGIC = bytes.fromhex("d1d33964")

T = TypeVar("T")


def iceberg_snapshot(source: Any, storage_options: Mapping[str, Any] | None) -> Snapshot:
    """Return the snapshot of a pyiceberg table, of its scan, or of a URL.

    Args:
        source: The table, at its current snapshot; a scan; or "iceberg://catalog/namespace.table", perhaps with the id
            or the name of a snapshot, such as a tag, behind "@".
        storage_options: Options of fsspec.

    Raises:
        ConfigError: pyiceberg is not installed, there is no such catalog, table or snapshot, or the scan has a limit.
        OriginError: The catalog or the metadata cannot be read.
        DataError: The table has something that cannot be applied.
    """
    if isinstance(source, (str, os.PathLike)):
        url = os.fspath(source)
        return _reading(redacted(url), lambda: _snapshot(_opened(url, storage_options), url))
    if hasattr(source, "scan"):
        table = f"{ICEBERG_URL}{getattr(source.catalog, 'name', None)}/{'.'.join(source.name())}"
        return _reading(redacted(table), lambda: _snapshot(source.scan(), table))
    if not hasattr(source, "snapshot"):
        raise ConfigError(f"the source is a {type(source).__name__}, which reads no snapshot: use table.scan()")
    owner, names = getattr(source, "catalog", None), getattr(source, "table_identifier", None)
    table = str(source.table_metadata.location)
    if owner is not None and names:
        table = f"{ICEBERG_URL}{owner.name}/{'.'.join(names)}"
    return _reading(redacted(table), lambda: _snapshot(source, table))


def _opened(url: str, storage_options: Mapping[str, Any] | None) -> Any:
    """Return a scan of the table and the snapshot that a URL names."""
    required("pyiceberg.table", "iceberg", "an Iceberg table")
    from pyiceberg.catalog import load_catalog

    place, named = at_version(url)
    name, _, identifier = place.removeprefix(ICEBERG_URL).partition("/")
    if not name or "." not in identifier:
        raise ConfigError(f"{redacted(url)} must be {ICEBERG_URL}catalog/namespace.table, perhaps with @snapshot")
    try:
        catalog = load_catalog(name, **of_iceberg(storage_options))
    except ValueError as error:
        raise ConfigError(
            f"{redacted(url)}: pyiceberg knows no catalog {name!r}: describe it in ~/.pyiceberg.yaml, or by variables "
            f"PYICEBERG_CATALOG__{name.upper()}__URI: {_line(error)}"
        ) from cause_of(error)
    scan = catalog.load_table(identifier).scan()
    if named is None:
        return scan
    metadata = scan.table_metadata
    found = metadata.snapshot_by_id(int(named)) if named.lstrip("-").isdecimal() else metadata.snapshot_by_name(named)
    if found is None:
        raise _no_snapshot(redacted(place), named, metadata)
    return scan.update(snapshot_id=found.snapshot_id)


def _no_snapshot(table: str, named: object, metadata: Any) -> ConfigError:
    newest = metadata.current_snapshot_id
    return ConfigError(
        f"{table} has no snapshot {named}, of {len(metadata.snapshots)}: it never had, or expire_snapshots has removed "
        f"it; its newest is {newest}"
    )


def _reading(table: str, call: Callable[[], T]) -> T:
    """Return what a call of pyiceberg returns, with its errors as those of dataload."""
    try:
        return call()
    except (ConfigError, OriginError, DataError):
        raise
    except FileNotFoundError as error:
        raise OriginNotFound(
            f"{table}: a file of its metadata is gone, which expire_snapshots removes with old snapshots: open a newer "
            f"snapshot: {_line(error)}"
        ) from cause_of(error)
    except Exception as error:  # noqa: BLE001 (each catalog and store raises its own)
        if type(error).__name__ in NO_SUCH:
            raise OriginNotFound(f"{table}: the catalog has no such table: {_line(error)}") from cause_of(error)
        if "equality delete" in str(error).lower():
            raise DataError(f"{table} has equality deletes, which dataload cannot apply: {COPY}") from cause_of(error)
        raise OriginError(
            f"{table}: the catalog or the table's metadata cannot be read by pyiceberg ({type(error).__name__}): "
            f"{_line(error)}"
        ) from cause_of(error)


def _line(error: BaseException) -> str:
    return redacted(" ".join(str(error).split()))


def _snapshot(scan: Any, table: str) -> Snapshot:
    from pyiceberg.expressions import AlwaysTrue

    table = at_version(table)[0]
    metadata = scan.table_metadata
    if scan.limit is not None:
        raise ConfigError(
            f"{redacted(table)}: the scan has a limit, which reads any rows: leave it out, and use select"
        )
    if scan.snapshot_id is not None and metadata.snapshot_by_id(scan.snapshot_id) is None:
        raise _no_snapshot(redacted(table), scan.snapshot_id, metadata)
    snapshot = scan.snapshot()
    if snapshot is None:
        raise DataError(f"{redacted(table)} has no snapshot, so no rows: write some first")
    url = f"{redacted(table)}@{snapshot.snapshot_id}"
    schema = scan.update(selected_fields=("*",)).projection()
    columns = _columns(schema, metadata, url)
    try:
        tasks = list(scan.plan_files())
    except ValueError as error:
        if "equality delete" not in str(error).lower():
            raise
        raise DataError(
            f"{url}: {_equality_deletes(snapshot, scan.io)} has equality deletes, which neither pyiceberg nor dataload "
            f"applies: run rewrite_data_files, or {COPY}"
        ) from error
    identities = {spec.spec_id: _identities(spec, schema) for spec in metadata.specs().values()}
    filters = None if isinstance(scan.row_filter, AlwaysTrue) else _expression(scan, schema)
    chosen = None if "*" in scan.selected_fields else flatten(_arrow(scan.projection())).names
    return Snapshot(
        url,
        snapshot.snapshot_id,
        _plain(metadata.location),
        sorted((_file(task.file, identities, url) for task in tasks), key=lambda file: file.url),
        columns,
        _earlier(snapshot, metadata),
        _deleted(tasks, scan.io, url),
        of_fsspec(metadata.location, scan.io.properties),
        chosen,
        filters,
    )


def _earlier(snapshot: Any, metadata: Any) -> list[int]:
    """Return the ids of the snapshots before one, the newest first."""
    parents = {each.snapshot_id: each.parent_snapshot_id for each in metadata.snapshots}
    found: list[int] = []
    while (parent := parents.pop(snapshot.snapshot_id if not found else found[-1], None)) in parents:
        found.append(parent)
    return found


def _arrow(schema: Any) -> pa.Schema:
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    return schema_to_pyarrow(schema, include_field_ids=True)


def _columns(schema: Any, metadata: Any, url: str) -> TableColumns:
    """Return the columns of a schema, with the names that files without field ids have for them."""
    mapping = metadata.name_mapping()
    names = dict(_mapped(mapping)) if mapping is not None else {}

    def named(each: pa.Field) -> pa.Field:
        number = (each.metadata or {}).get(ID)
        found = {} if number is None else {ID: number}
        if number is not None and int(number) in names:
            found[STORED] = json.dumps(names[int(number)]).encode()
        return each.with_metadata(found)

    arrow = _arrow(schema)
    fields = [named(each).with_type(with_fields(each.type, named)) for each in arrow]
    own = {each.field_id for each in schema.fields}
    for number, each in schema._lazy_id_to_field.items():  # noqa: SLF001 (nothing public has the nested ones)
        if getattr(each, "initial_default", None) is not None and number not in own:
            raise DataError(
                f"{url}: {schema.find_column_name(number)!r} is inside of another column and has a default value, "
                f"which dataload cannot apply: {COPY}"
            )
    defaults = {
        each.name: text_of(pa.array([each.initial_default], arrow.field(each.name).type))[0]
        for each in schema.fields
        if each.initial_default is not None
    }
    return TableColumns(pa.schema(fields), "id", defaults=defaults)


def _mapped(fields: Iterable[Any]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the names of each field of a name mapping."""
    for each in getattr(fields, "root", fields):
        if each.field_id is not None:
            yield each.field_id, list(each.names)
        yield from _mapped(each.fields)


def _identities(spec: Any, schema: Any) -> list[tuple[int, str, pa.DataType]]:
    """Return the position, the column and its type of each partition field that has the values of a column."""
    flat = flatten(_arrow(schema))
    found = []
    for position, each in enumerate(spec.fields):
        name = schema.find_column_name(each.source_id)
        if str(each.transform) == "identity" and name in flat.names:
            found.append((position, name, flat.field(name).type))
    return found


def _file(file: Any, identities: Mapping[int, Any], url: str) -> FileOfTable:
    kind = getattr(file.file_format, "value", str(file.file_format))
    if kind.upper() != "PARQUET":
        raise DataError(f"{url}: {redacted(file.file_path)} is a file of {kind}, and only Parquet is read: {COPY}")
    if file.key_metadata is not None:
        raise DataError(f"{url}: {redacted(file.file_path)} is encrypted, which dataload cannot read: {COPY}")
    constants: list[tuple[str, int | str | None]] = []
    for position, name, type_ in identities.get(file.spec_id, ()):
        if (value := file.partition[position]) is not None:
            constants.append((name, text_of(pa.array([getattr(value, "bytes", value)], type_))[0]))
    return FileOfTable(_plain(file.file_path), int(file.file_size_in_bytes), constants=tuple(constants))


def _plain(url: str) -> str:
    """Return the URL of a file, or the path of a local one."""
    return url.removeprefix("file://") if url.startswith("file:///") else url.removeprefix("file:")


def _expression(scan: Any, schema: Any) -> Any:
    """Return the row filter of a scan as an expression of Arrow, with the names of a schema."""
    from pyiceberg.expressions.visitors import bind, translate_column_names
    from pyiceberg.io.pyarrow import expression_to_pyarrow

    own = bind(scan.table_metadata.schema(), scan.row_filter, case_sensitive=scan.case_sensitive)
    named = translate_column_names(own, schema, case_sensitive=scan.case_sensitive)
    return expression_to_pyarrow(bind(schema, named, case_sensitive=scan.case_sensitive), schema)


def _equality_deletes(snapshot: Any, io: Any) -> str:
    """Return the name of a file with equality deletes."""
    for manifest in snapshot.manifests(io):
        for entry in manifest.fetch_manifest_entry(io, discard_deleted=True):
            if getattr(entry.data_file.content, "name", "") == "EQUALITY_DELETES":
                return redacted(entry.data_file.file_path)
    return "a file"


def _deleted(tasks: Iterable[Any], io: Any, url: str) -> dict[str, Positions]:
    """Return the deleted rows of each data file that has some."""
    wanted: dict[str, set[str]] = {}  # by delete file, the data files
    formats: dict[str, str] = {}
    for task in tasks:
        for delete in task.delete_files:
            wanted.setdefault(delete.file_path, set()).add(task.file.file_path)
            formats[delete.file_path] = getattr(delete.file_format, "value", str(delete.file_format)).upper()

    def read(path: str) -> list[tuple[str, Positions]]:
        try:
            with io.new_input(path).open() as file:
                data = file.read()
        except FileNotFoundError as error:
            raise OriginNotFound(
                f"{redacted(path)} of {url} is gone, which expire_snapshots removes with old snapshots: open a newer "
                "snapshot"
            ) from cause_of(error)
        try:
            if formats[path] == "PARQUET":
                found = list(_positions(data))
            elif formats[path] == "PUFFIN":
                found = list(vectors_of(data))
            else:
                raise DataError(f"{redacted(path)} has deletes in {formats[path]}, which dataload cannot read: {COPY}")
        except (ValueError, LookupError, TypeError, OSError, OverflowError, pa.ArrowException) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{redacted(path)}, a delete file of {url}, cannot be read: {_line(error)}") from error
        return [(file, rows) for file, rows in found if file in wanted[path]]

    parts: dict[str, list[Positions]] = {}
    read_all = DaemonExecutor(DELETES_AT_ONCE, "dataload-deletes").map(read, sorted(wanted))
    for file, rows in chain.from_iterable(read_all):
        parts.setdefault(file, []).append(rows)
    return {_plain(file): np.unique(np.concatenate(rows)) for file, rows in parts.items()}


def _positions(data: bytes) -> Iterator[tuple[str, Positions]]:
    """Yield the data files of a file of position deletes, and the rows that it deletes of each."""
    table = pq.read_table(pa.BufferReader(data), columns=["file_path", "pos"])
    paths = table["file_path"].combine_chunks().dictionary_encode()
    paths = paths.combine_chunks() if isinstance(paths, pa.ChunkedArray) else paths
    codes, rows = paths.indices.to_numpy(zero_copy_only=False), table["pos"].to_numpy()
    for number, path in enumerate(paths.dictionary.to_pylist()):
        yield path, rows[codes == number].astype(np.int64)


def vectors_of(data: bytes) -> Iterator[tuple[str, Positions]]:
    """Yield the data files of a Puffin file of deletion vectors, and the rows that each vector deletes.

    Raises:
        ValueError: The bytes are no such file.

    Notes: https://iceberg.apache.org/puffin-spec/
    """
    from pyroaring import BitMap64  # that of pyiceberg

    if len(data) < TRAILER + 8 or data[:4] != PUFFIN or data[-4:] != PUFFIN:
        raise ValueError("it is no Puffin file")
    size, flags = int.from_bytes(data[-TRAILER:-8], "little"), data[-8:-4]
    if flags[0] & 1:
        raise ValueError("its footer is compressed")
    if size > len(data) - TRAILER - 8:
        raise ValueError("its footer is cut short")
    footer = json.loads(data[-TRAILER - size : -TRAILER])
    for blob in footer["blobs"]:
        if blob["type"] != VECTOR:
            continue
        start, length = int(blob["offset"]), int(blob["length"])
        if blob.get("compression-codec") or start < 0 or length < 12 or start + length > len(data):
            raise ValueError("a deletion vector is compressed or cut short")
        vector = data[start : start + length]
        inner = int.from_bytes(vector[:4], "big")
        content = vector[4 : 4 + inner]
        if (
            inner != length - 8
            or content[:4] != VECTOR_MAGIC
            or zlib.crc32(content) != int.from_bytes(vector[-4:], "big")
        ):
            raise ValueError("a deletion vector is damaged")
        bitmap = BitMap64.deserialize(content[4:])
        yield blob["properties"]["referenced-data-file"], np.fromiter(bitmap, np.int64, len(bitmap))
