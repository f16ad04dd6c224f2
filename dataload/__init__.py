"""dataload: data loading for PyTorch from S3, at the speed of memory.

`import dataload` imports no other module: each name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataload.cache.config import CacheConfig as CacheConfig
    from dataload.conversion.conversion import convert as convert
    from dataload.dataset import make_dataset as make_dataset
    from dataload.errors import ConfigError as ConfigError
    from dataload.errors import CorruptEntry as CorruptEntry
    from dataload.errors import DataError as DataError
    from dataload.errors import DataloadError as DataloadError
    from dataload.errors import LossSpike as LossSpike
    from dataload.errors import NonFiniteLoss as NonFiniteLoss
    from dataload.errors import ObjectChanged as ObjectChanged
    from dataload.errors import OriginError as OriginError
    from dataload.loader import make_loader as make_loader
    from dataload.mixture import mix as mix
    from dataload.train import StopSignal as StopSignal
    from dataload.train import evaluate_over as evaluate_over
    from dataload.train import find_batch_size as find_batch_size
    from dataload.train import fit as fit
    from dataload.world import World as World

_HOME = {
    "CacheConfig": "dataload.cache.config",
    "ConfigError": "dataload.errors",
    "CorruptEntry": "dataload.errors",
    "DataError": "dataload.errors",
    "DataloadError": "dataload.errors",
    "LossSpike": "dataload.errors",
    "NonFiniteLoss": "dataload.errors",
    "ObjectChanged": "dataload.errors",
    "OriginError": "dataload.errors",
    "StopSignal": "dataload.train",
    "World": "dataload.world",
    "convert": "dataload.conversion.conversion",
    "evaluate_over": "dataload.train",
    "find_batch_size": "dataload.train",
    "fit": "dataload.train",
    "make_dataset": "dataload.dataset",
    "make_loader": "dataload.loader",
    "mix": "dataload.mixture",
}
__all__ = [
    "CacheConfig",
    "ConfigError",
    "CorruptEntry",
    "DataError",
    "DataloadError",
    "LossSpike",
    "NonFiniteLoss",
    "ObjectChanged",
    "OriginError",
    "StopSignal",
    "World",
    "convert",
    "evaluate_over",
    "find_batch_size",
    "fit",
    "make_dataset",
    "make_loader",
    "mix",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("dataload")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dataload.runtime.collection import rare_collections

    with rare_collections():  # Imported objects stay.
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
