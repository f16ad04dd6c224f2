"""The source code of functions and classes, without comments and docstrings."""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, reduce
from operator import or_
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from dataload.errors import ConfigError
from dataload.mapping.bytecode import names_in
from dataload.mapping.large_values import LargeValues
from dataload.mapping.packages import MAIN_PROGRAMS, package_of

_FUTURE_FLAGS = reduce(or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))
_PYTEST = "@pytest_ar"  # the name that pytest adds to the functions whose assertions it rewrites
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BEGINNINGS = ("__init__", "__new__", "__post_init__", "__setstate__")
_FILLING = ("add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
_Place = tuple[int, int]


class _File(NamedTuple):
    """A parsed file.

    Attributes:
        tree: Its syntax tree.
        compiled: The code objects in it; none if the source cannot change.
        definitions: Its functions and lambdas by their first lines.
    """

    tree: ast.Module
    compiled: set[CodeType]
    definitions: dict[int, list[ast.AST]]


class Sources:
    """Finds the source of code objects. It parses each file once.

    A file may have changed since it was imported. The source of such a file is not that of the function that runs, so
    it is compiled again and compared with the function.

    It keeps the source of each function and class. An edit of the file does not change the code that runs.

    Args:
        functions: The sources of functions that another process knows, by file and code.
        classes: The sources of classes that it knows.

    Attributes:
        large: Keeps the digests of large collections in the same way.
        cells: The texts of cells of notebooks, which are no files, by their names. Lines of statements without a
            function or class that was looked up are empty: they may have secrets.
    """

    def __init__(
        self, functions: Mapping[tuple[str, CodeType], str] | None = None, classes: Iterable[tuple[type, str]] = ()
    ) -> None:
        self._files: dict[tuple[str, int], _File] = {}
        self._functions = dict(functions or {})
        self._sent = {code: text for (_, code), text in self._functions.items()}  # under whatever file it arrived
        self._classes = {id(kind): (kind, text) for kind, text in classes}  # by id: a metaclass may define another hash
        self.large = LargeValues()
        self.cells: dict[str, str] = {}

    def forget(self) -> None:
        """Free the memory of the parsed files but the latest. They are parsed again for functions that are new."""
        self._files.clear()

    def texts(self) -> tuple[dict[tuple[str, CodeType], str], list[tuple[type, str]]]:
        """Return the arguments of `Sources` for another process, to which cloudpickle sends them with the functions.

        Functions and classes of the main program are sent as they are here, even if its file has changed since. Other
        classes are imported there, perhaps from a file that has changed. Functions of such a file have another code.
        """
        classes = [*self._classes.values()]
        return {**self._functions}, [(kind, text) for kind, text in classes if kind.__module__ in MAIN_PROGRAMS]

    @property
    def found(self) -> dict[str, set[str]]:
        """The sources of all functions and classes that were looked up, by the name. Functions may share a name."""
        found: dict[str, set[str]] = {}
        for (file, code), text in self._functions.items():
            found.setdefault(f"{file} {code.co_qualname}", set()).add(text)
        for kind, text in self._classes.values():
            found.setdefault(f"class {kind.__module__}.{kind.__qualname__}", set()).add(text)
        return found

    def assigned(self, name: str) -> set[str]:
        """Return the names of variables and attributes that a call of a function with this name assigns, or fills.

        Code that was looked up counts if the name of its function is special, or is in code that counts. What
        `__init__` assigns belongs to an object from its start.
        """
        left, names, found = {code: text for (_, code), text in self._functions.items()}, {name}, set[str]()
        while reached := [code for code in left if code.co_name in names or _is_special(code.co_name)]:
            for code in reached:
                tree = ast.parse(left.pop(code))
                names |= {*names_in(code), *code.co_freevars}
                found.update(_assigned_in(tree, _locals_of(tree)))
        return found

    def of_function(self, code: CodeType) -> str:
        """Return the source of a function in a normal form: other comments and docstrings do not change it.

        Raises:
            ConfigError: There is no source, or it is not that of the function that runs.
        """
        known = self._functions.get((code.co_filename, code)) or self._sent.get(code)
        if known is not None:
            return known
        parsed = self._parsed(code)
        rewritten = any(_PYTEST in each.co_names for each in (code, *_nested(code)))
        if parsed.compiled and code not in parsed.compiled and not rewritten:
            raise ConfigError(f"{code.co_filename} has changed since {code.co_qualname} was imported")
        node = _node_of(parsed.definitions, code)
        if node is None:
            raise ConfigError(f"{code.co_qualname} is not found in {code.co_filename}")
        self._keep(code, parsed.tree, node)
        found = self._functions[code.co_filename, code] = _normal(node)
        return found

    def of_class(self, kind: type) -> str:
        """Return the source of a class in the same form; "" if a call made it, such as of `type` or `namedtuple`."""
        if id(kind) not in self._classes:
            text = ""
            with suppress(ConfigError, OSError, TypeError, SyntaxError):
                text = self._of_class(kind)
            self._classes[id(kind)] = kind, text
        return self._classes[id(kind)][1]

    def _of_class(self, kind: type) -> str:
        members = [*vars(kind).values()]  # A copy: reading one may complete a pydantic model, which adds more.
        code = next((code for member in members if (code := _code_of(member, kind)) is not None), None)
        if code is None:
            return _normal(ast.parse(textwrap.dedent(inspect.getsource(kind))))
        tree = self._parsed(code).tree
        found = _class_of(tree, kind.__qualname__.replace(".<locals>", "").split("."))
        if found is None:
            return ""
        self._keep(code, tree, found)
        return _normal(found)

    def _keep(self, code: CodeType, tree: ast.Module, node: Any) -> None:
        """Note the statement around a node, if it is in a cell of a notebook."""
        if os.path.exists(code.co_filename):  # noqa: PTH110
            return
        lines = _lines_of(code)
        kept = self.cells.get(code.co_filename, "\n" * len(lines)).splitlines(keepends=True)
        for statement in tree.body:
            first, last = _first_line(statement), statement.end_lineno or 0
            if first <= node.lineno <= last:
                kept[first - 1 : last] = lines[first - 1 : last]
        self.cells[code.co_filename] = "".join(kept)

    def _parsed(self, code: CodeType) -> _File:
        """Return the file of a code object."""
        try:
            text = "".join(_lines_of(code))
            key = code.co_filename, hash(text)
            parsed = self._files.get(key)
            if parsed is None:
                flags = code.co_flags & _FUTURE_FLAGS | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as cells of notebooks are
                parsed = self._files[key] = _parse(text, code.co_filename, flags)
        except (OSError, TypeError, SyntaxError, ValueError, IndexError) as error:
            raise ConfigError(f"{code.co_qualname} has no source: {error}") from error
        return parsed


@lru_cache(maxsize=2)  # The functions of a chain of maps are of one script, or of it and one module.
def _parse(text: str, file: str, flags: int) -> _File:
    module = compile(text, file, "exec", flags=flags, dont_inherit=True)
    tree, definitions = ast.parse(text), dict[int, list[ast.AST]]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Lambda, *_FUNCTIONS)):
            definitions.setdefault(_first_line(node), []).append(node)
    return _File(tree, set(_nested(module)), definitions)


def _lines_of(code: CodeType) -> list[str]:
    """Return the lines of the file of a code object. `inspect` would first look at each imported module."""
    linecache.checkcache(code.co_filename)
    return linecache.getlines(code.co_filename) or inspect.findsource(code)[0]


def add_cells(cells: Mapping[str, str]) -> None:
    """Make the cells of another process known to `inspect` and to tracebacks."""
    for name, text in cells.items():
        linecache.cache.setdefault(name, (len(text), None, text.splitlines(keepends=True), name))


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _node_of(definitions: Mapping[int, list[ast.AST]], code: CodeType) -> ast.AST | None:
    """Return the definition of a function, or the lambda that has all places of the code."""
    there = definitions.get(code.co_firstlineno, [])
    if code.co_name != "<lambda>":
        return next((node for node in there if isinstance(node, _FUNCTIONS) and node.name == code.co_name), None)
    starts, ends = _extent(code)
    # A lambda whose body is another one only has places of that.
    inner = [_node_of(definitions, each) for each in code.co_consts if isinstance(each, CodeType)]
    around = [
        node
        for node in there
        if isinstance(node, ast.Lambda)
        and node not in inner
        and (node.lineno, node.col_offset) <= starts
        and ends <= (node.end_lineno or node.lineno, node.end_col_offset or 0)
    ]
    return max(around, key=lambda node: (node.lineno, node.col_offset), default=None)  # the innermost


def _extent(code: CodeType) -> tuple[_Place, _Place]:
    """Return the first and the last place of a code object: (line, column) both."""
    starts, ends = [], []
    for line, end_line, column, end_column in code.co_positions():
        if None not in (line, end_line, column, end_column) and (line, column) != (end_line, end_column):
            starts.append((line or 0, column or 0))
            ends.append((end_line or 0, end_column or 0))
    return min(starts, default=(0, 0)), max(ends, default=(0, 0))


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _locals_of(tree: ast.AST) -> set[str]:
    """Return the names of the arguments and variables of functions."""
    nodes = [*ast.walk(tree)]
    outer = {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return (stored | {node.arg for node in nodes if isinstance(node, ast.arg)}) - outer


def _assigned_in(node: ast.AST, local: set[str]) -> Iterator[str]:
    """Yield the names of globals, of variables around a function, and of attributes, that code assigns or fills."""
    if isinstance(node, _FUNCTIONS) and node.name in _BEGINNINGS:
        return
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from node.names
    target: Any = None
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        target = node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLING:
        target = node.func.value
    while isinstance(target, ast.Subscript):
        target = target.value
    if isinstance(target, ast.Attribute):
        yield target.attr
    elif isinstance(target, ast.Name) and target.id not in local:
        yield target.id
    for child in ast.iter_child_nodes(node):
        yield from _assigned_in(child, local)


def _first_line(node: Any) -> int:
    first: int = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return first


def _code_of(member: Any, kind: type) -> CodeType | None:
    """Return the code of a method that the body of the class defines."""
    for name in ("__func__", "fget", "__wrapped__"):
        member = getattr(member, name, None) or member
    code = getattr(member, "__code__", None)
    if not isinstance(code, CodeType) or code.co_qualname.rpartition(".")[0] != kind.__qualname__:
        return None
    return code


def is_generated(function: FunctionType) -> bool:
    """Return whether `dataclass` or attrs made a function of the fields of a class. Others of `exec` are unknown.

    An installed package, such as `dataclasses` itself, may have wrapped it.
    """
    if package_of(function.__globals__.get("__name__")) is not None:
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)  # An extension's function has none.
    file, name = ("", "") if code is None else (code.co_filename, code.co_qualname)
    return file.startswith("<attrs generated ") or (file == "<string>" and name.startswith("__create_fn__."))


def _class_of(node: ast.AST, names: list[str]) -> ast.AST | None:
    """Return the class at a path of names of functions and classes. Of several with one name, it takes all."""
    bodies: list[ast.AST] = [node]
    for name in names:
        bodies = [
            child
            for body in bodies
            for child in ast.walk(body)
            if isinstance(child, (ast.ClassDef, *_FUNCTIONS)) and child.name == name
        ]
    return ast.Module([body for body in bodies if isinstance(body, ast.stmt)], []) if bodies else None


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and isinstance(body, list):
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = body[1:] or [ast.Pass()]
        return node


def _normal(node: ast.AST) -> str:
    copy = ast.parse(ast.unparse(node))
    return ast.unparse(_WithoutDocstrings().visit(copy))
