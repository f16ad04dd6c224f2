"""Listings that lack nothing: an error of a folder is raised, and links to local files and folders are followed."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.core import has_magic
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from dataload.cache.origin.errors import MISSING, underlying_error
from dataload.cache.origin.s3_names import MAGIC, CompleteS3
from dataload.cache.origin.version import bucket_info, forget, refreshing
from dataload.errors import OriginError

log = logging.getLogger(__name__)


def has_wildcard(path: str) -> bool:
    """Return whether a path has one of the characters of globs. In a URL, "?" begins the query."""
    return bool(has_magic(path.partition("?")[0] if "://" in path else path))


def folder_of_glob(path: str) -> str:
    """Return the folder above the first character of globs in a path."""
    return MAGIC.split(path, maxsplit=1)[0].rpartition("/")[0]


def complete(filesystem: Any) -> Any:
    """Return a filesystem with complete results of `info`, `find` and `glob`, the last two with `detail=True`.

    fsspec's own `find` leaves out a folder that cannot be listed, and with it the objects below it.
    """
    if hasattr(filesystem, "call_s3"):
        return CompleteS3(filesystem)
    if type(filesystem) is DirFileSystem:
        return DirFileSystem(filesystem.path, complete(filesystem.fs), skip_instance_cache=True)
    if _inherits(filesystem, AbstractFileSystem, "find", "walk", "glob"):
        return Walked(filesystem)
    # The `_glob` of a class outside of fsspec may need its own instance.
    if _inherits(filesystem, AsyncFileSystem, "_find", "_walk") and _is_of_fsspec(type(filesystem)._glob):  # noqa: SLF001
        return (_HttpWalked if hasattr(filesystem, "encode_url") else _AsyncWalked)(filesystem)
    return _WithInfos(filesystem)


def fresh_info(filesystem: Any, path: str) -> Any:
    """Request the info of an object or a folder from the store, whatever the filesystem remembers."""
    found = bucket_info(filesystem, path)
    if found is None:
        forget(filesystem, path)
        found = complete(filesystem).info(path, **refreshing(filesystem, path))
    return found


def left_out(error: OSError) -> None:
    """Raise the error of a folder, unless it is gone or belongs to someone else."""
    cause = error.__cause__ if isinstance(error, OriginError) else error
    if isinstance(cause, PermissionError):
        log.warning("%s: this folder is left out", error)
    elif not isinstance(error, MISSING):
        raise error


class Walked(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A view of a filesystem whose `walk`, `find` and `glob` pass the error of each folder to a function.

    fsspec's `walk` does so for the first folder only.

    Args:
        filesystem: Lists the folders.
        on_error: As for fsspec's `walk`: "omit", "raise" or a function.
    """

    cachable = False

    def __init__(self, filesystem: Any, on_error: str | Callable[[OSError], object] = left_out) -> None:
        super().__init__()
        self._on_error = on_error
        self._strip_protocol = filesystem._strip_protocol  # noqa: SLF001 (an extension point of fsspec)
        self.ls, self.info = filesystem.ls, filesystem.info
        self.exists, self.isdir, self.isfile = filesystem.exists, filesystem.isdir, filesystem.isfile

    def walk(self, path: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return super().walk(path, *args, **{**kwargs, "on_error": self._on_error})  # type: ignore[no-any-return]

    def find(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().find(path, *args, **kwargs)
        except OSError:
            if not self.isfile(path):  # HDFS and SMB cannot list a file.
                raise
            return {path: self.info(path)}


class _AsyncWalked(AsyncFileSystem):  # type: ignore[misc]
    """The same view of an asynchronous filesystem."""

    cachable = False

    def __init__(self, filesystem: Any) -> None:
        super().__init__(loop=filesystem.loop)
        self._own_glob = type(filesystem)._glob  # noqa: SLF001 (in URLs, "?" is no wildcard)
        self._strip_protocol = filesystem._strip_protocol  # noqa: SLF001
        self.info = filesystem.info
        for name in ("_ls", "_info", "_exists", "_isdir", "_isfile"):
            setattr(self, name, getattr(filesystem, name))

    async def _walk(self, path: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for folder in super()._walk(path, *args, **{**kwargs, "on_error": left_out}):
            yield folder

    async def _glob(self, path: Any, **kwargs: Any) -> Any:
        return await self._own_glob(self, path, **kwargs)


class _HttpWalked(_AsyncWalked):
    """The same view of HTTP. fsspec takes each URL for a page of links first, and fetches a whole file to find none."""

    async def _find(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if not path.endswith("/"):
            try:
                info = await self._info(path)
            except FileNotFoundError as error:
                if underlying_error(error) is not error:
                    raise
                return {}
            mimetype = info.get("mimetype")
            if mimetype != "text/html" and (mimetype or info["size"] is not None):
                return {path: info}
        return await super()._find(path, *args, **kwargs)


class _WithInfos(AbstractFileSystem):  # type: ignore[misc]
    """A view of a filesystem with listings of its own. That of Azure returns the name of a file without its info."""

    cachable = False

    def __init__(self, filesystem: Any) -> None:
        super().__init__()
        self._filesystem = filesystem
        self._strip_protocol = filesystem._strip_protocol  # noqa: SLF001
        self.info, self.glob = filesystem.info, filesystem.glob

    def find(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        found = self._filesystem.find(path, *args, **kwargs)
        return found if isinstance(found, dict) else {name: fresh_info(self._filesystem, name) for name in found}


class LocalNames(LocalFileSystem):  # type: ignore[misc]
    """The local filesystem, whose listings follow symbolic links to files and folders.

    A link to a folder that contains the link is not followed. A link whose target is missing is a file of 0 bytes.
    """

    def info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        if not (isinstance(path, os.DirEntry) and path.is_symlink()):
            return super().info(path, **kwargs)  # type: ignore[no-any-return]
        try:
            target = Path(path.path).stat()
        except OSError:
            return {**super().info(path, **kwargs), "type": "file"}
        if any(os.path.samestat(target, folder.stat()) for folder in Path(path.path).parents):
            return super().info(path, **kwargs)  # type: ignore[no-any-return]
        return super().info(path.path, **kwargs)  # type: ignore[no-any-return]


def _inherits(filesystem: Any, base: type, *names: str) -> bool:
    """Return whether these methods of a filesystem are those of a base class."""
    return all(getattr(getattr(filesystem, name, None), "__func__", None) is getattr(base, name) for name in names)


def _is_of_fsspec(method: Any) -> bool:
    return str(method.__module__).startswith("fsspec.")
