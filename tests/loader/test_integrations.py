"""The loader under Lightning and accelerate, each with two ranks in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ports import free_port
from torch.utils.data import BatchSampler, RandomSampler

from dataload import World, make_dataset, make_loader
from dataload.errors import ConfigError
from dataload.loader.loader import Loader

N = 301
GROUPS = [40, 60, 7, 93, 50, 50, 1]
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    first = 0
    for number, count in enumerate(GROUPS):
        ids = range(first, first + count)
        pq.write_table(pa.table({"row_id": ids, "half": [row / 2 for row in ids]}), path / f"{number}.parquet")
        first += count
    return path


def run_two_ranks(program: str, folder: Path, out: Path, *more: str, number: int = 2) -> Seen:
    """Run tests/support/`program` on two ranks, or on `number`. Return their output, by rank."""
    shared = {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    shared |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent.parent / "support" / program), str(folder), str(out), *more]
    ran = subprocess.run(command, env={**os.environ, **shared}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(number)]


@pytest.fixture(scope="module")
def accelerated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run_two_ranks("accelerate_rank.py", folder, tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def lightning(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run_two_ranks("lightning_rank.py", folder, tmp_path_factory.mktemp("lightning"))


@pytest.fixture
def epochs_of(folder: Path) -> Callable[[int], list[list[int]]]:
    """Return a function of an epoch: the rows that each rank must get."""

    def expected(epoch: int) -> list[list[int]]:
        dataset = make_dataset(str(folder), cache=False)
        loaders = [make_loader(dataset, 16, world=World(rank, 2)) for rank in range(2)]
        return [[row for rows in loader.sampler.batches(epoch, 0) for row in rows.tolist()] for loader in loaders]

    return expected


def once(ranks: list[list[int]]) -> bool:
    """Return whether both ranks together have each row, and one row twice as padding."""
    return Counter(chain(*ranks)).keys() == set(range(N)) and len(ranks[0]) == len(ranks[1]) == 151


# accelerate


def test_accelerate_cannot_shard_a_loader_a_second_time(accelerated: Seen) -> None:
    for rank in accelerated:
        assert len(rank["sharded again"]) == 3
        for error in rank["sharded again"]:
            assert "a second time: use the loader as it is, or accelerator.prepare(loader)" in error


def test_prepare_returns_the_loader_itself(accelerated: Seen) -> None:
    assert all(all(rank["itself"]) for rank in accelerated)


def test_gather_for_metrics_gives_each_row_once(accelerated: Seen) -> None:
    for rank in accelerated:
        assert len(rank["once"]) == 8
        for setting, rows in rank["once"].items():
            assert Counter(rows) == Counter(range(N)), setting


def test_gather_for_metrics_of_a_resumed_epoch_and_without_the_tail(accelerated: Seen) -> None:
    for rank in accelerated:
        assert len(rank["from 101"]) == len(set(rank["from 101"])) == N - 101
        assert len(rank["dropped"]) == len(set(rank["dropped"])) == N - N % 32


def test_the_last_step_of_an_epoch_synchronises(accelerated: Seen) -> None:
    for rank in accelerated:
        assert rank["synchronised"] == [number % 4 == 3 or number == 9 for number in range(10)]
        assert rank["weights alike"] == [True] * 3
        assert rank["evaluated"] == N
        assert rank["nothing active"]


def test_accelerate_resumes_in_the_middle_of_an_epoch(accelerated: Seen, epochs_of: Any) -> None:
    assert [rank["resumed"] for rank in accelerated] == [rank["wanted"] for rank in accelerated] == epochs_of(1)


def test_skip_first_batches_counts_from_the_start_of_a_restored_epoch(accelerated: Seen, epochs_of: Any) -> None:
    """The guide of accelerate loads the state, which restores the position, and then skips the batches before it."""
    for rank, (epoch, following) in enumerate(zip(epochs_of(1), epochs_of(2), strict=True)):
        assert accelerated[rank]["resumed and skipped"] == [epoch, following]


def test_accelerate_has_each_row_of_a_mixture_once_and_resumes_with_its_next_weights(accelerated: Seen) -> None:
    for rank in accelerated:
        epoch, following = rank["mixed"]
        assert sorted(epoch) == list(range(N))
        assert rank["mixed resumed"] == [epoch, following]
    following = list(chain(*(rank["mixed"][1] for rank in accelerated)))
    assert len(following) == len({*following}) == 200
    assert sum(row < 100 for row in following) == 100


def test_skip_first_batches(accelerated: Seen) -> None:
    for rank in accelerated:
        assert rank["skipped"] == rank["unskipped"][3:]
        [(_, unskipped), *_] = rank["drawn"]
        assert rank["drawn"] == [[unskipped[3:], unskipped]] * 2


def test_statistics_of_an_epoch_whose_first_batches_are_skipped(accelerated: Seen, epochs_of: Any) -> None:
    for rank, rows in enumerate(epochs_of(1)):
        left = rows[4 * 16 :]
        expected = [left, [1, len(left), 6, rank, 2], [2, len(rows)]]
        assert accelerated[rank]["continued"] == [expected] * 2


def test_batches_are_on_the_device_of_accelerate(accelerated: Seen) -> None:
    assert [(rank["device"], rank["asked for"]) for rank in accelerated] == [("meta", "cpu")] * 2


# Lightning


def test_lightning_shards_nothing_again(lightning: Seen, epochs_of: Any) -> None:
    for epoch in range(3):
        trained = [rank["trained"][str(epoch)] for rank in lightning]
        assert trained == epochs_of(epoch)
        assert once(trained)


def test_lightning_validates_after_a_sanity_check(lightning: Seen) -> None:
    for number, rank in enumerate(lightning):
        batches = rank["validated"]
        sanity, epochs = batches[:2], batches[2:]
        assert len(epochs) == 6
        assert sanity == epochs[:2] == epochs[2:4] == epochs[4:]
        assert batches[0] == list(range(100 * number, 100 * number + 100))


@pytest.mark.parametrize(("where", "left"), [("middle", slice(4 * 16, None)), ("last", slice(151, None))])
def test_lightning_resumes(lightning: Seen, where: str, left: slice) -> None:
    for rank in lightning:
        expected = {"1": rank["trained"]["1"][left], "2": rank["trained"]["2"]}
        assert rank[where] == {epoch: rows for epoch, rows in expected.items() if rows}


def test_lightning_has_each_row_of_a_mixture_once_and_resumes(lightning: Seen) -> None:
    for epoch in ("0", "1", "2"):
        assert once([rank["mixed"][epoch] for rank in lightning])
    for rank in lightning:
        assert rank["mixed"]["1"] != rank["mixed"]["2"]
        assert rank["mixed resumed"] == {"1": rank["mixed"]["1"][4 * 16 :], "2": rank["mixed"]["2"]}


@pytest.mark.parametrize(("where", "batches"), [("cycled", 6), ("cycled border", 4)])
def test_a_combined_loader_resumes_in_a_cycle_of_its_short_loader(lightning: Seen, where: str, batches: int) -> None:
    """At the border, the short loader has just ended, and its next epoch has not begun."""
    for rank in lightning:
        whole = rank[where]
        assert len(whole["1"]) == 151 + 2 * 50 + 2 * 16  # two epochs of the short one, and two batches of a third
        left = whole["1"][batches * 32 - (14 if batches > 3 else 0) :]
        assert rank[f"{where} resumed"] == {"1": left, "2": whole["2"]}


@pytest.mark.parametrize("made", ["overfitted hook", "overfitted"])
def test_lightning_overfits_the_first_batches_of_the_files(lightning: Seen, made: str) -> None:
    for number, rank in enumerate(lightning):
        rows = [32 * batch + 16 * number + row for batch in range(2) for row in range(16)]
        assert rank[made] == {str(epoch): rows for epoch in range(3)}


def test_other_samplers_are_refused(folder: Path) -> None:
    loader = make_loader(str(folder), 16, cache=False)
    arguments = {"maker": loader.maker, "rank_sampler": loader.rank_sampler}
    with pytest.raises(ConfigError, match=r"its own sampler.*: pass shuffle= or world= to make_loader"):
        Loader(loader.dataset, sampler=RandomSampler(loader.dataset), **arguments)


@pytest.mark.parametrize("made", ["hook", "given", "workers"])
def test_lightning_predicts(lightning: Seen, epochs_of: Any, made: str) -> None:
    predicted = [[rows for rows, _ in rank[made]] for rank in lightning]
    assert [list(chain(*batches)) for batches in predicted] == epochs_of(0)
    assert all(rows == tracked for rank in lightning for rows, tracked in rank[made])


def test_fabric(lightning: Seen, epochs_of: Any) -> None:
    assert [rank["fabric"] for rank in lightning] == [list(pair) for pair in zip(*map(epochs_of, (0, 1)), strict=True)]
    for rank in lightning:
        assert rank["fabric resumed"] == rank["by hand"][2:]


# Tensor parallelism


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ("accelerate", 'make_loader(..., mesh=accelerator.torch_device_mesh["dp_shard"])'),
        ("lightning", 'make_loader(..., mesh=self.device_mesh["data_parallel"])'),
    ],
)
def test_tensor_parallel_peers_get_equal_batches(folder: Path, tmp_path: Path, trainer: str, line: str) -> None:
    seen = run_two_ranks("model_parallel_rank.py", folder, tmp_path, trainer, number=4)
    for rank in seen:
        assert rank["error"] is not None, "a loader without a mesh is made"
        assert "the 4 ranks are not all data-parallel" in rank["error"]
        assert line in rank["error"]
    assert [seen[0]["rows"], seen[2]["rows"]] == [seen[1]["rows"], seen[3]["rows"]]
    assert once([list(chain(*rank["rows"])) for rank in seen[::2]])


# In this process


def test_epochs_that_fabric_counts_from_0_continue_at_the_restored_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fabric sets the epoch of the sampler before each loop: to the number of earlier loops."""
    dataset = make_dataset(str(folder), cache=False)
    state = {**make_loader(dataset, 16).state_dict(), "epoch": 3, "cursor": 64}

    def epochs(*counted: int, own: int | None = None) -> list[tuple[int, int]]:
        """Return the epoch and the batches of each loop. The second one breaks after a batch.

        own: The epoch that the program itself sets after the restart.
        """
        loader, found = make_loader(dataset, 16), []
        loader.load_state_dict(state)
        if own is not None:
            loader.set_epoch(own)
        for number, epoch in enumerate(counted):
            loader.sampler.set_epoch(epoch)
            list(islice(loader, 1) if number == 1 else loader)
            found.append((loader.stats().epoch, loader.stats().batches))
        return found

    for name in ("lightning.fabric.wrappers", "lightning_fabric.wrappers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert epochs(0, 1, 2) == [(0, 19), (1, 1), (2, 19)]
    monkeypatch.setitem(sys.modules, "lightning.fabric.wrappers", sys)
    assert epochs(0, 1, 2, 3) == [(3, 15), (4, 1), (5, 19), (6, 19)]
    assert epochs(0, 1, 2, own=3) == [(3, 15), (4, 1), (5, 19)]
    assert epochs(0, 1, own=4) == [(0, 19), (1, 1)]
    assert epochs(3, 4) == [(3, 15), (4, 1)]
    assert epochs(4, 3, 5) == [(4, 19), (3, 1), (5, 19)]


def test_a_loader_made_before_the_ranks_were_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_dataset(str(folder), cache=False)
    loader, explicit = make_loader(dataset, 16), make_loader(dataset, 16, world=World())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"made for a single process, but this is rank 1 of 2.*train_dataloader"):
        next(iter(loader))
    assert len(list(explicit)) == 19


def test_a_loader_made_for_more_ranks_than_the_process_group_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    loader = make_loader(make_dataset(str(folder), cache=False), 16)
    assert len(list(loader)) == 10
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="made for rank 1 of 2, but this is rank 0 of 1: make it after"):
            next(iter(loader))
    finally:
        torch.distributed.destroy_process_group()


def test_a_plain_dataloader_cannot_pass_the_transform_its_generator(folder: Path) -> None:
    loader = make_loader(make_dataset(str(folder), cache=False), 16, transform=lambda batch, rng: batch)
    with pytest.raises(ConfigError, match="pass its batch_sampler"):
        loader.collate_fn(loader.dataset.__getitems__([1, 2]))


def noisy(batch: Any, rng: Any) -> Any:
    return {"row_id": batch["row_id"], "noise": rng.random()}


def test_a_batch_sampler_begins_with_the_epoch(folder: Path) -> None:
    """Lightning predicts with one. The loader, whose sampler it draws on, may have a restored position."""
    loader = make_loader(make_dataset(str(folder), cache=False), 16, transform=noisy)
    whole = [(batch["row_id"].tolist(), batch["noise"]) for batch in loader]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "cursor": 64})
    batches = BatchSampler(loader.sampler, 16, drop_last=False)
    rebuilt = Loader(loader.dataset, maker=loader.maker, rank_sampler=loader.rank_sampler, batch_sampler=batches)
    assert [(batch["row_id"].tolist(), batch["noise"]) for batch in rebuilt] == whole


def test_a_trainer_that_sets_the_epoch_has_its_tail_although_rows_are_drawn_ahead(folder: Path) -> None:
    """The DataLoader of `skip_first_batches` draws row numbers ahead, so the state may be of the next epoch."""
    dataset = make_dataset(str(folder), cache=False)
    loader, resumed = make_loader(dataset, 16), make_loader(dataset, 16)
    drawn = list(loader.batch_sampler)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)
    assert list(resumed.batch_sampler)[15:] == drawn[15:]


def test_trainers_are_not_imported(folder: Path) -> None:
    list(make_loader(make_dataset(str(folder), cache=False), 16))
    assert not {"accelerate", "lightning", "lightning_fabric"} & sys.modules.keys()
