"""The metadata of an origin as a read-only fsspec filesystem: names, sizes and versions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from fsspec.implementations.chained import ChainedFileSystem

from dataload.cache.blocks.ranges import outcomes
from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.origin.listings import Walked, complete, left_out
from dataload.cache.origin.origin import Origin
from dataload.cache.origin.s3_names import VERSION
from dataload.cache.origin.version import VERSION_FIELDS, forget, version_of
from dataload.cache.tier import BlobKey, Kind, copy_into
from dataload.errors import ConfigError
from dataload.runtime.redact import redacted

T = TypeVar("T")


class MetadataFileSystem(ChainedFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A read-only view of the names, sizes and versions of an origin's objects. It rejects all writes.

    Args:
        blocks: Reads the objects. Its settings say when to check an object's version.
    """

    def __init__(self, blocks: Blocks, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = blocks
        self._consistency = blocks.config.consistency
        self._known: dict[str, dict[str, Any]] = {}
        self._takes_infos = True  # of other processes, which may be older than `invalidate_cache`
        self._forgotten = set[str]()  # paths whose info from elsewhere may be the one that was forgotten
        # A class method in fsspec; here the origin's class decides. No method, which would keep the cache in a cycle.
        self._path = self._strip_protocol = partial(_path_at, blocks.origin)

    @property
    def fs(self) -> Any:
        """The origin's filesystem."""
        return self.blocks.origin.filesystem

    @property
    def fsid(self) -> str:
        return f"tiercache+{self.blocks.origin.identity}"

    def _versioned(self, path: str, version_id: str | None) -> Any:
        """Return the path of a version of an object, or of the newest one."""
        return self._path(f"{os.fspath(path)}{VERSION}{version_id}" if version_id else path)

    def info(self, path: str, refresh: bool = False, version_id: str | None = None, **_: Any) -> dict[str, Any]:
        path = self._versioned(path, version_id)
        known = None if refresh else self._known.get(path)
        if known is None:
            immutable = self._consistency == "immutable" and not refresh
            known = self._known[path] = self._cached_info(path) if immutable else self.blocks.origin.info(path)
        return dict(known)

    def _cached_info(self, path: str) -> dict[str, Any]:
        """Return the first info that the origin gave of an object, from the cache if it is there."""
        key = self._info_key(path)
        cached = self.blocks.tier.get(key)
        if cached is not None:
            return {**json.loads(bytes(key.proven(cached))), "name": path}
        info = self.blocks.origin.info(path)
        if info["type"] == "file":
            plain = ((name, value) for name, value in info.items() if isinstance(value, (str, int, float)))
            fields = {name: value for name, value in plain if redacted(value) == str(value)}  # no URL with credentials
            data = json.dumps({**fields, "checksum": version_of(info)}).encode()
            self.blocks.tier.get_or_fill(key, partial(copy_into, key.proof(data) + data))
        return info

    def _request(self, path: str, request: Callable[[Any, Any], T]) -> T:
        """Make a request for metadata, which is retried, with the filesystem that lists objects and the path there."""
        return self.blocks.origin.metadata(path, lambda names: request(names, self._path(path)))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        entries = self._request(path, lambda fs, path: fs.ls(path, detail=True, **kwargs))
        self._learn(entries)
        return [dict(entry) for entry in entries] if detail else sorted(entry["name"] for entry in entries)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        given = {"maxdepth": maxdepth, "withdirs": withdirs, "detail": True, **kwargs}
        found = self._request(path, lambda fs, path: complete(fs).find(path, **given))
        # Some filesystems return a single file without its info.
        found = {name: info or self.blocks.origin.info(name) for name, info in found.items()}
        return self._learned(found, detail=detail)

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        detail = kwargs.pop("detail", False)
        given = {"maxdepth": maxdepth, "detail": True, **kwargs}
        slash = "/" if os.fspath(path).endswith("/") else ""  # only folders
        # The origin decides which characters are magic: in a URL, "?" is not.
        found = self._request(path, lambda fs, path: complete(fs).glob(path.rstrip(slash) + slash, **given))
        return self._learned(found, detail=detail)

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], object] = left_out,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Yield the folders below `path`, as fsspec does. By default, a folder that cannot be listed raises its error.

        Args:
            path: The first folder.
            maxdepth: How many levels to list; None: all.
            topdown: Whether a folder comes before those in it.
            on_error: "omit", "raise", or a function of the error, for each folder.
            **kwargs: Arguments of `ls`; `detail`: yield infos instead of names.
        """
        return Walked(self, on_error).walk(path, maxdepth, topdown, **kwargs)

    def exists(self, path: str, version_id: str | None = None, **_: Any) -> bool:
        return self._type_of(self._versioned(path, version_id)) is not None

    def isfile(self, path: str) -> bool:
        return self._type_of(path) == "file"

    def isdir(self, path: str) -> bool:
        return self._type_of(path) == "directory"

    def modified(self, path: str) -> Any:
        return self._request(path, lambda fs, path: fs.modified(path))

    def created(self, path: str) -> Any:
        return self._request(path, lambda fs, path: fs.created(path))

    def sign(self, path: str, expiration: int = 100, **kwargs: Any) -> Any:
        """Return a presigned URL that bypasses the cache. expiration: seconds."""
        return self._request(path, lambda fs, path: fs.sign(path, expiration=expiration, **kwargs))

    def ukey(self, path: str) -> str:
        return version_of(self.info(path))

    def checksum(self, path: str, refresh: bool = False) -> int:
        return int.from_bytes(version_of(self.info(path, refresh=refresh)).encode(), "big")

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget versions and sizes. Cached blocks stay: their keys include the version."""
        self._takes_infos = False
        self._known.clear()
        self.fs.invalidate_cache(None if path is None else self._path(path))

    def object(self, path: str, version_id: str | None = None) -> Object:
        """Return the current object at `path`, by the rules of `consistency`.

        Args:
            path: Path of the object.
            version_id: The version to read, in a versioned S3 bucket.

        Raises:
            FileNotFoundError: The object does not exist.
            IsADirectoryError: `path` is a folder.
        """
        path = self._versioned(path, version_id)
        if self._consistency == "open":
            self._known.pop(path, None)
        info = self.info(path)
        if info["type"] != "file":
            raise IsADirectoryError(f"{path} is a folder")
        return Object.of(info | {"name": path})

    def _objects(
        self, paths: list[str], version_id: str | None = None, *, raises: bool = False
    ) -> list[Object | Exception]:
        """Return the result of `object`, or its exception, for each path; look them up concurrently."""
        return outcomes(self.blocks, partial(self.object, version_id=version_id), paths, raises=raises)

    def _learned(self, found: dict[str, dict[str, Any]], *, detail: bool) -> Any:
        """Remember infos by name, and return them or their names."""
        # Before 2026, fsspec's wrapper of a folder leaves the whole names in the infos.
        self._learn({**info, "name": name} for name, info in found.items())
        return {name: {**info, "name": name} for name, info in found.items()} if detail else sorted(found)

    def _learn(self, infos: Iterable[dict[str, Any]]) -> None:
        """Remember listed objects that have a version field. Listings may lack details of other objects."""
        files = (info for info in infos if info["type"] == "file" and info.get("size") is not None)
        self._known.update((info["name"], info) for info in files if any(map(info.get, VERSION_FIELDS)))

    def _receive(self, infos: dict[str, dict[str, Any]]) -> None:
        """Remember infos of another process, as far as none is known here: they may be older."""
        if self._takes_infos:
            newer = self._known.keys() | self._forgotten
            self._known.update((path, info) for path, info in infos.items() if path not in newer)

    def _forget(self, obj: Object) -> None:
        """Forget the version of an object that has another one now."""
        self._forgotten.add(obj.path)
        self._known.pop(obj.path, None)
        forget(self.fs, obj.path)
        if self._consistency == "immutable":
            self.blocks.tier.discard([self._info_key(obj.path)], [])

    def _info_key(self, path: str) -> BlobKey:
        return self.blocks.key(Object(path, 0, "immutable"), Kind.INFO, check=BlobKey.proven)

    def _type_of(self, path: str) -> str | None:
        """Return "file", "directory", or None if nothing is there. Errors of the origin are raised."""
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return None

    def _read_only(self, *_: Any, **__: Any) -> Any:
        raise ConfigError("tiercache is read-only: write through the filesystem behind it (`.fs`)")

    mkdir = makedirs = mkdirs = touch = _read_only
    rm = rm_file = rmdir = delete = _rm = _read_only
    cp = cp_file = copy = mv = move = rename = _read_only
    pipe = pipe_file = put = put_file = upload = write_bytes = write_text = _read_only
    start_transaction = end_transaction = _read_only
    transaction = property(_read_only)


class Forget:
    """Makes a filesystem forget the version of an object. Its pickle has the filesystem without infos of objects."""

    def __init__(self, fs: MetadataFileSystem) -> None:
        self._fs = fs

    def __call__(self, obj: Object) -> None:
        self._fs._forget(obj)  # noqa: SLF001 (of this module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _forget_in, (type(self._fs), self._fs.storage_args, self._fs.storage_options)


def _forget_in(cls: type[MetadataFileSystem], args: tuple[Any, ...], options: dict[str, Any]) -> Forget:
    return Forget(cls(*args, **options))


def _path_at(origin: Origin, path: Any) -> Any:
    """Return a path, or a list of paths, in the form of the origin's filesystem."""
    if isinstance(path, list):
        return [_path_at(origin, each) for each in path]
    return origin.path_of(os.fspath(path))
