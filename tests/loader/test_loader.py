"""The loader as a training loop sees it: rows, order, shapes, resuming."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import operator
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from timed_epoch import timed_epoch
from torch.utils.data import DataLoader, DistributedSampler

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError
from dataload.loader.loader import Loader
from dataload.samplers import window_size

FILES = [[40, 60], [7, 0, 93], [50, 50, 1]]
N = 301


@pytest.fixture
def dataset(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Any:
    return make_dataset(dataset_of(FILES), storage_options=bucket.options, cache=cache)


def ids(batches: Iterable[Any]) -> list[int]:
    return [int(row) for batch in batches for row in batch["row_id"]]


def ranks(dataset: Any, world_size: int, batch_size: int, **options: Any) -> list[Loader]:
    return [make_loader(dataset, batch_size, world=World(rank, world_size), **options) for rank in range(world_size)]


# Which rows


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, "full", False])
def test_each_row_once_an_epoch_over_all_ranks(dataset: Any, world_size: int, shuffle: Any) -> None:
    loaders = ranks(dataset, world_size, 16, shuffle=shuffle, window=2)
    epochs = []
    for epoch in range(2):
        found = []
        for loader in loaders:
            loader.set_epoch(epoch)
            mine = ids(loader)
            assert len(mine) == -(-N // world_size)
            found += mine[: len(mine) - loader.padding]
        assert Counter(found) == Counter(range(N))
        epochs.append(found)
    assert (epochs[0] == epochs[1]) == (shuffle is False)


@pytest.mark.parametrize("size", [N, N + 1])
def test_drop_last_that_would_drop_all_rows_is_refused(dataset: Any, size: int) -> None:
    with pytest.raises(ConfigError, match=f"drops all {N} rows.* global batch of {2 * size}: lower batch_size={size}"):
        make_loader(dataset, size, drop_last=True, world=World(0, 2))
    assert len(make_loader(dataset, size, world=World(0, 2))) == 1
    assert len(make_loader(dataset, N, drop_last=True)) == 1


def test_drop_last_leaves_out_less_than_a_global_batch(dataset: Any) -> None:
    loaders = ranks(dataset, 2, 16, drop_last=True)
    batches = [[ids([batch]) for batch in loader] for loader in loaders]
    assert [[len(batch) for batch in mine] for mine in batches] == [[16] * 9] * 2
    assert [len(loader) for loader in loaders] == [9, 9]
    seen = Counter(row for mine in batches for batch in mine for row in batch)
    assert max(seen.values()) == 1
    assert len(seen) == 288


def test_rows_are_whole(dataset: Any) -> None:
    for batch in make_loader(dataset, 32, window=3):
        assert torch.equal(batch["half"], batch["row_id"] / 2)
        assert torch.equal(batch["vector"], (batch["row_id"][:, None] + torch.arange(3)).float())
        assert batch["text"] == [f"row {row}" for row in batch["row_id"]]


def test_a_seed_is_an_order(dataset: Any) -> None:
    first, again, other = (ids(make_loader(dataset, 16, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_global_batch_does_not_depend_on_the_world(dataset: Any) -> None:
    one = [set(ids([batch])) for batch in make_loader(dataset, 32)]
    pair = zip(*ranks(dataset, 2, 16), strict=True)
    for batch, halves in zip(one, pair, strict=True):
        assert batch <= set(ids(halves))


def test_bytes_leave_the_origin_once(bucket: Any, dataset: Any) -> None:
    size = sum(group.file.size for group in {group.file: group for group in dataset.row_groups}.values())
    bucket.server.reset()
    for loader in ranks(dataset, 2, 16):
        for _ in range(3):
            ids(loader)
    assert bucket.server.stats()["get_bytes"] <= size
    bucket.server.reset()
    assert len(ids(make_loader(dataset, 16))) == N
    assert bucket.server.stats()["get_requests"] == 0


# Drop-in


def test_it_is_a_dataloader_with_a_distributed_sampler(dataset: Any) -> None:
    loader = make_loader(dataset, 16, world=World(1, 2))
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.sampler, DistributedSampler)
    assert loader.batch_size == 16
    assert len(loader) == 10 == len(list(loader))


def test_a_plain_dataloader_takes_the_dataset(dataset: Any) -> None:
    found = list(DataLoader(dataset, 64, shuffle=True))
    assert sorted(ids(found)) == list(range(N))
    assert found[0]["vector"].shape == (64, 3)
    assert found[0]["row_id"].dtype == torch.int64
    assert dataset[-1]["text"] == dataset[np.int8(-1)]["text"] == f"row {N - 1}"
    with pytest.raises(IndexError):
        dataset[N]


def test_the_sampler_drops_into_a_plain_dataloader(dataset: Any) -> None:
    ours = make_loader(dataset, 16, world=World(1, 2))
    plain = DataLoader(dataset, 16, sampler=make_loader(dataset, 16, world=World(1, 2)).sampler)
    assert ids(plain) == ids(ours)


def test_rows_is_a_sequence_of_dicts(dataset: Any) -> None:
    rows = dataset.__getitems__([5, 3, 300])
    assert len(rows) == 3
    assert [row["row_id"].item() for row in rows] == [5, 3, 300]
    assert rows[-1]["text"] == "row 300"
    assert [row["row_id"].item() for row in rows[:2]] == [5, 3]
    assert rows.columns["half"].tolist() == [2.5, 1.5, 150]
    with pytest.raises(IndexError):
        rows[3]


def test_a_batch_that_the_loop_drops_is_freed_before_those_made_with_it(dataset: Any) -> None:
    rows: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    for batch in make_loader(dataset, 4):
        rows.append(weakref.ref(batch["row_id"]))
        alive.append(sum(row() is not None for row in rows))
    assert max(alive) <= 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_the_program_drops_is_freed_at_once(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, workers: int
) -> None:
    """In large runs users call gc.disable() or gc.freeze()."""
    dataset = make_dataset(dataset_of(FILES), storage_options=bucket.options, cache=cache)
    loader = make_loader(dataset, 16, transform=where_am_i, num_workers=workers)
    gc.disable()
    try:
        list(loader)
        dropped = [weakref.ref(each) for each in (loader, loader.sampler, dataset.rowstore)]
        del loader, dataset
        assert [each() for each in dropped] == [None, None, None]
    finally:
        gc.enable()


# Epochs and positions


def test_each_loop_is_a_new_epoch(dataset: Any) -> None:
    loader, by_hand = make_loader(dataset, 16), make_loader(dataset, 16)
    first, second = ids(loader), ids(loader)
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second
    by_hand.set_epoch(1)
    assert ids(by_hand) == second


@pytest.mark.parametrize("workers", [0, 2])
def test_a_peek_changes_nothing(dataset: Any, workers: int) -> None:
    whole = ids(make_loader(dataset, 16))
    loader = make_loader(dataset, 16, num_workers=workers)
    assert ids([next(iter(loader))]) == whole[:16]
    loader.set_epoch(0)
    assert ids([next(iter(loader))]) == whole[:16]
    assert ids(loader) == whole


def test_each_iterator_has_its_own_position(dataset: Any) -> None:
    loader = make_loader(dataset, 16)
    pairs = [(ids([left]), ids([right])) for left, right in zip(loader, loader, strict=True)]
    assert [left for left, _ in pairs] == [right for _, right in pairs]
    assert sorted(row for left, _ in pairs for row in left) == list(range(N))


def test_the_state_is_that_of_the_iterator_that_yielded_last(dataset: Any) -> None:
    """A loop may look at a batch of another iterator."""
    loader = make_loader(dataset, 16)
    older = iter(loader)
    for _ in range(5):
        next(older)
    assert loader.state_dict()["cursor"] == 80
    newer = iter(loader)
    next(newer)
    assert loader.state_dict()["cursor"] == 16
    next(older)
    assert loader.state_dict()["cursor"] == 96
    older.close()
    newer.close()


def test_persistent_workers_serve_one_iterator(dataset: Any) -> None:
    loader = make_loader(dataset, 16, num_workers=1, persistent_workers=True)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    with pytest.raises(RuntimeError, match="one iterator at a time"):
        next(older)
    newer.close()


def test_the_state_after_a_whole_epoch_begins_the_next(dataset: Any) -> None:
    loader, resumed = make_loader(dataset, 16), make_loader(dataset, 16)
    ids(loader)
    resumed.load_state_dict(loader.state_dict())
    assert ids(resumed) == ids(loader)


def test_set_epoch_repeats_an_epoch(dataset: Any) -> None:
    loader = make_loader(dataset, 16)
    first = ids(loader)
    loader.set_epoch(0)
    assert ids(loader) == first


@pytest.mark.parametrize("given_to", ["loader", "sampler"])
def test_set_epoch_of_the_sampler_is_that_of_the_loader(dataset: Any, given_to: str) -> None:
    """After a loop that takes all batches without an end, the position is at the end of its epoch."""
    loader = make_loader(dataset, 16)
    first = ids(batch for _, batch in zip(range(len(loader)), loader, strict=False))
    {"loader": loader, "sampler": loader.sampler}[given_to].set_epoch(0)
    assert (loader.state_dict()["epoch"], loader.state_dict()["cursor"]) == (0, 0)
    assert ids(loader) == first


def test_a_loop_that_takes_len_batches_ends_the_epoch(dataset: Any) -> None:
    loader = make_loader(dataset, 16)
    first = ids(batch for _, batch in zip(range(len(loader)), loader, strict=False))
    second = ids(loader)
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second


@pytest.mark.variants
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 5, 9])
def test_resume_continues_at_the_saved_position(dataset: Any, stop: int, workers: int) -> None:
    whole = make_loader(dataset, 16, world=World(1, 2))
    whole.set_epoch(3)
    expected = ids(whole) + ids(whole)

    loader = make_loader(dataset, 16, world=World(1, 2), num_workers=workers)
    loader.set_epoch(3)
    batches = iter(loader)
    begun = ids(next(batches) for _ in range(stop))
    state = json.loads(json.dumps(loader.state_dict()))
    batches.close()

    resumed = make_loader(dataset, 16, world=World(1, 2), num_workers=workers)
    resumed.load_state_dict(state)
    assert begun + ids(resumed) + ids(resumed) == expected


def test_a_peek_loses_no_restored_position(dataset: Any) -> None:
    loader = make_loader(dataset, 16)
    expected, second = ids(loader), ids(loader)
    loader.set_epoch(0)
    loader.load_state_dict({**loader.state_dict(), "cursor": 80})
    for _ in range(2):
        assert ids([next(iter(loader))]) == expected[80:96]
    loader.set_epoch(0)
    assert ids(loader) == expected[80:]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "cursor": 80})
    assert ids([next(iter(loader))]) == expected[80:96]
    loader.set_epoch(1)
    assert ids(loader) == second


def test_arguments_that_change_before_a_resume_hold_from_the_next_epoch_on(dataset: Any) -> None:
    whole, changed = make_loader(dataset, 16), make_loader(dataset, 16, shuffle="full", seed=3)
    batches = iter(whole)
    begun = ids(next(batches) for _ in range(5))
    state = whole.state_dict()
    resumed = make_loader(dataset, 16, shuffle="full", seed=3)
    resumed.load_state_dict(state)
    assert re.search(r"shuffle='block', .*, from epoch 1 on shuffle='full', .*, seed=3;", repr(resumed))
    assert begun + ids(resumed) == begun + ids(batches)
    changed.set_epoch(1)
    assert repr(resumed) == repr(changed)
    assert ids(resumed) == ids(changed)


def begun(loader: Any, count: int) -> tuple[list[int], dict[str, Any]]:
    """Return the rows of the first batches of an epoch, and the state after them."""
    batches = iter(loader)
    found = ids(next(batches) for _ in range(count))
    state = loader.state_dict()
    batches.close()
    return found, state


def test_resume_in_another_world_loses_and_repeats_nothing(dataset: Any) -> None:
    found = []
    states = []
    for loader in ranks(dataset, 2, 16):
        rows, state = begun(loader, 4)
        found += rows
        states.append(json.dumps(state))
    assert states[0] == states[1]
    assert len(states[0]) < 4096
    for loader in ranks(dataset, 3, 8):
        loader.load_state_dict(json.loads(states[0]))
        rest = ids(loader)
        found += rest
    spare = Counter(found) - Counter(range(N))
    assert set(found) == set(range(N))
    assert sum(spare.values()) <= 2


def test_padding_of_a_resumed_epoch(dataset: Any) -> None:
    found, state = begun(make_loader(dataset, 16), 8)
    for loader in ranks(dataset, 3, 8):
        loader.load_state_dict(state)
        padding = loader.padding
        rest = ids(loader)
        found += rest[: len(rest) - padding]
    assert Counter(found) == Counter(range(N))


def test_padding_after_a_loop_is_that_of_the_loop(dataset: Any) -> None:
    """The rest of a resumed epoch and the next epoch pad other ranks."""
    first, state = begun(make_loader(dataset, 16), 8)
    loaders = ranks(dataset, 3, 8)
    for loader in loaders:
        loader.load_state_dict(state)
    for earlier in (first, []):
        found = list(earlier)
        for loader in loaders:
            mine = ids(loader)
            found += mine[: len(mine) - loader.padding]
        assert Counter(found) == Counter(range(N))
    whole = [loader.padding for loader in loaders]
    for loader in loaders:
        loader.load_state_dict(state)
    assert [loader.padding for loader in loaders] != whole


def test_a_state_after_the_last_batch_leaves_nothing_of_its_epoch(dataset: Any) -> None:
    loader = make_loader(dataset, 16)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    state = loader.state_dict()
    batches.close()
    resumed = make_loader(dataset, 16)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert ids(resumed) == []
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert len(ids(resumed)) == N


def test_a_state_of_another_dataset_is_rejected(
    bucket: Any, dataset: Any, dataset_of: Callable[..., str], cache: CacheConfig
) -> None:
    state = make_loader(dataset, 16).state_dict()
    other = make_dataset(dataset_of([[N]], "other"), storage_options=bucket.options, cache=cache)
    with pytest.raises(ConfigError, match="dataset"):
        make_loader(other, 16).load_state_dict(state)


# Workers, transforms, shapes


def augment(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"row_id": batch["row_id"], "noise": rng.random(len(batch["row_id"]))}


def test_a_batch_has_its_augmentation_at_any_worker_count(dataset: Any) -> None:
    def noise(loader: Loader) -> list[tuple[int, float]]:
        return [
            (int(row), value) for batch in loader for row, value in zip(batch["row_id"], batch["noise"], strict=True)
        ]

    without_workers, with_workers, other = (
        noise(make_loader(dataset, 16, transform=augment, num_workers=workers, seed=seed))
        for workers, seed in ((0, 0), (2, 0), (0, 1))
    )
    assert without_workers == with_workers
    assert sorted(value for _, value in without_workers) != sorted(value for _, value in other)
    assert len({value for _, value in without_workers}) == N


def where_am_i(batch: dict[str, Any]) -> dict[str, Any]:
    worker = torch.utils.data.get_worker_info()
    return {**batch, "worker": -1 if worker is None else worker.id}


@pytest.mark.variants
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
)
def test_workers(dataset: Any, options: dict[str, Any]) -> None:
    plain = make_loader(dataset, 16)
    loader = make_loader(dataset, 16, transform=where_am_i, **options)
    for _ in range(2):
        batches = list(loader)
        assert ids(batches) == ids(plain)
        assert {batch["worker"] for batch in batches} == set(range(options["num_workers"]))
    del batches, loader


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"num_workers": 1, "persistent_workers": True, "transform": where_am_i},
            marks=pytest.mark.slow,
            id="workers",
        ),
    ],
)
def test_a_loader_in_use_can_be_sent_to_another_process(dataset: Any, options: dict[str, Any]) -> None:
    expected = ids(make_loader(dataset, 16))
    loader = make_loader(dataset, 16, **options)
    batches = iter(loader)
    assert ids([next(batches)]) == expected[:16]
    copied = pickle.loads(pickle.dumps(loader))
    assert copied.state_dict() == loader.state_dict()
    copied.load_state_dict(copied.state_dict())
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert process.submit(ids, copied).result(timeout=200) == expected[16:]
    assert ids(batches) == expected[16:]


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_row_once_over_ranks_and_workers(dataset: Any, drop_last: bool) -> None:
    """Five ranks have 0 to 2 workers each, equally many batches, and the batches of a rank without workers."""
    found, counts = [], set()
    for rank in range(5):
        options = {"world": World(rank, 5), "drop_last": drop_last}
        loader = make_loader(dataset, 7, num_workers=rank % 3, **options)
        batches = [ids([batch]) for batch in loader]
        assert batches == [ids([batch]) for batch in make_loader(dataset, 7, **options)]
        counts.add((len(batches), len(loader)))
        rows = [row for batch in batches for row in batch]
        found += rows[: len(rows) - make_loader(dataset, 7, **options).padding]
    assert counts == {(8, 8) if drop_last else (9, 9)}
    assert len(found) == len(set(found)) == (280 if drop_last else N)


def test_the_default_window_follows_from_the_footers(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_loader(dataset, 16).sampler.order.window == len(dataset.row_groups) == 8
    assert make_loader(dataset, 16, window=5).sampler.order.window == 5
    monkeypatch.setattr(window_size, "MEMORY", sum(sorted(group.bytes for group in dataset.row_groups)[-6:]))
    assert make_loader(Dataset(dataset.manifest, dataset.blocks), 16).sampler.order.window == 3


def test_lightning_sets_worker_init_fn_after_the_loader_is_made(dataset: Any) -> None:
    loader = make_loader(dataset, 16, num_workers=1, transform=threads_of_torch)
    loader.worker_init_fn = use_seven_threads
    assert {batch["threads"] for batch in loader} == {7}


def use_seven_threads(worker: int) -> None:
    torch.set_num_threads(7)


def threads_of_torch(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "threads": torch.get_num_threads()}


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "lists": [torch.arange(int(row) % 5) for row in batch["row_id"]]}


def test_lists_of_tensors_come_from_workers(dataset: Any) -> None:
    for batch in make_loader(dataset, 300, transform=lists, num_workers=1):
        assert [len(one) for one in batch["lists"]] == [int(row) % 5 for row in batch["row_id"]]


@pytest.fixture
def larger(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Any:
    """A dataset whose files are too large to be cached with their footers."""
    return make_dataset(dataset_of([[150, 150]] * 3), storage_options=bucket.options, cache=cache)


def test_workers_count_what_they_fetch(larger: Any) -> None:
    loader = make_loader(larger, 16, num_workers=2)
    ids(loader)
    assert loader.stats().bytes_origin == sum(file.size for file in {group.file for group in larger.row_groups})
    assert loader.stats().requests_origin == 3


def broken(batch: dict[str, Any]) -> dict[str, Any]:
    if 150 in batch["row_id"]:
        raise ValueError("a broken transform")
    return batch


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_transform_is_raised(dataset: Any, workers: int) -> None:
    before = multiprocessing.active_children()  # such as the parent of ranks
    with pytest.raises(ValueError, match="a broken transform"):
        ids(make_loader(dataset, 16, transform=broken, num_workers=workers))
    assert multiprocessing.active_children() == before  # without the garbage collector


def broken_by_an_error_of_its_own(batch: dict[str, Any]) -> dict[str, Any]:
    class Own(Exception):
        """No other process has this class, as those that boto3 makes for a client."""

    raise Own("a broken transform")


def test_an_error_that_cannot_be_pickled_comes_from_a_worker(dataset: Any) -> None:
    loader = make_loader(dataset, 16, transform=broken_by_an_error_of_its_own, num_workers=1, timeout=30)
    with pytest.raises(RuntimeError, match="Own: a broken transform"):
        next(iter(loader))


def test_collate_fn_gets_rows(dataset: Any) -> None:
    loader = make_loader(dataset, 16, collate_fn=lambda rows: {"row_id": [row["row_id"] for row in rows]})
    assert sorted(ids(loader)) == list(range(N))


def test_collate_fn_may_change_rows_in_place(dataset: Any) -> None:
    def negated(rows: Any) -> dict[str, list[int]]:
        for row in rows:
            row["row_id"] = -row["row_id"]
        return {"row_id": [row["row_id"] for row in rows]}

    assert sorted(ids(make_loader(dataset, 16, collate_fn=negated))) == list(range(1 - N, 1))


def joined(rows: Any) -> dict[str, Any]:
    """Collate as transformers and TRL do: look at the types, and join lists of tokens by `+`."""
    assert isinstance(rows, list)
    assert all(type(row) is dict for row in rows)
    tokens = [row["tokens"] + row["tokens"] for row in rows]
    return {"row_id": torch.stack([row["row_id"] for row in rows]), "tokens": [len(each) for each in tokens]}


@pytest.fixture
def token_rows(tmp_path: Path) -> Any:
    tokens = [[row] * (row % 4) for row in range(48)]
    table = pa.table({"row_id": range(48), "tokens": tokens, "wave": [[0.5] * (row % 3) for row in range(48)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=20)
    return make_dataset(tmp_path / "x.parquet", cache=False)


@pytest.mark.parametrize("make", [make_loader, partial(make_loader, num_workers=1), DataLoader])
def test_collators_of_tokens_get_lists_of_dicts(token_rows: Any, make: Any) -> None:
    batches = list(make(token_rows, 16, shuffle=False, collate_fn=joined))
    assert [row for batch in batches for row in batch["row_id"].tolist()] == list(range(48))
    assert [length for batch in batches for length in batch["tokens"]] == [2 * (row % 4) for row in range(48)]


def test_rows_are_made_at_the_first_look_at_their_list(token_rows: Any) -> None:
    looks: dict[str, Any] = {
        "length": len,
        "iteration": lambda rows: sum(1 for _ in rows),
        "index": lambda rows: len([rows[0], rows[-1], rows[1]]),
        "slice": lambda rows: len(rows[:]),
        "on the left": lambda rows: len(operator.add(rows, [])),
        "on the right": lambda rows: len(operator.add([], rows)),
        "star": lambda rows: len([*rows]),
        "sequence": lambda rows: len(pa.array([row["tokens"] for row in rows])),
        "reversed": lambda rows: len(list(reversed(rows))),
        "copy": lambda rows: len(copy.deepcopy(rows)),
        "pickle": lambda rows: len(pickle.loads(pickle.dumps(rows))),
        "change": lambda rows: (rows.append(rows.pop()), list.__len__(rows))[1],
        "truth": lambda rows: 3 * bool(rows),
        "array": lambda rows: sum(row is not None for row in np.array(rows)),
    }
    for name, look in looks.items():
        rows = token_rows.__getitems__([3, 1, 2])
        assert rows.columns["row_id"].tolist() == [3, 1, 2]
        assert list.__getitem__(rows, slice(None)) == [None] * 3, "columns make no row"
        assert look(rows) == 3, name
    [row] = token_rows.__getitems__([7])
    assert row == {"row_id": 7, "tokens": [7, 7, 7], "wave": row["wave"]}
    assert row["wave"].dtype == torch.float64
    assert {name: value.tolist() for name, value in token_rows[7].items()} == row | {"wave": row["wave"].tolist()}


def test_trainers_rebuild_lists_of_rows_by_their_type(token_rows: Any) -> None:
    """As `send_to_device` of accelerate and `move_data_to_device` of Lightning do with what a collator returns."""
    [rows] = DataLoader(token_rows, 48, collate_fn=lambda rows: rows)
    moved = type(rows)(dict(row) for row in rows)
    assert type(moved) is list
    assert type(rows)() == []
    assert moved == rows


def test_collate_functions_of_timm_get_pairs(token_rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(rows: Any) -> dict[str, Any]:
        assert all(isinstance(row, tuple) for row in rows)
        return {"row_id": [row[0] for row in rows]}

    with pytest.raises(AssertionError):
        list(make_loader(token_rows, 16, collate_fn=pairs))
    monkeypatch.setattr(pairs, "__module__", "timm.data.loader")
    assert sorted(ids(make_loader(token_rows, 16, collate_fn=pairs))) == list(range(48))
    assert sorted(ids(make_loader(token_rows, 16, collate_fn=partial(pairs)))) == list(range(48))
    of_timm = type(
        "FastCollateMixup", (), {"__call__": lambda self, rows: pairs(rows), "__module__": "timm.data.mixup"}
    )
    derived = type("Mine", (of_timm,), {})()
    assert sorted(ids(make_loader(token_rows, 16, collate_fn=derived))) == list(range(48))


def test_columns_group_ragged(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> None:
    url = dataset_of(FILES)
    options = {"storage_options": bucket.options, "cache": cache}
    batch = next(iter(make_loader(url, 4, columns=["half"], **options)))
    assert set(batch) == {"half"}
    batch = next(iter(make_loader(url, 4, columns=["half", "row_id"], group={"x": ["half"]}, **options)))
    assert batch["x"].shape == (4, 1)


def test_a_device(dataset: Any) -> None:
    batch = next(iter(make_loader(dataset, 4, device="meta")))
    assert batch["row_id"].device.type == "meta"
    assert batch["text"][0].startswith("row")


def test_stats(larger: Any) -> None:
    loader = make_loader(larger, 16)
    stats = timed_epoch(loader)
    assert (stats.epoch, stats.rows, stats.batches) == (0, 900, 57)
    assert stats.stall_fraction == stats.wait_seconds / stats.seconds <= 1
    assert stats.requests_origin == 3
    assert stats.bytes_origin == sum(file.size for file in {group.file for group in larger.row_groups})
    ids(loader)
    assert loader.stats().epoch == 1
    assert loader.stats().bytes_origin == 0
    assert loader.stats().hit_rate == 1
    assert "epoch 1: 900 rows" in str(loader.stats())


# Stopping


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_an_epoch_early(dataset: Any, workers: int) -> None:
    loader = make_loader(dataset, 16, num_workers=workers)
    whole = ids(make_loader(dataset, 16))
    for _ in range(3):
        for number, batch in enumerate(loader):
            assert ids([batch]) == whole[16 * number : 16 * number + 16]
            if number == 2:
                break
    with pytest.raises(RuntimeError, match="mine"):
        for _batch in loader:
            raise RuntimeError("mine")


def test_loops_that_begin_at_the_same_batch_each_time_are_told_once(
    dataset: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def capped(loader: Any) -> None:
        for _ in zip(range(2), loader, strict=False):
            pass

    loader = make_loader(dataset, 16)
    for epoch in range(4):
        loader.set_epoch(epoch)
        capped(loader)
    loader.set_epoch(4)
    next(iter(loader))
    ids(loader)  # A look at the first batch, then the loop.
    assert not caplog.records
    for _ in range(5):
        capped(loader)
    [record] = caplog.records
    assert "begin at the same batch of epoch 5 each time" in record.getMessage()
    assert "loader.set_epoch(epoch)" in record.getMessage()


def test_threads_end_with_their_loader(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> None:
    before = set(threading.enumerate())
    loader = make_loader(dataset_of(FILES), 16, storage_options=bucket.options, cache=cache)
    ids(loader)
    pools = [thread for thread in threading.enumerate() if thread not in before and "dataload-" in thread.name]
    assert pools
    del loader
    gc.collect()
    for thread in pools:
        thread.join(200)
        assert not thread.is_alive()


@pytest.mark.slow
def test_the_interpreter_exits_in_the_middle_of_an_epoch(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path
) -> None:
    options = {"storage_options": bucket.options, "cache_dir": str(tmp_path / "c")}
    program = f"""
import dataload
loader = dataload.make_loader({dataset_of(FILES)!r}, 4, **{options!r})
batches = iter(loader)
next(batches)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


# Bad input


def test_a_cache_smaller_than_the_window_needs(bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    url = dataset_of(FILES)
    options = {"storage_options": bucket.options, "cache_dir": str(tmp_path / "c"), "cache_bytes": 9000}
    with pytest.raises(ConfigError, match=r"cache_bytes=9000 is too small: two windows of 4.*raise.*lower"):
        make_loader(url, 16, window=4, **options)
    with pytest.raises(ConfigError, match=r"cache_bytes=9000.*'full' needs the whole dataset"):
        make_loader(url, 16, shuffle="full", **options)
    assert len(ids(make_loader(url, 16, window=1, **{**options, "cache_bytes": 20_000}))) == N


def test_a_default_cache_that_is_too_small_names_the_disk(small_disk: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.zeros(200_000)}), tmp_path / "x.parquet", row_group_size=20_000)
    options = {"cache_dir": str(small_disk / "c")}
    cause = rf"^the disk of {small_disk}/c has 9\d\d\.\d kB free, and the default cache of \d+\.\d kB on it is "
    fits = r"too small: two windows of 2 row groups must fit, 640\.0 kB decoded; pass cache_bytes='673.7kB' or more"
    with pytest.raises(ConfigError, match=cause + fits):
        make_loader(tmp_path / "x.parquet", 16, window=2, **options)
    fits_nowhere = (
        r"too small: two windows of 4 row groups.*; name a cache_dir on a larger disk, choose fewer columns, or lower"
    )
    with pytest.raises(ConfigError, match=cause + fits_nowhere):
        make_loader(tmp_path / "x.parquet", 16, window=4, **options)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"prefetch": 0}, "prefetch"),
        ({"columns": ["half"]}, "columns"),
        ({"cache_dir": "/x"}, "cache_dir"),
        ({"num_workers": 1, "in_order": False}, "in_order"),
        ({"group": {"half": ["row_id"]}}, "'half'"),
        ({"shuffle": "some"}, "shuffle"),
        ({"window": 0}, "window"),
        ({"ragged": "round"}, "ragged"),
        ({"num_streams": 3, "world": World(0, 4, 0, 2)}, "num_streams"),
        ({"group": {"x": ["nothing"]}}, "'x'"),
    ],
)
def test_arguments_that_cannot_work(dataset: Any, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        next(iter(make_loader(dataset, **{"batch_size": 16, **wrong})))


def test_columns_are_a_list_of_names(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> None:
    url = dataset_of([[3]])
    for wrong in ("half", []):
        with pytest.raises(ConfigError, match="columns="):
            make_dataset(url, columns=wrong, storage_options=bucket.options, cache=cache)


def test_rows_outside_the_dataset(dataset: Any) -> None:
    for wrong in ([], [-1], [N]):
        with pytest.raises(IndexError, match=f"0 to {N - 1}"):
            dataset.__getitems__(wrong)


def test_a_loader_as_the_dataset_of_a_dataloader_names_the_way_out(dataset: Any) -> None:
    loader = make_loader(dataset, 16)
    with pytest.raises(TypeError, match="Hugging Face Trainer, return it from get_train_dataloader"):
        next(iter(torch.utils.data.DataLoader(loader, batch_size=4)))  # type: ignore[arg-type]


def test_nulls_name_file_row_group_and_column(bucket: Any, cache: CacheConfig) -> None:
    import pyarrow as pa

    bucket.put_table("data/x.parquet", pa.table({"a": [1, 2, 3, None]}), row_group_size=2)
    options = {"storage_options": bucket.options, "cache": cache}
    with pytest.raises(DataError, match=r"data/x\.parquet row group 1 column 'a' has 1 nulls"):
        list(make_loader(bucket.url("data"), 4, **options))
    assert sorted(next(iter(make_loader(bucket.url("data"), 4, fill_null=0, **options)))["a"].tolist()) == [0, 1, 2, 3]


def test_more_ranks_than_one_and_no_number(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK"):
        make_loader(dataset, 16)


@pytest.mark.parametrize(("transform", "workers"), [(None, 0), (where_am_i, 2)])
def test_workers_run_only_user_code(dataset: Any, transform: Any, workers: int) -> None:
    """Without user code, a worker would only copy."""
    before = {*multiprocessing.active_children()}  # such as the parent of ranks
    with closing(iter(make_loader(dataset, 16, num_workers=2, transform=transform))) as batches:
        next(batches)
        assert len({*multiprocessing.active_children()} - before) == workers


def test_an_error_for_an_argument_of_make_dataset_omits_the_value(dataset: Any) -> None:
    """The value may contain a password."""
    for wrong in ({"cluster": "valkey://user:hunter2@host"}, {"storage_options": {"secret": "hunter2"}}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} cannot be combined with a dataset") as raised:
            make_loader(dataset, 4, **wrong)
        assert "hunter2" not in str(raised.value)


def _identity(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_cache_the_main_process_prefetches_nothing_for_workers(workers: int, bucket: Any) -> None:
    """A row group that workers cannot share is not prefetched for them."""
    table = pa.table({"x": [np.random.default_rng(row).bytes(1000) for row in range(2000)]})
    bucket.put_table("x.parquet", table, row_group_size=500)
    dataset = make_dataset(bucket.url("x.parquet"), storage_options=bucket.options, cache=False)
    bucket.server.reset()
    options = {"num_workers": workers, "transform": _identity} if workers else {}
    assert sum(len(batch["x"]) for batch in make_loader(dataset, 100, **options)) == 2000
    assert bucket.server.stats()["get_bytes"] < 1.2 * table.nbytes


@pytest.mark.parametrize(
    ("workers", "transform", "has_cache", "warnings"),
    [(2, _identity, False, 1), (1, _identity, False, 0), (2, None, False, 0), (2, _identity, True, 0)],
)
def test_workers_that_each_fetch_the_whole_dataset_are_warned_of(
    workers: int,
    transform: Any,
    has_cache: bool,
    warnings: int,
    tmp_path: Path,
    cache: CacheConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pq.write_table(pa.table({"x": range(8)}), tmp_path / "x.parquet")
    source = str(tmp_path / "x.parquet")
    make_loader(source, 4, num_workers=workers, transform=transform, cache=cache if has_cache else False)
    found = [message for message in caplog.messages if "every row group" in message]
    assert len(found) == warnings
    assert all("without a cache, each of the 2 workers" in message for message in found)
