"""evaluate_over and find_batch_size, on one rank and on several."""

from __future__ import annotations

import gc
import os
import random
from contextlib import contextmanager, nullcontext
from itertools import count, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from regression import Rows, parameters_of, squared_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from dataload.dataset import make_dataset
from dataload.errors import ConfigError
from dataload.loader import make_loader
from dataload.rows.collate import Flat
from dataload.samplers import ShardedSampler
from dataload.train import batch_size, evaluate_over, evaluation, find_batch_size, fit, rank_batches
from dataload.train.checkpoint.state import all_equal, host_copy, rng_state
from dataload.train.ranks.process_group import process_group
from dataload.world import World

N = 301


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    large = np.random.default_rng(0).integers(1 << 55, size=N)  # float64 would lose their last bits
    table = pa.table({"row_id": np.arange(N), "large": large, "x": np.random.default_rng(1).normal(size=N)})
    pq.write_table(table, path / "a.parquet", row_group_size=40)
    return str(path)


def metrics(model, batch):
    assert not model.training
    assert not torch.is_grad_enabled()
    return {
        "large": batch["large"],
        "odd": batch["row_id"] % 2 == 1,
        "x": model(batch["x"][:, None].float()).squeeze(1),
    }


def evaluated(folder, batch_size, cursor=0, **options):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    world = World.detect()
    with process_group(world, torch.device("cpu")):
        loader = make_loader(make_dataset(folder, cache=False), batch_size, **options)
        if cursor:
            loader.load_state_dict({**loader.state_dict(), "cursor": cursor})
        found = evaluate_over(model, loader, metrics)
    assert model.training
    return found


def refusing(batch):
    if 7 in batch["row_id"] or 300 in batch["row_id"]:
        raise ValueError("a bad row")
    return batch


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"batch_size": 64}, {"shuffle": False}])
def test_rows_that_stand_in_for_rows_that_raised_do_not_count(folder, options):
    found = evaluated(folder, **{"batch_size": 5, "on_error": "skip", "transform": refusing, **options})
    good = pq.read_table(folder).filter(~pc.is_in(pc.field("row_id"), pa.array([7, 300])))
    assert found["rows"] == N - 2
    assert found["odd"] == pc.mean(pc.bit_wise_and(good["row_id"], 1)).as_py()
    assert found["large"] == sum(good["large"].to_pylist()) / (N - 2)


def test_they_do_not_count_on_several_ranks(folder, ranks):
    for found in ranks(2, evaluated, folder, 16, on_error="skip", transform=refusing):
        assert found["rows"] == N - 2


def evaluated_outside_of_fit(folder, batch_size):
    loader = make_loader(make_dataset(folder, cache=False), batch_size)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    found = [evaluate_over(model, loader, metrics) for _ in range(2)]
    assert not dist.is_initialized()
    whole = make_loader(make_dataset(folder, cache=False), batch_size, world=World())
    if World.detect().rank == 0:  # The other ranks have no part in it.
        found.append(evaluate_over(model, whole, metrics))
    return found


def test_ranks_evaluate_together_without_a_process_group_of_the_caller(ranks, folder):
    single = evaluated(folder, 16)
    for found in ranks(2, evaluated_outside_of_fit, folder, 16):
        assert [(each["rows"], each["large"]) for each in found] == [(N, single["large"])] * len(found)


def evaluated_without_a_launcher(folder, meeting):
    world = World.detect()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    loader = make_loader(folder, 16, cache=False, world=World(world.rank, world.world_size))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=world.rank, world_size=world.world_size)
    torch.manual_seed(0)
    found = evaluate_over(nn.Linear(1, 1), loader, metrics)
    dist.destroy_process_group()
    return found


def test_ranks_that_no_launcher_started_evaluate_over_their_process_group(ranks, folder, tmp_path):
    single = evaluated(folder, 16)
    for found in ranks(2, evaluated_without_a_launcher, folder, tmp_path / "meeting"):
        assert (found["rows"], found["large"]) == (N, single["large"])


def test_a_rank_without_a_process_group_of_the_others_is_an_error(folder):
    """Otherwise it would evaluate over its own rows, and train a model of its own."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own = make_loader(folder, 16, cache=False, world=World(0, 2))
    sampler = DistributedSampler(range(8), 2, 0)
    plain = DataLoader(range(8), 2, sampler=sampler)
    in_batches = DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    for loader in (own, plain, in_batches):
        with pytest.raises(ConfigError, match=r"one of 2 ranks, .* call torch\.distributed\.init_process_group"):
            evaluate_over(model, loader, metrics)
        with pytest.raises(ConfigError, match=r"one of 2 ranks, .* start them with torchrun"):
            fit(model, optimizer, loader, squared_error, epochs=1, progress=False)


@pytest.mark.variants
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_count_as_one_process_does(ranks, folder, shuffle):
    table = pq.read_table(folder)
    single = evaluated(folder, 16, shuffle=shuffle)
    assert single["rows"] == N
    assert single["odd"] == 150 / N
    assert single["large"] == sum(table["large"].to_pylist()) / N
    for number in (2, 4):
        for found in ranks(number, evaluated, folder, 16, shuffle=shuffle):
            assert {**found, "x": None} == {**single, "x": None}
            assert found["x"] == pytest.approx(single["x"], rel=1e-12)


def test_what_is_left_of_an_epoch(ranks, folder):
    """Two ranks share the rest without padding, but the next epoch with padding."""
    for found in ranks(2, evaluated, folder, 16, cursor=65, shuffle=False):
        assert (found["rows"], found["odd"]) == (N - 65, 118 / (N - 65))


def evaluated_twice(folder, cursor):
    with process_group(World.detect(), torch.device("cpu")):
        loader = make_loader(folder, 16, cache=False, shuffle=False)
        loader.load_state_dict({**loader.state_dict(), "cursor": cursor})
        return [evaluate_over(nn.Linear(1, 1), loader, metrics)["rows"] for _ in range(2)]


def test_the_epoch_after_a_resumed_one_has_padding_of_its_own(ranks, folder):
    assert ranks(2, evaluated_twice, folder, 65) == [[N - 65, N]] * 2


def of_few_rows(path):
    with process_group(World.detect(), torch.device("cpu")):
        loader = make_loader(path, 4, shuffle=False, row_ids=True, cache=False)
        batches, size, padding = list(loader), len(loader), loader.padding
        again = make_loader(path, 4, shuffle=False, cache=False)
        found = evaluate_over(nn.Identity(), again, lambda model, batch: {"x": batch["x"]})
    return [batch["row_id"].tolist() for batch in batches], size, padding, found


def test_fewer_rows_than_ranks(ranks, tmp_path):
    pq.write_table(pa.table({"x": [5, 9]}), tmp_path / "a.parquet")
    answers = ranks(3, of_few_rows, str(tmp_path))
    assert [rows for rows, *_ in answers[:2]] == [[[0]], [[1]]]
    assert all(len(row) == 1 and row[0] in range(2) for (row,), *_ in answers)
    assert [size for _, size, *_ in answers] == [1] * 3
    assert [padding for *_, padding, _ in answers] == [0, 0, 1]
    assert [found for *_, found in answers] == [{"x": 7.0, "rows": 2}] * 3


def of_kept_rows(path, least):
    """Evaluate over three rows on two ranks, without those whose x is less than `least`."""

    def keep(batch):
        return {"x": batch["x"][batch["x"] >= least]}

    with process_group(World.detect(), torch.device("cpu")):
        loader = make_loader(path, 4, shuffle=False, cache=False, transform=keep)
        return evaluate_over(nn.Identity(), loader, lambda model, batch: {"x": batch["x"]})


def test_a_transform_that_drops_rows_beside_rows_that_repeat_others(ranks, tmp_path):
    """It may have dropped the row that repeats another one, so it is unknown which one to leave out."""
    pq.write_table(pa.table({"x": [1, 2, 6]}), tmp_path / "a.parquet")
    assert ranks(2, of_kept_rows, str(tmp_path), 0) == [{"x": 3.0, "rows": 3}] * 2
    for error in ranks(2, of_kept_rows, str(tmp_path), 2):
        assert "changes the number of rows" in str(error)


def unevenly(batches, make_model=nn.Identity):
    with process_group(World.detect(), torch.device("cpu")):
        own = [torch.ones(4, 1)] * batches[World.detect().rank]
        return evaluate_over(make_model(), own, lambda model, batch: {"x": model(batch)[:, 0] * 3})


def test_ranks_may_have_more_or_nothing(ranks):
    assert ranks(2, unevenly, (3, 1)) == [{"x": 3.0, "rows": 16}] * 2
    assert ranks(2, unevenly, (0, 1)) == [{"x": 3.0, "rows": 4}] * 2
    assert all("no rows" in str(error) for error in ranks(2, unevenly, (0, 0)))


def with_buffers_of_this_rank():
    model = DistributedDataParallel(nn.BatchNorm1d(1, eps=0))
    model.module.running_mean.fill_(World.detect().rank - 1)
    return model


@pytest.mark.parametrize("batches", [(3, 1), (0, 1), (1, 0)])
def test_ranks_evaluate_with_the_buffers_of_the_first_one(ranks, batches):
    """DDP would wait for the first forward of a rank that has no batch."""
    found = ranks(2, unevenly, batches, with_buffers_of_this_rank)
    assert found == [{"x": 6.0, "rows": 4 * sum(batches)}] * 2


def own_buffer():
    """Return a buffer that DDP ignores, after an evaluation."""
    with process_group(World.detect(), torch.device("cpu")):
        model = nn.BatchNorm1d(1)
        model.register_buffer("own", torch.tensor(float(World.detect().rank)))
        model._ddp_params_and_buffers_to_ignore = ["own"]
        batches = [torch.ones(4, 1)]
        # DDP is freed before its group ends: torch may otherwise wait forever.
        evaluate_over(DistributedDataParallel(model), batches, lambda model, batch: {"x": model(batch)[:, 0]})
        return model.own.item()


def test_a_buffer_that_ddp_ignores_stays_that_of_each_rank(ranks):
    assert ranks(2, own_buffer) == [0.0, 1.0]


def with_the_sampler_of_torch(rows, batch_size=2, drop_last=False, in_batches=False):
    """Evaluate over a DataLoader of torch, whose sampler repeats rows until each rank has as many."""
    world = World.detect()
    sampler = DistributedSampler(range(rows), world.world_size, world.rank, shuffle=False)
    options = {"sampler": sampler, "batch_size": batch_size, "drop_last": drop_last}
    if in_batches:
        options = {"batch_sampler": BatchSampler(**options)}
    loader = DataLoader(torch.arange(rows), **options)
    return evaluate_over(nn.Identity(), loader, lambda model, batch: {"x": batch})


@pytest.mark.variants
@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_rows_that_the_sampler_of_torch_repeats_do_not_count(ranks, rows, in_batches):
    found = ranks(3, with_the_sampler_of_torch, rows, in_batches=in_batches)
    assert found == [{"x": (rows - 1) / 2, "rows": rows}] * 3


def with_a_sampler_of_batches(rows, batch_size=2, drop_last=False):
    """Evaluate over a DataLoader of torch, whose sampler pads the last global batch."""
    sampler = ShardedSampler([rows], batch_size=batch_size, shuffle=False)
    loader = DataLoader(torch.arange(rows), batch_size, sampler=sampler, drop_last=drop_last)
    return evaluate_over(nn.Identity(), loader, lambda model, batch: {"x": batch})


def test_rows_that_a_sampler_of_this_package_repeats_do_not_count(ranks):
    """Each of 4 ranks has 2 of the last 5 rows: one of the third rank and both of the last one repeat others."""
    assert ranks(4, with_a_sampler_of_batches, 13) == [{"x": 6.0, "rows": 13}] * 4


@pytest.mark.parametrize("evaluate", [with_the_sampler_of_torch, with_a_sampler_of_batches])
def test_a_row_that_repeats_another_one_may_be_in_no_batch(ranks, evaluate):
    """Each rank has 5 of 9 rows, of which the last one, which may be a repeated one, is dropped."""
    assert ranks(2, evaluate, 9, batch_size=4, drop_last=True) == [{"x": 3.5, "rows": 8}] * 2


class Batches(list):
    """Batches whose last `padding` rows repeat other rows."""

    padding = 0


def mean_of(values, size, padding=0):
    batches = Batches(torch.cat([values, values[:padding]]).split(size))
    batches.padding = padding
    return evaluate_over(nn.Identity(), batches, lambda model, batch: {"x": batch})


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_no_last_bit_depends_on_where_batches_end(dtype):
    draw = torch.Generator().manual_seed(0)
    values = (1000 * torch.randn(5 * evaluation.CHUNK - 77, generator=draw, dtype=torch.float64)).to(dtype)
    expected = mean_of(values, len(values))
    assert expected == {"x": pytest.approx(values.double().mean().item(), rel=1e-10), "rows": len(values)}
    for size, padding in ((1000, 0), (1001, 3), (3 * evaluation.CHUNK, 5000), (len(values), 1), (7, 100)):
        assert mean_of(values, size, padding) == expected


def test_values_are_not_kept():
    """The number of values in live tensors does not grow with the number of batches."""
    alive = []

    def metrics(model, batch):
        if next(numbers) in (10, 40):
            alive.append(sum(one.numel() for one in gc.get_objects() if type(one) is torch.Tensor))
        return {"x": batch + 1, "odd": batch % 2 == 1}

    numbers = count()
    found = evaluate_over(nn.Identity(), repeat(torch.arange(10_000), 41), metrics)
    assert found == {"x": 5000.5, "odd": 0.5, "rows": 410_000}
    assert alive[1] - alive[0] < 4 * evaluation.CHUNK


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "metric_fn returned NoneType: return a dict of tensors"),
        (0.5, "metric_fn returned float: return a dict of tensors"),
        (torch.ones(3), "metric_fn returned Tensor: return a dict of tensors"),
        ({"x": 0.5}, "metric 'x' is of type float: give a tensor with one value for each row"),
        ({"x": torch.tensor(1.0)}, r"'x' has shape \(\)"),
        ({"x": torch.ones(3, 1)}, r"'x' has shape \(3, 1\)"),
        ({"x": torch.ones(3), "y": torch.ones(2)}, "unequal numbers of rows"),
        ({"rows": torch.ones(3)}, "a metric named 'rows'"),
    ],
)
def test_metrics_have_one_value_for_each_row(values, message):
    model = nn.Identity().train()
    with pytest.raises(ConfigError, match=message):
        evaluate_over(model, [torch.ones(3)], lambda model, batch: values)
    assert model.training


def test_batches_without_rows_have_no_mean():
    for batches in ([], [torch.empty(0)]):
        with pytest.raises(ConfigError, match="no rows to evaluate on"):
            evaluate_over(nn.Identity(), batches, lambda model, batch: {"x": batch})


# ---- the size of a batch


class Machine(nn.Module):
    """A model on a simulated device: a time for each batch size, and memory for `capacity` rows."""

    def __init__(self, seconds, capacity=10**9):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        self.seconds, self.capacity = seconds, capacity
        self.now = 0.0
        self.sizes = []
        self.full = torch.OutOfMemoryError("full")

    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.capacity:
            raise self.full
        self.now += self.seconds(len(x))
        return self.layer(x)


@contextmanager
def clock_of(model):
    """Time the steps by the clock of the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_size, "perf_counter", lambda: model.now)
        yield


def found(seconds, capacity=10**9, **options):
    """Return the batch size that this rank finds, and the sizes that it tries."""
    rank = World.detect().rank
    model = Machine(
        seconds[rank] if isinstance(seconds, tuple) else seconds,
        capacity[rank] if isinstance(capacity, tuple) else capacity,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before, drawn = parameters_of(model).clone(), torch.get_rng_state()
    batch = {"x": Rows(8).x, "y": Rows(8).y}
    with clock_of(model):
        size = find_batch_size(model, optimizer, batch, squared_error, precision="fp32", **options)
    assert torch.equal(parameters_of(model), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    return size, sorted(set(model.sizes))


def overhead(rows):
    """Return 1 s per step and 10 ms per row: doubling speeds up 64 rows 1.44 times, but 1024 rows 1.046 times."""
    return 1 + rows / 100


def steep(rows):
    """Return 0.5 s per step and 100 ms per row: at 64 rows, almost all time is per row."""
    return 0.5 + rows / 10


def linear(rows):
    return rows / 100


class Mixed(nn.Module):
    """A frozen and a trained batch norm, and a forward that draws from all generators without using the draws."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.frozen = nn.BatchNorm1d(3).eval()
        self.layer = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, x):
        torch.rand(()), random.random(), np.random.rand()  # noqa: NPY002
        return self.layer(self.frozen(x.float()))

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        assert metadata["version"] == self._version
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.variants
@pytest.mark.parametrize("wrong", [None, torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("training", [True, False])
def test_everything_is_restored_also_after_errors(wrong, training):
    torch.manual_seed(0)
    model = Mixed()
    model.layer.train(training)
    optimizer = torch.optim.Adam(model.parameters())
    before = host_copy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "drawn": rng_state()})
    modes = [module.training for module in model.modules()]
    batches = count()

    def loss(model, batch):
        if next(batches) == 8 and wrong is not None:
            raise wrong("as it happens")
        return squared_error(model, batch)

    batch = {"x": Rows(8).x, "y": Rows(8).y}
    with nullcontext() if wrong is not RuntimeError else pytest.raises(RuntimeError, match="as it happens"):
        find_batch_size(model, optimizer, batch, loss, start=4, limit=8, precision="fp32")
    assert next(batches) == (10 if wrong is None else 9)
    after = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "drawn": rng_state()}
    assert all_equal([before, after])
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_stops_when_it_gets_no_faster():
    assert found(overhead) == (1024, [2**i for i in range(12)])
    assert found(overhead, gain=0.4)[0] == 128
    assert found(linear)[0] == 1


def test_it_stops_at_what_fits_and_at_the_limit():
    assert found(overhead, capacity=300) == (256, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    assert found(overhead, start=3, limit=20) == (12, [3, 6, 12])
    with pytest.raises(ConfigError, match="a batch of 8 rows does not fit"):
        found(overhead, capacity=7, start=8)


@pytest.mark.parametrize("text", ["CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "NCCL: out of memory"])
def test_libraries_of_the_gpu_may_find_memory_full(text):
    model = Machine(overhead, capacity=32)
    model.full = RuntimeError(text)
    batch = {"x": Rows(8).x, "y": Rows(8).y}
    with clock_of(model):
        size = find_batch_size(model, torch.optim.SGD(model.parameters(), 0.1), batch, squared_error, precision="fp32")
    assert size == 32


@pytest.mark.parametrize(("start", "limit"), [(0, 8), (-1, 8), (9, 8)])
def test_sizes_that_cannot_be_tried(start, limit):
    with pytest.raises(ConfigError, match=f"start={start} must be from 1 to limit=8"):
        found(overhead, start=start, limit=limit)


class Bulky(torch.Tensor):
    """A tensor of which at most 32 rows fit on the device."""

    def to(self, *args, **kwargs):
        if len(self) > 32:
            raise torch.OutOfMemoryError("full")
        return super().to(*args, **kwargs)


def test_a_batch_that_does_not_even_go_to_the_device_does_not_fit():
    model = Machine(overhead)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = {"x": Rows(8).x.as_subclass(Bulky), "y": Rows(8).y}
    with clock_of(model):
        assert find_batch_size(model, optimizer, batch, squared_error, precision="fp32") == 32


def test_ranks_find_the_same(ranks):
    """The rank with the least memory and the slowest rank decide."""
    assert [size for size, _ in ranks(2, found, overhead, capacity=(300, 70))] == [64, 64]
    assert [size for size, _ in ranks(2, found, (overhead, steep))] == [64, 64]


def test_rows_of_any_kind_are_repeated():
    batch = {"x": torch.arange(3), "name": ["a", "b", "c"], "more": {"y": torch.arange(3)}, "scale": torch.tensor(2.0)}
    larger = batch_size._resize(batch, 5, torch.device("cpu"))
    assert larger["x"].tolist() == [0, 1, 2, 0, 1]
    assert larger["name"] == ["a", "b", "c", "a", "b"]
    assert larger["more"]["y"].tolist() == [0, 1, 2, 0, 1]
    assert batch_size._resize((torch.arange(2), torch.arange(2)), 3, torch.device("cpu"))[1].tolist() == [0, 1, 0]
    assert batch_size._resize(torch.arange(3), 2, torch.device("cpu")).tolist() == [0, 1]


def test_the_default_device_of_torch_is_not_that_of_a_repeated_batch():
    batch = {"x": torch.arange(3)}
    with torch.device("meta"):
        larger = batch_size._resize(batch, 5, torch.device("cpu"))
    assert larger["x"].tolist() == [0, 1, 2, 0, 1]


class Pair(NamedTuple):
    images: Any
    label: Any


@pytest.mark.variants
@pytest.mark.parametrize(
    ("column", "larger"),
    [
        (["a", "b", "c"], ["a", "b", "c", "a", "b"]),
        (["a", None, "c"], ["a", None, "c", "a", None]),
        (np.arange(3), np.array([0, 1, 2, 0, 1])),
        ([torch.ones(2), torch.ones(0), torch.ones(1)], [torch.ones(n) for n in (2, 0, 1, 2, 0)]),
        ({"deep": {"x": torch.arange(3), "of": None}}, {"deep": {"x": torch.tensor([0, 1, 2, 0, 1]), "of": None}}),
        ([torch.arange(3), torch.ones(3)], [torch.tensor([0, 1, 2, 0, 1]), torch.ones(5)]),  # torch's of a pair a row
        (Flat(torch.arange(4), torch.tensor([0, 1, 1, 4])), None),
        *[(other, other) for other in (None, "train", "abc", b"abc", 3, torch.tensor(2.0), ["a", "b"], (), object())],
    ],
)
@pytest.mark.parametrize("shape", [lambda x, y: {"x": x, "label": y}, lambda x, y: [x, y], lambda x, y: (x, y), Pair])
def test_what_fit_takes_is_repeated(column, larger, shape):
    """Columns with one entry for each of the 3 rows are repeated."""
    batch = shape(column, torch.arange(3))
    assert rank_batches.num_rows(batch) == 3
    found = batch_size._resize(batch, 5, torch.device("cpu"))
    assert type(found) is type(batch)
    assert rank_batches.num_rows(found) == 5
    first, label = found.values() if isinstance(found, dict) else found
    assert label.tolist() == [0, 1, 2, 0, 1]
    if isinstance(column, Flat):
        rows = [first.values[start:end].tolist() for start, end in pairwise(first.offsets.tolist())]
        assert rows == [[0], [], [1, 2, 3], [0], []]
    else:
        assert type(first) is type(column)
        assert (
            first is larger or np.array_equal(first, larger) if hasattr(first, "shape") else all_equal([first, larger])
        )


def test_strings_and_none_take_part_in_the_trial():
    model = nn.Linear(3, 1).double()
    seen = []

    def loss(model, batch):
        seen.append((batch["name"], batch["split"], batch["mask"]))
        return squared_error(model, batch)

    batch = {"x": Rows(2).x, "y": Rows(2).y, "name": ["a", "b"], "split": "train", "mask": None}
    assert find_batch_size(model, torch.optim.SGD(model.parameters(), 0.1), batch, loss, start=3, limit=3) == 3
    assert seen == [(["a", "b", "a"], "train", None)] * batch_size.REPEATS


def test_a_batch_without_rows_has_none_to_repeat():
    model = nn.Linear(3, 1)
    with pytest.raises(ConfigError, match="this batch has none"):
        find_batch_size(model, torch.optim.SGD(model.parameters(), 0.1), {"x": torch.zeros(0, 3)}, squared_error)
