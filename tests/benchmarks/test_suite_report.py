"""The report of a small fixed result: its tables, what is extrapolated, and where another system is better."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dataload.benchmarks import run
from dataload.benchmarks.origin.behaviour import S3
from dataload.benchmarks.suite import picture, report
from dataload.benchmarks.suite.figures import Cost, Figures, Spread, cost
from dataload.errors import ConfigError

MB = 1_000_000
Result = dict[str, Any]


def run_of(system: str, seconds: list[float], ranks: int = 1, megabytes: float = 100.0, **changed: Any) -> Result:
    """Return a run whose first epoch alone takes bytes from the origin."""
    epochs = [
        {"seconds": each, "first_batch_seconds": 0.5, "rows": 1000, "cpu_seconds": 1.0 + number}
        for number, each in enumerate(seconds)
    ]
    right = {"dataset": "images", "system": system, "ranks": ranks, "round": 0, "epochs": epochs, "problems": []}
    sent = {"origin_bytes": [int(megabytes * MB)] * len(epochs), "peak_bytes": 300 * MB * ranks, "error": ""}
    return right | sent | changed


def feed_of(system: str, phase: str, *tries: tuple[int, float], error: str = "") -> Result:
    measured = [{"accelerators": count, "utilization": part} for count, part in tries]
    return {"dataset": "images", "system": system, "round": 0, "phase": phase, "tries": measured, "error": error}


def results_of(**changed: Any) -> Result:
    dataset = {
        "workload": "images", "rows": 1000, "parquet_bytes": 100 * MB, "decoded_bytes": 100 * MB, "batch_size": 64,
        "row_group_megabytes": 10, "conversions": {"LitData": {"seconds": 7.0, "date": "2026-11-22"}},
        "accelerator": {"unit": "0.25 × a model", "rows_per_second": 100.0, "source": "a page"},
    }  # fmt: skip
    right = {
        "date": "2026-11-23", "commit": "abc1234", "versions": {"torch": "2"}, "size": "middle", "rounds": 1,
        "machine": {"processor": "a", "cores": 2, "memory": "1 GB", "system": "Linux"}, "ranks": [1, 4],
        "behaviour": asdict(S3), "written_bytes_per_second": [2e9], "datasets": {"images": dataset},
        "runs": [
            run_of("dataload", [3.0, 1.0, 1.0, 1.0]),
            run_of("dataload", [4.0, 2.0, 2.0], ranks=4),
            run_of("LitData", [5.0] + [2.0] * 9),
            run_of("LitData", [5.0] + [2.0] * 9, ranks=4, megabytes=250),
            run_of("WebDataset", [], error="ended with 1: no such thing"),
            run_of("rows in memory", [9.0] + [0.1] * 9),
        ],
        "feeds": [
            feed_of("dataload", "cold", (30, 0.5), (17, 0.95)), feed_of("dataload", "warm", (300, 0.97)),
            feed_of("LitData", "cold", (20, 0.91), (22, 0.85)), feed_of("LitData", "warm", (15, 0.6), (9, 0.7)),
            feed_of("WebDataset", "cold", error="ended with 1: no such thing"),
        ],
    }  # fmt: skip
    return right | changed


def line_of(text: str, start: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_the_cost_of_measured_epochs_is_their_sum() -> None:
    measured = run_of("LitData", [5.0, 2.0, 3.0])
    assert cost(measured, 1) == Cost(5, 100 * MB, None)
    assert cost(measured, 3) == Cost(10, 100 * MB, None)


def test_an_epoch_that_was_not_measured_costs_the_median_of_the_warm_ones() -> None:
    measured = run_of("pyarrow", [5.0, 2.0, 3.0, 9.0]) | {"origin_bytes": [10, 20, 30, 40]}
    assert cost(measured, 10) == Cost(19 + 6 * 3, 40 + 6 * 10, 4)


@pytest.mark.parametrize("seconds", [[], [5.0]])
def test_nothing_follows_from_a_cold_epoch_alone(seconds: list[float]) -> None:
    assert cost(run_of("LitData", seconds), 10) is None


def test_the_tables_say_how_many_accelerators_are_busy() -> None:
    text = report.markdown(results_of())
    assert "| **dataload** | 17 (0.5 s) | ≥ 300 |" in text
    assert "| LitData | 20 (0.5 s) | < 9 |" in text
    assert "| *10 Gbit/s allow* | 139 |" in text  # 1.25 GB/s of rows of 100 kB at 100 rows/s, of which 90 %


def test_the_headline_has_the_cost_of_ten_epochs() -> None:
    text = report.headline(results_of())
    assert "| **dataload** | ≈ 12.0 s | 1.0 × | 1.2 GB |" in text
    assert "| LitData | 23 s + 7.0 s | 2.5 × | 1.2 GB |" in text
    assert report.CONVERTED in text
    assert text.count("commit abc1234") == 1
    assert "30 ms, 90 MB/s a connection, 10 Gbit/s a host, 0.1 % of requests delayed by 1 s" in text


def test_extrapolated_cells_are_explained_if_there_are_any() -> None:
    assert report.EXTRAPOLATED in report.markdown(results_of())
    measured = results_of(runs=[run_of("dataload", [3.0] + [1.0] * 9), run_of("LitData", [5.0] + [2.0] * 9)])
    assert report.EXTRAPOLATED not in report.markdown(measured)
    assert report.ABOUT in report.headline(results_of())
    assert "≈" not in report.headline(measured)
    assert "measured" not in line_of(report.markdown(measured), "| **dataload** | 1 |")


def test_where_another_system_is_better_a_sentence_says_so() -> None:
    text = report.markdown(results_of())
    assert "- images, cold: LitData 20; dataload 17" in text
    assert "- images, seconds: rows in memory (reference) 9.9 s; dataload 12.0 s" in text
    short = report.headline(results_of())
    assert "Another system takes fewer seconds: images (rows in memory (reference) 9.9 s; dataload 12.0 s)." in short
    assert "Another system keeps more accelerators busy in the first epoch: images (LitData 20; dataload 17)." in short
    assert "in later epochs" not in short
    alone = results_of(
        runs=[run_of("dataload", [1.0] * 10), run_of("LitData", [2.0] * 10)],
        feeds=[feed_of("dataload", "cold", (9, 0.9)), feed_of("LitData", "cold", (9, 0.9))],
    )
    text = report.markdown(alone)
    assert "Another system" not in report.headline(alone)
    assert "No system keeps more accelerators busy than dataload." in text
    assert "No system takes less of any of these than dataload." in text


def fed_cold(*tries: tuple[str, list[tuple[int, float]]]) -> Result:
    return results_of(feeds=[feed_of(system, "cold", *measured) for system, measured in tries])


@pytest.mark.parametrize(
    ("mine", "others", "line"),
    [
        ([(18, 0.9), (20, 0.5)], [(46, 0.5)], "- images, cold: dataload 18; undecided: LitData < 46"),
        ([(18, 0.9), (20, 0.5)], [(18, 0.5)], "No system keeps more accelerators busy than dataload."),
        ([(60, 0.5)], [(20, 0.9), (21, 0.5)], "- images, cold: dataload < 60; undecided: LitData 20"),
        ([(60, 0.5)], [(60, 0.9)], "- images, cold: LitData ≥ 60; dataload < 60"),
        ([(1, 0.5)], [(1, 0.9), (2, 0.5)], "- images, cold: LitData 1; dataload 0"),
    ],
)
def test_a_search_that_found_no_busy_number_decides_only_what_it_shows(
    mine: list[tuple[int, float]], others: list[tuple[int, float]], line: str
) -> None:
    assert line in report.markdown(fed_cold(("dataload", mine), ("LitData", others))).splitlines()


def test_the_headline_says_where_the_comparison_is_undecided() -> None:
    undecided = fed_cold(("dataload", [(18, 0.9), (20, 0.5)]), ("LitData", [(46, 0.5)]))
    assert "in the first epoch: images (undecided: LitData < 46; dataload 18)." in report.headline(undecided)


def test_a_round_without_a_busy_number_takes_no_part_in_the_median() -> None:
    rounds = fed_cold(("dataload", [(40, 0.9), (41, 0.5)]), ("dataload", [(46, 0.5)]))
    assert Figures(rounds).fed("images", "dataload", "cold") == Spread(40, 40, 40)
    never = fed_cold(("dataload", [(60, 0.5)]), ("dataload", [(46, 0.5)]))
    assert Figures(never).fed("images", "dataload", "cold") == Spread(60, 60, 60, bound="<")


def test_the_rate_of_a_first_epoch_counts_the_wait_for_its_first_batch() -> None:
    cold = run_of("dataload", [2.0])
    cold["epochs"][0]["first_batch_seconds"] = 1.9
    rate = Figures(results_of(runs=[cold])).rate("images", "dataload", "cold")
    assert rate == Spread(500, 500, 500)


def test_a_number_of_ranks_that_was_not_run_has_one_line() -> None:
    missing = [run_of(system, [], ranks=2) | {"error": "not run: late"} for system in ("dataload", "LitData")]
    text = report.markdown(results_of(runs=[*results_of()["runs"], *missing], ranks=[1, 2, 4]))
    assert "2 ranks: not run." in text
    assert "| LitData | 2 |" not in text
    assert "| LitData | 4 |" in text


def test_a_system_that_failed_has_its_error_in_its_cells() -> None:
    text = report.markdown(results_of())
    assert "| WebDataset | 1 |  | ended with 1: no such thing |" in text
    assert "| WebDataset | ended with 1: no such thing | – |" in text
    assert "| WebDataset | ended with 1: no such thing | – | – |" in report.headline(results_of())


@pytest.mark.parametrize(
    ("seconds", "error", "short", "whole"),
    [
        ([5.0, 2.0], "no answer within 72 s", "≈ 23 s + 7.0 s", "5.0 s | 9.0 s, 2 measured | 23 s, 2 measured"),
        ([50.0], "no answer within 72 s", "one epoch: 50 s + 7.0 s", "50 s | stopped | stopped"),
        ([], "no answer within 72 s", "no answer within 72 s", "no answer within 72 s |  | "),
        ([5.0, 2.0], "ended with 1: killed", "ended with 1: killed", "ended with 1: killed |  | "),
    ],
)
def test_a_system_that_the_benchmark_stopped_has_the_figures_of_its_epochs(
    seconds: list[float], error: str, short: str, whole: str
) -> None:
    stopped = run_of("LitData", seconds, error=error)
    unfed = feed_of("LitData", "warm", error=error)
    results = results_of(runs=[run_of("dataload", [1.0] * 10), stopped], feeds=[unfed])
    assert f"| LitData | {short} |" in report.headline(results)
    assert f" | {whole} |" in line_of(report.markdown(results), "| LitData | 1 |")
    assert (report.STOPPED_EARLY in report.headline(results)) == (len(seconds) < 2 and "answer" in error)
    assert Figures(results).feed_error("images", "LitData", "warm") == (
        "stopped" if seconds and "answer" in error else error
    )


def test_the_report_has_conversions_settings_units_and_wrong_rows() -> None:
    wrong = run_of("LitData", [5.0, 2.0, 2.0], ranks=4, problems=["epoch 0: 9 rows of 10", "epoch 1: 9 rows of 10"])
    text = report.markdown(results_of(runs=[*results_of()["runs"], wrong]))
    assert "| LitData | 1 | 7.0 s | 5.0 s | 9.0 s | 23 s | 1.0 × | 300.0 MB |" in text
    assert "- images, LitData, 4 ranks: epoch 0: 9 rows of 10" in text
    assert "0.25 × a model, 100 rows/s (a page)" in text
    assert "tar shards" in line_of(text, "| WebDataset | files")
    assert "a file was written at 2.0 GB/s or more" in text
    assert "Conversions were measured on 2026-11-22." in text
    assert text.splitlines()[2].startswith("2026-11-23, commit abc1234")


def test_rounds_are_shown_as_a_median_with_a_range() -> None:
    runs = [run_of("dataload", [seconds] * 10) | {"round": number} for number, seconds in enumerate((1.0, 3.0, 1.5))]
    assert "| 15.0 s (10.0 s–30 s) |" in report.headline(results_of(runs=runs))


def test_an_unlimited_origin_has_no_bound_by_the_wire() -> None:
    text = report.markdown(results_of(behaviour=asdict(type(S3)())))
    assert "an origin as fast as this machine" in text
    assert "10 Gbit/s allow" not in text


def test_a_run_that_ended_early_is_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "early.json").write_text(json.dumps(results_of(runs=[], feeds=[])))
    run.bench(render=tmp_path / "early.json", results=tmp_path)
    assert "10 epochs" not in capsys.readouterr().out
    assert (tmp_path / "partial.md").exists()
    assert Figures(results_of(runs=[])).systems == []
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


def test_stored_pixels_are_explained_only_beside_that_workload() -> None:
    results = results_of()
    assert "stored pixels" not in report.markdown(results)
    results["datasets"]["images"]["workload"] = "pixels"
    assert "stored pixels" in report.markdown(results)


def test_a_figure_of_some_datasets_names_them() -> None:
    """Otherwise systems that were measured with fewer datasets would look better or worse than they are."""
    results = results_of()
    both = results["datasets"] | {"tokens": results["datasets"]["images"] | {"workload": "tokens"}}
    tokens = run_of("dataload", [4.0, 2.0, 2.0], ranks=4, megabytes=200) | {"dataset": "tokens"}
    text = report.headline(results | {"datasets": both, "runs": [*results["runs"], tokens]})
    assert line_of(text, "| **dataload**").endswith("| 1.0 ×–2.0 × | 1.2 GB |")
    assert line_of(text, "| LitData").endswith("| 2.5 × (images) | 1.2 GB (images) |")
