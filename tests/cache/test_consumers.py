"""Common libraries read through `tiercache`: equal to uncached reads, and served from disk once warm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import duckdb
import fsspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pad
import pyarrow.parquet as pq
import pytest
import tqdm
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

BLOCK = 50_000
ROWS = 20_000


@pytest.fixture(autouse=True)
def threads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep progress bars from starting threads."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


@pytest.fixture
def folder(bucket: Any) -> str:
    """Write three Parquet files in two folders, and a CSV file."""
    rng = np.random.default_rng(0)
    for number, key in enumerate(("a/0.parquet", "a/1.parquet", "b/2.parquet")):
        ids = np.arange(number * ROWS, (number + 1) * ROWS)
        table = pa.table({"id": ids, "x": rng.random(ROWS), "text": [f"row {i}" for i in ids]})
        bucket.put_table(f"data/{key}", table, row_group_size=5000)
    bucket.put("lines.csv", b"id,text\n" + b"".join(b"%d,text of %d\n" % (i, i) for i in range(20_000)))
    bucket.server.reset()
    return f"{bucket.name}/data"


@pytest.fixture
def options(bucket: Any, tmp_path: Path) -> dict[str, Any]:
    return {
        "target_protocol": "s3",
        "target_options": bucket.options,
        "cache_dir": str(tmp_path / "cache"),
        "block_bytes": BLOCK,
        "skip_instance_cache": True,
    }


@pytest.fixture
def chained(bucket: Any, tmp_path: Path) -> dict[str, Any]:
    """Return the storage_options of tiercache::s3:// URLs."""
    ours = {"cache_dir": str(tmp_path / "cache"), "block_bytes": BLOCK, "skip_instance_cache": True}
    return {"s3": bucket.options, "tiercache": ours}


@pytest.fixture
def same_three_times(bucket: Any) -> Callable[..., None]:
    """Compare uncached, cold and warm reads. A cold read fetches each byte once, a warm read none."""

    def check(uncached: Callable[[], Any], cached: Callable[[], Any], equal: Callable[[Any, Any], bool]) -> None:
        expected = uncached()
        bucket.server.reset()
        assert equal(cached(), expected)
        asked = [(sent.path, sent.range) for sent in bucket.server.requests if sent.method == "GET" and sent.range]
        assert asked
        assert len(set(asked)) == len(asked)
        bucket.server.reset()
        assert equal(cached(), expected)
        assert bucket.server.stats()["get_requests"] == 0

    return check


def origin(bucket: Any) -> Any:
    return fsspec.filesystem("s3", **bucket.options)


def test_pyarrow_dataset(folder: str, bucket: Any, options: dict[str, Any], same_three_times: Any) -> None:
    def read(fs: Any) -> pa.Table:
        rows = pad.dataset(folder, filesystem=fs, format="parquet")
        return rows.to_table(columns=["id", "text"], filter=pad.field("id") >= 12_345).sort_by("id")

    same_three_times(
        lambda: read(origin(bucket)), lambda: read(fsspec.filesystem("tiercache", **options)), pa.Table.equals
    )


def test_a_local_folder_of_links(tmp_path: Path) -> None:
    """As Hugging Face and DVC lay out their caches."""
    (folder := tmp_path / "set").mkdir()
    for number, name in enumerate(("set/0.parquet", "blobs/b", "shared/2.parquet")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [number]}), tmp_path / name)
    (folder / "1.parquet").symlink_to("../blobs/b")
    (folder / "day").symlink_to("../shared")
    names = ["0.parquet", "1.parquet", "day/2.parquet"]
    given = {"cache_dir": str(tmp_path / "cache"), "skip_instance_cache": True}
    fs = fsspec.filesystem("tiercache", target_protocol="file", **given)
    rows = pad.dataset(str(folder), filesystem=fs, format="parquet").to_table()
    assert sorted(rows["id"].to_pylist()) == [0, 1, 2]
    assert fs.find(str(folder)) == fs.glob(f"{folder}/**/*.parquet") == [str(folder / name) for name in names]
    types = {Path(info["name"]).name: info["type"] for info in fs.ls(str(folder))}
    assert types == {"0.parquet": "file", "1.parquet": "file", "day": "directory"}
    fs.get(str(folder), str(tmp_path / "out"), recursive=True)
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_pyarrow_parquet_and_csv(folder: str, bucket: Any, options: dict[str, Any], same_three_times: Any) -> None:
    def read(fs: Any) -> list[pa.Table]:
        csv = pad.dataset(f"{bucket.name}/lines.csv", filesystem=fs, format="csv").to_table()
        return [pq.read_table(f"{folder}/a/0.parquet", filesystem=fs), csv]

    same_three_times(
        lambda: read(origin(bucket)), lambda: read(fsspec.filesystem("tiercache", **options)), lambda a, b: a == b
    )


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_pandas(kind: str, folder: str, bucket: Any, chained: Any, same_three_times: Any) -> None:
    read = pd.read_parquet if kind == "parquet" else pd.read_csv
    url = bucket.url("data/a/0.parquet" if kind == "parquet" else "lines.csv")
    same_three_times(
        lambda: read(url, storage_options=bucket.options),
        lambda: read(f"tiercache::{url}", storage_options=chained),
        pd.DataFrame.equals,
    )


def test_pandas_reads_a_folder(folder: str, bucket: Any, chained: Any, same_three_times: Any) -> None:
    same_three_times(
        lambda: pd.read_parquet(f"s3://{folder}", storage_options=bucket.options),
        lambda: pd.read_parquet(f"tiercache::s3://{folder}", storage_options=chained),
        pd.DataFrame.equals,
    )


def test_polars(folder: str, bucket: Any, options: dict[str, Any], same_three_times: Any) -> None:
    def read(fs: Any) -> list[pl.DataFrame]:
        with fs.open(f"{folder}/a/0.parquet") as one, fs.open(f"{bucket.name}/lines.csv") as other:
            eager = [pl.read_parquet(one, columns=["id", "x"]), pl.read_csv(other)]
        rows = pl.scan_pyarrow_dataset(pad.dataset(folder, filesystem=fs, format="parquet"))
        return [*eager, rows.filter(pl.col("id") > 30_000).collect().sort("id")]

    def equal(found: list[pl.DataFrame], expected: list[pl.DataFrame]) -> bool:
        return all(one.equals(other) for one, other in zip(found, expected, strict=True))

    same_three_times(lambda: read(origin(bucket)), lambda: read(fsspec.filesystem("tiercache", **options)), equal)


def test_polars_reads_a_chained_url(folder: str, bucket: Any, chained: Any, same_three_times: Any) -> None:
    def read(url: str, storage_options: Any) -> pl.DataFrame:
        with fsspec.open(url, **storage_options) as file:
            return pl.read_parquet(file)

    same_three_times(
        lambda: read(bucket.url("data/b/2.parquet"), bucket.options),
        lambda: read(f"tiercache::{bucket.url('data/b/2.parquet')}", chained),
        pl.DataFrame.equals,
    )


def test_duckdb(folder: str, bucket: Any, options: dict[str, Any], same_three_times: Any, tmp_path: Path) -> None:
    origin(bucket).get(bucket.name, str(tmp_path / "plain"), recursive=True)

    def read(root: str, fs: Any = None) -> Any:
        rows = pad.dataset(f"{root}/data", filesystem=fs, format="parquet")  # noqa: F841 (duckdb finds it by its name)
        lines = pad.dataset(f"{root}/lines.csv", filesystem=fs, format="csv")  # noqa: F841
        with duckdb.connect() as connection:
            found = connection.sql("select * from rows where id >= 100 order by id").fetchall()
            return found, connection.sql("select count(*), sum(id) from lines").fetchall()

    same_three_times(
        lambda: read(str(tmp_path / "plain")),
        lambda: read(bucket.name, fsspec.filesystem("tiercache", **options)),
        lambda one, other: one == other,
    )


@pytest.mark.variants
@pytest.mark.parametrize(
    ("form", "streaming"),
    [
        ("tiercache://", False),
        ("tiercache://::s3://", True),
        pytest.param("tiercache://", True, marks=pytest.mark.slow),
        pytest.param("tiercache://::s3://", False, marks=pytest.mark.slow),
    ],
)
def test_hugging_face_datasets(
    form: str,
    streaming: bool,
    folder: str,
    bucket: Any,
    options: Any,
    chained: Any,
    same_three_times: Any,
    tmp_path: Path,
) -> None:
    turns = iter(range(3))

    def read(prefix: str, storage_options: Any) -> list[dict[str, Any]]:
        rows = datasets.load_dataset(
            "parquet",
            data_files=[f"{prefix}{folder}/a/{number}.parquet" for number in range(2)],
            split="train",
            streaming=streaming,
            storage_options=storage_options,
            cache_dir=str(tmp_path / f"prepared-{next(turns)}"),
        )
        return list(rows)

    cached = {"tiercache": options} if form == "tiercache://" else chained
    same_three_times(
        lambda: pq.read_table(f"{folder}/a", filesystem=origin(bucket)).to_pylist(),
        lambda: read(form, cached),
        lambda one, other: one == other,
    )


@pytest.fixture
def zarr() -> Iterator[Any]:
    """Return zarr, whose import takes seconds. The loop that it starts ends with the test."""
    import zarr

    yield zarr
    zarr.core.sync.cleanup_resources()


@pytest.mark.variants
@pytest.mark.parametrize("how", ["url", "filesystem"])
def test_zarr(how: str, zarr: Any, bucket: Any, options: Any, chained: Any, same_three_times: Any) -> None:
    values = np.random.default_rng(0).integers(0, 1000, (300, 200))
    memory = zarr.storage.MemoryStore()
    group = zarr.create_group(memory)
    group.create_array("plain", data=values, chunks=(50, 70))
    group.create_array("sharded", data=values, chunks=(10, 20), shards=(100, 100))
    for key, value in memory._store_dict.items():
        bucket.put(f"z.zarr/{key}", value.to_bytes())

    def read(store: Any) -> list[Any]:
        root = zarr.open_group(store, mode="r")
        return [root["plain"][:], root["sharded"][:], root["sharded"][5:25, 30:190], sorted(root.array_keys())]

    def cached() -> list[Any]:
        if how == "url":
            url = f"tiercache::s3://{bucket.name}/z.zarr"
            return read(zarr.storage.FsspecStore.from_url(url, storage_options=chained, read_only=True))
        fs = AsyncFileSystemWrapper(fsspec.filesystem("tiercache", **options), asynchronous=True)
        return read(zarr.storage.FsspecStore(fs, read_only=True, path=f"{bucket.name}/z.zarr"))

    def equal(found: list[Any], expected: list[Any]) -> bool:
        return found[3] == expected[3] and all(map(np.array_equal, found[:3], expected[:3]))

    same_three_times(lambda: [values, values, values[5:25, 30:190], ["plain", "sharded"]], cached, equal)
