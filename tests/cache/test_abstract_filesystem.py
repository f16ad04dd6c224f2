"""fsspec's own tests of `open` and `get`, over an origin in memory and one on S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests, AbstractOpenTests

from dataload.cache.filesystem import TierCacheFileSystem


class PastTheCache(TierCacheFileSystem):
    """`tiercache` with writes that go to the origin: the suite creates its files through the tested filesystem."""

    def _at_the_origin(self, name: str, path: str, *args: Any, **kwargs: Any) -> Any:
        self.invalidate_cache()
        return getattr(self.fs, name)(self._path(path), *args, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode, **kwargs)
        if mode == "xb" and self.exists(path):  # s3fs leaves it to the store, and this one does not look.
            raise FileExistsError(path)
        return self._at_the_origin("open", path, mode)

    def makedirs(self, *args: Any, **kwargs: Any) -> None:
        self._at_the_origin("makedirs", *args, **kwargs)

    def mkdir(self, *args: Any, **kwargs: Any) -> None:
        self._at_the_origin("mkdir", *args, **kwargs)

    def pipe(self, *args: Any, **kwargs: Any) -> None:
        self._at_the_origin("pipe", *args, **kwargs)

    def rm(self, *args: Any, **kwargs: Any) -> None:
        self._at_the_origin("rm", *args, **kwargs)

    def touch(self, *args: Any, **kwargs: Any) -> None:
        self._at_the_origin("touch", *args, **kwargs)


class OverMemory(AbstractFixtures):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> PastTheCache:
        return PastTheCache("memory", cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self) -> Iterator[str]:
        yield "/abstract"
        memory = fsspec.filesystem("memory")
        if memory.exists("/abstract"):
            memory.rm("/abstract", recursive=True)

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(parts)


class OverS3(AbstractFixtures):
    @pytest.fixture
    def fs(self, bucket: Any, tmp_path: Path) -> PastTheCache:
        return PastTheCache("s3", bucket.options, cache_dir=str(tmp_path / "cache"), skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self, bucket: Any) -> str:
        return str(bucket.name)

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class TestOpenOverMemory(OverMemory, AbstractOpenTests):
    pass


class TestGetOverMemory(OverMemory, AbstractGetTests):
    pass


class TestOpenOverS3(OverS3, AbstractOpenTests):
    pass


@pytest.mark.slow
class TestGetOverS3(OverS3, AbstractGetTests):
    pass
