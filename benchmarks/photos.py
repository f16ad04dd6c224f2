"""Photographs as JPEG of 500 x 375 pixels: parts of pictures that scikit-image, scikit-learn and matplotlib ship."""

from __future__ import annotations

import io
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

WIDTH, HEIGHT, QUALITY = 500, 375, 90
SIDE, CROP = 256, 224
LABELS = 1000
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random resized crop
LEAST_TILE = 360  # pixels of a picture's width
SOURCES = {
    "skimage": ("data", ["astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg"]),
    "sklearn": ("datasets/images", ["china.jpg", "flower.jpg"]),
    "matplotlib": ("mpl-data/sample_data", ["grace_hopper.jpg"]),
}

Row = dict[str, Any]


def photos(rng: np.random.Generator, rows: int) -> pa.Table:
    """Return a table of distinct photographs: `image`, a JPEG of about 80 KB, and `label`, in [0, LABELS)."""
    encoded = pa.array([tile(rng) for _ in range(rows)], pa.binary())
    return pa.table({"image": encoded, "label": rng.integers(0, LABELS, rows)})


def tile(rng: np.random.Generator) -> bytes:
    """Return a JPEG of a random part of a random picture, perhaps mirrored."""
    from PIL import Image, ImageOps

    pictures = _pictures()
    picture = pictures[rng.integers(len(pictures))]
    most = min(picture.width, picture.height * WIDTH // HEIGHT)
    width = int(rng.integers(LEAST_TILE, most + 1))
    height = width * HEIGHT // WIDTH
    left, top = rng.random(2) * (picture.width - width, picture.height - height)
    part = picture.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS, (left, top, left + width, top + height))
    encoded = io.BytesIO()
    (ImageOps.mirror(part) if rng.random() < 0.5 else part).save(encoded, "jpeg", quality=QUALITY)
    return encoded.getvalue()


def decode_and_crop(row: Row) -> Row:
    """Decode `image` by Pillow to a random resized crop, uint8 [CROP, CROP, 3], which depends on the label only."""
    return {**row, "image": random_crop(row["image"], np.random.default_rng(int(row["label"])))}


def random_crop(encoded: Any, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return a random resized crop of a JPEG, perhaps mirrored, uint8 [CROP, CROP, 3], made by Pillow."""
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as picture:
        box = crop_box(picture.width, picture.height, rng)
        cropped = picture.resize((CROP, CROP), Image.Resampling.BILINEAR, box)
    pixels: npt.NDArray[np.uint8] = np.asarray(cropped)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def decoded(row: Row) -> Row:
    """Decode `image` by Pillow to the centre of the photograph, uint8 [SIDE, SIDE, 3]."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(row["image"])) as picture:
        return {**row, "image": np.asarray(ImageOps.fit(picture, (SIDE, SIDE), Image.Resampling.BILINEAR))}


def cropped_at_random(row: Row) -> Row:
    """Return a random resized crop of pixels by OpenCV, uint8 [CROP, CROP, 3], which depends on the label only."""
    import cv2

    left, top, right, bottom, mirror = _crops()[int(row["label"])]
    cropped = cv2.resize(np.asarray(row["image"])[top:bottom, left:right], (CROP, CROP))
    return {**row, "image": cv2.flip(cropped, 1) if mirror else cropped}


@cache
def _crops() -> list[tuple[int, int, int, int, bool]]:
    """Return (left, top, right, bottom, mirror) of prepared photographs by label."""
    rng = np.random.default_rng(CROP)
    boxes = [crop_box(SIDE, SIDE, rng) for _ in range(LABELS)]
    return [(int(left), int(top), int(right), int(bottom), rng.random() < 0.5) for left, top, right, bottom in boxes]


def crop_box(width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Return (left, top, right, bottom) of a random part of an image, as torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * rng.uniform(*AREA)
        aspect = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.integers(0, width - wide + 1), rng.integers(0, height - high + 1)
            return float(left), float(top), float(left + wide), float(top + high)
    return 0.0, 0.0, float(width), float(height)


@cache
def _pictures() -> list[Any]:
    from importlib.util import find_spec

    from PIL import Image

    pictures = []
    for package, (folder, names) in SOURCES.items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"photographs need {package}: pip install 'dataload[bench]'", name=package)
        for name in names:
            with Image.open(Path(spec.origin).parent / folder / name) as picture:
                pictures.append(picture.convert("RGB"))
    return pictures
