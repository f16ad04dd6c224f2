"""The list of every ConfigError of the code with a test that raises it, `tests/config_errors.txt`.

`python tests/support/config_errors.py TEST ...` runs these tests, adds the errors that they raise to the list, and
drops those that the code no longer has. It exits with 1 if an error is not listed then, and prints the error.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = ROOT / "tests" / "config_errors.txt"
PACKAGES = ("cache", "dataload", "samplers", "benchmarks")

Error = tuple[str, str]  # module and message, with the code of its values in braces


def errors_in(path: Path, module: str) -> dict[range, Error]:
    """Return the ConfigErrors of a module by their lines."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigError":
            found[range(node.lineno, (node.end_lineno or node.lineno) + 1)] = module, _text(node.args[0])
    return found


def errors_of_the_code() -> dict[Path, dict[range, Error]]:
    """Return the ConfigErrors of all packages, by file and lines. Links to other folders are not followed."""
    paths = (path for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path.parent.resolve() == path.parent)
    return {path: errors_in(path, str(path.relative_to(ROOT))) for path in sorted(paths)}


def _text(message: ast.expr) -> str:
    if isinstance(message, ast.Constant):
        return " ".join(str(message.value).split())
    if not isinstance(message, ast.JoinedStr):
        return f"{{{ast.unparse(message)}}}"
    parts = (
        f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else str(ast.literal_eval(part))
        for part in message.values
    )
    return " ".join("".join(parts).split())


def read() -> dict[Error, str]:
    """Return the test that raises each error of the list."""
    found: dict[Error, str] = {}
    module = message = ""
    for line in LIST.read_text().splitlines() if LIST.exists() else ():
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            module = line
        elif depth == 2:
            message = line.strip()
        else:
            found[module, message] = line.strip()
    return found


def write(tests: dict[Error, str]) -> None:
    """Write the list: modules, messages and tests, each further indented."""
    lines, last = [], ""
    for (module, message), test in sorted(tests.items()):
        lines += [module] if module != last else []
        lines += [f"  {message}", f"    {test}"]
        last = module
    LIST.write_text("\n".join(lines) + "\n")


def raised_by(tests: Sequence[str]) -> dict[Error, set[str]]:
    """Run tests and return the tests that raised each error, also in processes that they started."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        path = [str(ROOT / "tests/support/config_error_recorder"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "CONFIG_ERRORS": str(notes)}
        command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "slow or not slow", "-p", "no:cacheprovider"]
        subprocess.run([*command, *tests], env=environment, cwd=ROOT, check=False, stdout=sys.stderr)
        lines = notes.read_text().splitlines()
    code = errors_of_the_code()
    found: dict[Error, set[str]] = defaultdict(set)
    for file, number, test in (line.split("\t") for line in lines):
        for at, error in code.get(Path(file).resolve(), {}).items():
            if int(number) in at and test:
                found[error].add(test.partition("[")[0].partition(" ")[0])
    return found


def fewest(raised: dict[Error, set[str]]) -> dict[Error, str]:
    """Return one test for each error, few tests in all."""
    chosen: dict[Error, str] = {}
    while left := {error: tests for error, tests in raised.items() if error not in chosen and tests}:
        counts = defaultdict[str, int](int)
        for test in (test for tests in left.values() for test in tests):
            counts[test] += 1
        best = min(counts, key=lambda test: (-counts[test], test))
        chosen |= {error: best for error, tests in left.items() if best in tests}
    return chosen


def main() -> int:
    """Run tests and write the list. Return 1 if an error has no test."""
    code = {error for errors in errors_of_the_code().values() for error in errors.values()}
    listed = {error: test for error, test in read().items() if error in code}
    listed = fewest(raised_by(sys.argv[1:])) | listed
    write(listed)
    missing = code - listed.keys()
    print(*(f"{module}: {message}" for module, message in sorted(missing)), sep="\n")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
