"""`images.decode`: the pixels of Pillow from every format, or an error that names the row."""

from __future__ import annotations

import importlib
import io
import pickle
import re
import struct
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps, features

from dataload import images, make_dataset, make_loader
from dataload.errors import ConfigError, DataError, RowError
from dataload.images import codecs
from dataload.images.orientation import jpeg_orientation

WIDTH, HEIGHT = 90, 60


def picture(width: int = WIDTH, height: int = HEIGHT, mode: str = "RGB") -> Image.Image:
    """Return a smooth picture without a symmetry."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [x * 255 / width, y * 255 / height, (x + 2 * y) * 255 / (width + 2 * height)]
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def with_orientation(orientation: int, order: str = "big", kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif.endian = "<" if order == "little" else ">"
    exif[0x0112] = orientation
    return encoded(picture(), kind, exif=exif.tobytes())


# Formats


@pytest.mark.parametrize(
    "data",
    [
        encoded(picture()),
        encoded(picture(), progressive=True, subsampling=0),
        encoded(picture(mode="L")),
        encoded(picture(mode="CMYK")),
        encoded(picture(), "PNG"),
        encoded(picture(mode="L"), "PNG"),
        encoded(picture(mode="P"), "PNG"),
        encoded(picture(mode="1"), "PNG"),
        encoded(picture(mode="LA"), "PNG"),
        encoded(picture(), "WEBP", lossless=True),
        encoded(picture(), "WEBP"),
        encoded(picture(), "GIF"),
        encoded(picture(), "BMP"),
        encoded(picture(), "TIFF"),
    ],
    ids=lambda data: repr(data[:4]),
)
def test_pixels_are_those_of_pillow(data: bytes) -> None:
    [pixels] = images.decode([data])
    assert pixels.dtype == torch.uint8
    assert np.array_equal(pixels, by_pillow(data))


def test_alpha_is_dropped() -> None:
    image = picture(mode="RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    for kind in ("PNG", "WEBP"):
        [pixels] = images.decode([encoded(image, kind, lossless=True)])
        shown = np.asarray(image)[:, :, 3] > 0  # WebP does not store the colours of transparent pixels
        assert np.array_equal(pixels.numpy()[shown], np.asarray(picture())[shown])


def test_sixteen_bits_are_shifted_not_clipped() -> None:
    deep = (np.arange(HEIGHT * WIDTH, dtype=np.uint16) * 12).reshape(HEIGHT, WIDTH)
    for kind in ("PNG", "PPM", "TIFF"):
        [pixels] = images.decode([encoded(Image.fromarray(deep), kind)])
        assert pixels.shape == (HEIGHT, WIDTH, 3)
        assert np.array_equal(pixels.numpy(), np.repeat((deep >> 8)[:, :, None], 3, axis=2))


def tiff_of_12_bits(values: np.ndarray) -> bytes:
    """Return an uncompressed TIFF of grey values, uint16 [H, W], with an even W."""
    height, width = values.shape
    first, second = values[:, ::2], values[:, 1::2]
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=2).astype(np.uint8).tobytes()
    # Width, height, bits of a value, no compression, 0 is black, start of the data, values of a pixel, rows, bytes.
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(packed)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    header = struct.pack("<2sHI", b"II", 42, 8 + len(packed))
    return header + packed + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_twelve_bits_are_shifted_by_four() -> None:
    deep = (np.arange(HEIGHT * WIDTH, dtype=np.uint16) % 4096).reshape(HEIGHT, WIDTH)
    [pixels] = images.decode([tiff_of_12_bits(deep)])
    assert np.array_equal(pixels.numpy(), np.repeat((deep >> 4)[:, :, None], 3, axis=2))


def test_pixels_of_an_unknown_range_are_an_error() -> None:
    """Pillow would clip them to 0..255: floats from 0 to 1 become black."""
    floats, large = np.full((4, 4), 0.5, np.float32), np.full((4, 4), 1 << 16, np.int32)
    bytes_in_32_bits = np.arange(256, dtype=np.int32).reshape(16, 16)
    for values, mode in ((floats, "F"), (large, "I"), (bytes_in_32_bits, "I")):
        with pytest.raises(DataError, match=f"row 0 cannot be decoded: its pixels .mode {mode}. have an unknown range"):
            images.decode([encoded(Image.fromarray(values), "TIFF")])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["big", "little"])
def test_photographs_are_upright(orientation: int, order: str) -> None:
    data = with_orientation(orientation, order)
    assert jpeg_orientation(data) == orientation
    assert jpeg_orientation(data[:2] + b"\xff\xff" + data[2:]) == orientation  # Bytes may fill the space between parts.
    [pixels] = images.decode([data])
    assert np.array_equal(pixels, by_pillow(data))
    assert pixels.shape == ((HEIGHT, WIDTH, 3) if orientation < 5 else (WIDTH, HEIGHT, 3))
    [cropped] = images.decode([data], size=HEIGHT)
    edge = (WIDTH - HEIGHT) // 2
    part = slice(edge, edge + HEIGHT)
    assert np.array_equal(cropped, by_pillow(data)[:, part] if orientation < 5 else by_pillow(data)[part])


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_other_formats_have_an_orientation(kind: str, orientation: int) -> None:
    """Pillow itself turns a TIFF."""
    data = with_orientation(orientation, kind=kind)
    assert np.array_equal(images.decode([data])[0], by_pillow(data))


def test_a_damaged_orientation_is_none() -> None:
    data = with_orientation(6)
    for end in range(2, len(data) - 1, 3):
        jpeg_orientation(data[:end])
    start = data.index(b"Exif\0\0") + 6
    assert jpeg_orientation(data[: start + 8] + b"\xff\xff" + data[start + 10 :]) in (1, 6)  # too many entries
    assert jpeg_orientation(data.replace(struct.pack(">HHIH", 0x0112, 3, 1, 6), struct.pack(">HHIH", 0x0112, 3, 1, 99)))


@pytest.mark.parametrize("exif", [b"Exif\0\0nonsense", b"\0\0\0\0"])
@pytest.mark.parametrize(("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("WEBP", "RGB")])
def test_damaged_exif_is_no_orientation(kind: str, mode: str, exif: bytes) -> None:
    plain, damaged = (encoded(picture().convert(mode), kind, **more) for more in ({}, {"exif": exif}))
    assert np.array_equal(images.decode([damaged])[0], images.decode([plain])[0])


# Sizes


@pytest.mark.parametrize(("width", "height"), [(90, 60), (60, 90), (61, 61), (200, 64), (64, 201), (20, 31)])
def test_the_shorter_side_is_resized_and_the_centre_is_cut_out(width: int, height: int) -> None:
    data = encoded(picture(width, height), "PNG")
    factor = 48 / min(width, height)
    resized = picture(width, height).resize((int(width * factor), int(height * factor)), Image.Resampling.BILINEAR)
    [full] = images.decode([data], size=48, crop="full")
    assert full.shape[:2] == (resized.height, resized.width)
    assert np.abs(full.numpy().astype(int) - np.asarray(resized)).max() <= 1
    [cropped] = images.decode([data], size=48)
    top, left = round((resized.height - 48) / 2), round((resized.width - 48) / 2)
    assert torch.equal(cropped, full[top : top + 48, left : left + 48])


@pytest.mark.parametrize(("size", "decoded"), [(201, 400), (200, 200), (101, 200), (100, 100), (60, 100), (20, 50)])
def test_a_large_jpeg_is_decoded_to_a_fraction(size: int, decoded: int) -> None:
    """To a half, a quarter or an eighth that is not smaller than the result; the result differs little."""
    data = encoded(picture(600, 400), quality=95)
    assert codecs.Decoder(size)(data).shape[0] == decoded
    [scaled] = images.decode([data], size=size)
    [whole] = images.decode([encoded(Image.fromarray(by_pillow(data)), "PNG")], size=size)
    assert np.abs(scaled.numpy().astype(int) - whole.numpy()).max() <= 6


def test_images_of_different_shapes_need_a_size() -> None:
    data = [encoded(picture()), encoded(picture()), encoded(picture(80, 60))]
    with pytest.raises(DataError, match=r"image: rows 0 and 2 have 90 x 60 and 80 x 60 pixels, .* use size= and crop="):
        images.decode(data)
    with pytest.raises(DataError, match="rows 0 and 2 have"):
        images.decode(data, size=30, crop="full")
    with pytest.raises(DataError, match="rows 0 and 1 have 90 x 60 and 60 x 90 pixels"):
        images.decode([data[0], encoded(picture(60, 90))])
    assert images.decode(data, size=30).shape == (3, 30, 30, 3)
    assert images.decode([], size=30).shape[0] == 0


def test_images_do_not_share_memory() -> None:
    """They are decoded in place where that is possible."""
    mirrored = ImageOps.mirror(picture())
    data = [encoded(picture()), encoded(mirrored), encoded(mirrored, "PNG"), with_orientation(3), encoded(picture())]
    for pixels in (images.decode(data), images.decode(data, size=HEIGHT, crop="full")):
        for one, each in zip(pixels, data, strict=True):
            assert np.array_equal(one, by_pillow(each))


# Damaged images


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def oversized() -> bytes:
    data = bytearray(encoded(picture()))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"  # 65,535 x 65,535 pixels, 12 GB
    return bytes(data)


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (b"", "it is empty"),
        (b"no image", "it is not an image, or of an unknown format"),
        (truncated(encoded(picture(), quality=100)), "truncated"),
        (truncated(encoded(picture(), "PNG")), "truncated"),
        (truncated(encoded(picture(), "WEBP", lossless=True)), ""),
        (encoded(picture())[:20], ""),
        (b"\xff\xd8\xff", ""),
        (oversized(), "65535 x 65535 pixels, more than|decompression bomb"),
        (None, "it is null"),
        ({"bytes": None, "path": "cat.jpg"}, "it has no bytes, only the path 'cat.jpg'"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_damaged_image_is_named(damaged: Any, reason: str) -> None:
    good = encoded(picture())
    with pytest.raises(DataError, match=rf"photo: row 2 cannot be decoded: .*({reason})") as error:
        images.decode("photo", size=32)({"photo": [good, good, damaged, good]})
    assert " at 0x" not in str(error.value)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_threads": 2}], ids=str)
def test_a_loader_raises_the_error_of_a_damaged_image(tmp_path: Path, options: Any) -> None:
    pq.write_table(pa.table({"photo": [encoded(picture()), b"no image"]}), tmp_path / "photos.parquet")
    dataset, transform = make_dataset(tmp_path, cache=False), images.decode("photo", size=8)
    loader = make_loader(dataset, 2, shuffle=False, transform=transform, **options)
    with pytest.raises(DataError, match=r"photo: row 1 cannot be decoded: .*(\n.*)*2 rows of the dataset: 0-1"):
        list(loader)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=str)
def test_a_loader_names_the_row_of_a_damaged_image_in_the_dataset(tmp_path: Path, options: Any) -> None:
    pictures = [encoded(picture())] * 32
    pictures[21] = b"no image"
    pq.write_table(pa.table({"photo": pictures}), tmp_path / "photos.parquet")
    loader = make_loader(make_dataset(tmp_path, cache=False), 16, transform=images.decode("photo", size=8), **options)
    with pytest.raises(DataError, match="photo: row ") as caught:
        list(loader)
    text = "".join(traceback.format_exception(caught.value))
    note = r"row (\d+) of the batch is the first that raises: row 21 of the dataset"
    found = re.search(rf"photo: row (\d+) cannot(?:.*\n)*?{note}", text)
    assert found is not None
    assert found[1] == found[2]
    assert "loader.dataset.locate(21) returns" in text


def test_an_error_of_a_row_is_pickled_whole() -> None:
    error = RowError.of("photo", 3, 16, "cannot be decoded")
    error.add_note("note")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.__notes__) == (str(error), ["note"])
    assert (copy.without_row, copy.row, copy.rows) == ("photo cannot be decoded", 3, 16)


def test_the_note_of_a_column_of_the_users_function_names_no_row(tmp_path: Path) -> None:
    pictures = [encoded(picture())] * 8
    pq.write_table(pa.table({"photo": [*pictures[:3], b"damaged", *pictures[4:]]}), tmp_path / "photos.parquet")

    def decode_odd(batch: dict[str, Any]) -> dict[str, Any]:
        return {"pixels": images.decode(batch["photo"][1::2], size=8)}

    with pytest.raises(DataError, match="image: row 1 cannot") as caught:
        list(make_loader(make_dataset(tmp_path, cache=False), 8, shuffle=False, transform=decode_odd))
    assert "of the batch is row" not in "".join(traceback.format_exception(caught.value))


def test_map_names_the_row_of_a_damaged_image_in_its_file(tmp_path: Path) -> None:
    file, pictures = tmp_path / "photos.parquet", [encoded(picture())] * 100
    pictures[77] = b"no image"
    pq.write_table(pa.table({"photo": pictures}), file, row_group_size=40)
    mapped = make_dataset(file, cache=False).map(images.decode("photo", size=8), version=1)
    with pytest.raises(DataError, match=rf"{file} row group 1 row 37: map dataload\.images\.decode: photo cannot be "):
        mapped[77]


def test_damaged_images_are_marked(tmp_path: Path) -> None:
    data: list[Any] = [encoded(picture(60 + row, 60)) for row in range(8)]
    expected, is_damaged = images.decode(data, size=24), torch.zeros(8, dtype=torch.bool)
    data[0], data[5] = None, truncated(data[5])
    is_damaged[[0, 5]], expected[[0, 5]] = True, 0
    pq.write_table(pa.table({"photo": pa.array(data, pa.binary())}), tmp_path / "photos.parquet")
    mapped = make_dataset(tmp_path / "photos.parquet", cache=False).map(images.decode("photo", size=24, damaged="mark"))
    [batch] = make_loader(mapped, 8, shuffle=False)
    assert torch.equal(batch["photo.is_damaged"], is_damaged)
    assert torch.equal(batch["photo"], expected)


@pytest.mark.skipif(not features.check("avif"), reason="Pillow has no codec of AVIF")
def test_damaged_avif_is_marked() -> None:
    """Errors of its codec are RuntimeErrors."""
    data = encoded(picture(), "AVIF")
    pixels = data.index(b"mdat") + 4
    photos = [truncated(data), data[:pixels] + bytes(len(data) - pixels), data]
    batch = images.decode("photo", size=8, damaged="mark")({"photo": photos})
    assert batch["photo.is_damaged"].tolist() == [True, True, False]


def test_a_missing_image_whose_name_is_about_memory_is_marked() -> None:
    missing = {"bytes": None, "path": "memory_001.jpg"}
    batch = images.decode("photo", size=8, damaged="mark")({"photo": [encoded(picture()), missing]})
    assert batch["photo.is_damaged"].tolist() == [False, True]


def test_the_default_device_of_torch_is_not_that_of_marks() -> None:
    with torch.device("meta"):
        batch = images.decode("photo", size=8, damaged="mark")({"photo": [encoded(picture()), None]})
    assert batch["photo.is_damaged"].tolist() == [False, True]


SHORT_OF_MEMORY = """
import io, resource
import torch
from PIL import Image
from dataload import images
torch.set_num_threads(1)
file = io.BytesIO()
Image.new("RGB", (8000, 8)).save(file, "PNG")
decode = images.decode("photo", size=400, damaged="mark")  # resized to 400 x 400,000 pixels
decode({"photo": [file.getvalue()]})
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), -1))
decode({"photo": [file.getvalue()]})
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_intact_image_is_not_marked_when_memory_is_short() -> None:
    done = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert "RowError: photo: row 0 cannot be decoded" in done.stderr
    assert "memory" in done.stderr


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_of_too_many_pixels_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "MOST_PIXELS", WIDTH * HEIGHT - 1)
    with pytest.raises(DataError, match="row 0 cannot be decoded: it has 90 x 60 pixels, more than 5,399"):
        images.decode([encoded(picture(), kind)])


def test_harmless_bytes_in_a_jpeg_are_no_error() -> None:
    data = encoded(picture())
    extended = data[:-2] + b"\0\0\0\0\0" + data[-2:]  # libjpeg warns of extraneous bytes
    assert np.array_equal(images.decode([extended])[0], by_pillow(data))


# Columns and batches


def test_columns_of_hugging_face() -> None:
    data = encoded(picture())
    assert torch.equal(images.decode([{"bytes": data, "path": None}]), images.decode([data]))


@pytest.mark.parametrize("path", [None, "cat.jpg"])
def test_columns_of_hugging_face_in_parquet(path: str | None, tmp_path: Path) -> None:
    """The loader reads a struct as a column for each member."""
    data, file = [encoded(picture(60 + row, 60)) for row in range(8)], tmp_path / "photos.parquet"
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    structs = [{"bytes": each, "path": path} for each in data]
    pq.write_table(pa.table({"image": pa.array(structs, kind), "label": range(8)}), file)
    expected, decode = images.decode(data, size=24), images.decode("image", size=24)
    dataset = make_dataset(file, cache=False)
    loaders = [
        make_loader(dataset.map(decode, columns=["image"]), 8, shuffle=False),
        make_loader(dataset.map(decode), 8, shuffle=False),
        make_loader(dataset, 8, shuffle=False, transform=decode, num_threads=2),
    ]
    for loader in loaders:
        [batch] = loader
        assert {*batch} == {"image", "label"}
        assert torch.equal(batch["image"], expected)
    structs[5] = {"bytes": None, "path": "cat.jpg"}
    pq.write_table(pa.table({"image": pa.array(structs, kind)}), file)
    with pytest.raises(DataError, match=r"row 5: map .* image cannot be decoded: it has no bytes, only the path 'cat"):
        make_loader(make_dataset(file, cache=False).map(decode), 8)


@pytest.mark.parametrize("struct", [False, True])
def test_flat_columns(struct: bool, tmp_path: Path) -> None:
    data: list[Any] = [encoded(picture(60 + row, 60), kind) for row, kind in enumerate(["JPEG", "PNG", "WEBP"])]
    photos = [*data, None]
    column = pa.array(photos, pa.binary())
    if struct:
        column = pa.StructArray.from_arrays([column, pa.array(["a.jpg"] * 4)], ["bytes", "path"])
    pq.write_table(pa.table({"photo": column}), tmp_path / "photos.parquet")
    [flat] = make_loader(make_dataset(tmp_path, cache=False), 4, shuffle=False, ragged="flat")
    marked = images.decode("photo", size=24, damaged="mark")(flat)
    assert marked["photo.is_damaged"].tolist() == [False, False, False, True]
    assert torch.equal(marked["photo"][:3], images.decode(data, size=24))
    with pytest.raises(DataError, match="photo: row 3 cannot be decoded: it is empty"):
        images.decode("photo", size=24)(flat)
    if not struct:
        with pytest.raises(DataError, match="image: row 3 cannot be decoded: it is empty"):
            images.decode(flat["photo"], size=24)


@pytest.mark.parametrize(
    "kind",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: pa.py_buffer(data),
        lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8),
    ],
)
def test_any_bytes(kind: Any) -> None:
    assert images.decode([kind(encoded(picture()))]).shape == (1, HEIGHT, WIDTH, 3)
    assert images.decode([kind(encoded(picture(), "PNG"))]).shape == (1, HEIGHT, WIDTH, 3)


def test_a_function_of_a_batch() -> None:
    function = images.decode("image", size=32)
    batch = {"image": [encoded(picture())], "label": [3]}
    decoded = pickle.loads(pickle.dumps(function))(batch)
    assert decoded["label"] == [3]
    assert decoded["image"].shape == (1, 32, 32, 3)
    assert isinstance(batch["image"], list)
    with pytest.raises(ConfigError, match="no column is called 'image'; there are label"):
        function({"label": [3]})


@pytest.mark.parametrize("value", [3, "photo.jpg", 1.5])
def test_a_column_without_images_is_not_marked_as_damaged(value: Any) -> None:
    with pytest.raises(RowError, match=f"row 0 cannot be decoded: it is of type {type(value).__name__}, not an enc"):
        images.decode("label", size=8, damaged="mark")({"label": [value]})


def test_sizes_may_be_of_numpy() -> None:
    assert images.decode([encoded(picture())], size=np.int64(8)).shape == (1, 8, 8, 3)  # type: ignore[call-overload]


def test_arguments() -> None:
    with pytest.raises(ConfigError, match="crop='middle' is unknown: use 'center' or 'full'"):
        images.decode("image", crop="middle")  # type: ignore[call-overload]
    for size in (0, 1.5, "32", (32, 32), True):
        with pytest.raises(
            ConfigError, match=re.escape(f"size={size!r} must be a whole number of at least 1, or None")
        ):
            images.decode([], size=size)
    with pytest.raises(ConfigError, match="damaged='skip' is unknown: use 'raise' or 'mark'"):
        images.decode("image", damaged="skip")  # type: ignore[call-overload]
    for options in ({}, {"size": 8, "crop": "full"}):
        with pytest.raises(ConfigError, match="damaged='mark' needs the name of a column, size= and crop='center'"):
            images.decode("image", damaged="mark", **options)
    with pytest.raises(ConfigError, match="decode takes the name of a column or a list of images, not one image: "):
        images.decode(encoded(picture()))


def test_in_a_loader_with_threads(tmp_path: Path) -> None:
    data = [encoded(picture(60 + row, 60)) for row in range(40)]
    pq.write_table(pa.table({"image": data, "row": np.arange(40)}), tmp_path / "a.parquet")
    loader = make_loader(
        str(tmp_path / "a.parquet"),
        8,
        transform=images.decode("image", size=24),
        num_threads=2,
        cache_dir=str(tmp_path / "cache"),
    )
    for batch in loader:
        expected = images.decode([data[row] for row in batch["row"].tolist()], size=24)
        assert torch.equal(batch["image"], expected)


def test_decoding_releases_the_interpreter_lock() -> None:
    """Another thread can run only while the decoder has released the lock."""
    data = encoded(picture(1000, 750), quality=95)
    begun, ran, released = threading.Event(), threading.Event(), list[bool]()

    def run() -> None:
        begun.set()
        for _ in range(20):  # The system may not run the other thread at once.
            decoder(data)
            if ran.is_set():
                released.append(True)
                return

    decoder = codecs.Decoder()
    decoder(data)
    thread, interval = threading.Thread(target=run), sys.getswitchinterval()
    sys.setswitchinterval(1000)  # seconds after which a thread has to release the lock
    try:
        thread.start()
        begun.wait()
        ran.set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert released


FIRST_IMAGE = """
import importlib
import io
from PIL import Image
from dataload import images
completed = []
Image.register_open("FIRST", None, lambda prefix: completed.append(Image.init()))  # It recognizes no image.
file = io.BytesIO()
Image.new("RGB", (8, 8)).save(file, "PNG")
images.decode([file.getvalue()])
print(completed)
"""


@pytest.mark.slow
def test_all_formats_are_registered_before_the_first_image_is_opened() -> None:
    """Image.open of Pillow may overlook a format that another thread registers."""
    done = subprocess.run([sys.executable, "-c", FIRST_IMAGE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False]"  # There was nothing left to register.


def test_importing_dataload_imports_no_codec() -> None:
    program = "import sys, dataload, dataload.images; print({'PIL', 'simplejpeg', 'cv2', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.variants
@pytest.mark.parametrize(("package", "module"), [("simplejpeg", "codecs"), ("cv2", "random_crop")])
def test_missing_packages_are_named(package: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"dataload.images.{module}", raising=False)
    says = rf"images need more packages \({package}\): pip install 'dataload\[images\]'"
    with pytest.raises(ConfigError, match=says):
        importlib.import_module(f"dataload.images.{module}")


def test_a_column_of_numbers_is_not_decoded() -> None:
    with pytest.raises(DataError, match=r"column label is int64, not encoded images"):
        images.decode("label")({"label": torch.zeros(2, dtype=torch.int64)})
