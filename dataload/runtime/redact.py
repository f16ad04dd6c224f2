"""Removal of credentials from text before it is shown or stored."""

from __future__ import annotations

import re

CREDENTIALS = re.compile(
    "key|secret|tok|pass|cred|auth|user|session|cookie|header|sign|sig$|sas|expires|x-amz|connection_string",
    re.IGNORECASE,
)
"""Matches the names of options and query parameters that hold credentials."""

_USERINFO = re.compile(r"(?<![\w/])//[^/?#\s]*@")  # up to the last @ of a host: a password may have others
_QUERY = re.compile(r"\?(?!versionId=)[^\s'\"]*")  # signatures and tokens of presigned URLs


def redacted(text: object) -> str:
    """Return `text` on one line, its URLs without user, password and query."""
    return _USERINFO.sub("//", _QUERY.sub("", " ".join(str(text).split())))


def unsigned(text: str) -> str:
    """Return the URL `text` without user, password and the query parameters that hold credentials."""
    address, mark, query = _USERINFO.sub("//", text).partition("?")
    kept = [part for part in query.split("&") if not CREDENTIALS.search(part.partition("=")[0])]
    return address + mark * bool(kept) + "&".join(kept)
