"""The statistics that ranks write become a correct page, picture and metrics."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import resource
import socket
import sys
import tracemalloc
from base64 import b64decode
from collections import defaultdict
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from prometheus_client.parser import text_string_to_metric_families
from runs import BEGAN, SLOW_RANK, write_pass, write_run

from dataload import ConfigError, World, fit, make_dataset, make_loader
from dataload.reporting import prometheus
from dataload.reporting.aggregate import epochs, over_ranks, throughput
from dataload.reporting.html import html, summary, write
from dataload.reporting.plots import picture, plots
from dataload.telemetry import stats_log
from dataload.telemetry.loader_stats import ADVICE, MOST_ROW_IDS, LoaderStats
from dataload.telemetry.stats_log import FINENESS, Samples, merged, read, read_peers
from dataload.telemetry.wait_timeline import CAUSES


@pytest.fixture
def loader_of(dataset_of, bucket, cache, tmp_path):
    dataset = make_dataset(dataset_of([[50, 50]]), storage_options=bucket.options, cache=cache)
    return lambda batch_size=10, **options: make_loader(dataset, batch_size, **options)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_where_nothing_was_read_nothing_is_said_of_hits():
    assert "hits" not in str(LoaderStats(1, rows=5, seconds=1.0))
    assert "cache hits 75.0%, 0 bytes from the origin" in str(LoaderStats(1, hits=3, misses=1))


def test_replaced_rows_of_all_ranks_are_counted_and_some_are_listed():
    ranks = [LoaderStats(0), LoaderStats(0), LoaderStats(0)]
    ranks[0].skip(range(80))
    ranks[2].skip(range(100, 190))
    total = over_ranks(ranks)
    assert (total.skipped_rows, total.skipped_row_ids) == (170, [*range(80), *range(100, 120)])
    assert len(total.skipped_row_ids) == MOST_ROW_IDS
    assert "170 rows that raised are skipped; " in str(total)
    assert "replaced" not in str(ranks[1])


def test_a_sample_a_second_and_one_at_the_end(tmp_path):
    stats = LoaderStats(3, rank=5)
    with Samples(tmp_path, stats) as samples:
        for seconds in (0.4, 0.9, 1.1, 1.5, 2.0, 2.2, 2.3):
            stats.seconds, stats.batches = seconds, stats.batches + 1
            samples.take(last=seconds == 2.3)
    lines = lines_of(tmp_path / "rank-5.jsonl")
    assert [line["seconds"] for line in lines] == [1.1, 2.2, 2.3]
    assert [line["ended"] for line in lines] == [False, False, True]
    assert all((line["rank"], line["epoch"]) == (5, 3) for line in lines)
    assert lines[-1]["waits"] == stats.waits


def test_what_the_last_batch_was_used_for_is_time_of_the_epoch(loader_of, tmp_path):
    loader = loader_of(stats_dir=tmp_path / "stats", batch_size=100)
    list(loader)
    [one] = read(tmp_path / "stats")
    assert [sample.rows for sample in one.samples] == [100, 100]
    assert one.stats.seconds == pytest.approx(loader.stats().seconds, abs=1e-8)
    assert one.stats.wait_seconds == pytest.approx(loader.stats().wait_seconds, abs=1e-8)
    assert one.ended


def test_a_loop_that_is_left_adds_nothing_to_its_last_batch(loader_of, tmp_path):
    loader = loader_of(stats_dir=tmp_path / "stats")
    batches = iter(loader)
    next(batches)
    before = loader.stats().seconds
    with pytest.raises(KeyError):
        batches.throw(KeyError)
    [one] = read(tmp_path / "stats")
    assert one.stats.seconds == pytest.approx(before, abs=1e-8)
    assert (one.ended, len(one.samples)) == (False, 1)


def test_a_long_epoch_is_sampled_less_often(tmp_path):
    stats = LoaderStats()
    with Samples(tmp_path, stats) as samples:
        for hundreds in range(1000):
            stats.seconds, stats.batches = 100.0 * FINENESS + 10 * hundreds, stats.batches + 1
            samples.take(last=False)
    assert 90 <= len(lines_of(tmp_path / "rank-0.jsonl")) <= 110


def test_what_a_kill_tore_off_takes_no_other_line_with_it(tmp_path):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 10}] * 3, ended=False)
    path = tmp_path / "rank-0.jsonl"
    whole = path.read_bytes()
    for torn in range(2, 300, 7):
        path.write_bytes(whole[:-torn])
        assert [sample.rows for sample in read(tmp_path)[0].samples] == [10, 20]
        write_pass(tmp_path, 0, 0, BEGAN + 60, [{"rows": 5}])
        assert [(one.stats.rows, one.ended) for one in read(tmp_path)] == [(20, False), (5, True)]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "null",
        '{"rank": 0}',
        "\N{BROKEN BAR}",
        '{"rows": "<script>"',
        pytest.param({"rows": "many"}, id="text for a number"),
        pytest.param({"rank": None}, id="no rank"),
        pytest.param({"host": 7}, id="number for a host"),
        pytest.param({"rank": 0.5}, id="half a rank"),
        pytest.param({"waits": {"origin": 1}}, id="causes missing"),
        pytest.param({"waits": None}, id="no waits"),
        pytest.param({"seconds": float("nan")}, id="not a number"),
        pytest.param({"began": float("inf")}, id="endless"),
        pytest.param({"rows": 10**400}, id="more than a float holds"),
        pytest.param({"bytes_local": 1e300}, id="more bytes than there are"),
        pytest.param({"seconds": -1}, id="ended before it began"),
        pytest.param({"waits": dict.fromkeys(CAUSES, -1e-3)}, id="negative waits"),
        pytest.param("[" * 200_000, id="nested too deep"),
    ],
)
def test_damaged_lines_are_passed_over(tmp_path, line):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 10}])
    path = tmp_path / "rank-0.jsonl"
    damaged = line if isinstance(line, str) else json.dumps({**lines_of(path)[0], **line})
    path.write_bytes(path.read_bytes() + b"\n" + damaged.encode("latin-1"))
    [one] = read(tmp_path)
    assert [sample.rows for sample in one.samples] == [10]


@pytest.mark.variants
@pytest.mark.parametrize(
    "line",
    [
        pytest.param({"waits": {**dict.fromkeys(CAUSES, 0.1), "moon": 9.0}}, id="an unknown cause"),
        pytest.param({"host": "\ud800"}, id="half a character"),
        pytest.param({"seconds": 1e-320}, id="no time at all"),
        pytest.param(dict.fromkeys(["began", "seconds", "rows", "bytes_origin", "misses"], 9e17), id="a lot"),
        pytest.param({"wait_seconds": 9e17, "waits": dict.fromkeys(CAUSES, 9e17)}, id="waited more than there was"),
    ],
)
def test_a_strange_line_spoils_no_report(dataload, tmp_path, line):
    for rank in range(2):
        write_pass(tmp_path, rank, 0, BEGAN, [{"rows": 10, "origin": 0.2 + rank / 2}])
        path = tmp_path / f"rank-{rank}.jsonl"
        path.write_text(json.dumps({**lines_of(path)[0], **line}))
    assert [one.rank for one in read(tmp_path)] == [0, 1]
    for words in ([], ["--png", tmp_path / "run.png"], ["--metrics", tmp_path / "run.prom"], ["--json"]):
        code, said, complaint = dataload("report", tmp_path, *words)
        assert (code, complaint) == (0, "")
        assert said.encode()


def test_a_title_may_hold_what_no_page_can(tmp_path):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 10}])
    write(read(tmp_path), tmp_path / "page.html", "runs/\udcff")
    assert "<h1>runs/?</h1>" in (tmp_path / "page.html").read_text()


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path, caplog):
    write_pass(tmp_path, 1, 0, BEGAN, [{"rows": 10}])
    (tmp_path / "rank-0.jsonl").mkdir()
    (tmp_path / "rank-2.jsonl").symlink_to("rank-2.jsonl")
    assert [one.rank for one in read(tmp_path)] == [1]
    assert [name for name in ("rank-0.jsonl", "rank-1.jsonl", "rank-2.jsonl") if name in caplog.text] == [
        "rank-0.jsonl",
        "rank-2.jsonl",
    ]
    (tmp_path / "rank-1.jsonl").unlink()
    with pytest.raises(ConfigError, match="stats_dir"):
        read(tmp_path)


def test_passes_that_begin_almost_at_once_are_two(tmp_path, monkeypatch):
    for epoch, began in ((0, BEGAN), (1, BEGAN), (1, BEGAN + 1e-5)):
        monkeypatch.setattr(stats_log, "time", lambda began=began: began)
        with Samples(tmp_path, LoaderStats(epoch, batches=1, seconds=1e-6)):
            pass
    assert [(one.stats.epoch, one.began) for one in read(tmp_path)] == [(0, BEGAN), (1, BEGAN), (1, BEGAN + 1e-5)]
    assert read_peers(tmp_path, samples=False) == without_samples(tmp_path)


def without_samples(folder):
    return [[dataclasses.replace(each, samples=[]) for each in peers] for peers in read_peers(folder)]


def test_of_a_long_run_little_is_kept(tmp_path):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 10}] * 1000)
    tracemalloc.start()
    try:
        [one] = read(tmp_path)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert one.samples[-1] == (1000, 10_000)
    assert kept < 1000 * 300


def test_the_loader_writes_its_epochs(dataset_of, bucket, cache, tmp_path):
    dataset = make_dataset(dataset_of([[500]]), storage_options=bucket.options, cache=cache)
    loader = make_loader(dataset, 50, stats_dir=tmp_path / "stats")
    for _ in range(2):
        list(loader)
    for _ in loader:
        break
    whole, again, broken = read(tmp_path / "stats")
    assert [one.stats.epoch for one in (whole, again, broken)] == [0, 1, 2]
    assert [one.ended for one in (whole, again, broken)] == [True, True, False]
    assert (whole.stats.rows, whole.stats.batches, broken.stats.rows) == (500, 10, 50)
    assert whole.stats.bytes_origin > 0
    assert whole.stats.seconds >= whole.stats.wait_seconds == pytest.approx(sum(whole.stats.waits.values()))


def test_ranks_that_wrote_nothing_are_missed(loader_of, tmp_path):
    list(loader_of(stats_dir=tmp_path, world=World(1, 3)))
    [said] = summary(read(tmp_path))["notes"]
    assert said.startswith("ranks 0, 2 wrote nothing here: ")
    assert "other hosts" in said
    list(loader_of(stats_dir=tmp_path, world=World(2, 3)))
    [said] = summary(read(tmp_path))["notes"]
    assert said.startswith("rank 0 wrote nothing here: ")
    assert f'<p class="advice">{said}' in html(read(tmp_path), "run")
    list(loader_of(stats_dir=tmp_path, world=World(0, 3)))
    assert summary(read(tmp_path))["notes"] == []


def test_of_many_missing_ranks_some_are_named(tmp_path):
    with Samples(tmp_path, LoaderStats(seconds=1.0, rank=1, world_size=10**17)):
        pass
    [said] = summary(read(tmp_path))["notes"]
    assert said.startswith(f"ranks 0, 2, 3, 4, 5 and {10**17 - 6} more wrote nothing here: ")


def test_a_long_time_between_two_runs_is_asked_about(dataload, tmp_path):
    for began in (BEGAN, BEGAN + 3500):
        write_pass(tmp_path, 0, 0, began, [{"rows": 10}] * 60)
    assert summary(read(tmp_path))["notes"] == []
    write_pass(tmp_path, 0, 0, BEGAN + 24 * 3600, [{"rows": 10}] * 60)
    [note] = summary(read(tmp_path))["notes"]
    assert note.startswith("nothing ran for 23.0 h before epoch 0 was begun again")
    code, said, _ = dataload("report", tmp_path)
    assert (code, said.splitlines()[-2]) == (0, note)
    assert note in (tmp_path / "report.html").read_text()


def test_a_loop_that_does_not_ask_for_one_more_has_ended_the_epoch(loader_of, tmp_path):
    loader = loader_of(stats_dir=tmp_path / "stats")
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    [one] = read(tmp_path / "stats")
    assert (one.ended, one.stats.rows) == (True, 100)
    batches.close()
    assert len(read(tmp_path / "stats")[0].samples) == 1


def test_trouble_with_the_folder_stops_no_training(loader_of, tmp_path, caplog):
    (tmp_path / "stats").write_text("a file")
    with caplog.at_level(logging.WARNING, stats_log.__name__):
        assert len(list(loader_of(stats_dir=tmp_path / "stats"))) == 10
    assert [name for name in ("rank-0.jsonl", "ledger") for said in caplog.messages if name in said] == [
        "rank-0.jsonl",
        "ledger",
    ]


def test_trouble_is_logged_once(tmp_path, caplog):
    (tmp_path / "stats").write_text("a file")
    write_pass(tmp_path / "stats", 3, 0, BEGAN, [{"rows": 10}] * 5)
    assert len(caplog.messages) == 1


def test_fit_has_its_loader_write_into_the_log_dir(loader_of, tmp_path):
    def loss(model, batch):
        return model(batch["vector"]).square().mean()

    model, options = torch.nn.Linear(3, 1), {"epochs": 2, "precision": "fp32", "progress": False}
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    loader, own = loader_of(), loader_of(stats_dir=tmp_path / "own")
    fit(model, optimizer, loader, loss, log_dir=tmp_path / "log", **options)
    fit(model, optimizer, own, loss, log_dir=tmp_path / "other", **options)
    assert [one.stats.rows for one in read(tmp_path / "log")] == [100, 100]
    assert [one.stats.rows for one in read(tmp_path / "own")] == [100, 100]
    assert not list((tmp_path / "other").glob("rank-*"))
    assert loader.stats_dir is None


def test_ranks_make_an_epoch(tmp_path):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 10, "origin": 0.5, "bytes_origin": 100, "hits": 3}] * 4)
    write_pass(tmp_path, 1, 0, BEGAN + 0.1, [{"rows": 20, "decode": 0.1, "bytes_origin": 50, "misses": 1}] * 4)
    [epoch] = epochs(read(tmp_path))
    assert epoch.ended
    total = epoch.total
    assert (total.rows, total.seconds, total.bytes_origin, total.hits, total.misses) == (120, 4, 600, 12, 4)
    assert total.wait_seconds == pytest.approx(1.2)
    assert (total.waits["origin"], total.waits["decode"]) == (pytest.approx(1.0), pytest.approx(0.2))
    assert (total.rows_per_second, total.hit_rate) == (30, 0.75)


def test_a_resumed_epoch_is_told_apart(tmp_path):
    for rank in range(2):
        write_pass(tmp_path, rank, 0, BEGAN + rank, [{"rows": 10}] * 3, ended=False)
        write_pass(tmp_path, rank, 0, BEGAN + 60 + rank, [{"rows": 10}])
        write_pass(tmp_path, rank, 1, BEGAN + 70 + rank, [{"rows": 10}])
    found = epochs(read(tmp_path))
    assert [(epoch.number, epoch.restarts, epoch.ended, epoch.total.rows) for epoch in found] == [
        (0, 0, False, 60),
        (0, 1, True, 20),
        (1, 0, True, 20),
    ]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_files_of_one_name_from_two_hosts_may_be_appended(tmp_path, order):
    """Also if a kill tore the last line of one."""
    write_pass(tmp_path / "a", 0, 0, BEGAN, [{"rows": 10}] * 3, ended=False)
    write_pass(tmp_path / "b", 0, 0, BEGAN + 60, [{"rows": 20}])
    parts = {host: (tmp_path / host / "rank-0.jsonl").read_bytes() for host in order}
    parts["a"] = parts["a"][:-9]
    (tmp_path / "rank-0.jsonl").write_bytes(b"".join(parts[host] for host in order))
    found = epochs(read(tmp_path))
    assert [(epoch.restarts, epoch.ended, epoch.total.rows) for epoch in found] == [(0, False, 20), (1, True, 20)]


def begun(folder):
    """Return epochs as (number, how often it was begun before, ranks)."""
    return [(epoch.number, epoch.restarts, list(epoch.ranks)) for epoch in epochs(read(folder))]


def test_more_ranks_may_go_on_where_fewer_ended(tmp_path):
    for rank in range(2):
        write_pass(tmp_path, rank, 0, BEGAN, [{"rows": 10}] * 3, ended=False)
    for rank in range(4):
        write_pass(tmp_path, rank, 0, BEGAN + 60 - rank / 10, [{"rows": 10}])
    assert begun(tmp_path) == [(0, 0, [0, 1]), (0, 1, [0, 1, 2, 3])]


def test_more_ranks_may_go_on_at_once(tmp_path):
    for began, ranks in ((BEGAN, 1), (BEGAN + 4, 2)):
        for rank in reversed(range(ranks)):
            with Samples(tmp_path, LoaderStats(0, seconds=3.0, rank=rank, world_size=ranks)) as samples:
                samples._origin["began"] = began + (1 - rank) / 10
    assert begun(tmp_path) == [(0, 0, [0]), (0, 1, [0, 1])]


def test_a_rank_that_wrote_nothing_before_it_was_killed_begins_with_the_others(tmp_path):
    write_pass(tmp_path, 1, 0, BEGAN, [{"rows": 10}] * 3, ended=False)
    for rank in range(2):
        write_pass(tmp_path, rank, 0, BEGAN + 60 + rank, [{"rows": 10}] * 3)
    assert begun(tmp_path) == [(0, 0, [1]), (0, 1, [0, 1])]


def test_a_rank_may_begin_again_at_once(tmp_path):
    for began in (BEGAN, BEGAN + 2):
        for rank in range(2):
            write_pass(tmp_path, rank, 0, began, [{"rows": 10}] * 3, ended=False)
    assert begun(tmp_path) == [(0, 0, [0, 1]), (0, 1, [0, 1])]


def test_counters_do_not_fall_when_another_peer_has_waited_longest(tmp_path):
    """Prometheus would take that for a restart."""
    for process, rows, waited in ((0, 100, {"origin": 1.0}), (1, 90, {"origin": 1.5, "disk": 0.5})):
        stats = LoaderStats(0, rows=rows, seconds=10.0, world_size=1)
        stats.waited(waited, str)
        with Samples(tmp_path, stats, process) as samples:
            samples._origin["began"] = BEGAN
    [slowest], [largest] = read(tmp_path), merged(read_peers(tmp_path), steady=True)
    assert (slowest.stats.rows, slowest.stats.waits["origin"]) == (90, 1.5)
    assert (largest.stats.rows, largest.stats.waits["origin"], largest.stats.waits["disk"]) == (100, 1.5, 0.5)


def test_ranks_that_begin_late_are_of_the_same_epoch(tmp_path):
    for rank in range(3):
        write_pass(tmp_path, rank, 0, BEGAN + 20 * rank, [{"rows": 10}] * 60)
    assert begun(tmp_path) == [(0, 0, [0, 1, 2])]


def test_clocks_may_be_a_second_apart(tmp_path):
    for epoch in range(4):
        for rank in range(2):
            with Samples(tmp_path, LoaderStats(epoch, seconds=0.1, rank=rank)) as samples:
                samples._origin["began"] = BEGAN + epoch / 10 + rank
    assert begun(tmp_path) == [(epoch, 0, [0, 1]) for epoch in range(4)]


def test_stragglers_waited_for_data_while_the_others_waited_for_them(tmp_path):
    write_run(tmp_path)
    late = [list(epoch.stragglers()) for epoch in epochs(read(tmp_path))]
    assert late == [[], [], [], [SLOW_RANK], [SLOW_RANK], [SLOW_RANK]]
    assert epochs(read(tmp_path))[3].stragglers()[SLOW_RANK] == pytest.approx(30 * 0.35)


def test_the_advice_for_a_straggler_is_for_its_settings(tmp_path):
    for rank, seconds in enumerate((0.1, 0.1, 5.0)):
        stats = LoaderStats(0, seconds=10.0, rank=rank, world_size=3, settings=["num_threads"])
        stats.waited({"transform": seconds}, str)
        with Samples(tmp_path, stats) as samples:
            samples.take(last=True)
    [epoch] = epochs(read(tmp_path))
    [late] = epoch.late()
    assert late.startswith("rank 2 ")
    for line in (late, str(epoch.total), str(epoch.ranks[2].stats)):
        assert "raise num_threads" in line
    assert str(epoch.total).startswith("epoch 0: ")
    assert str(epoch.ranks[2].stats).startswith("epoch 0, rank 2 of 3: ")


def test_one_of_two_ranks_is_a_straggler_by_all_that_it_waited_longer(tmp_path):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 10}] * 4)
    write_pass(tmp_path, 1, 0, BEGAN, [{"rows": 10, "transform": 0.5}] * 4)
    assert epochs(read(tmp_path))[0].stragglers() == {1: pytest.approx(2.0)}


def test_throughput_adds_up_to_the_rows(tmp_path):
    write_run(tmp_path)
    passes = read(tmp_path)
    edges, of_ranks = throughput(passes)
    assert edges[-1] == pytest.approx(5 * 34 + 30)
    for rank, rates in of_ranks.items():
        assert len(rates) == pytest.approx(240, abs=3)
        assert (rates * np.diff(edges)).sum() == pytest.approx(
            sum(one.stats.rows for one in passes if one.rank == rank)
        )
        assert rates[np.searchsorted(edges, 32)] == 0  # between epochs
        assert rates[np.searchsorted(edges, 15)] > 500


@pytest.mark.variants
@pytest.mark.parametrize("number", [50, 100, 200, 300])
def test_throughput_of_many_epochs_shows_no_pattern_that_is_not_there(tmp_path, number):
    write_short_epochs(tmp_path, number)
    edges, of_ranks = throughput(read(tmp_path))
    of_epochs = np.searchsorted(edges, 10.0 * np.arange(number) - 1e-6)
    rates = np.split(of_ranks[0], of_epochs[1:])[:-1]
    assert {tuple(np.round(one, 3)) for one in rates} == {tuple(np.round(rates[0], 3))}


def write_short_epochs(folder, number):
    """Write epochs of 7 s with pauses of 3 s; the first one reads from the origin."""
    for epoch in range(number):
        cold = {"origin": 0.5, "bytes_origin": 40_000_000} if epoch == 0 else {}
        write_pass(folder, 0, epoch, BEGAN + 10 * epoch, [{"rows": 100, "bytes_local": 1_000_000, **cold}] * 7)


def write_two(folder):
    """Two ranks, two epochs of 4 s."""
    at_first = {"rows": 1000, "origin": 0.5, "hits": 3, "misses": 1, "requests_origin": 2}
    at_first |= {"bytes_local": 30_000_000, "bytes_origin": 25_000_000}
    write_pass(folder, 0, 0, BEGAN, [at_first] * 4)
    write_pass(folder, 1, 0, BEGAN, [{"rows": 500, "decode": 0.25, "bytes_cluster": 10_000_000}] * 4)
    write_pass(folder, 0, 1, BEGAN + 4, [{"rows": 2000}] * 4)
    write_pass(folder, 1, 1, BEGAN + 4, [{"rows": 1000, "disk": 0.5}] * 4)


def axes_of(folder, title):
    """Return the drawn plot of that title."""
    passes = read(folder)
    [plot] = [plot for plot in plots(passes, epochs(passes)) if plot.title == title]
    axes = Figure().subplots()
    plot.draw(axes)
    return axes


def bars(axes, length):
    """Return bars by label. length: "height" or "width" of a bar."""
    return {of.get_label(): [round(getattr(bar, f"get_{length}")(), 6) for bar in of] for of in axes.containers}


def named(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_the_plots_show_what_the_passes_say(tmp_path):
    write_two(tmp_path)
    waiting, tiers = axes_of(tmp_path, "Waiting, by cause"), axes_of(tmp_path, "Bytes, by tier")
    assert bars(waiting, "height") == {"origin": [25, 0], "disk": [0, 25], "decode": [12.5, 0]}
    assert named(waiting.xaxis) == ["0", "1"]
    assert bars(tiers, "height") == {"local": [120e6, 0], "cluster": [40e6, 0], "origin": [100e6, 0]}
    for axes in (waiting, tiers):  # stacked
        tops = [bar.get_y() + bar.get_height() for of in axes.containers for bar in of]
        assert max(tops) == pytest.approx(sum(of[0].get_height() for of in axes.containers))
    [hits] = axes_of(tmp_path, "Cache hits").lines
    assert hits.get_ydata() == pytest.approx([75, np.nan], nan_ok=True)
    [image] = axes_of(tmp_path, "Waiting, by rank").images
    assert image.get_array().tolist() == [[50, 0], [25, 50]]
    causes = axes_of(tmp_path, "Waiting of each rank, by cause")
    assert bars(causes, "width") == {"origin": [2, 0], "disk": [0, 2], "decode": [0, 1]}
    assert [bar.get_x() for of in causes.containers for bar in of] == [0, 0, 2, 0, 2, 2]
    assert named(causes.yaxis) == ["0", "1"]
    rates = {stairs.get_label(): stairs.get_data().values for stairs in axes_of(tmp_path, "Throughput").patches}
    for name, slow, fast in (("all", 1500, 3000), ("rank 0", 1000, 2000), ("rank 1", 500, 1000)):
        assert rates[name] == pytest.approx(np.repeat([slow, fast], 120)), name


def test_a_plot_of_no_bytes_says_so_once(tmp_path):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 1}])
    assert named(axes_of(tmp_path, "Bytes, by tier").yaxis) == ["0 bytes", "1 byte"]


def test_names_of_epochs_that_were_begun_often_stay_short(tmp_path):
    for again in range(30):
        write_pass(tmp_path, 0, 7, BEGAN + 60 * again, [{"rows": 1}], ended=False)
    assert named(axes_of(tmp_path, "Cache hits").xaxis) == ["7", "7 (5)", "7 (10)", "7 (15)", "7 (20)", "7 (25)"]


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Waiting, by cause", "Bytes, by tier"])
def test_the_first_of_many_epochs_can_be_seen(tmp_path, title):
    write_short_epochs(tmp_path, 600)
    axes = axes_of(tmp_path, title)
    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())[::-1, :, :3].astype(int)
    left, bottom, right, top = axes.bbox.extents.astype(int)
    assert axes.transData.transform((-0.5, 0))[0] > left + 3  # where the axis is not drawn over it
    inside = picture[bottom : top + 1, left : right + 1]
    near = np.abs(inside - [0xD5, 0x5E, 0]).max(axis=2) < 80
    assert near.any(axis=1).sum() > 0.7 * len(inside)


@pytest.mark.parametrize("ranks", [1, 8])
def test_titles_and_legends_of_the_picture_stand_apart(tmp_path, ranks):
    write_run(tmp_path, ranks=ranks, seconds=3)
    passes = read(tmp_path)
    shown = plots(passes, epochs(passes))
    figure = picture(shown)
    figure.draw_without_rendering()
    legends = 0
    for plot, part in zip(shown, figure.subfigs, strict=False):
        [title], axes = part.texts, part.axes[0]
        assert title.get_text() == plot.title
        assert axes.has_data()
        above = title.get_window_extent()
        assert not above.overlaps(axes.get_window_extent())
        if legend := axes.get_legend():
            legends += 1
            beside = legend.get_window_extent()
            assert not above.overlaps(beside)
            assert part.bbox.x0 <= beside.x0 < beside.x1 <= part.bbox.x1
    assert legends == (4 if ranks == 1 else 5)


class Page(HTMLParser):
    """Parse tags with their attributes, table rows as (class, cells), and texts. Require proper nesting."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.rows, self.texts = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append((dict(attrs).get("class"), []))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1], data))
        if self.open and self.open[-1] in ("th", "td"):
            self.rows[-1][1].append(data)

    def text_of(self, tag):
        return [text for of, text in self.texts if of == tag]


def test_the_table_says_what_the_passes_say(tmp_path):
    write_two(tmp_path)
    page, host = Page(html(read(tmp_path), "run")), socket.gethostname()
    before = ["rank", "host", "rows", "rows/s", "seconds", "waiting", "p99", "longest"]
    none, waits_0, waits_1 = ["0 bytes"] * 3, ["500 ms", "500 ms", "2.0", "0.0"], ["250 ms", "250 ms", "0.0", "1.0"]
    after = ["hits", "from local", "from cluster", "from origin"]
    assert page.rows[3:] == [
        (None, [*before, "on disk, s", *after]),
        (None, ["0", host, "8,000", "2,000", "4.0", "0.0%", "0 s", "0 s", "0.0", "\N{EN DASH}", *none]),
        ("late", ["1", host, "4,000", "1,000", "4.0", "50.0%", "500 ms", "500 ms", "2.0", "\N{EN DASH}", *none]),
        (None, [*before, "on origin, s", "on decode, s", *after]),
        (
            "late",
            [*["0", host, "4,000", "1,000", "4.0", "50.0%", *waits_0], *["75.0%", "120.0 MB", "0 bytes", "100.0 MB"]],
        ),
        (
            None,
            [*["1", host, "2,000", "500", "4.0", "25.0%", *waits_1], *["\N{EN DASH}", "0 bytes", "40.0 MB", "0 bytes"]],
        ),
    ]


def test_the_page_says_what_was_begun_again_and_what_has_not_ended(tmp_path):
    write_pass(tmp_path, 0, 0, BEGAN, [{"rows": 10}] * 3, ended=False)
    page = Page(html(read(tmp_path), "run"))
    assert page.text_of("p")[0] == "1 epoch on 1 rank in 3.0 s:"
    for rank in range(2):
        write_pass(tmp_path, rank, 0, BEGAN + 60, [{"rows": 10}] * 3)
        write_pass(tmp_path, rank, 1, BEGAN + 63, [{"rows": 10}] * 3, ended=rank == 0)
    found, page = epochs(read(tmp_path)), Page(html(read(tmp_path), "run"))
    assert page.text_of("p")[0] == "2 epochs (1 begun again) on 2 ranks in 66 s:"
    assert page.text_of("summary") == [
        f"{found[2].total}, not ended",
        f"{found[1].total}, begun again (1)",
        f"{found[0].total}, not ended",
    ]


def write_a_restart(folder):
    """Two ranks are killed in epoch 1 and begin it again after 90 s, in new processes, then train epoch 2."""
    for rank in range(2):
        write_pass(folder, rank, 0, BEGAN, [{"rows": 10, "origin": 0.4}] * 10)
        write_pass(folder, rank, 1, BEGAN + 11, [{"rows": 10}] * 4, ended=False)
        again = {"started": BEGAN + 105 + rank}
        write_pass(folder, rank, 1, BEGAN + 105 + rank, [{"rows": 10, "decode": 0.02}] * 6, **again)
        write_pass(folder, rank, 2, BEGAN + 112, [{"rows": 10}] * 10, **again)


def test_the_page_shows_all_epochs_and_where_the_run_was_restarted(tmp_path):
    write_a_restart(tmp_path)
    page = Page(html(read(tmp_path), "run"))
    assert page.text_of("p")[0] == "3 epochs (1 begun again) on 2 ranks in 2 min, 1 restart:"
    assert page.text_of("p")[1].startswith("600 rows in 30.0 s (20 rows/s), 14% of it waiting")
    assert "99 % up to 400 ms, the longest 400 ms" in page.text_of("p")[1]
    table = page.rows[:6]
    assert [(kind, cells[0]) for kind, cells in table[1:]] == [
        (None, "0"),
        (None, "1, not ended"),
        ("pause", "restarted after 2 min"),
        (None, "1 (1)"),
        (None, "2"),
    ]
    assert [cells[1] for kind, cells in table[1:] if not kind] == ["under 0.1 s", "11 s", "2 min", "2 min"]


def test_the_command_shows_all_epochs_and_where_the_run_was_restarted(dataload, tmp_path):
    write_a_restart(tmp_path)
    _, said, _ = dataload("report", tmp_path)
    starts = [line.partition(":")[0] for line in said.splitlines()]
    assert starts[:5] == ["epoch 0", "epoch 1", "-- restarted after 2 min", "epoch 1 (1)", "epoch 2"]
    found = json.loads(dataload("report", tmp_path, "--json")[1])
    assert (found["run"]["rows"], found["run"]["seconds"]) == (600, pytest.approx(30))
    assert sum(found["run"]["wait_histogram"]["counts"].values()) == 60
    assert [(epoch["restarted"], epoch["pause"]) for epoch in found["epochs"]] == [
        (False, 0),
        (False, pytest.approx(1)),
        (True, pytest.approx(90)),
        (False, pytest.approx(0)),
    ]


def test_plots_mark_a_restart_and_the_time_in_which_nothing_ran(tmp_path):
    write_a_restart(tmp_path)
    lines = axes_of(tmp_path, "Waiting, by cause").lines
    assert [line.get_xdata()[0] for line in lines] == [1.5]
    throughput = axes_of(tmp_path, "Throughput")
    assert [line.get_xdata()[0] for line in throughput.lines] == [105]
    [span] = [patch for patch in throughput.patches if hasattr(patch, "get_width")]
    assert (span.get_x(), span.get_x() + span.get_width()) == (pytest.approx(15), pytest.approx(105))


def test_a_process_that_begins_late_is_no_restart(tmp_path):
    for epoch in range(2):
        for rank, late in enumerate((0, 5)):
            began = BEGAN + 10 * epoch + late
            write_pass(tmp_path, rank, epoch, began, [{"rows": 10}] * 10, started=BEGAN + late)
    assert [epoch.restarted for epoch in epochs(read(tmp_path))] == [False, False]


def two_epochs(folder, first):
    loader = make_loader(str(folder / "x.parquet"), 10, cache=False, stats_dir=folder / "stats")
    for epoch in range(first, first + 2):
        loader.set_epoch(epoch)
        list(loader)


def test_two_runs_of_a_program_are_told_apart(ranks, tmp_path):
    pq.write_table(pa.table({"a": range(100)}), tmp_path / "x.parquet")
    for first in (0, 2):
        assert ranks(1, two_epochs, tmp_path, first) == [None]
    found = epochs(read(tmp_path / "stats"))
    assert [(epoch.number, epoch.restarted) for epoch in found] == [(0, False), (1, False), (2, True), (3, False)]


@pytest.mark.variants
@pytest.mark.parametrize(("late", "last"), [(5, None), (6, "And 1 more straggler."), (7, "And 2 more stragglers.")])
def test_of_many_stragglers_the_latest_are_named(tmp_path, late, last):
    for rank in range(16):
        write_pass(tmp_path, rank, 0, BEGAN, [{"rows": 10, "disk": max(0, rank - 15 + late) / 10}] * 4)
    page = Page(html(read(tmp_path), "run"))
    said = [text for text in page.text_of("p") if "traggler" in text]
    assert [text.split(" (")[0] for text in said] == [
        *(f"Straggler: rank {rank}" for rank in range(15, 10, -1)),
        *([last] if last else []),
    ]
    assert [row[1][0] for row in page.rows if row[0]] == [str(rank) for rank in range(16 - late, 16)]


def test_a_twentieth_of_the_epoch_makes_a_straggler(tmp_path):
    for rank, wait in enumerate((0.0, 0.04, 0.0, 0.06, 0.0)):
        write_pass(tmp_path, rank, 0, BEGAN, [{"rows": 10, "disk": wait}] * 4)
    assert epochs(read(tmp_path))[0].stragglers() == {3: pytest.approx(0.24)}


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    write_run(tmp_path, ranks=3, seconds=3)
    text = html(read(tmp_path), "a <run>")
    page = Page(text)
    assert not re.search(r"https?:|//\w", re.sub(r"base64,[\w+/=]+", "", text))
    assert "script" not in {tag for tag, _ in page.tags}
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 7
    for image in images:
        kind, _, data = image["src"].partition(",")
        drawn = b64decode(data).decode()
        assert kind == "data:image/svg+xml;base64"
        assert image["alt"]
        assert re.search(
            r"<!-- (epoch|seconds, all epochs|seconds) -->", drawn
        )  # the axis, as matplotlib notes letters
        assert set(re.findall(r"""(?:href\s*=\s*["']|src\s*=\s*["']|url\(["']?)(#|data:|.{9})""", drawn)) <= {
            "#",
            "data:",
        }
        assert not re.search(r"<script|<!ENTITY|<\?xml-stylesheet|@import|\son\w+\s*=", drawn)
    assert sum(tag == "details" for tag, _ in page.tags) == 6
    assert sum(tag == "tr" for tag, _ in page.tags) == 6 * (1 + 3) + (1 + 6)
    assert "<title>a &lt;run&gt;</title>" in text
    for epoch in summary(read(tmp_path))["epochs"]:
        assert epoch["advice"].replace("'", "&#x27;") in text


def test_what_a_file_says_is_no_markup(tmp_path):
    write_run(tmp_path, ranks=3, epochs=4, seconds=3)
    path = tmp_path / f"rank-{SLOW_RANK}.jsonl"
    host = json.dumps(lines_of(path)[0]["host"])
    path.write_text(path.read_text().replace(f'"host": {host}', '"host": "<script>alert()</script>"'))
    text = html(read(tmp_path), "run")
    assert "<script>" not in text
    assert text.count("&lt;script&gt;") == 4 + 1  # in the tables, and as a straggler


def test_metrics(tmp_path):
    write_two(tmp_path)
    prometheus.write(read(tmp_path), tmp_path / "run.prom")
    values = {}
    for family in text_string_to_metric_families((tmp_path / "run.prom").read_text()):
        for sample in family.samples:
            assert sample.labels.pop("run") == "run"
            if sample.name.endswith("_bucket"):
                continue
            labels = [label for _, label in sorted(sample.labels.items())]
            values[sample.name.removeprefix("dataload_"), *labels] = sample.value
    expected = {
        "rows_total": (12_000, 6_000),
        "batches_total": (8, 8),
        "tokens_total": (0, 0),
        "wait_seconds_count": (8, 8),
        "wait_seconds_sum": (2, 3),
        "seconds_total": (8, 8),
        "origin_requests_total": (8, 0),
        "skipped_rows_total": (0, 0),
        "epoch": (1, 1),
        "rows_per_second": (2000, 1000),
        "stall_ratio": (0, 0.5),
        "sampled_timestamp_seconds": (BEGAN + 8, BEGAN + 8),
    }
    waits = {"origin": (2, 0), "disk": (0, 2), "decode": (0, 1)}
    tiers = {"local": (120e6, 0), "cluster": (0, 40e6), "origin": (100e6, 0)}
    assert values == {
        **{(name, str(rank)): value for name, of_ranks in expected.items() for rank, value in enumerate(of_ranks)},
        **{
            ("wait_cause_seconds_total", cause, str(rank)): waits.get(cause, (0, 0))[rank]
            for cause in CAUSES
            for rank in (0, 1)
        },
        **{("bytes_total", str(rank), tier): of_ranks[rank] for tier, of_ranks in tiers.items() for rank in (0, 1)},
        ("cache_reads_total", "0", "hit"): 12,
        ("cache_reads_total", "0", "miss"): 4,
        ("cache_reads_total", "1", "hit"): 0,
        ("cache_reads_total", "1", "miss"): 0,
    }


def test_for_metrics_the_last_lines_of_each_pass_are_parsed(dataload, tmp_path, monkeypatch):
    write_run(tmp_path, ranks=2, epochs=3, seconds=40)
    for rank, torn in enumerate((3, 150)):  # after the start of the pass, and before it
        path = tmp_path / f"rank-{rank}.jsonl"
        path.write_bytes(path.read_bytes()[:-torn])
    assert read_peers(tmp_path, samples=False) == without_samples(tmp_path)
    prometheus.write(merged(read_peers(tmp_path), steady=True), tmp_path / "run.prom")
    expected, loads, parsed = (tmp_path / "run.prom").read_text(), json.loads, []
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    code, _, _ = dataload("report", tmp_path, "--metrics", tmp_path / "run.prom")
    assert code == 0
    assert (tmp_path / "run.prom").read_text() == expected
    assert len(parsed) == 2 * (3 + 2)  # a line of each pass, and in each file the empty first and the torn last one


def test_ranks_of_an_earlier_start_keep_counters_only(tmp_path):
    """Their last gauges would raise alerts for ever."""
    write_two(tmp_path)
    later = [dataclasses.replace(found, began=BEGAN + 99, world_size=1) for found in read(tmp_path) if found.rank == 0]
    prometheus.write([*read(tmp_path), *later], tmp_path / "run.prom")
    ranks = defaultdict(set)
    for family in text_string_to_metric_families((tmp_path / "run.prom").read_text()):
        for sample in family.samples:
            ranks[family.type].add(sample.labels["rank"])
    assert ranks == {"counter": {"0", "1"}, "histogram": {"0", "1"}, "gauge": {"0"}}


def test_no_series_is_in_the_files_of_two_runs(tmp_path):
    write_two(tmp_path)
    found = []
    for name in ("one.prom", "another.prom"):
        prometheus.write(read(tmp_path), tmp_path / name)
        families = text_string_to_metric_families((tmp_path / name).read_text())
        found += [(sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples]
    assert len(found) == len(set(found)) > 0


def test_metrics_are_never_half_there(tmp_path):
    write_run(tmp_path, ranks=1, epochs=1, seconds=2)
    passes, (limit, most) = read(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "run.prom").write_text("before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))  # as on a disk that is full in the middle of the file
    try:
        with pytest.raises(OSError, match="large"):
            prometheus.write(passes, tmp_path / "run.prom")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert (tmp_path / "run.prom").read_text() == "before"
    assert [path.name for path in tmp_path.glob("run*")] == ["run.prom"]


def test_the_command(dataload, tmp_path):
    run = tmp_path / "run"
    write_run(run, ranks=3, epochs=4, seconds=2)
    code, said, _ = dataload("report", run)
    assert code == 0
    *of_epochs, slow, total, waits, written = said.splitlines()
    assert of_epochs == [str(epoch.total) for epoch in epochs(read(run))]
    assert slow.strip() == (
        f"rank {SLOW_RANK} ({socket.gethostname()}) waited 0.7 s longer for data than the median rank, mostly on disk: "
        + ADVICE["disk"]
    )
    assert total.startswith("4 epochs on 3 ranks in 20 s: 23,604 rows in 8.0 s")
    assert waits.startswith("Waits for a batch: half up to ")
    assert written == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")

    (run / "report.html").unlink()
    picture, metrics = tmp_path / "run.png", tmp_path / "run.prom"
    code, said, _ = dataload("report", run, "--png", picture, "--metrics", metrics, "--json")
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "dataload_rows_total" in metrics.read_text()
    assert not (run / "report.html").exists()
    found = json.loads(said)
    assert found["written"] == [str(picture), str(metrics)]
    assert [epoch["epoch"] for epoch in found["epochs"]] == [0, 1, 2, 3]
    assert found["epochs"][3]["stragglers"] == {str(SLOW_RANK): pytest.approx(0.7)}


@pytest.mark.parametrize("folder", ["nothing", "empty"])
def test_the_command_says_what_is_missing(dataload, tmp_path, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "rank-0.jsonl").write_text("{")
    code, _, said = dataload("report", tmp_path / folder)
    assert code == 2
    assert "stats_dir" in said
    assert "log_dir" in said
    with pytest.raises(ConfigError):
        read(tmp_path / folder)


@pytest.mark.parametrize(
    ("option", "module", "package"),
    [("--png", "plots", "matplotlib"), ("--metrics", "prometheus", "prometheus_client")],
)
def test_the_command_names_the_extra(dataload, tmp_path, monkeypatch, option, module, package):
    write_run(tmp_path, ranks=1, epochs=1, seconds=1)
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"dataload.reporting.{module}", raising=False)
    code, _, said = dataload("report", tmp_path, option, tmp_path / "out")
    assert code == 2
    assert "pip install 'dataload[report]'" in said


@pytest.mark.parametrize("option", ["--html", "--png", "--metrics"])
def test_the_command_names_what_cannot_be_written(dataload, tmp_path, option):
    write_run(tmp_path, ranks=1, epochs=1, seconds=1)
    code, _, said = dataload("report", tmp_path, option, tmp_path / "missing" / "out")
    assert code == 2
    assert f"{tmp_path / 'missing' / 'out'} cannot be written: No such file" in said
