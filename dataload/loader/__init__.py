"""Batches from rows: the loader, what it asks for ahead, and how a batch is made."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataload.loader.loader import Loader as Loader
    from dataload.loader.loader import make_loader as make_loader

__all__ = ["Loader", "make_loader"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("dataload.loader.loader"), name)
