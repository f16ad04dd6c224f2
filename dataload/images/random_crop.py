"""Random resized crops of batches of pixels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataload.errors import ConfigError

try:
    import cv2
except ImportError as error:
    raise ConfigError(f"images need more packages ({error.name}): pip install 'dataload[images]'") from error

ATTEMPTS = 10  # to draw a box that fits

Boxes = npt.NDArray[np.int64]


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
        batch: Pixels, uint8 Tensor or array [B, H, W, C].
        rng: The random numbers, such as those that a loader passes to its `transform`.
        size: Height and width of the result in pixels.
        scale: Least and greatest share of the image's area.
        ratio: Least and greatest width of a part, divided by its height.
        flip: Whether to mirror each image with a probability of 1/2.

    Returns:
        Pixels, uint8 Tensor[B, size, size, C].

    Raises:
        ConfigError: The batch has another dtype or number of dimensions, or a range is empty.

    Example:
        ```python
        def augment(batch, rng):
            return {**batch, "image": random_resized_crop(batch["image"], rng)}


        loader = make_loader(dataset, 256, transform=augment, num_threads=2)
        ```
    """
    images = np.asarray(batch)
    if images.dtype != np.uint8 or images.ndim != 4:
        raise ConfigError(f"random_resized_crop takes uint8 [B, H, W, C], not {images.dtype} {list(images.shape)}")
    if not (0 < scale[0] <= scale[1] and 0 < ratio[0] <= ratio[1]) or size < 1:
        raise ConfigError(f"size={size}, scale={scale} or ratio={ratio} is not a positive number or range")
    count, height, width, channels = images.shape
    boxes = random_boxes(rng, count, height, width, scale, ratio)
    mirrored = np.asarray(rng.random(count) < (0.5 if flip else 0.0))
    cropped = np.empty((count, size, size, channels), np.uint8)
    for image, (top, left, high, wide), mirror, out in zip(
        images, boxes.tolist(), mirrored.tolist(), cropped, strict=True
    ):
        part = image[top : top + high, left : left + wide]
        resized = cv2.resize(_shrunk(part, size), (size, size), dst=None if mirror else out)
        if mirror:
            cv2.flip(resized, 1, dst=out)
        elif resized is not out:  # OpenCV could not write there.
            out[...] = resized.reshape(out.shape)
    return torch.from_numpy(cropped)


def random_boxes(
    rng: np.random.Generator,
    count: int,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Boxes:
    """Return random parts of images of one shape: top, left, height, width, int64 [count, 4].

    Of `ATTEMPTS` boxes for each image, the first one that fits is taken. If none fits, it is the centre, as much of it
    as the ratio allows.

    Args:
        rng: The random numbers. Each call draws equally many.
        count: Number of boxes.
        height: Height of the images.
        width: Width of the images.
        scale: As in `random_resized_crop`.
        ratio: As in `random_resized_crop`.
    """
    area = height * width * rng.uniform(*scale, (count, ATTEMPTS))
    aspect = np.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1]), (count, ATTEMPTS)))
    sides = np.stack([np.rint(np.sqrt(area / aspect)), np.rint(np.sqrt(area * aspect))], axis=2).astype(np.int64)
    limits = np.array([height, width])
    fits: npt.NDArray[np.bool_] = np.all((sides > 0) & (sides <= limits), axis=2)
    chosen = sides[np.arange(count), fits.argmax(axis=1)]
    never = ~fits.any(axis=1)
    widest = min(width, max(1, round(height * ratio[1])))
    chosen[never] = min(height, max(1, round(widest / ratio[0]))), widest
    spare = limits - chosen
    corners = np.minimum((rng.random((count, 2)) * (spare + 1)).astype(np.int64), spare)
    corners[never] = (spare // 2)[never]
    return np.concatenate([corners, chosen], axis=1)


def _shrunk(part: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """Return the means of whole blocks of a part that is at least twice as large as `size`, or the part itself."""
    high, wide = (max(1, side // size) for side in part.shape[:2])
    if high == wide == 1:
        return part
    top, left = part.shape[0] % high // 2, part.shape[1] % wide // 2
    rows, columns = part.shape[0] // high, part.shape[1] // wide
    whole = part[top : top + rows * high, left : left + columns * wide]
    return np.asarray(cv2.resize(whole, (columns, rows), interpolation=cv2.INTER_AREA), np.uint8)
