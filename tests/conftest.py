from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import nightly  # noqa: F401 (sets the profile of hypothesis)
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
import torch.distributed as dist
import typer.main
from moto_server import Bucket, S3Server
from ranks import forked_ranks  # noqa: F401 (a fixture)

from dataload.cache.config import CacheConfig

# Else each client of boto3 and s3fs parses the description of S3's API again, and keeps 30,000 objects of it.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)
# Else each run of the command line in this process builds all commands again: 12 ms.
typer.main.get_command = functools.cache(typer.main.get_command)


# Else gcsfs asks Google over gRPC what kind of bucket one of an emulator is, for a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# The modules that take longest. They run first, so that no process of pytest-xdist runs one alone at the end.
LONGEST = """
    test_growing_data test_map test_store_checkpoints test_docs test_report test_mesh test_waits test_integrations
    test_convert test_train_resume test_cli test_mixed_loader test_loader test_background_decoder test_cluster_tier
    test_origin_engine test_stores test_cluster_training test_row_store test_flat_map test_bad_rows test_filesystem
    test_pipeline test_fetch_plan
""".split()  # noqa: SIM905 (a name in a line each would be longer than what it orders)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without garbage collections, which would take a fifth of the time and find nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by module, the longest modules first. Leave all but the first of `variants` to `make slow`."""
    seen = set()
    for item in items:
        if item.get_closest_marker("variants"):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker("slow")
            seen.add(test)
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(scope="session")
def s3_client(server: S3Server) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )


@pytest.fixture
def bucket(server: S3Server, s3_client: Any, request: pytest.FixtureRequest) -> Bucket:
    name = f"bucket-{abs(hash(request.node.nodeid)):x}"
    s3_client.create_bucket(Bucket=name)
    server.reset()
    return Bucket(name, server, s3_client)


@pytest.fixture
def cache(tmp_path: Path) -> CacheConfig:
    return CacheConfig(cache_dir=str(tmp_path / "cache"), cache_bytes="1GB")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of one megabyte."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small filesystem can be mounted here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


def rows_table(first: int, count: int) -> pa.Table:
    """Return columns that are functions of `row_id`, which counts from `first`, so that rows can be verified."""
    ids = np.arange(first, first + count)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array((ids[:, None] + np.arange(3)).ravel().astype(np.float32)), 3)
    return pa.table(
        {"row_id": ids, "half": ids / 2, "vector": vectors, "text": pa.array([f"row {i}" for i in ids], pa.string())}
    )


@pytest.fixture
def table_of() -> Callable[[int, int], pa.Table]:
    return rows_table


@pytest.fixture
def dataset_of(bucket: Bucket) -> Callable[..., str]:
    """Write files of row groups with `row_id` 0, 1, … in file order. Return the URL of their folder."""

    def write(files: list[list[int]], folder: str = "data") -> str:
        first = 0
        for number, groups in enumerate(files):
            sink = pa.BufferOutputStream()
            schema = rows_table(0, 1).schema
            with pq.ParquetWriter(sink, schema, compression="none", use_dictionary=False) as writer:
                for count in groups:
                    writer.write_table(rows_table(first, count), row_group_size=max(1, count))
                    first += count
            bucket.put(f"{folder}/part-{number:03d}.parquet", sink.getvalue().to_pybytes())
        bucket.server.reset()
        return bucket.url(folder)

    return write


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_stays() -> None:
    """Freeze imported objects, so that garbage collections between tests skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Check that no thread and no child process of a test outlives it."""
    before, of_fixtures = set(threading.enumerate()), children(os.getpid())
    yield
    s3fs.S3FileSystem.clear_instance_cache()  # Their clients have credentials and settings of this test.
    end_threads_of_pyiceberg()
    if left_threads(before) or processes(of_fixtures):
        gc.collect()  # Cycles may hold them.
    ours = left_threads(before)
    until = time.monotonic() + 200
    for thread in ours:
        while thread.is_alive() and time.monotonic() < until:
            thread.join(1)
            gc.collect()  # An error's traceback may hold the pool of a thread whose call has just ended.
    assert not [thread for thread in ours if thread.is_alive()], f"threads left behind: {ours}"
    until = time.monotonic() + 60
    while (left := processes(of_fixtures)) and time.monotonic() < until:
        time.sleep(0.05)  # Some have been told to end.
    assert not left, f"processes left behind: {left}"
    assert not dist.is_initialized()


def left_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that a test has started and that should have ended with it."""
    return [thread for thread in threading.enumerate() if thread not in before and not lives_on(thread)]


def end_threads_of_pyiceberg() -> None:
    """End the threads of pyiceberg, which it keeps for the life of the process."""
    module = sys.modules.get("pyiceberg.utils.concurrent")
    if module is not None and (pool := module.ExecutorFactory._instance) is not None:
        pool.shutdown()
        module.ExecutorFactory._instance = None


def processes(of_fixtures: set[int]) -> list[bytes]:
    """Return the commands of child processes, and of children of `of_fixtures`, which serve several tests.

    Helpers of multiprocessing may outlive a test, too.
    """
    found = []
    for parent in (os.getpid(), *of_fixtures):
        for child in children(parent) - of_fixtures:
            with suppress(FileNotFoundError):
                found.append(Path(f"/proc/{child}/cmdline").read_bytes())
    return [command for command in found if b"resource_tracker" not in command and b"forkserver" not in command]


def children(process: int) -> set[int]:
    with suppress(FileNotFoundError):  # It has ended.
        return set(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
    return set()


def lives_on(thread: threading.Thread) -> bool:
    """Return whether a thread may outlive a test: pools end with their dataset or with the process."""
    pools = ("dataload-blocks", "dataload-decode", "dataload-load", "dataload-map")
    others = ("dataload-stalls", "fsspecIO", "gcsfs-deferred-close", "asyncio_", "Dummy-")
    return thread.name.startswith((*pools, *others)) or "process_request" in thread.name


@pytest.fixture
def no_aws_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the AWS settings of the machine: variables, files and the service of an instance."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
