"""Making an index anew from the blobs' own footers, when the old one was lost or cannot be believed."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dataload.cache.local import blob_file
from dataload.cache.local.failpoints import step
from dataload.cache.local.index import Index, Row
from dataload.errors import CorruptEntry

log = logging.getLogger(__name__)


def rebuild(index: Index, path: Path, blobs: Path) -> None:
    """Drop the index at `path` and enter a row for each sound file below `blobs`; the others are removed.

    Only footers are read, some 10 µs a blob: what a power failure did to the contents is found when they are first
    read. Call it under the set-up lock, alone in the folder. Raises OSError and lmdb.Error; killed half-way, it leaves
    an index that is not believed.
    """
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, exist_ok=True)
    step("rebuild: dropped")
    index.make()
    entered = 0
    for folder in sorted(blobs.iterdir()):
        rows = list(_rows(folder))
        index.enter(rows)
        entered += len(rows)
    step("rebuild: entered")
    if entered:
        log.warning("cache %s: its index was lost, and made anew from %d blobs", path.parent, entered)


def _rows(folder: Path) -> Iterator[Row]:
    if not folder.is_dir() or folder.is_symlink():
        return
    now = time.time_ns()
    for file in folder.iterdir():
        try:
            footer, name, status = blob_file.read_footer(file)
            if footer.digest.hex() != file.name or file.name[:2] != folder.name:
                raise CorruptEntry(f"{file} holds another blob")
        except FileNotFoundError:
            continue
        except OSError as error:
            if not isinstance(error, CorruptEntry) and error.errno not in (errno.EIO, errno.EISDIR):
                raise
            _remove(file)
        else:
            yield Row(footer.digest, name, status.st_size, min(now, status.st_mtime_ns))


def _remove(file: Path) -> None:
    # Nothing in blobs/ was ever put there by anyone but us.
    with suppress(IsADirectoryError):
        file.unlink(missing_ok=True)
