"""The conversion of a workload to a system's own format, in its own process. Its cost is stored beside the result.

The suite runs `python -m dataload.benchmarks.systems.convert` with SYSTEM WORKLOAD SIZE FILES FOLDER in the
system's environment.
"""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from xxhash import xxh3_64_hexdigest

from dataload.benchmarks import batches
from dataload.benchmarks.systems import conversion
from dataload.benchmarks.systems.registry import Entry, named
from dataload.benchmarks.workloads import workloads

VERSIONS = Path(batches.__file__).with_name("peers.txt")  # of the peers' environment; not in an installed package


def convert(system: str, workload: str, size: str, files: Path, folder: Path) -> None:
    """Convert a workload to `folder`. Write seconds, bytes, the date and `made_of` as JSON beside it."""
    unfinished = folder.with_name(folder.name + "-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    converter = named(system).converter()
    started = perf_counter()
    converter(workloads(size)[workload], files, unfinished)
    seconds = perf_counter() - started
    num_bytes = sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    today = datetime.now(UTC).date().isoformat()
    price = {"seconds": seconds, "bytes": num_bytes, "date": today, "made_of": made_of(named(system), files)}
    folder.with_suffix(".json").write_text(json.dumps(price))


def price_of(entry: Entry, files: Path, folder: Path) -> dict[str, Any] | None:
    """Return the cost of a conversion that is up to date; None without one."""
    try:
        price: dict[str, Any] = json.loads(folder.with_suffix(".json").read_text())
    except FileNotFoundError:
        return None
    return price if price.get("made_of") == made_of(entry, files) else None


def made_of(entry: Entry, files: Path) -> str:
    """Return a hash of the inputs of a conversion: the rows, the modules that convert them, and the versions."""
    inputs = (files.with_suffix(".json"), entry.source(), *map(Path, (batches.__file__, conversion.__file__)), VERSIONS)
    return xxh3_64_hexdigest(b"".join(path.read_bytes() for path in inputs if path.exists()))


if __name__ == "__main__":
    system, workload, size, files, folder = sys.argv[1:]
    convert(system, workload, size, Path(files), Path(folder))
