"""A source of tar files as WebDataset has them: the files of a sample follow each other, and share a name up to a dot.

https://github.com/webdataset/webdataset has the rule.
"""

from __future__ import annotations

import io
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.conversion.samples import Sample, schema_of, tables
from dataload.conversion.source import Files, Part
from dataload.errors import DataError

KEY = "__key__"
NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
SKIPPED = re.compile(r"__[^/]*__($|/)")
# What WebDataset decodes by itself, and does not run code; JSON stays text. Other files stay as they are.
DECODED: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript", "json", "jsn"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
}


class _Member(tarfile.TarInfo):
    """A member, before which a damaged or missing header is an error. tarfile would end there without one."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf and len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the end
            raise tarfile.ReadError(f"it is cut or damaged: {error}") from error


class Tars:
    """Tar files, which may be compressed. Their columns are those of the first and the last file.

    Args:
        files: The files.

    Raises:
        DataError: One of these files cannot be read.
    """

    def __init__(self, files: Files) -> None:
        self._files, self._objects = files, list(files.objects.values())
        self.parts = [Part(each.name, each.size) for each in self._objects]
        ends = {0, len(self.parts) - 1}
        self.schema = schema_of((sample for part in sorted(ends) for sample in self._samples(part)), files.url)

    def read(self, part: int) -> Iterator[pa.Table]:
        yield from tables(self._samples(part), self.schema, self.parts[part].name)

    def _samples(self, part: int) -> Iterator[Sample]:
        name = self.parts[part].name
        sample: dict[str, Any] = {}
        for path, data in self._members(part):
            if (match := NAME.fullmatch(path)) is None:
                continue
            if sample and match[1] != sample[KEY]:
                yield sample
                sample = {}
            column = match[2].lower()
            if column in sample:
                raise DataError(f"{name}: sample {match[1]!r} has two files {column!r}: leave one out")
            sample[KEY] = match[1]
            try:
                sample[column] = DECODED.get(column.rpartition(".")[2], bytes)(data)
            except ValueError as error:
                raise DataError(f"{name}: {path!r} cannot be read: {error}: write it again, or leave it out") from error
        if sample:
            yield sample

    def _members(self, part: int) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents of the files in a tar file."""
        try:
            with (
                self._files.open(self._objects[part]) as file,
                tarfile.open(fileobj=file, mode="r|*", tarinfo=_Member) as archive,
            ):
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps all
                    if member.isreg() and not SKIPPED.match(member.name):
                        content = archive.extractfile(member)
                        assert content is not None
                        yield member.name, content.read()
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise DataError(
                f"{self.parts[part].name} cannot be read: {error}: write it again, or leave it out"
            ) from error
