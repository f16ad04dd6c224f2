"""Errors for wrong arguments: misspelt names, numbers that are not whole, and URLs instead of folders."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from dataload.errors import ConfigError
from dataload.runtime.redact import redacted

P = ParamSpec("P")
R = TypeVar("R")

_OTHERS = (list, tuple, str, bytes, bytearray, memoryview, range)  # sequences that stay as they are
_PLAIN = frozenset((str, int, float, bool, type(None)))  # types that hold no others


def did_you_mean(name: str, known: Iterable[str], otherwise: str, least: float = 0.6) -> str:
    """Return a question that names the known name nearest to a misspelt one; `otherwise` if none is near.

    The similarity of near names is at least `least` of 1.
    """
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=least)
    return f"did you mean {near[0]!r}?" if near else otherwise


def unknown_keyword(name: str, known: Iterable[str], otherwise: str) -> ConfigError:
    """Return the error for a keyword argument that is not among the known ones."""
    return ConfigError(f"{name}= is unknown: {did_you_mean(name, known, otherwise)}")


def known_keywords(
    *passed_on: Callable[..., object], others: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of functions whose `**options` are arguments of other functions or classes.

    `help` and `inspect.signature` show these arguments, and an unknown keyword is a ConfigError. Mappings and sequences
    may be of any type, see `plain_containers`.

    Args:
        *passed_on: What gets the options, such as `CacheConfig`: its arguments that have a default.
        others: The function takes other keywords, too, and checks them itself.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
        options = {
            name: each.replace(kind=each.KEYWORD_ONLY)
            for option in passed_on
            for name, each in inspect.signature(option).parameters.items()
            if each.default is not each.empty and name not in own
        }
        known = own | options
        rest = [each for each in signature.parameters.values() if others and each.kind is each.VAR_KEYWORD]

        plain = with_plain_arguments(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known and not others:
                    raise unknown_keyword(name, known, f"it is not an argument of {function.__name__}")
            return plain(*args, **kwargs)

        checked.__signature__ = signature.replace(parameters=[*known.values(), *rest])  # type: ignore[attr-defined]
        return checked

    return decorate


def plain_containers(value: Any) -> Any:
    """Return an argument with dicts and lists in place of other mappings and sequences, at any depth.

    Those of OmegaConf, for one, are neither. Sets, arrays, datasets, and subclasses of dict and list stay as they are.
    """
    kind = type(value)
    if kind is list and _PLAIN.issuperset(map(type, value)):
        return value
    if kind is tuple:
        return tuple(map(plain_containers, value))
    if kind is dict or (isinstance(value, Mapping) and not isinstance(value, dict)):
        return {name: plain_containers(each) for name, each in value.items()}
    if kind is list or (isinstance(value, Sequence) and not isinstance(value, _OTHERS)):
        return [plain_containers(each) for each in value]
    return value


def with_plain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose arguments may be mappings and sequences of any type; see `plain_containers`."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        by_name = {name: plain_containers(value) for name, value in kwargs.items()}
        return function(*map(plain_containers, args), **by_name)

    return called


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


def is_url(path: object) -> bool:
    """Return whether a path is a URL, also if pathlib has joined its slashes."""
    return re.match(r"[A-Za-z][\w+.-]+:/", str(path)) is not None


def local_folder(name: str, path: Any) -> Path:
    """Return a folder to write to. `~` is the home of the user, `$NAME` a variable of the environment.

    A folder whose name has a `$` is found if it exists.

    Args:
        name: The argument, for errors.
        path: Its value.

    Raises:
        ConfigError: The value is no path, names a variable that is not set, or is a URL, which pathlib would take for a
            folder of that name.
    """
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise ConfigError(f"{name}={path!r} must be a path")
    if is_url(path):
        raise ConfigError(f"{name}={redacted(str(path))!r} is a URL: name a folder of this machine, or a mounted one")
    try:
        if os.path.exists(literal := Path(path).expanduser()):  # noqa: PTH110 (Path.exists may raise)
            return literal
        expanded = Path(os.path.expandvars(path)).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name}={str(path)!r}: this user has no home folder: name it in full") from error
    if unset := re.search(r"\$(\w+|\{[^}]*\})", str(expanded)):
        raise ConfigError(f"{name}={str(path)!r}: {unset[0]} is not set in the environment: name the folder in full")
    return expanded
