"""The conversion of a workload to a system's own format, in its own process. Its time is stored beside the result.

The suite runs `python -m dataload.benchmarks.systems.convert` with SYSTEM WORKLOAD SIZE FILES FOLDER in the
system's environment.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from time import perf_counter

from xxhash import xxh3_64_hexdigest

from dataload.benchmarks import batches
from dataload.benchmarks.systems import conversion
from dataload.benchmarks.systems.registry import Entry, named
from dataload.benchmarks.workloads import workloads

VERSIONS = Path(batches.__file__).with_name("peers.txt")  # of the peers' environment; not in an installed package


def convert(system: str, workload: str, size: str, files: Path, folder: Path) -> None:
    """Convert a workload to `folder`. Write the seconds and `made_of` as JSON beside it."""
    unfinished = folder.with_name(folder.name + "-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    converter = named(system).converter()
    started = perf_counter()
    converter(workloads(size)[workload], files, unfinished)
    seconds = perf_counter() - started
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    told = {"seconds": seconds, "made_of": made_of(named(system), files)}
    folder.with_suffix(".json").write_text(json.dumps(told))


def seconds_of(entry: Entry, files: Path, folder: Path) -> float | None:
    """Return the seconds of a conversion that is up to date; None without one."""
    try:
        told = json.loads(folder.with_suffix(".json").read_text())
    except FileNotFoundError:
        return None
    return float(told["seconds"]) if told["made_of"] == made_of(entry, files) else None


def made_of(entry: Entry, files: Path) -> str:
    """Return a hash of the inputs of a conversion: the rows, the modules that convert them, and the versions."""
    inputs = (files.with_suffix(".json"), entry.source(), *map(Path, (batches.__file__, conversion.__file__)), VERSIONS)
    return xxh3_64_hexdigest(b"".join(path.read_bytes() for path in inputs if path.exists()))


if __name__ == "__main__":
    system, workload, size, files, folder = sys.argv[1:]
    convert(system, workload, size, Path(files), Path(folder))
