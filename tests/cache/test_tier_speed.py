"""The benchmark of the local tier: it takes every measurement and compares it with its target."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dataload.benchmarks.tier import AIMS, judged, measure

TINY = ["--rounds", "1", "--blobs", "2", "--blob-bytes", "131072", "--entries", "100", "--rebuilt", "3"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[typer.Typer]:
    app = typer.Typer()
    app.command()(measure)
    level = logging.getLogger("dataload").level
    yield app
    logging.getLogger("dataload").setLevel(level)


def test_every_figure_is_taken(run: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(run, [*TINY, "--folder", str(tmp_path), "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert [figure["name"] for figure in found["figures"]] == [aim.name for aim in AIMS]
    assert all(0 < figure["low"] <= figure["median"] <= figure["high"] for figure in found["figures"])
    assert found["settings"]["entries"] == 100
    assert "processor" in found["machine"]
    assert list(tmp_path.iterdir()) == []


def test_people_are_shown_a_table(run: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(run, [*TINY, "--folder", str(tmp_path)], catch_exceptions=False)
    assert "rebuilding the index" in result.stdout


def test_a_bar_is_met_or_missed() -> None:
    taken = {aim.name: [50.0, 40.0, 60.0] for aim in AIMS} | {"fill": [30.0], "lookup": [4.0, 6.0, 5.5]}
    figures = {figure.name: figure for figure in judged(taken)}
    assert (figures["warm read of blobs"].met, figures["warm read of blobs"].to_floor) == (True, 1)
    assert (figures["fill"].met, figures["fill"].bar) == (False, ">= 0.7 ×")
    assert (figures["lookup"].met, figures["lookup"].median) == (False, 5.5)
    assert (figures["read of 64 KiB"].met, figures["opening"].met) == (True, True)
    assert figures["rebuilding the index"].met is None
