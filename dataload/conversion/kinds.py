"""The kinds of sources, and how each is told by its files: by their endings, or by the index of a library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from dataload.arguments import did_you_mean
from dataload.conversion.columns import STATE, ColumnFiles, arrow, saved_to_disk
from dataload.conversion.images import ImageFolders
from dataload.conversion.lines import csv, json_lines
from dataload.conversion.shards import INDEX, index_of, litdata, mds
from dataload.conversion.source import Files, Source
from dataload.conversion.tars import Tars
from dataload.errors import ConfigError

PACKED = ("", ".gz", ".bz2", ".zst")  # endings of compressed text


class Kind(NamedTuple):
    """A kind of source.

    Attributes:
        title: How messages call it.
        endings: Those of its files; none: an index tells it.
        open: Makes the source of files.
        passes: How often it reads the files: text twice, the first time for its types.
    """

    title: str
    endings: tuple[str, ...]
    open: Callable[[Files], Source]
    passes: int = 1


def _packed(*endings: str) -> tuple[str, ...]:
    return tuple(ending + packed for ending in endings for packed in PACKED)


KINDS = {
    "parquet": Kind("Parquet", (".parquet", ".pq", ".parq"), partial(ColumnFiles, format="parquet")),
    "arrow": Kind("Arrow or Feather", (".arrow", ".feather", ".ipc"), arrow),
    "json": Kind("JSON lines", _packed(".jsonl", ".ndjson", ".json"), json_lines, 2),
    "csv": Kind("CSV", _packed(".csv", ".tsv"), csv, 2),
    "images": Kind(
        "folders of images", (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"), ImageFolders
    ),
    "webdataset": Kind("tar files of WebDataset", (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz"), Tars),
    "mds": Kind("MDS of MosaicML", (), mds),
    "litdata": Kind("LitData", (), litdata),
    "huggingface": Kind("save_to_disk of Hugging Face", (), saved_to_disk),
}
KEYS = {"shards": "mds", "chunks": "litdata"}  # that INDEX has, by kind
SPLITS = "dataset_dict.json"  # of Hugging Face


def kind_of(files: Files, name: str | None) -> str:
    """Return the kind of a source, and leave out the files of others.

    Args:
        files: The files.
        name: The kind; None: as the endings of the files say.

    Raises:
        ConfigError: There is no such kind, or the endings say none or several.
        DataError: An index cannot be read.
    """
    understood = ", ".join(f"{each.title} ({name})" for name, each in KINDS.items())
    if name is not None and name not in KINDS:
        raise ConfigError(f"format={name!r}: {did_you_mean(name, KINDS, f'it may be {understood}')}")
    if name is None:
        _check_splits(files)
    if (name or _indexed(files)) in (*KEYS.values(), "huggingface"):
        kind = name or _indexed(files)
        assert kind is not None
        return kind
    found = {
        kind: [file for file in files.objects if each.endings and file.lower().endswith(each.endings)]
        for kind, each in KINDS.items()
    }
    present = [kind for kind in KINDS if found[kind]] if name is None else [name]
    if not present:
        example = next(iter(files.objects))
        raise ConfigError(f"{files.url} has no files that convert knows, such as {example}: it knows {understood}")
    if len(present) > 1:
        ways = " or ".join(f"--format {kind} ({found[kind][0]}, …)" for kind in present)
        raise ConfigError(f"{files.url} has files of several kinds: choose {ways}")
    [kind] = present
    files.keep(found[kind] or list(files.objects))
    return kind


def _indexed(files: Files) -> str | None:
    """Return the kind that an index in the folder tells; None: there is no index."""
    if STATE in files.objects and "dataset_info.json" in files.objects:
        return "huggingface"
    index = index_of(files) if any(file.endswith((".mds", ".bin")) or ".mds." in file for file in files.objects) else {}
    return next((kind for key, kind in KEYS.items() if key in index), None)


def _check_splits(files: Files) -> None:
    """Raise ConfigError if each folder in the folder has an index of its own."""
    signs = (INDEX, STATE) if SPLITS in files.objects else (INDEX,)
    splits = [file.rpartition("/")[0] for file in files.objects if file.rpartition("/")[2] in signs and "/" in file]
    shards = any(file.endswith((".mds", ".bin", ".arrow")) or ".mds." in file for file in files.objects)
    if splits and shards and INDEX not in files.objects:
        names = " and ".join(map(repr, splits))
        raise ConfigError(f"{files.url} has the splits {names}: name the folder of one")
