"""Process groups, DDP and what ranks exchange, as far as it shows without a GPU."""

from __future__ import annotations

import os
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from regression import build, in_order, squared_error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dataload import make_dataset, make_loader
from dataload.errors import ConfigError
from dataload.train import find_batch_size, fit
from dataload.train.ranks import collectives
from dataload.train.ranks import process_group as groups
from dataload.train.ranks.collectives import share_buffers
from dataload.train.ranks.process_group import process_group
from dataload.train.ranks.replica import replicate
from dataload.train.ranks.sharded import move
from dataload.world import World

CPU = torch.device("cpu")


class CrashError(Exception):
    """An error of the training."""


def replicated_for_a_gpu():
    """Replicate for a GPU. The model stays on the CPU, where `device_ids` would be an error."""
    with process_group(World.detect(), CPU):
        replica = replicate(nn.Linear(2, 1), torch.device("cuda"))
        replica(torch.ones(1, 2)).backward()
        return replica.module.weight.grad


def test_ddp_moves_no_batches(ranks):
    """With `device_ids`, DDP cannot be called without arguments, and copies batches that are on the device already."""
    for gradient in ranks(2, replicated_for_a_gpu):
        assert gradient.tolist() == [[1.0, 1.0]]


def made_too_early(folder):
    """Make a loader in the environment of rank 0, as processes of `mp.spawn` inherit it. Return what its uses do."""
    rank = int(os.environ["RANK"])
    os.environ.update(RANK="0", LOCAL_RANK="0")
    loader, done = make_loader(make_dataset(folder, cache=False), 4), []
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for use in (list, lambda batches: fit(*build(), batches, squared_error, epochs=1, progress=False)):
            try:
                done.append(len(use(loader)))
            except ConfigError as error:
                done.append(str(error))
    finally:
        dist.destroy_process_group()
    return done


def test_a_loader_made_before_a_process_knows_its_rank(ranks, tmp_path):
    """Otherwise both ranks would read the rows of rank 0."""
    pq.write_table(pa.table({"row_id": range(32)}), tmp_path / "x.parquet")
    (batches, first), (second, third) = ranks(2, made_too_early, str(tmp_path))
    assert batches == 4
    assert "made for rank 0 of 2, but this is rank 1 of 2: make it after the ranks have been started" in second
    assert "this is data-parallel rank 0 of 2, and its loader has rank 0 of 2, but these differ on some rank" in first
    assert "this is data-parallel rank 1 of 2, and its loader has rank 0 of 2, but these differ on some rank" in third


def compressed(hook):
    """Return the gradients that the ranks of a mesh of 2 x 2 average over its first dimension."""
    with process_group(World.detect(), CPU):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        replica = replicate(model, CPU, mesh["dp"], comm_hook=hook)
        replica(torch.full((1, 1), 10.0 * dist.get_rank())).sum().backward()
        return model.weight.grad.item()


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_compressed_gradients_stay_in_the_mesh(ranks, hook):
    assert ranks(4, compressed, hook) == [10, 20, 10, 20]


def crash_in_a_group_that_cannot_end():
    """NCCL waits in the end of a group for ranks that wait for this one."""
    held, destroy = threading.Event(), dist.destroy_process_group
    groups.ENDING_SECONDS = 0.01

    def wait_then_destroy():
        held.wait()
        destroy()

    dist.destroy_process_group = wait_then_destroy
    try:
        with process_group(World.detect(), CPU):
            dist.barrier()  # Else the end of one rank may break the connection that the other one still opens.
            raise CrashError
    finally:
        held.set()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and thread.name.startswith("Thread"):
                thread.join()


def test_an_error_does_not_wait_for_the_end_of_the_group(ranks):
    assert [type(error) for error in ranks(2, crash_in_a_group_that_cannot_end)] == [CrashError, CrashError]


def meet_twice():
    """Start two groups, one after the other. Return whether both meet at the same store."""
    with process_group(World.detect(), CPU):
        [first] = groups._STORES.values()
    with process_group(World.detect(), CPU):
        [second] = groups._STORES.values()
    return first is second


def test_the_store_outlives_a_group(ranks):
    """Without torchrun, rank 0 is the server: it may leave a group before the others have started the next one."""
    assert ranks(2, meet_twice) == [True, True]


def buffers_shared():
    """Share a buffer that is not contiguous. NCCL refuses such tensors, gloo does not."""
    broadcast = dist.broadcast

    def by_nccl(tensor, **options):
        assert tensor.is_contiguous()
        broadcast(tensor, **options)

    dist.broadcast = by_nccl
    model = nn.Module()
    with process_group(World.detect(), CPU):
        model.register_buffer("table", torch.full((3, 2), dist.get_rank() + 1.0).t())
        share_buffers(model)
    return model.table


def test_buffers_are_shared_whatever_their_layout(ranks):
    for table in ranks(2, buffers_shared):
        assert table.tolist() == [[1.0] * 3] * 2


def only_gpus_have_a_backend():
    """Exchange a count in a group that names no backend of the CPU. gather_object works there on the GPU."""
    with process_group(World.detect(), CPU):
        dist.barrier()  # The first rank must not end before the other has connected to it.
        dist.get_backend_config = lambda: "cuda:nccl"
        collectives.gather = lambda count, mesh: ["by gather", count, mesh]
        return collectives.gather_count(3)


def test_counts_need_no_backend_of_the_cpu(ranks):
    assert ranks(2, only_gpus_have_a_backend) == [["by gather", 3, None]] * 2


def counted_under_another_device():
    with process_group(World.detect(), CPU), torch.device("meta"):
        return collectives.gather_count(dist.get_rank() + 3)


def test_counts_are_on_the_cpu_whatever_the_default_device_of_torch(ranks):
    assert ranks(2, counted_under_another_device) == [[3, 4]] * 2


# ---- models and optimizers that fit cannot train


def wrapped():
    model, _ = build()
    with process_group(World.detect(), CPU):
        replica = DistributedDataParallel(model)
        fit(replica, torch.optim.SGD(model.parameters(), 0.1), in_order(4), squared_error, epochs=1, progress=False)


def test_a_model_in_ddp_is_not_replicated_twice(ranks):
    for error in ranks(2, wrapped):
        assert isinstance(error, ConfigError)
        assert "pass the module inside" in str(error)


def searched():
    model, optimizer = build()
    batch = next(iter(in_order(4)))
    with process_group(World.detect(), CPU):
        find_batch_size(DistributedDataParallel(model), optimizer, batch, squared_error, precision="fp32")


def test_the_batch_size_of_a_model_in_ddp_is_not_searched(ranks):
    """A rank whose memory is full would leave the others waiting."""
    for error in ranks(2, searched):
        assert isinstance(error, ConfigError)
        assert "pass the module inside" in str(error)


def test_an_optimizer_of_other_parameters_would_train_nothing():
    (model, _), (_, other) = build(), build()
    with pytest.raises(ConfigError, match="has none of the model's parameters"):
        fit(model, other, in_order(4), squared_error, epochs=1, progress=False)


def with_a_loss_that_learns(is_submodule, **options):
    model, _ = build()
    loss = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], 1e-3)
    if is_submodule:
        model.forward = nn.Sequential(*model).forward
        model.add_module("loss", loss)

    def weighted(replica, batch):
        return loss(replica(batch["x"]) - batch["y"]).square().mean()

    fit(model, optimizer, in_order(4), weighted, epochs=1, precision="fp32", progress=False, **options)
    return loss.weight.item()


def test_parameters_outside_of_the_model_are_neither_exchanged_nor_saved(ranks, tmp_path):
    for error in ranks(2, with_a_loss_that_learns, False):
        assert "the optimizer has parameters that the model lacks" in str(error)
    with pytest.raises(ConfigError, match="a submodule of the model"):
        with_a_loss_that_learns(False, checkpoint_dir=tmp_path)
    with_a_loss_that_learns(False)
    first, second = ranks(2, with_a_loss_that_learns, True)
    assert first == second


class OnAnotherDevice(nn.Linear):
    """A module whose parameters are converted by `to`, as those that move to a GPU are."""

    def to(self, device):
        self.device = device
        return self

    def parameters(self, recurse=True):
        parameters = list(super().parameters(recurse))
        return iter([_At(self.device) for _ in parameters]) if hasattr(self, "device") else iter(parameters)


class _At:
    def __init__(self, device):
        self.device = device


@pytest.mark.variants
@pytest.mark.parametrize(("device", "loads"), [("cuda", 1), ("cpu", 0)])
def test_the_state_of_an_optimizer_moves_with_the_parameters(device, loads):
    """Adagrad makes its state in its constructor, when the model is not yet on the GPU."""
    model = OnAnotherDevice(2, 1)
    optimizer, loaded = torch.optim.Adagrad(nn.Linear(2, 1).parameters()), []
    optimizer.load_state_dict = loaded.append
    move(model, optimizer, torch.device(device))
    assert len(loaded) == loads
