"""The credentials of a store, for as long as the store accepts them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from fsspec.asyn import sync

# Credentials are fetched again this long before they expire, or once half of their time has passed.
RENEWED_BEFORE = timedelta(minutes=5)
# If it has not helped to fetch rejected credentials again, this long passes before the next time: a role has others
# each time.
PAUSE = 30.0  # seconds

Fetched = dict[str, Any]  # as a credential provider of obstore returns them


def provided(key: str, secret: str, token: str | None, expires_at: datetime | None = None) -> Fetched:
    """Return credentials as a provider of obstore does."""
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires_at}


def fetched(filesystem: Any) -> Fetched:
    """Return the credentials of an s3fs filesystem."""
    if given := _given(filesystem):
        return given
    filesystem.connect()  # One that another process has sent has no session yet.
    return _of_session(filesystem, filesystem.session)


def renewed(filesystem: Any, held: Fetched | None) -> Fetched | None:
    """Return the credentials of a new session of s3fs, which uses them from now on; None if they are no other ones."""
    if not hasattr(filesystem, "call_s3") or filesystem.anon or _given(filesystem):
        return None
    if filesystem.storage_options.get("session") is not None:  # The caller's, which renews what it has.
        return None
    from aiobotocore.session import AioSession  # type: ignore[import-untyped]  # s3fs has imported it.

    session = AioSession(**filesystem.kwargs)
    found = _of_session(filesystem, session)
    rejected = [] if held is None else [held]
    if filesystem.session is not None:  # Without one, s3fs will open a new one, too.
        used: Fetched = {}
        with suppress(Exception):  # The session may have sources that are no longer valid.
            used = _of_session(filesystem, filesystem.session)
        rejected.append(used)
        if _identity(used) != _identity(found):  # Another client takes time and memory.
            filesystem.session = session  # Older releases of s3fs would keep the one before.
            filesystem.connect(refresh=True)
    return found if any(_identity(each) != _identity(found) for each in rejected) else None


def _renewal(credentials: Fetched | None) -> datetime | None:
    """Return when to fetch credentials again; None if they do not expire."""
    expires_at: datetime | None = None if credentials is None else credentials["expires_at"]
    return expires_at and expires_at - min(RENEWED_BEFORE, (expires_at - datetime.now(UTC)) / 2)


def _identity(credentials: Fetched) -> tuple[Any, ...]:
    return tuple(credentials.get(name) for name in ("access_key_id", "secret_access_key", "token"))


def _given(filesystem: Any) -> Fetched | None:
    """Return the credentials that the options of an s3fs filesystem name."""
    is_given = filesystem.key and filesystem.secret
    return provided(filesystem.key, filesystem.secret, filesystem.token) if is_given else None


def _of_session(filesystem: Any, session: Any) -> Fetched:
    """Return the credentials of a session. They expire if the session renews them."""
    found: Fetched = sync(filesystem.loop, _asked, session)
    return found


async def _asked(session: Any) -> Fetched:
    found = await session.get_credentials()
    if found is None:
        raise PermissionError("no credentials were found: give key and secret, or anon=True for a public bucket")
    frozen = await found.get_frozen_credentials()
    expires_at = getattr(found, "_expiry_time", None)  # botocore has no public name for it.
    return provided(frozen.access_key, frozen.secret_key, frozen.token, expires_at and expires_at.astimezone(UTC))


class Credentials:
    """A credential provider of obstore, over the fsspec filesystem, which knows profiles, roles and instance metadata.

    Any thread may call it.

    Args:
        filesystem: Returns the filesystem.
        received: Credentials to use first; None: those of the filesystem.
        fetch: Returns the credentials of the filesystem.
        others: Returns other ones than those that the store has rejected; None if there are none.

    Attributes:
        number: How many other credentials came before these.
    """

    def __init__(
        self,
        filesystem: Callable[[], Any],
        received: Fetched | None = None,
        fetch: Callable[[Any], Fetched] = fetched,
        others: Callable[[Any, Fetched | None], Fetched | None] = renewed,
    ) -> None:
        self.number = 0
        self._fetch, self._others = fetch, others
        self._filesystem = filesystem
        self._mutex = threading.Lock()
        self._held = received
        self._renew_at = _renewal(received)
        self._paused_until = -math.inf

    def __call__(self) -> Fetched:
        held = self._held
        if held is not None and (self._renew_at is None or datetime.now(UTC) < self._renew_at):
            return held
        number = self.number
        try:
            found = self._fetch(self._filesystem())
        except Exception:
            if held is None or datetime.now(UTC) >= held["expires_at"]:
                raise
            found = held  # The service that renews them may be down for a while.
        with self._mutex:
            if self.number != number and self._held is not None:
                return self._held  # `renew` was faster, and knows that the store rejects earlier ones.
            self._held, self._renew_at = found, _renewal(found)
        return found

    def renew(self, number: int) -> bool:
        """Fetch credentials again after the store has rejected those with a number. Return whether there are others."""
        with self._mutex:
            if self.number != number:
                return True
            if time.monotonic() < self._paused_until:
                return False
            with suppress(Exception):  # The source may be away. The caller raises the store's error.
                if self._finds_others():
                    self.number += 1
                    return True
        self.pause()
        return False

    def pause(self) -> None:
        """Renew nothing for a while, because that has not helped."""
        self._paused_until = time.monotonic() + PAUSE

    def _finds_others(self) -> bool:
        found = self._others(self._filesystem(), self._held)
        if found is None:
            return False
        self._held, self._renew_at = found, _renewal(found)
        return True
