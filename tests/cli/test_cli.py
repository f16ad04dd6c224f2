"""The commands as a user types them: their output and exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import until
from rich.console import Console

import dataload
from dataload import CacheConfig, make_dataset, make_loader
from dataload.benchmarks.origin import Origin
from dataload.cache.blocks.reader import IN_FLIGHT, Object
from dataload.cache.local import fsck
from dataload.catalog.footer_cache import _runs
from dataload.cli import app
from dataload.cli.console import bar, table
from dataload.formats.detect import tail_bytes
from dataload.planning import warm
from dataload.runtime import progress
from dataload.runtime.progress import ProgressLines
from dataload.runtime.text import duration

Run = Callable[..., CompletedProcess[str]]


def runs(url: str, *names: str) -> list[str]:
    """Return the files of a folder, given in order, with which a run of footers begins."""
    folder = url.removeprefix("s3://")
    return [run[0].path.rpartition("/")[2] for run in _runs(Object(f"{folder}/{name}", 1, "v") for name in names)]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """The environment of a command without the endpoint of S3."""
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "home"),
        "COLUMNS": "80",
    }


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], settings: dict[str, str]) -> Run:
    """Run `dataload …` in this process."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)

    def dataload(*words: str) -> CompletedProcess[str]:
        monkeypatch.setattr("sys.argv", ["dataload", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            app.main()
        return CompletedProcess(words, int(str(end.value.code)), *capsys.readouterr())

    return dataload


@pytest.fixture
def at_bucket(run: Run, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run commands that find S3 through the usual AWS environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.endpoint_url)
    return run


def test_warm_stats_verify_evict(at_bucket: Run, bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    url, cache = dataset_of([[300, 200], [100]]), ("--cache-dir", str(tmp_path / "c"))
    size = sum(entry["Size"] for entry in bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"])

    warmed = at_bucket("warm", url, *cache)
    assert warmed.returncode == 0, warmed.stderr
    assert warmed.stdout.startswith("2 objects, 600 rows")
    sent = bucket.server.stats()["get_bytes"]
    assert size <= sent <= 2 * size  # these files are hardly more than their footers

    again = json.loads(at_bucket("warm", url, *cache, "--json").stdout)
    assert (again["objects"], again["rows"], again["bytes_origin"]) == (2, 600, 0)
    assert 0 < again["bytes"] < size  # the row groups, without the footers
    assert at_bucket("warm", url, *cache).stdout.endswith("0 bytes fetched in 0 requests; the cache has all of it\n")
    assert bucket.server.stats()["get_bytes"] == sent

    held = json.loads(at_bucket("cache", "stats", *cache, "--json").stdout)
    # The records of each row group, the manifest, and of each run of footers these and what was found in them.
    blobs = 4 + 2 * len(runs(url, "part-000.parquet", "part-001.parquet"))
    assert held["blobs"] == blobs
    assert held["cache_dir"] == cache[1]
    assert f": {blobs} blobs, " in at_bucket("cache", "stats", *cache).stdout

    assert at_bucket("cache", "verify", *cache).returncode == 0
    [blob] = [path for path in (tmp_path / "c" / "blobs").glob("*/*") if path.stat().st_size > 10_000][:1]
    blob.write_bytes(blob.read_bytes()[::-1])
    found = at_bucket("cache", "verify", *cache)
    assert found.returncode == 1
    assert "footer" in found.stdout
    assert at_bucket("cache", "verify", *cache, "--repair").returncode == 1
    report = json.loads(at_bucket("cache", "verify", *cache, "--json").stdout)
    assert (report["blobs"], report["problems"]) == (blobs - 1, [])

    part = at_bucket("cache", "evict", f"{url}/part-000.parquet", *cache, "--json")
    assert json.loads(part.stdout)["bytes"] > 0
    assert 0 < json.loads(at_bucket("cache", "stats", *cache, "--json").stdout)["blobs"] < blobs - 1
    assert at_bucket("cache", "evict", f"{url}/part-000.parquet", *cache).returncode == 1
    assert at_bucket("cache", "evict", "--all", *cache).returncode == 0
    assert json.loads(at_bucket("cache", "stats", *cache, "--json").stdout)["bytes"] == 0


def test_plan_takes_the_sources_of_a_mixture(at_bucket: Run, dataset_of: Callable[..., str]) -> None:
    urls = [dataset_of([[300, 200]], "a"), dataset_of([[100]], "b")]
    found = json.loads(at_bucket("plan", *urls, "--json").stdout)
    assert (found["objects"], found["rows"], found["epoch_rows"], found["row_groups"]) == (2, 600, 600, 3)
    done = at_bucket("plan", *urls, "--weights", "1, 0.5")
    assert done.returncode == 0, done.stderr
    assert "600 rows in 3 row groups" in done.stdout
    assert "300 rows, by the weights" in done.stdout
    ramp = at_bucket("plan", *urls, "--schedule", '{"0": [1, 1], "50": [4, 1]}', "--ramp")
    assert "rows, by the weights, which ramp to row 50" in " ".join(ramp.stdout.split())
    for schedule in ("[1, 1]", '{"x": [1, 1]}', "{0"):
        assert "must be JSON: rows" in at_bucket("plan", *urls, "--schedule", schedule).stderr
    twice = at_bucket("plan", urls[0], urls[0])
    assert twice.returncode == 2
    assert "name it once, with the sum of its weights" in twice.stderr
    for weights, error in (
        ("1", "1 weights for 2 URLs"),
        ("1,x", "1,x must be numbers"),
        ("1,0", "positive"),
    ):
        failed = at_bucket("plan", *urls, "--weights", weights)
        assert failed.returncode == 2
        assert error in failed.stderr


def test_plan_says_what_the_first_epoch_takes(at_bucket: Run, bucket: Any, dataset_of: Callable[..., str]) -> None:
    url = dataset_of([[300, 200], [100, 400]])
    size = sum(entry["Size"] for entry in bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"])
    done = at_bucket("plan", url)
    assert done.returncode == 0, done.stderr
    assert "2 objects" in done.stdout
    assert "1,000 rows in 4 row groups" in done.stdout
    for text in ("variance ratio", "first batch   waits for", "later epochs  fetch nothing", "window        of "):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    link = ("--gbps", "8e-6", "--latency-ms", "0")
    prices = ("--price-gb", "0.5", "--price-get", "0.2")
    costly = json.loads(at_bucket("plan", url, *link, *prices, "--json").stdout)
    fetched, requests = (costly["footers"][what] + costly["first_epoch"][what] for what in ("bytes", "requests"))
    assert costly["first_epoch_seconds"] == pytest.approx(fetched / 1000)
    assert costly["first_epoch_cost"] == pytest.approx(fetched / 1e9 * 0.5 + requests / 1e3 * 0.2)
    found = json.loads(at_bucket("plan", url, "--window", "2", "--batch-size", "350", "--json").stdout)
    assert (found["objects"], found["bytes"], found["rows"], found["row_groups"]) == (2, size, 1000, 4)
    assert found["trade"]["window"] == 2
    two_ranks = ("plan", url, "--window", "2", "--batch-size", "175", "--world-size", "2", "--json")
    assert json.loads(at_bucket(*two_ranks).stdout)["first_batch"] == found["first_batch"]
    json_of_all = json.loads(at_bucket("warm", url, "--json").stdout)
    assert json_of_all["requests_origin"] == found["first_epoch"]["requests"]
    assert (
        found["decoded_bytes"]
        > json.loads(at_bucket("plan", url, "--columns", "row_id", "--json").stdout)["decoded_bytes"]
    )


def test_the_default_cache_is_the_users(at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    assert at_bucket("warm", dataset_of([[10]])).returncode == 0
    assert (tmp_path / "home" / "dataload" / "FORMAT").exists()


def test_storage_options(at_bucket: Run, bucket: Any, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    options = json.dumps({**bucket.options, "anon": False})
    assert at_bucket("warm", dataset_of([[10]]), "--storage-options", options).returncode == 0


def test_warm_says_when_the_cache_is_too_small(at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    done = at_bucket("warm", dataset_of([[5000]]), "--cache-dir", str(tmp_path / "c"), "--cache-bytes", "20kB")
    assert done.returncode == 1
    assert "0 of 1 row groups are cached: the cache is full" in done.stderr
    assert (
        json.loads(at_bucket("cache", "stats", "--cache-dir", str(tmp_path / "c"), "--json").stdout)["bytes"] <= 20_000
    )


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
        (["cache", "stats", "--cache-dir", "/nowhere"], "no cache at /nowhere: name its folder with --cache-dir"),
        (["cache", "verify", "--cache-dir", "/nowhere"], "no cache at /nowhere"),
        (["cache", "evict", "--all", "--cache-dir", "/nowhere"], "no cache at /nowhere"),
        (["cache", "evict"], "either a URL or --all"),
        (["cache", "evict", "--keep-bytes", "1GB"], "either a URL or --all"),
        (["cache", "evict", "s3://x", "--all"], "either a URL or --all"),
        (["cache", "evict", "s3://x", "--keep-bytes", "1GB"], "--keep-bytes goes with --all"),
        (["cache", "fly"], "fly"),
        (["evict", "--all"], "evict"),
        (["warm", ""], "URL is empty"),
        (["doctor", ""], "URL is empty"),
        (["plan", "s3://"], "s3:// names no bucket"),
        (["plan", "{bucket}/diff*"], "a glob names objects, not folders"),
        (["warm", "{bucket}/differ", "--storage-options", '{"foo": 1}'], "'foo'"),
        (["warm", "{bucket}/differ", "--storage-options", '{"endpoint_url": "foo"}'], "Invalid endpoint: foo"),
        (["warm", "{bucket}/differ/0.parquet", "--columns", '["a, b"]'], "column 'a, b' is not in the dataset"),
        (["warm", "{bucket}/differ/0.parquet", "--columns", "[1]"], "--columns=[1]"),
        (["warm", "{bucket}/differ/0.parquet", "--columns", "[]"], "--columns=[]"),
        (["demo", "--cache-dir", "s3://bucket/x"], "cache_dir='s3:/bucket/x'"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--seed", "4294967296"], "--seed"),
        (["demo", "--rows", "1000"], "--rows"),
        (["bench", "--ranks", "a"], "--ranks=a"),
        (["bench", "--continue", "--size", "tiny", "--results", "/nowhere"], "--continue: /nowhere/partial.json"),
        (["bench", "--workloads", "words"], "no workload is called words"),
        (["bench", "--systems", "words"], "no system is called 'words'"),
        (["bench", "--size", "huge"], "not 'huge'"),
        (["bench", "--render", "/nowhere"], "--render: /nowhere"),
        (["head", "{bucket}/nothing"], "no objects at"),
        (["head", "{bucket}/differ/0.parquet", "--columns", "b"], "column 'b' is not in the dataset"),
        (["head", "{bucket}/differ/0.parquet", "--rows", "-1"], "--rows"),
        (["head", "{bucket}/differ/0.parquet", "--engine", "nonsense"], "use one of auto, fsspec, obstore"),
        (["plan", "{bucket}/differ/0.parquet", "--engine", "nonsense"], "use one of auto, fsspec, obstore"),
        (["warm", "{bucket}/differ/0.parquet", "--engine", "nonsense"], "use one of auto, fsspec, obstore"),
        (["plan", "a", "--gbps", "0"], "must be above 0"),
        (["plan", "a", "--accelerators", "8"], "both --accelerators and --step-ms"),
        (["plan", "a", "--accelerators", "8", "--step-ms", "9", "--world-size", "4"], "leave out --world-size=4"),
        (["plan", "a", "--accelerators", "8", "--step-ms", "9", "--measured", "/nowhere"], "--measured=/nowhere"),
        (["doctor", "--measure", "f"], "name its URL"),
        (["warm", "a", "--shard", "first"], "--shard=first"),
        (["warm", "{bucket}/differ/0.parquet", "--shard", "4/4"], "node 4 of 4: nodes count from 0"),
        (["warm", "{bucket}/differ/0.parquet", "--shard", "0/2", "--num-streams", "3"], "not a multiple of 2 nodes"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    at_bucket: Run, bucket: Any, tmp_path: Path, words: list[str], says: str
) -> None:
    import pyarrow as pa

    bucket.put("notes.txt", b"just notes")
    bucket.put_table("differ/0.parquet", pa.table({"a": [1]}))
    bucket.put_table("differ/1.parquet", pa.table({"a": ["x"]}))
    done = at_bucket(*(word.replace("{bucket}", f"s3://{bucket.name}") for word in words))
    assert done.returncode == 2, done.stderr
    assert says.lower() in done.stderr.lower()
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not list((tmp_path / "home").glob("dataload/tmp/*")), "a file is incomplete"


@pytest.mark.parametrize("words", [[""], ["tiercache::"], ["warp://x"], [], ["s3://x", "--all"], ["--keep-bytes", "1"]])
def test_a_slip_evicts_nothing(
    at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path, words: list[str]
) -> None:
    cache = ("--cache-dir", str(tmp_path / "c"))
    at_bucket("warm", dataset_of([[100]]), *cache)
    held = at_bucket("cache", "stats", *cache).stdout
    assert at_bucket("cache", "evict", *words, *cache).returncode == 2
    assert at_bucket("cache", "stats", *cache).stdout == held


def test_evict_by_glob_and_by_chained_url(at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    url, cache = dataset_of([[100], [100], [100]]), ("--cache-dir", str(tmp_path / "c"))
    at_bucket("warm", url, *cache)

    def held() -> int:
        return int(json.loads(at_bucket("cache", "stats", *cache, "--json").stdout)["blobs"])

    first, second = "part-001.parquet", "part-002.parquet"
    begun, before = runs(url, "part-000.parquet", first, second), held()
    assert at_bucket("cache", "evict", f"{url}/part-*1.parquet", *cache).returncode == 0
    assert held() == before - 1 - 2 * begun.count(first), "its records, and the footers that it names"
    assert at_bucket("cache", "evict", f"tiercache::{url}/part-002.parquet", *cache).returncode == 0
    assert held() == before - 2 - 2 * (begun.count(first) + begun.count(second))


def test_a_name_is_a_name_though_it_looks_like_a_glob(at_bucket: Run, bucket: Any, tmp_path: Path) -> None:
    for name in ("a*b", "aab", "x**y"):
        bucket.put_table(f"odd/{name}.parquet", pa.table({"a": [1, 2]}))
    url, cache = f"s3://{bucket.name}/odd", ("--cache-dir", str(tmp_path / "c"))
    at_bucket("warm", url, *cache)

    def held() -> int:
        return int(json.loads(at_bucket("cache", "stats", *cache, "--json").stdout)["blobs"])

    left, begun = held(), runs(url, "a*b.parquet", "aab.parquet", "x**y.parquet")
    for name, named in ("a*b", 1), ("x**y", 0):
        left -= 1 + named + 2 * begun.count(f"{name}.parquet")
        assert at_bucket("cache", "evict", f"{url}/{name}.parquet", *cache).returncode == 0
        assert held() == left, "its own, and the manifest and footers that it names"
    done = at_bucket("cache", "evict", f"{url}/z**y", *cache)
    assert (done.returncode, "is not a valid glob" in done.stderr) == (2, True)


def test_a_name_with_odd_spaces_is_evicted(at_bucket: Run, bucket: Any, tmp_path: Path) -> None:
    """The names of blobs have single spaces, for messages."""
    for name in ("a  b", "c\u3000d", "e\u00a0f"):
        bucket.put_table(f"odd/{name}.parquet", pa.table({"a": [1, 2]}))
    url, cache = f"s3://{bucket.name}/odd", ("--cache-dir", str(tmp_path / "c"))
    at_bucket("warm", url, *cache)
    for name in ("a  b.parquet", "c\u3000d.parquet", "e\u00a0f.par*"):
        done = at_bucket("cache", "evict", f"{url}/{name}", *cache)
        assert done.returncode == 0, done.stderr


def test_warm_continues_when_another_process_is_slow(
    at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group whose wait times out is not cached; the others are."""
    make = warm.make_cached
    monkeypatch.setattr(warm, "make_cached", lambda cache, number: make(cache, number) and number != 1)
    done = at_bucket("warm", dataset_of([[100]] * 4), "--cache-dir", str(tmp_path / "c"), "--json")
    assert json.loads(done.stdout)["row_groups_kept"] == 3
    assert done.returncode == 1
    assert "3 of 4 row groups are cached: waiting for another process timed out" in done.stderr


def test_a_server_without_an_answer_is_not_a_missing_dataset(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataload.cache.origin.origin.FIRST_CONTACT_SECONDS", 0)
    done = run("plan", "http://127.0.0.1:1/x.parquet", "--cache-dir", str(tmp_path / "c"))
    assert done.returncode == 1
    assert "Connect call failed" in done.stderr


@pytest.mark.variants
@pytest.mark.parametrize("cached", [False, True])
def test_warm_fetches_nothing_in_vain(
    at_bucket: Run, bucket: Any, dataset_of: Callable[..., str], tmp_path: Path, cached: bool
) -> None:
    """At most the requests in flight when the cache is full, a third of the row groups, are fetched in vain."""
    url = dataset_of([[3000]] * 3 * IN_FLIGHT)
    cache = ("--cache-dir", str(tmp_path / "c"), "--cache-bytes", "1MB")
    if cached:
        at_bucket("warm", url, *cache)
    before = bucket.server.stats()["get_bytes"]
    done = at_bucket("warm", url, *cache, "--json")
    figures = json.loads(done.stdout)
    assert done.returncode == 1
    assert 0 < figures["row_groups_kept"] < 10
    size = sum(entry["Size"] for entry in bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"])
    assert bucket.server.stats()["get_bytes"] - before < size / 2, "fetched row groups that do not fit into the cache"


def test_a_store_of_two_addresses_is_warmed_once(at_bucket: Run, bucket: Any, dataset_of: Callable[..., str]) -> None:
    """A loader with the origin_id of `warm` finds the rows under another address."""
    url, name = dataset_of([[300]]), ("--origin-id", "our store")
    assert at_bucket("warm", url, *name).returncode == 0
    sent = bucket.server.stats()["get_bytes"]
    other = {**bucket.options, "endpoint_url": bucket.server.endpoint_url.replace("127.0.0.1", "localhost")}
    dataset = make_dataset(url, storage_options=other, cache=CacheConfig(origin_id="our store"))
    assert len(dataset.__getitems__(list(range(300)))) == 300
    for command in ("plan", "warm"):
        assert at_bucket(command, url, *name, "--engine", "fsspec").returncode == 0
    assert bucket.server.stats()["get_bytes"] == sent
    fetched = []
    for options in (name, ()):
        bucket.server.reset()
        assert at_bucket("head", url, *options).returncode == 0
        fetched.append(bucket.server.stats()["get_bytes"])
    assert fetched[0] < fetched[1], "head did not find the footers under the name"


def test_warm_says_what_its_part_is(at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    url, cache = dataset_of([[100], [100], [100], [100]]), ("--cache-dir", str(tmp_path / "c"))
    whole = json.loads(at_bucket("warm", url, *cache, "--json").stdout)
    part = json.loads(at_bucket("warm", url, "--shard", "0/2", *cache, "--json").stdout)
    assert (part["objects"], part["rows"], part["row_groups"], part["row_groups_kept"]) == (2, 200, 2, 2)
    assert part["bytes"] < whole["bytes"]
    first = json.loads(at_bucket("warm", dataset_of([[100] * 4]), "--first", "1", *cache, "--json").stdout)
    assert first["bytes"] < part["bytes"]


def test_filters_of_plan_and_warm(at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    url, filters = dataset_of([[10, 10], [10]]), '[["row_id", ">=", 15]]'
    for command in ("plan", "warm"):
        done = at_bucket(command, url, "--filters", filters, "--cache-dir", str(tmp_path / "cache"), "--json")
        assert json.loads(done.stdout)["row_groups"] == 2
    assert "not JSON" in at_bucket("warm", url, "--filters", "row_id > 3").stderr


def test_a_plan_for_a_smaller_cache_evicts_nothing(
    at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path
) -> None:
    url, cache = dataset_of([[1000] * 8]), ("--cache-dir", str(tmp_path / "c"))
    assert at_bucket("warm", url, *cache).returncode == 0
    blobs = {path.name for path in (tmp_path / "c" / "blobs").glob("*/*")}
    done = at_bucket("plan", url, *cache, "--cache-bytes", "200kB", "--window", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cache_bytes"] == 200_000 < found["cache_bytes_needed"]
    assert {path.name for path in (tmp_path / "c" / "blobs").glob("*/*")} == blobs
    refused = at_bucket("plan", url, *cache, "--cache-bytes", "lots")
    assert (refused.returncode, "cache_bytes='lots'" in refused.stderr) == (2, True)


def test_warm_caches_what_a_loader_with_other_nulls_reads(run: Run, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from dataload.loader import make_loader

    pq.write_table(pa.table({"x": [1, None, 3], "name": ["a", None, "c"]}), url := tmp_path / "nulls.parquet")
    cases = [
        (["--fill-null", "0", "--columns", "x"], {"fill_null": 0, "columns": ["x"]}),
        (["--fill-null", '{"x": -1, "name": "-"}'], {"fill_null": {"x": -1, "name": "-"}}),
        (["--null-masks"], {"null_masks": True}),
    ]
    for number, (words, arguments) in enumerate(cases):
        cache = str(tmp_path / str(number))
        for command in ("plan", "warm"):
            done = run(command, str(url), *words, "--cache-dir", cache)
            assert done.returncode == 0, done.stderr
        loader = make_loader(url, 3, cache_dir=cache, cache_bytes="10MB", **arguments)
        assert len(list(loader)) == 1
        assert loader.stats().misses == 0, words
    assert "fill_null: column 'y' is not in" in run("warm", str(url), "--fill-null", '{"y": 0}').stderr
    assert "--fill-null=none: not JSON" in run("warm", str(url), "--fill-null", "none").stderr
    done = run("doctor", str(url), "--fill-null", "0", "--cache-dir", cache, "--cache-bytes", "1MB", "--json")
    assert json.loads(done.stdout)["checks"]["dataset"]["what"] == "the footers describe 3 rows"


def test_a_column_whose_name_has_a_comma(at_bucket: Run, bucket: Any, tmp_path: Path) -> None:
    bucket.put_table("odd/0.parquet", pa.table({"a, b": [1, 2], "c": [3, 4]}))
    url, cache = f"s3://{bucket.name}/odd", ("--cache-dir", str(tmp_path / "c"))
    assert at_bucket("warm", url, "--columns", '["a, b"]', *cache).returncode == 0


def test_a_folder_of_somebody_else(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))  # root may look anywhere

    monkeypatch.setattr(Path, "exists", denied)
    done = run("cache", "stats", "--cache-dir", "/elsewhere/cache")
    assert done.returncode == 2
    assert "/elsewhere/cache cannot be opened" in done.stderr


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    done = run()
    assert (done.returncode, done.stderr) == (2, "")
    assert "Commands" in done.stdout
    assert done.stdout.count("\n") > 10


def test_version(run: Run) -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dataload {dataload.__version__}\n", "")


@pytest.mark.parametrize(
    "words", [["--debug", "cache", "stats"], ["cache", "--debug", "stats"], ["cache", "stats", "--debug"]]
)
def test_debug_shows_the_traceback_and_changes_nothing_else(run: Run, words: list[str]) -> None:
    plain, done = (run(*some, "--cache-dir", "/nowhere") for some in (["cache", "stats"], words))
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (2, "")
    assert done.stderr.startswith("Traceback")
    assert "ConfigError" in done.stderr
    assert done.stderr.endswith(plain.stderr)
    assert "Traceback" not in plain.stderr


def test_debug_of_a_wrong_option(run: Run) -> None:
    done = run("cache", "stats", "--debug", "--none")
    assert done.returncode == 2
    assert "no such option: --none" in done.stderr.lower()


COMMANDS = ["head", "plan", "warm", "doctor", "report", "top", "demo", "bench", "cache"]
CACHE_COMMANDS = ["stats", "verify", "evict"]


def test_help(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"  {command} " in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2], "the summary of a command is cut"


@pytest.mark.parametrize("words", [("cache",), ("cache", "--help")], ids=str)
def test_help_of_cache_names_its_commands(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.returncode, done.stderr) == (0 if "--help" in words else 2, "")
    for command in CACHE_COMMANDS:
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize("command", [*COMMANDS, *(f"cache {name}" for name in CACHE_COMMANDS)])
def test_help_of_a_command_fits_into_80_columns(run: Run, command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout or command == "cache"
    assert max(map(len, done.stdout.splitlines())) <= 80


LIGHT = """
import sys
from dataload.cli.app import main
sys.argv = ["dataload", {words}]
try:
    main()
finally:
    heavy = {{"torch", "pyarrow", "numpy", "fsspec", "lmdb", "pandas"}} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.parametrize("words", ['"--help"', '"warm", "--help"', '"--show-completion", "bash"'])
def test_help_is_quick_for_it_imports_little(words: str) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "SHELL": "/bin/bash"}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(words=words)], capture_output=True, text=True, env=environment, check=False
    )
    assert "Assertion" not in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    """Many files, each of one row group."""
    folder = tmp_path / "origin" / "bucket" / "data"
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    for number in range(FILES):
        table = pa.table({"x": [noise.bytes(1000) for _ in range(100)]})
        pq.write_table(table, folder / f"{number:03d}.parquet", compression="none")
    with Origin(tmp_path / "origin") as running:
        yield running


FILES = 60


def test_warming_goes_on_where_it_was_interrupted(
    run: Run, origin: Origin, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in (tmp_path / "origin").rglob("*.parquet"))
    origin.behave(latency=0.1)
    where = {"AWS_ENDPOINT_URL": origin.endpoint_url}
    words = ("warm", "s3://bucket/data")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    started = subprocess.Popen(
        [sys.executable, "-m", "dataload", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, **settings, **where},
    )
    until(lambda: origin.stats()["get_requests"] >= FILES + 20)  # the footers, and some of the rows
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=200)
    assert (started.returncode, out) == (130, "")
    assert err.endswith(
        "dataload: interrupted: the cache keeps the fetched row groups; run the same command to continue\n"
    )

    origin.behave(latency=0)
    before = origin.stats()["get_bytes"]
    monkeypatch.setenv(*next(iter(where.items())))
    done = run(*words, "--json")
    assert (done.returncode, json.loads(done.stdout)["rows"]) == (0, FILES * 100)
    after = origin.stats()["get_bytes"]
    assert 0.1 * size < after - before < 0.8 * size
    footers = FILES * (8 << 10)
    assert size <= after <= 1.02 * size + footers
    run(*words)
    assert origin.stats()["get_bytes"] == after


def test_warm_what_comes_first(at_bucket: Run, dataset_of: Callable[..., str], bucket: Any, tmp_path: Path) -> None:
    """A loader of an epoch finds the first row groups of that epoch in the cache."""
    url, cache = dataset_of([[300, 200], [100, 400]]), str(tmp_path / "c")
    done = at_bucket(
        "warm", url, "--epoch", "3", "--seed", "7", "--window", "2", "--first", "2", "--cache-dir", cache, "--json"
    )
    assert done.returncode == 0, done.stderr
    dataset = make_dataset(url, storage_options=bucket.options, cache=CacheConfig(cache))
    needed = list(make_loader(dataset, 10, seed=7, window=2).sampler.blocks_from(3, 0))
    kept = [group for group in range(4) if dataset.rowstore.row_groups.caches[0].find(group) is not None]
    assert kept == sorted(needed[:2])
    assert json.loads(done.stdout)["rows"] == sum(dataset.row_groups[group].rows for group in kept)


def test_what_is_evicted_goes_bit_by_bit(
    at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress is reported, and other processes wait only briefly."""
    assert at_bucket("warm", dataset_of([[100] * 4] * 2), "--cache-dir", str(tmp_path / "c")).returncode == 0
    folder = fsck.open_existing(tmp_path / "c")
    held, evicted = folder.index.used_bytes(), list[int]()
    monkeypatch.setattr(fsck, "EVICTED_BYTES", held // 20)
    assert fsck.evict(folder, keep_bytes=held // 2, progress=evicted.append) == sum(evicted)
    assert len(evicted) >= 3
    assert 0 < folder.index.used_bytes() <= held // 2
    assert fsck.evict(folder) > 0
    assert folder.index.used_bytes() == 0


def test_a_plan_that_cannot_be(at_bucket: Run, dataset_of: Callable[..., str]) -> None:
    done = at_bucket("plan", dataset_of([[300, 200], [100, 400]]), "--cache-bytes", "10kB")
    assert done.returncode == 1
    assert "none: this cache is too small" in done.stdout
    assert "lower window" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_doctor_of_a_dataset(at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    url, cache = dataset_of([[100]]), ("--cache-dir", str(tmp_path / "c"), "--cache-bytes", "1MB")
    done = at_bucket("doctor", url, *cache)
    assert done.returncode == 0, done.stdout
    for check in ("cache filesystem", "ranks", "credentials", "If-Match"):
        assert f"ok       {check}:" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not (tmp_path / "c").exists(), "doctor created a cache"
    found = at_bucket("doctor", f"{url}/nothing", *cache, "--json")
    assert found.returncode == 1
    assert json.loads(found.stdout)["checks"]["credentials"]["advice"] == "check bucket, prefix and endpoint"
    # The size of a batch follows from the rows of this dataset.
    workers = at_bucket("doctor", url, *cache, "--num-workers", "4", "--batch-size", str(10**9), "--json")
    assert "--shm-size" in json.loads(workers.stdout)["checks"]["shared memory"]["advice"]


def test_a_doctor_of_a_table_that_cannot_be_listed_checks_the_machine(run: Run, tmp_path: Path) -> None:
    (tmp_path / "table" / "_delta_log").mkdir(parents=True)
    (tmp_path / "table" / "_delta_log" / "0.json").write_text("{}")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "table" / "x.parquet")
    done = run("doctor", str(tmp_path / "table"), "--cache-dir", str(tmp_path / "c"), "--cache-bytes", "1MB", "--json")
    assert done.returncode == 1, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert {"locks", "processors", "cluster"} < checks.keys()
    assert checks["credentials"]["status"] == "problem"
    assert "DeltaTable(url).file_uris()" in checks["credentials"]["what"]
    assert not checks["credentials"]["advice"]


def test_plan_and_doctor_of_other_shuffles(at_bucket: Run, dataset_of: Callable[..., str], tmp_path: Path) -> None:
    """A shuffle of all rows needs a cache for all of them, a window or file order for a few row groups."""
    url, window = dataset_of([[1000] * 20]), ("--window", "1")
    whole = at_bucket("plan", url, "--cache-dir", str(tmp_path / "whole"), "--json")
    half = str(json.loads(whole.stdout)["decoded_bytes"] // 2)
    texts = {}
    for command in ("plan", "doctor"):
        arguments = (url, *window, "--cache-dir", str(tmp_path / command), "--cache-bytes", half)
        for shuffle, code in (("block", 0), ("none", 0), ("full", 1), ("some", 2)):
            done = at_bucket(command, *arguments, "--shuffle", shuffle)
            assert done.returncode == code, done.stdout
            texts[command, shuffle] = text = " ".join((done.stdout + done.stderr).split())
            assert ("shuffle='full' needs the whole dataset" in text) == (shuffle == "full"), text
        assert "--shuffle=some: must be block, full or none" in text
    assert "rows in file order" in texts["plan", "none"]
    done = at_bucket("doctor", *arguments, "--shuffle", "full", "--filters", '[["row_id", "<", 3000]]')
    assert done.returncode == 0, done.stdout


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = ProgressLines("warming", 10_000_000, clock=lambda: now[0])
    for second in (0.5, 2, 3, 20):
        now[0] = second
        lines.advance(1_000_000)
    assert capsys.readouterr().err == (
        "warming: 2.0 MB of 10.0 MB (20%), 1.0 MB/s, 8.0 s to go\n"
        "warming: 4.0 MB of 10.0 MB (40%), 200.0 kB/s, 30 s to go\n"
    )
    nothing = ProgressLines("warming", 0, clock=lambda: now[0])  # row groups without rows
    now[0] = 30
    nothing.advance(0)
    assert capsys.readouterr().err == "warming: 0 bytes of 0 bytes (100%), 0 bytes/s, under 0.1 s to go\n"
    slow = ProgressLines("counting documents", 40, "row groups", clock=lambda: now[0])
    now[0] = 50.0
    slow.advance(10)
    assert capsys.readouterr().err == "counting documents: 10 of 40 row groups (25%), 0.50/s, 60 s to go\n"


@pytest.mark.parametrize(
    ("unit", "total", "expected"),
    [
        ("", 10**9, r"warming ━+╸ + 0.4/1.0 GB 100.0 MB/s 0:00:06"),
        ("files", 10**9, r"warming ━+╸ + 400000000/1000000000 files 100,000,000/s 0:00:06"),
    ],
)
def test_a_bar_on_a_terminal(unit: str, total: int, expected: str) -> None:
    """The bar shows rate and remaining time in one line of 80 columns."""
    now = [0.0]
    console = Console(file=io.StringIO(), width=80, get_time=lambda: now[0])
    shown = bar(console, unit)
    task = shown.add_task("warming", total=total)
    for second in range(1, 5):
        now[0] = second
        shown.advance(task, 10**8)
    with console.capture() as printed:
        console.print(shown.get_renderable())
    [line] = printed.get().splitlines()
    assert len(line.rstrip()) <= 80
    assert re.fullmatch(expected, line.rstrip())


def test_texts_wrap_beside_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert table([("a", "one two three four five"), ("long", "x")]) == ("a     one two three\n      four five\nlong  x")


@pytest.mark.parametrize(
    ("seconds", "says"), [(0.01, "under 0.1 s"), (4.21, "4.2 s"), (45, "45 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations(seconds: float, says: str) -> None:
    assert duration(seconds) == says


# head


def put(bucket: Any, name: str, table: pa.Table, **options: Any) -> str:
    """Write a Parquet file to the bucket. Return its URL."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    bucket.put(name, sink.getvalue().to_pybytes())
    bucket.server.reset()
    return str(bucket.url(name))


def test_head_shows_columns_and_the_first_rows(at_bucket: Run, dataset_of: Callable[..., str]) -> None:
    url = dataset_of([[0, 4, 300], [100]])
    found = json.loads(at_bucket("head", url, "--json").stdout)
    assert (found["objects"], found["rows"], found["row_groups"]) == (2, 404, 4)
    assert {column["name"]: column["batch"] for column in found["columns"]} == {
        "row_id": "Tensor[B] of int64",
        "half": "Tensor[B] of float64",
        "vector": "Tensor[B, 3] of float32",
        "text": "list[str]",
    }
    assert found["first_rows"] == [
        {"row_id": row, "half": row / 2, "vector": [row, row + 1, row + 2], "text": f"row {row}"} for row in range(4)
    ]
    text = at_bucket("head", url, "--rows", "1", "--columns", "text,half").stdout
    assert re.sub(r" +", " ", text).splitlines()[1:] == [
        "text string: list[str]",
        "half double: Tensor[B] of float64",
        "row 0 text=row 0, half=0.0",
    ]


def test_head_of_columns_that_no_batch_can_hold(run: Run, tmp_path: Path) -> None:
    union = pa.UnionArray.from_dense(
        pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([7]), pa.array(["b"])]
    )
    table = pa.table({"u": union, "x": [1, None], "s": [{"a": b"\x00" * 20, "b": float("nan")}] * 2})
    path = tmp_path / "data" / "label=cat" / "x.arrow"
    path.parent.mkdir(parents=True)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    found = json.loads(run("head", str(tmp_path / "data"), "--json").stdout)
    columns = {column["name"]: column for column in found["columns"]}
    assert columns["u"]["batch"] is None
    assert columns["u"]["problem"].startswith("column 'u' has type dense_union<")
    form = {"name": "x", "type": "int64", "batch": "Tensor[B] of int64", "problem": None}
    form |= {"holds_nulls": False, "promoted": None}
    assert columns["x"] == {**form, "nulls": 1}
    zeros = f"<20 bytes: {'00' * 16}…>"
    assert found["first_rows"] == [
        {"u": 7, "x": 1, "s.a": zeros, "s.b": "nan", "label": "cat"},
        {"u": "b", "x": None, "s.a": zeros, "s.b": "nan", "label": "cat"},
    ]
    shown = run("head", str(tmp_path / "data"))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "column 'u' has type dense_union" in " ".join(shown.stdout.split())


def test_head_counts_the_nulls_of_each_column(run: Run, tmp_path: Path) -> None:
    """Statistics of list columns count empty lists as well."""
    none = {"x": [None, 1, None], "s": [None, {"a": 1, "b": None}, {"a": 2, "b": 3.0}], "every": [[], [1], None]}
    some = {"x": [1, 2, 3], "s": [{"a": 1, "b": 2.0}] * 3, "every": [[1]] * 3}
    schema = pa.schema([("x", pa.int64()), ("s", pa.struct({"a": pa.int64(), "b": pa.float64()}))])
    schema = schema.append(pa.field("every", pa.list_(pa.int64()))).append(pa.field("full", pa.list_(pa.int64())))
    for key, values in (("__HIVE_DEFAULT_PARTITION__", none), ("cat", some)):
        path = tmp_path / "data" / f"label={key}" / "x.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({**values, "full": [[1], [2], [3]]}, schema), path, row_group_size=2)
    found = json.loads(run("head", str(tmp_path / "data"), "--json").stdout)["columns"]
    counts = {"x": 2, "s.a": 1, "s.b": 2, "every": None, "full": 0, "label": 3}
    assert {column["name"]: column["nulls"] for column in found} == counts
    shown = run("head", str(tmp_path / "data"), "--rows", "0").stdout
    assert re.sub(r" +", " ", shown).splitlines()[1:] == [
        "x int64: Tensor[B] of int64, 2 nulls: pass fill_null= or null_masks=True",
        "s.a int64: Tensor[B] of int64, 1 null: pass fill_null= or null_masks=True",
        "s.b double: Tensor[B] of float64, 2 nulls",
        "every list<element: int64>: list[Tensor] of int64, may have nulls",
        "full list<element: int64>: list[Tensor] of int64",
        "label string: list[str], 3 nulls",
    ]


def test_head_shows_the_progress_of_counting_nulls(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", 0.0)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    assert "counting nulls: 1 of 1 files (100%)" in run("head", str(tmp_path / "x.parquet")).stderr


def test_head_escapes_characters_that_the_terminal_lacks(tmp_path: Path, settings: dict[str, str]) -> None:
    pq.write_table(pa.table({"pr€is": ["café ☃"]}), tmp_path / "x.parquet")
    command = [sys.executable, "-m", "dataload", "head", str(tmp_path / "x.parquet")]
    environment = {**os.environ, **settings, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, encoding="latin-1", env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"pr\u20acis=café \u2603" in done.stdout


def test_head_of_folders_alone_and_of_no_rows(at_bucket: Run, bucket: Any) -> None:
    put(bucket, "h/label=cat/0.parquet", pa.table({"x": [5]}))
    url = bucket.url("h")
    only = json.loads(at_bucket("head", url, "--columns", "label", "--json").stdout)
    assert only["first_rows"] == [{"label": "cat"}]
    put(bucket, "empty/0.parquet", pa.table({"x": pa.array([], pa.int64())}))
    empty = json.loads(at_bucket("head", bucket.url("empty"), "--json").stdout)
    assert (empty["rows"], empty["first_rows"]) == (0, [])


def test_head_counts_objects_without_row_groups(at_bucket: Run, bucket: Any) -> None:
    none, some = (pa.table({"x": pa.array(values, pa.int64())}) for values in ([], [5]))
    for number, rows in enumerate([none, none, some]):
        content = pa.BufferOutputStream()
        with pq.ParquetWriter(content, rows.schema) as writer:
            if len(rows):
                writer.write_table(rows)
        bucket.put(f"part/{number}.parquet", content.getvalue().to_pybytes())
    assert "3 objects" in at_bucket("head", bucket.url("part")).stdout
    found = json.loads(at_bucket("head", bucket.url("part/[01].parquet"), "--json").stdout)
    assert (found["objects"], found["row_groups"], found["rows"]) == (2, 0, 0)


def test_head_fetches_footers_and_ranges_of_the_first_row_group(at_bucket: Run, bucket: Any) -> None:
    """The row groups are so small that a loader would read them through blocks, with their neighbours."""
    noise = np.random.default_rng(0)
    table = pa.table({"x": noise.integers(1 << 60, size=12_000), "wide": [noise.bytes(100) for _ in range(12_000)]})
    url = put(bucket, "h.parquet", table, row_group_size=4000, compression="none", use_dictionary=False)
    size = bucket.client.head_object(Bucket=bucket.name, Key="h.parquet")["ContentLength"]
    tail = tail_bytes(Object("h.parquet", size, "v"))

    assert at_bucket("head", url, "--rows", "0").returncode == 0
    assert bucket.server.stats()["get_bytes"] == tail
    chosen = json.loads(at_bucket("head", url, "--columns", "x", "--json").stdout)
    assert [row["x"] for row in chosen["first_rows"]] == table["x"].to_pylist()[:5]
    assert 32_000 <= bucket.server.stats()["get_bytes"] - tail <= 33_000  # the footer is cached
    bucket.server.reset()
    at_bucket("head", url)
    assert 448_000 <= bucket.server.stats()["get_bytes"] <= 450_000


def test_head_of_a_large_row_group_fetches_its_start(at_bucket: Run, bucket: Any) -> None:
    noise = np.random.default_rng(0)
    table = pa.table({"wide": [noise.bytes(1000) for _ in range(12_000)]})
    url = put(bucket, "h.parquet", table, compression="none", use_dictionary=False)
    shown = json.loads(at_bucket("head", url, "--json").stdout)
    assert shown["first_rows"][4]["wide"].startswith(f"<1000 bytes: {table['wide'][4].as_py()[:16].hex()}")
    assert bucket.server.stats()["get_bytes"] <= 3 << 20


def test_doctor_takes_the_ranks_of_a_host(run: Run, tmp_path: Path) -> None:
    """Before the launch, the environment says nothing about them."""
    words = ("doctor", "--cache-dir", str(tmp_path), "--num-workers", "3", "--json")
    cases = ((), ("--world-size", "1000"), ("--world-size", "1000", "--num-streams", "4"))
    found = [json.loads(run(*words, *more).stdout)["checks"]["processors"]["what"] for more in cases]
    assert "1000 ranks" not in found[0]
    assert "for 1000 ranks of 3 workers each: 4000 processes" in found[1]
    assert "for 250 ranks of 3 workers each: 1000 processes" in found[2]
    assert run(*words, "--world-size", "0").returncode == 2


@pytest.mark.parametrize(("ranks", "shuffle"), [("8", "block"), ("1", "block"), ("1", "none")])
def test_streams_that_a_loader_refuses_have_no_plan(run: Run, ranks: str, shuffle: str) -> None:
    words = ("--world-size", ranks, "--batch-size", "5", "--shuffle", shuffle)
    done = run("plan", "s3://bucket/x", "--num-streams", "3", *words)
    assert done.returncode == 2
    assert f"--num-streams=3: nodes with equal parts of --world-size={ranks} ranks" in " ".join(done.stderr.split())


def test_a_plan_of_several_nodes_has_a_rank_on_each(at_bucket: Run, dataset_of: Callable[..., str]) -> None:
    words = ("plan", dataset_of([[100] * 8]), "--num-streams", "4", "--batch-size", "50", "--json")
    default, named = (json.loads(at_bucket(*words, *more).stdout) for more in ((), ("--world-size", "4")))
    assert default == named


WITHOUT_TORCH = """
import sys
from dataload.cli.app import main
for words in {commands}:
    sys.argv = ["dataload", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0 or (words[0] == "doctor" and end.code == 1), words
    assert "torch" not in sys.modules, words
"""


@pytest.mark.parametrize(
    ("command", "what", "package"),
    [("demo", "the demo", "scikit-learn"), ("bench", "bench", "scikit-image"), ("bench", "bench", "psutil")],
)
def test_a_command_names_the_extra_that_it_needs(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, what: str, package: str
) -> None:
    """As after `pip install dataload`, without extras."""
    version = metadata.version

    def without(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    monkeypatch.chdir(tmp_path)
    done = run(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"dataload: {what} needs more packages ({package}): pip install 'dataload[{command}]'\n"
    assert not list(tmp_path.iterdir())


def test_commands_import_no_torch(tmp_path: Path) -> None:
    """All but `demo` and `bench`. The doctor may find a problem of the machine that runs the tests."""
    data, stats, cache = tmp_path / "data", tmp_path / "stats", ["--cache-dir", str(tmp_path / "cache")]
    data.mkdir()
    pq.write_table(pa.table({"x": range(100), "text": ["a"] * 100}), data / "x.parquet")
    list(make_loader(data, 10, cache=False, stats_dir=stats))
    commands = [
        ["head", str(data), *cache],
        ["plan", str(data), "--filters", '[["x", ">", 5]]', *cache],
        ["warm", str(data), *cache],
        ["convert", str(data), str(tmp_path / "converted"), "--shuffle", "0"],
        ["doctor", str(data), *cache],
        *(["cache", command, *cache] for command in ("stats", "verify")),
        ["cache", "evict", "--all", *cache],
        ["report", str(stats)],
        ["report", str(stats), "--metrics", str(tmp_path / "metrics.prom")],
        ["top", str(stats)],
    ]
    program = WITHOUT_TORCH.format(commands=commands)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "x=0" in done.stdout
