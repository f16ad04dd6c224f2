"""Random resized crops of batches of pixels, or of encoded images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dataload.errors import ConfigError, RowError
from dataload.images.codecs import CHANNELS, Decoder, bytes_of, is_whole
from dataload.images.orientation import Pixels
from dataload.rows.collate import unflattened

try:
    import cv2
except ImportError as error:
    raise ConfigError(f"images need more packages ({error.name}): pip install 'dataload[images]'") from error

ATTEMPTS = 10  # to draw a box that fits
MOST_CHANNELS = 4


def random_resized_crop(
    batch: Any,
    rng: np.random.Generator,
    size: int = 224,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    *,
    flip: bool = True,
) -> torch.Tensor:
    """Cut a random part out of each image, resize it to a square, and mirror half of the images.

    The parts are drawn as by torchvision's RandomResizedCrop. The resizing is bilinear, releases the interpreter lock,
    and averages whole blocks first where it shrinks to less than a half.

    Args:
        batch: Pixels, uint8 Tensor or array [B, H, W, C]; or B encoded images of any shapes, as for `decode`. These are
            decoded one after the other, so that memory holds one whole image.
        rng: The random numbers, such as those that a loader passes to its `transform`.
        size: Height and width of the result in pixels.
        scale: Least and greatest share of the image's area.
        ratio: Least and greatest width of a part, divided by its height.
        flip: Whether to mirror each image with a probability of 1/2.

    Returns:
        Pixels, uint8 Tensor[B, size, size, C].

    Raises:
        ConfigError: The batch has another dtype or number of dimensions, or a range is empty.
        DataError: An encoded image is damaged, missing or of an unknown format. It names the row and the reason.

    Example:
        ```python
        def augment(batch, rng):
            return {**batch, "image": random_resized_crop(batch["image"], rng)}


        loader = make_loader(dataset, 256, transform=augment, num_threads=2)
        ```
    """
    if not isinstance(rng, np.random.Generator):
        raise ConfigError(f"rng is a {type(rng).__name__}: pass that of `transform(batch, rng)`")
    if not (0 < scale[0] <= scale[1] and 0 < ratio[0] <= ratio[1]) or not is_whole(size):
        raise ConfigError(f"size={size}, scale={scale} or ratio={ratio} is not a positive number or range")
    images: Iterable[Pixels]
    batch = unflattened(batch)
    if isinstance(batch, (list, tuple)):
        images, channels = _decoded(batch), CHANNELS
    else:
        images = pixels = _pixels(batch)
        channels = pixels.shape[3]
    draws = Draws(rng, len(batch), scale, ratio)
    mirrored = rng.random(len(batch)) < (0.5 if flip else 0.0)
    cropped = np.empty((len(batch), size, size, channels), np.uint8)
    for row, (image, mirror, out) in enumerate(zip(images, mirrored.tolist(), cropped, strict=True)):
        top, left, high, wide = draws.box(row, *image.shape[:2])
        part = image[top : top + high, left : left + wide]
        resized = cv2.resize(_shrunk(part, size), (size, size), dst=None if mirror else out)
        if mirror:
            cv2.flip(resized, 1, dst=out)
        elif resized is not out:  # OpenCV could not write there.
            out[...] = resized.reshape(out.shape)
    return torch.from_numpy(cropped)


class Draws:
    """The random numbers of the parts of images. The number of draws does not depend on the images.

    Args:
        rng: Draws them.
        count: Number of images.
        scale: As in `random_resized_crop`.
        ratio: As in `random_resized_crop`.
    """

    def __init__(
        self, rng: np.random.Generator, count: int, scale: tuple[float, float], ratio: tuple[float, float]
    ) -> None:
        logs = math.log(ratio[0]), math.log(ratio[1])
        self._shares = rng.uniform(*scale, (count, ATTEMPTS)).tolist()
        self._aspects = np.exp(rng.uniform(*logs, (count, ATTEMPTS))).tolist()
        self._corners = rng.random((count, 2)).tolist()
        self._ratio = ratio

    def box(self, row: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width of a part of an image.

        Of `ATTEMPTS` boxes, the first one that fits is taken. If none fits, it is the centre, as much of it as the
        ratio allows.

        Args:
            row: The image.
            height: Its height.
            width: Its width.
        """
        for share, aspect in zip(self._shares[row], self._aspects[row], strict=True):
            area = height * width * share
            high, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 0 < high <= height and 0 < wide <= width:
                down, right = self._corners[row]
                return int(down * (height - high + 1)), int(right * (width - wide + 1)), high, wide
        wide = min(width, max(1, round(height * self._ratio[1])))
        high = min(height, max(1, round(wide / self._ratio[0])))
        return (height - high) // 2, (width - wide) // 2, high, wide


def _pixels(batch: Any) -> Pixels:
    images: Pixels = np.asarray(batch)
    if images.dtype != np.uint8 or images.ndim != 4:
        raise ConfigError(f"random_resized_crop takes uint8 [B, H, W, C], not {images.dtype} {list(images.shape)}")
    if images.shape[1] <= MOST_CHANNELS < images.shape[3]:
        raise ConfigError(
            f"uint8 {list(images.shape)} has its channels before the pixels, not [B, H, W, C]: permute(0, 2, 3, 1)"
        )
    return images


def _decoded(images: Sequence[Any]) -> Iterator[Pixels]:
    """Yield the pixels of each image, until the next one."""
    decoder = Decoder()
    for row, image in enumerate(images):
        try:
            pixels = decoder(bytes_of(image))
        except Exception as error:
            raise RowError.of("image", row, len(images), f"cannot be decoded: {error}") from error
        yield pixels


def _shrunk(part: Pixels, size: int) -> Pixels:
    """Return the means of whole blocks of a part that is at least twice as large as `size`, or the part itself."""
    high, wide = (max(1, side // size) for side in part.shape[:2])
    if high == wide == 1:
        return part
    top, left = part.shape[0] % high // 2, part.shape[1] % wide // 2
    rows, columns = part.shape[0] // high, part.shape[1] // wide
    whole = part[top : top + rows * high, left : left + columns * wide]
    return np.asarray(cv2.resize(whole, (columns, rows), interpolation=cv2.INTER_AREA), np.uint8)
