"""Files of a cache that are cut short while a process has them mapped."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiers import look, put, run

from dataload import CacheConfig, make_dataset
from dataload.cache.local.tier import LocalTier


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"x": list(range(100)), "s": [str(row) for row in range(100)]}), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def read_cut(file: Path, cache: Path, column: str) -> None:
    os.dup2(os.open(cache.with_name("said"), os.O_WRONLY | os.O_CREAT, 0o600), 2)
    dataset = make_dataset(str(file), columns=[column], cache=CacheConfig(cache_dir=str(cache), cache_bytes="1GB"))
    assert dataset[1]
    for blob in cache.glob("blobs/*/*"):
        os.truncate(blob, 0)
    assert dataset[2]


@pytest.mark.variants
@pytest.mark.parametrize("column", ["x", "s"])
def test_a_process_whose_mapped_blob_is_cut_short_dies_with_the_name_of_the_cache(
    file: Path, tmp_path: Path, column: str
) -> None:
    assert run(read_cut, file, tmp_path / "cache", column) == -signal.SIGBUS
    said = (tmp_path / "said").read_text()
    assert f'File "the cache {tmp_path}/cache: its disk failed, or a file in it was cut short"' in said


def read_with_a_jvm(file: Path, cache: Path, number: signal.Signals) -> None:
    """Read a row in a process whose signals are handled, as a JVM does, by _exit(number of the signal)."""
    os.dup2(os.open(cache.with_name("said"), os.O_WRONLY | os.O_CREAT, 0o600), 2)
    libc = ctypes.CDLL(None)
    libc.signal(ctypes.c_int(number), libc._exit)
    assert make_dataset(str(file), cache=CacheConfig(cache_dir=str(cache), cache_bytes="1GB"))[1]
    os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS])
def test_signals_that_a_jvm_handles_stay_its_own(file: Path, tmp_path: Path, number: signal.Signals) -> None:
    assert run(read_with_a_jvm, file, tmp_path / "cache", number) == number
    assert (tmp_path / "said").read_text() == ""


@pytest.mark.parametrize("cached", [True, False])
def test_only_a_cache_on_disk_is_named_by_the_frames_of_a_read(file: Path, cache: CacheConfig, *, cached: bool) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError) as error:
        make_dataset(str(file), cache=cache if cached else False).__getitems__([2]).batch(fails)
    frames = [frame.filename for frame in traceback.extract_tb(error.tb)]
    assert any("the cache" in frame for frame in frames) == cached
    assert "" not in frames


def test_a_blob_that_was_cut_short_before_it_is_mapped_is_made_again(file: Path, cache: CacheConfig) -> None:
    expected = make_dataset(str(file), cache=cache).__getitems__([2]).columns["s"]
    for blob in cache.folder.glob("blobs/*/*"):
        os.truncate(blob, blob.stat().st_size // 2)
    assert make_dataset(str(file), cache=cache).__getitems__([2]).columns["s"] == expected


def write_after_a_cut_of_the_index(cache: Path) -> None:
    tier = LocalTier(cache)
    for number in range(6):
        put(tier, f"x/{number}")
    os.truncate(cache / "index" / "data.mdb", 8192)
    for number in range(6):
        put(tier, f"y/{number}")
        put(tier, f"x/{number}")


def test_an_index_that_is_cut_short_under_a_process_is_rebuilt(tmp_path: Path) -> None:
    assert run(write_after_a_cut_of_the_index, tmp_path / "cache") == 0
    put(tier := LocalTier(tmp_path / "cache"), "y/0")
    assert look(tier, "y/0")
