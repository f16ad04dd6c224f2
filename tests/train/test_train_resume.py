"""Checkpoints: which exist, which one a run resumes from, and that their state is restored exactly."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
from collections import defaultdict
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoint_files import change_state, saved_state, seal
from regression import Rows, build, in_order, parameters_of, squared_error
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from dataload.cache.local import run_lock
from dataload.dataset import make_dataset
from dataload.errors import ConfigError
from dataload.loader import make_loader
from dataload.train.checkpoint import checkpoints, manifest, tensor_file
from dataload.train.checkpoint.checkpoints import STATE, TENSORS, Checkpoints, load
from dataload.train.checkpoint.state import rng_state
from dataload.train.harness import fit
from dataload.train.rank_batches import batches_on
from dataload.world import World


class CrashError(Exception):
    """An error in the user's code."""


def train_with_noise(folder, epochs, crash_at=None, evaluate_crash_at=None, resume="auto"):
    """Train with dropout, global generators and a schedule of NumPy numbers. Return parameters and metrics.

    Evaluation draws from the generators, too.
    """
    world = World.detect()
    model, optimizer = build(dropout=0.3)
    torch.manual_seed(100 + world.rank)
    np.random.seed(200 + world.rank)  # noqa: NPY002
    random.seed(300 + world.rank)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(1 / (1 + step)))
    sampler = DistributedSampler(Rows(), 2, world.rank) if world.world_size == 2 else None
    loader = DataLoader(Rows(), 8, shuffle=sampler is None, sampler=sampler)
    batches, evaluations = count(1), count(1)

    def loss(model, batch):
        if next(batches) == crash_at:
            raise CrashError
        scale = np.random.rand() + random.random()  # noqa: NPY002
        return squared_error(model, batch) * scale

    def evaluate(model):
        if next(evaluations) == evaluate_crash_at:
            raise CrashError
        random.random(), torch.rand(())
        return {"weight": np.float32(model[0].weight.sum())}

    history = fit(
        model,
        optimizer,
        loader,
        loss,
        epochs=epochs,
        precision="fp32",
        scheduler=scheduler,
        evaluate=evaluate,
        checkpoint_dir=folder,
        resume=resume,
        progress=False,
    )
    return parameters_of(model), [(record["epoch"], record["loss"], record["weight"]) for record in history]


def crash_then_resume(folder, **crash):
    with pytest.raises((CrashError, RuntimeError)):
        train_with_noise(folder, 4, **crash)
    assert (folder / "checkpoint-000002").is_dir()
    return train_with_noise(folder, 4)


# In the third of five-batch epochs, and after the second: what was saved then was not evaluated.
@pytest.mark.parametrize("crash", [{"crash_at": 13}, {"evaluate_crash_at": 2}])
def test_a_loader_without_state_is_resumed_at_the_end_of_an_epoch(tmp_path, crash):
    expected, figures = train_with_noise(None, 4)
    actual, again = crash_then_resume(tmp_path, **crash)
    assert torch.equal(actual, expected)
    assert again == figures
    assert [epoch for epoch, *_ in figures] == [0, 1, 2, 3]


def shuffled_by_its_own_generator(where):
    own = torch.Generator().manual_seed(0)
    if where == "loader":
        return DataLoader(Rows(), 8, shuffle=True, generator=own)
    sampler = RandomSampler(Rows(), generator=own)
    if where == "sampler":
        return DataLoader(Rows(), 8, sampler=sampler)
    return DataLoader(Rows(), batch_sampler=BatchSampler(sampler, 8, drop_last=False))


@pytest.mark.parametrize("where", ["loader", "sampler", "batch_sampler"])
def test_the_generator_of_a_loader_is_resumed(tmp_path, where):
    def train(*epochs):
        folder, rows = tmp_path / str(len(epochs)), []

        def loss(model, batch):
            rows.extend(batch["name"])
            return squared_error(model, batch)

        for total in epochs:
            model, optimizer = build()
            loader = shuffled_by_its_own_generator(where)
            fit(model, optimizer, loader, loss, epochs=total, checkpoint_dir=folder, progress=False)
        return rows

    assert train(1, 2, 3) == train(3)


def doubled(batch):
    """Return a batch of the regression, made in a worker."""
    x = batch["id"].double()[:, None].expand(-1, 3) / 40
    return {"x": x, "y": 2 * x[:, :1]}


def loader_with_persistent_workers(kind, folder):
    options = {"num_workers": 1, "persistent_workers": True}
    if kind == "torch":
        return DataLoader(Rows(), 8, shuffle=True, **options)
    if kind == "torch with a generator":
        return DataLoader(Rows(), 8, shuffle=True, generator=torch.Generator().manual_seed(0), **options)
    return make_loader(make_dataset(str(folder / "rows.parquet"), cache=False), 8, transform=doubled, **options)


@pytest.mark.variants
@pytest.mark.parametrize("kind", ["torch", "torch with a generator", "dataload"])
def test_the_generators_are_resumed_where_workers_are_persistent(tmp_path, kind):
    """Epochs after the first start no workers, but a resumed run starts them. The model draws, and so may the order."""
    pq.write_table(pa.table({"id": range(40)}), tmp_path / "rows.parquet")

    def train(*epochs):
        for total in epochs:
            model, optimizer = build(dropout=0.3)
            loader = loader_with_persistent_workers(kind, tmp_path)
            options = {"epochs": total, "precision": "fp32", "checkpoint_dir": tmp_path / str(len(epochs))}
            fit(model, optimizer, loader, squared_error, progress=False, **options)
            del loader
        return parameters_of(model)

    assert torch.equal(train(1, 2, 3), train(3))


def test_a_loader_with_persistent_workers_keeps_its_own_generator():
    """Torch draws a seed in each epoch for a stream of torchdata. From a new generator, it would always be the same."""
    loader = DataLoader(Rows(), 8, num_workers=1, persistent_workers=True)
    batches_on(loader, torch.device("cpu"))
    generator = loader.generator
    assert generator is not None
    batches_on(loader, torch.device("cpu"))
    assert loader.generator is generator


def test_checkpoints_in_an_epoch_need_a_loader_with_a_state(tmp_path):
    model, optimizer = build()
    with pytest.raises(ConfigError, match="checkpoint_every: this loader has no state_dict"):
        fit(model, optimizer, in_order(8), squared_error, epochs=1, checkpoint_every=1, checkpoint_dir=tmp_path)


class Drawing:
    """A loader with a state that draws from torch's generator when its iteration starts, as torch's own loaders do.

    Its state can be loaded only on its own rank.
    """

    def __init__(self, num_rows=40, num_batches=None):
        self.num_rows, self.num_batches = num_rows, num_batches
        self.given = 0

    def __iter__(self):
        torch.rand(())
        for batch in list(in_order(4, self.num_rows))[self.given : self.num_batches]:
            self.given += 1
            yield batch
        self.given = 0

    def state_dict(self):
        return {"given": self.given, "rank": World.detect().rank}

    def load_state_dict(self, state):
        assert state["rank"] == World.detect().rank
        self.given = state["given"]


def train_drawing(folder, crash_at=None, checkpoint_every=3, **of_loader):
    model, optimizer = build(dropout=0.3)
    batches = count()

    def loss(model, batch):
        if next(batches) == crash_at:
            raise CrashError
        return squared_error(model, batch)

    options = {"epochs": 2, "precision": "fp32", "checkpoint_every": checkpoint_every, "progress": False}
    fit(model, optimizer, Drawing(**of_loader), loss, checkpoint_dir=folder, **options)
    return parameters_of(model)


@pytest.mark.variants
@pytest.mark.parametrize("crash_at", [8, 11, 19])
def test_loaders_may_draw_from_the_generators_when_they_begin(tmp_path, crash_at):
    expected = train_drawing(tmp_path / "whole")
    with pytest.raises(CrashError):
        train_drawing(tmp_path / "cut", crash_at)
    assert torch.equal(train_drawing(tmp_path / "cut"), expected)


def drawing_resumed(folder):
    with pytest.raises(CrashError):
        train_drawing(folder, crash_at=4)
    train_drawing(folder)


def test_ranks_are_resumed_with_their_own_loaders(ranks, tmp_path):
    assert ranks(2, drawing_resumed, tmp_path) == [None, None]
    with pytest.raises(ConfigError, match=r"a different loader state for each of 2 ranks.* start 2 ranks, not 1"):
        train_drawing(tmp_path)


def uneven_resumed(folder):
    """Crash in each step after the last batch of rank 0, and resume."""
    options = {"checkpoint_every": 1, "num_rows": 48, "num_batches": (3, 6)[World.detect().rank]}
    expected, latest = train_drawing(folder / "whole", **options), []
    for crash_at in range(3, 7):
        cut = folder / str(crash_at)
        with pytest.raises(CrashError):
            train_drawing(cut, crash_at, **options)
        latest.append(names(cut)[-1])
        assert torch.equal(train_drawing(cut, **options), expected)
    return latest


def test_ranks_with_unequal_numbers_of_batches_are_resumed_before_the_first_of_them_ends(ranks, tmp_path):
    latest = ["checkpoint-000002"] * 3 + ["checkpoint-000003"]  # of the second step, and of the first epoch
    assert ranks(2, uneven_resumed, tmp_path) == [latest] * 2


def train_sparse(folder, *epochs):
    """Train for each number of epochs in turn, as after a kill."""
    draw = torch.Generator().manual_seed(World.detect().rank)
    batches = [torch.randint(50, (8,), generator=draw) for _ in range(6)]
    for total in epochs:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 7, sparse=True), nn.Linear(7, 90), nn.Tanh(), nn.Linear(90, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"epochs": total, "precision": "fp32", "checkpoint_dir": folder, "progress": False}
        fit(model, optimizer, batches, lambda model, batch: model(batch).square().mean(), **options)
    return parameters_of(model)


@pytest.mark.slow
def test_a_model_with_sparse_gradients_is_resumed_on_three_ranks(ranks, tmp_path):
    expected = ranks(3, train_sparse, tmp_path / "at once", 3)
    actual = ranks(3, train_sparse, tmp_path / "resumed", 1, 2, 3)
    assert all(torch.equal(vector, expected[0]) for vector in expected + actual)


def train_from_files(folder, crash_at=None):
    model, batches = nn.Linear(1, 1), count()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    loader = make_loader(make_dataset(str(folder / "rows.parquet"), cache=False), 4, drop_last=True)

    def loss(model, batch):
        if next(batches) == crash_at:
            raise CrashError
        return model(batch["id"].float()[:, None]).square().mean()

    options = {"epochs": 2, "precision": "fp32", "checkpoint_every": 5, "progress": False}
    return [record["rows"] for record in fit(model, optimizer, loader, loss, checkpoint_dir=folder / "run", **options)]


def test_more_ranks_go_on_where_less_than_a_batch_of_theirs_is_left(ranks, tmp_path):
    """Of 24 rows, one rank has trained on 20. The other 4 are less than a global batch of two ranks."""
    pq.write_table(pa.table({"id": range(24)}), tmp_path / "rows.parquet")
    with pytest.raises(CrashError):
        train_from_files(tmp_path, crash_at=5)
    assert ranks(2, train_from_files, tmp_path) == [[20, 24]] * 2


def test_skipped_steps_are_those_of_all_ranks(tmp_path):
    """One rank resumes the checkpoint of two ranks, which have skipped the same steps."""

    def run(folder, crash_at=None):
        torch.manual_seed(0)
        model, batches = nn.Linear(3, 1), count()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)

        def loss(model, batch):
            if next(batches) == crash_at:
                raise CrashError
            return model(batch["x"].float()).float().square().mean()

        options = {"epochs": 1, "precision": "fp16", "checkpoint_every": folder and 4, "checkpoint_dir": folder}
        return fit(model, optimizer, Drawing(), loss, progress=False, **options)[0]

    with pytest.raises(CrashError):
        run(tmp_path, crash_at=4)
    rest = saved_state(tmp_path / "checkpoint-000001")
    [(_, own)] = rest["processes"]
    change_state(tmp_path / "checkpoint-000001", {**rest, "processes": [(0, own), (1, own)]})
    assert run(tmp_path)["skipped_steps"] == run(None)["skipped_steps"] > 0


def test_ranks_are_resumed_with_their_own_generators(ranks, tmp_path):
    expected = ranks(2, train_with_noise, None, 4)
    actual = ranks(2, crash_then_resume, tmp_path, crash_at=8)  # in the third of three-batch epochs
    for (vector, figures), (expected_vector, expected_figures) in zip(actual, expected, strict=True):
        assert torch.equal(vector, expected_vector)
        assert figures == expected_figures


def test_resume_chooses_its_checkpoint(tmp_path):
    done, _ = train_with_noise(tmp_path / "a", 2)
    for source in (tmp_path / "a", tmp_path / "a" / "checkpoint-000002", str(tmp_path / "a")):
        again, figures = train_with_noise(None, 2, resume=source)
        assert torch.equal(again, done)
        assert len(figures) == 2
    assert len(train_with_noise(None, 1, resume=tmp_path / "a" / "checkpoint-000001")[1]) == 1
    for missing in (tmp_path / "b", tmp_path / "a" / "other"):
        with pytest.raises(ConfigError, match="there is no checkpoint at this path"):
            train_with_noise(None, 2, resume=missing)


def test_folders_of_other_programs_are_no_checkpoints(tmp_path):
    """The Trainer of transformers has such names, too."""
    for name in ("checkpoint-500", "checkpoint-100000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}")
    done, _ = train_with_noise(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002", "checkpoint-100000", "checkpoint-500"]
    again, figures = train_with_noise(tmp_path, 2)
    assert torch.equal(again, done)
    assert len(figures) == 2


def test_files_beside_the_checkpoints_do_not_make_a_checkpoint_of_their_folder(tmp_path):
    """Other programs write such names, too."""
    for name in (manifest.MANIFEST, STATE, TENSORS):
        (tmp_path / name).write_text("{}")
    done, _ = train_with_noise(tmp_path, 2)
    for resumed in (train_with_noise(tmp_path, 2), train_with_noise(None, 2, resume=tmp_path)):
        assert torch.equal(resumed[0], done)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / STATE).write_text("{}")
    with pytest.raises(ConfigError, match="there is no checkpoint at this path"):
        train_with_noise(None, 2, resume=tmp_path / "other")


def test_a_checkpoint_may_be_renamed(tmp_path):
    done, _ = train_with_noise(tmp_path, 1)
    best = (tmp_path / "checkpoint-000001").rename(tmp_path / "best")
    assert torch.equal(train_with_noise(None, 1, resume=best)[0], done)
    (best / manifest.MANIFEST).unlink()
    with pytest.raises(ConfigError, match=r"best is damaged: manifest.json is missing"):
        train_with_noise(None, 1, resume=best)


def test_a_folder_that_only_root_may_enter_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "lost+found").mkdir()
    is_file = Path.is_file

    def denied(path):  # as to a user, which this test may not be
        if "lost+found" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", denied)
    train_with_noise(tmp_path, 1)
    assert "checkpoint-000001" in names(tmp_path)


def test_a_signal_ends_the_run_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """DCP makes one error of all that it catches."""

    class Interrupted(FileSystemWriter):
        def write_data(self, *_):
            raise SystemExit(99)

    monkeypatch.setattr(checkpoints, "_Writer", Interrupted)
    with pytest.raises(SystemExit) as ended:
        train_with_noise(tmp_path, 1)
    assert ended.value.code == 99
    assert "checkpoint-000001" not in names(tmp_path)


def test_checkpoints_of_a_new_run_come_after_those_of_an_earlier_run(tmp_path):
    train_with_noise(tmp_path, 3)
    restarted, figures = train_with_noise(tmp_path, 1, resume=None)
    assert len(figures) == 1
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-000003", "checkpoint-000004"]
    assert torch.equal(train_with_noise(tmp_path, 1)[0], restarted)


@pytest.mark.parametrize("keys", [("ema.w", "ema"), (1, "1")])
def test_two_tensors_of_one_name_stop_the_run_before_it_trains(keys, tmp_path):
    class Averaging(torch.optim.SGD):
        def state_dict(self):
            first, second = keys
            other = {"w": torch.ones(3)} if second == "ema" else torch.ones(3)
            return {**super().state_dict(), first: torch.zeros(3), second: other}

    def never(model, batch):
        raise AssertionError("it trains")

    model, _ = build()
    optimizer = Averaging(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"two are called optimizer\.(ema\.w|1): rename a key"):
        fit(model, optimizer, in_order(4), never, epochs=1, checkpoint_dir=tmp_path, progress=False)


@pytest.mark.parametrize("resume", [None, "other", "run/checkpoint-000001"])
def test_checkpoints_of_earlier_runs_stay(tmp_path, resume):
    """Also when the new run is resumed. It removes its own."""
    folder, other = tmp_path / "run", tmp_path / "other"
    train_with_noise(folder, 2)
    earlier = names(folder)
    train_with_noise(other, 1)
    train_with_noise(folder, 4, resume=resume and tmp_path / resume)
    own = names(folder)[2:]
    assert names(folder)[:2] == earlier
    assert len(own) == 2
    train_with_noise(folder, 6)
    assert names(folder)[:2] == earlier
    assert len(names(folder)) == 4
    assert not set(own) & set(names(folder))


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != run_lock.LOCK)


def test_new_files_are_trained_on_from_the_end_of_an_epoch_on(tmp_path, caplog):
    data = tmp_path / "rows"
    data.mkdir()

    def train(epochs, crash_at=None, resume="auto"):
        model, calls = nn.Linear(1, 1), count(1)

        def loss(model, batch):
            if next(calls) == crash_at:
                raise CrashError
            return model(batch["id"].float()[:, None]).square().mean()

        loader = make_loader(make_dataset(str(data), cache=False), 4)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        options = {"checkpoint_every": 1, "checkpoint_dir": tmp_path / "checkpoints", "keep": 9, "progress": False}
        history = fit(model, optimizer, loader, loss, epochs=epochs, resume=resume, **options)
        return [record["rows"] for record in history]

    rows = pa.table({"id": range(8)})
    pq.write_table(rows, data / "a.parquet")
    assert train(1) == [8]
    pq.write_table(rows, data / "b.parquet")
    with pytest.raises(CrashError):
        train(2, crash_at=3)
    [warning] = [record.getMessage() for record in caplog.records if record.name == "dataload.train.loop"]
    assert warning.endswith("checkpoint-000002 is of another dataset: epoch 1 begins with this one")
    pq.write_table(rows, data / "c.parquet")
    with pytest.raises(ConfigError, match=r"within an epoch of another dataset: .* resume= a checkpoint from the end"):
        train(2)
    assert train(2, resume=tmp_path / "checkpoints/checkpoint-000002") == [8, 24]


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_ones_are_kept(tmp_path, keep):
    kept = Checkpoints(tmp_path, keep)
    for number in range(5):
        kept.save({"model": {"x": torch.tensor(number)}}, {})
    kept.close()
    assert names(tmp_path) == [f"checkpoint-{number:06d}" for number in range(6 - keep, 6)]
    with pytest.raises(ConfigError, match="keep=0"):
        Checkpoints(tmp_path, 0)


def test_files_are_hashed_as_they_are_written_and_not_read_back(tmp_path):
    def bytes_read():
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    run = Checkpoints(tmp_path, 1)
    before = bytes_read()
    run.save({"model": {"x": torch.zeros(8 << 20)}}, {})
    assert bytes_read() - before < 8 << 20
    run.close()
    assert sum(file.stat().st_size for file in (tmp_path / "checkpoint-000001").iterdir()) > 32 << 20
    assert manifest.damage(tmp_path / "checkpoint-000001", (TENSORS, STATE), 0, 1) is None


def test_what_was_half_written_or_half_removed_is_swept_away(tmp_path):
    train_with_noise(tmp_path, 3)
    (tmp_path / "checkpoint-000003").rename(tmp_path / ".checkpoint-000003")
    (tmp_path / "mine").mkdir()
    _, figures = train_with_noise(tmp_path, 2)
    assert len(figures) == 2
    assert names(tmp_path) == ["checkpoint-000002", "mine"]


class Evil:
    """An object whose unpickling creates a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_what_is_planted_in_a_checkpoint_runs_no_code(tmp_path):
    """Whoever can write a file there can write its checksum, too."""
    done, figures = train_with_noise(tmp_path, 1)
    planted = tmp_path / "checkpoint-000001"
    evil = pickle.dumps(Evil(tmp_path / "owned"))
    (planted / TENSORS).write_bytes(evil)
    seal(planted)
    again, resumed = train_with_noise(tmp_path, 1)
    assert torch.equal(again, done)
    assert resumed == figures
    for file in (STATE, "__0_0.distcp"):
        content = (planted / file).read_bytes()
        torch.save({"history": Evil(tmp_path / "owned")}, planted / file)
        os.truncate(planted / file, len(content))
        seal(planted)
        with pytest.raises(ConfigError, match="checkpoint-000001 cannot be read"):
            train_with_noise(tmp_path, 2)
        (planted / file).write_bytes(content)
    assert not (tmp_path / "owned").exists()


def test_bytes_in_place_of_a_tensor_are_not_unpickled(tmp_path):
    """DCP unpickles what its metadata declares as bytes."""
    done, _ = train_with_noise(tmp_path, 1)
    planted = tmp_path / "checkpoint-000001"
    evil = planted / "__9_9.distcp"
    torch.save(Evil(tmp_path / "owned"), evil)
    metadata = FileSystemReader(planted).read_metadata()
    for index, stored in metadata.storage_data.items():
        metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
        stored.relative_path, stored.offset, stored.length = evil.name, 0, evil.stat().st_size
    metadata.storage_data = {MetadataIndex(index.fqn): stored for index, stored in metadata.storage_data.items()}
    (planted / TENSORS).write_bytes(pickle.dumps(metadata))
    seal(planted)
    assert torch.equal(train_with_noise(tmp_path, 1)[0], done)
    assert not (tmp_path / "owned").exists()


WILD = {
    "another folder": {"file": "../checkpoint-000002/__0_0.distcp"},
    "a negative start": {"start": -1},
    "a start beyond the file": {"start": 1 << 60},
    "a length beyond the file": {"bytes": 1 << 60},
    "too few bytes": {"bytes": 8},
    "sizes beyond the tensor": {"sizes": [1 << 40, 1]},
    "negative offsets": {"offsets": [-1, 0]},
    "other dimensions": {"offsets": [0], "sizes": [1]},
    "a part of the tensor": {"sizes": [0, 0]},
    "text": {"start": "0"},
}


@pytest.mark.variants
@pytest.mark.parametrize("change", WILD.values(), ids=WILD.keys())
def test_wild_offsets_in_a_checkpoint_are_refused(tmp_path, change):
    train_with_noise(tmp_path, 2)
    planted = tmp_path / "checkpoint-000002"
    content = json.loads((planted / STATE).read_text())
    content["tensors"]["model.0.weight"]["chunks"][0].update(change)
    (planted / STATE).write_text(json.dumps(content))
    seal(planted)
    with pytest.raises(ConfigError, match="checkpoint-000002 cannot be read"):
        train_with_noise(tmp_path, 3)


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path):
    train_with_noise(tmp_path, 1)
    listed = tmp_path / "checkpoint-000001" / manifest.MANIFEST
    files = json.loads(listed.read_text())
    listed.write_text(json.dumps({**files, "../checkpoint-000001/state.json": files[STATE]}))
    with pytest.raises(ConfigError, match=r"is damaged: manifest.json names files elsewhere"):
        train_with_noise(tmp_path, 2)


@pytest.mark.parametrize("size", ["1e999", "NaN", "[]", '"many"'])
def test_a_manifest_with_sizes_that_are_none_is_refused(tmp_path, size):
    train_with_noise(tmp_path, 1)
    listed = tmp_path / "checkpoint-000001" / manifest.MANIFEST
    listed.write_text(re.sub(r'"size": \d+', f'"size": {size}', listed.read_text(), count=1))
    with pytest.raises(ConfigError, match=r"checkpoint-000001 is damaged: manifest.json is no manifest"):
        train_with_noise(tmp_path, 2)


@pytest.mark.parametrize("file", [STATE, TENSORS])
def test_a_manifest_that_lacks_a_file_of_each_checkpoint_is_refused(tmp_path, file):
    train_with_noise(tmp_path, 1)
    listed = tmp_path / "checkpoint-000001" / manifest.MANIFEST
    files = json.loads(listed.read_text())
    del files[file]
    listed.write_text(json.dumps(files))
    with pytest.raises(ConfigError, match=f"checkpoint-000001 is damaged: manifest.json lacks {file}"):
        train_with_noise(tmp_path, 2)


@pytest.mark.variants
@pytest.mark.parametrize("share", [0, 0.5, None])
@pytest.mark.parametrize("file", [manifest.MANIFEST, STATE, TENSORS, "__0_0.distcp"])
def test_a_damaged_checkpoint_is_named_with_an_older_one_that_is_whole(tmp_path, file, share):
    """A file is cut short, or lost."""
    done, figures = train_with_noise(tmp_path, 2)
    damaged = tmp_path / "checkpoint-000002"
    if share is None:
        (damaged / file).unlink()
    else:
        os.truncate(damaged / file, int((damaged / file).stat().st_size * share))
    whole = tmp_path / "checkpoint-000001"
    way_out = f"checkpoint-000001 is whole: to resume from it, remove checkpoint-000002, or pass resume='{whole}'"
    with pytest.raises(ConfigError, match=rf"{damaged} is damaged: {file} .*{re.escape(way_out)}"):
        train_with_noise(tmp_path, 2)
    again, resumed = train_with_noise(tmp_path, 2, resume=whole)
    assert torch.equal(again, done)
    assert resumed == figures
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002", "checkpoint-000003"]
    shutil.rmtree(tmp_path / "checkpoint-000003")
    shutil.rmtree(damaged)
    assert torch.equal(train_with_noise(tmp_path, 2)[0], done)


def test_older_checkpoints_are_verified_before_they_are_named(tmp_path):
    kept = Checkpoints(tmp_path, 3)
    for number in range(3):
        kept.save({"model": {"x": torch.tensor(number)}}, {})
    for number, file in ((3, STATE), (2, "__0_0.distcp")):
        flip_a_bit(tmp_path / f"checkpoint-{number:06d}" / file, 99)
    with pytest.raises(ConfigError, match=r"000003 is damaged: state.json .* checksum; checkpoint-000001 is whole"):
        kept.find("auto")
    flip_a_bit(tmp_path / "checkpoint-000001" / TENSORS, 99)
    with pytest.raises(ConfigError, match=r"no earlier checkpoint .* is whole: pass resume=None"):
        kept.find("auto")
    kept.close()


def flip_a_bit(file, number):
    content = bytearray(file.read_bytes())
    content[number // 8] ^= 1 << number % 8
    file.write_bytes(content)


@pytest.mark.parametrize("trials", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_never_loaded(tmp_path, trials):
    """Bits are flipped; parts are cut out, filled with zeros, or doubled; files are lost or swapped."""
    saved = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
    parts = {"model": saved, "optimizer": torch.optim.Adam(saved.parameters())}
    saved(torch.rand(4, 3)).sum().backward()
    parts["optimizer"].step()
    kept, draw = Checkpoints(tmp_path, 9), random.Random(5)
    for number in range(2):
        kept.save({name: part.state_dict() for name, part in parts.items()}, {"number": number})
    folder = kept.find("auto")
    refused = 0
    for trial in range(trials):
        victim = draw.choice(sorted(folder.iterdir()))
        before = victim.read_bytes()
        start, length = draw.randrange(len(before)), draw.choice([1, 7, 512])
        kind = draw.choice(["flipped", "cut", "cut out", "zeros", "doubled", "lost", "older"])
        if kind == "lost":
            victim.unlink()
        else:
            others = {"cut": before[:start], "older": (tmp_path / "checkpoint-000001" / victim.name).read_bytes()}
            others |= {"cut out": before[:start] + before[start + length :]}
            others |= {"zeros": before[:start] + bytes(length) + before[start + length :]}
            others |= {"doubled": before[: start + length] + before[start:]}
            victim.write_bytes(others.get(kind, before))
        if kind == "flipped":
            flip_a_bit(victim, 8 * start + draw.randrange(8))
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
        again = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
        try:
            assert load(kept.find("auto"), again, dict)["number"] == 1
        except ConfigError as error:
            assert "is damaged" in str(error), (trial, kind)
            assert "checkpoint-000001 is whole" in str(error)
            refused += 1
        else:
            for name, part in parts.items():
                torch.testing.assert_close(again[name].state_dict(), part.state_dict(), rtol=0, atol=0)
        victim.write_bytes(before)
    assert refused > 0.8 * trials
    kept.close()


def resumed_from_several(folder):
    train_with_noise(folder, 2)
    train_with_noise(folder, 3, resume=[None, "auto", folder / "checkpoint-000001"][World.detect().rank])


def test_ranks_that_resume_from_different_checkpoints_are_told(ranks, tmp_path):
    for error in ranks(3, resumed_from_several, tmp_path):
        assert isinstance(error, ConfigError), repr(error)
        assert "ranks do not agree on the checkpoint to resume from: None on ranks [0]; 'checkpoint-" in str(error)


def resumed_from_a_folder_of_each_rank(folder):
    train_with_noise(None, 3, resume=folder / f"node {World.detect().rank}")


def test_ranks_that_resume_from_checkpoints_of_different_runs_are_told(ranks, tmp_path):
    """Their names are the same."""
    for node in range(2):
        train_with_noise(tmp_path / f"node {node}", 1)
    for error in ranks(2, resumed_from_a_folder_of_each_rank, tmp_path):
        assert isinstance(error, ConfigError), repr(error)
        told = r"ranks do not agree on the checkpoint to resume from: 'checkpoint-000001, \w+' on ranks \[0\]; 'check"
        assert re.search(told, str(error))


def test_ranks_name_an_earlier_checkpoint_although_not_all_have_it(ranks, tmp_path):
    train_with_noise(tmp_path / "node 0", 2)
    os.truncate(tmp_path / "node 0" / "checkpoint-000002" / STATE, 0)
    shutil.copytree(tmp_path / "node 0" / "checkpoint-000002", tmp_path / "node 1" / "checkpoint-000002")
    for error in ranks(2, resumed_from_a_folder_of_each_rank, tmp_path):
        assert isinstance(error, ConfigError), repr(error)
        assert re.search(r"000002 is damaged: state.json .* no earlier checkpoint beside it is whole", str(error))


def with_a_variable_of_rank_0(folder, argument):
    if World.detect().rank == 0:
        os.environ["NOWHERE"] = str(folder)
    fit(*build(), Rows(), None, epochs=1, progress=False, **{argument: "$NOWHERE/run"})


@pytest.mark.parametrize("argument", ["checkpoint_dir", "resume", "log_dir", "profile"])
def test_a_folder_that_one_rank_cannot_name_is_an_error_of_all(ranks, tmp_path, argument):
    for error in ranks(2, with_a_variable_of_rank_0, tmp_path, argument):
        assert isinstance(error, ConfigError), repr(error)
        assert f"{argument}='$NOWHERE/run': $NOWHERE is not set in the environment" in str(error)


def resumed_from_a_damaged_file_of_rank_1(folder):
    world = World.detect()
    train_with_noise(folder, 1)
    if world.rank == 1:
        os.truncate(folder / "checkpoint-000001" / "__1_0.distcp", 0)
    train_with_noise(folder, 2)


def test_a_damaged_checkpoint_is_named_on_all_ranks(ranks, tmp_path):
    for error in ranks(2, resumed_from_a_damaged_file_of_rank_1, tmp_path):
        assert isinstance(error, ConfigError)
        assert f"{tmp_path}/checkpoint-000001 is damaged: __1_0.distcp has 0 bytes" in str(error)


@pytest.mark.parametrize("change", [{}, {"parts": {}}, {"earlier": 0}, {"parts": 1, "earlier": 0}, {"earlier": "x"}])
def test_a_state_of_another_shape_is_named(tmp_path, change):
    train_with_noise(tmp_path, 1)
    change_state(tmp_path / "checkpoint-000001", change)
    for folder in (tmp_path, None):
        with pytest.raises(ConfigError, match=r"checkpoint-000001 cannot be read .* another program wrote it"):
            train_with_noise(folder, 2, resume=tmp_path / "checkpoint-000001")


def changed_process(**changes):
    return lambda rest: {**rest, "processes": [(rank, {**own, **changes}) for rank, own in rest["processes"]]}


def test_the_state_of_another_loader_is_refused(tmp_path):
    pq.write_table(pa.table({"id": range(8)}), tmp_path / "rows.parquet")
    model, loader = nn.Linear(1, 1), make_loader(tmp_path / "rows.parquet", 4, cache=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def train(epochs):
        options = {"epochs": epochs, "checkpoint_dir": tmp_path / "run", "progress": False}
        fit(model, optimizer, loader, lambda model, batch: model(batch["id"].float()[:, None]).mean(), **options)

    train(1)
    checkpoint = tmp_path / "run" / "checkpoint-000001"
    change_state(checkpoint, changed_process(loader={"yielded": 4})(saved_state(checkpoint)))
    with pytest.raises(ConfigError, match=r"000001 has the state of another loader: .*, or pass resume=None"):
        train(2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda rest: {**rest, "history": None}, "has a NoneType as 'history'"),
        (lambda rest: {**rest, "history": ["epoch 0"]}, r"history\[0\] is str"),
        (lambda rest: {**rest, "history": [{"loss": 0.5}]}, r"history\[0\] lacks 'epoch'"),
        (lambda rest: {**rest, "history": rest["history"] * 2}, r"history\[1\] is of epoch 0"),
        (lambda rest: {**rest, "step": "7"}, "has a str as 'step'"),
        (lambda rest: {**rest, "step": True}, "has a bool as 'step'"),
        (lambda rest: {**rest, "step": -1}, "step is -1"),
        (lambda rest: {name: value for name, value in rest.items() if name != "step"}, "lacks 'step'"),
        (lambda rest: {**rest, "processes": []}, "processes are of ranks"),
        (lambda rest: {**rest, "processes": [1]}, r"processes\[0\] is no pair"),
        (lambda rest: {**rest, "processes": [(1, rest["processes"][0][1])]}, r"processes are of ranks \[1\]"),
        (lambda rest: {**rest, "processes": [(0, {})]}, r"processes\[0\] lacks 'generators'"),
        (changed_process(generators={}), r"processes\[0\]: generators lacks 'torch'"),
        (changed_process(**{"usual weight": "x"}), r"processes\[0\] has a str as 'usual weight'"),
        (changed_process(**{"so far": {"sums": {}}}), r"processes\[0\]: so far lacks 'rows'"),
        (changed_process(**{"so far": {"sums": {"loss": "x"}, "rows": {}, "counts": {}}}), "sums so far has a str"),
        (changed_process(**{"so far": {"sums": {}, "rows": {}, "counts": {}, "x": {}}}), "so far has more: 'x'"),
        (changed_process(generators={**rng_state(), "python": (3, (), None)}), "state vector is the wrong size"),
        (
            changed_process(generators={**rng_state(), "numpy": {"bit_generator": "MT19937"}}),
            "state dictionary is not valid",
        ),
        (changed_process(generators={**rng_state(), "torch": torch.zeros(3, dtype=torch.uint8)}), "RNG state"),
        (changed_process(generators={**rng_state(), "more": ["x"]}), "expected a torch.ByteTensor"),
    ],
)
def test_progress_that_makes_no_sense_is_named_before_anything_is_loaded(tmp_path, change, named):
    train_with_noise(tmp_path, 1)
    checkpoint = tmp_path / "checkpoint-000001"
    change_state(checkpoint, change(saved_state(checkpoint)))
    model = nn.Sequential(nn.Linear(1, 1))  # Its state does not fit, either.
    with pytest.raises(ConfigError, match=f"checkpoint-000001 cannot be read .*{named}.*another program wrote it"):
        fit(
            model, torch.optim.SGD(model.parameters(), 0.1), [], None, epochs=2, checkpoint_dir=tmp_path, progress=False
        )


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="this torch has no such error")
def test_an_error_of_the_gpu_does_not_blame_the_checkpoint(tmp_path, monkeypatch):
    train_with_noise(tmp_path, 1)

    def fail(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(tensor_file, "read_into", fail)
    with pytest.raises(OSError, match="CUDA error: an illegal memory access"):
        train_with_noise(tmp_path, 2)


def test_an_error_of_the_disk_does_not_blame_the_checkpoint(tmp_path, monkeypatch):
    train_with_noise(tmp_path, 1)

    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(manifest, "read", fail)
    with pytest.raises(OSError, match="Input/output error") as failed:
        train_with_noise(tmp_path, 2)
    assert failed.value.__notes__ == [f"while {tmp_path / 'checkpoint-000001'} was read"]


def test_a_lack_of_memory_does_not_blame_the_checkpoint(tmp_path, monkeypatch):
    train_with_noise(tmp_path, 1)

    def fail(path):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(checkpoints, "from_json", fail)
    with pytest.raises(torch.OutOfMemoryError):
        train_with_noise(tmp_path, 2)


def test_values_that_are_no_tensors_are_not_read_from_dcp(tmp_path):
    """DCP would unpickle them, so its files hold tensors only."""
    train_with_noise(tmp_path, 1)
    known = FileSystemReader(tmp_path / "checkpoint-000001").read_metadata().state_dict_metadata
    assert {type(value) for value in known.values()} == {TensorStorageMetadata}


class Counting(nn.Identity):
    """A layer with extra state that is no tensor."""

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        raise AssertionError("it is loaded")


def test_the_model_is_read_by_torch_alone(tmp_path):
    model, optimizer = build()
    model.append(Counting())
    fit(model, optimizer, in_order(8), squared_error, epochs=1, checkpoint_dir=tmp_path, progress=False)
    again = build()[0].append(Counting())
    tensors = {name: value for name, value in again.state_dict().items() if isinstance(value, torch.Tensor)}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load({"model": tensors}, checkpoint_id=tmp_path / "checkpoint-000001")
    assert torch.equal(parameters_of(again), parameters_of(model))


def test_checkpoint_of_another_setup_is_refused(tmp_path):
    train_with_noise(tmp_path, 1)
    model, optimizer = build()
    with pytest.raises(ConfigError, match="only one of the two has scheduler"):
        fit(model, optimizer, in_order(8), squared_error, epochs=2, checkpoint_dir=tmp_path, progress=False)


@pytest.mark.parametrize("changed", [nn.Linear(3, 4), nn.Linear(3, 8, bias=False)], ids=["shape", "name"])
def test_the_state_of_another_model_is_refused(tmp_path, changed):
    model, optimizer = build()
    fit(model, optimizer, in_order(8), squared_error, epochs=1, checkpoint_dir=tmp_path, progress=False)
    model[0] = changed.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with pytest.raises(ConfigError, match=r"000001 has the state of another model .*0\..*: resume with that model"):
        fit(model, optimizer, in_order(8), squared_error, epochs=2, checkpoint_dir=tmp_path, progress=False)


def one_group_each(parameters):
    return torch.optim.SGD([{"params": [each]} for each in parameters], 0.1)


@pytest.mark.parametrize(
    ("saved", "resumed", "problem"),
    [
        (torch.optim.SGD, torch.optim.AdamW, "betas"),
        (one_group_each, torch.optim.SGD, "parameter groups"),
        (torch.optim.Adam, torch.optim.SGD, "momentum"),
        (torch.optim.Adadelta, torch.optim.Adam, "betas"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(tmp_path, saved, resumed, problem):
    def train(make, epochs):
        model, _ = build()
        optimizer = make(model.parameters())
        fit(model, optimizer, in_order(8), squared_error, epochs=epochs, checkpoint_dir=tmp_path, progress=False)

    train(saved, 1)
    train(saved, 2)
    with pytest.raises(ConfigError, match=f"state of another optimizer .*{problem}.*: resume with that optimizer"):
        train(resumed, 3)


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_learning_rate_of_a_checkpoint_is_logged_if_it_replaces_another(tmp_path, caplog, scheduled):
    for epochs, rate in ((1, 0.1), (2, 0.1), (3, 5.0)):
        model, _ = build()
        optimizer = torch.optim.SGD(model.parameters(), rate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
        options = {"scheduler": scheduler, "checkpoint_dir": tmp_path, "progress": False}
        caplog.clear()
        fit(model, optimizer, in_order(8), squared_error, epochs=epochs, **options)
        found = [record.getMessage() for record in caplog.records if "learning rate" in record.getMessage()]
        assert len(found) == (rate == 5.0)
    assert found[0].endswith("checkpoint-000002, [0.1], not [5.0] of this call of fit")


class Odd(nn.Linear):
    """A layer whose state can be pickled, but from its first forward on not loaded without running code."""

    seen = None

    def forward(self, x):
        self.seen = defaultdict(int)
        return super().forward(x)

    def get_extra_state(self):
        return {"seen": [self.seen]}


def save_odd(folder):
    model = Odd(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(model, batch):
        return model(batch["x"].float()).float().mean()

    fit(model, optimizer, in_order(4), loss, epochs=1, checkpoint_dir=folder, progress=False)


def test_what_could_not_be_read_back_is_not_saved(ranks, tmp_path):
    for error in ranks(2, save_odd, tmp_path):
        assert isinstance(error, ConfigError)
        assert "convert to plain data parts.model._extra_state.seen.0 (defaultdict)" in str(error)
    assert not list(tmp_path.glob("checkpoint-*"))


def schedules(optimizer):
    every = torch.optim.lr_scheduler
    chained = [every.ConstantLR(optimizer), every.ExponentialLR(optimizer, 0.9)]
    return [
        every.MultiStepLR(optimizer, [2, 4]),
        every.OneCycleLR(optimizer, 0.1, total_steps=10),
        every.CosineAnnealingWarmRestarts(optimizer, 3),
        every.SequentialLR(optimizer, chained, [2]),
        every.SequentialLR(
            optimizer, [every.ConstantLR(optimizer), every.MultiStepLR(optimizer, np.arange(1, 4))], [3]
        ),
    ]


@pytest.mark.parametrize("number", range(5))
def test_states_come_back_as_they_were(tmp_path, number):
    """The states of schedulers, 16-bit and channels-last tensors, and optimizers with state other than tensors."""

    def parts():
        model = nn.Conv2d(2, 3, 2).to(torch.bfloat16, memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), amsgrad=True, capturable=False)
        return {"model": model, "optimizer": optimizer, "scheduler": schedules(optimizer)[number]}

    first, second = parts(), parts()
    first["model"](torch.ones(1, 2, 4, 4).bfloat16()).sum().backward()
    first["optimizer"].step()
    first["scheduler"].step()
    Checkpoints(tmp_path, 1).save({name: part.state_dict() for name, part in first.items()}, {"more": [1]})
    assert load(tmp_path / "checkpoint-000001", second, dict)["more"] == [1]
    for name in ("model", "optimizer"):
        torch.testing.assert_close(second[name].state_dict(), first[name].state_dict(), rtol=0, atol=0)
    assert second["scheduler"].state_dict() == first["scheduler"].state_dict()
    for _ in range(6):
        rates = []
        for part in (first, second):
            part["optimizer"].step()
            part["scheduler"].step()
            rates.append(part["scheduler"].get_last_lr())
        assert rates[0] == rates[1]
    moment = second["optimizer"].state_dict()["state"][0]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)


class Upgraded(nn.Module):
    """A module whose state had the inverse of its scale before version 2."""

    _version = 2

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        if metadata.get("version", 1) < self._version:
            state[prefix + "scale"] = 1 / state[prefix + "scale"]
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_modules_get_the_version_of_their_state(tmp_path):
    Checkpoints(tmp_path, 1).save({"model": nn.Sequential(Upgraded(4.0)).state_dict()}, {})
    again = nn.Sequential(Upgraded())
    load(tmp_path / "checkpoint-000001", {"model": again}, dict)
    assert again[0].scale == 4


def test_the_scale_of_sixteen_bit_losses_is_resumed(tmp_path):
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
    saved = saved_state(tmp_path / "checkpoint-000002")
    assert saved["parts"]["scaler"]["_growth_tracker"] > 0
    again, _ = run(4, tmp_path)
    assert torch.equal(again, weight)


def test_a_second_run_in_a_live_folder_is_refused(tmp_path, monkeypatch):
    """It neither removes the draft of the first one nor takes the number of its next checkpoint."""
    monkeypatch.setattr(run_lock, "SECONDS", 0)
    model, optimizer = build()
    steps, refused = count(), []

    def loss(model, batch):
        if next(steps) == 3:
            draft = tmp_path / ".checkpoint-000001-draft"
            draft.mkdir()
            with pytest.raises(ConfigError) as error:
                train_with_noise(tmp_path, 1)
            refused.append(str(error.value))
            assert draft.is_dir()
        return squared_error(model, batch)

    fit(model, optimizer, in_order(8), loss, epochs=2, checkpoint_dir=tmp_path, progress=False)
    holder = f"process {os.getpid()} on host {socket.gethostname()}"
    [message] = refused
    assert message.startswith(f"checkpoint_dir {str(tmp_path)!r} is that of another run, {holder}: end that run")
    train_with_noise(tmp_path / "another", 1)
    assert {"checkpoint-000001", "checkpoint-000002"} <= set(names(tmp_path))


def hold(folder, host, pipe):
    socket.gethostname = lambda: host
    Checkpoints(folder, 1)
    pipe.send(os.getpid())
    signal.pause()


@pytest.mark.parametrize(("host", "seconds"), [(socket.gethostname(), run_lock.SECONDS), ("elsewhere", 0)])
def test_a_run_waits_for_one_that_is_about_to_end_and_for_no_dead_one(tmp_path, monkeypatch, caplog, host, seconds):
    """It waits longer for one on another host: on NFS, the lock of a dead node ends with its lease."""
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path, host, theirs))
    holder.start()
    pid = ours.recv()
    waits = []

    def end(seconds):
        waits.append(seconds)
        holder.kill()
        holder.join()

    monkeypatch.setattr(run_lock, "SECONDS", seconds)
    monkeypatch.setattr(run_lock, "sleep", end)
    train_with_noise(tmp_path, 1)
    assert len(waits) == 1
    assert f"process {pid} on host {host}: waiting for its end" in caplog.text
    assert names(tmp_path) == ["checkpoint-000001"]


def test_children_do_not_hold_the_folder_of_their_parent(tmp_path):
    run = Checkpoints(tmp_path, 1)
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=signal.pause)
    child.start()
    os.close(run._lock._descriptor)  # as when the parent is killed
    Checkpoints(tmp_path, 1).close()
    child.kill()
    child.join()


def test_a_second_run_where_there_are_no_locks_takes_no_number_of_the_first(tmp_path):
    """The second to publish a number raises an error."""
    first = Checkpoints(tmp_path, 2)
    first.close()
    second = Checkpoints(tmp_path, 2)
    first.save({"model": {"x": torch.tensor(1)}}, {})
    with pytest.raises(ConfigError, match="checkpoint-000001 is the checkpoint of another run"):
        second.save({"model": {"x": torch.tensor(2)}}, {})
    second.close()
    model = nn.Module()
    model.register_buffer("x", torch.tensor(0))
    load(tmp_path / "checkpoint-000001", {"model": model}, dict)
    assert model.x == 1


def test_a_full_disk_is_named_and_what_was_written_makes_room(small_disk):
    folder = small_disk / "run"
    run = Checkpoints(folder, 2)
    for size in (10_000, 20_000):
        run.save({"model": {"x": torch.zeros(size)}}, {})
    with pytest.raises(OSError, match=f"No space left on device while a checkpoint was saved: '{folder}'") as full:
        run.save({"model": {"x": torch.zeros(300_000)}}, {})
    assert full.value.errno == errno.ENOSPC
    run.save({"model": {"x": torch.zeros(100_000)}}, {})
    run.close()
    assert names(folder) == ["checkpoint-000002", "checkpoint-000004"]


def test_old_checkpoints_that_cannot_be_removed_wait(tmp_path, monkeypatch):
    """On NFS, a file that another process reads keeps its folder."""
    kept = Checkpoints(tmp_path, 1)

    def busy(folder):
        raise OSError(errno.ENOTEMPTY, "busy", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        for number in range(3):
            kept.save({"model": {"x": torch.tensor(number)}}, {})
        kept.close()
        assert Checkpoints(tmp_path, 1).close() is None
    kept.save({"model": {"x": torch.tensor(3)}}, {})
    Checkpoints(tmp_path, 1).close()
    assert names(tmp_path) == ["checkpoint-000004"]


def never(model, batch):
    raise AssertionError("it trains")


class Remembering(Drawing):
    """A loader whose state cannot be loaded without running code."""

    def state_dict(self):
        return {**super().state_dict(), "seen": defaultdict(int)}


@pytest.mark.parametrize("checkpoint_every", [None, 1])
def test_a_loader_whose_state_could_not_be_read_back_stops_the_run_before_it_trains(tmp_path, checkpoint_every):
    model, optimizer = build()
    options = {"epochs": 1, "checkpoint_dir": tmp_path, "checkpoint_every": checkpoint_every, "progress": False}
    with pytest.raises(ConfigError, match=r"convert to plain data loader\.seen \(defaultdict\)"):
        fit(model, optimizer, Remembering(), never, **options)


def test_a_state_that_could_not_be_read_back_stops_the_run_before_it_trains(tmp_path):
    model = Odd(3, 1)
    model(torch.ones(3))
    with pytest.raises(ConfigError, match=r"convert to plain data model\._extra_state"):
        fit(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            in_order(4),
            never,
            epochs=1,
            checkpoint_dir=tmp_path,
            progress=False,
        )


def resumed_by_own_paths(folders):
    """Resume from a folder that each rank reaches by a path of its own."""
    return train_with_noise(folders[World.detect().rank], 2)[1]


def test_ranks_may_have_paths_of_their_own(ranks, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    folders = [tmp_path / "here", tmp_path / "there"]
    for _ in range(2):
        for figures in ranks(2, resumed_by_own_paths, folders):
            assert len(figures) == 2


class Plateau:
    """An evaluation with a state: the metric that the learning rate follows."""

    def __init__(self, optimizer):
        self._scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        self.average = torch.zeros(2)

    def __call__(self, model):
        self.average += 1
        self._scheduler.step(1.0)
        return {"average": self.average[0]}

    def state_dict(self):
        return {"scheduler": self._scheduler.state_dict(), "average": self.average}

    def load_state_dict(self, state):
        self._scheduler.load_state_dict(state["scheduler"])
        self.average = state["average"]


def rates_of(folder, *epochs):
    """Train for each number of epochs in turn, as after a kill. Return the final learning rate and averages."""
    for total in epochs:
        model, optimizer = build()
        evaluate = Plateau(optimizer)
        history = fit(
            model,
            optimizer,
            in_order(8),
            squared_error,
            epochs=total,
            evaluate=evaluate,
            checkpoint_dir=folder,
            progress=False,
        )
    return optimizer.param_groups[0]["lr"], [record["average"] for record in history]


def test_the_state_of_an_evaluation_is_resumed(tmp_path):
    expected = rates_of(tmp_path / "at once", 6)
    assert expected == (pytest.approx(0.05 * 0.01), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert rates_of(tmp_path / "resumed", 2, 4, 6) == expected


@pytest.mark.parametrize("first", [None, Plateau], ids=["added", "left out"])
def test_an_evaluation_may_be_added_or_left_out(tmp_path, caplog, first):
    for epochs, make in ((1, first), (2, Plateau if first is None else None)):
        model, optimizer = build()
        evaluate = make and make(optimizer)
        options = {"evaluate": evaluate, "checkpoint_dir": tmp_path, "progress": False}
        history = fit(model, optimizer, in_order(8), squared_error, epochs=epochs, **options)
    assert len(history) == 2
    assert ("average" in history[1]) == (first is None)
    assert caplog.text.count("has a state of evaluate, which begins again") == 1


def test_a_run_that_is_done_says_so(tmp_path, caplog):
    logged = []
    for epochs in (1, 1, 2):
        caplog.clear()
        model, optimizer = build()
        fit(model, optimizer, in_order(8), squared_error, epochs=epochs, checkpoint_dir=tmp_path, progress=False)
        logged.append("its checkpoint has all 1 epochs, so nothing is trained: raise epochs to go on" in caplog.text)
    assert logged == [False, True, False]
