"""fit gives the same parameters for any number of ranks and any accumulation."""

from __future__ import annotations

import functools
import gc
import os
import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain, count, zip_longest
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from regression import Rows, assert_close, build, in_order, parameters_of, squared_error, train_in_order
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from dataload import find_batch_size, make_dataset, make_loader, mix
from dataload.errors import ConfigError
from dataload.rows.collate import Flat
from dataload.train import epoch_metrics, rank_batches
from dataload.train.harness import fit
from dataload.train.optimizer_step import OptimizerStep
from dataload.train.ranks.exchange import Exchange
from dataload.train.ranks.process_group import device_of
from dataload.world import World


class CrashError(Exception):
    """An error in the user's code."""


def test_two_ranks_train_like_one_with_twice_the_batch(ranks):
    single = train_in_order(8)
    first, second = ranks(2, train_in_order, 4)
    assert_close(first, single)
    assert torch.equal(first, second)
    assert not torch.equal(single, train_in_order(4))


def test_accumulated_batches_train_like_one_large_batch(ranks):
    whole = train_in_order(8)
    assert_close(train_in_order(4, accumulate=2), whole)
    assert_close(train_in_order(2, accumulate=4), whole)
    assert_close(ranks(2, train_in_order, 2, accumulate=2)[1], whole)


def steps_of(groups, clip=None):
    """Return the parameters after two epochs of plain torch: one step on the mean loss of each group of rows."""
    model, optimizer = build()
    rows = Rows()
    for group in groups * 2:
        optimizer.zero_grad()
        squared_error(model, {"x": rows.x[group], "y": rows.y[group]}).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_last_partial_step_averages_what_was_accumulated(ranks, clip):
    expected = steps_of([slice(0, 16), slice(16, 32), slice(32, 40)], clip)
    assert_close(train_in_order(8, accumulate=2, clip_grad_norm=clip), expected)
    assert_close(ranks(2, train_in_order, 4, accumulate=2, clip_grad_norm=clip)[0], expected)


@pytest.mark.parametrize("num_rows", [36, 42])
def test_each_row_of_a_step_counts_alike(ranks, num_rows):
    """The last batches of a step may be smaller."""
    expected = train_in_order(16, num_rows)
    assert_close(train_in_order(4, num_rows, accumulate=4), expected)
    assert_close(ranks(2, train_in_order, 4, num_rows, accumulate=2)[1], expected)


class Watched(nn.Module):
    """A model that has running statistics of its input, which do not change its output."""

    def __init__(self, model):
        super().__init__()
        self.model, self.norm = model, nn.BatchNorm1d(3, affine=False).double()

    def forward(self, x):
        self.norm(x)
        return self.model(x)


def train_unevenly(sizes, accumulate):
    """Train with batches of the given sizes on each rank. Return parameters, history and counted batches."""
    rank, rows = World.detect().rank, Rows()
    x, y = (column.chunk(2)[rank].split([*sizes[rank], 20 - sum(sizes[rank])])[:-1] for column in (rows.x, rows.y))
    batches = [{"x": own_x, "y": own_y} for own_x, own_y in zip(x, y, strict=True)]
    model, optimizer = build()
    options = {"epochs": 2, "accumulate": accumulate, "precision": "fp32", "progress": False}
    model = Watched(model)
    history = fit(model, optimizer, batches, squared_error, **options)
    return parameters_of(model), history, model.norm.num_batches_tracked.item()


@pytest.mark.variants
@pytest.mark.parametrize(
    "sizes",
    [
        ([4] * 5, [4] * 3),
        ([4] * 2, [4] * 5),
        ([4] * 5, [2] * 5),  # equally many, but smaller
        ([4, 0, 4, 3], [0, 0, 2, 4, 4]),  # those without rows are passed over
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_may_have_other_batches(ranks, sizes, accumulate):
    """The result is that of one process whose steps have the rows of all ranks."""
    halves = torch.arange(40).chunk(2)
    own = [half.split([*of_rank, 20 - sum(of_rank)])[:-1] for half, of_rank in zip(halves, sizes, strict=True)]
    steps = list(zip_longest(*([batch for batch in batches if len(batch)] for batches in own), fillvalue=halves[0][:0]))
    groups = [torch.cat(list(chain(*steps[i : i + accumulate]))) for i in range(0, len(steps), accumulate)]
    first, second = ranks(2, train_unevenly, sizes, accumulate)
    assert torch.equal(first[0], second[0])
    assert_close(first[0], steps_of(groups))
    assert [record["rows"] for record in first[1]] == [sum(map(sum, sizes))] * 2
    assert first[2] == second[2] == 2 * np.count_nonzero(sizes[0])  # Statistics are those of rank 0, as in DDP.


def test_a_rank_without_any_batch_is_refused_on_all(ranks):
    for error in ranks(2, train_unevenly, ([4] * 3, []), 1):
        assert isinstance(error, ConfigError)
        assert "no batch on ranks [1]" in str(error)


class Columns(NamedTuple):
    x: torch.Tensor
    label: torch.Tensor


class Checked(Columns):
    """A batch whose class validates its columns."""

    __slots__ = ()

    def __new__(cls, x, label):
        assert len(x) == len(label)
        return super().__new__(cls, x, label)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (Checked(torch.zeros(3, 2), torch.zeros(3)), 3),
        (nn.utils.rnn.pack_sequence([torch.zeros(5), torch.zeros(4), torch.zeros(1)]), 3),
        ({"x": torch.zeros(8, 4), "mask": torch.zeros(1, 1, 4, 4)}, 8),
        ({"positions": torch.zeros(4), "x": torch.zeros(8, 4), "label": torch.zeros(8)}, 8),
        (torch.zeros(3, 2), 3),
        ([torch.zeros(3, 2), ["a", "b", "c"]], 3),
        ({"x": {"image": torch.zeros(5, 2), "scale": torch.tensor(1.0)}, "label": torch.zeros(5)}, 5),
        ({"x": {"text": ["a", "b", "c"]}, "of": "train"}, 3),
        ([[torch.zeros(5), torch.zeros(5)], {"label": np.zeros(5)}, "train", 3], 5),
        ({"text": ["a", "b", "c"], "of": None}, 3),
        ({"x": Flat(torch.ones(2), torch.tensor([0, 1, 1, 2])), "label": torch.zeros(3)}, 3),
        ({"boxes": torch.zeros(0, 4), "of": torch.zeros(0), "image": torch.zeros(2, 3, 4, 4)}, 2),  # without any box
        ({"text": ["a", "b", "c"], "boxes": torch.zeros(0, 4)}, 3),
        *[(empty, 0) for empty in ([], {}, {"x": []}, {"x": torch.zeros(0, 3)}, {"x": [], "of": None})],
    ],
)
def test_rows_of_a_batch(batch, rows):
    assert rank_batches.num_rows(batch) == rows


@pytest.mark.parametrize("batch", [object(), "text", None, (None, None), {"x": None}])
def test_a_batch_that_says_nothing_of_its_rows_is_refused(batch):
    with pytest.raises(ConfigError, match=f"rows of a batch of type {type(batch).__name__} cannot be counted"):
        rank_batches.num_rows(batch)


def test_a_batch_that_is_none_loses_no_rows_silently():
    model, optimizer = build()
    batches = [*in_order(20), None]
    with pytest.raises(ConfigError, match="rows of a batch of type NoneType cannot be counted"):
        fit(model, optimizer, batches, squared_error, epochs=1, progress=False)


def synchronised(accumulate):
    model, optimizer = build()
    seen = []

    def loss(model, batch):
        seen.append(model.require_backward_grad_sync)
        return squared_error(model, batch)

    fit(model, optimizer, in_order(4), loss, epochs=1, precision="fp32", accumulate=accumulate, progress=False)
    return seen


def test_gradients_cross_ranks_once_per_step(ranks):
    assert ranks(2, synchronised, 2) == [[False, True, False, True, True]] * 2


def test_scheduler_steps_with_the_optimizer():
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = in_order(8)
    fit(model, optimizer, loader, squared_error, epochs=2, accumulate=2, scheduler=scheduler, progress=False)
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5**6


def test_clipping_sees_unscaled_gradients():
    model = nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loader = DataLoader([{"x": torch.full((3,), 0.5)}] * 4, 4)

    def loss(model, batch):
        return model(batch["x"]).float().mean()

    fit(model, optimizer, loader, loss, epochs=1, precision="fp16", clip_grad_norm=0.25, progress=False)
    assert (model.weight - before).norm().item() == pytest.approx(0.25, rel=1e-3)


# ---- process groups


def group_after_failure(failing_rank):
    """Return the error of fit, its notes, whether a process group is left, and the parameters after another fit."""
    model, optimizer = build()

    def loss(model, batch):
        if World.detect().rank == failing_rank:
            raise CrashError
        return squared_error(model, batch)

    try:
        fit(model, optimizer, in_order(4), loss, epochs=1, precision="fp32", progress=False)
    except Exception as error:
        name, notes = type(error).__name__, error.__notes__
    return name, notes, dist.is_initialized(), train_in_order(4)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_process_group_ends_with_an_exception(ranks, failing_rank):
    results = ranks(2, group_after_failure, failing_rank)
    # A collective of the other rank fails, because its peer is lost.
    assert [name for name, *_ in results] == [
        "CrashError" if rank == failing_rank else "RuntimeError" for rank in (0, 1)
    ]
    for rank, (_, notes, left, vector) in enumerate(results):
        assert notes == [f"rank {rank} of 2, epoch 0, step 0"]
        assert not left
        assert_close(vector, train_in_order(8))


def fit_in_a_group_of_ours():
    store = dist.PrefixStore("ours", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])))
    dist.init_process_group("gloo", store=store, rank=World.detect().rank, world_size=2)
    try:
        vector = train_in_order(4)
        return vector, dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_process_group_of_others_stays(ranks):
    for vector, alive in ranks(2, fit_in_a_group_of_ours):
        assert alive
        assert_close(vector, train_in_order(8))


def replicas_at_the_end_of_the_group():
    """Return how many models in DDP are in memory when `fit` ends its process group."""
    found, destroy = [], dist.destroy_process_group

    def count_then_destroy():
        found.append(sum(isinstance(each, DistributedDataParallel) for each in gc.get_objects()))
        destroy()

    dist.destroy_process_group = count_then_destroy
    train_in_order(4)
    return found


def test_the_replica_goes_before_the_group(ranks):
    """Otherwise torch may wait forever: the replica's end waits for a thread that needs the interpreter."""
    assert ranks(2, replicas_at_the_end_of_the_group) == [[0], [0]]


def fit_own_data(fingerprints):
    rank = World.detect().rank
    model, optimizer = build()
    loader = in_order(4, fingerprint=fingerprints[rank])
    fit(model, optimizer, loader, squared_error, epochs=1, progress=False)


def test_ranks_with_different_data_are_refused(ranks):
    for error in ranks(2, fit_own_data, ("abc", "xyz")):
        assert isinstance(error, ConfigError)
        assert "fingerprint: 'abc' on ranks [0]; 'xyz' on ranks [1]" in str(error)
    assert ranks(2, fit_own_data, ("abc", "abc")) == [None, None]


def fit_files_of_this_node(folders):
    model, optimizer = build()
    columns = {"x": ["a", "b", "c"], "y": ["d"]}
    loader = make_loader(folders[World.detect().rank], 4, group=columns, cache=False)
    fit(model, optimizer, loader, squared_error, epochs=1, precision="fp32", progress=False)


def test_nodes_may_have_copies_of_the_data_and_no_other_data(ranks, tmp_path):
    for name, rows in (("here", 8), ("there", 8), ("other", 9)):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(dict.fromkeys("abcd", np.ones(rows))), tmp_path / name / "rows.parquet")
    assert ranks(2, fit_files_of_this_node, (tmp_path / "here", tmp_path / "there")) == [None, None]
    for error in ranks(2, fit_files_of_this_node, (tmp_path / "here", tmp_path / "other")):
        assert isinstance(error, ConfigError)
        assert "ranks do not agree on the dataset's order_key" in str(error)


def scaled(batch, by):
    return {"a": batch["a"] * by}


def fit_map_of_this_rank(folder):
    model, optimizer = build()
    mapped = make_dataset(folder, cache=False).map(functools.partial(scaled, by=World.detect().rank), columns=["a"])
    loader = make_loader(mapped, 4, group={"x": ["a", "b", "c"], "y": ["d"]})
    fit(model, optimizer, loader, squared_error, epochs=1, precision="fp32", progress=False)


def test_ranks_that_map_the_rows_in_other_ways_do_not_train_together(ranks, tmp_path):
    pq.write_table(pa.table(dict.fromkeys("abcd", np.ones(8))), tmp_path / "rows.parquet")
    for error in ranks(2, fit_map_of_this_rank, tmp_path):
        assert "ranks do not agree on the functions of map" in str(error)


def fit_loader_of_this_rank(folder, batch_sizes, options):
    rank = World.detect().rank
    model, optimizer = build()
    columns = {"x": ["a", "b", "c"], "y": ["d"]}
    loader = make_loader(folder, batch_sizes[rank], group=columns, cache=False, **options[rank])
    fit(model, optimizer, loader, squared_error, epochs=1, precision="fp32", progress=False)


@pytest.mark.parametrize(
    ("batch_sizes", "options", "what"),
    [
        ((4, 2), ({}, {}), "batch_size and drop_last"),
        ((4, 4), ({"seed": 1}, {"seed": 2}), "the shuffle"),
        ((4, 4), ({}, {"shuffle": False}), "the shuffle"),
        ((4, 4), ({}, {"drop_last": True}), "batch_size and drop_last"),
    ],
)
def test_ranks_whose_loaders_share_rows_in_other_ways_do_not_train_together(
    ranks, tmp_path, batch_sizes, options, what
):
    """Rows would come twice or never."""
    pq.write_table(pa.table(dict.fromkeys("abcd", np.ones(96))), tmp_path / "rows.parquet")
    for error in ranks(2, fit_loader_of_this_rank, tmp_path, batch_sizes, options):
        assert isinstance(error, ConfigError)
        assert f"ranks do not agree on {what} of the loader" in str(error)


def fit_sparse():
    torch.manual_seed(1)
    model = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [torch.tensor([World.detect().rank])] * 2
    fit(model, optimizer, batches, lambda model, batch: model(batch).sum(), epochs=1, precision="fp32", progress=False)
    return model.weight.detach()


def test_sparse_gradients(ranks):
    torch.manual_seed(1)
    expected = nn.Embedding(8, 2).weight.detach()
    expected[:2] -= 2 * 0.1 / 2
    for weight in ranks(2, fit_sparse):
        torch.testing.assert_close(weight, expected)


def fit_counting_waits():
    model, optimizer = build()
    loader = Remembering({"hits": 3, "waits": {"disk": 1.0}, "waits_by_source": {"a": 2.0}})
    return fit(model, optimizer, loader, squared_error, epochs=1, progress=False)[0]


def test_waits_are_those_of_one_process(ranks):
    """As the seconds beside them are."""
    for record in ranks(2, fit_counting_waits):
        assert (record["hits"], record["waits.disk"], record["waits_by_source.a"]) == (6, 1.0, 2.0)


def fit_mixture(folder, weights):
    rank = World.detect().rank
    mixture = mix([folder, folder], weights[rank], num_rows=16, cache=False)
    model, optimizer = build()
    loader = make_loader(mixture, 4, group={"x": ["a", "b", "c"], "y": ["d"]})
    fit(model, optimizer, loader, squared_error, epochs=1, precision="fp32", progress=False)


def test_ranks_with_different_weights_are_refused(ranks, tmp_path):
    pq.write_table(pa.table(dict.fromkeys("abcd", np.ones(8))), tmp_path / "rows.parquet")
    for error in ranks(2, fit_mixture, str(tmp_path), ([1, 1], [1, 2])):
        assert isinstance(error, ConfigError)
        assert "the weights of the mixture: (1, 1) on ranks [0]; (1, 2) on ranks [1]" in str(error)
    assert ranks(2, fit_mixture, str(tmp_path), ([1, 1], [2, 2])) == [None, None]


@pytest.mark.parametrize(
    ("gpus", "world", "requested", "own"),
    [
        (0, World(0, 1, 0, 1), None, "cpu"),
        (4, World(5, 8, 1, 4), None, "cuda:1"),
        (4, World(5, 8), "cuda:2", "cuda:2"),
        (1, World(5, 8, 3, 4), "cuda", "cuda:0"),  # the launcher shows each rank its own
        (1, World(5, 8), None, "cuda:0"),
        (4, World(), None, "cuda:0"),
    ],
)
def test_each_rank_has_a_device_of_its_own(monkeypatch, gpus, world, requested, own):
    chosen = with_gpus(monkeypatch, gpus)
    assert device_of(world, requested) == torch.device(own)
    assert chosen == [torch.device(own)] * (own != "cpu")


@pytest.mark.parametrize(
    ("gpus", "world", "requested", "message"),
    [
        (4, World(5, 8), None, "rank 5 of 8 cannot tell which of the 4 GPUs here is its own"),
        (4, World(5, 8), "cuda", "LOCAL_RANK, or pass device='cuda:N'"),
        (0, World(), "cuda", "device='cuda': torch finds no GPU here"),
        (0, World(), "cuda:1", "device='cuda:1': torch finds no GPU here"),
    ],
)
def test_an_ambiguous_or_missing_gpu_is_an_error(monkeypatch, gpus, world, requested, message):
    chosen = with_gpus(monkeypatch, gpus)
    with pytest.raises(ConfigError, match=message):
        device_of(world, requested)
    assert not chosen


def with_gpus(monkeypatch, number):
    """Pretend that there are `number` GPUs. Return a list that collects the devices that are set."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def seen_by_hooks(accumulate):
    """Return how often hooks of each kind ran with a tensor."""
    model, optimizer = build()
    calls = Counter()

    def saw(kind):
        def hook(module, *values):
            assert isinstance(values[0][0], torch.Tensor)
            calls[kind] += 1

        return hook

    model.register_forward_pre_hook(saw("before"))
    model.register_forward_hook(saw("after"))
    model[0].register_forward_hook(saw("layer"))
    model[3].register_full_backward_hook(saw("backward"))
    everywhere = nn.modules.module.register_module_forward_pre_hook(saw("any module"))
    try:
        options = {"precision": "fp32", "accumulate": accumulate, "progress": False}
        fit(model, optimizer, in_order(4), squared_error, epochs=2, **options)
    finally:
        everywhere.remove()
    return calls


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_of_modules_see_batches_alone(ranks, accumulate):
    calls = dict.fromkeys(("before", "after", "layer", "backward"), 10)
    assert ranks(2, seen_by_hooks, accumulate) == [{**calls, "any module": 10 * (5 + 1)}] * 2  # DDP is one


class Writing(nn.Module):
    """A model that writes its rank into a buffer, and collects the previous values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        self.register_buffer("rank", torch.tensor(7))
        self.found = []

    def forward(self, x):
        self.found.append(self.rank.item())
        self.rank.fill_(World.detect().rank)
        return self.layer(x)


def buffers_found():
    model = Writing()
    fit(model, torch.optim.SGD(model.parameters(), 0.1), in_order(4), squared_error, epochs=1, progress=False)
    return model.found


def test_each_step_begins_with_the_buffers_of_rank_0(ranks):
    assert ranks(2, buffers_found) == [[7, 0, 0, 0, 0]] * 2


def buffers_found_that_ddp_ignores(folder):
    """Return the buffers that the steps of two epochs find, and the last one."""
    model = Writing()
    model._ddp_params_and_buffers_to_ignore = ["rank"]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    options = {"epochs": 2, "checkpoint_dir": folder, "checkpoint_every": 2, "progress": False}
    fit(model, optimizer, Remembering({}), squared_error, **options)
    return model.found, model.rank.item()


def test_a_buffer_that_ddp_ignores_stays_that_of_each_rank(ranks, tmp_path):
    """Checkpoints have that of one rank."""
    for folder in (None, tmp_path):
        assert ranks(2, buffers_found_that_ddp_ignores, folder) == [([7, *[rank] * 9], rank) for rank in (0, 1)]


# ---- loaders and history


class Clock:
    """A clock that tests move by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_history_counts_rows_time_and_waits(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rank_batches, "perf_counter", clock)
    monkeypatch.setattr(epoch_metrics, "perf_counter", clock)

    class Slow:
        def __iter__(self):
            for batch in DataLoader(Rows(10), 4):
                clock.now += 1
                yield batch

    def loss(model, batch):
        clock.now += 3
        return squared_error(model, batch), {"size": float(len(batch["x"])), "twice": torch.tensor(2.0)}

    model, optimizer = build()
    (record,) = fit(
        model,
        optimizer,
        Slow(),
        loss,
        epochs=1,
        evaluate=lambda model: {"mode": model.training, "rows": 7},
        progress=False,
    )
    assert record == {
        "epoch": 0,
        "loss": record["loss"],
        "size": (4 * 4 + 4 * 4 + 2 * 2) / 10,
        "twice": 2.0,
        "rows": 10,
        "seconds": 12.0,
        "rows_per_second": 10 / 12,
        "wait_seconds": 3.0,
        "stall_fraction": 0.25,
        "mode": 0.0,
        "evaluate.rows": 7.0,
    }


def losses_by_rank():
    model, optimizer = build()
    rank, steps = World.detect().rank, []

    def loss(model, batch):
        steps.append(len(steps))
        own = {"double": 2 * rank, f"of {rank}": 5.0} | ({"at first": 3.0 + rank} if steps == [0] else {})
        return squared_error(model, batch) * 0 + rank, own

    (record,) = fit(model, optimizer, in_order(4), loss, epochs=1, precision="fp32", progress=False)
    return {name: record[name] for name in ("loss", "double", "of 0", "of 1", "at first", "rows")}


def test_history_averages_over_what_ranks_log(ranks):
    expected = {"loss": 0.5, "double": 1.0, "of 0": 5.0, "of 1": 5.0, "at first": 3.5, "rows": 40}
    assert ranks(2, losses_by_rank) == [expected] * 2


def logging_as(name, at=0):
    """Return the dict of an epoch in which step `at` logs a scalar of this name, and the number of steps."""
    model, optimizer = build()
    steps = count()

    def loss(model, batch):
        return squared_error(model, batch), {name: 0.5} if next(steps) == at else {}

    loader = Remembering({"hits": 3, "waits": {"disk": 1.0}})
    try:
        return fit(model, optimizer, loader, loss, epochs=1, progress=False)[0], next(steps)
    except ConfigError as error:
        return str(error), next(steps)


@pytest.mark.parametrize(
    "name",
    ["epoch", "loss", "rows", "seconds", "wait_seconds", "skipped_steps", "rows_per_second", "hits", "waits.disk"],
)
def test_a_scalar_with_the_name_of_a_figure_is_refused(name):
    """The error comes in the first step that logs it."""
    message, steps = logging_as(name, at=2)
    assert f"loss_fn logs {name!r}" in message
    assert (
        "Reserved names are epoch, hits, loss, rows, rows_per_second, seconds, skipped_steps, stall_fraction" in message
    )
    assert steps == 3


def test_a_scalar_with_a_name_of_its_own_is_logged():
    record, _ = logging_as("misses")
    assert record.pop("misses") == 0.5
    assert record.keys() <= epoch_metrics.reserved_names(Remembering({"hits": 3, "waits": {"disk": 1.0}}))


def test_the_place_of_a_loader_is_no_figure(tmp_path):
    pq.write_table(pa.table({"x": np.ones((8, 3)).tolist(), "y": np.ones(8)}), tmp_path / "x.parquet")
    loader = make_loader(str(tmp_path), 4, cache=False)
    model = nn.Linear(3, 1)

    def loss(model, batch):
        return model(torch.stack(batch["x"]).float()).mean(), {"rank": 3.0}  # a usual name of a metric of retrieval

    (record,) = fit(model, torch.optim.SGD(model.parameters(), 0.1), loader, loss, epochs=1, progress=False)
    assert record["rank"] == 3
    assert "world_size" not in record


class Listed(Mapping):
    """A mapping whose keys are a list, and that has no truth value."""

    def __init__(self, **values):
        self.values = values

    def __getitem__(self, name):
        return self.values[name]

    def __iter__(self):
        raise TypeError("rows are not iterated")

    def __len__(self):
        return len(self.values)

    def __bool__(self):
        raise ValueError("ambiguous")

    def keys(self):
        return list(self.values)


def test_scalars_are_any_mapping():
    model, optimizer = build()

    def loss(model, batch):
        return squared_error(model, batch), Listed(misses=0.5)

    (record,) = fit(model, optimizer, in_order(20), loss, epochs=1, progress=False)
    assert record["misses"] == 0.5


def test_a_scalar_of_several_elements_is_refused_in_the_first_step():
    model, optimizer = build()
    steps = count()

    def loss(model, batch):
        next(steps)
        return squared_error(model, batch), {"misses": torch.ones(1), "per_class": torch.ones(3)}

    with pytest.raises(ConfigError, match=r"loss_fn returned 'per_class' of shape \(3,\): return one number"):
        fit(model, optimizer, in_order(4), loss, epochs=1, progress=False)
    assert next(steps) == 1


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (lambda loss: loss.item(), "float"),
        (lambda _: None, "NoneType"),
        (lambda loss: {"loss": loss}, "dict"),
        (lambda loss: [loss, {}], "list"),
        (lambda loss: ({"half": 0.5}, loss), "(dict, Tensor of shape ())"),
        (lambda loss: (loss, 0.5), "(Tensor of shape (), float)"),
        (lambda loss: (loss,), "(Tensor of shape (),)"),
        (lambda loss: loss.expand(3), "Tensor of shape (3,)"),
    ],
)
def test_a_loss_of_another_form_is_refused(result, kind):
    model, optimizer = build()

    def loss(model, batch):
        return result(squared_error(model, batch))

    message = re.escape(f"loss_fn returned {kind}: return the mean loss as a tensor with one element, or")
    with pytest.raises(ConfigError, match=message):
        fit(model, optimizer, in_order(20), loss, epochs=1, progress=False)
    with pytest.raises(ConfigError, match=message):
        find_batch_size(model, optimizer, next(iter(in_order(20))), loss)


class Remembering:
    """A loader with set_epoch, state and stats that records its calls."""

    def __init__(self, traffic):
        self.traffic = traffic
        self.calls = []
        self.dataset = SimpleNamespace(fingerprint="f")

    def __iter__(self):
        self.calls.append("iter")
        return iter(DataLoader(Rows(), 8))

    def set_epoch(self, epoch):
        self.calls.append(epoch)

    def stats(self):
        return self.traffic

    def state_dict(self):
        return {"epoch": np.int64(len(self.calls)), "fingerprint": "f"}

    def load_state_dict(self, state):
        self.calls.append(state)


@pytest.mark.parametrize(
    "traffic", [{"hits": 3, "bytes_origin": np.float64(7)}, SimpleNamespace(hits=3, bytes_origin=7)]
)
def test_loader_gets_its_epoch_and_its_state(tmp_path, traffic):
    first, second = Remembering(traffic), Remembering(traffic)
    for loader, epochs in ((first, 2), (second, 3)):
        model, optimizer = build()
        history = fit(model, optimizer, loader, squared_error, epochs=epochs, checkpoint_dir=tmp_path, progress=False)
    assert first.calls == [0, "iter", 1, "iter"]
    assert second.calls == [{"epoch": 4, "fingerprint": "f"}, 2, "iter"]
    assert [(record["hits"], record["bytes_origin"]) for record in history] == [(3, 7)] * 3
    assert "misses" not in history[0]


@pytest.mark.parametrize("in_batches", [False, True])
def test_each_epoch_has_an_order_of_its_own(in_batches):
    sampler = DistributedSampler(Rows(), 1, 0)
    options = {"sampler": sampler, "batch_size": 8}
    if in_batches:
        options = {"batch_sampler": BatchSampler(**options, drop_last=False)}
    model, optimizer = build()
    rows = []

    def loss(model, batch):
        rows.extend(batch["name"])
        return squared_error(model, batch)

    fit(model, optimizer, DataLoader(Rows(), **options), loss, epochs=2, progress=False)
    assert sorted(rows[:40]) == sorted(rows[40:])
    assert rows[:40] != rows[40:]


def test_a_streaming_dataset_of_hugging_face_has_another_order_in_each_epoch():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"number": range(40)}).to_iterable_dataset().shuffle(0, buffer_size=40)
    model, rows = nn.Linear(1, 1), []

    def loss(model, batch):
        rows.extend(batch["number"].tolist())
        return model(batch["number"].float()[:, None]).mean()

    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    fit(model, optimizer, DataLoader(stream, 8), loss, epochs=2, progress=False)
    assert sorted(rows[:40]) == sorted(rows[40:]) == list(range(40))
    assert rows[:40] != rows[40:]


@pytest.mark.parametrize(("precision", "dtype"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_batches_keep_their_strings_and_the_default_precision_is_that_of_the_device(precision, dtype):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []

    def loss(model, batch):
        guess = model(batch["x"].float())
        seen.append((batch["name"][0], guess.dtype))
        return guess.float().mean()

    default = {} if precision == "auto" else {"precision": precision}
    fit(model, optimizer, in_order(40), loss, epochs=1, progress=False, **default)
    assert seen == [("row 0", dtype)]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_evaluation_has_the_precision_of_the_training(precision, dtype):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []

    def evaluate(model):
        seen.append(model(torch.ones(1, 3)).dtype)
        return {}

    options = {"epochs": 1, "progress": False, "precision": precision, "evaluate": evaluate}
    fit(model, optimizer, in_order(40), lambda model, batch: model(batch["x"].float()).float().mean(), **options)
    assert seen == [dtype]


def test_an_evaluation_may_change_the_weights_in_place():
    """As it does for a moving average of them."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scores = []

    def evaluate(model):
        for factor in (1, 0):
            model.load_state_dict({name: factor * each for name, each in model.state_dict().items()})
            scores.append(model(torch.ones(1, 3)).item())
        return {}

    options = {"epochs": 1, "progress": False, "precision": "bf16", "evaluate": evaluate}
    fit(model, optimizer, in_order(40), lambda model, batch: model(batch["x"].float()).float().mean(), **options)
    assert scores[0] != scores[1] == 0


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp32")])
def test_automatic_precision_is_bf16_on_gpus_that_have_it(monkeypatch, native, precision):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    model, optimizer = build()
    assert OptimizerStep(Exchange(model), optimizer, squared_error, torch.device("cuda"), "auto").precision == precision


def test_batches_may_be_tuples():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader([(torch.ones(3), i) for i in range(6)], 4)

    def loss(model, batch):
        return model(batch[0]).mean() * batch[1].float().mean()

    (record,) = fit(model, optimizer, loader, loss, epochs=1, progress=False)
    assert record["rows"] == 6


def test_progress_off_a_terminal_is_one_plain_line_an_epoch(capsys):
    model, optimizer = build()
    fit(model, optimizer, in_order(1), squared_error, epochs=2)
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert re.fullmatch(r"epoch 0 of 2: loss [\d.e+-]+; 40 rows in .+ \([\d,]+ rows/s\), \d+% of it waiting", first)
    assert second.startswith("epoch 1 of 2: loss ")
    assert err.replace("\n", "").isprintable()
    fit(model, optimizer, in_order(1), squared_error, epochs=1, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_resumed_run_says_where_it_begins(capsys, tmp_path):
    for epochs in (1, 2):
        model, optimizer = build()
        fit(model, optimizer, in_order(1), squared_error, epochs=epochs, checkpoint_dir=tmp_path / "run")
    assert capsys.readouterr().err.splitlines()[1] == "resumed after step 40, in epoch 1 of 2"


def test_without_progress_the_line_of_an_epoch_is_in_the_log(caplog):
    model, optimizer = build()

    def loss(model, batch):
        return squared_error(model, batch), {"error": 0.25}

    options = {"evaluate": lambda _: {"accuracy": 0.75, "loss": 2.0}, "progress": False}
    with caplog.at_level("INFO", "dataload.train.loop"):
        [record] = fit(model, optimizer, in_order(1), loss, epochs=1, **options)
    [line] = [line for line in caplog.messages if line.startswith("epoch ")]
    assert line.startswith(
        f"epoch 0 of 1: loss {record['loss']:.4g}, error 0.25, accuracy 0.75, evaluate.loss 2; 40 rows in "
    )


def test_the_line_of_an_epoch_names_trouble_and_no_counts():
    record = {"epoch": 3, "loss": 0.5, "rows": 1000, "seconds": 10.0, "wait_seconds": 1.0, "rows_per_second": 100.0}
    record |= {"stall_fraction": 0.1, "hits": 7, "straggler": 2, "straggler_seconds": 4.0, "skipped_steps": 1}
    assert epoch_metrics.line_of(record, {*epoch_metrics.FIGURES, "hits"}).split("; ") == [
        *("loss 0.5", "1,000 rows in 10 s (100 rows/s), 10% of it waiting"),
        *("rank 2 held the others up for 4.0 s", "1 step skipped"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is not one of auto, fp32, bf16, fp16"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"accumulate": 7.5}, "accumulate=7.5 must be a whole number of at least 1"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm=-1.0"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm=nan"),
        ({"log_every": 0}, "log_every=0"),
        ({"epochs": "2"}, "epochs='2' must be a whole number"),
        ({"scheduler": len}, r"has no step\(\)"),
        ({"scheduler": ReduceLROnPlateau(build()[1])}, "ReduceLROnPlateau follows a metric"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1"),
        ({"epoch": 3}, r"epoch= is unknown: did you mean 'epochs'\?"),
        ({"zzz": 3}, "zzz= is unknown: it is not an argument of fit"),
        ({"loader": []}, "the loader gave no batch"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options, message):
    model, optimizer = build()
    with pytest.raises(ConfigError, match=message):
        fit(model, optimizer, options.pop("loader", in_order(8)), squared_error, **{"epochs": 1, **options})


def test_checkpoints_without_a_folder_are_warned_of(tmp_path, caplog):
    pq.write_table(pa.table({"x": torch.randn(8).tolist(), "y": [0.0] * 8}), tmp_path / "rows.parquet")
    loader = make_loader(tmp_path / "rows.parquet", 4, cache=False)
    model = torch.nn.Linear(1, 1)

    def loss(model, batch):
        return model(batch["x"].float().unsqueeze(1)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(model, optimizer, loader, loss, epochs=1, checkpoint_every=3, progress=False)
    assert "checkpoint_every=3 saves nothing without a checkpoint_dir" in caplog.text
