"""The kinds of sources, and how each is told by the names of its files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from dataload.arguments import did_you_mean
from dataload.conversion.columns import ColumnFiles
from dataload.conversion.images import ImageFolders
from dataload.conversion.lines import csv, json_lines
from dataload.conversion.source import Files, Source
from dataload.errors import ConfigError

PACKED = ("", ".gz", ".bz2", ".zst")  # endings of compressed text


class Kind(NamedTuple):
    """A kind of source.

    Attributes:
        title: How messages call it.
        endings: Those of its files.
        open: Makes the source of files.
    """

    title: str
    endings: tuple[str, ...]
    open: Callable[[Files], Source]


def _packed(*endings: str) -> tuple[str, ...]:
    return tuple(ending + packed for ending in endings for packed in PACKED)


KINDS = {
    "parquet": Kind("Parquet", (".parquet", ".pq", ".parq"), partial(ColumnFiles, format="parquet")),
    "arrow": Kind("Arrow or Feather", (".arrow", ".feather", ".ipc"), partial(ColumnFiles, format="ipc")),
    "json": Kind("JSON lines", _packed(".jsonl", ".ndjson", ".json"), json_lines),
    "csv": Kind("CSV", _packed(".csv", ".tsv"), csv),
    "images": Kind(
        "folders of images", (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"), ImageFolders
    ),
}


def open_kind(files: Files, name: str | None) -> tuple[str, Source]:
    """Return the kind of a source, and the source, of the files of that kind.

    Args:
        files: The files.
        name: The kind; None: as the endings of the files say.

    Raises:
        ConfigError: There is no such kind, or the endings say none or several.
        DataError: A file cannot be read.
    """
    understood = ", ".join(f"{each.title} ({name})" for name, each in KINDS.items())
    if name is not None and name not in KINDS:
        raise ConfigError(f"format={name!r}: {did_you_mean(name, KINDS, f'it may be {understood}')}")
    found = {kind: [file for file in files.objects if file.lower().endswith(KINDS[kind].endings)] for kind in KINDS}
    present = [kind for kind in KINDS if found[kind]] if name is None else [name]
    if not present:
        example = next(iter(files.objects))
        raise ConfigError(f"{files.url} has no files that convert knows, such as {example}: it knows {understood}")
    if len(present) > 1:
        ways = " or ".join(f"--format {kind} ({found[kind][0]}, …)" for kind in present)
        raise ConfigError(f"{files.url} has files of several kinds: choose {ways}")
    [kind] = present
    files.keep(found[kind] or list(files.objects))
    return kind, KINDS[kind].open(files)
