"""The commit of results is that of the code which was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dataload import benchmarks
from dataload.benchmarks.machine.circumstances import conditions


def commit() -> str:
    found: str = conditions(None)["commit"]
    return found


def test_the_commit_is_the_last_one_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    monkeypatch.setattr(benchmarks, "__file__", str(tmp_path / "benchmarks/__init__.py"))
    assert commit() == "unknown"
    git("init")
    write("dataload/code.py", "1")
    git("add", ".")
    git("commit", "-m", "code")
    first = commit()
    write("docs/page.md", "a")
    write("benchmarks/results/latest.json", "{}")
    git("add", ".")
    git("commit", "-m", "results")
    assert commit() == first
    write("dataload/code.py", "2")
    second = commit()
    assert second.startswith(f"{first}+")
    write("dataload/code.py", "3")
    assert commit() not in (first, second)
    git("commit", "-a", "-m", "more code")
    assert "+" not in commit()
    assert commit() != first
