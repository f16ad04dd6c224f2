"""Tests of the background decoder: the process is optional and does not outlive its parent."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from row_groups import load, make_in_background
from scarce_memory import ScarceMemory
from threads import no_more_threads

from dataload import CacheConfig, make_dataset, make_loader
from dataload.errors import OriginNotFound, as_sent
from dataload.formats import parquet
from dataload.rows import scheduler
from dataload.rows.background_decoder import client, worker
from dataload.rows.background_decoder.client import MAX_FAILURES, BackgroundDecoder, DemandSignal
from dataload.rows.making.pipeline import make_cached
from dataload.rows.row_groups import RowGroups
from dataload.runtime import child_process
from dataload.runtime.child_process import start_process
from dataload.runtime.counters import Counters


@pytest.fixture
def dataset(bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig) -> Any:
    return make_dataset(dataset_of([[5] * 40]), storage_options=bucket.options, cache=cache)


@pytest.fixture
def decoder(dataset: Any) -> Iterator[BackgroundDecoder]:
    decoder = BackgroundDecoder(dataset.rowstore.row_groups)
    make_in_background(decoder, 0)  # starts it
    assert decoder._process is not None
    assert decoder._process.ready.wait(200)
    yield decoder
    decoder.end()


@pytest.fixture
def not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if this process decodes a row group."""

    def fails(*_: Any) -> Any:
        raise AssertionError("decoded in the training process")

    monkeypatch.setattr(parquet.ParquetFooter, "open_row_group", fails)


def test_it_caches_row_groups_for_this_process(decoder: BackgroundDecoder, dataset: Any, not_here: None) -> None:
    assert decoder.make(3, DemandSignal(), account := Counters())
    assert make_in_background(decoder, 3)
    assert [len(blob) > 0 for blob in load(dataset.rowstore.row_groups.caches[0], 3)] == [True]
    assert account.snapshot()["requests_origin"] >= 1


def test_it_never_imports_torch_and_yields_to_others(decoder: BackgroundDecoder) -> None:
    assert make_in_background(decoder, 0)
    process = psutil.Process(decoder._process.child.process.pid)
    assert process.nice() == 19
    assert not [each.path for each in process.memory_maps() if "libtorch" in each.path]


def test_it_reads_s3_without_s3fs(decoder: BackgroundDecoder) -> None:
    """It receives what this process has resolved, because the imports of s3fs take longer than a row group."""
    assert make_in_background(decoder, 1)
    assert decoder._process is not None
    libraries = Path(f"/proc/{decoder._process.child.process.pid}/maps").read_text()
    assert "/obstore/" in libraries
    assert "/aiohttp/" not in libraries


def test_an_error_of_the_process_is_raised_by_the_caller(
    bucket: Any, dataset_of: Callable[..., str], cache: CacheConfig, not_here: None
) -> None:
    dataset = make_dataset(dataset_of([[200] * 3]), storage_options=bucket.options, cache=cache)
    decoder = BackgroundDecoder(dataset.rowstore.row_groups)
    make_in_background(decoder, 0)
    assert decoder._process.ready.wait(200)
    for found in bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]:
        bucket.client.delete_object(Bucket=bucket.name, Key=found["Key"])
    with pytest.raises(OriginNotFound, match="is gone from"):
        make_in_background(decoder, 1)
    decoder.end()


@pytest.mark.parametrize("panics", [False, True])
def test_after_an_error_that_only_the_process_has_the_caller_decodes(
    tmp_path: Path, table_of: Callable[[int, int], pa.Table], cache: CacheConfig, *, panics: bool
) -> None:
    fsspec.register_implementation("scarce", ScarceMemory, clobber=True)
    pq.write_table(table_of(0, 10), tmp_path / "x.parquet", row_group_size=5)
    options = {"owner": os.getpid(), "panics": panics}
    dataset = make_dataset(f"scarce://{tmp_path}/x.parquet", storage_options=options, cache=cache)
    decoder = BackgroundDecoder(dataset.rowstore.row_groups)
    make_in_background(decoder, 0)
    assert decoder._process.ready.wait(200)
    assert not make_in_background(decoder, 1)
    assert decoder._process.made == 0
    assert dataset.rowstore.gather(np.array([7])).rows["row_id"].tolist() == [7]
    decoder.end()


def test_after_a_kill_the_caller_decodes_and_another_process_starts(decoder: BackgroundDecoder, dataset: Any) -> None:
    first = decoder._process
    first.child.process.kill()
    assert first.ended.wait(200)
    assert not make_in_background(decoder, 1)
    assert dataset.rowstore.gather(np.array([5])).rows["row_id"].tolist() == [5]
    assert decoder._process is not first
    assert decoder._process.ready.wait(200)
    assert make_in_background(decoder, 2)


def test_a_kill_is_noticed_while_others_hold_its_socket(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the user may start children of its own there, which inherit it."""
    held = list[int]()

    def start(program: str, descriptor: int) -> Any:
        held.append(os.dup(descriptor))
        return start_process(program, descriptor)

    monkeypatch.setattr(child_process, "start_process", start)
    monkeypatch.setattr(client, "SELDOM_SECONDS", 0.01)
    decoder = BackgroundDecoder(dataset.rowstore.row_groups)
    make_in_background(decoder, 0)  # starts it
    process = decoder._process
    try:
        assert process.ready.wait(200)
        process.child.process.kill()
        assert process.ended.wait(200)
    finally:
        decoder.end()
        for descriptor in held:
            os.close(descriptor)


def test_a_process_that_has_ended_is_not_kept(decoder: BackgroundDecoder) -> None:
    """The process of a long pause ends, so there may be many of them in a run."""
    ended = weakref.ref(decoder._process)
    decoder.end()
    decoder.begin()
    gc.collect()
    assert decoder._process is not None
    assert ended() is None


def test_demand_ends_the_wait_for_the_process(
    decoder: BackgroundDecoder, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataload.rows.background_decoder.client.SELDOM_SECONDS", 3600)  # Only demand ends the wait.
    process, demand = decoder._process, DemandSignal()
    os.kill(process.child.process.pid, signal.SIGSTOP)
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(make_in_background(decoder, 8, demand)))
    asking.start()
    while 8 not in process._requests:
        threading.Event().wait(0.001)
    assert not answers
    with demand.waiting():
        asking.join(200)
        assert answers == [False]
        assert not make_in_background(decoder, 9, demand)
        assert 9 not in process._requests
    assert dataset.rowstore.gather(np.array([40])).rows["row_id"].tolist() == [40]
    os.kill(process.child.process.pid, signal.SIGCONT)
    assert make_in_background(decoder, 8, demand)
    assert make_in_background(decoder, 9, demand)


def test_requests_to_a_stopped_process_never_block(decoder: BackgroundDecoder) -> None:
    """More than its socket holds. The caller makes the other row groups itself."""
    process = decoder._process
    os.kill(process.child.process.pid, signal.SIGSTOP)
    answers: list[object] = []

    def ask() -> None:
        answers.extend(process.make(group, DemandSignal(), lambda: True, Counters()) for group in range(2000))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(200)
    assert answers == [None] * 2000


def test_demand_without_memory_does_not_end_the_wait(decoder: BackgroundDecoder, dataset: Any) -> None:
    demand = DemandSignal()
    blobs = dataset.rowstore.row_groups.caches[0]
    with demand.waiting(), blobs.memory.held.reserve(sys.maxsize):
        assert make_in_background(decoder, 10, demand)


def test_the_kill_of_a_stopped_process_ends_the_wait(decoder: BackgroundDecoder) -> None:
    process = decoder._process
    os.kill(process.child.process.pid, signal.SIGSTOP)
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(make_in_background(decoder, 7)))
    asking.start()
    while 7 not in process._requests:
        threading.Event().wait(0.001)
    process.child.process.kill()
    asking.join(200)
    assert answers == [False]


def test_row_groups_that_the_cache_has_no_space_for_pause_the_decoder(
    bucket: Any, dataset_of: Callable[..., str], tmp_path: Path
) -> None:
    cache = CacheConfig(str(tmp_path / "small"), 4000)
    dataset = make_dataset(dataset_of([[50] * 4]), storage_options=bucket.options, cache=cache)
    decoder = BackgroundDecoder(dataset.rowstore.row_groups)
    make_in_background(decoder, 0)
    assert decoder._process.ready.wait(200)
    cached = [make_in_background(decoder, group) for group in range(4)]
    assert not all(cached)
    assert decoder._paused_until > 0
    assert not make_in_background(decoder, 0)
    decoder.end()


class Odd(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_be_pickled_is_dropped() -> None:
    assert as_sent(Odd(1, 2)) is None
    assert str(as_sent(OriginNotFound("gone"))) == "gone"


def test_after_three_failures_no_process_is_started(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    decoder = BackgroundDecoder(dataset.rowstore.row_groups)
    seen = set()
    while True:
        make_in_background(decoder, 0)
        if decoder._process is None:
            break
        seen.add(decoder._process)
        assert decoder._process.ended.wait(200)
    assert len(seen) == 3
    decoder.end()


@pytest.mark.slow
def test_failures_before_much_work_are_forgotten_and_each_is_logged(
    decoder: BackgroundDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "FORGIVEN_AFTER", 2)
    for number in range(MAX_FAILURES + 1):
        for group in range(3 * number, 3 * number + 2):
            assert make_in_background(decoder, group)
        process = decoder._process
        assert process is not None
        process.child.process.kill()
        assert process.ended.wait(200)
        make_in_background(decoder, 0)
        assert decoder._process is not None
        assert decoder._process.ready.wait(200)
    message = "the background process that decodes row groups was killed by SIGKILL, perhaps because memory ran out: "
    assert caplog.messages == [message + "another one will be started"] * (MAX_FAILURES + 1)


def test_a_loader_uses_it_for_row_groups_that_are_not_cached(
    dataset: Any, monkeypatch: pytest.MonkeyPatch, cache: CacheConfig
) -> None:
    monkeypatch.setattr(scheduler, "BACKGROUND_BYTES", 0)
    monkeypatch.setattr(DemandSignal, "mostly_waiting", False)
    loader = make_loader(dataset, 10)
    for _ in range(2):
        assert sorted(np.concatenate([batch["row_id"] for batch in loader]).tolist()) == list(range(200))
    assert dataset.rowstore.scheduler.decoder._process is not None
    assert loader.stats().bytes_origin == 0
    warm = make_loader(pickle.loads(pickle.dumps(dataset)), 10)
    assert sum(len(batch["row_id"]) for batch in warm) == 200
    assert warm.dataset.rowstore.scheduler.decoder._process is None  # all row groups were cached
    dataset.rowstore.scheduler.decoder.end()


def test_a_loop_that_only_waits_starts_no_process(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process would take processor time from the threads that the loop waits for."""
    monkeypatch.setattr(scheduler, "BACKGROUND_BYTES", 0)
    assert sum(len(batch["row_id"]) for batch in make_loader(dataset, 10)) == 200
    assert dataset.rowstore.scheduler.decoder._process is None


@pytest.mark.parametrize("point", [1, 2], ids=["begins", "ends"])
def test_an_interrupted_wait_leaves_the_signal_to_later_ones(monkeypatch: pytest.MonkeyPatch, point: int) -> None:
    """Ctrl-C comes while a wait begins or ends. The loop that a notebook starts again waits, too."""
    demand, times = DemandSignal(), iter(range(1, point + 1))

    def interrupted() -> float:
        if next(times) == point:
            raise KeyboardInterrupt
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(client, "perf_counter", interrupted)
        with pytest.raises(KeyboardInterrupt), demand.waiting():
            pass
    with demand.waiting():
        assert demand.now
    assert not demand.now


def test_a_thread_is_mostly_waiting_until_waits_are_less_than_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.9, 1.0, 4.0, 5.9, 6.1, 7.0, 20.0, 20.1])
    monkeypatch.setattr("dataload.rows.background_decoder.client.perf_counter", lambda: next(times))
    demand = DemandSignal()  # at 0 s
    assert demand.mostly_waiting  # too early to tell
    with demand.waiting():  # at 1 s
        pass  # until 4 s
    assert demand.mostly_waiting  # 2.9 s without a wait, 3 s in waits
    assert not demand.mostly_waiting  # 3.1 s without a wait
    with demand.waiting():  # at 7 s
        pass  # until 20 s
    assert demand.mostly_waiting


def test_a_loop_whose_workers_gather_starts_it(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of the training process waits for row groups then."""
    monkeypatch.setattr(scheduler, "BACKGROUND_BYTES", 0)
    monkeypatch.setattr("dataload.rows.background_decoder.client.BUSY_SECONDS", 0)
    loader = make_loader(dataset, 5, window=1, shuffle=False, num_workers=1, transform=dict)
    assert sum(len(batch["row_id"]) for batch in loader) == 200
    decoder = dataset.rowstore.scheduler.decoder
    assert decoder._process is not None
    decoder.end()


def test_a_forked_child_does_not_end_it(decoder: BackgroundDecoder) -> None:
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
    assert make_in_background(decoder, 4)


PROGRAM = """
    import os, signal, sys, threading
    import numpy as np
    from dataload import CacheConfig, make_dataset, make_loader
    from dataload.rows import scheduler
    scheduler.BACKGROUND_BYTES = 0
    scheduler.DemandSignal.mostly_waiting = False
    options = {"key": "a", "secret": "b", "endpoint_url": sys.argv[1]}
    dataset = make_dataset(sys.argv[2], storage_options=options, cache=CacheConfig(sys.argv[3], "1GB"))
    loader = make_loader(dataset, 4)
    batches = iter(loader)
    next(batches)
    process = dataset.rowstore.scheduler.decoder._process
    process.ready.wait()
    print(process.child.process.pid, flush=True)
"""


@pytest.mark.variants
@pytest.mark.parametrize("end", ["killed", "loader dropped"])
def test_it_does_not_outlive_its_parent(bucket: Any, dataset_of: Callable[..., str], tmp_path: Path, end: str) -> None:
    url = dataset_of([[5] * 40])
    program = textwrap.dedent(PROGRAM) + ("" if end == "killed" else "del loader, batches, dataset\n")
    command = [sys.executable, "-c", program + "sys.stdin.read()"]
    command += [bucket.options["endpoint_url"], url, str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as trainer:
        filling = psutil.Process(int(trainer.stdout.readline()))
        if end == "killed":
            trainer.kill()
        filling.wait(200)
        trainer.stdin.close()
        assert trainer.wait(200) == (-9 if end == "killed" else 0)
        assert not trainer.stderr.read()


@pytest.mark.slow
def test_a_dataset_that_cannot_be_pickled_is_logged(
    dataset: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A filesystem may hold a session, which cannot be pickled."""

    def fails(_: Any) -> Any:
        raise TypeError("cannot pickle a session")

    monkeypatch.setattr(RowGroups, "__reduce__", fails)
    decoder = BackgroundDecoder(dataset.rowstore.row_groups)
    for _ in range(MAX_FAILURES):
        assert not make_in_background(decoder, 0)
        assert decoder._process is not None
        assert decoder._process.ended.wait(200)
    assert not make_in_background(decoder, 0)
    assert "cannot pickle a session" in caplog.text
    decoder.end()
    ours, theirs = socket.socketpair()
    with theirs:
        process = start_process(f"{worker.__name__}:run", theirs.fileno())
    ours.close()
    assert process.wait(200) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_it_is_optional_where_no_thread_can_start(dataset: Any) -> None:
    decoder, before = BackgroundDecoder(dataset.rowstore.row_groups), psutil.Process().children()
    with no_more_threads():
        assert not make_in_background(decoder, 0)
    assert not make_in_background(decoder, 0)
    assert psutil.Process().children() == before  # the process that was started for the thread has ended
    assert make_cached(dataset.rowstore.row_groups.caches[0], 0)
