"""A workload in a system's own format, made once, in a process of its own: free, with its price noted.

Started as `python -m dataload.benchmarks.convert SYSTEM WORKLOAD SIZE FILES FOLDER` in the system's environment.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from time import perf_counter

from dataload.benchmarks.systems.registry import named
from dataload.benchmarks.workloads import workloads


def convert(system: str, workload: str, size: str, files: Path, folder: Path) -> None:
    """Fills `folder`, and notes beside it, as JSON, the seconds it took and the bytes it has."""
    unfinished = folder.with_name(folder.name + "-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    converter = named(system).converter()
    started = perf_counter()
    converter(workloads(size)[workload], files, unfinished)
    seconds = perf_counter() - started
    num_bytes = sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    unfinished.rename(folder)
    folder.with_suffix(".json").write_text(json.dumps({"seconds": seconds, "bytes": num_bytes}))


if __name__ == "__main__":
    system, workload, size, files, folder = sys.argv[1:]
    convert(system, workload, size, Path(files), Path(folder))
