"""The benchmark of the start measures processes that find all rows in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dataload.benchmarks import startup


@pytest.mark.slow
def test_the_measured_processes_fetch_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origins, fetched, seconds = list[startup.Origin](), list[int](), startup._seconds

    class Kept(startup.Origin):
        def __enter__(self) -> startup.Origin:
            origins.append(self)
            return super().__enter__()

    def counted(arguments: dict[str, Any]) -> dict[str, float]:
        found = seconds(arguments)
        fetched.append(origins[0].stats()["get_requests"])
        return found

    monkeypatch.setattr(startup, "Origin", Kept)
    monkeypatch.setattr(startup, "_seconds", counted)
    app = typer.Typer()
    app.command()(startup.main)
    done = CliRunner().invoke(app, ["--size", "tiny", "--rounds", "1", "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert fetched[0] == fetched[1] > 0
    rows = [line.split("|")[1].strip() for line in done.output.splitlines() if line.startswith("|")]
    assert rows == ["part", "---", "import dataload", "make_loader", "first batch", "all of these", "processor time"]
