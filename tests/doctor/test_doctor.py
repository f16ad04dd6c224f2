"""Each check of the doctor finds the fault that it looks for, and advises how to fix it."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from time import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
import typer
from attempts import fail_at_once
from clusters import Server, ServerCluster
from http_servers import serving
from rich.filesize import decimal

from dataload import CacheConfig, convert, make_loader
from dataload.cache.blocks.reader import Blocks
from dataload.cache.local.index import Index, Row
from dataload.cache.local.setup import recovery
from dataload.cache.origin.source import open_source
from dataload.catalog import resolve
from dataload.cli.commands.doctor import doctor
from dataload.doctor import cache_dir, cluster, limits, object_store, processes, registry
from dataload.doctor.finding import Case, Finding, reason
from dataload.doctor.object_store import Store
from dataload.doctor.registry import MACHINE, ORIGIN, examine
from dataload.errors import ConfigError

BODY = b"0123456789"
LISTED = """<?xml version="1.0"?><ListBucketResult><Name>b</Name><Prefix>data/</Prefix><KeyCount>1</KeyCount>
<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated><Contents><Key>data/x</Key><Size>10</Size>{etag}
<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"""


OPEN_MPI = " ".join(
    f"OMPI_COMM_WORLD_{name}={number}"
    for name, number in {"RANK": 5, "SIZE": 8, "LOCAL_RANK": 1, "LOCAL_SIZE": 4}.items()
)


def line(found: Finding) -> str:
    return f"{found.status}: {found.what} -> {found.advice}"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of launchers and of AWS."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(CacheConfig(tmp_path / "cache", 10**6))


def test_a_machine_in_order(case: Case) -> None:
    found = {name: line(finding) for name, finding in examine(case, None)}
    assert list(found) == list(MACHINE)
    assert all(finding.startswith("ok: ") for finding in found.values()), found


def test_a_check_that_fails_takes_no_other_with_it(case: Case, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("nonsense\n")
    found = dict(examine(Case(case.cache, mounts=tmp_path / "mounts"), None))
    assert "the check failed: list index out of range (IndexError)" in line(found["cache filesystem"])
    assert list(found) == list(MACHINE)


def test_each_finding_is_printed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(*_: Any) -> Iterator[tuple[str, Finding]]:
        yield "first", Finding("ok", "it is in order")
        assert capsys.readouterr().out == "ok       first: it is in order\n"
        yield "second", Finding("problem", "it is not", "mend it")

    monkeypatch.setattr(registry, "examine", examine)
    with pytest.raises(typer.Exit) as ended:
        doctor(cache_dir=tmp_path)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out == "problem  second: it is not\n         -> mend it\n"


@pytest.mark.parametrize("kind", ["nfs4", "fuse.s3fs", "wekafs"])
def test_a_network_filesystem(case: Case, tmp_path: Path, kind: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"22 21 0:40 / {tmp_path} rw - {kind} server:/export rw\n")
    found = cache_dir.filesystem(Case(case.cache, mounts=mounts))
    assert (found.status, f"a filesystem of type {kind}, " in found.what) == ("problem", True)
    assert (
        cache_dir.filesystem(Case(replace(case.cache, allow_network_filesystem=True), mounts=mounts)).status
        == "warning"
    )


def test_a_filesystem_in_memory(case: Case, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"22 21 0:40 / {tmp_path} rw - tmpfs tmpfs rw\n")
    found = line(cache_dir.filesystem(Case(case.cache, mounts=mounts)))
    assert found.startswith("warning")
    assert "in memory (tmpfs)" in found
    assert "--cache-dir /nvme/cache" in found


def test_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    found = cache_dir.usable(Case(CacheConfig(tmp_path)))
    assert (found.status, found.advice) == ("problem", "name an empty folder")
    assert "thesis.txt" in found.what


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    for folder in ("/proc/sys/cache", "/proc/cache"):
        assert "may not write to /proc" in line(cache_dir.usable(Case(CacheConfig(Path(folder)))))


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may not read."""
    path, user = tmp_path / "closed", os.geteuid()
    path.mkdir(mode=0)
    if user == 0:
        os.seteuid(65534)  # permissions do not apply to root
    yield path
    os.seteuid(user)


def test_a_folder_in_one_that_may_not_be_looked_into(closed: Path) -> None:
    case = Case(CacheConfig(closed / "cache"))
    assert "Permission denied" in line(cache_dir.usable(case))
    assert "name a folder of your own" in line(cache_dir.usable(case))
    assert "cannot be locked" in line(cache_dir.locks(case))
    assert cache_dir.filesystem(case).status != "problem"


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert "lower cache_bytes" in line(cache_dir.capacity(Case(CacheConfig(tmp_path, 2 * free))))
    assert cache_dir.capacity(Case(CacheConfig(tmp_path, free // 2))).status == "ok"
    monkeypatch.setattr(cache_dir, "SMALL_CACHE_BYTES", free // 3)  # Others write to the disk, too.
    assert cache_dir.capacity(Case(CacheConfig(tmp_path / "cache"))).status == "ok"
    monkeypatch.setattr(cache_dir, "SMALL_CACHE_BYTES", 2 * free)
    assert "on a larger disk" in line(cache_dir.capacity(Case(CacheConfig(tmp_path / "cache"))))


@pytest.fixture
def used(case: Case) -> None:
    """The index of a cache that claims to hold a terabyte."""
    index = Index(case.folder / "index")
    (case.folder / "index").mkdir(parents=True)
    index.make()
    index.enter([Row(bytes(16), "x", 10**12)])
    index.close()
    recovery.note_open(case.folder / "index")


@pytest.mark.usefixtures("used")
def test_space_that_the_cache_uses_already(case: Case) -> None:
    free = shutil.disk_usage(case.existing).free
    assert cache_dir.capacity(Case(replace(case.cache, cache_bytes=free + 10**12 // 2))).status == "ok"
    assert f"may grow by {decimal(2 * free)}" in line(
        cache_dir.capacity(Case(replace(case.cache, cache_bytes=2 * free + 10**12)))
    )


@pytest.mark.usefixtures("used")
def test_after_a_power_failure_the_index_is_not_opened(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn index can crash the process that opens it, so the blobs are counted."""
    (case.folder / "index" / "data.mdb").write_bytes(os.urandom(100_000))
    blob = case.folder / "blobs" / "00" / "0000"
    blob.parent.mkdir(parents=True)
    blob.touch()
    os.truncate(blob, 10**12)
    monkeypatch.setattr(recovery, "boot_id", lambda: "another boot")
    monkeypatch.setattr("lmdb.open", lambda *_, **__: pytest.fail("LMDB opens the index"))
    free = shutil.disk_usage(case.existing).free
    assert cache_dir.capacity(Case(replace(case.cache, cache_bytes=free + 10**12 // 2))).status == "ok"


@pytest.mark.usefixtures("used")
def test_an_index_that_is_damaged(case: Case) -> None:
    (case.folder / "index" / "data.mdb").write_bytes(b"?" * 100_000)
    found = cache_dir.capacity(case)
    assert (found.status, found.advice) == ("problem", "dataload cache verify --repair")
    assert f"the index of {case.folder} cannot be read" in found.what


def test_a_url_of_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checks go to the origin behind the cache, and create no cache."""
    pq.write_table(pa.table({"label": np.arange(8)}), tmp_path / "x.parquet")
    options = json.dumps({"tiercache": {"cache_dir": str(tmp_path / "cache")}})
    url = f"tiercache::file://{tmp_path}/x.parquet"
    doctor(url, cache_dir=tmp_path / "cache", cache_bytes="1MB", storage_options=options)
    assert not (tmp_path / "cache").exists()
    assert "ok       credentials: 1 objects" in capsys.readouterr().out


def test_a_user_without_a_home_may_name_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"label": np.arange(8)}), tmp_path / "x.parquet")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for name in ("HOME", "XDG_CACHE_HOME", "DATALOAD_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    doctor(f"{tmp_path}/x.parquet", cache_dir=tmp_path / "cache", cache_bytes="1MB")


REFUSED = """
import ctypes, struct, sys
from pathlib import Path
from dataload.doctor import cache_dir
from dataload import CacheConfig
from dataload.doctor.finding import Case

# A seccomp filter: fcntl(…, F_OFD_SETLK, …) fails with EINVAL, all other system calls pass.
LOAD, EQUAL, RETURN, FCNTL, F_OFD_SETLK, ALLOW, REFUSE = 0x20, 0x15, 0x06, 72, 37, 0x7FFF0000, 0x00050000 | 22
steps = [
    (LOAD, 0, 0, 0), (EQUAL, 0, 3, FCNTL), (LOAD, 0, 0, 24), (EQUAL, 0, 1, F_OFD_SETLK),
    (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW),
]
program = b"".join(struct.pack("<HBBI", *step) for step in steps)
held = ctypes.create_string_buffer(program)
filter = struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(held))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()
found = cache_dir.locks(Case(CacheConfig(Path(sys.argv[1]))))
print(found.status, found.what, found.advice)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls have other numbers")
def test_no_locks(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", REFUSED, tmp_path], capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("problem files in "), ran.stderr
    assert "cannot be locked: Invalid argument" in ran.stdout
    assert "such as ext4 or xfs" in ran.stdout


def test_locks_that_exclude_no_other_holder(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network filesystems grant each host its own locks."""
    from dataload.cache.local import key_locks

    monkeypatch.setattr(key_locks, "set_lock", lambda *_: True)
    assert "do not exclude other holders" in line(cache_dir.locks(case))


def set_ranks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Set the environment of `count` ranks on this host alone."""
    for name, value in {"RANK": 0, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": count}.items():
        monkeypatch.setenv(name, str(value))


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize

    def found(**planned: int) -> str:
        return line(limits.shared_memory(Case(CacheConfig(tmp_path), shared_memory=tmp_path, **planned)))

    row = free // 1000
    assert f"4 workers need {decimal(4 * 200 * 2 * row)}" in found(num_workers=4, batch_size=200, row_bytes=row)
    assert "--shm-size" in found(num_workers=4, batch_size=200, row_bytes=row)
    assert found(num_workers=1, batch_size=300, row_bytes=row).startswith("ok")
    monkeypatch.setattr(limits, "SHARED_BYTES", 2 * free // 3)
    assert found(num_workers=1).startswith("ok")
    set_ranks(monkeypatch, 2)
    assert f"2 workers need {decimal(2 * 300 * 2 * row)}" in found(num_workers=1, batch_size=300, row_bytes=row)
    assert found(num_workers=1).startswith("problem"), "both ranks share this host's memory"
    assert found().startswith("ok")
    assert "there is no" in line(limits.shared_memory(Case(CacheConfig(tmp_path), shared_memory=tmp_path / "none")))


@pytest.fixture
def limit() -> Iterator[Callable[[int, int], None]]:
    """Set a soft limit of this process for the duration of the test."""
    before: dict[int, tuple[int, int]] = {}

    def lower(which: int, soft: int) -> None:
        before[which] = resource.getrlimit(which)
        resource.setrlimit(which, (soft, before[which][1]))

    yield lower
    for which, both in before.items():
        resource.setrlimit(which, both)


def test_few_open_files(case: Case, limit: Callable[[int, int], None]) -> None:
    limit(resource.RLIMIT_NOFILE, 700)
    assert limits.descriptors(case).status == "ok"
    assert "a process may open 700 files" in line(limits.descriptors(Case(case.cache, num_workers=8)))


@pytest.mark.parametrize(
    ("hard", "num_workers", "advice"),
    [
        (resource.RLIM_INFINITY, 8, "ulimit -n 65536, "),
        (10**6, 8, "ulimit -n 65536, "),
        (2000, 8, "ulimit -n 2000, or LimitNOFILE=65536"),
        (1000, 8, "have root raise the hard limit of 1,000: nofile 65536 in limits.conf"),
        (10**6, 2000, "ulimit -n 128512, "),
    ],
)
def test_the_advice_respects_the_hard_limit_of_open_files(
    case: Case, monkeypatch: pytest.MonkeyPatch, hard: int, num_workers: int, advice: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (700, hard))
    assert limits.descriptors(Case(case.cache, num_workers=num_workers)).advice.startswith(advice)


@pytest.mark.parametrize(
    ("planned", "needed"),
    [
        ({}, "67.1 MB"),
        ({"row_bytes": 10**6, "batch_size": 100, "prefetch": 2}, "200.0 MB"),
    ],
)
def test_little_locked_memory(
    case: Case, limit: Callable[[int, int], None], planned: dict[str, int], needed: str
) -> None:
    limit(resource.RLIMIT_MEMLOCK, 64 << 10)
    found = line(limits.locked_memory(Case(case.cache, pin_memory=True, **planned)))
    assert found.startswith("warning: a process may lock 65.5 kB")
    assert f"need {needed}" in found
    assert "memlock=-1" in found
    assert limits.locked_memory(Case(case.cache, **planned)).status == "ok", "nothing is pinned"


@pytest.mark.parametrize(("batch_size", "prefetch", "status"), [(100, 1, "ok"), (50, 2, "ok"), (100, 2, "warning")])
def test_batches_that_are_pinned(
    case: Case, monkeypatch: pytest.MonkeyPatch, batch_size: int, prefetch: int, status: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**8, resource.RLIM_INFINITY))
    planned = Case(case.cache, batch_size=batch_size, prefetch=prefetch, row_bytes=10**6, pin_memory=True)
    assert limits.locked_memory(planned).status == status


def test_few_processors(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        found = line(limits.processors(Case(case.cache, num_workers=3)))
        set_ranks(monkeypatch, 2)
        too_many = line(limits.processors(Case(case.cache)))
        planned = line(limits.processors(Case(case.cache, local_world_size=3)))
    finally:
        os.sched_setaffinity(0, before)
    assert "1 processors for 1 ranks of 3 workers each: 4 processes -> num_workers=0, or" in found
    assert "1 processors for 2 ranks of 0 workers each: 2 processes -> at most 1 rank on this host" in too_many
    assert "1 processors for 3 ranks of 0 workers each: 3 processes" in planned


def test_workers_that_are_forked(case: Case) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        multiprocessing.set_start_method("fork", force=True)
        found = line(processes.fork(Case(case.cache, num_workers=1)))
        multiprocessing.set_start_method("forkserver", force=True)
        assert processes.fork(Case(case.cache, num_workers=1)).advice == ""
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert found.startswith("warning: unless the program sets another start method, workers are forked")
    assert "multiprocessing_context='forkserver'" in found


@pytest.mark.parametrize(
    ("environment", "status", "says"),
    [
        ("WORLD_SIZE=4", "problem", "set RANK"),
        ("RANK=3", "problem", "set WORLD_SIZE too"),
        ("RANK=4 WORLD_SIZE=4", "problem", "ranks count from 0"),
        ("RANK=x WORLD_SIZE=4", "problem", "not a whole number"),
        ("RANK=1 WORLD_SIZE=4 SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4", "problem", "Slurm says rank 2"),
        ("RANK=0 WORLD_SIZE=1 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4", "problem", "Slurm says rank 0 of 4"),
        (f"{OPEN_MPI} SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", "ok", "rank 5 of 8"),
        ("SLURM_NTASKS=8 SLURM_PROCID=0", "problem", "start the program with srun"),
        ("RANK=1 WORLD_SIZE=4 SLURM_PROCID=x", "problem", "SLURM_PROCID='x'"),
        ("RANK=1 WORLD_SIZE=4", "warning", "set LOCAL_WORLD_SIZE"),
        ("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", "ok", "rank 1 of 4"),
        ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8", "problem", "rank 5 of 8 is local rank 1 of 8"),
        ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4", "warning", "not numbered host by host"),
    ],
)
def test_ranks(case: Case, monkeypatch: pytest.MonkeyPatch, environment: str, status: str, says: str) -> None:
    for name, value in (pair.split("=") for pair in environment.split()):
        monkeypatch.setenv(name, value)
    found = processes.ranks(case)
    assert found.status == status
    assert says in line(found)


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def with_cluster(case: Case, url: str) -> Case:
    return replace(case, cache=replace(case.cache, cluster=url))


def test_a_cluster_that_does_not_answer(case: Case) -> None:
    url = f"valkey://user:s3cret@127.0.0.1:{closed_port()}"
    found = line(cluster.cluster(with_cluster(case, url)))
    assert "does not answer" in found
    assert "user and password" in found
    assert "s3cret" not in found


def test_a_cluster_that_cannot_be_written(case: Case, tmp_path: Path) -> None:
    def found(url: str) -> str:
        return line(cluster.cluster(with_cluster(case, url)))

    with Server(tmp_path / "a") as server, Server(tmp_path / "b", "--replicaof", "127.0.0.1", str(server.port)) as copy:
        assert found(server.url).startswith(f"ok: {server.address} can be read and written")
        assert server.ask("DBSIZE") == 0
        assert "name a primary" in found(copy.url)
        server.ask("ACL", "SETUSER", "reader", "on", ">s3cret", "~*", "+get", "+hello", "+client")
        denied = found(f"valkey://reader:s3cret@{server.address}")
        assert "+set +eval +pexpire" in denied
        assert "s3cret" not in denied
        server.ask("CONFIG", "SET", "maxmemory", "1", "maxmemory-policy", "noeviction")
        assert "maxmemory-policy allkeys-lru" in found(server.url)


@pytest.mark.slow
def test_every_node_of_a_cluster_is_written(case: Case, tmp_path: Path) -> None:
    with ServerCluster(tmp_path) as servers:
        assert cluster.cluster(with_cluster(case, servers.url)).status == "ok"
        servers.servers[1].ask("CONFIG", "SET", "maxmemory", "1", "maxmemory-policy", "noeviction")
        assert "cannot be used: " in line(cluster.cluster(with_cluster(case, servers.url)))


@dataclass
class Answers:
    """The behaviour of the fake store."""

    ranges: bool = True
    etag: bool = True
    if_match: bool = True
    seconds_ahead: float = 0
    refuses: str = ""
    refuses_objects: bool = False
    token: str = ""
    region: str = "us-east-1"


class Handler(BaseHTTPRequestHandler):
    """The part of S3 that the checks use: a bucket `b` with one object."""

    answers: Answers

    def do_GET(self) -> None:
        answers, where = self.answers, urlsplit(self.path)
        self.body, self.headers_ = b"", {"x-amz-bucket-region": answers.region}
        status = 200
        etag = '"one"' if answers.etag else ""
        if (refused := self.refused(where.path)) is not None:
            status, self.body = 403, f"<Error><Code>{refused}</Code><Message>no</Message></Error>".encode()
        elif "list-type" in parse_qs(where.query):
            self.body = LISTED.format(etag=f"<ETag>{etag}</ETag>" if etag else "").encode()
        elif where.path == "/b/data/x":
            self.headers_ |= {"ETag": etag} if etag else {}
            if answers.if_match and self.headers.get("If-Match", etag) != etag:
                status = 412
            elif answers.ranges and "Range" in self.headers:
                status, self.body = 206, BODY[:1]
                self.headers_["Content-Range"] = f"bytes 0-0/{len(BODY)}"
            else:
                self.body = BODY
        elif where.path not in ("/", "/b"):
            status = 404
        self.send_response(status)
        for name, value in {**self.headers_, "Content-Length": str(len(self.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.body)

    def refused(self, path: str) -> str | None:
        """Return the error code for a rejected request; None if it is accepted."""
        answers = self.answers
        if answers.token and self.headers.get("Authorization") != f"Bearer {answers.token}":
            return "AccessDenied"
        if path == "/b/data/x" and answers.refuses_objects:
            return "AccessDenied"
        return answers.refuses if answers.refuses and path != "/" else None

    do_HEAD = do_GET  # noqa: N815 (http.server finds the method by this name)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time() + self.answers.seconds_ahead, usegmt=True)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def address(answers: Answers) -> Iterator[str]:
    with serving(type("Of", (Handler,), {"answers": answers})) as url:
        yield url


def s3(address: str, **options: Any) -> Store:
    keys = {"key": "testing", "secret": "s3cret", "client_kwargs": {"region_name": "us-east-1"}}
    return Store(
        "s3://b/data", Blocks.open(open_source("s3://b/data", {"endpoint_url": address, **keys, **options}), None)
    )


def http(address: str, **options: Any) -> Store:
    url = f"{address}/b/data/x"
    return Store(url, Blocks.open(open_source(url, options), None))


def test_a_store_in_order(case: Case, address: str, tmp_path: Path) -> None:
    for store in (s3(address), http(address)):
        found = {name: line(finding) for name, finding in examine(case, store) if name in ORIGIN}
        assert list(found) == list(ORIGIN)
        assert all(finding.startswith("ok: ") for finding in found.values()), found
    (tmp_path / "x").write_bytes(BODY)
    on_disk = Store(str(tmp_path / "x"), Blocks.open(open_source(str(tmp_path / "x"), {}), None))
    found = {name: finding.status for name, finding in examine(case, on_disk) if name in ORIGIN}
    assert found == dict.fromkeys(ORIGIN, "ok")


def test_an_endpoint_without_a_server(case: Case) -> None:
    found = dict(examine(case, s3(f"http://127.0.0.1:{closed_port()}")))
    assert "cannot be reached" in line(found["endpoint"])
    assert "AWS_ENDPOINT_URL" in line(found["endpoint"])
    assert "clock" not in found, "the checks stop at an endpoint that cannot be reached"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT_URL", "user:s3cret@foo"),
        ("AWS_PROFILE", "nope"),
        ("AWS_CONFIG_FILE", "broken"),
        ("--storage-options", '{"nonsense": 1}'),
        ("--storage-options", '{"client_kwargs": {"nonsense": 1}}'),
    ],
)
def test_a_store_that_cannot_be_opened(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if value == "broken":
        (tmp_path / "broken").write_text("[nonsense")
        value = str(tmp_path / "broken")
    options = value if name == "--storage-options" else None
    if options is None:
        monkeypatch.setenv(name, value)
    with pytest.raises(typer.Exit):
        doctor("s3://b/data", cache_dir=tmp_path / "cache", storage_options=options, as_json=True)
    printed = capsys.readouterr().out
    found = json.loads(printed)["checks"]
    assert list(found) == [*MACHINE, "endpoint"]
    assert "s3://b/data cannot be opened: " in found["endpoint"]["what"]
    assert name in found["endpoint"]["advice"] or "in ~/.aws" in found["endpoint"]["advice"]
    assert "s3cret" not in printed


def test_rows_that_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def manifest_of(*_: Any) -> None:
        raise RuntimeError("an unexpected filesystem error")

    (tmp_path / "x").write_bytes(BODY)
    monkeypatch.setattr(resolve, "manifest_of", manifest_of)
    with pytest.raises(typer.Exit):
        doctor(str(tmp_path / "x"), cache_dir=tmp_path / "cache", cache_bytes="1MB", as_json=True)
    found = json.loads(capsys.readouterr().out)["checks"]
    assert list(found) == [*MACHINE, *ORIGIN, "dataset"]
    assert found["dataset"]["what"] == "the dataset cannot be read: an unexpected filesystem error"


def test_a_dataset_that_no_loader_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    for write, says in (
        (lambda path: pq.write_table(pa.table({"x": ["a"]}), path), "differ in column 'x'"),
        (lambda path: path.write_text("not parquet at all"), "b.parquet is not a Parquet file"),
    ):
        write(tmp_path / "b.parquet")
        with pytest.raises(typer.Exit) as end:
            doctor(str(tmp_path), cache_dir=tmp_path / "cache", cache_bytes="1MB", as_json=True)
        assert end.value.exit_code == 1
        found = json.loads(capsys.readouterr().out)["checks"]
        assert found["dataset"]["status"] == "problem"
        assert says in found["dataset"]["what"]
        assert found["cache size"]["status"] == "warning"


def shape_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    with suppress(typer.Exit):  # of a check of this machine
        doctor(str(folder), cache_dir=folder.parent / "cache", cache_bytes="1GB", as_json=True)
    return json.loads(capsys.readouterr().out)["checks"]["shape"]


def test_small_row_groups_are_told_with_the_command_that_mends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    blobs = pa.table({"x": [np.random.default_rng(number).bytes(100_000) for number in range(700)]})
    pq.write_table(blobs, tmp_path / "in/x.parquet", row_group_size=10, compression="none")
    found = shape_of(tmp_path / "in", capsys)
    assert found["status"] == "warning"
    assert found["what"] == "row groups have about 1.0 MB and 10 rows, and some dozens of MB load fastest"
    assert found["advice"] == f"dataload convert {tmp_path}/in NEW_FOLDER --shuffle 0"
    convert(tmp_path / "in", tmp_path / "out", shuffle=0)
    assert shape_of(tmp_path / "out", capsys)["status"] == "ok"


@pytest.mark.parametrize(
    ("labels", "status"),
    [(np.repeat(np.arange(8), 100), "warning"), (np.arange(800) % 8, "ok"), (np.zeros(800), "ok")],
)
def test_rows_sorted_by_label_are_told(
    labels: Any, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    table = pa.table({"x": np.arange(800), "label": labels, "text": [f"row {number}" for number in range(800)]})
    pq.write_table(table, tmp_path / "in/x.parquet", row_group_size=50)
    found = shape_of(tmp_path / "in", capsys)
    assert found["status"] == status
    assert ("rows are sorted by 'label'" in found["what"]) == (status == "warning")


@pytest.mark.parametrize(("compression", "status"), [("zstd", "warning"), ("none", "ok")])
def test_compression_that_gains_nothing_is_told(
    compression: str, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    blobs = pa.table(
        {"text": ["a" * 1000] * 70, "image": [np.random.default_rng(n).bytes(1_000_000) for n in range(70)]}
    )
    pq.write_table(blobs, tmp_path / "in/x.parquet", row_group_size=35, compression=compression)
    found = shape_of(tmp_path / "in", capsys)
    assert found["status"] == status
    assert ("column 'image' is compressed without becoming smaller" in found["what"]) == (status == "warning")


def test_rows_of_some_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a row counts the selected columns only."""
    cases: list[Case] = []

    def examine(case: Case, _: Any) -> Iterator[tuple[str, Finding]]:
        cases.append(case)
        return iter(())

    monkeypatch.setattr(registry, "examine", examine)
    pq.write_table(pa.table({"wide": [bytes(10**5)] * 8, "label": np.arange(8)}), tmp_path / "x.parquet")
    for columns in (None, "label"):
        doctor(str(tmp_path / "x.parquet"), columns=columns, pin_memory=True)
    wide, narrow = cases
    assert wide.row_bytes is not None
    assert wide.row_bytes > 1000
    assert narrow.row_bytes == 8
    assert narrow.pin_memory
    with pytest.raises(ConfigError, match="did you mean 'label'"):
        doctor(str(tmp_path / "x.parquet"), columns="labels")


@pytest.mark.parametrize("window", [1, None])
def test_a_cache_that_a_loader_would_refuse(
    window: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The window of the loader, by default of all files together, decides what must fit."""
    for file in range(4):
        pq.write_table(pa.table({"x": np.arange(file, file + 40_000) * 7}), tmp_path / f"{file}.parquet")

    def found(cache_bytes: str) -> dict[str, str]:
        sizes = {"window": window, "cache_dir": tmp_path / "cache", "cache_bytes": cache_bytes}
        with suppress(typer.Exit):
            doctor(f"{tmp_path}/*.parquet", as_json=True, **sizes)
        checks: dict[str, dict[str, str]] = json.loads(capsys.readouterr().out)["checks"]
        return checks["cache size"]

    for cache_bytes in ("500kB", "1MB"):
        loader = {"window": window, "cache_dir": str(tmp_path / "its cache"), "cache_bytes": cache_bytes}
        if cache_bytes == "1MB" and window:
            make_loader(f"{tmp_path}/*.parquet", 10, **loader)
            assert found(cache_bytes)["status"] == "ok"
        else:
            with pytest.raises(ConfigError) as error:
                make_loader(f"{tmp_path}/*.parquet", 10, **loader)
            assert found(cache_bytes)["status"] == "problem"
            assert str(error.value) == "; ".join([found(cache_bytes)["what"], found(cache_bytes)["advice"]])
    assert found("2MB")["status"] == "ok"


def test_what_may_be_listed_but_not_read(case: Case, address: str, answers: Answers) -> None:
    answers.refuses_objects = True
    for store in (s3(address), s3(address, anon=True)):
        found = dict(examine(case, store))
        assert list(found) == [*MACHINE, *ORIGIN]
        for check in ("ranges", "ETag"):
            assert found[check].status == "problem"
            assert found[check].advice == "check that the credentials allow reading objects, not only listing them"


class Greeting(BaseRequestHandler):
    """A server that answers with an SSH banner instead of HTTP."""

    def handle(self) -> None:
        self.request.recv(1 << 16)
        self.request.sendall(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")


def test_a_server_without_http(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_once(monkeypatch)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with ThreadingTCPServer(("127.0.0.1", 0), Greeting) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        found = dict(examine(case, s3(url, config_kwargs={"retries": {"max_attempts": 0}})))
        server.shutdown()
        thread.join()
    assert line(found["clock"]) == "ok: the origin sends no date -> "
    assert found["credentials"].status == "problem"
    assert "check AWS_ENDPOINT_URL" in found["credentials"].advice
    assert "ranges" not in found


def test_a_proxy_without_a_server(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_port()
    monkeypatch.setenv("no_proxy", "")
    for proxy in (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", f"user:s3cret@127.0.0.1:{port}"):
        monkeypatch.setenv("http_proxy", proxy)
        assert f": 127.0.0.1:{port} cannot be reached" in line(object_store.endpoint(http(address)))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert object_store.endpoint(http(address)).status == "ok"


def test_a_server_without_tls(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_once(monkeypatch)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    once = {"retries": {"max_attempts": 0}}
    found = line(object_store.credentials(s3(address.replace("http:", "https:"), config_kwargs=once)))
    assert "AWS_CA_BUNDLE" in found
    assert "s3cret" not in found


@pytest.mark.parametrize(("seconds", "status"), [(-3600, "problem"), (200, "warning"), (5, "ok")])
def test_a_clock_that_is_wrong(address: str, answers: Answers, seconds: int, status: str) -> None:
    answers.seconds_ahead = seconds
    found = object_store.clock(s3(address))
    assert found.status == status
    if status != "ok":
        assert ("ahead of" if seconds < 0 else "behind") in found.what
        assert "set-ntp true" in found.advice


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId"])
def test_credentials_that_are_refused(address: str, answers: Answers, code: str) -> None:
    answers.refuses = code
    found = line(object_store.credentials(s3(address)))
    assert found.startswith("problem")
    assert f"({code}: no)" in found
    assert "AWS_ACCESS_KEY_ID" in found
    assert "s3cret" not in found


def test_credentials_in_a_url_are_not_printed(case: Case, address: str, answers: Answers) -> None:
    answers.refuses = "AccessDenied"
    url = f"{address.replace('//', '//user:s3cret@')}/b/data/x?sig=s3cret"
    found = dict(examine(case, Store(url, Blocks.open(open_source(url, {}), None))))
    assert found["credentials"].status == "problem"
    assert "s3cret" not in repr(found)
    answers.refuses, answers.ranges, answers.etag = "", False, False
    url = f"{address}/b/data/x?sig=s3cret"
    found = dict(examine(case, Store(url, Blocks.open(open_source(url, {}), None))))
    assert (found["ranges"].status, found["ETag"].status) == ("problem", "warning")
    assert "s3cret" not in repr(found)


def test_no_credentials(address: str) -> None:
    found = line(object_store.credentials(s3(address, key=None, secret=None)))
    assert "Unable to locate credentials" in found
    assert "AWS_ACCESS_KEY_ID" in found


def test_nothing_there(address: str) -> None:
    url = f"{address}/b/data/y"
    assert "check bucket, prefix" in line(object_store.credentials(Store(url, Blocks.open(open_source(url, {}), None))))


def test_another_region(address: str, answers: Answers) -> None:
    answers.region = "eu-west-1"
    found = line(object_store.region(s3(address)))
    assert "is in eu-west-1, but requests are signed for us-east-1" in found
    assert "AWS_DEFAULT_REGION=eu-west-1" in found


@pytest.mark.parametrize("kind", [s3, http])
def test_no_ranges(address: str, answers: Answers, kind: Callable[[str], Store]) -> None:
    answers.ranges = False
    found = line(object_store.ranges(kind(address)))
    assert "the store answers a range request with the whole object" in found
    assert "a store that serves ranges" in found


def test_a_token(case: Case, address: str, answers: Answers) -> None:
    answers.token = "s3cret"
    headers = {"Authorization": "Bearer s3cret"}
    for options in ({"headers": headers}, {"client_kwargs": {"headers": headers}}):
        assert object_store.ranges(http(address, **options)).status == "ok"
    store = http(address, headers=headers)
    assert store.objects
    answers.token = "another"
    found = line(object_store.ranges(store))
    assert "403" in found
    assert "allow reading objects, not only listing them" in found
    assert "s3cret" not in found


@pytest.mark.parametrize("kind", [s3, http])
def test_no_etags(address: str, answers: Answers, kind: Callable[[str], Store]) -> None:
    answers.etag = False
    found = line(object_store.etag(kind(address)))
    assert "has no ETag" in found
    assert "under new names" in found


def test_no_if_match(address: str, answers: Answers) -> None:
    answers.if_match = False
    assert line(object_store.if_match(s3(address))).startswith("ok:")
    answers.etag = False
    found = line(object_store.if_match(s3(address)))
    assert "the store ignores If-Match" in found
    assert "do not replace any" in found


def test_a_reason_has_no_credentials() -> None:
    assert reason(ValueError("cannot reach user:se@cret@host:1")) == "cannot reach host:1"
    assert reason(ValueError()) == "ValueError"
