"""The workloads of the benchmark are the same each time, every system delivers each row, and wrong rows are seen."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from dataload.benchmarks import batches
from dataload.benchmarks.accelerators import Clock
from dataload.benchmarks.batches import batches_of
from dataload.benchmarks.consumer import Consumer
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.suite.rank import Epoch, read_epoch
from dataload.benchmarks.suite.results import Run
from dataload.benchmarks.systems import conversion, convert
from dataload.benchmarks.systems.base import BUCKET, Setting
from dataload.benchmarks.systems.convert import made_of, seconds_of
from dataload.benchmarks.systems.registry import ENTRIES, Entry, named
from dataload.benchmarks.workloads import Truth, workloads, write

WORKLOADS = {name: workload for name, workload in workloads("tiny").items() if name != "volumes"}
OWN = [entry for entry in ENTRIES if entry.environment == "own"]
ALL = [
    *((entry, workload, 0) for entry in OWN for workload in WORKLOADS),
    *((entry, workload, 2) for entry in OWN if entry.name != "the wire" for workload in ("images", "text", "tokens")),
]
OFTEN = {("images", 0), ("table", 0), ("text", 2)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def setting_of(data: Path, origin: Origin, workload: str, cache_dir: Path, workers: int = 0) -> Setting:
    prefix = f"tiny/{workload}/parquet"
    return Setting(WORKLOADS[workload], origin.endpoint_url, prefix, "", data / BUCKET / prefix, cache_dir, workers)


def read(entry: Entry, setting: Setting, truth: Truth, epochs: int = 3) -> Run:
    """Read epochs of a system in this process."""
    run, started = Run("a dataset", entry.name, 1, 0), perf_counter()
    with closing(entry.load()(setting)) as system:
        for number in range(epochs):
            epoch = read_epoch(system, setting, number, Clock(inf), started)
            run.check(epoch, truth)
            run.epochs.append(epoch)
    return run


@pytest.mark.variants
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_workload_is_the_same_each_time_and_its_truth_that_of_its_files(workload: Any, tmp_path: Path) -> None:
    truth = write(workload, tmp_path / "one")
    assert write(workload, tmp_path / "one") == truth
    assert write(workload, tmp_path / "two") == truth
    files = sorted((tmp_path / "one").glob("*.parquet"))
    assert [path.read_bytes() for path in files] == [(tmp_path / "two" / path.name).read_bytes() for path in files]
    table = pq.read_table(tmp_path / "one")
    consumer = workload.consumer()
    shuffled = table.take(np.random.default_rng(0).permutation(len(table)))
    for batch in batches_of(shuffled, replace(workload, batch_size=37)):
        consumer.take(batch)
    assert (consumer.rows, consumer.digest, consumer.num_bytes) == (truth.rows, truth.digest, truth.decoded_bytes)
    assert truth.rows == workload.rows
    assert truth.parquet_bytes == sum(path.stat().st_size for path in files)


def test_the_digest_sees_rows_that_are_missing_doubled_or_wrong() -> None:
    rows = {"image": [b"a", b"bc", b"d"], "x": np.arange(6, dtype=np.float32).reshape(3, 2), "label": np.arange(3)}

    def digest(*indices: int, **changed: Any) -> int:
        consumer = Consumer()
        for index in indices:
            consumer.take({name: column[index : index + 1] for name, column in {**rows, **changed}.items()})
        return consumer.digest

    whole = digest(0, 1, 2)
    assert digest(2, 0, 1) == whole
    assert whole not in {digest(0, 1), digest(0, 1, 1), digest(0, 1, 2, 2)}
    assert digest(0, 1, 2, image=[b"a", b"bd", b"d"]) != whole
    assert digest(0, 1, 2, x=-rows["x"]) != whole
    swapped = rows["label"][[1, 0, 2]]
    assert digest(0, 1, 2, label=swapped, x=rows["x"][[1, 0, 2]]) != whole
    assert digest(0, 1, 2, label=swapped, image=[b"bc", b"a", b"d"]) != whole
    assert digest(0, 1, 2, x=np.roll(rows["x"], 1, axis=1)) != whole
    same = digest(0, 1, 2, label=np.zeros(3, int))
    assert digest(0, 1, 2, label=np.zeros(3, int), x=rows["x"][[1, 0, 2]]) != same
    assert digest(0, 1, 2, label=np.zeros(3, int), image=[b"bc", b"a", b"d"]) != same
    assert digest(1, 0, 2, label=np.zeros(3, int)) == same
    assert digest(0, 1, 2, 99) == whole  # an empty batch


def test_features_count_the_same_in_columns_as_in_one_array() -> None:
    columns = {"a": np.float32([1, 2, 3]), "b": np.float32([4, 5, 6])}
    label = torch.arange(3)
    apart, together = Consumer(("a", "b")), Consumer(("a", "b"))
    apart.take({**columns, "label": label})
    together.take({"x": torch.tensor(np.stack([*columns.values()])).T, "label": label})
    assert (apart.digest, apart.num_bytes, apart.order) == (together.digest, together.num_bytes, together.order)
    assert apart.num_bytes == 3 * 8 + 3 * 8


@pytest.mark.variants
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("entry", "workload", "workers"),
    [pytest.param(*each, marks=[] if each[1:] in OFTEN else pytest.mark.slow) for each in ALL],
    ids=lambda value: value.name if isinstance(value, Entry) else str(value),
)
def test_every_system_delivers_each_row_once(
    entry: Entry, workload: str, workers: int, data: Path, tmp_path: Path
) -> None:
    truth = write(WORKLOADS[workload], data / BUCKET / f"tiny/{workload}/parquet")
    with Origin(data) as origin:
        run = read(entry, setting_of(data, origin, workload, tmp_path, workers), truth)
    assert not run.problems
    times = [time for epoch in run.epochs for time in (epoch.first_batch_seconds, epoch.seconds)]
    assert times == sorted(times)
    assert times[0] > 0


def test_ranks_share_the_rows_of_an_epoch(data: Path, tmp_path: Path) -> None:
    truth = write(WORKLOADS["table"], data / BUCKET / "tiny/table/parquet")
    with Origin(data) as origin:
        for name in ("pyarrow", "rows in memory", "the wire"):
            setting = setting_of(data, origin, "table", tmp_path)
            epochs = [
                read(named(name), replace(setting, rank=rank, ranks=2), truth, epochs=1).epochs[0] for rank in (0, 1)
            ]
            assert sum(epoch.rows for epoch in epochs) == truth.rows
            assert name == "the wire" or sum(epoch.digest for epoch in epochs) % (1 << 64) == truth.digest


def epoch_of(truth: Truth, **changed: Any) -> Epoch:
    """Return a right epoch of a dataset, with changes."""
    right = {"rows": truth.rows, "num_bytes": truth.decoded_bytes, "digest": truth.digest, "order": truth.order + 1}
    times = {"seconds": 2.0, "first_batch_seconds": 1.0, "cpu_seconds": 1.0, "compute_seconds": 0, "total_seconds": 0}
    return Epoch(**right | times | changed)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"rows": 99}, "epoch 0: 99 rows of 100"),
        ({"digest": 8}, "epoch 0: not the rows of the dataset"),
        ({"order": 3}, "epoch 0: the order of an earlier epoch or of the files"),
    ],
)
def test_the_problem_of_a_wrong_epoch_has_its_number(changed: dict[str, Any], problem: str | None) -> None:
    truth = Truth(rows=100, digest=7, order=3, decoded_bytes=1000, parquet_bytes=1000)
    run = Run("a dataset", "LitData", 1, 0)
    run.check(epoch_of(truth, **changed), truth)
    assert run.problems == ([problem] if problem else [])
    again = Run("a dataset", "LitData", 1, 0, epochs=[epoch_of(truth)])
    again.check(epoch_of(truth), truth)
    assert again.problems == ["epoch 1: the order of an earlier epoch or of the files"]


def test_row_groups_have_the_size_asked_for() -> None:
    small, large = (workloads("full", megabytes)["images"] for megabytes in (10, 128))
    assert (small.rows_per_group, large.rows_per_group) == (100, 1280)
    assert small.rows == large.rows
    assert (small.groups_per_file, large.groups_per_file) == (13, 1)


def test_a_conversion_is_made_anew_when_what_it_is_made_of_changed(tmp_path: Path) -> None:
    write(WORKLOADS["tokens"], tmp_path / "parquet")
    entry, folder = named("WebDataset"), tmp_path / "webdataset"
    assert seconds_of(entry, tmp_path / "parquet", folder) is None
    told = {"seconds": 3.0, "made_of": made_of(entry, tmp_path / "parquet")}
    folder.with_suffix(".json").write_text(json.dumps(told))
    assert seconds_of(entry, tmp_path / "parquet", folder) == 3
    (tmp_path / "parquet.json").write_text("others")
    assert seconds_of(entry, tmp_path / "parquet", folder) is None


@pytest.mark.parametrize(
    ("module", "name"),
    [(conversion, "__file__"), (batches, "__file__"), (convert, "VERSIONS")],
    ids=["files", "batches", "versions"],
)
def test_a_conversion_is_made_of_its_modules_and_of_versions(
    module: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parquet.json").write_text("the truth")
    before = made_of(named("WebDataset"), tmp_path / "parquet")
    changed = tmp_path / "changed"
    changed.write_bytes(Path(getattr(module, name)).read_bytes() + b"# changed")
    monkeypatch.setattr(module, name, changed)
    assert made_of(named("WebDataset"), tmp_path / "parquet") != before
