"""Local files that one process has the memory to read, with the protocol scarce://."""

from __future__ import annotations

import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem


class ScarceMemory(LocalFileSystem):
    """Local files that raise MemoryError in each other process than `owner`."""

    protocol = "scarce"

    def __init__(self, owner: int, **options: Any) -> None:
        super().__init__(**options)
        self.owner = owner

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("scarce://")))

    def _open(self, *args: Any, **options: Any) -> Any:
        if os.getpid() != self.owner:
            raise MemoryError
        return super()._open(*args, **options)
