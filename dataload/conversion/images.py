"""A source of folders of images: `root/class/name.jpg`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pyarrow as pa

from dataload.cache.blocks.reader import IN_FLIGHT, Object
from dataload.conversion.source import Files, Part
from dataload.errors import DataError
from dataload.runtime.executor import DaemonExecutor

PART_BYTES, PART_FILES = 32 << 20, 2048


class ImageFolders:
    """Images as `image` (their bytes as they are), `label` (the number of the class) and `path` below the root.

    The classes are the folders in the root, numbered by name, as torchvision's ImageFolder does. Images that lie in no
    folder have no label.

    Args:
        files: The files.

    Raises:
        DataError: Some images are in a folder, others are not.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._names = list(files.objects)
        above = {name.partition("/")[0] if "/" in name else None: name for name in self._names}
        if None in above and len(above) > 1:
            raise DataError(
                f"{files.url}: {above[None]} is in no folder, and others are in the folders of their classes: move it"
            )
        self._classes = {name: number for number, name in enumerate(sorted(filter(None, above)))}
        fields = [pa.field("image", pa.binary()), pa.field("label", pa.int64()), pa.field("path", pa.string())]
        features = {
            "image": {"dtype": "binary", "_type": "Value"},
            "label": {"names": list(self._classes), "_type": "ClassLabel"},
            "path": {"dtype": "string", "_type": "Value"},
        }
        if not self._classes:
            del fields[1], features["label"]
        self.schema = pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})
        self._starts = list(_starts([files.objects[name].size for name in self._names]))
        ends = [*self._starts[1:], len(self._names)]
        sizes = [0, *accumulate(files.objects[name].size for name in self._names)]
        self.parts = [
            Part(self._names[start], sizes[end] - sizes[start]) for start, end in zip(self._starts, ends, strict=True)
        ]
        self._threads = DaemonExecutor(IN_FLIGHT, "dataload-images")

    def read(self, part: int) -> Iterator[pa.Table]:
        end = self._starts[part + 1] if part + 1 < len(self.parts) else len(self._names)
        names = self._names[self._starts[part] : end]
        columns = {
            "image": self._images([self._files.objects[name] for name in names]),
            "label": [self._classes.get(name.partition("/")[0]) for name in names],
            "path": names,
        }
        yield pa.table({field.name: pa.array(columns[field.name], field.type) for field in self.schema}, self.schema)

    def _images(self, files: list[Object]) -> pa.Array:
        """Read files into one buffer: bytes objects of many threads would fragment the memory."""
        if empty := [each.name for each in files if not each.size]:
            raise DataError(f"{empty[0]} is empty: remove it, or write it again")
        bounds = list(accumulate((each.size for each in files), initial=0))
        data = pa.allocate_buffer(bounds[-1])
        memory = memoryview(data).cast("B")
        parts = [(each, memory[start:stop]) for each, (start, stop) in zip(files, pairwise(bounds), strict=True)]
        self._threads.map(lambda part: self._files.read_into(*part), parts)
        offsets = pa.array(bounds, pa.int32()).buffers()[1]
        return pa.Array.from_buffers(pa.binary(), len(files), [None, offsets, data])


def _starts(sizes: list[int]) -> Iterator[int]:
    """Yield where parts of a limited size begin."""
    held = count = 0
    for number, size in enumerate(sizes):
        if number == 0 or held + size > PART_BYTES or count == PART_FILES:
            yield number
            held = count = 0
        held += size
        count += 1
