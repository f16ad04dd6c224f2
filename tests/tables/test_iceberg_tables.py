"""Iceberg tables as sources: what their snapshots and scans have, what is fetched, and what is refused."""

from __future__ import annotations

import json
import pickle
import queue
import socket
import threading
import traceback
import uuid
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from growing import as_a_new_process

pytest.importorskip("pyiceberg")

from http_servers import serving
from iceberg_histories import DELETE_SCHEMA, add_deletes, catalog_in, puffin
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import IncrementalAppendScan
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, IntegerType, LongType, NestedField, StringType, StructType, TimeType, UUIDType
from pyiceberg.utils.config import Config
from table_rows import check_same, rows_of

from dataload import make_dataset, make_loader
from dataload.catalog import iceberg
from dataload.catalog.iceberg_deletes import vectors_of
from dataload.errors import ConfigError, DataError, OriginError, OriginNotFound

VENDED = {"s3.access-key-id": "id", "s3.secret-access-key": "VENDEDSECRET"}


def rows(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"id": pa.array(ids, pa.int64()), "text": [f"row {each}" for each in ids]})


@pytest.fixture
def catalog(tmp_path, monkeypatch):
    found = catalog_in(tmp_path / "lake")
    for name in ("uri", "warehouse"):
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKE__{name.upper()}", found.properties[name])
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # as a process has it that begins now
    yield found
    found.engine.dispose()


@pytest.fixture
def table(catalog):
    made = catalog.create_table("space.table", rows(0, 1).schema)
    made.append(rows(0, 4))
    made.append(rows(4, 4))
    return catalog.load_table("space.table")


def ids(source: object, **options: object) -> list[int]:
    return sorted(make_dataset(source, cache=False, **options)["id"].tolist())


def data_files(table) -> list:
    return [task.file for task in table.scan().plan_files()]


def test_tables_scans_and_urls_name_snapshots(table):
    old = table.snapshots()[0].snapshot_id
    table.manage_snapshots().create_tag(old, "first").commit()
    assert ids(table) == ids(table.scan()) == ids("iceberg://lake/space.table") == list(range(8))
    for source in (
        table.scan(snapshot_id=old),
        f"iceberg://lake/space.table@{old}",
        "iceberg://lake/space.table@first",
    ):
        assert ids(source) == list(range(4))
    assert f"iceberg://lake/space.table@{old}:" in repr(make_dataset(table.scan(snapshot_id=old), cache=False))
    assert "iceberg://lake/space.table@" in repr(make_dataset(table, cache=False))


def test_loaders_take_tables(table):
    loader = make_loader(table, 3, cache=False)
    assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(8))


@pytest.mark.parametrize(
    "condition",
    ["id > 2 and text != 'row 5'", "id in (1, 3, 77) or text = 'row 6'", "not (id = 3) and text is not null"],
)
def test_the_row_filter_of_a_scan_is_exact(condition, table):
    scan = table.scan(row_filter=condition, selected_fields=("id",))
    check_same(scan, scan.to_arrow())


@pytest.fixture
def grown(table):
    """A table of which two files lack the column "n", and one has it."""
    with table.update_schema() as update:
        update.add_column("n", LongType())
    table.append(rows(8, 3).append_column("n", pa.array([7, 8, None], pa.int64())))
    return table


@pytest.mark.parametrize("condition", ["n != 7", "n not in (7, 9)", "not (n = 7)", "id > 1 and (n != 7 or id = 2)"])
def test_a_row_filter_that_leaves_rows_without_a_value_open_is_refused(condition, grown):
    """If a file lacks the column, pyiceberg reads them, and if it stores nulls, it does not."""
    assert grown.scan(row_filter=condition).to_arrow()["n"].null_count
    with pytest.raises(ConfigError, match=r"leaves open whether rows without a value of 'n' are read, and .* lacks it"):
        make_dataset(grown.scan(row_filter=condition), cache=False)


@pytest.mark.parametrize(
    "condition",
    ["n != 7 and n is not null", "n != 7 or n is null", "n = 7", "not (n != 7)", "n is null", "n != 7 and id > 8"],
)
def test_a_row_filter_on_a_column_that_files_lack_is_exact(condition, grown):
    scan = grown.scan(row_filter=condition)
    check_same(scan, scan.to_arrow())


def test_a_row_filter_without_rows_is_told_by_its_name(grown):
    with pytest.raises(ConfigError, match=r"^row_filter=.* leave none of 3 rows"):
        make_dataset(grown.scan(row_filter="n is null and id = 8"), cache=False)


@pytest.mark.parametrize("name", ["l.element.a", "m.value.a"])
def test_a_part_of_what_is_inside_a_list_or_a_map_is_not_selected(name, catalog):
    kind = pa.struct([("a", pa.int64()), ("b", pa.string())])
    columns = {
        "p": pa.array([{"a": 1, "b": "x"}], kind),
        "l": pa.array([[{"a": 1, "b": "x"}]], pa.list_(kind)),
        "m": pa.array([[("k", {"a": 1, "b": "x"})]], pa.map_(pa.string(), kind)),
    }
    made = catalog.create_table("space.nested", pa.table(columns).schema)
    made.append(pa.table(columns))
    for scan in (made.scan(selected_fields=("p.a", name[:1])), made.scan(selected_fields=("m.key",))):
        check_same(scan, scan.to_arrow())
    with pytest.raises(ConfigError, match=f"selects a part of '{name[:1]}', whose values are read whole"):
        make_dataset(made.scan(selected_fields=(name,)), cache=False)


def test_the_row_filter_of_a_scan_and_filters_both_hold(table):
    assert ids(table.scan(row_filter="id > 2"), filters=[("id", "<", 5)]) == [3, 4]


def test_columns_are_chosen_in_one_place(table):
    scan = table.scan(selected_fields=("text",))
    assert make_dataset(scan, cache=False).schema.names == ["text"]
    with pytest.raises(ConfigError, match="the scan selects columns, and columns= too"):
        make_dataset(scan, columns=["id"], cache=False)


def test_a_scan_with_a_limit_is_refused(table):
    with pytest.raises(ConfigError, match="the scan has a limit"):
        make_dataset(table.scan(limit=3), cache=False)


def test_a_scan_of_changes_is_refused(table):
    with pytest.raises(ConfigError, match=r"is a IncrementalAppendScan, which reads no snapshot: use table.scan\(\)"):
        make_dataset(IncrementalAppendScan(table.metadata, table.io), cache=False)


def test_default_values_fill_files_that_lack_a_column(table):
    """Those of version 3, which pyiceberg reads and does not write."""
    schema = Schema(
        *table.schema().fields,
        NestedField(3, "word", StringType(), required=True, initial_default="none"),
        NestedField(4, "number", IntegerType(), required=True, initial_default=7),
        NestedField(5, "day", DateType(), required=True, initial_default=20_000),
        schema_id=1,
    )
    changes = {"schemas": [table.schema(), schema], "current_schema_id": 1, "last_column_id": 5}
    changed = table.scan().update(table_metadata=table.metadata.model_copy(update=changes))
    check_same(changed, changed.to_arrow())
    assert ids(changed, filters=[("word", "=", "none"), ("number", ">", 6)]) == list(range(8))
    assert ids(changed.filter("word = 'none' and id > 5")) == [6, 7]


def test_values_of_a_partition_stand_for_a_column_that_files_lack(catalog, tmp_path):
    """A table that was made of the files of Hive has its keys in the metadata only."""
    fields = (NestedField(2, "key", UUIDType(), False), NestedField(3, "time", TimeType(), False))
    schema = Schema(NestedField(1, "id", LongType(), False), *fields)
    keys = (PartitionField(2, 1000, IdentityTransform(), "key"), PartitionField(3, 1001, IdentityTransform(), "time"))
    spec = PartitionSpec(*keys)
    made = catalog.create_table("space.hive", schema, partition_spec=spec)
    key = uuid.uuid4()
    path = tmp_path / "plain.parquet"
    pq.write_table(pa.table([[5]], schema=_with_ids(["id"])), path)
    _add_file(made, path, key.bytes, 3_600_000_001)
    [row] = make_dataset(made, cache=False)
    assert (int(row["id"]), row["key"]) == (5, key)
    assert int(row["time"]) == 3_600_000_001  # microseconds


def _with_ids(names: list[str]) -> pa.Schema:
    return pa.schema(
        [pa.field(name, pa.int64(), True, {"PARQUET:field_id": str(n)}) for n, name in enumerate(names, 1)]
    )


def test_names_of_a_mapping_stand_for_field_ids(catalog, tmp_path):
    schema = Schema(
        NestedField(1, "id", LongType(), False),
        NestedField(2, "s", StructType(NestedField(3, "a", LongType(), False)), False),
    )
    made = catalog.create_table("space.mapped", schema)
    path = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"old": [1, 2], "s": [{"b": 3}, None]}), path)
    with pytest.raises(DataError, match="has columns without field ids, and its table has no name mapping"):
        _add_file(made, path)
        make_dataset(made, cache=False)
    names = [{"field-id": 1, "names": ["id", "old"]}]
    names += [{"field-id": 2, "names": ["s"], "fields": [{"field-id": 3, "names": ["b"]}]}]
    with made.transaction() as transaction:
        transaction.set_properties({"schema.name-mapping.default": json.dumps(names)})
    check_same(made, made.scan().to_arrow())


def test_a_column_that_a_mapping_leaves_out_is_null(catalog, tmp_path):
    """Even if a file has one of its name."""
    fields = NestedField(1, "id", LongType(), False), NestedField(2, "x", StringType(), False)
    made = catalog.create_table("space.partial", Schema(*fields))
    path = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"id": [1, 2], "x": ["of another", "column"]}), path)
    with made.transaction() as transaction:
        transaction.set_properties({"schema.name-mapping.default": json.dumps([{"field-id": 1, "names": ["id"]}])})
    _add_file(made, path)
    dataset = make_dataset(made, cache=False)
    assert (dataset["id"].tolist(), dataset["x"].tolist()) == ([1, 2], [None, None])


def _add_file(table, path: Path, *partition: object) -> None:
    file = DataFile.from_args(
        file_path=f"file://{path}",
        file_format=FileFormat.PARQUET,
        content=DataFileContent.DATA,
        partition=Record(*partition),
        record_count=pq.read_metadata(path).num_rows,
        file_size_in_bytes=path.stat().st_size,
        _table_format_version=2,
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.append_data_file(file)


def test_equality_deletes_are_refused_by_name(table):
    [file, _] = data_files(table)
    content = {"content": DataFileContent.EQUALITY_DELETES, "equality_ids": [1]}
    add_deletes(table, "file:///nowhere/equal.parquet", file, FileFormat.PARQUET, 1, **content)
    with pytest.raises(
        DataError, match=r"iceberg://lake/space.table@\d+: file:///nowhere/equal.parquet has equality deletes"
    ):
        make_dataset(table, cache=False)


def test_equality_deletes_in_the_plan_of_a_catalog_are_refused_by_name(table, monkeypatch):
    [file, _] = data_files(table)
    content = {"content": DataFileContent.EQUALITY_DELETES, "equality_ids": [1]}
    add_deletes(table, "file:///nowhere/equal.parquet", file, FileFormat.PARQUET, 1, **content)

    def planned(_: object) -> None:
        raise NotImplementedError("PyIceberg does not yet support equality deletes: file:///nowhere/equal.parquet")

    monkeypatch.setattr("pyiceberg.table.DataScan.plan_files", planned)
    with pytest.raises(DataError, match=r"space.table@\d+: file:///nowhere/equal.parquet has equality deletes"):
        make_dataset(table, cache=False)


def test_files_of_other_formats_are_refused_by_name(table):
    content = {"content": DataFileContent.DATA}
    add_deletes(table, "file:///nowhere/rows.orc", data_files(table)[0], FileFormat.ORC, 1, **content)
    with pytest.raises(DataError, match=r"rows.orc is a file of ORC, and only Parquet is read"):
        make_dataset(table, cache=False)


@pytest.mark.parametrize("damage", ["cut", "flip", "row"])
def test_a_damaged_deletion_vector_is_refused_by_name(damage, table, tmp_path):
    [file, _] = data_files(table)
    data = puffin({file.file_path: [1, 2 if damage != "row" else 99]})
    place = 8 + int.from_bytes(data[4:8], "big") - 2  # of the last row
    data = {"cut": data[:-5], "flip": data[:place] + b"\3" + data[place + 1 :], "row": data}[damage]
    path = tmp_path / "vector.puffin"
    path.write_bytes(data)
    add_deletes(table, path, file, FileFormat.PUFFIN, 2)
    problem = "it deletes row 99 of .* which has 4 rows" if damage == "row" else ""
    with pytest.raises(DataError, match=f"vector.puffin, a delete file of iceberg.*{problem}"):
        make_dataset(table, cache=False)


def test_one_delete_file_is_for_several_data_files(table, tmp_path):
    first, second = data_files(table)
    paths = [second.file_path, first.file_path, "file:///of/another/snapshot.parquet", second.file_path]
    pq.write_table(pa.table([paths, [3, 0, 7, 0]], schema=DELETE_SCHEMA), tmp_path / "deletes.parquet")
    add_deletes(table, tmp_path / "deletes.parquet", first, FileFormat.PARQUET, 4)
    assert ids(table) == sorted(table.scan().to_arrow()["id"].to_pylist())
    assert len(ids(table)) == 5


def test_a_file_that_is_listed_twice_is_refused(table):
    [file, _] = data_files(table)
    table.add_files([file.file_path], check_duplicate_files=False)
    with pytest.raises(DataError, match=r"iceberg://lake/space.table@\d+ lists .*parquet twice"):
        make_dataset(table, cache=False)


def test_a_file_that_another_table_wrote_again_has_no_rows_of_the_cache(catalog, tmp_path):
    """At an equal size, which is all that Iceberg says of a file."""
    path, found = tmp_path / "rows.parquet", []
    for start in (100, 200):
        made = catalog.create_table_if_not_exists("space.again", _with_ids(["id"]))
        pq.write_table(pa.table([np.arange(start, start + 50)], schema=_with_ids(["id"])), path, use_dictionary=False)
        _add_file(made, path)
        found.append(make_dataset(made, cache_dir=tmp_path / "cache")["id"].tolist())
        size = path.stat().st_size
        catalog.drop_table("space.again")
    assert found == [list(range(100, 150)), list(range(200, 250))]
    assert path.stat().st_size == size


def test_a_pin_names_the_columns_too(table):
    """Those of a table may be renamed without a new snapshot."""
    with table.update_schema() as update:
        update.rename_column("id", "key")
    dataset = make_dataset(table, cache=False)
    assert dataset.manifest.pinned.endswith("~1")
    again = make_dataset(dataset.manifest.pinned, cache=False)
    assert again.fingerprint == dataset.fingerprint
    assert again["key"].tolist() == dataset["key"].tolist()
    snapshot = dataset.manifest.pinned.partition("~")[0]
    assert ids(snapshot) == list(range(8))  # the names that it had
    with pytest.raises(ConfigError, match="has no schema 7: leave out ~7"):
        make_dataset(f"{snapshot}~7", cache=False)


def test_an_epoch_goes_on_after_the_branch_of_its_url_has_moved(table, tmp_path):
    loader = make_loader("iceberg://lake/space.table@main", 2, cache_dir=tmp_path / "first")
    batches = iter(loader)
    seen = next(batches)["id"].tolist()
    state = loader.state_dict()
    batches.close()
    table.append(rows(8, 2))
    as_a_new_process()
    loader = make_loader("iceberg://lake/space.table@main", 2, cache_dir=tmp_path / "second")
    loader.load_state_dict(state, on_change="continue")
    assert sorted(seen + [number for batch in loader for number in batch["id"].tolist()]) == list(range(10))


@pytest.mark.parametrize("choice", ["continue", "next_epoch"])
def test_a_copy_in_another_process_knows_the_columns_of_other_versions_by_their_names_there(choice, table):
    def loader(name: str) -> Any:
        as_a_new_process()
        how = {"columns": ["id", name], "fill_null": {name: "none"}, "cache": False}
        return make_loader(pickle.loads(pickle.dumps(make_dataset("iceberg://lake/space.table", **how))), 2)

    first = loader("text")
    batches = iter(first)
    seen = next(batches)["id"].tolist()
    state = first.state_dict()
    batches.close()
    with table.update_schema() as update:
        update.rename_column("text", "word")
    table.append(rows(8, 1).rename_columns(["id", "word"]))
    resumed = loader("word")
    resumed.load_state_dict(state, on_change=choice)
    rest = list(resumed)
    assert sorted(seen + [each for batch in rest for each in batch["id"].tolist()]) == [
        *range(8 + (choice == "continue"))
    ]
    assert {*rest[0]} == {"id", "word" if choice == "continue" else "text"}


@pytest.mark.parametrize("choice", ["continue", "next_epoch"])
def test_a_copy_that_names_no_columns_does_not_read_its_own_snapshot_again(choice, table):
    """So it may be gone."""
    source = "iceberg://lake/space.table"
    first = make_loader(source, 2, cache=False)
    seen, state = next(iter(first))["id"].tolist(), first.state_dict()
    table.append(rows(8, 1))
    copy = pickle.loads(pickle.dumps(make_dataset(source, cache=False)))
    table.append(rows(9, 1))
    table.maintenance.expire_snapshots().by_id(table.snapshots()[-2].snapshot_id).commit()
    as_a_new_process()
    resumed = make_loader(copy, 2)
    resumed.load_state_dict(state, on_change=choice)
    rest = [each for batch in resumed for each in batch["id"].tolist()]
    assert sorted(seen + rest) == [*range(8 + (choice == "continue"))]


def test_a_filter_that_cannot_be_applied_is_told(table):
    with pytest.raises(ConfigError, match=r"the scan's row_filter cannot be applied"):
        make_dataset(table.scan(row_filter="id > 'x'"), cache=False)
    with pytest.raises(DataError, match=r"has no files, so no rows: none may match the scan's row filter"):
        make_dataset(table.scan(row_filter="id > 1000"), cache=False)


def test_deletion_vectors_of_large_files_are_read():
    [(name, found)] = vectors_of(puffin({"a file": list(range(0, 200_000, 3))}), {"a file": 200_000})
    assert name == "a file"
    assert found.tolist() == list(range(0, 200_000, 3))


def test_a_snapshot_that_is_not_there_is_named_with_the_newest(table):
    newest = table.current_snapshot().snapshot_id
    for source in ("iceberg://lake/space.table@77", table.scan(snapshot_id=77)):
        with pytest.raises(ConfigError, match=f"has no snapshot 77, of 2: .* its newest is {newest}"):
            make_dataset(source, cache=False)


def test_a_table_that_is_not_there_is_not_found(table):
    with pytest.raises(OriginNotFound, match=r"iceberg://lake/space.other: the catalog has no such table"):
        make_dataset("iceberg://lake/space.other", cache=False)


def test_unknown_catalogs_and_wrong_urls_are_told(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"must be iceberg://catalog/namespace.table"):
        make_dataset("iceberg://lake/table", cache=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pyiceberg knows no catalog 'nowhere': describe it in ~/.pyiceberg.yaml"):
        make_dataset("iceberg://nowhere/space.table", cache=False)


def test_a_catalog_that_does_not_answer_is_told(monkeypatch):
    monkeypatch.setenv("PYICEBERG_CATALOG__DOWN__URI", "http://user:s3cret@127.0.0.1:9")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    with pytest.raises(
        OriginError, match=r"iceberg://down/space.table: the catalog or the table's metadata cannot"
    ) as found:
        make_dataset("iceberg://down/space.table", cache=False)
    assert "s3cret" not in str(found.value)


def test_a_catalog_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr("dataload.catalog.iceberg.CATALOG_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which takes connections, and answers none
        monkeypatch.setenv("PYICEBERG_CATALOG__SILENT__URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
        with pytest.raises(OriginError, match=r"iceberg://silent/space.table: the catalog has not answered for 0.1 s"):
            make_dataset("iceberg://silent/space.table", cache=False)


def test_a_catalog_that_gives_up_is_told_in_its_own_words(table, monkeypatch):
    def gives_up(*_: object) -> None:
        raise TimeoutError("the database is locked")

    monkeypatch.setattr(type(table.catalog), "load_table", gives_up)
    with pytest.raises(OriginError, match=r"cannot be read by pyiceberg \(TimeoutError\): the database is locked"):
        make_dataset(table, cache=False).refresh()


class Catalog(BaseHTTPRequestHandler):
    """Answers a table with credentials of its store, and with metadata that are none."""

    def do_GET(self) -> None:
        content = {"defaults": {}, "overrides": {}} if "/config" in self.path else {"config": VENDED, "metadata": {}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_that_cannot_be_read_shows_no_credentials(monkeypatch):
    with serving(Catalog) as url:
        monkeypatch.setenv("PYICEBERG_CATALOG__VENDING__URI", url)
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
        with pytest.raises(OriginError, match=r"iceberg://vending/space.table: .* \(ValidationError\)") as found:
            make_dataset("iceberg://vending/space.table", cache=False)
    assert VENDED["s3.secret-access-key"] not in "".join(traceback.format_exception(found.value))


def configure(monkeypatch, name: str, **properties: str) -> None:
    for key, value in properties.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__{name.upper()}__{key.upper()}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())


@pytest.mark.parametrize(
    ("properties", "problem"),
    [
        ({"uri": "http://127.0.0.1:9", "token": "tok-s3cret\n"}, "its token or headers may have one line only"),
        ({"uri": "http://127.0.0.1:9", "header__x_key": "s3cret\n"}, "its token or headers may have one line only"),
        ({"uri": "user:s3cret@127.0.0.1:9", "type": "rest"}, "its uri must begin with https://"),
        ({"uri": "s3cret@127.0.0.1:9", "type": "sql"}, "ArgumentError"),
        ({"type": "s3cret", "token": "s3cret"}, "check its type and uri: '…' is not a valid CatalogType"),
    ],
)
def test_errors_of_a_catalog_show_no_credentials(properties, problem, monkeypatch):
    configure(monkeypatch, "hidden", **properties)
    with pytest.raises((ConfigError, OriginError), match=rf"iceberg://hidden/space.table: .*{problem}") as found:
        make_dataset("iceberg://hidden/space.table", cache=False)
    assert "s3cret" not in "".join(traceback.format_exception(found.value))


def test_errors_of_a_table_show_no_credentials_of_its_catalog_and_store(table, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("the store of VENDED-S3CRET refuses tok-S3CRET")

    table.catalog.properties["token"] = "tok-S3CRET"
    table.io.properties["s3.session-token"] = "VENDED-S3CRET"
    monkeypatch.setattr("pyiceberg.table.DataScan.plan_files", fails)
    for source in (table, table.scan()):
        with pytest.raises(OriginError, match="the store of … refuses …") as found:
            make_dataset(source, cache=False)
        assert "S3CRET" not in "".join(traceback.format_exception(found.value))


def test_a_configuration_that_cannot_be_read_shows_no_credentials(tmp_path, monkeypatch):
    (tmp_path / ".pyiceberg.yaml").write_text("catalog:\n  prod:\n    token: S3CRET\n   uri: x: y")
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"~/.pyiceberg.yaml, or a variable PYICEBERG_…, cannot be read") as found:
        make_dataset("iceberg://prod/space.table", cache=False)
    assert "S3CRET" not in "".join(traceback.format_exception(found.value))


class LogIn(BaseHTTPRequestHandler):
    """Answers everything with a page to log in."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Please log in</html>")

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


def test_what_is_no_catalog_is_told(monkeypatch):
    with serving(LogIn) as url:
        configure(monkeypatch, "page", uri=url)
        with pytest.raises(ConfigError, match=r"the catalog 'page' cannot be opened .*: what answers is no catalog"):
            make_dataset("iceberg://page/space.table", cache=False)


def test_what_is_no_token_endpoint_is_told(tmp_path, monkeypatch):
    with serving(LogIn) as url:
        oauth = f"client_id: me\n        client_secret: S3CRET\n        token_url: {url}"
        auth = f"auth:\n      type: oauth2\n      oauth2:\n        {oauth}"
        (tmp_path / ".pyiceberg.yaml").write_text(f"catalog:\n  page:\n    {auth}\n")
        monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
        configure(monkeypatch, "page", uri=url)
        with pytest.raises(ConfigError, match=r"the catalog 'page' cannot be opened .*: what answers is no catalog"):
            make_dataset("iceberg://page/space.table", cache=False)


def planning(table: Any) -> type[BaseHTTPRequestHandler]:
    """Return a catalog that answers with a table, and not at all when it is asked which files to read."""
    answer = {"metadata-location": table.metadata_location, "metadata": json.loads(table.metadata.model_dump_json())}
    paths = "/v1/{prefix}/namespaces/{namespace}/tables/{table}"
    config = {"defaults": {"scan-planning-mode": "server"}, "overrides": {}}
    config["endpoints"] = [f"GET {paths}", f"POST {paths}/plan"]

    class Planning(LogIn):
        asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        given_up = threading.Event()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(config if "/config" in self.path else {**answer, "config": {}}).encode())

        def do_POST(self) -> None:
            self.asked.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.given_up.wait(60)

    return Planning


def test_a_catalog_that_plans_a_scan_is_told_its_snapshot_and_given_up(table, monkeypatch):
    handler = planning(table)
    answered = iceberg._answered

    def with_deadline(name: str, call: Any, requests: int = 1) -> Any:
        """Give up at once what is asked after the table has been loaded."""
        monkeypatch.setattr(iceberg, "CATALOG_SECONDS", 60 if requests == 1 else 0.01)
        return answered(name, call, requests)

    monkeypatch.setattr(iceberg, "_answered", with_deadline)
    with serving(handler) as url:
        configure(monkeypatch, "plans", uri=url)
        with pytest.raises(OriginError, match=r"iceberg://plans/space.table: the catalog has not answered for 0.05 s"):
            make_dataset("iceberg://plans/space.table", cache=False)
        try:
            assert handler.asked.get(timeout=60)["snapshot-id"] == table.metadata.current_snapshot_id
        finally:
            handler.given_up.set()


def test_a_selected_column_that_is_renamed_is_told(table):
    dataset = make_dataset(table.scan(selected_fields=("id",)), cache=False)
    with table.update_schema() as update:
        update.rename_column("id", "key")
    with pytest.raises(ConfigError, match=r"has no column 'id', which the scan's selected_fields names: .* scan\(\)"):
        dataset.refresh()


def test_a_table_without_snapshots_is_told(catalog):
    made = catalog.create_table("space.empty", rows(0, 1).schema)
    with pytest.raises(DataError, match=r"iceberg://lake/space.empty has no snapshot, so no rows"):
        make_dataset(made, cache=False)


def test_a_table_without_rows_is_told(table):
    table.delete("id >= 0")
    with pytest.raises(DataError, match="has no files, so no rows"):
        make_dataset(table, cache=False)


def test_files_that_are_gone_are_told(table):
    for file in data_files(table):
        Path(file.file_path.removeprefix("file://")).unlink()
    with pytest.raises(OriginNotFound, match="VACUUM or expire_snapshots has removed it"):
        make_dataset(table, cache=False)


class OfS3:
    """A table in S3."""

    def __init__(self, bucket, folder: Path) -> None:
        self.bucket = bucket
        self.secrets = {"s3.access-key-id": "testing", "s3.secret-access-key": "testing", "s3.region": "us-east-1"}
        options = {"s3.endpoint": bucket.server.endpoint_url, **self.secrets}
        self.catalog = catalog_in(folder, bucket.url("warehouse"), **options)
        self.table = self.catalog.create_table("space.table", rows(0, 1).schema)

    def fetched(self, call) -> set[str]:
        """Return the files of data of which a call fetches bytes."""
        before = len(self.bucket.server.requests)
        call()
        sent = self.bucket.server.requests[before:]
        names = {each.path.rpartition("/")[2] for each in sent if each.method == "GET"}
        return {name for name in names if name.endswith((".parquet", ".puffin"))}

    @property
    def names(self) -> set[str]:
        return {file.file_path.rpartition("/")[2] for file in data_files(self.table)}


@pytest.fixture
def remote(bucket, tmp_path):
    made = OfS3(bucket, tmp_path / "lake")
    yield made
    made.catalog.engine.dispose()


def test_a_new_snapshot_fetches_only_its_new_files(remote, tmp_path):
    for number in range(3):
        remote.table.append(rows(10 * number, 10))
    known = remote.names
    assert remote.fetched(lambda: rows_of(make_dataset(remote.table, cache_dir=tmp_path / "cache"))) == known
    remote.table.append(rows(100, 10))
    assert (
        remote.fetched(lambda: rows_of(make_dataset(remote.table, cache_dir=tmp_path / "cache")))
        == remote.names - known
    )


def test_a_snapshot_that_only_deletes_fetches_no_file_of_data(remote, tmp_path):
    remote.table.append(rows(0, 10))
    rows_of(make_dataset(remote.table, cache_dir=tmp_path / "cache"))
    [file] = data_files(remote.table)
    remote.bucket.put("warehouse/vector.puffin", puffin({file.file_path: [2, 5]}))
    add_deletes(remote.table, remote.bucket.url("warehouse/vector.puffin"), file, FileFormat.PUFFIN, 2)
    found: list[int] = []
    names = remote.fetched(
        lambda: found.extend(make_dataset(remote.table, cache_dir=tmp_path / "cache")["id"].tolist())
    )
    assert found == np.delete(np.arange(10), [2, 5]).tolist()
    assert names == {"vector.puffin"}
