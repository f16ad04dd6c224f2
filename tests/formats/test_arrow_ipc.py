"""Arrow IPC files and streams deliver the rows that were written, fetch only the needed bytes, and name errors."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pytest
import tqdm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from dataload import CacheConfig, make_dataset, make_loader
from dataload.cache.blocks.reader import Blocks
from dataload.cache.origin.source import open_source
from dataload.catalog.footer_cache import read_footer
from dataload.catalog.sources import list_objects
from dataload.errors import ConfigError, DataError
from dataload.formats.arrow_ipc import messages
from dataload.formats.arrow_ipc.reader import ArrowFooter

BATCH, BATCHES = 8, 5


def rows(first: int, count: int) -> pa.RecordBatch:
    numbers = range(first, first + count)
    kinds = pa.array([f"kind {number % 3}" for number in range(3)])
    return pa.record_batch(
        {
            "id": pa.array(numbers, pa.int64()),
            "none": pa.nulls(count),
            "text": [f"row {number}" * (number % 4) for number in numbers],
            "kind": pa.DictionaryArray.from_arrays(pa.array([number % 3 for number in numbers], pa.int8()), kinds),
            "point": pa.array([{"x": number / 2, "name": {"long": f"n{number}"}} for number in numbers]),
            "view": pa.array([f"{number} is more than twelve characters" for number in numbers], pa.string_view()),
            "vector": pa.array([[number, number + 1] for number in numbers], pa.list_(pa.float32(), 2)),
            "either": pa.UnionArray.from_sparse(
                pa.array([0] * count, pa.int8()), [pa.array(numbers), pa.array([""] * count)]
            ),
            "runs": pa.RunEndEncodedArray.from_arrays(pa.array([count], pa.int32()), pa.array([7], pa.int64())),
            "tokens": pa.array([[number] * (number % 3) for number in numbers], pa.list_(pa.int32())),
        }
    )


CHOSEN = ["tokens", "point", "id", "kind", "view", "text", "vector"]
BATCHES_OF_ROWS = [rows(number * BATCH, BATCH) for number in range(BATCHES)]


def written(batches: list[pa.RecordBatch], form: str = "file", **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with new(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def stored(bucket: Any, cache: CacheConfig) -> Callable[..., Any]:
    """Return a function that makes a dataset of files with these contents."""

    def store(*contents: bytes, **options: Any) -> Any:
        for number, content in enumerate(contents):
            bucket.put(f"data/part-{number}.arrow", content)
        bucket.server.reset()
        return make_dataset(bucket.url("data"), storage_options=bucket.options, cache=cache, **options)

    return store


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_the_rows_are_those_that_were_written(stored: Callable[..., Any], form: str, compression: str | None) -> None:
    content = written(BATCHES_OF_ROWS, form, compression=compression)
    dataset = stored(content, content, columns=CHOSEN)
    assert [group.rows for group in dataset.row_groups] == [BATCH] * BATCHES * 2
    expected = [row for batch in BATCHES_OF_ROWS * 2 for row in batch.select(CHOSEN).to_pylist()]
    order = np.random.default_rng(0).permutation(len(expected))
    for row, number in zip(dataset.__getitems__(order), order, strict=True):
        point = expected[number].pop("point")
        flat = {"point.x": point["x"], "point.name.long": point["name"]["long"]}
        assert {name: plain(value) for name, value in row.items()} == expected[number] | flat


@pytest.mark.parametrize("version", [pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5])
def test_older_metadata(stored: Callable[..., Any], version: Any) -> None:
    batches = [batch.drop_columns(["either", "runs"]) for batch in BATCHES_OF_ROWS]
    dataset = stored(written(batches, metadata_version=version), columns=CHOSEN)
    assert [plain(row["tokens"]) for row in dataset.__getitems__(range(9))] == [
        [number] * (number % 3) for number in range(9)
    ]


def test_feather(stored: Callable[..., Any], tmp_path: Path) -> None:
    pyarrow.feather.write_feather(pa.table({"id": range(10)}), tmp_path / "x", chunksize=4)
    dataset = stored((tmp_path / "x").read_bytes())
    assert [group.rows for group in dataset.row_groups] == [4, 4, 2]
    assert [plain(row["id"]) for row in dataset.__getitems__(range(10))] == list(range(10))


def test_what_hugging_face_saves(
    bucket: Any, cache: CacheConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"id": list(range(25)), "text": [str(number) for number in range(25)]}
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # it would start a thread
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved", num_shards=2)
    for file in (tmp_path / "saved").iterdir():
        bucket.put(f"saved/{file.name}", file.read_bytes())
    loader = make_loader(
        bucket.url("saved/"),
        5,
        storage_options=bucket.options,
        cache_dir=cache.cache_dir,
        cache_bytes=cache.cache_bytes,
    )
    seen = [(int(number), text) for batch in loader for number, text in zip(batch["id"], batch["text"], strict=True)]
    assert sorted(seen) == [(number, str(number)) for number in range(25)]


@pytest.mark.parametrize("form", ["file", "stream"])
def test_large_columns_that_are_not_read_are_not_fetched(bucket: Any, stored: Callable[..., Any], form: str) -> None:
    noise = np.random.default_rng(0)
    batches = [
        pa.record_batch({"a": range(100_000), "b": noise.random(100_000), "c": range(100_000)}) for _ in range(4)
    ]
    dataset = stored(written(batches, form), columns=["b"])
    indexed = bucket.server.stats()["get_bytes"]
    assert [plain(row["b"]) for row in dataset.__getitems__([5, 300_001])] == [
        batches[0]["b"][5].as_py(),
        batches[3]["b"][1].as_py(),
    ]
    fetched = bucket.server.stats()["get_bytes"] - indexed
    if form == "file":
        assert indexed < 100_000
        assert fetched == 2 * batches[0]["b"].nbytes
    else:  # The first block of a stream is read before the size of its batches is known.
        assert indexed < 100_000 + (4 << 20)
        assert fetched == batches[0]["b"].nbytes


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_files_of_polars(stored: Callable[..., Any], compression: Any) -> None:
    frame = pl.DataFrame(
        {
            "kind": pl.Series(["a", "b", None, "a"], dtype=pl.Categorical),
            "level": pl.Series(["low", "high", "low", "low"], dtype=pl.Enum(["low", "high"])),
            "text": ["short", None, "more than twelve characters", ""],
            "tags": [["x"], [], None, ["y", None]],
            "day": [date(2020, 1, 1)] * 4,
        }
    )
    file = io.BytesIO()
    frame.write_ipc(file, compression=compression)
    dataset = stored(file.getvalue())
    columns = dataset.__getitems__(range(4)).columns
    assert {name: columns[name] for name in frame.columns[:4]} == frame[:, :4].to_dict(as_series=False)
    assert columns["day"].tolist() == [18262] * 4


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["low", "high"])], ids=["Categorical", "Enum"])
def test_filters_on_the_categories_of_polars(stored: Callable[..., Any], kind: Any) -> None:
    """Their dictionaries have views, which Arrow cannot gather."""
    levels = pl.Series(["low", "high", None, "low"], dtype=kind)
    file = io.BytesIO()
    pl.DataFrame({"id": range(4), "level": levels, "s": pl.DataFrame({"level": levels}).to_struct()}).write_ipc(file)
    dataset = stored(file.getvalue(), columns=["id"])
    for name, field in (("level", pc.field("level")), ("s.level", pc.field("s", "level"))):
        for filters, left in (
            ([(name, "=", "low")], [0, 3]),
            ([(name, "in", ["high", None])], [1, 2]),
            (field != "low", [1]),
        ):
            found = dataset.filter(filters)
            assert [plain(row["id"]) for row in found.__getitems__(range(len(found)))] == left


def test_the_schema_of_a_file_is_that_of_its_footer(stored: Callable[..., Any]) -> None:
    """Arrow's own reader does not read the first message either."""
    content = bytearray(written(BATCHES_OF_ROWS))
    content[8:24] = bytes(16)
    assert stored(bytes(content), columns=["id"])[BATCH + 1] == {"id": BATCH + 1}


def test_small_batches_are_fetched_together(bucket: Any, stored: Callable[..., Any]) -> None:
    dataset = stored(written(BATCHES_OF_ROWS), columns=["id"])
    assert len(dataset.__getitems__(range(len(dataset)))) == BATCH * BATCHES
    assert bucket.server.stats()["get_requests"] <= 2


def test_a_column_that_has_the_name_of_a_member_inside_a_list(stored: Callable[..., Any]) -> None:
    batch = pa.record_batch({".x": range(100), "list": [[{"x": number}] for number in range(100)]})
    assert stored(written([batch])).__getitems__(range(100)).columns[".x"].tolist() == [*range(100)]


def test_a_column_without_a_name(stored: Callable[..., Any]) -> None:
    dataset = stored(written([pa.record_batch([pa.array(range(100)), pa.array(range(100))], ["", "x"])]))
    assert dataset.__getitems__(range(100)).columns[""].tolist() == [*range(100)]
    [group] = dataset.row_groups
    sizes = read_footer(group.file, group.footer_at, dataset.blocks).decoded_bytes(0, ["", "x"])
    assert sizes[0] == sizes[1]


def test_dictionaries_that_grow(stored: Callable[..., Any]) -> None:
    """Later dictionaries of a stream replace or extend the earlier ones; those of a file extend them."""
    words = [["a"], ["a", "bb"], ["a", "bb", "ccc"]]
    batches = [
        pa.record_batch({"c": pa.DictionaryArray.from_arrays(pa.array([len(some) - 1], pa.int32()), pa.array(some))})
        for some in words
    ]
    for form, deltas in (("file", True), ("stream", True), ("stream", False)):
        dataset = stored(written(batches, form, emit_dictionary_deltas=deltas))
        assert [row["c"] for row in dataset.__getitems__([2, 0, 1])] == ["ccc", "a", "bb"]


def test_dictionaries_of_other_columns_are_not_fetched(bucket: Any, stored: Callable[..., Any]) -> None:
    noise = np.random.default_rng(0)
    words = pa.array([noise.bytes(100).hex() for _ in range(10_000)])
    batches = [
        pa.record_batch(
            {
                "n": pa.array(noise.random(100_000)),
                "c": pa.DictionaryArray.from_arrays(pa.array(noise.integers(0, 10_000, 100_000, np.int32)), words),
            }
        )
        for _ in range(2)
    ]
    for compression in (None, "lz4"):
        content = written(batches, compression=compression)
        dataset = stored(content, columns=["n"])
        before = bucket.server.stats()["get_bytes"]
        assert dataset[100_001]["n"] == batches[1]["n"][1].as_py()
        if compression is None:
            assert bucket.server.stats()["get_bytes"] - before == batches[1]["n"].nbytes
        both = stored(content)
        assert both[100_001]["c"] == batches[1]["c"][1].as_py()


def test_dictionaries_that_others_have_taken_the_place_of_are_not_fetched(stored: Callable[..., Any]) -> None:
    words = [pa.array([f"{number} {word} " * 1000 for word in range(100)]) for number in range(8)]
    batches = [
        pa.record_batch({"c": pa.DictionaryArray.from_arrays(pa.array([7, 8], pa.int32()), some)}) for some in words
    ]
    dataset = stored(written(batches, "stream"))
    footer = read_footer(dataset.row_groups[0].file, dataset.row_groups[0].footer_at, dataset.blocks)
    first, last = (
        sum(stop - start for spans in footer.fetched(number, ["c"], sys.maxsize) for start, stop in spans)
        for number in (0, 7)
    )
    assert last < 1.2 * first
    assert [row["c"] for row in dataset.__getitems__([15, 0])] == ["7 8 " * 1000, "0 7 " * 1000]


def test_a_stream_that_goes_back_is_refused(stored: Callable[..., Any]) -> None:
    """The reader must not loop for ever."""
    content = bytearray(written(BATCHES_OF_ROWS[:2], "stream"))
    second = 8 + int.from_bytes(content[4:8], "little")
    metadata = memoryview(
        bytes(content[second : second + 8 + int.from_bytes(content[second + 4 : second + 8], "little")])
    )
    message = messages.Message(second, metadata)
    struct.pack_into("<q", content, second + 8 + messages._position(message._root, 3), -len(metadata))
    with pytest.raises(DataError, match="message at bytes"):
        stored(bytes(content))


def test_files_without_rows(stored: Callable[..., Any]) -> None:
    empty = BATCHES_OF_ROWS[0].slice(0, 0)
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, empty.schema).close()
    dataset = stored(written([empty, BATCHES_OF_ROWS[0]]), sink.getvalue().to_pybytes(), columns=["id", "text"])
    assert [group.rows for group in dataset.row_groups] == [0, BATCH]
    assert [plain(row["id"]) for row in dataset.__getitems__([7, 0])] == [7, 0]


def test_filters_read_the_values(stored: Callable[..., Any]) -> None:
    dataset = stored(written(BATCHES_OF_ROWS), columns=["id"], filters=[("id", "<", BATCH + 8)])
    assert len(dataset) == BATCH + 8
    assert [plain(row["id"]) for row in dataset.__getitems__([BATCH + 7, 0])] == [BATCH + 7, 0]


def test_parquet_and_arrow_of_one_schema_are_one_dataset(bucket: Any, stored: Callable[..., Any]) -> None:
    table = pa.table({"id": pa.array(range(3), pa.int64()), "text": ["a", "b", "c"]})
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    dataset = stored(written(table.to_batches()), sink.getvalue().to_pybytes())
    assert [row["text"] for row in dataset.__getitems__(range(6))] == ["a", "b", "c"] * 2


def test_a_first_feather(stored: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"part-0\.arrow is Feather of version 1: rewrite it"):
        stored(b"FEA1" + bytes(40) + b"FEA1")


@pytest.mark.parametrize(("form", "says"), [("file", "its end is missing"), ("stream", "cannot be read")])
def test_a_file_that_is_cut_short(stored: Callable[..., Any], form: str, says: str) -> None:
    with pytest.raises(DataError, match=rf"part-0\.arrow .*{says}"):
        stored(written(BATCHES_OF_ROWS, form)[:-100])


def damaged(content: bytes, tmp_path: Path) -> None:
    """The whole file is read through a cache."""
    file = tmp_path / "data.arrow"
    file.write_bytes(content)
    dataset = make_dataset(str(file), columns=CHOSEN, cache=False)
    if len(dataset):
        dataset.__getitems__(range(len(dataset)))


@settings(
    max_examples=3000 if NIGHTLY else 60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.parametrize("form", ["file", "stream"])
def test_damage_is_an_error_that_names_the_file(form: str, data: st.DataObject, tmp_path: Path) -> None:
    """Damage in the values may go undetected."""
    content = bytearray(written(BATCHES_OF_ROWS[:2], form))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged(bytes(content), tmp_path)
    except (DataError, ConfigError) as error:
        assert "data.arrow" in str(error) or "column" in str(error)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_damaged_size_of_compressed_values_is_an_error_that_names_the_file(compression: str, tmp_path: Path) -> None:
    """It is no lack of memory."""
    table = pa.table({"id": np.arange(1000)})
    content = written(table.to_batches(), compression=compression)
    size = struct.pack("<q", table.nbytes)
    assert content.count(size) == 1
    (tmp_path / "x.arrow").write_bytes(content.replace(size, struct.pack("<q", 1 << 60)))
    dataset = make_dataset(tmp_path, cache=False)
    with pytest.raises(DataError, match=r"x\.arrow record batch 0 cannot be decoded: .* say that they hold"):
        dataset[0]


def test_an_index_of_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.arrow"
    file.write_bytes(written(BATCHES_OF_ROWS))
    blocks = Blocks.open(open_source(str(file), None), None)
    (obj,) = list_objects(str(file), blocks)
    footer = int.from_bytes(file.read_bytes()[-10:-6], "little") + 10
    index = messages.index_of_file(obj, blocks, file.read_bytes()[-footer:])
    ArrowFooter.from_bytes(memoryview(index), obj)
    with pytest.raises(DataError, match="message at bytes"):
        ArrowFooter.from_bytes(memoryview(index), replace(obj, size=obj.size // 2))


@pytest.mark.parametrize("call", ["coded", "fetched", "open_row_group"])
def test_many_columns_take_time_in_proportion(tmp_path: Path, call: str) -> None:
    calls: dict[int, int] = {}
    for count in (400, 1600):
        names = [f"group.{number}" for number in range(count)]
        (tmp_path / f"{count}.arrow").write_bytes(written([pa.record_batch([pa.array([1])] * count, names)]))
        dataset = make_dataset(tmp_path / f"{count}.arrow", cache=False)
        [group] = dataset.row_groups
        footer = read_footer(group.file, group.footer_at, dataset.blocks)
        events: list[str] = []
        sys.setprofile(lambda _, event, __, events=events: events.append(event))
        try:
            if call == "coded":
                footer.coded(0, names)
            elif call == "fetched":
                footer.fetched(0, names, sys.maxsize)
            else:
                with footer.open_row_group(group.file, 0, names, dataset.blocks, sys.maxsize):
                    pass
        finally:
            sys.setprofile(None)
        calls[count] = len(events)
    assert calls[1600] < 6 * calls[400]
