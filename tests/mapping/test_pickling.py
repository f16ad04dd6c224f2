"""Functions reach other processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import functools, sys
from multiprocessing import get_context
from dataload.mapping.identity import identity
from dataload.mapping.pickling import dumps

@functools.cache
def factor():
    return 3

def times(batch):
    return {"x": batch["x"] * factor()}

def write():
    sys.stdout.buffer.write(dumps(times, identity(times)))

if __name__ == "__main__":
    START
"""
STARTS = {"at once": "write()", "in a spawned process": "get_context('spawn').Process(target=write).start()"}


def test_a_function_of_the_main_program_that_calls_a_cached_one(tmp_path: Path) -> None:
    """In a process that multiprocessing has spawned, the main program has another name."""
    found = set()
    for start in STARTS.values():
        program = tmp_path / "main.py"
        program.write_text(PROGRAM.replace("START", start))
        sent = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, check=True).stdout
        times, its_identity = pickle.loads(sent)
        assert times({"x": 2}) == {"x": 6}
        found.add(its_identity)
    assert len(found) == 1
