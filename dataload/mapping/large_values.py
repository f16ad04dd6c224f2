"""Digests of large collections, such as vocabularies: identities are compared each time that a blob is cached."""

from __future__ import annotations

import hashlib
import json
import operator
from typing import Any

FEWEST = 1000  # members; smaller collections are described fast enough
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


class LargeValues:
    """Computes the digest of a large collection of plain values, and keeps it until the members change."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, tuple[Any, ...], str]] = {}  # by id: the value, its members, its digest

    def digest(self, value: Any) -> str | None:
        """Return the digest of a value, or None if it is not a large collection of strings, bytes and numbers."""
        if type(value) not in (dict, list, tuple, set, frozenset) or len(value) < FEWEST:
            return None
        members = (*value, *value.values()) if isinstance(value, dict) else (*value,)
        _, before, digest = self._known.get(id(value), (None, (), ""))
        if len(members) != len(before) or not all(map(operator.is_, members, before)):
            if not _PLAIN.issuperset(map(type, members)):
                return None
            described = [[type(each).__qualname__, repr(each)] for each in members]
            content = json.dumps(sorted(described) if isinstance(value, (set, frozenset)) else described)
            digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
            self._known[id(value)] = value, members, digest
        return digest
