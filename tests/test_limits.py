"""The check of sizes finds what is too large, and nothing else."""

from __future__ import annotations

from pathlib import Path

from limits import MOST_LINES, MOST_MODULES, findings

BODY = "    x = 0\n"


def test_what_is_as_large_as_allowed_passes(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "module.py").write_text("\n" * MOST_LINES["module"])
    (folder / "function.py").write_text(
        'def f():\n    """One.\n\n    Two.\n    """\n' + BODY * (MOST_LINES["function"] - 1)
    )
    (folder / "large.py").write_text("class A:\n" + BODY * (MOST_LINES["class"] - 1))
    for number in range(MOST_MODULES - 4):
        (folder / f"m{number}.py").touch()
    (tmp_path / "package" / "link").symlink_to(folder)
    assert list(findings(tmp_path)) == []


def test_what_is_too_large_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("\n" * (MOST_LINES["module"] + 1))
    (tmp_path / "function.py").write_text("\nasync def f():\n" + BODY * MOST_LINES["function"])
    (tmp_path / "large.py").write_text("class A:\n" + BODY * MOST_LINES["class"])
    for number in range(MOST_MODULES - 2):
        (tmp_path / f"m{number}.py").touch()
    (tmp_path / "m").mkdir()  # between the modules in the order of names
    (tmp_path / "m" / "other.py").touch()
    assert list(findings(tmp_path)) == [
        f"{tmp_path}: 17 modules, more than 16",
        f"{tmp_path}/function.py:2: function f: 61 lines, more than 60",
        f"{tmp_path}/large.py:1: class A: 251 lines, more than 250",
        f"{tmp_path}/module.py:1: module module: 351 lines, more than 350",
    ]
