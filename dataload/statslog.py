"""Statistics of a run on disk: each rank appends lines of JSON to a file of its own, which `dataload report` reads."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any, Self

from dataload.errors import ConfigError
from dataload.stats import LoaderStats
from dataload.timeline import CAUSES

EVERY = 1.0  # seconds from sample to sample, and
FINENESS = 1000  # parts of the epoch so far, whichever is longer: so a long epoch has thousands of lines, not millions

log = logging.getLogger(__name__)


class Samples:
    """Writes what one rank's epoch has come to: once a second, and at its end. Use it with `with`.

    folder: it gets `rank-<rank>.jsonl`; None: nothing is written. stats: of the epoch, looked at when a sample is due;
    count: called before that, to bring what the caches count up to date.

    Notes: whoever takes batches writes, so there is no thread, and nothing is open between two samples. A file that
    cannot be written is logged, and the epoch goes on without.
    """

    def __init__(self, folder: Path | None, rank: int, stats: LoaderStats, count: Callable[[], None]) -> None:
        self._path = None if folder is None else folder / f"rank-{rank}.jsonl"
        self._origin = {"rank": rank, "host": socket.gethostname(), "began": round(time(), 3)}
        self._stats = stats
        self._count = count
        self._due = EVERY
        self._written = 0.0  # seconds, by the last line
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Who asks for one more after the last batch is done with it, too: only now its step is among the seconds. They
        # stand still for who left: what it has done since its last batch is nothing that a loader would know.
        if self._stats.seconds > self._written:
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
        self._count()
        line = {**self._origin, "ended": ended, **asdict(self._stats)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                # The new line comes first: what a kill tore off then takes no other line with it.
                file.write(b"\n" + json.dumps(line, default=float).encode())
        except OSError as error:
            log.warning("%s: no more statistics of this epoch: %s", self._path, error)
            self._path = None
        self._written = self._stats.seconds


@dataclass(frozen=True)
class Pass:
    """One rank's way through one epoch; a run that was resumed has several of an epoch.

    rank, host: who; began: seconds since 1970; samples: the epoch so far, each time; ended: whether it came to its end.
    """

    rank: int
    host: str
    began: float
    samples: tuple[LoaderStats, ...]
    ended: bool

    @property
    def stats(self) -> LoaderStats:
        return self.samples[-1]


def read(folder: Path) -> list[Pass]:
    """The passes of all ranks that wrote into `folder`, oldest first. Lines that are torn or damaged are passed over.

    Raises ConfigError when there are none.
    """
    found: dict[tuple[int, float], list[tuple[dict[str, Any], LoaderStats]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line, stats in _lines(path):
            found.setdefault((line["rank"], line["began"]), []).append((line, stats))
    if not found:
        raise ConfigError(
            f"{folder}: there are no statistics of a run: give make_loader a stats_dir, or fit a log_dir, and that here"
        )
    passes = [
        Pass(rank, str(lines[-1][0]["host"]), began, tuple(stats for _, stats in lines), bool(lines[-1][0]["ended"]))
        for (rank, began), lines in found.items()
    ]
    return sorted(passes, key=lambda one: (one.began, one.rank))


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], LoaderStats]]:
    with path.open("rb") as file:
        for text in file:
            try:
                line = json.loads(text)
                stats = LoaderStats(**{field.name: line[field.name] for field in fields(LoaderStats)})
                numbers = [line["rank"], line["began"], line["ended"], *(stats.waits[cause] for cause in CAUSES)]
                numbers += [getattr(stats, field.name) for field in fields(LoaderStats) if field.name != "waits"]
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(line.get("host"), str) and all(isinstance(number, (int, float)) for number in numbers):
                yield line, stats
