"""Checkpoints in an object store: what a run saves there, and that no other bytes and no other run are trusted."""

from __future__ import annotations

import io
import logging
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from threading import Event, Lock
from time import sleep
from types import SimpleNamespace
from unittest.mock import Mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch
from faulty_proxy import faulty_proxy
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from ranks import LostError
from s3fs import S3FileSystem
from torch import nn

from dataload.cache.origin import lease, obstore, origin
from dataload.cache.origin.obstore import UPLOAD_PART_BYTES
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.store_path import BLOCK_BYTES, StorePath
from dataload.dataset import make_dataset
from dataload.errors import ConfigError, OriginError, OriginNotFound
from dataload.loader import make_loader
from dataload.train.checkpoint import manifest, places
from dataload.train.checkpoint.checkpoints import Checkpoints, load
from dataload.train.harness import fit
from dataload.world import World

N, BATCH, EPOCHS, EVERY = 151, 8, 2, 3  # rows; of a rank's batch; epochs; steps between checkpoints
SECRET = "a-secret-that-is-nowhere"


def environment(endpoint):
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.fixture(autouse=True)
def _environment(server, monkeypatch):
    for name, value in environment(server.endpoint_url).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def run_url(bucket):
    return f"s3://{bucket.name}/runs/one"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    x = np.random.default_rng(0).normal(size=(N, 3))
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3)
    pq.write_table(pa.table({"x": lists, "y": x.sum(1) ** 2}), path / "a.parquet", row_group_size=40)
    return str(path)


def train(data, folder, environ, *, max_steps=None, width=8, victim=None):
    """Train. Return the model's state as one vector, and the losses of the epochs.

    Args:
        data: The dataset.
        folder: The checkpoint_dir.
        environ: The environment of the store.
        max_steps: As for `fit`.
        width: Of the model, which is saved.
        victim: A rank that kills itself in its fifth step.
    """
    os.environ.update(environ)
    world = World.detect()
    loader = make_loader(make_dataset(data, cache=False), BATCH)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1)).double()
    torch.manual_seed(100 + world.rank)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    steps = count()

    def loss(model, batch):
        if next(steps) == 4 and world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean() * (1 + 0.1 * torch.rand(()))

    options = {"epochs": EPOCHS, "precision": "fp32", "timeout": 60, "progress": False, "max_steps": max_steps}
    history = fit(model, optimizer, loader, loss, checkpoint_dir=folder, checkpoint_every=folder and EVERY, **options)
    state = torch.cat([value.double().ravel() for value in model.state_dict().values()])
    return state, [record["loss"] for record in history]


@pytest.mark.variants
@pytest.mark.parametrize("number", [2, 1, 4])
def test_a_run_resumes_from_a_store_bit_by_bit(ranks, data, server, run_url, number):
    environ = environment(server.endpoint_url)
    expected = ranks(number, train, data, None, environ)
    ranks(number, train, data, run_url, environ, max_steps=2)
    killed = ranks(number, train, data, run_url, environ, victim=number - 1)
    assert isinstance(killed[-1], LostError)
    for (state, losses), (wanted, figures) in zip(ranks(number, train, data, run_url, environ), expected, strict=True):
        assert torch.equal(state, wanted)
        assert losses == figures


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 4)])
def test_other_numbers_of_ranks_resume_from_a_store(ranks, data, server, run_url, first, second):
    environ = environment(server.endpoint_url)
    ranks(first, train, data, run_url, environ, max_steps=5)
    states = [state for state, _ in ranks(second, train, data, run_url, environ)]
    assert all(torch.equal(state, states[0]) for state in states)


def keys(bucket, folder="runs/one/"):
    listed = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=folder).get("Contents", ())
    return sorted(each["Key"].removeprefix(folder) for each in listed)


def checkpoints_in(bucket):
    return sorted({key.partition("/")[0] for key in keys(bucket) if key.startswith("checkpoint-")})


def save(run, value, size=3):
    run.save({"model": {"x": torch.full((size,), float(value))}}, {"value": value})


def loaded(path, size=3):
    model = nn.Module()
    model.register_buffer("x", torch.zeros(size))
    rest = load(path, {"model": model}, dict)
    assert torch.equal(model.x, torch.full((size,), float(rest["value"])))
    return rest["value"]


def test_the_latest_checkpoints_are_kept(bucket, run_url):
    with_two = Checkpoints(run_url, 2)
    for value in range(4):
        save(with_two, value)
    assert checkpoints_in(bucket) == ["checkpoint-000003", "checkpoint-000004"]
    assert loaded(with_two.find("auto")) == 3
    with_two.close()
    new_run = Checkpoints(run_url, 1)
    for value in range(2):
        save(new_run, value)
    new_run.close()
    assert checkpoints_in(bucket) == ["checkpoint-000003", "checkpoint-000004", "checkpoint-000006"]


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_checkpoint_has_the_files_of_one_on_disk_which_dcp_reads(bucket, run_url, tmp_path):
    run = Checkpoints(run_url, 1)
    save(run, 7)
    run.close()
    folder = tmp_path / "checkpoint-000001"
    folder.mkdir()
    for key in keys(bucket, "runs/one/checkpoint-000001/"):
        bucket.client.download_file(bucket.name, f"runs/one/checkpoint-000001/{key}", str(folder / key))
    assert {file.name for file in folder.iterdir()} == {
        *(".metadata", "__0_0.distcp", "manifest.json", "owner.json", "state.json")
    }
    assert loaded(folder) == 7
    found = {"model": {"x": torch.zeros(3)}}
    torch.distributed.checkpoint.load(found, checkpoint_id=folder)
    assert found["model"]["x"].tolist() == [7, 7, 7]


def test_a_checkpoint_of_a_disk_can_be_copied_to_a_store(bucket, tmp_path):
    run = Checkpoints(tmp_path, 1)
    save(run, 4)
    run.close()
    for file in (tmp_path / "checkpoint-000001").iterdir():
        bucket.client.upload_file(str(file), bucket.name, f"copy/checkpoint-000001/{file.name}")
    other = Checkpoints(None, 1)
    assert loaded(other.find(f"s3://{bucket.name}/copy")) == 4
    assert loaded(other.find(f"s3://{bucket.name}/copy/checkpoint-000001")) == 4
    corrupt(bucket, "copy/checkpoint-000001/__0_0.distcp", 700)
    with pytest.raises(ConfigError, match=r"checkpoint-000001 is damaged: __0_0.distcp does not match its checksum"):
        other.find(f"s3://{bucket.name}/copy")


def corrupt(bucket, key, at):
    body = bytearray(bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read())
    body[at] ^= 1
    bucket.client.put_object(Bucket=bucket.name, Key=key, Body=bytes(body))


def test_a_rank_fetches_only_the_blocks_that_it_needs_and_once(bucket, run_url):
    run = Checkpoints(run_url, 1)
    count, size = 2, BLOCK_BYTES  # tensors, of 4 blocks each
    run.save({"model": {str(number): torch.full((size,), float(number)) for number in range(count)}}, {"value": 0})
    run.close()
    model = nn.Module()
    for number in range(count):
        model.register_buffer(str(number), torch.zeros(size))
    path = run.find("auto")
    bucket.server.reset()
    load(path, {"model": model}, dict)
    assert all(
        torch.equal(model.get_buffer(str(number)), torch.full((size,), float(number))) for number in range(count)
    )
    asked = [sent.range for sent in bucket.server.requests if sent.path.endswith(".distcp") and sent.method == "GET"]
    assert len(asked) == len(set(asked)) == 4 * count + 1


@pytest.mark.variants
@pytest.mark.parametrize("file", ["__0_0.distcp", "state.json", ".metadata", "owner.json", "manifest.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_that_is_whole(bucket, run_url, file):
    run = Checkpoints(run_url, 3)
    for value in range(3):
        save(run, value)
    corrupt(bucket, f"runs/one/checkpoint-000003/{file}", 20 if file != "manifest.json" else 0)
    if file != "manifest.json":
        bucket.client.delete_object(Bucket=bucket.name, Key=f"runs/one/checkpoint-000002/{file}")
    whole = "checkpoint-000002" if file == "manifest.json" else "checkpoint-000001"
    with pytest.raises(ConfigError, match=rf"checkpoint-000003 is damaged: {file} .*; {whole} is whole: .*s3://"):
        loaded(run.find("auto"))
    assert loaded(run.find(f"{run_url}/{whole}")) == int(whole[-1]) - 1
    run.close()


class Planted:
    def __reduce__(self):
        return os.mkdir, (os.environ["PLANTED"],)


def test_a_planted_pickle_is_never_loaded(bucket, run_url, tmp_path, monkeypatch):
    """It may come with a manifest that fits."""
    monkeypatch.setenv("PLANTED", str(tmp_path / "executed"))
    run = Checkpoints(run_url, 1)
    save(run, 1)
    run.close()
    base = "runs/one/checkpoint-000001"
    bad = io.BytesIO()
    torch.save(Planted(), bad)
    size = bucket.client.head_object(Bucket=bucket.name, Key=f"{base}/__0_0.distcp")["ContentLength"]
    planted = {".metadata": pickle.dumps(Planted()), "__0_0.distcp": bad.getvalue()[:size].ljust(size, b"\0")}
    path = StorePath(f"{run_url}/checkpoint-000001")
    files = manifest.read(path)
    for name, body in planted.items():
        bucket.client.put_object(Bucket=bucket.name, Key=f"{base}/{name}", Body=body)
        files[name] = manifest.entries(path, [name])[name]
    bucket.client.put_object(Bucket=bucket.name, Key=f"{base}/manifest.json", Body=manifest.content_of(files))
    with pytest.raises(ConfigError, match="another program wrote it"):
        loaded(run.find("auto"))
    assert not (tmp_path / "executed").exists()


def test_a_planted_size_is_never_allocated(bucket, run_url):
    run = Checkpoints(run_url, 1)
    save(run, 1)
    run.close()
    base, path = "runs/one/checkpoint-000001", StorePath(f"{run_url}/checkpoint-000001")
    state = (path / "state.json").read_bytes()
    body = state.replace(
        b'"tensor": "torch.float32", "shape": [3]', b'"tensor": "torch.float32", "shape": [%d]' % 2**50
    )
    assert body != state
    bucket.client.put_object(Bucket=bucket.name, Key=f"{base}/state.json", Body=body)
    files = manifest.read(path) | manifest.entries(path, ["state.json"])
    body = manifest.content_of(files)
    bucket.client.put_object(Bucket=bucket.name, Key=f"{base}/manifest.json", Body=body)
    with pytest.raises(ConfigError, match=r"tensor model.x has shape \[1125899906842624\]"):
        loaded(run.find("auto"))


def test_a_checkpoint_without_a_manifest_is_none_and_is_swept(bucket, run_url):
    run = Checkpoints(run_url, 3)
    for value in range(2):
        save(run, value)
    run.close()
    bucket.client.delete_object(Bucket=bucket.name, Key="runs/one/checkpoint-000002/manifest.json")
    with pytest.raises(ConfigError, match=r"checkpoint-000002 is damaged: manifest.json is missing"):
        Checkpoints(None, 1).find(f"{run_url}/checkpoint-000002")
    again = Checkpoints(run_url, 3)
    assert loaded(again.find("auto")) == 0
    assert "owner.json" in keys(bucket, "runs/one/checkpoint-000002/")  # who may only stand still
    save(again, 2)
    again.close()
    Checkpoints(run_url, 3).close()
    assert checkpoints_in(bucket) == ["checkpoint-000001", "checkpoint-000003"]


def test_two_runs_never_save_into_one_folder(bucket, run_url, monkeypatch):
    monkeypatch.setattr(lease, "RENEWED", 0.02)
    monkeypatch.setattr(lease, "SEEN", 0)
    monkeypatch.setattr(lease.Lease, "pause", 0.05)
    first = Checkpoints(run_url, 1)
    with pytest.raises(ConfigError, match=f"that of another run, process {os.getpid()} on host {socket.gethostname()}"):
        Checkpoints(run_url, 1)
    save(first, 1)
    first.close()
    Checkpoints(run_url, 1).close()
    assert [key for key in keys(bucket) if key.startswith((".lease", ".probe"))] == keys(bucket)[:1]


HOLDER = """
import sys, signal
from dataload.train.checkpoint.checkpoints import Checkpoints
run = Checkpoints(sys.argv[1], 1)
print("held", flush=True)
signal.pause()
"""


def holder(run_url):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, run_url], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def hold_and_die(run_url, environ):
    os.environ.update(environ)
    assert Checkpoints(run_url, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_lease_of_a_killed_process_of_this_host_is_taken_over_at_once(ranks, server, run_url):
    [end] = ranks(1, hold_and_die, run_url, environment(server.endpoint_url))
    assert str(end) == str(-signal.SIGKILL)
    mine = lease.Lease(StorePath(run_url))
    assert mine.acquire() is None
    mine.release()


def test_the_lease_of_another_host_expires_and_a_holder_that_stood_still_saves_no_more(run_url, monkeypatch):
    monkeypatch.setattr(lease, "_has_ended", lambda life: False)  # as of a process of another host
    monkeypatch.setattr(lease.Lease, "pause", 0.05)
    monkeypatch.setattr(lease, "EXPIRED", 0.5)
    first = Checkpoints(run_url, 2)
    save(first, 1)
    first._lock._ended.set()  # Its thread stands still.
    second = Checkpoints(run_url, 2)
    assert loaded(second.find("auto")) == 1
    with pytest.raises(ConfigError, match="has been taken over by another run"):
        save(first, 2)
    first.close()
    save(second, 3)
    assert loaded(second.find("auto")) == 3
    second.close()


def test_a_run_that_stood_still_before_its_manifest_completes_a_whole_checkpoint_or_none(run_url, monkeypatch):
    """Its successor has swept nothing that the manifest names, and has saved nothing itself."""
    first = Checkpoints(run_url, 3)
    save(first, 1)
    create = StorePath.create

    def late(path, content):
        if path.name == "manifest.json":
            first._lock._ended.set()  # Its thread stands still.
            with monkeypatch.context() as patch:
                patch.setattr(lease, "_has_ended", lambda life: True)
                Checkpoints(run_url, 3).close()
        return create(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(StorePath, "create", late)
        save(first, 2)
    first.close()
    again = Checkpoints(run_url, 3)
    assert loaded(again.find("auto")) == 2
    again.close()


def test_a_run_that_stood_still_in_the_midst_of_saving_changes_no_checkpoint_of_its_successor(run_url, monkeypatch):
    """Its files are in a folder of their own, which the next run does not take."""
    first = Checkpoints(run_url, 3)
    save(first, 1)
    published, successor = places.Store.publish, []

    def publish(self, number, run, state, files):
        if not successor:
            first._lock._ended.set()  # Its thread stands still.
            with monkeypatch.context() as patch:
                patch.setattr(lease, "_has_ended", lambda life: False)
                patch.setattr(lease, "EXPIRED", 0)
                successor.append(Checkpoints(run_url, 3))
            assert loaded(successor[0].find("auto")) == 1
            save(successor[0], 2)
        published(self, number, run, state, files)

    monkeypatch.setattr(places.Store, "publish", publish)
    save(first, 3)
    with pytest.raises(ConfigError, match="has been taken over by another run"):
        save(first, 4)
    assert loaded(successor[0].find("auto")) == 2
    successor[0].close()
    first.close()


def test_a_store_that_ignores_conditions_is_told(server, run_url, monkeypatch, caplog):
    Checkpoints(run_url, 1).close()
    assert "If-None-Match" not in caplog.text
    with faulty_proxy(server.endpoint_url, 0, 0, dropped="if-none-match") as (endpoint, _):
        S3FileSystem.clear_instance_cache()
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        run = Checkpoints(f"{run_url}/other", 1)
        save(run, 1)
        run.close()
    assert caplog.text.count("this store ignores If-None-Match, by which runs exclude each other") == 1


def test_a_save_lists_its_own_folders_alone(run_url, monkeypatch):
    """Other runs may have left thousands of objects beside it."""
    run = Checkpoints(run_url, 1)
    for value in range(2):
        save(run, value)
    listed, files = [], StorePath.files
    monkeypatch.setattr(StorePath, "files", lambda path: listed.append(str(path).removeprefix(run_url)) or files(path))
    save(run, 2)
    run.close()
    assert set(listed) == {"/.lease", "/checkpoint-000003", "/checkpoint-000002"}


def test_a_renewal_that_hangs_does_not_hold_the_end_up(run_url, monkeypatch, caplog):
    monkeypatch.setattr(lease, "RENEWED", 0)
    monkeypatch.setattr(lease, "RELEASED", 0)
    held, hangs, goes_on = lease.Lease(StorePath(run_url)), Event(), Event()

    def hanging():
        hangs.set()
        goes_on.wait()

    monkeypatch.setattr(held, "_held", hanging)
    assert held.acquire() is None
    assert hangs.wait(20)
    thread = held._thread
    held.release()
    assert "the lease is not released, and expires" in caplog.text
    goes_on.set()
    thread.join()


def test_an_upload_that_fails_leaves_no_object_and_no_parts(bucket, run_url):
    for engine in ("obstore", "fsspec"):
        path = StorePath(f"{run_url}/{engine}", Origin(S3FileSystem(**bucket.options), engine=engine))
        with pytest.raises(ValueError, match="disk"), path.upload() as stream:
            stream.write(bytes(2 * UPLOAD_PART_BYTES + 1))
            raise ValueError("disk")
        assert keys(bucket) == []
        assert "Uploads" not in bucket.client.list_multipart_uploads(Bucket=bucket.name)


@pytest.fixture
def renewed(run_url, monkeypatch):
    """A lease that is renewed all the time."""
    monkeypatch.setattr(lease, "RENEWED", 0)
    held = lease.Lease(StorePath(run_url))
    assert held.acquire() is None
    yield held
    held.release()


def test_a_renewal_in_the_midst_of_a_check_loses_no_lease(renewed):
    for _ in range(20):
        renewed.check()


def test_renewals_that_fail_lose_no_lease(renewed, monkeypatch):
    """Whatever is raised, and also once the object is there."""
    create, numbers = renewed._create, renewed._numbers
    errors, due, done = [RuntimeError(), OSError()], [], Event()

    def creating(number, **options):
        due.append(errors.pop()) if errors else done.set()
        return create(number, **options)

    def listing():
        if due:
            raise due.pop()
        return numbers()

    monkeypatch.setattr(renewed, "_create", creating)
    monkeypatch.setattr(renewed, "_numbers", listing)
    assert done.wait(20)
    renewed.check()


@pytest.mark.slow
def test_the_lease_of_a_clone_of_this_machine_is_not_taken_over_at_once(run_url, monkeypatch):
    """It has the same boot_id, and other processes of the same numbers."""
    with holder(run_url) as process:
        process.kill()
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    assert lease.Lease(StorePath(run_url)).acquire().pid == process.pid


@pytest.mark.slow
def test_the_lease_of_another_users_process_that_proc_hides_is_not_taken_over(run_url, monkeypatch):
    """As where /proc is mounted with hidepid."""
    seen = lease.life_of
    with holder(run_url) as process:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", Mock(side_effect=PermissionError))
            patch.setattr(lease, "life_of", lambda pid: seen(pid) if pid == os.getpid() else None)
            assert lease.Lease(StorePath(run_url)).acquire().pid == process.pid
        process.kill()


def test_a_state_that_was_damaged_on_its_way_is_not_sealed(run_url, monkeypatch):
    run = Checkpoints(run_url, 3)
    upload = StorePath.upload

    @contextmanager
    def damaging(path):
        with upload(path) as stream:
            if path.name != "state.json":
                yield stream
                return
            yield Mock(write=lambda content: stream.write(content.replace(b"1234", b"1235")))

    with monkeypatch.context() as patch:
        patch.setattr(StorePath, "upload", damaging)
        save(run, 1234)
    with pytest.raises(ConfigError, match=r"state.json does not match its checksum"):
        run.find("auto")
    run.close()


def test_an_owner_of_a_number_is_never_displaced(run_url):
    store = places.place_of(StorePath(run_url))
    assert store.claim(1, "one") == 1
    assert store.claim(1, "one") == 1  # whose answer was lost
    assert store.claim(1, "two") == 2


def what_fit_says(run_url, environ):
    def loss(model, batch):
        raise AssertionError("it trains")

    os.environ.clear()
    os.environ.update(environ)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        fit(model, optimizer, [{"x": torch.ones(4, 2)}], loss, epochs=1, checkpoint_dir=run_url, progress=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.variants
@pytest.mark.parametrize("kind", ["no bucket", "no keys", "no server"])
def test_what_keeps_a_run_from_saving_is_told_before_it_trains(ranks, run_url, kind, tmp_path):
    environ = dict(os.environ)
    if kind == "no bucket":
        run_url, says = (
            "s3://no-such-bucket/run",
            "OriginNotFound: s3://no-such-bucket/run.* check the name of the bucket",
        )
    elif kind == "no keys":
        environ = {name: value for name, value in environ.items() if "AWS_" not in name or "ENDPOINT" in name}
        environ |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
        says = "no credentials were found.* set other ones by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    else:
        environ |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
        says = "cannot be reached .*set AWS_ENDPOINT_URL"
    [told] = ranks(1, what_fit_says, run_url, environ)
    assert "\n" not in told

    assert re.search(says, told), told


def test_credentials_are_in_no_object_and_no_log(bucket, run_url, caplog):
    caplog.set_level(logging.DEBUG, "dataload")
    run = Checkpoints(run_url, 1)
    save(run, 1)
    assert SECRET not in repr(run.find("auto")) + repr(run.folder)
    run.close()
    for key in keys(bucket):
        body = bucket.client.get_object(Bucket=bucket.name, Key=f"runs/one/{key}")["Body"].read()
        assert SECRET.encode() not in body
    assert SECRET not in caplog.text


def foreign(bucket, number):
    """Put what another program has in a folder of such a name."""
    names = [f"checkpoint-{number:06d}/{name}" for name in ("model.safetensors", "optimizer.pt", "eval/notes.txt")]
    for name in names:
        bucket.client.put_object(Bucket=bucket.name, Key=f"runs/one/{name}", Body=b"precious")
    return names


def test_folders_of_other_programs_stay(bucket, run_url):
    """Those of transformers have such names from 100,000 steps on."""
    theirs = [*foreign(bucket, 2), *foreign(bucket, 100_000)]
    for value in range(2):
        run = Checkpoints(run_url, 1)
        for _ in range(3):
            save(run, value)
        run.find("auto")
        run.close()
    found = [key for key in keys(bucket) if key.startswith(("checkpoint-000002/", "checkpoint-100000/"))]
    assert found == sorted(theirs)


def test_keep_removes_no_checkpoint_of_a_successor(run_url, monkeypatch):
    """A run that stood still between its last check and its manifest has nothing to say about later numbers."""
    first = Checkpoints(run_url, 1)
    publish, successor = places.Store.publish, []

    def late(self, *args):
        publish(self, *args)
        if not successor:
            first._lock._ended.set()  # Its thread stands still.
            with monkeypatch.context() as patch:
                patch.setattr(lease, "_has_ended", lambda life: True)
                successor.append(Checkpoints(run_url, 3))
            for value in range(3):
                save(successor[0], value)

    monkeypatch.setattr(places.Store, "publish", late)
    save(first, 9)
    for number in (1, 2, 3, 4):
        assert loaded(StorePath(f"{run_url}/checkpoint-{number:06d}")) == (9, 0, 1, 2)[number - 1]
    successor[0].close()
    first.close()


def test_credentials_in_a_url_are_not_shown(run_url):
    with pytest.raises(ConfigError, match="there is no checkpoint at this path") as told:
        Checkpoints(None, 1).find(f"memory://user:{SECRET}@nothing/here")
    assert SECRET not in str(told.value)


def test_any_filesystem_of_fsspec_holds_checkpoints():
    run = Checkpoints("memory://checkpoints/run", 1)
    save(run, 5, size=100_000)
    run.close()
    assert loaded(run.find("auto"), size=100_000) == 5


class Shelf(LocalFileSystem):
    """A disk elsewhere, as of SFTP or SMB, whose folders somebody has to make."""

    protocol, local_file = "shelf", False

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("shelf://").rstrip("/")


class Arrows(ArrowFSWrapper):
    """A filesystem of Arrow, as HDFS is."""

    protocol, root_marker = "arrows", "/"

    def __init__(self, **options):
        super().__init__(pyarrow.fs.LocalFileSystem(), **options)

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("arrows://").rstrip("/")


@pytest.mark.parametrize("kind", [Shelf, Arrows])
def test_filesystems_with_folders_hold_checkpoints(tmp_path, kind):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    run = Checkpoints(f"{kind.protocol}://{tmp_path}/runs/one", 1)
    for value in range(3):
        save(run, value)
    run.close()
    assert loaded(run.find("auto")) == 2
    assert len([*tmp_path.glob("runs/one/checkpoint-*/*")]) == 5


class Lonely(MemoryFileSystem):
    """A filesystem of one connection, as FTP's, which serves one request at a time."""

    protocol, busy = "lonely", Lock()

    @contextmanager
    def request(self):
        assert self.busy.acquire(blocking=False), "two requests at a time"
        sleep(0.002)
        self.busy.release()
        yield

    def pipe_file(self, path, value, mode="overwrite", **options):
        with self.request():
            super().pipe_file(path, value, mode, **options)

    def _open(self, path, mode="rb", **options):
        file = super()._open(path, mode, **options)
        if mode == "wb":
            write = file.write

            def in_a_request(data):
                with self.request():
                    return write(data)

            file.write = in_a_request
        return file


def test_uploads_and_the_lease_share_one_connection():
    path, done = StorePath("lonely://run/uploaded", Origin(Lonely())), Event()

    def renew():
        for number in count():
            if done.is_set():
                return
            path.with_name(f"lease-{number}").create(b"x")

    with ThreadPoolExecutor(1) as others:
        renewing = others.submit(renew)
        try:
            with path.upload() as stream:
                for _ in range(50):
                    stream.write(b"x")
        finally:
            done.set()
        renewing.result()
    assert path.size() == 50


def test_no_bucket_is_made(bucket, run_url):
    path = StorePath("s3://no-such-bucket-here/runs/one", Origin(S3FileSystem(**bucket.options), engine="fsspec"))
    with pytest.raises(OriginNotFound):
        path.create(b"x")
    with pytest.raises(OriginNotFound), path.upload() as stream:
        stream.write(b"x")
    assert "no-such-bucket-here" not in {each["Name"] for each in bucket.client.list_buckets()["Buckets"]}


def save_until_killed(url, environ, report, calls, size, *, late):
    """Save one checkpoint after the other, in parts of 5 MiB, and be killed after so many function calls in between.

    They count from the first save on, or (`late`) from where it publishes.
    """
    os.environ.update(environ)
    obstore.UPLOAD_PART_BYTES = origin.UPLOAD_PART_BYTES = 5 << 20  # the least that S3 takes
    run = Checkpoints(url, 2)
    found = run.find("auto")
    first, left = (loaded(found, size) + 1 if found else 0), count(calls, -1)

    def killing(*_):
        if next(left) <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if late:
        publish = places.Store.publish
        places.Store.publish = lambda *args: sys.setprofile(killing) or publish(*args)
    else:
        sys.setprofile(killing)
    for value in count(first):
        save(run, value, size)
        report.write_text(str(value))


def test_the_manifest_is_written_last(bucket, run_url):
    """So whenever a kill comes, a folder with a manifest is complete. Uploads of several parts are completed before."""
    run = Checkpoints(run_url, 2)
    before = len(bucket.server.requests)
    save(run, 0, size=20_000_000)
    run.close()
    written = [sent.path for sent in bucket.server.requests[before:] if sent.method in ("PUT", "POST")]
    own = [path.rpartition("/")[2] for path in written if "/checkpoint-000001/" in path]
    assert own.count("manifest.json") == 1
    assert own[-1] == "manifest.json"
    assert {".metadata", "__0_0.distcp", "state.json"} <= set(own)


@pytest.mark.parametrize(("kills", "size"), [(3, 300_000), pytest.param(30, 3_000_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_whatever_a_kill_interrupts_the_newest_complete_checkpoint_loads(ranks, server, run_url, tmp_path, kills, size):
    """Also of a store of which 5 % of the answers are 503, and as many are cut or lost."""
    draw, saved, report = random.Random(7), -1, tmp_path / "saved"
    with faulty_proxy(server.endpoint_url, 0.05, 7) as (endpoint, counts):
        for kill in range(kills):
            late = kill % 2 == 1
            calls = draw.randrange(3_000 if late else 50_000)  # A save takes about 20,000.
            [end] = ranks(1, save_until_killed, run_url, environment(endpoint), report, calls, size, late=late)
            assert str(end) == str(-signal.SIGKILL)
            known = int(report.read_text()) if report.exists() else -1
            run = Checkpoints(run_url, 2)
            found = run.find("auto")
            latest = loaded(found, size) if found else -1
            run.close()
            assert max(saved, known) <= latest <= max(saved, known) + 1  # A kill may come before the report.
            saved = latest
    assert kills < 30 or min(saved, counts["slow down"], counts["lost"] + counts["cut"]) > 0


@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_faults_of_the_store_are_survived(data, server, run_url, monkeypatch, rounds):
    """5 % of the requests get 503, and as many answers are cut or lost."""
    steps = 8 if rounds == 1 else None
    expected = train(data, None, {}, width=400, max_steps=steps)
    for seed in range(rounds):
        url = f"{run_url}/{seed}"
        S3FileSystem.clear_instance_cache()  # They have the endpoint of an earlier round.
        with faulty_proxy(server.endpoint_url, 0.05, seed) as (endpoint, counts):
            train(data, url, environment(endpoint), width=400, max_steps=5)
            state, losses = train(data, url, environment(endpoint), width=400, max_steps=steps)
        assert torch.equal(state, expected[0])
        assert losses == expected[1]
        assert min(counts["slow down"], counts["lost"] + counts["cut"]) > 0


def test_ranks_that_do_not_see_one_store_are_told(ranks, data):
    """Each process has a memory of its own."""
    for error in ranks(2, train, data, "memory://checkpoints/run", {}):
        assert isinstance(error, ConfigError)
        assert "rank 1 does not see what rank 0 writes there" in str(error)


def test_an_upload_copies_a_part_of_a_tensor_at_a_time(monkeypatch):
    sizes, tensor = [], torch.zeros(2 * UPLOAD_PART_BYTES + 5, dtype=torch.uint8).numpy()
    with StorePath("memory://checkpoints/large").upload() as stream:
        monkeypatch.setattr(stream, "_opened", SimpleNamespace(write=lambda part: sizes.append(len(part))))
        assert stream.write(tensor) == len(tensor)
    assert sizes == [UPLOAD_PART_BYTES, UPLOAD_PART_BYTES, 5]


def train_by_own_endpoint(data, folder, endpoints):
    return train(data, folder, environment(endpoints[World.detect().rank]))


@pytest.mark.parametrize("denied", ["^PUT ", r"\?delete|^DELETE "])
def test_a_rank_that_may_not_write_or_remove_is_told_before_it_trains(ranks, data, server, run_url, denied):
    with faulty_proxy(server.endpoint_url, 0, 0, denied) as (endpoint, counts):
        for error in ranks(2, train_by_own_endpoint, data, run_url, [server.endpoint_url, endpoint]):
            assert isinstance(error, PermissionError | OriginError), error
            assert re.search(r"runs/one/\.probe-\w+-1.*(denied|may not)", str(error)), error
    assert counts["denied"]


def test_a_run_in_a_store_without_another_folder_keeps_no_ledger_and_says_so(data, run_url, caplog):
    train(data, run_url, {}, max_steps=1)
    assert "keeps no ledger" in caplog.text
