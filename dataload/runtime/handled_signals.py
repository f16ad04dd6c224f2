"""Which signals a process handles."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def is_handled(number: int) -> bool | None:
    """Return whether any code of this process handles a signal; None: the kernel does not tell, as gVisor's does not.

    `signal.getsignal` knows Python's handlers only.
    """
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(errors="replace")
        return bool(int(status.partition("\nSigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
    return None
