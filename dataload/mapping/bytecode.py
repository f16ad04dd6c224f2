"""The names that a function uses, read from its bytecode."""

from __future__ import annotations

import dis
import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from types import CodeType
from typing import Any

_LOADS = ("FAST", "FAST_BORROW", "FAST_CHECK", "GLOBAL", "DEREF", "NAME")  # ends of the names of instructions


def imported_in(code: CodeType, scope: Mapping[str, Any]) -> list[tuple[set[str], str]]:
    """Return the modules that a function imports when it is called, with their packages and all that it takes of them.

    Each has the names of the variables that may hold it.
    """
    found, statement, package, level, is_import = dict[str, set[str]](), list[str](), "", 0, False
    is_from = False
    for step in _steps(code):
        if step.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")):
            level, is_from = (step.argval, is_from) if isinstance(step.argval, int) else (level, bool(step.argval))
        elif step.opname == "IMPORT_NAME":
            package = _absolute(step.argval, level, scope)
            is_import, parts = bool(package), package.split(".") if package else []
            statement = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
            for name in statement:
                found.setdefault(name, set())
        elif step.opname == "IMPORT_FROM" and is_import:
            statement = [*(() if is_from else statement), f"{package}.{step.argval}"]
            found.setdefault(statement[-1], set())
        elif step.opname.startswith("STORE_") and is_import:
            for name in statement:
                found.setdefault(name, set()).add(_first(step.argval))
        elif step.opname not in ("SWAP", "POP_TOP", "EXTENDED_ARG", "CACHE"):
            is_import = False
    inner = [
        module
        for constant in code.co_consts
        if isinstance(constant, CodeType)
        for module in imported_in(constant, scope)
    ]
    return [(variables, name) for name, variables in found.items()] + inner


@lru_cache(maxsize=256)  # Each function of this module reads them, and of functions inside others more than once.
def _steps(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


def _absolute(name: str, level: int, scope: Mapping[str, Any]) -> str:
    """Return the whole name of a module; "" if its import raises, because the function is not in such a package."""
    with suppress(ImportError):
        return importlib.util.resolve_name("." * level + name, scope.get("__package__"))
    return ""


def passed_on_in(code: CodeType) -> set[str]:
    """Return the names of variables, and of attributes, that a function uses for more than their attributes."""
    inner = (passed_on_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    found, loaded = set[str](), ""
    for step in _steps(code):
        if step.opname == "EXTENDED_ARG":
            continue
        is_attribute = step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))
        if loaded and not is_attribute:
            found.add(loaded)
        loaded = str(step.argval) if is_attribute else ""
        if "LOAD_" in step.opname and step.opname.endswith(_LOADS):
            first, loaded = _first(step.argval), _last(step.argval)
            found.update({first} - {loaded})
    return found.union(*inner)


def _first(argument: Any) -> str:
    """Return the variable of an instruction, or the first one of two."""
    return str(argument[0] if isinstance(argument, tuple) else argument)


def _last(argument: Any) -> str:
    return str(argument[-1] if isinstance(argument, tuple) else argument)


def globals_in(code: CodeType) -> set[str]:
    """Return the names of globals that a function and the functions in it use: those that cloudpickle sends."""
    inner = (globals_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    own = {step.argval for step in _steps(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*inner)


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that a function and the functions in it use."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
