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
from dataload.rows.background_decoder import MOST_FAILURES, BackgroundDecoder, DemandSignal, _portable
from dataload.rows.row_group_cache import FETCHED_BYTES


@pytest.fixture
def dataset(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Any:
    return make_dataset(dataset_of([[5] * 40]), storage_options=bucket.options, cache=cache)


@pytest.fixture
def filler(dataset: Any) -> Iterator[BackgroundDecoder]:
    filler = BackgroundDecoder(dataset.rowstore.blobs)
    filler.make(0)  # starts it
    assert filler._process is not None
    assert filler._process.ready.wait(60)
    yield filler
    filler.end()


@pytest.fixture
def not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded in this process."""

    def refuses(*_: Any) -> Any:
        raise AssertionError("decoded in the process that trains")

    monkeypatch.setattr(parquet.ParquetFooter, "open_row_group", refuses)


def test_it_makes_what_others_then_read(filler: BackgroundDecoder, dataset: Any, not_here: None) -> None:
    assert filler.make(3)
    assert filler.make(3)
    assert [len(blob) > 0 for blob in dataset.rowstore.blobs.load(3)] == [True]
    assert filler.counts()["requests_origin"] >= 1


def test_it_never_imports_torch_and_yields_to_others(filler: BackgroundDecoder) -> None:
    assert filler.make(0)
    process = psutil.Process(filler._process._popen.pid)
    assert process.nice() == 19
    assert not [each.path for each in process.memory_maps() if "libtorch" in each.path]


def test_what_cannot_be_decoded_is_said_where_it_was_asked_for(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, not_here: None
) -> None:
    dataset = make_dataset(dataset_of([[5] * 3]), storage_options=bucket.options, cache=cache)
    filler = BackgroundDecoder(dataset.rowstore.blobs)
    filler.make(0)
    assert filler._process.ready.wait(60)
    for found in bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]:
        bucket.client.delete_object(Bucket=bucket.name, Key=found["Key"])
    with pytest.raises(OriginNotFound, match="does not exist"):
        filler.make(1)
    filler.end()


def test_killed_it_leaves_its_work_to_who_asks_and_comes_again(filler: BackgroundDecoder, dataset: Any) -> None:
    first = filler._process
    first._popen.kill()
    assert first.gone.wait(60)
    assert not filler.make(1)
    assert dataset.rowstore.gather(np.array([5])).rows["row_id"].tolist() == [5]
    assert filler._process is not first
    assert filler._process.ready.wait(60)
    assert filler.make(2)


def test_who_is_in_a_hurry_does_not_wait_for_it(
    filler: BackgroundDecoder, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dataload.rows.background_decoder.SELDOM_SECONDS", 3600
    )  # Who waits is told that somebody else does, too.
    process, haste = filler._process, DemandSignal()
    os.kill(process._popen.pid, signal.SIGSTOP)
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(filler.make(8, haste)))
    asking.start()
    while 8 not in process._asked:
        threading.Event().wait(0.001)
    assert not answers
    with haste.waiting():
        asking.join(60)
        assert answers == [False]
        assert not filler.make(9, haste)
        assert 9 not in process._asked
    assert dataset.rowstore.gather(np.array([40])).rows["row_id"].tolist() == [40]
    os.kill(process._popen.pid, signal.SIGCONT)
    assert filler.make(8, haste)
    assert filler.make(9, haste)


def test_haste_without_room_is_none(filler: BackgroundDecoder, dataset: Any) -> None:
    haste = DemandSignal()
    blobs = dataset.rowstore.blobs
    with haste.waiting(), blobs.fetched.hold(FETCHED_BYTES):
        assert filler._blobs is blobs
        assert filler.make(10, haste)


def test_stopped_it_is_not_waited_for_once_it_is_killed(filler: BackgroundDecoder) -> None:
    process = filler._process
    os.kill(process._popen.pid, signal.SIGSTOP)
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(filler.make(7)))
    asking.start()
    while 7 not in process._asked:
        threading.Event().wait(0.001)
    process._popen.kill()
    asking.join(60)
    assert answers == [False]


def test_what_the_cache_has_no_room_for_is_not_made_twice_for_long(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path
) -> None:
    cache = CacheConfig(str(tmp_path / "small"), 4000)
    dataset = make_dataset(dataset_of([[50] * 4]), storage_options=bucket.options, cache=cache)
    filler = BackgroundDecoder(dataset.rowstore.blobs)
    filler.make(0)
    assert filler._process.ready.wait(60)
    asked = [filler.make(group) for group in range(4)]
    assert not all(asked)
    assert filler._left_alone_until > 0
    assert not filler.make(0)
    filler.end()


class Odd(Exception):
    """That cannot be made from its text."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_that_would_not_arrive_stays_behind() -> None:
    assert _portable(Odd(1, 2)) is None
    assert str(_portable(OriginNotFound("gone"))) == "gone"


def test_one_that_always_dies_is_given_up(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    filler = BackgroundDecoder(dataset.rowstore.blobs)
    seen = set()
    while True:
        filler.make(0)
        if filler._process is None:
            break
        seen.add(filler._process)
        assert filler._process.gone.wait(60)
    assert len(seen) == 3
    filler.end()


def test_a_loader_has_it_make_what_is_not_kept(
    dataset: Any, monkeypatch: pytest.MonkeyPatch, cache: CacheConfig
) -> None:
    monkeypatch.setattr(row_store, "FILLED_BYTES", 0)
    loader = make_loader(dataset, 10)
    for _ in range(2):
        assert sorted(np.concatenate([batch["row_id"] for batch in loader]).tolist()) == list(range(200))
    assert dataset.rowstore._filler._process is not None
    assert loader.stats().bytes_origin == 0
    warm = make_loader(pickle.loads(pickle.dumps(dataset)), 10)
    assert sum(len(batch["row_id"]) for batch in warm) == 200
    assert warm.dataset.rowstore._filler._process is None  # all was kept
    dataset.rowstore._filler.end()


def test_a_forked_child_leaves_it_alone(filler: BackgroundDecoder) -> None:
    process = filler._process
    child = os.fork()
    if child == 0:
        try:
            filler.end()
            process.end()
            os._exit(filler._process is not None)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert filler.make(4)


PROGRAM = """
    import os, signal, sys, threading
    import numpy as np
    from dataload import CacheConfig, make_dataset, make_loader
    from dataload.rows import row_store
    row_store.FILLED_BYTES = 0
    options = {"key": "a", "secret": "b", "endpoint_url": sys.argv[1]}
    dataset = make_dataset(sys.argv[2], storage_options=options, cache=CacheConfig(sys.argv[3], "1GB"))
    loader = make_loader(dataset, 4)
    batches = iter(loader)
    next(batches)
    process = dataset.rowstore._filler._process
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
    filler = BackgroundDecoder(blobs)
    for _ in range(MOST_FAILURES):
        assert not filler.make(0)
        assert filler._process is not None
        assert filler._process.gone.wait(60)
    assert not filler.make(0)
    assert "cannot pickle a session" in caplog.text
    filler.end()
