"""The parts of the demo: the dataset, the model and the promises."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from dataload.benchmarks.origin import Origin
from dataload.demo import checks, dataset, model, runner, worker
from dataload.errors import DataloadError


@pytest.fixture(autouse=True)
def no_aws(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


# ---- data


def test_digits_are_the_same_bytes_each_time():
    first = dict(dataset.files(600, 3, 2))
    assert first == dict(dataset.files(600, 3, 2))
    assert first != dict(dataset.files(600, 3, 2, seed=1))
    assert len(set(first.values())) == 3


def test_files_hold_what_they_say():
    files = list(dataset.files(600, 3, 2))
    assert [name for name, _ in files] == ["digits-00.parquet", "digits-01.parquet", "digits-02.parquet"]
    tables = []
    for _, content in files:
        file = pq.ParquetFile(io.BytesIO(content))
        assert file.metadata.num_row_groups == 2
        column = file.metadata.row_group(0).column(0)
        assert column.compression == "UNCOMPRESSED"
        assert not column.is_stats_set
        assert len(content) < 1.1 * 200 * dataset.PIXELS
        tables.append(file.read())
        assert tables[-1].schema == dataset.SCHEMA
    ids = np.concatenate([table["number"].to_numpy() for table in tables])
    assert np.array_equal(ids, np.arange(600))
    labels = np.concatenate([table["label"].to_numpy() for table in tables])
    assert set(labels) == set(range(10))


def test_default_dataset_is_large_enough():
    train, _ = dataset.load_split()
    (table,) = dataset.augmented(train, 500, 1)
    a_row = len(dataset.parquet_bytes(table, 500)) / 500
    assert 190e6 < 50_000 * a_row < 220e6


def test_no_original_is_in_both_parts():
    train, held_out = dataset.load_split(seed=3)
    assert sorted([*train.originals, *held_out.originals]) == list(range(1797))
    assert len(held_out.originals) == 360
    shares = np.bincount(held_out.labels) / np.bincount(np.concatenate([train.labels, held_out.labels]))
    assert np.all(np.abs(shares - dataset.HELD_OUT) < 0.02)


def plain_images():
    """Return ten originals, one for each label, whose grey levels differ by more than the noise."""
    levels = np.arange(1, 11, dtype=np.uint8)
    return dataset.Digits(np.repeat(levels[:, None] * 20, dataset.PIXELS, axis=1), np.arange(10), np.arange(10))


def rows_of(tables):
    """Return pixels uint8[n, 64, 64] and labels int64[n]."""
    tables = list(tables)
    pixels = [table["image"].combine_chunks().values.to_numpy().reshape(-1, 64, 64) for table in tables]
    return np.concatenate(pixels), np.concatenate([table["label"].to_numpy() for table in tables])


def test_labels_belong_to_their_images_unless_shuffled():
    pixels, labels = rows_of(dataset.augmented(plain_images(), 400, 2))
    assert np.array_equal(pixels[:, 32, 32] // 20 - 1, labels)
    same_pixels, shuffled = rows_of(dataset.augmented(plain_images(), 400, 2, shuffled_labels=True))
    assert np.array_equal(same_pixels, pixels)
    assert np.array_equal(np.bincount(shuffled), np.bincount(labels))
    assert np.mean(shuffled == labels) < 0.2


def test_images_are_shifted_a_few_pixels_each_way():
    pixels, _ = rows_of(dataset.augmented(plain_images(), 400, 1))
    outside = pixels < 20  # noise on black
    assert outside[:, 0].all(axis=1).any()
    assert outside[:, -1].all(axis=1).any()
    assert not outside[:, dataset.MAX_SHIFT : -dataset.MAX_SHIFT, dataset.MAX_SHIFT : -dataset.MAX_SHIFT].any()
    assert len(np.unique(outside.reshape(400, -1), axis=0)) > 100


@pytest.mark.slow
def test_model_learns_from_a_part_of_the_data():
    torch.manual_seed(0)
    train, held_out = dataset.load_split()
    pixels, labels = rows_of(dataset.augmented(train, 8192, 1))
    images, answers = torch.from_numpy(pixels.reshape(-1, dataset.PIXELS)), torch.from_numpy(labels)
    net = model.DigitNet()
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    before = images.clone()
    for start in range(0, len(images), 128):
        optimizer.zero_grad()
        model.loss(net, {"image": images[start : start + 128], "label": answers[start : start + 128]}).backward()
        optimizer.step()
    assert torch.equal(images, before)
    assert model.accuracy(net, torch.from_numpy(held_out.images), torch.from_numpy(held_out.labels)) > 0.8


# ---- checks


EPOCH = checks.EpochTraffic(1000.0, 0, 0, 1.0, 0.1, 0.99)


@pytest.mark.parametrize(
    ("fetched", "later_requests", "whole", "kept"),
    [
        ((10, 102), 0, False, [True, True]),
        ((10, 103), 0, False, [False, True]),
        ((10, 100), 1, False, [True, False]),
        ((0, 0), 0, True, [True, True]),
        ((1, 100), 0, True, [False, True]),
    ],
)
def test_traffic_promises(fetched, later_requests, whole, kept):
    requests, num_bytes = fetched
    epochs = [
        replace(EPOCH, s3_requests=requests, s3_bytes=num_bytes),
        EPOCH,
        replace(EPOCH, s3_requests=later_requests, s3_bytes=0),
    ]
    assert [promise.kept for promise in checks.traffic_promises(epochs, 100, whole=whole)] == kept


@pytest.mark.parametrize(
    ("orders", "kept"),
    [
        ([[2, 0, 1], [1, 0, 2]], [True, True]),
        ([[2, 0, 1], [1, 0, 1]], [False, True]),
        ([[2, 0, 1], [1, 0]], [False, True]),
        ([[2, 0, 1], [2, 0, 1]], [True, False]),
        ([[2, 0, 1], [0, 1, 2]], [True, False]),  # file order is no shuffle
    ],
)
def test_order_promises(orders, kept):
    assert [promise.kept for promise in checks.order_promises([np.array(order) for order in orders], 3)] == kept


def test_the_accuracy_promise_is_reversed_for_the_control():
    assert [checks.accuracy_promise(share, shuffled_labels=False).kept for share in (0.94, 0.95)] == [False, True]
    assert [checks.accuracy_promise(share, shuffled_labels=True).kept for share in (0.2, 0.19)] == [False, True]


def test_epochs_are_differences_of_the_servers_totals():
    record = {"rows_per_second": 5.0, "hits": 3, "misses": 1, "stall_fraction": 0.5, "accuracy": 0.9}
    history = [record | {"get_requests": 7.0, "get_bytes": 70.0}, record | {"get_requests": 9.0, "get_bytes": 90.0}]
    first, second = checks.read_epochs(history, {"get_requests": 10, "get_bytes": 99})
    assert (first.s3_requests, first.s3_bytes) == (7, 70)
    assert (second.s3_requests, second.s3_bytes) == (3, 29)
    assert first.hit_rate == 0.75


def test_report_fits_a_terminal_and_names_what_broke():
    epochs = [replace(EPOCH, rows_per_second=123456.7, s3_requests=1234, s3_bytes=999_900_000)] * 3
    promises = [checks.Promise("all is well", kept=True), checks.Promise("one is not", kept=False)]
    result = checks.Result(50_000, 206_321_744, epochs, ["a", "b", "c"], promises, 30.0)
    assert result.problems == ["one is not"]
    output = io.StringIO()
    checks.show(result, Console(file=output, width=80))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "999.9 MB" in line and "123,457" in line]
    outcomes = [line.split(maxsplit=1) for line in lines if line.startswith(("kept", "BROKEN"))]
    assert outcomes == [["kept", "all is well"], ["BROKEN", "one is not"]]


# ---- processes


@pytest.mark.slow
def test_failing_ranks_are_named_and_gone(tmp_path, monkeypatch):
    """Kubeflow sets options of torchrun for a job of several nodes, which are not for these ranks."""
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_RDZV_CONF", "join_timeout=5")
    (tmp_path / "s3" / "bucket").mkdir(parents=True)
    with Origin(tmp_path / "s3") as server:
        job = worker.Job(
            url="s3://bucket/nowhere",
            storage_options=server.storage_options,
            stats_url=server.stats_url,
            cache_dir=str(tmp_path / "cache"),
            cache_bytes=10**9,
            scratch=str(tmp_path),
            epochs=1,
            batch_size=4,
            seed=0,
        )
        with pytest.raises(DataloadError, match=r"ranks failed: .*OriginNotFound: .*nowhere"):
            runner.run_ranks(job)


@pytest.fixture
def hangups():
    """Handle SIGHUP as by default, also if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
def test_nohup_keeps_the_demo_running_when_the_terminal_closes():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with runner.signals_as_exit():
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.usefixtures("hangups")
def test_a_repeated_signal_does_not_interrupt_the_clean_up():
    cleaned = False
    with pytest.raises(SystemExit) as ended, runner.signals_as_exit():
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)
            cleaned = True
    assert (ended.value.code, cleaned) == (129, True)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_launcher_that_will_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(runner, "SHUTDOWN_TIMEOUT", 0.2)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    launcher = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    with launcher.stdout:
        launcher.stdout.readline()
        with pytest.raises(KeyboardInterrupt), runner._terminated(launcher):
            raise KeyboardInterrupt
    assert launcher.returncode == -9


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "noise\n[rank1]: Traceback (most recent call last):\n[rank1]:   x: y\n[rank1]: KeyError: 'a'\n",
            "[rank1]: KeyError: 'a'",
        ),
        ("E1 api.py] failed (exitcode: -9) local_rank: 1 (pid: 5) of binary\n", "rank 1 exited with code -9"),
        ("", "torchrun exited with code 3"),
    ],
)
def test_failures_are_one_line(log, reason):
    assert runner.failure(log, 3) == reason
