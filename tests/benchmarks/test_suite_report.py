"""The report of a small fixed result: shares of a job's time, what is extrapolated, and what is only bounded."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dataload.benchmarks import run
from dataload.benchmarks.origin.behaviour import S3
from dataload.benchmarks.suite import picture, report
from dataload.benchmarks.suite.figures import Figures, Share, busy_share, utilization
from dataload.errors import ConfigError

MB = 1_000_000
DATASET = {
    "workload": "images", "rows": 1000, "parquet_bytes": 100 * MB, "decoded_bytes": 100 * MB, "batch_size": 64,
    "row_group_megabytes": 10, "rows_per_second": 500.0, "epoch_seconds": 2.0, "accelerators": 8.0,
    "accelerator": "a model", "source": "a page",
}  # fmt: skip
Result = dict[str, Any]


def run_of(system: str, *ends: float, ranks: int = 1, **changed: Any) -> Result:
    """Return a job whose epochs end after these seconds."""
    epochs = [
        {"seconds": end, "first_batch_seconds": 1.5, "cpu_seconds": end, "compute_seconds": 9.0, "total_seconds": 10.0}
        for end in ends
    ]
    right = {"dataset": "images, 10 MB", "system": system, "ranks": ranks, "round": 0, "epochs": epochs}
    right |= {"conversion_seconds": 0.0, "import_seconds": 1.0, "stopped_after": None, "problems": [], "error": ""}
    return right | {"origin_bytes": [100 * MB] * len(ends), "peak_bytes": 300 * MB * ranks} | changed


def every(seconds: float, start: float = 0.0) -> list[float]:
    """Return the ends of ten epochs of some seconds."""
    return [start + seconds * number for number in range(1, 11)]


def results_of(*runs: Result, **changed: Any) -> Result:
    usual = [
        run_of("dataload", *every(2, start=5)),
        run_of("LitData", *every(4, start=5), conversion_seconds=7.0),
        run_of("WebDataset", error="ended with 1: no such thing"),
        run_of("pyarrow", 30, 60, 90, stopped_after=100.0),
        run_of("rows in memory", stopped_after=100.0),
        run_of("dataload", *every(2, start=10), ranks=4),
    ]
    speed = {"loop_seconds": 0.5, "copied_bytes_per_second": 5e9, "written_bytes_per_second": 2e9}
    right = {
        "date": "2026-11-23", "datasets": {"images, 10 MB": DATASET}, "runs": list(runs) or usual,
        "speed": [speed, speed | {"loop_seconds": 0.25}],
        "conditions": {
            "commit": "abc1234", "versions": {"torch": "2"}, "size": "full", "origin": asdict(S3),
            "machine": {"processor": "a CPU", "cores": 2, "memory": "1 GB", "system": "Linux"},
        },
    }  # fmt: skip
    return right | changed


def line_of(text: str, start: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return line


@pytest.mark.parametrize(("epochs", "share"), [(1, 2 / 7), (3, 6 / 11), (10, 20 / 25)])
def test_start_up_counts(epochs: int, share: float) -> None:
    assert busy_share(run_of("dataload", *every(2, start=5)), DATASET, epochs) == Share(pytest.approx(share))


def test_conversion_counts() -> None:
    converted = run_of("LitData", *every(2, start=5), conversion_seconds=15.0)
    assert busy_share(converted, DATASET) == Share(pytest.approx(20 / 40))


def test_imports_can_be_left_out() -> None:
    ran = run_of("dataload", *every(2, start=5), import_seconds=5.0)
    assert busy_share(ran, DATASET, since="import") == Share(pytest.approx(1))


def test_epochs_after_the_limit_count_as_the_median_of_the_warm_ones() -> None:
    stopped = run_of("pyarrow", 50, 60, 80, 90, stopped_after=100.0)
    assert busy_share(stopped, DATASET, 3) == Share(pytest.approx(6 / 80))
    assert busy_share(stopped, DATASET) == Share(pytest.approx(20 / (90 + 6 * 10)), "extrapolated")


@pytest.mark.parametrize(
    ("ends", "epochs", "share"), [((), 1, 2 / 100), ((), 10, 20 / 118), ((60,), 1, 2 / 60), ((60,), 10, 20 / 116)]
)
def test_a_job_that_was_stopped_early_has_a_bound(ends: tuple[float, ...], epochs: int, share: float) -> None:
    kind = "measured" if epochs <= len(ends) else "below"
    assert busy_share(run_of("pyarrow", *ends, stopped_after=100.0), DATASET, epochs) == Share(
        pytest.approx(share), kind
    )


def test_a_failed_job_has_no_figures() -> None:
    failed = run_of("pyarrow", 5, 10, error="killed")
    assert busy_share(failed, DATASET, 1) is None


def test_utilization_leaves_out_start_up() -> None:
    assert utilization(run_of("dataload", *every(2, start=500))) == pytest.approx(0.9)
    assert utilization(run_of("dataload")) is None


def test_a_cell_is_a_number() -> None:
    text = report.headline(results_of())
    assert "| **dataload** | **80 %** |" in text
    assert "| LitData | 38 % |" in text
    assert "| pyarrow | *6.7 %* |" in text
    assert "| rows in memory (reference) | < 17 % |" in text
    assert "WebDataset" not in text
    for line in text.splitlines():
        for cell in line.split("|")[2:-1]:
            assert re.fullmatch(r"images|--:|\*{0,2}(< )?[\d.]+ %\*{0,2}|–", cell.strip()), line


def test_marks_of_cells_are_explained_if_there_are_any() -> None:
    assert report.KINDS in report.headline(results_of())
    assert report.KINDS not in report.headline(results_of(run_of("dataload", *every(2))))


def test_each_number_of_ranks_and_size_of_row_groups_has_a_table() -> None:
    large = DATASET | {"row_group_megabytes": 128}
    both = {"images, 10 MB": DATASET, "images, 128 MB": large}
    runs = [run_of("dataload", *every(2), ranks=4), run_of("pyarrow", *every(4), dataset="images, 128 MB")]
    text = report.headline(results_of(*runs, datasets=both))
    assert "10 epochs, 4 ranks, row groups of 10 MB:" in text
    assert "10 epochs, 1 rank, row groups of 128 MB:" in text
    assert text.count("Busy share of 10") == 2


def test_the_host_and_its_speed_stand_beside_the_figures() -> None:
    text = report.headline(results_of())
    assert "2026-11-23, commit abc1234, size full, on a CPU, 2 cores, 1 GB of memory, Linux." in text
    assert (
        "ten million loops of Python in 0.25 to 0.50 s, a memory copy at 5.0 GB/s, a file written at 2.0 GB/s" in text
    )
    assert "latency 30 ms" in text
    assert "0.1 % of requests take 1 s longer" in text


def test_details_have_all_epochs_and_what_the_job_took() -> None:
    text = report.markdown(results_of())
    assert line_of(text, "| **dataload** | 1 |") == (
        "| **dataload** | 1 | 29 % | 55 % | 80 % | 83 % | 90 % | 1.5 s | – | 1.0 × | 25 s | 300.0 MB |"
    )
    assert "| LitData | 1 | 12 % |" in text
    assert " | 7 s | " in line_of(text, "| LitData | 1 |")
    assert "8.0 × a model (a page)" in text
    assert "- images, 10 MB, WebDataset, 1 rank: ended with 1: no such thing" in text
    assert "MLPerf Storage v2.0" in text


def test_rows_that_differ_are_told_once() -> None:
    wrong = run_of("LitData", *every(4), ranks=4, problems=["epoch 0: 9 rows of 10", "epoch 1: 9 rows of 10"])
    text = report.markdown(results_of(wrong, wrong | {"round": 1}))
    assert text.count("- images, 10 MB, LitData, 4 ranks: epoch 0: 9 rows of 10") == 1


def test_rounds_count_as_their_median() -> None:
    runs = [run_of("dataload", *every(seconds), round=number) for number, seconds in enumerate((2.0, 4.0, 2.5))]
    text = report.headline(results_of(*runs))
    assert "| **dataload** | **80 %** |" in text
    assert "Medians of 3 rounds, which differ by at most 50 points." in text


def test_figures_of_fewer_rounds_are_counted() -> None:
    runs = [run_of("dataload", *every(2.0), round=number) for number in (0, 1)]
    text = report.headline(results_of(*runs, run_of("pyarrow", *every(2.0))))
    assert "Medians of 2 rounds (1 of the 2 figures are of fewer), which differ by at most 0 points." in text


def test_a_run_that_ended_early_is_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "early.json").write_text(json.dumps(results_of() | {"runs": [], "speed": []}))
    run.bench(render=tmp_path / "early.json", results=tmp_path)
    assert "Busy share of" not in capsys.readouterr().out
    assert (tmp_path / "partial.md").exists()
    assert Figures(results_of() | {"runs": []}).entries == []
    with pytest.raises(ConfigError, match="cannot be read"):
        run.bench(render=tmp_path / "nowhere.json", results=tmp_path)


def test_outside_a_clone_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(results_of()))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.bench(render=tmp_path / "run.json")
    out = capsys.readouterr().out
    assert report.headline(results_of()) in out
    assert out.endswith("--results FOLDER keeps all tables, a picture and JSON\n")
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(ConfigError, match="run it there"):
        run.bench(render=tmp_path / "run.json", publish=True)


def test_the_picture_shows_every_system(tmp_path: Path) -> None:
    picture.draw(results_of(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_takes_the_tables_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "comparison.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.put_between_marks(page, "new")
    assert page.read_text() == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no benchmark marks"):
        report.put_between_marks(page, "new")
