"""Note where each ConfigError is raised, in the file that CONFIG_ERRORS names.

Python imports this module when it starts if PYTHONPATH names its folder, so the processes that a test starts note
theirs, too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from dataload.errors import ConfigError


def _noted(error: ConfigError, *args: Any) -> None:
    Exception.__init__(error, *args)
    raised = sys._getframe(1)
    line = f"{raised.f_code.co_filename}\t{raised.f_lineno}\t{os.environ.get('PYTEST_CURRENT_TEST', '')}\n"
    with open(os.environ["CONFIG_ERRORS"], "a") as notes:  # noqa: PTH123 (a line is one write, also among processes)
        notes.write(line)


ConfigError.__init__ = _noted  # type: ignore[method-assign]
