"""Whether the index of a cache can be trusted after a crash of the machine.

LMDB without syncs survives crashes of processes, not of the machine. So a file beside it, `index/state`, records its
state. It is read before LMDB opens the index, because opening a torn index can crash the process.

    <boot id>   opened since this boot of the machine, and not closed
    closed      closed by its last process, and synced to disk
    (missing)   being created, or in doubt: a part of the folder was removed while processes ran, or LMDB reported
                damage

An index is trusted if it was closed, or if it was opened since this boot.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CLOSED = "closed"


def boot_id() -> str:
    """Return the ID of this boot of the machine; "" if the kernel provides none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def trusted(index: Path) -> bool:
    """Return whether the index at this path can be trusted. Raises OSError."""
    state = _state(index)
    return state == _CLOSED or state == boot_id() != ""


def note_open(index: Path) -> None:
    """Record durably that the index is open and valid until the end of this boot. Raises OSError."""
    if _state(index) != boot_id():
        write_durably(index / "state", boot_id())


def note_closed(index: Path) -> None:
    """Record that the index is synced and no process has it open. A state in doubt stays. Raises OSError."""
    if _state(index) == boot_id() != "":
        write_durably(index / "state", _CLOSED)


def doubt(index: Path) -> None:
    """Make the next process that has the folder to itself rebuild the index."""
    with suppress(OSError):
        (index / "state").unlink(missing_ok=True)


def write_durably(file: Path, text: str) -> None:
    """Replace a file by `text`, so that the change survives a power failure. Raises OSError."""
    draft = file.with_name(f"locks.{file.name}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    draft.replace(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _state(index: Path) -> str | None:
    try:
        return (index / "state").read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
