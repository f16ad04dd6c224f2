"""What Prometheus scrapes of a training process is what its loaders count."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections import defaultdict
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_servers import serving
from ports import free_port
from prometheus_client import openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from dataload import ConfigError, World, make_dataset, make_loader, mix
from dataload.loader import loader_metrics, metrics_server
from dataload.telemetry.wait_timeline import CAUSES

ROWS = 60
DASHBOARD = Path(__file__).parents[2] / "docs" / "dashboards" / "dataload.json"


@pytest.fixture
def port():
    """A free port, whose server ends with the test. A program leaves it to the end of its process."""
    yield free_port()
    for each in metrics_server._servers.values():
        each._server.shutdown()
        each._server.server_close()
    metrics_server._servers.clear()
    loader_metrics.measured.clear()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"id": range(ROWS)}), tmp_path / "train" / "rows.parquet", row_group_size=10)
    return tmp_path / "train"


def scrape(port, accept="text/plain"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def values_of(port):
    """Return the values by name and labels, without `dataload_` and the rank."""
    values = {}
    for family in text_string_to_metric_families(scrape(port)):
        for sample in family.samples:
            assert sample.labels.pop("rank") == "0"
            values[sample.name.removeprefix("dataload_"), *(sample.labels[name] for name in sorted(sample.labels))] = (
                sample.value
            )
    return values


def test_a_scrape_has_the_sums_over_all_epochs(folder, port, tmp_path):
    loader = make_loader(folder, 10, metrics_port=port, cache_dir=str(tmp_path / "cache"), cache_bytes="1GB")
    every = []
    for _ in range(2):
        list(loader)
        every.append(loader.stats())
    for _ in zip(range(2), loader, strict=False):
        values = values_of(port)  # within an epoch
    every.append(loader.stats())

    def summed(of):
        return pytest.approx(sum(of(stats) for stats in every))

    for name in ("rows", "batches", "skipped_rows", "tokens", "seconds"):
        assert values[f"{name}_total", "train"] == summed(lambda stats, name=name: getattr(stats, name)), name
    for cause in CAUSES:
        assert values["wait_cause_seconds_total", cause, "train"] == summed(lambda stats, of=cause: stats.waits[of])
    for tier in ("local", "cluster", "origin"):
        of_tier = summed(lambda stats, tier=tier: getattr(stats, f"bytes_{tier}"))
        assert values["bytes_total", "train", tier] == of_tier
    assert values["cache_reads_total", "train", "miss"] == ROWS / 10
    assert values["cache_reads_total", "train", "hit"] == summed(lambda stats: stats.hits)
    assert values["wait_seconds_count", "train"] == values["batches_total", "train"] == 6 + 6 + 2
    assert values["wait_seconds_sum", "train"] == summed(lambda stats: stats.wait_seconds)
    assert values["wait_seconds_bucket", "+Inf", "train"] == 14
    assert values["epoch", "train"] == 2
    assert values["stall_ratio", "train"] == pytest.approx(every[-1].stall_fraction)
    assert 0 < values["cache_used_bytes", "train"] <= values["cache_limit_bytes", "train"] == 1e9


OPEN_TELEMETRY = """
import json, sys
from opentelemetry import metrics
from dataload import make_loader

early = make_loader(sys.argv[1], 10, cache=False)
list(early)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader], shutdown_on_exit=False))
late = make_loader(sys.argv[1], 10, cache=False)
list(late)
next(iter(late))
data = json.loads(reader.get_metrics_data().to_json())
[scope] = data["resource_metrics"][0]["scope_metrics"]
print(json.dumps(scope["metrics"]))
"""


def test_open_telemetry_has_the_same_sums(folder):
    """Of a program that uses its API, whichever of loader and meter provider it makes first."""
    program = [sys.executable, "-c", OPEN_TELEMETRY, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    units, values = {}, {}
    for metric in json.loads(done.stdout):
        units[metric["name"]] = metric["unit"]
        for point in metric["data"]["data_points"]:
            attributes = point["attributes"]
            assert attributes.pop("rank") == "0"
            values[metric["name"], *(attributes[name] for name in sorted(attributes))] = point["value"]
    assert values["dataload.rows", "train"] == 2 * ROWS + 10  # of two loaders of the same rows
    assert values["dataload.batches", "train"] == (2 * ROWS + 10) / 10
    assert values["dataload.epoch", "train"] == 1
    assert values["dataload.bytes", "train", "origin"] > 0
    assert values["dataload.wait", "train", "0.5"] <= values["dataload.wait", "train", "1"]
    assert {values["dataload.wait_cause_seconds", cause, "train"] >= 0 for cause in CAUSES} == {True}
    assert (units["dataload.wait"], units["dataload.bytes"], units["dataload.rows"]) == ("s", "By", "1")


def test_both_formats_can_be_read(folder, port):
    list(make_loader(folder, 10, metrics_port=port, cache=False))
    names = {family.name for family in text_string_to_metric_families(scrape(port))}
    text = scrape(port, openmetrics.exposition.CONTENT_TYPE_LATEST)
    assert text.endswith("# EOF\n")
    assert {family.name for family in parse_openmetrics(text)} == names
    assert "dataload_wait_seconds" in names


def test_promtool_finds_nothing_to_improve(folder, port):
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    list(make_loader(folder, 10, metrics_port=port, cache=False))
    checked = subprocess.run([promtool, "check", "metrics"], input=scrape(port), capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def queries():
    """Return the queries of the dashboard, with their legends."""
    dashboard = json.loads(DASHBOARD.read_text())
    of_panels = [(each["expr"], each["legendFormat"]) for panel in dashboard["panels"] for each in panel["targets"]]
    return of_panels + [
        (each["query"]["query"], "") for each in dashboard["templating"]["list"] if each["type"] == "query"
    ]


def test_the_queries_of_the_dashboard_are_of_metrics_and_their_labels(folder, port, tmp_path):
    loader = make_loader(folder, 10, metrics_port=port, cache_dir=str(tmp_path / "cache"), cache_bytes="1GB")
    list(loader)
    labels = defaultdict(set)
    for family in text_string_to_metric_families(scrape(port)):
        for sample in family.samples:
            labels[sample.name] |= {*sample.labels, "job", "instance"}
    assert len(queries()) > 10
    for query, legend in queries():
        names = re.findall(r"dataload_\w+", query)
        used = re.findall(r"(\w+)=", query) + re.findall(r"by \((\w+)\)", query) + re.findall(r"{{(\w+)}}", legend)
        assert {*names} <= labels.keys(), query
        assert {*used} <= set().union(*(labels[name] for name in names)), query


def test_promtool_takes_the_queries_of_the_dashboard(tmp_path):
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    whole = [query.replace("$__rate_interval", "1m") for query, _ in queries() if not query.startswith("label_values")]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(whole)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    checked = subprocess.run([promtool, "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_loaders_of_a_process_share_the_port(folder, port):
    train, test = make_dataset(folder, cache=False).split([0.8, 0.2])
    loaders = [make_loader(part, 6, metrics_port=port) for part in (train, test)]
    for loader in loaders:
        list(loader)
    values = values_of(port)
    assert values["rows_total", "train"] == len(train)
    assert values["rows_total", "train-2"] == len(test)


def test_no_two_loaders_have_one_label(folder, port):
    other = folder.with_name("train-2")
    shutil.copytree(folder, other)
    parts = make_dataset(folder, cache=False).split([0.5, 0.5])
    loaders = [make_loader(each, 10, metrics_port=port) for each in (*parts, make_dataset(other, cache=False))]
    for loader in loaders:
        list(loader)
    rows = {tuple(labels): value for (name, *labels), value in values_of(port).items() if name == "rows_total"}
    assert rows == {("train",): ROWS / 2, ("train-2",): ROWS / 2, ("train-2-2",): ROWS}


def test_a_loader_that_is_made_again_goes_on_counting(folder, port):
    loader = make_loader(folder, 10, metrics_port=port, cache=False)
    list(loader)
    loader = make_loader(folder, 10, metrics_port=port, cache=False)  # while the first one lives
    gc.collect()
    list(loader)
    del loader
    gc.collect()
    list(make_loader(make_dataset(folder, cache=False).select(range(30)), 10, metrics_port=port))
    values = values_of(port)
    assert values["rows_total", "train"] == 2 * ROWS + 30
    assert ("rows_total", "train-2") not in values


def test_loops_of_two_loaders_of_the_same_rows_both_count(folder, port):
    loaders = [make_loader(folder, 10, metrics_port=port, cache=False) for _ in range(2)]
    for _ in zip(*loaders, strict=True):
        pass
    assert values_of(port)["rows_total", "train"] == 2 * ROWS


def test_a_mixture_has_the_names_of_its_sources(folder, port):
    mixed = mix({name: make_dataset(folder, cache=False) for name in ("web", "books")}, {"web": 1, "books": 1})
    loader = make_loader(mixed, 10, metrics_port=port)
    list(loader)
    assert values_of(port)["rows_total", "web, books"] == loader.stats().rows


def test_credentials_of_a_url_reach_no_label(folder, port):
    with serving(partial(SimpleHTTPRequestHandler, directory=str(folder))) as url:
        url = url.replace("//", "//user:secret@") + "/rows.parquet?signature=secret"
        list(make_loader(url, 10, metrics_port=port, cache=False))
    assert values_of(port)["rows_total", "rows.parquet"] == ROWS
    assert "secret" not in scrape(port)


def test_a_path_that_is_no_text_can_be_scraped(folder, port):
    strange = folder.rename(os.fsdecode(os.fsencode(folder.parent) + b"/\xff"))
    list(make_loader(strange, 10, metrics_port=port, cache=False))
    assert values_of(port)["rows_total", "?"] == ROWS


def test_each_rank_of_a_host_adds_its_local_rank(folder, ranks):
    port = free_port()
    assert free_port() == port + 1
    assert ranks(2, count_in_rank, str(folder), port) == [("0", ROWS / 2), ("1", ROWS / 2)]


def count_in_rank(folder, port):
    loader = make_loader(folder, 10, metrics_port=port, cache=False)
    list(loader)
    own = port + World.detect().local_rank
    [rows] = [family for family in text_string_to_metric_families(scrape(own)) if family.name == "dataload_rows"]
    [sample] = rows.samples
    return sample.labels["rank"], sample.value


def test_a_taken_port_is_named(folder, port):
    with socket.socket() as other:
        other.bind(("0.0.0.0", port + 1))
        other.listen()
        with pytest.raises(ConfigError, match=rf"metrics_port={port}: port {port + 1}, .* \(Address already in use\)"):
            make_loader(folder, 10, metrics_port=port, world=World(1, 2, 1, 2), cache=False)
    for wrong in (70_000, 0, "9400"):
        with pytest.raises(ConfigError, match=f"metrics_port={wrong!r}"):
            make_loader(folder, 10, metrics_port=wrong, cache=False)


def test_a_forked_child_is_told_whose_port_it_wants(folder, port):
    list(make_loader(folder, 10, metrics_port=port, cache=False))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    if not (child := os.fork()):
        try:
            make_loader(folder, 10, metrics_port=port, cache=False)
        except ConfigError as error:
            sender.send(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert f"the process that forked this one serves port {port}" in receiver.recv()


def test_without_the_package_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        ConfigError, match=r"metrics_port=9400 needs prometheus_client: pip install .dataload\[metrics\]"
    ):
        make_loader(folder, 10, metrics_port=9400, cache=False)


def test_a_copy_of_a_loader_in_another_process_serves_nothing(folder, port):
    loader = make_loader(folder, 10, metrics_port=port, cache=False)
    list(loader)
    list(pickle.loads(pickle.dumps(loader)))
    assert values_of(port)["rows_total", "train"] == ROWS


PROGRAM = """
import os, sys
from dataload import make_loader

loader = make_loader(sys.argv[1], 10, metrics_port=int(sys.argv[2]), cache=False)
list(loader)
if os.fork() == 0:
    list(loader)
    print("child", flush=True)
    sys.stdin.readline()  # It lives on.
    os._exit(0)
"""


@pytest.mark.slow
def test_the_port_is_free_once_the_process_has_ended(folder):
    """A child that it has forked does not keep the port."""
    port = free_port()
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), str(port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"child\n"
        assert program.wait(200) == 0
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))
            probe.listen()
        assert program.communicate(b"\n") == (b"", b"")
