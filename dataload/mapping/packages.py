"""The installed packages that define functions and classes."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys
import sysconfig
import types
from contextlib import suppress
from typing import Any

SPAWNED = "__mp_main__"  # the main program in a process that multiprocessing has spawned
MAIN_PROGRAMS = ("__main__", SPAWNED)
_FOLLOWED = "dataload.images."  # The packages of its codecs count, too.


def module_of(named: Any) -> str:
    """Return the module of a function or class. That of the main program has one name in all its processes."""
    return "__main__" if named.__module__ in (None, SPAWNED) else str(named.__module__)


def is_own(kind: type) -> bool:
    """Return whether the project defines a class."""
    return package_of(kind.__module__) is None


def installed_name(value: Any) -> Any:
    """Return the name and version of an object that an installed package defines under its name, or None."""
    module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
    if not isinstance(module, str) or (package := package_of(module)) is None:
        return None
    for name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None)):
        found: Any = sys.modules.get(module)
        for part in name.split(".") if isinstance(name, str) else ():
            found = getattr(found, part, None)
        if name and (found is value or (module == "builtins" and isinstance(value, type))):  # such as NoneType
            return ["installed", module, name, package]
    shown = repr(value)  # such as torch.float32
    found = sys.modules.get(module)
    for part in shown.split(".")[1:] if shown.startswith(f"{module}.") else ():
        found = getattr(found, part, None)
    return ["installed", shown, package] if found is value else None


@functools.cache
def package_of(module: str | None) -> str | None:
    """Return the name and version of the installed package of a module, or None for a module of the project."""
    if module is None or module in MAIN_PROGRAMS or module.startswith(_FOLLOWED):
        return None  # `exec` makes functions without a module.
    root = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None and (found := sys.modules.get(root)) is not None:
        file = getattr(found, "__file__", None)
    if file is None:
        file = _file_of(module)
    if is_installed := file is not None and _is_installed(file):
        names = sorted({package.metadata["Name"] for package, roots in _installed() if root in roots})
        if names:
            return ", ".join(f"{name} {_version(name)}" for name in names)
    if root in sys.stdlib_module_names and (is_installed or _is_of_python(file)):
        return f"python {sys.version_info.major}.{sys.version_info.minor}"
    return None


def _is_installed(file: str) -> bool:
    folders, parts = {"site-packages", "dist-packages"}, {*pathlib.PurePath(file).parts}
    installed = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
    return bool(folders & parts) or file.startswith(installed)


def _is_of_python(file: str | None) -> bool:
    """Return whether the file of a module that is named like one of Python is Python's own."""
    folders = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    return file in (None, "built-in", "frozen") or str(file).startswith(folders)


def own_module(name: str) -> types.ModuleType | None:
    """Import a module of the project. Return None if there is no such module, or its code raises an error."""
    with suppress(Exception):
        importlib.import_module(name)
    return sys.modules.get(name)


def _file_of(module: str) -> str | None:
    """Return the file of a module or of its package, or the folder of a namespace. It runs none of their code."""
    names, file = module.split("."), None
    with suppress(Exception):  # of a finder
        for count in range(1, len(names) + 1):
            spec = importlib.util.find_spec(".".join(names[:count]))  # This imports parents: namespaces, without code.
            if spec is None or spec.origin is not None:
                return None if spec is None else spec.origin
            file = next(iter(spec.submodule_search_locations or ()), None)
    return file


def _version(name: str) -> str:
    """Return the version of a package. That of one which is not from an index includes its files: see PEP 610."""
    version, package = importlib.metadata.version(name), importlib.metadata.distribution(name)
    if package.read_text("direct_url.json") is None:
        return version
    # Every build of a project of one's own may have the same version. RECORD has the hash of each file.
    files = [line for line in (package.read_text("RECORD") or "").splitlines() if _is_source(line.partition(",")[0])]
    return f"{version} {hashlib.sha256(str(sorted(files)).encode()).hexdigest()}"


def _is_source(path: str) -> bool:
    """Return whether a file of a package is the same wherever the package is installed."""
    return not path.startswith("../") and not path.endswith(".pyc") and ".dist-info/" not in path


@functools.cache
def _installed() -> list[tuple[importlib.metadata.Distribution, set[str]]]:
    """Return the installed packages, with the names of the modules and folders that they install.

    `importlib.metadata.packages_distributions` parses each path and the metadata of each package, for 0.3 s.
    """
    return [(package, _roots(package)) for package in importlib.metadata.distributions()]


def _roots(package: importlib.metadata.Distribution) -> set[str]:
    if declared := (package.read_text("top_level.txt") or "").split():
        return {*declared}
    paths = (package.read_text("RECORD") or "").splitlines()
    return {path.partition("/")[0].partition(".")[0] for path in paths}
