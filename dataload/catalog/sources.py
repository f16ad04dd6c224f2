"""The files that a source names: a path, a folder, a glob, or a list of these."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import filterfalse, groupby
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fsspec.utils import glob_translate

from dataload.cache.blocks.reader import IN_FLIGHT, Blocks, Object
from dataload.cache.origin.explanation import amazon_hint
from dataload.cache.origin.listings import folder_of_glob, has_wildcard
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.source import split_chain
from dataload.catalog.table_logs import check_delta, check_files, check_iceberg
from dataload.errors import ConfigError, OriginError, OriginNotFound
from dataload.formats.detect import CONVERT
from dataload.formats.hive_partitions import Keys, Partitioning, keys_of
from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.redact import redacted
from dataload.runtime.text import counted

# Names of Spark, except keys that begin with "_", and "." and "..", which may be in keys of S3; markers of folders by
# EMR and Hadoop; results of `map` by Hugging Face datasets
METADATA = re.compile(r"(^|/)(\.(?!\.?/)|_(?![^/]*=)|cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow$)|_\$folder\$$")


class TableFormat(NamedTuple):
    """A format of tables whose folders also have files of deleted rows.

    Attributes:
        own_files: Matches files that only such tables have.
        sign: The glob below a table's folder of some of these files, among which each table has one.
        version_files: The call that returns the files of a version.
        deletions: What marks rows of these files as deleted.
        rewrite: The command that rewrites the files without such rows.
        url: How such a table is named as a source, with a gap for its path.
    """

    own_files: re.Pattern[str]
    sign: str
    version_files: str
    deletions: str
    rewrite: str
    url: str = ""


TABLE_FORMATS = {
    "a Delta": TableFormat(
        re.compile(r"(^|/)_delta_log/"),
        "_delta_log/0*",
        "DeltaTable(url).file_uris()",
        "deletion vectors",
        "REORG TABLE … APPLY (PURGE)",
        "delta+{}",
    ),
    "a Hudi": TableFormat(
        re.compile(r"(^|/)\.hoodie/"), ".hoodie/h*", "as Hudi lists them", "log files", "its compaction"
    ),
    "an Iceberg": TableFormat(
        re.compile(r"(^|/)metadata/[^/]+\.metadata\.json$"),
        "metadata/*.metadata.json",
        "[task.file.file_path for task in table.scan().plan_files()]",
        "delete files",
        "rewrite_data_files with delete-file-threshold=1",
        "iceberg://catalog/namespace.table, or the table of pyiceberg",
    ),
}
# Files beside the data of a repository, such as one of Hugging Face's hub or a dataset of LeRobot
DOCUMENT = re.compile(
    r"(?i)(^|/)((README|LICEN[CS]E([-_]\w+)?|NOTICE|COPYING|CITATION|CHANGELOG|AUTHORS|VERSION|Makefile|\w+SUMS)|"
    r"[^/]+\.(md|rst|txt|json|ya?ml|toml|cfg|ini|cff|bib|pdf|html?|py|ipynb|sh|md5|sha1|sha256|sha512|"
    r"png|jpe?g|gif|svg|webp|mp4|mkv|avi|webm|mov))$"
)
META_FOLDER, DATA_FOLDER = re.compile(r"(.*?/)meta/"), re.compile(r"(.*?/)data/")  # of LeRobot, side by side
LOGS = {"a Delta": check_delta, "an Iceberg": check_iceberg}  # by table format: what their metadata says of files
KEY = re.compile(r"=[^/]*$")
IN_TABLE = re.compile(r"[^/]/([^/]+=[^/]*|data)$")  # a folder that the folder of a table may be above
PREFIX = re.compile(r"(?<=[^/])/[0-9A-Za-z]{2}$")  # a folder that Delta draws for files of a table with column mapping
FOLDERS_PER_LEVEL = 4  # below the fixed parts of globs, in which to look for a table; each takes a few requests
WAYS = "use a URL, a path, or a list of them"
SPLITS_FILE = re.compile(r"(^|/)dataset_dict\.json$")
SPLIT = re.compile(r"(?:^|/)(train|test|validation|valid|val|dev|eval)(?=[-_./\d])")

log = logging.getLogger(__name__)

TABLE_URLS = ("delta+", "iceberg://")  # begin the URLs of tables


class Table(Protocol):
    """A `deltalake.DeltaTable`, or a table of pyiceberg."""

    def scan(self, *arguments: Any, **options: Any) -> Any: ...


class Scan(Protocol):
    """A scan of a table of pyiceberg."""

    def plan_files(self) -> Any: ...


Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Table | Scan


def source_paths(source: Source) -> list[str]:
    """Return the URLs or paths that `source` names. Raise ConfigError if there are none."""
    # Others may also be iterable: a DataFrame has the names of its columns, a loader its batches.
    is_column = len(getattr(source, "shape", ())) == 1
    is_list = is_column or isinstance(source, (Sequence, AbstractSet, Iterator, ValuesView))
    if not (is_list or isinstance(source, os.PathLike)) or isinstance(source, bytes):
        raise ConfigError(f"the source is of type {type(source).__name__}: {_way(source)}")
    paths = []
    items: Any = [source] if isinstance(source, (str, os.PathLike)) else source
    for path in items:
        if not isinstance(path, (str, os.PathLike)):
            kind, way = type(path).__name__, WAYS
            if hasattr(path, "rowstore") or type(path).__module__.partition(".")[0] in ("deltalake", "pyiceberg"):
                way = "mix([…]) reads several datasets"
            raise ConfigError(f"the source has an item of type {kind}: {way}")
        if os.fspath(path).startswith(TABLE_URLS):
            raise ConfigError(
                f"the source has the table {redacted(path)} in a list: pass it alone, or mix([…]) several"
            )
        paths.append(os.fspath(path))
    if not paths:
        raise ConfigError("the source is an empty list: name at least one file, folder or glob")
    return paths


def _way(source: object) -> str:
    """Return what to pass instead of an object that is no path."""
    name = type(source).__name__
    ways = [
        (isinstance(source, Mapping), "pass one of its values, or mix(source) for several by name"),
        (name == "Subset", "pass it to make_loader, or use dataset.select(subset.indices)"),
        (name == "ConcatDataset", "pass mix(source.datasets)"),
        (hasattr(source, "rank_sampler"), "pass its .dataset"),  # a loader of ours
        (is_of_hugging_face(source), "pass it to make_loader, or write it by to_parquet(path), and pass that path"),
        *(
            (hasattr(source, method), f"write it by {method}(path), and pass that path")
            for method in ("to_parquet", "write_parquet", "sink_parquet")  # of pandas, polars, and others
        ),
        (
            type(source).__module__.startswith("pyarrow."),
            "write it by pyarrow.parquet.write_table(table, path), and pass that path",
        ),
    ]
    return next((way for is_one, way in ways if is_one), WAYS)


def is_of_hugging_face(source: object) -> bool:
    """Return whether the library `datasets` made an object. Users' own packages may have its name."""
    library = sys.modules.get("datasets")
    if "datasets.arrow_dataset" not in sys.modules or library is None:
        return False
    names = ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")
    return any(isinstance(source, getattr(library, name, ())) for name in names)


def list_objects(source: Source, blocks: Blocks, partitioning: Partitioning = "hive") -> dict[Object, Keys]:
    """Return the objects that `source` names, each once, in order of path, with their partition keys; None: no keys.

    The order does not follow a list, because `glob.glob` lists files differently on each node. The keys are those of
    the folders below the named path. Of a folder or a glob, files of metadata are skipped: those of Spark, whose names
    start with "_" or ".", the cached results of Hugging Face datasets, and documents beside the data, such as README.md
    and the folder `meta` of LeRobot.

    Raises:
        ConfigError: A folder or a glob has files of a table with deleted rows, such as Delta, or a folder has a dataset
            for each split.
        OriginNotFound: There are no such objects.
    """
    found: dict[str, tuple[Object, Keys]] = {}
    again: list[str] = []
    folders: set[str] = set()
    below: set[str] = set()
    named: list[str] = []  # the objects that the source names by themselves
    paths = source_paths(source)
    # Other stores list one path at a time. A listing by fsspec drops cached listings that other threads use. Threads
    # cannot share a connection of FTP.
    concurrent = all(split_chain(path)[1].startswith(("http://", "https://", "s3://", "s3a://")) for path in paths)
    every = DaemonExecutor(IN_FLIGHT, "dataload-list").map if concurrent else map
    roots = blocks.origin.pinned([blocks.origin.path_of(split_chain(path)[1]) for path in paths])
    found_at = every(partial(_list, blocks=blocks), list(zip(paths, roots, strict=True)))
    for root, (listed, unlisted, matched) in zip(roots, found_at, strict=True):
        if root in (obj.path for obj in listed):
            named.append(root)
        folders.update(filterfalse(has_wildcard, unlisted))
        below.update(filterfalse(has_wildcard, matched))
        again += [obj.name for obj in listed if obj.path in found]
        for obj, keys in listed.items():
            # The source may name an object by itself and by a folder above it, which yields more keys.
            if obj.path not in found or len(keys) > len(found[obj.path][1]):
                found[obj.path] = obj, keys
    searched = sorted(filter(None, folders.union(_some_of_each_level(below))))
    signs = [f"{folder}/{table.sign}" for folder in searched for table in TABLE_FORMATS.values()]
    for sign, names in zip(signs, every(partial(_matching, blocks.origin), signs), strict=True):
        _check_listing(redacted(sign.rsplit("/", 2)[0]), names)
    check_files(named)
    if not any(split_chain(path)[1].startswith(("http://", "https://")) for path in paths):  # These list no folders.
        _check_tables(named, blocks, every)
    if again:
        log.warning("the source names %s twice, and it is read once: mix repeats rows by weights", min(again))
    objects = dict(found[path] for path in sorted(found))
    return objects if partitioning else dict.fromkeys(objects, ())


def _list(named: tuple[str, str], blocks: Blocks) -> tuple[dict[Object, Keys], list[str], set[str]]:
    """Return the objects of a path, the folders above it, and the folders between a glob's fixed part and its files.

    A table may be at any of these folders: their own files are not listed yet.

    named: the path as the user has it, and at the origin.
    """
    origin = blocks.origin
    path, root = named
    infos, folder = infos_at(origin, root)
    is_glob = folder != root
    unlisted = [folder] if is_glob else []
    if is_glob or root not in infos:
        unlisted += _folders_above(folder)
    _check_cache(path, folder, root.removeprefix(folder) if is_glob else "/**", blocks)
    listed = {Object.of(info): name.removeprefix(folder) for name, info in infos.items()}
    if not listed:
        check = "check the path" if origin.address == "file://" else "check bucket, prefix and endpoint"
        check += _doubts(path)
        if has_wildcard(root):
            check += "; a glob names objects, not folders: add /* for what is in them, and write [[] for a ["
        raise OriginNotFound(f"no objects at {_shown(path)} ({origin.address}): {check}")
    _check_listing(redacted(path), listed.values())
    wants_documents = is_glob and DOCUMENT.search(root) is not None  # such as *.json
    found = {obj: keys_of(name) for obj, name in _data_of(listed, documents=wants_documents).items()}
    if not found:
        other = min(obj.name for obj in listed)
        raise OriginNotFound(
            f"{redacted(path)} has no Parquet or Arrow files, only others such as {other}: names that begin with _ or "
            ". and endings such as .json are skipped as metadata, so name data that is called so file by file, "
            f"or {CONVERT}"
        )
    if skipped := [obj.name for obj in listed if obj not in found]:
        log.info(
            "%s: skips %s beside the data, such as %s", redacted(path), counted(len(skipped), "file"), min(skipped)
        )
    splits = {match[1] for obj in found if (match := SPLIT.search(listed[obj]))}
    if "train" in splits and len(splits) > 1:
        log.warning("%s: reads the splits %s together: name a folder or a glob of one", redacted(path), _texts(splits))
    below = _folders_below(folder, (obj.path for obj in found)) if is_glob else set()
    return found, unlisted, below


def infos_at(origin: Origin, path: str) -> tuple[dict[str, Any], str]:
    """Return the infos of the objects at a path, by path, and the folder above a glob; else the path itself.

    An object or a folder may have characters of globs in its name.
    """
    is_glob = has_wildcard(path) and not (origin.is_local and Path(path).exists())
    if is_glob and (found := origin.list(path, is_glob=True)):
        return found, folder_of_glob(path)
    return origin.list(path, is_glob=False), path


def _data_of(listed: Mapping[Object, str], *, documents: bool) -> dict[Object, str]:
    """Return the listed files, with their names below the source, that are no metadata, nor documents if not wanted."""
    data = {
        obj: name
        for obj, name in listed.items()
        if not METADATA.search(name) and (documents or not DOCUMENT.search(name))
    }
    above = {match[1] for name in data.values() if (match := DATA_FOLDER.match(name))}
    return {
        obj: name for obj, name in data.items() if (match := META_FOLDER.match(name)) is None or match[1] not in above
    }


def _check_cache(path: str, folder: str, pattern: str, blocks: Blocks) -> None:
    """Raise ConfigError if a path names files of the cache: those that match a pattern below a folder."""
    if not (blocks.origin.is_local and blocks.tier.on_disk):
        return
    cache, above = blocks.config.folder, Path(folder).resolve()
    if cache.resolve().is_relative_to(above):
        names = (f"/{(cache.resolve() / name).relative_to(above)}" for name in ("FORMAT", "blobs/a/0"))
        if any(re.match(glob_translate(pattern), name) and not METADATA.search(name) for name in names):
            way = "name a folder outside of it, by cache_dir or DATALOAD_CACHE_DIR"
            raise ConfigError(f"cache_dir {cache} lies inside the source {path}: {way}")


def _shown(path: str) -> str:
    """Return a URL for a message, in quotes if whitespace in it could be overlooked."""
    return redacted(path) if path == redacted(path) or path.split() == [path] else redacted(repr(path))


def _doubts(path: str) -> str:
    """Return what is probably wrong with a URL at which nothing is."""
    doubts = ""
    if path != path.strip():
        doubts += "; the URL begins or ends with whitespace"
    if "{" in path and "}" in path:
        doubts += "; braces are not expanded: name each path in a list"
    return doubts + amazon_hint(path)


def _folders_below(folder: str, names: Iterable[str]) -> set[str]:
    """Return the folders of files, and those between them and a folder above, except folders of partition keys."""
    inner = {name.rpartition("/")[0].removeprefix(folder) for name in names}
    found = {path[: end.start()] for path in inner for end in re.finditer(r"(?<=[^/])(/|$)", path)}
    return {folder + path for path in found if "=" not in path.rpartition("/")[2]}


def _some_of_each_level(folders: Iterable[str]) -> Iterator[str]:
    """Yield folders of each depth, evenly spaced by name."""
    depth = methodcaller("count", "/")
    for _, level in groupby(sorted(sorted(folders), key=depth), depth):
        names = list(level)
        count = min(len(names), FOLDERS_PER_LEVEL)
        yield from (names[number * len(names) // count] for number in range(count))


def _folders_above(folder: str) -> list[str]:
    """Return the folders above one whose table may have its files: above partition keys, and above one named "data"."""
    found = []
    folder = folder.rstrip("/")
    while match := IN_TABLE.search(folder):
        folder = folder.removesuffix(f"/{match[1]}")
        found.append(folder)
        if match[1] == "data":
            break
    return found


def _matching(origin: Origin, pattern: str) -> dict[str, Any]:
    """Return the objects that match; none after any error of the store, so a table is not found then."""
    try:
        return origin.list(pattern, is_glob=True)
    except OriginError:
        return {}


def _check_tables(paths: Sequence[str], blocks: Blocks, every: Callable[..., Iterable[Any]]) -> None:
    """Raise ConfigError if files that are named by themselves are of tables that delete rows of them elsewhere.

    Looks in few folders of each level above them.
    """
    origin = blocks.origin
    above = set(map(_folder_of, paths))
    folders = {folder for path in above for folder in (path, *_folders_above(path)) if not KEY.search(folder)}
    folders |= {PREFIX.sub("", folder) for folder in folders}
    searched = _some_of_each_level(filterfalse(has_wildcard, filter(None, folders)))
    checks = [(folder, table, check) for folder in searched for table, check in LOGS.items()]
    signs = [f"{folder}/{TABLE_FORMATS[table].sign}" for folder, table, _ in checks]
    read = partial(every, partial(_content, origin))
    for (folder, _, check), found in zip(checks, every(partial(_matching, origin), signs), strict=True):
        if found:
            files = {name: Object.of(info) for name, info in found.items()}
            check(folder, files, [path for path in paths if path.startswith(f"{folder}/")], read)


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _content(origin: Origin, obj: Object) -> bytes:
    """Return the bytes of an object."""
    return bytes(origin.read(obj.path, 0, obj.size, obj.version)) if obj.size else b""


def _check_listing(path: str, names: Collection[str]) -> None:
    """Raise ConfigError if these names are of a table with deleted rows, or of separate datasets."""
    for kind, table in TABLE_FORMATS.items():
        if any(map(table.own_files.search, names)):
            name = f"name the table itself, {table.url.format(path)}; or " if table.url else ""
            raise ConfigError(
                f"{path} is {kind} table, and its folder also has files of deleted rows: {name}pass a list of the "
                f"files of one version, {table.version_files}. If the table has {table.deletions}, first run "
                f"{table.rewrite}: they still have deleted rows"
            )
    for name in filter(SPLITS_FILE.search, names):
        folder = name.rpartition("/")[0]
        below = (other.removeprefix(folder).split("/") for other in names if other.startswith(f"{folder}/"))
        splits = sorted({parts[1] for parts in below if len(parts) > 2})
        raise ConfigError(
            f"{path.rstrip('/')}{folder} has the splits {_texts(splits)}: name the folder of one, or mix them"
        )


def _texts(names: Iterable[str]) -> str:
    return " and ".join(map(repr, sorted(names)))
