"""Tests of child processes that answer requests: what ends them, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dataload.runtime import child_process
from dataload.runtime.child_process import ChildProcesses, ProcessDied, serve


def echo(descriptor: int) -> None:
    serve(descriptor, lambda hello: lambda request: hello + request)


def fails_to_start(descriptor: int) -> None:
    def start(hello: bytes) -> Callable[[bytes], bytes]:
        raise OSError(hello.decode())

    serve(descriptor, start)


def reads_nothing(descriptor: int) -> None:
    threading.Event().wait()


def fails_to_answer(descriptor: int) -> None:
    def answer(request: bytes) -> bytes:
        raise EOFError(request.decode())

    serve(descriptor, lambda _: answer)


def is_killed(descriptor: int) -> None:
    serve(descriptor, lambda _: lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[arg-type,return-value]


def exits(descriptor: int) -> None:
    serve(descriptor, lambda _: lambda _: os._exit(3))  # type: ignore[arg-type,return-value]


def running(program: Callable[[int], None]) -> ChildProcesses:
    return ChildProcesses(1, f"{__name__}:{program.__name__}", b"hello ")


OUT_OF_FILES = """
import os, resource, threading
from dataload.runtime import child_process
looks, runs = threading.Semaphore(0), child_process._runs
def look(process):
    looks.release()
    return runs(process)
child_process._runs, child_process.LOOK_SECONDS = look, 0.01
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
try:
    while True:
        os.dup(0)
except OSError:
    pass
child_process.end_with(os.getppid())
for _ in range(3):
    looks.acquire()
os._exit(3)
"""


def test_a_process_without_free_files_does_not_take_its_parent_for_dead() -> None:
    assert subprocess.run([sys.executable, "-c", OUT_OF_FILES], check=False).returncode == 3


def test_a_request_is_answered() -> None:
    processes = running(echo)
    assert [processes.submit(request).result(200) for request in (b"a", b"b")] == [b"hello a", b"hello b"]
    assert len(processes.running) == 1


def test_a_process_that_died_while_it_had_no_work_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "ATTEMPTS", 1)  # No request may fail for it.
    processes = running(echo)
    processes.submit(b"a").result(200)
    [child] = processes.running
    child.process.kill()
    child.process.wait(200)
    assert processes.submit(b"b").result(200) == b"hello b"
    assert len(processes.running) == 1


def test_a_long_first_message_holds_up_no_other_process() -> None:
    processes = ChildProcesses(1, f"{__name__}:{reads_nothing.__name__}", bytes(16 << 20))
    child = processes._take()  # It does not wait for the process to read.
    child.process.kill()
    assert processes._end(child)


@pytest.mark.parametrize(("program", "error"), [(fails_to_start, "OSError"), (fails_to_answer, "EOFError")])
def test_an_error_of_the_program_is_no_end_of_the_connection(
    program: Callable[[int], None],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The process ends with a status and a traceback, not as if its parent had closed the connection."""
    monkeypatch.setattr(child_process, "EXIT_SECONDS", 60)  # A process that is killed has another status.
    processes = running(program)
    with pytest.raises(ProcessDied, match=r"exit status 1\)"):
        processes.submit(b"request").result(200)
    assert f"{error}: " in capfd.readouterr().err
    assert processes.running == []


def test_a_process_that_exits_is_not_replaced() -> None:
    processes = running(exits)
    with pytest.raises(ProcessDied, match=r"a process ended during the call \(exit status 3\)"):
        processes.submit(b"request").result(200)


def test_a_process_whose_answer_cannot_be_received_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise there would be one process more after each such call."""
    processes, call, children = running(echo), child_process._Server.call, []

    def too_large(child: Any, request: bytes) -> bytes:
        children.append(child)
        call(child, request)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(child_process._Server, "call", too_large)
        with pytest.raises(MemoryError):
            processes.submit(b"large").result(200)
    assert processes.running == []
    assert children[0].process.poll() is not None
    assert processes.submit(b"small").result(200) == b"hello small"
    assert len(processes.running) == 1


def test_the_end_of_a_process_is_noticed_while_others_hold_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function may start children of its own, which inherit it."""
    held, start = list[int](), child_process.start_process

    def start_process(program: str, descriptor: int) -> Any:
        held.append(os.dup(descriptor))
        return start(program, descriptor)

    monkeypatch.setattr(child_process, "start_process", start_process)
    monkeypatch.setattr(child_process, "LOOK_SECONDS", 0.01)
    processes = running(is_killed)
    try:
        with pytest.raises(ProcessDied, match=r"exit status -9, -9, -9\)"):
            processes.submit(b"request").result(200)
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert processes.running == []
