"""Names, sizes and versions of the objects in S3, listed by obstore."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import sync
from fsspec.core import has_magic

from dataload.cache.origin.errors import UnsuitableError, is_store_error
from dataload.cache.origin.version import fresh_listing
from dataload.errors import ConfigError
from dataload.runtime.executor import DaemonExecutor, awaited
from dataload.runtime.redact import redacted

PAGE = 1000  # objects
MOST_PAGES = 50  # of all that is below a folder, of which a glob may need a part only
MOST_AMBIGUOUS = 8  # entries of a listing, each of which takes a request
PLAIN = re.compile(r"[A-Za-z0-9 .=+\-_/:,@!$&'()]*")  # obstore encodes other characters of a prefix, and lists nothing
MAGIC = re.compile(r"[*?[]")
BUCKET = re.compile(r"[A-Za-z0-9._-]+")
VERSION = "?versionId="  # in a path of s3fs, before the version of the object


class S3Names(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A view of the files in S3, with the names, sizes and ETags that s3fs returns.

    s3fs repeats a request that fails, or that finds nothing, so its errors are raised.

    Args:
        store: Returns the obstore store of a bucket.
        s3fs: Returns the s3fs filesystem.
    """

    protocol = ("s3", "s3a")
    root_marker = ""
    cachable = False

    def __init__(self, store: Callable[[str], Any], s3fs: Callable[[], Any]) -> None:
        super().__init__()
        self._store = store
        self._s3fs = s3fs
        self._requests = DaemonExecutor(1, "dataload-names")  # In the main thread, Ctrl-C could not interrupt obstore.

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        found = self._first(lambda: self._info(path))
        return found or self._by_s3fs(lambda s3fs: s3fs.info(path))

    def find(self, path: str, maxdepth: int | None = None, **_: Any) -> dict[str, dict[str, Any]]:
        """Return the files at `path` by name."""
        path = self._strip_protocol(path)
        found = self._first(lambda: self._find(path, maxdepth) or {path: self._info(path)})
        return found or self._by_s3fs(lambda s3fs: s3fs.find(path, maxdepth=maxdepth, detail=True))

    def glob(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        """Return the files that match a pattern, by name."""
        walk = _Walk(self._find)
        found = self._first(lambda: walk.glob(path, detail=True))
        return self._by_s3fs(lambda s3fs: CompleteS3(s3fs).glob(path, detail=True)) if found is None else found

    def _first(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Return the result of requests of obstore, or None if they fail."""
        try:
            return awaited(self._requests.submit(call))
        except BaseException as error:
            # obstore panics at some addresses that it cannot parse, in a class that is no Exception.
            if isinstance(error, UnsuitableError) or is_store_error(error) or type(error).__name__ == "PanicException":
                return None
            raise

    def _by_s3fs(self, request: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        filesystem = self._s3fs()
        with fresh_listing(filesystem, None):
            return request(filesystem)

    def _info(self, path: str) -> dict[str, Any]:
        import obstore

        bucket, key = self._split(self._strip_protocol(path))
        return _file(bucket, obstore.head(self._store(bucket), key))

    def _find(self, path: str, depth: int | None) -> dict[str, dict[str, Any]]:
        """Return the files below a folder, at most `depth` levels below it."""
        import obstore

        bucket, prefix = self._split(self._strip_protocol(path))
        listed = self._listed(bucket, prefix, MOST_PAGES if depth else None)
        if not prefix and "" in obstore.list_with_delimiter(self._store(bucket))["common_prefixes"]:
            raise _unlistable()  # obstore lists the object "/x" as "x".
        folder = f"{bucket}/{prefix}/" if prefix else f"{bucket}/"
        found = {info["name"]: info for info in self._files(bucket, prefix, listed)}
        return {name: found[name] for name in found if not depth or name.removeprefix(folder).count("/") < depth}

    def _files(self, bucket: str, prefix: str, listed: list[Any]) -> Iterator[dict[str, Any]]:
        """Yield the files of a listing.

        obstore lists the object "a/" as "a". Such markers of folders have no bytes, or other objects below them. One
        that has bytes and nothing below it is taken for a file.
        """
        listed = list(_checked(listed, prefix))
        ambiguous = _ambiguous(listed)
        if len(ambiguous) > MOST_AMBIGUOUS:
            raise _unlistable()
        for entry in listed:
            if entry["path"] not in ambiguous:
                yield _file(bucket, entry)
        for path in ambiguous:
            try:
                yield self._info(f"{bucket}/{path}")
            except FileNotFoundError:
                continue  # the marker of a folder

    def _listed(self, bucket: str, prefix: str, most_pages: int | None) -> list[Any]:
        """Return the objects below a prefix, as obstore describes them.

        Raises:
            UnsuitableError: They fill `most_pages`, or obstore would list them wrongly: s3fs lists them, or says why it
                cannot.
        """
        import obstore

        store, found, names = self._store(bucket), list[Any](), set[str]()
        for number, page in enumerate(obstore.list(store, prefix or None, chunk_size=PAGE)):
            known = len(names)
            found.extend(page)
            names.update(entry["path"] for entry in page)
            # A store that repeats a page would be listed for ever.
            if len(names) == known or number + 1 == most_pages:
                raise _unlistable()
        # obstore takes a page without a token for the next one for the last page. Pages have round numbers of names.
        if found and (len(found) >= PAGE or len(found) % 10 == 0):
            further = obstore.list(store, prefix or None, offset=found[-1]["path"], chunk_size=1)
            if next(iter(further), None):
                raise _unlistable()
        return found

    def _split(self, path: str) -> tuple[str, str]:
        bucket, _, key = path.partition("/")
        _check(key)
        if not BUCKET.fullmatch(bucket):
            raise _unlistable()
        return bucket, key


class _Walk(AbstractFileSystem):  # type: ignore[misc]
    """fsspec's globs over the files that `find` returns."""

    protocol = S3Names.protocol
    root_marker = S3Names.root_marker
    cachable = False

    def __init__(self, find: Callable[[str, int | None], dict[str, dict[str, Any]]]) -> None:
        super().__init__()
        self._find = find

    def find(self, path: str, maxdepth: int | None = None, **_: Any) -> dict[str, dict[str, Any]]:
        return self._find(path, maxdepth)


class CompleteS3(AbstractFileSystem):  # type: ignore[misc]
    """s3fs with listings that lack nothing. A folder that cannot be listed raises its error; versions stay in names.

    s3fs leaves out such a folder, and with it the objects below it.
    """

    protocol = S3Names.protocol
    root_marker = S3Names.root_marker
    cachable = False

    def __init__(self, s3fs: Any) -> None:
        super().__init__()
        self._s3fs = s3fs
        self.exists = s3fs.exists

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        info: dict[str, Any] = self._s3fs.info(path, **kwargs)
        return {**info, "name": path} if VERSION in path else info

    def find(self, path: str, maxdepth: int | None = None, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """Return the files below a folder whose names begin with `prefix`, and with `withdirs` the folders, by name."""
        path = self._strip_protocol(path)
        if not path:
            raise ValueError("Cannot traverse all of S3")
        if VERSION in path:
            return {path: self.info(path)}
        with fresh_listing(self._s3fs, path):  # s3fs would keep older listings of folders, for `ls`.
            if not maxdepth:  # s3fs finds files at any depth without walking.
                return self._s3fs.find(path, prefix=prefix, **{**kwargs, "detail": True})  # type: ignore[no-any-return]
            found = dict(self._levels(path, maxdepth, prefix))
        if not found and not prefix and self._s3fs.isfile(path):
            return {path: self.info(path)}
        if not kwargs.get("withdirs"):
            return {name: info for name, info in found.items() if info["type"] != "directory"}
        own = {"name": path, "size": 0, "type": "directory", "StorageClass": "DIRECTORY"}
        return {path: own, **found} if found and not prefix else found

    def _levels(self, path: str, depth: int, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names and infos of `depth` levels. A file follows the folder of the same name."""
        with suppress(FileNotFoundError):
            listed = sync(self._s3fs.loop, self._s3fs._lsdir, path, prefix=prefix)  # noqa: SLF001 (`ls` has no prefix)
            for info in sorted(listed, key=lambda info: info["type"] != "directory"):
                yield info["name"], info
                if info["type"] == "directory" and depth > 1:
                    yield from self._levels(info["name"], depth - 1)

    def glob(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return the files and folders that match a pattern, by name."""
        if VERSION in path:
            return {path: self.info(path)}
        if has_magic(path) and _lists_prefixes():  # The names of its first wild part begin so.
            kwargs["prefix"] = MAGIC.split(path, maxsplit=1)[0].rpartition("/")[2] if "/" in path else ""
        return super().glob(path, **kwargs)  # type: ignore[no-any-return]


def _lists_prefixes() -> bool:
    """Return whether s3fs can list a part of a folder. Before 2026.7, it took such a listing for the whole folder."""
    import s3fs

    found = re.match(r"(\d+)\.(\d+)", s3fs.__version__)
    return found is None or tuple(map(int, found.groups())) >= (2026, 7)


def check_version(url: str, filesystem: Any) -> None:
    """Raise ConfigError if a URL names a version that its filesystem ignores, as s3fs does by default."""
    if VERSION in url and "s3" in filesystem.protocol and not getattr(filesystem, "version_aware", False):
        fix = "pass version_aware=True to it, in storage_options or target_options"
        raise ConfigError(f"{redacted(url)} names a version, and s3fs would read the newest one: {fix}")


def _unlistable() -> UnsuitableError:
    return UnsuitableError("obstore lists such names in another form", whole_store=False)


def _check(path: str) -> None:
    if not PLAIN.fullmatch(path) or any(part in ("", ".", "..") for part in path.split("/")[:-1]):
        raise _unlistable()


def _checked(entries: Iterable[Any], prefix: str) -> Iterator[Any]:
    """Yield the entries of a listing without the marker of the listed folder itself.

    Raises:
        UnsuitableError: An object is not below the prefix.
    """
    for entry in entries:
        if entry["path"] != prefix:
            if not entry["path"].startswith(prefix and f"{prefix}/"):
                raise _unlistable()
            yield entry


def _ambiguous(listed: Iterable[Any]) -> set[str]:
    """Return the names of a listing that may be those of files or of folders."""
    folders = {folder for entry in listed for folder in _folders(entry["path"])}
    return {entry["path"] for entry in listed if not entry["size"] or entry["path"] in folders}


def _folders(path: str) -> Iterator[str]:
    """Yield the folders that a path is in."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _file(bucket: str, entry: Any) -> dict[str, Any]:
    """Return the info of an object, as fsspec has it."""
    return {
        "name": f"{bucket}/{entry['path']}",
        "size": entry["size"],
        "type": "file",
        "ETag": entry["e_tag"],
        "LastModified": entry["last_modified"],
    }
