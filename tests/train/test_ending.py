"""Runs that end before their last epoch, by a signal, a number of steps or a time, and go on as if they had not."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from nightly import NIGHTLY
from regression import build, in_order, parameters_of, squared_error

from dataload import ConfigError, StopSignal, fit, make_loader
from dataload.runtime.fatal_frames import print_fatal_frames
from dataload.train import harness
from dataload.train.checkpoint.checkpoints import Checkpoints
from dataload.world import World

ROWS, EPOCHS = 96, 3
TRIALS = 50 if NIGHTLY else 1


@pytest.fixture(autouse=True)
def usual_handlers():
    """Handle signals as a program does that has set no handler. Other tests of the process may have."""
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGUSR1: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3)
    table = pa.table({"x": lists, "y": pa.FixedSizeListArray.from_arrays(pa.array(x.sum(1) ** 2), 1)})
    pq.write_table(table, path / "a.parquet", row_group_size=16)
    return str(path)


def train(folder, checkpoints, at=None, by=0, **options):
    """Train. Return the parameters, the history and the steps of this process; no history: the run was ended.

    Args:
        folder: The dataset.
        checkpoints: The checkpoint_dir.
        at: The call of the loss in which a rank gets SIGTERM; None: none does.
        by: That rank.
        **options: Of `fit`.
    """
    world, calls = World.detect(), count()
    model, optimizer = build(dropout=0.2)
    torch.manual_seed(world.rank)
    loader = options.pop("loader", None) or make_loader(folder, 4, cache=False)

    def loss(model, batch):
        if next(calls) == at and world.rank == by:
            os.kill(os.getpid(), signal.SIGTERM)
        return squared_error(model, batch)

    how = {"epochs": EPOCHS, "precision": "fp32", "progress": False, "checkpoint_dir": checkpoints, **options}
    try:
        history = fit(model, optimizer, loader, loss, **how)
    except SystemExit as end:
        assert end.code == 0
        history = None
    return parameters_of(model), history, next(calls)


def seconds_apart(history):
    """Return what does not depend on the speed of the machine."""
    return [(record["epoch"], record["loss"], record["rows"]) for record in history]


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_signal_to_any_rank_ends_all_ranks_after_the_same_step_and_the_run_goes_on_bit_by_bit(
    tmp_path, folder, ranks, trial
):
    draw = random.Random(trial)
    number = 4 if NIGHTLY else 2
    whole = ranks(number, train, folder, None)
    steps = whole[0][2]
    at, by, every = draw.randrange(steps - 1), draw.randrange(number), draw.choice([None, 2])
    ended = ranks(number, train, folder, str(tmp_path), at=at, by=by, checkpoint_every=every)
    assert [history for _, history, _ in ended] == [None] * number
    assert [calls for *_, calls in ended] == [at + 1] * number
    rest = ranks(number, train, folder, str(tmp_path), checkpoint_every=every)
    for (expected, figures, _), (actual, again, calls) in zip(whole, rest, strict=True):
        assert torch.equal(actual, expected)
        assert seconds_apart(again) == seconds_apart(figures)
        assert calls == steps - at - 1


def told_without_a_group_for_the_host():
    dist.init_process_group("cuda:gloo")  # as init_process_group("nccl") has none
    with StopSignal() as stop:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        requested = stop.requested()
    dist.destroy_process_group()
    return requested, stop.reason


def test_ranks_agree_in_a_process_group_of_gpus_alone(ranks):
    assert ranks(2, told_without_a_group_for_the_host) == [(True, "SIGTERM on rank 1")] * 2


def test_max_steps_counts_over_resumes_and_a_finished_run_says_how_to_go_on(tmp_path, folder, caplog):
    expected, figures, _ = train(folder, None)
    _, first, calls = train(folder, tmp_path, max_steps=7, accumulate=2)
    assert calls == 14
    assert [(record["epoch"], record["rows"], record["unfinished"]) for record in first] == [(0, 56, True)]
    assert (
        "max_steps=7 has ended the run after step 7, in epoch 0: a call with a larger max_steps goes on from"
        in caplog.text
    )
    caplog.clear()
    _, again, calls = train(folder, tmp_path, max_steps=7, accumulate=2)
    assert (again, calls) == ([], 0)
    assert "the run is finished, its checkpoint has all 7 steps, so nothing is trained: raise max_steps" in caplog.text

    parts = [train(folder, tmp_path / "parts", max_steps=most)[2] for most in (5, 24, 40)]
    assert parts == [5, 19, 16]
    actual, history, _ = train(folder, tmp_path / "parts")
    assert torch.equal(actual, expected)
    assert seconds_apart(history) == seconds_apart(figures)


def test_max_seconds_ends_the_run_after_a_step(tmp_path, folder):
    _, history, calls = train(folder, tmp_path, max_seconds=1e-9)
    assert (len(history), calls) == (1, 1)
    _, history, calls = train(folder, tmp_path, max_seconds=-1)  # a deadline that has passed
    assert (len(history), calls) == (1, 1)
    _, history, _ = train(folder, tmp_path, max_seconds=1e9)
    assert [record["rows"] for record in history] == [ROWS] * EPOCHS


def by_a_deadline_of_its_own(folder):
    return train(folder, None, max_seconds=1e9 if World.detect().rank else 1e-9)


def test_ranks_may_measure_the_seconds_to_a_deadline_themselves(folder, ranks):
    assert [calls for *_, calls in ranks(2, by_a_deadline_of_its_own, folder)] == [1, 1]


@pytest.mark.parametrize("of", ["step", "evaluate", "max_steps"])
def test_a_signal_at_the_end_of_a_run_is_heeded_too(tmp_path, folder, caplog, of):
    """Otherwise the program would begin its next part, such as another run, until it is killed."""
    last = ROWS // 4 * EPOCHS

    def evaluate(model):
        if of == "evaluate" and not evaluated:
            evaluated.append(os.kill(os.getpid(), signal.SIGTERM))
        return {"score": 1.0}

    evaluated: list[None] = []
    how = {"evaluate": evaluate, "epochs": EPOCHS}
    if of == "evaluate":
        how["epochs"] = 1
    if of == "max_steps":
        how["max_steps"] = last - 1
    at = {"step": last - 1, "max_steps": last - 2}.get(of)
    _, history, calls = train(folder, tmp_path, at=at, **how)
    assert history is None
    assert caplog.text.count("SIGTERM has ended the run after step") == 1
    _, history, again = train(folder, tmp_path, **how)
    assert (again, len(history)) == (0, how["epochs"] - (of == "max_steps"))
    if of != "max_steps":
        assert history[-1]["score"] == 1.0
    assert calls == {"step": last, "evaluate": ROWS // 4, "max_steps": last - 1}[of]


def test_a_signal_while_a_run_is_opened_ends_it_before_its_first_step(tmp_path, folder, monkeypatch):
    train(folder, tmp_path, max_steps=3)
    loader = make_loader(folder, 4, cache=False)
    load = loader.load_state_dict

    def told(*state):
        os.kill(os.getpid(), signal.SIGTERM)
        load(*state)

    monkeypatch.setattr(loader, "load_state_dict", told)
    assert train(folder, tmp_path, loader=loader)[1:] == (None, 0)


def test_a_signal_before_the_first_step_of_all_says_that_nothing_is_saved(tmp_path, folder, monkeypatch, caplog):
    find = Checkpoints.find
    monkeypatch.setattr(Checkpoints, "find", lambda *args: os.kill(os.getpid(), signal.SIGTERM) or find(*args))
    assert train(folder, tmp_path)[1:] == (None, 0)
    assert "SIGTERM has ended the run after step 0, in epoch 0: the same call begins" in caplog.messages


def test_a_signal_while_a_run_is_opened_ends_it_before_it_evaluates(tmp_path, folder, monkeypatch):
    train(folder, tmp_path, epochs=1, evaluate=lambda _: {"score": 1.0})
    evaluated = []
    how = {"epochs": 1, "evaluate": lambda _: evaluated.append(None) or {}}
    find = Checkpoints.find
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "find", lambda *args: os.kill(os.getpid(), signal.SIGTERM) or find(*args))
        assert train(folder, tmp_path, **how)[1:] == (None, 0)
    assert evaluated == []
    train(folder, tmp_path, **how)
    assert evaluated == [None]


def told_at_the_end(folder, checkpoints):
    told, close = [], Checkpoints.close

    def closing(run):
        if World.detect().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        close(run)

    Checkpoints.close = closing
    harness.log.addFilter(lambda record: told.append(record.getMessage()) or True)
    return train(folder, checkpoints, epochs=1)[1], told


def test_a_signal_while_a_run_is_closed_ends_the_program_on_all_ranks(tmp_path, folder, ranks):
    """To give the lease of a store back may take a minute."""
    said = ["SIGTERM on rank 1 came when the run had ended already: the program ends, too"]
    assert ranks(2, told_at_the_end, folder, str(tmp_path)) == [(None, said), (None, [])]


def test_a_signal_in_the_save_by_which_max_steps_end_a_run_is_heeded_too(tmp_path, folder, monkeypatch):
    save = Checkpoints.save
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", lambda *args: os.kill(os.getpid(), signal.SIGTERM) or save(*args))
        assert train(folder, tmp_path, max_steps=3)[1:] == (None, 3)
    assert train(folder, tmp_path, max_steps=5)[2] == 2


@pytest.mark.slow
def test_a_rank_that_waits_for_the_others_ends_at_a_signal(folder):
    program = """
import torch
from dataload import fit
print("waits", flush=True)
model = torch.nn.Linear(1, 1)
fit(model, torch.optim.SGD(model.parameters()), [], lambda *_: None, epochs=1)
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | ranks) as waiting:
        assert waiting.stdout.readline() == b"waits\n"
        with socket.socket() as peer:
            while peer.connect_ex(("127.0.0.1", port)):
                assert waiting.poll() is None
        waiting.terminate()
        assert waiting.wait(60) == -signal.SIGTERM


def test_a_loader_without_a_state_ends_at_once_and_its_epoch_begins_again(tmp_path, caplog):
    _, history, calls = train(None, tmp_path, at=7, loader=in_order(8))
    assert (history, calls) == (None, 8)
    assert "SIGTERM has ended the run after step 8, in epoch 1: the same call begins again with epoch 1" in caplog.text
    _, history, calls = train(None, tmp_path, loader=in_order(8))
    assert (len(history), calls) == (EPOCHS, 10)


def test_a_run_without_checkpoints_says_that_nothing_is_saved(folder, caplog):
    _, history, calls = train(folder, None, at=2)
    assert (history, calls) == (None, 3)
    assert "nothing is saved without a checkpoint_dir" in caplog.text


class Batches:
    """Batches of a rank, of which rank 1 has two more than rank 0, with a state."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        batch = {"x": torch.ones(4, 3).double(), "y": torch.ones(4, 1).double()}
        while self.next < (5 if World.detect().rank else 3):
            self.next += 1
            yield batch
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def uneven(checkpoints, at):
    return train(None, checkpoints, at=at, loader=Batches(), epochs=2)


@pytest.mark.variants
@pytest.mark.parametrize(("at", "last"), [(0, 2), (1, 5)])
def test_ranks_with_fewer_batches_end_with_the_others(tmp_path, ranks, at, last):
    ended = ranks(2, uneven, str(tmp_path), at)
    assert [(history, calls) for _, history, calls in ended] == [(None, last)] * 2
    whole, rest = ranks(2, uneven, None, None), ranks(2, uneven, str(tmp_path), None)
    assert torch.equal(rest[0][0], whole[0][0])
    assert [calls for *_, calls in rest] == [10 - last] * 2


def in_an_order_of_its_own(folder):
    names = ["SIGTERM", "SIGUSR1"]
    return train(folder, None, epochs=1, stop_signals=names[:: -1 if World.detect().rank else 1])


def test_ranks_may_name_the_signals_in_any_order(folder, ranks):
    assert [len(history) for _, history, _ in ranks(2, in_an_order_of_its_own, folder)] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("of", ["dataload", "torch"])
def test_a_signal_to_the_process_group_ends_the_program_with_status_0_and_no_worker(tmp_path, of):
    pq.write_table(pa.table({"x": np.arange(20_000.0)}), tmp_path / "a.parquet")  # more than workers make ahead
    program = f"""
import os, signal, torch
from torch.utils.data import DataLoader
from dataload import fit, make_loader
group = os.getpgid(0)
def transform(batch):
    if 500 in batch["x"]:
        os.killpg(group, signal.SIGTERM)
    return batch
def loss(model, batch):
    return model(batch["x"][:, None]).tanh().mean()
model = torch.nn.Linear(1, 1).double()
if {of!r} == "torch":
    rows = [{{"x": torch.tensor(float(row)).double()}} for row in range(20_000)]
    collate = torch.utils.data.default_collate
    loader = DataLoader(rows, 2, num_workers=2, collate_fn=lambda rows: transform(collate(rows)))
else:
    loader = make_loader({str(tmp_path)!r}, 2, cache=False, shuffle=False, transform=transform, num_workers=2)
fit(model, torch.optim.SGD(model.parameters(), 0.1), loader, loss, epochs=1, checkpoint_dir={str(tmp_path / "run")!r})
print("not reached")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "SIGTERM has ended the run after step" in done.stderr
    assert done.stdout == ""
    # torch's DataLoader has no state, so its epoch begins again.
    assert any((tmp_path / "run").glob("checkpoint-*")) == (of == "dataload")


@pytest.mark.slow
@pytest.mark.parametrize(("of", "method"), [("dataload", "fork"), ("torch", "fork"), ("dataload", "spawn")])
def test_a_signal_to_the_process_group_as_workers_start_ends_the_program_with_status_0(tmp_path, of, method):
    pq.write_table(pa.table({"x": np.arange(64.0)}), tmp_path / "a.parquet")
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, signal, torch
from torch.utils.data import DataLoader
from dataload import fit, make_loader

def end_group():
    os.killpg(int(os.environ["GROUP"]), signal.SIGTERM)

def loss(model, batch):
    return model(batch["x"][:, None]).tanh().mean()

if __name__ == "__mp_main__":  # in a worker that is spawned
    end_group()
if __name__ == "__main__":
    os.environ["GROUP"] = str(os.getpgid(0))
    os.register_at_fork(after_in_child=end_group)
    model = torch.nn.Linear(1, 1).double()
    workers = {{"num_workers": 2, "multiprocessing_context": {method!r}}}
    if {of!r} == "torch":
        rows = [{{"x": torch.tensor(float(row)).double()}} for row in range(64)]
        loader = DataLoader(rows, 2, **workers)
    else:
        loader = make_loader({str(tmp_path / "a.parquet")!r}, 2, cache=False, transform=dict, **workers)
    fit(model, torch.optim.SGD(model.parameters(), 0.1), loader, loss, epochs=1)
    print("not reached")
""")
    command = [sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "SIGTERM has ended the run after step 1" in done.stderr
    assert done.stdout == ""


def test_signals_that_the_program_handles_are_left_to_it(folder):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        _, history, _ = train(folder, None, at=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert len(history) == EPOCHS


def test_a_run_within_a_stop_signal_heeds_it_too(folder):
    with StopSignal() as stop:
        assert train(folder, None, at=2)[1:] == (None, 3)
        assert (stop.requested(), stop.reason) == (True, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_rank_that_was_forked_within_a_stop_signal_heeds_its_own():
    with StopSignal() as outer:
        child = os.fork()
        if not child:
            try:
                with StopSignal() as stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                    os._exit(3 if stop.requested() else 4)
            finally:
                os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert not outer.requested()


def test_a_handler_that_the_program_sets_during_the_run_stays():
    def own(*_):
        pass

    try:
        with StopSignal(["SIGUSR1"]):
            signal.signal(signal.SIGUSR1, own)
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_handlers_of_other_languages_are_left_to_the_program(tmp_path):
    with (tmp_path / "stacks").open("w+") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        try:
            with StopSignal(["SIGUSR1"]) as stop:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert not stop.requested()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        assert "test_ending.py" in (tmp_path / "stacks").read_text()


def test_a_kernel_that_does_not_tell_of_handlers_is_no_obstacle(monkeypatch):
    """As that of gVisor, whose /proc/self/status has no such line."""
    read = Path.read_text

    def without_signals(path, *args, **options):
        lines = read(path, *args, **options).splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("Sig"))

    monkeypatch.setattr(Path, "read_text", without_signals)
    with StopSignal(["SIGUSR1"]) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested()
    print_fatal_frames()


def test_ctrl_c_is_heeded_if_it_is_named():
    with StopSignal(["SIGINT"]) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.requested(), stop.reason) == (True, "SIGINT")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ranks_may_be_forked_after_the_request_was_made():
    stop = StopSignal()
    child = os.fork()
    if not child:
        try:
            with stop:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(3 if stop.requested() else 4)
        finally:
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_outside_of_the_main_thread_signals_stay_as_they_are(folder):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(folder, None, epochs=1)))
    thread.start()
    thread.join()
    assert len(found[0][1]) == 1


def test_handlers_are_restored_and_forked_children_end_as_before():
    with StopSignal(["SIGUSR1"]) as stop:
        child = os.fork()
        if not child:
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR1
        assert not stop.requested()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps=0"),
        ({"max_seconds": float("nan")}, "max_seconds=nan must be a number of seconds"),
        ({"max_seconds": "10"}, "max_seconds='10' must be a number of seconds"),
        ({"stop_signals": ["SIGKILL"]}, "name signals that a process can handle"),
        ({"stop_signals": [signal.SIGTERM]}, "name signals that a process can handle"),
        ({"stop_signals": signal.SIGTERM}, "name signals that a process can handle"),
        ({"stop_signals": ["TERM"]}, "name signals that a process can handle"),
    ],
)
def test_impossible_endings_are_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        train(folder, None, **options)
