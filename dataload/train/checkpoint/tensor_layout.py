"""Where the tensors of a checkpoint are, as JSON. DCP's own `.metadata` is a pickle, which only other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dataload.train.checkpoint.manifest import Entry
from dataload.train.checkpoint.state import DTYPES


class Stored(NamedTuple):
    """Where the bytes of a chunk are, as DCP's reader of files wants to know it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


def files_of(metadata: Metadata) -> dict[str, int]:
    """Return the files that hold tensors, and how many bytes of each."""
    files: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        files[stored.relative_path] = max(files.get(stored.relative_path, 0), stored.offset + stored.length)
    return files


def to_json(metadata: Metadata) -> dict[str, Any]:
    """Return the type, the shape and the chunks of each tensor, as DCP has written them."""

    def chunk(name: str, each: ChunkStorageMetadata) -> dict[str, Any]:
        stored = metadata.storage_data[MetadataIndex(name, each.offsets)]
        where = {"file": str(stored.relative_path), "start": stored.offset, "bytes": stored.length}
        return {"offsets": list(each.offsets), "sizes": list(each.sizes), **where}

    found = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = [chunk(name, each) for each in tensor.chunks]
        found[name] = {"dtype": str(tensor.properties.dtype), "shape": list(tensor.size), "chunks": chunks}
    return found


def from_json(tensors: Mapping[str, Any], files: Mapping[str, Entry]) -> Metadata:
    """Return DCP's metadata of tensors, and of tensors only: DCP would unpickle anything else.

    Args:
        tensors: What `to_json` returned.
        files: The files of the checkpoint.

    Raises:
        ValueError: A chunk is not within its tensor or its file, or the chunks of a tensor are not all of it.
        TypeError, KeyError: `tensors` is of another form.
    """
    metadata = Metadata({}, storage_data={})
    for name, each in tensors.items():
        dtype, shape = DTYPES[each["dtype"]], torch.Size(each["shape"])
        chunks = []
        for chunk in each["chunks"]:
            offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
            file, start, length = chunk["file"], chunk["start"], chunk["bytes"]
            inside = len(offsets) == len(sizes) == len(shape) and all(
                min(offset, size) >= 0 and offset + size <= whole
                for offset, size, whole in zip(offsets, sizes, shape, strict=True)
            )
            least = prod(sizes) * dtype.itemsize  # its values, without what torch.save adds
            if not (inside and start >= 0 and least <= length <= files[file].size - start):
                raise ValueError(f"a chunk of tensor {name} is not within it, or not within {file}")
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            metadata.storage_data[MetadataIndex(name, offsets)] = Stored(file, start, length)
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
            raise ValueError(f"the chunks of tensor {name} are not all of it")
        metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
    return metadata
