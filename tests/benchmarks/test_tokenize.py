"""The measurement of tokenizers runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dataload.benchmarks.text.tokenize import SYSTEMS


@pytest.mark.slow
def test_all_systems_read_the_same_tokens() -> None:
    command = [sys.executable, "-m", "dataload.benchmarks.text.tokenize", "--rows", "300", "--rounds", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    last_cells = [line.split("│")[-2].strip() for line in told.stdout.splitlines() if line.startswith("│")]
    tokens = list(filter(None, last_cells))  # The name of a system may take several lines.
    assert len(tokens) == len(SYSTEMS)
    assert len(set(tokens)) == 1
    assert "Traceback" not in told.stderr
