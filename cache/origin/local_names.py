"""Names, sizes and versions of local files, also behind symbolic links."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem


class LocalNames(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
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
