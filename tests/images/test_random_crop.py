"""`images.random_resized_crop`: parts of images within bounds, from the random numbers of a batch."""

from __future__ import annotations

import io
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataload.errors import ConfigError, DataError
from dataload.images import random_resized_crop
from dataload.images.random_crop import Draws
from dataload.rows.collate import Flat

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ramps(count: int, height: int = 64, width: int = 96) -> torch.Tensor:
    """Return images whose first channel is the row and whose second one is the column; the third is the image."""
    pixels = np.zeros((count, height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(height)[:, None]
    pixels[..., 1] = np.arange(width)
    pixels[..., 2] = np.arange(count)[:, None, None]
    return torch.from_numpy(pixels)


def random_boxes(
    rng: np.random.Generator,
    count: int,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> np.ndarray:
    draws = Draws(rng, count, scale, ratio)
    return np.array([draws.box(row, height, width) for row in range(count)])


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_boxes_lie_in_the_image(height: int, width: int, seed: int) -> None:
    top, left, high, wide = random_boxes(generator(seed), 50, height, width, SCALE, RATIO).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (high > 0).all()
    assert (wide > 0).all()
    assert (top + high <= height).all()
    assert (left + wide <= width).all()


def test_boxes_have_the_requested_areas_and_ratios() -> None:
    top, left, high, wide = random_boxes(generator(), 4000, 300, 400, SCALE, RATIO).T
    area, ratio = high * wide / (300 * 400), wide / high
    assert 0.078 < area.min() < 0.09
    assert 0.95 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.35
    assert abs(np.log(ratio).mean()) < 0.03
    assert 0.4 < area.mean() < 0.6
    spare = 300 - high > 50  # enough room for a mean
    assert 0.45 < (top / (300 - high + 1e-9))[spare].mean() < 0.55
    assert 0.45 < (left / (400 - wide + 1e-9))[400 - wide > 50].mean() < 0.55


def test_a_box_that_never_fits_is_the_centre() -> None:
    assert random_boxes(generator(), 2, 300, 10, (1.0, 1.0), RATIO).tolist() == [[143, 0, 13, 10]] * 2
    assert random_boxes(generator(), 1, 10, 300, (1.0, 1.0), RATIO).tolist() == [[0, 143, 10, 13]]


def test_each_image_is_cut_at_its_box() -> None:
    batch = ramps(200)
    cropped = random_resized_crop(batch, generator(4), 32, flip=False)
    boxes = random_boxes(generator(4), 200, 64, 96, SCALE, RATIO)
    assert cropped.dtype == torch.uint8
    assert cropped.shape == (200, 32, 32, 3)
    for number, (image, (top, left, high, wide)) in enumerate(zip(cropped.int(), boxes.tolist(), strict=True)):
        assert (image[..., 2] == number).all()
        assert abs(image[0, 0, 0].item() - top) <= high / 32 + 1
        assert abs(image[-1, 0, 0].item() - (top + high - 1)) <= high / 32 + 1
        assert abs(image[0, 0, 1].item() - left) <= wide / 32 + 1
        assert abs(image[0, -1, 1].item() - (left + wide - 1)) <= wide / 32 + 1


def test_half_of_the_images_are_mirrored() -> None:
    batch = ramps(400)
    plain, mirrored = (random_resized_crop(batch, generator(1), 16, flip=flip) for flip in (False, True))
    flips = [torch.equal(one, other.flip(1)) for one, other in zip(plain, mirrored, strict=True)]
    assert all(torch.equal(one, other) or flip for one, other, flip in zip(plain, mirrored, flips, strict=True))
    assert 150 < sum(flips) < 250


def test_the_whole_image_at_its_size_is_itself() -> None:
    batch = ramps(3, 50, 50)
    assert torch.equal(random_resized_crop(batch, generator(), 50, (1.0, 1.0), (1.0, 1.0), flip=False), batch)


@pytest.mark.parametrize(("height", "size"), [(256, 96), (640, 64), (301, 100), (90, 224)])
def test_resizing_is_close_to_torch_with_antialiasing(height: int, size: int) -> None:
    y, x = np.mgrid[0:height, 0:height] * (2 * np.pi / height)
    smooth = (127 + 60 * np.sin(5 * x + y) + 60 * np.cos(4 * y))[..., None].repeat(3, axis=2).astype(np.uint8)[None]
    [cropped] = random_resized_crop(smooth, generator(), size, (1.0, 1.0), (1.0, 1.0), flip=False)
    channels = torch.from_numpy(smooth).permute(0, 3, 1, 2).float()
    expected = torch.nn.functional.interpolate(channels, (size, size), mode="bilinear", antialias=True)[0]
    difference = (cropped.permute(2, 0, 1).float() - expected).abs()
    assert difference.mean() < 4  # Whole blocks leave out up to a block at the edges.
    assert difference.max() < 20


def test_fine_patterns_do_not_alias() -> None:
    """Stripes of one pixel become grey. Bilinear interpolation alone would miss them."""
    stripes = np.zeros((1, 448, 448, 3), np.uint8)
    stripes[:, :, ::4] = 255
    [cropped] = random_resized_crop(stripes, generator(), 112, (1.0, 1.0), (1.0, 1.0), flip=False)
    assert cropped.min() >= 62
    assert cropped.max() <= 66


def test_the_same_random_numbers_give_the_same_crops() -> None:
    batch = ramps(20)
    first, again, other = (random_resized_crop(batch, generator(seed), 24) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray, lambda pixels: torch.from_numpy(pixels).flip(2)])
def test_any_channels_and_arrays(channels: int, kind: Any) -> None:
    pixels = ramps(6).numpy()[..., [0, 1, 2, 2][:channels]].copy()
    pixels.setflags(write=kind is not np.asarray)
    cropped = random_resized_crop(kind(pixels), generator(), 20)
    assert cropped.shape == (6, 20, 20, channels)
    expected = random_resized_crop(ramps(6), generator(), 20)
    if kind is torch.from_numpy:
        assert (cropped[..., :3].int() - expected[..., :channels].int()).abs().max() <= 1


def test_an_empty_batch() -> None:
    assert random_resized_crop(ramps(0), generator(), 20).shape == (0, 20, 20, 3)


@pytest.mark.parametrize(
    ("batch", "options", "reason"),
    [
        (torch.zeros(2, 8, 8, 3), {}, r"takes uint8 \[B, H, W, C\], not float32 \[2, 8, 8, 3\]"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), {}, r"not uint8 \[8, 8, 3\]"),
        (ramps(1), {"scale": (0.5, 0.2)}, r"scale=\(0.5, 0.2\)"),
        (ramps(1), {"size": 0}, "size=0"),
        (ramps(1), {"size": (20, 20)}, r"size=\(20, 20\)"),
        (ramps(1).permute(0, 3, 1, 2), {}, r"\[1, 3, \d+, \d+\] has its channels before.*permute\(0, 2, 3, 1\)"),
    ],
)
def test_arguments(batch: Any, options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        random_resized_crop(batch, generator(), **options)


def test_it_takes_the_generator_of_the_loader() -> None:
    with pytest.raises(ConfigError, match="rng is a NoneType: pass that of `transform"):
        random_resized_crop(ramps(1), None)  # type: ignore[arg-type]


def encoded(image: torch.Tensor) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(image.numpy()).save(sink, "PNG")
    return sink.getvalue()


def test_encoded_images_are_cut_like_their_pixels() -> None:
    pixels = ramps(20)
    found = random_resized_crop([encoded(image) for image in pixels], generator(3), 24)
    assert torch.equal(found, random_resized_crop(pixels, generator(3), 24))


def test_encoded_images_of_a_flat_column_are_cut() -> None:
    pixels = ramps(20)
    files = [encoded(image) for image in pixels]
    values = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
    flat = Flat(values, torch.tensor([0, *accumulate(map(len, files))]))
    assert torch.equal(random_resized_crop(flat, generator(3), 24), random_resized_crop(pixels, generator(3), 24))


def test_encoded_images_may_have_any_shapes() -> None:
    """The part of an image does not depend on the others of the batch, nor on their shapes."""
    images = [ramps(1)[0], ramps(1, 30, 40)[0], ramps(1, 200, 10)[0], ramps(1)[0]]
    found = random_resized_crop([encoded(image) for image in images], generator(3), 24)
    assert found.shape == (4, 24, 24, 3)
    alike = random_resized_crop([encoded(images[0])] * 4, generator(3), 24)
    assert torch.equal(found[[0, 3]], alike[[0, 3]])


def test_a_damaged_image_is_named() -> None:
    good = encoded(ramps(1)[0])
    with pytest.raises(DataError, match="image: row 1 cannot be decoded: it is not an image"):
        random_resized_crop([good, b"no image", good], generator())
