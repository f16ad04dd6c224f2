"""The speed of the local tier beside plain files: `python -m dataload.benchmarks.tier`.

The tier and its floors alternate, so that a slow minute of the machine affects both. Each figure is the median of the
rounds, with the lowest and the highest. All files are in the page cache, and no write is synced. Every read sums the
bytes, and every fill comes from memory, for the tier and for plain files.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from dataload.benchmarks.machine.circumstances import circumstances
from dataload.cache.local.index import Row
from dataload.cache.local.registry import open_folder
from dataload.cache.local.tier import LocalTier
from dataload.cache.tier import Allocate, BlobKey, Fill

SPAN = 64 << 10
LOOKUPS, SPANS = 20_000, 2_000
LIMIT = 1 << 50
HITS = 1000
STOPPED = """
import os, signal, sys
from dataload.cache.local.tier import LocalTier

tier = LocalTier(sys.argv[1], 1 << 50)
with tier.folder.index._transaction(write=True):
    os.kill(os.getpid(), signal.SIGSTOP)
"""

Round = Callable[[], float]
"""A function that takes one measurement."""


@dataclass(frozen=True)
class Aim:
    """A figure and its target.

    Args:
        name: Name of the figure.
        unit: Its unit.
        floor: Name of the figure to compare with, or "".
        least: Least ratio to the floor.
        most: Greatest value.
    """

    name: str
    unit: str
    floor: str = ""
    least: float | None = None
    most: float | None = None


AIMS = (
    Aim("warm read of blobs", "MB/s", "pread of plain files", least=0.8),
    Aim("pread of plain files", "MB/s"),
    Aim("read of 64 KiB", "µs", "pread of 64 KiB", most=50),
    Aim("pread of 64 KiB", "µs"),
    Aim("hits beside a stopped process", "hits/s", "hits", least=0.67),
    Aim("hits", "hits/s"),
    Aim("fill", "MB/s", "write of plain files", least=0.7),
    Aim("write of plain files", "MB/s"),
    Aim("lookup", "µs", most=5),
    Aim("opening", "ms", most=100),
    Aim("rebuilding the index", "blobs/s"),
)


@dataclass(frozen=True)
class TierFigure:
    """A figure over all rounds.

    Args:
        name: Name of the figure.
        unit: Its unit.
        median: Median of the rounds.
        low: Lowest round.
        high: Highest round.
        floor: Name of the figure to compare with, or "".
        to_floor: Ratio of the medians; None without a floor.
        bar: The target, or "".
        met: Whether the target is met; None without a target.
    """

    name: str
    unit: str
    median: float
    low: float
    high: float
    floor: str
    to_floor: float | None
    bar: str
    met: bool | None


def measure(
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure; default: temporary.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 7,
    blobs: Annotated[int, typer.Option(min=1, help="Number of blobs to read and fill in a round.")] = 32,
    blob_bytes: Annotated[int, typer.Option(min=SPAN, help="Size of a blob in bytes.")] = 4 << 20,
    entries: Annotated[int, typer.Option(min=1, help="Number of entries of the index.")] = 1_000_000,
    rebuilt: Annotated[int, typer.Option(min=1, help="Number of small blobs whose index is rebuilt.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure the local tier beside plain files."""
    with tempfile.TemporaryDirectory(prefix="dataload-tier-", dir=folder) as scratch:
        data = np.random.default_rng(0).integers(0, 256, blob_bytes, np.uint8)
        files = Files(Path(scratch), data, blobs)
        measurements = reads(files) | hits(files) | fills(files) | index(Path(scratch) / "entries", entries)
        measurements |= {"rebuilding the index": rebuilding(Path(scratch) / "rebuilt", rebuilt)}
        logging.getLogger("dataload").setLevel(logging.ERROR)  # Each rebuild of the index logs a warning.
        values: dict[str, list[float]] = {name: [] for name in measurements}
        for _ in range(rounds + 1):
            for name, take in measurements.items():
                values[name].append(take())
    figures = judged({name: taken[1:] for name, taken in values.items()})  # The first round is a warm-up.
    if as_json:
        settings = {"rounds": rounds, "blobs": blobs, "blob_bytes": blob_bytes, "entries": entries, "rebuilt": rebuilt}
        result = circumstances(None) | {"settings": settings, "figures": [asdict(figure) for figure in figures]}
        typer.echo(json.dumps(result))
    else:
        show(figures)


class Files:
    """The same bytes as blobs of a tier and as plain files."""

    def __init__(self, folder: Path, data: Any, count: int) -> None:
        self.data = data
        self.tier = LocalTier(folder / "tier", LIMIT)
        self.keys = [key_of(f"kept/{number}") for number in range(count)]
        self.paths = [folder / "plain" / str(number) for number in range(count)]
        (folder / "plain").mkdir()
        self.new = folder / "new"
        for key, path in zip(self.keys, self.paths, strict=True):
            self.tier.get_or_fill(key, fill_with(data))
            path.write_bytes(data)

    @property
    def bytes(self) -> int:
        return len(self.keys) * len(self.data)


def judged(taken: dict[str, list[float]]) -> list[TierFigure]:
    """Return the figures for the values of each round."""
    middle = {name: median(values) for name, values in taken.items()}
    return [figure_of(aim, taken[aim.name], middle.get(aim.floor)) for aim in AIMS]


def figure_of(aim: Aim, values: list[float], floor: float | None) -> TierFigure:
    middle = median(values)
    ratio = middle / floor if floor else None
    bar, met = "", None
    if aim.least is not None and ratio is not None:
        bar, met = f">= {aim.least:g} ×", ratio >= aim.least
    elif aim.most is not None:
        bar, met = f"<= {aim.most:g} {aim.unit}", middle <= aim.most
    return TierFigure(aim.name, aim.unit, middle, min(values), max(values), aim.floor, ratio, bar, met)


def show(figures: list[TierFigure]) -> None:
    table = Table("figure", "unit", "median", "lowest", "highest", "to its floor", "target")
    for figure in figures:
        ratio = f"{figure.to_floor:.2f} ×" if figure.to_floor else ""
        bar = "" if figure.met is None else f"{figure.bar}, {'met' if figure.met else 'MISSED'}"
        table.add_row(figure.name, figure.unit, *map(number, (figure.median, figure.low, figure.high)), ratio, bar)
    Console(width=120).print(table)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def key_of(path: str) -> BlobKey:
    return BlobKey("benchmark", path, "1", "all")


def fill_with(data: Any) -> Fill:
    def fill(allocate: Allocate) -> None:
        allocate(len(data))[:] = data

    return fill


def touch(read: Any) -> Any:
    """Return the sum of the bytes, so that every byte is read."""
    return np.frombuffer(read, np.uint8).view(np.uint64).sum()


def seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def reads(files: Files) -> dict[str, Round]:
    """Return the measurements of reads: whole blobs in MB/s, spans in µs."""
    rng = np.random.default_rng(1)

    def tier() -> None:
        for key in files.keys:
            touch(files.tier.get(key))

    def plain() -> None:
        for path in files.paths:
            touch(pread(path, len(files.data), 0))

    def random_spans() -> list[tuple[int, int]]:
        """Return SPANS pairs of the number of a file and an offset in it."""
        numbers = rng.integers(0, len(files.keys), SPANS).tolist()
        starts = rng.integers(0, len(files.data) // SPAN, SPANS) * SPAN
        return list(zip(numbers, starts.tolist(), strict=True))

    def spans() -> float:
        chosen = random_spans()
        return seconds(lambda: [touch(files.tier.get(files.keys[at], (start, start + SPAN))) for at, start in chosen])

    def plain_spans() -> float:
        chosen = random_spans()
        return seconds(lambda: [touch(pread(files.paths[at], SPAN, start)) for at, start in chosen])

    return {
        "warm read of blobs": lambda: files.bytes / seconds(tier) / 1e6,
        "pread of plain files": lambda: files.bytes / seconds(plain) / 1e6,
        "read of 64 KiB": lambda: spans() / SPANS * 1e6,
        "pread of 64 KiB": lambda: plain_spans() / SPANS * 1e6,
    }


def hits(files: Files) -> dict[str, Round]:
    """Return the measurements of hits per second, also beside a process that is stopped inside an index transaction."""
    keys = [files.keys[number % len(files.keys)] for number in range(HITS)]

    def rate() -> float:
        return HITS / seconds(lambda: [files.tier.get(key, (0, SPAN)) for key in keys])

    def beside_a_stopped_process() -> float:
        with subprocess.Popen([sys.executable, "-c", STOPPED, str(files.tier.path)]) as process:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            try:
                return rate()
            finally:
                process.kill()

    return {"hits beside a stopped process": beside_a_stopped_process, "hits": rate}


def pread(path: Path, size: int, start: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, size, start)
    finally:
        os.close(descriptor)


def fills(files: Files) -> dict[str, Round]:
    """Return the measurements of writes in MB/s: new blobs and new files, without the time to remove them."""
    buffer = np.empty_like(files.data)

    def tier() -> float:
        keys = [key_of(f"new/{number}") for number in range(len(files.keys))]
        fill = fill_with(files.data)
        took = seconds(lambda: [files.tier.get_or_fill(key, fill) for key in keys])
        for key in keys:
            files.tier.folder.discard(key.digest)
        return files.bytes / took / 1e6

    def plain() -> float:
        files.new.mkdir()
        took = seconds(lambda: [write(files.new / path.name) for path in files.paths])
        shutil.rmtree(files.new)
        return files.bytes / took / 1e6

    def write(path: Path) -> int:
        buffer[:] = files.data  # Bytes of an origin pass through memory, too.
        with path.open("wb", buffering=0) as file:
            return file.write(buffer)

    return {"fill": tier, "write of plain files": plain}


def index(folder: Path, entries: int) -> dict[str, Round]:
    """Return the measurements of the index: a lookup in µs, opening in ms. The entries have no files."""
    digests = [key_of(f"row/{number}").digest for number in range(entries)]
    opened = open_folder(folder)
    opened.index.enter(Row(digest, f"bucket/folder/{digest.hex()}#0-4194304", 1) for digest in sorted(digests))
    opened.close()
    rng = np.random.default_rng(2)

    def lookup() -> float:
        opened = open_folder(folder)
        chosen = [digests[at] for at in rng.integers(0, entries, LOOKUPS).tolist()]
        took = seconds(lambda: [opened.index.size_of(digest) for digest in chosen])
        opened.close()
        return took / LOOKUPS * 1e6

    def opening() -> float:
        tier = LocalTier(folder, LIMIT)
        took = seconds(lambda: tier.folder)
        tier.folder.close()
        return took * 1e3

    return {"lookup": lookup, "opening": opening}


def rebuilding(folder: Path, count: int) -> Round:
    """Return the measurement of a rebuilt index in blobs per second."""
    tier = LocalTier(folder, LIMIT)
    for number in range(count):
        tier.get_or_fill(key_of(f"small/{number}"), fill_with(b"small"))
    tier.folder.close()

    def rebuild() -> float:
        shutil.rmtree(folder / "index")
        tier = LocalTier(folder, LIMIT)
        took = seconds(lambda: tier.folder)
        assert len(tier.folder.index.rows()) == count
        tier.folder.close()
        return count / took

    return rebuild


if __name__ == "__main__":
    typer.run(measure)
