"""The credentials of a store in S3, for as long as the store accepts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from fsspec.asyn import sync

# Credentials are fetched again this long before they expire, or once half of their time has passed.
RENEWED_BEFORE = timedelta(minutes=5)
UNCHANGED_SECONDS = 10.0  # for which rejected credentials are not fetched again if that has brought no others

Fetched = dict[str, Any]  # as a credential provider of obstore returns them


class Credentials:
    """A credential provider of obstore, over the s3fs session, which knows profiles, roles and instance metadata.

    Any thread may call it.

    Args:
        filesystem: Returns the s3fs filesystem.
        received: Credentials to use first; None: those of the session.

    Attributes:
        number: How many other credentials came before these.
    """

    def __init__(self, filesystem: Callable[[], Any], received: Fetched | None = None) -> None:
        self.number = 0
        self._filesystem = filesystem
        self._mutex = threading.Lock()
        self._held = received
        self._renew_at = _renewal(received)
        self._unchanged_at = -UNCHANGED_SECONDS

    def __call__(self) -> Fetched:
        held = self._held
        if held is not None and (self._renew_at is None or datetime.now(UTC) < self._renew_at):
            return held
        try:
            found = _fetched(self._filesystem())
        except Exception:
            if held is None or datetime.now(UTC) >= held["expires_at"]:
                raise
            found = held  # The service that renews them may be down for a while.
        self._held, self._renew_at = found, _renewal(found)
        return found

    def renew(self, number: int) -> bool:
        """Fetch credentials again after the store has rejected those with a number. Return whether there are others."""
        with self._mutex:
            if self.number != number:
                return True
            if time.monotonic() < self._unchanged_at + UNCHANGED_SECONDS:
                return False
            filesystem = self._filesystem()
            rejected = self._held or _fetched(filesystem)
            _forget_session(filesystem)
            found = _fetched(filesystem)
            self._held, self._renew_at = found, _renewal(found)
            if _identity(found) == _identity(rejected):
                self._unchanged_at = time.monotonic()
                return False
            self.number += 1
            return True


def provided(key: str, secret: str, token: str | None, expires_at: datetime | None = None) -> Fetched:
    """Return credentials as a provider of obstore does."""
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires_at}


def _renewal(credentials: Fetched | None) -> datetime | None:
    """Return when to fetch credentials again; None if they do not expire."""
    expires_at: datetime | None = None if credentials is None else credentials["expires_at"]
    return expires_at and expires_at - min(RENEWED_BEFORE, (expires_at - datetime.now(UTC)) / 2)


def _identity(credentials: Fetched) -> tuple[Any, ...]:
    return tuple(credentials[name] for name in ("access_key_id", "secret_access_key", "token"))


def _forget_session(filesystem: Any) -> None:
    """Make an s3fs filesystem read the environment and files again, and ask services again."""
    if filesystem.storage_options.get("session") is None:
        filesystem.session = None  # Older releases of s3fs would keep it.
    filesystem.connect(refresh=True)


def _fetched(filesystem: Any) -> Fetched:
    if filesystem.key and filesystem.secret:
        return provided(filesystem.key, filesystem.secret, filesystem.token)
    filesystem.connect()  # One that another process has sent has no session yet.
    found: Fetched = sync(filesystem.loop, _of_session, filesystem)
    return found


async def _of_session(filesystem: Any) -> Fetched:
    """Return the credentials of a filesystem's session. They expire if the session renews them."""
    found = await filesystem.session.get_credentials()
    if found is None:
        raise PermissionError("no credentials were found: give key and secret, or anon=True for a public bucket")
    frozen = await found.get_frozen_credentials()
    expires_at = getattr(found, "_expiry_time", None)  # botocore has no public name for it.
    return provided(frozen.access_key, frozen.secret_key, frozen.token, expires_at and expires_at.astimezone(UTC))
