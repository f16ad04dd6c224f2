"""`tiercache`: an fsspec filesystem that caches another filesystem on the local disk."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Unpack

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.utils import isfilelike

from dataload.arguments import known_keywords
from dataload.cache.blocks.file import BlockFile
from dataload.cache.blocks.ranges import Range, read_ranges
from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.config import CacheConfig, check_names, split_options
from dataload.cache.metadata import Forget, MetadataFileSystem
from dataload.cache.options import CacheOptions
from dataload.cache.origin.listings import has_wildcard
from dataload.cache.origin.origin import connect
from dataload.errors import ConfigError, ObjectChanged, OriginError
from dataload.runtime.executor import awaited
from dataload.runtime.redact import public

COPIED_BLOCKS = 4  # per read of a file that is copied
PICKLED_INFOS = 20_000  # sizes and versions of objects in a pickled filesystem: 5 MB


class FileSystemOptions(CacheOptions, total=False):
    """Arguments of `TierCacheFileSystem` beside its own: those of a cache, and those that fsspec gets."""

    asynchronous: bool
    loop: Any
    skip_instance_cache: bool
    use_listings_cache: bool


class TierCacheFileSystem(MetadataFileSystem):
    """A read-only view of another filesystem that fetches each byte once per host.

    Args:
        target_protocol: The fsspec protocol of the origin, such as "s3".
        target_options: The options of the origin's filesystem, such as {"anon": True}.
        fs: The origin's filesystem, instead of `target_protocol` and `target_options`.
        **options: Arguments of `CacheConfig`. Others are passed on to `fsspec.AbstractFileSystem`.

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

    @known_keywords(CacheConfig, others=True)
    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fs: Any = None,
        **options: Unpack[FileSystemOptions],
    ) -> None:
        cache_options, for_fsspec = split_options(options)
        check_names(for_fsspec)
        config = CacheConfig(**cache_options)
        if (fs is None) == (target_protocol is None):
            raise ConfigError("tiercache needs an origin: target_protocol='s3' (with target_options), or fs=")
        if fs is None:
            fs = connect(str(target_protocol), target_options)
        super().__init__(Blocks.open(fs, config), **for_fsspec)

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
