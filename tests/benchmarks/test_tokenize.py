"""The measurement of tokenizers runs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_both_systems_read_the_same_tokens() -> None:
    command = [sys.executable, "-m", "dataload.benchmarks.text.tokenize", "--rows", "300", "--rounds", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    own, peer = (line for line in told.stdout.splitlines() if "map" in line and "│" in line)
    assert own.split()[-2] == peer.split()[-2]  # tokens
    assert "Traceback" not in told.stderr
