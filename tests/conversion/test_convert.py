"""`convert` writes the rows of each source's own reader, in a good shape, and refuses what it would mix up."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import converting
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as pa_dataset
import pyarrow.json as pa_json
import pyarrow.parquet as pq
import pytest
from pyarrow import feather
from test_row_sums import COLUMNS

from dataload import ConfigError, DataError, DataloadError, OriginError, convert, make_dataset, make_loader
from dataload.cache.local import run_lock
from dataload.cache.origin.lease import Lease
from dataload.conversion import shuffled, writer
from dataload.conversion.conversion import Conversion
from dataload.errors import ObjectChanged

NOISE = np.random.default_rng(0)
JPEG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffd9")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files, row groups and buckets."""
    monkeypatch.setattr(writer, "ROW_GROUP_BYTES", 1 << 14)
    monkeypatch.setattr(writer, "FILE_BYTES", 1 << 16)
    monkeypatch.setattr(shuffled, "BUCKET_BYTES", 1 << 16)
    monkeypatch.setattr(shuffled, "DEALT_BYTES", 1 << 16)


def rows(count: int = 3000) -> pa.Table:
    blobs = [NOISE.bytes(100) for _ in range(count)]
    names = [f"name {number % 10}" for number in range(count)]
    return pa.table({"id": range(count), "blob": blobs, "name": names, "list": [[n] * (n % 3) for n in range(count)]})


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_parquet_of_a_bad_shape(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"in/day={day}").mkdir(parents=True)
        pq.write_table(rows(), tmp_path / f"in/day={day}/x.parquet", row_group_size=10)
    done = convert(tmp_path / "in", tmp_path / "out")
    assert (done.format, done.rows, done.files) == ("parquet", 6000, 1)
    expected = pa_dataset.dataset(tmp_path / "in", partitioning="hive").to_table()
    assert pq.read_table(tmp_path / "out/part-00000.parquet").equals(expected)
    file = pq.ParquetFile(tmp_path / "out/part-00000.parquet")
    assert file.num_row_groups == 1
    stored = {chunk.path_in_schema: chunk for chunk in map(file.metadata.row_group(0).column, range(5))}
    assert stored["blob"].compression == "UNCOMPRESSED"
    assert "RLE_DICTIONARY" not in stored["blob"].encodings
    assert stored["id"].compression == "ZSTD"
    assert "RLE_DICTIONARY" in stored["name"].encodings
    assert all(chunk.has_column_index and chunk.has_offset_index and chunk.is_stats_set for chunk in stored.values())
    assert make_dataset(tmp_path / "out", cache=False)[5]["name"] == "name 5"


def test_page_checksums_find_a_flipped_bit(tmp_path: Path) -> None:
    pq.write_table(rows(), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out")
    path = tmp_path / "out/part-00000.parquet"
    body = bytearray(path.read_bytes())
    body[body.index(rows_blob := pq.read_table(path)["blob"][7].as_py())] ^= 1
    assert rows_blob
    path.write_bytes(body)
    with pytest.raises(OSError, match="could not verify page integrity, CRC"):
        pq.read_table(path, page_checksum_verification=True)


def test_row_groups_and_files_have_their_size(small: None, tmp_path: Path) -> None:
    pq.write_table(rows(), tmp_path / "in.parquet", row_group_size=10)
    done = convert(tmp_path / "in.parquet", tmp_path / "out")
    footers = [pq.read_metadata(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert done.files == len(footers) > 4
    sizes = [
        sum(footer.row_group(group).column(column).total_compressed_size for column in range(footer.num_columns))
        for footer in footers
        for group in range(footer.num_row_groups)
    ]
    assert all(writer.ROW_GROUP_BYTES / 2 < size < 2 * writer.ROW_GROUP_BYTES for size in sizes[:-1])
    assert all(footer.num_row_groups == 4 for footer in footers[:-1])
    assert pq.read_table(tmp_path / "out").equals(pq.read_table(tmp_path / "in.parquet"))


def test_files_whose_types_differ_are_unified(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"x": pa.array([1], pa.int32())}), tmp_path / "in/a.parquet")
    pq.write_table(pa.table({"x": pa.array([1 << 40], pa.int64()), "y": ["b"]}), tmp_path / "in/b.parquet")
    convert(tmp_path / "in", tmp_path / "out")
    assert pq.read_table(tmp_path / "out").to_pylist() == [{"x": 1, "y": None}, {"x": 1 << 40, "y": "b"}]


def test_arrow_and_feather(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    table = rows()
    feather.write_feather(table, tmp_path / "in/a.feather")
    with pa.ipc.new_file(tmp_path / "in/b.arrow", table.schema) as file:
        file.write_table(table)
    done = convert(tmp_path / "in", tmp_path / "out")
    assert (done.format, done.rows) == ("arrow", 6000)
    assert pq.read_table(tmp_path / "out").equals(pa.concat_tables([table, table]))


def test_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types and columns that only the last lines have hold for all, as in pyarrow's reader of the whole file."""
    monkeypatch.setattr("dataload.conversion.lines.CHUNK_BYTES", 1000)
    lines = [{"x": n, "s": f"text {n}", "list": [{"a": n}], "never": None} for n in range(300)]
    lines += [{"x": 0.5, "s": "é" * 3000, "list": [], "late": True}]
    text = "\n".join(map(json.dumps, lines)).encode()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(text))
    assert convert(tmp_path / "in.jsonl.gz", tmp_path / "out").rows == 301
    expected = pa_json.read_json(io.BytesIO(text))
    found = pq.read_table(tmp_path / "out")
    assert found.cast(expected.schema).equals(expected)


def test_text_that_looks_like_a_time_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataload.conversion.lines.CHUNK_BYTES", 1000)
    values = ["2020-01-01"] * 100 + ["tomorrow"]
    lines = [json.dumps({"x": value, "inside": {"when": [value]}}) for value in values]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    convert(tmp_path / "in.jsonl", tmp_path / "out")
    found = pq.read_table(tmp_path / "out")
    assert found["x"].to_pylist() == values
    assert found["inside"].to_pylist() == [{"when": [value]} for value in values]


def test_times_of_a_day_in_csv_are_text(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("x,when\n1,10:11:12\n2,\n")
    convert(tmp_path / "in.csv", tmp_path / "out")
    assert pq.read_table(tmp_path / "out")["when"].to_pylist() == ["10:11:12", ""]


def test_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types that only the last rows need hold for all, as in pyarrow's reader of the whole file."""
    monkeypatch.setattr("dataload.conversion.lines.BLOCK_BYTES", 2000)
    lines = [
        "x,y,s,day,flag,empty",
        *(f'{n}, {n},"a\n, {n}",2020-01-01,true,' for n in range(300)),
        "0.5,7,NA,2020-01-02,x,9",
    ]
    (tmp_path / "in.csv").write_text("\n".join(lines))
    convert(tmp_path / "in.csv", tmp_path / "out")
    options = pa_csv.ParseOptions(newlines_in_values=True)
    assert pq.read_table(tmp_path / "out").equals(pa_csv.read_csv(tmp_path / "in.csv", parse_options=options))


def test_tabs(tmp_path: Path) -> None:
    (tmp_path / "in.tsv").write_text("x\ty\n1\ta,b\n")
    convert(tmp_path / "in.tsv", tmp_path / "out")
    assert pq.read_table(tmp_path / "out").to_pylist() == [{"x": 1, "y": "a,b"}]


def images(folder: Path, count: int = 30) -> None:
    for number in range(count):
        path = folder / f"class {number % 3}/{number:06}.JPG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(JPEG + bytes([number % 256]) * (number % 7))


def test_folders_of_images(tmp_path: Path) -> None:
    images(tmp_path / "in")
    (tmp_path / "in/README.md").write_text("about them")
    done = convert(tmp_path / "in", tmp_path / "out")
    assert (done.format, done.rows) == ("images", 30)
    for row in pq.read_table(tmp_path / "out").to_pylist():
        assert row["image"] == (tmp_path / "in" / row["path"]).read_bytes()
        assert row["path"].startswith(f"class {row['label']}/")
    dataset = make_dataset(tmp_path / "out", cache=False)
    assert dataset.class_names("label") == ["class 0", "class 1", "class 2"]


def test_images_without_folders_have_no_label(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(JPEG)
    convert(tmp_path / "in", tmp_path / "out")
    assert pq.read_table(tmp_path / "out").to_pylist() == [{"image": JPEG, "path": "a.png"}]


def test_a_shuffle_depends_on_the_seed_only(small: None, tmp_path: Path) -> None:
    table = rows()
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10)
    orders = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert(tmp_path / "in.parquet", tmp_path / name, shuffle=seed)
        found = pq.read_table(tmp_path / name)
        assert found.sort_by("id").equals(table)
        orders.append(found["id"].to_numpy())
        assert not [name for name in files_in(tmp_path / name) if "bucket" in name]
    assert (orders[0] == orders[1]).all()
    assert (orders[0] != orders[2]).mean() > 0.9
    assert abs(np.corrcoef(orders[0], np.arange(len(table)))[0, 1]) < 0.1


def test_dictionaries_survive_a_shuffle(small: None, tmp_path: Path) -> None:
    tables = [pa.table({"x": pa.array([f"{n}", "b"] * 500).dictionary_encode()}) for n in range(3)]
    (tmp_path / "in").mkdir()
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"in/{number}.parquet")
    convert(tmp_path / "in", tmp_path / "out", shuffle=0)
    expected = sorted(value for table in tables for value in table["x"].to_pylist())
    assert sorted(pq.read_table(tmp_path / "out")["x"].to_pylist()) == expected


def test_from_and_to_s3(small: None, bucket: Any, tmp_path: Path) -> None:
    table = rows()
    bucket.put_table("in/x.parquet", table, row_group_size=100)
    options = {"storage_options": bucket.options}
    convert(bucket.url("in"), bucket.url("out"), **options)
    assert make_dataset(bucket.url("out"), cache=False, **options)["id"].tolist() == list(range(3000))
    convert(bucket.url("in"), bucket.url("mixed"), shuffle=1, scratch_dir=tmp_path / "scratch", **options)
    mixed = make_dataset(bucket.url("mixed"), cache=False, **options)["id"].tolist()
    assert mixed != sorted(mixed) == list(range(3000))
    assert files_in(tmp_path / "scratch") == []
    convert(bucket.url("in"), tmp_path / "here", **options)
    assert pq.read_table(tmp_path / "here").equals(table)
    convert(tmp_path / "here", bucket.url("back"), to_storage_options=bucket.options)
    assert convert(tmp_path / "here", bucket.url("back"), to_storage_options=bucket.options).rows == 3000
    with pytest.raises(ConfigError, match="needs scratch_dir"):
        convert(bucket.url("in"), bucket.url("other"), shuffle=1, **options)


def test_a_finished_conversion_is_a_no_op(tmp_path: Path) -> None:
    pq.write_table(rows(), tmp_path / "in.parquet")
    done = convert(tmp_path / "in.parquet", tmp_path / "out")
    before = (tmp_path / "out/part-00000.parquet").stat()
    assert convert(tmp_path / "in.parquet", tmp_path / "out") == done
    assert (tmp_path / "out/part-00000.parquet").stat() == before


def test_the_destination_is_not_mixed_up(tmp_path: Path) -> None:
    pq.write_table(rows(), tmp_path / "in.parquet")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"has notes\.txt, which convert has not written: name an empty folder"):
        convert(tmp_path / "in.parquet", tmp_path / "full")
    convert(tmp_path / "in.parquet", tmp_path / "out")
    with pytest.raises(ConfigError, match="was begun with another shuffle"):
        convert(tmp_path / "in.parquet", tmp_path / "out", shuffle=1)
    with pytest.raises(ConfigError, match="one lies in the other"):
        convert(tmp_path / "out", tmp_path / "out/again")
    with pytest.raises(ConfigError, match="one lies in the other"):
        convert(tmp_path / "in.parquet", tmp_path)
    (tmp_path / "out/part-00000.parquet").rename(tmp_path / "moved.parquet")
    with pytest.raises(ConfigError, match=r"has lost part-00000\.parquet"):
        convert(tmp_path / "in.parquet", tmp_path / "out")
    (tmp_path / "out/_convert.json").write_text("[]")
    with pytest.raises(ConfigError, match="is of no conversion by this version"):
        convert(tmp_path / "in.parquet", tmp_path / "out")


def test_kinds_of_sources(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("text")
    with pytest.raises(
        ConfigError, match=r"convert knows, such as a\.txt: it knows Parquet \(parquet\), .*CSV \(csv\)"
    ):
        convert(tmp_path / "in", tmp_path / "out")
    with pytest.raises(ConfigError, match="format='jsonl': did you mean 'json'"):
        convert(tmp_path / "in", tmp_path / "out", format="jsonl")
    (tmp_path / "in/a.csv").write_text("x\n1\n")
    (tmp_path / "in/b.jsonl").write_text('{"x": 2}\n')
    with pytest.raises(ConfigError, match=r"choose --format json \(b\.jsonl, …\) or --format csv \(a\.csv, …\)"):
        convert(tmp_path / "in", tmp_path / "out")
    convert(tmp_path / "in", tmp_path / "out", format="csv")
    assert pq.read_table(tmp_path / "out").to_pylist() == [{"x": 1}]
    with pytest.raises(OriginError, match="check the path"):
        convert(tmp_path / "none", tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("x.parquet", b"PAR1 no", "x.parquet cannot be read"),
        ("x.jsonl", b'{"x": 1}\n{"x": \n', "x.jsonl cannot be read"),
        ("x.jsonl", b'[{"x": 1}]', "x.jsonl is one JSON array, and not an object a line: convert it by jq"),
        ("x.jsonl", b'{"x": {"a": 1}}\n' * 2 + b'{"x": 5}', "x.jsonl"),
        ("x.jsonl", '{"x": "café"}'.encode("latin-1"), "x.jsonl is not UTF-8 .*: write it in UTF-8"),
        ("x.csv", b"x,y\n1,2\n3\n", "x.csv cannot be read"),
        ("x.csv", b"x,y,y\n1,2,3\n", "x.csv has several columns called 'y': rename them"),
        ("x.csv.gz", gzip.compress(NOISE.bytes(10000).hex().encode())[:-500], "x.csv.gz cannot be read: Truncated"),
        ("x.jsonl.gz", b'{"x": 1}\n', "x.jsonl.gz cannot be read: zlib inflate failed"),
        ("x.jpg", b"", "x.jpg is empty"),
    ],
)
def test_errors_name_the_file(name: str, body: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(body)
    with pytest.raises(DataError, match=says):
        convert(tmp_path / name, tmp_path / "out")
    assert not [name for name in files_in(tmp_path) if name.endswith(".parquet") and name != "x.parquet"]


def test_damaged_rows_are_an_error_of_their_file(tmp_path: Path) -> None:
    pq.write_table(rows(100), path := tmp_path / "x.parquet", use_dictionary=False)
    with path.open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 2000)
    with pa.ipc.new_stream(cut := tmp_path / "cut.arrow", (table := rows(100)).schema) as stream:
        stream.write_table(table)
    os.truncate(cut, cut.stat().st_size // 2)
    for each in (path, cut):
        with pytest.raises(DataError, match=f"{each.name} cannot be read: .*: write it again, or leave it out"):
            convert(each, tmp_path / f"out of {each.name}")


def test_json_of_several_types_is_an_error_of_the_second_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, value in (("a", "1"), ("b", '"text"')):
        (tmp_path / f"in/{name}.jsonl").write_text(f'{{"x": {value}}}\n')
    with pytest.raises(DataError, match=r"b\.jsonl: column 'x' is string here and int64 before: give it one type"):
        convert(tmp_path / "in", tmp_path / "out")


def test_errors_of_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images(tmp_path / "in")
    (tmp_path / "in/stray.jpg").write_bytes(JPEG)
    with pytest.raises(DataError, match=r"stray\.jpg is in no folder"):
        convert(tmp_path / "in", tmp_path / "out")
    monkeypatch.setattr("dataload.conversion.lines.CHUNK_BYTES", 10)
    (tmp_path / "x.jsonl").write_text('{"x": {"a": 1}}\n{"x": 5}\n')
    with pytest.raises(DataError, match=r"x\.jsonl: column 'x' is int64 here and struct<a: int64> before"):
        convert(tmp_path / "x.jsonl", tmp_path / "out")
    feather.write_feather(pa.table({"x": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}), tmp_path / "x.feather")
    with pytest.raises(DataError, match="column 'x': Parquet cannot hold month_day_nano_interval"):
        convert(tmp_path / "x.feather", tmp_path / "out")


@pytest.mark.variants
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "jsonl.gz", "csv"])
def test_progress_goes_with_the_bytes_of_a_file(
    kind: str, seed: int | None, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is read twice, and a shuffle reads its buckets once more."""
    monkeypatch.setattr("dataload.conversion.source.BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr("dataload.conversion.lines.CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr("dataload.conversion.lines.BLOCK_BYTES", 1 << 16)
    path = tmp_path / f"in.{kind}"
    if kind == "csv":
        path.write_text("x\n" + "\n".join(str(n) for n in range(500_000)))
    elif kind == "jsonl.gz":
        lines = (json.dumps({"x": n, "s": NOISE.bytes(200).hex()}) for n in range(10_000))
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    else:
        write_source(kind, path, 0)
    conversion = Conversion(path, tmp_path / "out", shuffle=seed)
    told: list[int] = []
    conversion.run(told.append)
    passes = 1 + (kind not in ("parquet", "arrow")) + (seed is not None)
    assert sum(told) == conversion.bytes == passes * path.stat().st_size
    assert max(told) < conversion.bytes / 2 or kind in ("parquet", "arrow")  # which Arrow reads ahead


def test_a_second_conversion_is_refused(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes nothing, and the first one ends as if alone."""
    monkeypatch.setattr(run_lock, "SECONDS", 0)
    table = rows()
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10)
    refused = []

    def meanwhile(_: int) -> None:
        before = files_in(tmp_path / "out")
        with pytest.raises(ConfigError, match=rf"out is that of another conversion, process {os.getpid()} on host"):
            convert(tmp_path / "in.parquet", tmp_path / "out")
        refused.append(files_in(tmp_path / "out") == before)

    Conversion(tmp_path / "in.parquet", tmp_path / "out").run(meanwhile)
    assert refused
    assert all(refused)
    assert pq.read_table(tmp_path / "out").equals(table)


def test_a_second_conversion_to_s3_is_refused(
    small: None, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lease, "patience", lambda *_: 0.0)
    pq.write_table(rows(), tmp_path / "in.parquet")
    options = {"to_storage_options": bucket.options}
    first = Conversion(tmp_path / "in.parquet", bucket.url("out"), **options)
    refused = []

    def meanwhile(_: int) -> None:
        with pytest.raises(ConfigError, match="is that of another conversion"):
            convert(tmp_path / "in.parquet", bucket.url("out"), **options)
        refused.append(True)

    assert first.run(meanwhile).rows == 3000
    assert refused


def test_a_conversion_whose_lease_was_taken_over_writes_no_more(
    small: None, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(rows(), tmp_path / "in.parquet")
    conversion = Conversion(tmp_path / "in.parquet", bucket.url("out"), to_storage_options=bucket.options)
    names: list[str] = []

    def meanwhile(_: int) -> None:
        bucket.put("out/.lease/999999.json", json.dumps({"nonce": "x", "pid": 1, "host": "other"}).encode())
        names[:] = bucket_names(bucket)

    with pytest.raises(ConfigError, match="has been taken over by another run"):
        conversion.run(meanwhile)
    assert bucket_names(bucket) == names


def bucket_names(bucket: Any) -> list[str]:
    listed = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix="out/_").get("Contents", [])
    listed += bucket.client.list_objects_v2(Bucket=bucket.name, Prefix="out/part").get("Contents", [])
    return sorted(f"{each['Key']} {each['ETag']}" for each in listed)


def write_source(kind: str, path: Path, first: int) -> None:
    """Write 20,000 rows, in parts of which only some are read ahead."""
    table = pa.table({"x": range(first, first + 20_000), "pad": [NOISE.bytes(1000)] * 20_000})
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=1000, use_dictionary=False, compression="NONE")
    elif kind == "arrow":
        feather.write_feather(table, path, compression="uncompressed", chunksize=1000)
    else:
        path.write_bytes(b"".join(b'{"x": %d, "pad": "%s"}\n' % (n, b"." * 1000) for n in range(first, first + 20_000)))


@pytest.mark.variants
@pytest.mark.parametrize("place", ["local", "s3"])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_a_file_that_is_replaced_meanwhile_is_an_error(
    kind: str, place: str, small: None, bucket: Any, tmp_path: Path
) -> None:
    """No row of the new version mixes with those of the old one."""
    path, url, options = tmp_path / f"in.{kind}", str(tmp_path / f"in.{kind}"), {}
    write_source(kind, path, 0)
    if place == "s3":
        bucket.put(f"in.{kind}", path.read_bytes())
        url, options = bucket.url(f"in.{kind}"), {"storage_options": bucket.options}
    conversion = Conversion(url, tmp_path / "out", **options)
    write_source(kind, tmp_path / "new", 1_000_000)
    if place == "s3":
        bucket.put(f"in.{kind}", (tmp_path / "new").read_bytes())
    else:
        (tmp_path / "new").rename(path)
    with pytest.raises(ObjectChanged, match="was replaced after it was listed"):
        conversion.run()
    assert not [name for name in files_in(tmp_path / "out") if name.startswith("part-")]


@pytest.mark.parametrize(
    "planted",
    [
        {},
        {"version": 1},
        {"position": [0]},
        {"position": [0, -1]},
        {"rows": "1"},
        {"is_done": 1},
        {"files": {}},
        {"files": [{"name": "../in.parquet", "rows": 1, "bytes": 1, "sum": 1}]},
        {"files": [{"name": "part-00000.parquet", "rows": 1}]},
        {"files": [7]},
        [[[]]],
        None,
        "version",
    ],
)
def test_a_planted_state_is_refused(planted: Any, tmp_path: Path) -> None:
    pq.write_table(rows(), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out")
    state = json.loads((tmp_path / "out/_convert.json").read_text())
    broken = {**state, **planted} if isinstance(planted, dict) and "version" not in planted and planted else planted
    (tmp_path / "out/_convert.json").write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match="is of no conversion by this version"):
        convert(tmp_path / "in.parquet", tmp_path / "out")


def test_a_cut_file_is_a_lost_one(tmp_path: Path) -> None:
    pq.write_table(rows(), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out")
    os.truncate(tmp_path / "out/part-00000.parquet", 100)
    with pytest.raises(ConfigError, match=r"has lost part-00000\.parquet"):
        convert(tmp_path / "in.parquet", tmp_path / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("place", ["local", "s3", "memory"])
def test_an_interrupt_leaves_no_half_file(
    error: type[BaseException], place: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(rows(), tmp_path / "in.parquet")
    root = {"local": str(tmp_path / "out"), "s3": bucket.url("out"), "memory": f"memory://{tmp_path.name}/out"}[place]
    options = {"to_storage_options": bucket.options} if place == "s3" else {}
    real = writer.Writer.write

    def broken(self: Any, rows: pa.Table) -> None:
        real(self, rows)
        raise error

    monkeypatch.setattr(writer.Writer, "write", broken)
    with pytest.raises(error):
        convert(tmp_path / "in.parquet", root, **options)
    gc.collect()
    filesystem = fsspec.filesystem(place.replace("local", "file"), **(bucket.options if place == "s3" else {}))
    filesystem.invalidate_cache()
    names = [path.rpartition("/")[2] for path in filesystem.find(root)]
    assert [name for name in names if "lock" not in name and not name.startswith("0")] == ["_convert.json"]
    monkeypatch.setattr(writer.Writer, "write", real)
    assert convert(tmp_path / "in.parquet", root, **options).rows == 3000


BIG = 2**53 + 1


def test_whole_numbers_that_floats_would_round(tmp_path: Path) -> None:
    """CSV has them as text, and JSON raises an error, in whatever order they come."""
    for number, values in enumerate([[BIG, 0.5], [0.5, BIG], [2**64 - 1, 1]]):
        (tmp_path / f"{number}.csv").write_text("\n".join(["x", *map(str, values)]))
        convert(tmp_path / f"{number}.csv", tmp_path / f"{number}")
        assert pq.read_table(tmp_path / f"{number}")["x"].to_pylist() == [*map(str, values)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(json.dumps({"x": value}) for value in values))
        with pytest.raises(DataError, match=r"jsonl: column 'x' has whole numbers beyond 2\*\*53"):
            convert(tmp_path / f"{number}.jsonl", tmp_path / "none")
    (tmp_path / "whole.jsonl").write_text(f'{{"x": {BIG}}}\n{{"x": -{BIG}}}\n')
    convert(tmp_path / "whole.jsonl", tmp_path / "whole")
    assert pq.read_table(tmp_path / "whole")["x"].to_pylist() == [BIG, -BIG]
    (tmp_path / "even.jsonl").write_text(f'{{"x": {2**60}}}\n{{"x": 0.5}}\n')
    convert(tmp_path / "even.jsonl", tmp_path / "even")
    assert pq.read_table(tmp_path / "even")["x"].to_pylist() == [2.0**60, 0.5]
    (tmp_path / "deep.jsonl").write_text(f'{{"a": {{"b": [{{"c": [{BIG}]}}]}}}}\n{{"a": {{"b": [{{"c": [0.5]}}]}}}}\n')
    with pytest.raises(DataError, match=r"column 'a\.b\.c' has whole numbers"):
        convert(tmp_path / "deep.jsonl", tmp_path / "none")


def test_whole_numbers_in_one_file_and_fractions_in_another(tmp_path: Path) -> None:
    for name, value in (("a", BIG), ("b", 0.5)):
        for ending, text in (("csv", f"x\n{value}\n"), ("jsonl", f'{{"x": {value}}}\n')):
            (tmp_path / ending).mkdir(exist_ok=True)
            (tmp_path / ending / f"{name}.{ending}").write_text(text)
    convert(tmp_path / "csv", tmp_path / "out")
    assert pq.read_table(tmp_path / "out")["x"].to_pylist() == [str(BIG), "0.5"]
    with pytest.raises(DataError, match=r"a\.jsonl: column 'x' has whole numbers"):
        convert(tmp_path / "jsonl", tmp_path / "none")


def test_sources_without_rows_or_columns(tmp_path: Path) -> None:
    pq.write_table(rows(0), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet has no rows"):
        convert(tmp_path / "rows.parquet", tmp_path / "out")
    pq.write_table(rows(3).select([]), tmp_path / "columns.parquet")
    (tmp_path / "empty.jsonl").write_text("{}\n{}\n")
    (tmp_path / "nothing.csv").write_text("")
    for name in ("columns.parquet", "empty.jsonl", "nothing.csv"):
        with pytest.raises(DataError, match=f"{name} has no columns"):
            convert(tmp_path / name, tmp_path / name.partition(".")[0])
    (tmp_path / "some.jsonl").write_text('{}\n{"x": 1}\n{}\n')
    convert(tmp_path / "some.jsonl", tmp_path / "some")
    assert pq.read_table(tmp_path / "some")["x"].to_pylist() == [None, 1, None]


@pytest.mark.parametrize("name", ["a [b]*?", "100% #1&x=ü", "new\nline", "'quotes\"", "~$HOME"])
def test_names_with_odd_characters(name: str, bucket: Any, tmp_path: Path) -> None:
    table = rows(10)
    folder = tmp_path / name
    folder.mkdir()
    pq.write_table(table, folder / f"{name}.parquet")
    convert(folder, tmp_path / f"{name}.out")
    assert pq.read_table(tmp_path / f"{name}.out").equals(table)
    if name != "new\nline":
        bucket.put(f"{name}/{name}.parquet", (folder / f"{name}.parquet").read_bytes())
        options = {"storage_options": bucket.options}
        convert(bucket.url(name), bucket.url(f"{name}.out"), **options)
        convert(bucket.url(f"{name}.out"), tmp_path / "back", **options)
        assert pq.read_table(tmp_path / "back").equals(table)


def test_names_that_are_not_utf8_and_hidden_files(tmp_path: Path) -> None:
    images(tmp_path / "in")
    for hidden in (".thumbnails/a.jpg", "__MACOSX/._a.jpg", "class 0/.a.jpg"):
        (tmp_path / "in" / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / hidden).write_bytes(JPEG)
    assert convert(tmp_path / "in", tmp_path / "out").rows == 30
    (tmp_path / "in/class 0" / os.fsdecode(b"\xff.jpg")).write_bytes(JPEG)
    with pytest.raises(DataError, match=r"the name 'class 0/\\udcff\.jpg' is not UTF-8: rename the file"):
        convert(tmp_path / "in", tmp_path / "other")


VIEWS = {
    "list views": pa.array([[n] * (n % 3) for n in range(500)], pa.list_view(pa.int64())),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([300, 500], pa.int32()), pa.array(["a", "b"])),
    "binary views": pa.array([b"%d" % n * (n % 9) for n in range(500)], pa.binary_view()),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", [*COLUMNS, *VIEWS])
def test_types(name: str, seed: int | None, tmp_path: Path) -> None:
    column = {**COLUMNS, **VIEWS}[name]
    feather.write_feather(pa.table({"id": range(len(column)), "x": column}), tmp_path / "in.feather")
    convert(tmp_path / "in.feather", tmp_path / "out", shuffle=seed)
    found = pq.read_table(tmp_path / "out")
    order = np.argsort(found["id"].to_numpy())
    assert found["x"].take(order).to_pylist() == column.to_pylist()


def killed(command: list[Any], point: int, *flags: str) -> bool:
    """Run the conversion until its change of files with this number. Return whether it came so far."""
    ran = subprocess.run(
        [sys.executable, converting.__file__, str(point), *map(str, command), *flags],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode in (0, -signal.SIGKILL), ran.stderr
    return ran.returncode != 0


def check_kills(tmp_path: Path, options: list[str], kills: int) -> None:
    table = rows(6000)
    (tmp_path / "in").mkdir()
    for number in range(3):
        part = table.slice(number * 2000, 2000)
        pq.write_table(part, tmp_path / f"in/{number}.parquet", row_group_size=100)
    check_resumed(tmp_path, options, kills, table)


def check_resumed(tmp_path: Path, options: list[str], kills: int, table: pa.Table, *flags: str) -> None:
    """Kill conversions of `in` to `out` at random points, and check that the last one has the rows, by their id."""
    draw = random.Random(kills)
    command = [tmp_path / "in", tmp_path / "out", *options]
    first, last = (20, 150) if options else (5, 20)  # with a shuffle, most changes deal rows to buckets
    seen = [killed(command, draw.randint(first, last), *flags) for _ in range(kills)]
    assert any(seen)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*.parquet")}
    done = json.loads((tmp_path / "out/_convert.json").read_text())["files"] if kept else []
    assert not killed(command, 0, *flags)
    for each in done:
        path = tmp_path / "out" / each["name"]
        assert path.stat().st_mtime_ns == kept[path], "a complete file was written again"
    found = pq.read_table(tmp_path / "out")
    name = next(name for name in table.schema.names if name in ("id", "__key__"))
    assert (found.sort_by(name) if options else found).equals(table.sort_by(name) if options else table)
    assert not [name for name in files_in(tmp_path / "out") if "tmp" in name or "bucket" in name]


@pytest.mark.variants
@pytest.mark.parametrize("options", [[], ["--shuffle", "7"]])
def test_a_killed_conversion_goes_on(options: list[str], tmp_path: Path) -> None:
    check_kills(tmp_path, options, 2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--shuffle", "7"]])
def test_ten_kills(options: list[str], tmp_path: Path) -> None:
    check_kills(tmp_path, options, 10)


def test_lost_rows_are_found(small: None, tmp_path: Path) -> None:
    pq.write_table(rows(), tmp_path / "in.parquet")
    conversion = Conversion(tmp_path / "in.parquet", tmp_path / "out")
    conversion.run()
    state = json.loads((tmp_path / "out/_convert.json").read_text())
    (tmp_path / "out/_convert.json").write_text(json.dumps({**state, "is_done": False, "rows": state["rows"] + 1}))
    with pytest.raises(DataloadError, match="does not hold the rows of the source: 3,000 rows"):
        convert(tmp_path / "in.parquet", tmp_path / "out")


MEMORY = """
import resource, sys
from dataload import convert

source, destination, *seed = sys.argv[1:]
import pyarrow.dataset, pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(convert(source, destination, shuffle=int(seed[0]) if seed else None).rows)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
assert "torch" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [[], ["1"]])
def test_100_000_small_files_need_little_memory(seed: list[str], tmp_path: Path) -> None:
    """10 KB each: 1 GB of images."""
    for folder in range(100):
        (tmp_path / f"in/{folder:03}").mkdir(parents=True)
    noise = NOISE.bytes(10_000)
    for number in range(100_000):
        (tmp_path / f"in/{number % 100:03}/{number:06}.jpg").write_bytes(JPEG + noise + str(number).encode())
    command = [sys.executable, "-c", MEMORY, tmp_path / "in", tmp_path / "out", *seed]
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    ran = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, check=True)
    count, megabytes = map(int, ran.stdout.split())
    assert count == 100_000
    assert megabytes < 600


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """From a folder of images to a loop, as the guide does it."""
    images(tmp_path / "photos")
    command = [sys.executable, "-m", "dataload", "convert", "photos/", "train/", "--shuffle", "0"]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "COLUMNS": "200"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": False}
    said = subprocess.run(command, **run).stdout
    assert said.startswith("30 rows in 1 file, ")
    assert "source and files have the same rows (checksum " in said
    found = json.loads(subprocess.run([*command, "--json"], **run).stdout)
    assert (found["rows"], found["files"], found["format"]) == (30, 1, "images")
    wrong = subprocess.run([*command[:-1], "1"], **run)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("dataload: train/ was begun with another shuffle")
    labels = [label for batch in make_loader(tmp_path / "train", 10, cache=False) for label in batch["label"].tolist()]
    assert sorted(labels) == [0] * 10 + [1] * 10 + [2] * 10


def test_the_seed_is_a_whole_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shuffle=0\.5 must be a whole number"):
        convert(tmp_path, tmp_path / "out", shuffle=0.5)  # type: ignore[arg-type]
