"""The statistics log of a run: each process appends JSON lines to its own file, which `dataload report` reads."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import groupby, islice
from operator import index
from pathlib import Path
from stat import S_ISREG
from time import time
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

from dataload.errors import ConfigError
from dataload.telemetry.loader_stats import BY_SOURCE, NO_NUMBERS, PLACE, TRAFFIC, LoaderStats, summed
from dataload.telemetry.wait_histogram import WaitHistogram
from dataload.telemetry.wait_timeline import CAUSES

# A sample is due after EVERY seconds, or after 1/FINENESS of the epoch so far if that is longer. A long epoch then has
# thousands of lines, not millions.
EVERY = 1.0
FINENESS = 1000
CLOCKS = 2.0  # most seconds of skew between hosts' clocks
# Of each peer, not of all together
COUNTERS = ("rows", "batches", "seconds", "wait_seconds", "sync_seconds", "skipped_rows", "tokens", "padding_tokens")
MOST_HOST = 253  # characters of its name
TAILS = 1 << 16, 1 << 20, 1 << 24  # bytes at the end of a file that hold its last lines
MAX_NUMBER = 1e18  # of bytes, rows or seconds; a line with a larger number is damaged

log = logging.getLogger(__name__)


@cache
def _started(process: int) -> float:
    """Return when this process began its first loop, in seconds since 1970."""
    del process  # A forked child has a time of its own.
    return time()


class Samples:
    """A context manager that writes samples of one process's epoch: once a second, and at the end.

    Args:
        folder: Folder of the file `rank-<rank>.jsonl`, or `rank-<rank>-process-<process>.jsonl`. None writes nothing.
        stats: Statistics of the epoch, read when a sample is due.
        process: Number of this process if several processes may have the same rank; None if each rank is one process.

    Notes:
        The training loop's thread writes, and no file stays open between two samples. If the file cannot be written,
        a warning is logged and the epoch continues without a log. A forked child writes nothing.
    """

    def __init__(self, folder: Path | None, stats: LoaderStats, process: int | None = None) -> None:
        name = f"rank-{stats.rank}.jsonl" if process is None else f"rank-{stats.rank}-process-{process}.jsonl"
        self._path = None if folder is None else folder / name
        # `_key` knows the lines of a pass by their first value, and by "began" and what follows it.
        self._origin = {"host": socket.gethostname(), "began": time(), "started": _started(os.getpid())}
        self._origin["process"] = stats.rank if process is None else process
        self._owner = os.getpid()
        self._stats = stats
        self._next_due = EVERY
        self._written: dict[str, Any] = {}
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The seconds grow if the loop requested a batch after the last one; the counts, if a load ended meanwhile.
        if self._path is not None and asdict(self._stats) != self._written:
            self._append(ended=self._ended or kind is None)

    def take(self, *, last: bool) -> None:
        """Write a sample if one is due. Call it before each batch is handed out; `last` marks the last batch."""
        self._ended = last  # The loop may stop here without requesting another batch.
        if self._path is not None and (last or self._stats.seconds >= self._next_due):
            self._append(ended=last)
            self._next_due = self._stats.seconds + max(EVERY, self._stats.seconds / FINENESS)

    def _append(self, *, ended: bool) -> None:
        if self._path is None or os.getpid() != self._owner:
            return
        line = {**self._stats.as_json(), **self._origin, "ended": ended}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                # Begin with the line break: a line torn by a kill then damages no other line.
                file.write(b"\n" + json.dumps(line, default=float).encode())
        except OSError as error:
            log.warning("no further statistics of this epoch: %s cannot be written: %s", self._path, error)
            self._path = None
        self._written = asdict(self._stats)


class Sample(NamedTuple):
    """A point of a pass: the rows handed out in its first `seconds`."""

    seconds: float
    rows: int


@dataclass(frozen=True)
class Pass:
    """One rank's iteration over one epoch. A resumed run has several passes of an epoch.

    Attributes:
        rank: The data-parallel rank.
        world_size: Number of data-parallel ranks; 0 if unknown.
        process: Number of the process.
        host: Name of the process's host.
        began: Start of the pass, in seconds since 1970.
        started: Start of the process's first pass, in seconds since 1970.
        ended: Whether the pass reached the end of the epoch.
        stats: Statistics of the whole pass.
        samples: Progress of the pass, in order of time.
    """

    rank: int
    world_size: int
    process: int
    host: str
    began: float
    started: float
    ended: bool
    stats: LoaderStats
    samples: list[Sample]

    @property
    def until(self) -> float:
        """Time of the last sample, in seconds since 1970."""
        return self.began + self.stats.seconds


def read(folder: Path) -> list[Pass]:
    """Return the passes of all ranks that wrote into `folder`, oldest first. See `read_peers` and `merged`."""
    return merged(read_peers(folder))


def merged(peers: Iterable[Sequence[Pass]], *, steady: bool = False) -> list[Pass]:
    """Return one pass for each group of peers, oldest first: that of the one that waited longest, with all traffic.

    Args:
        peers: The groups, as `read_peers` returns them.
        steady: Give it the largest figures of all peers, so that no counter falls while the run goes on.
    """
    return sorted((_one_of(group, steady) for group in peers), key=lambda each: (each.began, each.rank))


def read_peers(folder: Path, *, samples: bool = True) -> list[list[Pass]]:
    """Return the passes of all processes that wrote into `folder`, in groups of those that got the same rows.

    Such are processes with the same rank, for example tensor-parallel ones. Damaged lines are skipped. Unreadable files
    are skipped and logged.

    Args:
        folder: The folder.
        samples: Give each pass its samples. Without them, only the last lines of each pass are parsed.

    Raises:
        ConfigError: The folder has no statistics.
    """
    passes: dict[tuple[int, int, int, float], Pass] = {}
    for path in _files(folder):
        try:
            for latest in _lines(path, every=samples):
                key = latest.rank, latest.process, latest.stats.epoch, latest.began
                progress = passes[key].samples if key in passes else []
                if samples:
                    progress.append(Sample(latest.stats.seconds, latest.stats.rows))
                passes[key] = replace(latest, samples=progress)
        except OSError as error:
            log.warning("skipping %s, which cannot be read: %s", _text(str(path)), error.strerror)
    return _peers(folder, passes.values())


def read_latest(folder: Path) -> dict[int, Pass]:
    """Return the latest pass of each rank, from the last lines of its file.

    Of its progress, it has two samples: the last one, and the first of the pass among these lines.

    Raises:
        ConfigError: The folder has no statistics.
    """
    passes = map(_latest, _files(folder))
    groups = _peers(folder, [each for each in passes if each is not None])
    return {each.rank: each for each in merged(groups)}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.jsonl"))


def _opened(path: Path) -> BinaryIO:
    """Open the file of a process.

    Raises:
        OSError: It cannot be read, or is no file: a pipe would block its reader, and a device may have no end.
    """
    if not S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path.open("rb")


def _latest(path: Path) -> Pass | None:
    """Return the state of a file's last pass; None if it has no intact line, or cannot be read."""
    with suppress(OSError), _opened(path) as file:
        size = file.seek(0, os.SEEK_END)
        for tail in TAILS:
            file.seek(max(0, size - tail))
            lines = file.read(tail).split(b"\n")
            if (latest := next(_intact(reversed(lines)), None)) is not None:
                first = next((each for each in _intact(lines) if each.began == latest.began), latest)
                samples = [Sample(each.stats.seconds, each.stats.rows) for each in (first, latest)]
                return replace(latest, samples=samples)
            if tail >= size:
                break
    return None


def _peers(folder: Path, passes: Iterable[Pass]) -> list[list[Pass]]:
    """Return the passes of a folder in groups: those of processes that read the same rows at the same time."""
    passes = sorted(passes, key=lambda each: (each.began, each.rank))
    if not passes:
        raise ConfigError(
            f"{folder} holds no statistics of a run: pass the folder that make_loader got as stats_dir, or fit as "
            "log_dir"
        )
    groups: list[list[Pass]] = []
    latest: dict[tuple[int, int, int], list[Pass]] = {}
    for each in passes:
        key = each.rank, each.world_size, each.stats.epoch
        group = latest.get(key, [])
        together = each.began <= max((peer.until for peer in group), default=0.0) + CLOCKS
        if not together or each.process in {peer.process for peer in group}:
            group = latest[key] = []
            groups.append(group)
        group.append(each)
    return groups


def _one_of(peers: Sequence[Pass], steady: bool) -> Pass:
    """Return the pass of the peer that waited longest, with all traffic; if `steady`, with the largest counters."""
    slowest, every = max(peers, key=lambda each: each.stats.wait_seconds), [each.stats for each in peers]
    figures: dict[str, Any] = {name: sum(getattr(stats, name) for stats in every) for name in TRAFFIC}
    figures["bytes_by_source"] = summed(stats.bytes_by_source for stats in every)
    if steady:
        figures |= {name: max(getattr(stats, name) for stats in every) for name in COUNTERS}
        figures["waits"] = {cause: max(stats.waits[cause] for stats in every) for cause in CAUSES}
        figures["wait_histogram"] = WaitHistogram.largest(stats.wait_histogram for stats in every)
    return replace(slowest, stats=replace(slowest.stats, **figures))


def _lines(path: Path, *, every: bool) -> Iterator[Pass]:
    """Yield the state of each pass at its last intact line; if `every`, at each intact line."""
    with _opened(path) as file:
        if every:
            yield from _intact(file)
            return
        for _, lines in groupby(file, _key):
            yield from islice(_intact(reversed([*lines])), 1)


def _key(line: bytes) -> tuple[bytes, bytes]:
    """Return the bytes of a line that are the same in all lines of a pass, and differ between passes of a file."""
    return line.partition(b",")[0], line[line.rfind(b'"began"') :].partition(b"ended")[0]


def _intact(lines: Iterable[bytes]) -> Iterator[Pass]:
    """Yield, for each intact line, the state of its pass at that time."""
    for line in lines:
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                continue
            parsed = _pass(content)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        yield parsed


def _pass(line: Any) -> Pass:
    """Parse a line.

    Raises:
        ValueError, KeyError, TypeError: No rank wrote such a line.
    """
    names = {field.name for field in fields(LoaderStats)} - {*NO_NUMBERS, *PLACE, *BY_SOURCE}
    figures: dict[str, Any] = {name: _number(line[name]) for name in names}
    for name in BY_SOURCE:
        figures[name] = {_text(source): _number(value) for source, value in dict(line[name]).items()}
    stats = LoaderStats(
        **figures,
        skipped_row_ids=[_number(index(row)) for row in line["skipped_row_ids"]],
        waits={cause: _number(line["waits"][cause]) for cause in CAUSES},
        wait_histogram=WaitHistogram.from_json(line["wait_histogram"]),
        **{name: _number(index(line[name])) for name in ("rank", "world_size", "total_batches")},
        settings=[*map(str, line["settings"])],
    )
    process, host = _number(index(line["process"])), _text(line["host"])[:MOST_HOST]
    began, started, ended = _number(line["began"]), _number(line["started"]), bool(line["ended"])
    return Pass(stats.rank, stats.world_size, process, host, began, started, ended, stats, [])


def _text(value: Any) -> str:
    """Return a text as terminals and files can show it. JSON may hold lone surrogates, and escapes of terminals."""
    if not isinstance(value, str):
        raise TypeError("no text")
    return "".join(each if each.isprintable() else "?" for each in value)


def _number(value: Any) -> Any:
    """Return the number, rounded to a billionth, the resolution of clocks.

    Raises:
        ValueError: The number is negative, too large or NaN.
    """
    number = round(value, 9)
    if not 0 <= number < MAX_NUMBER:
        raise ValueError(f"{number} is out of range")
    return number
