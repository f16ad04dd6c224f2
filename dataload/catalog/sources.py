"""The files that a source names: a path, a folder, a glob, or a list of these."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from fsspec.core import has_magic

from dataload.cache.blocks.reader import Blocks, Object
from dataload.errors import ConfigError, OriginNotFound
from dataload.formats.hive_partitions import Keys, keys_of
from dataload.runtime.redact import redacted

METADATA = re.compile(r"(^|/)([_.]|(dataset_info|dataset_dict|state)\.json$)")  # of Spark; of Hugging Face datasets

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def source_paths(source: Source) -> list[str]:
    """Return the URLs or paths that `source` names. Raise ConfigError if there are none."""
    if not isinstance(source, (str, os.PathLike, Iterable)) or isinstance(source, (bytes, Mapping)):
        raise ConfigError(f"the source is of type {type(source).__name__}: use a URL, a path, or a list of them")
    paths = []
    for path in [source] if isinstance(source, (str, os.PathLike)) else source:
        if not isinstance(path, (str, os.PathLike)):
            kind = type(path).__name__
            raise ConfigError(f"the source has an item of type {kind}: use a URL, a path, or a list of them")
        paths.append(os.fspath(path))
    if not paths:
        raise ConfigError("the source is an empty list: name at least one file, folder or glob")
    return paths


def list_objects(source: Source, blocks: Blocks) -> dict[Object, Keys]:
    """Return the objects that `source` names, in order of path, with their partition keys.

    The keys are those of the folders below the named path. Files of metadata are skipped: those of Spark, whose names
    start with "_" or ".", and the JSON of Hugging Face datasets.

    Raises:
        OriginNotFound: There are no such objects.
    """
    found: dict[str, tuple[Object, Keys]] = {}
    for path in source_paths(source):
        listed = _list(path, blocks)
        if not listed:
            address = blocks.origin.address
            check = "check the path" if address == "file://" else "check bucket, prefix and endpoint"
            hint = "; a glob names objects, not folders: add /* for what is in them" if has_magic(path) else ""
            raise OriginNotFound(f"no objects at {redacted(path)} ({address}): {check}{hint}")
        for obj, keys in listed.items():
            # The source may name an object twice: by itself and by a folder above it, which yields more keys.
            if obj.path not in found or len(keys) > len(found[obj.path][1]):
                found[obj.path] = obj, keys
    return dict(found[path] for path in sorted(found))


def _list(path: str, blocks: Blocks) -> dict[Object, Keys]:
    origin = blocks.origin
    root = origin.path_of(path.rpartition("::")[2])
    folder = re.split(r"[*?\[]", root, maxsplit=1)[0].rpartition("/")[0] if has_magic(root) else root
    listed = {Object.of(info): name.removeprefix(folder) for name, info in origin.list(root).items()}
    return {obj: keys_of(relative) for obj, relative in listed.items() if not METADATA.search(relative)}
