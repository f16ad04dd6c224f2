"""Sources of shards that only their library reads: MDS of MosaicML Streaming, and LitData's format.

One shard at a time is copied to a temporary folder, from which the library reads it. Nothing is unpickled.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataload.cache.blocks.reader import Object
from dataload.conversion.samples import Sample, array_type, png, schema_of, tables
from dataload.conversion.source import BLOCK_BYTES, Files, Part
from dataload.errors import DataError
from dataload.extras import required

INDEX = "index.json"
MDS = {  # encodings: how they are read, and as which type
    **{name: (name, pa.from_numpy_dtype(name)) for name in ("uint8", "uint16", "uint32", "uint64")},
    **{name: (name, pa.from_numpy_dtype(name)) for name in ("int8", "int16", "int32", "int64")},
    **{name: (name, pa.from_numpy_dtype(name)) for name in ("float16", "float32", "float64")},
    "bytes": ("bytes", pa.binary()),
    "int": ("int", pa.int64()),
    "jpeg": ("bytes", pa.binary()),
    "json": ("str", pa.string()),
    "pil": ("pil", pa.binary()),
    "png": ("bytes", pa.binary()),
    "str": ("str", pa.string()),
    "str_decimal": ("str", pa.string()),
    "str_float": ("str_float", pa.float64()),
    "str_int": ("str_int", pa.int64()),
}
TOKENS = 2048
LITDATA = frozenset(
    {"bool", "bytes", "float", "int", "no_header_numpy", "no_header_tensor", "numpy", "pil", "str", "tensor", "text"}
)
LITDATA_FILES = frozenset({"audio", "file", "image", "jpeg", "mesh", "nifti", "pdf", "tifffile", "video"})

Open = Callable[[int, Path], Iterator[Sample]]  # yields the samples of a shard, given its number and its copy


class Shards:
    """A source of shards.

    Args:
        files: The files.
        shards: The shards, in order.
        open: Opens one.
        schema: The columns; None: those of the first and the last shard.
    """

    def __init__(self, files: Files, shards: Sequence[Object], open: Open, schema: pa.Schema | None) -> None:  # noqa: A002 (as builtins call it)
        self._files, self._shards, self._open = files, shards, open
        self.parts = [Part(each.name, each.size) for each in shards]
        self.schema = pa.schema([]) if schema is None else schema
        if schema is None and shards:
            self.schema = schema_of((each for part in {0, len(shards) - 1} for each in self._samples(part)), files.url)

    def read(self, part: int) -> Iterator[pa.Table]:
        yield from tables(self._samples(part), self.schema, self.parts[part].name)

    def _samples(self, part: int) -> Iterator[Sample]:
        each = self._shards[part]
        with tempfile.TemporaryDirectory(prefix="dataload-convert-") as folder:
            copy = Path(folder) / each.path.rpartition("/")[2]
            with self._files.open(each) as source, copy.open("wb") as target:
                while block := source.read(BLOCK_BYTES):
                    target.write(block)
            try:
                yield from self._open(part, copy)
            except (DataError, OSError):
                raise
            except Exception as error:  # The libraries raise any error for a damaged shard.
                raise DataError(f"{each.name} cannot be read: {error}: write it again, or leave it out") from error


def index_of(files: Files) -> dict[str, Any]:
    """Return what the index of shards says; {}: there is none.

    Raises:
        DataError: It is no JSON object.
    """
    if INDEX not in files.objects:
        return {}
    try:
        found = json.loads(files.content(files.objects[INDEX]))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{files.objects[INDEX].name} cannot be read: {error}: write it again") from error
    return found if isinstance(found, dict) else {}


def mds(files: Files) -> Shards:
    """Return a source of MDS. Images stay as they are, JSON is text, and pixels of Pillow become PNG."""
    formats = required("streaming.base.format", "convert", "MDS")
    compression = required("streaming.base.compression", "convert", "MDS")
    shards = _listed(files, "shards")
    for shard in shards:
        if (shard.get("version"), shard.get("format")) != (2, "mds"):
            raise DataError(f"{files.url}: {INDEX} has shards of the format {shard.get('format')}: convert reads MDS")
    names = [_stored(shard)["basename"] for shard in shards]
    objects = _objects(files, names, [_stored(shard).get("bytes") for shard in shards])
    schema = _mds_schema(files, shards)

    def samples(part: int, copy: Path) -> Iterator[Sample]:
        shard = shards[part]
        if shard["zip_data"]:
            copy.write_bytes(compression.decompress(shard["compression"], copy.read_bytes()))
        encodings = [MDS.get(each, (each, None))[0] for each in shard["column_encodings"]]
        raw = {**shard["raw_data"], "basename": copy.name}
        reader = formats.reader_from_json(
            str(copy.parent),
            None,
            {**shard, "column_encodings": encodings, "raw_data": raw, "zip_data": None, "compression": None},
        )
        images = [name for name, each in zip(shard["column_names"], encodings, strict=True) if each == "pil"]
        for number in range(shard["samples"]):
            sample = reader[number]
            yield {**sample, **{name: png(sample[name]) for name in images}} if images else sample

    return Shards(files, objects, samples, schema)


def _mds_schema(files: Files, shards: Sequence[Mapping[str, Any]]) -> pa.Schema | None:
    """Return the columns of MDS; None: there is a column of arrays whose shape only they tell."""
    fields: dict[str, Any] = {}
    is_known = True
    for shard in shards:
        for name, encoding in zip(shard["column_names"], shard["column_encodings"], strict=True):
            first = fields.setdefault(name, encoding)
            if encoding != first or (encoding not in MDS and encoding.partition(":")[0] != "ndarray"):
                also = f" and {first}" if first != encoding else ""
                fix = (
                    "it would run code" if encoding == "pkl" else "write it as one of str, bytes, int, float or ndarray"
                )
                raise DataError(
                    f"{files.url}: column {name!r} is stored as {encoding}{also}, which convert cannot read: {fix}"
                )
            is_known = is_known and (encoding in MDS or encoding.count(":") == 2)
    if not is_known:
        return None
    return pa.schema([pa.field(name, _mds_type(encoding)) for name, encoding in fields.items()])


def _mds_type(encoding: str) -> pa.DataType:
    if encoding in MDS:
        return MDS[encoding][1]
    _, dtype, shape = encoding.split(":")
    return array_type(pa.from_numpy_dtype(dtype), [int(size) for size in shape.split(",")])


def litdata(files: Files) -> Shards:
    """Return a source of chunks that `litdata.optimize` has written. Images and other files stay as they are.

    Tokens are rows of up to `TOKENS`: like LitData, these chunks know no documents. The values of nested samples are
    columns called `outer.inner`.
    """
    library = required("litdata", "convert", "LitData's format")
    loaders = required("litdata.streaming.item_loader", "convert", "LitData's format")
    index = index_of(files)
    chunks = _listed(files, "chunks")
    config = index.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("data_format"), list):
        raise DataError(f"{files.url}: {INDEX} does not say how its chunks are stored: write it again by optimize")
    if config.get("encryption"):
        raise DataError(f"{files.url} is encrypted, which convert cannot read: write it without encryption")
    formats = [_litdata_format(files, each) for each in config["data_format"]]
    objects = _objects(files, [chunk["filename"] for chunk in chunks], [None] * len(chunks))

    has_tokens = config.get("item_loader") == "TokensLoader"

    def samples(part: int, copy: Path) -> Iterator[Sample]:
        chunk = chunks[part]
        own = {**index, "chunks": [chunk], "config": {**config, "data_format": formats}}
        (copy.parent / INDEX).write_text(json.dumps(own))
        loader = loaders.TokensLoader(block_size=chunk["dim"]) if has_tokens else loaders.PyTreeLoader()
        dataset = library.StreamingDataset(str(copy.parent), str(copy.parent / "cache"), item_loader=loader)
        for number in range(len(dataset)):
            if not has_tokens:
                yield dict(_leaves("", dataset[number]))
                continue
            tokens = dict(_leaves("tokens", dataset[number]))["tokens"]
            yield from ({"tokens": tokens[start : start + TOKENS]} for start in range(0, len(tokens), TOKENS))

    found = Shards(files, objects, samples, None)
    if has_tokens and objects:
        kind = found.schema.field("tokens").type.value_type
        found.schema = pa.schema([pa.field("tokens", pa.list_(kind))])
    return found


def _litdata_format(files: Files, given: Any) -> str:
    """Return how the values of a column are read: files as bytes."""
    name = str(given).partition(":")[0]
    if name in LITDATA_FILES:
        return "bytes"
    if name not in LITDATA:
        fix = "it would run code" if name == "pickle" else "write numbers, text, arrays or bytes"
        raise DataError(f"{files.url} has values of the format {given}, which convert cannot read: {fix}")
    return str(given)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a sample with their names."""
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    if isinstance(value, (dict, list, tuple)):
        for key, each in items:
            yield from _leaves(f"{name}.{key}" if name else str(key), each)
        return
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().numpy()
    elif hasattr(value, "getbands"):  # an image of Pillow
        value = png(value)
    elif isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    yield name or "data", value


def _listed(files: Files, name: str) -> list[dict[str, Any]]:
    found = index_of(files).get(name)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise DataError(f"{files.url}: {INDEX} lists no {name}: check it")
    return found


def _stored(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the index says of the file of a shard."""
    found: dict[str, Any] = shard.get("zip_data") or shard["raw_data"]
    return found


def _objects(files: Files, names: Sequence[str], sizes: Sequence[int | None]) -> list[Object]:
    """Return the files of shards. Raise DataError if one is missing or has another size than the index says."""
    for name, size in zip(names, sizes, strict=True):
        if name not in files.objects:
            raise DataError(f"{files.url} lacks {name}, which {INDEX} names: copy it there")
        if size not in (None, found := files.objects[name].size):
            raise DataError(f"{files.objects[name].name} has {found:,} bytes, and {size:,} by {INDEX}: copy it again")
    return [files.objects[name] for name in names]
