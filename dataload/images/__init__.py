"""Images in batches: decode JPEG, PNG and WebP, and crop them at random. `pip install 'dataload[images]'`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataload.images.decoding import decode as decode
    from dataload.images.random_crop import random_resized_crop as random_resized_crop

_HOME = {"decode": "dataload.images.decoding", "random_resized_crop": "dataload.images.random_crop"}

__all__ = ["decode", "random_resized_crop"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
