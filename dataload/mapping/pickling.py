"""Functions as bytes for other processes, with what the main program defines."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle

from dataload.mapping.packages import MAIN_PROGRAMS, SPAWNED

_Cached = type(functools.cache(str))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions with a cache, too. cloudpickle names them, but the main program has no name elsewhere.

    A cached property of Python 3.11 has a lock, which no pickle has.

    Code keeps the name of its file, which cloudpickle drops since 3.1.3 and tracebacks show.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            make, parts = self.dispatch_table[CodeType](obj)
            return _code, (obj.co_filename, make, parts)
        if isinstance(obj, _Cached) and obj.__module__ in MAIN_PROGRAMS:
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if type(obj) is functools.cached_property:
            return _cached_property, (obj.func, obj.attrname)
        return super().reducer_override(obj)


def dumps(*content: Any) -> bytes:
    """Return a tuple with functions as bytes for `pickle.loads`. Functions of modules are pickled by name.

    Raises:
        Exception: Something that a function refers to cannot be pickled.
    """
    buffer = io.BytesIO()
    if SPAWNED in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[SPAWNED])  # as cloudpickle does with the main program
    _Pickler(buffer).dump(content)
    return buffer.getvalue()


def _code(file: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=file)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


def _cached_property(function: Callable[..., Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made
