"""Rows that a filter or a selection drops may have nulls that batches cannot hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from thrift import Struct, with_footer
from typer.testing import CliRunner

from dataload import make_dataset, make_loader, mix
from dataload.cli.app import app
from dataload.dataset import Dataset
from dataload.errors import DataError

N, GROUP = 60, 10
LABELED = [row for row in range(N) if row % 3]


def table(*, name: str = "label") -> pa.Table:
    """Each third row has nulls. Rows 0 to 29 are those of `part` 0."""

    def column(value: Callable[[int], Any], kind: pa.DataType) -> pa.Array:
        return pa.array([value(row) if row % 3 else None for row in range(N)], kind)

    columns = {
        "id": pa.array(range(N)),
        "part": pa.array([row // 30 for row in range(N)]),
        name: column(lambda row: row, pa.int32()),
        "flag": column(lambda row: row % 2 == 0, pa.bool_()),
        "when": column(lambda row: row, pa.timestamp("us")),
        "vector": column(lambda row: [row, row + 1], pa.list_(pa.int16(), 2)),
        "text": pa.array([f"text {row}" for row in range(N)]),
    }
    return pa.table(columns)


def write_parquet(path: Path, **options: Any) -> None:
    pq.write_table(table(), path / "a.parquet", row_group_size=GROUP, **options)


def write_without_statistics(path: Path) -> None:
    write_parquet(path, write_statistics=False)


def write_feather(path: Path) -> None:
    pa.feather.write_feather(table(), path / "a.feather", chunksize=GROUP)


@pytest.fixture(params=[write_parquet, write_without_statistics, write_feather])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    (tmp_path / "data").mkdir()
    request.param(tmp_path / "data")
    return str(tmp_path / "data")


def rows_of(dataset: Dataset, **options: Any) -> dict[str, list[Any]]:
    loader = make_loader(dataset, 7, shuffle=False, **options)
    batches = list(loader)
    return {name: [row for batch in batches for row in np.asarray(batch[name]).tolist()] for name in batches[0]}


def expected(rows: list[int]) -> dict[str, list[Any]]:
    whole = table().take(rows)
    return whole.set_column(4, "when", whole["when"].cast(pa.int64())).to_pydict()


FILTERS = [[("label", "not in", [None])], pc.field("label").is_valid(), [("id", "in", LABELED)]]


@pytest.mark.variants
@pytest.mark.parametrize("filters", FILTERS, ids=["not in", "is_valid", "of another column"])
def test_a_filter_drops_rows_with_nulls(folder: str, tmp_path: Path, filters: Any) -> None:
    dataset = make_dataset(folder, filters=filters, cache_dir=str(tmp_path / "cache"))
    for _ in range(2):  # the second time from the cache
        assert rows_of(dataset) == expected(LABELED)
        assert rows_of(make_dataset(folder, columns=["label"], filters=filters, cache_dir=str(tmp_path / "cache"))) == {
            "label": LABELED
        }


def test_other_selections_of_a_cached_row_group_have_their_own_rows(folder: str, tmp_path: Path) -> None:
    dataset = make_dataset(folder, columns=["id", "label"], cache_dir=str(tmp_path / "cache"))
    labeled = dataset.filter(pc.field("label").is_valid())
    assert rows_of(labeled)["label"] == LABELED
    assert rows_of(labeled.filter([("part", "=", 1)]))["label"] == [row for row in LABELED if row >= 30]
    assert rows_of(labeled.select([2, 5, 9]))["label"] == [LABELED[row] for row in (2, 5, 9)]
    for rows in ([0, 1], [9, 10, 11]):
        with pytest.raises(DataError, match="column 'label' has 1 nulls: pass fill_null= to replace them"):
            rows_of(dataset.select(rows))
    masked = make_dataset(folder, columns=["label"], null_masks=True, cache_dir=str(tmp_path / "cache"))
    assert rows_of(masked.select([0, 1]))["label.is_null"] == [True, False]


LISTS = [[1, 2], [3, None], [], None, [4], [5], [None], [6]]


def lists() -> pa.Table:
    struct = pa.array([{"a": each, "b": row} for row, each in enumerate(LISTS)])
    return pa.table({"id": range(8), "list": LISTS, "s": struct, "flags": [[True, None]] * 8})


def write_lists_to_parquet(path: Path) -> None:
    pq.write_table(lists(), path / "a.parquet", row_group_size=4)


def write_lists_to_feather(path: Path) -> None:
    pa.feather.write_feather(lists(), path / "a.feather", chunksize=4)


@pytest.mark.parametrize("write", [write_lists_to_parquet, write_lists_to_feather])
def test_dropped_rows_may_have_nulls_inside_lists_if_footers_count_them(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    columns, cache = ["id", "list", "s"], str(tmp_path / "cache")
    dataset = make_dataset(tmp_path / "data", columns=columns, cache_dir=cache)
    kept = [0, 2, 3, 4, 5, 7]
    for _ in range(2):  # the second time from the cache
        chosen = make_dataset(tmp_path / "data", columns=columns, filters=[("id", "in", kept)], cache_dir=cache)
        for name in ("list", "s.a"):
            found = [chosen[number][name] for number in range(len(kept))]
            assert [None if each is None else each.tolist() for each in found] == [LISTS[row] for row in kept]
    for rows in ([0, 1], [6, 7], range(8)):
        with pytest.raises(DataError, match=r"column '(list|s\.a)' has [12] nulls inside its lists: pass fill_null="):
            rows_of(dataset.select(rows))
    filled = make_dataset(tmp_path / "data", columns=["list"], fill_null=0, cache_dir=cache)
    assert [each.tolist() for each in filled.select([1, 6])["list"]] == [[3, 0], [0]]


@pytest.mark.parametrize("kind", [pa.bool8(), pa.int8()])
def test_a_null_inside_a_list_of_any_type_is_a_data_error(kind: pa.DataType, tmp_path: Path) -> None:
    values = pa.array([1, None, 0], pa.int8())
    values = pa.ExtensionArray.from_storage(kind, values) if isinstance(kind, pa.BaseExtensionType) else values
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), values)
    pq.write_table(pa.table({"x": lists}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'x'"):
        list(make_loader(tmp_path / "a.parquet", 2, cache=False))


def test_selections_share_row_groups_with_null_and_empty_lists(tmp_path: Path) -> None:
    """They have no nulls inside of lists."""
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"list": [[1], [], None, [4]]}), tmp_path / "data/a.parquet")
    dataset = make_dataset(tmp_path / "data", cache_dir=str(tmp_path / "cache"))
    assert [each.tolist() for each in dataset.select([0, 1])["list"]] == [[1], []]
    misses = dataset.blocks.stats()["misses"]
    assert [None if each is None else each.tolist() for each in dataset.select([2, 3])["list"]] == [None, [4]]
    assert dataset.blocks.stats()["misses"] == misses


def test_a_null_of_a_selected_row_is_an_error_before_the_first_batch_where_footers_prove_it(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    dataset = make_dataset(tmp_path, columns=["label", "vector"], cache=False)
    with pytest.raises(DataError, match=r"row group 0 column 'label' has at least 3 nulls, .*: at least 'label' 19"):
        make_loader(dataset.select(range(1, N)), 4)
    loader = make_loader(dataset.select([0, 1]), 4)  # The null may be that of a row that is not selected.
    with pytest.raises(DataError, match="row group 0 column 'label' has 1 nulls: "):
        next(iter(loader))


def test_the_footers_of_arrow_files_count_nulls(tmp_path: Path) -> None:
    write_feather(tmp_path)
    with pytest.raises(DataError, match=r"in all files: 'label' 20, 'flag' 20, 'when' 20\)"):
        make_loader(tmp_path, 4, cache=False)
    found = CliRunner().invoke(app, ["head", str(tmp_path), "--json", "--cache-dir", str(tmp_path / ".cache")])
    nulls = {column["name"]: column["nulls"] for column in json.loads(found.stdout)["columns"]}
    # A null of a list of fixed size has nulls in its elements.
    assert nulls == {"id": 0, "part": 0, "label": 20, "flag": 20, "when": 20, "vector": None, "text": 0}


def test_a_map_of_selected_rows_gets_no_others(folder: str, tmp_path: Path) -> None:
    dataset = make_dataset(folder, columns=["id", "label"], cache_dir=str(tmp_path / "cache"))
    labeled = dataset.filter([("label", "not in", [None])]).map(
        lambda rows: {"half": 60 // rows["label"]}, version=None
    )
    assert rows_of(labeled)["half"] == [60 // row for row in LABELED]  # 60 // 0 would raise
    part = labeled.select([3, 20])
    assert rows_of(part)["half"] == [60 // LABELED[3], 60 // LABELED[20]]
    whole = dataset.filter([("id", ">=", 1)])
    with pytest.raises(DataError, match="column 'label' has"):
        rows_of(whole.map(lambda rows: {"half": rows["id"]}).select([0, 1]))


def test_a_mixture_of_filtered_datasets(folder: str, tmp_path: Path) -> None:
    dataset = make_dataset(folder, columns=["label", "flag"], cache_dir=str(tmp_path / "cache"))
    labeled = dataset.filter(pc.field("label").is_valid())
    parts = {"a": labeled.filter([("part", "=", 0)]), "b": labeled.filter([("part", "=", 1)])}
    batches = make_loader(mix(parts), 8)
    assert sorted(row for batch in batches for row in batch["label"].tolist()) == LABELED


@pytest.mark.parametrize("fill_null", ["none", {"text": "none"}], ids=str)
def test_a_replacement_for_other_columns_is_no_error(tmp_path: Path, fill_null: Any) -> None:
    write_parquet(tmp_path)
    dataset = make_dataset(tmp_path, filters=FILTERS[0], fill_null=fill_null, cache=False)
    assert rows_of(dataset) == expected(LABELED)


def test_warm_makes_the_row_groups_of_a_filter(folder: str, tmp_path: Path) -> None:
    cache, filters = str(tmp_path / "cache"), '[["label", "not in", [null]]]'
    warmed = CliRunner().invoke(app, ["warm", folder, "--filters", filters, "--cache-dir", cache])
    assert warmed.exit_code == 0, warmed.output
    loader = make_loader(folder, 8, filters=FILTERS[0], cache_dir=cache)
    assert sum(len(batch["label"]) for batch in loader) == len(LABELED)
    assert (loader.stats().hits, loader.stats().misses) == (6, 0)


@pytest.mark.parametrize("write", [write_parquet, write_feather])
def test_datasets_without_nulls_share_row_groups_whatever_rows_they_have(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    dataset = make_dataset(tmp_path / "data", columns=["id", "part"], cache_dir=str(tmp_path / "cache"))
    assert rows_of(dataset)["id"] == [*range(N)]
    loader = make_loader(dataset.select(range(0, N, 3)), 4)
    assert sum(len(batch["id"]) for batch in loader) == N // 3
    assert (loader.stats().hits, loader.stats().misses) == (6, 0)


def test_a_row_group_of_several_blobs_may_have_nulls_in_dropped_rows(tmp_path: Path) -> None:
    rows = np.arange(150_000)
    labels = pa.array(rows, mask=rows % 1000 == 999)
    pq.write_table(pa.table({"label": labels}), tmp_path / "a.parquet", row_group_size=len(rows))
    dataset = make_dataset(
        tmp_path / "a.parquet", filters=pc.field("label").is_valid(), cache_dir=str(tmp_path / "cache")
    )
    assert rows_of(dataset.select(np.arange(140_000, 140_020)))["label"] == [*range(140_140, 140_160)]
    assert int(sum(batch["label"].sum() for batch in make_loader(dataset, 10_000))) == pc.sum(labels).as_py()


def test_lists_whose_elements_may_be_null_are_decoded_whole(tmp_path: Path) -> None:
    """If the footer does not tell such nulls from null and empty lists, as older writers do not."""

    def without_levels(footer: Struct) -> None:
        metadata = footer[4][1][1][0][1][1][1][0][3][1]  # of the first chunk
        del metadata[16]

    lists = pa.array([[1, None], [2], None], pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": lists}), path := tmp_path / "a.parquet")
    path.write_bytes(with_footer(path.read_bytes(), without_levels))
    dataset = make_dataset(tmp_path, cache=False).select([1, 2])
    with pytest.raises(DataError, match="column 'tokens' has 1 nulls inside its lists: pass fill_null="):
        next(iter(make_loader(dataset, 2)))
