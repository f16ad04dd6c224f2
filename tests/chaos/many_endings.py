"""A hundred programs of each kind that exit in the middle of an epoch, and the time of the slowest exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_endings import ENDS, PROGRAM, origin  # noqa: F401 (a fixture)

from dataload.benchmarks.origin import Origin

TIMES = 100


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("end", ["interrupted", "error", "the end of the program", "no loader"])
def test_it_ends_and_leaves_no_process(origin: Origin, tmp_path: Path, end: str, filled: bool) -> None:  # noqa: F811
    program = PROGRAM.format(end=ENDS[end], filled=filled)
    slowest = 0.0
    for number in range(TIMES // 4):
        origin.behave(stalled=0.0)
        command = [sys.executable, "-c", program, origin.endpoint_url, str(tmp_path / f"cache-{number}")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as trainer:
            assert trainer.stdout.readline() == "made\n", trainer.stderr.read()
            started = psutil.Process(trainer.pid).children(recursive=True)
            origin.behave(stalled=1.0)
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            assert trainer.stdout.readline() == "looping\n", trainer.stderr.read()
            begun = time.monotonic()
            if end == "interrupted":
                trainer.send_signal(signal.SIGINT)
            trainer.communicate(timeout=15)
            assert trainer.returncode == {"error": 1, "interrupted": -signal.SIGINT}.get(end, 0)
            slowest = max(slowest, time.monotonic() - begun)
        psutil.wait_procs(started, timeout=5)
        assert not [process for process in started if process.is_running()]
    sys.stderr.write(f"{end}, filled={filled}: the slowest of {TIMES // 4} exited after {slowest:.2f} s\n")
