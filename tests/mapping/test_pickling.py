"""Functions reach other processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

PROGRAM = """
import functools, sys
from multiprocessing import get_context
from dataload.mapping.identity import identity
from dataload.mapping.pickling import dumps

@functools.cache
def factor():
    return 3

class Settings:
    @functools.cached_property
    def one(self):
        return len([self])

def times(batch):
    settings = Settings()
    return {"x": batch["x"] * factor() * settings.one * vars(settings)["one"]}

def write():
    sys.stdout.buffer.write(dumps(times, identity(times)))

if __name__ == "__main__":
    START
"""
STARTS = {"at once": "write()", "in a spawned process": "get_context('spawn').Process(target=write).start()"}


SCRIPT = """
import sys
import torch.multiprocessing
from dataload import make_dataset, make_loader

FACTOR = 3

def times(batch):
    return {"x": batch["x"] * FACTOR}

def check(rank, start, processes):
    cache = f"{sys.argv[1]}/cache-{start}-{processes}"
    mapped = make_dataset(f"{sys.argv[1]}/rows.parquet", cache_dir=cache, cache_bytes="100MB")
    mapped = mapped.map(times, processes=processes)
    if start == "decoder":
        next(iter(make_loader(mapped, 1)))
        decoder = mapped.rowstore.scheduler.decoder
        decoder.begin()
        assert decoder._process.ready.wait(200)
    method = start if start in ("spawn", "forkserver") else None
    workers = {"num_workers": 1, "transform": dict, "multiprocessing_context": method} if method else {}
    assert sum(int(batch["x"].sum()) for batch in make_loader(mapped, 64, **workers)) == 3 * sum(range(1000))

if __name__ == "__main__":
    start, processes = sys.argv[2], int(sys.argv[3]) or None
    if start == "mp.spawn":
        torch.multiprocessing.spawn(check, (start, processes))
    else:
        check(0, start, processes)
"""
SCRIPT_STARTS = [("", 1), *(pytest.param(start, 0, marks=pytest.mark.slow) for start in ("decoder", "spawn"))]
SCRIPT_STARTS += [pytest.param(start, 1, marks=pytest.mark.slow) for start in ("forkserver", "mp.spawn")]


@pytest.mark.parametrize(("start", "processes"), SCRIPT_STARTS)
def test_functions_of_a_script_run_in_other_processes_without_a_message(
    tmp_path: Path, start: str, processes: int
) -> None:
    run_script(tmp_path, start, processes)


def run_script(folder: Path, start: str, processes: int, **environment: str) -> None:
    (folder / "main.py").write_text(SCRIPT)
    pq.write_table(pa.table({"x": range(1000)}), folder / "rows.parquet", row_group_size=100)
    command = [sys.executable, folder / "main.py", folder, start, str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (0, "")


PLANTED = """
import functools
import cloudpickle.cloudpickle

make = cloudpickle.cloudpickle._make_function

@functools.wraps(make)
def renamed(code, *parts):
    return make(code.replace(co_filename="<dynamic-code>"), *parts)

cloudpickle.cloudpickle._make_function = renamed
"""


@pytest.mark.slow
@pytest.mark.parametrize(("start", "processes"), SCRIPT_STARTS)
def test_functions_reach_processes_whatever_file_cloudpickle_gives_their_code(
    tmp_path: Path, start: str, processes: int
) -> None:
    """Code of the main program counts as the source that was sent with it, and isn't looked up again."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    run_script(tmp_path, start, processes, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")


def test_a_function_of_the_main_program_that_uses_cached_ones(tmp_path: Path) -> None:
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
