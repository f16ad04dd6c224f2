"""What went wrong at a store, whichever client says so: passing or not, denied, and with which status."""

from __future__ import annotations

import re

from dataload.errors import DataloadError

# Packages whose errors are a request's, though they are no OSError: a body cut short is aiohttp's ClientPayloadError.
TRANSPORTS = frozenset({"aiobotocore", "aiohttp", "botocore", "obstore"})

_SAID_STATUS = re.compile(r"status code: (\d{3})")  # by obstore, in its words
_DENIALS = ("PermissionDeniedError", "UnauthenticatedError")  # obstore's, which are no PermissionError


def is_trouble(error: BaseException) -> bool:
    """Whether the store or the way to it failed, as against a mistake in the program."""
    return isinstance(error, OSError) or _client(error) in TRANSPORTS


def meant(error: BaseException) -> BaseException:
    """What went wrong: fsspec has HTTP say "not found" of whatever happens when it asks for an object's size."""
    cause = error.__cause__
    if cause is None or not isinstance(error, FileNotFoundError) or _client(cause) != "aiohttp" or status(cause) == 404:
        return error
    return cause


def passing(error: BaseException) -> bool:
    """Whether trying again may help: not with what the store has decided."""
    if not is_trouble(error) or isinstance(error, (FileNotFoundError, DataloadError)) or denied(error):
        return False
    code = status(error)
    return code is None or code in (408, 429) or code >= 500


def denied(error: BaseException) -> bool:
    """Whether the store knows nobody of that name, or does not let them in."""
    return isinstance(error, PermissionError) or type(error).__name__ in _DENIALS or status(error) in (401, 403)


def status(error: BaseException) -> int | None:
    """The HTTP status behind an error, where there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(said := getattr(cause, "status", None), int):  # aiohttp
            return said
        response = getattr(cause, "response", None)
        if type(cause).__module__.startswith("obstore"):
            words = _SAID_STATUS.search(str(cause))
            if words or type(cause).__name__ == "PreconditionError":
                return int(words[1]) if words else 412
        if isinstance(response, dict):  # botocore
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        cause = cause.__cause__
    return None


def _client(error: BaseException) -> str:
    """The package that an error is of."""
    return type(error).__module__.partition(".")[0]
