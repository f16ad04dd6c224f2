"""The columns that a function of `map` may return, and how they arrive in batches."""

from __future__ import annotations

import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from dataload import CacheConfig, make_dataset, make_loader
from dataload.dataset import Dataset
from dataload.errors import DataError
from dataload.mapping import map_maker
from dataload.mapping.map_maker import ChunkSize
from dataload.rows.collate import Flat
from dataload.rows.columns import Dense

ROWS = 64  # in two row groups; the sample has 32 rows of each
INT64_MAX = 2**63 - 1


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    with tiers.fork_server(__name__):
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table({"id": range(ROWS)}), path, row_group_size=ROWS // 2)
    return path


def mapped(file: Path, values: Callable[[list[int]], Any], **options: Any) -> Dataset:
    """Return the dataset with a column x of what a function returns for the ids of rows."""

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": values(batch["id"].tolist())}

    return make_dataset(file, **({"cache": False} | options)).map(function, version="")


def batch_of(dataset: Dataset, rows: int = 2) -> Any:
    return dataset.__getitems__(range(rows)).columns["x"]


def plain(value: Any) -> Any:
    """Return values of a batch as Python objects; tensors with their shape."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, memoryview):
        return bytes(value)
    return [plain(each) for each in value] if isinstance(value, list) else value


LATER = datetime(2026, 5, 17, 1, 2, 3, 4, UTC)
CHAT = [
    {"role": "user", "content": "a", "calls": [{"name": "f", "score": 0.5}]},
    {"role": "bot", "content": None, "calls": []},
]
IMAGES = [np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3), np.ones((1, 4, 3), np.uint8)]
AUDIO = [torch.ones(2, 3), torch.zeros(2, 5)]
BOXES = [np.ones((2, 4), np.float32), np.empty((0, 4), np.float32)]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        pytest.param(np.arange(2), "int64", [0, 1], id="array"),
        pytest.param(np.zeros((2, 3), np.uint8), "shape=[3]", [[0, 0, 0]] * 2, id="array of rows"),
        pytest.param(torch.ones(2, 1, dtype=torch.float16), "shape=[1]", [[1.0]] * 2, id="tensor"),
        pytest.param(torch.ones(2, requires_grad=True), "float", [1.0, 1.0], id="tensor with a gradient"),
        pytest.param([1, 2], "int64", [1, 2], id="ints"),
        pytest.param([1, 2.5], "double", [1.0, 2.5], id="floats"),
        pytest.param([1.5, None], "double", [1.5, math.nan], id="a null beside floats"),
        pytest.param([True, False], "bool", [True, False], id="bools"),
        pytest.param([np.float32(1.5), np.float32(2)], "float", [1.5, 2.0], id="numbers of numpy"),
        pytest.param(
            [np.ones((2, 2)), np.ones((2, 2))], "shape=[2,2]", [[[1, 1], [1, 1]]] * 2, id="images of one shape"
        ),
        pytest.param([torch.tensor(3), torch.tensor(4)], "int64", [3, 4], id="scalars"),
        pytest.param([np.arange(2), None], "list<item: int64>", [[0, 1], None], id="vectors"),
        pytest.param([[1], []], "list<item: int64>", [[1], []], id="lists"),
        pytest.param(([1.5], None), "list<item: double>", [[1.5], None], id="lists with a null"),
        pytest.param(Flat(torch.arange(3), torch.tensor([0, 1, 3])), "list<item: int64>", [[0], [1, 2]], id="flat"),
        pytest.param(
            Flat(torch.arange(4).reshape(2, 2), torch.tensor([0, 1, 2])),
            "fixed_size_list<item: int64>[2]",
            [[[0, 1]], [[2, 3]]],
            id="flat of one length",
        ),
        pytest.param(["a", None], "string", ["a", None], id="strings"),
        pytest.param(np.array(["a", "b"]), "string", ["a", "b"], id="array of strings"),
        pytest.param([b"a", memoryview(b"b")], "binary", [b"a", b"b"], id="bytes"),
        pytest.param([["a", "b"], None], "list<item: string>", [["a", "b"], None], id="lists of strings"),
        pytest.param(
            [[["a"], []], []], "list<item: list<item: string>>", [[["a"], []], []], id="lists of lists of strings"
        ),
        pytest.param(
            [[[1, 2], [3]], [[]]], "list<item: list<item: int64>>", [[[1, 2], [3]], [[]]], id="lists of lists"
        ),
        pytest.param([CHAT, None], "list<item: struct<", [CHAT, None], id="messages"),
        pytest.param(
            [[{"a": torch.tensor([1, 2])}], []], "list<item: struct<", [[{"a": [1, 2]}], []], id="tensors inside"
        ),
        pytest.param(
            [[{"a": np.eye(2)}], []], "list<item: struct<", [[{"a": [[1, 0], [0, 1]]}], []], id="arrays inside"
        ),
        pytest.param(BOXES, "fixed_size_list<item: float>[4]", [[[1] * 4] * 2, []], id="boxes"),
        pytest.param(IMAGES, "struct<data: list<item: uint8>", [image.tolist() for image in IMAGES], id="images"),
        pytest.param(
            [IMAGES[0], None], "list<item: fixed_size_list", [IMAGES[0].tolist(), None], id="an image and a null"
        ),
        pytest.param(AUDIO, "struct<data: list<item: float>", [each.tolist() for each in AUDIO], id="stereo"),
        pytest.param(
            torch.tensor([1.5, 3e38], dtype=torch.bfloat16),
            "float",
            torch.tensor([1.5, 3e38], dtype=torch.bfloat16).tolist(),
            id="bfloat16",
        ),
        pytest.param(
            torch.tensor([448, 2**-9]).to(torch.float8_e4m3fn), "halffloat", [448.0, 2**-9], id="float8_e4m3fn"
        ),
        pytest.param(
            torch.tensor([57344, 2**-16]).to(torch.float8_e5m2), "halffloat", [57344.0, 2**-16], id="float8_e5m2"
        ),
        pytest.param(
            [torch.ones(1, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)],
            "list<item: float>",
            [[1.0], [1.0, 1.0]],
            id="list of bfloat16",
        ),
        pytest.param(np.array(["2026-05-17", "1970-01-02"], "datetime64[D]"), "date32", [20590, 1], id="days"),
        pytest.param(np.array([1, 2], "timedelta64[h]"), "duration[s]", [3600, 7200], id="hours"),
        pytest.param(
            np.array([[1, 2], [3, 4]], "datetime64[ms]"), "timestamp[ms]", [[1, 2], [3, 4]], id="array of times"
        ),
        pytest.param(
            [LATER, LATER], "timestamp[us, tz=UTC]", [int(LATER.timestamp()) * 10**6 + 4] * 2, id="times of Python"
        ),
        pytest.param([timedelta(seconds=1), timedelta(0)], "duration[us]", [10**6, 0], id="durations of Python"),
        pytest.param([[date(1970, 1, 2)], []], "list<item: date32", [[1], []], id="lists of dates"),
        pytest.param([Decimal("0.35"), None], "double", [0.35, math.nan], id="decimals"),
        pytest.param([[Decimal("0.35")], []], "list<item: double>", [[0.35], []], id="lists of decimals"),
        pytest.param(
            [[{"d": Decimal("1e20")}], [{"d": Decimal("0.125")}]],
            "decimal256",
            [[{"d": Decimal(10**20)}], [{"d": Decimal("0.125")}]],
            id="decimals inside",
        ),
        pytest.param(pa.array([[1], [2]]), "list<item: int64>", [[1], [2]], id="arrow"),
        pytest.param(pa.array([1, 2], pa.int8()), "int8", [1, 2], id="arrow of one type"),
        pytest.param(
            pa.array([{"a": [1]}, None], pa.map_(pa.string(), pa.list_(pa.int8()))),
            "map<string, list<item: int8>>",
            [[("a", [1])], None],
            id="map",
        ),
        pytest.param(pa.chunked_array([[1], [2]], pa.uint64()), "uint64", [1, 2], id="arrow of two chunks"),
        pytest.param([np.uint64(2**63 + 1), np.uint64(1)], "uint64", [2**63 + 1, 1], id="list of uint64"),
        pytest.param(np.array([2**63 + 1, 1], np.uint64), "uint64", [2**63 + 1, 1], id="array of uint64"),
        pytest.param(np.arange(2, dtype=">i4"), "int32", [0, 1], id="other byte order"),
    ],
)
def test_each_form_of_a_column(file: Path, value: Any, kind: str, expected: list[Any]) -> None:
    dataset = two_rows(file, value)
    assert kind in str(dataset.schema.field("x").type)
    assert same(plain(batch_of(dataset)), expected)


def returning(value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that returns the same for all rows."""

    def function(_: dict[str, Any]) -> dict[str, Any]:
        return {"x": value}

    return function


def two_rows(file: Path, value: Any, **options: Any) -> Dataset:
    """Return the dataset of two rows for which a function returns a value."""
    return make_dataset(file, cache=False, **options).select([0, 1]).map(returning(value), version="")


def same(found: Any, expected: Any) -> bool:
    """Compare values; NaN equals NaN."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float) and math.isnan(expected):
        return math.isnan(found)
    return bool(found == expected)


def test_structs_are_dotted_columns_that_gain_members(file: Path) -> None:
    rows = [{"a": n, **({"b": str(n)} if n >= ROWS // 2 else {})} for n in range(ROWS)]
    batch = mapped(file, lambda ids: [rows[n] for n in ids]).__getitems__(range(ROWS)).columns
    assert batch["x.a"].tolist() == list(range(ROWS))
    assert batch["x.b"] == [None] * (ROWS // 2) + [str(n) for n in range(ROWS // 2, ROWS)]


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        pytest.param([1, 2], [1.5, 2.5], "double", id="ints and floats"),
        pytest.param([[], None], [[1.5], []], "list<item: double>", id="empty lists"),
        pytest.param([None, None], ["a", "b"], "string", id="nulls"),
        pytest.param(np.zeros(2, np.int16), np.zeros(2, np.int32), "int32", id="arrays"),
        pytest.param([[{"a": 1}], []], [[{"a": 1, "b": "c"}], None], "struct<a: int64, b: string>", id="members"),
        pytest.param([np.ones((1, 4))] * 2, [np.ones((3, 4))] * 2, "fixed_size_list<item: double>[4]", id="boxes"),
        pytest.param([np.ones((1, 4))] * 2, [np.ones((3, 5))] * 2, "struct<data: list<item: double>", id="shapes"),
        pytest.param([np.ones((1, 4))] * 2, [None, None], "fixed_size_list<item: double>[4]", id="no shape"),
    ],
)
def test_samples_are_promoted_as_files_are(file: Path, first: Any, then: Any, kind: str) -> None:
    def function(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": first if batch["id"][0] == 0 else then}

    dataset = make_dataset(file, cache=False).select([0, 1, ROWS - 2, ROWS - 1]).map(function, version="")
    assert kind in str(dataset.schema.field("x").type)
    expected = [each.tolist() if isinstance(each, np.ndarray) else each for each in [*first, *then]]
    if kind == "struct<a: int64, b: string>":
        expected[0] = [{"a": 1, "b": None}]
    assert same(plain(list(batch_of(dataset, 4))), expected)


@pytest.mark.parametrize(
    ("sample", "later", "error"),
    [
        ([1, 2], [1.5, 2], r"'x' is float64 \[B\] here, and int64 \[B\]"),
        (np.zeros(2, np.float32), np.zeros(2), r"'x' is float64 \[B\] here, and float32 \[B\]"),
        (np.zeros((2, 3)), np.zeros((2, 4)), r"'x' is float64 \[B, 4\] here, and float64 \[B, 3\]"),
        (np.zeros(2), np.array([1, 2**53 + 1]), "'x' has an integer that float64 cannot hold"),
        (["a", "b"], [b"a", b"b"], "'x' is binary here, and string in the rows before: return one type"),
        ([[1], [2]], [[1.5], [2]], "'x' is list<item: double> here, and list<item: int64>"),
        ([[{"a": 1}]] * 2, [[{"b": 1}]] * 2, r"'x' is list<item: struct<b: int64>> here"),
        ([{"a": 1}] * 2, [{"b": 1}] * 2, r"it returned the column 'x.b', unlike for the rows before"),
        ([{"a": 1}] * 2, [1, 2], r"it returned the column 'x', unlike for the rows before"),
        ([np.ones((2, 2))] * 2, [np.ones((3, 2))] * 2, r"float64 \[B, 3, 2\] here, and .*\[B, 2, 2\].*nested_tensor"),
        (
            IMAGES,
            [np.ones((2, 2))] * 2,
            r"'x' is float64 \[B, 2, 2\] here, and tensors of",
        ),
        (
            IMAGES,
            [image * 1.5 for image in IMAGES],
            r"'x' is float64 \[B, 2, 3, 3\] here, and tensors of uint8",
        ),
        (BOXES, [np.ones((2, 5), np.float32)] * 2, r"float32 \[B, 2, 5\] here, and list<item: fixed_size_list"),
    ],
)
def test_another_type_in_later_rows_names_both(file: Path, sample: Any, later: Any, error: str) -> None:
    calls: list[int] = []

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(batch["id"]))
        return {"x": (sample if len(calls) == 1 else later)[: len(batch["id"])]}

    dataset = make_dataset(file, cache=False).select([0, 1]).map(function, version="")
    with pytest.raises(DataError, match=rf"rows\.parquet row group 0 .*{error}"):
        dataset.__getitems__([0, 1])


def test_nested_tensors_vary_whatever_the_sample_shows(file: Path) -> None:
    def boxes(ids: list[int]) -> Any:
        sizes = [1 if n < ROWS // 4 else 2 for n in ids]
        return torch.nested.as_nested_tensor([torch.ones(size, 4) for size in sizes], layout=torch.jagged)

    def images(ids: list[int]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return torch.nested.nested_tensor([torch.ones(1 if n < ROWS // 4 else n, 4, 3) for n in ids])

    assert [len(row) for row in batch_of(mapped(file, boxes), ROWS)] == [1] * 16 + [2] * 48
    assert "fixed_size_list<item: float>[4]" in str(mapped(file, boxes).schema.field("x").type)
    found = batch_of(mapped(file, images), ROWS)
    assert [tuple(row.shape) for row in found] == [(1, 4, 3)] * 16 + [(n, 4, 3) for n in range(16, ROWS)]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([1], r"'x' has 1 rows, and the batch 2"),
        (np.zeros((3, 2)), r"'x' has 3 rows, and the batch 1"),
        (7, r"'x' is one int: return an array .*; or leave the column out, and name the others with columns="),
        (np.float32(1), "'x' is one numpy.float32"),
        (None, "'x' is one NoneType"),
        ({"a": 1}, "'x' is a dict"),
        ([None, None], "'x' has only None or empty lists in the sample"),
        ([[], None], "'x' has only None or empty lists in the sample"),
        ([np.array([]), None], "'x' has only None or empty lists in the sample"),
        ([1, None], r"column 'x' has 1 nulls: pass fill_null= .* or null_masks=True"),
        ([1, 2**63 + 1], r"'x' has an integer that int64 cannot hold: return an array, .*np\.array\(…, np\.uint64\)"),
        ([2**63 + 1, 2**63 + 2], "'x' has an integer that int64 cannot hold"),
        ([[1], [2**63 + 1]], "'x' has an integer that int64 cannot hold"),
        (np.array([1, 2**63 + 1], object), "'x' has an integer that int64 cannot hold"),
        ([1, "a"], "'x' has values that no type holds together"),
        (["a", 1], "'x' has values that no type holds together"),
        (["a", b"b"], "'x' has values that no type holds together .*'a' beside bytes"),
        ([[{"a": b"b"}, {"a": "b"}], []], "'x' has values that no type holds together .*'b' beside bytes"),
        ([[1], ["a"]], "'x' has values that no type holds together"),
        (["\ud800", "a"], r"'x' has text that is not Unicode .*surrogates.*: pass errors='replace' to make_dataset"),
        ([[{"a": "\ud800"}], []], "'x' has text that is not Unicode"),
        ([date(2020, 1, 1), datetime(2020, 1, 1, 5)], r"datetime\(2020, 1, 1, 5, 0\) beside dates"),  # noqa: DTZ001
        ([[{"a": date(2020, 1, 1)}, {"a": LATER}], []], r"datetime\(2026.* beside dates"),
        ([LATER, LATER.replace(tzinfo=None)], r"datetime\(2026.*\) beside times with a zone"),
        ([LATER.replace(tzinfo=None), LATER], r"datetime\(2026.*utc\) beside times without a zone"),
        ([[[LATER]], [[LATER.replace(tzinfo=None)]]], r"beside times with a zone"),
        ([1j, 2j], "'x' has values that no type holds together"),
        ([np.zeros((1, 2)), np.zeros((2, 1, 1))], "'x' has arrays of 2 and 3 dimensions"),
        ([np.arange(1), np.arange(1.0)], "'x' has arrays of float64 and int64"),
        ([np.ma.masked_equal([0.0, 1.0], 1)] * 2, "'x' has masked arrays: fill them"),
        (np.array([b"a\0\0", b"abc"]), r"'x' is an array of \|S3: return an array"),
        (np.zeros(2, np.complex64), "'x' is an array of complex64"),
        (np.zeros(2, "timedelta64[M]"), r"'x' has times in timedelta64\[M\], which Arrow lacks"),
        (np.ma.masked_equal([0.0, 1.0], 1), r"'x' is a masked array: fill it, such as by \.filled\(np\.nan\)"),
        (torch.zeros(2).to_sparse(), "'x' has a tensor that numpy cannot hold"),
    ],
)
def test_other_values_are_errors(file: Path, value: Any, error: str) -> None:
    with pytest.raises(DataError, match=f"map .*{error}"):
        two_rows(file, value)


def test_nulls_are_those_of_files(file: Path) -> None:
    ints = [7, None]
    filled = two_rows(file, ints, fill_null=0)
    assert batch_of(filled).tolist() == [7, 0]
    batch = two_rows(file, ints, null_masks=True).__getitems__([1, 0]).columns
    assert (batch["x"].tolist(), batch["x.is_null"].tolist()) == ([0, 7], [True, False])
    whole = two_rows(file, np.arange(2), null_masks=True).__getitems__([1, 0]).columns
    assert (whole["x"].tolist(), whole["x.is_null"].tolist()) == ([1, 0], [False, False])
    images = two_rows(file, [np.ones((2, 2), np.int64), None], null_masks=True).__getitems__([0, 1]).columns
    assert (images["x"][1], images["x.is_null"].tolist()) == (None, [False, True])


def test_masks_that_a_function_returns_stay(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, None, 3]}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, cache=False, null_masks=True).map(lambda batch: {**batch, "y": batch["id"] + 1})
    batch = dataset.__getitems__([0, 1, 2]).columns
    assert set(batch) == {"id", "id.is_null", "y", "y.is_null"}
    assert (batch["id.is_null"].tolist(), batch["y.is_null"].tolist()) == ([False, True, False], [False] * 3)
    assert dataset["y.is_null"].tolist() == [False] * 3


def test_columns_of_files_come_back_as_they_are(tmp_path: Path, cache: CacheConfig) -> None:
    """`{**batch}` with types that values of Python do not tell: maps, small numbers inside, and columns of nulls."""
    columns = {
        "map": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int8())),
        "chat": pa.array([CHAT, [], None]),
        "tools": pa.array(
            [[{"name": "f", "calls": []}]] * 3,
            pa.list_(pa.struct([("name", pa.string()), ("calls", pa.list_(pa.string()))])),
        ),
        "nothing": pa.nulls(3),
        "note": pa.array([None, None, "a"]).slice(0, 3),
        "times": pa.array([[[LATER]], [], None]),
        "when": pa.array([[time(1, 2)], [], None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path / "x.parquet", cache=cache)
    again = dataset.map(lambda batch: {**batch, "n": [len(chat or []) for chat in batch["chat"]]})
    before, batch = (each.__getitems__([0, 1, 2]).columns for each in (dataset, again))
    assert plain(batch.pop("n")) == [2, 0, 0]
    assert {name: plain(list(column)) for name, column in batch.items()} == {
        name: plain(list(column)) for name, column in before.items()
    }
    assert str(again.schema.field("map").type) == "map<string, int64>"
    loaded = next(iter(make_loader(again, 3, shuffle=False, num_workers=1)))
    assert loaded["map"] == before["map"]


def test_members_beside_a_map_are_not_dropped(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.int64()))]))
    pq.write_table(pa.table({"x": pa.array([[{"m": [("a", 1)]}]], kind)}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, cache=False)
    assert dataset.map(lambda batch: dict(batch)).__getitems__([0]).columns["x"] == [[{"m": [("a", 1)]}]]
    with pytest.raises(DataError, match="'x' has values that no type holds together"):
        dataset.map(lambda batch: {"x": [[{**turn, "more": 1} for turn in row] for row in batch["x"]]})


def test_an_arrow_array_may_be_over_a_buffer_that_is_used_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_maker, "FIRST_ROWS", 1)
    monkeypatch.setattr(map_maker, "CHUNK_ROWS", 1)
    buffers: dict[int, Any] = {}

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        row = buffers.setdefault(threading.get_ident(), np.empty(1, np.int64))
        row[:] = batch["id"][0]
        return {"x": pa.array(row)}

    dataset = make_dataset(file, cache=False).select([0, 1, 2]).map(one_at_a_time(function), version="")
    assert batch_of(dataset, 3).tolist() == [0, 1, 2]


def one_at_a_time(function: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that takes the sample's rows together, and others one by one."""

    def called(batch: dict[str, Any]) -> dict[str, Any]:
        return function(batch) if len(batch["id"]) == 1 else {"x": batch["id"]}

    return called


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"ragged": "flat"}, {"device": "cpu"}], ids=str)
def test_images_of_varying_shape_reach_the_loop(file: Path, cache: CacheConfig, options: dict[str, Any]) -> None:
    def images(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "image": [
                None if n % 7 == 3 else np.full((n % 5 + 1, n % 3, 3), n, np.uint8) for n in batch["id"].tolist()
            ],
            "id": batch["id"],
        }

    dataset = make_dataset(file, cache=cache).map(images).map(lambda batch: {"id": batch["id"] + 0}, columns=["id"])
    rows = [
        pair
        for batch in make_loader(dataset, 7, **options)
        for pair in zip(batch["id"].tolist(), batch["image"], strict=True)
    ]
    assert sorted(n for n, _ in rows) == list(range(ROWS))
    for n, image in rows:
        expected = None if n % 7 == 3 else torch.full((n % 5 + 1, n % 3, 3), n, dtype=torch.uint8)
        assert image is None if expected is None else torch.equal(image, expected)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        pytest.param(np.zeros(32, np.int64), np.full(32, 2**64 - 1, np.uint64), id="uint64"),
        pytest.param([np.zeros((1, 2), int)] * 32, [np.full((2, 2), 2**64 - 1, np.uint64)] * 32, id="boxes"),
        pytest.param(np.zeros(32), np.full(32, 2**63 - 1), id="no warning of NumPy"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_integers_that_the_column_lacks_are_errors(file: Path, first: Any, later: Any) -> None:
    """The sample has integers that the type of the column holds; a later chunk has others."""
    calls: list[int] = []

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(batch["id"]))
        return {"x": (first if len(calls) == 1 else later)[: len(batch["id"])]}

    dataset = make_dataset(file, cache=False).select([0, 1]).map(function, version="")
    with pytest.raises(DataError, match=r"'x' has an integer that .* cannot hold"):
        dataset.__getitems__([0, 1])


NS = pa.timestamp("ns")
NESTED = {
    "lists of ns": (pa.list_(pa.list_(NS)), [[[1]], [], None]),
    "structs of ns": (pa.list_(pa.struct([("t", NS)])), [[{"t": 1}], None, []]),
    "uint64": (pa.list_(pa.struct([("h", pa.uint64())])), [[{"h": 2**64 - 1}], [{"h": None}], []]),
    "map of strings": (pa.map_(pa.string(), pa.string()), [[("a", "b")], None, []]),
    "map with NaN": (pa.map_(pa.string(), pa.float64()), [[("a", math.nan)], [("b", None)], []]),
    "decimals": (pa.list_(pa.struct([("d", pa.decimal128(10, 2))])), [[{"d": Decimal("1.50")}], [], None]),
}


@pytest.mark.parametrize(("kind", "values"), NESTED.values(), ids=NESTED)
def test_nested_columns_of_files_keep_their_type(tmp_path: Path, kind: pa.DataType, values: list[Any]) -> None:
    pq.write_table(pa.table({"x": pa.array(values, kind)}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, cache=False)
    again = dataset.map(lambda batch: {**batch})
    assert again.schema.field("x").type == dataset.schema.field("x").type
    before, after = (batch_of(each, 3) for each in (dataset, again))
    assert repr(after) == repr(before)


def test_other_numbers_in_nested_columns_have_their_own_type(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("n", pa.int8())]))
    pq.write_table(pa.table({"x": pa.array([[{"n": 1}]], kind)}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, cache=False)
    for value in (1.0, True, 2**40):
        changed = dataset.map(returning([[{"n": value}]]), version=value)
        assert repr(batch_of(changed, 1)) == repr([[{"n": value}]])


@pytest.mark.parametrize(
    ("kind", "first", "later"),
    [
        pytest.param(pa.list_(pa.int16()), [1], [70000], id="lists of small integers"),
        pytest.param(pa.list_(pa.float32()), [0.0], [0.1], id="lists of small floats"),
        pytest.param(pa.list_(pa.int64(), 2), [1, 2], [1, 2, 3], id="lists of one length"),
        pytest.param(
            pa.list_(pa.struct([("n", pa.int16())])), [{"n": 1}], [{"n": 70000}], id="small integers in structs"
        ),
        pytest.param(
            pa.map_(pa.string(), pa.float32()), [("a", 0.0)], [("a", 0.1), ("b", 0.2)], id="small floats in maps"
        ),
    ],
)
def test_values_of_python_do_not_get_a_type_that_only_the_sample_fits(
    tmp_path: Path, kind: pa.DataType, first: Any, later: Any
) -> None:
    pq.write_table(pa.table({"id": range(99), "x": pa.array([first] * 99, kind)}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, cache=False)

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": [later if n == 90 else first for n in batch["id"].tolist()]}

    [before, after] = batch_of(dataset.map(function).select([0, 90]))
    assert [plain(before), plain(after)] == [first, later]


def test_a_member_that_the_function_removes_is_gone(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("text", pa.string()), ("think", pa.string()), ("calls", pa.map_("string", "int64"))]))
    message = {"text": "a", "think": "b", "calls": [("c", 1)]}
    pq.write_table(pa.table({"x": pa.array([[message]], kind)}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path, cache=False)
    made = [[{"text": "a"}]]
    assert batch_of(dataset.map(returning(made)), 1) == made


def test_times_of_pandas_keep_their_nanoseconds(file: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    for one in (pandas.Timestamp(1, unit="ns"), pandas.Timedelta(1, unit="ns")):
        assert batch_of(two_rows(file, [one, None], fill_null=0)).tolist() == [1, 0]
        assert plain(batch_of(two_rows(file, [[one], []]))) == [[1], []]
        assert batch_of(two_rows(file, [[{"t": one}], []])) == [[{"t": one}], []]
    in_zone = pandas.Timestamp(1, unit="ns", tz="UTC")
    assert batch_of(two_rows(file, [in_zone, pandas.NaT], fill_null=0)).tolist() == [1, 0]
    assert plain(batch_of(two_rows(file, [[{"t": date(1970, 1, 2)}, {"t": pandas.NaT}]] * 2)))[0][1] == {"t": None}
    early = pandas.Timestamp("1500-01-01").as_unit("us")
    assert batch_of(two_rows(file, [early, early])).tolist() == [early.to_numpy().astype(int)] * 2


def test_series_of_polars_arrive_as_they_are(file: Path) -> None:
    pl = pytest.importorskip("polars", reason="needs polars")
    large = 2**62 + 1
    batch = two_rows(file, pl.Series([None, large]), null_masks=True).__getitems__([0, 1]).columns
    assert (batch["x"].tolist(), batch["x.is_null"].tolist()) == ([0, large], [True, False])
    assert batch_of(two_rows(file, pl.Series([large, None]), fill_null=7)).tolist() == [large, 7]
    structs = two_rows(file, pl.Series([{"a": 1, "b": "c"}, {"a": 2, "b": None}])).__getitems__([0, 1]).columns
    assert (structs["x.a"].tolist(), structs["x.b"]) == ([1, 2], ["c", None])
    assert plain(batch_of(two_rows(file, pl.Series([[1], []])))) == [[1], []]
    assert batch_of(two_rows(file, pl.Series(["a", None], dtype=pl.Categorical))) == ["a", None]
    times = two_rows(file, pl.Series([LATER, LATER]))
    assert str(times.schema.field("x").type) == "timestamp[us, tz=UTC]"
    assert batch_of(two_rows(file, pl.Series([b"a", b"b"], dtype=pl.Object))) == [b"a", b"b"]
    with pytest.raises(DataError, match="'x' has the type Int128, which Arrow lacks"):
        two_rows(file, pl.Series([1, 2], dtype=pl.Int128))


def test_series_of_pandas_arrive_as_they_are(file: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    large = 2**62 + 1
    for value in (pandas.Series([large, None], dtype="Int64"), pandas.array([large, None], dtype="Int64")):
        assert batch_of(two_rows(file, value, fill_null=7)).tolist() == [large, 7]
    assert batch_of(two_rows(file, pandas.Series(["a", None], dtype="string"))) == ["a", None]
    assert batch_of(two_rows(file, pandas.Series(["a", None]))) == ["a", None]
    assert batch_of(two_rows(file, pandas.Series(["a", None], dtype="category"))) == ["a", None]
    times = two_rows(file, pandas.Series(pandas.to_datetime([1, 2], unit="ns", utc=True)))
    assert (str(times.schema.field("x").type), batch_of(times).tolist()) == ("timestamp[ns, tz=UTC]", [1, 2])
    assert same(batch_of(two_rows(file, pandas.Series([1.5, math.nan]))).tolist(), [1.5, math.nan])


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ([[1, 2], np.array([])], "int64", [[1, 2], []]),
        ([np.array([]), np.array([1, 2])], "int64", [[], [1, 2]]),
        ([torch.tensor([]), torch.tensor([1])], "int64", [[], [1]]),
        (pa.array([[], None], pa.list_(pa.float32())), "list<item: float>", [[], None]),
        ([["a"], np.array([])], "string", [["a"], []]),
        ([np.array([]), np.ones((2, 4), np.float32)], "fixed_size_list<item: float>[4]", [[], [[1] * 4] * 2]),
    ],
)
def test_an_empty_array_tells_no_type(file: Path, value: Any, kind: str, expected: list[Any]) -> None:
    dataset = two_rows(file, value)
    assert kind in str(dataset.schema.field("x").type)
    assert plain(batch_of(dataset)) == expected


@pytest.mark.parametrize("empty", [slice(0, ROWS // 2), slice(ROWS // 2, ROWS), slice(0, 0)], ids=str)
def test_chunks_of_empty_arrays_tell_no_type(file: Path, empty: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_maker, "FIRST_ROWS", 1)
    monkeypatch.setattr(map_maker, "CHUNK_ROWS", 1)
    rows = range(ROWS)[empty]
    dataset = mapped(file, lambda ids: [np.array([]) if n % 2 or n in rows else np.array([n]) for n in ids])
    assert str(dataset.schema.field("x").type) == "list<item: int64>"
    assert plain(batch_of(dataset, ROWS)) == [[] if n % 2 or n in rows else [n] for n in range(ROWS)]


@pytest.mark.variants
@pytest.mark.parametrize("processes", [None, 1])
def test_text_that_is_not_unicode_is_replaced(file: Path, processes: int | None) -> None:
    dataset = make_dataset(file, cache=False, errors="replace").select([0, 1])
    assert batch_of(dataset.map(surrogates, version="", processes=processes)) == [[{"a": "b\ufffd"}], []]


def surrogates(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": [[{"a": "b\udcff"}], []][: len(batch["id"])]}


@pytest.mark.parametrize("is_flat", [False, True])
def test_invalid_text_of_arrow_is_replaced(file: Path, is_flat: bool) -> None:
    text = pa.Array.from_buffers(pa.string(), 2, pa.array([b"a\xff", b"b"]).buffers())
    dataset = make_dataset(file, cache=False, errors="replace").select([0, 1])
    made = (dataset.flat_map if is_flat else dataset.map)(returning(text), version="")
    assert batch_of(made) == ["a\ufffd", "b"]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ([np.datetime64("2020-01-01"), np.datetime64("1970-01-02")], "date32", [18262, 1]),
        ([np.datetime64("1970-01-02"), None], "date32", [1, 0]),
        ([np.datetime64(1, "ms"), np.datetime64(1, "s")], "timestamp[ms]", [1, 1000]),
        ([np.timedelta64(1, "h"), None], "duration[s]", [3600, 0]),
        ([np.array(1, "datetime64[D]")] * 2, "date32", [1, 1]),
        ([np.array([1], "datetime64[Y]"), None], "list<item: date32", [[365], None]),
        ([[np.datetime64("1970-01-02")], []], "list<item: date32", [[1], []]),
        ([[{"t": np.datetime64("1970-01-02")}], []], "struct<t: date32", [[{"t": date(1970, 1, 2)}], []]),
        ([[{"t": np.timedelta64(1, "h")}], []], "struct<t: duration[s]", [[{"t": timedelta(hours=1)}], []]),
        ([[{"t": np.array(["1970"], "datetime64[Y]")}], []], "list<item: date32", [[{"t": [date(1970, 1, 1)]}], []]),
        ([np.ones((2, 1), "datetime64[ns]")] * 2, "list<item: list<item: timestamp[ns]>>", None),
        ([np.arange(2, dtype=">i4"), None], "list<item: int32>", [[0, 1], None]),
        ([np.arange(2).astype(">M8[s]"), None], "list<item: timestamp[s]>", [[0, 1], None]),
    ],
)
def test_times_and_byte_orders_of_numpy_in_lists(file: Path, value: Any, kind: str, expected: Any) -> None:
    dataset = two_rows(file, value, fill_null=0)
    assert kind in str(dataset.schema.field("x").type)
    if expected is not None:
        assert plain(list(batch_of(dataset))) == expected


NONE_INSIDE = [[{"a": 1, "tool": None}]] * 2


@pytest.mark.parametrize(
    ("first", "then"), [(NONE_INSIDE, [[{"a": 1, "tool": "f"}]] * 2), ([{"a": None}] * 2, [{"a": 1}] * 2)]
)
def test_a_part_without_type_is_a_warning_and_an_error_later(
    file: Path, caplog: pytest.LogCaptureFixture, first: Any, then: Any
) -> None:
    calls: list[int] = []

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(batch["id"]))
        return {"x": (first if len(calls) == 1 else then)[: len(batch["id"])]}

    dataset = make_dataset(file, cache=False).select([0, 1]).map(function, version="")
    assert re.search(r"column 'x.* has only None or empty lists there: return pa\.array\(values, type\)", caplog.text)
    with pytest.raises(
        DataError, match=r"in the rows before, because the sample has only None.*: return one type, .*pa\.array"
    ):
        dataset.__getitems__([0, 1])


def test_the_part_that_differs_is_named(file: Path) -> None:
    first, later = {"a": 1, "none": None, "in": [{"b": 1}]}, {"a": 2, "none": None, "in": [{"b": 1, "tool": "f"}]}
    rows = iter([first])

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": [[next(rows, later)]] * len(batch["id"])}

    with pytest.raises(DataError, match=r"in the rows before: they differ in x\[\]\.in\[\]\.tool: return one"):
        batch_of(make_dataset(file, cache=False).select([0, 1]).map(function, version=""))


def test_a_part_without_type_of_the_source_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pq.write_table(pa.table({"x": pa.array(NONE_INSIDE), "y": pa.nulls(2)}), tmp_path / "x.parquet")
    make_dataset(tmp_path, cache=False).map(lambda batch: {**batch})
    assert not caplog.records


def test_a_late_none_among_images_is_a_null_of_numbers(file: Path) -> None:
    def late(dtype: Any, **options: Any) -> Dataset:
        image = np.ones((1, 2), dtype)
        samples = iter([[image, image]])

        def function(batch: dict[str, Any]) -> dict[str, Any]:
            return {"x": next(samples, [None, image])[: len(batch["id"])]}

        return make_dataset(file, cache=False, **options).select([0, 1]).map(function, version="")

    assert same(plain(batch_of(late(np.float32))), [[[math.nan] * 2], [[1, 1]]])
    assert plain(batch_of(late(np.uint8, fill_null=0))) == [[[0, 0]], [[1, 1]]]
    with pytest.raises(DataError, match="'x' has 1 rows with nulls: pass fill_null="):
        batch_of(late(np.uint8))


def test_nested_tensors_are_no_hint_for_another_type(file: Path) -> None:
    kinds = iter([np.int8])

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.zeros((len(batch["id"]), 3), next(kinds, np.float32))}

    with pytest.raises(DataError, match="return one type") as caught:
        make_dataset(file, cache=False).select([0, 1]).map(function, version="").__getitems__([0])
    assert "torch.nested" not in str(caught.value)


LEAVES: list[st.SearchStrategy[Any]] = [
    st.booleans(),
    st.integers(-(2**63), INT64_MAX),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.binary(max_size=5),
    st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)),  # noqa: DTZ001 (without a zone)
    st.dates(date(1900, 1, 1), date(2100, 1, 1)),
    st.timedeltas(timedelta(-9999), timedelta(9999)),
    st.decimals(-(10**20), 10**20, places=5),
]


def nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[st.SearchStrategy[Any]]:
    """Return strategies of nested values of one type, at most three levels deep, with nulls at every level."""

    def deeper(inner: st.SearchStrategy[st.SearchStrategy[Any]]) -> st.SearchStrategy[st.SearchStrategy[Any]]:
        lists = inner.map(lambda each: st.lists(st.none() | each, max_size=3))
        structs = st.lists(inner, min_size=1, max_size=3).map(
            lambda each: st.fixed_dictionaries(
                {name: st.none() | part for name, part in zip("abc", each, strict=False)}
            )
        )
        return lists | structs

    return st.recursive(st.sampled_from(LEAVES), deeper, max_leaves=4)


@settings(max_examples=1000 if NIGHTLY else 30, deadline=None)
@given(data=st.data())
def test_nested_values_come_back_equal(file: Path, data: st.DataObject) -> None:
    kind = data.draw(nested(st.none()))
    one = st.lists(
        st.lists(st.none() | kind, max_size=2), min_size=1, max_size=2
    )  # lists of lists: never a flat column
    rows = [data.draw(one) for _ in range(4)]
    dataset = make_dataset(file, cache=False).select([0, 1, ROWS - 2, ROWS - 1])

    def function(batch: dict[str, Any]) -> dict[str, Any]:
        places = [n if n < 2 else n - ROWS + 4 for n in batch["id"].tolist()]
        return {"x": [rows[place] for place in places]}

    assert batch_of(dataset.map(function, version=""), 4) == rows


def test_chunks_follow_the_size_of_their_results() -> None:
    chunk = ChunkSize(1024, 32, limit=1 << 20)
    small, large = ({"x": Dense(np.zeros((chunk.rows, size), np.uint8))} for size in (16, 1 << 16))
    sizes = [chunk.rows]
    for columns in (small, small, large, small):
        chunk.follow(columns, len(columns["x"].values))
        sizes.append(chunk.rows)
    assert sizes == [32, 64, 128, 16, 32]
