"""The commands as a person types them: what they print, and what they exit with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


@pytest.fixture
def run(bucket: Any, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `dataload …` with S3 found through the usual AWS environment."""
    environment = {
        **ENVIRONMENT,
        "AWS_ENDPOINT_URL": bucket.server.endpoint_url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "home"),
    }

    def dataload(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dataload", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)

    return dataload


def test_warm_stats_verify_evict(run: Any, bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    url, cache = dataset_of([[300, 200], [100]]), ("--cache-dir", str(tmp_path / "c"))
    size = sum(entry["Size"] for entry in bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"])

    warmed = run("warm", url, *cache)
    assert warmed.returncode == 0, warmed.stderr
    assert warmed.stdout.startswith("2 objects, 600 rows")
    sent = bucket.server.stats()["get_bytes"]
    assert size <= sent <= 2 * size  # these files are hardly more than their footers

    again = json.loads(run("warm", url, *cache, "--json").stdout)
    assert (again["objects"], again["rows"], again["bytes"], again["bytes_origin"]) == (2, 600, size, 0)
    assert bucket.server.stats()["get_bytes"] == sent

    held = json.loads(run("stats", *cache, "--json").stdout)
    assert held["blobs"] == 8  # a block and a footer for each file, the records of each row group, and the manifest
    assert held["cache_dir"] == cache[1]
    assert str(held["blobs"]) in run("stats", *cache).stdout

    assert run("verify", *cache).returncode == 0
    [blob] = [path for path in (tmp_path / "c" / "blobs").glob("*/*") if path.stat().st_size > 10_000][:1]
    blob.write_bytes(blob.read_bytes()[::-1])
    found = run("verify", *cache)
    assert found.returncode == 1
    assert "footer" in found.stdout
    assert run("verify", *cache, "--repair").returncode == 1
    report = json.loads(run("verify", *cache, "--json").stdout)
    assert (report["blobs"], report["problems"]) == (7, [])

    part = run("evict", f"{url}/part-000.parquet", *cache, "--json")
    assert json.loads(part.stdout)["bytes"] > 0
    assert 0 < json.loads(run("stats", *cache, "--json").stdout)["blobs"] < 7
    assert run("evict", f"{url}/part-000.parquet", *cache).returncode == 1
    assert run("evict", *cache).returncode == 0
    assert json.loads(run("stats", *cache, "--json").stdout)["bytes"] == 0


def test_plan_says_what_the_first_epoch_takes(run: Any, bucket: Any, dataset_of: Callable[..., str]) -> None:
    """No byte of the data is read for it."""
    url = dataset_of([[300, 200], [100, 400]])
    size = sum(entry["Size"] for entry in bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"])
    said = run("plan", url)
    assert said.returncode == 0, said.stderr
    assert "2 objects" in said.stdout
    assert "1,000 rows in 4 row groups" in said.stdout
    for what in ("variance ratio", "first batch: waits for", "memory:"):
        assert what in said.stdout
    found = json.loads(run("plan", url, "--window", "2", "--batch-size", "350", "--json").stdout)
    assert (found["objects"], found["bytes"], found["rows"], found["row_groups"]) == (2, size, 1000, 4)
    assert (found["trade"]["window"], found["trade"]["first_row_groups"]) == (2, 3)
    json_of_all = json.loads(run("warm", url, "--json").stdout)
    assert json_of_all["requests_origin"] == found["requests"]
    assert (
        found["decoded_bytes"] > json.loads(run("plan", url, "--columns", "row_id", "--json").stdout)["decoded_bytes"]
    )


def test_the_default_cache_is_the_users(run: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    assert run("warm", dataset_of([[10]])).returncode == 0
    assert (tmp_path / "home" / "dataload" / "FORMAT").exists()


def test_storage_options(run: Any, bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    options = json.dumps({**bucket.options, "anon": False})
    assert run("warm", dataset_of([[10]]), "--storage-options", options).returncode == 0


def test_warm_says_when_the_cache_is_too_small(run: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    done = run("warm", dataset_of([[5000]]), "--cache-dir", str(tmp_path / "c"), "--cache-bytes", "20kB")
    assert done.returncode == 1
    assert "did not fit" in done.stderr
    assert json.loads(run("stats", "--cache-dir", str(tmp_path / "c"), "--json").stdout)["bytes"] <= 20_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["warm", "s3://no-such-bucket/x"], "no-such-bucket"),
        (["warm", "{bucket}/nothing"], "no objects at"),
        (["warm", "{bucket}/notes.txt"], "not a Parquet file"),
        (["warm", "{bucket}/differ"], "differ in column 'a'"),
        (["warm", "warp://x"], "warp"),
        (["warm", "{bucket}/differ", "--cache-dir", "/proc/nowhere"], "/proc/nowhere cannot be used"),
        (["warm", "{bucket}/differ", "--cache-bytes", "lots"], "cache_bytes='lots'"),
        (["warm", "{bucket}/differ", "--storage-options", "[1]"], "--storage-options"),
        (["warm"], "url"),
        (["warm", "a", "--no-such-option"], "no-such-option"),
        (["fly"], "fly"),
        (["stats", "--cache-dir", "/nowhere"], "no cache at /nowhere"),
        (["verify", "--cache-dir", "/nowhere"], "no cache at /nowhere"),
        (["evict", "--cache-dir", "/nowhere"], "no cache at /nowhere"),
        (["evict", "s3://x", "--keep-bytes", "1GB"], "not both"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    run: Any, bucket: Any, tmp_path: Path, words: list[str], says: str
) -> None:
    import pyarrow as pa

    bucket.put("notes.txt", b"just notes")
    bucket.put_table("differ/0.parquet", pa.table({"a": [1]}))
    bucket.put_table("differ/1.parquet", pa.table({"a": ["x"]}))
    done = run(*(word.replace("{bucket}", f"s3://{bucket.name}") for word in words))
    assert done.returncode == 2, done.stderr
    assert says.lower() in done.stderr.lower()
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not list((tmp_path / "home").glob("dataload/tmp/*")), "something was left half-written"


def test_debug_shows_the_traceback(run: Any) -> None:
    done = run("--debug", "stats", "--cache-dir", "/nowhere")
    assert "Traceback" in done.stderr


def test_help(run: Any) -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("demo", "warm", "stats", "verify", "evict"):
        assert command in done.stdout
