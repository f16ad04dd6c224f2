"""Workflows as their users write them, on the newest releases of other projects; `make workflows` runs them.

Each test is a workflow. Its name says which, and the first line of its docstring what must hold. A test with the mark
`limit("…")` shows what does not work, and the recipe that does. The run ends with a table of all.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig

PROJECTS = ["torch", "transformers", "tokenizers", "trl", "peft", "accelerate", "datasets", "lightning", "timm"]
PROJECTS += ["albumentations", "torchvision", "torchaudio", "torchtitan", "torchtune"]
START = "<!-- what follows is written by make workflows -->"


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "support"))
    os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "NO_ALBUMENTATIONS_UPDATE"), "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns of each fork
    config.addinivalue_line("markers", "limit(text): what does not work, and what to write instead")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Other projects keep threads, such as the monitor of tqdm, unlike this one in its own tests."""


@pytest.fixture
def cache(tmp_path: Path) -> CacheConfig:
    return CacheConfig(cache_dir=str(tmp_path / "cache"), cache_bytes="1GB")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes columns to a Parquet file and returns its path."""

    def written(columns: Any, name: str = "rows", row_group_size: int = 16) -> str:
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=row_group_size)
        return str(tmp_path / f"{name}.parquet")

    return written


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainers write where the program runs. No cache outlives a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATALOAD_CACHE_DIR", str(tmp_path / "default-cache"))
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


outcomes: dict[str, tuple[str, str, list[str]]] = {}  # of each workflow, for all its parameters


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = (yield).get_result()
    if report.when != "call" and report.passed:
        return
    name = item.originalname.removeprefix("test_")
    said = (item.obj.__doc__ or "").partition("\n")[0].rstrip(".")
    kind = item.path.stem.removeprefix("test_").replace("_", " ")
    limit = item.get_closest_marker("limit")
    works = "works" if limit is None else f"limit: {limit.args[0]}"
    outcome = works if report.passed else "skipped" if report.skipped else "**fails**"
    outcomes.setdefault(name, (kind, said, []))[2].append(outcome)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """Print the tables of workflows, and write them to the page that `WRITE_TABLE` names."""
    lines, found = list[str](), Counter[str]()
    for kind, group in groupby(sorted(outcomes.items(), key=lambda entry: entry[1][0]), lambda entry: entry[1][0]):
        lines += [f"## {kind.capitalize()}", "", "| | |", "|---|---|"]
        for name, (_, said, each) in group:
            outcome = next((one for one in each if one in ("**fails**", "skipped")), each[0])
            lines.append(f"| `{name}` | {said}{'' if outcome == 'works' else f' ({outcome})'} |")
            found[outcome.partition(":")[0]] += 1
        lines.append("")
    summary = ", ".join(f"{count} {outcome.strip('*')}" for outcome, count in found.items())
    releases = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PROJECTS)
    text = "\n".join([f"{len(outcomes)} workflows: {summary}. On {releases}.", "", *lines])
    terminalreporter.write_line(text)
    if (page := os.environ.get("WRITE_TABLE")) and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        path = Path(page)
        path.write_text(f"{path.read_text().partition(START)[0]}{START}\n\n{text}")
