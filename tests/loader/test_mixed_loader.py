"""Loaders over mixtures: the rows of the sampler, exact quotas, resuming on other ranks, one fetch for each byte."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import feather
from ranks import LostError
from row_groups import make_in_background

import dataload
from dataload import CacheConfig, World, make_dataset, make_loader, mix
from dataload.cache.blocks.reader import IN_FLIGHT
from dataload.cache.division import Need
from dataload.cache.local.tier import LocalTier
from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.mixture import Mixture, mixture
from dataload.mixture.mixture import MOST_WEIGHTS
from dataload.reporting.html import html, summary
from dataload.rows.background_decoder.client import BackgroundDecoder
from dataload.rows.making import pipeline
from dataload.rows.making.pipeline import make_cached
from dataload.rows.row_store import Loads
from dataload.runtime.priority import current_priority
from dataload.samplers.mixture.sampler import MixtureSampler
from dataload.samplers.mixture.source import MixtureSource
from dataload.telemetry.stats_log import read

FILES = {"a": [[40, 60], [7, 0, 93]], "b": [[30, 31]], "c": [[11], [9, 3]]}
ROWS = {"a": 200, "b": 61, "c": 23}
WEIGHTS = {"a": 5, "b": 3, "c": 2}
FIRST = {"a": 0, "b": 200, "c": 261}
NAMES = list(FILES)

Sources = Callable[..., dict[str, Dataset]]


@pytest.fixture
def sources(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Sources:
    """Return `sources(columns)`, the dataset of each name. Row i of each source has row_id == i."""
    urls = {name: dataset_of(files, name) for name, files in FILES.items()}
    options = {"storage_options": bucket.options, "cache": cache}

    def make(columns: list[str] | None = None) -> dict[str, Dataset]:
        return {name: make_dataset(url, columns=columns, **options) for name, url in urls.items()}

    return make


def test_sources_are_opened_at_the_same_time(
    bucket: Any, dataset_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {name: dataset_of(files, name) for name, files in FILES.items()}
    together, make = threading.Barrier(len(urls), timeout=200), mixture.make_dataset

    def open_with_the_others(*args: Any, **options: Any) -> Dataset:
        together.wait()
        return make(*args, **options)

    monkeypatch.setattr(mixture, "make_dataset", open_with_the_others)
    mixed = mix(urls, storage_options=bucket.options, cache=False)
    assert {name: len(each) for name, each in zip(mixed.names, mixed.datasets, strict=True)} == ROWS


def rows_of(batch: Any) -> list[tuple[int, int]]:
    """Return (source, row) of each row of a batch."""
    return list(zip(batch["source"].tolist(), batch["row_id"].tolist(), strict=True))


def stream_of(batches: Iterable[Any]) -> list[tuple[int, int]]:
    return [row for batch in batches for row in rows_of(batch)]


def global_batches(loaders: list[Any], batches: int | None = None) -> list[list[tuple[int, int]]]:
    """Return the rows of each global batch, in any order, without padding."""
    parts = [[rows_of(batch) for batch in islice(loader, batches)] for loader in loaders]
    return [sorted({row for part in together for row in part}) for together in zip(*parts, strict=True)]


def expected(sampler: MixtureSampler, epoch: int) -> list[tuple[int, int]]:
    """Return the rows of the sampler by brute force: a list of all rows of all sources."""
    every = [(number, row) for number, name in enumerate(NAMES) for row in range(ROWS[name])]
    return [every[row] for run, _, _ in sampler.runs(epoch, 0) for row in run.ravel().tolist()]


def sampler_of(datasets: dict[str, Dataset], rank: int, size: int, **options: Any) -> MixtureSampler:
    described = [MixtureSource(each.block_lengths, name, each.order_key.encode()) for name, each in datasets.items()]
    windows = [each.window for each in datasets.values()]
    return MixtureSampler(described, size, rank, windows=windows, **options)


# Which rows


@pytest.mark.variants
@pytest.mark.parametrize("shuffle", [True, "full", False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batching", ["mixed", "homogeneous"])
def test_the_stream_is_that_of_the_sampler(sources: Sources, shuffle: Any, workers: int, batching: Any) -> None:
    datasets = sources()
    mixture = mix(datasets, WEIGHTS, stop="all_exhausted", batching=batching, name_column="source")
    options = {"transform": dict, "num_workers": workers} if workers else {}
    for rank in range(2):
        loader = make_loader(mixture, 6, shuffle=shuffle, seed=3, world=World(rank, 2), **options)
        order = {"weights": [5, 3, 2], "stop": "all_exhausted", "batching": batching, "shuffle": shuffle}
        sampler = sampler_of(datasets, rank, 2, seed=3, batch_size=6, **order)
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert len(loader) == -(-len(sampler) // 6)
            assert stream_of(loader) == expected(sampler, epoch)


def test_rows_are_whole(sources: Sources) -> None:
    mixture = mix(sources(), WEIGHTS, name_column="source")
    for batch in make_loader(mixture, 32, row_ids=False):
        assert torch.equal(batch["half"], batch["row_id"] / 2)
        assert torch.equal(batch["vector"], (batch["row_id"][:, None] + torch.arange(3)).float())
        assert batch["text"] == [f"row {row}" for row in batch["row_id"]]
        assert batch["source"].dtype == torch.int64
    assert mixture["source"].tolist() == [row["source"].item() for row in mixture.__getitems__(range(len(mixture)))]


def test_each_prefix_has_its_quotas_and_each_row_comes_once_before_any_comes_twice(sources: Sources) -> None:
    loader = make_loader(mix(sources(), WEIGHTS, num_rows=400, name_column="source"), 7, world=World(0, 1))
    stream = stream_of(loader)
    assert len(stream) == 400
    for number, name in enumerate(NAMES):
        mine = [row for source, row in stream if source == number]
        counts = np.cumsum([source == number for source, _ in stream])
        assert np.abs(counts - np.arange(1, 401) * WEIGHTS[name] / 10).max() < 1
        for first in range(0, len(mine), ROWS[name]):
            part = mine[first : first + ROWS[name]]
            assert len({*part}) == len(part)
    assert loader.stats().rows_by_source == {"a": 200, "b": 120, "c": 80}
    assert loader.stats().rows == 400


def test_homogeneous_batches_are_of_one_source(sources: Sources) -> None:
    mixture = mix(sources(), WEIGHTS, num_rows=480, batching="homogeneous", name_column="source")
    batches = global_batches([make_loader(mixture, 8, world=World(rank, 2)) for rank in range(2)])
    kinds = [{source for source, _ in batch} for batch in batches]
    assert [len(kind) for kind in kinds] == [1] * 30
    assert Counter(kind.pop() for kind in kinds) == {0: 15, 1: 9, 2: 6}


def test_weights_by_rows_give_each_row_once(sources: Sources) -> None:
    loader = make_loader(mix([*sources().values()], name_column="source"), 16, world=World(0, 1))
    every = [(number, row) for number, name in enumerate(NAMES) for row in range(ROWS[name])]
    assert sorted(stream_of(loader)) == every
    assert [*loader.stats().rows_by_source] == ["0", "1", "2"]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_end_of_an_epoch_is_padded_or_dropped(sources: Sources, drop_last: bool) -> None:
    mixture = mix(sources(), WEIGHTS, num_rows=101, name_column="source")
    loaders = [make_loader(mixture, 4, drop_last=drop_last, world=World(rank, 3)) for rank in range(3)]
    streams = [stream_of(loader) for loader in loaders]
    assert [len(stream) for stream in streams] == [32 if drop_last else 34] * 3
    assert sum(loader.padding for loader in loaders) == (0 if drop_last else 1)
    whole = stream_of(make_loader(mixture, 12, world=World(0, 1)))
    together = Counter(row for stream in streams for row in stream)
    wanted = Counter(whole[:96] if drop_last else [*whole, whole[0]])
    assert together == wanted


def test_filtered_sources_have_their_rows_only(sources: Sources) -> None:
    datasets = sources()
    even = datasets["a"].filter([("half", "<", 20)])  # as in class balancing: several subsets of one dataset
    odd = datasets["a"].select(range(41, 100, 2))
    mixture = mix({"even": even, "odd": odd, "b": datasets["b"]}, [1, 1, 1], stop="all_exhausted", name_column="source")
    found = stream_of(make_loader(mixture, 8, world=World(0, 1)))
    rows = {number: {row for source, row in found if source == number} for number in range(3)}
    assert rows == {0: {*range(40)}, 1: {*range(41, 100, 2)}, 2: {*range(61)}}


def test_one_dataset_may_be_two_sources(sources: Sources) -> None:
    data = sources()["b"]
    found = stream_of(make_loader(mix([data, data], name_column="source"), 8, world=World(0, 1)))
    assert sorted(found) == [(number, row) for number in range(2) for row in range(61)]


# The dataset itself


def test_a_mixture_is_a_map_style_dataset(sources: Sources) -> None:
    datasets = sources()
    mixture = mix(datasets, name_column="source")
    assert len(mixture) == 284
    assert int(mixture[-1]["row_id"]) == 22
    batch = mixture.__getitems__([260, 0, 261, 200])
    assert batch.columns["row_id"].tolist() == [60, 0, 0, 0]
    assert batch.columns["source"].tolist() == [1, 0, 2, 1]
    assert mixture.schema == datasets["a"].schema
    assert mixture.locate(261) == datasets["c"].locate(0)
    assert mixture.locate([199, 205]) == [datasets["a"].locate(199), datasets["b"].locate(5)]
    for outside in (-1, 284):
        with pytest.raises(IndexError, match="284 rows"):
            mixture.locate(outside)
    copy = pickle.loads(pickle.dumps(mixture))
    assert copy.__getitems__([260, 0]).columns["source"].tolist() == [1, 0]
    assert copy.fingerprint == mixture.fingerprint
    assert mix(dict(reversed(datasets.items()))).fingerprint != mixture.fingerprint


def test_row_ids_number_all_sources(sources: Sources, bucket: Any) -> None:
    datasets = sources(["half"])
    loader = make_loader(mix(datasets, name_column="source"), 16, row_ids=True, world=World(0, 1))
    for batch in loader:
        firsts = torch.tensor([FIRST[name] for name in NAMES])
        assert torch.equal(batch["row_id"], firsts[batch["source"]] + (2 * batch["half"]).long())
        for row, source in zip(batch["row_id"].tolist(), batch["source"].tolist(), strict=True):
            assert f"/{NAMES[source]}/" in loader.dataset.locate(row).url


def test_two_computed_columns_of_one_name_are_refused(sources: Sources) -> None:
    mixture = mix(sources(["half"]), name_column="row_id")
    assert {*stream_of([{**b, "source": b["row_id"]} for b in make_loader(mixture, 16)])} == {(i, i) for i in range(3)}
    with pytest.raises(ConfigError, match="both add the column 'row_id'"):
        make_loader(mixture, 16, row_ids=True)


def test_transforms_get_the_random_numbers_of_their_batch(sources: Sources) -> None:
    def drawn(workers: int) -> list[float]:
        loader = make_loader(mix(sources()), 16, transform=draw, num_workers=workers, world=World(0, 1))
        return list(loader)

    alone = drawn(0)
    assert len({*alone}) == len(alone) > 10
    assert drawn(2) == alone


def draw(batch: Any, rng: np.random.Generator) -> float:
    return float(rng.random())


def test_bad_rows_are_replaced_and_named(sources: Sources) -> None:
    def transform(batch: Any) -> Any:
        if any((batch["source"] == 2) & (batch["row_id"] == 5)):
            raise ValueError("row 5 of c")
        return batch

    mixture = mix(sources(), WEIGHTS, num_rows=100, name_column="source")
    with pytest.raises(ValueError, match="row 5 of c") as caught:
        list(make_loader(mixture, 10, transform=transform, world=World(0, 1)))
    assert "266" in caught.value.__notes__[0]
    loader = make_loader(mixture, 10, transform=transform, on_error="skip", world=World(0, 1))
    assert (2, 5) not in stream_of(loader)
    assert loader.stats().skipped_row_ids == [266]
    assert loader.stats().rows_by_source == {"a": 50, "b": 30, "c": 20}


# Resuming


@pytest.mark.variants
@pytest.mark.parametrize("batching", ["mixed", "homogeneous"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_on_other_ranks_after_a_wrap_repeats_and_loses_nothing(
    sources: Sources, batching: Any, workers: int
) -> None:
    """2 ranks, then 4, then 1, with the same global batch. Source c wraps before the first stop."""
    options = {"transform": dict, "num_workers": workers} if workers else {}

    def loaders(size: int) -> list[Any]:
        mixture = mix(sources(), WEIGHTS, num_rows=485, batching=batching, name_column="source")
        return [make_loader(mixture, 12 // size, world=World(rank, size), **options) for rank in range(size)]

    whole = global_batches(loaders(1))
    found, state = [], None
    for size, batches in ((2, 14), (4, 11), (1, None)):
        ranks = loaders(size)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        found += global_batches(ranks, batches)
        states = [json.dumps(loader.state_dict()) for loader in ranks]
        assert len({*states}) == 1
        assert len(states[0]) < 4096
        state = json.loads(states[0])
    assert sum(row[0] == 2 for batch in whole[:14] for row in batch) > ROWS["c"]
    assert found == whole


def test_a_state_of_another_mixture_is_refused(sources: Sources) -> None:
    datasets = sources()
    state = make_loader(mix(datasets), 12, world=World(0, 1)).state_dict()
    others = [dict(reversed(datasets.items())), {**datasets, "c": datasets["b"]}, {"a": datasets["a"]}]
    for other in others:
        with pytest.raises(ConfigError, match="another dataset"):
            make_loader(mix(other), 12, world=World(0, 1)).load_state_dict(state)


def train(folder: Path, rows: Path, cache: Path, dies_after: int | None) -> None:
    """Append the rows of each batch to a file, and write the state beside it. Go on with the state that is there."""
    sources = {name: str(folder / f"{name}.parquet") for name in ("a", "b", "c")}
    mixture = mix(sources, [5, 3, 2], num_rows=300, name_column="source", cache=CacheConfig(str(cache), "1GB"))
    loader, state = make_loader(mixture, 10, world=World(0, 1)), rows.with_suffix(".json")
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    with rows.open("a") as out:
        for batch in loader:
            pairs = zip(batch["source"].tolist(), batch["id"].tolist(), strict=True)
            out.write("".join(f"{source} {row}\n" for source, row in pairs))
            out.flush()
            state.write_text(json.dumps(loader.state_dict()))
            if loader.stats().batches == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_continues(ranks: Any, tmp_path: Path) -> None:
    for name, count in ROWS.items():
        pq.write_table(pa.table({"id": range(count)}), tmp_path / f"{name}.parquet", row_group_size=20)
    whole, parts, cache = tmp_path / "whole", tmp_path / "parts", tmp_path / "cache"
    assert ranks(1, train, tmp_path, whole, cache, None) == [None]
    [killed] = ranks(1, train, tmp_path, parts, cache, 13)
    assert isinstance(killed, LostError)
    assert len(parts.read_text().splitlines()) == 130
    assert ranks(1, train, tmp_path, parts, cache, None) == [None]
    assert parts.read_text() == whole.read_text()


# Weights


def test_new_weights_hold_from_the_next_epoch_on_and_are_in_the_state(sources: Sources) -> None:
    def mixture_of(datasets: dict[str, Dataset]) -> Mixture:
        return mix(datasets, WEIGHTS, num_rows=200, name_column="source")

    mixture = mixture_of(sources())
    loader = make_loader(mixture, 10, world=World(0, 1))
    for number, _ in enumerate(loader):
        if number == 9:
            mixture.set_weights({"c": 1, "a": 1, "b": 2})
            middle = loader.state_dict()
    assert loader.stats().rows_by_source == {"a": 100, "b": 60, "c": 40}
    assert (middle["weights"], middle["next_weights"]) == ([5, 3, 2], [1, 2, 1])
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["weights"] == [1, 2, 1]
    stream = stream_of(loader)
    assert loader.stats().rows_by_source == {"a": 50, "b": 100, "c": 50}

    again = mixture_of(sources())
    resumed = make_loader(again, 10, world=World(0, 1))
    resumed.load_state_dict(state)
    assert again.weights == (1, 2, 1)
    assert stream_of(resumed) == stream
    assert stream_of(resumed) == stream_of(loader)

    again = mixture_of(sources())
    again.set_weights([1, 1, 1])  # The state has precedence.
    resumed = make_loader(again, 10, world=World(0, 1))
    resumed.load_state_dict(json.loads(json.dumps(middle)))
    assert len(stream_of(resumed)) == 100
    assert stream_of(resumed) == stream


def test_weights_that_are_set_before_the_first_batch_of_a_begun_epoch_hold_from_the_next_one_on(
    sources: Sources,
) -> None:
    states: list[dict[str, Any]] = []

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        if not states:
            mixture.set_weights([1, 2, 1])
            states.append(loader.state_dict())
        return batch

    options: dict[str, Any] = {"num_rows": 200, "name_column": "source"}
    mixture = mix(sources(), WEIGHTS, **options)
    loader = make_loader(mixture, 10, transform=transform, num_threads=0, world=World(0, 1))
    stream = stream_of(loader)
    state = json.loads(json.dumps(states[0]))
    assert (state["cursor"], state["weights"], state["next_weights"]) == (0, [5, 3, 2], [1, 2, 1])

    resumed = make_loader(mix(sources(), WEIGHTS, **options), 10, world=World(0, 1))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert stream_of(resumed) == stream
    assert stream_of(resumed) == stream_of(loader)
    assert resumed.stats().rows_by_source == {"a": 50, "b": 100, "c": 50}

    resumed.dataset.set_weights([2, 1, 1])  # The restored epoch is over. It has these weights if it is read again.
    resumed.set_epoch(0)
    stream_of(resumed)
    assert resumed.stats().rows_by_source == {"a": 100, "b": 50, "c": 50}


@pytest.mark.slow
def test_a_mixture_remembers_its_latest_weights(sources: Sources) -> None:
    """The state of so many sources has a digest of their weights."""
    mixture = mix(dict.fromkeys(map(str, range(700)), sources()["c"]))
    loader, sizes, states = make_loader(mixture, 100, world=World(0, 1)), [], []
    for change in range(3 * MOST_WEIGHTS):
        mixture.set_weights([100_000 + change, *range(100_000, 100_699)])
        if change % MOST_WEIGHTS == MOST_WEIGHTS - 1:
            sizes.append(len(pickle.dumps(mixture)))
            states.append(loader.state_dict())
    assert max(sizes) < 1.05 * sizes[0]
    assert max(len(json.dumps(state)) for state in states) <= 4096
    mixture.set_weights(None)
    loader.load_state_dict(states[2])
    assert mixture.weights[0] == 100_000 + 3 * MOST_WEIGHTS - 1
    with pytest.raises(ConfigError, match="only a digest of its weights"):
        loader.load_state_dict(states[1])


def test_the_length_follows_new_weights(sources: Sources) -> None:
    mixture = mix(sources(), [1, 1, 1])
    loader = make_loader(mixture, 1, world=World(0, 1))
    before = len(loader)
    mixture.set_weights([2, 1, 1])
    assert before < len(loader) == len(list(loader))


def test_the_length_follows_new_weights_after_a_loop_of_len_batches(sources: Sources) -> None:
    mixture = mix(sources(), [1, 1, 1])
    loader = make_loader(mixture, 1, world=World(0, 1))
    before = len([batch for _, batch in zip(range(len(loader)), loader, strict=False)])
    mixture.set_weights([2, 1, 1])
    assert (loader.state_dict()["epoch"], loader.state_dict()["cursor"]) == (0, before)
    assert before < len(loader) == len(list(islice(loader, len(loader))))
    assert len(list(loader)) == len(loader)
    assert loader.state_dict()["epoch"] == 3

    next(iter(loader))
    loader.sampler.set_epoch(7)
    mixture.set_weights([1, 1, 1])
    assert len(loader) == before


def test_the_capacity_follows_new_weights_when_an_epoch_begins(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length, the padding and the state take no I/O, and raise nothing about the cache."""
    mixture = mix(sources(), [1, 1, 1])
    loader = make_loader(mixture, 1, world=World(0, 1))
    leased, lease = list[Need](), LocalTier.lease

    def counted(tier: LocalTier, need: Need) -> Any:
        leased.append(need)
        return lease(tier, need)

    monkeypatch.setattr(LocalTier, "lease", counted)
    mixture.set_weights([2, 1, 1])
    state = loader.state_dict()
    assert (len(loader), loader.padding, state["weights"]) == (len(loader), 0, [2, 1, 1])
    loader.load_state_dict(state)
    assert leased == []
    list(loader)
    assert len(leased) == 1
    list(loader)
    assert len(leased) == 1


# Bytes


@pytest.fixture
def larger(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> dict[str, Dataset]:
    """Sources whose files are too large to be cached with their footers."""
    options = {"storage_options": bucket.options, "cache": cache}
    return {name: make_dataset(dataset_of([[300]] * 2, name), **options) for name in NAMES}


def test_each_byte_is_fetched_once_over_all_epochs(larger: dict[str, Dataset], bucket: Any) -> None:
    mixture = mix(larger, WEIGHTS, num_rows=3000)
    bucket.server.reset()  # The footers are there.
    loader = make_loader(mixture, 16, world=World(0, 1))
    list(loader)
    stats = loader.stats()
    assert stats.misses == sum(group.rows > 0 for group in mixture.row_groups)
    sizes = {group.file.path: group.file.size for group in mixture.row_groups}
    fetched = bucket.server.stats()["get_bytes"]
    assert 0 < stats.bytes_origin <= fetched <= sum(sizes.values())
    for _ in range(3):
        list(loader)
        assert loader.stats().misses == 0
    assert bucket.server.stats()["get_bytes"] == fetched


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 1])
def test_statistics_by_source(larger: dict[str, Dataset], tmp_path: Path, workers: int) -> None:
    """Source c is cached before, so only a and b are fetched."""
    list(make_loader(larger["c"], 8, world=World(0, 1)))
    options = {"transform": dict, "num_workers": workers} if workers else {}
    loader = make_loader(mix(larger, WEIGHTS, num_rows=100), 10, stats_dir=tmp_path, world=World(0, 1), **options)
    list(loader)
    stats = loader.stats()
    assert stats.rows_by_source == {"a": 50, "b": 30, "c": 20}
    assert stats.bytes_by_source.keys() == {"a", "b"}
    assert sum(stats.bytes_by_source.values()) == stats.bytes_origin > 0
    assert sum(stats.waits_by_source.values()) <= stats.wait_seconds + 1e-9
    assert stats.waits_by_source.keys() <= {*NAMES}
    assert "; by source: a 50 rows, " in str(stats)
    assert "b 30 rows, " in str(stats)
    total = summary(read(tmp_path))["epochs"][0]["total"]
    assert total["bytes_by_source"] == stats.bytes_by_source
    assert total["waits_by_source"] == pytest.approx(stats.waits_by_source, abs=1e-6)
    assert "<td>b</td><td>30</td><td>30.0%</td>" in html(read(tmp_path), "run")


LARGE = {"a": [[1000] * 30], "b": [[1000] * 20], "c": [[1000] * 10]}


def test_the_sources_share_the_limit_of_the_cache(bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    """The cache holds half of all rows. Each source would fit into it by itself."""
    urls = {name: dataset_of(files, name) for name, files in LARGE.items()}
    options = {"storage_options": bucket.options}
    decoded = mix(urls, cache=False, **options).rowstore.row_groups.num_bytes
    mixture = mix(urls, cache=CacheConfig(str(tmp_path / "cache"), decoded // 2), name_column="source", **options)
    total = sum({group.file.path: group.file.size for group in mixture.row_groups}.values())
    loader = make_loader(mixture, 100, window=2, world=World(0, 1))
    every = [(number, row) for number, count in enumerate((30_000, 20_000, 10_000)) for row in range(count)]
    fetched = []
    for _ in range(4):
        bucket.server.reset()
        assert sorted(stream_of(loader)) == every
        fetched.append(bucket.server.stats()["get_bytes"] / total)
    region = max(blobs.tier.division().region for blobs in mixture.rowstore.row_groups.caches) / decoded
    assert 0 < region < 0.3
    assert 0.3 < np.mean(fetched[1:]) <= 1.02 * (0.5 + region) + 1 / 60
    assert all(dataset.blocks.stats()["refused"] == 0 for dataset in mixture.datasets)


def test_a_cache_that_is_too_small_for_all_sources_together(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path
) -> None:
    urls = {name: dataset_of(files, name) for name, files in LARGE.items()}
    options = {"storage_options": bucket.options}
    whole = mix(urls, cache=False, **options).rowstore.row_groups
    limit = whole.num_bytes * 10 // 60
    cache = CacheConfig(str(tmp_path / "cache"), limit)
    for url in urls.values():
        make_loader(url, 100, window=2, cache=cache, **options)
    with pytest.raises(ConfigError, match=f"cache_bytes={limit} is too small: two windows of 6 row groups"):
        make_loader(mix(urls, cache=cache, **options), 100, window=2)


# Memory and processes


def test_the_row_group_that_a_loader_used_least_recently_is_closed_first(sources: Sources) -> None:
    """A source with a small weight uses a row group for long, while the others open and finish several."""
    mixture = mix(sources())
    for store in (mixture.rowstore, pickle.loads(pickle.dumps(mixture)).rowstore):
        store.capacity = 2
        for row, is_new in ((0, True), (200, True), (0, False), (261, True), (0, False), (200, True)):
            loads = Loads()
            store.gather(np.array([row]), loads=loads)
            assert [*loads.opened.values()] == [is_new]


def test_one_memory_budget_bounds_all_sources(sources: Sources) -> None:
    mixture = mix(sources())
    make_loader(mixture, 16, world=World(0, 4))

    def free() -> set[bool]:
        row_groups = mixture.rowstore.row_groups
        sizes = {cache.reservation(number) for cache, number in map(row_groups.of, range(len(mixture.row_groups)))}
        return set(map(row_groups.memory.held.fits, sizes))

    for first in mixture.rowstore.row_groups.caches:
        assert free() == {True}
        with first.memory.held.reserve(sys.maxsize):
            assert free() == {False}
    child = os.fork()
    if not child:  # The budgets of a forked child are new, and one again.
        with mixture.rowstore.row_groups.memory.held.reserve(sys.maxsize):
            os._exit(7 if free() == {False} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_loads_of_all_sources_use_that_budget(sources: Sources) -> None:
    mixture = mix(sources())
    list(make_loader(mixture, 16, world=World(0, 1)))
    row_groups = mixture.rowstore.row_groups
    assert {id(cache.memory) for cache in row_groups.caches} == {id(row_groups.memory)}


@pytest.mark.slow
def test_the_background_decoder_makes_row_groups_of_all_sources(sources: Sources) -> None:
    mixture = mix(sources())
    decoder = BackgroundDecoder(mixture.rowstore.row_groups)
    make_in_background(decoder, 0)  # starts it
    assert decoder._process is not None
    assert decoder._process.ready.wait(200)
    try:
        for group in [number for number, group in enumerate(mixture.row_groups) if group.rows]:
            assert make_in_background(decoder, group)
            cache, own = mixture.rowstore.row_groups.of(group)
            assert cache.find(own) is not None
    finally:
        decoder.end()


def test_row_groups_of_all_sources_are_fetched_in_one_order(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the background decoder, which makes row groups in the order of the requests."""
    priorities: list[int] = []

    def made(*_: Any) -> list[memoryview]:
        priorities.append(current_priority())
        return []

    monkeypatch.setattr(pipeline, "_make_one", made)
    row_groups = mix(sources()).rowstore.row_groups
    for group in (0, 1, 5, 2, 6, 0):  # of the sources a, a, b, a, c, a
        cache, number = row_groups.of(group)
        make_cached(cache, number)
    assert priorities == sorted({*priorities})
    assert len(priorities) == 6


def test_the_sources_share_one_pool_of_threads(tmp_path: Path) -> None:
    for number in range(40):
        pq.write_table(pa.table({"x": [number]}), tmp_path / f"{number}.parquet")
    mixture = mix([tmp_path / f"{number}.parquet" for number in range(40)], cache=False)
    gate = threading.Event()
    calls = [each.blocks.submit(gate.wait, 60) for each in mixture.datasets]
    names = [thread.name for thread in threading.enumerate()]
    gate.set()
    assert all(call.result() for call in calls)
    assert sum(name.startswith("dataload-blocks-read") for name in names) == IN_FLIGHT


# Mistakes


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1, 0, 1], "weight 0 of source 'b'"),
        ([1, -1, 1], "weight -1"),
        ([1, float("nan"), 1], "weight nan"),
        ({"a": 1, "b": 1, "x": 1}, "differ in 'c', 'x'"),
        ({"a": 1, "b": 1}, "differ in 'c'"),
        ([1, 1], "2 weights for 3 sources: give one for each"),
        (3, "weights=3: give a number for each source"),
        ("123", "weights='123': give a number for each source"),
        (["1", 1, 1], "weight '1' of source 'a'"),
        (torch.tensor([1.0, -1.0, 1.0]), "weight -1.0 of source 'b'"),
    ],
)
def test_wrong_weights(sources: Sources, weights: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mix(sources(), weights)
    with pytest.raises(ConfigError, match=says):
        mix(dict.fromkeys(NAMES, "s3://no-such-bucket/x"), weights)  # No source is opened.


def test_a_schedule_changes_weights_within_an_epoch_and_after_a_resume_on_other_ranks(sources: Sources) -> None:
    schedule = {100: {"c": 1, "b": 1, "a": 0}}

    def mixture_of(**options: Any) -> Mixture:
        return mix(sources(["half"]), WEIGHTS, num_rows=240, **options)

    scheduled = mixture_of(schedule=schedule, ramp=True)
    assert "a: 200 rows, weight 5 to 0, b: 61 rows, weight 3 to 1" in repr(scheduled)
    assert "; weights ramp to row 100; " in repr(scheduled)
    alone = make_loader(scheduled, 12, row_ids=True, world=World(0, 1))
    whole = [batch["row_id"].tolist() for batch in alone]
    named = [row for batch in whole for row in batch]
    assert sum(row < ROWS["a"] for row in named) == 25  # half of 100 rows with half of the share
    assert max(place for place, row in enumerate(named) if row < ROWS["a"]) < 100

    state, found = None, []
    for ranks, steps in ((4, 5), (3, 2), (1, 100)):
        mixtures = [mixture_of(schedule=schedule, ramp=True) for _ in range(ranks)]
        loaders = [
            make_loader(each, 12 // ranks, row_ids=True, world=World(rank, ranks, rank, ranks))
            for rank, each in enumerate(mixtures)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        steps_of = [[batch["row_id"].tolist() for batch in islice(loader, steps)] for loader in loaders]
        found += [sorted(row for batch in step for row in batch) for step in zip(*steps_of, strict=True)]
        state = loaders[0].state_dict()
    assert found == [sorted(batch) for batch in whole]


def test_a_schedule_is_part_of_the_weights_that_a_resume_keeps(
    sources: Sources, caplog: pytest.LogCaptureFixture
) -> None:
    mixture = mix(sources(["half"]), schedule={0: [5, 3, 2], 50: [1, 1, 1]}, num_rows=200)
    loader = make_loader(mixture, 10, world=World(0, 1), row_ids=True)
    batches = [batch["row_id"].tolist() for batch in islice(loader, 3)]
    state = json.loads(json.dumps(loader.state_dict()))
    batches = [batch["row_id"].tolist() for batch in make_resumed(mixture, state)]
    other = mix(sources(["half"]), schedule={0: [5, 3, 2], 60: [1, 1, 1]}, num_rows=200)
    assert [batch["row_id"].tolist() for batch in make_resumed(other, state)] == batches
    assert other.weights == mixture.weights
    assert "50: [1, 1, 1]}, which the loader keeps instead of schedule={0: [5, 3, 2], 60: [1, 1, 1]}, as" in caplog.text
    mixture.set_weights([1, 1, 1])
    assert mixture.weights == (1, 1, 1)
    mixture.set_weights(schedule={7: [1, 1, 2]})  # by rows before
    assert mixture.weights == ((0, 7), ((200, 61, 23), (1, 1, 2)), False)
    with pytest.raises(ConfigError, match="4 weights for 3 sources"):
        mixture.set_weights(schedule={0: [1] * 4, 9: [2, 1, 1, 1]})


def make_resumed(mixture: Mixture, state: Any) -> Any:
    loader = make_loader(mixture, 10, world=World(0, 1), row_ids=True)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stop": "never"}, "stop='never'"),
        ({"schedule": {5: {"a": 1, "b": 1}}}, "differ in 'c'"),
        ({"schedule": {0: [1, 1], 5: [1, 2]}}, "2 weights for 3 sources"),
        ({"ramp": True}, "ramp=True needs schedule="),
        ({"batching": "random"}, "batching='random'"),
        ({"num_rows": 0}, "num_rows=0"),
        ({"num_rows": 2.5}, "num_rows=2.5: must be a whole number"),
        ({"name_column": "half"}, "name_column='half' is a column of the sources"),
        ({"name_column": "row_id.is_null"}, "is the name of a mask of nulls"),
        ({"name_column": ""}, "name_column='' must be a string"),
        ({"name_column": 1}, "name_column=1 must be a string"),
        ({"columns": ["half"]}, "columns cannot be combined with datasets"),
    ],
)
def test_wrong_arguments(sources: Sources, options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mix(sources(), **options)


def test_wrong_sources(sources: Sources) -> None:
    one = sources()["a"]
    for wrong, says in (
        ({}, "at least one source"),
        ("s3://x", "a mapping"),
        ({1: one}, "a string"),
        ({"x": mix([one]), "y": one}, "source 'x' is a mixture"),
        ([make_loader(one, 4), one], "the source is of type Loader: pass its .dataset"),
        ([None, one], "the source is of type NoneType: use a URL"),
    ):
        with pytest.raises(ConfigError, match=says):
            mix(wrong)
    with pytest.raises(ConfigError, match="source= is unknown: did you mean"):
        mix([one], source="s3://x")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"x": pa.array([1], pa.int32())}, "column 'x' is int64 in source 'one' and int32 in source 'two'"),
        ({"x": pa.array([[1]])}, "column 'x' is int64 in source 'one' and list"),
        ({"y": pa.array([1])}, "column 'x' is int64 in source 'one' and missing in source 'two'"),
        ({"x": pa.array([1]), "y": pa.array([1.5])}, "column 'y' is missing in source 'one' and double"),
    ],
)
def test_sources_with_other_columns(tmp_path: Path, columns: Any, says: str) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "one.parquet")
    pq.write_table(pa.table(columns), tmp_path / "two.parquet")
    urls = {name: str(tmp_path / f"{name}.parquet") for name in ("one", "two")}
    with pytest.raises(ConfigError, match=says):
        mix(urls, cache=False)


MS, US = pa.timestamp("ms"), pa.timestamp("us")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (MS, US),
        (pa.timestamp("us", "UTC"), US),
        (pa.duration("s"), pa.duration("ms")),
        (pa.time32("s"), pa.time32("ms")),
        (pa.time64("us"), pa.time64("ns")),
        (pa.date32(), pa.date64()),
        (pa.int64(), US),
        (pa.list_(MS), pa.list_(US)),
        (pa.list_(MS, 1), pa.list_(US, 1)),
    ],
)
def test_times_of_other_units_never_share_a_batch(tmp_path: Path, one: pa.DataType, two: pa.DataType) -> None:
    for name, kind in (("one", one), ("two", two)):
        value: Any = [0] if pa.types.is_nested(kind) else 0
        feather.write_feather(pa.table({"at": pa.array([value], kind)}), tmp_path / f"{name}.arrow")
    datasets = {name: make_dataset(tmp_path / f"{name}.arrow", cache=False) for name in ("one", "two")}
    with pytest.raises(ConfigError) as caught:
        mix(datasets)
    assert f"column 'at' is {one} in source 'one' and {two} in source 'two'" in str(caught.value)


def test_time_zones_may_differ(tmp_path: Path) -> None:
    """All timestamps with a time zone are in UTC."""
    for name, zone in (("one", "UTC"), ("two", "Europe/Paris")):
        pq.write_table(pa.table({"at": pa.array([7], pa.timestamp("us", zone))}), tmp_path / f"{name}.parquet")
    [batch] = make_loader(mix([make_dataset(tmp_path / f"{name}.parquet", cache=False) for name in ("one", "two")]), 2)
    assert batch["at"].tolist() == [7, 7]


def test_columns_may_be_in_another_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": [10]}), tmp_path / "one.parquet")
    pq.write_table(pa.table({"y": [20], "x": [2]}), tmp_path / "two.parquet")
    [batch] = make_loader(mix([str(tmp_path / "one.parquet"), str(tmp_path / "two.parquet")], cache=False), 2)
    assert [*batch] == ["x", "y"]
    assert sorted(zip(batch["x"].tolist(), batch["y"].tolist(), strict=True)) == [(1, 10), (2, 20)]


@pytest.mark.parametrize("options", [{"cache": False}, {"cache": CacheConfig}, {"cache_dir": "cache"}])
def test_the_cache_of_the_sources(tmp_path: Path, options: dict[str, Any]) -> None:
    """`mix` hands the arguments of the cache to `make_dataset`, also if some sources are datasets."""
    given = {name: str(tmp_path / "cache") if value == "cache" else value for name, value in options.items()}
    if given.get("cache") is CacheConfig:
        given["cache"] = CacheConfig(str(tmp_path / "cache"), "1GB")
    pq.write_table(pa.table({"x": range(8)}), tmp_path / "x.parquet")
    mixture = mix([make_dataset(tmp_path / "x.parquet", cache=False), tmp_path / "x.parquet"], **given)
    loader = make_loader(mixture, 4, world=World(0, 1))
    assert sorted(row for batch in loader for row in batch["x"].tolist()) == sorted([*range(8), *range(8)])
    assert [dataset.blocks.tier.shared for dataset in mixture.datasets] == [False, given != {"cache": False}]
    assert (tmp_path / "cache").exists() == (given != {"cache": False})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache": True}, "cache=True must be a CacheConfig, False"),
        ({"cache": "/nvme"}, "cache='/nvme' must be"),
        ({"cache": False, "cache_bytes": 10}, "cache_bytes: not allowed with cache=False, leave it out"),
        ({"cache": CacheConfig(), "cluster": "valkey://:password@x"}, r"cluster: pass it inside cache=CacheConfig"),
        ({"cache_bytes": 0}, "cache_bytes=0"),
    ],
)
def test_wrong_caches(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    pq.write_table(pa.table({"x": range(8)}), tmp_path / "x.parquet")
    for opened in (make_dataset, lambda path, **given: make_loader(path, 2, **given), lambda *a, **b: mix([*a], **b)):
        with pytest.raises(ConfigError, match=says) as caught:
            opened(tmp_path / "x.parquet", **options)
        assert "password" not in str(caught.value)


def test_arguments_of_datasets_do_not_go_with_a_mixture(sources: Sources) -> None:
    with pytest.raises(ConfigError, match="columns cannot be combined with a dataset"):
        make_loader(mix(sources()), 8, columns=["half"])


def test_mix_is_at_the_top() -> None:
    assert dataload.mix is mix
    assert "mix" in dataload.__all__
