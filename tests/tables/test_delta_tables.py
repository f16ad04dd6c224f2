"""Delta tables as sources: what their versions have, what is fetched, and what is refused."""

from __future__ import annotations

import datetime as dt
import json
import sys
import traceback
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

pytest.importorskip("deltalake")

from delta_histories import DeltaHistory, deletion_vector
from deltalake import DeltaTable, write_deltalake
from table_rows import check_same, rows_of

from dataload import make_dataset, make_loader, mix
from dataload.cli import app
from dataload.errors import ConfigError, DataError, DataloadError, OriginError, OriginNotFound

SECRET = "s3cret-of-the-table"


def rows(first: int, count: int) -> pa.Table:
    ids = range(first, first + count)
    return pa.table({"id": pa.array(ids, pa.int64()), "text": [f"row {each}" for each in ids]})


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = f"{tmp_path}/table"
    write_deltalake(path, rows(0, 4))
    write_deltalake(path, rows(4, 4), mode="append")
    return path


def ids(source: object, **options: object) -> list[int]:
    return sorted(make_dataset(source, cache=False, **options)["id"].tolist())


def commit(path: str, *actions: dict[str, object]) -> None:
    version = DeltaTable(path).version() + 1
    Path(f"{path}/_delta_log/{version:020}.json").write_text("\n".join(map(json.dumps, actions)))


def delete_by_vector(path: str, kind: str, numbers: list[int]) -> None:
    """Delete rows of the oldest file of a table by a deletion vector."""
    [(name, add), *_] = sorted(adds(path).items(), key=lambda item: item[1]["modificationTime"])
    features = {"minReaderVersion": 3, "minWriterVersion": 7}
    names = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    vector = deletion_vector(Path(path), numbers, kind)
    remove = {"path": name, "deletionTimestamp": 1, "dataChange": True}
    commit(path, {"protocol": {**features, **names}}, {"remove": remove}, {"add": {**add, "deletionVector": vector}})


def adds(path: str) -> dict[str, dict[str, object]]:
    lines = [line for log in Path(f"{path}/_delta_log").glob("*.json") for line in log.read_text().splitlines()]
    found = [json.loads(line) for line in lines]
    return {each["add"]["path"]: each["add"] for each in found if "add" in each}


def test_table_objects_and_urls_name_versions(table):
    assert ids(DeltaTable(table)) == ids(f"delta+{table}") == ids(f"delta+file://{table}") == list(range(8))
    assert ids(DeltaTable(table, version=0)) == ids(f"delta+{table}@0") == list(range(4))


def test_loaders_and_mixtures_take_tables(table):
    loader = make_loader(DeltaTable(table), 3, cache=False)
    assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(8))
    mixture = mix({"old": f"delta+{table}@0", "new": DeltaTable(table)}, cache=False)
    assert len(mixture) == 12


def test_partition_values_have_the_types_of_the_table(tmp_path):
    columns = {
        "day": pa.array([dt.date(2020, 1, 2), None], pa.date32()),
        "time": pa.array([dt.datetime(2020, 1, 2, 3, 4, 5, 6, dt.UTC), None], pa.timestamp("us", "UTC")),
        "price": pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)),
        "flag": pa.array([True, None]),
        "text": pa.array(["a b/%2F=ü", None]),
        "number": pa.array([-7, None], pa.int8()),
        "ratio": pa.array([0.1, None], pa.float32()),
        "id": pa.array([1, 2]),
    }
    write_deltalake(f"{tmp_path}/t", pa.table(columns), partition_by=[name for name in columns if name != "id"])
    found = DeltaTable(f"{tmp_path}/t")
    check_same(found, pa.table(found.scan()))
    assert ids(found, filters=[("day", "=", dt.date(2020, 1, 2))], null_masks=True) == [1]
    assert ids(found, filters=pc.field("price") > Decimal(1), null_masks=True) == [1]
    assert ids(found, filters=pc.field("flag").is_null(), null_masks=True) == [2]


def test_filters_read_names_of_the_table(tmp_path):
    history = DeltaHistory(tmp_path / "t", 2, "name")
    history.rename()
    renamed = pa.table(history.table.scan())
    numbers = [
        each.name for each in renamed.schema if pa.types.is_integer(each.type) or pa.types.is_floating(each.type)
    ]
    for name in numbers:
        least = pc.max(renamed[name])
        kept = make_dataset(history.table, filters=pc.field(name) >= least, null_masks=True, cache=False)
        assert len(kept) == pc.sum(pc.greater_equal(renamed[name], least)).as_py()
    assert len(numbers) == 2


def test_a_name_that_moves_to_another_column_has_no_rows_of_the_cache(tmp_path):
    """Two versions call two columns of one file "a"; rows of one must not be found for the other."""
    path, cache = tmp_path / "t", tmp_path / "cache"
    write_deltalake(str(path), pa.table({"a": [1, 5], "b": [3, 0]}), configuration={"delta.columnMapping.mode": "name"})
    before = json.loads(DeltaTable(str(path)).schema().to_json())
    assert sorted(make_dataset(f"delta+{path}", cache_dir=cache)["a"].tolist()) == [1, 5]
    first, second = before["fields"]
    first["name"], second["name"] = "b", "a"
    log = [json.loads(line) for line in (path / "_delta_log" / f"{0:020}.json").read_text().splitlines()]
    [metadata] = [each["metaData"] for each in log if "metaData" in each]
    commit(str(path), {"metaData": {**metadata, "schemaString": json.dumps(before)}})
    assert sorted(make_dataset(f"delta+{path}", cache_dir=cache)["a"].tolist()) == [0, 3]
    assert sorted(make_dataset(f"delta+{path}@0", cache_dir=cache)["a"].tolist()) == [1, 5]
    assert sorted(make_dataset(f"delta+{path}", cache_dir=cache, filters=[("a", ">", 2)])["a"].tolist()) == [3]
    assert sorted(make_dataset(f"delta+{path}@0", cache_dir=cache, filters=[("a", ">", 2)])["a"].tolist()) == [5]
    state = make_loader(f"delta+{path}@0", 1, cache=False).state_dict()
    with pytest.raises(ConfigError, match=r"the state is of delta\+.*t@0, and this loader reads delta\+"):
        make_loader(f"delta+{path}", 1, cache=False).load_state_dict(state)


@pytest.mark.parametrize("kind", ["i", "u", "p"])
def test_deletion_vectors_delete_rows(kind, table):
    delete_by_vector(table, kind, [0, 3])
    assert ids(f"delta+{table}") == [1, 2, 4, 5, 6, 7]
    assert ids(f"delta+{table}@1") == list(range(8))


def test_unknown_reader_features_are_refused_by_name(table):
    commit(
        table,
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": ["deletionVectors", "telepathy"],
                "writerFeatures": ["deletionVectors", "telepathy"],
            }
        },
    )
    with pytest.raises(DataError, match=r"telepathy.*copy its rows to plain Parquet"):
        make_dataset(f"delta+{table}", cache=False)
    assert ids(f"delta+{table}@1") == list(range(8))


def test_a_version_that_is_not_there_is_named_with_the_newest(table):
    with pytest.raises(ConfigError, match=r"has no version 9: its newest is 1; leave out @9"):
        make_dataset(f"delta+{table}@9", cache=False)
    with pytest.raises(OriginNotFound, match="table@new: there is no Delta table"):
        make_dataset(f"delta+{table}@new", cache=False)


@pytest.mark.parametrize("name", ["x@y", "two  spaces", "50%?", "x@3/t"])
def test_a_pin_opens_a_table_again_whatever_its_folder_is_called(name, tmp_path):
    write_deltalake(f"{tmp_path}/{name}", rows(0, 4))
    pinned = make_dataset(f"delta+{tmp_path}/{name}", cache=False).manifest.pinned
    write_deltalake(f"{tmp_path}/{name}", rows(4, 4), mode="append")
    assert ids(pinned) == list(range(4))


@pytest.mark.parametrize("url", ["file:///etc/rows.parquet", "/etc/rows.parquet", "http://127.0.0.1:9/rows.parquet"])
def test_a_table_in_a_store_names_no_files_elsewhere(url, remote):
    remote.write(0, 4)
    stats = {"size": 500, "modificationTime": 1, "dataChange": True, "partitionValues": {}}
    log = json.dumps({"add": {"path": url, **stats}}).encode()
    remote.bucket.put(f"table/_delta_log/{1:020}.json", log)
    with pytest.raises(DataError, match=r"rows.parquet, which is not in the store of the table"):
        make_dataset(remote.table, cache=False)


def test_rows_of_a_table_leave_the_cache_by_its_url(table, tmp_path):
    rows_of(make_dataset(f"delta+{table}", cache_dir=tmp_path / "cache"))
    evict = ["cache", "evict", f"delta+{table}@1", "--cache-dir", str(tmp_path / "cache")]
    app.app(evict, standalone_mode=False)
    with pytest.raises(DataloadError, match="the cache holds no blobs of"):
        app.app(evict, standalone_mode=False)


def test_a_version_whose_log_is_gone_is_told(table):
    DeltaTable(table).create_checkpoint()
    Path(f"{table}/_delta_log/{0:020}.json").unlink()
    assert ids(f"delta+{table}") == list(range(8))
    with pytest.raises(ConfigError, match="version 0 cannot be read any more, of 2 versions: the log of old ones"):
        make_dataset(f"delta+{table}@0", cache=False)


def test_a_folder_that_is_no_table_is_not_found(tmp_path):
    with pytest.raises(OriginNotFound, match="there is no Delta table"):
        make_dataset(f"delta+{tmp_path}", cache=False)


def test_vacuumed_files_are_told(table):
    write_deltalake(table, rows(8, 2), mode="overwrite")
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert ids(f"delta+{table}") == [8, 9]
    with pytest.raises(OriginNotFound, match="VACUUM or expire_snapshots has removed it"):
        make_dataset(f"delta+{table}@1", cache=False)


def test_deletion_vectors_that_are_vacuumed_are_told(table):
    delete_by_vector(table, "u", [0])
    [file] = Path(table).glob("*.bin")
    file.unlink()
    with pytest.raises(OriginNotFound, match=f"table@2: a file of its deletion vectors is gone, .*{file.name}"):
        make_dataset(f"delta+{table}", cache=False)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/table", {"token": "RAWSECRET"}),
        ("s3://bucket/table", {"AWS_SKIP_SIGNATURE": "RAWSECRET"}),
    ],
)
def test_errors_of_a_log_show_no_credentials(url, options):
    with pytest.raises(OriginError, match=r"log of the table cannot be read by deltalake: Generic .*…") as caught:
        make_dataset(f"delta+{url}", cache=False, storage_options=options)
    shown = "".join(traceback.format_exception(caught.value))
    assert "RAWSECRET" not in shown
    assert "\x1b" not in str(caught.value)


def test_files_that_are_vacuumed_while_they_are_read_are_told(table, tmp_path):
    dataset = make_dataset(f"delta+{table}@1", cache_dir=tmp_path / "cache")
    write_deltalake(table, rows(8, 2), mode="overwrite")
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(OriginNotFound, match="VACUUM or expire_snapshots has removed it"):
        dataset["id"]


def test_rows_that_are_cached_outlive_a_vacuum(table, tmp_path):
    first = rows_of(make_dataset(f"delta+{table}@1", cache_dir=tmp_path / "cache"))
    write_deltalake(table, rows(8, 2), mode="overwrite")
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert rows_of(make_dataset(f"delta+{table}@1", cache_dir=tmp_path / "cache")) == first


def test_tables_without_rows_are_told(tmp_path, table):
    DeltaTable.create(f"{tmp_path}/empty", pa.schema([pa.field("id", pa.int64())]))
    with pytest.raises(DataError, match=r"delta\+.*empty@0 has no files, so no rows"):
        make_dataset(f"delta+{tmp_path}/empty", cache=False)


def test_a_table_in_a_list_is_refused(table):
    with pytest.raises(ConfigError, match=r"has the table delta\+.* in a list: pass it alone, or mix"):
        make_dataset([f"delta+{table}"], cache=False)
    with pytest.raises(ConfigError, match=r"item of type DeltaTable: mix\(\[…\]\) reads several datasets"):
        make_dataset([DeltaTable(table)], cache=False)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"a Delta table needs deltalake: pip install 'dataload\[delta\]'"):
        make_dataset("delta+s3://bucket/table", cache=False)


def test_the_folder_of_a_table_is_refused_with_its_own_name(table):
    with pytest.raises(ConfigError, match=rf"name the table itself, delta\+{table}; or pass a list"):
        make_dataset(table, cache=False)


class OfS3:
    """A table in S3."""

    def __init__(self, bucket) -> None:
        self.bucket, self.url = bucket, bucket.url("table")
        self.options = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": bucket.server.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_S3_ALLOW_UNSAFE_RENAME": "true",
        }

    def write(self, first: int, count: int) -> None:
        write_deltalake(self.url, rows(first, count), mode="append", storage_options=self.options)

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.url, storage_options=self.options)

    def fetched(self, call) -> set[str]:
        """Return the files of data of which a call fetches bytes."""
        before = len(self.bucket.server.requests)
        call()
        sent = self.bucket.server.requests[before:]
        return {each.path.rpartition("/")[2] for each in sent if each.method == "GET" and ".parquet" in each.path}


@pytest.fixture
def remote(bucket) -> OfS3:
    return OfS3(bucket)


def test_a_table_gives_its_own_storage_options(remote, tmp_path, caplog):
    caplog.set_level("DEBUG", "dataload")
    remote.write(0, 5)
    loader = make_loader(remote.table, 2, cache_dir=tmp_path / "cache")
    assert sorted(number for batch in loader for number in batch["id"].tolist()) == list(range(5))
    told = [repr(loader), repr(loader.dataset.manifest), json.dumps(loader.state_dict()), caplog.text]
    assert not [text for text in told if SECRET in text]
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if SECRET.encode() in path.read_bytes()]


def test_a_new_version_fetches_only_its_new_files(remote, tmp_path):
    for number in range(10):
        remote.write(10 * number, 10)
    known = {Path(path).name for path in remote.table.file_uris()}
    assert remote.fetched(lambda: rows_of(make_dataset(remote.table, cache_dir=tmp_path / "cache"))) == known
    remote.write(100, 10)
    new = {Path(path).name for path in remote.table.file_uris()} - known
    assert remote.fetched(lambda: rows_of(make_dataset(remote.table, cache_dir=tmp_path / "cache"))) == new


def test_a_version_that_only_deletes_fetches_no_file_of_data(remote, tmp_path):
    remote.write(0, 10)
    rows_of(make_dataset(remote.table, cache_dir=tmp_path / "cache"))
    [name] = [Path(path).name for path in remote.table.file_uris()]
    body = remote.bucket.client.get_object(Bucket=remote.bucket.name, Key=f"table/_delta_log/{0:020}.json")[
        "Body"
    ].read()
    [add] = [json.loads(line)["add"] for line in body.splitlines() if b'"add"' in line]
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    actions = [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"remove": {"path": name, "deletionTimestamp": 1, "dataChange": True}},
        {"add": {**add, "deletionVector": deletion_vector(tmp_path, [2, 5], "i")}},
    ]
    remote.bucket.put(f"table/_delta_log/{1:020}.json", "\n".join(map(json.dumps, actions)).encode())
    found: list[int] = []
    names = remote.fetched(
        lambda: found.extend(make_dataset(remote.table, cache_dir=tmp_path / "cache")["id"].tolist())
    )
    assert found == [0, 1, 3, 4, 6, 7, 8, 9]
    assert names == set()


def test_widened_columns_have_the_values_of_old_and_new_files(tmp_path):
    """Deltalake opens such a table, and reads none of its rows."""
    path = f"{tmp_path}/table"
    narrow = {"id": pa.array([1, 2], pa.int32()), "x": pa.array([0.5, None], pa.float32())}
    write_deltalake(path, pa.table({**narrow, "price": pa.array([Decimal("1.25"), None], pa.decimal128(5, 2))}))
    lines = Path(f"{path}/_delta_log/{0:020}.json").read_text().splitlines()
    [metadata] = [found["metaData"] for found in map(json.loads, lines) if "metaData" in found]
    schema = json.loads(metadata["schemaString"])
    for field, wider in zip(schema["fields"], ("long", "double", "decimal(12,2)"), strict=True):
        field["metadata"] = {"delta.typeChanges": [{"fromType": field["type"], "toType": wider}]}
        field["type"] = wider
    features = {"readerFeatures": ["typeWidening"], "writerFeatures": ["typeWidening"]}
    commit(
        path,
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"metaData": {**metadata, "schemaString": json.dumps(schema)}},
    )
    wide = pa.table({"id": [1 << 40], "x": [1 / 3], "price": pa.array([Decimal("1234567.89")], pa.decimal128(12, 2))})
    pq.write_table(wide, f"{path}/wide.parquet")
    [add] = adds(path).values()
    size = Path(f"{path}/wide.parquet").stat().st_size
    commit(path, {"add": {**add, "path": "wide.parquet", "size": size, "stats": '{"numRecords": 1}'}})
    dataset = make_dataset(f"delta+{path}", cache=False)
    assert dataset.schema.types == [pa.int64(), pa.float64(), pa.decimal128(12, 2)]
    assert sorted(dataset["id"].tolist()) == [1, 2, 1 << 40]
    assert sorted(map(str, dataset["x"].tolist())) == sorted(["0.5", "nan", str(1 / 3)])
    assert sorted(map(str, dataset["price"].tolist())) == ["1.25", "1234567.89", "nan"]
    assert make_dataset(f"delta+{path}@0", cache=False).schema.types[:2] == [pa.int32(), pa.float32()]
