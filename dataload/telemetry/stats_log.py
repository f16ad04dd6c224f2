"""Statistics of a run on disk: each rank appends lines of JSON to a file of its own, which `dataload report` reads."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from operator import index
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any, NamedTuple, Self

from dataload.errors import ConfigError
from dataload.telemetry.loader_stats import LoaderStats
from dataload.telemetry.wait_timeline import CAUSES

EVERY = 1.0  # seconds from sample to sample, and
FINENESS = 1000  # parts of the epoch so far, whichever is longer: so a long epoch has thousands of lines, not millions
MOST = 1e18  # of bytes, rows or seconds: a line that says more is damaged

log = logging.getLogger(__name__)


class Samples:
    """Writes what one rank's epoch has come to: once a second, and at its end. Use it with `with`.

    folder: it gets `rank-<rank>.jsonl`; None: nothing is written. stats: of the epoch, looked at when a sample is due;
    world_size: of all ranks; 0: not known.

    Notes: whoever takes batches writes, so there is no thread, and nothing is open between two samples. A file that
    cannot be written is logged, and the epoch goes on without.
    """

    def __init__(self, folder: Path | None, rank: int, stats: LoaderStats, world_size: int = 0) -> None:
        self._path = None if folder is None else folder / f"rank-{rank}.jsonl"
        self._origin = {"rank": rank, "world_size": world_size, "host": socket.gethostname(), "began": time()}
        self._stats = stats
        self._due = EVERY
        self._written = asdict(LoaderStats(stats.epoch))
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The seconds grow if the loop asked for a batch after the last one; the counts, if a load ended meanwhile.
        if asdict(self._stats) != self._written:
            self._append(ended=self._ended or kind is None)

    def take(self, *, last: bool) -> None:
        """A batch is about to be handed out, the last one or not."""
        self._ended = last  # whether or not the loop will ask for one more
        if self._path is not None and (last or self._stats.seconds >= self._due):
            self._append(ended=last)
            self._due = self._stats.seconds + max(EVERY, self._stats.seconds / FINENESS)

    def _append(self, *, ended: bool) -> None:
        if self._path is None:
            return
        line = {**self._origin, "ended": ended, **asdict(self._stats)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                # The new line comes first: what a kill tore off then takes no other line with it.
                file.write(b"\n" + json.dumps(line, default=float).encode())
        except OSError as error:
            log.warning("%s: no more statistics of this epoch: %s", self._path, error)
            self._path = None
        self._written = asdict(self._stats)


class Sample(NamedTuple):
    """rows: of the pass, handed out in its first `seconds`."""

    seconds: float
    rows: int


@dataclass(frozen=True)
class Pass:
    """One rank's way through one epoch; a run that was resumed has several of an epoch.

    rank, host: who; world_size: of how many ranks, 0: not known; began: seconds since 1970; ended: whether it came to
    its end; stats: what it came to; samples: the way there.
    """

    rank: int
    world_size: int
    host: str
    began: float
    ended: bool
    stats: LoaderStats
    samples: list[Sample]

    @property
    def until(self) -> float:
        """The time of the last sample, in seconds since 1970."""
        return self.began + self.stats.seconds


def read(folder: Path) -> list[Pass]:
    """The passes of all ranks that wrote into `folder`, oldest first.

    Lines that are torn or damaged are passed over; files that cannot be read, too, and that is logged. Raises
    ConfigError when nothing is left.
    """
    found: dict[tuple[int, int, float], Pass] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        try:
            for one in _lines(path):
                key = one.rank, one.stats.epoch, one.began
                samples = found[key].samples if key in found else []
                samples.append(Sample(one.stats.seconds, one.stats.rows))
                found[key] = replace(one, samples=samples)
        except OSError as error:
            log.warning("%s cannot be read and is passed over: %s", path, error.strerror)
    if not found:
        raise ConfigError(
            f"{folder}: there are no statistics of a run: give make_loader a stats_dir, or fit a log_dir, and that here"
        )
    return sorted(found.values(), key=lambda one: (one.began, one.rank))


def _lines(path: Path) -> Iterator[Pass]:
    """For each line, what the pass had come to by then."""
    with path.open("rb") as file:
        for text in file:
            try:
                one = _pass(json.loads(text))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            yield one


def _pass(line: Any) -> Pass:
    """Raises ValueError, KeyError or TypeError for what no rank writes. Once none wrote its world_size."""
    figures = {field.name: _number(line[field.name]) for field in fields(LoaderStats) if field.name != "waits"}
    waits = {cause: _number(line["waits"][cause]) for cause in CAUSES}
    host = str.encode(line["host"], errors="replace").decode()  # JSON can hold half a character, which no file can
    rank, world_size = (_number(index(ranks)) for ranks in (line["rank"], line.get("world_size", 0)))
    began, ended = _number(line["began"]), bool(line["ended"])
    return Pass(rank, world_size, host, began, ended, LoaderStats(**figures, waits=waits), [])


def _number(value: Any) -> Any:
    """The number, to a billionth, for no clock is finer. Raises ValueError for what nothing here comes to, as NaN."""
    number = round(value, 9)
    if not 0 <= number < MOST:
        raise ValueError(f"{number} is out of range")
    return number
