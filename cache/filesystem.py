"""`tiercache`: an fsspec filesystem that caches another filesystem on the local disk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.utils import isfilelike

from dataload.cache.blocks.file import BlockFile
from dataload.cache.blocks.ranges import Range, read_ranges
from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.config import CacheConfig, check_names
from dataload.cache.metadata import Forget, MetadataFileSystem
from dataload.cache.origin.deferred_s3 import deferred_s3
from dataload.cache.origin.explanation import opening
from dataload.cache.origin.listings import has_wildcard
from dataload.cache.origin.origin import connect, introduce
from dataload.cache.origin.s3_names import VERSION
from dataload.errors import ConfigError, ObjectChanged, OriginError
from dataload.runtime.executor import awaited
from dataload.runtime.redact import public, redacted

NO_BUCKET = re.compile(r"(s3a?|gcs|gs)://(/.*)?", re.DOTALL)
# Options of pandas' other engines, polars, deltalake and boto3, without "aws_".
NAMES_IN_S3FS = {
    **dict.fromkeys(("access_key_id", "access_key"), "'key'"),
    **dict.fromkeys(("secret_access_key", "secret_key"), "'secret'"),
    **dict.fromkeys(("session_token", "security_token"), "'token'"),
    **dict.fromkeys(("region", "region_name", "default_region"), "client_kwargs={'region_name': …}"),
    **dict.fromkeys(("endpoint", "endpoint_override"), "'endpoint_url'"),
    **dict.fromkeys(("skip_signature", "anonymous", "no_sign_request"), "'anon'"),
}
COPIED_BLOCKS = 4  # per read of a file that is copied
PICKLED_INFOS = 20_000  # sizes and versions of objects in a pickled filesystem: 5 MB


class TierCacheFileSystem(MetadataFileSystem):
    """A read-only view of another filesystem that fetches each byte once per host.

    The other arguments are those of `CacheConfig`.

    Args:
        target_protocol: The fsspec protocol of the origin, such as "s3".
        target_options: The options of the origin's filesystem, such as {"anon": True}.
        fs: The origin's filesystem, instead of `target_protocol` and `target_options`.

    Raises:
        ConfigError: The settings are invalid.
        FileNotFoundError: While reading: the object does not exist.
        OriginError: While reading: the origin failed.
        ObjectChanged: While reading: the object was replaced.

    Notes:
        The filesystem is picklable and works in forked and spawned children. It opens the cache at the first read.

    Example:
        >>> import fsspec, tempfile
        >>> fsspec.filesystem("memory").pipe("/bucket/greeting", b"hello, world")
        >>> cache = tempfile.TemporaryDirectory()
        >>> fs = TierCacheFileSystem(target_protocol="memory", cache_dir=cache.name, cache_bytes="1MB")
        >>> fs.cat_file("/bucket/greeting", 7, 12)
        b'world'
        >>> fs.stats()["bytes_origin"]
        12
        >>> cache.cleanup()
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
        cluster_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_names(kwargs)
        self.config = CacheConfig(
            cache_dir,
            cache_bytes,
            block_bytes,
            policy,
            consistency,
            engine=engine,
            in_flight=in_flight,
            cluster=cluster,
            cluster_key=cluster_key,
            origin_id=origin_id,
            allow_network_filesystem=allow_network_filesystem,
        )
        if (fs is None) == (target_protocol is None):
            raise ConfigError("tiercache needs an origin: target_protocol='s3' (with target_options), or fs=")
        if fs is None:
            fs = connect(str(target_protocol), target_options)
        super().__init__(Blocks.open(fs, self.config), consistency, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        known = dict(islice(reversed(self._known.items()), PICKLED_INFOS))
        return _restore, (type(self), self.storage_args, self.storage_options, known)

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Return the arguments as JSON has them; without `include_password`, no credentials of the origin either."""
        found: dict[str, Any] = super().to_dict(include_password=include_password)
        return found if include_password else public(found)

    def _open(self, path: str, mode: str = "rb", version_id: str | None = None, **_: Any) -> BlockFile:
        if mode != "rb":
            self._read_only()
        return BlockFile(self.blocks, self.object(path, version_id), Forget(self))

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
        max_gap: int | None = None,  # noqa: ARG002 (ranges are fetched in blocks)
        on_error: str = "return",
        version_id: str | None = None,
        **_: Any,
    ) -> list[bytes | Exception]:
        """Fetch many ranges concurrently. Bounds may be None or negative, as in `cat_file`.

        Args:
            paths: The object of each range.
            starts: First byte of each range, or one value for all.
            ends: End of each range (exclusive), or one value for all.
            max_gap: Ignored.
            on_error: "return": return the exception in place of the bytes; anything else: raise the first one, and
                cancel the fetches that have not begun.
            version_id: The version to read, in a versioned S3 bucket.
        """
        if not isinstance(paths, list):
            raise TypeError(f"cat_ranges takes a list of paths, not {paths!r}")
        bounds = [bound if isinstance(bound, list) else [bound] * len(paths) for bound in (starts, ends)]
        if any(len(bound) != len(paths) for bound in bounds):
            raise ValueError(f"{len(paths)} paths need as many starts and ends: {len(bounds[0])} and {len(bounds[1])}")
        names, raises = dict.fromkeys(paths), on_error != "return"
        objects = dict(zip(names, self._objects(list(names), version_id, raises=raises), strict=True))

        def cut(path: str, start: int | None, end: int | None) -> Range | Exception:
            obj = objects[path]
            if isinstance(obj, Exception):
                return obj
            first, last, _step = slice(start, end).indices(obj.size)
            return obj, first, max(first, last)

        return read_ranges(self.blocks, map(cut, paths, *bounds), self._forget, raises=raises)

    def cat(
        self,
        path: str | list[str],
        recursive: bool = False,
        on_error: str = "raise",
        start: int | None = None,
        end: int | None = None,
        version_id: str | None = None,
        **_: Any,
    ) -> Any:
        paths = self.expand_path(path, recursive=recursive)
        if recursive:
            paths = [each for each in paths if self.isfile(each)]
        elif isinstance(path, str) and paths == [self._path(path)]:
            return self.cat_file(paths[0], start, end, version_id)
        found = self.cat_ranges(
            paths, start, end, on_error="raise" if on_error == "raise" else "return", version_id=version_id
        )
        pairs = zip(paths, found, strict=True)
        return {name: result for name, result in pairs if on_error == "return" or not isinstance(result, Exception)}

    def get_file(
        self,
        rpath: str,
        lpath: Any = None,
        callback: Any = DEFAULT_CALLBACK,
        outfile: Any = None,
        version_id: str | None = None,
        **_: Any,
    ) -> None:
        """Copy an object to a local file, a few blocks at a time. Remove an incomplete file on errors."""
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        rpath = self._versioned(rpath, version_id)
        if outfile is None and self.isdir(rpath):
            Path(lpath).mkdir(parents=True, exist_ok=True)
            return
        with self._open(rpath) as file:
            if outfile is not None:
                _copy(file, outfile, callback)
                return
            Path(lpath).parent.mkdir(parents=True, exist_ok=True)
            with Path(lpath).open("wb") as target:
                try:
                    _copy(file, target, callback)
                except BaseException:
                    if Path(lpath).is_file():  # not /dev/stdout
                        Path(lpath).unlink()
                    raise

    def prefetch(self, paths: str | list[str], wait: bool = False) -> None:
        """Start to fetch whole objects into the cache.

        Args:
            paths: Paths, folders or globs.
            wait: Return only when all objects are fetched.

        Raises:
            OriginError: A path cannot be listed, or nothing is there, or, with `wait`, an object cannot be fetched.
        """
        infos = [info for path in ([paths] if isinstance(paths, str) else paths) for info in self._listed(path)]
        self._learn(infos)
        objects = self._objects([info["name"] for info in infos], raises=True)
        futures = [future for obj in objects if isinstance(obj, Object) for future in self.blocks.prefetch(obj)]
        for future in futures if wait else ():
            awaited(future)

    def _listed(self, path: str) -> list[dict[str, Any]]:
        """Return the infos of the objects of `prefetch`. Raise OriginNotFound if a path that is no glob has nothing."""
        origin, path = self.blocks.origin, self._path(path)
        found, is_glob = origin.list(path), has_wildcard(path)
        if not found and is_glob:
            with suppress(OriginError):  # The name of an object may have the characters of globs.
                found = origin.list(path, is_glob=False)
        elif not found:
            origin.info(path)  # An empty folder has an info.
        return [*found.values()]

    def stats(self) -> dict[str, Any]:
        """Return the totals of this process.

        Returns:
            hits, misses, waits, refused, bytes_local, bytes_cluster, bytes_origin, requests_origin, retries_origin:
                counts. Listings count among the retries only.
            errors: counts by tier.
            engine, engine_reason: the client that fetches bytes, and why it was chosen.
            health: the state of the local disk; see `Health`. None without a cache on disk.
            cluster: see `Cluster.stats`. None without a cluster.
        """
        return self.blocks.stats()


def _restore(
    cls: type[TierCacheFileSystem], args: tuple[Any, ...], options: dict[str, Any], known: dict[str, dict[str, Any]]
) -> TierCacheFileSystem:
    fs = cls(*args, **options)
    fs._receive(known)  # fsspec may return an instance that is in use.
    return fs


def _copy(file: BlockFile, into: Any, callback: Any) -> None:
    callback.set_size(file.size)
    while data := file.read(COPIED_BLOCKS * file.blocksize):
        into.write(data)
        callback.relative_update(len(data))


def open_source(
    url: str, storage_options: dict[str, Any] | None, config: CacheConfig | None, others: Sequence[str] = ()
) -> Blocks:
    """Open the origin of a URL, cached as `config` says. A tiercache:: URL brings its own cache settings.

    Args:
        url: A URL or a local path.
        storage_options: Options of its filesystem.
        config: The cache; None: no cache. For a tiercache:: URL, the default.
        others: Further URLs or paths, which must be of the same filesystem.

    Raises:
        ConfigError: The URL is empty, names no bucket or is in an archive, its protocol is unknown, its filesystem
            rejects the options, which other libraries may call so, another URL is of another filesystem, or `config`
            is given for a tiercache:: URL.
        OriginError: The filesystem cannot connect to its server.
    """
    introduce()
    for each in (url, *others):
        _check_url(each)
    opened, options = next((each for each in (url, *others) if VERSION in each), url), dict(storage_options or {})
    if VERSION in opened:  # For such a URL, fsspec sets version_aware itself.
        options.pop("version_aware", None)
    if opened.startswith(("s3://", "s3a://")):
        _check_options(options)
    with_options = " with these storage_options" if storage_options else ""
    with opening(url, f"{redacted(url)} cannot be opened{with_options}"):
        # fsspec would split the name of a local file at each "::".
        local = connect("file", options) if "::" in url and not split_chain(url)[0] else None
        filesystem = local or deferred_s3(opened, options) or fsspec.url_to_fs(opened, **options)[0]
    for other in others:
        if _store_of(other, filesystem) != _store_of(url, filesystem):
            raise ConfigError(
                f"{redacted(url)} and {redacted(other)} are of two filesystems: make_dataset for each, and mix() them"
            )
    if isinstance(filesystem, TierCacheFileSystem):
        if config != CacheConfig():
            fix = "give its settings in storage_options={'tiercache': {...}}, or leave out tiercache::"
            raise ConfigError(f"{redacted(url)} has a cache of its own: {fix}")
        return filesystem.blocks
    return Blocks.open(filesystem, config)


def _check_options(options: dict[str, Any]) -> None:
    """Raise ConfigError for options that other libraries of S3 name otherwise than s3fs does."""
    for name in options:
        if own := NAMES_IN_S3FS.get(name.lower().removeprefix("aws_")):
            raise ConfigError(f"storage_options names {name!r}, which s3fs calls {own}: pass that")


def split_chain(url: str) -> tuple[str, str]:
    """Return the filesystems before the last "::" of a URL, such as "tiercache", and the rest."""
    chain, _, last = url.rpartition("::")
    named = {part.partition("://")[0] for part in chain.split("::")}
    return (chain, last) if named <= {*fsspec.available_protocols()} else ("", url)


def _check_url(url: str) -> None:
    """Raise ConfigError for an empty URL, for one without a bucket, in an archive, or that a Path has changed."""
    if not url:
        raise ConfigError("the URL is empty: name an object, a folder or a glob")
    chain, last = split_chain(url)
    if "://" in chain:
        fix = "which dataload cannot read: unpack the archive"
        raise ConfigError(f"{redacted(url)} names a file in an archive by '::', {fix}")
    if NO_BUCKET.fullmatch(last):
        raise ConfigError(f"{url} names no bucket: name one, and a folder in it")
    protocol, mark, rest = url.partition(":/")
    # fsspec takes file:/path for a local path.
    protocols = {*fsspec.available_protocols()} - {"file", "local"}
    if mark and not rest.startswith("/") and protocol in protocols and not Path(url).parent.exists():
        fix = f"pass the text '{protocol}://…', because a Path cannot hold a URL"
        raise ConfigError(f"{redacted(url)} has a single slash behind {protocol}: {fix}")


def _store_of(url: str, filesystem: Any) -> tuple[Any, ...]:
    """Return what a URL says about its store: protocol, host, account. `filesystem`: of one of the URLs."""
    chain, last = split_chain(url)
    protocol, mark, _ = last.partition("://")
    if chain:
        return (chain, protocol if mark else "file")
    names = [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol
    options = filesystem._get_kwargs_from_urls(last)  # noqa: SLF001 (an extension point of fsspec)
    options.pop("version_aware", None)
    return (names[0] if (protocol if mark else "file") in names else protocol, options)
