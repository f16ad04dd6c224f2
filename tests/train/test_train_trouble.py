"""Steps and ranks that fail."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from checkpoint_files import saved_state
from ranks import LostError, launchers_store
from regression import build, in_order, parameters_of, squared_error, train_in_order
from torch import nn

from dataload.errors import ConfigError, NonFiniteLoss
from dataload.train.harness import fit
from dataload.world import World

# ---- steps that go wrong


def planted(value, at, rank=0, **options):
    """Train with a loss that is multiplied by `value` in one step. Return history, optimizer steps and parameters."""
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    loader, steps = in_order(4), iter(range(1000))

    def loss(model, batch):
        planted = value if next(steps) == at and World.detect().rank == rank else 1.0
        return model(batch["x"].float()).float().square().mean() * planted

    before = []

    class Remembering(torch.optim.SGD):
        def step(self, *args):
            before.append(parameters_of(model).clone())
            return super().step(*args)

    optimizer = Remembering(model.parameters(), 0.05)
    history = fit(model, optimizer, loader, loss, epochs=2, progress=False, **options)
    return history, len(before), parameters_of(model)


def test_an_overflow_in_sixteen_bits_is_skipped():
    quiet, steps, _ = planted(1.0, 0, precision="fp16")
    history, fewer, parameters = planted(1e38, 13, precision="fp16")
    # The first steps are skipped until the scale is small enough for these losses.
    assert [record["skipped_steps"] for record in quiet] == [3, 0]
    assert [record["skipped_steps"] for record in history] == [3, 1]
    assert fewer == steps - 1
    assert parameters.isfinite().all()


def test_a_skipped_step_is_none_of_the_schedule():
    model, made = nn.Linear(3, 1), iter(range(100))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def loss(model, batch):
        return model(batch["x"].float()).float().mean() * 1e-3 * (1e38 if next(made) == 4 else 1.0)

    options = {"precision": "fp16", "scheduler": scheduler, "progress": False}
    (record,) = fit(model, optimizer, in_order(4), loss, epochs=1, **options)
    assert record["skipped_steps"] == 1
    assert optimizer.param_groups[0]["lr"] == 0.5**9


def test_the_scale_halves_at_an_overflow(tmp_path):
    planted(1e38, 13, precision="fp16", checkpoint_dir=tmp_path)
    scales = [saved_state(path)["parts"]["scaler"]["scale"] for path in sorted(tmp_path.glob("checkpoint-*"))]
    assert scales[1] == scales[0] / 2


@pytest.mark.variants
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_that_is_not_finite_stops(value, precision, tmp_path):
    with pytest.raises(NonFiniteLoss, match=r"rank 0, epoch 1, step 14: the loss is (nan|inf).*check_finite=False"):
        planted(value, 13, precision=precision, checkpoint_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-000001"]


def test_a_gradient_that_is_not_finite_is_not_saved(tmp_path):
    """The gradient is that of an epoch's last step, after which no loss would show it."""
    model, made = nn.Linear(3, 1), iter(range(100))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def loss(model, batch):
        root = (0 * model.weight.sum()).abs().sqrt() if next(made) == 19 else 0.0  # 0, and its derivative 0 / 0
        return model(batch["x"].float()).float().square().mean() + root

    options = {"epochs": 2, "precision": "fp32", "progress": False}
    with pytest.raises(NonFiniteLoss, match="rank 0, epoch 1, step 20: parameter 'weight' is not finite"):
        fit(model, optimizer, in_order(4), loss, checkpoint_dir=tmp_path, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-000001"]


def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_one(ranks):
    first, second = ranks(2, planted, float("nan"), 3, rank=1)
    assert isinstance(second, NonFiniteLoss)
    assert "rank 1, epoch 0, step 4" in str(second)
    assert isinstance(first, RuntimeError)


def test_training_continues_with_check_finite_off():
    history, _, parameters = planted(float("nan"), 13, check_finite=False)
    assert len(history) == 2
    assert parameters.isnan().all()


# ---- ranks that go wrong


def go_wrong(rank, how, **options):
    model, optimizer = build()
    steps = iter(range(1000))

    def loss(model, batch):
        if next(steps) == 3 and World.detect().rank == rank:
            os.kill(os.getpid(), how)
        return squared_error(model, batch)

    fit(model, optimizer, in_order(4), loss, epochs=1, precision="fp32", progress=False, **options)


@pytest.mark.variants
@pytest.mark.parametrize(
    ("rank", "how", "timeout"),
    [
        (0, signal.SIGKILL, 60),
        (1, signal.SIGSTOP, 10),
        pytest.param(1, signal.SIGKILL, 60, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, 10, marks=pytest.mark.slow),
    ],
)
def test_the_others_do_not_wait_for_ever(ranks, rank, how, timeout):
    """The wait for a rank that hangs ends after `timeout`. The default of torch is half an hour."""
    answers = ranks(2, go_wrong, rank, how, timeout=timeout, until=1 - rank)
    assert isinstance(answers[rank], LostError)
    error = answers[1 - rank]
    assert isinstance(error, RuntimeError)
    assert error.__notes__ == [f"rank {1 - rank} of 2, epoch 0, step 3"]


def come_late():
    if World.detect().rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    train_in_order(4, timeout=3)


def test_the_others_do_not_wait_for_ever_for_a_rank_that_never_comes(ranks):
    error, _ = ranks(2, come_late, until=0)
    assert str(error).startswith("ranks [1] of 2 did not come within 3 s")


def train_twice():
    return [train_in_order(4, timeout=20) for _ in range(2)]


def test_a_restarted_rank_does_not_meet_a_killed_one(ranks):
    """The store of torchrun outlives an attempt, with the addresses of its ranks."""
    store, expected = launchers_store(), train_in_order(8)
    for attempt in range(2):
        lost = ranks(2, go_wrong, attempt % 2, signal.SIGKILL, timeout=20, until=1 - attempt % 2, store=store)
        assert lost[1 - attempt % 2].__notes__ == [f"rank {1 - attempt % 2} of 2, epoch 0, step 3"]
    for answer in ranks(2, train_twice, store=store):
        assert all(torch.allclose(vector, expected) for vector in answer)


def timeout_in_a_group_of_ours():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()  # A rank that ends before the others have connected to it would be their error.
    try:
        train_in_order(4, timeout=3)
    finally:
        dist.destroy_process_group()


def test_the_timeout_of_a_group_is_its_makers(ranks):
    for error in ranks(2, timeout_in_a_group_of_ours):
        assert isinstance(error, ConfigError)
        assert "the process group already exists" in str(error)
