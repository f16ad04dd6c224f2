"""Checks that all ranks see one folder, also through a network filesystem whose clients cache listings."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

from dataload.errors import ConfigError
from dataload.train.distributed import gather, is_first

SECONDS = 30.0  # for which an NFS client may take a folder to be as it was
PAUSE = 0.1


def require_shared(folder: Path, probe_prefix: str) -> None:
    """Raise ConfigError, on every rank, unless all ranks see one folder; each may have its own path of it.

    Rank 0 creates the folder, and for a moment an empty folder inside, which the ranks look for: `probe_prefix` and a
    nonce. They look in a listing, and a listing that shows it shows all older entries of rank 0's, too.
    """
    ranks = gather((str(folder), socket.gethostname(), uuid4().hex))
    if len(ranks) == 1:
        return
    path, host, nonce = ranks[0]
    probe = folder / f"{probe_prefix}{nonce}"
    failure = None
    if is_first():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.mkdir()
        except OSError as error:
            failure = str(error)
    if failure := gather(failure)[0]:
        raise ConfigError(f"checkpoint_dir {path!r}: rank 0, on host {host}, cannot create a folder there: {failure}")
    try:
        objections = last_objections(lambda: _unseen(probe))
    finally:
        if is_first():
            with suppress(OSError):  # Another run in this folder may have removed it.
                probe.rmdir()
    places: dict[tuple[str, str, str], list[int]] = {}
    for rank, (objection, (own_path, own_host, _)) in enumerate(zip(objections, ranks, strict=True)):
        if objection is not None:
            places.setdefault((own_path, own_host, objection), []).append(rank)
    if places:
        listed = "; ".join(
            f"ranks {blind} do not see it in {own_path!r} on host {own_host} ({objection})"
            for (own_path, own_host, objection), blind in places.items()
        )
        raise ConfigError(
            f"ranks see different folders as checkpoint_dir: rank 0 made an entry in {path!r} on host {host}, "
            f"{listed}. Give a folder on a filesystem that all nodes mount"
        )


def last_objections(objection: Callable[[], str | None]) -> list[str | None]:
    """Ask `objection` on every rank until no rank has one, for SECONDS at most; return those of the last time.

    The ranks meet after each try, so none waits longer for another than one try takes.
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
