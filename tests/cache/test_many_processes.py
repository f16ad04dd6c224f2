"""Concurrent reads by several processes of a host, with and without faults: each byte is fetched once, and correct."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import until
from nightly import NIGHTLY

from dataload.benchmarks.origin import Origin, s3
from dataload.benchmarks.systems.base import BUCKET
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.errors import ObjectChanged

BLOCK = 64 << 10
OBJECTS = [np.random.default_rng(number).bytes((3 + number % 4) * BLOCK + number) for number in range(24)]
BYTES = sum(map(len, OBJECTS))
TRIALS = 100 if NIGHTLY else 12

READ = f"""
import hashlib, json, random, sys
from dataload.benchmarks.origin import s3
from dataload.cache.origin import origin, retries, translation
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.errors import OriginError

retries.FIRST_PAUSE, translation.STALL_SECONDS = 0.001, 1
endpoint, cache, seed, options = sys.argv[1:]
options = json.loads(options)
origin.RETRY_SECONDS = options.pop("retry_seconds", 120)
processes, first, last = options.pop("processes", 1), options.pop("first", 0), options.pop("last", None)
fs = TierCacheFileSystem("s3", s3.storage_options(endpoint), cache_dir=cache, block_bytes=65536, **options)
fs.blocks.origin.limiter.share(fs, processes)
names = sorted(fs.find("{BUCKET}"))[first:last]
random.Random(int(seed)).shuffle(names)
print("ready", flush=True)
sys.stdin.readline()
try:
    read = dict(zip(names, fs.cat_ranges(names, 0, None, on_error="raise"), strict=True))
except OriginError as error:
    print(json.dumps(dict(error=str(error))))
else:
    digests = {{name.rpartition("/")[2]: hashlib.sha256(body).hexdigest() for name, body in read.items()}}
    print(json.dumps(dict(digests=digests, requests=fs.stats()["requests_origin"])))
"""

WANTED = {f"{number:02d}.bin": hashlib.sha256(body).hexdigest() for number, body in enumerate(OBJECTS)}


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    folder = tmp_path / "objects" / BUCKET
    folder.mkdir(parents=True)
    for number, body in enumerate(OBJECTS):
        (folder / f"{number:02d}.bin").write_bytes(body)
    with Origin(tmp_path / "objects") as origin:
        yield origin


def reader(origin: Origin, cache: Path, seed: int = 0, **options: Any) -> Any:
    """Start a process that reads objects once it gets a line of input."""
    command = [sys.executable, "-c", READ, origin.endpoint_url, str(cache), str(seed), json.dumps(options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process


def read_by(processes: int, origin: Origin, cache: Path, faults: dict[str, Any], **options: Any) -> list[Any]:
    """Return the reports of several processes that start to read together."""
    running = [reader(origin, cache, seed, processes=processes, **options) for seed in range(processes)]
    for one in running:
        assert one.stdout.readline() == "ready\n"
    origin.reset()
    origin.behave(**faults)
    for one in running:
        one.stdin.write("go\n")
        one.stdin.flush()
    told = [one.communicate(timeout=200)[0] for one in running]
    assert [one.returncode for one in running] == [0] * processes
    return [json.loads(said) for said in told]


def test_many_that_start_at_once_fetch_each_byte_once_and_no_more_at_a_time_than_agreed(
    origin: Origin, tmp_path: Path
) -> None:
    processes = 8 if NIGHTLY else 2
    told = read_by(processes, origin, tmp_path / "cache", {"bytes_per_second": 2e6}, in_flight=2 * processes)
    assert all(one["digests"] == WANTED for one in told)
    stats = origin.stats()
    assert (stats["get_bytes"], stats["duplicate_gets"]) == (BYTES, 0)
    assert processes < stats["most_gets_at_once"] <= 2 * processes


@pytest.mark.slow
def test_a_process_that_stands_still_in_its_requests_stops_no_other(origin: Origin, tmp_path: Path) -> None:
    stopped, other = (
        reader(origin, tmp_path / "cache", in_flight=1, first=first, last=last) for first, last in ((0, 1), (1, None))
    )
    with stopped, other:
        try:
            for one in (stopped, other):
                assert one.stdout.readline() == "ready\n"
            origin.reset()
            origin.behave(stalled=1.0)
            stopped.stdin.write("go\n")
            stopped.stdin.flush()
            until(lambda: origin.stats()["most_gets_at_once"])
            stopped.send_signal(signal.SIGSTOP)
            origin.behave(stalled=0.0)
            told = json.loads(other.communicate("go\n", timeout=200)[0])
            assert told["digests"] == dict(sorted(WANTED.items())[1:])
        finally:
            stopped.kill()
            other.kill()


@pytest.mark.parametrize(
    "faults",
    [
        *([{fault: 0.05} for fault in ("slow_down", "reset", "short", "stalled")] if NIGHTLY else []),
        dict.fromkeys(("slow_down", "reset", "short", "stalled"), 0.05),
    ],
    ids=lambda faults: ", ".join(faults),
)
def test_faults_change_no_byte(origin: Origin, tmp_path: Path, faults: dict[str, float]) -> None:
    told = read_by(4 if NIGHTLY else 2, origin, tmp_path / "cache", faults)
    assert all(one["digests"] == WANTED for one in told)
    blocks = sum(-(-len(body) // BLOCK) for body in OBJECTS)
    struck = sum(origin.stats()["errors"].values())
    assert struck > 0
    assert sum(one["requests"] for one in told) <= blocks + struck


@pytest.mark.slow
def test_an_origin_that_stays_down_is_one_clear_error_each(origin: Origin, tmp_path: Path) -> None:
    told = read_by(4 if NIGHTLY else 2, origin, tmp_path / "cache", {"slow_down": 0.5, "reset": 0.5}, retry_seconds=1)
    assert all(BUCKET in one["error"] and ".bin" in one["error"] and "\n" not in one["error"] for one in told)


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_an_object_replaced_while_it_is_read_is_old_or_an_error(origin: Origin, tmp_path: Path, engine: str) -> None:
    """A read never mixes two versions."""
    path, changed = tmp_path / "objects" / BUCKET / "03.bin", 0
    versions = [OBJECTS[3], OBJECTS[3][::-1]]
    fs = TierCacheFileSystem(
        "s3", s3.storage_options(origin.endpoint_url), cache_dir=str(tmp_path / "c"), block_bytes=BLOCK, engine=engine
    )
    for trial in range(TRIALS):
        fs.invalidate_cache()
        size = fs.info(f"{BUCKET}/03.bin")["size"]
        halfway, found = np.random.default_rng(trial).integers(size), b""
        try:
            with fs.open(f"{BUCKET}/03.bin") as file:
                found = bytes(file.read(halfway))
                new = tmp_path / "new"
                new.write_bytes(versions[(trial + 1) % 2])
                new.replace(path)
                found += bytes(file.read())
        except ObjectChanged as error:
            assert "03.bin" in str(error)
            changed += 1
        else:
            assert found == versions[trial % 2]
    assert changed > TRIALS // 2
    fs.clear_instance_cache()
