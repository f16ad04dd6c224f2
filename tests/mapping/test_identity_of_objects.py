"""The identity of a function covers objects and classes of the project that it refers to."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest

from dataload.errors import ConfigError
from dataload.mapping.identity import _Walk, identity
from dataload.mapping.sources import Sources
from dataload.mapping.stage import UserFunction

OBJECTS = {
    "private attribute of a class": "S = $\nclass D:\n    _k = S\n    def __call__(s, b): return s._k\nf = D()",
    "attribute of a class set later": "class D:\n    k = 0\n    def __call__(s, b): return s.k\nD.k = $\nf = D()",
    "private slot of a base": (
        "class _B:\n    __slots__ = ('__k',)\n    def __init__(s, k): s.__k = k\nclass D(_B):\n    __slots__ = ()\n"
        "    def __call__(s, b): return s._B__k\nf = D($)"
    ),
    "end of a long pattern of bytes": "import re\nR = re.compile(b'a' * 250 + b'$')\ndef f(b): return R.match(b)",
    "value of an enum": "import enum\nS = $\nclass M(enum.Enum):\n    A = S\ndef f(b): return b['x'] * M.A.value",
    "factory": "import collections\nV = collections.defaultdict(lambda: $)\ndef f(b): return V[b]",
    "method of a dict": "class V(dict):\n    def enc(s): return $\nv = V()\ndef f(b): return v.enc()",
    "method of a list": "class V(list):\n    def enc(s): return $\nv = V()\ndef f(b): return v.enc()",
    "method of a string": "class V(str):\n    def enc(s): return $\nv = V()\ndef f(b): return v.enc()",
    "number that shows itself in its own way": (
        "class V(float):\n    def __repr__(s): return 'V'\nv = V($)\ndef f(b): return b * v"
    ),
    "method that wraps a function of an extension": (
        "import functools\nclass D:\n    @functools.wraps(len, assigned=())\n    def size(s, b): return $\nd = D()\n"
        "def f(b): return d.size(b)"
    ),
    "method of a named tuple": (
        "from typing import NamedTuple\nclass C(NamedTuple):\n    k: int\n    def enc(s): return $\nc = C(3)\n"
        "def f(b): return c.enc()"
    ),
    "attribute of a function": "def f(b): return b['x'] * f.k\nf.k = $",
    "factory of a dataclass": (
        "from dataclasses import dataclass, field\nS = $\n@dataclass\nclass C:\n"
        "    s: list = field(default_factory=lambda: [S])\ndef f(b): return C().s"
    ),
    "default of a dataclass": (
        "from dataclasses import dataclass\nS = $\n@dataclass\nclass C:\n    s: int = S\ndef f(b): return C().s"
    ),
    "default of a dataclass with slots": (
        "from dataclasses import dataclass\nS = $\n@dataclass(slots=True)\nclass C:\n    k: int\n    s: int = S\n"
        "def f(b): return C(0).s"
    ),
    "default of a named tuple": (
        "from typing import NamedTuple\nS = $\nclass C(NamedTuple):\n    k: int\n    s: int = S\n"
        "def f(b): return C(0).s"
    ),
    "default of a model": (
        "import pydantic\nS = $\nclass C(pydantic.BaseModel):\n    k: int\n    s: int = S\ndef f(b): return C(k=0).s"
    ),
    "factory of a model": (
        "import pydantic\nS = $\nclass C(pydantic.BaseModel):\n    s: int = pydantic.Field(default_factory=lambda: S)\n"
        "def f(b): return C().s"
    ),
    "private default of a model": (
        "import pydantic\nS = $\nclass C(pydantic.BaseModel):\n    _s: int = pydantic.PrivateAttr(S)\n"
        "def f(b): return C()._s"
    ),
    "call of a class, set later": (
        "class D: pass\ndef call(s, b): return $\nD.__call__ = call\nd = D()\ndef f(b): return d(b)"
    ),
    "call of a class that is an object": (
        "class C:\n    def __call__(s, b): return $\nclass D:\n    __call__ = C()\nd = D()\ndef f(b): return d(b)"
    ),
    "constructor": "class D:\n    def __init__(s): s.k = $\ndef f(b): return D().k",
    "constructor of a base, a helper": (
        "def k(): return $\nclass B:\n    def __init__(s): s.k = k()\nclass D(B): pass\ndef f(b): return D().k"
    ),
    "version of a class": "S = $\nclass D:\n    __version__ = S\ndef f(b): return D.__version__",
    "attribute of a metaclass": "class M(type):\n    k = $\nclass D(metaclass=M): pass\ndef f(b): return D.k",
    "cached static method": (
        "import functools\nS = $\ndef g(): return S\nclass D:\n    @staticmethod\n    @functools.cache\n"
        "    def k(): return g()\ndef f(b): return D.k()"
    ),
    "cached property": (
        "import functools\nS = $\ndef g(): return S\nclass D:\n    @property\n    @functools.cache\n"
        "    def k(s): return g()\ndef f(b): return D().k"
    ),
    "partial as a static method": (
        "import functools\ndef g(b, k): return k\nclass D: pass\nD.g = staticmethod(functools.partial(g, k=$))\n"
        "def f(b): return D.g(b)"
    ),
    "class as a static method": (
        "class C:\n    def __init__(s, b): s.k = $\nclass D: pass\nD.g = staticmethod(C)\ndef f(b): return D.g(b).k"
    ),
    "object as a property": (
        "class C:\n    def __init__(s, k): s.k = k\n    def __call__(s, d): return s.k\nclass D: pass\n"
        "D.k = property(C($))\ndef f(b): return D().k"
    ),
    "item getter as a property": (
        "import operator\nclass D(tuple): pass\nD.k = property(operator.itemgetter($))\ndef f(b): return D(b).k"
    ),
    "property of a kind of one's own": (
        "class P(property):\n    def __get__(s, d, kind=None): return $\nclass D:\n    @P\n    def k(s): pass\n"
        "def f(b): return D().k"
    ),
    "class method that is a property": (
        "S = $\ndef g(): return S\nclass D:\n    @classmethod\n    @property\n    def k(c): return g()\n"
        "def f(b): return D.k"
    ),
    "attribute of an enum that is no member": (
        "import enum\nclass M(enum.Enum):\n    A = 1\nM.k = $\ndef f(b): return M.k"
    ),
    "property of an enum": (
        "import enum\nS = $\ndef g(): return S\nclass M(enum.Enum):\n    A = 1\n    @enum.property\n"
        "    def k(s): return g()\ndef f(b): return M.A.k"
    ),
    "other name of a member of an enum": (
        "import enum\nS = $\nclass M(enum.Enum):\n    A = 1\n    C = 2\n    B = S\ndef f(b): return M.B"
    ),
    "validator in an annotation of a model": (
        "import pydantic, typing\ndef h(v): return $\nclass C(pydantic.BaseModel):\n"
        "    k: typing.Annotated[int, pydantic.AfterValidator(h)] = 1\ndef f(b): return C(k=b).k"
    ),
    "validator deep in an annotation of a model": (
        "import pydantic, typing\ndef h(v): return $\nclass C(pydantic.BaseModel):\n"
        "    k: dict[str, typing.Annotated[int, pydantic.AfterValidator(h)] | None]\ndef f(b): return C(k=b).k"
    ),
    "bound of a field of a model": (
        "import pydantic\nS = $\nclass C(pydantic.BaseModel):\n    k: int = pydantic.Field(1, ge=S)\n"
        "def f(b): return C(k=b).k"
    ),
    "model in a model": (
        "import pydantic\nclass I(pydantic.BaseModel):\n    z: int = $\nclass C(pydantic.BaseModel):\n    i: I\n"
        "def f(b): return C(**b).i.z"
    ),
    "model in a model that is defined later": (
        "import pydantic\nclass C(pydantic.BaseModel):\n    i: 'I'\nclass I(pydantic.BaseModel):\n    z: int = $\n"
        "def f(b): return C(**b).i.z"
    ),
    "enum in a model": (
        "import enum, pydantic\nS = $\nclass E(enum.Enum):\n    A = S\nclass C(pydantic.BaseModel):\n    e: E\n"
        "def f(b): return C(e=b).e"
    ),
    "type of a field of a dataclass": (
        "import dataclasses\nclass I:\n    z = $\n@dataclasses.dataclass\nclass C:\n    i: I\n"
        "def f(b): return dataclasses.fields(C)[0].type().z"
    ),
    "metadata of a field of a dataclass": (
        "import dataclasses\nM = {'a': $}\n@dataclasses.dataclass\nclass C:\n"
        "    k: int = dataclasses.field(metadata=M)\ndef f(b): return dataclasses.fields(C)[0].metadata"
    ),
    "metadata of an annotation": (
        "import dataclasses, typing\nM = $\n@dataclasses.dataclass\nclass C:\n    k: typing.Annotated[int, M]\n"
        "def f(b): return typing.get_type_hints(C, include_extras=True)"
    ),
    "default of attrs": "import attrs\nS = $\n@attrs.define\nclass C:\n    k: int = S\ndef f(b): return C().k",
    "factory of attrs": (
        "import attrs\ndef g(): return $\n@attrs.frozen\nclass C:\n    k: int = attrs.field(factory=g)\n"
        "def f(b): return C().k"
    ),
    "converter of attrs": (
        "import attrs\ndef g(v): return $\n@attrs.define\nclass C:\n    k: int = attrs.field(converter=g)\n"
        "def f(b): return C(b).k"
    ),
    "validator of attrs": (
        "import attrs\ndef g(c, a, v): assert v > $\n@attrs.define\nclass C:\n    k: int = attrs.field(validator=g)\n"
        "def f(b): return C(b).k"
    ),
    "object of attrs": "import attrs\n@attrs.define\nclass C:\n    k: int\nc = C($)\ndef f(b): return c.k",
    "text of an enum": "import enum\nS = '$'\nclass M(enum.StrEnum):\n    A = S\ndef f(b): return M(b)",
    "member of a protocol": (
        "import typing\nclass P(typing.Protocol):\n    def g(s): return $\nclass C(P): pass\ndef f(b): return C().g()"
    ),
    "named tuple that a call makes": (
        "import collections\nC = collections.namedtuple('C', 'k l'.split()[::3 - 2 * $])\ndef f(b): return C(*b)"
    ),
    "value of a named tuple": (
        "import collections\nC = collections.namedtuple('C', 'k')\nc = C($)\ndef f(b): return c.k"
    ),
    "enum that a call makes": "import enum\nM = enum.Enum('M', {'A': $})\ndef f(b): return M.A.value",
    "class that a call makes": "C = type('C', (), {'k': $})\ndef f(b): return C.k",
    "function for a type": (
        "import functools\n@functools.singledispatch\ndef g(x): return 0\n@g.register\ndef _(x: int): return $\n"
        "def f(b): return g(b)"
    ),
    "partial as a method": (
        "import functools\nclass C:\n    def g(s, k): return k\n    h = functools.partialmethod(g, $)\n"
        "def f(b): return C().h()"
    ),
    "arguments of a program": "import argparse\nA = argparse.Namespace(k=$)\ndef f(b): return A.k",
    "simple namespace": "import types\nA = types.SimpleNamespace(k=$)\ndef f(b): return A.k",
    "queue": "import collections\nQ = collections.deque([$])\ndef f(b): return Q[0]",
    "length of a queue": "import collections\nQ = collections.deque(maxlen=$)\ndef f(b): return Q.maxlen",
    "type of Arrow": "import pyarrow as pa\nT = pa.list_(pa.int64(), $)\ndef f(b): return pa.array(b, T)",
    "metadata of a type of Arrow": (
        "import pyarrow as pa\nT = pa.struct([pa.field('a', pa.int64(), metadata={'k': '$'})])\n"
        "def f(b): return T.field(0).metadata"
    ),
    "schema of Arrow": "import pyarrow as pa\nT = pa.schema([], {'k': '$'})\ndef f(b): return T.metadata",
    "type with arguments": "import typing\nT = list[typing.Literal[$] | int]\ndef f(b): return typing.get_args(T)",
    "function without gradients": "import torch\n@torch.no_grad()\ndef f(b): return $",
    "function in inference mode": "import torch\n@torch.inference_mode(bool($ - 1))\ndef f(b): return b",
    "function that locks": "import threading\nL = threading.Lock()\ndef f(b):\n    with L: return $",
    "callable that has any attribute": (
        "class D(dict):\n    def __getattr__(s, name): return s[name]\n    def __call__(s, b): return s.k\nf = D(k=$)"
    ),
    "function that its wrapper finds by an attribute": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def w(b): return 2 * w.__wrapped__(b)\n"
        "    return w\n@twice\ndef f(b): return $"
    ),
}
MEMBERS = {
    "version of a module": ("__version__ = $", "helpers.__version__"),
    "members by their names": ("scale = $", "helpers.__dict__['scale']"),
    "version of a module that is passed on": ("__version__ = $", "vars(helpers)['__version__']"),
    "members of any name": ("def __getattr__(name): return $", "helpers.scale"),
    "a helper of members of any name": ("def k(): return $\ndef __getattr__(name): return k()", "helpers.scale"),
}
MODELS = """
import pydantic
class Model(pydantic.BaseModel):
    size: int = 2
    _cache: dict = pydantic.PrivateAttr(default_factory=dict)
def f(b): return Model().size
"""


def module(folder: Path, text: str, name: str = "project") -> ModuleType:
    """Return a new module with this text."""
    path = folder / f"{name}.py"
    path.write_text(text)
    sys.modules[name] = made = ModuleType(name)
    made.__file__ = str(path)
    exec(compile(text, str(path), "exec", dont_inherit=True), vars(made))
    return made


@pytest.fixture(autouse=True)
def _no_project():
    yield
    for name in ("project", "helpers"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_change_of_an_object_is_noticed(tmp_path: Path, name: str) -> None:
    for library in ("attrs", "pydantic"):
        if f"import {library}" in OBJECTS[name]:
            pytest.importorskip(library)
    first, same, other = (identity(module(tmp_path, OBJECTS[name].replace("$", value)).f) for value in "112")
    assert first == same != other


@pytest.mark.parametrize(
    "name",
    [
        "factory of a dataclass",
        "default of a dataclass with slots",
        "default of a model",
        "type of a field of a dataclass",
        "validator deep in an annotation of a model",
        "model in a model that is defined later",
        "converter of attrs",
        "member of a protocol",
        "text of an enum",
        "enum that a call makes",
        "value of a named tuple",
        "type with arguments",
        "function without gradients",
    ],
)
def test_a_class_of_a_script_has_the_same_identity_after_its_journey(tmp_path: Path, name: str) -> None:
    """Its fields without a default have another object as a mark there."""
    for library in ("attrs", "pydantic"):
        if f"import {library}" in OBJECTS[name]:
            pytest.importorskip(library)
    script = module(tmp_path, OBJECTS[name].replace("$", "1"))
    cloudpickle.register_pickle_by_value(script)
    try:
        function = UserFunction.of(script.f, None)
        assert pickle.loads(pickle.dumps(function)).digest == function.digest
    finally:
        cloudpickle.unregister_pickle_by_value(script)


def test_a_model_that_is_complete_when_it_is_used_stays_the_same(tmp_path: Path) -> None:
    """Its members change when the class of a forward reference exists."""
    pytest.importorskip("pydantic")
    text = "import pydantic\nclass C(pydantic.BaseModel):\n    d: 'D'\nclass D(pydantic.BaseModel):\n    k: int = 1\n"
    made = module(tmp_path, f"{text}def f(b): return C(d=D()).d.k")
    before = identity(made.f)
    assert made.f(0) == 1
    assert identity(made.f) == before


def test_a_flag_that_makes_a_value_when_it_is_called_stays_the_same(tmp_path: Path) -> None:
    made = module(tmp_path, "import enum\nclass M(enum.Flag):\n    A = 1\n    B = 2\ndef f(b): return M(b)")
    before = identity(made.f)
    made.f(3)
    assert identity(made.f) == before


WITHOUT_SOURCE = {
    "__init__ has no source": (
        "import dataclasses, functools\n@dataclasses.dataclass\nclass D: pass\ninit = D.__init__\n"
        "@functools.wraps(init)\ndef wrapped(s): s.k = 1\nD.__init__ = wrapped\ndef f(b): return D().k"
    ),
    "enc has no source": (
        "names = {}\nexec('def enc(s): return 1', names)\nclass D:\n    enc = names['enc']\nd = D()\n"
        "def f(b): return d.enc()"
    ),
    "'cbrt' of project.f is compiled code of the project": "from math import cbrt\ndef f(b): return cbrt(b)",
}


@pytest.mark.parametrize("problem", WITHOUT_SOURCE)
def test_code_of_the_project_without_a_source_needs_a_version(
    tmp_path: Path, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math.cbrt, "__module__", "an_extension_of_the_project")
    with pytest.raises(ConfigError, match=f"{problem}.* Pass version="):
        identity(module(tmp_path, WITHOUT_SOURCE[problem]).f)


@pytest.mark.parametrize(
    "text",
    [
        "globals()['b']",
        "eval('b')",
        "exec('b')",
        "__import__('helpers').k",
        "importlib.import_module('helpers').k",
        "(lambda: eval('b'))()",
    ],
)
def test_a_function_that_may_read_anything_needs_a_version(tmp_path: Path, text: str) -> None:
    made = module(tmp_path, f"import importlib\ndef g(b): return {text}\ndef f(b): return g(b)")
    with pytest.raises(ConfigError, match=r"project\.g calls \w+, which may read anything\. Pass version="):
        identity(made.f)
    assert identity(made.f, "1")


def test_a_function_of_the_project_may_have_the_name_of_a_reader(tmp_path: Path) -> None:
    assert identity(module(tmp_path, "def eval(b): return b\ndef f(b): return eval(b), b.exec()").f)


IMPORTS = {
    "module of the project that raises an error": "import broken",
    "package without this module": "import numpy.no_module",
    "package that is not installed": "import no_package.of_this_name",
    "module of the same package, in a script": "from . import other",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_an_import_in_a_function_may_fail(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    text = f"def f(b):\n    try:\n        {IMPORTS[name]}\n    except Exception:\n        return b"
    assert identity(module(tmp_path, text).f)


IMPORT = "import pytest, wave, azure.storage.blob"  # of the last, two are namespaces
IDENTITY = """
from dataload.mapping.identity import identity
import app
print(identity(app.f), {"pytest", "wave", "azure.storage.blob"} & sys.modules.keys())
"""


@pytest.mark.slow
def test_installed_packages_count_without_their_import(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(f"def f(b):\n    {IMPORT}\n")
    paths = f"import sys\nsys.path[:] = {[str(tmp_path), *sys.path]}\n"
    commands = [[sys.executable, "-c", paths + before + IDENTITY] for before in ("", IMPORT)]
    found = [subprocess.check_output(command, text=True, timeout=200).split(maxsplit=1) for command in commands]
    assert found[0] == [found[1][0], "set()\n"]


@pytest.mark.parametrize("name", MEMBERS)
def test_a_change_of_a_member_with_underscores_is_noticed(tmp_path: Path, name: str) -> None:
    text, use = MEMBERS[name]
    found = []
    for value in "112":
        module(tmp_path, text.replace("$", value), "helpers")
        found.append(identity(module(tmp_path, f"import helpers\ndef f(b): return {use}").f))
    assert found[0] == found[1] != found[2]


def merges() -> dict[tuple[str, str], int]:
    """Return a table of pairs like that of a byte pair encoding."""
    return {(str(n), "b"): n for n in range(2000)}


@pytest.mark.variants
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {str(n): n for n in range(2000)}, lambda value: value.update({"5": True})),
        (lambda: {str(n): n for n in range(2000)}, lambda value: value.update({"6": value.pop("6")})),
        (lambda: [float(n) for n in range(2000)], lambda value: value.__setitem__(1, 1)),
        (lambda: {f"w{n}" for n in range(2000)}, lambda value: value.add("new")),
        (lambda: [[n] for n in range(2000)], lambda value: value[5].append(6)),
        (merges, lambda value: value.update({("5", "b"): True})),
        (merges, lambda value: value.update({("6", "b"): value.pop(("6", "b"))})),
        (lambda: {str(n): [1, 2] for n in range(2000)}, lambda value: value["5"].__setitem__(0, 1.0)),
        (lambda: [(0.0, n) for n in range(2000)], lambda value: value.__setitem__(5, (-0.0, 5))),
        (lambda: [(b"a", n) for n in range(2000)], lambda value: value.__setitem__(5, (bytearray(b"a"), 5))),
        (lambda: [[n] for n in range(2000)], lambda value: value.__setitem__(5, (5,))),
        (lambda: [{n} for n in range(2000)], lambda value: value[5].add("new")),
        (lambda: [np.zeros(1), *range(2000)], lambda value: value[0].fill(1)),
        (lambda: [1.5, *range(2000)], lambda value: value.__setitem__(0, np.float64(1.5))),
    ],
)
def test_a_change_of_a_large_collection_is_noticed(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    value, other = make(), make()
    kept = Sources()

    def function(batch: Any) -> Any:
        return value

    before = identity(function, None, kept)
    assert identity(function, None, kept) == before
    change(value)
    changed = identity(function, None, kept)
    value = other
    assert identity(function, None, kept) == before != changed == identity_of_changed(other, change, function)


@pytest.mark.parametrize(
    "make", [merges, lambda: [*merges()], lambda: {str(n): [n, {n: None}] for n in range(2000)}, lambda: {*merges()}]
)
def test_a_large_collection_is_described_once(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    value, kept, described, describe = make(), Sources(), list[Any](), _Walk.describe
    monkeypatch.setattr(_Walk, "describe", lambda walk, each, at: (described.append(each), describe(walk, each, at))[1])

    def function(batch: Any) -> Any:
        return value

    before, first = identity(function, None, kept), len(described)
    assert identity(function, None, kept) == before
    assert len(described) - first < 50 < first


def identity_of_changed(value: Any, change: Callable[[Any], Any], function: Any) -> str:
    change(value)
    return identity(function)


def test_the_path_of_a_module_does_not_count(tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        module(folder, "", "helpers")
        found.append(identity(module(folder, "import helpers\ndef f(b): return vars(helpers)").f))
    assert found[0] == found[1]


def test_what_libraries_set_in_classes_does_not_count(tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    assert identity(module(tmp_path, MODELS).f)


def test_a_warning_changes_nothing(tmp_path: Path) -> None:
    helpers = module(tmp_path, "import warnings\ndef g(b): warnings.warn('slow', stacklevel=1)", "helpers")
    made = module(tmp_path, "import helpers\ndef apply(module, b): module.g(b)\ndef f(b): apply(helpers, b)")
    before = identity(made.f)
    with pytest.warns(UserWarning, match="slow"):
        made.f({})
    assert "__warningregistry__" in vars(helpers)
    assert identity(made.f) == before


def test_tensors_that_numpy_cannot_hold_need_a_version(tmp_path: Path) -> None:
    text = "import torch\nT = torch.eye(2).to_sparse()\ndef f(b): return T"
    with pytest.raises(ConfigError, match="version="):
        identity(module(tmp_path, text).f)
