"""Shuffled orders of row numbers and their shards. Names load on first use; only `ShardedSampler` needs torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataload.samplers.permutation import Permutation as Permutation
    from dataload.samplers.quality import shuffle_quality as shuffle_quality
    from dataload.samplers.sharded import ShardedSampler as ShardedSampler

_HOME = {
    "Permutation": "dataload.samplers.permutation",
    "ShardedSampler": "dataload.samplers.sharded",
    "shuffle_quality": "dataload.samplers.quality",
}
__all__ = ["Permutation", "ShardedSampler", "shuffle_quality"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
