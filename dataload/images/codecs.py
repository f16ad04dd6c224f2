"""The pixels of one encoded image: JPEG by libjpeg-turbo, other formats by Pillow."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataload.errors import ConfigError
from dataload.images.orientation import TAG, UPRIGHT, Pixels, jpeg_orientation, upright

try:
    import simplejpeg
    from PIL import Image, UnidentifiedImageError
except ImportError as error:
    raise ConfigError(f"images need more packages ({error.name}): pip install 'dataload[images]'") from error

MOST_PIXELS = 178_956_970  # as Pillow: a larger image is an attack, or a damaged header
KEPT_BYTES = 64 << 20  # of memory for the pixels of the next image
CHANNELS = 3
_OF_16_BITS = ("PNG", "PPM")  # formats that Pillow opens in mode I, of 32 bits, with values of 16
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_JPEG = b"\xff\xd8\xff"
_FRACTIONS = (8, 4, 2)  # The codec has no vector code for others.


class Decoder:
    """Decodes images one after the other. JPEGs share the memory of their pixels.

    Args:
        least: Least length of the shorter side that the caller needs, in pixels. A JPEG of at least twice that is
            decoded to a half, a quarter or an eighth. 0: never.
    """

    def __init__(self, least: int = 0) -> None:
        self._least = least
        self._memory = np.empty(0, np.uint8)

    def __call__(self, encoded: Any, out: Pixels | None = None) -> Pixels:
        """Return the upright pixels of an image, uint8 [H, W, 3], until the next call.

        Args:
            encoded: The file, bytes-like. Grey, CMYK, palettes and 16 bits become RGB of 8 bits; alpha is dropped. An
                animation gives its first frame.
            out: Memory for the pixels, contiguous. It is used for a JPEG that is as large.

        Raises:
            Exception: The image is damaged, or of an unknown format.
        """
        if not len(encoded):
            raise ValueError("it is empty")
        if bytes(encoded[:3]) == _JPEG:
            try:
                return self._jpeg(encoded, out)
            except ValueError:  # Pillow reads a file with harmless errors, or gives the reason.
                pass
        try:
            return _by_pillow(encoded)
        except RuntimeError as error:  # of libavif
            raise ValueError(str(error)) from error

    def _jpeg(self, encoded: Any, out: Pixels | None) -> Pixels:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(encoded)
        if colorspace in ("CMYK", "YCCK") or height * width > MOST_PIXELS:
            raise ValueError(colorspace)
        fraction = next((each for each in _FRACTIONS if min(height, width) >= each * self._least), 1)
        fraction = fraction if self._least else 1
        height, width = -(-height // fraction), -(-width // fraction)
        size = height * width * CHANNELS
        memory = out.reshape(-1) if out is not None and out.size == size else self._memory_of(size)
        pixels: Pixels = simplejpeg.decode_jpeg(encoded, buffer=memory, min_height=height, min_width=width)
        orientation = jpeg_orientation(encoded)
        return pixels if orientation == UPRIGHT else upright(pixels, orientation)

    def _memory_of(self, size: int) -> npt.NDArray[np.uint8]:
        if size > len(self._memory):
            memory = np.empty(size, np.uint8)
            if size > KEPT_BYTES:
                return memory
            self._memory = memory
        return self._memory[:size]


def is_whole(size: Any) -> bool:
    """Return whether a size is a whole number of at least 1, of Python or numpy."""
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size >= 1)


def bytes_of(image: Any) -> Any:
    """Return the file of an image: bytes, a uint8 Tensor [n], or a dict with `bytes`, as Hugging Face stores it."""
    if isinstance(image, Mapping):
        if image.get("bytes") is None:
            raise ValueError(f"it has no bytes, only the path {image.get('path')!r}")
        image = image["bytes"]
    if image is None:
        raise ValueError("it is null")
    if isinstance(image, torch.Tensor) and image.dtype == torch.uint8 and image.ndim == 1:
        return image.numpy().data
    if isinstance(image, str | int | float):
        raise TypeError(f"it is of type {type(image).__name__}, not an encoded image")
    return image


def _by_pillow(encoded: Any) -> Pixels:
    # Image.open would register the formats itself, but misses those that another thread registers meanwhile.
    Image.preinit()  # the common formats, which are then tried first
    Image.init()
    try:
        opened = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError:
        raise ValueError("it is not an image, or of an unknown format") from None
    with opened as picture:
        if picture.width * picture.height > MOST_PIXELS:
            raise ValueError(f"it has {picture.width} x {picture.height} pixels, more than {MOST_PIXELS:,}")
        picture.load()  # which turns a TIFF upright, and removes its orientation
        orientation = _orientation(picture)
        if picture.mode[0] in "IF":  # 16 bits or more, which `convert` would clip
            if picture.mode == "F" or (picture.mode == "I" and picture.format not in _OF_16_BITS):
                raise ValueError(f"its pixels (mode {picture.mode}) have an unknown range: convert the file to 16 bits")
            # Pillow leaves 12 bits of a TIFF as they are. It scales those of other formats to 16.
            [bits] = getattr(picture, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))
            pixels = np.repeat((np.asarray(picture) >> (bits - 8)).astype(np.uint8)[:, :, None], CHANNELS, axis=2)
        else:
            pixels = np.array(picture.convert("RGB"))
    return pixels if orientation not in range(2, 9) else upright(pixels, orientation)


def _orientation(picture: Image.Image) -> int:
    """Return the orientation in the EXIF data; upright if the data is damaged."""
    try:
        return int(picture.getexif().get(TAG, UPRIGHT))
    except (SyntaxError, ValueError, TypeError, struct.error):
        return UPRIGHT
