"""The identity of a function covers objects and classes of the project that it refers to."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from dataload.errors import ConfigError
from dataload.mapping.identity import identity

OBJECTS = {
    "private attribute of a class": "S = $\nclass D:\n    _k = S\n    def __call__(s, b): return s._k\nf = D()",
    "attribute of a class set later": "class D:\n    k = 0\n    def __call__(s, b): return s.k\nD.k = $\nf = D()",
    "value of an enum": "import enum\nS = $\nclass M(enum.Enum):\n    A = S\ndef f(b): return b['x'] * M.A.value",
    "factory": "import collections\nV = collections.defaultdict(lambda: $)\ndef f(b): return V[b]",
    "method of a dict": "class V(dict):\n    def enc(s): return $\nv = V()\ndef f(b): return v.enc()",
    "method of a list": "class V(list):\n    def enc(s): return $\nv = V()\ndef f(b): return v.enc()",
    "method of a string": "class V(str):\n    def enc(s): return $\nv = V()\ndef f(b): return v.enc()",
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
    "attribute of a metaclass": "class M(type):\n    k = $\nclass D(metaclass=M): pass\ndef f(b): return D.k",
}


def module(folder: Path, text: str) -> ModuleType:
    """Return a new module `project` with this text."""
    path = folder / "project.py"
    path.write_text(text)
    sys.modules["project"] = made = ModuleType("project")
    made.__file__ = str(path)
    exec(compile(text, str(path), "exec", dont_inherit=True), vars(made))
    return made


@pytest.fixture(autouse=True)
def _no_project():
    yield
    sys.modules.pop("project", None)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_change_of_an_object_is_noticed(tmp_path: Path, name: str) -> None:
    first, same, other = (identity(module(tmp_path, OBJECTS[name].replace("$", value)).f) for value in "112")
    assert first == same != other


def test_tensors_that_numpy_cannot_hold_need_a_version(tmp_path: Path) -> None:
    text = "import torch\nT = torch.tensor([1], dtype=torch.bfloat16)\ndef f(b): return T"
    with pytest.raises(ConfigError, match="version="):
        identity(module(tmp_path, text).f)
