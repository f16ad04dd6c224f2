"""Parquet of Hugging Face datasets, polars, duckdb and Spark opens without arguments, and all writers agree."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import tqdm
from decoded import plain
from PIL import Image
from rows_of_writers import ROWS

from dataload import make_dataset
from dataload.catalog import filtering
from dataload.errors import DataError

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("chat", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("tags", pa.list_(pa.string())),
        ("lists", pa.list_(pa.list_(pa.int64()))),
        ("name", pa.string()),
        ("score", pa.float64()),
    ]
)

SPARK = Path(__file__).parent / "spark"  # files that Spark wrote


def with_arrow(path: Path, **options: Any) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS, SCHEMA), path / "x.parquet", **options)


def with_duckdb(path: Path) -> None:
    rows = pa.Table.from_pylist(ROWS, SCHEMA)
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        connection.execute(f"copy (select * from rows) to '{path / 'x.parquet'}' (format parquet)")


@pytest.fixture(autouse=True)
def bars_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


WRITERS = {
    "arrow": with_arrow,
    "legacy lists": lambda path: with_arrow(path, use_compliant_nested_type=False, version="1.0", store_schema=False),
    "datasets": lambda path: datasets.Dataset.from_list(ROWS).to_parquet(str(path / "x.parquet")),
    "polars": lambda path: pl.from_arrow(pa.Table.from_pylist(ROWS, SCHEMA)).write_parquet(path / "x.parquet"),
    "duckdb": with_duckdb,
    "spark": lambda path: shutil.copy(SPARK / "nested-standard.parquet", path),
    "legacy spark": lambda path: shutil.copy(SPARK / "nested-legacy.parquet", path),
}


def rows_of(path: Path) -> list[dict[str, Any]]:
    dataset = make_dataset(str(path), cache=False)
    return [{name: plain(value) for name, value in row.items()} for row in dataset.__getitems__(range(len(dataset)))]


@pytest.mark.parametrize("writer", WRITERS)
def test_files_of_every_writer_agree(writer: str, tmp_path: Path) -> None:
    WRITERS[writer](tmp_path)
    found = rows_of(tmp_path)
    missing = found[3].pop("score")
    assert missing != missing  # noqa: PLR0124 (NaN)
    assert found == [{name: row[name] for name in row if row["id"] != 3 or name != "score"} for row in ROWS]


def test_a_type_that_arrow_does_not_read_yet(tmp_path: Path) -> None:
    pl.DataFrame({"x": pl.Series([1], dtype=pl.Int128)}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet has .* not implemented: write that column with another type"):
        make_dataset(tmp_path, cache=False)


@pytest.mark.parametrize("kind", ["standard", "legacy"])
def test_types_of_spark(kind: str) -> None:
    """Spark writes times as 96 bits, and decimals of the legacy format as bytes."""
    path = SPARK / f"types-{kind}.parquet"
    batch = make_dataset(path, cache=False, null_masks=True).__getitems__([0, 1]).columns
    found = {name: plain(column[0]) for name, column in batch.items()}
    microseconds = datetime(2020, 1, 2, 3, 4, 5, 6, UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    assert pq.read_metadata(path).schema.column(0).physical_type == "INT96"
    assert found.pop("time") == microseconds // timedelta(microseconds=1)
    assert found == {
        "price": -12.5,
        "large": 1e27,
        "day": -1,
        "bytes": b"\0\xff",
        "counts": [("a", 1), ("b", None)],
    } | {
        "yes": True,
        "small": -128,
        "half": 0.5,
        **dict.fromkeys(["time.is_null", "day.is_null", "yes.is_null", "small.is_null"], False),
    }
    nulls = {name: plain(column[1]) for name, column in batch.items()}
    assert all(nulls[name] for name in nulls if name.endswith(".is_null"))
    assert all(nulls[name] != nulls[name] for name in ("price", "large", "half"))  # NaN
    assert (nulls["bytes"], nulls["counts"]) == (None, None)


NEVER = datetime(9999, 12, 31, tzinfo=UTC).replace(tzinfo=None)  # Spark ends what has no end there.


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.list_(pa.timestamp("us"))])
@pytest.mark.parametrize("writer", ["arrow", "spark"])
def test_times_of_96_bits_are_microseconds_if_their_writer_counts_these(
    tmp_path: Path, kind: pa.DataType, writer: str
) -> None:
    table = pa.table({"t": pa.array([[NEVER] if pa.types.is_list(kind) else NEVER], kind)})
    options = {"store_schema": writer == "arrow", "use_deprecated_int96_timestamps": True}
    with pq.ParquetWriter(tmp_path / "x.parquet", table.schema, **options) as file:
        file.write_table(table)
        if writer == "spark":
            file.add_key_value_metadata({"org.apache.spark.version": "3.5.0"})
    dataset = make_dataset(tmp_path / "x.parquet", cache=False)
    assert dataset.schema.field("t").type == kind
    assert dataset[0]["t"].flatten().tolist() == [(NEVER - datetime(1970, 1, 1)) // timedelta(microseconds=1)]  # noqa: DTZ001


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.list_(pa.timestamp("us"))])
def test_times_of_96_bits_that_ns_cannot_hold_are_refused(tmp_path: Path, kind: pa.DataType) -> None:
    """The writer does not tell their unit. In ns, they would wrap around to 1816."""
    table = pa.table({"t": pa.array([[NEVER] if pa.types.is_list(kind) else NEVER], kind), "x": [1]})
    pq.write_table(table, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True, store_schema=False)
    with pytest.raises(DataError, match=r"row group 0.*column 't' has a time outside of the years 1678 to 2261"):
        make_dataset(tmp_path / "x.parquet", cache=False)[0]
    assert make_dataset(tmp_path / "x.parquet", columns=["x"], cache=False)[0]["x"] == 1


INSTANTS = [1577934245000000123, 1577934245000001999, -1, -(2**63) + 1000, 2**63 - 1]
NS = pa.timestamp("ns")


def test_times_of_96_bits_have_nanoseconds(tmp_path: Path) -> None:
    """Also in nested columns, and in columns whose names have dots."""
    member = pa.field("u", pa.int64(), nullable=False)
    columns = {
        "t": pa.array(INSTANTS, NS),
        "e.t": pa.array(INSTANTS, NS),
        "x": pa.array(range(5)),
        "s": pa.array([{"t": value, "u": 1} for value in INSTANTS], pa.struct([pa.field("t", NS), member])),
        "lists": pa.array([[value] for value in INSTANTS], pa.list_(NS)),
        "map": pa.array([[("k", value)] for value in INSTANTS], pa.map_(pa.string(), NS)),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    dataset = make_dataset(tmp_path / "x.parquet", cache=False)
    batch = dataset.__getitems__(range(5)).columns
    for name in ("t", "e.t", "s.t"):
        assert batch[name].tolist() == INSTANTS
    assert [each.tolist() for each in batch["lists"]] == [[value] for value in INSTANTS]
    assert dataset[0]["map"] == [("k", pa.scalar(INSTANTS[0], NS).as_py())]
    members = make_dataset(tmp_path / "x.parquet", columns=["s.u"], cache=False).__getitems__(range(5)).columns
    assert {name: column.tolist() for name, column in members.items()} == {"s.u": [1] * 5}


def test_filters_compare_nanoseconds_of_times_of_96_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a row group whose bytes are freed while the filter reads it."""
    monkeypatch.setattr(filtering, "HELD_BYTES", 1)
    table = pa.table({"t": pa.array(np.arange(100_000) * 10**9 + 7, NS), "x": range(100_000)})
    pq.write_table(table, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True, use_dictionary=False)
    for row in (0, 99_999):
        filters = [("t", "=", np.datetime64(row * 10**9 + 7, "ns"))]
        assert make_dataset(tmp_path, filters=filters, cache=False).__getitems__([0]).columns["x"].tolist() == [row]


@pytest.mark.parametrize(("nanoseconds", "fits"), [(775_807, True), (775_808, False), (775_999, False)])
@pytest.mark.parametrize(
    "kind",
    [NS, pa.list_(NS), pa.list_(NS, 1), pa.map_(NS, NS), pa.struct([("m", NS)]), pa.list_(pa.struct([("m", NS)]))],
)
def test_the_last_time_of_96_bits_that_ns_can_hold(
    tmp_path: Path, kind: pa.DataType, nanoseconds: int, fits: bool
) -> None:
    """The test changes the nanoseconds of the day in the file, because pyarrow cannot write later times."""
    last = 2**63 - 1
    value: Any = last
    if pa.types.is_struct(kind):
        value = {"m": last}
    elif pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        value = [{"m": last} if pa.types.is_struct(kind.value_type) else last]
    elif pa.types.is_map(kind):
        value = [(last, last)]
    path = tmp_path / "x.parquet"
    options: Any = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    pq.write_table(pa.table({"t": pa.array([value], kind)}), path, use_deprecated_int96_timestamps=True, **options)
    content = path.read_bytes()
    of_day = last % (86400 * 10**9)
    old, new = of_day.to_bytes(8, "little"), (of_day - 775_807 + nanoseconds).to_bytes(8, "little")
    assert old in content
    path.write_bytes(content.replace(old, new))
    dataset = make_dataset(path, cache=False)
    if fits:
        dataset[0]
    else:
        with pytest.raises(DataError, match="column 't' has a time outside of the years"):
            dataset[0]


def test_features_of_hugging_face_datasets(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.fromarray(np.zeros((2, 3, 3), np.uint8)).save(picture, "png")
    cubes = np.arange(36, dtype=np.float32).reshape(3, 2, 3, 2)
    features = datasets.Features(
        {
            "image": datasets.Image(decode=False),
            "audio": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
            "cube": datasets.Array3D((2, 3, 2), "float32"),
            "tall": datasets.Array2D((None, 2), "int32"),
            "pair": datasets.Sequence(datasets.Value("int32"), length=2),
            "words": datasets.Sequence(datasets.Value("string")),
            "boxes": datasets.Sequence({"label": datasets.Value("string"), "at": datasets.Value("int64")}),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    rows = {
        "image": [{"bytes": picture.getvalue(), "path": None}, None, {"bytes": b"x", "path": "a.png"}],
        "audio": [{"bytes": b"RIFF", "path": "a.wav"}] * 3,
        "cube": cubes.tolist(),
        "tall": [[[1, 2]], [[3, 4], [5, 6]], []],
        "pair": [[1, 2], [3, 4], [5, 6]],
        "words": [["a"], [], ["b", "c"]],
        "boxes": [{"label": ["l"], "at": [1]}, {"label": [], "at": []}, {"label": ["m", "n"], "at": [2, 3]}],
        "label": ["cat", "dog", "cat"],
    }
    made = datasets.Dataset.from_dict(rows, features).cast_column("audio", datasets.Audio(decode=False))
    made.to_parquet(str(tmp_path / "x.parquet"))
    batch = make_dataset(str(tmp_path), cache=False).__getitems__(range(3)).columns
    assert [plain(value) for value in batch["image.bytes"]] == [picture.getvalue(), None, b"x"]
    assert batch["image.path"] == [None, None, "a.png"]
    assert [plain(value) for value in batch["audio.bytes"]] == [b"RIFF"] * 3
    assert batch["cube"].dtype == torch.float32
    assert batch["cube"].tolist() == cubes.tolist()
    assert batch["tall"] == rows["tall"]
    assert batch["pair"].tolist() == rows["pair"]
    assert batch["words"] == rows["words"]
    assert batch["label"].tolist() == [0, 1, 0]
    assert batch.get("boxes.label", batch.get("boxes")) == (
        [box["label"] for box in rows["boxes"]] if "boxes.label" in batch else made["boxes"][:]
    )


@pytest.mark.variants
@pytest.mark.parametrize("first", ["pass", "import datasets"])
def test_arrays_of_hugging_face_are_tensors_with_and_without_its_package(first: str, tmp_path: Path) -> None:
    """`import datasets` registers extension types, which change how Arrow reads the same file."""
    cube = np.arange(12, dtype=np.uint8).reshape(1, 2, 3, 2)
    features = datasets.Features({"cube": datasets.Array3D((2, 3, 2), "uint8")})
    made = datasets.Dataset.from_dict({"cube": cube.tolist()}, features)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.to_parquet(str(tmp_path / "x.parquet"))
    with pa.ipc.new_file(tmp_path / "y.arrow", made.data.schema) as file:
        file.write_table(made.data.table)
    program = f"""
{first}
from dataload import make_dataset
for name in ("x.parquet", "y.arrow"):
    cube = make_dataset({str(tmp_path)!r} + "/" + name, cache=False).__getitems__([0]).columns["cube"]
    print(tuple(cube.shape), cube.dtype, cube.flatten().tolist() == list(range(12)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["(1, 2, 3, 2) torch.uint8 True"] * 2, done.stderr


@pytest.mark.slow
def test_an_array_of_another_shape_than_its_type_says(tmp_path: Path) -> None:
    metadata = {b"ARROW:extension:name": b"datasets.features.features.Array2DExtensionType"}
    metadata[b"ARROW:extension:metadata"] = b'[[2, 2], "int8"]'
    field = pa.field("cube", pa.list_(pa.list_(pa.int8())), metadata=metadata)
    kept = pa.table({"cube": pa.array([[[1, 2], [3]]], field.type)}, pa.schema([field]))
    program = f"""
import sys, pyarrow as pa, pyarrow.parquet as pq
from dataload import make_dataset
make_dataset({str(tmp_path / "x.parquet")!r}, cache=False)[0]
"""
    pq.write_table(kept, tmp_path / "x.parquet")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert DataError.__name__ in done.stderr
    assert "column 'cube' cannot be decoded: ListType can only be casted to FixedSizeListType" in done.stderr
