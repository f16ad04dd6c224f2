"""The loader: it requests row groups ahead, makes batches of rows and copies them to the device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataload.loader.factory import make_loader as make_loader
    from dataload.loader.loader import Loader as Loader

_HOME = {"Loader": "dataload.loader.loader", "make_loader": "dataload.loader.factory"}

__all__ = ["Loader", "make_loader"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
