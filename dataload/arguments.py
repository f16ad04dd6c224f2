"""Errors for wrong arguments: misspelt names, and numbers that are not whole."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from dataload.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question that names the known name nearest to a misspelt one; `otherwise` if none is near."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def known_keywords(*passed_on: Callable[..., object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of functions that makes an unknown keyword argument a ConfigError.

    Args:
        *passed_on: The functions that get the further keyword arguments of the decorated one, after a first argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function).parameters.values()
        options = [option for each in passed_on for option in [*inspect.signature(each).parameters.values()][1:]]
        known = {each.name for each in (*own, *options) if each.kind is not each.VAR_KEYWORD}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    hint = did_you_mean(name, known, f"it is not an argument of {function.__name__}")
                    raise ConfigError(f"{name}= is unknown: {hint}")
            return function(*args, **kwargs)

        return checked

    return decorate


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number of Python, NumPy or torch as an int of Python.

    Args:
        name: The argument, for errors.
        value: Its value.
        least: The smallest allowed number; None: any.

    Raises:
        ConfigError: The value is not a whole number, or less than `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name}={value!r} must be a whole number{bound}") from None
    if least is not None and number < least:
        raise ConfigError(f"{name}={number} must be at least {least}")
    return number
