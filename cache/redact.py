"""Keeping credentials out of what people and disks get to see."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"//[^/@\s]*@")
_QUERY = re.compile(r"\?(?!versionId=)[^\s'\"]*")  # signatures and tokens of presigned URLs


def redacted(text: object) -> str:
    """`text` on one line, its URLs without user, password and query."""
    return _USERINFO.sub("//", _QUERY.sub("", " ".join(str(text).split())))
