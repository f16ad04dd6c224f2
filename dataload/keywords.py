"""Errors for misspelt names, which name what was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

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
