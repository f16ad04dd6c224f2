"""Whether the index of a cache may be believed: it was closed last, or the machine has not stopped since it was opened.

LMDB without syncs survives the death of processes, not of the machine. So a file beside it, `index/state`, says how it
was left. It is read before LMDB is: opening what a power failure left torn can end the process.

    <boot id>   opened in this boot of the machine, and not closed since
    closed      closed by the last process that had it open, and on the disk as it was then
    (missing)   being made, or in doubt: something of the folder was removed under living processes, or LMDB found it
                damaged
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CLOSED = "closed"


def boot_id() -> str:
    """Names the time since the machine was started; "" where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def trusted(index: Path) -> bool:
    """Whether what the index at this path says may be believed. Raises OSError."""
    state = _state(index)
    return state == _CLOSED or state == boot_id() != ""


def note_open(index: Path) -> None:
    """From now on the index is only as good as this boot. On the disk when this returns; raises OSError."""
    if _state(index) != boot_id():
        write_durably(index / "state", boot_id())


def note_closed(index: Path) -> None:
    """The index is on the disk, and nobody has it open. Leaves one in doubt as it is. Raises OSError."""
    if _state(index) == boot_id() != "":
        write_durably(index / "state", _CLOSED)


def doubt(index: Path) -> None:
    """Have the next process that is alone in the folder make the index anew."""
    with suppress(OSError):
        (index / "state").unlink(missing_ok=True)


def write_durably(file: Path, text: str) -> None:
    """Replace a file by one that holds `text`, which a power failure does not take back. Raises OSError."""
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
