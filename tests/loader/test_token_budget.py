"""`make_loader(batch_tokens=, length=)`: each row once within the budget, on any ranks, after kills."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ranks import steps_of

from dataload import World, evaluate_over, make_dataset, make_loader, mix
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.samplers.token_batches import TokenOrder

ROWS, BUDGET = 3000, 2048
LENGTHS = np.clip(np.random.default_rng(1).lognormal(3.5, 1, ROWS).astype(np.int64), 0, 1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("texts") / "data"
    path.mkdir()
    tokens = pa.array([np.arange(1, length + 1, dtype=np.int32) for length in LENGTHS], pa.list_(pa.int32()))
    table = pa.table({"tokens": tokens, "n_tokens": LENGTHS, "id": range(ROWS)})
    pq.write_table(table.slice(0, 2000), path / "a.parquet", row_group_size=150)
    pq.write_table(table.slice(2000), path / "b.parquet", row_group_size=400)
    return path


@pytest.fixture
def dataset(folder: Path, tmp_path: Path) -> Dataset:
    return make_dataset(str(folder), cache_dir=str(tmp_path / "cache"), cache_bytes="1GB")


def padded(batch: Any) -> int:
    return max(1, *map(len, batch["tokens"])) * len(batch["tokens"])


def ids_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["id"].tolist()]


def same(batch: Any) -> Any:
    return batch


@pytest.mark.variants
@pytest.mark.parametrize("length", ["tokens", "n_tokens"])
@pytest.mark.parametrize(
    "options", [{}, {"ragged": "flat"}, {"num_threads": 2, "transform": same}, {"num_workers": 2, "transform": same}]
)
def test_batches_stay_within_the_budget(dataset: Dataset, length: str, options: Any) -> None:
    loader = make_loader(dataset, batch_tokens=BUDGET, length=length, window=3, world=World(0, 1), **options)
    batches = list(loader)
    sizes = LENGTHS[ids_of(batches)]
    assert sorted(ids_of(batches)) == list(range(ROWS))
    first = 0
    for batch in batches:
        own = sizes[first : (first := first + len(batch["id"]))]
        assert max(own.max(), 1) * len(own) <= BUDGET
        lists = batch["tokens"].offsets.diff() if options.get("ragged") == "flat" else map(len, batch["tokens"])
        assert list(lists) == own.tolist()
    assert len(batches) < 1.2 * LENGTHS.sum() / BUDGET
    stats = loader.stats()
    assert (stats.rows, stats.batches) == (ROWS, len(batches))
    assert stats.tokens == LENGTHS.sum()
    ends = np.cumsum([len(batch["id"]) for batch in batches])[:-1]
    sizes_of = np.split(sizes, ends)
    assert stats.padding_tokens == sum(max(own.max(), 1) * len(own) for own in sizes_of) - LENGTHS.sum()
    assert " tokens/s, " in str(stats)


@pytest.mark.variants
@pytest.mark.parametrize("size", [4, 1, 2, 8])
def test_all_ranks_have_equally_many_batches(dataset: Dataset, size: int) -> None:
    loaders = [
        make_loader(dataset, batch_tokens=BUDGET, length="n_tokens", world=World(*at(rank, size)))
        for rank in range(size)
    ]
    for _ in range(2):
        lengths = {len(loader) for loader in loaders}
        ranks = [list(loader) for loader in loaders]
        assert {len(batches) for batches in ranks} == lengths
        assert sorted(row for batches in ranks for row in ids_of(batches)) == list(range(ROWS))
        assert not any(loader.padding for loader in loaders)
        assert all(padded(batch) <= BUDGET for batches in ranks for batch in batches)


def at(rank: int, size: int) -> tuple[int, int, int, int]:
    return rank, size, rank, size


def test_the_first_batch_waits_for_no_plan_of_all_others(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_them(*_: Any) -> int:
        raise AssertionError("all batches of the epoch are planned")

    loader = make_loader(dataset, batch_tokens=BUDGET, length="n_tokens")
    monkeypatch.setattr(TokenOrder, "batches", all_of_them)
    assert ids_of([next(iter(loader))])
    assert loader.stats().total_batches == 0  # unknown


def test_padded_columns_are_tensors_within_the_budget(dataset: Dataset) -> None:
    loader = make_loader(dataset, batch_tokens=BUDGET, length="n_tokens", pad_to_multiple=16, world=World(0, 1))
    for batch in loader:
        tokens, lengths = batch["tokens"], batch["tokens.length"]
        assert tokens.dtype == torch.int32
        assert tokens.numel() <= BUDGET
        assert tokens.shape[1] % 16 == 0
        assert tokens.shape[1] - 16 < max(1, int(lengths.max())) <= tokens.shape[1]
        assert lengths.tolist() == batch["n_tokens"].tolist()
        expected = torch.arange(1, tokens.shape[1] + 1)
        assert torch.equal(tokens, torch.where(expected <= lengths[:, None], expected, 0).int())


@pytest.mark.parametrize("how", [{}, {"num_workers": 1, "transform": same}])
def test_a_list_that_is_longer_than_its_length_says_is_an_error(tmp_path: Path, how: Any) -> None:
    """Such a batch would be larger than the budget."""
    lengths = [3, 2, 4, 1]
    table = pa.table({"tokens": [[0] * size for size in lengths], "n_tokens": [3, 2, 2, 1], "id": range(4)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    dataset = make_dataset(tmp_path / "a.parquet", cache=False)
    loader = make_loader(dataset, batch_tokens=6, length="n_tokens", pad_to_multiple=1, **how)
    with pytest.raises(DataError, match=r"row group 1 row 0: column 'tokens' has 4 values, and batch_tokens counts 2"):
        list(loader)
    assert sorted(ids_of(make_loader(dataset, batch_tokens=6, length="tokens", pad_to_multiple=1, **how))) == [
        0,
        1,
        2,
        3,
    ]
    skipping = make_loader(dataset, batch_tokens=6, length="n_tokens", pad_to_multiple=1, on_error="skip", **how)
    assert 2 not in ids_of(skipping)
    assert skipping.stats().skipped_row_ids == [2]


def test_lists_of_arrays_have_lengths(dataset: Dataset) -> None:
    """As a function of map makes them of tensors [n, 5]."""

    def boxes(batch: Any) -> Any:
        return {"id": batch["id"], "boxes": [torch.zeros(len(tokens), 5) for tokens in batch["tokens"]]}

    mapped = dataset.map(boxes, ["id", "tokens"])
    loader = make_loader(mapped, batch_tokens=BUDGET, length="boxes", pad_to_multiple=4)
    batches = list(loader)
    assert sorted(ids_of(batches)) == list(range(ROWS))
    for batch in batches:
        rows, longest, width = batch["boxes"].shape
        assert rows * longest <= BUDGET
        assert (longest % 4, width) == (0, 5)
        assert batch["boxes.length"].tolist() == LENGTHS[batch["id"].tolist()].tolist()


def test_a_collate_function_gets_the_lists_as_they_are(dataset: Dataset) -> None:
    def sizes(rows: list[dict[str, Any]]) -> Any:
        return [len(row["tokens"]) for row in rows]

    loader = make_loader(
        dataset, batch_tokens=BUDGET, length="tokens", pad_to_multiple=8, collate_fn=sizes, world=World(0, 1)
    )
    found = list(loader)
    assert sorted(size for batch in found for size in batch) == sorted(LENGTHS.tolist())
    assert all(-(-max(1, *batch) // 8) * 8 * len(batch) <= BUDGET for batch in found)


def test_lengths_of_maps_filters_and_mixtures_count(dataset: Dataset, folder: Path) -> None:
    doubled = dataset.map(lambda batch: {"id": batch["id"], "tokens": [[*row, *row] for row in batch["tokens"]]})
    short = dataset.filter([("n_tokens", "<", 100)])
    mixture = mix({"all": dataset, "short": short}, [1, 1], num_rows=1000)
    without = make_dataset(str(folder), columns=["id"], cache=False)
    for source, rows in ((doubled, ROWS), (short, int((LENGTHS < 100).sum())), (mixture, 1000)):
        length = "tokens" if source is doubled else "n_tokens"
        loader = make_loader(source, batch_tokens=BUDGET, length=length, world=World(0, 1))
        batches = list(loader)
        assert len(ids_of(batches)) == rows
        assert all(padded(batch) <= BUDGET for batch in batches)
    loader = make_loader(without, batch_tokens=BUDGET, length="n_tokens", world=World(0, 1))
    batches = list(loader)  # of columns without that of the lengths
    assert list(batches[0]) == ["id"]
    assert all(LENGTHS[batch["id"]].max(initial=1) * len(batch["id"]) <= BUDGET for batch in batches)


def test_lengths_are_read_once_for_a_host(
    dataset: Dataset, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataload import row_lengths

    calls: list[Any] = []
    counted: Callable[..., Any] = row_lengths.each_counted
    monkeypatch.setattr(row_lengths, "each_counted", lambda *given: calls.append(given) or counted(*given))
    first = make_loader(dataset, batch_tokens=BUDGET, length="n_tokens", world=World(0, 1))
    again = make_dataset(str(folder), cache_dir=str(tmp_path / "cache"), cache_bytes="1GB")
    second = make_loader(again, batch_tokens=BUDGET, length="n_tokens", world=World(0, 1))
    assert len(calls) == 1
    assert ids_of(first) == ids_of(second)


def train(folder: Path, cache: Path, state: Path, out: Path, steps: int, dying: int) -> None:
    """Write the row ids and the state of each step, as a rank. The rank `dying` is killed after nine."""
    world = World.detect()
    options: dict[str, Any] = {"batch_tokens": 2048, "length": "tokens", "window": 3, "cache_bytes": "1GB"}
    loader = make_loader(str(folder), world=world, cache_dir=str(cache), **options)
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    with (out / str(world.rank)).open("w") as lines:
        for number, batch in enumerate(islice(loader, steps), 1):
            lines.write(json.dumps([batch["id"].tolist(), loader.state_dict()]) + "\n")
            lines.flush()
            if number == 9 and world.rank == dying:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_goes_on_with_other_ranks_and_each_row_comes_once(
    ranks: Any, folder: Path, tmp_path: Path
) -> None:
    state, seen = tmp_path / "state.json", []
    for size, steps, dying in ((4, 14, 2), (3, 11, -1), (1, 10**6, -1)):
        out = tmp_path / str(size)
        taken = steps_of(ranks, size, dying, out, train, folder, tmp_path / "cache", state, out, steps, dying)
        assert len(taken) == (9 if dying >= 0 else min(steps, len(taken)))
        for step in taken:
            [after] = {json.dumps(after) for _, after in step}  # the same on all ranks
            seen += [row for ids, _ in step for row in ids]
        state.write_text(after)
    assert sorted(seen) == list(range(ROWS))


def test_a_resume_in_the_loop_goes_on_with_the_next_batch(dataset: Dataset) -> None:
    def make() -> Any:
        return make_loader(dataset, batch_tokens=BUDGET, length="n_tokens", world=World(0, 1), seed=3)

    loader, other, resumed = make(), make(), make()
    whole = [batch["id"].tolist() for batch in loader]
    taken = [batch["id"].tolist() for batch in islice(other, 7)]
    resumed.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert taken + [batch["id"].tolist() for batch in resumed] == whole
    assert resumed.state_dict()["epoch"] == 1
    later = [batch["id"].tolist() for batch in resumed]
    assert later == [batch["id"].tolist() for batch in loader] != whole


def test_several_nodes_are_told_that_each_reads_everything(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(4):
        make_loader(dataset, batch_tokens=BUDGET, length="n_tokens", world=World(rank, 4, rank % 2, 2))
    assert caplog.text.count("each of the 2 nodes reads the whole dataset") == 1


def test_metrics_count_each_row_once(dataset: Dataset) -> None:
    loader = make_loader(dataset, batch_tokens=BUDGET, length="n_tokens", shuffle=False, world=World(0, 1))
    found = evaluate_over(torch.nn.Linear(1, 1), loader, lambda _, batch: {"n": batch["n_tokens"].float()})
    assert found["rows"] == ROWS
    assert found["n"] == pytest.approx(LENGTHS.mean())


def test_errors_name_what_to_change(dataset: Dataset) -> None:
    longest = int(LENGTHS.argmax())
    with pytest.raises(DataError, match=rf"row {longest % 150}.*'n_tokens' has a length of 1,024.*raise batch_tokens"):
        make_loader(dataset.select(range(2000)), batch_tokens=1000, length="n_tokens")
    wrong = dataset.map(lambda batch: {"n": batch["id"] - 5})
    with pytest.raises(DataError, match="row 0: column 'n' has no length"):
        make_loader(wrong, batch_tokens=10_000, length="n")
    ratios = dataset.map(lambda batch: {"n": batch["id"] / 5})
    for source, options, says in (
        (dataset, {}, "and neither is given"),
        (dataset, {"batch_size": 4, "batch_tokens": 9}, "and both are given"),
        (dataset, {"batch_size": 4, "length": "tokens"}, "length='tokens' belongs to batch_tokens"),
        (dataset, {"batch_size": 4, "pad_to_multiple": 8}, "pad_to_multiple=8 belongs to batch_tokens"),
        (dataset, {"batch_tokens": 9}, "needs the name of the column"),
        (dataset, {"batch_tokens": 7, "length": "tokens", "pad_to_multiple": 8}, "holds no row padded to"),
        (dataset, {"batch_tokens": 7, "length": "tokens", "num_streams": 2}, "num_streams=2"),
        (dataset, {"batch_tokens": 7, "length": "token"}, "did you mean 'tokens'"),
        (ratios, {"batch_tokens": 7, "length": "n"}, "name a column of integers, or of lists"),
        (dataset.pack(64), {"batch_tokens": 7, "length": "tokens"}, "of a packed dataset all have 64 tokens"),
        (dataset.select([0]), {"batch_tokens": 2048, "length": "tokens", "drop_last": True}, "lower batch_tokens=2048"),
        (mix([dataset], batching="homogeneous"), {"batch_tokens": 2048, "length": "tokens"}, "homogeneous"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_loader(source, world=World(0, 2), **options)
    named = dataset.map(lambda batch: {"a": batch["tokens"], "a.length": batch["id"]})
    with pytest.raises(ConfigError, match=r"adds the column 'a\.length'"):
        make_loader(named, batch_tokens=2048, length="a", pad_to_multiple=8)


def test_a_state_is_refused_if_a_function_makes_other_lengths(dataset: Dataset) -> None:
    """Batches would be cut elsewhere, and rows lost, although the files are the same."""

    def loader(most: int) -> Any:
        def shorten(batch: Any) -> Any:
            return {**batch, "n_tokens": batch["n_tokens"].clamp(max=most)}

        return make_loader(dataset.map(shorten), batch_tokens=BUDGET, length="n_tokens")

    first = loader(1000)
    list(islice(first, 7))
    again = loader(1000)
    again.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError):
        loader(100).load_state_dict(first.state_dict())
