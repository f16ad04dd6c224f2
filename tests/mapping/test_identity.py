"""Tests of the identity of functions: it changes with their results, and with nothing else."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest

from dataload import images
from dataload.errors import ConfigError
from dataload.mapping import packages
from dataload.mapping.identity import identity
from dataload.mapping.sources import Sources
from dataload.mapping.stage import UserFunction

AS_PROGRAM = """
from dataload.mapping.identity import identity

class Scale:
    def __init__(self, by): self.by = by
    def __call__(self, batch): return {"x": batch["x"] * self.by}

def double(batch): return Scale(2)(batch)

def show():
    print([identity(double), identity(Scale(3)), identity(double, "v1")])

if __name__ == "__main__": show()
"""

SOURCE = '''
import functools, logging
import helpers
from helpers import scaled

log = logging.getLogger("project")
SIZE = 3
TABLE = {"a": [1, 2]}

class Base:
    """A base."""
    GAIN = 1

    def grow(self, values):
        return values * self.GAIN

class Resize(Base):
    def __init__(self, size):
        self.size = size

    def __call__(self, batch):
        return {"x": self.grow(batch["x"]) + self.size}

def inner(values):
    """Add."""
    # a comment
    return values + SIZE

def plain(batch, step=2):
    """Map."""
    log.info("called")
    return {"x": inner(batch["x"]) + step}  # the result

def through_module(batch):
    return {"x": helpers.scaled(batch["x"]) + helpers.OFFSET}

def imported_late(batch):
    from helpers import scaled as other
    return {"x": other(batch["x"])}

def call(module, batch, name="scaled"):
    return {"x": getattr(module, name)(batch["x"])}

def passed_on(batch):
    return call(helpers, batch)

def passed_on_late(batch):
    import helpers as other
    return call(other, batch)

def of_table(batch):
    return {"x": batch["x"] + TABLE["a"][0]}

def make(factor):
    def closed(batch):
        return {"x": batch["x"] * factor}
    return closed

resized = Resize(4)
nested = lambda batch, by: lambda value: value * by
deep = lambda batch: lambda by: lambda value: value * by
first, second = lambda batch: {"x": batch["x"]}, lambda batch: {"x": batch["x"] + 1}
'''
HELPERS = '''
OFFSET = 1
UNUSED = 1

def scaled(values):
    """Scale."""
    return values * doubled(2)

def doubled(value):
    return value * 2
'''


class Project:
    """Writes a module and its helper, imports them, and returns the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *changes: tuple[str, str]) -> ModuleType:
        texts = {"helpers": HELPERS, "project": SOURCE}
        for old, new in changes:
            assert any(old in text for text in texts.values())
            texts = {name: text.replace(old, new) for name, text in texts.items()}
        for name, text in texts.items():
            path = self.folder / f"{name}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(name, path)
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))  # no file of bytecode
        return sys.modules["project"]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    yield Project(tmp_path)
    for name in ("helpers", "project"):
        sys.modules.pop(name, None)


FUNCTIONS: dict[str, Callable[[ModuleType], Any]] = {
    "plain": lambda module: module.plain,
    "through_module": lambda module: module.through_module,
    "imported_late": lambda module: module.imported_late,
    "passed_on": lambda module: module.passed_on,
    "passed_on_late": lambda module: module.passed_on_late,
    "of_table": lambda module: module.of_table,
    "closed": lambda module: module.make(2),
    "partial": lambda module: functools.partial(module.plain, step=5),
    "partial of a module": lambda module: functools.partial(module.call, module.helpers),
    "object": lambda module: module.resized,
    "method": lambda module: module.resized.grow,
    "lambda": lambda module: module.first,
    "lambda that makes one": lambda module: module.nested,
    "lambda that makes two": lambda module: module.deep,
}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        pytest.param("plain", "+ step}  # the", "- step}  # the", id="source"),
        pytest.param("plain", "step=2", "step=3", id="default"),
        pytest.param("plain", "SIZE = 3", "SIZE = 4", id="constant of a helper"),
        pytest.param("plain", "return values + SIZE", "return values - SIZE", id="helper"),
        pytest.param("partial", "SIZE = 3", "SIZE = 4", id="helper of a partial"),
        pytest.param("through_module", "OFFSET = 1", "OFFSET = 2", id="constant of another module"),
        pytest.param("through_module", "doubled(2)", "doubled(3)", id="function of another module"),
        pytest.param("through_module", "value * 2", "value * 3", id="helper of a helper"),
        pytest.param("imported_late", "value * 2", "value * 3", id="module imported in the function"),
        pytest.param("passed_on", "value * 2", "value * 3", id="module passed on"),
        pytest.param("passed_on_late", "value * 2", "value * 3", id="module imported and passed on"),
        pytest.param("partial of a module", "value * 2", "value * 3", id="module as an argument"),
        pytest.param("of_table", "[1, 2]", "[1, 3]", id="table"),
        pytest.param("closed", "* factor", "+ factor", id="source of a closure"),
        pytest.param("object", "Resize(4)", "Resize(5)", id="state of an object"),
        pytest.param("object", "GAIN = 1", "GAIN = 2", id="constant of a base class"),
        pytest.param("object", "values * self", "values + self", id="method of a base class"),
        pytest.param("method", "Resize(4)", "Resize(5)", id="object of a method"),
        pytest.param(
            "lambda",
            'first, second = lambda batch: {"x": batch["x"]}',
            'first, second = lambda batch: {"x": 1}',
            id="lambda",
        ),
        pytest.param("lambda that makes one", "lambda batch, by: lam", "lambda by, batch: lam", id="outer lambda"),
        pytest.param("lambda that makes one", "value: value * by", "value: value + by", id="inner lambda"),
        pytest.param("lambda that makes two", "lambda by: lambda value: v", "lambda value: lambda by: v", id="middle"),
    ],
)
def test_what_changes_results_changes_the_identity(project: Project, name: str, old: str, new: str) -> None:
    before = identity(FUNCTIONS[name](project()))
    assert identity(FUNCTIONS[name](project((old, new)))) != before
    assert identity(FUNCTIONS[name](project())) == before


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another one"),
        ('"""Add."""', '"""Add a size."""\n'),
        ('"""A base."""', '"""The base."""'),
        ('"""Scale."""', '"""Scale it."""'),
        ("values + SIZE", "(values  +  SIZE)"),
        ("SIZE = 3", "\n\nSIZE = 3"),
        ("UNUSED = 1", "UNUSED = 2"),
    ],
)
def test_comments_docstrings_and_layout_do_not(project: Project, name: str, old: str, new: str) -> None:
    # Each member of a module counts that is passed on.
    counts = old == "UNUSED = 1" and name in ("passed_on", "passed_on_late", "partial of a module")
    before = identity(FUNCTIONS[name](project()))
    assert (identity(FUNCTIONS[name](project((old, new)))) != before) == counts


def test_closures_partials_arrays_and_lambdas_of_one_line_differ(project: Project) -> None:
    module, identities = project(), set()
    values = [2, 3, "2", b"2", (2,), None, np.arange(2), np.arange(2.0), np.arange(2).reshape(2, 1), np.float32(2)]
    functions = [*map(module.make, values), functools.partial(module.plain, step=7), module.first, module.second]
    identities = {identity(function) for function in functions}
    assert len(identities) == len(functions)
    assert identity(module.make(np.arange(2))) == identity(module.make(np.arange(2)))


def test_the_values_of_sets_are_in_no_order(project: Project) -> None:
    forward, backward = set(map(str, range(50))), set(map(str, reversed(range(50))))
    assert identity(project().make(forward)) == identity(project().make(backward))


def test_another_process_finds_the_same_identity(project: Project, tmp_path: Path) -> None:
    expected = identity(project().plain)
    program = "from dataload.mapping.identity import identity; import project; print(identity(project.plain))"
    folders = [str(tmp_path), *sys.path]
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {folders}; {program}"]
    assert subprocess.check_output(command, text=True).strip() == expected


def executed() -> Any:
    scope: dict[str, Any] = {}
    exec("def f(batch): return batch", scope)  # in a scope without a name
    return scope["f"]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(eval("lambda batch: batch"), id="lambda without source"),
        pytest.param(executed(), id="function without a module"),
        pytest.param(functools.partial(np.take, np.random.default_rng(0)), id="generator"),
        pytest.param(np.random.default_rng(0).random, id="method of an extension"),
        pytest.param(functools.partial(np.take, iter([1])), id="iterator"),
    ],
)
def test_a_function_without_identity_needs_a_version(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot tell .* Pass version="):
        identity(function)
    assert identity(function, "1") == identity(function, "1") != identity(function, "2")


def test_a_file_that_changed_since_its_import_is_no_identity(project: Project, tmp_path: Path) -> None:
    module = project()
    (tmp_path / "project.py").write_text(SOURCE.replace("+ step", "- step"))
    with pytest.raises(ConfigError, match="has changed since plain was imported"):
        identity(module.plain)


def test_code_that_is_not_in_its_file_has_no_source(tmp_path: Path) -> None:
    path = tmp_path / "constants.py"
    path.write_text("X = 1\n" + "\n" * 9)
    names: dict[str, Any] = {}
    exec(compile("def f(): return 1", str(path), "exec"), names)
    with pytest.raises(ConfigError, match=r"f is not found in .*constants\.py"):
        Sources().of_function(names["f"].__code__)


def test_a_process_that_imports_another_source_refuses_the_function(project: Project) -> None:
    sent = pickle.dumps(UserFunction.of(project().plain, None))
    assert pickle.loads(sent).call({"x": 1}) == {"x": 6}
    project(("# a comment", "# another one"))
    assert pickle.loads(sent).call({"x": 1}) == {"x": 6}
    project(("SIZE = 3", "SIZE = 4"))
    with pytest.raises(ConfigError, match=r"project\.plain, or something that it refers to, has changed since"):
        pickle.loads(sent)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_script_has_the_same_identity_after_its_journey(project: Project, name: str) -> None:
    """Only the globals that it uses travel. The attribute `size` has the name of another one."""
    module = project(("SIZE = 3", "SIZE = 3\nsize = 1"))
    cloudpickle.register_pickle_by_value(module)
    try:
        function = UserFunction.of(FUNCTIONS[name](module), None)
        assert pickle.loads(pickle.dumps(function)).digest == function.digest
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_an_object_that_the_script_and_a_module_share_may_travel_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of the script brings a copy of it, and the module has its own."""
    (tmp_path / "settings_of_a_test.py").write_text("SHARED = {'a': [1]}\n")
    (tmp_path / "module_of_a_test.py").write_text(
        "from settings_of_a_test import SHARED\ndef size():\n    return len(SHARED)\n"
    )
    (tmp_path / "script_of_a_test.py").write_text(
        "from settings_of_a_test import SHARED\nfrom module_of_a_test import size\n"
        "def decode(batch):\n    return {'x': (SHARED, size())}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    script = importlib.import_module("script_of_a_test")
    cloudpickle.register_pickle_by_value(script)
    try:
        function = UserFunction.of(script.decode, None)
        copy = pickle.loads(pickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(script)
    assert copy.call.__globals__["SHARED"] is not script.SHARED
    assert copy.digest == function.digest


def test_objects_that_refer_to_themselves_have_an_identity(project: Project) -> None:
    def ring(size: int) -> list[Any]:
        first: list[Any] = []
        last = first
        for _ in range(size - 1):
            last.append(last := [])
        last.append(first)
        return first

    module = project()
    assert identity(module.make(ring(2))) == identity(module.make(ring(2))) != identity(module.make(ring(3)))


def test_the_script_may_be_edited_while_it_runs(project: Project) -> None:
    """Its functions travel as they are, so its file does not matter. That of an imported module does."""
    module = project()
    cloudpickle.register_pickle_by_value(module)
    try:
        sent = pickle.dumps(UserFunction.of(module.plain, None))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    project(("SIZE = 3", "# a new line\nSIZE = 4"), ("+ step", "- step"))
    assert pickle.loads(sent).call({"x": 1}) == {"x": 6}


def test_each_file_is_parsed_once(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, parsed, parse = project(), list[str](), ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: (parsed.append(text), parse(text))[1])
    for function in (functions.through_module, functions.plain):
        user = UserFunction.of(function, None)
        assert user.is_same
    assert sorted(parsed.count(text) for text in (SOURCE, HELPERS)) == [1, 1]


def test_installed_packages_count_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.0")
    packages.package_of.cache_clear()
    before = identity(np.linalg.norm)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.1")
    packages.package_of.cache_clear()
    assert identity(np.linalg.norm) != before
    packages.package_of.cache_clear()


@pytest.mark.parametrize("package", ["pillow", "simplejpeg", "torch"])
def test_the_codecs_of_an_installed_dataload_count(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    function, installed = images.decode("image", size=256), packages._installed()
    own = importlib.metadata.distribution("dataload")
    monkeypatch.setattr(packages, "_is_installed", lambda _: True)
    monkeypatch.setattr(packages, "_installed", lambda: [*installed, (own, {"dataload"})])
    monkeypatch.setattr(packages, "_version", str)
    packages.package_of.cache_clear()
    before = identity(function)
    monkeypatch.setattr(packages, "_version", lambda name: "2" if name.lower() == package else name)
    packages.package_of.cache_clear()
    assert identity(function) != before
    packages.package_of.cache_clear()


def test_packages_are_those_that_importlib_finds() -> None:
    expected = {
        name: set(owners)
        for name, owners in packages_distributions().items()
        if hasattr(sys.modules.get(name), "__file__")
    }
    found: dict[str, set[str]] = {name: set() for name in expected}
    for package, roots in packages._installed():
        for root in roots & expected.keys():
            found[root].add(package.metadata["Name"])
    assert found == expected
    assert expected["_pytest"] == {"pytest"}


@pytest.mark.parametrize(("origin", "is_found"), [("direct_url.json", True), ("INSTALLER", False)])
def test_a_package_that_was_built_again_under_one_version(tmp_path: Path, origin: str, is_found: bool) -> None:
    """One that is not from an index, such as a project of one's own, also counts by the hashes of its files."""
    info = tmp_path / "site-packages" / "acme-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 0.1.0\n")
    (info / "top_level.txt").write_text("acme\n")
    (info / origin).write_text("{}")
    (tmp_path / "site-packages" / "acme.py").write_text("")
    code = (
        f"import sys; sys.path.append({str(info.parent)!r}); import acme; "
        "from dataload.mapping.packages import package_of; print(package_of('acme'))"
    )
    found = set()
    for digest in ("a", "b"):
        (info / "RECORD").write_text(f"acme.py,sha256={digest},0\nacme.pyc,,\n../bin/{digest},,\n")
        found.add(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=200))
    assert len(found) == 1 + is_found
    assert all(name.startswith("acme 0.1.0") for name in found)


HELPER = "def helper(module, x): return module.scale(x)\n"
SCALE = "def scale(x): return 2 * x\n"
# name: (files of a project, the file that changes); app.f is the function
PATHS_TO_SCALE = {
    "passed on and used": (
        {
            "pkg/__init__.py": "from . import sub\n",
            "app.py": "import pkg\ndef f(b):\n id(pkg)\n return pkg.sub.scale(b)",
        },
        "pkg/sub.py",
    ),
    "another name": (
        {"pkg/__init__.py": "from . import sub\n", "app.py": "import pkg\ndef f(b):\n g = pkg\n return g.sub.scale(b)"},
        "pkg/sub.py",
    ),
    "module and function of one name": (
        {"pkg/__init__.py": "from . import scale\n", "app.py": "import pkg\ndef f(b): return pkg.scale.scale(b)"},
        "pkg/scale.py",
    ),
    "submodule passed on": (
        {"pkg/__init__.py": "", "app.py": f"import pkg.sub\n{HELPER}def f(b): return helper(pkg.sub, b)"},
        "pkg/sub.py",
    ),
    "submodule imported under another name": (
        {"pkg/__init__.py": "", "app.py": f"{HELPER}def f(b):\n import pkg.sub as s\n return helper(s, b)"},
        "pkg/sub.py",
    ),
    "module imported twice": (
        {"app.py": f"{HELPER}def f(b):\n import m as a\n import m as c\n return helper(c, b)"},
        "m.py",
    ),
    "package of an imported submodule": (
        {"pkg/sub.py": "", "app.py": "def f(b):\n import pkg.sub\n return pkg.scale(b)"},
        "pkg/__init__.py",
    ),
    "module of a module": (
        {
            "m.py": "import tools\n",
            "app.py": "import m\ndef g(m, x): return m.tools.scale(x)\ndef f(b): return g(m, b)",
        },
        "tools.py",
    ),
    "module named like one of Python": ({"app.py": "import wave\ndef f(b): return wave.scale(b)"}, "wave.py"),
    "default value": (
        {"pkg/__init__.py": "from . import sub\n", "app.py": "import pkg\ndef f(b, q=pkg): return q.sub.scale(b)"},
        "pkg/sub.py",
    ),
}
IDENTITIES = """
import importlib, pathlib, sys
from dataload.mapping.identity import identity
standard = set(sys.modules)
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    print(identity(importlib.import_module("app").f))
    sys.path.pop(0)
    for name in set(sys.modules) - standard:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in sys.modules[name].__file__:
            del sys.modules[name]
"""


def test_a_function_is_followed_whatever_the_path_to_its_module(tmp_path: Path) -> None:
    found = []
    for factor in ("2", "3"):
        for name, (files, changed) in PATHS_TO_SCALE.items():
            for file, text in (files | {changed: SCALE.replace("2", factor)}).items():
                path = tmp_path / factor / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n")
        command = [sys.executable, "-B", "-c", IDENTITIES, str(tmp_path / factor)]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.split())
    assert len(found[0]) == len(PATHS_TO_SCALE)
    stale = [name for name, old, new in zip(sorted(PATHS_TO_SCALE), *found, strict=True) if old == new]
    assert not stale


def test_modules_that_import_each_other_are_described_once(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(12)]
    (tmp_path / "1" / "pkg").mkdir(parents=True)
    for name in names:
        text = f"from . import {', '.join(each for each in names if each != name)}\n"
        (tmp_path / "1" / "pkg" / f"{name}.py").write_text(text)
    (tmp_path / "1" / "pkg" / "__init__.py").write_text(f"from . import {', '.join(names)}\n")
    (tmp_path / "1" / "app.py").write_text(f"import pkg\n{HELPER}def f(b): return helper(pkg, b)\n")
    command = [sys.executable, "-B", "-c", IDENTITIES, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.strip()


def test_a_program_has_the_functions_of_one_that_imports_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(AS_PROGRAM)
    ways = ["program.py"], ["-m", "program"], ["-c", "import program; program.show()"]
    shown = [subprocess.run([sys.executable, *way], cwd=tmp_path, capture_output=True, check=True) for way in ways]
    assert len({each.stdout for each in shown}) == 1
