"""Every ConfigError of the code has a test that raises it."""

from __future__ import annotations

from pathlib import Path

import config_errors
import pytest

ADVICE = "run tests/support/config_errors.py with the test that raises it"


def test_every_error_is_listed_with_a_test() -> None:
    code = {error for errors in config_errors.errors_of_the_code().values() for error in errors.values()}
    listed = config_errors.read()
    assert code - listed.keys() == set(), ADVICE
    assert listed.keys() - code == set(), "the list has errors that the code does not have"
    for test in listed.values():
        file, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (config_errors.ROOT / file).read_text(), test


def test_errors_are_found_with_their_messages(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('raise ConfigError(\n    f"{name}={size!r} is "\n    "wrong"\n)\nraise ConfigError("a  b")\n')
    assert config_errors.errors_in(path, "module.py") == {
        range(1, 5): ("module.py", "{name}={size} is wrong"),
        range(5, 6): ("module.py", "a b"),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_listed_tests_raise_the_errors() -> None:
    listed = config_errors.read()
    raised = config_errors.raised_by(sorted(set(listed.values())))
    assert [(error, test) for error, test in listed.items() if test not in raised.get(error, ())] == []
