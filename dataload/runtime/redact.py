"""Removal of credentials from text before it is shown or stored."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote

CREDENTIALS = re.compile(
    "key|secret|tok|pass|cred|auth|user|session|cookie|header|sign|sig$|sas|expires|x-amz|connection[-_]string|"
    "jwt|pwd|^code$",
    re.IGNORECASE,
)
"""Matches the names of options and query parameters that hold credentials."""

SHORTEST_SECRET = 4  # characters: shorter ones are in any text

# Names and values of options about credentials that are none themselves.
_NO_SECRET = re.compile("(enabled|type|region|signer|endpoint|delegation|user|name|ur[il])$", re.IGNORECASE)
_WORDS = {"true", "false", "none", "basic", "bearer", "oauth2"}

_FIELD = re.compile(r"([\w.-]+)=(.+)")  # of a connection string or a query
_BEHIND_USER = re.compile(r"[^=:]+:(.+)")

# Up to the last @ of a host: a password may have others. In Azure's URLs the name of a container may stand before it.
_NOT_AZURE = "(?<!abfs:)(?<!abfss:)(?<!wasb:)(?<!wasbs:)"
_USERINFO = re.compile(rf"(?<![\w/])(?:{_NOT_AZURE}//[^/?#\s]*@|//[^/?#\s]*:[^/?#\s]*@)")
# Signatures and tokens of presigned URLs. The version of an object is no secret.
_QUERY = re.compile(r"(\?versionId=[^?&\s'\"]*)?(?(1)([?&][^\s'\"]*)?|\?[^\s'\"]+)")

# Query parameters of the signatures of presigned URLs: of AWS and Google; of AWS, Google and CloudFront, with
# "Signature"; of Azure, with "sig".
_SIGNATURE = re.compile("x-(amz|goog)-.*", re.IGNORECASE)
_OLDER_SIGNATURE = re.compile("signature|expires|awsaccesskeyid|googleaccessid|key-pair-id|policy", re.IGNORECASE)
_AZURE_SIGNATURE = re.compile("s(ig|v|s|rt|p|t|e|pr|ip|r|dd|i|koid|ktid|kt|ke|ks|kv|aoid|uoid|cid)|rsc[cdelt]")


def without_signature(path: str) -> str:
    """Return a path, or a presigned URL without its signature. Other parameters of its query may name the object."""
    address, mark, query = path.partition("?")
    if not mark or "://" not in address:
        return path
    names = {part.partition("=")[0] for part in query.split("&")}
    patterns = [_SIGNATURE]
    patterns += [_OLDER_SIGNATURE] * any(name.lower() == "signature" for name in names)
    patterns += [_AZURE_SIGNATURE] * ("sig" in names)
    signed = {name for name in names if any(pattern.fullmatch(name) for pattern in patterns)}
    kept = [part for part in query.split("&") if part.partition("=")[0] not in signed]
    return "?".join(filter(None, (address, "&".join(kept)))) if signed else path


def redacted(text: object, secrets: Iterable[str] = ()) -> str:
    """Return `text` on one line, its URLs without user, password and query, except a version of S3.

    Args:
        text: The text.
        secrets: What it must not show besides, see `secrets_of`.
    """
    text = " ".join(str(text).split())
    for secret in sorted(secrets, key=len, reverse=True):
        forms = "|".join(map(re.escape, {secret, " ".join(secret.split()), repr(secret)[1:-1]}))
        text = re.sub(rf"(?<![\w-])(?:{forms})(?![\w-])", "…", text)  # "iceberg", but no part of "iceberg_tables"
    return _USERINFO.sub("//", _QUERY.sub(r"\1", text))


def secrets_of(options: Any, *, is_secret: bool = False) -> set[str]:
    """Return the credentials in options, at any depth: of those named so, and of URLs and connection strings.

    Args:
        options: The options, or a value of one.
        is_secret: Whether the name of this value says so.
    """
    if isinstance(options, Mapping):
        return set().union(*(secrets_of(each, is_secret=_named_so(str(n), is_secret)) for n, each in options.items()))
    if isinstance(options, (list, tuple)):
        return set().union(*(secrets_of(each, is_secret=is_secret) for each in options))
    if not isinstance(options, (str, int)):
        return set()
    value = str(options)
    pieces = re.split(r"[\s;&?]+", value)
    password = value.rpartition("@")[0].rpartition("//")[2].partition(":")[2]
    found = secrets_of([password, password.partition("@")[0]], is_secret=True) if password else set()
    for name, each in (match.groups() for match in map(_FIELD.fullmatch, pieces) if match):
        found |= secrets_of({name: each})
    if is_secret:
        parts = {value, *pieces}
        parts |= {match[1] for match in map(_BEHIND_USER.fullmatch, parts) if match}
        forms = {form for each in parts for form in (each, quote(each), quote_plus(each), unquote(each))}
        found |= {form for form in forms if len(form) >= SHORTEST_SECRET and form.lower() not in _WORDS}
    return found


def _named_so(name: str, is_inside: bool) -> bool:
    """Return whether an option of this name, perhaps inside of a secret one, is a secret."""
    return not _NO_SECRET.search(name) and (is_inside or CREDENTIALS.search(name) is not None)


def cause_of(error: Exception, secrets: Iterable[str] = ()) -> Exception | None:
    """Return `error` as the cause of another one; None if the traceback would, or may, show credentials."""
    shown: list[BaseException] = [error]
    for seen in shown:  # It grows. Causes may make a cycle.
        text = " ".join("".join(traceback.format_exception_only(seen)).split())
        if redacted(text, secrets) != text or quotes_input(seen):
            return None
        members = seen.exceptions if isinstance(seen, BaseExceptionGroup) else ()
        shown += [each for each in (seen.__cause__ or seen.__context__, *members) if each and each not in shown]
    return error


def quotes_input(error: BaseException) -> bool:
    """Return whether the text of an error quotes what was given, such as a store's answer, a header or a URL.

    Those of pydantic do, and those of requests and http.client about headers and URLs.
    """
    module = type(error).__module__
    is_of_requests = module.startswith("requests") or str(error).startswith("Invalid header")
    return module.startswith("pydantic") or (isinstance(error, ValueError) and is_of_requests)


def without_credentials(text: str) -> str:
    """Return the URL `text` without user, password and the parameters that hold credentials."""
    text, _, fragment = _USERINFO.sub("//", text).partition("#")
    if fragment and not CREDENTIALS.search(fragment.partition("=")[0] if "=" in fragment else ""):
        text += f"#{fragment}"
    address, mark, query = text.partition("?")
    kept = [part for part in query.split("&") if not CREDENTIALS.search(part.partition("=")[0])]
    return address + mark * bool(kept) + "&".join(kept)


def public(value: Any) -> Any:
    """Return options, perhaps nested, without those that hold credentials, and URLs without their credentials."""
    if isinstance(value, Mapping):
        return {name: public(each) for name, each in value.items() if not CREDENTIALS.search(str(name))}
    if isinstance(value, (list, tuple)):
        return [public(each) for each in value]
    return without_credentials(value) if isinstance(value, str) else value
