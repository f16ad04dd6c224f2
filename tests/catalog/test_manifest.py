from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from decoded import plain
from pyarrow import feather

from dataload import make_dataset, make_loader
from dataload.cache.blocks.reader import Blocks
from dataload.cache.config import CacheConfig
from dataload.cache.origin.source import open_source
from dataload.catalog.manifest import Manifest
from dataload.catalog.resolve import resolve
from dataload.errors import ConfigError, DataError, OriginNotFound


def manifest_of(bucket: Any, cache: CacheConfig, folder: str = "data") -> Manifest:
    return resolve(bucket.url(folder), Blocks.open(open_source(bucket.url(), bucket.options), cache))


def test_files_row_groups_and_rows_come_in_order(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig
) -> None:
    dataset = make_dataset(dataset_of([[3, 4], [5], [0, 2]]), storage_options=bucket.options, cache=cache)
    assert [(group.number, group.rows) for group in dataset.row_groups][:3] == [(0, 3), (1, 4), (0, 5)]
    assert len(dataset) == dataset.num_rows == 14
    assert [row["row_id"].item() for row in dataset.__getitems__(range(14))] == list(range(14))
    assert dataset.schema.names == ["row_id", "half", "vector", "text"]


def test_a_file_a_folder_a_glob_and_a_list_name_the_same(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig
) -> None:
    url = dataset_of([[3], [4]])
    sources = [url, f"{url}/*.parquet", [f"{url}/part-001.parquet", f"{url}/part-000.parquet"], [url, url]]
    found = {make_dataset(source, storage_options=bucket.options, cache=cache).fingerprint for source in sources}
    assert len(found) == 1
    one = make_dataset(f"{url}/part-001.parquet", storage_options=bucket.options, cache=cache)
    assert len(one) == 4
    assert one.fingerprint not in found


def test_footers_are_read_once_a_host(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> None:
    url = dataset_of([[3], [4], [5]])
    first = make_dataset(url, storage_options=bucket.options, cache=cache)
    assert bucket.server.stats()["get_requests"] == 3
    second = make_dataset(url, storage_options=bucket.options, cache=cache)
    assert bucket.server.stats()["get_requests"] == 3
    assert second.manifest == first.manifest


def test_a_changed_object_changes_the_fingerprint(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig
) -> None:
    before = make_dataset(dataset_of([[3], [4]]), storage_options=bucket.options, cache=cache)
    after = make_dataset(dataset_of([[3], [5]]), storage_options=bucket.options, cache=cache)
    assert after.fingerprint != before.fingerprint
    assert len(after) == 8


def test_a_manifest_survives_its_bytes(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> None:
    manifest = make_dataset(dataset_of([[3, 0], [4]]), storage_options=bucket.options, cache=cache).manifest
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


NESTED = pa.table(
    {
        "id": [1, 2, 3],
        "image": [{"bytes": b"x" * size, "info": {"path": "a" * size, "width": size}} for size in (1, 20, 300)],
        "pairs": pa.array([[("k", 1)], [], [("l", 2)]], pa.map_(pa.string(), pa.int64())),
        "boxes": [[{"x": 1, "tag": "t"}], [], [{"x": 2, "tag": "u" * 50}]],
        "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
        "vector": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
        "tokens": [[1], [1, 2], []],
    }
)


def test_struct_members_are_columns(bucket: Any, cache: CacheConfig) -> None:
    bucket.put_table("data/x.parquet", NESTED)
    manifest = manifest_of(bucket, cache)
    members = ["image.bytes", "image.info.path", "image.info.width"]
    assert manifest.schema.names == ["id", *members, "pairs", "boxes", "kind", "vector", "tokens"]
    assert manifest.schema.field("image.info.width").type == pa.int64()
    assert manifest.select(None) == manifest.schema.names
    assert manifest.select(["tokens", "image", "id"]) == ["tokens", *members, "id"]
    assert manifest.select(["image.info", "image.bytes"]) == [*members[1:], members[0]]
    manifest.check_columns(["image.info", "image.info.path", "kind"])


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (["id", "id"], "'id' 2 times"),
        (["image", "image.info.path"], "'image.info.path' 2 times"),
        (["image.byte"], "'image.byte'.*did you mean 'image.bytes'"),
        (["imag"], "'imag' is not in the dataset"),
        ([""], "'' is not in the dataset"),
    ],
)
def test_columns_that_cannot_be_chosen(bucket: Any, cache: CacheConfig, columns: list[str], says: str) -> None:
    bucket.put_table("data/x.parquet", NESTED)
    with pytest.raises(ConfigError, match=says):
        manifest_of(bucket, cache).select(columns)


def test_sizes_of_ragged_columns(bucket: Any, cache: CacheConfig) -> None:
    bucket.put_table("data/x.parquet", NESTED, row_group_size=2, use_dictionary=["kind"])
    manifest = manifest_of(bucket, cache)
    assert manifest.ragged == ("image.bytes", "image.info.path", "pairs", "boxes", "kind", "tokens")
    body = bucket.client.get_object(Bucket=bucket.name, Key="data/x.parquet")["Body"].read()
    footer = pq.read_metadata(pa.BufferReader(body))
    for group in manifest.row_groups:
        of = footer.row_group(group.number)
        chunks = [of.column(number) for number in range(of.num_columns)]
        for name, size in zip(manifest.ragged, group.sizes, strict=True):
            mine = [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{name}.")]
            kind = manifest.schema.field(name).type
            if pa.types.is_list(kind) and pa.types.is_integer(
                kind.value_type
            ):  # the size of numbers does not depend on their encoding
                assert size == sum(chunk.num_values for chunk in mine) * kind.value_type.bit_width // 8
            else:
                assert size == sum(chunk.total_uncompressed_size for chunk in mine) > 0
    assert manifest.row_groups[1].sizes[0] > 300


def test_a_manifest_is_small(bucket: Any, cache: CacheConfig) -> None:
    bucket.put_table("data/x.parquet", pa.table({"a": range(1000), "text": ["x"] * 1000}), row_group_size=1)
    manifest = manifest_of(bucket, cache)
    assert len(manifest.to_bytes()) < 20 * len(manifest.row_groups)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_nulls_of_many_columns_add_about_a_byte_each_to_a_manifest(bucket: Any, cache: CacheConfig) -> None:
    draw, names = np.random.default_rng(0), [f"column_{number}" for number in range(13)]
    columns = {name: pa.array(range(20_000), pa.int32(), mask=draw.random(20_000) < 0.2) for name in names}
    bucket.put_table("data/x.parquet", pa.table(columns), row_group_size=20)
    manifest = manifest_of(bucket, cache)
    again = Manifest.from_bytes(manifest.to_bytes())
    for name in names:
        assert again.nulls[name].tolist() == [columns[name][at : at + 20].null_count for at in range(0, 20_000, 20)]
    without = replace(manifest, nulls={})
    assert len(manifest.to_bytes()) < len(without.to_bytes()) + 13 * len(manifest.row_groups)


def test_long_footers(bucket: Any, cache: CacheConfig) -> None:
    wide = pa.table({f"column {number} {'x' * 200}": np.arange(10) for number in range(500)})
    bucket.put_table("wide/x.parquet", wide, row_group_size=5)
    dataset = make_dataset(bucket.url("wide"), storage_options=bucket.options, cache=cache)
    assert len(dataset) == 10
    assert len(dataset.schema) == 500


def test_hidden_and_folder_objects_are_passed_over(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig
) -> None:
    url = dataset_of([[3]])
    for key in ("data/_SUCCESS", "data/.part.crc", "data/_temporary/x.parquet", "data/", "data/state.json"):
        bucket.put(key, b"")
    assert len(make_dataset(url, storage_options=bucket.options, cache=cache)) == 3


def test_without_a_cache(bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    dataset = make_dataset(dataset_of([[3]]), storage_options=bucket.options, cache=False)
    assert dataset[2]["row_id"] == 2


def test_a_local_folder(tmp_path: Path, cache: CacheConfig) -> None:
    pa.parquet.write_table(pa.table({"a": [1, 2]}), tmp_path / "x.parquet")
    assert make_dataset(tmp_path / "x.parquet", cache=cache)[1]["a"] == 2


def test_a_tiercache_url(bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    options = {"s3": bucket.options, "tiercache": {"cache_dir": str(tmp_path / "c")}}
    assert len(make_dataset(f"tiercache::{dataset_of([[3]])}", storage_options=options)) == 3
    assert (tmp_path / "c" / "FORMAT").exists()


# Bad input: each names the thing and says what to do


def refused(error: type[Exception], says: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=says) as caught:
        make_dataset(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_a_missing_bucket(bucket: Any, cache: CacheConfig) -> None:
    refused(
        OriginNotFound, "no-such-bucket.*check", "s3://no-such-bucket/x", storage_options=bucket.options, cache=cache
    )


def test_an_empty_prefix(bucket: Any, cache: CacheConfig) -> None:
    for url in (bucket.url("nothing/here"), bucket.url("*.parquet")):
        refused(OriginNotFound, f"{bucket.name}.*check", url, storage_options=bucket.options, cache=cache)


@pytest.mark.parametrize("body", [b"a,b\n1,2\n", b"x" * 100_000])
def test_a_file_that_is_no_parquet(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, body: bytes
) -> None:
    url = dataset_of([[3]])
    bucket.put("data/notes.csv", body)
    refused(DataError, r"notes\.csv is not a Parquet file", url, storage_options=bucket.options, cache=cache)


@pytest.mark.parametrize(("kind", "magic"), [("a Parquet", b"PAR1"), ("an Arrow", b"ARROW1")])
@pytest.mark.parametrize("rest", [b"", b"\0\0", b"x" * 100_000])
def test_a_file_without_its_end(bucket: Any, cache: CacheConfig, kind: str, magic: bytes, rest: bytes) -> None:
    bucket.put("data/part.parquet", magic + rest)
    options = {"storage_options": bucket.options, "cache": cache}
    refused(DataError, rf"part\.parquet begins as {kind} file, and its end is missing", bucket.url("data"), **options)


def test_files_without_columns(bucket: Any, cache: CacheConfig, tmp_path: Path) -> None:
    pq.write_table(pa.table({}), tmp_path / "none.parquet")
    for name in ("none", "keyed/label=1/none"):
        bucket.put(f"{name}.parquet", (tmp_path / "none.parquet").read_bytes())
    options = {"storage_options": bucket.options, "cache": cache}
    refused(DataError, r"none\.parquet has no column", bucket.url("none.parquet"), **options)
    assert make_dataset(bucket.url("keyed"), **options).schema.names == ["label"]  # from the name of the folder


def test_a_parquet_file_cut_short(bucket: Any, cache: CacheConfig) -> None:
    bucket.put("data/cut.parquet", b"PAR1" + (10**6).to_bytes(4, "little") + b"PAR1")
    refused(DataError, r"cut\.parquet is cut short", bucket.url("data"), storage_options=bucket.options, cache=cache)
    bucket.put("data/cut.parquet", b"PAR1" + b"x" * 50 + (50).to_bytes(4, "little") + b"PAR1")
    refused(DataError, r"cut\.parquet", bucket.url("data"), storage_options=bucket.options, cache=cache)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_column_whose_name_begins_with_that_of_another(tmp_path: Path, form: str) -> None:
    """The name has a dot, as those of the members of structs do."""
    table = pa.table({"a": [1, 2], "a.b": ["x", None], "a.b.c": [[3], [4]], "s": [{"u": 5}, {"u": 6}]})
    for number, part in enumerate([table, table.select(["s", "a.b.c", "a.b", "a"])]):
        path = str(tmp_path / f"{number}.{form}")
        if form == "parquet":
            pq.write_table(part, path)
        else:
            feather.write_feather(part, path)
    expected: dict[str, Any] = {"a": [1, 2] * 2, "a.b": ["x", None] * 2, "a.b.c": [[3], [4]] * 2, "s.u": [5, 6] * 2}

    def columns_of(**options: Any) -> dict[str, Any]:
        batch = make_dataset(str(tmp_path), cache=False, **options).__getitems__(range(4)).columns
        return {name: pa.array([*map(plain, column)]).to_pylist() for name, column in batch.items()}

    assert columns_of() == expected
    for name, column in expected.items():
        assert columns_of(columns=[name]) == {name: column}
    assert make_dataset(str(tmp_path), filters=[("a", "=", 1), ("a.b", "=", "x")], cache=False).num_rows == 2
    pq.write_table(pa.table({"a": [1], "s": [{"u": 5}], "a.b.c": [[3]]}), tmp_path / "2.parquet")
    refused(DataError, r"2\.parquet lacks column 'a\.b'", str(tmp_path), cache=False)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"a": ["y"], "b": ["x"]}, r"1\.parquet and .*0\.parquet.* column 'a': string .*leave it out with columns="),
        ({"a": [1]}, r"1\.parquet lacks column 'b', which other files have; leave it out with columns="),
        ({"a": [1], "b": ["x"], "c": [1]}, r"0\.parquet lacks column 'c'"),
        ({"a": [1], "b": [{"x": 1}]}, r"1\.parquet and .*0\.parquet.* column 'b': a struct there, string here"),
        ({"a": [None], "b": [None], "c": [None]}, r"0\.parquet lacks column 'c'"),
    ],
)
def test_schemas_that_differ(bucket: Any, cache: CacheConfig, other: dict[str, Any], says: str) -> None:
    bucket.put_table("data/0.parquet", pa.table({"a": [1], "b": ["x"]}))
    bucket.put_table("data/1.parquet", pa.table(other))
    refused(
        DataError,
        says,
        bucket.url("data"),
        storage_options=bucket.options,
        cache=cache,
    )


EPOCH = np.datetime64(0, "us").item()


def test_files_share_columns_of_any_order_and_of_types_that_are_the_same_in_batches(
    bucket: Any, cache: CacheConfig
) -> None:
    """Pandas writes a column without values as nulls without a type, and other writers other string types."""
    moment = pa.timestamp("us")
    values = {
        "x": pa.array([0.5, None]),
        "n": pa.array([1, 2]),
        "t": pa.array(["a", None], pa.large_string()),
        "b": pa.array([b"a", b"b"]),
        "l": pa.array([[1, 2], []]),
        "v": pa.array([[0.5, 1.0], [2.0, 3.0]], pa.list_(pa.float32(), 2)),
        "d": pa.array([1, 2], moment),
        "s": pa.array([["q"], None]),
    }
    same = {**values, "t": values["t"].cast(pa.string()).dictionary_encode(), "b": values["b"].cast(pa.large_binary())}
    others = [dict.fromkeys(values, pa.nulls(2)), dict(reversed(same.items()))]
    tables = [pa.table({"id": [2 * n, 2 * n + 1], **columns}) for n, columns in enumerate([others[0], values, *others])]
    for number, table in enumerate(tables):
        bucket.put_table(f"data/{number}.parquet", table)
    options = {"storage_options": bucket.options, "cache": cache, "null_masks": True}
    url = bucket.url("data")
    [batch] = make_loader(url, 8, shuffle=False, **options)
    assert batch["id"].tolist() == list(range(8))
    assert batch["n.is_null"].tolist() == [True, True, False, False] * 2
    assert batch["n"].tolist() == [0, 0, 1, 2] * 2
    assert batch["x"].nan_to_num(-1.0).tolist() == [-1.0, -1.0, 0.5, -1.0] * 2
    assert batch["t"] == [None, None, "a", None] * 2
    assert [value if value is None else bytes(value) for value in batch["b"]] == [None, None, b"a", b"b"] * 2
    assert [None if value is None else value.tolist() for value in batch["l"]] == [None, None, [1, 2], []] * 2
    assert batch["v"][2:4].tolist() == [[0.5, 1.0], [2.0, 3.0]]
    assert batch["v"].isnan().all(1).tolist() == [True, True, False, False] * 2
    assert batch["d"].tolist() == [0, 0, 1, 2] * 2
    assert batch["s"] == [None, None, ["q"], None] * 2
    [filled] = make_loader(url, 8, shuffle=False, **{**options, "fill_null": {"d": EPOCH}})
    assert filled["d"].tolist() == [0, 0, 1, 2] * 2
    assert [row["id"] for row in kept(url, pc.field("n") > 1, options)] == [3, 7]
    assert [row["id"] for row in kept(url, pc.field("t").is_null(), options)] == [0, 1, 3, 4, 5, 7]


def null_of(value: Any) -> pa.DataType:
    """Return the type of values like this one of which none is known."""
    if isinstance(value, list):
        return pa.list_(null_of(value[0]) if value else pa.null())
    return pa.struct([(name, null_of(each)) for name, each in value.items()]) if isinstance(value, dict) else pa.null()


def write(file: Path, table: pa.Table) -> None:
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("without", "typed", "expected"),
    [
        ([[], None], pa.array([[1, 2], []]), [[], None, [1, 2], []]),
        ([[], [None]], pa.array([["a"], None], pa.large_list(pa.string())), [[], [None], ["a"], None]),
        ([[[]], None], pa.array([[[1], []], []]), [[[]], None, [[1], []], []]),
        ([[], None], pa.array([[{"a": 1}], []]), [[], None, [{"a": 1}], []]),
        ([[{"a": None}], []], pa.array([[{"a": ["x"]}], []]), [[{"a": None}], [], [{"a": ["x"]}], []]),
        ([[{"a": []}], []], pa.array([[{"a": ["x"]}], []]), [[{"a": []}], [], [{"a": ["x"]}], []]),
    ],
)
def test_lists_without_values_have_the_type_of_other_files(
    tmp_path: Path, without: list[Any], typed: pa.Array, expected: list[Any], is_first: bool, suffix: str
) -> None:
    columns = [pa.array(without, null_of(without[0])), typed]
    for number, column in enumerate(columns if is_first else reversed(columns)):
        write(tmp_path / f"{number}.{suffix}", pa.table({"id": [2 * number, 2 * number + 1], "c": column}))
    options = {"cache": False, "columns": ["c"]}
    [batch] = make_loader(str(tmp_path), 4, shuffle=False, **options)
    found = [value.tolist() if isinstance(value, torch.Tensor) else value for value in batch["c"]]
    assert found == (expected if is_first else expected[2:] + expected[:2])
    assert len(kept(str(tmp_path), pc.field("c").is_valid(), options)) == 4 - expected.count(None)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [pa.list_(pa.float32(), 2), pa.list_(pa.list_(pa.float32(), 1), 2)])
def test_fixed_size_lists_without_values_have_the_type_of_other_files(
    tmp_path: Path, kind: pa.DataType, is_first: bool, suffix: str
) -> None:
    value = np.arange(2, dtype=np.float32).reshape(2, *[1] * pa.types.is_fixed_size_list(kind.value_type)).tolist()
    columns = [pa.array([None, None], pa.list_(pa.null())), pa.array([value, value], kind)]
    for number, column in enumerate(columns if is_first else reversed(columns)):
        write(tmp_path / f"{number}.{suffix}", pa.table({"id": [2 * number, 2 * number + 1], "c": column}))
    options = {"cache": False, "columns": ["c"]}
    [batch] = make_loader(str(tmp_path), 4, shuffle=False, **options)
    with_values = slice(2, 4) if is_first else slice(0, 2)
    assert batch["c"][with_values].tolist() == [value, value]
    assert batch["c"].isnan().sum() == 4
    assert len(kept(str(tmp_path), pc.field("c").is_valid(), options)) == 2


A_STRUCT = pa.array([{"a": 1, "s": {"b": "x", "l": [1]}}, {"a": 2, "s": None}])
PARTS = [
    pa.nulls(2),
    pa.array([{"a": None, "s": None}, None], null_of({"a": None, "s": None})),
    pa.array(
        [{"a": 5, "s": {"b": None, "l": []}}, None],
        pa.struct([("a", pa.int64()), ("s", null_of({"b": None, "l": []}))]),
    ),
]


@pytest.mark.variants
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("columns", [*permutations([A_STRUCT, *PARTS]), *permutations([A_STRUCT, PARTS[0]])])
def test_a_struct_without_values_has_the_members_of_other_files(
    tmp_path: Path, columns: Sequence[pa.Array], suffix: str
) -> None:
    for number, column in enumerate(columns):
        write(tmp_path / f"{number}.{suffix}", pa.table({"id": [2 * number, 2 * number + 1], "c": column, "z": [0, 0]}))
    rows = [row.as_py() or {"a": None, "s": None} for column in columns for row in column]
    inner = [row["s"] or {"b": None, "l": None} for row in rows]
    [batch] = make_loader(str(tmp_path), 8, shuffle=False, cache=False, fill_null={"c.a": -1})
    assert list(batch) == ["id", "c.a", "c.s.b", "c.s.l", "z"]
    assert batch["c.a"].tolist() == [-1 if row["a"] is None else row["a"] for row in rows]
    assert batch["c.s.b"] == [row["b"] for row in inner]
    assert [None if value is None else value.tolist() for value in batch["c.s.l"]] == [row["l"] for row in inner]
    [some] = make_loader(str(tmp_path), 8, shuffle=False, cache=False, columns=["c.s.b"])
    assert some["c.s.b"] == [row["b"] for row in inner]
    options = {"cache": False, "columns": ["c.s.b"]}
    assert [row["c.s.b"] for row in kept(str(tmp_path), [("c.s.b", "=", "x")], options)] == ["x"]
    assert len(kept(str(tmp_path), pc.field("c", "a") > 1, options)) == sum((row["a"] or 0) > 1 for row in rows)
    assert len(kept(str(tmp_path), pc.field("c", "a").is_null(), options)) == sum(row["a"] is None for row in rows)


def test_lists_with_other_members_beside_one_without_values_differ(tmp_path: Path) -> None:
    for number, row in enumerate([{"a": None, "b": 1}, {"a": 1, "b": "x"}]):
        pq.write_table(pa.table({"t": pa.array([[row]])}), tmp_path / f"{number}.parquet")
    refused(DataError, r"1\.parquet and .*0\.parquet differ in column 't'", str(tmp_path), cache=False)


def test_a_member_of_a_struct_without_values_is_filtered(tmp_path: Path) -> None:
    for number, member in enumerate([pa.nulls(2), pa.array(["x", "y"])]):
        struct = pa.StructArray.from_arrays([member, pa.array([1, 2])], ["a", "b"])
        pq.write_table(pa.table({"s": struct, "id": [2 * number, 2 * number + 1]}), tmp_path / f"{number}.parquet")
    assert [row["id"] for row in kept(str(tmp_path), [("s.a", "=", "x")], {"cache": False})] == [2]


NOON = datetime(2024, 3, 1, 12, tzinfo=UTC)
STRINGS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ([["a"], None, []], [pa.list_(STRINGS[0]), pa.large_list(STRINGS[1]), pa.list_(STRINGS[2])]),
        ([[["a"]], [[]], [None]], [pa.list_(pa.list_(STRINGS[0])), pa.large_list(pa.large_list(STRINGS[1]))]),
        ([[("a", b"b")], [], None], [pa.map_(STRINGS[0], pa.binary()), pa.map_(STRINGS[1], pa.large_binary())]),
        ([[{"m": "a"}], [None], []], [pa.list_(pa.struct([("m", kind)])) for kind in STRINGS[:2]]),
        ([["a"], ["b"], ["b"]], [pa.list_(STRINGS[3]), pa.list_(STRINGS[0])]),
        ([["a"], ["b"], ["b"]], [pa.list_(STRINGS[0], 1), pa.list_(STRINGS[1], 1)]),
        ([[[NOON]], [None], []], [pa.list_(pa.list_(pa.timestamp("us", zone))) for zone in ("UTC", "Europe/Berlin")]),
    ],
)
def test_nested_values_that_are_the_same_in_python(tmp_path: Path, values: list[Any], kinds: list[Any]) -> None:
    for number, order in enumerate(permutations(kinds)):
        (tmp_path / str(number)).mkdir()
        for file, kind in enumerate(order):
            write(tmp_path / str(number) / f"{file}.arrow", pa.table({"x": pa.array(values, kind)}))
        dataset = make_dataset(tmp_path / str(number), cache=False)
        found = dataset.__getitems__(range(len(dataset)))
        assert [row["x"] for row in found] == values * len(order)


def test_times_of_other_zones_are_one_column(tmp_path: Path) -> None:
    for number, zone in enumerate(["UTC", "Europe/Berlin", "-03:30"]):
        times = pa.array([NOON, NOON + timedelta(hours=number)], pa.timestamp("us", zone))
        write(tmp_path / f"{number}.parquet", pa.table({"t": times}))
    dataset = make_dataset(tmp_path, cache=False)
    hours = [(row["t"].item() - NOON.timestamp() * 1e6) / 3.6e9 for row in dataset.__getitems__(range(6))]
    assert hours == [0, 0, 0, 1, 0, 2]
    assert len(make_dataset(tmp_path, filters=[("t", ">", NOON)], cache=False)) == 2
    assert len(make_dataset(tmp_path, filters=[("t", "=", NOON)], cache=False)) == 4


def kept(url: str, filters: Any, options: dict[str, Any]) -> list[Any]:
    dataset = make_dataset(url, filters=filters, **options)
    return dataset.__getitems__(range(len(dataset)))


def test_columns_of_one_name(bucket: Any, cache: CacheConfig) -> None:
    twice = pa.table([[1], [2]], ["x", "x"])
    bucket.put_table("data/x.parquet", twice)
    says = r"data/x\.parquet: 2 columns would be called 'x'; leave it out with columns="
    refused(DataError, says, bucket.url("data"), storage_options=bucket.options, cache=cache)


def test_a_column_that_does_not_exist(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> None:
    url = dataset_of([[3]])
    options = {"storage_options": bucket.options, "cache": cache}
    refused(ConfigError, "'rowid'.*did you mean 'row_id'", url, columns=["rowid"], **options)
    refused(ConfigError, "'zzz'.*'row_id', 'half'", url, columns=["zzz"], **options)


def test_an_unwritable_cache(bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unwritable = CacheConfig(cache_dir=str(tmp_path / "file" / "cache"))
    refused(
        ConfigError, "file/cache cannot be used", dataset_of([[3]]), storage_options=bucket.options, cache=unwritable
    )


def test_a_glob_below_a_hidden_folder(bucket: Any, cache: CacheConfig) -> None:
    import pyarrow as pa

    bucket.put_table("_made/.today/x.parquet", pa.table({"a": [1]}))
    for url in (bucket.url("_made/.today/*.parquet"), bucket.url("_made/.today")):
        assert len(make_dataset(url, storage_options=bucket.options, cache=cache)) == 1


def test_data_with_the_names_of_metadata(tmp_path: Path) -> None:
    for name in ("_part-0.parquet", "_part-1.parquet"):
        write(tmp_path / name, pa.table({"a": [1]}))
    for source in (tmp_path, f"{tmp_path}/_part*.parquet"):
        with pytest.raises(OriginNotFound, match=r"such as .*_part-0.parquet: .* are skipped .*file by file"):
            make_dataset(source, cache=False)
    assert len(make_dataset([tmp_path / "_part-0.parquet", tmp_path / "_part-1.parquet"], cache=False)) == 2


def test_nullability_does_not_matter(bucket: Any, cache: CacheConfig) -> None:
    bucket.put_table("data/0.parquet", pa.table({"a": [1]}))
    bucket.put_table("data/1.parquet", pa.table({"a": [2]}, pa.schema([pa.field("a", pa.int64(), nullable=False)])))
    assert len(make_dataset(bucket.url("data"), storage_options=bucket.options, cache=cache)) == 2


@pytest.mark.parametrize("kind", [pa.list_(pa.int32(), 0), pa.struct([("l", pa.list_(pa.list_(pa.int8(), 0)))])])
def test_lists_of_the_fixed_length_0_in_parquet_name_their_column(tmp_path: Path, kind: pa.DataType) -> None:
    values = [{"l": [[]]}] if pa.types.is_struct(kind) else [[]]
    write(tmp_path / "x.parquet", pa.table({"id": [1, 2], "c": pa.array(values * 2, kind)}))
    name = r"c\.l" if pa.types.is_struct(kind) else "c"
    says = rf"x\.parquet row group 0: column '{name}' has lists of the fixed length 0.*leave it out with columns="
    with pytest.raises(DataError, match=says):
        list(make_loader(str(tmp_path), 2, cache=False))
    [batch] = make_loader(str(tmp_path), 2, shuffle=False, cache=False, columns=["id"])
    assert batch["id"].tolist() == [1, 2]


def test_a_damaged_page_names_its_file(bucket: Any, cache: CacheConfig) -> None:
    table = pa.table({"a": [str(number) for number in range(1000)]})
    bucket.put_table("data/x.parquet", table, compression="snappy", use_dictionary=False)
    body = bytearray(bucket.client.get_object(Bucket=bucket.name, Key="data/x.parquet")["Body"].read())
    body[100:1500] = b"\xff" * 1400
    bucket.put("data/x.parquet", bytes(body))
    dataset = make_dataset(bucket.url("data"), storage_options=bucket.options, cache=cache)
    with pytest.raises(DataError, match=r"data/x\.parquet row group 0 cannot be decoded"):
        dataset[0]


def test_a_type_that_batches_cannot_hold(bucket: Any, cache: CacheConfig) -> None:
    odd = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array(["x"])])
    sink = pa.BufferOutputStream()
    table = pa.table({"fine": [1], "odd": odd})
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write(table)
    bucket.put("data/x.arrow", sink.getvalue().to_pybytes())
    url = bucket.url("data")
    refused(DataError, "'odd'.*union", url, storage_options=bucket.options, cache=cache)
    assert make_dataset(url, columns=["fine"], storage_options=bucket.options, cache=cache)[0]["fine"] == 1


@pytest.mark.parametrize("source", ["warp://x/y", []])
def test_a_source_that_names_nothing(source: Any, cache: CacheConfig) -> None:
    with pytest.raises(ConfigError):
        make_dataset(source, cache=cache)
