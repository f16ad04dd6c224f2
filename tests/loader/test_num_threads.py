"""`num_threads`: threads apply a transform to different batches, and the loop gets the same batches as ever."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from timed_epoch import timed_epoch

from dataload import make_dataset, make_loader, mix
from dataload.dataset import Dataset
from dataload.errors import ConfigError
from dataload.loader import batch_maker
from dataload.rows.collate import with_strings

N, BATCH = 200, 8
SECONDS = 200  # a deadline that a busy machine does not reach

Batch = dict[str, Any]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Row i has x == i."""
    pq.write_table(pa.table({"x": np.arange(N)}), tmp_path / "a.parquet", row_group_size=20)
    return make_dataset(tmp_path / "a.parquet", cache=False)


def noisy(batch: Batch, rng: np.random.Generator) -> Batch:
    return {**batch, "noise": torch.from_numpy(rng.random(len(batch["x"])))}


def values(batches: Any) -> list[tuple[list[int], list[float]]]:
    return [(batch["x"].tolist(), batch["noise"].tolist()) for batch in batches]


def threads_ahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dataload-ahead")]


def meeting_of(count: int) -> Callable[[Batch], Batch]:
    """Return a transform whose calls end only while `count` of them run at the same time."""
    meeting = threading.Barrier(count)

    def transform(batch: Batch) -> Batch:
        meeting.wait(SECONDS)
        return {**batch, "thread": threading.get_ident()}

    return transform


# The same batches


@pytest.mark.parametrize("kind", ["dataset", "mixture"])
def test_batches_do_not_depend_on_the_threads(dataset: Dataset, kind: str) -> None:
    source = dataset if kind == "dataset" else mix({"a": dataset, "b": dataset.select(np.arange(50))}, [2, 1])
    runs = []
    for options in ({}, {"num_threads": 0}, {"num_threads": 1}, {"num_threads": 2}, {"num_threads": 5}):
        loader = make_loader(source, BATCH, seed=3, transform=noisy, drop_last=True, **options)
        runs.append([values(loader) for _ in range(2)])
    assert all(run == runs[0] for run in runs)
    assert runs[0][0] != runs[0][1]
    assert len(runs[0][0]) == len(make_loader(source, BATCH, seed=3, drop_last=True))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_resumed_epoch_continues_with_the_same_batches(dataset: Dataset, threads: int) -> None:
    whole = values(make_loader(dataset, BATCH, transform=noisy))
    loader = make_loader(dataset, BATCH, transform=noisy, num_threads=threads)
    batches = iter(loader)
    first = values(next(batches) for _ in range(7))
    state = loader.state_dict()
    assert state["cursor"] == 7 * BATCH  # not the batches that are made already
    batches.close()
    resumed = make_loader(dataset, BATCH, transform=noisy, num_threads=3 - threads)
    resumed.load_state_dict(state)
    assert first + values(resumed) == whole


def test_a_collate_function_runs_in_the_threads(dataset: Dataset) -> None:
    meeting = meeting_of(2)
    loader = make_loader(dataset, 25, shuffle=False, num_threads=2, collate_fn=lambda rows: meeting(rows.columns))
    batches = list(loader)
    assert [batch["x"][0].item() for batch in batches] == list(range(0, N, 25))
    assert len({batch["thread"] for batch in batches}) == 2


def test_without_code_of_the_user_one_thread_gathers(dataset: Dataset) -> None:
    for threads, expected in ((None, 1), (0, 0), (1, 1), (4, 1)):
        batches = iter(make_loader(dataset, BATCH, num_threads=threads))
        next(batches)
        assert len(threads_ahead()) == expected
        batches.close()


# Concurrency


@pytest.mark.parametrize("threads", [2, 3])
def test_transforms_of_different_batches_overlap(dataset: Dataset, threads: int) -> None:
    loader = make_loader(
        dataset, N // (4 * threads), num_threads=threads, transform=meeting_of(threads), drop_last=True
    )
    batches = list(loader)
    assert len(batches) in (4 * threads, 4 * threads + 1)
    assert len({batch["thread"] for batch in batches}) == threads


def test_batches_that_are_done_early_wait_for_their_turn(dataset: Dataset) -> None:
    later = threading.Event()

    def transform(batch: Batch) -> Batch:
        first = batch["x"][0].item()
        if first == 0:
            assert later.wait(SECONDS)
        if first == 3 * BATCH:
            later.set()
        return batch

    loader = make_loader(dataset, BATCH, shuffle=False, num_threads=2, transform=transform)
    assert torch.cat([batch["x"] for batch in loader]).tolist() == list(range(N))


def test_without_threads_the_loop_makes_the_batch_that_it_needs(dataset: Dataset) -> None:
    seen: list[int] = []

    def transform(batch: Batch) -> Batch:
        assert threading.current_thread() is threading.main_thread()
        seen.append(len(batch["x"]))
        return batch

    for number, _ in enumerate(make_loader(dataset, BATCH, num_threads=0, transform=transform)):
        assert len(seen) == number + 1
    assert not threads_ahead()


@pytest.mark.parametrize(("prefetch", "most"), [(2, 2), (4, 4), (None, 8)])
def test_prefetch_bounds_the_batches_in_memory(dataset: Dataset, prefetch: int | None, most: int) -> None:
    made: list[int] = []
    enough = threading.Event()

    def transform(batch: Batch) -> Batch:
        made.append(1)
        if len(made) == 1 + most:
            enough.set()
        return batch

    batches = iter(make_loader(dataset, BATCH, num_threads=2, prefetch=prefetch, transform=transform))
    next(batches)
    assert enough.wait(SECONDS)
    batches.close()
    assert len(made) == 1 + most


def test_nothing_is_in_shared_memory_and_nothing_is_pickled(dataset: Dataset) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise AssertionError

    loader = make_loader(dataset, BATCH, num_threads=2, transform=lambda batch: {**batch, "object": Unpicklable()})
    for batch in loader:
        assert isinstance(batch["object"], Unpicklable)
        assert not batch["x"].is_shared()
        assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(f"torch_{os.getpid()}_")]


# Errors


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_an_error_is_raised_at_its_batch(dataset: Dataset, threads: int) -> None:
    def transform(batch: Batch) -> Batch:
        if 5 * BATCH in batch["x"].tolist():
            raise LookupError("no such word")
        return batch

    loader = make_loader(dataset, BATCH, shuffle=False, num_threads=threads, transform=transform)
    batches = iter(loader)
    assert [next(batches)["x"][0].item() for _ in range(5)] == list(range(0, 5 * BATCH, BATCH))
    with pytest.raises(LookupError, match="no such word") as caught:
        next(batches)
    assert "rank 0, epoch 0, batch 5 has 8 rows of the dataset: 40-47" in caught.value.__notes__[0]
    assert loader.state_dict()["cursor"] == 5 * BATCH
    assert not threads_ahead()


@pytest.mark.parametrize("threads", [0, 2])
def test_a_transform_that_raises_stop_iteration_does_not_end_the_epoch(dataset: Dataset, threads: int) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(make_loader(dataset, BATCH, num_threads=threads, transform=lambda _: next(iter([]))))


def test_bad_rows_are_replaced_in_the_threads(dataset: Dataset) -> None:
    def transform(batch: Batch, rng: np.random.Generator) -> Batch:
        if {*batch["x"].tolist()} & {3, 77, 78, 130}:
            raise ValueError("corrupt")
        return noisy(batch, rng)

    runs = []
    for threads in (0, 1, 3):
        loader = make_loader(dataset, BATCH, num_threads=threads, on_error="skip", transform=transform)
        runs.append((values(loader), sorted(loader.stats().skipped_row_ids), loader.stats().rows))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1:] == ([3, 77, 78, 130], N)


def test_a_batch_that_takes_too_long_times_out(dataset: Dataset) -> None:
    release = threading.Event()
    loader = make_loader(dataset, BATCH, transform=lambda _: release.wait(SECONDS), timeout=0.01)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.01 seconds"):
        next(iter(loader))
    release.set()
    for thread in threads_ahead():  # The loop waits for them one second.
        thread.join(SECONDS)


# Ends of a loop


@pytest.mark.parametrize("end", ["break", "close", "error", "collection"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_loop_that_ends_early_leaves_no_thread(dataset: Dataset, end: str, threads: int) -> None:
    loader = make_loader(dataset, BATCH, num_threads=threads, transform=dict)
    if end == "break":
        for _ in loader:
            assert len(threads_ahead()) == threads
            break
    elif end == "error":
        with pytest.raises(ZeroDivisionError):
            for _ in loader:
                raise ZeroDivisionError
    else:
        batches = iter(loader)
        next(batches)
        if end == "close":
            batches.close()
        circle: list[Any] = [batches]
        circle.append(circle)
        del batches, circle
    gc.collect()
    assert not threads_ahead()


def test_an_interrupt_ends_the_threads(dataset: Dataset) -> None:
    """Ctrl-C comes while the loop waits for a batch and both threads run the transform."""
    meeting, release = threading.Barrier(2), threading.Event()

    def transform(batch: Batch) -> Batch:
        if meeting.wait(SECONDS) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        release.wait(SECONDS)
        return batch

    loader = make_loader(dataset, BATCH, num_threads=2, transform=transform)
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    release.set()
    for thread in threads_ahead():  # The loop waits for them one second.
        thread.join(SECONDS)
    assert not threads_ahead()


# Statistics and arguments


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_statistics_are_those_of_the_batches_handed_out(dataset: Dataset, threads: int) -> None:
    loader = make_loader(dataset, BATCH, num_threads=threads, transform=dict)
    for number, _ in enumerate(loader, 1):
        assert (loader.stats().batches, loader.stats().rows) == (number, number * BATCH)
    assert timed_epoch(loader).batches == number


def test_arguments_that_exclude_each_other(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="num_workers=2 and num_threads=2: use one of them"):
        make_loader(dataset, BATCH, num_workers=2, num_threads=2, transform=dict)
    with pytest.raises(ConfigError, match="timeout=5 and num_threads=0: the loop itself makes the batches"):
        make_loader(dataset, BATCH, num_threads=0, timeout=5)
    with pytest.raises(ConfigError, match="num_threads=-1 must be at least 0"):
        make_loader(dataset, BATCH, num_threads=-1)


def test_strings_are_made_by_the_loop_not_ahead_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread ahead would hold the interpreter lock for the strings of many batches at once."""
    texts = [f"text {row}" for row in range(N)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    seen = []

    def recorded(batch: Batch) -> Batch:
        seen.append((threading.get_ident(), type(batch["text"])))
        return with_strings(batch)

    monkeypatch.setattr(batch_maker, "with_strings", recorded)
    loader = make_loader(tmp_path / "a.parquet", 50, cache=False, shuffle=False)
    assert [text for batch in loader for text in batch["text"]] == texts
    assert seen == [(threading.get_ident(), pa.LargeStringArray)] * 4


def rows_or_error(dataset: Dataset, answers: Any, **options: int) -> None:
    try:
        loader = make_loader(dataset, BATCH, transform=noisy, **options)
        answers.send(sum(len(batch["x"]) for batch in loader))
    except ConfigError as error:
        answers.send(str(error))


DAEMONIC = (
    "num_workers=2 cannot start processes in a daemonic one: use num_threads=2, or start this process with daemon=False"
)


@pytest.mark.parametrize(("options", "expected"), [({"num_threads": 2}, N), ({"num_workers": 2}, DAEMONIC)])
def test_a_daemonic_process_is_told_to_use_threads(dataset: Dataset, options: Any, expected: Any) -> None:
    """Such as the workers of a multiprocessing.Pool."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=rows_or_error, args=(dataset, theirs), kwargs=options, daemon=True)
    process.start()
    assert ours.poll(SECONDS)
    assert ours.recv() == expected
    process.join(SECONDS)
    assert process.exitcode == 0
