"""Tests of `Dataset.map`: the rows, what is computed when, what is cached, and errors."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import os
import pickle
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tiers
import torch
from clusters import until
from row_groups import load

from dataload import CacheConfig, World, make_dataset, make_loader, mix
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.mapping import map_maker, processes
from dataload.planning.orders import order_of
from dataload.planning.plan import plan
from dataload.planning.warm import warm
from dataload.rows import row_group_plan, scheduler
from dataload.rows.background_decoder.client import MAX_FAILURES, BackgroundDecoder
from dataload.rows.making import compute_lock
from dataload.rows.making.row_group_memory import RankShare
from dataload.runtime import child_process

ROWS, GROUP = 200, 20
SHIFT = 1
FIFTHS = pc.field("id").isin([*range(0, ROWS, 5)])


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    with tiers.fork_server(__name__):
        yield


@pytest.fixture
def _by_value() -> Iterator[None]:
    """Send functions of this module as those of a script, so that processes need not import what it imports."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    ids = range(ROWS)
    columns = {
        "id": ids,
        "text": [f"row {n}" for n in ids],
        "label": ["cat", "dog"] * (ROWS // 2),
        "tags": [list(range(n % 4)) for n in ids],
        "note": [[[n], []] for n in ids],
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=GROUP)
    return tmp_path / "rows.parquet"


@pytest.fixture
def dataset(file: Path, cache: CacheConfig) -> Dataset:
    return make_dataset(file, cache=cache)


OF_THREAD = threading.local()


def into_a_buffer(batch: dict[str, Any]) -> dict[str, Any]:
    ids = batch["id"].numpy()
    buffer = vars(OF_THREAD).setdefault("buffer", np.empty((GROUP, 2), np.int64))[: len(ids)]
    buffer[:] = ids[:, None]
    return {
        "array": buffer,
        "tensor": torch.from_numpy(buffer),
        "lists": [*buffer],
        "bytes": [row.data for row in buffer],
    }


@pytest.mark.variants
@pytest.mark.parametrize("processes", [None, 1])
def test_a_function_may_return_a_buffer_that_it_uses_again(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, processes: int | None
) -> None:
    monkeypatch.setattr(map_maker, "FIRST_ROWS", 1)
    monkeypatch.setattr(map_maker, "CHUNK_ROWS", 1)
    batch = dataset.map(into_a_buffer, version="1", processes=processes).__getitems__(range(ROWS)).columns
    expected = [[row, row] for row in range(ROWS)]
    assert batch["array"].tolist() == batch["tensor"].tolist() == expected
    assert [row.tolist() for row in batch["lists"]] == expected
    assert [np.frombuffer(row, np.int64).tolist() for row in batch["bytes"]] == expected


def halved(batch: dict[str, Any], first: int) -> dict[str, Any]:
    """Write to the bytes of the rows from `first` on, of which equal rows share one copy."""
    for number, image in zip(batch["id"].tolist(), batch["image"], strict=True):
        if number >= first:
            pixels = np.frombuffer(image, np.uint8)
            pixels //= 2
    return batch


@pytest.mark.variants
@pytest.mark.parametrize("processes", [None, 1])
@pytest.mark.parametrize("first", [3, 35], ids=["in the sample", "later"])
@pytest.mark.usefixtures("_by_value")
def test_a_function_cannot_write_to_bytes_that_rows_share(tmp_path: Path, processes: int | None, first: int) -> None:
    pq.write_table(pa.table({"id": range(40), "image": [bytes([8])] * 40}), tmp_path / "x.parquet")
    dataset = make_dataset(tmp_path / "x.parquet", cache=False)
    with pytest.raises(DataError, match=rf"row {first}: map .*halved: ValueError: .*read-only"):
        dataset.map(functools.partial(halved, first=first), processes=processes)[0]


def every_form(batch: dict[str, Any]) -> dict[str, Any]:
    ids = batch["id"]
    return {
        "id": ids,
        "half": ids.numpy() / 2,
        "image": ids.to(torch.uint8)[:, None, None].repeat(1, 2, 3),
        "tokens": [list(range(len(text))) for text in batch["text"]],
        "upper": [text.upper() for text in batch["text"]],
        "raw": [text.encode() for text in batch["text"]],
    }


def test_columns_that_the_function_does_not_get_are_not_converted(tmp_path: Path) -> None:
    """They may have values that batches cannot hold, such as text that is not UTF-8."""
    offsets, data = np.array([0, 1, 2], np.int32), b"\xffa"
    text = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    pq.write_table(pa.table({"id": [1, 2], "text": text}), tmp_path / "x.parquet")
    mapped = make_dataset(tmp_path / "x.parquet", cache=False).map(plus, columns=["id"])
    found = mapped.rowstore.gather(np.arange(2))
    assert found.rows["id"].tolist() == [1 + SHIFT, 2 + SHIFT]
    with pytest.raises(DataError, match="UTF-8"):
        mapped[0]


def test_the_order_of_rows_does_not_depend_on_the_function(file: Path) -> None:
    """Functions of ranks may differ, such as in the device that they use. All ranks must share one order."""
    dataset = make_dataset(file, columns=["id"], cache=False)
    mapped = (dataset, dataset.map(plus), dataset.map(times))
    loaders = [make_loader(each, 10, world=World(0, 2, 0, 1), row_ids=True) for each in mapped]
    found = [[batch["row_id"].tolist() for batch in loader] for loader in loaders]
    assert found[0] == found[1] == found[2]
    loaders[2].load_state_dict(loaders[1].state_dict())


def test_the_ranks_of_a_host_share_its_cores(file: Path) -> None:
    mapped = make_dataset(file, cache=False).map(plus, columns=["id"])
    mapped.rowstore.row_groups.memory.use(RankShare(1 << 30, 5))
    assert mapped.rowstore.row_groups.caches[0].maker._calls == 5


def test_a_mixture_of_maps_can_be_warmed(file: Path, tmp_path: Path) -> None:
    dataset = make_dataset(file, columns=["id"], cache=CacheConfig(str(tmp_path / "cache")))
    row_groups = mix([dataset.map(plus), dataset.map(times)]).rowstore.row_groups
    assert warm(row_groups, range(2 * len(dataset.row_groups))) == 2 * len(dataset.row_groups)
    assert all(cache.caches_everything for cache in row_groups.caches)


def plus(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"] + SHIFT}


def times(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"] * 2}


def told(batch: dict[str, Any], told: Path) -> dict[str, Any]:
    """Append the ids of the batch to a file."""
    with told.open("ab", buffering=0) as file:
        file.write("".join(f"{number} " for number in batch["id"].tolist()).encode())
    return {"id": batch["id"]}


class Told:
    """A function that notes the rows that it gets."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return told(batch, Path(self.path))

    def counts(self) -> Counter[int]:
        return Counter(map(int, Path(self.path).read_text().split()))

    def forget(self) -> None:
        Path(self.path).write_text("")


def ids(dataset: Any) -> list[int]:
    return dataset.__getitems__(range(len(dataset))).columns["id"].tolist()


def trained(dataset: Any, **options: Any) -> list[int]:
    return sorted(number for batch in make_loader(dataset, 16, **options) for number in batch["id"].tolist())


@pytest.mark.variants
@pytest.mark.parametrize(("is_cached", "processes"), [(True, None), (False, None), (True, 1)])
@pytest.mark.usefixtures("_by_value")
def test_each_form_of_a_row(
    file: Path, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch, processes: int | None, is_cached: bool
) -> None:
    monkeypatch.setattr(map_maker, "CHUNK_ROWS", 8)  # Chunks end within blobs of 16 rows and with row groups.
    monkeypatch.setattr(row_group_plan, "BLOB_ROWS", 16)
    dataset = make_dataset(file, cache=cache if is_cached else False).map(every_form, processes=processes)
    assert dataset.schema.names == ["id", "half", "image", "tokens", "upper", "raw"]
    assert dataset.schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), [2, 3])
    numbers = np.random.default_rng(0).permutation(ROWS)
    for _ in range(2):
        batch = dataset.__getitems__(numbers).columns
        assert batch["half"].tolist() == (numbers / 2).tolist()
        assert batch["image"].shape == (ROWS, 2, 3)
        assert batch["image"][:, 1, 2].tolist() == numbers.astype(np.uint8).tolist()
        assert [each.tolist() for each in batch["tokens"]] == [list(range(len(f"row {n}"))) for n in numbers]
        assert batch["upper"] == [f"ROW {n}" for n in numbers]
        assert [bytes(each) for each in batch["raw"]] == [f"row {n}".encode() for n in numbers]
    assert dataset[-1]["upper"] == "ROW 199"


def test_without_a_cache_a_map_of_much_data_fetches_no_whole_blocks(
    bucket: Any, dataset_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataload.cache.blocks.reader.UNCACHED_BYTES", 1 << 20)
    url, options = dataset_of([[2000] * 40]), bucket.options
    mapped = make_dataset(url, storage_options=options, cache=False).map(lambda row: {"row_id": row["row_id"]})
    bucket.server.reset()
    assert sorted(batch for each in make_loader(mapped, 2000) for batch in each["row_id"].tolist()) == [*range(80_000)]
    [file] = {group.file for group in mapped.row_groups}
    assert bucket.server.stats()["get_bytes"] < 2 * file.size


def test_columns_that_the_function_does_not_get_stay(dataset: Dataset) -> None:
    mapped = dataset.map(lambda batch: {"length": [len(text) for text in batch["text"]]}, columns=["text"])
    assert mapped.schema.names == ["id", "label", "tags", "note", "length"]
    before, batch = (each.__getitems__(range(ROWS)).columns for each in (dataset, mapped))
    assert batch["length"].tolist() == [len(text) for text in before["text"]]
    assert batch["id"].tolist() == before["id"].tolist()
    assert batch["label"] == before["label"]
    assert batch["note"] == before["note"]
    assert all(map(torch.equal, batch["tags"], before["tags"]))
    replaced = dataset.map(lambda batch: {"text": batch["id"]}, columns=["id", "text"])
    assert replaced.schema.names == ["text", "label", "tags", "note"]


def test_masks_and_nulls_go_with_their_column(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([1, None, 3]), "y": pa.array([None, 5, 6]), "s": ["a", None, "c"]})
    pq.write_table(table, tmp_path / "nulls.parquet")
    dataset = make_dataset(tmp_path / "nulls.parquet", cache=False, null_masks=True)
    mapped = dataset.map(lambda batch: {"x": batch["x"] * 2, "was_null": batch["x.is_null"]}, columns=["x"])
    batch = mapped.__getitems__([2, 1, 0]).columns
    assert batch["x"].tolist() == [6, 0, 2]
    assert batch["was_null"].tolist() == [False, True, False]
    assert batch["y.is_null"].tolist() == [False, False, True]
    assert batch["s"] == ["c", None, "a"]


def test_maps_follow_each_other_and_selections(dataset: Dataset) -> None:
    mapped = dataset.map(plus, columns=["id"]).map(times, columns=["id"])
    assert ids(mapped) == [2 * (n + 1) for n in range(ROWS)]
    assert mapped[3]["text"] == "row 3"
    some = dataset.filter(pc.field("id") > 90).select(np.arange(0, 100, 3)).map(times, columns=["id"])
    expected = [2 * n for n in range(91, 191, 3)]
    assert ids(some) == expected
    chosen = some.select([1, 5, 30]).map(plus, columns=["id"]).select([0, 2])
    assert ids(chosen) == [expected[1] + 1, expected[30] + 1]
    assert [place.row for place in chosen.locate([0, 1])] == [(94 % GROUP), (181 % GROUP)]
    parts = some.split([0.5, 0.5])
    assert sorted(ids(parts[0]) + ids(parts[1])) == expected
    again = pickle.loads(pickle.dumps(parts[0]))
    assert ids(again) == ids(parts[0])
    assert again.fingerprint == parts[0].fingerprint
    assert trained(mix([mapped.select(range(50)), some], [50, len(some)])) == sorted([*ids(mapped)[:50], *expected])


def test_a_mixture_takes_columns_in_another_order(dataset: Dataset) -> None:
    one = dataset.map(lambda batch: {"id": batch["id"], "text": batch["text"]})
    other = dataset.map(lambda batch: {"text": ["x"] * len(batch["id"]), "id": batch["id"] + ROWS})
    assert trained(mix([one, other])) == list(range(2 * ROWS))


def test_filters_read_the_files(dataset: Dataset) -> None:
    mapped = dataset.map(plus, columns=["id"])
    assert ids(mapped.filter([("label", "=", "dog")])) == [n + 1 for n in range(1, ROWS, 2)]
    with pytest.raises(ConfigError, match=r"'id'.* filter before map"):
        mapped.filter([("id", ">", 3)])
    with pytest.raises(ConfigError, match=r"'new'.* filter before map"):
        dataset.map(lambda batch: {"new": batch["id"]}).filter([("new", ">", 3)])


def test_only_selected_rows_are_mapped_and_each_once(dataset: Dataset, tmp_path: Path) -> None:
    function = Told(tmp_path / "told")
    mapped = dataset.filter(FIFTHS).map(function, version="1")
    assert set(function.counts()) <= set(range(0, ROWS, 5))
    function.forget()
    for _ in range(2):
        assert trained(mapped) == list(range(0, ROWS, 5))
    assert trained(mapped.select(range(10))) == list(range(0, 50, 5))
    assert function.counts() == Counter(range(0, ROWS, 5))
    again = dataset.filter(FIFTHS).map(function, version="1")
    assert trained(again) == list(range(0, ROWS, 5))
    assert function.counts() == Counter(range(0, ROWS, 5))


def test_maps_of_different_rows_have_different_blobs(dataset: Dataset) -> None:
    first, second = (dataset.select(range(start, start + 10)).map(plus) for start in (0, 5))
    assert ids(first) == list(range(1, 11))
    assert ids(second) == list(range(6, 16))


class ToldLists(Told):
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().__call__(batch) | {"list": [[*range(length)] for length in batch["length"].tolist()]}


def test_a_new_file_does_not_map_rows_of_others_again(tmp_path: Path, cache: CacheConfig) -> None:
    """Its values are larger, so a blob of many rows would have fewer of them."""
    (tmp_path / "data").mkdir()
    function = ToldLists(tmp_path / "told")
    for number, length in enumerate([1000, 1000, 1000, 1000, 1060]):
        rows = range(4 * number, 4 * number + 4)
        pq.write_table(pa.table({"id": rows, "length": [length] * 4}), tmp_path / "data" / f"{number}.parquet")
        if number >= 3:
            mapped = make_dataset(tmp_path / "data", cache=cache).map(function, version="1")
            function.forget()
            assert trained(mapped) == list(range(rows.stop))
    assert set(function.counts()) == set(rows)


def test_source_and_result_share_one_budget(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = dataset.map(lambda batch: wide(batch, 1)).map(lambda batch: wide(batch, 2))
    [cache], blob = mapped.rowstore.row_groups.caches, GROUP * 501 * 8
    maker = cache.maker
    maker.memory.use(RankShare(100 << 20, 2))
    of_chunks = 3 * blob  # the first result, and both as source and result of the second map
    least = dataset.rowstore.row_groups.caches[0].decoding_bytes(0) + 2 * 3 * blob + of_chunks
    assert least <= cache.decoding_bytes(0) < least + blob
    monkeypatch.setattr(map_maker, "CHUNK_BYTES", 1000)
    assert cache.decoding_bytes(0) < least - of_chunks + blob
    assert maker.reservation(0) == dataset.rowstore.row_groups.caches[0].maker.reservation(0)
    assert maker._source.maker.memory is maker._source.maker._source.maker.memory is maker.memory


def test_each_decoder_thread_has_memory_for_source_and_result(dataset: Dataset) -> None:
    maker = dataset.map(plus).map(plus).rowstore.row_groups.caches[0].maker
    maker.memory.use(RankShare(64 << 30, 3))
    a_row_group = 3 * 3 * row_group_plan.BLOB_BYTES + 2 * 2 * map_maker.CHUNK_BYTES
    assert maker.memory.decoding.total == 3 * a_row_group


def test_results_of_a_function_are_not_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record batches are decompressed whole, those of the source alone."""
    monkeypatch.setattr(row_group_plan, "BLOB_BYTES", 1 << 16)
    table, sizes = pa.table({"id": range(100_000)}), {}
    for compression in (None, "zstd"):
        path = tmp_path / f"{compression}.arrow"
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as file:
            file.write_table(table)
        dataset = make_dataset(path, cache=False)
        [source], [mapped] = (each.rowstore.row_groups.caches for each in (dataset, dataset.map(plus)))
        sizes[compression] = source.decoding_bytes(0), mapped.decoding_bytes(0)
    assert sizes["zstd"][0] > sizes[None][0]
    assert sizes["zstd"][1] - sizes["zstd"][0] == sizes[None][1] - sizes[None][0]


def test_the_chunks_of_a_row_group_are_mapped_in_threads(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_maker, "CHUNK_ROWS", 4)
    is_sample, calls, second = [True], itertools.count(1), threading.Event()

    def wait_for_another_call(batch: dict[str, Any]) -> dict[str, Any]:
        if not is_sample[0]:
            if next(calls) == 2:
                second.set()
            assert second.wait(tiers.PATIENCE)
        return plus(batch)

    mapped = dataset.map(wait_for_another_call, version=1)
    mapped.rowstore.row_groups.memory.use(RankShare(1 << 30, 2))
    is_sample[0] = False
    assert mapped[3]["id"] == 3 + SHIFT


def test_small_row_groups_are_mapped_at_the_same_time(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_lock, "PATIENCE_SECONDS", 2 * tiers.PATIENCE)
    together, is_sample = threading.Barrier(5), [True]

    def wait_for_other_calls(batch: dict[str, Any]) -> dict[str, Any]:
        if not is_sample[0]:
            together.wait(tiers.PATIENCE)
        return plus(batch)

    row_groups = dataset.map(wait_for_other_calls, version=1).rowstore.row_groups
    row_groups.memory.use(RankShare(64 << 20, 5))
    is_sample[0] = False
    assert warm(row_groups, range(ROWS // GROUP)) == ROWS // GROUP


def run_rank(rank: int, file: Path, cache: CacheConfig, told: Path, out: Any) -> None:
    dataset = make_dataset(file, cache=cache).map(Told(told), version="1")
    out.put(trained(dataset, world=World(rank, 2, rank, 2)))


def test_two_ranks_of_a_host_map_each_row_once(file: Path, cache: CacheConfig, tmp_path: Path) -> None:
    out = tiers.FORKSERVER.SimpleQueue()
    arguments = file, cache, tmp_path / "told", out
    ranks = [tiers.FORKSERVER.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    assert sorted(out.get() + out.get()) == list(range(ROWS))
    for rank in ranks:
        rank.join(tiers.PATIENCE)
        assert rank.exitcode == 0
    counts = Told(tmp_path / "told").counts()
    sampled = sum(counts.values()) - ROWS
    assert sampled == 4 * GROUP  # One rank sampled four row groups; they have fewer than 32 rows.
    assert set(counts) == set(range(ROWS))


def test_another_version_has_other_rows(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = dataset.map(plus, columns=["id"])
    assert ids(mapped)[:3] == [1, 2, 3]
    monkeypatch.setattr(f"{__name__}.SHIFT", 5)
    changed = dataset.map(plus, columns=["id"])
    assert ids(changed)[:3] == [5, 6, 7]
    assert ids(mapped)[:3] == [1, 2, 3]
    prints = {each.fingerprint for each in (dataset, mapped, changed, mapped.select([0]), changed.map(plus))}
    assert len(prints) == 5
    monkeypatch.setattr(f"{__name__}.SHIFT", 1)
    assert dataset.map(plus, columns=["id"]).fingerprint == mapped.fingerprint


def test_a_global_that_changes_after_map_is_an_error(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = dataset.map(plus, columns=["id"])
    twice = mapped.map(times, columns=["id"])
    monkeypatch.setattr(f"{__name__}.SHIFT", 5)
    with pytest.raises(ConfigError, match=r"plus, or something .* has changed since map was called: call map again"):
        mapped[0]
    with pytest.raises(ConfigError, match="plus, or something"):
        mapped.map(lambda batch: batch)
    monkeypatch.setattr(f"{__name__}.SHIFT", 1)
    assert [mapped[0]["id"], twice[0]["id"]] == [1, 2]


class Adder:
    """A function with a state."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"] + self.shift}


def test_an_object_that_changes_in_the_middle_of_an_epoch_is_an_error(dataset: Dataset) -> None:
    adder = Adder(2)
    mapped = dataset.map(adder)
    assert mapped[0]["id"] == 2
    adder.shift = 3
    with pytest.raises(ConfigError, match="has changed since map"):
        mapped[GROUP]
    assert dataset.map(Adder(2))[GROUP]["id"] == GROUP + 2


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # An edit in the same second would not be noticed.
    (tmp_path / "edited.py").write_text(EDITED)
    yield importlib.import_module("edited")
    del sys.modules["edited"]


EDITED = """
STEP = None
def load(): return 1
def f(batch):
    global STEP
    STEP = STEP or load()  # so that it needs a version
    return {'id': batch['id'] + STEP}
def load_and_add(batch): return {'id': batch['id'] + load()}
"""


def test_an_edit_of_the_file_does_not_change_the_function_in_memory(file: Path, edited: ModuleType) -> None:
    mapped = make_dataset(file, cache=False).map(edited.load_and_add)
    Path(str(edited.__file__)).write_text("K = 2\n" + EDITED.replace("+ load", "- load"))
    assert mapped[0]["id"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "is_other"),
    [
        ("return {'id': batch['id'] + STEP}", "return {'id': batch['id'] - STEP}", True),
        ("def load(): return 1", "def load(): return 1000", True),
        ("def load(): return 1", "STEPS = 3\ndef load():\n    return 1  # a comment", False),
    ],
)
def test_an_edit_of_the_code_is_noticed_by_another_process_under_a_version(
    file: Path, edited: ModuleType, before: str, after: str, is_other: bool
) -> None:
    mapped = make_dataset(file, cache=False).map(edited.f, version="1", processes=1)
    Path(str(edited.__file__)).write_text(EDITED.replace(before, after))
    if is_other:
        with pytest.raises(DataError, match=r"the function: ConfigError: edited.f, .* has changed since map"):
            mapped[0]
    else:
        assert mapped[0]["id"] == 1


def wide(batch: dict[str, Any], shift: int) -> dict[str, Any]:
    return {"id": batch["id"] + shift, "wide": np.repeat(batch["id"].numpy()[:, None] + shift, 500, axis=1)}


def run_job(shift: int, file: Path, cache: CacheConfig, out: Any) -> None:
    dataset = make_dataset(file, cache=cache).map(lambda batch: wide(batch, shift), columns=["id"])
    loader = make_loader(dataset, 10, window=1)
    rows = []
    for _ in range(3):
        for batch in loader:
            assert (batch["wide"] == batch["id"][:, None]).all()
            rows += batch["id"].tolist()
    out.put((shift, sorted(rows)))


def test_two_jobs_with_two_versions_share_a_cache_of_half_their_bytes(file: Path, tmp_path: Path) -> None:
    cache = CacheConfig(str(tmp_path / "small"), ROWS * 500 * 8)
    out = tiers.FORKSERVER.SimpleQueue()
    jobs = [tiers.FORKSERVER.Process(target=run_job, args=(shift, file, cache, out)) for shift in (0, 7)]
    for job in jobs:
        job.start()
    for shift, rows in (out.get(), out.get()):
        assert rows == sorted([*range(shift, ROWS + shift)] * 3)
    for job in jobs:
        job.join(tiers.PATIENCE)
        assert job.exitcode == 0


def test_a_limit_of_half_the_result(file: Path, tmp_path: Path) -> None:
    half = ROWS * 500 * 8 // 2
    dataset = make_dataset(file, cache=CacheConfig(str(tmp_path / "small"), half))
    mapped = dataset.map(lambda batch: wide(batch, 3))
    assert trained(mapped, window=1) == list(range(3, ROWS + 3))
    assert 0 < sum(path.stat().st_size for path in (tmp_path / "small").rglob("*") if path.is_file()) < 2 * half
    with pytest.raises(ConfigError, match="is too small"):
        make_loader(mapped, 10, shuffle="full").__iter__().__next__()


def test_a_resumed_loader_goes_on_at_the_next_row(dataset: Dataset) -> None:
    mapped = dataset.map(plus, columns=["id"])
    loader = make_loader(mapped, 16)
    whole = [batch["id"].tolist() for batch in loader]
    loader = make_loader(mapped, 16)
    batches = iter(loader)
    first = [next(batches)["id"].tolist() for _ in range(3)]
    state = loader.state_dict()
    del batches, loader
    resumed = make_loader(dataset.map(plus, columns=["id"]), 16)
    resumed.load_state_dict(state)
    assert first + [batch["id"].tolist() for batch in resumed] == whole
    other = make_loader(dataset.map(times, columns=["id"]), 16)
    other.load_state_dict(state)
    expected = [[2 * (number - SHIFT) for number in batch] for batch in whole[3:]]
    assert [batch["id"].tolist() for batch in other] == expected


def test_the_cached_rows_of_the_files_are_used(dataset: Dataset, file: Path) -> None:
    warm(dataset.rowstore.row_groups, range(len(dataset.row_groups)))
    file.write_bytes(b"")  # The versions were pinned; nothing may be fetched.
    assert ids(dataset.map(plus, columns=["id"])) == [n + 1 for n in range(ROWS)]


def test_the_sample_of_a_second_map_calls_the_first_for_few_rows(tmp_path: Path, cache: CacheConfig) -> None:
    pq.write_table(pa.table({"id": range(4 * 4096)}), tmp_path / "x.parquet", row_group_size=4096)
    dataset = make_dataset(tmp_path / "x.parquet", cache=cache)
    warm(dataset.rowstore.row_groups, range(4))
    function = Told(tmp_path / "told")
    mapped = dataset.map(function, version=1)
    function.forget()
    mapped.map(times, version=1)
    assert sum(function.counts().values()) == 4 * 32
    function.forget()
    warm(mapped.rowstore.row_groups, range(4))
    function.forget()
    assert mapped.map(times, version=2)[3]["id"] == 6
    assert not function.counts()


def test_the_default_device_of_torch_is_not_that_of_a_batch(dataset: Dataset) -> None:
    with torch.device("meta"):
        assert ids(dataset.map(plus, columns=["id"])) == [n + 1 for n in range(ROWS)]


def test_a_python_call_warms(dataset: Dataset, tmp_path: Path) -> None:
    function = Told(tmp_path / "told")
    mapped = dataset.map(function, version="1")
    assert warm(mapped.rowstore.row_groups, range(len(mapped.row_groups))) == len(mapped.row_groups)
    function.forget()
    assert trained(mapped) == list(range(ROWS))
    assert not function.counts()


def test_the_plan_forecasts_the_bytes_of_mapped_rows(dataset: Dataset) -> None:
    mapped = dataset.map(every_form)
    blobs = mapped.rowstore.row_groups.caches[0]
    forecast = plan([blobs], order_of(mapped.manifest), 16)
    assert forecast.is_estimate
    exact = sum(len(blob) for number in range(len(mapped.row_groups)) for blob in load(blobs, number))
    assert exact * 0.9 < forecast.decoded_bytes < exact * 1.1
    assert forecast.first_epoch.bytes > 0


def failing(batch: dict[str, Any]) -> dict[str, Any]:
    if 97 in batch["id"]:
        raise KeyError("ninety-seven")
    return {"id": batch["id"]}


def reshaped(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": np.zeros((len(batch["id"]), 2 + int(97 in batch["id"])))}


def renamed(batch: dict[str, Any]) -> dict[str, Any]:
    return {"other" if 97 in batch["id"] else "id": batch["id"]}


def dropped(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"][batch["id"] != 97]}


FAILED = r"map test_map.failing: KeyError: 'ninety-seven' \(.*test_map.py:\d+ in failing\)"


@pytest.mark.parametrize(
    ("function", "error", "processes"),
    [
        (failing, FAILED, None),
        pytest.param(failing, FAILED, 1, marks=pytest.mark.slow),
        (reshaped, r"column 'id' is float64 \[B, 3\] here, and float64 \[B, 2\]", None),
        (renamed, "the column '(other|id)', unlike for the rows before", None),
        (dropped, "column 'id' has 0 rows, and the batch 1", None),
    ],
)
def test_errors_name_file_row_group_and_row(
    dataset: Dataset, file: Path, function: Callable[..., Any], error: str, processes: int | None
) -> None:
    mapped = dataset.select(range(10, ROWS)).map(function, processes=processes)
    with pytest.raises(DataError, match=rf"{file} row group 4 row 17: .*{error}"):
        mapped[97 - 10]


def test_results_much_larger_than_those_of_the_sample(
    dataset: Dataset, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of row group 4, no row is in the sample."""

    def grown(batch: dict[str, Any]) -> dict[str, Any]:
        return {"raw": [bytes(1 << 20 if number // GROUP == 4 else 1) for number in batch["id"].tolist()]}

    mapped = dataset.map(grown)
    assert len(mapped[4 * GROUP]["raw"]) == 1 << 20
    monkeypatch.setattr(map_maker, "usable_memory", lambda: 8 * (GROUP // 2) << 20)
    mapped = dataset.map(grown, version="1")
    assert len(mapped[0]["raw"]) == 1
    with pytest.raises(
        DataError, match=rf"{file} row group 4: map .*grown: .* 20 rows take .* write the file with fewer"
    ):
        mapped[4 * GROUP]


@pytest.mark.variants
@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda batch: [1], "row group 1 row 0: .*returned a list: return a dict"),
        (lambda batch: {}, "returned no column"),
        (lambda batch: {3: batch["id"]}, "name columns by strings"),
        (lambda batch: {"id": None}, "column 'id' is one NoneType"),
        (lambda batch: {"id": [None] * len(batch["id"])}, "its column 'id' has 20 nulls: pass fill_null="),
        (lambda batch: 1 / 0, "row group 1 row 0: .*ZeroDivisionError"),
    ],
)
def test_the_sample_finds_errors_at_once(dataset: Dataset, function: Callable[..., Any], error: str) -> None:
    with pytest.raises(DataError, match=error):
        dataset.map(function)


def test_arguments_that_cannot_work(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="did you mean 'text'"):
        dataset.map(plus, columns=["txet"])
    with pytest.raises(ConfigError, match="must be a list"):
        dataset.map(plus, columns="id")
    with pytest.raises(ConfigError, match="processes=0"):
        dataset.map(plus, processes=0)
    with pytest.raises(ConfigError, match="processes=True must be a number"):
        dataset.map(plus, processes=True)
    with pytest.raises(ConfigError, match="needs a function"):
        dataset.map({"id": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Pass version="):
        dataset.map(eval("lambda batch: batch"))
    with pytest.raises(DataError, match="'label', which it did not get: add it to columns="):
        dataset.map(lambda batch: {"label": batch["id"]}, columns=["id"])


@pytest.mark.parametrize(
    "version", [np.arange(2000.0), torch.tensor([1.00001]), torch.nn.Linear(2, 2), object(), ("a", [1]), np.float64(1)]
)
def test_a_version_is_a_plain_value(dataset: Dataset, version: Any) -> None:
    with pytest.raises(ConfigError, match=r"version= has a (ndarray|Tensor|Linear|object|list|float64): pass a string"):
        dataset.map(plus, version=version)


def test_versions_tell_functions_apart(dataset: Dataset) -> None:
    versions = ["1", b"1", 1, 1.0, True, ("resize", 32), ("resize", 224), ("resize", (32, None))]
    assert len({dataset.map(plus, version=version).fingerprint for version in versions}) == len(versions)
    with pytest.raises(ConfigError, match=r"every lambda is 'test_map\..*<lambda>': use def"):
        dataset.map(functools.partial(lambda batch, size: batch, size=1), version=1)


def test_the_row_and_the_reason_belong_together(dataset: Dataset) -> None:
    def faulty(batch: dict[str, Any]) -> dict[str, Any]:
        for number in (97, 85):
            if number in batch["id"]:
                raise KeyError(number)
        return {"id": batch["id"]}

    with pytest.raises(DataError, match=r"row group 4 row 5: .*KeyError: 85 "):
        dataset.select(range(10, ROWS)).map(faulty)[80]


def test_ctrl_c_interrupts_the_search_for_the_row_that_fails(dataset: Dataset) -> None:
    errors = [KeyboardInterrupt(), ValueError("broken")]

    def broken(batch: dict[str, Any]) -> dict[str, Any]:
        raise errors.pop()

    with pytest.raises(KeyboardInterrupt):
        dataset.map(broken, version="1")
    assert errors == []


def children() -> list[psutil.Process]:
    """Return the processes that map, without those of other kinds and those that have just ended."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            found += [each] * ("dataload.mapping" in " ".join(each.cmdline()))
    return found


@pytest.mark.usefixtures("_by_value")
def test_a_process_that_dies_is_replaced(dataset: Dataset, tmp_path: Path) -> None:
    parent, marker = os.getpid(), str(tmp_path / "died")

    def dying(batch: dict[str, Any]) -> dict[str, Any]:
        if os.getpid() != parent and 97 in batch["id"] and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if os.getpid() != parent and 150 in batch["id"]:
            raise KeyError(150)
        return {"id": batch["id"]}

    mapped = dataset.map(dying, processes=1)
    assert ids(mapped.select(range(140))) == list(range(140))
    assert Path(marker).exists()
    with pytest.raises(DataError, match=r"row group 7 row 10: .*KeyError: 150 \(.*test_map.py:\d+ in dying\)"):
        mapped[150]
    assert len(children()) == 1
    del mapped
    gc.collect()
    assert not children()


@pytest.mark.slow
@pytest.mark.usefixtures("_by_value")
def test_several_deaths_of_one_chunk_are_an_error(
    dataset: Dataset, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "ATTEMPTS", 2)  # 3 take longer.
    parent = os.getpid()

    def deadly(batch: dict[str, Any]) -> dict[str, Any]:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": batch["id"]}

    mapped = dataset.map(deadly, processes=1)
    error = rf"{file} row group 0 rows 0 to 19: .*2 processes in a row ended.*status -9, -9"
    with pytest.raises(DataError, match=error):
        mapped[0]


@pytest.mark.usefixtures("_by_value")
def test_a_function_that_ends_its_process_is_an_error_at_once(dataset: Dataset, file: Path) -> None:
    parent = os.getpid()

    def exits(batch: dict[str, Any]) -> dict[str, Any]:
        if os.getpid() != parent:
            os._exit(3)
        return {"id": batch["id"]}

    with pytest.raises(DataError, match=rf"{file} row group 0 rows 0 to 19: .*a process ended.*status 3\)"):
        dataset.map(exits, processes=1)[0]


def spoil_results(error: Exception) -> None:
    def fails(*_: Any) -> bytearray:
        raise error

    processes.blob_of = fails


@pytest.mark.slow
@pytest.mark.parametrize("error", [DataError("x has too many elements"), MemoryError("64 GB"), OSError("no space")])
@pytest.mark.usefixtures("_by_value")
def test_results_that_a_process_cannot_send_are_an_error(dataset: Dataset, error: Exception) -> None:
    parent = os.getpid()

    def spoiling(batch: dict[str, Any]) -> dict[str, Any]:
        if os.getpid() != parent:
            spoil_results(error)
        return {"id": batch["id"]}

    with pytest.raises(DataError, match=rf"row group 0 rows 0 to 19: .*{error}"):
        dataset.map(spoiling, version="1", processes=1)[0]


def loaded_in(process: int) -> Loadable:
    if os.getpid() != process:
        sys.exit("no such option")
    return Loadable()


class Loadable:
    """A function of a script that exits when another process imports it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return loaded_in, (os.getpid(),)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"]}


def test_a_function_that_no_other_process_can_get(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()

    def locked(batch: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return {"id": batch["id"]}

    error = r"map .*locked: another process cannot get .*'_thread.lock' object.*: make that object inside the function"
    with pytest.raises(ConfigError, match=f"{error}, or leave processes= out$"):
        dataset.map(locked, version=1, processes=1)
    mapped = dataset.map(locked, version=1)
    assert trained(mapped) == list(range(ROWS))
    decoder = BackgroundDecoder(mapped.rowstore.row_groups)
    caplog.clear()
    for _ in range(MAX_FAILURES):
        decoder.begin()
        assert decoder._process is None or decoder._process.ended.wait(tiers.PATIENCE)
    [warning] = caplog.messages
    assert re.search(rf'{error}"\): the training process makes them alone$', warning)


@pytest.mark.slow
def test_a_script_that_exits_when_a_process_imports_it_is_named_as_the_cause(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="cannot load the function: SystemExit: no such option"):
        dataset.map(Loadable(), version="1", processes=1)[0]


class Endless:
    """A function that never returns in a process other than that of the sample. It writes the process's number."""

    def __init__(self, path: Path) -> None:
        self.path, self.parent = str(path), os.getpid()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if os.getpid() != self.parent:
            Path(f"{self.path}-draft").write_text(str(os.getpid()))
            Path(f"{self.path}-draft").rename(self.path)
            threading.Event().wait()
        return {"id": batch["id"]}


def run_endless(file: Path, path: Path) -> None:
    make_dataset(file, cache=False).map(Endless(path), version="1", processes=1)[0]


def test_a_process_ends_with_a_killed_trainer_in_the_middle_of_a_call(file: Path, tmp_path: Path) -> None:
    trainer = tiers.start(run_endless, file, tmp_path / "pid")
    until(lambda: (tmp_path / "pid").exists())
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    trainer.kill()
    assert tiers.end(trainer) == -signal.SIGKILL
    assert psutil.wait_procs([child], tiers.PATIENCE)[1] == []


def test_the_loop_waits_for_the_function(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The background decoder starts with the first row group, although the loop waits all the time."""
    # A row group at a time, so that the loop waits for a call from its start on, however late its threads run.
    monkeypatch.setattr(scheduler, "LOADERS", 1)

    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        threading.Event().wait(0.05)
        return {"id": batch["id"]}

    loader = make_loader(dataset.map(slow), 16)
    assert sum(len(batch["id"]) for batch in loader) == ROWS
    assert loader.stats().waits["map"] > 0
    assert loader.dataset.rowstore.scheduler.decoder.started


@pytest.mark.usefixtures("_by_value")
def test_a_function_may_read_another_dataset(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dataset has one thread that loads. A shared one would wait for itself."""
    monkeypatch.setattr(scheduler, "LOADERS", 1)
    other, read = make_dataset(file, cache=False), list[int]()

    def with_other(batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": torch.as_tensor([other[number]["id"] for number in batch["id"].tolist()]) + SHIFT}

    mapped = make_dataset(file, cache=False).map(with_other, version=1)
    reader = threading.Thread(target=lambda: read.extend(ids(mapped)), daemon=True)
    reader.start()
    reader.join(200)  # only a deadlock takes that long
    assert read == [*range(SHIFT, ROWS + SHIFT)]


def test_a_process_that_cannot_start_is_an_error_of_the_map(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = make_dataset(file, cache=False).map(plus, processes=1)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DataError, match=r"map .*plus: no process can be started .*/nowhere/python.*: start fewer"):
        mapped[0]
