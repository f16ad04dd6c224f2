"""fit: the same parameters whatever the ranks and the accumulation, and exact resumption."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dataload import checkpoint, train
from dataload.batch import Flat
from dataload.checkpoint import CHECKPOINT
from dataload.errors import ConfigError
from dataload.train import fit
from dataload.world import World

SPAWN = multiprocessing.get_context("spawn")
DEADLINE = 60  # seconds for one job of a rank


class Rows(Dataset):
    """Rows of a small regression, as dicts, in float64."""

    def __init__(self, num_rows=40, fingerprint=None):
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_rows, 3, generator=draw, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True) ** 2
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i], "name": f"row {i}"}


def in_order(batch_size, num_rows=40, **kwargs):
    """A loader whose t-th batch over all ranks is the t-th run of rows, whatever the number of ranks."""
    world = World.detect()
    dataset = Rows(num_rows, **kwargs)
    sampler = DistributedSampler(dataset, world.world_size, world.rank, shuffle=False)
    return DataLoader(dataset, batch_size, sampler=sampler)


def build(dropout=0.0):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def squared_error(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def train_in_order(batch_size, num_rows=40, epochs=2, **options):
    """The parameters after training a fresh model on rows in order, as one vector."""
    model, optimizer = build()
    fit(
        model,
        optimizer,
        in_order(batch_size, num_rows),
        squared_error,
        epochs=epochs,
        precision="fp32",
        progress=False,
        **options,
    )
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# ---- two ranks in processes of their own


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """As in every module, but the two ranks live on from test to test."""
    us = psutil.Process()
    before = {child.pid for child in us.children()}
    yield
    new = [child for child in us.children() if child.pid not in before and "tracker" not in " ".join(child.cmdline())]
    assert not new
    assert not dist.is_initialized()


def serve_rank(pipe, environ):
    os.environ.update(environ)
    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        function, args, kwargs = job
        try:
            pipe.send((True, function(*args, **kwargs)))
        except Exception as error:
            pipe.send((False, error))


@pytest.fixture(scope="module")
def two_ranks():
    """run(function, *args, **kwargs) on two ranks: [result of rank 0, of rank 1]; an exception is a result too."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # As under torchrun: the store is the launcher's, so that no port has to be guessed, and it outlives every group.
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    pipes, processes = [], []
    for rank in range(2):
        pipe, theirs = SPAWN.Pipe()
        environ = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(SPAWN.Process(target=serve_rank, args=(theirs, environ), daemon=True))
        processes[-1].start()
        pipes.append(pipe)

    def run(function, *args, **kwargs):
        for pipe in pipes:
            pipe.send((function, args, kwargs))
        assert all(pipe.poll(DEADLINE) for pipe in pipes), "a rank does not answer"
        return [value for _, value in (pipe.recv() for pipe in pipes)]

    yield run
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode == 0


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_two_ranks_train_like_one_with_twice_the_batch(two_ranks):
    alone = train_in_order(8)
    first, second = two_ranks(train_in_order, 4)
    assert_close(first, alone)
    assert torch.equal(first, second)
    assert not torch.equal(alone, train_in_order(4))


def test_accumulated_batches_train_like_one_large_batch(two_ranks):
    whole = train_in_order(8)
    assert_close(train_in_order(4, accumulate=2), whole)
    assert_close(train_in_order(2, accumulate=4), whole)
    assert_close(two_ranks(train_in_order, 2, accumulate=2)[1], whole)


def steps_of(groups, clip=None):
    """Two epochs of plain torch over 40 rows: one step on the mean loss of each group of rows."""
    model, optimizer = build()
    rows = Rows()
    for group in groups * 2:
        optimizer.zero_grad()
        squared_error(model, {"x": rows.x[group], "y": rows.y[group]}).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_last_partial_step_averages_what_was_accumulated(two_ranks, clip):
    expected = steps_of([slice(0, 16), slice(16, 32), slice(32, 40)], clip)
    assert_close(train_in_order(8, accumulate=2, clip_grad_norm=clip), expected)
    assert_close(two_ranks(train_in_order, 4, accumulate=2, clip_grad_norm=clip)[0], expected)


def synchronised(accumulate):
    model, optimizer = build()
    seen = []

    def loss(model, batch):
        seen.append(model.require_backward_grad_sync)
        return squared_error(model, batch)

    fit(model, optimizer, in_order(4), loss, epochs=1, precision="fp32", accumulate=accumulate, progress=False)
    return seen


def test_gradients_cross_ranks_once_per_step(two_ranks):
    assert two_ranks(synchronised, 2) == [[False, True, False, True, True]] * 2


def test_scheduler_steps_with_the_optimizer():
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = in_order(8)
    fit(model, optimizer, loader, squared_error, epochs=2, accumulate=2, scheduler=scheduler, progress=False)
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5**6


# ---- checkpoints


class CrashError(Exception):
    """Stands for the machine going down."""


def train_with_noise(folder, epochs, crash_at=None, resume="auto"):
    """Trains with dropout, global generators and a schedule of numpy numbers; returns (parameters, losses)."""
    world = World.detect()
    model, optimizer = build(dropout=0.3)
    torch.manual_seed(100 + world.rank)
    np.random.seed(200 + world.rank)  # noqa: NPY002
    random.seed(300 + world.rank)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(1 / (1 + step)))
    sampler = DistributedSampler(Rows(), 2, world.rank) if world.world_size == 2 else None
    loader = DataLoader(Rows(), 8, shuffle=sampler is None, sampler=sampler)
    batches = 0

    def loss(model, batch):
        nonlocal batches
        batches += 1
        if batches == crash_at:
            raise CrashError
        scale = np.random.rand() + random.random()  # noqa: NPY002
        return squared_error(model, batch) * scale

    history = fit(
        model,
        optimizer,
        loader,
        loss,
        epochs=epochs,
        precision="fp32",
        scheduler=scheduler,
        evaluate=lambda model: {"weight": np.float32(model[0].weight.sum())},
        checkpoint_dir=folder,
        resume=resume,
        progress=False,
    )
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    return vector, [(record["epoch"], record["loss"], record["weight"]) for record in history]


def crash_then_resume(folder, crash_at):
    with pytest.raises((CrashError, RuntimeError)):
        train_with_noise(folder, 4, crash_at=crash_at)
    return train_with_noise(folder, 4)


def test_resumed_run_ends_with_the_same_bits(tmp_path):
    expected, figures = train_with_noise(None, 4)
    actual, again = crash_then_resume(tmp_path, crash_at=13)  # in the third of five-batch epochs
    assert torch.equal(actual, expected)
    assert again == figures
    assert [epoch for epoch, *_ in figures] == [0, 1, 2, 3]


def test_resumed_ranks_end_with_the_same_bits(two_ranks, tmp_path):
    expected = two_ranks(train_with_noise, None, 4)
    actual = two_ranks(crash_then_resume, tmp_path, crash_at=8)  # in the third of three-batch epochs
    for (vector, figures), (wanted, wanted_figures) in zip(actual, expected, strict=True):
        assert torch.equal(vector, wanted)
        assert figures == wanted_figures


def test_resume_chooses_its_checkpoint(tmp_path):
    done, _ = train_with_noise(tmp_path / "a", 2)
    for source in (tmp_path / "a", tmp_path / "a" / CHECKPOINT, str(tmp_path / "a")):
        again, figures = train_with_noise(None, 2, resume=source)
        assert torch.equal(again, done)
        assert len(figures) == 2
    anew, figures = train_with_noise(tmp_path / "a", 1, resume=None)
    assert not torch.equal(anew, done)
    assert len(figures) == 1
    for missing in (tmp_path / "b", tmp_path / "a" / "other.pt"):
        with pytest.raises(ConfigError, match="no checkpoint there"):
            train_with_noise(None, 2, resume=missing)


def die_while_saving(folder, save):
    """Trains three epochs and is killed in the given save, between writing the file and putting it in place."""
    saves = 0
    replace = Path.replace

    def lethal(self, target):
        nonlocal saves
        saves += 1
        if saves == save:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.replace = lethal
    train_with_noise(folder, 3)


def test_half_written_checkpoint_is_never_read(tmp_path):
    process = SPAWN.Process(target=die_while_saving, args=(tmp_path, 2))
    process.start()
    process.join(DEADLINE)
    assert process.exitcode == -signal.SIGKILL
    (left,) = set(tmp_path.iterdir()) - {tmp_path / CHECKPOINT}
    left.write_bytes(left.read_bytes()[:100])
    _, figures = train_with_noise(tmp_path, 1)
    assert len(figures) == 1
    expected, _ = train_with_noise(None, 3)
    actual, _ = train_with_noise(tmp_path, 3)
    assert torch.equal(actual, expected)
    assert list(tmp_path.iterdir()) == [tmp_path / CHECKPOINT]


def test_checkpoint_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"parts": {}, "history": [Evil()], "generators": []}, tmp_path / CHECKPOINT)
    with pytest.raises(pickle.UnpicklingError):
        train_with_noise(tmp_path, 1)
    assert not (tmp_path / "owned").exists()


def test_checkpoint_of_another_setup_is_refused(tmp_path):
    train_with_noise(tmp_path, 1)
    model, optimizer = build()
    with pytest.raises(ConfigError, match="both have: scheduler"):
        fit(model, optimizer, in_order(8), squared_error, epochs=2, checkpoint_dir=tmp_path, progress=False)


def test_sixteen_bit_gradients_are_scaled_and_the_scale_is_resumed(tmp_path):
    def run(epochs, checkpoint_dir=None):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        loader = DataLoader([{"x": torch.ones(3), "y": torch.ones(1)}] * 16, 4)
        kinds = set()

        def loss(model, batch):
            guess = model(batch["x"])
            kinds.add(guess.dtype)
            return ((guess.float() - batch["y"]) ** 2).mean()

        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        options = {"precision": "fp16", "checkpoint_dir": checkpoint_dir, "progress": False}
        history = fit(model, optimizer, loader, loss, epochs=epochs, **options)
        assert kinds == {torch.float16}
        return model.weight.detach(), history

    weight, history = run(4)
    assert history[-1]["loss"] < history[0]["loss"] / 10
    run(2, tmp_path)
    assert "_growth_tracker" in torch.load(tmp_path / CHECKPOINT, weights_only=True)["parts"]["scaler"]
    again, _ = run(4, tmp_path)
    assert torch.equal(again, weight)


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
    """The name of the error that ended fit and whether a process group is left."""
    model, optimizer = build()

    def loss(model, batch):
        if World.detect().rank == failing_rank:
            raise CrashError
        return squared_error(model, batch)

    try:
        fit(model, optimizer, in_order(4), loss, epochs=1, precision="fp32", progress=False)
    except Exception as error:
        return type(error).__name__, dist.is_initialized()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_process_group_ends_with_an_exception(two_ranks, failing_rank):
    results = two_ranks(group_after_failure, failing_rank)
    assert results[failing_rank] == ("CrashError", False)
    assert results[1 - failing_rank] == ("RuntimeError", False)  # its collective lost the other rank
    assert_close(two_ranks(train_in_order, 4)[0], train_in_order(8))


def fit_in_a_group_of_ours():
    store = dist.PrefixStore("ours", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])))
    dist.init_process_group("gloo", store=store, rank=World.detect().rank, world_size=2)
    try:
        vector = train_in_order(4)
        return vector, dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_process_group_of_others_stays(two_ranks):
    for vector, alive in two_ranks(fit_in_a_group_of_ours):
        assert alive
        assert_close(vector, train_in_order(8))


def fit_own_data(fingerprints, num_rows):
    rank = World.detect().rank
    model, optimizer = build()
    loader = in_order(4, num_rows=num_rows[rank], fingerprint=fingerprints[rank])
    fit(model, optimizer, loader, squared_error, epochs=1, progress=False)


def test_ranks_with_different_data_are_refused(two_ranks):
    for error in two_ranks(fit_own_data, ("abc", "xyz"), (40, 40)):
        assert isinstance(error, ConfigError)
        assert "fingerprint: 'abc' on ranks [0]; 'xyz' on ranks [1]" in str(error)
    for error in two_ranks(fit_own_data, ("abc", "abc"), (40, 32)):
        assert isinstance(error, ConfigError)
        assert "len(loader): 5 on ranks [0]; 4 on ranks [1]" in str(error)
    assert two_ranks(fit_own_data, ("abc", "abc"), (40, 40)) == [None, None]


def fit_own_checkpoint(folder):
    rank = World.detect().rank
    model, optimizer = build()
    fit(model, optimizer, in_order(4), squared_error, epochs=1, checkpoint_dir=folder / str(rank), progress=False)
    return sorted(path.name for path in folder.rglob("*.pt"))


def test_checkpoint_that_not_all_ranks_see_is_refused(two_ranks, tmp_path):
    two_ranks(fit_own_checkpoint, tmp_path)
    assert (tmp_path / "0" / CHECKPOINT).exists()
    assert not (tmp_path / "1").exists()
    for error in two_ranks(fit_own_checkpoint, tmp_path):
        assert isinstance(error, ConfigError)
        assert "1 on ranks [0]; 0 on ranks [1]" in str(error)


# ---- loaders and history


class Clock:
    """Time that passes only when told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


def test_history_counts_rows_time_and_waits(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(train, "time", clock)

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
        model, optimizer, Slow(), loss, epochs=1, evaluate=lambda model: {"mode": model.training}, progress=False
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
    }


def losses_by_rank():
    model, optimizer = build()
    rank = World.detect().rank

    def loss(model, batch):
        return squared_error(model, batch) * 0 + rank, {"double": 2 * rank}

    (record,) = fit(model, optimizer, in_order(4), loss, epochs=1, precision="fp32", progress=False)
    return record["loss"], record["double"], record["rows"]


def test_history_averages_over_ranks(two_ranks):
    assert two_ranks(losses_by_rank) == [(0.5, 1.0, 40)] * 2


class Remembering:
    """A loader with the protocol of ours: epochs, state and statistics."""

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
        return {"epoch": len(self.calls), "fingerprint": "f"}

    def load_state_dict(self, state):
        self.calls.append(state)


@pytest.mark.parametrize("traffic", [{"hits": 3, "bytes_origin": 7.0}, SimpleNamespace(hits=3, bytes_origin=7)])
def test_loader_is_told_its_epoch_and_keeps_its_state(tmp_path, traffic):
    first, second = Remembering(traffic), Remembering(traffic)
    for loader, epochs in ((first, 2), (second, 3)):
        model, optimizer = build()
        history = fit(model, optimizer, loader, squared_error, epochs=epochs, checkpoint_dir=tmp_path, progress=False)
    assert first.calls == [0, "iter", 1, "iter"]
    assert second.calls == [{"epoch": 4, "fingerprint": "f"}, 2, "iter"]
    assert [(record["hits"], record["bytes_origin"]) for record in history] == [(3, 7)] * 3
    assert "misses" not in history[0]


def test_batches_keep_their_strings_and_default_precision_is_bf16():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []

    def loss(model, batch):
        guess = model(batch["x"].float())
        seen.append((batch["name"][0], guess.dtype))
        return guess.float().mean()

    fit(model, optimizer, in_order(40), loss, epochs=1, progress=False)
    assert seen == [("row 0", torch.bfloat16)]


def test_batches_may_be_tuples():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader([(torch.ones(3), i) for i in range(6)], 4)

    def loss(model, batch):
        return model(batch[0]).mean() * batch[1].float().mean()

    (record,) = fit(model, optimizer, loader, loss, epochs=1, progress=False)
    assert record["rows"] == 6


def test_rows_of_ragged_batches_are_counted_by_their_offsets():
    ragged = {"x": Flat(torch.ones(2), torch.tensor([0, 1, 1, 2])), "label": torch.zeros(3)}
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(model, batch):
        return model(batch["x"].values[:, None]).float().mean()

    (record,) = fit(model, optimizer, [ragged, ragged], loss, epochs=1, progress=False)
    assert record["rows"] == 6


def test_progress_off_a_terminal_is_one_plain_line_an_epoch(capsys):
    model, optimizer = build()
    fit(model, optimizer, in_order(1), squared_error, epochs=2)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line[:9] for line in err.splitlines()] == ["epoch 1/2", "epoch 2/2"]
    assert err.replace("\n", "").isprintable()
    fit(model, optimizer, in_order(1), squared_error, epochs=1, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is none of fp32, bf16, fp16"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"loader": []}, "the loader gave no batch"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options, message):
    model, optimizer = build()
    with pytest.raises(ConfigError, match=message):
        fit(model, optimizer, options.pop("loader", in_order(8)), squared_error, epochs=1, progress=False, **options)


def test_torch_saves_what_it_can_load_without_code():
    """Every scheduler of torch whose state goes into a checkpoint must come back under weights_only."""
    schedules = torch.optim.lr_scheduler
    _, optimizer = build()
    for scheduler in (
        schedules.MultiStepLR(optimizer, [2, 4]),
        schedules.OneCycleLR(optimizer, 0.1, total_steps=10),
        schedules.CosineAnnealingWarmRestarts(optimizer, 3),
        schedules.SequentialLR(
            optimizer, [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)], [2]
        ),
    ):
        file = io.BytesIO()
        torch.save(checkpoint._plain(scheduler.state_dict()), file)
        file.seek(0)
        scheduler.load_state_dict(torch.load(file, weights_only=True))
