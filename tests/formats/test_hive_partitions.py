"""Keys in folder names become columns of the right types, or raise an error."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from dataload import make_dataset, make_loader
from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.config import CacheConfig
from dataload.cache.origin.source import open_source
from dataload.catalog.manifest import Manifest
from dataload.catalog.resolve import resolve
from dataload.catalog.sources import list_objects
from dataload.cli.app import app
from dataload.errors import ConfigError, DataError
from dataload.formats.hive_partitions import Keys, keys_of, partition_columns


def put(bucket: Any, *keys: str, **columns: Any) -> None:
    for number, key in enumerate(keys):
        table = pa.table(columns or {"a": [number]})
        bucket.put_table(f"data/{key}.parquet", table, row_group_size=1)


def manifest_of(bucket: Any, cache: CacheConfig, *sources: str) -> Manifest:
    blocks = Blocks.open(open_source(bucket.url(), bucket.options), cache)
    return resolve([bucket.url(source) for source in sources or ["data"]], blocks)


def run(*words: str) -> str:
    """Run a command. Return its output, or its error."""
    done = CliRunner().invoke(app, words)
    return done.output + str(done.exception or "")


def constants(manifest: Manifest) -> list[dict[str, Any]]:
    return [dict(group.constants) for group in manifest.row_groups]


@pytest.mark.parametrize(
    ("relative", "keys"),
    [
        ("/part.parquet", ()),
        ("/label=cat/part.parquet", (("label", "cat"),)),
        ("/year=2024/plain/day=07/part.parquet", (("year", "2024"), ("day", "07"))),
        ("/label=__HIVE_DEFAULT_PARTITION__/x", (("label", None),)),
        ("/a%20key=50%25%2F2/x", (("a key", "50%/2"),)),
        ("/a=b=c/x", (("a", "b=c"),)),
        ("/a=/x", (("a", ""),)),
        ("/=b/x", ()),
        ("/label=cat.parquet", ()),
        ("", ()),
    ],
)
def test_keys_of_a_path(relative: str, keys: Keys) -> None:
    assert keys_of(relative) == keys


@pytest.mark.parametrize(
    ("values", "kind", "column"),
    [
        (["1", "-20", "007"], pa.int64(), [1, -20, 7]),
        (["1", None], pa.int64(), [1, None]),
        ([str(2**63 - 1), str(-(2**63))], pa.int64(), [2**63 - 1, -(2**63)]),
        (["1", str(2**63)], pa.string(), ["1", str(2**63)]),
        (["1", "9" * 5000], pa.string(), ["1", "9" * 5000]),
        (["1", "1.5"], pa.string(), ["1", "1.5"]),
        (["1", ""], pa.string(), ["1", ""]),
        (["1_0"], pa.string(), ["1_0"]),
        (["\u0663"], pa.string(), ["\u0663"]),
        ([None, None], pa.string(), [None, None]),
    ],
)
def test_types(values: list[str | None], kind: pa.DataType, column: list[Any]) -> None:
    files = {Object(str(number), 1, ""): (("key", value),) for number, value in enumerate(values)}
    fields, found = partition_columns(files, ())
    assert fields == [pa.field("key", kind)]
    assert found == [(("key", value),) for value in column]


def test_keys_are_columns_at_the_end(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "split=train/year=2023/x", "split=train/year=2024/x", "split=val/year=2024/x", a=[1, 2], b=["x", "y"])
    manifest = manifest_of(bucket, cache)
    assert manifest.schema == pa.schema({"a": pa.int64(), "b": pa.string(), "split": pa.string(), "year": pa.int64()})
    expected = [("train", 2023)] * 2 + [("train", 2024)] * 2 + [("val", 2024)] * 2
    assert constants(manifest) == [{"split": split, "year": year} for split, year in expected]
    assert manifest.select(["year", "a"]) == ["year", "a"]
    assert manifest.ragged == ("b", "split")
    assert [group.sizes[1:] for group in manifest.row_groups] == [(5,)] * 4 + [(3,)] * 2


def test_a_manifest_with_keys_survives_its_bytes(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "split=train/year=2023/x", "split=__HIVE_DEFAULT_PARTITION__/year=2024/x", a=[1, 2])
    manifest = manifest_of(bucket, cache)
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert again.row_groups[0].constants is again.row_groups[1].constants
    assert constants(again)[:2] == [{"split": None, "year": 2024}] * 2


def test_a_column_of_the_file_wins(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "a=7/s=1/x", "a=8/s=2/x", "plain/s=2/x", a=[1], s=[{"m": 1}])
    manifest = manifest_of(bucket, cache)
    assert manifest.schema.names == ["a", "s.m"]
    assert constants(manifest) == [{}] * 3


def sources() -> Sequence[tuple[list[str], list[str]]]:
    return [
        (["data"], ["year", "label"]),
        (["data/*/*/*.parquet"], ["year", "label"]),
        (["data/year=*/label=cat/x.parquet"], ["year", "label"]),
        (["data/year=1", "data/year=2/"], ["label"]),
        (["data/year=1/*/x.parquet"], ["label"]),
        (["data/year=1/label=cat"], []),
        (["data/year=1/label=cat/x.parquet"], []),
        (["data/year=1/label=cat/x.parquet", "data/year=2/label=cat/x.parquet"], []),
        (["data", "data/year=1/label=cat/x.parquet"], ["year", "label"]),
        (["data/year=1/label=cat/x.parquet", "data"], ["year", "label"]),
    ]


@pytest.mark.parametrize(("named", "keys"), sources())
def test_only_what_lies_below_the_source_counts(
    bucket: Any, cache: CacheConfig, named: list[str], keys: list[str]
) -> None:
    put(bucket, "year=1/label=cat/x", "year=1/label=dog/x", "year=2/label=cat/x")
    manifest = manifest_of(bucket, cache, *named)
    assert manifest.schema.names == ["a", *keys]
    assert all(list(values) == keys for values in constants(manifest))


def test_fingerprints_cover_the_keys(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "label=cat/x", "label=cat/y")
    folder, glob = manifest_of(bucket, cache), manifest_of(bucket, cache, "data/*/*.parquet")
    assert folder == glob
    below, listed = manifest_of(bucket, cache, "data/label=cat"), manifest_of(bucket, cache, "data/label=cat/*")
    assert below == listed
    assert below.fingerprint != folder.fingerprint
    assert "label" in folder.schema.names
    assert "label" not in below.schema.names


def test_without_keys_the_fingerprint_is_of_the_objects_alone(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "x", "y")
    objects = list_objects(bucket.url("data"), Blocks.open(open_source(bucket.url(), bucket.options), cache))
    digest = hashlib.blake2b(digest_size=16, person=b"dataload files")
    for obj in objects:
        digest.update(json.dumps([obj.path, obj.size, obj.version]).encode())
    assert manifest_of(bucket, cache).fingerprint == digest.hexdigest()


def test_files_of_different_keys_are_refused(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "label=cat/x", "label=dog/x", "y")
    with pytest.raises(DataError, match=r"data/y\.parquet and .*label=cat/x\.parquet.*none and 'label'") as caught:
        manifest_of(bucket, cache)
    assert "\n" not in str(caught.value)


def test_keys_can_be_switched_off(tmp_path: Path, cache: CacheConfig) -> None:
    """A run's folder may be named by its arguments, which differ."""
    for number, folder in enumerate(("lr=1/lr=2", "seed=3")):
        (tmp_path / "data" / folder).mkdir(parents=True)
        pq.write_table(pa.table({"id": [number]}), tmp_path / "data" / folder / "x.parquet")
    for source in (tmp_path / "data", tmp_path / "data" / "*" / "*" / "*.parquet"):
        with pytest.raises(DataError, match=r"; if its folders are no keys, pass partitioning=None$"):
            make_dataset(source, cache=cache)
        dataset = make_dataset(source, cache=cache, partitioning=None)
        assert dataset.schema.names == ["id"]
    loader = make_loader(tmp_path / "data", 2, cache=cache, partitioning=None)
    assert sorted(next(iter(loader))["id"].tolist()) == [0, 1]
    with pytest.raises(ConfigError, match="partitioning='directory' is unknown: use 'hive', or None"):
        make_dataset(tmp_path, partitioning="directory")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="partitioning cannot be combined with a dataset"):
        make_loader(dataset, 3, partitioning=None)


@pytest.mark.parametrize("command", ["head", "plan", "warm", "doctor"])
def test_commands_switch_keys_off(tmp_path: Path, command: str) -> None:
    for number, folder in enumerate(("lr=1", "seed=3")):
        (tmp_path / "data" / folder).mkdir(parents=True)
        pq.write_table(pa.table({"id": [number]}), tmp_path / "data" / folder / "x.parquet")
    words = [command, str(tmp_path / "data"), "--cache-dir", str(tmp_path / "cache")]
    assert "pass partitioning=None" in " ".join(run(*words).split())
    found = run(*words, "--partitioning", "none")
    assert "pass partitioning=None" not in " ".join(found.split())
    assert "2 rows" in found or command == "doctor"
    assert "must be hive or none" in run(*words, "--partitioning", "all")


def test_keys_in_another_order_are_the_same(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "a1=1/b1=2/x", "b1=3/a1=4/x")
    assert constants(manifest_of(bucket, cache)) == [{"a1": 1, "b1": 2}, {"a1": 4, "b1": 3}]


def test_one_key_twice_is_refused(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "label=cat/label=dog/x")
    with pytest.raises(DataError, match=r"label=dog/x\.parquet.*same key"):
        manifest_of(bucket, cache)


def test_hidden_folders_stay_hidden(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "label=cat/x", "_spark_metadata/x", "label=dog/_tmp/x", ".label=cow/x")
    blocks = Blocks.open(open_source(bucket.url(), bucket.options), cache)
    assert [obj.path for obj in list_objects(bucket.url("data"), blocks)] == [f"{bucket.name}/data/label=cat/x.parquet"]


def test_a_key_may_begin_with_an_underscore(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "_id=1/x", "_id=2/x", "_spark_metadata/x")
    assert constants(manifest_of(bucket, cache)) == [{"_id": 1}, {"_id": 2}]


def test_names_written_by_pyarrow(tmp_path: Any, cache: CacheConfig) -> None:
    import pyarrow.dataset as pads

    labels = ["50% / x=y", "ü ñ", "a+b", None, "plain"]
    table = pa.table({"label": labels, "a": range(5)})
    layout = pads.partitioning(pa.schema([("label", pa.string())]), flavor="hive")
    pads.write_dataset(table, tmp_path, format="parquet", partitioning=layout)
    files = f"{tmp_path}/*/*.parquet"
    manifest = resolve(files, Blocks.open(open_source(files, None), cache))
    assert {dict(group.constants)["label"] for group in manifest.row_groups} == set(labels)


# Read as columns


def rows_of(dataset: Any) -> list[dict[str, Any]]:
    return [
        {name: getattr(value, "item", lambda value=value: value)() for name, value in row.items()}
        for row in dataset.__getitems__(range(len(dataset)))
    ]


def test_keys_are_read_as_columns(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "label=cat/year=1/x", "label=dog/year=-2/x", a=[1, 2])
    options = {"storage_options": bucket.options, "cache": cache}
    cats, dogs = {"label": "cat", "year": 1}, {"label": "dog", "year": -2}
    whole = make_dataset(bucket.url("data"), **options)
    assert rows_of(whole) == [{"a": 1, **cats}, {"a": 2, **cats}, {"a": 1, **dogs}, {"a": 2, **dogs}]
    assert [row["label"] for row in whole.__getitems__([3, 0, 2])] == ["dog", "cat", "dog"]
    some = make_dataset(bucket.url("data"), columns=["year", "a"], filters=[("label", "=", "dog")], **options)
    assert rows_of(some) == [{"year": -2, "a": 1}, {"year": -2, "a": 2}]
    assert list(rows_of(some)[0]) == ["year", "a"]


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"] * 2, "label": batch["label"]}


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("order", [["mixed", "hive"], ["hive", "mixed"]])
def test_datasets_with_other_constants_of_one_file_share_no_rows(
    tmp_path: Path, cache: CacheConfig, order: list[str], *, is_mapped: bool
) -> None:
    """`label` is a key of the folders of one dataset, and a column that a file of the other one lacks."""
    keyed, other = tmp_path / "keyed", tmp_path / "other"
    for file, table in {
        keyed / "label=cat" / "0.parquet": {"x": [1, 2]},
        keyed / "label=dog" / "0.parquet": {"x": [3]},
        other / "0.parquet": {"x": [4], "label": ["cow"]},
    }.items():
        file.parent.mkdir(parents=True)
        pq.write_table(pa.table(table), file)
    sources = {"hive": keyed, "mixed": [keyed / "label=cat", keyed / "label=dog", other]}
    found = {}
    for name in order:
        dataset = make_dataset(sources[name], columns=["x", "label"], cache=cache)
        found[name] = [row["label"] for row in rows_of(dataset.map(doubled) if is_mapped else dataset)]
    assert found == {"hive": ["cat", "cat", "dog"], "mixed": [None, None, None, "cow"]}


def test_constants_are_looked_up_once_for_each_row_group(
    tmp_path: Path, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group of an old file has a constant for each of the thousand columns that the table got since then."""
    for name in ("a", "b"):
        (tmp_path / f"label={name}").mkdir()
        pq.write_table(pa.table({"x": [1]}), tmp_path / f"label={name}" / "0.parquet")
    blobs, asked = make_dataset(f"{tmp_path}/*/*.parquet", cache=cache).rowstore.row_groups.caches[0], list[int]()
    constants = blobs.plan.constants
    monkeypatch.setattr(blobs.plan, "constants", lambda number: asked.append(number) or constants(number))
    names = [[blobs.plan.group_name(number), blobs.plan.qualified(number, "")] for number in (0, 1, 0)]
    assert names[0] == names[2] != names[1]
    assert asked == [0, 1]


def test_keys_of_other_datasets_do_not_count_where_they_are_not_read(tmp_path: Path, cache: CacheConfig) -> None:
    file = tmp_path / "label=cat" / "0.parquet"
    file.parent.mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), file)
    for source, misses in ((f"{tmp_path}/*/*.parquet", 1), (file, 0)):
        loader = make_loader(source, 2, columns=["x"], cache=cache)
        assert [batch["x"].tolist() for batch in loader] in ([[1, 2]], [[2, 1]])
        assert loader.stats().misses == misses


def test_keys_alone_are_read(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "label=cat/year=1/x", "label=dog/year=2/x", a=[1, 2])
    dataset = make_dataset(bucket.url("data"), columns=["label", "year"], storage_options=bucket.options, cache=cache)
    assert rows_of(dataset) == [{"label": "cat", "year": 1}] * 2 + [{"label": "dog", "year": 2}] * 2


def test_a_null_key_is_none_or_filled(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "label=cat/x", "label=__HIVE_DEFAULT_PARTITION__/x", a=[1])
    options = {"storage_options": bucket.options, "cache": cache}
    filled = make_dataset(bucket.url("data"), fill_null={"label": "none"}, **options)
    assert [row["label"] for row in rows_of(filled)] == ["none", "cat"]
    assert [row["label"] for row in rows_of(make_dataset(bucket.url("data"), **options))] == [None, "cat"]


def test_the_files_own_column_is_read(bucket: Any, cache: CacheConfig) -> None:
    put(bucket, "a=7/x", a=[1, 2])
    dataset = make_dataset(bucket.url("data"), storage_options=bucket.options, cache=cache)
    assert rows_of(dataset) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name", [b"label=caf\xe9", b"label=caf%E9"])
def test_a_key_that_is_not_utf_8_is_refused(tmp_path: Any, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    with (folder / "x.parquet").open("wb") as file:
        pq.write_table(pa.table({"id": [1]}), file)
    with pytest.raises(DataError, match="is not UTF-8: rename"):
        make_dataset(tmp_path, cache=False)
    assert len(make_dataset(folder, cache=False)) == 1  # keys are those of the folders below the source


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["kind=a/label=cat/0.parquet", "kind=a/label=cat", "kind=a/label=cat/*.parquet"])
def test_a_key_above_the_source_names_the_folder(tmp_path: Path, name: str) -> None:
    file = tmp_path / "kind=a" / "label=cat" / "0.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), file)
    for options in ({"columns": ["label"]}, {"filters": [("label", "=", "cat")]}):
        with pytest.raises(ConfigError, match="'label' is not in the dataset: it is a key of folders above") as raised:
            make_dataset([tmp_path / name], cache=False, **options)
        assert "name the folder above label=… instead; of a Delta table, copy a version's files" in str(raised.value)
    assert len(make_dataset(tmp_path / "kind=a", columns=["label"], cache=False)) == 1
