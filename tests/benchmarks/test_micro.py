"""Each benchmark of `make micro` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MICRO = Path(__file__).parents[2] / "benchmarks/micro"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", sorted(path.name for path in MICRO.glob("test_*.py")))
def test_a_tiny_run(file: str) -> None:
    options = ["--size", "tiny", "--benchmark-disable", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", MICRO / file, *options], cwd=MICRO.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
