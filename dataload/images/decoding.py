"""Decode a column of images to pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Literal, get_args, overload

import numpy as np
import torch
from torch.nn.functional import interpolate

from dataload.errors import ConfigError, DataError, RowError
from dataload.images.codecs import CHANNELS, MOST_PIXELS, Decoder, bytes_of, is_whole
from dataload.images.orientation import Pixels
from dataload.rows.collate import unflattened
from dataload.runtime.exhaustion import is_exhaustion
from dataload.runtime.text import few

WAYS_OUT = ": skip such rows by on_error='skip' of make_loader, or mark them by damaged='mark'"
Crop = Literal["center", "full"]
Damaged = Literal["raise", "mark"]


@overload
def decode(
    column: str, *, size: int | None = None, crop: Crop = "center", damaged: Damaged = "raise"
) -> Callable[[Mapping[str, Any]], dict[str, Any]]: ...
@overload
def decode(column: Sequence[Any], *, size: int | None = None, crop: Crop = "center") -> torch.Tensor: ...


def decode(
    column: str | Sequence[Any], *, size: int | None = None, crop: Crop = "center", damaged: Damaged = "raise"
) -> Any:
    """Decode JPEG, PNG, WebP and other images to RGB pixels, and resize them.

    EXIF orientation is applied. Grey, CMYK, palettes and 16 bits become RGB of 8 bits; alpha is dropped. The decoder
    releases the interpreter lock.

    Args:
        column: Name of a column, for `Dataset.map` or `transform`, of bytes or of the structs of `bytes` and `path`
            that Hugging Face stores; or a list of the images themselves, or a `Flat` of their bytes.
        size: Length of the shorter side in pixels. Images are resized with antialiasing, and a large JPEG is decoded to
            a half, a quarter or an eighth first. None: images stay as they are, and all must have one shape.
        crop: "center" cuts out the centre, `size` x `size`. "full" keeps the whole image: all images of a call must
            then have one shape.
        damaged: "raise", or "mark" to return black pixels for each image that cannot be decoded, and the column
            "<column>.is_damaged". It takes the name of a column, a `size` and crop="center".

    Returns:
        Pixels, uint8 [n, H, W, 3]. For a name: a function of a batch (a dict) that returns the batch with the pixels
        in the place of the column; with "mark" also bool [n].

    Raises:
        ConfigError: `size`, `crop` or `damaged` is invalid, or the packages of `dataload[images]` are missing.
        DataError: An image is damaged, missing or of an unknown format, or of another shape than the first. It names
            the row in the column and the reason.

    Example:
        ```python
        pixels = decode(batch["image"], size=256)  # uint8 Tensor[B, 256, 256, 3]
        loader = make_loader("s3://bucket/photos", 64, transform=decode("image", size=256), num_threads=2)
        ```
    """
    if crop not in get_args(Crop):
        raise ConfigError(f"crop={crop!r} is unknown: use 'center' or 'full'")
    if size is not None and not is_whole(size):
        raise ConfigError(f"size={size!r} must be a whole number of at least 1, or None")
    if damaged not in get_args(Damaged):
        raise ConfigError(f"damaged={damaged!r} is unknown: use 'raise' or 'mark'")
    if damaged == "mark" and (not isinstance(column, str) or size is None or crop != "center"):
        raise ConfigError("damaged='mark' needs the name of a column, size= and crop='center'")
    if isinstance(column, str):
        made = partial(_decode_column, column=column, size=size, crop=crop, damaged=damaged)
        vars(made).update(__module__="dataload.images", __qualname__="decode")  # the name that errors of `map` show
        return made
    if isinstance(column, (bytes, bytearray, memoryview)):
        raise ConfigError("decode takes the name of a column or a list of images, not one image: decode([image])")
    return _decoded(unflattened(column), size, crop, "image")


def _decode_column(
    batch: Mapping[str, Any], *, column: str, size: int | None, crop: Crop, damaged: Damaged
) -> dict[str, Any]:
    """Return the batch with the images of a column decoded. Its arguments are those of `decode`."""
    others = dict(batch)
    if column in batch:
        images = unflattened(others.pop(column))
    elif f"{column}.bytes" in batch:  # a member of a struct that Hugging Face stores
        files = unflattened(others.pop(f"{column}.bytes"))
        paths = others.pop(f"{column}.path", repeat(None))
        images = [{"bytes": file, "path": path} for file, path in zip(files, paths, strict=False)]
    else:
        raise ConfigError(f"decode: no column is called {column!r}; there are {few(batch)}")
    if damaged == "raise":
        return {**others, column: _decoded(images, size, crop, column)}
    is_damaged = torch.zeros(len(images), dtype=torch.bool, device="cpu")
    pixels = _decoded(images, size, crop, column, is_damaged)
    return {**others, column: pixels, f"{column}.is_damaged": is_damaged}


def _decoded(
    images: Sequence[Any], size: int | None, crop: Crop, name: str, is_damaged: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the pixels of images. is_damaged: bool [n], set for images that cannot be decoded; None: they raise."""
    if isinstance(images, torch.Tensor):
        raise DataError(
            f"column {name} is {str(images.dtype).removeprefix('torch.')}, not encoded images: name another"
        )
    decoder, pixels = Decoder(size or 0), np.empty((0, 0, 0, 3), np.uint8)
    for row, image in enumerate(images):
        try:
            one = decoder(bytes_of(image), pixels[row] if row and size is None else None)
            if size is not None:
                one = _resized(one, size, crop)
        except Exception as error:
            if is_damaged is None or size is None or not _is_damage(error):
                raise RowError.of(name, row, len(images), f"cannot be decoded: {error}{WAYS_OUT}") from error
            is_damaged[row] = True
            one = np.zeros((size, size, CHANNELS), np.uint8)
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


def _is_damage(error: Exception) -> bool:
    """Return whether an error is that of a damaged image, and not of the program or its resources."""
    return not (isinstance(error, (RuntimeError, TypeError)) or is_exhaustion(error))


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
