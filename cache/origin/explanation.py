"""Errors of stores as errors of dataload: what went wrong and, for S3, how to fix it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from dataload.cache.origin.errors import MISSING, denied, is_store_error, is_unsupported, status, underlying_error
from dataload.cache.origin.version import CHANGED, OF_TABLE
from dataload.errors import ConfigError, DataloadError, ObjectChanged, OriginError, OriginNotFound
from dataload.runtime.exhaustion import with_causes
from dataload.runtime.redact import cause_of, redacted, without_signature

ENDPOINT = "AWS_ENDPOINT_URL (or endpoint_url in storage_options)"
KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
RIGHTS = f"allow these keys to list and read the bucket, or set other ones by {KEYS}"
SPELLING = "check the spelling of the URL, because S3 also denies what is not there"
UNREACHABLE = f"set {ENDPOINT} to the store's address, or check the network and proxies"
TOKEN = "renew the token: log in again, or set a new AWS_SESSION_TOKEN with its keys"  # noqa: S105 (no password)
REGION = "set AWS_DEFAULT_REGION (or region_name in client_kwargs) to the region of the bucket"
ARCHIVED = "restore the object from the archive, or leave it out"
UNLISTABLE = "name its files in a list: the store does not know ListObjectsV2"
VACUUMED = (
    "its table says it has the file, so VACUUM or expire_snapshots has removed it as one of an old version: open a "
    "version that the table still keeps"
)
VENDED = (
    "if the table's catalog gave the credentials, load the table again for new ones, or pass storage_options whose "
    "credentials renew themselves"
)
PROXY = "check HTTP_PROXY and HTTPS_PROXY, or add the store's host to NO_PROXY"
CLOCK = "set the clock of this host, such as by timedatectl set-ntp true"

# The fixes for S3's error codes. An answer to HEAD has no code, only the HTTP status.
CODES = {
    "301": REGION,
    "400": f"{TOKEN}; or {REGION}",
    "403": f"{RIGHTS}; or {SPELLING}; or {TOKEN}; or {CLOCK}",
    "407": PROXY,
    "AccessDenied": f"{RIGHTS}; or {SPELLING}",
    "AllAccessDisabled": RIGHTS,
    "AuthorizationHeaderMalformed": f"{REGION}; or set {KEYS}",
    "ExpiredToken": TOKEN,
    "InvalidAccessKeyId": f"set {KEYS}, to a key of this store, or {ENDPOINT}",
    "InvalidObjectState": ARCHIVED,
    "InvalidToken": TOKEN,
    "NoSuchBucket": f"check the name of the bucket, and {ENDPOINT}",
    "PermanentRedirect": REGION,
    "RequestTimeTooSkewed": CLOCK,
    "SignatureDoesNotMatch": f"set {KEYS}, to a key with its own secret",
    "SlowDown": "lower in_flight of CacheConfig",
    "TokenRefreshRequired": TOKEN,
}
# The fixes for errors of botocore.
TYPES = {
    "ConnectTimeoutError": UNREACHABLE,
    "EndpointConnectionError": UNREACHABLE,
    "MissingDependencyException": "pip install awscrt, with which botocore signs requests for several regions",
    "NoCredentialsError": f"set {KEYS}, or anon=True in storage_options for a public bucket",
    "NoRegionError": "set AWS_DEFAULT_REGION (or region in ~/.aws/config)",
    "PartialCredentialsError": f"set {KEYS}",
    "ProfileNotFound": "set AWS_PROFILE to a profile of ~/.aws/config, or unset it",
    "ProxyConnectionError": PROXY,
    "ReadTimeoutError": UNREACHABLE,
    "SSOTokenLoadError": "log in: aws sso login",
    "SSLError": "set AWS_CA_BUNDLE to the file of the store's certificates, or begin the endpoint with http://",
    "UnauthorizedSSOTokenError": "log in again: aws sso login",
}

# The fixes for what errors say, of botocore and obstore.
TEXTS = {
    "Invalid endpoint": f"begin {ENDPOINT} with http:// or https://",
    "InvalidCertificate": TYPES["SSLError"],
    "kind: Connect": UNREACHABLE,
}

# The bucket is in the host, or the path begins with it.
_AMAZON_OVER_HTTP = re.compile(
    r"https?://((?P<host>[^/]+)\.s3|s3)[.-]([a-z0-9-]+\.)*amazonaws\.com(\.cn)?(/(?P<bucket>[^/?]*)|$)"
)
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_TEXT = re.compile(r"<Message>([^<]*)</Message>")


@contextmanager
def opening(what: str, rejected: str) -> Iterator[None]:
    """Raise the errors of a filesystem's constructor. FTP and SFTP connect in it.

    Args:
        what: The URL of an object or of a server.
        rejected: The message about options that the filesystem rejects.

    Raises:
        ConfigError: The filesystem rejects its options, or its package is not installed.
        OriginError: The server cannot be reached, or it denies access.
    """
    try:
        yield
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"{rejected}: {redacted(error)}") from cause_of(error)
    except DataloadError:
        raise
    except Exception as error:
        if not is_store_error(error):
            raise
        raise OriginError(f"{redacted(what)}: the server {explained(error, in_s3=False)}") from cause_of(error)


def rejected_options(path: str, error: Exception) -> str:
    """Return the message about options that a filesystem rejects, with the fix."""
    fix = fix_of(error)
    return f"{redacted(path)} cannot be requested with these options: {redacted(error)}" + (f"; {fix}" if fix else "")


def fix_of(error: BaseException) -> str | None:
    """Return how to fix an error of S3; None if that is unknown."""
    code, _ = _answer(error)
    if target := _redirect(error):
        return f"if you trust {target}, to which it redirects and which is not followed, set {ENDPOINT} to it"
    operations = [str(getattr(cause, "operation_name", "")) for cause in with_causes(error)]
    if is_unsupported(error) and "ListObjectsV2" in operations:
        return CODES.get(code, UNLISTABLE)
    for cause in with_causes(error):
        if fix := TYPES.get(type(cause).__name__):
            return fix
        if found := next((fix for text, fix in TEXTS.items() if text in str(cause)), None):
            return found
    return CODES.get(code) or (RIGHTS if denied(error) else None)


def amazon_hint(url: str) -> str:
    """Return how to name what is at an HTTP address of Amazon S3; nothing for other URLs."""
    match = _AMAZON_OVER_HTTP.match(url)
    bucket = (match["host"] or match["bucket"]) if match else None
    return f"; for S3 itself, name s3://{bucket}/…" if bucket else ""


def origin_error(
    raised: BaseException, what: str, address: str, *, in_s3: bool, version: str | None = None
) -> OriginError | ConfigError | None:
    """Return an error of a store's client as an error of dataload; None if it is not the store's.

    Args:
        raised: The error.
        what: Path of the object or folder, perhaps with a byte range.
        address: Address of the store.
        in_s3: Whether the store speaks S3.
        version: That of the object when the dataset was listed; None: it was not.
    """
    error = underlying_error(raised)
    where = redacted(f"s3://{what}" if in_s3 and "://" not in what else what)
    if isinstance(error, MISSING):
        if version is not None:
            way = VACUUMED if version.startswith(OF_TABLE) else "restore it, or start the program again"
            return OriginNotFound(f"{where} is gone from {address}: {way}")
        fix = (in_s3 and fix_of(error)) or f"check its name and {ENDPOINT if in_s3 else 'the endpoint'}"
        return OriginNotFound(f"{where} does not exist at {address}: {fix}{amazon_hint(what)}")
    if isinstance(error, ValueError) and fix_of(error):  # of the endpoint, before the first request
        return ConfigError(rejected_options(where, error))
    if isinstance(error, OriginError) or not is_store_error(error):
        return error if isinstance(error, OriginError) else None
    if status(error) == 412 or (version is not None and status(error) == 416):  # The latter: it is shorter now.
        return ObjectChanged(f"{where} {CHANGED}")
    text = explained(error, in_s3=in_s3)
    if (version or "").startswith(OF_TABLE) and fix_of(error) == TOKEN:
        text = f"{text}; {VENDED}"
    if status(error) in (400, 401, 403) and without_signature(what) != what:
        fix = "the signature of the URL has expired or is wrong: pass a new URL"
        text = f"denied access with status {status(error)}: {fix}"
    return OriginError(f"{where}: {address} {text}{amazon_hint(what)}")


def explained(error: BaseException, *, in_s3: bool) -> str:
    """Return what went wrong at a store, to be read after its address, and the fix."""
    if not in_s3:
        what_failed = "denied access, check the credentials" if denied(error) else f"failed: {type(error).__name__}"
        return f"{what_failed}: {_first_line(error)}"
    code, text = _answer(error)
    fix = fix_of(error)
    if fix == UNREACHABLE:
        what = "cannot be reached"
    elif fix != ARCHIVED and (denied(error) or fix in (TOKEN, CLOCK)):
        what = "denied access"
    else:
        what = "failed"
    reason = f"{code}: {text}" if code else f"{type(error).__name__}: {_first_line(error)}"
    if fix and code.isdecimal():
        fix += "; dataload doctor names the cause"
    return f"{what} ({reason}): {fix}" if fix else f"{what}: {reason}"


def _redirect(error: BaseException) -> str | None:
    """Return the host to which a store redirects; None for Amazon's redirect to the region of a bucket."""
    for cause in with_causes(error):
        response = getattr(cause, "response", None)
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}) if isinstance(response, dict) else {}
        if "location" in headers and "x-amz-bucket-region" not in headers:
            target = urlsplit(headers["location"])
            return redacted(f"{target.scheme}://{target.netloc}")
    return None


def _answer(error: BaseException) -> tuple[str, str]:
    """Return the code and the text of S3's answer. An answer without a body has its HTTP status as the code."""
    for cause in with_causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return str(response["Error"].get("Code", "")), redacted(response["Error"].get("Message", ""))
        if code := _CODE.search(str(cause)):  # of obstore
            text = _TEXT.search(str(cause))
            return code[1], redacted(text[1]) if text else ""
    return (str(status(error)), _first_line(error)) if status(error) else ("", "")


def _first_line(error: BaseException) -> str:
    first, *more = str(error).split("\n")
    return redacted(f"{first} {more[0]}" if first.endswith(":") and more else first)
