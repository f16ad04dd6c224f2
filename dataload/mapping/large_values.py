"""Digests of large collections, such as vocabularies: identities are compared each time that a blob is cached."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from dataload.mapping.known_objects import stamp_of

FEWEST = 1000  # members; smaller collections are described fast enough
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


class LargeValues:
    """Keeps the digests of large collections of built-in types, tensors and tokenizers until their content changes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes, str]] = {}  # by id: the value, its content, its digest

    def digest(self, value: Any, describe: Callable[[], str]) -> str:
        """Return the digest of a value: the known one if the value has not changed, otherwise that of `describe`."""
        content = _content(value) if _is_large(value) else stamp_of(value)
        if content is None:
            return describe()
        _, before, digest = self._known.get(id(value), (None, b"", ""))
        if content != before:
            digest = describe()
            self._known[id(value)] = value, content, digest
        return digest


class _BuiltIn(pickle.Pickler):
    """Pickles the built-in types that have an opcode of their own, so equal bytes are equal values of equal types."""

    def reducer_override(self, obj: Any) -> Any:
        raise pickle.PicklingError(f"{type(obj)} has none")


def _content(value: Any) -> bytes | None:
    """Return a hash of a collection in this process, or None if other types are in it or it contains itself."""
    content = hashlib.blake2b(digest_size=16)
    pickler = _BuiltIn(SimpleNamespace(write=content.update), 5)
    pickler.fast = True  # An object that comes twice is written twice, so the bytes do not depend on ids.
    with suppress(Exception):
        pickler.dump(value)
        return content.digest()
    return None


def flat_digest(value: Any) -> str | None:
    """Return the digest of a large collection of strings, bytes and numbers for all processes; None for others."""
    if not _is_large(value):
        return None
    members = (*value, *value.values()) if isinstance(value, dict) else (*value,)
    if not _PLAIN.issuperset(map(type, members)):
        return None
    described = [[type(each).__qualname__, repr(each)] for each in members]
    content = json.dumps(sorted(described) if isinstance(value, (set, frozenset)) else described)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _is_large(value: Any) -> bool:
    return type(value) in (dict, list, tuple, set, frozenset) and len(value) >= FEWEST
