"""Text that is not UTF-8, which files may have and Python's strings cannot."""

from __future__ import annotations

from typing import Literal, cast, get_args

import pyarrow as pa

from dataload.errors import ConfigError
from dataload.formats.arrow_arrays import with_parts
from dataload.formats.arrow_types import has_elements, is_text

TextErrors = Literal["raise", "replace"]
"""What to do about bytes that are not UTF-8: raise an error, or replace them by U+FFFD, as `bytes.decode` does."""


def checked_errors(errors: str) -> TextErrors:
    """Return a valid `errors`. Raise ConfigError for others."""
    if errors not in get_args(TextErrors):
        raise ConfigError(f"errors={errors!r} is unknown: use 'raise', or 'replace' for U+FFFD instead of bad bytes")
    return cast(TextErrors, errors)


def repaired(array: pa.Array) -> pa.Array:
    """Return an array with U+FFFD in place of bytes that are not UTF-8, at any depth.

    Args:
        array: Text, or nested values as `arrow_arrays.plain` returns them. Other values stay as they are.
    """
    kind = array.type
    if is_text(kind):
        return array if _is_valid(array) else _decoded(array)
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(repaired(array.storage))
    is_nested = has_elements(kind) or (pa.types.is_struct(kind) and kind.num_fields)
    return with_parts(array, repaired) if is_nested else array


def _is_valid(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _decoded(array: pa.Array) -> pa.Array:
    values = array.cast(pa.large_binary()).to_pylist()
    return pa.array([None if value is None else value.decode(errors="replace") for value in values], array.type)
