"""Snapshots of Iceberg tables, whose metadata pyiceberg reads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from dataload.catalog.iceberg_deletes import COPY, deleted_rows, plain_url
from dataload.catalog.table_options import of_iceberg, to_iceberg
from dataload.catalog.tables import ICEBERG_URL, FileOfTable, Snapshot, text_of
from dataload.errors import ConfigError, DataError, OriginError, OriginNotFound
from dataload.extras import required
from dataload.formats.schema import flatten
from dataload.formats.table_columns import ID, STORED, TableColumns, with_fields
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.redact import cause_of, quotes_input, redacted, secrets_of

CATALOG_SECONDS = 60.0  # a load balancer's usual limit
PLAN_REQUESTS = 5  # A catalog that plans a scan sends the plan in parts.
NO_SUCH = {"NoSuchTableError", "NoSuchNamespaceError", "NoSuchIdentifierError", "NoSuchPropertyException"}
NO_CATALOG = "what answers is no catalog or token endpoint, perhaps a page to log in"

T = TypeVar("T")


class AtSchema(NamedTuple):
    """A scan of a snapshot with the columns of a schema, by its number; None: with those of the snapshot."""

    scan: Any
    schema_id: int | None


def iceberg_snapshot(source: Any, storage_options: Mapping[str, Any] | None) -> Snapshot:
    """Return the snapshot of a pyiceberg table, of its scan, or of a URL.

    Args:
        source: The table, at its current snapshot; a scan; what `iceberg_at` returned; or
            "iceberg://catalog/namespace.table", perhaps with the id or the name of a snapshot, such as a tag, behind
            "@".
        storage_options: Options of fsspec.

    Raises:
        ConfigError: pyiceberg is not installed, there is no such catalog, table or snapshot, or the scan has a limit.
        OriginError: The catalog or the metadata cannot be read.
        DataError: The table has something that cannot be applied.
    """
    if isinstance(source, (str, os.PathLike)):
        scan, table, schema_id = _opened(os.fspath(source), storage_options)
    else:
        scan, schema_id = source if isinstance(source, AtSchema) else (source, None)
        if hasattr(scan, "scan"):
            table = f"{ICEBERG_URL}{getattr(scan.catalog, 'name', None)}/{'.'.join(scan.name())}"
            scan = scan.scan()
        elif not hasattr(scan, "snapshot"):
            raise ConfigError(f"the source is a {type(scan).__name__}, which reads no snapshot: use table.scan()")
        else:
            owner, names = getattr(scan, "catalog", None), getattr(scan, "table_identifier", None)
            table = str(scan.table_metadata.location)
            if owner is not None and names:
                table = f"{ICEBERG_URL}{owner.name}/{'.'.join(names)}"
    return _reading(redacted(table), lambda: _snapshot(scan, table, schema_id), _secrets_of(scan))


def iceberg_at(source: Any, version: str | None) -> Any:
    """Return a table, or a scan of it, at another version; None: the one that it has now, unless the scan names one.

    A scan of another version has all columns: that may have other names for those that the scan selects.

    Raises:
        ConfigError: Its catalog is not known, or it has no such snapshot.
        OriginError: The catalog cannot be read.
    """
    is_scan = not hasattr(source, "scan")
    name = getattr(source, "table_identifier", None) if is_scan else source.name()
    catalog = getattr(source, "catalog", None)
    if version is not None:
        _, number, schema_id = _parts(f"@{version}")
        scan = source if is_scan else source.scan()
        return AtSchema(scan.update(snapshot_id=int(number or version), selected_fields=("*",)), schema_id)
    if is_scan and source.snapshot_id is not None:
        return source
    if catalog is None or not name or type(catalog).__name__ == "NoopCatalog":
        raise ConfigError("the table has no catalog, which would know its newest snapshot: load it by a catalog")
    shown = redacted(f"{ICEBERG_URL}{getattr(catalog, 'name', None)}/{'.'.join(name)}")
    secrets = secrets_of(getattr(catalog, "properties", {}))
    table = _reading(shown, lambda: _answered(shown, lambda: catalog.load_table(name)), secrets)
    if not is_scan:
        return table
    chosen = {each: getattr(source, each) for each in ("row_filter", "selected_fields", "case_sensitive", "options")}
    return table.scan(**chosen)


def location_of(url: str) -> str:
    """Return the URL of the folder of the table that a URL names; errors are those of `iceberg_snapshot`."""
    return plain_url(_opened(url, None)[0].table_metadata.location)


def _parts(url: str) -> tuple[str, str | None, int | None]:
    """Return the URL of a table, and the snapshot and the schema that it names: "URL@snapshot~schema" or less."""
    place, mark, named = url.partition("@")
    snapshot, tilde, schema = named.rpartition("~")
    if tilde and schema.isdecimal():
        return place, snapshot, int(schema)
    return place, named if mark else None, None


def _opened(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Any, str, int | None]:
    """Return a scan of the table and the snapshot that a URL names, the table's URL, and the schema that it names."""
    required("pyiceberg.table", "iceberg", "an Iceberg table")
    place, named, schema_id = _parts(url)
    name, _, identifier = place.removeprefix(ICEBERG_URL).partition("/")
    if not name or "." not in identifier:
        raise ConfigError(f"{redacted(url)} must be {ICEBERG_URL}catalog/namespace.table, perhaps with @snapshot")
    given = to_iceberg(storage_options)
    known = _configured(redacted(url), name) | given
    secrets = secrets_of(known)

    def load() -> Any:
        from pyiceberg.catalog import load_catalog

        try:
            catalog = load_catalog(name, **given)
        except ValueError as error:
            raise ConfigError(_not_opened(redacted(url), name, error, secrets, known)) from cause_of(error, secrets)
        return catalog.load_table(identifier).scan()

    scan = _reading(redacted(place), lambda: _answered(redacted(place), load), secrets)
    if named is None:
        return scan, place, None
    metadata = scan.table_metadata
    found = metadata.snapshot_by_id(int(named)) if named.lstrip("-").isdecimal() else metadata.snapshot_by_name(named)
    if found is None:
        raise _no_snapshot(redacted(place), named, metadata)
    return scan.update(snapshot_id=found.snapshot_id), place, schema_id


def _configured(url: str, name: str) -> dict[str, Any]:
    """Return what pyiceberg's configuration says of a catalog."""
    from pyiceberg.utils.config import Config

    try:
        return dict(Config().get_catalog_config(name) or {})
    except Exception as error:  # noqa: BLE001 (strictyaml raises its own, which quote the file)
        raise ConfigError(
            f"{url}: ~/.pyiceberg.yaml, or a variable PYICEBERG_…, cannot be read ({type(error).__name__}): correct it"
        ) from None


def _not_opened(url: str, name: str, error: ValueError, secrets: Iterable[str], known: Mapping[str, Any]) -> str:
    """Return why a catalog cannot be opened. known: what is configured for it."""
    if not known:
        return (
            f"{url}: pyiceberg knows no catalog {name!r}: describe it in ~/.pyiceberg.yaml, or by variables "
            f"PYICEBERG_CATALOG__{name.upper()}__URI"
        )
    if _is_of_pydantic(error) or type(error).__name__ == "JSONDecodeError":
        what = f"{NO_CATALOG}: check its uri and credentials"
    elif quotes_input(error):
        what = "its uri must begin with https:// or http://, and its token or headers may have one line only"
    else:
        what = f"check its type and uri: {_line(error, secrets)}"
    return f"{url}: the catalog {name!r} cannot be opened ({type(error).__name__}): {what}"


def _secrets_of(scan: Any) -> set[str]:
    """Return the credentials of the catalog and of the store of a scan."""
    holders = getattr(scan, "catalog", None), getattr(scan, "io", None)
    return set().union(*(secrets_of(getattr(each, "properties", {})) for each in holders))


def _answered(table: str, call: Callable[[], T], requests: int = 1) -> T:
    """Return what a call of a catalog returns. pyiceberg itself waits for ever.

    Args:
        table: Names it.
        call: The call.
        requests: How many it may send, one after the other.

    Raises:
        OriginError: It has not answered after `CATALOG_SECONDS` for each.
    """
    seconds, answer = requests * CATALOG_SECONDS, DaemonExecutor(1, "dataload-catalog").submit(call)
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # The call itself has given up, and its error says why.
            return answer.result()
        raise OriginError(
            f"{table}: the catalog has not answered for {seconds:g} s: check its uri, and that this host reaches it"
        ) from None


def _no_snapshot(table: str, named: object, metadata: Any) -> ConfigError:
    newest = metadata.current_snapshot_id
    return ConfigError(
        f"{table} has no snapshot {named}, of {len(metadata.snapshots)}: it never had, or expire_snapshots has removed "
        f"it; its newest is {newest}"
    )


def _reading(table: str, call: Callable[[], T], secrets: Iterable[str]) -> T:
    """Return what a call of pyiceberg returns, with its errors as those of dataload, without some secrets."""
    try:
        return call()
    except (ConfigError, OriginError, DataError):
        raise
    except FileNotFoundError as error:
        raise OriginNotFound(
            f"{table}: a file of its metadata is gone, which expire_snapshots removes with old snapshots: open a newer "
            f"snapshot: {_line(error, secrets)}"
        ) from cause_of(error, secrets)
    except Exception as error:  # noqa: BLE001 (each catalog and store raises its own)
        cause = cause_of(error, secrets)
        if type(error).__name__ in NO_SUCH:
            raise OriginNotFound(f"{table}: the catalog has no such table: {_line(error, secrets)}") from cause
        raise OriginError(
            f"{table}: the catalog or the table's metadata cannot be read by pyiceberg ({type(error).__name__}): "
            f"{_line(error, secrets)}"
        ) from cause


def _line(error: Any, secrets: Iterable[str] = ()) -> str:
    if not quotes_input(error):
        return redacted(error, secrets)
    if _is_of_pydantic(error):
        found = (": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"]))) for each in error.errors())
        return redacted("; ".join(found), secrets)
    return NO_CATALOG if type(error).__name__ == "JSONDecodeError" else "a URL or a header is malformed"


def _is_of_pydantic(error: Exception) -> bool:
    from pydantic import ValidationError  # pyiceberg needs it

    return isinstance(error, ValidationError)


def _snapshot(scan: Any, table: str, schema_id: int | None = None) -> Snapshot:
    metadata, snapshot = scan.table_metadata, _chosen_snapshot(scan, redacted(table))
    schema = scan.update(selected_fields=("*",)).projection()
    if schema_id is not None and (schema := metadata.schema_by_id(schema_id)) is None:
        raise ConfigError(f"{redacted(table)} has no schema {schema_id}: leave out ~{schema_id} for the snapshot's own")
    url = f"{redacted(table)}@{snapshot.snapshot_id}"
    if snapshot.schema_id not in (None, schema.schema_id):  # columns that were renamed or added since
        url += f"~{schema.schema_id}"
    columns = _columns(schema, metadata, url)
    filters, undecided = _filters(scan, schema, url)
    tasks = _tasks(scan, snapshot, redacted(table))
    identities = {spec.spec_id: _identities(spec, schema) for spec in metadata.specs().values()}
    return Snapshot(
        url,
        snapshot.snapshot_id,
        plain_url(metadata.location),
        sorted((_file(task.file, identities, metadata, url) for task in tasks), key=lambda file: file.url),
        columns,
        earlier=_earlier(snapshot, metadata),
        deleted=deleted_rows(tasks, scan.io, url),
        storage_options=of_iceberg(metadata.location, scan.io.properties),
        chosen=None if "*" in scan.selected_fields else _chosen(scan, schema, url),
        filters=filters,
        undecided=undecided,
    )


def _chosen_snapshot(scan: Any, table: str) -> Any:
    """Return the snapshot that a scan reads.

    Raises:
        ConfigError: The table does not have it, or the scan has a limit.
        DataError: The table has none.
    """
    metadata = scan.table_metadata
    if scan.limit is not None:
        raise ConfigError(f"{table}: the scan has a limit, which reads any rows: leave it out, and use select")
    if scan.snapshot_id is not None and metadata.snapshot_by_id(scan.snapshot_id) is None:
        raise _no_snapshot(table, scan.snapshot_id, metadata)
    if (snapshot := scan.snapshot()) is None:
        raise DataError(f"{table} has no snapshot, so no rows: write some first")
    return snapshot


def _filters(scan: Any, schema: Any, url: str) -> tuple[Any, Callable[[Collection[str]], str | None] | None]:
    """Return the row filter of a scan for Arrow, and what tells which rows it leaves open; None: it has none."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import expression_to_pyarrow

    if isinstance(scan.row_filter, AlwaysTrue):
        return None, None
    try:
        bound = _bound(scan, schema)
        return expression_to_pyarrow(bound, schema), partial(_undecided, bound, schema)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{url}: the scan's row_filter cannot be applied: {_line(error)}") from cause_of(error)


def _tasks(scan: Any, snapshot: Any, table: str) -> list[Any]:
    """Return the files of a snapshot that a scan reads, and what is deleted of each, as pyiceberg or the catalog plans.

    Raises:
        DataError: The snapshot has equality deletes.
        OriginError: The catalog does not answer.
    """
    is_by_catalog = getattr(getattr(scan, "catalog", None), "supports_server_side_planning", lambda: False)
    try:
        if not is_by_catalog():
            return list(scan.plan_files())
        plan = scan.update(snapshot_id=snapshot.snapshot_id).plan_files  # without an id, it plans its newest one
        return list(_answered(table, plan, PLAN_REQUESTS))
    except (ValueError, NotImplementedError) as error:
        if "equality delete" not in str(error).lower():
            raise
        raise DataError(
            f"{table}@{snapshot.snapshot_id}: {_equality_deletes(snapshot, scan.io)} has equality deletes, which "
            f"neither pyiceberg nor dataload applies: run rewrite_data_files, or {COPY}"
        ) from error


def _chosen(scan: Any, schema: Any, url: str) -> list[str]:
    """Return the columns that a scan selects.

    Raises:
        ConfigError: The table lacks one, or it is a part of a list or a map.
    """
    for name in scan.selected_fields:
        try:
            schema.find_field(name, scan.case_sensitive)
        except ValueError:
            raise ConfigError(
                f"{url} has no column {name!r}, which the scan's selected_fields names: it may have been renamed or "
                "dropped since; make the dataset again, with a scan() of the columns that the table has"
            ) from None
    whole = flatten(_arrow(schema))
    for each in (found := flatten(_arrow(scan.projection()))):
        if each.type != whole.field(each.name).type:
            raise ConfigError(
                f"{url}: selected_fields selects a part of {each.name!r}, whose values are read whole: select "
                f"{each.name!r}, and leave out the rest in map or transform"
            )
    return list(found.names)


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


def _file(file: Any, identities: Mapping[int, Any], metadata: Any, url: str) -> FileOfTable:
    kind = getattr(file.file_format, "value", str(file.file_format))
    if kind.upper() != "PARQUET":
        raise DataError(f"{url}: {redacted(file.file_path)} is a file of {kind}, and only Parquet is read: {COPY}")
    if file.key_metadata is not None:
        raise DataError(f"{url}: {redacted(file.file_path)} is encrypted, which dataload cannot read: {COPY}")
    constants: list[tuple[str, int | str | None]] = []
    for position, name, type_ in identities.get(file.spec_id, ()):
        if (value := file.partition[position]) is not None:
            constants.append((name, text_of(pa.array([getattr(value, "bytes", value)], type_))[0]))
    # Iceberg writes no file twice, but another table may have a file where a dropped one had its own.
    counts = [file.record_count, file.column_sizes, file.lower_bounds, file.upper_bounds]
    content = [
        str(metadata.table_uuid),
        *(sorted(each.items()) if isinstance(each, Mapping) else each for each in counts),
    ]
    stamp = hashlib.blake2b(repr(content).encode(), digest_size=8, person=b"iceberg file").hexdigest()
    return FileOfTable(plain_url(file.file_path), int(file.file_size_in_bytes), stamp, tuple(constants))


def _bound(scan: Any, schema: Any) -> Any:
    """Return the row filter of a scan with the columns of a schema."""
    from pyiceberg.expressions.visitors import bind, translate_column_names

    own = bind(scan.table_metadata.schema(), scan.row_filter, case_sensitive=scan.case_sensitive)
    named = translate_column_names(own, schema, case_sensitive=scan.case_sensitive)
    return bind(schema, named, case_sensitive=scan.case_sensitive)


def _undecided(condition: Any, schema: Any, lacked: Collection[str]) -> str | None:
    """Return a column that files lack, if Iceberg has their rows by a condition like `n != 7`, and Arrow has not.

    pyiceberg asks Iceberg about columns that a file lacks, and Arrow about nulls that it stores.
    """
    from pyiceberg import expressions as of
    from pyiceberg.expressions.visitors import rewrite_not

    condition = rewrite_not(condition)
    negative = of.BoundNotEqualTo, of.BoundNotIn, of.BoundNotNaN, of.BoundNotStartsWith
    found: list[str] = []

    def over_nulls(each: Any, *, by_iceberg: bool) -> Any:
        if isinstance(each, of.And | of.Or):
            parts = (over_nulls(part, by_iceberg=by_iceberg) for part in (each.left, each.right))
            return type(each)(*parts)
        if not isinstance(each, of.BoundPredicate):
            return each
        if (name := schema.find_column_name(each.term.ref().field.field_id)) not in lacked:
            return each
        if isinstance(each, negative):
            found.append(name)
        return of.AlwaysTrue() if isinstance(each, (of.BoundIsNull, *negative * by_iceberg)) else of.AlwaysFalse()

    is_decided = over_nulls(condition, by_iceberg=True) == over_nulls(condition, by_iceberg=False)
    return None if is_decided else found[0]


def _equality_deletes(snapshot: Any, io: Any) -> str:
    """Return the name of a file with equality deletes."""
    for manifest in snapshot.manifests(io):
        for entry in manifest.fetch_manifest_entry(io, discard_deleted=True):
            if getattr(entry.data_file.content, "name", "") == "EQUALITY_DELETES":
                return redacted(entry.data_file.file_path)
    return "a file"
