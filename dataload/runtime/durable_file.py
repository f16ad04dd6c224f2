"""Small files that survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path


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
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Flush the renames in a folder to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
