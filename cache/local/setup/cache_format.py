"""The file that names the format of a cache."""

from __future__ import annotations

import json
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from dataload.cache.local.setup import recovery
from dataload.errors import ConfigError
from dataload.runtime.durable_file import write_durably

FORMAT = 5


def check(path: Path) -> None:
    """Check the format of the cache at `path`. Create the file in a folder without one.

    The caller holds the set-up lock.

    Raises:
        ConfigError: The cache has another format.
        OSError: The disk fails.
    """
    file = path / "FORMAT"
    if not file.exists():
        if stat.S_IMODE(path.stat().st_mode) != 0o700:
            with suppress(PermissionError):  # `preflight.check_private` tells what that means.
                path.chmod(0o700)
        recovery.doubt(path / "index")  # It may have lost other files besides.
        write_durably(file, json.dumps({"format": FORMAT, "uuid": str(uuid.uuid4())}))
        return
    try:
        found = json.loads(file.read_text())["format"]
    except (ValueError, KeyError, TypeError):
        found = "unreadable"
    if found != FORMAT:
        raise ConfigError(
            f"cache_dir {path} has format {found}, this version reads {FORMAT}: remove it or name another"
        )
