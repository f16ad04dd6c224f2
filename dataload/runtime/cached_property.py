"""A property that is computed once per instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801 (as that of functools)
    """A property whose value is stored in the instance after the first access.

    Threads that access it at the same time may each compute the value. `functools.cached_property` holds a lock during
    the computation instead, before Python 3.12 one lock for all instances. A child process that is forked at that
    moment, such as a loader's worker, would wait for that lock forever.

    A class with such a property is pickled by a copy of its attributes, which another thread may add to meanwhile.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        state = "__getstate__"
        if getattr(owner, state) is getattr(object, state):
            setattr(owner, state, lambda instance: vars(instance).copy())

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> Self | T:
        if instance is None:
            return self
        value = vars(instance)[self._name] = self._compute(instance)
        return value
