"""The benchmark suite counts every row, detects slower and wrong systems, and reports every run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from dataload.benchmarks import render, suite
from dataload.benchmarks.batches import batches_of
from dataload.benchmarks.consumer import Consumer
from dataload.benchmarks.machine.hot_memory import HotMemory
from dataload.benchmarks.measure import Limits, Measured, Measurement
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.suite import Suite
from dataload.benchmarks.summary import compare, summarise
from dataload.benchmarks.systems.base import BUCKET, Setting
from dataload.benchmarks.systems.convert import made_of, price_of
from dataload.benchmarks.systems.ours import SLEEP_SECONDS
from dataload.benchmarks.systems.registry import ENTRIES, Entry, named
from dataload.benchmarks.workloads import Truth, workloads, write
from dataload.errors import ConfigError

WORKLOADS = workloads("tiny")
SHORT = Limits(60, 0.0001, 60)
OWN = [entry for entry in ENTRIES if entry.environment == "own" and entry.kind != "check"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def setting_of(data: Path, origin: Origin | None, workload: str, cache_dir: Path, workers: int = 0) -> Setting:
    prefix = f"tiny/{workload}/parquet"
    files = data / BUCKET / prefix
    endpoint_url = origin.endpoint_url if origin else ""
    return Setting(WORKLOADS[workload], endpoint_url, prefix, "", files, cache_dir, workers)


def measure(entry: Entry, setting: Setting, truth: Truth, limits: Limits = SHORT) -> Measured:
    measurement = Measurement(entry, setting, truth, limits)
    measurement.run()
    return measurement.measured


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


def test_features_count_the_same_in_columns_as_in_one_array() -> None:
    columns = {"a": np.float32([1, 2, 3]), "b": np.float32([4, 5, 6])}
    label = torch.arange(3)
    apart, together = Consumer(("a", "b")), Consumer(("a", "b"))
    apart.take({**columns, "label": label})
    together.take({"x": torch.tensor(np.stack([*columns.values()])).T, "label": label})
    assert (apart.digest, apart.num_bytes, apart.order) == (together.digest, together.num_bytes, together.order)
    assert apart.num_bytes == 3 * 8 + 3 * 8


# fsspec's blockcache and the datasets of pyarrow leave files open. Two processes that create a file of the blockcache
# at the same time may corrupt it ("mmap length is greater …").
PARALLEL = [entry for entry in OWN if entry.parallel and "blockcache" not in entry.name]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("entry", "workload", "workers"),
    [
        *((entry, workload, 0) for entry in OWN for workload in WORKLOADS),
        *((entry, workload, 2) for entry in OWN if entry.parallel for workload in ("images", "text", "tokens")),
    ],
    ids=lambda value: value.name if isinstance(value, Entry) else str(value),
)
def test_every_system_delivers_each_row_once(
    entry: Entry, workload: str, workers: int, data: Path, tmp_path: Path
) -> None:
    truth = write(WORKLOADS[workload], data / BUCKET / f"tiny/{workload}/parquet")
    with Origin(data) as origin:
        setting = setting_of(data, origin, workload, tmp_path, workers)
        measured = measure(entry, setting, truth)
    assert not measured.problems
    assert measured.phases.keys() == set(entry.phases)
    assert "warm" not in entry.phases or measured.phases["warm"].epochs == 2
    for phase in measured.phases.values():
        assert phase.rows == (phase.epochs * truth.rows if entry.whole else WORKLOADS[workload].batch_size) > 0
        assert not phase.cut
        assert 0 < phase.first_batch_seconds <= phase.seconds


class _Fake:
    """A system that delivers `rows` of the table workload, in the order of the files or shuffled by epoch."""

    def __init__(self, setting: Setting, rows: slice, *, shuffled: bool) -> None:
        self._table = pq.read_table(setting.files)
        self._rows, self._shuffled, self._workload = rows, shuffled, setting.workload

    def epoch(self, number: int) -> Iterator[Any]:
        order = (
            np.random.default_rng(number).permutation(len(self._table))
            if self._shuffled
            else np.arange(len(self._table))
        )
        yield from batches_of(self._table.take(order[self._rows]), self._workload)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("rows", "shuffled", "problem"),
    [
        (slice(None), True, None),
        (slice(1, None), True, "epoch 0: 24999 rows of 25000"),
        (slice(None), False, "epoch 0: the order of an earlier epoch or of the files"),
    ],
)
def test_what_is_wrong_with_an_epoch_is_said(
    rows: slice, shuffled: bool, problem: str | None, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = write(WORKLOADS["table"], data / BUCKET / "tiny/table/parquet")
    monkeypatch.setattr(Entry, "load", lambda _: lambda setting: _Fake(setting, rows, shuffled=shuffled))
    with Origin(data) as origin:
        setting = setting_of(data, origin, "table", tmp_path)
        measured = measure(named("DataLoader over rows"), setting, truth)
        wrong = measure(named("DataLoader over rows"), setting, replace(truth, digest=1))
    assert (problem in measured.problems) if problem else not measured.problems
    assert any("rows" in problem for problem in wrong.problems)


def test_a_phase_that_takes_too_long_is_cut_and_says_so(data: Path, tmp_path: Path) -> None:
    truth = write(WORKLOADS["table"], data / BUCKET / "tiny/table/parquet")
    with Origin(data) as origin:
        setting = setting_of(data, origin, "table", tmp_path)
        measured = measure(named("DataLoader over rows"), setting, truth, Limits(0, 0, 0))
    assert measured.phases.keys() == {"cold"}, "an epoch after a cut one is not warm"
    assert measured.phases["cold"].cut
    assert measured.phases["cold"].rows == WORKLOADS["table"].batch_size
    assert not measured.problems


def test_a_slowed_loader_is_slower_by_its_sleep(data: Path, tmp_path: Path) -> None:
    """The clock is only used for a lower bound: a sleep does not end early."""
    truth = write(WORKLOADS["tokens"], data / BUCKET / "tiny/tokens/parquet")
    with Origin(data) as origin:
        setting = setting_of(data, origin, "tokens", tmp_path)
        measured = measure(named("dataload, slowed"), setting, truth)
    warm = measured.phases["warm"]
    batches = -(-truth.rows // WORKLOADS["tokens"].batch_size)
    assert warm.seconds >= warm.epochs * batches * SLEEP_SECONDS


def test_the_origin_counts_for_each_phase_what_that_phase_fetched(data: Path, tmp_path: Path) -> None:
    truth = write(WORKLOADS["images"], data / BUCKET / "tiny/images/parquet")
    with Origin(data) as origin:
        setting = setting_of(data, origin, "images", tmp_path)
        floor = measure(named("floor: ranged GETs"), setting, truth).phases["cold"]
        ours = measure(named("dataload"), setting, truth).phases
    assert floor.origin_bytes == truth.parquet_bytes
    assert floor.duplicate_gets == 0
    assert truth.parquet_bytes <= ours["cold"].origin_bytes <= 1.02 * truth.parquet_bytes
    assert ours["warm"].origin_bytes == 0


def suite_of(folder: Path, *names: str, **changed: Any) -> Suite:
    given: dict[str, Any] = {
        "size": "tiny",
        "workloads": ("images",),
        "entries": tuple(named(name) for name in names),
        "workers": (0,),
        "rounds": 2,
        "limits": Limits(30, 0.0001, 30),
        "wire": False,
        "folder": folder,
        "peers_python": None,
    }
    return Suite(**given | changed)


@pytest.mark.slow
def test_a_suite_takes_turns_and_leaves_no_system_out(data: Path) -> None:
    said: list[str] = []
    names = ["dataload", "LitData", "floor: gather"]
    with HotMemory(data, pause=0, control_bytes=1 << 20, least=0) as memory:
        results = suite_of(data, *names, memory=memory).run(said.append)
    json.dumps(results)
    assert len(results["written_bytes_per_second"]) == 2
    turned = [*names[1:], *names[:1]]
    assert [run["system"] for run in results["runs"]] == [*names, *turned]
    assert [run["round"] for run in results["runs"]] == [0] * len(names) + [1] * len(names)
    errors = {run["system"]: run["error"] for run in results["runs"] if "error" in run}
    assert errors == {"LitData": "not run: its environment does not exist (make peers)"}
    assert all(run["peak_memory_bytes"] > 10_000_000 for run in results["runs"] if "error" not in run)
    assert not [path for path in data.iterdir() if path.name not in {BUCKET, "data"}]

    results |= {
        "date": "today",
        "commit": "0",
        "versions": {"torch": "2"},
        "machine": {"processor": "a", "cores": 2, "memory": "1 GB", "system": "Linux"},
    }
    text = render.markdown(results)
    assert "its environment does not exist" in text
    assert "a file was written at" in text
    assert all(f"| {name}" in text for name in names)
    assert "| images | warm epochs |" in render.headline(results)
    render.plot(results, data / "plot.png")
    assert (data / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_an_accelerator_is_busy_as_long_as_it_does_not_wait(data: Path, tmp_path: Path) -> None:
    class Waiting(_Fake):
        def epoch(self, number: int) -> Iterator[Any]:
            for batch in super().epoch(number):
                sleep(3 * 0.001)
                yield batch

    workload = WORKLOADS["table"]
    truth = write(workload, data / BUCKET / "tiny/table/parquet")
    with Origin(data) as origin, pytest.MonkeyPatch.context() as patch:
        setting = replace(setting_of(data, origin, "table", tmp_path), step_seconds=0.001)
        patch.setattr(Entry, "load", lambda _: lambda setting: Waiting(setting, slice(None), shuffled=True))
        cold = measure(named("DataLoader over rows"), setting, truth).phases["cold"]
    assert cold.step_seconds == pytest.approx(-(-truth.rows // workload.batch_size) * 0.001)
    run = {"workload": "table", "system": "DataLoader over rows", "workers": 0, "round": 0}
    phases = {"cold": asdict(cold)}
    [entry] = summarise({"runs": [run | {"phases": phases}], "workloads": {"table": asdict(truth)}})
    assert 0 < entry["figures"]["cold_busy"]["median"] < 25


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended with -9: no output"),
        ("raise SystemExit('no such thing')", "ended with 1: no such thing"),
    ],
)
def test_a_measurement_that_dies_is_reported(program: str, error: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    python.chmod(0o700)
    results = suite_of(tmp_path, "LitData", peers_python=python, rounds=1).run(lambda _: None)
    assert [run["error"] for run in results["runs"]] == [f"not converted: {error.partition(': ')[2]}"]
    results = suite_of(tmp_path, "Hugging Face, streaming", peers_python=python, rounds=1).run(lambda _: None)
    assert [run["error"] for run in results["runs"]] == [error]


def result_of(system: str, *rates: float, workers: int = 0, problem: str = "") -> list[dict[str, Any]]:
    phase = {
        "rows": 100,
        "num_bytes": 100,
        "first_batch_seconds": 1.0,
        "cpu_seconds": 1.0,
        "epochs": 1,
        "origin_bytes": 0,
        "cut": False,
    }
    return [
        {
            "workload": "images",
            "system": system,
            "workers": workers,
            "round": number,
            "phases": {"warm": phase | {"seconds": 100 / rate}},
            "problems": [problem] if problem else [],
            "peak_memory_bytes": 1,
        }
        for number, rate in enumerate(rates)
    ]


TRUTH = asdict(Truth(100, 0, 0, 1000, 1000))


def test_a_summary_gives_medians_ranges_and_ratios() -> None:
    runs = [
        *result_of("dataload", 30, 10, 20),
        *result_of("LitData", 5, 4, 10),
        *result_of("WebDataset", 7, 8, 100, problem="epoch 0: 3 rows of 100"),
        *result_of("MosaicML Streaming", 50, 50, 50, workers=2),
        *result_of("floor: gather", 60, 40, 40),
    ]
    [ours, litdata, *_] = summarise({"runs": runs, "workloads": {"images": TRUTH}})
    rate = ours["figures"]["warm_rate"]
    assert (rate["low"], rate["median"], rate["high"]) == pytest.approx((10, 20, 30))
    assert rate["to_peer"] == pytest.approx({"low": 2, "median": 2.5, "high": 6})
    assert rate["to_floor"] == pytest.approx({"low": 0.25, "median": 0.5, "high": 0.5})
    assert litdata["figures"]["warm_rate"]["to_peer"]["median"] == pytest.approx(1)


def test_two_runs_agree_where_their_ranges_overlap() -> None:
    def run(*rates: float, size: str = "full") -> dict[str, Any]:
        runs = result_of("dataload", *rates)
        return {"runs": runs, "workloads": {"images": TRUTH}, "rounds": len(rates), "size": size}

    both = compare(run(10, 20), run(20, 30))
    assert (both.shared, both.apart, both.one_sided) == (4, [], [])
    assert both.by_chance == pytest.approx(4 / 3)  # 2 of the 6 ways to split 4 values give disjoint ranges
    both = compare(run(10, 20), run(21, 30))
    assert (both.shared, len(both.apart)) == (4, 1)
    assert "warm_rate  10–20 against 21–30" in both.apart[0]
    with pytest.raises(ConfigError, match="differ in size"):
        compare(run(10), run(10, size="small"))


def test_two_runs_on_unlike_days_agree_by_their_ratios() -> None:
    def run(*rates: float, floor: float) -> dict[str, Any]:
        floors = result_of("floor: gather", *[floor] * len(rates))
        return {"runs": [*result_of("dataload", *rates), *floors], "workloads": {"images": TRUTH}, "rounds": 2}

    both = compare(run(10, 20, floor=20), run(100, 200, floor=200))
    assert not [said for said in both.apart if "warm_rate to_floor" in said]
    assert [
        said for said in compare(run(10, 20, floor=20), run(10, 20, floor=200)).apart if "warm_rate to_floor" in said
    ]


def test_a_warm_phase_that_fails_loses_no_cold_one(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(_Fake):
        def epoch(self, number: int) -> Iterator[Any]:
            if number:
                raise RuntimeError("no more")
            return super().epoch(number)

    truth = write(WORKLOADS["table"], data / BUCKET / "tiny/table/parquet")
    monkeypatch.setattr(Entry, "load", lambda _: lambda setting: Failing(setting, slice(None), shuffled=True))
    with Origin(data) as origin:
        setting = setting_of(data, origin, "table", tmp_path)
        measurement = Measurement(named("DataLoader over rows"), setting, truth, SHORT)
        with pytest.raises(RuntimeError, match="no more"):
            measurement.run()
    assert measurement.measured.phases.keys() == {"cold"}


def test_a_conversion_is_made_anew_when_what_it_is_made_of_changed(tmp_path: Path) -> None:
    write(WORKLOADS["tokens"], tmp_path / "parquet")
    entry, folder = named("WebDataset"), tmp_path / "webdataset"
    assert price_of(entry, tmp_path / "parquet", folder) is None
    folder.with_suffix(".json").write_text(json.dumps({"made_of": made_of(entry, tmp_path / "parquet")}))
    assert price_of(entry, tmp_path / "parquet", folder)
    (tmp_path / "parquet.json").write_text("others")
    assert price_of(entry, tmp_path / "parquet", folder) is None


def test_when_the_time_is_over_the_rest_is_not_run_and_says_so(data: Path) -> None:
    results = suite_of(data, "dataload", rounds=1, seconds=0).run(lambda _: None)
    assert [run["error"] for run in results["runs"]] == ["not run: the limit of 0 s was reached"]


def test_a_measurement_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "PATIENCE_SECONDS", 0.1)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o700)
    only = {"peers_python": python, "rounds": 1, "limits": Limits(0, 0, 0)}
    results = suite_of(tmp_path, "Hugging Face, streaming", **only).run(lambda _: None)
    assert results["runs"][0]["error"].startswith("no answer within")


def test_readme_takes_the_table_between_its_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n")
    render.into_readme(readme, "new")
    assert readme.read_text() == f"before\n{render.BEGIN}\n\nnew\n\n{render.END}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="no benchmark marks"):
        render.into_readme(readme, "new")


def test_a_report_tells_who_fetches_stored_pixels_only_beside_that_workload() -> None:
    settings = dict.fromkeys(("date", "commit", "size", "rounds"), "0") | {"wire": False, "step_seconds": 0, "runs": []}
    machine = dict.fromkeys(("processor", "cores", "memory", "system"), "0")
    for workload, is_told in (("pixels", True), ("images", False)):
        found = {"machine": machine, "versions": {}, "workloads": {workload: TRUTH | {"conversions": {}}}}
        assert ("stored pixels" in render.markdown(settings | found)) is is_told


def test_a_system_that_delivers_nothing_ends_no_report(tmp_path: Path) -> None:
    [run] = result_of("LitData", 5, problem="epoch 0: 0 rows of 100")
    run["phases"]["warm"]["rows"] = 0
    results = {"runs": [run, *result_of("dataload", 7)], "workloads": {"images": TRUTH}}
    assert "warm_rate" not in summarise(results)[0]["figures"]
    render.plot(results, tmp_path / "plot.png")  # the results have no cold epochs


def test_who_delivers_wrong_rows_is_nobodys_best(tmp_path: Path) -> None:
    runs = [
        *result_of("dataload", 7),
        *result_of("LitData", 5),
        *result_of("LitData", 999, workers=2, problem="epoch 0: 3 rows of 100"),
    ]
    headline = render.headline({"runs": runs, "workloads": {"images": TRUTH}})
    assert "| 5 | LitData |" in headline
    assert "999" not in headline
