"""A filesystem that another process has sent."""

from __future__ import annotations

import pickle
from typing import Any

from dataload.cache.origin.deferred_s3 import DeferredS3
from dataload.cache.origin.guarded import guarded


class PickledFilesystem:
    """A filesystem that is unpickled when it is needed, because the import of its package may take long.

    Args:
        content: The filesystem, pickled by a process of this program.
        local_file: As the attribute of fsspec's local filesystem.
    """

    def __init__(self, content: bytes, local_file: bool) -> None:
        self.local_file = local_file
        self._content = content
        self._filesystem: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledFilesystem, (self._content, self.local_file)

    def load(self) -> Any:
        """Return the filesystem."""
        if self._filesystem is None:
            self._filesystem = pickle.loads(self._content)  # noqa: S301 (from a process of this program)
            guarded(self._filesystem)
        return self._filesystem


def pickled(filesystem: Any) -> PickledFilesystem | DeferredS3:
    """Return a filesystem in the form in which another process receives it."""
    if isinstance(filesystem, (PickledFilesystem, DeferredS3)):
        return filesystem
    # By pickling, fsspec recreates a filesystem, and those it wraps, from their arguments.
    return PickledFilesystem(pickle.dumps(filesystem), getattr(filesystem, "local_file", False))
