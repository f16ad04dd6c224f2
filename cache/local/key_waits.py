"""Waits of a tier for key locks that other threads and processes hold."""

from __future__ import annotations

import errno
import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dataload.cache.local.directory import CacheFolder
from dataload.cache.local.staging import users
from dataload.cache.tier import FILL_SECONDS, MAKE_SECONDS, BlobKey, Waited

if TYPE_CHECKING:
    from dataload.cache.local.tier import LocalTier

WAITS = "cache %s: waiting for another process, which runs and has been making %s for more than %g s"

log = logging.getLogger(__name__)


def acquire(tier: LocalTier, key: BlobKey, stack: ExitStack) -> CacheFolder | None:
    """Acquire the lock of a key until `stack` ends. Return the folder that the lock belongs to.

    Return None after `FILL_SECONDS`, or if the lock fails: the caller then fetches without caching, so there is no
    deadlock. Later calls for this key do not wait until its lock was free again.
    """
    folder = tier.opened()
    if folder is not None:
        with tier.attempt("locking a blob", folder), ExitStack() as own:
            began, patience = time.monotonic(), _patience(tier, key)
            if own.enter_context(folder.locks.hold(key.digest, patience)):
                tier.busy.discard(key.digest)
                stack.push(own.pop_all())
                return folder
            if patience:
                tier.busy.add(key.digest)
                reason = f"another process has held its lock for {time.monotonic() - began:.0f} s; {users(tier.path)}"
                tier.health.report("locking a blob", TimeoutError(errno.ETIMEDOUT, reason, key.name))
    return None


def wait_for_holder(tier: LocalTier, key: BlobKey) -> Waited:
    """Wait until no other process holds the lock of a key, as long as that process runs."""
    folder, deadline, is_running = tier.opened(), tier.clock() + MAKE_SECONDS, True
    while folder is not None and is_running and tier.clock() < deadline:
        is_running = False
        with tier.attempt("waiting for a blob", folder):
            with folder.locks.hold(key.digest, _patience(tier, key)) as held:
                if held:
                    tier.busy.discard(key.digest)
                    return Waited.FOR_PROCESS
            tier.busy.add(key.digest)
            is_running = folder.locks.is_running(key.digest)
            if not is_running:
                reason = f"the process that makes it was stopped; {users(tier.path)}"
                tier.health.report("waiting for a blob", TimeoutError(errno.ETIMEDOUT, reason, key.name))
            elif tier.health.is_new(f"wait for {key.name}"):
                log.warning(WAITS, tier.path, key.name, FILL_SECONDS)
    return Waited.IN_VAIN


def _patience(tier: LocalTier, key: BlobKey) -> float:
    return 0 if tier.health.writes.tripped or key.digest in tier.busy else FILL_SECONDS
