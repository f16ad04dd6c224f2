"""`errors="replace"`: text that is not UTF-8 ends no job, wherever it is, and rows that others cached are not mixed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload import make_dataset, make_loader, mix
from dataload.cli.app import app
from dataload.errors import ConfigError, DataError
from dataload.formats.text import repaired

BAD = [b"fine", b"caf\xe9", None, b"\xe2\x82", b"", b"a\xffb\xc3"]


def as_text(values: Any, kind: pa.DataType | None = None) -> pa.Array:
    """Return bytes, valid or not, as text."""
    binary = pa.array(values, pa.binary())
    return binary.view(pa.string()) if kind is None else binary.cast(pa.large_binary()).view(kind)


def replaced(value: Any) -> Any:
    """Return what Python makes of the bytes in a value, at any depth."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (list, tuple)):
        return type(value)(map(replaced, value))
    return {name: replaced(each) for name, each in value.items()} if isinstance(value, dict) else value


def lists(text: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, 2, None, 3, 3, 6, 6], pa.int32()), text)


def structs(text: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([text, pa.array(range(len(text)))], ["name", "n"])


def maps(text: pa.Array) -> pa.Array:
    keys = text.fill_null("k")
    return pa.MapArray.from_arrays(pa.array([0, 1, 3, 3, 4, 6, 6], pa.int32()), keys, text)


def as_bytes(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_map(kind):
        return pa.map_(as_bytes(kind.key_type), as_bytes(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(as_bytes(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(as_bytes(kind.value_type))
    return pa.binary() if kind == pa.string() else kind


@pytest.mark.parametrize(
    "nested",
    [lambda text: text, lists, maps, lambda text: lists(structs(text)), lambda text: pa.array([[[1]]] * 6)],
    ids=["flat", "list", "map", "list of structs", "no text"],
)
@pytest.mark.parametrize("ragged", ["list", "flat"])
def test_invalid_text_is_replaced_at_any_depth(tmp_path: Path, nested: Callable[[Any], pa.Array], ragged: str) -> None:
    column = nested(as_text(BAD))
    pq.write_table(pa.table({"c": column}), tmp_path / "x.parquet")
    expected = replaced(column.view(as_bytes(column.type)).to_pylist())
    [batch] = make_loader(tmp_path, 6, shuffle=False, errors="replace", ragged=ragged, cache=False)
    if ragged == "list":
        assert batch["c"] == expected
    if column.type != pa.list_(pa.list_(pa.int64())):
        with pytest.raises(DataError, match=r"UTF-8.*pass errors='replace'"):
            next(iter(make_loader(tmp_path, 6, shuffle=False, cache=False)))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_each_type_of_text_is_replaced_also_in_structs_dictionaries_and_runs(tmp_path: Path, kind: Any) -> None:
    words = as_text([b"fine", b"\xff"]).cast(pa.large_string()).cast(kind)
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1, None] * 20, pa.int8()), words)
    ends = pa.array([50, 60], pa.int32())
    long = words.cast(pa.string())  # Arrow decodes no runs of views.
    runs = pa.Array.from_buffers(pa.run_end_encoded(ends.type, long.type), 60, [None], children=[ends, long])
    text = pa.chunked_array([words] * 30).combine_chunks()
    table = pa.table({"text": text, "coded": coded, "runs": runs, "s": pa.StructArray.from_arrays([text], ["m"])})
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as file:
        file.write_table(table)
    skipping = make_loader(tmp_path, 60, shuffle=False, columns=["text"], on_error="skip", cache=False)
    assert [batch["text"] for batch in skipping] == [["fine"] * 60]  # The record batch itself can be read.
    [batch] = make_loader(tmp_path, 60, shuffle=False, errors="replace", cache=False)
    assert batch["text"] == batch["s.m"] == ["fine", "\ufffd"] * 30
    assert batch["coded"] == ["fine", "\ufffd", None] * 20
    assert batch["runs"] == ["fine"] * 50 + ["\ufffd"] * 10


def test_a_dictionary_that_arrow_cannot_read_says_what_to_write(tmp_path: Path) -> None:
    words = as_text([b"fine", b"\xff"])
    for kind in (pa.int32(), pa.int8()):
        coded = pa.DictionaryArray.from_arrays(pa.array([0, 1], kind), words)
        pq.write_table(pa.table({"c": coded}), tmp_path / f"{kind}.parquet")
    assert make_dataset(tmp_path / "int32.parquet", errors="replace", cache=False)["c"].tolist() == ["fine", "\ufffd"]
    with pytest.raises(
        DataError, match="a column with a dictionary type has text that is not UTF-8: write it as strings"
    ):
        make_dataset(tmp_path / "int8.parquet", errors="replace", cache=False)["c"]


@given(st.lists(st.one_of(st.none(), st.binary(max_size=9)), max_size=9), st.integers(0, 9))
def test_replacement_is_that_of_python(values: list[bytes | None], first: int) -> None:
    assert repaired(as_text(values)[first:]).to_pylist() == replaced(values[first:])


def test_rows_that_were_cached_for_one_answer_do_not_serve_the_other(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"c": as_text(BAD * 40), "d": as_text(BAD * 40)}), tmp_path / "data" / "x.parquet")

    def read(columns: list[str], errors: Any) -> list[Any]:
        dataset = make_dataset(tmp_path / "data", columns=columns, errors=errors, cache_dir=tmp_path / "cache")
        return [batch[columns[0]] for batch in make_loader(dataset, 240, shuffle=False)]

    for columns in (["c"], ["c", "d"], ["d"]):  # The third is made of cached blobs of the second.
        for _ in range(2):
            with pytest.raises(DataError, match="UTF-8"):
                read(columns, "raise")
            assert read(columns, "replace") == [replaced(BAD * 40)]


def test_map_and_filters_see_the_replaced_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": as_text(BAD), "id": range(6)}), tmp_path / "x.parquet", row_group_size=2)
    dataset = make_dataset(tmp_path, errors="replace", cache=False)
    upper = dataset.map(lambda batch: {"c": [text and text.upper() for text in batch["c"]]}, columns=["c"])
    assert [row["c"] for row in upper.__getitems__(range(6))][:2] == ["FINE", "CAF\ufffd"]
    assert dataset.filter([("c", "=", "caf\ufffd")]).__getitems__([0])[0]["id"] == 1
    large = make_dataset(tmp_path, errors="replace", filters=pc.utf8_upper(pc.field("c")) > "CAF", cache=False)
    assert [row["id"] for row in large.__getitems__(range(len(large)))] == [0, 1, 3]
    with pytest.raises(ConfigError, match="leave none"):
        make_dataset(tmp_path, filters=[("c", "=", "caf\ufffd")], cache=False)


def test_matches_that_were_cached_for_one_answer_do_not_serve_the_other(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"c": as_text(BAD * 2)}), tmp_path / "data" / "x.parquet")
    matching = {"filters": [("c", ">=", "caf\ufffd")], "cache_dir": tmp_path / "cache"}
    found = [len(make_dataset(tmp_path / "data", errors=errors, **matching)) for errors in ("raise", "replace")]  # type: ignore[arg-type]
    assert found == [4, 6]


def test_a_filter_finds_replaced_text_beyond_the_bounds_of_the_stored_bytes(tmp_path: Path) -> None:
    """U+FFFD is EF BF BD, which follows the greatest value, C3 A9."""
    pq.write_table(pa.table({"c": as_text([b"\x80", "é".encode(), b"a"])}), tmp_path / "x.parquet")
    found = make_dataset(tmp_path, errors="replace", cache=False).filter([("c", "=", "\ufffd")])
    assert len(found) == 1


def test_a_mixture_takes_sources_of_both_kinds(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": as_text([b"\xff"] * 8)}), tmp_path / "x.parquet")
    datasets = [make_dataset(tmp_path, errors=errors, cache=False) for errors in ("replace", "raise")]
    loader = make_loader(mix(datasets, [1, 1]), 2, on_error="raise")
    with pytest.raises(DataError, match="UTF-8"):
        list(loader)
    assert datasets[0][0]["c"] == "\ufffd"


@pytest.mark.parametrize("bad", [b"label=caf\xe9", b"label=caf%E9"])
def test_keys_of_folders_are_replaced(tmp_path: Path, bad: bytes) -> None:
    for name in (bad, b"label=tea"):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        with (folder / "x.parquet").open("wb") as file:
            pq.write_table(pa.table({"id": [1, 2]}), file)
    with pytest.raises(DataError, match="errors='replace'"):
        make_dataset(tmp_path, cache=False)
    dataset = make_dataset(tmp_path, errors="replace", cache=False)
    assert sorted({row["label"] for row in dataset.__getitems__(range(4))}) == ["caf\ufffd", "tea"]
    assert len(dataset.filter([("label", "=", "caf\ufffd")])) == 2


def test_warm_caches_the_rows_that_the_loader_reads(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "x.parquet"
    pq.write_table(pa.table({"c": as_text(BAD), "id": np.arange(6)}), path)
    words = ["--errors", "replace", "--cache-dir", str(tmp_path / "cache")]
    app(["warm", str(tmp_path / "data"), *words], standalone_mode=False)
    loader = make_loader(tmp_path / "data", 6, errors="replace", cache_dir=tmp_path / "cache", shuffle=False)
    assert [batch["c"] for batch in loader] == [replaced(BAD)]
    assert "row" in capsys.readouterr().out
    assert (loader.stats().hits, loader.stats().misses) == (1, 0)


@pytest.mark.parametrize("command", ["warm", "plan", "doctor"])
def test_other_values_are_refused(tmp_path: Path, command: str) -> None:
    with pytest.raises(ConfigError, match="errors='ignore' is unknown: use 'raise', or 'replace'"):
        make_dataset(tmp_path, errors="ignore", cache=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="errors='ignore' is unknown"):
        app([command, str(tmp_path), "--errors", "ignore"], standalone_mode=False)
