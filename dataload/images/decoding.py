"""Decode a column of images to pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import numpy as np
import torch
from torch.nn.functional import interpolate

from dataload.errors import ConfigError, DataError, RowError
from dataload.images.codecs import MOST_PIXELS, Decoder
from dataload.images.orientation import Pixels

CROPS = ("center", "full")

Crop = Literal["center", "full"]


@overload
def decode(
    column: str, *, size: int | None = None, crop: Crop = "center"
) -> Callable[[Mapping[str, Any]], dict[str, Any]]: ...
@overload
def decode(column: Sequence[Any], *, size: int | None = None, crop: Crop = "center") -> torch.Tensor: ...


def decode(column: str | Sequence[Any], *, size: int | None = None, crop: Crop = "center") -> Any:
    """Decode JPEG, PNG, WebP and other images to RGB pixels, and resize them.

    EXIF orientation is applied. Grey, CMYK, palettes and 16 bits become RGB of 8 bits; alpha is dropped. The decoder
    releases the interpreter lock.

    Args:
        column: Name of a column, for `Dataset.map` or `transform`; or the images themselves: bytes-like objects, or
            dicts with `bytes`, as Hugging Face stores them.
        size: Length of the shorter side in pixels. Images are resized with antialiasing, and a large JPEG is decoded to
            a half, a quarter or an eighth first. None: images stay as they are, and all must have one shape.
        crop: "center" cuts out the centre, `size` x `size`. "full" keeps the whole image: all images of a call must
            then have one shape.

    Returns:
        Pixels, uint8 [n, H, W, 3]. For a name: a function of a batch (a dict) that returns the batch with the pixels
        in the place of the column.

    Raises:
        ConfigError: `size` or `crop` is invalid, or the packages of `dataload[images]` are missing.
        DataError: An image is damaged, missing or of an unknown format, or of another shape than the first. It names
            the row in the column and the reason.

    Example:
        ```python
        pixels = decode(batch["image"], size=256)  # uint8 Tensor[B, 256, 256, 3]
        loader = make_loader("s3://bucket/photos", 64, transform=decode("image", size=256), num_threads=2)
        ```
    """
    if crop not in CROPS:
        raise ConfigError(f"crop={crop!r} is unknown: use 'center' or 'full'")
    if size is not None and size < 1:
        raise ConfigError(f"size={size} must be at least 1")
    if isinstance(column, str):
        return partial(decode_column, column=column, size=size, crop=crop)
    return _decoded(column, size, crop, "image")


def decode_column(batch: Mapping[str, Any], *, column: str, size: int | None, crop: Crop) -> dict[str, Any]:
    """Return the batch with the images of a column decoded. Its arguments are those of `decode`."""
    if column not in batch:
        raise ConfigError(f"decode: no column is called {column!r}; there are {', '.join(batch)}")
    return {**batch, column: _decoded(batch[column], size, crop, column)}


def _decoded(images: Sequence[Any], size: int | None, crop: Crop, name: str) -> torch.Tensor:
    decoder, pixels = Decoder(size or 0), np.empty((0, 0, 0, 3), np.uint8)
    for row, image in enumerate(images):
        try:
            one = decoder(_bytes_of(image), pixels[row] if row and size is None else None)
            if size is not None:
                one = _resized(one, size, crop)
        except Exception as error:
            raise RowError(name, row, f"cannot be decoded: {error}") from error
        if not row:
            pixels = np.empty((len(images), *one.shape), np.uint8)
        if one.shape != pixels.shape[1:]:
            shapes = " and ".join(f"{shape[1]} x {shape[0]}" for shape in (pixels.shape[1:], one.shape))
            raise DataError(
                f"{name}: rows 0 and {row} have {shapes} pixels, but the images of a batch need one shape: use size= "
                "and crop='center'"
            )
        if not np.may_share_memory(one, pixels):  # It was not decoded there.
            pixels[row] = one
    return torch.from_numpy(pixels)


def _bytes_of(image: Any) -> Any:
    if isinstance(image, Mapping):
        if image.get("bytes") is None:
            raise ValueError(f"it has no bytes, only the path {image.get('path')!r}")
        image = image["bytes"]
    if image is None:
        raise ValueError("it is null")
    return image


def _resized(pixels: Pixels, size: int, crop: Crop) -> Pixels:
    """Return the pixels with a shorter side of `size`, all of them or the centre.

    Args:
        pixels: uint8 [H, W, 3], contiguous.
        size: As in `decode`.
        crop: As in `decode`.
    """
    height, width = pixels.shape[:2]
    shorter = min(height, width)
    if shorter != size:
        shape = (height * size // shorter, width * size // shorter)
        if shape[0] * shape[1] > MOST_PIXELS:
            raise ValueError(
                f"{width} x {height} pixels are too thin: with size={size} they would be {shape[1]} x {shape[0]}"
            )
        # With these strides, torch sees that the channels come last, and writes them so.
        image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
        pixels = interpolate(image, size=shape, mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()
        height, width = shape
    if crop == "full":
        return pixels
    top, left = round((height - size) / 2), round((width - size) / 2)
    return pixels[top : top + size, left : left + size]
