"""Names, sizes and versions of local files, also behind symbolic links."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

log = logging.getLogger(__name__)


class LocalNames(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The local filesystem, whose listings follow symbolic links to files and folders.

    A link to a folder that contains the link is not followed. A link whose target is missing is a file of 0 bytes. A
    folder that cannot be listed raises its error, such as that of a failing mount, because a dataset is part of it.
    """

    def walk(self, path: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return super().walk(path, *args, **{**kwargs, "on_error": _left_out})  # type: ignore[no-any-return]

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


def _left_out(error: OSError) -> None:
    """Raise the error of a folder, unless it is gone or belongs to someone else."""
    if isinstance(error, PermissionError):
        log.warning("%s: this folder is left out", error)
    elif not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error
