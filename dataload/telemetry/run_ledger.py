"""The ledger of a run: a file of JSON lines that tell what each loop began with, from which its batches follow.

A line that starts a loop has its record, without what is equal in the start before it. The writer holds a lock on the
file, reads it, and appends a line, so that both sides merge the same lines; a line that a kill cut off is passed over.

A line that seals has a digest of all lines up to the loop's start and of the rows that the loop has handed out, so the
seals are a chain: a changed line, or a changed row, changes each later one. Ranks that replace bad rows say which.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError
from dataload.runtime.redact import redacted

FILE = "ledger.jsonl"
DIGEST_BYTES = 12
FIRST_SEAL = 1 << 10  # batches of a loop; each further seal comes after twice as many
MOST_SKIPPED = 1000  # rows that a loop of a rank names
LINES = {"cursor"}, {"to", "chain"}, {"skipped", "rank"}  # what tells the kinds of lines
NUMBERS = ("cursor", "to", "rank", "epoch", "ranks", "nodes", "rows", "batch_size", "step", "accumulate")
MOST = 1 << 62  # of these
ALWAYS = {"epoch", "ranks", "nodes", "rows", "batch_size", "order", "recipe"}  # in a record

Rows = npt.NDArray[np.int64]

log = logging.getLogger(__name__)


class Chain:
    """The digest of a ledger's lines, and of the rows of a loop.

    Args:
        lines: The intact lines up to the start of the loop.
    """

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._hash = hashlib.blake2b(b"\n".join(lines), digest_size=DIGEST_BYTES, person=b"run ledger")

    def add(self, cursor: int, rows: Rows) -> None:
        """Add the rows of a batch, which begins after `cursor` rows of the epoch."""
        self._hash.update(cursor.to_bytes(8, "little"))
        self._hash.update(np.ascontiguousarray(rows, "<i8").data)

    @property
    def text(self) -> str:
        """The digest."""
        return base64.b64encode(self._hash.digest()).decode()


class Ledger:
    """Writes the ledger of a run for one loop.

    Args:
        folder: Its folder; None writes nothing.
        rank: The data-parallel rank.
        writes: Whether this process writes the starts and seals. All write which rows they replaced.

    Notes: a failure to write is logged, and the loop goes on without a ledger.
    """

    def __init__(self, folder: Path | None, rank: int, *, writes: bool) -> None:
        self._path = None if folder is None else folder / FILE
        self._rank, self._writes = rank, writes
        self._chain: Chain | None = None
        self._end, self._sealed, self._batches, self._due = -1, -1, 0, FIRST_SEAL
        self._skipped = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.seal()

    def start(self, record: Callable[[], Mapping[str, Any]]) -> None:
        """Record the start of the loop. record: returns what it begins with."""
        if self._path is None or not self._writes:
            return
        content = record()
        known = dict[str, Any]()
        lines = list[bytes]()

        def line(before: bytes) -> Mapping[str, Any]:
            lines.extend(text for text, _ in _intact(before, known))
            place = {"cursor": content["cursor"]}  # the mark of a start
            return {**{name: value for name, value in content.items() if known.get(name) != value}, **place}

        if (added := self._append(line)) is not None:
            self._chain = Chain([*lines, added])

    def hand_out(self, cursor: int, end: int, rows: Rows | None, skipped: Sequence[int]) -> None:
        """Record a batch of this rank.

        Args:
            cursor: Rows of the epoch before its global batch.
            end: Rows of the epoch up to the end of its global batch.
            rows: Its rows, int64 [n].
            skipped: Those that were replaced.
        """
        if skipped:
            self._skip(skipped)
        if self._chain is None or rows is None:
            return
        self._chain.add(cursor, rows)
        self._end, self._batches = end, self._batches + 1
        if self._batches >= self._due:
            self._due *= 2
            self.seal()

    def seal(self) -> None:
        """Record a digest of the rows up to here."""
        if self._chain is not None and self._end != self._sealed:
            self._sealed = self._end
            content = {"to": self._end, "chain": self._chain.text}
            self._append(lambda _: content)

    def _skip(self, rows: Sequence[int]) -> None:
        rows = rows[: MOST_SKIPPED - self._skipped]
        if rows:
            self._skipped += len(rows)
            self._append(lambda _: {"skipped": list(rows), "rank": self._rank})

    def _append(self, line: Callable[[bytes], Mapping[str, Any]]) -> bytes | None:
        """Append line(bytes of the file). Return it; None if that failed."""
        if self._path is None:
            return None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab+", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # Closing the file releases it.
                file.seek(0)
                content = file.read()
                added = json.dumps(line(content), separators=(",", ":")).encode()
                after_a_cut = b"\n" if content and not content.endswith(b"\n") else b""
                file.write(after_a_cut + added + b"\n")
                os.fsync(file.fileno())
        except OSError as error:
            log.warning("the ledger of the run ends here: %s cannot be written: %s", self._path, error)
            self._path = None
            return None
        return added


@dataclass(frozen=True)
class Start:
    """A loop as the ledger has it.

    Attributes:
        record: What it began with, complete.
        number: Its number among the loops of the ledger, from 0.
        lines: The intact lines of the ledger up to it.
        seals: Rows of the epoch, and the digest that this process wrote after it had handed out so many.
        skipped: The rows that were replaced, by rank.
    """

    record: Mapping[str, Any]
    number: int
    lines: Sequence[bytes] = field(repr=False)
    seals: list[tuple[int, str]] = field(default_factory=list)
    skipped: dict[int, list[int]] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """Its epoch."""
        return int(self.record["epoch"])

    @property
    def cursor(self) -> int:
        """Rows of the epoch, of all ranks, before it."""
        return int(self.record["cursor"])


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
    found: list[Start] = []
    known: dict[str, Any] = {}
    lines: list[bytes] = []
    for text, line in _intact(content, known):
        lines.append(text)
        if "cursor" in line:
            if known.keys() >= ALWAYS:  # else a line before it was damaged later
                found.append(Start(dict(known), len(found), tuple(lines)))
        elif found and "to" in line:
            found[-1].seals.append((line["to"], line["chain"]))
        elif found:
            found[-1].skipped.setdefault(line["rank"], []).extend(line["skipped"])
    if not found:
        raise ConfigError(f"{redacted(path)} has no start of a loop: it is damaged, or of another program")
    return found


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
        numbers = [line[name] for name in NUMBERS if line.get(name) is not None] + line.get("skipped", [])
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
    is_one = any(line.keys() >= names for names in LINES)
    is_sound = all(type(number) is int and 0 <= number < MOST for number in numbers)
    return line if is_one and is_sound and isinstance(line.get("chain", ""), str) else {}
