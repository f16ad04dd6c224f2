"""Runs `dataload convert` with small files and row groups, and dies by SIGKILL at the N-th change of a file.

python converting.py N SOURCE DESTINATION [OPTIONS]; N = 0: it does not die
"""

from __future__ import annotations

import os
import signal
import sys

from dataload.conversion import shuffled, writer

if "--torchvision" in sys.argv:
    sys.argv.remove("--torchvision")
    import torchvision_stub  # noqa: F401


def main() -> None:
    writer.ROW_GROUP_BYTES, writer.FILE_BYTES = 1 << 14, 1 << 16
    shuffled.BUCKET_BYTES, shuffled.DEALT_BYTES = 1 << 16, 1 << 16
    left, *words = sys.argv[1:]
    fatal, folder = int(left), words[1]
    changes = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        changed = event in ("os.rename", "os.truncate") or (event == "open" and str(arguments[1]) not in ("r", "rb"))
        if changed and any(folder in str(argument) or event == "os.truncate" for argument in arguments):
            changes += 1
            if changes == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    sys.argv = ["dataload", "convert", *words]
    from dataload.cli import app

    try:
        app.main()
    finally:
        sys.stderr.write(f"changes {changes}\n")


if __name__ == "__main__":
    main()
