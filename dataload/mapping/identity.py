"""The identity of a function: a digest that changes if its results may change."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import hashlib
import json
import logging
import operator
import pathlib
import re
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from types import CodeType
from typing import Any

import numpy as np
import pyarrow as pa

from dataload.errors import ConfigError
from dataload.mapping.bytecode import globals_in, imported_in, names_in, passed_on_in
from dataload.mapping.known_objects import MOST_BYTES, is_device, is_plain_tensor, state_of
from dataload.mapping.large_values import flat_digest
from dataload.mapping.members import OF_MODULES, OF_NAMED_TUPLES, fields_of, is_made, parts_of
from dataload.mapping.packages import installed_name, is_own, module_of, own_module, package_of
from dataload.mapping.sources import Sources, is_generated

VERSION = 6
_SCALARS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_SHOWN: tuple[type, ...] = (decimal.Decimal, fractions.Fraction, pathlib.PurePath, range, np.dtype)
_SHOWN += (dt.date, dt.time, dt.timedelta, dt.timezone)
_READERS = {"__import__", "eval", "exec", "globals"}
_DISPATCHER: Any = functools.singledispatch(len)


def name_of(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function, or of the class of a callable object, for people.

    A `functools.partial` has the name of its function, unless it has one of its own.
    """
    named = _named(_inner(function))
    return f"{module_of(named)}.{named.__qualname__}"


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a `functools.partial` calls, unless it has a name of its own."""
    while isinstance(function, functools.partial) and _named(function) is not function:
        function = function.func
    return function


def _named(value: Any) -> Any:
    """Return a function or a class, and the class of any other object."""
    with suppress(Exception):  # A proxy may raise anything.
        return value if isinstance(value.__qualname__, str) else type(value)
    return type(value)


def identity(function: Callable[..., Any], version: Any = None, sources: Sources | None = None) -> str:
    """Return a hex digest of a function.

    It covers the qualified name, the source without comments and docstrings, default values, the values of closures,
    arguments of `functools.partial`, and the same for all functions, classes and constants of the project that the
    function refers to. Installed packages count by name and version. The module of the project does not count, but
    with a version the name of its file does: a program that imports the function of another one reads what that one has
    mapped.

    Args:
        function: The function.
        version: A version that the user changes with what the digest cannot cover. With one, an object of any state
            counts by its type, and what the project's own code assigns, such as a model that it loads at first use,
            does not count. Nor does the number of a device.
        sources: The sources that are known already. It gets those of this function.

    Raises:
        ConfigError: The function has no source, or it refers to an object whose state cannot be compared.
    """
    name, sources = name_of(function), sources or Sources()
    if version is not None:
        find_code(function, sources)
        assigned = sources.assigned(name.rpartition(".")[2])
        described = _LenientWalk(sources, assigned).describe(function, name)
        content: Any = ["version", _file_of(function), name.rpartition(".")[2], repr(version), described]
    else:
        try:
            content = _Walk(sources).describe(function, name)
        except ConfigError as error:
            raise ConfigError(
                f"map cannot tell one version of {name} from another: {error}. Pass version=, and change it whenever "
                "the function's results change"
            ) from None
    encoded = json.dumps([VERSION, content]).encode()
    return hashlib.blake2b(encoded, digest_size=16, person=b"dataload map").hexdigest()


class _Walk:
    """Describes a function and all that it refers to, each object once.

    Unless an object refers to itself, its description does not depend on the other objects that refer to it. Another
    process may have two copies of what is one object here: one that was sent to it and one that it has imported.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._digests: dict[int, str] = {}  # of the descriptions of objects, by id
        self._open: dict[int, int] = {}  # the depth of the objects that are being described
        self._modules: set[Any] = set()
        self._kept: list[Any] = []  # so that no other object gets the id of one that was described

    def describe(self, value: Any, where: str) -> Any:
        """Return a JSON-able description of a value.

        Args:
            value: The value.
            where: Its name in errors.

        Raises:
            ConfigError: The value cannot be described.
        """
        if isinstance(value, enum.Enum):
            return ["enum", self.describe(type(value), where), value.name]
        if isinstance(value, (*_SCALARS, *_SHOWN)) and not is_own(type(value)):
            return [type(value).__qualname__, repr(value)]
        if isinstance(value, types.ModuleType):
            return self._module(value, None, frozenset(), where)
        if id(value) in self._open:  # It refers to itself.
            return ["above", len(self._open) - self._open[id(value)]]
        if id(value) not in self._digests:
            self._kept.append(value)
            self._digests[id(value)] = ""  # An object that cannot be described is not tried again.
            self._digests[id(value)] = self._sources.large.digest(value, lambda: self._digest(value, where))
        return self._digests[id(value)]

    def _digest(self, value: Any, where: str) -> str:
        self._open[id(value)] = len(self._open)
        try:
            described = self._object(value, where)
        finally:
            del self._open[id(value)]
        return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()

    def _object(self, value: Any, where: str) -> Any:  # noqa: PLR0911 (a kind each)
        if (digest := flat_digest(value)) is not None:
            return [type(value).__qualname__, digest]
        if isinstance(value, (type, types.FunctionType)) and package_of(value.__module__) is None:
            return self._class(value) if isinstance(value, type) else self._function(value)
        if (describe := _describer_of(value)) is not None:
            own = [self.describe(type(value), where), self._state(value, where)] if is_own(type(value)) else []
            return [type(value).__qualname__, describe(self, value, where), *own]
        if isinstance(value, _SCALARS) and is_own(type(value)):
            base: Any = next(kind for kind in _SCALARS if isinstance(value, kind))  # Its own repr may show less.
            shown = base.__repr__(value)
            return ["object", self.describe(type(value), where), shown, self._state(value, where)]
        if (name := installed_name(value)) is not None:
            return name
        if isinstance(value, types.FunctionType):  # of another name, or without one
            own = [package_of(value.__module__), self._named(_cells_of(value), where)]
            return [*self._given(value, "installed"), *own]
        if all(base is object or package_of(base.__module__) is None for base in type(value).__mro__):
            return ["object", self.describe(type(value), where), self._state(value, where)]
        return self._known_object(value, where)

    def _known_object(self, value: Any, where: str) -> Any:
        if (known := state_of(value)) is not None:
            return ["known", self.describe(type(value), where), self._named(known, where)]
        raise ConfigError(f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which may have any state")

    def array(self, value: Any, where: str) -> Any:
        """Return a description of an array by its dtype, shape and bytes."""
        array = np.asarray(value)
        if array.dtype.hasobject or array.nbytes > MOST_BYTES:
            raise ConfigError(f"{where} is an array of objects, or of more than {MOST_BYTES >> 20} MiB")
        content = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
        return [str(array.dtype), array.shape, content]

    def items(self, values: Iterable[Any], where: str) -> list[Any]:
        """Return descriptions of values in their order."""
        return [self.describe(each, where) for each in values]

    def unordered(self, values: Iterable[Any], where: str) -> list[Any]:
        """Return descriptions of values in an order of their own."""
        return sorted(self.items(sorted(values, key=repr), where), key=json.dumps)

    def entries(self, value: Mapping[Any, Any], where: str) -> list[Any]:
        """Return descriptions of the keys and values of a mapping."""
        return [[self.describe(key, where), self.describe(each, f"{where}[{key!r}]")] for key, each in value.items()]

    def _state(self, value: Any, where: str) -> Any:
        slots = [(base, name) for base in type(value).__mro__ for name in _names(vars(base).get("__slots__", ()))]
        names = {name for base, slot in slots for name in (slot, f"_{base.__name__.lstrip('_')}{slot}")}  # private ones
        state = {name: getattr(value, name) for name in names - {"__dict__"} if hasattr(value, name)}
        return self._named(state | getattr(value, "__dict__", {}), where)

    def _named(self, state: Mapping[str, Any], where: str) -> list[Any]:
        counting = [(name, each) for name, each in sorted(state.items()) if self._counts(name, each)]
        return [[name, self.describe(each, f"{where}.{name}")] for name, each in counting]

    def _counts(self, name: str, value: Any) -> bool:  # noqa: ARG002 (see _LenientWalk)
        """Return whether the value of an attribute or of a variable counts."""
        return True

    def _source(self, code: CodeType) -> Any:
        return self._sources.of_function(code)

    def _function(self, function: types.FunctionType) -> Any:
        code, where = function.__code__, f"{function.__module__}.{function.__qualname__}"
        if code is _DISPATCHER.__code__:  # Its other variables are caches.
            return ["dispatcher", self.unordered(vars(function)["registry"].items(), where)]
        references = self._references(code, _cells_of(function), function.__globals__, where)
        return [*self._given(function, "function"), self._source(code), references]

    def _given(self, function: types.FunctionType, kind: str) -> list[Any]:
        """Return descriptions of the name of a function, its default values, and its attributes."""
        where = f"{function.__module__}.{function.__qualname__}"
        defaults = [function.__defaults__, function.__kwdefaults__]
        given = [*self.items(defaults, f"a default of {where}"), self._named(vars(function), where)]
        return [kind, *_installed_module(function), function.__qualname__, *given]

    def _references(self, code: CodeType, cells: Mapping[str, Any], scope: Mapping[str, Any], where: str) -> list[Any]:
        """Return descriptions of closure values, globals, and modules that a function imports when it is called."""
        names, passed_on, read = frozenset(names_in(code)), frozenset(passed_on_in(code)), globals_in(code)
        self._check_reads(names, read - scope.keys(), where)
        values = [({name}, name, value) for name, value in sorted(cells.items())]
        values += [({name}, name, scope[name]) for name in sorted(read & scope.keys())]
        described: list[Any] = []
        for variables, name in imported_in(code, scope):
            if (package := package_of(name)) is not None:  # Its import might take long, or fail.
                described.append([name, package])
            elif (module := own_module(name)) is not None:
                values.append((variables, name, module))
        for variables, name, value in values:
            # Another function gets the module, and may use any member.
            known = None if variables & passed_on or "__dict__" in names else names
            if self._counts(name, value):
                described.append([name, self._variable(value, known, passed_on, f"{name!r} of {where}")])
        return described

    def _variable(self, value: Any, names: frozenset[str] | None, passed_on: frozenset[str], where: str) -> Any:
        is_module = isinstance(value, types.ModuleType)
        return self._module(value, names, passed_on, where) if is_module else self.describe(value, where)

    def _module(self, value: Any, names: frozenset[str] | None, passed_on: frozenset[str], where: str) -> Any:
        """Return a description of a module; for one of the project, of the members that `names` may mean.

        names: None: all. passed_on: members that are modules and count with all members.
        """
        if (package := package_of(value.__name__)) is not None:
            return ["module", value.__name__, package]
        key = value.__name__, names, passed_on if names is not None else None
        if key in self._modules:
            return ["module again", value.__name__]
        self._modules.add(key)
        members = sorted(
            name
            for name in vars(value).keys() - OF_MODULES
            if names is None or name in names or name == "__getattr__"  # which makes members of any name
        )
        inner = []
        for name in members:
            known = None if names is None or name in passed_on else names
            if self._counts(name, vars(value)[name]):
                inner.append([name, self._variable(vars(value)[name], known, passed_on, f"{where}.{name}")])
        return ["module", value.__name__, inner]

    def _check_reads(self, names: AbstractSet[str], built_in: AbstractSet[str], where: str) -> None:
        """Raise ConfigError if a function uses names that its code does not show."""
        for name in sorted(names & {"import_module"} | built_in & _READERS):
            raise ConfigError(f"{where} calls {name}, which may read anything")

    def _class(self, kind: type) -> Any:
        where = f"{kind.__module__}.{kind.__qualname__}"
        members = []
        for name, member in sorted(vars(kind).items()):
            if (name in OF_NAMED_TUPLES and hasattr(kind, "_fields")) or not self._counts(name, member):
                continue
            for part in parts_of(member):
                is_function = isinstance(part, types.FunctionType)
                if is_generated(part) if is_function else part is member and is_made(kind, name, part):
                    continue
                members.append([name, self.describe(part, f"{where}.{name}")])
        members += [[name, self.describe(part, f"{where}.{name}")] for name, part in fields_of(kind)]
        if isinstance(kind, enum.EnumMeta):
            named: Mapping[str, enum.Enum] = kind.__members__  # A member may have several names.
            members += [[name, self.describe(each.value, where)] for name, each in named.items()]
        if package_of(type(kind).__module__) is None:
            members.append(["metaclass", self.describe(type(kind), where)])
        bases = [self.describe(base, where) for base in kind.__bases__ if base is not object]
        return ["class", kind.__qualname__, self._sources.of_class(kind), bases, members]


class _LenientWalk(_Walk):
    """Describes what it can: the user's version stands for the rest.

    Args:
        sources: As for `_Walk`.
        assigned: Names of variables and attributes that the project's code assigns, whose values do not count.
    """

    def __init__(self, sources: Sources, assigned: AbstractSet[str] = frozenset()) -> None:
        super().__init__(sources)
        self._assigned = assigned

    def describe(self, value: Any, where: str) -> Any:
        if is_device(value):  # It may differ between ranks.
            return ["device"]
        try:
            return super().describe(value, where)
        except Exception:  # noqa: BLE001 (of code that an attribute or a representation runs)
            return ["any", type(value).__module__, type(value).__qualname__]

    def _object(self, value: Any, where: str) -> Any:
        try:
            return super()._object(value, where)
        except Exception:  # noqa: BLE001
            named = _named(value)
            return ["any", named.__module__, named.__qualname__, package_of(named.__module__)]

    def _counts(self, name: str, value: Any) -> bool:
        return name not in self._assigned or isinstance(value, (type, types.FunctionType, types.ModuleType))

    def _source(self, code: CodeType) -> Any:
        try:
            return super()._source(code)
        except ConfigError:
            inner = [self._source(each) for each in code.co_consts if isinstance(each, CodeType)]
            constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
            return [code.co_code.hex(), code.co_names, self.items(constants, ""), inner]

    def _check_reads(self, names: AbstractSet[str], built_in: AbstractSet[str], where: str) -> None:
        """Do nothing: the version stands for what such a function reads."""


def find_code(function: Callable[..., Any], sources: Sources) -> None:
    """Make `sources` find the code of a function, and of the functions and classes of the project that it refers to."""
    _LenientWalk(sources).describe(function, name_of(function))


def _file_of(function: Callable[..., Any]) -> str:
    """Return the name of the file that defines a function, the same if it is a program or imported; "": a notebook."""
    named = _named(_inner(function))
    module = sys.modules.get(named.__module__)
    scope = getattr(named, "__globals__", None) or ({} if module is None else vars(module))
    return pathlib.PurePath(scope.get("__file__") or "").stem


def _installed_module(function: types.FunctionType) -> list[str]:
    """Return the module of a function if it is of an installed package, in which a name may have several."""
    return [] if package_of(function.__module__) is None else [function.__module__]


def _cells_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables around a function that have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # The variable has no value yet.
            found[name] = cell.cell_contents
    return found


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _module_function(walk: _Walk, value: Any, where: str) -> Any:
    """Return a description of a function of an extension, which must not be a method of an object with a state."""
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        if (package := package_of(value.__module__ or "builtins")) is None:
            raise ConfigError(f"{where} is compiled code of the project, whose source is unknown")
        return [value.__module__, value.__qualname__, package]
    return [value.__name__, walk.describe(owner, where)]


def _tensor(_: _Walk, value: Any, where: str) -> Any:
    try:
        dense = value.detach().cpu().contiguous()
        content = dense.reshape(-1).view(sys.modules["torch"].uint8).numpy()
    except RuntimeError as error:  # sparse
        raise ConfigError(f"{where} is a tensor that numpy cannot hold") from error
    return [str(value.dtype), [*value.shape], hashlib.blake2b(content, digest_size=16).hexdigest()]


def _describer_of(value: Any) -> Callable[[_Walk, Any, str], Any] | None:
    """Return the function that describes a value of a known kind."""
    if type(value) is np.ndarray or isinstance(value, np.generic):  # A subclass, such as a masked array, may have more.
        return _Walk.array
    if is_plain_tensor(value):
        return _tensor
    if typing.get_origin(value) is not None:
        return _alias
    return next((describe for kinds, describe in _KINDS if isinstance(value, kinds)), None)


def _alias(walk: _Walk, value: Any, where: str) -> Any:
    return [walk.describe(typing.get_origin(value), where), walk.items(typing.get_args(value), where)]


def _arrow(_: _Walk, value: Any, __: str) -> Any:
    field = value if isinstance(value, pa.Field) else pa.field("", value)
    return pa.schema([field]).serialize().to_pybytes().hex()


def _partial(walk: _Walk, value: Any, where: str) -> Any:
    parts = (value.func, value.args, value.keywords)
    return [walk.describe(part, f"an argument of {where}") for part in parts]


def _method(walk: _Walk, value: Any, where: str) -> Any:
    return [walk.describe(value.__func__, where), walk.describe(value.__self__, f"the object of {where}")]


_KINDS: list[tuple[Any, Callable[[_Walk, Any, str], Any]]] = [
    ((tuple, list), lambda walk, value, where: walk.items(value, where)),
    ((set, frozenset), lambda walk, value, where: walk.unordered(value, where)),
    (
        collections.defaultdict,
        lambda walk, value, where: [walk.describe(value.default_factory, where), walk.entries(value, where)],
    ),
    ((dict, types.MappingProxyType), lambda walk, value, where: walk.entries(value, where)),
    (re.Pattern, lambda walk, value, where: [walk.describe(value.pattern, where), value.flags]),
    (slice, lambda walk, value, where: walk.items((value.start, value.stop, value.step), where)),
    (bytearray, lambda _, value, __: repr(bytes(value))),
    ((functools.partial, functools.partialmethod), _partial),
    (types.MethodType, _method),
    (types.BuiltinFunctionType, _module_function),
    (functools._lru_cache_wrapper, lambda walk, value, where: walk.describe(value.__wrapped__, where)),  # noqa: SLF001
    (
        (operator.itemgetter, operator.attrgetter, operator.methodcaller),
        lambda walk, value, where: walk.describe(value.__reduce__(), where),
    ),
    (logging.Logger, lambda _, value, __: value.name),
    (collections.deque, lambda walk, value, where: [value.maxlen, walk.items(value, where)]),
    ((type(threading.Lock()), type(threading.RLock())), lambda *_: "lock"),
    ((pa.DataType, pa.Field), _arrow),
    (pa.Schema, lambda _, value, __: value.serialize().to_pybytes().hex()),
]
