"""Ranks of a plain loop that would read different rows are told, without a barrier and without false alarms."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from dataload import World, make_loader
from dataload.errors import ConfigError

Ranks = Callable[..., list[Any]]
BOARDS = ["agent", "group", "cache"]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "data").mkdir()
    paths = [tmp_path / "data" / f"{number}.parquet" for number in range(10)]
    for number, path in enumerate(paths):
        pq.write_table(pa.table({"x": np.arange(100) + 100 * number}), path)
    return list(map(str, paths))


def together(work: Callable[[int], Any], board: str) -> Any:
    """Return the result of a rank's work, once all ranks have ended theirs, as in one job."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if board == "group":
        dist.init_process_group("gloo")
    elif board == "cache":
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    try:
        return work(rank)
    finally:
        store.set(f"ended {rank}", "")
        store.wait([f"ended {other}" for other in range(size)])
        if board == "group":
            dist.destroy_process_group()


def read(sources: Sequence[Any], board: str, cache: Any = False, **options: Any) -> list[int]:
    """Return the rows of one epoch of a rank. Options in a list are those of the ranks."""
    kept: list[Any] = []  # What a rank shows in the cache ends with its loaders.

    def epoch(rank: int) -> list[int]:
        own = {name: value[rank] if isinstance(value, list) else value for name, value in options.items()}
        loader = make_loader(sources[rank], 10, **{"cache_dir": cache} if cache else {"cache": False}, **own)
        kept.append(loader)
        return [row for batch in loader for row in batch["x"].tolist()]

    return together(epoch, board)


def errors_of(answers: list[Any]) -> list[str]:
    assert all(isinstance(answer, (ConfigError, list)) for answer in answers), answers
    return [str(answer) for answer in answers if isinstance(answer, ConfigError)]


@pytest.mark.parametrize("board", BOARDS)
def test_ranks_that_list_different_files_are_told_in_the_first_epoch(
    files: list[str], tmp_path: Path, ranks: Ranks, board: str
) -> None:
    fewer = [*files[:4], *files[5:]]
    errors = errors_of(ranks(2, read, [files, fewer], board, str(tmp_path / "cache")))
    assert errors
    for error in errors:
        assert "the ranks read different rows: rank " in error
        assert "has 1,000 rows in 10 files (" in error
        assert "has 900 rows in 9 files (" in error
        assert f"the first file that differs is {files[4]}" in error or f"differs is {files[5]}" in error
        assert "List the files once" in error


def test_the_end_of_a_longer_list_is_named(files: list[str], ranks: Ranks) -> None:
    for error in errors_of(ranks(2, read, [files, files[:9]], "agent")):
        assert f"differs is {files[9]}." in error or f"differs is the one after {files[8]}." in error


def test_ranks_with_different_seeds_are_told(files: list[str], ranks: Ranks) -> None:
    errors = errors_of(ranks(2, read, [files, files], "agent", seed=[0, 1]))
    assert errors
    assert all("rank 1 has seed=1" in error and "rank 0 has seed=0" in error for error in errors)


@pytest.mark.variants
@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("number", [2, 3])
def test_ranks_that_agree_read_each_row_once(
    files: list[str], tmp_path: Path, ranks: Ranks, board: str, number: int
) -> None:
    answers = ranks(number, read, [files] * number, board, str(tmp_path / "cache"))
    assert set().union(*answers) == {*range(1000)}


def test_copies_of_the_files_in_other_folders_agree(files: list[str], tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "other" / "copy").mkdir(parents=True)
    copies = [str(tmp_path / "other" / "copy" / Path(file).name) for file in files]
    for file, copy in zip(files, copies, strict=True):
        Path(copy).write_bytes(Path(file).read_bytes())
    answers = ranks(2, read, [files, copies], "agent")
    assert set().union(*answers) == {*range(1000)}


def several(files: list[str], cache: str, board: str) -> int:
    """Loaders of training and validation, one that only rank 0 has, and ensembles of single ranks."""

    def epochs(rank: int) -> int:
        def loader_of(source: Any, **options: Any) -> Any:
            return make_loader(source, 10, cache_dir=cache, **options)

        if rank == 0:
            next(iter(make_loader(files[:1], 10, cache_dir=cache)))
        train, validation = loader_of(files[:8]), loader_of(files[8:], shuffle=False)
        own = loader_of(files[rank : rank + 2], world=World(), seed=rank)
        rows = 0
        for loader in (train, validation, own) if rank else (validation, own, train):
            rows += sum(len(batch["x"]) for batch in [*loader, *loader])
        return rows

    found: int = together(epochs, board)
    return found


def of_a_set(files: list[str], cache: str, board: str) -> int:
    """Loaders that are made in another order on each rank."""

    def epochs(rank: int) -> int:
        in_any_order = files[:2] if rank else files[1::-1]
        loaders = {file: make_loader(file, 10, cache_dir=cache) for file in in_any_order}
        return sum(len(batch["x"]) for file in files[:2] for _ in range(2) for batch in loaders[file])

    found: int = together(epochs, board)
    return found


@pytest.mark.variants
@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize(("program", "rows"), [(several, 1400), (of_a_set, 200)])
def test_several_loaders_of_a_job_are_not_taken_for_each_other(
    files: list[str], tmp_path: Path, ranks: Ranks, board: str, program: Callable[..., int], rows: int
) -> None:
    assert ranks(2, program, files, str(tmp_path / "cache"), board) == [rows, rows]


def two_of_a_line(files: list[str]) -> None:
    def epochs(rank: int) -> None:
        train, validation = make_loader(files[:8], 10, cache=False), make_loader(files[8 + rank :], 10, cache=False)
        for loader in (train, validation):
            list(loader)

    together(epochs, "agent")


def test_each_of_two_loaders_of_a_line_is_compared(files: list[str], ranks: Ranks) -> None:
    answers = [answer for answer in ranks(2, two_of_a_line, files) if answer is not None]
    assert answers
    assert all(
        f"the first file that differs is {files[8]}" in error or files[9] in error for error in errors_of(answers)
    )


def attempt(files: list[str], count: int, port: int) -> list[int]:
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": str(count), "MASTER_PORT": str(port)}
    return [row for batch in make_loader(files, 10, cache=False) for row in batch["x"].tolist()]


def test_what_an_earlier_attempt_read_does_not_count(files: list[str], ranks: Ranks) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = ranks(2, attempt, files[:5], 0, store.port)
    second = ranks(2, attempt, files, 1, store.port)
    assert set().union(*first) == {*range(500)}
    assert set().union(*second) == {*range(1000)}


def test_what_the_job_read_before_its_number_of_ranks_changed_does_not_count(files: list[str], ranks: Ranks) -> None:
    """Torchrun counts no restart then, and the store of its agent stays."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number in (2, 3):
        assert set().union(*ranks(number, attempt, files, 0, store.port)) == {*range(1000)}


def connections(files: list[str], board: str, port: int) -> int:
    """Return how often a rank connects for two loaders of two epochs each."""
    os.environ["MASTER_PORT"] = str(port)
    store, tries = dist.TCPStore, []

    def connect(*args: Any, **options: Any) -> Any:
        tries.append(args)
        if board == "unreachable":
            raise dist.DistNetworkError("Connection refused")
        return store(*args, **options)

    dist.TCPStore = connect
    for loader in (make_loader(files, 10, cache=False), make_loader(files, 10, cache=False)):
        for _ in range(2):
            list(loader)
    return len(tries)


@pytest.mark.parametrize("board", ["agent", "unreachable"])
def test_a_process_connects_to_the_store_once(files: list[str], ranks: Ranks, board: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks(2, connections, files, board, store.port) == [1, 1]


def alone(files: list[str], address: str) -> int:
    os.environ |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": address}
    loader = make_loader(files, 10, cache=False)
    return sum(len(batch["x"]) for batch in [*loader, *loader])


@pytest.mark.variants
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"], ids=["late ranks", "no store"])
def test_a_rank_waits_for_no_other(files: list[str], ranks: Ranks, address: str) -> None:
    assert ranks(1, alone, files, address) == [500]
