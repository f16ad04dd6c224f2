"""Functions as bytes for other processes, with what the main program defines."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import cloudpickle

_Cached = type(functools.cache(str))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions with a cache, too. cloudpickle names them, but the main program has no name elsewhere."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Cached) and obj.__module__ == "__main__":
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def dumps(function: Callable[..., Any]) -> bytes:
    """Return a function as bytes for `pickle.loads`. Functions of modules are pickled by name.

    Raises:
        Exception: Something that the function refers to cannot be pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(function)
    return buffer.getvalue()


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached
