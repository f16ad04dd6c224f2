"""Classification of the errors of all store clients: transient, denied, HTTP status."""

from __future__ import annotations

import re

from dataload.errors import DataloadError

# Packages whose errors are failed requests though not OSErrors: for a truncated body, aiohttp's ClientPayloadError.
TRANSPORTS = frozenset({"aiobotocore", "aiohttp", "botocore", "obstore"})

_STATUS_TEXT = re.compile(r"status code: (\d{3})")  # in the messages of obstore
_DENIALS = ("PermissionDeniedError", "UnauthenticatedError")  # of obstore; not subclasses of PermissionError


class UnsuitableError(Exception):
    """obstore cannot read or list this object; the message gives the reason.

    Args:
        reason: Why obstore cannot read it.
        whole_store: The reason applies to all objects of the store.
    """

    def __init__(self, reason: str, *, whole_store: bool = True) -> None:
        super().__init__(reason)
        self.whole_store = whole_store


def is_store_error(error: BaseException) -> bool:
    """Return whether the store or the network failed, as opposed to a bug in the program."""
    return isinstance(error, OSError) or _client(error) in TRANSPORTS


def underlying_error(error: BaseException) -> BaseException:
    """Return the real error: fsspec's HTTP filesystem reports every failed size request as "not found"."""
    cause = error.__cause__
    if cause is None or not isinstance(error, FileNotFoundError) or _client(cause) != "aiohttp" or status(cause) == 404:
        return error
    return cause


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed."""
    if not is_store_error(error) or isinstance(error, (FileNotFoundError, DataloadError)) or denied(error):
        return False
    code = status(error)
    return code is None or code in (408, 429) or code >= 500


def denied(error: BaseException) -> bool:
    """Return whether the store rejected the credentials."""
    return isinstance(error, PermissionError) or type(error).__name__ in _DENIALS or status(error) in (401, 403)


def status(error: BaseException) -> int | None:
    """Return the HTTP status behind an error; None without one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(code := getattr(cause, "status", None), int):  # aiohttp
            return code
        response = getattr(cause, "response", None)
        if type(cause).__module__.startswith("obstore"):
            found = _STATUS_TEXT.search(str(cause))
            if found or type(cause).__name__ == "PreconditionError":
                return int(found[1]) if found else 412
        if isinstance(response, dict):  # botocore
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        cause = cause.__cause__
    return None


def _client(error: BaseException) -> str:
    """Return the package that defines an error."""
    return type(error).__module__.partition(".")[0]
