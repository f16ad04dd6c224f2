"""Datasets of other libraries have the rows that these libraries read themselves. `make sources` has all of them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torchvision_stub  # noqa: F401 (else the libraries cannot import one of another torch)
from PIL import Image
from test_convert import check_resumed, files_in, small  # noqa: F401 (a fixture)

from dataload import ConfigError, DataError, convert, make_dataset

# The libraries warn of their own work, and leave files open.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("The given buffer is not writable", ":ResourceWarning", ":pytest.PytestUnraisableExceptionWarning")
]
tqdm = pytest.importorskip("tqdm").tqdm
tqdm.monitor_interval = 0  # else its first progress bar starts a thread, which stays
ROWS = 300
NOISE = np.random.default_rng(0)


def jpeg(number: int) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.full((8, 8 + number % 3, 3), number % 256, np.uint8)).save(sink, "JPEG")
    return sink.getvalue()


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.full((4, 5, 3), number % 256, np.uint8))


def write_tars(folder: Path, count: int = ROWS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(3):
        path = folder / (f"{shard}.tar.gz" if shard == 1 else f"{shard}.tar")
        with tarfile.open(path, "w:gz" if shard == 1 else "w") as archive:
            add(archive, "__meta__", b"{}")
            add(archive, "README", b"about")
            for number in range(shard * count // 3, (shard + 1) * count // 3):
                key = f"class.d/{number:06}" if number % 2 else f"{number:06}"
                add(archive, f"{key}.jpg", jpeg(number))
                add(archive, f"{key}.cls", str(number % 10).encode())
                if number % 3:
                    add(archive, f"{key}.TXT", f"é {number}".encode())
                add(archive, f"{key}.meta.json", json.dumps({"n": number}).encode())
                sink = io.BytesIO()
                np.save(sink, np.full((2, 3), number, np.float32))
                add(archive, f"{key}.npy", sink.getvalue())


def add(archive: tarfile.TarFile, name: str, body: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(body)
    archive.addfile(member, io.BytesIO(body))


def read_tars(folder: Path) -> Iterator[dict[str, Any]]:
    wds = pytest.importorskip("webdataset")
    urls = sorted(map(str, folder.iterdir()))
    for sample in wds.WebDataset(urls, shardshuffle=False).decode():
        meta = {"meta.json": json.dumps(sample["meta.json"])}
        yield {name: value for name, value in (sample | meta).items() if name not in ("__url__", "__local_path__")}


def write_mds(folder: Path, count: int = ROWS, compression: str | None = None) -> None:
    streaming = pytest.importorskip("streaming")
    columns = {
        "id": "int",
        "small": "uint8",
        "half": "float16",
        "text": "str",
        "raw": "bytes",
        "photo": "jpeg",
        "pixels": "pil",
        "fixed": "ndarray:float32:2,3",
        "vector": "ndarray:int64:4",
        "ragged": "ndarray:int32",
        "any": "ndarray",
        "meta": "json",
        "big": "str_int",
    }
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=1 << 14, compression=compression) as writer:
        for number in range(count):
            writer.write(
                {
                    "id": number,
                    "small": np.uint8(number % 256),
                    "half": np.float16(number / 2),
                    "text": f"é {number}",
                    "raw": bytes([number % 256]) * (number % 5),
                    "photo": Image.open(io.BytesIO(jpeg(number))),
                    "pixels": picture(number),
                    "fixed": np.full((2, 3), number, np.float32),
                    "vector": np.arange(4) + number,
                    "ragged": np.arange(number % 7 + 1, dtype=np.int32),
                    "any": np.ones((2, number % 3 + 1)),
                    "meta": {"n": number},
                    "big": 2**50 + number,
                }
            )


def read_mds(folder: Path) -> Iterator[dict[str, Any]]:
    streaming = pytest.importorskip("streaming")
    index = json.loads((folder / "index.json").read_text())
    if any(shard["zip_data"] for shard in index["shards"]):
        dataset = streaming.StreamingDataset(
            remote=str(folder), local=str(folder.with_name("local")), batch_size=1, shuffle=False
        )
    else:
        dataset = streaming.StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
    for number in range(len(dataset)):
        yield {**dataset[number], "meta": json.dumps(dataset[number]["meta"])}


def litdata_sample(number: int) -> dict[str, Any]:
    import torch

    return {
        "id": number,
        "score": number / 3,
        "text": f"é {number}",
        "flag": number % 2 == 0,
        "raw": bytes([number % 256]) * (number % 5 + 1),
        "photo": Image.open(io.BytesIO(jpeg(number))),
        "pixels": picture(number),
        "nested": {"array": np.full((2, 3), number, np.float32), "pair": (number, number + 1)},
        "tensor": torch.arange(4) + number,
        "ragged": torch.arange(number % 7 + 1, dtype=torch.int32),
    }


def litdata_file(number: int) -> dict[str, Any]:
    """A sample whose photo is a file, which LitData stores as it is."""
    return {**litdata_sample(number), "photo": Image.open(f"{os.environ['PHOTOS']}/{number}.jpg")}


def run(function: str, folder: Path, *args: Any) -> None:
    """Call a function of this module in a process of its own: LitData's writers leave threads behind."""
    pytest.importorskip("litdata")
    code = f"import test_other_libraries; test_other_libraries.{function}({str(folder)!r}, *{args!r})"
    path = {"PYTHONPATH": ":".join(filter(None, [str(Path(__file__).parent), *sys.path]))}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **path}, check=True)


def write_litdata(folder: Path, count: int = ROWS, compression: str | None = None) -> None:
    run("optimize", folder, count, compression)


def optimize(folder: str, count: int, compression: str | None) -> None:
    import litdata

    photos = Path(folder).with_name("photos")
    photos.mkdir(exist_ok=True)
    for number in range(count):
        (photos / f"{number}.jpg").write_bytes(jpeg(number))
    os.environ["PHOTOS"] = str(photos)
    litdata.optimize(
        litdata_file,
        list(range(count)),
        folder,
        chunk_size=40,
        num_workers=1,
        compression=compression,
        verbose=False,
        start_method="fork",
    )


def read_litdata(folder: Path) -> Iterator[dict[str, Any]]:
    litdata = pytest.importorskip("litdata")
    raw = {"jpeg": litdata.streaming.serializers.BytesSerializer()}
    dataset = litdata.StreamingDataset(str(folder), shuffle=False, serializers=raw)
    for number in range(len(dataset)):
        sample = dataset[number]
        nested = sample.pop("nested")
        yield {
            **sample,
            "nested.array": nested["array"],
            "nested.pair.0": nested["pair"][0],
            "nested.pair.1": nested["pair"][1],
        }


def write_saved(folder: Path, count: int = ROWS) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = {
        "id": list(range(count)),
        "text": [None if n % 7 == 0 else f"é {n}" for n in range(count)],
        "tokens": [[n] * (n % 4) for n in range(count)],
        "raw": [{"path": None, "bytes": jpeg(n)} for n in range(count)],
        "label": [n % 2 for n in range(count)],
    }
    dataset = datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=["cat", "dog"]))
    dataset.save_to_disk(folder, num_shards=3)


def read_saved(folder: Path) -> Iterator[dict[str, Any]]:
    datasets = pytest.importorskip("datasets")
    yield from datasets.load_from_disk(folder)


KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], Iterator[dict[str, Any]]]]] = {
    "webdataset": (write_tars, read_tars),
    "mds": (write_mds, read_mds),
    "litdata": (write_litdata, read_litdata),
    "huggingface": (write_saved, read_saved),
}


def same(found: Any, expected: Any) -> bool:
    """Return whether a value of ours is that of a library, which may have decoded an image."""
    if isinstance(expected, Image.Image):
        return (np.asarray(Image.open(io.BytesIO(found))) == np.asarray(expected)).all()
    if hasattr(expected, "detach"):
        expected = expected.numpy()
    if isinstance(expected, memoryview):
        expected = bytes(expected)
    if isinstance(expected, np.ndarray):
        return np.array_equal(np.array(found).reshape(expected.shape), expected)
    return bool(found == expected)


def compare(folder: Path, expected: Iterator[dict[str, Any]]) -> None:
    found = pq.read_table(folder).to_pylist()
    samples = list(expected)
    assert len(found) == len(samples) == ROWS
    for row, sample in zip(found, samples, strict=True):
        assert row.keys() >= sample.keys()
        assert all(row[name] is None for name in row.keys() - sample.keys())
        assert [name for name, value in sample.items() if not same(row[name], value)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_library(kind: str, bucket: Any, tmp_path: Path) -> None:
    write, read = KINDS[kind]
    write(tmp_path / "in", ROWS)
    done = convert(tmp_path / "in", tmp_path / "out")
    assert (done.format, done.rows) == (kind, ROWS)
    for path in filter(Path.is_file, (tmp_path / "in").rglob("*")):
        bucket.put(f"in/{path.relative_to(tmp_path / 'in')}", path.read_bytes())
    convert(bucket.url("in"), tmp_path / "from s3", storage_options=bucket.options)
    assert pq.read_table(tmp_path / "from s3").equals(pq.read_table(tmp_path / "out"))
    compare(tmp_path / "out", read(tmp_path / "in"))
    make_dataset(tmp_path / "out", cache=False)[7]


@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_compressed_shards(kind: str, tmp_path: Path) -> None:
    write, read = KINDS[kind]
    write(tmp_path / "in", ROWS, compression="zstd")  # type: ignore[call-arg]
    convert(tmp_path / "in", tmp_path / "out")
    compare(tmp_path / "out", read(tmp_path / "in"))


@pytest.mark.slow
@pytest.mark.timeout(3000)  # Each of the processes imports the library.
@pytest.mark.parametrize("options", [[], ["--shuffle", "7"]])
@pytest.mark.parametrize("kind", KINDS)
def test_ten_kills(kind: str, options: list[str], tmp_path: Path) -> None:
    KINDS[kind][0](tmp_path / "in", 3000)
    convert(tmp_path / "in", tmp_path / "whole")
    flags = ["--torchvision"] if kind in ("mds", "litdata") else []
    check_resumed(tmp_path, options, 10, pq.read_table(tmp_path / "whole"), *flags)


def test_types_of_arrays(tmp_path: Path) -> None:
    """Shapes that are declared, or those of all samples that were looked at, are fixed; others are lists."""
    write_mds(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out")
    schema = pq.read_schema(tmp_path / "out/part-00000.parquet")
    assert str(schema.field("fixed").type).startswith(
        "extension<arrow.fixed_shape_tensor[value_type=float, shape=[2,3]"
    )
    assert str(schema.field("vector").type) == "fixed_size_list<element: int64>[4]"
    assert str(schema.field("ragged").type) == "list<element: int32>"
    assert str(schema.field("any").type) == "list<element: list<element: double>>"


def test_token_chunks(tmp_path: Path) -> None:
    """LitData reads blocks of them, and leaves out the end of each chunk, which is shorter."""
    litdata = pytest.importorskip("litdata")
    run("write_tokens", tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out")
    rows = pq.read_table(tmp_path / "out")["tokens"].to_pylist()
    assert [token for row in rows for token in row] == [token for n in range(200) for token in document(n).tolist()]
    dataset = litdata.StreamingDataset(str(tmp_path / "in"), item_loader=litdata.TokensLoader(block_size=10))
    first = [token for number in range(100) for token in dataset[number].tolist()]
    assert rows[0][: len(first)] == first


def write_tokens(folder: str) -> None:
    import litdata

    litdata.optimize(
        document,
        list(range(200)),
        folder,
        chunk_size=8192,
        num_workers=1,
        item_loader=litdata.TokensLoader(),
        verbose=False,
        start_method="fork",
    )


def document(number: int) -> Any:
    import torch

    return torch.arange(number, 2 * number + 5)


def test_what_would_run_code_is_refused(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns={"x": "pkl"}) as writer:
        writer.write({"x": {1, 2}})
    with pytest.raises(DataError, match="column 'x' is stored as pkl, which convert cannot read: it would run code"):
        convert(tmp_path / "mds", tmp_path / "out")
    run("write_sets", tmp_path / "lit")
    with pytest.raises(DataError, match="values of the format pickle, which convert cannot read: it would run code"):
        convert(tmp_path / "lit", tmp_path / "out")


def write_sets(folder: str) -> None:
    import litdata

    litdata.optimize(sets, [1], folder, chunk_size=4, num_workers=1, verbose=False, start_method="fork")


def sets(number: int) -> dict[str, Any]:
    return {"x": {number}}


@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_a_missing_library_is_told_with_its_extra(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, package = {"mds": ("shards", "streaming"), "litdata": ("chunks", "litdata")}[kind]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/index.json").write_text(json.dumps({key: []}))
    (tmp_path / "in/x.bin").write_text("")
    for name in (package, "streaming.base.format", "litdata"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'dataload\[convert\]'"):
        convert(tmp_path / "in", tmp_path / "out")


def test_folders_of_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    one = datasets.Dataset.from_dict({"x": [1]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "in")
    with pytest.raises(ConfigError, match="has the splits 'test' and 'train': name the folder of one"):
        convert(tmp_path / "in", tmp_path / "out")
    assert convert(tmp_path / "in/train", tmp_path / "out").rows == 1


def test_a_dataset_with_an_index_of_rows(tmp_path: Path) -> None:
    write_saved(tmp_path / "in")
    state = json.loads((tmp_path / "in/state.json").read_text())
    (tmp_path / "in/state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "x"}]}))
    with pytest.raises(DataError, match="flatten_indices"):
        convert(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in/state.json").write_text(json.dumps({**state, "_data_files": [{"filename": "none.arrow"}]}))
    with pytest.raises(DataError, match=r"lacks none\.arrow, which state\.json names"):
        convert(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in/state.json").write_text("[]")
    with pytest.raises(DataError, match="does not list the files"):
        convert(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("cut", [1000, -1024])
def test_a_cut_tar_is_an_error(cut: int, tmp_path: Path) -> None:
    """Also if nothing but the end is lost."""
    write_tars(tmp_path / "in")
    path = tmp_path / "in/0.tar"
    body = path.read_bytes().rstrip(b"\0")
    body += bytes(-len(body) % 512) + bytes(1024)
    path.write_bytes(body[:cut])
    with pytest.raises(DataError, match=r"0\.tar cannot be read"):
        convert(tmp_path / "in", tmp_path / "out")


def test_a_damaged_header_within_a_tar_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for number in range(4):
            add(archive, f"{number}.txt", b"text")
    body = bytearray((tmp_path / "x.tar").read_bytes())
    body[2 * 1024] ^= 1
    (tmp_path / "x.tar").write_bytes(body)
    with pytest.raises(DataError, match=r"x\.tar cannot be read: it is cut or damaged: bad checksum"):
        convert(tmp_path / "x.tar", tmp_path / "out")


def test_samples_that_do_not_fit(tmp_path: Path) -> None:
    def write(name: str, *members: tuple[str, bytes]) -> None:
        with tarfile.open(tmp_path / name, "w") as archive:
            for member, body in members:
                add(archive, member, body)

    write("twice.tar", ("a.txt", b"1"), ("a.TXT", b"2"))
    with pytest.raises(DataError, match="sample 'a' has two files 'txt'"):
        convert(tmp_path / "twice.tar", tmp_path / "out")
    write("label.tar", ("a.cls", b"cat"))
    with pytest.raises(DataError, match=r"'a\.cls' cannot be read: invalid literal for int"):
        convert(tmp_path / "label.tar", tmp_path / "out")
    (tmp_path / "in").mkdir()
    write("in/0.tar", ("a.txt", b"1"))
    write("in/1.tar", ("b.txt", b"1"), ("b.png", b"2"))
    write("in/2.tar", ("c.txt", b"1"))
    with pytest.raises(
        DataError, match=r"1\.tar: a sample has 'png', which no sample of the first and the last file has"
    ):
        convert(tmp_path / "in", tmp_path / "out")
    assert not [name for name in files_in(tmp_path / "out") if name.startswith("part")]


def test_shards_that_are_missing_or_cut(tmp_path: Path) -> None:
    write_mds(tmp_path / "in")
    shard = sorted((tmp_path / "in").glob("*.mds"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"{shard.name} has [\d,]+ bytes, and [\d,]+ by index\.json: copy it again"):
        convert(tmp_path / "in", tmp_path / "out")
    shard.unlink()
    with pytest.raises(DataError, match=rf"lacks {shard.name}, which index\.json names"):
        convert(tmp_path / "in", tmp_path / "out")
    shard.write_bytes(bytes(len(whole)))
    with pytest.raises(DataError, match=rf"{shard.name} cannot be read"):
        convert(tmp_path / "in", tmp_path / "out")
