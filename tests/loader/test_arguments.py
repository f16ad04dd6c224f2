"""Arguments of `make_loader` that cannot work raise before the first request, and the error names what was meant."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from dataload import CacheConfig, ConfigError, World, make_loader, mix
from dataload.catalog.description import columns_text
from dataload.dataset import make_dataset

MISSING = "/this folder does not exist/"  # a request raises OriginNotFound


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": 2.5}, r"batch_size=2\.5 must be a whole number"),
        ({"batch_size": None}, "batch_size or batch_tokens says .*: pass one of them"),
        ({"batch_size": np.array([4])}, r"batch_size=array\(\[4\]\) must be a whole number"),
        ({"batch_size": torch.tensor(4.0)}, "must be a whole number"),
        ({"seed": None}, "seed=None must be a whole number"),
        ({"seed": 1.5}, r"seed=1\.5 must be a whole number$"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"num_streams": 0}, "num_streams=0 must be at least 1"),
        ({"prefetch": 0}, "prefetch=0 must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
        ({"num_threads": -1}, "num_threads=-1 must be at least 0"),
        ({"num_workers": 1, "num_threads": 1}, "use one of them"),
        ({"shuffle": "blok"}, "shuffle='blok' is unknown: use one of True, 'block', 'full', False"),
        ({"ragged": "padded"}, "ragged='padded' is unknown"),
        ({"on_error": "ignore"}, "on_error='ignore' is unknown"),
        ({"transform": 3}, "transform=3 must be a function"),
        ({"collate_fn": "stack"}, "collate_fn='stack' must be a function"),
        ({"device": "cdua"}, "device='cdua' is not a device"),
        pytest.param(
            *({"device": "cuda:1"}, "device='cuda:1': torch finds no GPU here"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"drop_last": 1}, "drop_last=1 must be True or False"),
        ({"world": World(0, 1), "mesh": object.__new__(DeviceMesh)}, "pass one of them"),
        ({"colums": ["id"]}, r"colums= is unknown: did you mean 'columns'\?"),
        ({"num_worker": 2}, r"num_worker= is unknown: did you mean 'num_workers'\?"),
        ({"persistent_worker": True}, r"did you mean 'persistent_workers'\?"),
        ({"zzz": 1}, "neither make_loader nor DataLoader"),
        ({"in_fligth": 16}, r"in_fligth= is unknown: did you mean 'in_flight'\?"),
        ({"in_flight": 0}, "in_flight=0 must be an integer of at least 1"),
        ({"sampler": [0]}, "sampler= is not an argument"),
        ({"batch_sampler": [[0]]}, "batch_sampler= is not an argument"),
        ({"in_order": False}, "cannot be resumed"),
        ({"generator": torch.Generator()}, r"generator= would not change the order.*: pass seed="),
        ({"persistent_workers": True}, "num_workers > 0"),
        ({"timeout": -1}, "timeout"),
        ({"world": 3}, "world=3 must be a World"),
        ({"mesh": "dp"}, "mesh='dp' must be a DeviceMesh"),
        ({"stats_dir": 3}, "stats_dir=3 must be a path"),
        ({"stall_warning": 0}, "stall_warning=0 must be seconds above 0"),
        ({"stall_warning": "60"}, "stall_warning='60' must be seconds above 0"),
        ({"group": ["a", "b"]}, r"group=\['a', 'b'\] must map names to lists of columns"),
        ({"group": {"x": "a"}}, "must map names to lists of columns"),
        ({"group": {"x": iter(["a"])}}, "must map names to lists of columns"),
    ],
)
def test_an_argument_that_cannot_work_raises_before_any_request(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loader(MISSING, **{"batch_size": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": "id"}, "columns='id' must be a list of at least one name"),
        ({"columns": []}, r"columns=\[\] must be a list of at least one name"),
        ({"columns": 3}, "columns=3 must be a list"),
        ({"columns": [3]}, r"columns=\[3\] must be a list of at least one name"),
        ({"filters": 3}, "filters=3 must be a list of"),
        ({"filters": [("id", "~", 3)]}, "the operator one of"),
        ({"filters": [("id", "in", 3)]}, "needs a list of values"),
        ({"cache": True}, "cache=True must be a CacheConfig"),
        ({"cache": False, "cache_dir": "x"}, "cache_dir: not allowed with cache=False, leave it out"),
        ({"cache_dir": 3}, "cache_dir=3 must be a path"),
        ({"cache_dir": "a\0b"}, "must be a path"),
        ({"cache_bytes": "many"}, "cache_bytes='many' is not a size"),
        ({"cluster": "10.0.0.1"}, "cluster: must be valkey://"),
        ({"policy": "fifo"}, "policy='fifo' is unknown: use one of pin, lru"),
        ({"cache": CacheConfig(), "policy": "lru"}, r"policy: pass it inside cache=CacheConfig\(...\)"),
        ({"consistency": "open"}, "consistency='open' is a setting of tiercache, not of a dataset"),
        ({"cache": CacheConfig(consistency="immutable")}, "consistency='immutable' is a setting of tiercache, not of"),
        ({"source": None}, "the source is of type NoneType: use a URL"),
        ({"source": {"a": MISSING}}, "the source is of type dict: pass one of its values"),
        ({"source": [MISSING, 3]}, "the source has an item of type int: use a URL"),
        ({"colums": ["id"]}, r"colums= is unknown: did you mean 'columns'\?"),
    ],
)
@pytest.mark.parametrize("function", [make_dataset, partial(make_loader, batch_size=4)], ids=["dataset", "loader"])
def test_an_argument_of_a_dataset_raises_before_any_request(
    function: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        function(**{"source": MISSING, **arguments})


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the source was read")


@pytest.mark.parametrize(
    "source", [Streamed(), torch.utils.data.DataLoader(Streamed())], ids=lambda source: type(source).__module__
)
def test_tables_and_datasets_of_others_are_no_lists_of_paths(source: Any) -> None:
    with pytest.raises(ConfigError, match=f"the source is of type {type(source).__name__}: use a URL, a path, or a"):
        make_loader(source, 4)


@pytest.mark.parametrize(
    "of", [tuple, set, iter, np.array, pd.Series, pd.Index, pl.Series, lambda paths: dict.fromkeys(paths, 0).keys()]
)
def test_lists_of_paths(of: Callable[..., Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    assert len(make_dataset(of([str(tmp_path / "x.parquet")]), cache=False)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": "first"}, "stop='first': use"),
        ({"batching": "random"}, "batching='random': use"),
        ({"weights": {"a": 1, "c": 1}}, "differ in 'b', 'c'"),
        ({"weights": [1, -1]}, "weight -1 of source 'b'"),
        ({"colums": ["id"]}, r"colums= is unknown: did you mean 'columns'\?"),
        ({"zzz": 1}, "zzz= is unknown: it is not an argument of mix"),
        ({"engin": "fsspec"}, r"engin= is unknown: did you mean 'engine'\?"),
    ],
)
def test_an_argument_of_a_mixture_raises_before_any_request(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mix({"a": MISSING, "b": MISSING}, **arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in (("a", 6), ("b", 4)):
        halves = np.zeros(rows, np.float16)
        table = pa.table({"id": range(rows), "text": ["x"] * rows, "half": halves})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["idd"], r"group 'x': column 'idd' is not read: did you mean 'id'\?"),
        (["id", "text"], "group 'x': column 'text' is not one number in each row"),
        (["id", "half"], "group 'x' must have columns of one dtype: 1 is int64 \\('id'\\), 1 is float16 \\('half'\\)"),
        ([], "must have columns of one dtype: there are none"),
    ],
)
def test_a_group_names_the_column_that_does_not_suit(folder: Path, columns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loader(str(folder), 2, cache=False, group={"x": columns})


def test_errors_of_a_wide_table_name_few_columns(tmp_path: Path) -> None:
    """A table may have thousands of columns."""
    names = [f"f{number}" for number in range(2000)]
    columns = {name: np.zeros(2, "f4" if number < 1500 else "f8") for number, name in enumerate(names)}
    pq.write_table(pa.table(columns), tmp_path / "wide.parquet")
    dataset = make_dataset(str(tmp_path), cache=False)
    with pytest.raises(ConfigError) as raised:
        make_loader(dataset, 2, group={"x": names})
    assert str(raised.value) == (
        "group 'x' must have columns of one dtype: 1,500 are float32 ('f0', 'f1', 'f2', … 1,497 more), "
        "500 are float64 ('f1500', 'f1501', 'f1502', … 497 more)"
    )
    for arguments in {"columns": ["label"]}, {"group": {"x": ["label"]}}:
        with pytest.raises(ConfigError, match=r"'label' is not .*: there are 'f0', .*'f7', … 1,992 more") as raised:
            make_loader(str(tmp_path), 2, cache=False, **arguments)
        assert len(str(raised.value)) < 200


@pytest.mark.parametrize("number", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_whole_numbers_of_any_type_work(folder: Path, number: Any) -> None:
    numbers = {name: number(1) for name in ("window", "num_streams", "num_threads", "seed")}
    rows = [
        make_loader(str(folder), size, cache=False, **more)
        for size, more in ((4, {"window": 1, "seed": 1}), (number(4), numbers))
    ]
    expected, found = ([batch["id"].tolist() for batch in loader] for loader in rows)
    assert found == expected


def test_the_text_of_a_loader_says_what_it_reads_and_how(folder: Path) -> None:
    loader = make_loader(str(folder), 2, world=World(1, 2), window=1, seed=7, cache=False)

    assert repr(loader) == (
        "Loader(3 batches; 2 rows a batch, rank 1 of 2; shuffle='block', window=1, seed=7; "
        f"Dataset(file://{folder}/: 10 rows in 2 row groups of 2 files; "
        "id: int64, text: string, half: halffloat; no cache))"
    )


def test_the_type_of_a_tensor_is_its_dtype_and_shape() -> None:
    assert columns_text(pa.schema({"image": pa.fixed_shape_tensor(pa.uint8(), [28, 28])})) == "image: uint8 [28, 28]"


def test_texts_name_the_first_of_many_columns_and_sources(folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({f"c{number}": [1] for number in range(20)}), tmp_path / "wide.parquet")
    one = make_dataset(tmp_path / "wide.parquet", cache_dir=str(tmp_path / "cache"))
    text = repr(mix({f"s{number}": one for number in range(11)}))

    assert text.startswith("Mixture(s0: 1 row, weight 1, ")
    assert "s7: 1 row, weight 1, … 3 more; c0: int64, " in text
    assert text.endswith(f"c7: int64, … 12 more; cache {tmp_path / 'cache'})")
    assert "shuffle=False" in repr(make_loader(one, 1, shuffle=False))


@pytest.mark.parametrize("url", ["s3://bucket/stats", "file:///tmp/stats", Path("gs://bucket/stats")])
def test_a_url_is_no_folder(url: str | Path) -> None:
    """It would be a folder of that name in the working directory, and lost with the machine."""
    for options in ({"stats_dir": url}, {"cache_dir": url}):
        with pytest.raises(ConfigError, match=f"{min(options)}=.* is a URL: name a folder of this machine"):
            make_loader(MISSING, 10, **options)


def test_a_tilde_is_the_home_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert make_loader(str(folder), 2, stats_dir="~/stats", cache=False).stats_dir == folder / "stats"
    with pytest.raises(ConfigError, match="cache_dir='~no-such-user/x': this user has no home folder"):
        make_loader(str(folder), 2, cache_dir="~no-such-user/x")


def test_a_variable_in_the_name_of_a_folder_is_expanded(
    folder: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setenv("SCRATCH", str(scratch))
    monkeypatch.chdir(scratch)
    for name in ("$SCRATCH/cache", "${SCRATCH}/cache"):
        assert repr(make_dataset(folder, cache_dir=name)).endswith(f"; cache {scratch}/cache)")
    with pytest.raises(ConfigError, match=r"cache_dir='\$NO_SUCH/x': \$NO_SUCH is not set in the environment"):
        make_loader(str(folder), 2, cache_dir="$NO_SUCH/x")
    for name in ("$NO_SUCH", "$SCRATCH"):
        (scratch / name).mkdir()
        assert repr(make_dataset(folder, cache_dir=str(scratch / name))).endswith(f"; cache {scratch}/{name})")


def test_the_environment_names_the_default_cache(
    folder: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = tmp_path_factory.mktemp("caches")
    monkeypatch.setenv("DATALOAD_CACHE_DIR", str(caches / "default"))
    assert repr(make_dataset(folder)).endswith(f"; cache {caches}/default)")
    assert repr(make_dataset(folder, cache_dir=str(caches / "named"))).endswith(f"; cache {caches}/named)")
    monkeypatch.setenv("DATALOAD_CACHE_DIR", "s3://bucket/cache")
    with pytest.raises(ConfigError, match="DATALOAD_CACHE_DIR='s3://bucket/cache' is a URL"):
        make_dataset(folder)


def test_a_user_without_a_home_is_told_how_to_name_a_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as in a container that runs under a number that no file lists."""

    def unlisted(user: int) -> object:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unlisted)
    for name in ("HOME", "XDG_CACHE_HOME", "DATALOAD_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="has no home folder for the cache: set DATALOAD_CACHE_DIR or HOME"):
        make_dataset(folder)
    assert len(make_dataset(folder, cache=False)) == 10
