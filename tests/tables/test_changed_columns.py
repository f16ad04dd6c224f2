"""Epochs that go on after the columns of their table have changed: other names, wider types, members and schemas."""

from __future__ import annotations

import datetime as dt
import io
import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from growing import as_a_new_process

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from iceberg_histories import catalog_in
from pyiceberg.types import LongType, StringType

from dataload import make_dataset, make_loader
from dataload.errors import ConfigError
from dataload.formats.table_columns import ID, STORED, TableColumns, TableFile, with_table_names
from dataload.lineage import calls_as_json


@pytest.fixture
def table(tmp_path: Path) -> Any:
    """Return a function that returns the table as the catalog has it now: rows of id and ten times id."""
    catalog = catalog_in(tmp_path / "lake")
    rows = pa.table({"id": pa.array(range(12), pa.int64()), "tens": pa.array(range(0, 120, 10), pa.int64())})
    catalog.create_table("space.table", rows.schema).append(rows)
    yield lambda: catalog.load_table("space.table")
    catalog.engine.dispose()


def rename(table: Any, *names: tuple[str, str]) -> None:
    for old, new in names:
        with table().update_schema() as update:
            update.rename_column(old, new)


def add(table: Any, name: str, kind: Any) -> None:
    with table().update_schema() as update:
        update.add_column(name, kind)


def begun(source: Any, **options: Any) -> tuple[list[dict[str, list[Any]]], Any]:
    """Return the first two batches of an epoch and the state after them, of a process that has ended."""
    loader = make_loader(source, 2, **options)
    batches = iter(loader)
    rows = [listed(next(batches)) for _ in range(2)]
    state = json.loads(json.dumps(loader.state_dict()))
    batches.close()
    as_a_new_process()
    return rows, state


def ended(source: Any, state: Any, choice: str, **options: Any) -> list[dict[str, list[Any]]]:
    loader = make_loader(source, 2, **options)
    loader.load_state_dict(state, on_change=choice)
    return [listed(batch) for batch in loader]


def listed(batch: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: values.tolist() if hasattr(values, "tolist") else list(values) for name, values in batch.items()}


def column(batches: list[dict[str, list[Any]]], name: str) -> list[Any]:
    return [value for batch in batches for value in batch[name]]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["table", "scan"])
def test_the_rest_of_an_epoch_has_the_names_that_its_beginning_had(kind, cached, table, tmp_path):
    """Columns may change their names without a new snapshot."""
    options = {"cache_dir": tmp_path / "cache"} if cached else {"cache": False}

    def source() -> Any:
        return table() if kind == "table" else table().scan()

    rename(table, ("id", "between"), ("tens", "id"), ("between", "tens"))
    first, state = begun(source(), **options)
    table().append(pa.table({"tens": pa.array([12], pa.int64()), "id": pa.array([120], pa.int64())}))
    rest = ended(source(), state, "next_epoch", **options)
    assert sorted(column(first + rest, "id")) == list(range(0, 120, 10))
    as_a_new_process()
    rest = ended(source(), state, "continue", **options)
    assert sorted(column(first + rest, "id")) == list(range(0, 130, 10))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("is_chosen_by", ["columns", "scan"])
def test_chosen_columns_are_those_of_the_earlier_version_by_their_names_there(is_chosen_by, cached, table, tmp_path):
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache"} if cached else {"cache": False}

    def how(name: str) -> Any:
        if is_chosen_by == "scan":
            return (table().scan(selected_fields=(name,)),)
        options["columns"] = [name]
        return (table(),)

    first, state = begun(*how("id"), **options)
    rename(table, ("id", "key"))
    table().append(pa.table({"key": pa.array([12], pa.int64()), "tens": pa.array([120], pa.int64())}))
    rest = ended(*how("key"), state, "next_epoch", **options)
    assert {tuple(batch) for batch in rest} == {("id",)}
    assert sorted(column(first + rest, "id")) == list(range(12))
    as_a_new_process()
    rest = ended(*how("key"), state, "continue", **options)
    assert sorted(column(first, "id") + column(rest, "key")) == list(range(13))


def test_a_column_that_the_earlier_version_lacks_is_told_with_the_version(table):
    options = {"cache": False, "null_masks": True}
    first, state = begun(table(), columns=["id"], **options)
    snapshot = table().current_snapshot().snapshot_id
    add(table, "more", LongType())
    table().delete("id = 11")
    with pytest.raises(ConfigError, match=f"table@{snapshot}, on which the epoch would end, lacks the column 'more'"):
        ended(table(), state, "next_epoch", columns=["id", "more"], **options)
    as_a_new_process()
    rest = ended(table(), state, "continue", columns=["id", "more"], **options)
    had = column(first, "id")
    assert sorted(had + column(rest, "id")) == sorted({*range(11)} | {*had})


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: 2 * values for name, values in batch.items()}


def test_a_column_of_map_that_the_earlier_version_calls_otherwise_is_told_with_the_version(table):
    first, state = begun(make_dataset(table(), cache=False).map(doubled, columns=["id"]))
    rename(table, ("id", "key"))
    table().delete("key = 11")
    dataset = make_dataset(table(), cache=False).map(doubled, columns=["key"])
    with pytest.raises(ConfigError, match=r"on which the epoch would end, lacks the column 'key'"):
        ended(dataset, state, "next_epoch")
    as_a_new_process()
    rest = ended(dataset, state, "continue")
    had = column(first, "id")
    assert sorted(had + column(rest, "key")) == sorted({*range(0, 22, 2)} | {*had})


def test_rows_are_found_by_columns_with_nulls_that_are_not_read(table):
    table().overwrite(pa.table({"id": pa.array(range(12), pa.int64()), "tens": pa.nulls(12, pa.int64())}))
    first, state = begun(table(), columns=["id"], cache=False)
    add(table, "more", LongType())
    table().delete("id = 11")
    options = {"columns": ["id", "more"], "fill_null": {"more": 0}, "cache": False}
    rest = ended(table(), state, "continue", **options)
    had = column(first, "id")
    assert sorted(had + column(rest, "id")) == sorted({*range(11)} | {*had})


def test_nulls_of_an_earlier_version_are_filled_by_the_names_there(table):
    """Also in the record of the run, and when the rest of the epoch is refreshed."""
    table().overwrite(pa.table({"id": pa.array(range(12), pa.int64()), "tens": pa.nulls(12, pa.int64())}))
    _, state = begun(table(), fill_null={"tens": 7}, cache=False)
    rename(table, ("tens", "more"))
    table().append(pa.table({"id": pa.array([12], pa.int64()), "more": pa.nulls(1, pa.int64())}))
    loader = make_loader(table(), 2, fill_null={"more": 7}, cache=False)
    loader.load_state_dict(state, on_change="next_epoch")
    [call] = calls_as_json(loader.dataset)
    assert call["make_dataset"]["fill_null"] == {"tens": 7}
    dataset = loader.dataset.exclude([0])
    table().delete("id = 11")
    assert dataset.refresh()
    assert sorted(dataset.newest["id"].tolist()) == [*range(1, 11), 12]
    assert dataset.newest["more"].tolist() == [7] * 11


def test_nulls_of_all_versions_of_an_epoch_are_filled_by_the_names_there(table):
    """The epoch ends on a version whose rows, and those before it, were written again."""
    table().overwrite(pa.table({"id": pa.array(range(12), pa.int64()), "tens": pa.nulls(12, pa.int64())}))
    first, state = begun(table(), fill_null={"tens": 7}, cache=False)
    table().delete("id = 11")
    rename(table, ("tens", "more"))
    for gone in (10, 9):
        loader = make_loader(table(), 1, fill_null={"more": 7}, cache=False)
        loader.load_state_dict(state, on_change="continue")
        batches = iter(loader)
        first += [listed(next(batches))]
        state = json.loads(json.dumps(loader.state_dict()))
        batches.close()
        as_a_new_process()
        table().delete(f"id = {gone}")
    rename(table, ("more", "last"))
    rest = ended(table(), state, "next_epoch", fill_null={"last": 7}, cache=False)
    had = column(first, "id")
    assert sorted(had + column(rest, "id")) == sorted({*range(10)} | {*had})
    assert set(column(rest, "more")) == {7}


@pytest.mark.parametrize("by", ["id", "name"])
def test_columns_of_a_wide_table_are_found_in_linear_time(by):
    count = 4000
    numbers = [{ID: str(number).encode()} for number in range(count)]
    stored = pa.schema([pa.field(f"old{n}", pa.int64(), metadata=each) for n, each in enumerate(numbers)])
    file = io.BytesIO()
    pq.write_table(stored.empty_table(), file)
    data = file.getvalue()
    names = [{**each, STORED: json.dumps([f"old{n}"]).encode()} for n, each in enumerate(numbers)]
    fields = [pa.field(f"new{n}", pa.int64(), metadata=each) for n, each in enumerate(names)]
    columns = TableColumns(pa.schema(fields[::-1]), by)
    footer = memoryview(data)[-8 - int.from_bytes(data[-8:-4], "little") :]
    start = time.perf_counter()
    _, renamed = with_table_names(footer, TableFile("wide.parquet", len(data), "", columns=columns))
    assert time.perf_counter() - start < 3  # of a tenth, and not of ten
    assert renamed == {f"new{n}": json.dumps([[f"old{n}", f"new{n}"]]) for n in range(count)}


def test_filters_that_an_earlier_version_does_not_know_are_told_with_the_version(table):
    _, state = begun(table(), filters=[("id", ">", 1)], cache=False)
    snapshot = table().current_snapshot().snapshot_id
    rename(table, ("id", "key"))
    with pytest.raises(ConfigError, match=f"table@{snapshot}, of which the epoch has rows: column 'key' is not in"):
        ended(table(), state, "continue", filters=[("key", ">", 1)], cache=False)


# Rows that a table writes again


def member(kind: Any) -> Any:
    return {"name": "a", "type": kind, "nullable": True, "metadata": {}}


DAYS = [dt.date(2020, 1, 1) + dt.timedelta(day) for day in range(8)]
LIST = {"type": "array", "containsNull": True}
WIDER = {
    "timestamp": (pa.array(DAYS, pa.date32()), "timestamp_ntz", pa.timestamp("us")),
    "decimal": (pa.array([Decimal(row) / 4 for row in range(8)], pa.decimal128(5, 2)), "decimal(20,4)", None),
    "of an integer": (pa.array(range(8), pa.int32()), "decimal(12,2)", None),
    "member": (
        pa.array([[{"a": row}] for row in range(8)], pa.list_(pa.struct([("a", pa.int32())]))),
        {**LIST, "elementType": {"type": "struct", "fields": [member("double")]}},
        pa.list_(pa.struct([("a", pa.float64())])),
    ),
    "decimal of a member": (
        pa.array([[{"a": Decimal(row) / 4}] for row in range(8)], pa.list_(pa.struct([("a", pa.decimal128(5, 2))]))),
        {**LIST, "elementType": {"type": "struct", "fields": [member("decimal(9,4)")]}},
        pa.list_(pa.struct([("a", pa.decimal128(9, 4))])),
    ),
}


def widen(path: str, kind: Any, written: pa.DataType | None) -> None:
    """Give the column "x" of a table a wider type, and write its only file again."""
    log = Path(path, "_delta_log", f"{0:020}.json").read_text().splitlines()
    actions = {name: action for line in log for name, action in json.loads(line).items()}
    schema = json.loads(actions["metaData"]["schemaString"])
    schema["fields"][0]["type"] = kind
    rows = pq.read_table(Path(path, actions["add"]["path"]))["x"]
    if written is None:
        digits, scale = map(int, kind.removeprefix("decimal(").removesuffix(")").split(","))
        written = pa.decimal128(digits, scale)
    pq.write_table(pa.table({"x": rows.cast(written)}), Path(path, "new.parquet"))
    features = ["typeWidening", "timestampNtz"]
    size, times = Path(path, "new.parquet").stat().st_size, {"modificationTime": 1, "dataChange": False}
    commit = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": features,
            }
        },
        {"metaData": {**actions["metaData"], "schemaString": json.dumps(schema)}},
        {"remove": {"path": actions["add"]["path"], "deletionTimestamp": 1, "dataChange": False}},
        {"add": {"path": "new.parquet", "size": size, "partitionValues": {}, **times}},
    ]
    Path(path, "_delta_log", f"{1:020}.json").write_text("\n".join(map(json.dumps, commit)))


@pytest.mark.parametrize("kind", WIDER)
def test_rows_that_are_written_again_with_a_wider_type_come_once_and_stay_excluded(kind, tmp_path):
    values, *wider = WIDER[kind]
    write_deltalake(path := f"{tmp_path}/table", pa.table({"x": values}))
    dataset = make_dataset(DeltaTable(path), cache=False).exclude([0, 5])
    _, state = begun(DeltaTable(path), cache=False)
    widen(path, *wider)
    assert sum(len(batch["x"]) for batch in ended(DeltaTable(path), state, "continue", cache=False)) == 4
    assert dataset.refresh().rows == 0
    assert len(dataset.newest) == 6


@pytest.mark.parametrize("change", ["drop and add", "rename", "add"])
def test_rows_that_are_written_again_are_found_after_a_member_of_a_list_has_changed(change, tmp_path):
    catalog = catalog_in(tmp_path / "lake")
    kind = pa.list_(pa.struct([("a", pa.int64()), ("b", pa.string())]))
    rows = {"id": pa.array(range(12), pa.int64()), "l": pa.array([[{"a": row, "b": "x"}] for row in range(12)], kind)}
    catalog.create_table("space.table", pa.table(rows).schema).append(pa.table(rows))

    def table() -> Any:
        return catalog.load_table("space.table")

    first, state = begun(table(), cache=False)
    if change == "drop and add":
        with table().update_schema() as update:
            update.delete_column("l.element.b")
    if change == "rename":
        rename(table, ("l.element.b", "c"))
    else:
        with table().update_schema() as update:
            update.add_column(("l", "b" if change == "drop and add" else "c"), StringType())
    table().delete("id = 11")
    rest = ended(table(), state, "continue", cache=False)
    had = column(first, "id")
    assert sorted(had + column(rest, "id")) == sorted({*range(11)} | {*had})
    catalog.engine.dispose()


def test_rows_of_partitions_are_found_when_they_are_written_again(tmp_path):
    """Files do not have their keys."""
    path = f"{tmp_path}/table"
    for first in (0, 6):
        rows = pa.table({"id": pa.array(range(first, first + 6), pa.int64()), "part": ["a", "b"] * 3})
        write_deltalake(path, rows, mode="append", partition_by=["part"])
    first, state = begun(DeltaTable(path), cache=False)
    DeltaTable(path).optimize.compact()
    rest = ended(DeltaTable(path), state, "continue", cache=False)
    assert sorted(column(first + rest, "id")) == list(range(12))


@pytest.mark.parametrize("partitions", [(None, ["part"]), (["part"], None), (["part"], ["part", "other"])])
def test_rows_are_found_in_other_partitions(partitions, tmp_path):
    path = str(tmp_path / "table")
    rows = pa.table({"id": range(12), "part": ["a", "b"] * 6, "other": ["c", "d", None] * 4})
    write_deltalake(path, rows, partition_by=partitions[0])
    first, state = begun(DeltaTable(path), cache=False)
    write_deltalake(path, rows, mode="overwrite", schema_mode="overwrite", partition_by=partitions[1])
    rest = ended(DeltaTable(path), state, "continue", cache=False)
    assert sorted(column(first + rest, "id")) == list(range(12))


@pytest.mark.parametrize("values", [pa.array(range(12), pa.int64()), pa.array([[row] for row in range(12)])])
def test_rows_of_types_that_cannot_be_compared_are_told(values, tmp_path):
    path = f"{tmp_path}/table"
    write_deltalake(path, pa.table({"x": [f"row {row}" for row in range(12)]}))
    _, state = begun(DeltaTable(path), cache=False)
    write_deltalake(path, pa.table({"x": values}), mode="overwrite", schema_mode="overwrite")
    with pytest.raises(ConfigError, match=r"table@1 has written rows of .*table@0 again, and they cannot be compared"):
        ended(DeltaTable(path), state, "continue", cache=False)
