"""Containers share one cache: each process is number 1 in its own PID namespace."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nightly import NIGHTLY

from dataload.benchmarks.origin import Origin
from dataload.benchmarks.systems.base import BUCKET

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
BLOCK = 16 << 10
OBJECTS = [np.random.default_rng(number).bytes(1 << 20) for number in range(8)]
BYTES = sum(map(len, OBJECTS))
WANTED = {f"{number}.bin": hashlib.sha256(body).hexdigest() for number, body in enumerate(OBJECTS)}
PROCESSES, IN_FLIGHT, KILLS = 4 if NIGHTLY else 2, 2, 10 if NIGHTLY else 2

READ = f"""
import hashlib, json, os, random, sys
from dataload.benchmarks.origin import s3
from dataload.cache.filesystem import TierCacheFileSystem

assert os.getpid() == 1
endpoint, cache, seed = sys.argv[1:]
fs = TierCacheFileSystem(
    "s3", s3.storage_options(endpoint), cache_dir=cache, cache_bytes="1GB", block_bytes={BLOCK}, in_flight={IN_FLIGHT}
)
names = sorted(fs.find("{BUCKET}"))
random.Random(int(seed)).shuffle(names)
print("ready", flush=True)
sys.stdin.readline()
digests = {{}}
for name in names:
    digests[name.rpartition("/")[2]] = hashlib.sha256(fs.cat_file(name)).hexdigest()
print(json.dumps(dict(digests=digests, health=fs.stats()["health"], errors=fs.stats()["errors"])))
"""

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
        reason="this process may not make namespaces (unshare --pid)",
    ),
]


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    folder = tmp_path / "objects" / BUCKET
    folder.mkdir(parents=True)
    for number, body in enumerate(OBJECTS):
        (folder / f"{number}.bin").write_bytes(body)
    with Origin(tmp_path / "objects") as origin:
        yield origin


def start(origin: Origin, cache: Path) -> list[subprocess.Popen[str]]:
    """Start readers with PID 1 each; at a signal they read all objects through one cache."""
    command = [*UNSHARE, sys.executable, "-c", READ, origin.endpoint_url, str(cache)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*command, str(seed)], **pipes) for seed in range(PROCESSES)]


def go(readers: list[Any]) -> None:
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        reader.stdin.write("go\n")
        reader.stdin.flush()


def answers(readers: list[Any]) -> list[dict[str, Any]]:
    said = [reader.communicate(timeout=200)[0] for reader in readers]
    assert [reader.returncode for reader in readers] == [0] * len(readers)
    return [json.loads(one) for one in said]


def assert_all_shared(told: list[dict[str, Any]]) -> None:
    assert all(one["digests"] == WANTED for one in told)
    assert [one["health"]["state"] for one in told] == ["normal"] * len(told)
    assert all(one["errors"]["local"] == 0 for one in told)


def test_containers_share_one_cold_cache(origin: Origin, tmp_path: Path) -> None:
    readers = start(origin, tmp_path / "cache")
    go(readers)
    assert_all_shared(answers(readers))
    assert origin.stats()["get_bytes"] <= 1.01 * BYTES


@pytest.mark.slow
def test_a_container_that_is_killed_in_a_fill_costs_the_others_nothing(origin: Origin, tmp_path: Path) -> None:
    for number in range(KILLS):
        origin.behave(latency=0.002)
        readers = start(origin, tmp_path / f"cache{number}")
        origin.reset()
        go(readers)
        victim, *others = readers
        while origin.stats()["get_requests"] < 40 * (1 + number):  # Each kill at a different moment of the fills.
            pass
        victim.kill()  # --kill-child: the reader dies with it, by SIGKILL.
        victim.communicate()
        assert_all_shared(answers(others))
        assert origin.stats()["get_bytes"] <= 1.01 * BYTES
