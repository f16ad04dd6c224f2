"""Row groups are made by another process, which nobody depends on and which outlives nobody."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dataload import CacheConfig, make_dataset, make_loader
from dataload.errors import OriginNotFound
from dataload.formats import parquet
from dataload.rows import row_store
from dataload.rows.background_decoder.client import MAX_FAILURES, BackgroundDecoder, DemandSignal
from dataload.rows.background_decoder.worker import portable
from dataload.rows.row_group_cache import FETCH_BYTES


@pytest.fixture
def dataset(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Any:
    return make_dataset(dataset_of([[5] * 40]), storage_options=bucket.options, cache=cache)


@pytest.fixture
def decoder(dataset: Any) -> Iterator[BackgroundDecoder]:
    decoder = BackgroundDecoder(dataset.rowstore.blobs)
    decoder.make(0)  # starts it
    assert decoder._process is not None
    assert decoder._process.ready.wait(60)
    yield decoder
    decoder.end()


@pytest.fixture
def not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded in this process."""

    def refuses(*_: Any) -> Any:
        raise AssertionError("decoded in the process that trains")

    monkeypatch.setattr(parquet.ParquetFooter, "open_row_group", refuses)


def test_it_makes_what_others_then_read(decoder: BackgroundDecoder, dataset: Any, not_here: None) -> None:
    assert decoder.make(3)
    assert decoder.make(3)
    assert [len(blob) > 0 for blob in dataset.rowstore.blobs.load(3)] == [True]
    assert decoder.counts()["requests_origin"] >= 1


def test_it_never_imports_torch_and_yields_to_others(decoder: BackgroundDecoder) -> None:
    assert decoder.make(0)
    process = psutil.Process(decoder._process._popen.pid)
    assert process.nice() == 19
    assert not [each.path for each in process.memory_maps() if "libtorch" in each.path]


def test_what_cannot_be_decoded_is_said_where_it_was_asked_for(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, not_here: None
) -> None:
    dataset = make_dataset(dataset_of([[5] * 3]), storage_options=bucket.options, cache=cache)
    decoder = BackgroundDecoder(dataset.rowstore.blobs)
    decoder.make(0)
    assert decoder._process.ready.wait(60)
    for found in bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]:
        bucket.client.delete_object(Bucket=bucket.name, Key=found["Key"])
    with pytest.raises(OriginNotFound, match="does not exist"):
        decoder.make(1)
    decoder.end()


def test_killed_it_leaves_its_work_to_who_asks_and_comes_again(decoder: BackgroundDecoder, dataset: Any) -> None:
    first = decoder._process
    first._popen.kill()
    assert first.ended.wait(60)
    assert not decoder.make(1)
    assert dataset.rowstore.gather(np.array([5])).rows["row_id"].tolist() == [5]
    assert decoder._process is not first
    assert decoder._process.ready.wait(60)
    assert decoder.make(2)


def test_who_is_in_a_hurry_does_not_wait_for_it(
    decoder: BackgroundDecoder, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dataload.rows.background_decoder.client.SELDOM_SECONDS", 3600
    )  # Who waits is told that somebody else does, too.
    process, demand = decoder._process, DemandSignal()
    os.kill(process._popen.pid, signal.SIGSTOP)
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(decoder.make(8, demand)))
    asking.start()
    while 8 not in process._requests:
        threading.Event().wait(0.001)
    assert not answers
    with demand.waiting():
        asking.join(60)
        assert answers == [False]
        assert not decoder.make(9, demand)
        assert 9 not in process._requests
    assert dataset.rowstore.gather(np.array([40])).rows["row_id"].tolist() == [40]
    os.kill(process._popen.pid, signal.SIGCONT)
    assert decoder.make(8, demand)
    assert decoder.make(9, demand)


def test_haste_without_room_is_none(decoder: BackgroundDecoder, dataset: Any) -> None:
    demand = DemandSignal()
    blobs = dataset.rowstore.blobs
    with demand.waiting(), blobs.fetch_budget.reserve(FETCH_BYTES):
        assert decoder._blobs is blobs
        assert decoder.make(10, demand)


def test_stopped_it_is_not_waited_for_once_it_is_killed(decoder: BackgroundDecoder) -> None:
    process = decoder._process
    os.kill(process._popen.pid, signal.SIGSTOP)
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(decoder.make(7)))
    asking.start()
    while 7 not in process._requests:
        threading.Event().wait(0.001)
    process._popen.kill()
    asking.join(60)
    assert answers == [False]


def test_what_the_cache_has_no_room_for_is_not_made_twice_for_long(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path
) -> None:
    cache = CacheConfig(str(tmp_path / "small"), 4000)
    dataset = make_dataset(dataset_of([[50] * 4]), storage_options=bucket.options, cache=cache)
    decoder = BackgroundDecoder(dataset.rowstore.blobs)
    decoder.make(0)
    assert decoder._process.ready.wait(60)
    asked = [decoder.make(group) for group in range(4)]
    assert not all(asked)
    assert decoder._paused_until > 0
    assert not decoder.make(0)
    decoder.end()


class Odd(Exception):
    """That cannot be made from its text."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_that_would_not_arrive_stays_behind() -> None:
    assert portable(Odd(1, 2)) is None
    assert str(portable(OriginNotFound("gone"))) == "gone"


def test_one_that_always_dies_is_given_up(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    decoder = BackgroundDecoder(dataset.rowstore.blobs)
    seen = set()
    while True:
        decoder.make(0)
        if decoder._process is None:
            break
        seen.add(decoder._process)
        assert decoder._process.ended.wait(60)
    assert len(seen) == 3
    decoder.end()


def test_a_loader_has_it_make_what_is_not_kept(
    dataset: Any, monkeypatch: pytest.MonkeyPatch, cache: CacheConfig
) -> None:
    monkeypatch.setattr(row_store, "BACKGROUND_BYTES", 0)
    loader = make_loader(dataset, 10)
    for _ in range(2):
        assert sorted(np.concatenate([batch["row_id"] for batch in loader]).tolist()) == list(range(200))
    assert dataset.rowstore._decoder._process is not None
    assert loader.stats().bytes_origin == 0
    warm = make_loader(pickle.loads(pickle.dumps(dataset)), 10)
    assert sum(len(batch["row_id"]) for batch in warm) == 200
    assert warm.dataset.rowstore._decoder._process is None  # all was kept
    dataset.rowstore._decoder.end()


def test_a_forked_child_leaves_it_alone(decoder: BackgroundDecoder) -> None:
    process = decoder._process
    child = os.fork()
    if child == 0:
        try:
            decoder.end()
            process.end()
            os._exit(decoder._process is not None)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert decoder.make(4)


PROGRAM = """
    import os, signal, sys, threading
    import numpy as np
    from dataload import CacheConfig, make_dataset, make_loader
    from dataload.rows import row_store
    row_store.BACKGROUND_BYTES = 0
    options = {"key": "a", "secret": "b", "endpoint_url": sys.argv[1]}
    dataset = make_dataset(sys.argv[2], storage_options=options, cache=CacheConfig(sys.argv[3], "1GB"))
    loader = make_loader(dataset, 4)
    batches = iter(loader)
    next(batches)
    process = dataset.rowstore._decoder._process
    process.ready.wait()
    print(process._popen.pid, flush=True)
"""


@pytest.mark.parametrize("end", ["killed", "loader dropped"])
def test_it_does_not_outlive_who_started_it(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path, end: str
) -> None:
    url = dataset_of([[5] * 40])
    program = textwrap.dedent(PROGRAM) + ("" if end == "killed" else "del loader, batches, dataset\n")
    command = [sys.executable, "-c", program + "sys.stdin.read()"]
    command += [bucket.options["endpoint_url"], url, str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as trainer:
        filling = psutil.Process(int(trainer.stdout.readline()))
        if end == "killed":
            trainer.kill()
        filling.wait(30)
        trainer.stdin.close()
        assert trainer.wait(30) == (-9 if end == "killed" else 0)
        assert not trainer.stderr.read()


def test_where_it_cannot_be_told_what_to_do_that_is_said(
    dataset: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a filesystem that holds a session of its user's."""

    def refuses(_: Any) -> Any:
        raise TypeError("cannot pickle a session")

    blobs = dataset.rowstore.blobs
    monkeypatch.setattr(type(blobs), "__reduce__", refuses)
    decoder = BackgroundDecoder(blobs)
    for _ in range(MAX_FAILURES):
        assert not decoder.make(0)
        assert decoder._process is not None
        assert decoder._process.ended.wait(60)
    assert not decoder.make(0)
    assert "cannot pickle a session" in caplog.text
    decoder.end()
