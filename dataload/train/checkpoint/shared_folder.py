"""A check that all ranks see the same folder. Network filesystems may cache listings, so it retries."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

from dataload.errors import ConfigError
from dataload.train.ranks.collectives import gather, is_first, on_first, ranks_by

SECONDS = 30.0  # how long an NFS client may serve a cached listing
PAUSE = 0.1  # seconds between two tries


def require_shared(folder: Path, probe_prefix: str) -> None:
    """Raise an error unless all ranks see the same folder, for which each rank may have its own path.

    Rank 0 creates the folder and, for a moment, an empty probe folder in it. The other ranks look for the probe in a
    listing. A listing that shows the probe also shows all older entries of rank 0.

    Args:
        folder: This rank's path of the folder.
        probe_prefix: How the name of the probe begins. A nonce follows.

    Raises:
        ConfigError: A rank does not see the probe, or rank 0 cannot create it (on every rank).
    """
    ranks = gather((str(folder), socket.gethostname(), uuid4().hex))
    path, host, nonce = ranks[0]
    probe = folder / f"{probe_prefix}{nonce}"

    def create() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.mkdir()
        except OSError as error:
            raise ConfigError(
                f"checkpoint_dir {path!r}: rank 0, on host {host}, cannot create a folder there: {error}; "
                "give a folder in which it can"
            ) from error

    on_first(create)
    try:
        objections = last_objections(lambda: None if is_first() else _unseen(probe))
    finally:
        if is_first():
            with suppress(OSError):  # Another run in this folder may have removed it.
                probe.rmdir()
    answers = zip(ranks, objections, strict=True)
    views = ranks_by((own_path, own_host, objection) for (own_path, own_host, _), objection in answers)
    listed = [
        f"ranks {blind} do not see it in {own_path!r} on host {own_host} ({objection})"
        for (own_path, own_host, objection), blind in views.items()
        if objection is not None
    ]
    if listed:
        raise ConfigError(
            f"ranks see different folders as checkpoint_dir: rank 0 created an entry in {path!r} on host {host}, "
            f"{'; '.join(listed)}. Give a folder on a filesystem that all nodes mount"
        )


def last_objections(objection: Callable[[], str | None]) -> list[str | None]:
    """Call `objection` on every rank until it returns None on all, for SECONDS at most.

    The ranks exchange their objections after each call, so that no rank waits for another longer than one call takes.

    Returns:
        The last objection of each rank, in rank order.
    """
    deadline = monotonic() + SECONDS
    while True:
        tries = gather((objection(), monotonic() >= deadline))
        objections = [found for found, _ in tries]
        if len(tries) == 1 or not any(objections) or tries[0][1]:
            return objections
        sleep(PAUSE)


def _unseen(probe: Path) -> str | None:
    try:
        return None if probe in probe.parent.iterdir() else "no such entry"
    except OSError as error:
        return error.strerror
