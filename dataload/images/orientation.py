"""The orientation of a photograph: the EXIF tag of a JPEG, and the upright pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TAG = 0x0112
UPRIGHT = 1
_EXIF = b"Exif\0\0"
_APP1, _START_OF_SCAN = 0xE1, 0xDA
_ENTRY_BYTES = 12

Pixels = npt.NDArray[np.uint8]


def jpeg_orientation(jpeg: Any) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8. It is 1 if there is none, or if it is damaged.

    Args:
        jpeg: The file, bytes-like.
    """
    at = 2
    while at + 4 <= len(jpeg) and jpeg[at] == 0xFF and jpeg[at + 1] != _START_OF_SCAN:
        if jpeg[at + 1] == 0xFF:  # It fills the space before a marker.
            at += 1
            continue
        length = int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if jpeg[at + 1] == _APP1 and bytes(jpeg[at + 4 : at + 10]) == _EXIF:
            return _tag_of(bytes(jpeg[at + 10 : at + 2 + length]))
        at += 2 + length
    return UPRIGHT


def _tag_of(tiff: bytes) -> int:
    """Return the orientation in a block of EXIF, which has the form of a TIFF file."""
    order = "little" if tiff[:2] == b"II" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)  # type: ignore[arg-type] # one of two literals

    first = number(4, 4)
    for entry in range(number(first, 2)):
        at = first + 2 + entry * _ENTRY_BYTES
        if at + _ENTRY_BYTES > len(tiff):
            break
        if number(at, 2) == TAG:
            found = number(at + 8, 2)
            return found if 1 <= found <= 8 else UPRIGHT
    return UPRIGHT


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return the pixels as they are to be seen, contiguous.

    Args:
        pixels: Stored pixels, uint8 [H, W, C].
        orientation: 1 to 8. From 5 on, the result is [W, H, C].
    """
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
