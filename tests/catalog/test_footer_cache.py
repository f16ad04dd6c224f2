from __future__ import annotations

import os
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import make_dataset
from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.config import CacheConfig
from dataload.cache.local.tier import LocalTier
from dataload.cache.origin.source import open_source
from dataload.cache.tier import BlobKey
from dataload.catalog import footer_cache
from dataload.catalog.footer_cache import (
    RUN,
    RUNS_AT_ONCE,
    FooterReader,
    _join,
    _name,
    _runs,
    read_footer,
    read_footers,
    run_key,
    runs_of,
    stored_footer,
)
from dataload.catalog.footer_summary import Summarize
from dataload.catalog.manifest import Manifest
from dataload.dataset import Dataset
from dataload.errors import DataError
from dataload.formats.base import Footer
from dataload.formats.detect import parse_footer
from dataload.runtime.executor import shared_executor

FILES = 24


def test_the_footers_of_a_run_are_copied_once() -> None:
    """The footers of 64 files of 2,000 column chunks take 20 MB."""
    footers, memory = [bytes(1 << 20)] * 4, memoryview(bytearray(5 << 20))
    tracemalloc.start()
    try:
        _join(BlobKey("", "", "", ""), footers, lambda size: memory[:size])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < len(footers[0])


@pytest.fixture
def opened(bucket: Any, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Dataset]:
    """A dataset in runs of about four files."""
    monkeypatch.setattr("dataload.catalog.footer_cache.RUN", 4)
    return lambda url: make_dataset(url, storage_options=bucket.options, cache=cache)


def own_runs(dataset: Dataset) -> set[Object]:
    return {group.footer_at.run for group in dataset.row_groups}


def fetched(bucket: Any) -> int:
    return int(bucket.server.stats()["get_requests"])


def objects(count: int) -> list[Object]:
    return [Object(f"bucket/part-{number:05d}.parquet", 1, "v") for number in range(count)]


def test_a_run_has_a_few_dozen_files_and_all_have_one() -> None:
    many = objects(10_000)
    runs = list(_runs(many))
    assert [obj for run in runs for obj in run] == many
    assert RUN / 1.3 < len(many) / len(runs) < RUN * 1.3
    assert list(_runs([])) == []


@pytest.mark.parametrize(("chunks", "parsed"), [(12, 3), (8, 4), (1, 4)])
def test_a_reader_keeps_footers_by_the_size_of_what_they_describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int, parsed: int
) -> None:
    """Here they have four chunks: two row groups of two columns. Footers of thousands of chunks take much memory."""
    for number in range(3):
        pq.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), tmp_path / f"{number}.parquet", row_group_size=1)
    dataset, calls = make_dataset(tmp_path, cache=False), list[str]()
    monkeypatch.setattr("dataload.catalog.footer_cache.CHUNKS_KEPT", chunks)
    parse = footer_cache.parse_footer
    monkeypatch.setattr(footer_cache, "parse_footer", lambda data, obj: [calls.append(obj.name), parse(data, obj)][1])
    reader = FooterReader(dataset.blocks, 4)
    for group in [*dataset.row_groups, *dataset.row_groups[1::-1]]:  # files 0, 1, 2 and 0, each twice
        reader.of(group)
    assert len(calls) == parsed


def test_one_file_more_or_less_changes_one_run() -> None:
    many = objects(1000)
    before = {tuple(run) for run in _runs(many)}
    assert len(before) > 10
    for number in range(0, 1000, 7):
        after = {tuple(run) for run in _runs(many[:number] + many[number + 1 :])}
        assert len(after - before) <= 1


def test_one_file_more_fetches_the_footers_of_its_run(
    opened: Callable[[str], Dataset], bucket: Any, dataset_of: Callable[..., str]
) -> None:
    first = opened(dataset_of([[3, 1]] * FILES))
    assert fetched(bucket) == FILES
    second = opened(dataset_of([[3, 1]] * FILES + [[5]]))
    [run] = own_runs(second) - own_runs(first)
    assert fetched(bucket) == len({group.file for group in second.row_groups if group.footer_at.run == run})
    assert second.num_rows == first.num_rows + 5


def test_no_more_footers_are_in_memory_than_are_looked_at(
    opened: Callable[[str], Dataset], dataset_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table with thousands of columns has a footer of megabytes, and ten times as much once it is parsed."""
    parsed: list[weakref.ref[Any]] = []
    most = 0

    def parse(footer: memoryview, obj: Object) -> Footer:
        nonlocal most
        found = parse_footer(footer, obj)
        parsed.append(weakref.ref(found))
        most = max(most, sum(one() is not None for one in parsed))
        return found

    monkeypatch.setattr("dataload.catalog.footer_cache.parse_footer", parse)
    opened(dataset_of([[3, 1]] * FILES))
    assert len(parsed) == FILES
    assert most <= 2 * RUNS_AT_ONCE


def test_progress_has_each_file_fetched_or_kept(
    opened: Callable[[str], Dataset], bucket: Any, dataset_of: Callable[..., str]
) -> None:
    dataset = opened(dataset_of([[3]] * FILES))
    files = [group.file for group in dataset.row_groups]
    seen: list[Object] = []
    read_footers(files, dataset.blocks, Summarize(None), seen.append, {})
    assert sorted(seen, key=lambda file: file.path) == files
    assert fetched(bucket) == FILES


def test_footers_are_told_apart(opened: Callable[[str], Dataset], dataset_of: Callable[..., str]) -> None:
    dataset = opened(dataset_of([[number + 1] * (1 + number % 3) for number in range(FILES)]))
    for group in dataset.row_groups:
        assert stored_footer(group.footer_at, runs_of(dataset.blocks)) is not None
        assert read_footer(group.file, group.footer_at, dataset.blocks).lengths[group.number] == group.rows


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * 2000)])
def test_a_run_that_is_gone_or_damaged_is_done_without(
    opened: Callable[[str], Dataset], bucket: Any, dataset_of: Callable[..., str], damage: Callable[[Path], Any]
) -> None:
    dataset = opened(dataset_of([[3], [4], [5]]))
    tier, group = dataset.blocks.tier, dataset.row_groups[1]
    assert isinstance(tier, LocalTier)
    damage(tier.folder.path_of(run_key(group.footer_at.run, dataset.blocks).digest))
    before = fetched(bucket)
    for _ in range(2):
        assert read_footer(group.file, group.footer_at, dataset.blocks).lengths == [4]
    assert fetched(bucket) - before == 1
    errors = dataset.blocks.stats()["errors"]["local"]
    read_footer(group.file, group.footer_at, dataset.blocks)
    assert dataset.blocks.stats()["errors"]["local"] == errors


def test_of_a_run_that_another_host_has_nothing_is_fetched(
    opened: Callable[[str], Dataset], bucket: Any, dataset_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened(dataset_of([[3], [4], [5]]))
    tier, group = dataset.blocks.tier, dataset.row_groups[1]
    assert isinstance(tier, LocalTier)
    path = tier.folder.path_of(run_key(group.footer_at.run, dataset.blocks).digest)
    whole = tier.get(run_key(group.footer_at.run, dataset.blocks))
    path.unlink()
    monkeypatch.setattr(LocalTier, "clustered", True)
    monkeypatch.setattr(tier, "fetch_from_cluster", lambda _: [whole])  # which this host has no capacity to cache
    before = fetched(bucket)
    assert read_footer(group.file, group.footer_at, dataset.blocks).lengths == [4]
    assert fetched(bucket) == before


def test_where_one_cannot_be_read_the_others_are_not_waited_for(
    bucket: Any, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, (first, *others) = Blocks.open(open_source(bucket.url(), bucket.options), cache), objects(1000)
    first_asked, submitted, raised = threading.Event(), threading.Event(), threading.Event()
    asked: list[Object] = []

    class Others(list[Object]):
        def __iter__(self) -> Iterator[Object]:
            yield from super().__iter__()
            submitted.set()

    def name(run: list[Object]) -> Object:
        assert run == [first] or first_asked.wait(200)
        return _name(run[:1])

    def fetch(obj: Object, _: Blocks) -> bytes:
        asked.append(obj)
        if obj == first:
            first_asked.set()
            assert submitted.wait(200)
            raise DataError(obj.path)
        assert raised.wait(200)
        return b""

    monkeypatch.setattr("dataload.catalog.footer_cache._runs", lambda _: [[first], Others(others)])
    monkeypatch.setattr("dataload.catalog.footer_cache._name", name)
    monkeypatch.setattr("dataload.catalog.footer_cache.FOOTERS_IN_FLIGHT", 1)
    monkeypatch.setattr("dataload.catalog.footer_cache.fetch_footer", fetch)
    fetches = shared_executor(1, "dataload-footers")
    with pytest.raises(DataError, match="part-00000"):
        read_footers([first, *others], blocks, Summarize(None), lambda _: None, {})
    raised.set()
    fetches.submit(int).result(200)  # after all that were submitted
    assert asked in ([first], [first, others[0]])


def test_a_part_of_a_manifest_still_says_where_footers_are(
    opened: Callable[[str], Dataset], dataset_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataload.catalog.footer_cache.RUN", 1)
    dataset = opened(dataset_of([[number] for number in range(1, 8)]))
    part = Manifest.from_bytes(dataset.manifest.only([1, 4, 6]).to_bytes())
    for group in part.row_groups:
        assert stored_footer(group.footer_at, runs_of(dataset.blocks)) is not None
        assert read_footer(group.file, group.footer_at, dataset.blocks).lengths == [group.rows]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_what_is_held_is_of_the_columns_that_are_read(tmp_path: Path, kind: str) -> None:
    """Many small labels next to large images are fetched at a time."""
    table = pa.table({"label": range(100), "image": [os.urandom(20_000) for _ in range(100)]})
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    dataset = make_dataset(str(path), cache=False)
    [group] = dataset.row_groups
    footer = read_footer(group.file, group.footer_at, dataset.blocks)
    assert bytes_of(footer, ["label", "image"]) == pytest.approx(2_000_000, rel=0.01)
    assert bytes_of(footer, ["label"]) < 2000


def bytes_of(footer: Footer, columns: list[str]) -> int:
    """Return the bytes that are fetched for columns of the first row group."""
    return sum(stop - start for spans in footer.fetched(0, columns, sys.maxsize) for start, stop in spans)
