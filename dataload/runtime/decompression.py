"""Decompression of bytes that anybody may have written."""

from __future__ import annotations

import zlib


def decompressed(data: bytes | memoryview, most: int, form: int = zlib.MAX_WBITS) -> bytes:
    """Return what zlib has compressed: `most` bytes at most. form: as `wbits` of zlib.

    Raises:
        ValueError: It is more, it is cut off, or it is something else.
    """
    stream = zlib.decompressobj(form)
    try:
        found = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"not compressed by zlib: {error}") from error
    if len(found) > most or not stream.eof:
        raise ValueError(f"cut off, or more than {most:,} bytes")
    return found
