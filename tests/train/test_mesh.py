"""Loaders and `fit` on device meshes: data-parallel dimensions beside tensor-parallel ones, FSDP2 and HSDP."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections import Counter
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from ranks import LostError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dataload import World, evaluate_over, find_batch_size, fit, make_dataset, make_loader, mix
from dataload.errors import ConfigError
from dataload.telemetry import stats_log
from dataload.train.ranks.collectives import gather_count
from dataload.train.ranks.sharded import full_tensor

N, BATCH = 332, 6  # rows; of a rank's batch. The global batches of 16 rows have no padding
NEEDS_FSDP = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 on CPUs needs torch 2.7")
DP, HSDP = ("dp", "tp"), ("dp_replicate", "dp_shard", "tp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    x = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)
    table = pa.table({"row_id": np.arange(N), "x": lists, "y": np.sin(x.sum(1))})
    pq.write_table(table, path / "a.parquet", row_group_size=20)
    return str(path)


def mesh_of(shape, names):
    """Start the process group of this rank. Return the whole mesh and that of its data-parallel dimensions."""
    world = World.detect()
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=world.rank, world_size=world.world_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dims = tuple(name for name in names if name != "tp")
    return mesh, mesh[dims if len(dims) > 1 else dims[0]]


def group_ended(function):
    """Call a function; end the process group also after an error."""
    try:
        return function()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# Loaders


def read(folder, shape, names, local_size, state=None, stop=None, batch=BATCH):
    """Return what a rank reads: its world, hashes of its batches, its rows without padding, and its state."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % local_size)

    def run():
        _, mesh = mesh_of(shape, names)
        loader = make_loader(make_dataset(folder, cache=False), batch, mesh=mesh)
        if state is not None:
            loader.load_state_dict(state)
        padding = loader.padding
        batches = list(islice(loader, stop))
        hashes = [hashlib.sha256(each["x"].numpy().tobytes()).hexdigest() for each in batches]
        rows = list(chain(*(each["row_id"].tolist() for each in batches)))
        world = World.from_mesh(mesh)
        return {
            "world": (world.rank, world.world_size, world.num_streams, loader.sampler.node_share),
            "hashes": hashes,
            "padding": padding,
            "rows": rows[: len(rows) - (padding if stop is None else 0)],
            "state": loader.state_dict(),
        }

    return group_ended(run)


def by_rank(answers):
    """Return the answers of one process for each data-parallel rank, once its peers have proved equal to it."""
    peers = {}
    for answer in answers:
        assert isinstance(answer, dict), answer
        peers.setdefault(answer["world"][0], []).append(answer)
    size = len(answers) // len(peers)
    for equals in peers.values():
        assert len(equals) == size
        assert all(answer == equals[0] for answer in equals)
    assert len({str(answer["state"]) for answer in answers}) == 1
    return [peers[rank][0] for rank in sorted(peers)]


@pytest.mark.variants
@pytest.mark.parametrize(
    ("shape", "names", "local_size", "streams", "share"),
    [
        ((4, 2), DP, 4, 2, 1 / 2),  # two nodes
        ((2, 4), ("tp", "dp"), 4, 1, 1),  # both nodes have all data-parallel ranks
        ((2, 2, 2), HSDP, 8, 1, 1),
        pytest.param((8, 1), DP, 8, 1, 1, marks=pytest.mark.slow),
        pytest.param((4, 2), DP, 8, 1, 1, marks=pytest.mark.slow),
        pytest.param((2, 4), DP, 8, 1, 1, marks=pytest.mark.slow),
        pytest.param((4, 2), DP, 1, 4, 1 / 4, marks=pytest.mark.slow),  # eight nodes: two for each data-parallel rank
        pytest.param((2, 2, 2), ("dp_replicate", "tp", "dp_shard"), 4, 2, 1 / 2, marks=pytest.mark.slow),
        ((3, 2), DP, 3, 3, 2 / 3),  # two nodes, each with a data-parallel rank of its own and one of both
    ],
)
def test_peers_get_equal_batches_and_each_row_comes_once(ranks, folder, shape, names, local_size, streams, share):
    found = by_rank(ranks(int(np.prod(shape)), read, folder, shape, names, local_size))
    assert [each["world"] for each in found] == [(rank, len(found), streams, share) for rank in range(len(found))]
    assert Counter(chain(*(each["rows"] for each in found))) == Counter(range(N))
    assert len({tuple(each["hashes"]) for each in found}) == len(found)


def placed(ranks_of_the_mesh, names, local_size):
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % local_size)

    def run():
        world = World.detect()
        dist.init_process_group("gloo", rank=world.rank, world_size=world.world_size)
        return World.from_mesh(DeviceMesh("cpu", ranks_of_the_mesh, mesh_dim_names=names)["dp"])

    return group_ended(run)


def test_a_mesh_that_is_no_grid_is_an_error_on_several_nodes(ranks):
    """Ranks 0 and 1 cannot tell that their peers 3 and 2 are in another order."""
    mesh = [[0, 1], [3, 2]]
    found = ranks(4, placed, mesh, ("tp", "dp"), 2)
    for error in found[2:]:
        assert "ranks [3, 2] of the mesh are not in ascending order" in str(error), error
    found = ranks(4, placed, mesh, ("tp", "dp"), 4)
    assert [(world.rank, world.world_size, world.num_streams) for world in found] == [
        (0, 2, 1),
        (1, 2, 1),
        (1, 2, 1),
        (0, 2, 1),
    ]
    found = ranks(4, placed, [3, 2, 1, 0], ("dp",), 2)  # All ranks see the whole mesh.
    assert [(world.rank, world.num_streams) for world in found] == [(3, 1), (2, 1), (1, 1), (0, 1)]


def test_a_stopped_epoch_continues_with_fewer_data_parallel_ranks(ranks, folder):
    begun = by_rank(ranks(8, read, folder, (4, 2), DP, 8, stop=5))
    state = begun[0]["state"]
    ended = by_rank(ranks(4, read, folder, (2, 2), DP, 4, state=state, batch=2 * BATCH))
    assert len(begun) == 4
    assert len(ended) == 2
    assert Counter(chain(*(each["rows"] for each in [*begun, *ended]))) == Counter(range(N))


def refusals(folder, line):
    def run():
        mesh, dp = mesh_of((2, 2), DP)
        dataset, errors = make_dataset(folder, cache=False), []
        first = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        outside = [{"mesh": first}] if dist.get_rank() > 1 else []
        for options in ({}, {"mesh": mesh}, {"mesh": dp, "world": World()}, *outside):
            try:
                make_loader(dataset, BATCH, **options)
            except ConfigError as error:
                errors.append(str(error))
        assert make_loader(dataset, BATCH, world=World(0, 2)).sampler.num_replicas == 2
        assert make_loader(dataset, BATCH, mesh=dp).sampler.num_replicas == 2
        return errors

    return group_ended(run)


def test_a_mesh_that_is_not_given_or_not_data_parallel(ranks, folder):
    for rank, (detected, whole, both, *outside) in enumerate(ranks(4, refusals, folder, None)):
        assert "the 4 ranks are not all data-parallel" in detected
        assert 'make_loader(..., mesh=mesh["dp"])' in detected
        assert 'pass mesh=mesh["dp"]' in whole
        assert "pass one of them" in both
        assert ["this process is not in" in error for error in outside] == [True] * (rank > 1)


def logged(folder, out, given):
    def run():
        _, dp = mesh_of((2, 2), DP)
        chosen = {"mesh": dp} if given == "mesh" else {"world": World(dist.get_rank() // 2, 2)}
        loader = make_loader(make_dataset(folder, cache=False), BATCH, stats_dir=out, **chosen)
        for _ in range(2):
            dist.barrier()
            list(loader)
        return loader.stats()

    return group_ended(run)


@pytest.mark.parametrize("given", ["mesh", "world"])
def test_peers_write_their_statistics_to_files_of_their_own(ranks, folder, tmp_path, given):
    stats = ranks(4, logged, folder, str(tmp_path), given)
    names = {f"rank-{process // 2}-process-{process}.jsonl" for process in range(4)}
    assert {path.name for path in tmp_path.iterdir()} == {*names, "ledger.jsonl", "ledger.rows"}
    passes = stats_log.read(tmp_path)
    assert [(each.rank, each.world_size, each.stats.rows) for each in passes if each.stats.epoch == 0] == [
        (each.rank, 2, 166) for each in passes if each.stats.epoch == 0
    ]
    assert sorted((each.rank, each.stats.epoch) for each in passes) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank, (one, other) in enumerate((stats[:2], stats[2:])):
        [last] = [each.stats for each in passes if (each.rank, each.stats.epoch) == (rank, 1)]
        assert last.bytes_local == one.bytes_local + other.bytes_local > 0
        assert last.rows == one.rows == other.rows
        assert last.wait_seconds == pytest.approx(max(one.wait_seconds, other.wait_seconds), abs=1e-8)


def numbers_of_ranks(ranks):
    """Return what the ranks of a mesh gather if each sends its own number in the mesh."""

    def run():
        world = World.detect()
        dist.init_process_group("gloo", rank=world.rank, world_size=world.world_size)
        names = ("dp_replicate", "dp_shard")[-np.ndim(ranks) :]
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        return gather_count(World.from_mesh(mesh).rank, mesh)

    return group_ended(run)


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [[2, 3], [0, 1]], [[3, 1], [2, 0]]])
def test_values_come_in_the_order_of_the_mesh(ranks, order):
    assert ranks(4, numbers_of_ranks, order) == [[0, 1, 2, 3]] * 4


# fit


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).sum(1)


def loss_of(model, batch):
    return ((model(batch["x"]) - batch["y"].float()) ** 2).mean()


def error_of(model, batch):
    return {"error": (model(batch["x"]) - batch["y"].float()).abs()}


class Averaged:
    """An evaluation whose state is the moving average of the weights, sharded as they are."""

    def __init__(self, model, loader):
        self.loader = loader
        self.average = {name: each.detach().clone() for name, each in model.named_parameters()}

    def __call__(self, model):
        for name, each in model.named_parameters():
            self.average[name].mul_(0.5).add_(each.detach(), alpha=0.5)
        average = {name: full_tensor(each).sum() for name, each in self.average.items()}
        return {**evaluate_over(model, self.loader, error_of), **average}

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


def gathered():
    """Return whether parameters that two dimensions of a mesh divide are whole again, as scores and averages need."""

    def run():
        torch.manual_seed(0)
        model = Network()
        before = [each.detach().clone() for each in model.parameters()]
        whole, dp = mesh_of((2, 2), DP)
        parallelize_module(model, whole["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(model, mesh=dp)
        return all(map(torch.equal, before, map(full_tensor, model.parameters())))

    return group_ended(run)


@NEEDS_FSDP
def test_parameters_that_two_dimensions_divide_are_whole_again(ranks):
    assert ranks(4, gathered) == [True] * 4


def train(folder, shape=None, names=DP, *, batch=4, accumulate=1, epochs=1, checkpoints=None, dies=None):
    """Train a network. Return the epochs, the loss of each step, the rows and the whole parameters.

    Args:
        folder: The dataset.
        shape: The shape of the mesh; None for DDP over all ranks.
        names: The names of its dimensions.
        batch: Rows of a rank's batch.
        accumulate: Batches of a step.
        epochs: Number of epochs.
        checkpoints: The checkpoint_dir.
        dies: The step at which rank 1 kills itself.
    """
    losses, rows = [], []

    def watched(model, batch):
        if dies == len(losses) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = loss_of(model, batch)
        losses.append(float(loss.detach()))
        rows.append(batch["row_id"].tolist())
        return loss

    def run():
        torch.manual_seed(0)
        model, dp = Network(), None
        whole, dp = mesh_of(shape, names) if shape else (None, None)
        if shape:
            if "tp" in names and whole["tp"].size() > 1:
                plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
                if names == HSDP:  # Then the parameters are on two different meshes.
                    plan = {"first": ColwiseParallel(output_layouts=Replicate())}
                parallelize_module(model, whole["tp"], plan)
            fully_shard(model.first, mesh=dp)
            fully_shard(model, mesh=dp)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        loader = make_loader(make_dataset(folder, cache=False), batch, mesh=dp)
        held_out = make_loader(make_dataset(folder, cache=False), 50, shuffle=False, mesh=dp)
        history = fit(
            model,
            optimizer,
            loader,
            watched,
            epochs=epochs,
            precision="fp32",
            accumulate=accumulate,
            clip_grad_norm=0.5,
            checkpoint_dir=checkpoints,
            checkpoint_every=4 if checkpoints else None,
            evaluate=Averaged(model, held_out),
            progress=False,
        )
        tensors = (each.full_tensor() if shape else each for each in model.parameters())
        return history, losses, rows, torch.cat([each.detach().ravel() for each in tensors])

    return group_ended(run)


@pytest.fixture(scope="module")
def ddp(ranks, folder):
    """What four ranks of DDP return, by `accumulate`."""
    return {accumulate: ranks(4, train, folder, accumulate=accumulate) for accumulate in (1, 3)}


@pytest.mark.variants
@NEEDS_FSDP
@pytest.mark.parametrize(
    ("shape", "names", "accumulate"),
    [
        ((4,), ("dp_shard",), 1),
        ((2, 2), ("dp_replicate", "dp_shard"), 3),
        *(
            pytest.param(shape, names, accumulate, marks=pytest.mark.slow)
            for shape, names, accumulate in [
                ((4,), ("dp_shard",), 3),
                ((2, 2), ("dp_replicate", "dp_shard"), 1),
                *(((4, 2), DP, accumulate) for accumulate in (1, 3)),
                *(((2, 2, 2), HSDP, accumulate) for accumulate in (1, 3)),
            ]
        ),
    ],
)
def test_sharded_models_train_like_ddp(ranks, folder, ddp, shape, names, accumulate):
    every, expected = int(np.prod(shape)), ddp[accumulate]
    found = ranks(every, train, folder, shape, names, accumulate=accumulate)
    errors = [answer for answer in found + expected if isinstance(answer, Exception)]
    assert not errors, errors
    peers = every // 4
    for rank, (history, losses, rows, weights) in enumerate(found):
        theirs = expected[rank // peers]
        assert len(losses) >= 20
        assert rows == theirs[2]
        np.testing.assert_allclose(losses, theirs[1], rtol=0, atol=1e-6)
        for name in ("loss", "error"):
            assert history[0][name] == pytest.approx(theirs[0][0][name], abs=1e-6)
        assert history[0]["rows"] == theirs[0][0]["rows"]
        torch.testing.assert_close(weights, theirs[3], rtol=0, atol=1e-6)


@NEEDS_FSDP
@pytest.mark.parametrize(
    ("shape", "names", "fewer"),
    [
        ((4,), ("dp_shard",), (2,)),
        pytest.param((2, 2), ("dp_replicate", "dp_shard"), (1, 2), marks=pytest.mark.slow),
        pytest.param((2, 2), DP, (1, 2), marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_on_two_ranks(ranks, folder, tmp_path, shape, names, fewer):
    dp = shape[0] if names == DP else 4
    start = {"batch": 16 // dp, "checkpoints": str(tmp_path / "checkpoints")}
    whole = ranks(4, train, folder, shape, names, batch=16 // dp)
    killed = ranks(4, train, folder, shape, names, dies=10, **start)
    assert isinstance(killed[1], LostError)
    assert max(path.name for path in (tmp_path / "checkpoints").glob("checkpoint-*")) == "checkpoint-000002"
    resumed = ranks(2, train, folder, fewer, names, **{**start, "batch": 16 // (1 if names == DP else 2)})
    assert not [answer for answer in resumed if isinstance(answer, Exception)], resumed
    begun = whole[:: 2 if names == DP else 1]
    rows = [step for answer in begun for step in answer[2][:8]] + [
        step for answer in (resumed[:1] if names == DP else resumed) for step in answer[2]
    ]
    assert Counter(chain(*rows)) == Counter(range(N))
    for name in ("loss", "first.weight"):
        assert resumed[0][0][0][name] == pytest.approx(whole[0][0][0][name], abs=1e-5)
    torch.testing.assert_close(resumed[0][3], whole[0][3], rtol=0, atol=1e-5)


class Casts(TorchDispatchMode):
    """Collects the storages of weights of 4 x 4 that autocast casts."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and (made.dtype, made.shape) == (torch.bfloat16, (4, 4)):
            self.storages.append(StorageWeakRef(made.untyped_storage()))
        return made


def casts_of(folder):
    """Return how many weights were cast in a forward, and how many casts were left at its end, for each step."""
    found = []

    def loss(model, batch):
        with Casts() as casts:
            guess = model(batch["x"])
        found.append((len(casts.storages), sum(not storage.expired() for storage in casts.storages)))
        return guess.float().square().mean()

    def run():
        _, mesh = mesh_of((2,), ("dp",))
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loader = make_loader(make_dataset(folder, columns=["x"], cache=False), 60, mesh=mesh)
        options = {"precision": "bf16", "activation_checkpointing": nn.Linear, "progress": False}
        fit(model, torch.optim.SGD(model.parameters(), 0.1), loader, loss, epochs=1, **options)
        return found

    return group_ended(run)


@pytest.mark.slow
@NEEDS_FSDP
def test_casts_of_gathered_weights_are_not_kept(ranks, folder):
    """Otherwise each rank would hold the whole model in bf16. The backward casts again what is recomputed."""
    for steps in ranks(2, casts_of, folder):
        assert len(steps) == 3
        for made, left in steps:
            assert made == 12
            assert left <= 1


class Tied(nn.Module):
    """A model whose output layer has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(4, 3)
        self.second = nn.Linear(3, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def train_tied(folder, checkpoints):
    def run():
        model = Tied()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        loader = make_loader(make_dataset(folder, columns=["row_id"], cache=False), BATCH)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

        def loss(model, batch):
            return model(batch["row_id"] % 4).square().mean()

        for epochs in (1, 2):
            history = fit(
                model,
                optimizer,
                loader,
                loss,
                epochs=epochs,
                checkpoint_dir=checkpoints,
                precision="fp32",
                progress=False,
            )
        return [record["epoch"] for record in history]

    return group_ended(run)


@pytest.mark.slow
@NEEDS_FSDP
def test_a_sharded_model_with_tied_weights_resumes(ranks, folder, tmp_path):
    assert ranks(2, train_tied, folder, tmp_path) == [[0, 1]] * 2


def search_batch_size():
    def run():
        model = Tied()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        find_batch_size(model, optimizer, torch.zeros(1, dtype=torch.long), lambda model, batch: model(batch).mean())

    return group_ended(run)


def search_batch_size_of_ranks_that_wait():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    find_batch_size(model, optimizer, torch.zeros(1, 2), lambda model, batch: model(batch).mean())


def test_the_batch_size_of_ranks_that_wait_for_each_other_is_not_searched(ranks):
    for error in ranks(2, search_batch_size_of_ranks_that_wait):
        assert isinstance(error, ConfigError)
        assert "SyncBatchNorm" in str(error)


@NEEDS_FSDP
def test_the_batch_size_of_a_sharded_model_is_not_searched(ranks):
    for error in ranks(2, search_batch_size):
        assert isinstance(error, ConfigError)
        assert "would hang once the memory of one rank is full" in str(error)


class CrashError(Exception):
    pass


def with_noise(folder, checkpoints=None, crash_at=None):
    """Train on a mesh of 2 x 2. Return the history, a random number of each step, and the loader's stats."""
    draws = []

    def loss(model, batch):
        if crash_at == len(draws):
            raise CrashError
        draws.append(float(torch.rand(())))
        return loss_of(model, batch)

    def run():
        _, dp = mesh_of((2, 2), DP)
        torch.manual_seed(0)
        model, loader = Network(), make_loader(make_dataset(folder, cache=False), 4, mesh=dp)
        torch.manual_seed(dist.get_rank())
        options = {"checkpoint_dir": checkpoints, "checkpoint_every": checkpoints and 4, "progress": False}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        history = fit(model, optimizer, loader, loss, epochs=1, precision="fp32", **options)
        return history, draws, loader.stats()

    return group_ended(run)


@pytest.mark.slow
def test_the_traffic_and_the_generators_of_peers_count(ranks, folder, tmp_path):
    whole = ranks(4, with_noise, folder)
    assert all(history == whole[0][0] for history, _, _ in whole)
    [epoch] = whole[0][0]
    assert epoch["rows"] == N
    for name in ("hits", "misses", "bytes_local", "bytes_origin"):
        assert epoch[name] == sum(getattr(stats, name) for _, _, stats in whole)
    assert len({str(draws) for _, draws, _ in whole}) == 4
    killed = ranks(4, with_noise, folder, str(tmp_path / "checkpoints"), crash_at=10)
    assert all(isinstance(answer, CrashError) for answer in killed)
    resumed = ranks(4, with_noise, folder, str(tmp_path / "checkpoints"))
    assert [draws for _, draws, _ in resumed] == [draws[8:] for _, draws, _ in whole]
    assert [history[0]["loss"] for history, _, _ in resumed] == [pytest.approx(epoch["loss"], abs=1e-12)] * 4


def saved(folder, checkpoints, weights):
    """Train a plain layer on a mesh of 2 x 2, with the given weights on each tensor-parallel rank."""

    def run():
        whole, dp = mesh_of((2, 2), DP)
        model = nn.Linear(4, 1)
        nn.init.constant_(model.weight, weights[whole.get_local_rank("tp")])
        nn.init.zeros_(model.bias)
        loader = make_loader(make_dataset(folder, cache=False), BATCH, mesh=dp)
        options = {"epochs": 1, "precision": "fp32", "checkpoint_dir": checkpoints, "progress": False}
        fit(model, torch.optim.SGD(model.parameters(), 1e-6), loader, loss_of_one_column, **options)

    return group_ended(run)


def loss_of_one_column(model, batch):
    return model(batch["x"]).square().mean()


def test_plain_shares_of_a_parameter_are_refused_before_the_first_checkpoint(ranks, folder, tmp_path):
    """Otherwise the checkpoint would have one of them, which all ranks would resume with."""
    for error in ranks(4, saved, folder, tmp_path, (0, 1)):
        assert isinstance(error, ConfigError)
        assert "parameter 'weight' of ranks [1, 3] is not that of rank 0" in str(error)
        assert not hasattr(error, "__notes__")  # which a step adds
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.slow
def test_replicas_that_are_rounded_differently_are_saved(ranks, folder, tmp_path):
    assert ranks(4, saved, folder, tmp_path, (1, 1 + 1e-6)) == [None] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "checkpoint-000001",
        "ledger.jsonl",
        "ledger.rows",
    ]


def mixed(folder):
    """Train on a mixture with two tensor-parallel ranks. Return the history."""

    def run():
        _, dp = mesh_of((1, 2), DP)
        sources = {"a": make_dataset(folder, cache=False), "b": make_dataset(folder, cache=False)}
        loader, model = make_loader(mix(sources, num_rows=96), 16, mesh=dp), Network()
        return fit(model, torch.optim.SGD(model.parameters(), 0.1), loader, loss_of, epochs=1, progress=False)

    return group_ended(run)


def test_rows_by_source_count_once_for_peers(ranks, folder):
    for [epoch] in ranks(2, mixed, folder):
        assert (epoch["rows"], epoch["rows_by_source.a"], epoch["rows_by_source.b"]) == (96, 48, 48)


def refused_models(folder):
    def run():
        whole, dp = mesh_of((2, 2), DP)
        loader, errors = make_loader(make_dataset(folder, cache=False), BATCH, mesh=dp), []
        other = make_loader(make_dataset(folder, cache=False), BATCH, world=World(dist.get_rank(), 4))
        _, both = mesh_of((2, 2), HSDP[:2])
        _, flat = mesh_of((2, 1, 2), HSDP)
        two_dimensions = make_loader(make_dataset(folder, cache=False), BATCH, mesh=flat)
        replicated = make_loader(make_dataset(folder, cache=False), BATCH, mesh=both)
        tensor_parallel, partly, fully, one_dimension = (Network() for _ in range(4))
        parallelize_module(tensor_parallel, whole["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(partly.first, mesh=dp)
        fully_shard(fully, mesh=dp)
        fully_shard(one_dimension, mesh=both["dp_shard"])
        for model, chosen, options in (
            (tensor_parallel, loader, {}),
            (partly, loader, {}),
            (fully, loader, {"comm_hook": "fp16"}),
            (Network(), other, {"mesh": dp}),
            (one_dimension, replicated, {}),
            (Network(), two_dimensions, {}),
        ):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            try:
                fit(model, optimizer, chosen, loss_of, epochs=1, precision="fp32", progress=False, **options)
            except ConfigError as error:
                errors.append(str(error))
        return errors

    return group_ended(run)


def test_models_whose_gradients_would_not_be_exchanged(ranks, folder):
    for tensor_parallel, partly, hook, other, one_dimension, two_dimensions in ranks(4, refused_models, folder):
        assert "fully_shard has not been called" in tensor_parallel
        assert "parameter 'second.weight' is not sharded" in partly
        assert "fully_shard(model, mesh=mesh) on the whole model" in partly
        assert "comm_hook='fp16' is for DDP" in hook
        assert re.search(r"this is data-parallel rank \d of 2, and its loader has rank \d of 4", other)
        assert "parameter 'first.weight' is not sharded over them" in one_dimension
        assert "DDP cannot use 2 dimensions of a mesh (dp_replicate, dp_shard)" in two_dimensions


def in_sixteen_bits(folder, with_tensor_parallel):
    def run():
        whole, dp = mesh_of((1, 2), DP) if with_tensor_parallel else mesh_of((2, 1), DP)
        model = Network()
        if with_tensor_parallel:
            parallelize_module(model, whole["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(model, mesh=dp)
        loader = make_loader(make_dataset(folder, cache=False), BATCH, mesh=dp)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        [epoch] = fit(model, optimizer, loader, loss_of, epochs=1, precision="fp16", progress=False)
        return epoch["rows"]

    return group_ended(run)


@NEEDS_FSDP
def test_ranks_that_would_skip_different_steps_are_found(ranks, folder):
    for error in ranks(2, in_sixteen_bits, folder, with_tensor_parallel=True):
        assert isinstance(error, ConfigError)
        assert "'first.weight' and 'second.bias' are sharded over different ranks" in str(error)
    assert ranks(2, in_sixteen_bits, folder, with_tensor_parallel=False) == [N, N]


def in_evaluation_mode(folder):
    def run():
        model, modes = Network().eval(), []

        def loss(model, batch):
            modes.append(model.training)
            return loss_of(model, batch)

        loader = make_loader(make_dataset(folder, cache=False), BATCH)
        fit(model, torch.optim.SGD(model.parameters(), 0.1), loader, loss, epochs=1, precision="fp32", progress=False)
        return all(modes)

    return group_ended(run)


def test_a_model_that_was_in_evaluation_mode_trains_in_training_mode(ranks, folder):
    assert ranks(2, in_evaluation_mode, folder) == [True, True]


def exchanges(folder):
    def run():
        _, dp = mesh_of((2,), ("dp",))
        model, wanted = fully_shard(Network(), mesh=dp), []
        original = model.set_requires_gradient_sync
        model.set_requires_gradient_sync = lambda wants, **options: (wanted.append(wants), original(wants, **options))
        loader = make_loader(make_dataset(folder, cache=False), 20, mesh=dp)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fit(model, optimizer, loader, loss_of, epochs=1, accumulate=3, precision="fp32", progress=False)
        return wanted

    return group_ended(run)


@NEEDS_FSDP
def test_gradients_are_exchanged_once_a_step(ranks, folder):
    assert ranks(2, exchanges, folder) == [[False, False, True] * 3] * 2
