"""`tiercache`: any fsspec filesystem, read through a cache on the local disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.utils import isfilelike

from dataload.cache.blocks.file import BlockFile
from dataload.cache.blocks.ranges import Range, outcomes, read_ranges
from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.config import CacheConfig
from dataload.cache.origin.origin import Origin, connect, introduce
from dataload.cache.origin.version import VERSION_FIELDS, version_of
from dataload.cache.tier import Allocate
from dataload.errors import ConfigError, ObjectChanged
from dataload.runtime.redact import redacted

BLOCKS_AT_ONCE = 4  # of a file that is copied
KNOWN_THAT_TRAVEL = 20_000  # objects whose size and version a pickled filesystem takes along: 5 MB


class TierCacheFileSystem(ChainedFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A read-only view of another filesystem whose bytes are fetched once a host.

    target_protocol, target_options: the origin as fsspec names it, such as "s3" and {"anon": True}; or
    fs: the origin as a filesystem.
    The other arguments are those of `CacheConfig`.

    Notes: picklable; nothing is opened before the first read; works in forked and spawned children.

    Raises ConfigError for settings that cannot work; FileNotFoundError, OriginError and ObjectChanged when reading.
    """

    protocol: ClassVar[str] = "tiercache"
    _strip_tokenize_options = ("fo",)

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fs: Any = None,
        cache_dir: str | None = None,
        cache_bytes: int | str | None = None,
        block_bytes: int | str = "4MiB",
        policy: str = "pin",
        consistency: str = "generation",
        engine: str = "auto",
        in_flight: int = 64,
        cluster: str | None = None,
        origin_id: str | None = None,
        allow_network_filesystem: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.config = CacheConfig(
            cache_dir,
            cache_bytes,
            block_bytes,
            policy,
            consistency,
            engine=engine,
            in_flight=in_flight,
            cluster=cluster,
            origin_id=origin_id,
            allow_network_filesystem=allow_network_filesystem,
        )
        if (fs is None) == (target_protocol is None):
            raise ConfigError("tiercache needs an origin: target_protocol='s3' (with target_options), or fs=")
        if fs is None:
            fs = connect(str(target_protocol), target_options)
        self.blocks = Blocks.open(Origin(fs, origin_id, engine), self.config)
        self._strip_protocol = self._path  # a class method by nature, but here the origin's class decides
        self._known: dict[str, dict[str, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        known = dict(islice(reversed(self._known.items()), KNOWN_THAT_TRAVEL))
        return _remade, (type(self), self.storage_args, self.storage_options, known)

    @property
    def fs(self) -> Any:
        """The filesystem behind the cache."""
        return self.blocks.origin.filesystem

    @property
    def fsid(self) -> str:
        return f"tiercache+{self.blocks.origin.identity}"

    def _path(self, path: Any) -> Any:
        """`path`, or each of a list, in the form that the origin's filesystem uses."""
        if isinstance(path, list):
            return [self._path(one) for one in path]
        return self.blocks.origin.path_of(os.fspath(path).removeprefix("tiercache://"))

    def info(self, path: str, refresh: bool = False, **_: Any) -> dict[str, Any]:
        path = self._path(path)
        known = None if refresh else self._known.get(path)
        if known is None:
            immutable = self.config.consistency == "immutable" and not refresh
            known = self._known[path] = self._kept_info(path) if immutable else self.blocks.origin.info(path)
        return dict(known)

    def _kept_info(self, path: str) -> dict[str, Any]:
        """What the origin said of an object when it was first asked, kept in the cache."""
        key = self.blocks.key(Object(path, 0, "immutable"), "info")
        kept = self.blocks.tier.get(key)
        if kept is not None:
            return dict(json.loads(bytes(kept)))
        info = self.blocks.origin.info(path)
        if info["type"] == "file":
            said = {name: value for name, value in info.items() if isinstance(value, (str, int, float))}
            data = json.dumps({**said, "checksum": version_of(info)}).encode()

            def fill(allocate: Allocate) -> None:
                allocate(len(data))[:] = data

            self.blocks.tier.get_or_fill(key, fill)
        return info

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        with self.blocks.origin.naming(path):
            entries = self.fs.ls(self._path(path), detail=True, **kwargs)
        self._learn(entries)
        return entries if detail else sorted(entry["name"] for entry in entries)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        with self.blocks.origin.naming(path):
            found = self.fs.find(self._path(path), maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)
        self._learn(found.values())
        return found if detail else sorted(found)

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        detail = kwargs.pop("detail", False)
        with self.blocks.origin.naming(path):
            # The origin knows best what is magic in its names: a "?" is not in a web address.
            found = self.fs.glob(self._path(path), maxdepth=maxdepth, detail=True, **kwargs)
        self._learn(found.values())
        return found if detail else sorted(found)

    def exists(self, path: str, **_: Any) -> bool:
        return self._type_of(path) is not None

    def isfile(self, path: str) -> bool:
        return self._type_of(path) == "file"

    def isdir(self, path: str) -> bool:
        return self._type_of(path) == "directory"

    def modified(self, path: str) -> Any:
        with self.blocks.origin.naming(path):
            return self.fs.modified(self._path(path))

    def created(self, path: str) -> Any:
        with self.blocks.origin.naming(path):
            return self.fs.created(self._path(path))

    def sign(self, path: str, expiration: int = 100, **kwargs: Any) -> Any:
        """An address that anybody may read for a while; straight from the origin, past the cache."""
        with self.blocks.origin.naming(path):
            return self.fs.sign(self._path(path), expiration=expiration, **kwargs)

    def ukey(self, path: str) -> str:
        return version_of(self.info(path))

    def checksum(self, path: str) -> int:
        return int.from_bytes(self.ukey(path).encode(), "big")

    def invalidate_cache(self, path: str | None = None) -> None:
        """Ask the origin anew for versions and sizes. Blocks are kept: their keys hold the version."""
        self._known.clear()
        self.fs.invalidate_cache(path)

    def object(self, path: str, version_id: str | None = None) -> Object:
        """The object that `path` names now, by the rules of `consistency`. Raises FileNotFoundError.

        version_id: of the version to read, in a versioned bucket of S3.
        """
        path = self._path(path) + (f"?versionId={version_id}" if version_id else "")
        if self.config.consistency == "open":
            self._known.pop(path, None)
        info = self.info(path)
        if info["type"] != "file":
            raise IsADirectoryError(f"{path} is a folder")
        return Object.of(info | {"name": path})  # s3fs leaves out which version was asked for

    def _open(self, path: str, mode: str = "rb", version_id: str | None = None, **_: Any) -> BlockFile:
        if mode != "rb":
            self._read_only()
        return BlockFile(self.blocks, self.object(path, version_id), self._forget)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, version_id: str | None = None, **_: Any
    ) -> bytes:
        obj = self.object(path, version_id)
        first, last, _step = slice(start, end).indices(obj.size)
        try:
            return bytes(self.blocks.read(obj, first, last))
        except ObjectChanged:
            self._forget(obj)
            raise

    def cat_ranges(
        self,
        paths: list[str],
        starts: int | list[int | None] | None,
        ends: int | list[int | None] | None,
        max_gap: int | None = None,  # noqa: ARG002 (blocks are what ranges are fetched in)
        on_error: str = "return",
        **_: Any,
    ) -> list[bytes | Exception]:
        """The bytes of many ranges, fetched at once; as `cat_file` reads bounds that are None or negative.

        on_error: "return" puts an exception in the place of what cannot be read, anything else raises it.
        """
        if not isinstance(paths, list):
            raise TypeError(f"cat_ranges takes a list of paths, not {paths!r}")
        bounds = [one if isinstance(one, list) else [one] * len(paths) for one in (starts, ends)]
        if any(len(one) != len(paths) for one in bounds):
            raise ValueError(f"{len(paths)} paths need as many starts and ends: {len(bounds[0])} and {len(bounds[1])}")
        names = dict.fromkeys(paths)
        objects = dict(zip(names, self._objects(list(names)), strict=True))

        def cut(path: str, start: int | None, end: int | None) -> Range | Exception:
            obj = objects[path]
            if isinstance(obj, Exception):
                return obj
            first, last, _step = slice(start, end).indices(obj.size)
            return obj, first, max(first, last)

        found = read_ranges(self.blocks, map(cut, paths, *bounds))
        for path, result in zip(paths, found, strict=True):
            if isinstance(result, ObjectChanged):
                self._known.pop(self._path(path), None)
            if isinstance(result, Exception) and on_error != "return":
                raise result
        return found

    def cat(
        self,
        path: str | list[str],
        recursive: bool = False,
        on_error: str = "raise",
        start: int | None = None,
        end: int | None = None,
        **_: Any,
    ) -> Any:
        paths = self.expand_path(path, recursive=recursive)
        if recursive:
            paths = [one for one in paths if self.isfile(one)]
        elif isinstance(path, str) and paths == [self._path(path)]:
            return self.cat_file(paths[0], start, end)
        found = self.cat_ranges(paths, start, end, on_error="raise" if on_error == "raise" else "return")
        pairs = zip(paths, found, strict=True)
        return {one: result for one, result in pairs if on_error == "return" or not isinstance(result, Exception)}

    def get_file(
        self, rpath: str, lpath: Any = None, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **_: Any
    ) -> None:
        """Copies an object to a local file, a few blocks at a time. What cannot be copied whole is removed again."""
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        if outfile is None and self.isdir(rpath):
            Path(lpath).mkdir(parents=True, exist_ok=True)
            return
        with self._open(rpath) as file:
            if outfile is not None:
                _copy(file, outfile, callback)
                return
            Path(lpath).parent.mkdir(parents=True, exist_ok=True)
            with Path(lpath).open("wb") as made:
                try:
                    _copy(file, made, callback)
                except BaseException:
                    if Path(lpath).is_file():  # and no /dev/stdout
                        Path(lpath).unlink()
                    raise

    def prefetch(self, paths: str | list[str], *, wait: bool = False) -> None:
        """Start filling the cache with whole objects (paths, folders or globs); `wait` until they are there.

        Raises OriginError for what cannot be listed and, when waiting, for what cannot be fetched.
        """
        origin = self.blocks.origin
        listed = [origin.list(self._path(path)) for path in ([paths] if isinstance(paths, str) else paths)]
        infos = [info for found in listed for info in found.values()]
        self._learn(infos)
        objects = self._objects([info["name"] for info in infos])
        for one in objects:
            if isinstance(one, Exception):
                raise one
        futures = [future for obj in objects if isinstance(obj, Object) for future in self.blocks.fill(obj)]
        for future in futures if wait else ():
            future.result()

    def _objects(self, paths: list[str]) -> list[Object | Exception]:
        """What `object` gives for each path; what has to be asked for first is, many at a time."""
        return outcomes(self.blocks, self.object, paths)

    def _learn(self, infos: Iterable[dict[str, Any]]) -> None:
        """A listing says of an object with an ETag what a request for it alone would, but of others it may say less."""
        whole = (info for info in infos if info["type"] == "file" and info.get("size") is not None)
        self._known.update((info["name"], info) for info in whole if any(map(info.get, VERSION_FIELDS)))

    def _forget(self, obj: Object) -> None:
        self._known.pop(obj.path, None)

    def _type_of(self, path: str) -> str | None:
        """What there is, "file" or "directory", or None. Trouble on the way to the origin is raised."""
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return None

    def stats(self) -> dict[str, Any]:
        """Totals of this process: hits, misses, waits, bytes_local, bytes_cluster, bytes_origin, requests_origin,
        errors by tier, engine.

        health: how the local disk is doing; see `Health`. cluster: see `Cluster.stats`. None without one.
        """
        return self.blocks.stats()

    def _read_only(self, *_: Any, **__: Any) -> Any:
        raise ConfigError("tiercache is read-only: write through the filesystem behind it (`.fs`)")

    mkdir = makedirs = mkdirs = touch = _read_only
    rm = rm_file = rmdir = delete = _rm = _read_only
    cp = cp_file = copy = mv = move = rename = _read_only
    pipe = pipe_file = put = put_file = upload = write_bytes = write_text = _read_only
    start_transaction = end_transaction = _read_only
    transaction = property(_read_only)


def _remade(
    cls: type[TierCacheFileSystem], args: tuple[Any, ...], options: dict[str, Any], known: dict[str, dict[str, Any]]
) -> TierCacheFileSystem:
    fs = cls(*args, **options)
    fs._known.update(known)
    return fs


def _copy(file: BlockFile, into: Any, callback: Any) -> None:
    callback.set_size(file.size)
    while data := file.read(BLOCKS_AT_ONCE * file.blocksize):
        into.write(data)
        callback.relative_update(len(data))


def open_source(url: str, storage_options: dict[str, Any] | None, config: CacheConfig | None) -> Blocks:
    """The objects' blocks at the origin that `url` names, kept as `config` says; a tiercache:: URL says so itself.

    Raises ConfigError for no URL, an unknown protocol, or options that its filesystem does not take.
    """
    if not url:
        raise ConfigError("the URL is empty: name an object, a folder or a glob")
    introduce()
    try:
        filesystem, _ = fsspec.url_to_fs(url, **(storage_options or {}))
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"{redacted(url)} cannot be opened with these storage_options: {redacted(error)}") from error
    if isinstance(filesystem, TierCacheFileSystem):
        return filesystem.blocks
    if config is None:
        return Blocks.open(Origin(filesystem), None)
    return Blocks.open(Origin(filesystem, config.origin_id, config.engine), config)
