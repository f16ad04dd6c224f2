"""The options of fit."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from regression import assert_close, build, in_order, parameters_of, squared_error, train_in_order
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from dataload.dataset import make_dataset
from dataload.errors import ConfigError
from dataload.loader import make_loader
from dataload.telemetry.spans import stage
from dataload.train import epoch_metrics, evaluate_over, fit, rank_batches, tensorboard
from dataload.train.modules import BuffersKept
from dataload.train.ranks.process_group import process_group
from dataload.world import World

STAGES = {"wait for batch", "copy to device", "forward", "backward", "optimizer", "checkpoint", "decode"}

# ---- what should not matter, and what training is for


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Digits of 8 x 8 pixels in two folders: 1424 to train on, 373 held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    path = tmp_path_factory.mktemp("digits")
    for name, rows in (("train", order[:1424]), ("held-out", order[1424:])):
        (path / name).mkdir()
        pixels = pa.FixedSizeListArray.from_arrays(pa.array(images[rows].ravel() / 16), 64)
        table = pa.table({"image": pixels, "label": labels[rows]})
        pq.write_table(table, path / name / "a.parquet", row_group_size=100)
    return path


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def twenty_steps(folder, batch_size, accumulate=1):
    """Train for two epochs of ten steps in float64. The last step of an epoch has fewer rows."""
    rank_batches.gather_count = None  # With this package's loader, ranks need not exchange batch sizes.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    loader = make_loader(make_dataset(str(folder / "train"), cache=False), batch_size)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    options = {"epochs": 2, "precision": "fp32", "accumulate": accumulate, "progress": False}
    fit(model, optimizer, loader, cross_entropy, **options)
    return parameters_of(model), next(iter(optimizer.state.values()))["step"].item()


@pytest.mark.slow
def test_neither_ranks_nor_accumulation_change_what_is_learned(ranks, folder):
    ((single, steps),) = ranks(1, twenty_steps, folder, 144)
    assert steps == 20
    for number, accumulate in ((1, 4), (2, 1), (2, 4), (4, 1)):
        for other, _ in ranks(number, twenty_steps, folder, 144 // number // accumulate, accumulate):
            assert (other - single).abs().max() < 1e-10, (number, accumulate)


def learn_digits(folder):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )
    train, held_out = (make_dataset(str(folder / name), cache=False) for name in ("train", "held-out"))
    loader, other = make_loader(train, 32, transform=single), make_loader(held_out, 64, transform=single, shuffle=False)

    def evaluate(model):
        return evaluate_over(
            model, other, lambda model, batch: {"right": model(batch["image"]).argmax(1) == batch["label"]}
        )

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    return fit(model, optimizer, loader, cross_entropy, epochs=6, precision="fp32", evaluate=evaluate, progress=False)[
        -1
    ]


def single(batch):
    return {**batch, "image": batch["image"].float()}


def test_two_ranks_learn_digits(ranks, folder):
    first, second = ranks(2, learn_digits, folder)
    assert (first["rows"], first["evaluate.rows"]) == (1424, 373)
    assert first["right"] == second["right"] >= 0.97


# ---- what gets smaller


def kept_for_backward(which):
    """Return (numbers that forward saves for backward, forward calls of the blocks, state of the model)."""
    model = nn.Sequential(*[Block(nn.BatchNorm1d(3)) for _ in range(4)], nn.Linear(3, 1)).double()
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    kept = []

    def loss(model, batch):
        def count(tensor):
            kept.append(tensor.numel())
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            return squared_error(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = {"epochs": 2, "precision": "fp32", "activation_checkpointing": which, "progress": False}
    fit(model, optimizer, in_order(8), loss, **options)
    assert not any("forward" in vars(module) for module in model.modules())
    return sum(kept), sum(block.calls for block in model[:4]), model.state_dict()


class Block(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers, nn.Linear(3, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.layers(x)


@pytest.mark.variants
@pytest.mark.parametrize("which", [Block, (Block, nn.Conv2d), [Block], lambda module: isinstance(module, Block)])
def test_activations_are_computed_twice(which):
    kept, calls, expected = kept_for_backward(None)
    less, more, actual = kept_for_backward(which)
    assert less < kept / 5
    assert more == 2 * calls
    assert expected["0.layers.0.num_batches_tracked"] == 10
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def penalised(which):
    """Return the weights after training with a penalty on the gradients of the inputs, and the batches counted."""
    torch.manual_seed(3)
    model = nn.Sequential(Block(nn.BatchNorm1d(3)), nn.Linear(3, 1)).double().requires_grad_()
    model[0].layers[3].p = 0.0

    def loss(model, batch):
        x = batch["x"].double().requires_grad_()
        [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return squared_error(model, batch) + slope.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    fit(model, optimizer, in_order(8), loss, epochs=1, precision="fp32", activation_checkpointing=which, progress=False)
    return [p.detach().clone() for p in model.parameters()], int(model[0].layers[0].num_batches_tracked)


def test_a_checkpointed_graph_may_be_differentiated_twice():
    (weights, batches), (expected, same) = penalised(Block), penalised(None)
    torch.testing.assert_close(weights, expected)
    assert batches == same == 10


@pytest.mark.slow
def test_compiled_modules_count_each_batch_once(monkeypatch):
    """AOTAutograd sees to it."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch's bar would leave a thread of tqdm behind
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inner = model[0]
    options = {
        "activation_checkpointing": lambda module: module is inner,
        "compile": {"backend": "aot_eager"},
        "precision": "fp32",
    }
    fit(model, optimizer, in_order(8), squared_error, epochs=1, progress=False, **options)
    assert int(inner[0].num_batches_tracked) == 5


def test_a_buffer_of_two_names_has_one_copy():
    model = nn.Module()
    model.register_buffer("one", torch.zeros(1))
    model.register_buffer("other", model.one)
    with BuffersKept(model):
        model.other += 1
        assert model.one == 1
    assert model.one is model.other
    assert model.one == 0


def test_activation_checkpointing_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="matched no module in Sequential"):
        train_in_order(8, activation_checkpointing=nn.Conv2d)


def sent(comm_hook):
    """Return the parameters, and dtype and size of each tensor that was reduced over ranks."""
    import torch.distributed as dist

    seen, reduce = set(), dist.all_reduce

    def watched(tensor, *args, **kwargs):
        seen.add((tensor.dtype, tensor.numel()))
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = watched
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = in_order(4)

    def loss(model, batch):
        return model(batch["x"].float().repeat(1, 22)[:, :64]).square().mean()

    how = {"epochs": 2, "precision": "fp32", "progress": False, "stop_signals": ()}  # which ranks would agree on
    fit(model, optimizer, loader, loss, comm_hook=comm_hook, **how)
    return parameters_of(model), seen


def test_gradients_cross_ranks_in_sixteen_bits(ranks):
    exact = ranks(2, sent, None)[0][0]
    (first, seen), (second, _) = ranks(2, sent, "fp16")
    assert {kind for kind, _ in seen} == {torch.float16}
    assert torch.equal(first, second)
    assert 0 < (first - exact).abs().max() < 0.01


def test_unknown_hooks_and_hooks_that_need_a_gpu_are_errors(ranks):
    with pytest.raises(ConfigError, match="comm_hook='zip' is not one of bf16, fp16, powersgd"):
        train_in_order(8, comm_hook="zip")
    for error in ranks(2, trained_with, comm_hook="bf16"):
        assert isinstance(error, ConfigError)
        assert "needs GPUs" in str(error)


def trained_with(**options):
    return train_in_order(4, **options)


def test_powersgd_is_asked_for(ranks):
    """It starts to compress after a thousand steps. Before, it sends the same as DDP."""
    for vector in ranks(2, trained_with, comm_hook="powersgd"):
        assert_close(vector, train_in_order(8))


def half_used(static_graph, accumulate=1):
    model, optimizer = build()
    model.add_module("unused", nn.Linear(2, 2).double())
    layers = nn.Sequential(*list(model)[:-1])

    def loss(replica, batch):
        return ((replica(batch["x"]) - batch["y"]) ** 2).mean()

    model.forward = lambda x: layers(x)
    options = {"epochs": 2, "precision": "fp32", "static_graph": static_graph, "progress": False}
    fit(model, optimizer, in_order(4 // accumulate), loss, accumulate=accumulate, **options)
    return parameters_of(layers)


def test_a_static_graph_may_leave_parameters_out(ranks):
    for accumulate in (1, 2):
        for vector in ranks(2, half_used, True, accumulate):
            assert_close(vector, train_in_order(8))
    assert all("did not receive grad" in str(error) for error in ranks(2, half_used, False))


def compiled(on):
    """Return the parameters and the number of compiled graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = Block().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = {"compile": {"backend": backend} if on else False, "precision": "fp32", "progress": False}
    fit(model, optimizer, in_order(4), squared_error, epochs=1, **options)
    return parameters_of(model), len(graphs)


@pytest.mark.slow
def test_compile(ranks):
    for (vector, graphs), (expected, none) in zip(ranks(2, compiled, True), ranks(2, compiled, False), strict=True):
        assert_close(vector, expected)
        assert graphs > none == 0


# ---- what a person sees


def test_tensorboard_gets_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    options = {"epochs": 2, "precision": "fp32", "log_dir": tmp_path, "log_every": 2, "scheduler": scheduler}
    history = fit(model, optimizer, in_order(4), squared_error, progress=False, **options)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert points["step/learning rate"] == [(step, pytest.approx(0.05 * 0.5**step)) for step in range(2, 21, 2)]
    assert points["epoch/loss"] == [(11, pytest.approx(history[0]["loss"])), (21, pytest.approx(history[1]["loss"]))]
    assert points["epoch/rows"] == [(11, 40), (21, 40)]
    for name in ("loss", "rows per second", "stall fraction", "memory"):
        assert [step for step, value in points[f"step/{name}"] if value >= 0] == list(range(2, 21, 2)), name


def test_the_memory_of_a_gpu_counts_from_the_start_of_the_metrics(tmp_path, monkeypatch):
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        tensorboard.TensorBoardWriter(tmp_path, 1, device).close()
    assert reset == [torch.device("cuda", 1)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
def test_a_full_disk_ends_the_metrics_and_not_the_run(small_disk, caplog):
    (small_disk / "tb").mkdir()
    model, optimizer = build()

    def loss(model, batch):
        with suppress(OSError), (small_disk / "other").open("ab") as file:
            file.write(bytes(2 << 20))
        return squared_error(model, batch)

    history = fit(model, optimizer, in_order(4), loss, epochs=3, log_dir=small_disk / "tb", log_every=1, progress=False)
    assert len(history) == 3
    assert caplog.text.count("gets no more metrics") == 1


def fit_logging_into(folder):
    model, optimizer = build()
    fit(model, optimizer, in_order(4), squared_error, epochs=1, log_dir=folder / "tb", progress=False)


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").touch()
    for error in ranks(2, fit_logging_into, tmp_path / "file"):
        assert isinstance(error, OSError)


def fit_logging_on_rank_0(folder):
    model, optimizer = build()
    log_dir = folder if World.detect().rank == 0 else None
    fit(model, optimizer, in_order(4), squared_error, epochs=1, log_dir=log_dir, progress=False)


def test_only_rank_0_needs_to_know_where_to_log(ranks, tmp_path):
    assert ranks(2, fit_logging_on_rank_0, tmp_path) == [None, None]
    assert list(tmp_path.iterdir())


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    """The points after the checkpoint, which the resumed run writes again, are hidden."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, optimizer = build()
    trained, options = [], {"checkpoint_dir": tmp_path / "c", "log_dir": tmp_path / "log", "log_every": 1}

    def loss(model, batch):
        trained.append(batch)
        if len(trained) == 15:
            raise CrashError
        return squared_error(model, batch)

    for error in (pytest.raises(CrashError), nullcontext()):
        with error:
            fit(model, optimizer, in_order(4), loss, epochs=2, precision="fp32", progress=False, **options)
    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    assert [point.step for point in events.Scalars("step/learning rate")] == list(range(1, 21))
    assert [point.step for point in events.Scalars("epoch/loss")] == [11, 21]


class Slow:
    """A loader with a state, whose batches take `seconds` of the clock `now`."""

    def __init__(self, now, seconds):
        self.now, self.seconds, self.yielded = now, seconds, 0

    def __iter__(self):
        for batch in list(in_order(4))[self.yielded :]:
            self.now[0] += self.seconds
            self.yielded += 1
            yield batch

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.yielded = state["yielded"]


def test_waits_before_a_resume_are_not_of_the_first_steps_after_it(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    now, trained = [0.0], []
    for module in (rank_batches, epoch_metrics, tensorboard):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def loss(model, batch):
        now[0] += 0.75
        trained.append(batch)
        if len(trained) == 6:
            raise CrashError
        return squared_error(model, batch)

    model, optimizer = build()
    options = {"log_dir": tmp_path / "log", "log_every": 1, "checkpoint_dir": tmp_path / "c", "checkpoint_every": 4}
    for seconds, error in ((9, pytest.raises(CrashError)), (0.25, nullcontext())):
        with error:
            fit(model, optimizer, Slow(now, seconds), loss, epochs=1, precision="fp32", progress=False, **options)
    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    stalls = {point.step: point.value for point in events.Scalars("step/stall fraction")}
    assert stalls[3] == pytest.approx(9 / 9.75)
    assert max(stalls[step] for step in stalls if step > 4) < 0.5


class CrashError(Exception):
    """An error of the training."""


def test_rows_per_second_are_of_all_batches(tmp_path, monkeypatch):
    """A batch of 4 rows takes 1 s, of which loading takes 0.25 s. Each point is the mean of 4 batches."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    now = [0.0]
    for module in (rank_batches, epoch_metrics, tensorboard):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def slowly(batches):
        for batch in batches:
            now[0] += 0.25
            yield batch

    def loss(model, batch):
        now[0] += 0.75
        return squared_error(model, batch)

    model, optimizer = build()
    options = {"epochs": 1, "accumulate": 2, "log_dir": tmp_path, "log_every": 2, "progress": False}
    fit(model, optimizer, slowly(in_order(4)), loss, precision="fp32", **options)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    # One batch is fetched ahead, so the first point includes the wait for five.
    speeds = [(point.step, point.value) for point in events.Scalars("step/rows per second")]
    assert speeds == [(2, pytest.approx(16 / 4.25)), (4, pytest.approx(4))]
    stalls = [point.value for point in events.Scalars("step/stall fraction")]
    assert stalls == [pytest.approx(1.25 / 4.25), pytest.approx(0.25)]


def test_the_home_of_the_user_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    train_in_order(4, log_dir="~/run", log_every=1)
    assert [path.name.split(".")[0] for path in (tmp_path / "run").iterdir()] == ["events"]
    assert not (tmp_path / "~").exists()


def logged_by(folder):
    train_in_order(4, log_dir=folder / World.detect().__repr__().replace(" ", ""))


def test_only_rank_0_logs(ranks, tmp_path):
    assert ranks(2, logged_by, tmp_path) == [None, None]
    assert ["rank=0" in path.name for path in tmp_path.iterdir()] == [True]


class Threaded:
    """A loader whose thread is in the stage "decode" while the loop waits for it."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        with ThreadPoolExecutor(1) as pool:
            for batch in self.loader:
                yield pool.submit(self.decoded, batch).result()

    def decoded(self, batch):
        with stage("decode"):
            return batch


def test_profile_names_the_stages(tmp_path):
    model, optimizer = build()
    options = {"profile": tmp_path / "trace", "checkpoint_dir": tmp_path / "kept", "progress": False}
    fit(model, optimizer, Threaded(in_order(4)), squared_error, epochs=2, precision="fp32", **options)
    assert [file.name for file in (tmp_path / "trace").iterdir()] == ["rank0.pt.trace.json"]
    events = json.loads((tmp_path / "trace" / "rank0.pt.trace.json").read_text())["traceEvents"]
    spans = {name: [event for event in events if event["name"] == name and "dur" in event] for name in STAGES}
    assert all(spans.values())
    (trainer,) = {event["tid"] for name in STAGES - {"decode"} for event in spans[name]}
    assert trainer not in {event["tid"] for event in spans["decode"]}
    for event in spans["decode"][1:-1]:  # each within the loop's waiting for it
        assert any(w["ts"] <= event["ts"] <= w["ts"] + w["dur"] for w in spans["wait for batch"])


def test_without_a_profile_stages_cost_nothing():
    assert stage("forward") is not None
    with pytest.raises(ZeroDivisionError), stage("forward"):
        1 / 0  # noqa: B018


def test_ranks_that_do_not_know_where_to_meet(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(ConfigError, match=r"2 ranks do not know where to meet: .* export MASTER_ADDR"),
        process_group(World(1, 2), torch.device("cpu"), None),
    ):
        pass


@pytest.mark.variants
@pytest.mark.parametrize(("argument", "url"), [("checkpoint_dir", "file://x"), ("profile", "s3://bucket/x")])
def test_a_url_is_no_folder(argument, url, tmp_path, monkeypatch):
    """It would be a folder of that name in the working directory, and lost with the machine."""
    monkeypatch.chdir(tmp_path)
    model, batches = nn.Linear(2, 1), [(torch.ones(4, 2), torch.zeros(4, 1))]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match=f"{argument}='{url}' is a URL: name a folder"):
        fit(model, optimizer, batches, squared_error, epochs=1, progress=False, **{argument: url})
    assert not list(tmp_path.iterdir())
