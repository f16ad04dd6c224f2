"""Functions of the cells of a notebook reach other processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

CELLS = """
import linecache, os, sys, threading

def run(number, text):
    name = f"/tmp/ipykernel_1/{number}.py"  # Such a name is no file.
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec"), vars(sys.modules["__main__"]))

run(1, '''
FACTOR = 3

def helper(values):
    return values * FACTOR
''')
run(2, '''
def times(batch):  # a comment
    return {"x": helper(batch["x"]), "pid": [os.getpid()] * len(batch["x"])}
''')
"""

MAPPED = """
from dataload import make_dataset, make_loader
mapped = make_dataset(sys.argv[1], cache_dir=sys.argv[2], cache_bytes="100MB").map(times, processes=1)
rows = [(x, pid) for batch in make_loader(mapped, 10) for x, pid in zip(batch["x"].tolist(), batch["pid"].tolist())]
print(sorted(x for x, _ in rows) == [*range(0, 300, 3)], os.getpid() in {pid for _, pid in rows})
"""

SENT = """
import pickle
from dataload.mapping.stage import UserFunction
function = UserFunction.of(times, None)
sys.stdout.write(f"{function.digest} {pickle.dumps(function).hex()}")
"""

RECEIVED = """
import pickle, sys
function = pickle.loads(bytes.fromhex(sys.argv[1]))
print(function.digest, function.is_same)
"""


def output(program: str, *arguments: str | Path) -> list[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def test_other_statements_of_a_cell_are_not_sent() -> None:
    cell = 'run(3, \'TOKEN = "s3cr3t"\\ndef times(batch):\\n    return batch\\nprint(TOKEN[:0], end="")\\n\')\n'
    check = "print(b's3cr3t' in pickle.dumps(function), b'def times' in pickle.dumps(function))"
    assert output(CELLS + cell + SENT.replace("sys.stdout.write", "str") + check) == ["False", "True"]


@pytest.mark.slow
def test_a_process_maps_with_a_function_of_a_cell(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "rows.parquet", row_group_size=50)
    assert output(CELLS + MAPPED, tmp_path / "rows.parquet", tmp_path / "cache") == ["True", "False"]


@pytest.mark.slow
def test_another_process_knows_the_source_of_a_cell() -> None:
    digest, sent = output(CELLS + SENT)
    assert output(RECEIVED, sent) == [digest, "True"]
