"""Find folders, modules, classes and functions that have grown too large to be read at once.

`python tests/support/limits.py [FOLDER ...]` prints each finding as `path:line: name: size` and exits with 1 if there
is one. `make check` runs it over the packages of the project. A function's docstring does not count.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("cache", "dataload", "samplers", "benchmarks")
MOST_MODULES = 16  # in a folder
MOST_LINES = {"module": 350, "class": 250, "function": 60}


def findings(folder: Path) -> Iterator[str]:
    """Yield what is too large in a folder and the folders below it. Links to other folders are not followed."""
    paths = sorted(path for path in folder.rglob("*.py") if path.parent.resolve() == path.parent)
    for parent, count in Counter(path.parent for path in paths).items():
        if count > MOST_MODULES:
            yield f"{parent}: {count} modules, more than {MOST_MODULES}"
    for path in paths:
        for line, kind, name, lines in sizes(path):
            if lines > MOST_LINES[kind]:
                yield f"{path}:{line}: {kind} {name}: {lines} lines, more than {MOST_LINES[kind]}"


def sizes(path: Path) -> Iterator[tuple[int, str, str, int]]:
    """Yield (line, kind, name, lines) of a module and of each class and function in it."""
    source = path.read_text()
    yield 1, "module", path.stem, len(source.splitlines())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, "class", node.name, _lines(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = 0 if ast.get_docstring(node) is None else _lines(node.body[0])
            yield node.lineno, "function", node.name, _lines(node) - docstring


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def main() -> int:
    """Print all findings. Return 1 if there are any."""
    folders = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT / name for name in PACKAGES]
    found = [line for folder in folders for line in findings(folder)]
    print(*found, sep="\n")
    print(f"{len(found)} findings", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
