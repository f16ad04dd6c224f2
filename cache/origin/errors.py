"""Classification of the errors of all store clients: transient, denied, HTTP status."""

from __future__ import annotations

import errno
import re

from dataload.errors import DataloadError
from dataload.runtime.exhaustion import with_causes

MISSING = (FileNotFoundError, NotADirectoryError)  # the latter for a path below a file
LASTING = (*MISSING, IsADirectoryError, DataloadError)
BAD_NAMES = (errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG)  # for which Python has no classes
# Errors that have no HTTP status although a retry cannot succeed, of botocore, aiohttp, ssl and ftplib.
PERMANENT = frozenset(
    {
        "ClientConnectorCertificateError",
        "ConfigParseError",
        "InvalidConfigError",
        "MissingDependencyException",
        "NoCredentialsError",
        "NoRegionError",
        "ParamValidationError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "SSOTokenLoadError",
        "SSLCertVerificationError",
        "UnauthorizedSSOTokenError",
        "error_perm",
    }
)
# Rejected credentials, for which the client has no PermissionError: of obstore, Azure, Google and paramiko.
DENIALS = frozenset(
    {
        "AuthenticationException",
        "ClientAuthenticationError",
        "DefaultCredentialsError",
        "PermissionDeniedError",
        "UnauthenticatedError",
    }
)

# Codes of S3, with status 400, that say nothing about the request itself.
PASSING = ("ExpiredToken", "InvalidToken", "RequestTimeout", "TokenRefreshRequired")
UNSUPPORTED = (501, 505)  # HTTP statuses for what a server cannot do

_PROVIDER = "External AWS credential provider"  # in the messages of obstore
_STATUS_TEXT = re.compile(r"status code: (\d{3})")  # in the messages of obstore
_REDIRECT = "redirect without LOCATION"  # in the messages of obstore: S3's answer to requests in a wrong region


class UnsuitableError(Exception):
    """obstore cannot read or list this object; the message gives the reason.

    Args:
        reason: Why obstore cannot read it.
        whole_store: The reason applies to all objects of the store.
        fix: What makes obstore suitable.
    """

    def __init__(self, reason: str, *, whole_store: bool = True, fix: str = "change that setting") -> None:
        super().__init__(reason)
        self.whole_store = whole_store
        self.fix = fix


class WrongBodyError(OSError):
    """The response does not contain the requested bytes."""


class HttpError(OSError):
    """A web server answered with an error.

    Args:
        message: The error.
        status: Its HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def is_store_error(error: BaseException) -> bool:
    """Return whether the store or the network failed, as opposed to a bug in the program.

    Each client of fsspec has its own exceptions. Of Python's own, these are raised for failed requests; the last one
    for a malformed response.
    """
    if isinstance(error, (OSError, EOFError, UnicodeError)):
        return True
    return isinstance(error, Exception) and _client(error) not in ("builtins", "dataload")


def underlying_error(error: BaseException) -> BaseException:
    """Return the real error: fsspec's HTTP filesystem reports every failed size request as "not found"."""
    cause = error.__cause__
    if cause is None or not isinstance(error, FileNotFoundError) or status(cause) == 404:
        return error
    if isinstance(cause, DataloadError):
        return cause
    # At its total timeout, aiohttp raises Python's TimeoutError.
    return cause if _client(cause) == "aiohttp" or isinstance(cause, (TimeoutError, ConnectionError)) else error


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed."""
    error = underlying_error(error)
    if not is_store_error(error) or isinstance(error, LASTING) or type(error).__name__ in PERMANENT or denied(error):
        return False
    if getattr(error, "errno", None) in BAD_NAMES:
        return False
    code = status(error)
    return code is None or code in (408, 429) or (code >= 500 and code not in UNSUPPORTED)


def denied(error: BaseException) -> bool:
    """Return whether the store rejected the credentials, or there are none."""
    if _PROVIDER in str(error):  # The request for credentials of a role may have failed.
        return "PermissionError" in str(error)
    return isinstance(error, PermissionError) or type(error).__name__ in DENIALS or status(error) in (401, 403)


def is_refusal(error: BaseException) -> bool:
    """Return whether a store may have rejected the credentials, which other ones could mend."""
    return status(error) in (400, 401, 403)


def is_unsupported(error: BaseException) -> bool:
    """Return whether a store may not know a part of the request."""
    return status(error) in (400, *UNSUPPORTED)


def is_passing(error: BaseException) -> bool:
    """Return whether a store rejects a request for the moment, not for what it asks."""
    return any(code in str(cause) for cause in with_causes(error) for code in PASSING)


def status(error: BaseException) -> int | None:
    """Return the HTTP status behind an error; None without one."""
    for cause in with_causes(error):
        response = getattr(cause, "response", None)
        named = [
            (cause, "status"),
            (cause, "status_code"),
            (response, "status_code"),
        ]  # aiohttp; Azure; httpx, requests
        if _client(cause) == "gcsfs":
            named.append((cause, "code"))
        for holder, name in named:
            if isinstance(code := getattr(holder, name, None), int):
                return code
        if type(cause).__module__.startswith("obstore"):
            found = _STATUS_TEXT.search(str(cause))
            if found or type(cause).__name__ == "PreconditionError":
                return int(found[1]) if found else 412
            if _REDIRECT in str(cause):
                return 301
        if isinstance(response, dict):  # botocore
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
    return None


def _client(error: BaseException) -> str:
    """Return the package that defines an error."""
    return type(error).__module__.partition(".")[0]
