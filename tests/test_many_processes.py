"""What several processes of a host read together, on good days and bad ones: each byte once, and the right one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nightly import NIGHTLY

from dataload.benchmarks import s3
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.systems.base import BUCKET
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.locks import Slots
from dataload.errors import ObjectChanged

BLOCK = 64 << 10
OBJECTS = [np.random.default_rng(number).bytes((3 + number % 4) * BLOCK + number) for number in range(24)]
BYTES = sum(map(len, OBJECTS))
TRIALS = 100 if NIGHTLY else 12

READ = f"""
import hashlib, json, random, sys
from dataload.benchmarks import s3
from dataload.cache import origin
from dataload.cache import obstores
from dataload.cache.filesystem import TierCacheFileSystem
from dataload.cache.locks import Slots
from dataload.errors import OriginError

origin.FIRST_PAUSE, obstores.STALL_SECONDS = 0.001, 1
endpoint, cache, seed, options = sys.argv[1:]
fs = TierCacheFileSystem("s3", s3.storage_options(endpoint), cache_dir=cache, block_bytes=65536, **json.loads(options))
names = sorted(fs.find("{BUCKET}"))
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


def read_by(processes: int, origin: Origin, cache: Path, faults: dict[str, Any], **options: Any) -> list[Any]:
    """What so many processes, which start to read at once, say in the end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", READ, origin.endpoint_url, str(cache)]
    running = [subprocess.Popen([*command, str(seed), json.dumps(options)], **pipes) for seed in range(processes)]
    for one in running:
        assert one.stdout.readline() == "ready\n"
    origin.reset()
    origin.behave(**faults)
    for one in running:
        one.stdin.write("go\n")
        one.stdin.flush()
    told = [one.communicate(timeout=100)[0] for one in running]
    assert [one.returncode for one in running] == [0] * processes
    return [json.loads(said) for said in told]


def test_many_that_start_at_once_fetch_each_byte_once_and_no_more_at_a_time_than_agreed(
    origin: Origin, tmp_path: Path
) -> None:
    told = read_by(8 if NIGHTLY else 2, origin, tmp_path / "cache", {"latency": 0.02}, in_flight=3)
    assert all(one["digests"] == WANTED for one in told)
    stats = origin.stats()
    assert (stats["get_bytes"], stats["duplicate_gets"]) == (BYTES, 0)
    assert stats["most_gets_at_once"] == 3


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


def test_an_origin_that_stays_down_is_one_clear_error_each(origin: Origin, tmp_path: Path) -> None:
    told = read_by(4 if NIGHTLY else 2, origin, tmp_path / "cache", {"slow_down": 0.5, "reset": 0.5})
    assert all(BUCKET in one["error"] and ".bin" in one["error"] and "\n" not in one["error"] for one in told)


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_an_object_replaced_while_it_is_read_is_old_or_an_error(origin: Origin, tmp_path: Path, engine: str) -> None:
    """Never a mixture."""
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


@pytest.fixture
def locks(tmp_path: Path) -> str:
    (tmp_path / "locks").touch()
    return str(tmp_path / "locks")


def test_places_are_given_back_by_the_dead(locks: str) -> None:
    slots = Slots(locks, 1)
    child = os.fork()
    if child == 0:
        with slots.take():
            os._exit(0)
    os.waitpid(child, 0)
    with slots.take():
        entered = threading.Event()

        def enter() -> None:
            with slots.take():
                entered.set()

        other = threading.Thread(target=enter)
        other.start()
        assert not entered.wait(0.05)
    other.join(20)
    assert entered.is_set()


def test_threads_of_a_process_wait_without_asking_the_file(locks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, asked, begun, entered = Slots(locks, 1), threading.Event(), threading.Event(), threading.Event()

    def enter() -> None:
        begun.set()
        with slots.take():
            entered.set()

    other = threading.Thread(target=enter)
    with slots.take(), monkeypatch.context() as patch:
        patch.setattr("dataload.cache.locks.set_lock", lambda *_: asked.set())
        other.start()
        assert begun.wait(20)
        assert not asked.wait(0.1)
    other.join(20)
    assert entered.is_set()


def test_threads_of_a_process_come_in_turn(locks: str) -> None:
    """Who gives a place back and asks again comes after those who wait."""
    slots, taken, enough = Slots(locks, 2), Counter[int](), threading.Event()

    def work(number: int) -> None:
        while not enough.is_set():
            with slots.take():
                taken[number] += 1
                time.sleep(0.001)
            if taken[number] == 100:
                enough.set()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert min(taken.values()) > 20


def test_a_process_whose_own_requests_stand_still_goes_on(locks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataload.cache.locks.PATIENCE", 0.05)
    slots = Slots(locks, 1)
    with slots.take():
        for _ in range(3):
            with slots.take():
                monkeypatch.setattr("dataload.cache.locks.PATIENCE", 3600)


def test_who_has_all_places_and_stands_still_stops_nobody(locks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataload.cache.locks.PATIENCE", 0.05)
    mine, theirs = Slots(locks, 1), Slots(locks, 1)
    with theirs.take():
        for _ in range(3):  # The second and third do not wait at all: PATIENCE is not theirs to be tried again.
            with mine.take():
                monkeypatch.setattr("dataload.cache.locks.PATIENCE", 3600)


def test_where_there_are_no_locks_there_is_no_bound(locks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> bool:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("dataload.cache.locks.set_lock", fails)
    with Slots(locks, 1).take(), Slots(locks, 1).take(), Slots(locks + " are not there", 1).take():
        pass
