"""What tests of reports and of `top` share."""

from __future__ import annotations

import sys

import pytest

from dataload.cli import app


@pytest.fixture
def dataload(monkeypatch, capsys):
    """Run the command in this process. Return its exit code, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["dataload", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        return ended.value.code, *capsys.readouterr()

    return run
