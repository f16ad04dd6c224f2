"""The ledger of a run: a file of JSON lines that tell what each loop began with, from which its batches follow.

A line that starts a loop has its record, without what is equal in the start before it. The writer holds a lock on the
file, reads it, and appends a line, so that both sides merge the same lines; a line that a kill cut off is passed over.

A seal is a line [rows that the loop has handed out, digest]. The digest is of all lines up to the loop's start and of
these rows, so the seals are a chain: a changed line, or a changed row, changes each later one. Ranks that replace bad
rows say which. A line about another loop than the latest one, such as one that goes on after an evaluation, ends with
the number of its loop.

Which rows the data of a loop has is in a file beside the ledger, named by a digest of it, which a line has.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, Self

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError
from dataload.runtime.redact import redacted

FILE = "ledger.jsonl"
KEPT = "ledger.rows"  # the folder of what is too long for a line
MOST_KEPT = 64 << 20  # bytes of a file in it
DIGEST_BYTES = 9
NAME_CHARACTERS = 32
FIRST_SEAL = 1 << 10  # batches of a loop; each further seal comes after twice as many
ROWS_AT_ONCE = 1 << 14  # in the chain: a call for a few leaves the interpreter to other threads as often
MOST_SKIPPED = 1000  # replaced rows that a loop of a rank names
MOST_BYTES = 1 << 20  # of a ledger in which further replaced rows are named
LOCK_SECONDS = 2.0  # that a loop waits for the lock of another process
LINES = {"cursor"}, {"to", "chain"}, {"skipped", "rank"}  # what tells the kinds of lines
NUMBERS = ("cursor", "to", "rank", "epoch", "ranks", "nodes", "rows", "batch_size", "step", "accumulate", "loop")
MOST = 1 << 62  # of these
ALWAYS = {"epoch", "ranks", "nodes", "rows", "batch_size", "order", "recipe"}  # in a record

Rows = npt.NDArray[np.int64]
P = ParamSpec("P")

log = logging.getLogger(__name__)


class Chain:
    """The digest of a ledger's lines, and of the rows of a loop.

    Args:
        lines: The intact lines up to the start of the loop.
    """

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._hash = hashlib.sha256(b"\n".join(lines))  # which processors have instructions for

    def add(self, rows: Rows) -> None:
        """Add row numbers of batches."""
        self._hash.update(np.ascontiguousarray(rows, "<i8").data)

    def sealed(self, rows: Rows, end: int) -> str:
        """Return the digest with further row numbers, of which the last come before row `end` of the epoch."""
        found = self._hash.copy()
        found.update(np.ascontiguousarray(rows, "<i8").data)
        found.update(end.to_bytes(8, "little"))
        return base64.b64encode(found.digest()[:DIGEST_BYTES]).decode()


def _guarded(method: Callable[Concatenate[Ledger, P], None]) -> Callable[Concatenate[Ledger, P], None]:
    """Return a method that ends the ledger, with one warning, where it would raise: no loop ends because of it."""

    @wraps(method)
    def guarded(self: Ledger, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001
            self.end_with(error)

    return guarded


class Ledger:
    """Writes the ledger of a run for one loop.

    Args:
        folder: Its folder; None writes nothing.
        rank: The data-parallel rank.
        writes: Whether this process writes the starts and seals. All write which rows they replaced.

    Attributes:
        end: Rows of the epoch, of all ranks, that the loop has handed out; -1: none.

    Notes: any failure is logged, once, and the loop goes on without a ledger.
    """

    def __init__(self, folder: Path | None, rank: int, *, writes: bool) -> None:
        self._path = None if folder is None else folder / FILE
        self._rank, self._writes, self._pid = rank, writes, os.getpid()
        self._number: int | None = None  # of the loop in the ledger
        self._chain: Chain | None = None
        self.end = self._sealed = -1
        self._first = 0  # row of the epoch that the loop began with
        self._is_sealed = False  # by its caller
        self._batches, self._due = 0, FIRST_SEAL
        self._waiting, self._rows = list[Rows](), 0  # that are handed out, but not in the chain yet
        self._latest: tuple[int, int, int, Rows] | None = None  # as `hand_out` got them
        self._skipped = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def end_with(self, error: Exception) -> None:
        """Write no more, because of an error."""
        log.warning("the ledger of the run ends here: %s cannot be written: %s", self._path, redacted(error))
        self._path = self._chain = None

    @_guarded
    def start(self, record: Callable[[], Mapping[str, Any]]) -> None:
        """Record the start of the loop. record: returns what it begins with."""
        if self._path is None or not self._writes:
            return
        content = record()
        known = dict[str, Any]()
        lines = list[bytes]()

        def line(before: bytes) -> Mapping[str, Any]:
            lines.extend(text for text, _ in _intact(before, known))
            self._number, self._first = _loops(before), content["cursor"]
            place = {"cursor": content["cursor"]}  # the mark of a start
            return {**{name: value for name, value in content.items() if known.get(name) != value}, **place}

        added = self._append(line, sync=True)
        self._chain = Chain([*lines, added])

    def keep(self, data: bytes) -> str | None:
        """Keep bytes beside the ledger, unless they are there. Return their name; None: there are too many."""
        assert self._path is not None
        if len(data) > MOST_KEPT:
            return None
        name = _name_of(data)
        file = self._path.parent / KEPT / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_name(f"{name}.{os.getpid()}")
            with draft.open("wb") as drafted:
                drafted.write(data)
                drafted.flush()
                os.fsync(drafted.fileno())
            draft.replace(file)
        return name

    @_guarded
    def hand_out(self, cursor: int, step: int, size: int, rows: Rows) -> None:
        """Record batches of this rank, of which the first is handed out, after all that were recorded before.

        Args:
            cursor: Rows of the epoch before the first global batch.
            step: Rows of each global batch.
            size: Rows of each of these batches.
            rows: Their rows, int64 [n].
        """
        if self._chain is None:
            return
        if self._latest is not None:
            self._waiting.append(self._latest[-1])
            self._rows += len(self._latest[-1])
            if self._rows >= ROWS_AT_ONCE:
                self._add_waiting(self._chain)
        self._latest = cursor, step, size, rows
        if self._batches >= self._due:
            self._due *= 2
            self._seal(cursor)
        self._batches += -(-len(rows) // size)

    @_guarded
    def seal(self) -> None:
        """Record a digest of the rows up to here."""
        self._is_sealed = True
        self._seal(self.end)

    @_guarded
    def _end(self) -> None:
        """Record how far the loop got. A training has sealed what it goes on from, so this needs no digest."""
        self._seal(self.end, with_digest=not self._is_sealed)

    def _seal(self, end: int, *, with_digest: bool = True) -> None:
        if self._chain is None or self._latest is None or end == self._sealed or self._pid != os.getpid():
            return  # A forked child has the loop of its parent.
        self._add_waiting(self._chain)
        cursor, step, size, rows = self._latest
        text = [self._chain.sealed(rows[: -(-(end - cursor) // step) * size], end)] if with_digest else []
        self._sealed = end
        self._append(lambda before: [end - self._first, *text, *self._loop_among(before)])

    def _loop_among(self, before: bytes) -> list[int]:
        """Return how a line says of which loop it is: not at all if that is the latest one."""
        return [] if self._number is None or _loops(before) == self._number + 1 else [self._number]

    def _add_waiting(self, chain: Chain) -> None:
        if self._waiting:
            chain.add(np.concatenate(self._waiting))
            self._waiting, self._rows = [], 0

    @_guarded
    def skip(self, rows: Sequence[int]) -> None:
        """Record rows that were replaced in a batch."""
        rows = rows[: MOST_SKIPPED - self._skipped]
        if not rows or self._path is None:
            return
        self._skipped += len(rows)
        if self._path.exists() and self._path.stat().st_size >= MOST_BYTES:
            log.warning("the ledger of the run is full: %s names no more rows that on_error replaces", self._path)
            self._skipped = MOST_SKIPPED
        else:
            names = "skipped", "rank", "loop"
            self._append(
                lambda before: dict(zip(names, (list(rows), self._rank, *self._loop_among(before)), strict=False))
            )

    def _append(self, line: Callable[[bytes], Mapping[str, Any] | list[Any]], *, sync: bool = False) -> bytes:
        """Append line(bytes of the file), and flush it to the disk if `sync`. Return it."""
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+", buffering=0) as file:
            _lock(file)  # Closing the file releases it.
            file.seek(0)
            content = file.read()
            added = json.dumps(line(content), separators=(",", ":")).encode()
            after_a_cut = b"\n" if content and not content.endswith(b"\n") else b""
            text = after_a_cut + added + b"\n"
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, "a line was cut off")
            if sync:
                os.fsync(file.fileno())
        return added


def _lock(file: IO[bytes]) -> None:
    """Lock a file. Raise BlockingIOError if another process holds the lock for too long, perhaps stopped."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.01)


@dataclass
class Start:
    """A loop as the ledger has it.

    Attributes:
        record: What it began with, complete.
        number: Its number among the loops of the ledger, from 0.
        lines: The intact lines of the ledger up to it.
        seals: Rows of the epoch, and the digest that this process wrote after it had handed out so many.
        reached: Rows of the epoch up to where it is known to have been; None: it has been killed before it said so.
        skipped: The rows that were replaced, by rank.
    """

    record: Mapping[str, Any]
    number: int
    lines: Sequence[bytes] = field(repr=False)
    seals: list[tuple[int, str]] = field(default_factory=list)
    reached: int | None = None
    skipped: dict[int, list[int]] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """Its epoch."""
        return int(self.record["epoch"])

    @property
    def cursor(self) -> int:
        """Rows of the epoch, of all ranks, before it."""
        return int(self.record["cursor"])


def read_kept(folder: Path, name: str) -> bytes | None:
    """Return the bytes that `Ledger.keep` has named; None: they are gone.

    Raises:
        ConfigError: They are others.
    """
    file = (folder if folder.is_dir() else folder.parent) / KEPT / Path(name).name
    try:
        with file.open("rb") as kept:
            data = kept.read(MOST_KEPT + 1)
    except OSError:
        return None
    if _name_of(data) != name:
        raise ConfigError(f"{redacted(file)} is damaged: it is not what the run has written")
    return data


def read_ledger(folder: Path) -> list[Start]:
    """Return the loops that a run has recorded, the oldest first.

    Raises:
        ConfigError: The folder has no ledger, or it cannot be read.
    """
    path = folder / FILE if folder.is_dir() else folder
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{redacted(path)} cannot be read ({error.strerror}): name the stats_dir of make_loader, or the log_dir or "
            "checkpoint_dir of fit"
        ) from error
    found: dict[int, Start] = {}
    known: dict[str, Any] = {}
    lines: list[bytes] = []
    loops = 0
    for text, line in _intact(content, known):
        lines.append(text)
        if "cursor" in line:
            if known.keys() >= ALWAYS:  # else a line before it was damaged later
                found[loops] = Start(dict(known), loops, tuple(lines))
            loops += 1
        elif (start := found.get(line.get("loop", loops - 1))) is None:
            continue
        elif "to" in line:
            start.reached = start.cursor + line["to"]
            start.seals.extend([(start.reached, line["chain"])] if line["chain"] else [])
        else:
            start.skipped.setdefault(line["rank"], []).extend(line["skipped"])
    if not found:
        raise ConfigError(f"{redacted(path)} has no start of a loop: it is damaged, or of another program")
    return list(found.values())


def _loops(content: bytes) -> int:
    """Return how many starts of loops a ledger has."""
    return sum("cursor" in line for _, line in _intact(content, {}))


def _name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:NAME_CHARACTERS]


def _intact(content: bytes, known: dict[str, Any]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the intact lines and what they say. Let `known` be the record of the latest start."""
    for text in content.split(b"\n"):
        if line := _parsed(text):
            known.update(line if "cursor" in line else {})
            yield text, line


def _parsed(text: bytes) -> dict[str, Any]:
    """Return the content of a line; nothing if no ledger has such a line, as if a kill cut it off."""
    try:
        line = json.loads(text)
        if isinstance(line, list):
            rows, *others = line
            line = {"to": rows, "chain": "", **{"chain" if isinstance(each, str) else "loop": each for each in others}}
        numbers = [line[name] for name in NUMBERS if line.get(name) is not None] + line.get("skipped", [])
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
    is_one = any(line.keys() >= names for names in LINES)
    is_sound = all(type(number) is int and 0 <= number < MOST for number in numbers)
    return line if is_one and is_sound and isinstance(line.get("chain", ""), str) else {}
