"""Functions reach other processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import functools, sys
from dataload.mapping.pickling import dumps

@functools.cache
def factor():
    return 3

def times(batch):
    return {"x": batch["x"] * factor()}

sys.stdout.buffer.write(dumps(times))
"""


def test_a_function_of_the_main_program_that_calls_a_cached_one(tmp_path: Path) -> None:
    program = tmp_path / "main.py"
    program.write_text(PROGRAM)
    times = pickle.loads(subprocess.run([sys.executable, program], stdout=subprocess.PIPE, check=True).stdout)
    assert times({"x": 2}) == {"x": 6}
