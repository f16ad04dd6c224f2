"""Frames that name what a process reads. faulthandler prints them after a SIGBUS, when no Python code can run."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from dataload.runtime.handled_signals import is_handled

P = ParamSpec("P")
T = TypeVar("T")


def reading(place: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a call, whose traceback has `place`, if any, as the name of a file."""
    if not place:
        return call(*args, **kwargs)
    result: T = _frame(place)(call, *args, **kwargs)
    return result


def print_fatal_frames() -> None:
    """Print a traceback to stderr if a signal ends this process. Do nothing if other code handles these signals.

    A JVM lives on its handler of SIGSEGV, which finds null pointers. One that is loaded later replaces faulthandler's.
    """
    with suppress(AttributeError, OSError, RuntimeError, ValueError):  # no stderr, or one without a descriptor
        if {is_handled(signal.SIGSEGV), is_handled(signal.SIGBUS)} == {False}:
            faulthandler.enable(sys.__stderr__ or sys.stderr)


def _called(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


@cache
def _frame(place: str) -> Callable[..., Any]:
    return FunctionType(_called.__code__.replace(co_filename=place), globals())
