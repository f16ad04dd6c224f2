"""Local files that one process has the memory to read, with the protocol scarce://."""

from __future__ import annotations

import os
from typing import Any

from fsspec.implementations.local import LocalFileSystem


class PanicException(BaseException):
    """The error of a library in Rust that panics. It is no Exception."""


class ScarceMemory(LocalFileSystem):
    """Local files that raise MemoryError in each other process than `owner`, or a panic, as libraries in Rust do."""

    protocol = "scarce"

    def __init__(self, owner: int, *, panics: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.owner = owner
        self.panics = panics

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("scarce://")))

    def _open(self, *args: Any, **options: Any) -> Any:
        if os.getpid() != self.owner:
            raise PanicException if self.panics else MemoryError
        return super()._open(*args, **options)
