"""Child processes: they end with their parent, answer requests, and are replaced when they die."""

from __future__ import annotations

import importlib
import os
import runpy
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dataload.runtime.executor import DaemonExecutor
from dataload.runtime.forks import ForkAware

ATTEMPTS = 3
EXIT_SECONDS = 0.3  # for a process to exit; then it is killed
LOOK_SECONDS = 1.0  # between two checks for the death of the process at the other end


class ProcessDied(Exception):
    """Several processes ended during one call, or none can be started. The message has the exit status or reason."""


class ChildProcesses(ForkAware):
    """At most `count` processes, which start on demand and end with this object.

    Args:
        count: Number of processes.
        program: The function that a process runs, as "module:name". It gets a descriptor for `serve`.
        hello: The first message to each process.

    Notes:
        Any thread may call it. A process exits when its parent has ended, however that ends. A forked child starts
        processes of its own.
    """

    def __init__(self, count: int, program: str, hello: bytes) -> None:
        self._count = count
        self._program = program
        self._hello = hello
        self._idle: list[_Server] = []
        self.running: list[_Server] = []
        self.after_fork_in_child()
        super().__init__()
        weakref.finalize(self, _end_all, self.running).atexit = False

    def after_fork_in_child(self) -> None:
        """Leave the processes to the parent."""
        for child in self.running:
            child.disown()
        self.running.clear()
        self._idle.clear()
        self._mutex = threading.Lock()
        self._threads = DaemonExecutor(self._count, "dataload-call")

    def submit(self, request: bytes | bytearray) -> Future[bytes]:
        """Return a future of the answer.

        It raises `ProcessDied` if a process exits during the request, or `ATTEMPTS` processes are killed.
        """
        return self._threads.submit(self._answer, request)

    def _answer(self, request: bytes | bytearray) -> bytes:
        statuses: list[int] = []
        while len(statuses) < ATTEMPTS and all(status < 0 for status in statuses):
            child = self._take()
            try:
                answer = child.call(request)
            except (EOFError, OSError):
                statuses.append(self._end(child))
                continue
            except BaseException:  # Its answer may still be in the connection.
                self._end(child)
                raise
            with self._mutex:
                self._idle.append(child)
            return answer
        ended = "a process" if len(statuses) == 1 else f"{len(statuses)} processes in a row"
        raise ProcessDied(
            f"{ended} ended during the call (exit status {', '.join(map(str, statuses))}): see the messages on stderr"
        )

    def _end(self, child: _Server) -> int:
        """End a process that answers no more calls. Return its exit status."""
        status = child.end()
        with self._mutex:
            self.running.remove(child)
        return status

    def _take(self) -> _Server:
        with self._mutex:
            while self._idle:
                child = self._idle.pop()
                if child.process.poll() is None:
                    return child
                child.end()
                self.running.remove(child)
            try:
                child = _Server(self._program, self._hello)
            except OSError as error:
                ways = "start fewer, or raise the limits of memory and processes"
                raise ProcessDied(f"no process can be started ({error}): {ways}") from error
            self.running.append(child)
            return child


def end_with(process: int) -> None:
    """End this process as soon as another one has ended, however that ends and whatever this one does then.

    Args:
        process: The id of the process, such as that of the parent. The parent passes it on: once it has ended, its
            children get another parent.

    Notes:
        The kernel could send a signal (PR_SET_PDEATHSIG), but it sends one at the end of the *thread* that started this
        process, and a process of a fork server is not a child of the one that uses it.
    """
    threading.Thread(target=_exit_after, args=(process,), name="dataload-parent", daemon=True).start()


def _exit_after(process: int) -> None:
    try:
        ended = select.poll()
        ended.register(os.pidfd_open(process), select.POLLIN)
        ended.poll()
    except ProcessLookupError:  # It has ended already.
        pass
    except (AttributeError, OSError):  # Linux before 5.3, or a Python that was built on one
        while _runs(process):
            threading.Event().wait(LOOK_SECONDS)
    os._exit(1)


def _runs(process: int) -> bool:
    """Return whether a process has not ended. One that nobody has waited for is a zombie."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # such as too many open files of this process
        return True
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def as_child(module: str, *arguments: str) -> list[str]:
    """Return the arguments of a Python that runs a module as its main program and ends with this process."""
    return ["-m", __name__, str(os.getpid()), module, *arguments]


def start_process(program: str, descriptor: int) -> subprocess.Popen[bytes]:
    """Start a process that runs a function, with the modules that this process can import, and ends with this process.

    Args:
        program: The function, as "module:name". It gets the descriptor.
        descriptor: The descriptor to pass on.

    Raises:
        OSError: The system cannot start another process.
    """
    call = f"from {__name__} import run; run({program!r}, {descriptor}, {os.getpid()})"
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {[*map(str, sys.path)]}; {call}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        process_group=0,  # Ctrl-C is for the parent only. In another session, niceness would have no effect.
    )


def run(program: str, descriptor: int, parent: int) -> None:
    """Run the function of `start_process`, in the process that it has started."""
    end_with(parent)  # before the imports, which take seconds
    module, name = program.split(":")
    getattr(importlib.import_module(module), name)(descriptor)


class ProcessConnection(Connection):
    """A connection to a process. Receiving from it raises EOFError once the process has ended.

    The end of the process alone does not close the connection: its own children may have inherited the other end.

    Args:
        descriptor: The socket, which this object closes.
        process: The process.
        look_seconds: Time between two checks for its end, while nothing is received.
    """

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes], look_seconds: float) -> None:
        super().__init__(descriptor)
        self._process, self._look_seconds = process, look_seconds

    def recv(self) -> Any:
        """Return the next object. Raise EOFError or OSError if the process has ended."""
        self._wait()
        return super().recv()

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        """Return the next message. Raise EOFError or OSError if the process has ended."""
        self._wait()
        return super().recv_bytes(maxlength)

    def _wait(self) -> None:
        while not self.poll(self._look_seconds):
            if self._process.poll() is not None and not self.poll():  # It may have sent something before its end.
                raise EOFError


class Child:
    """A running process that has started with this object, and the connection to it.

    Args:
        program: The function that it runs, as "module:name". It gets a descriptor of the connection.
        look_seconds: Time between two checks for its end, while nothing is received.
        niceness: See setpriority(2); 0: that of this process.

    Attributes:
        process: The process.
        connection: The connection.
        killed: Whether `stop` has killed it.

    Raises:
        OSError: The system cannot start another process.
    """

    def __init__(self, program: str, look_seconds: float, niceness: int = 0) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(self._socket.close)
            self.process = start_process(program, theirs.fileno())
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)
            if niceness:  # from the first import on: they are most of the start
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, self.process.pid, niceness)
            self.connection = ProcessConnection(os.dup(self._socket.fileno()), self.process, look_seconds)
            undo.pop_all()
        self.killed = False

    def stop(self) -> int:
        """End the process, wait until it has exited, and return its exit status. A thread that receives gets EOFError.

        It must exit within `EXIT_SECONDS`, or it is killed.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            return self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.killed = True
            return self.process.wait()

    def close(self) -> None:
        """Close the connection, when no thread receives from it."""
        with suppress(OSError):
            self.connection.close()
        self._socket.close()

    def disown(self) -> None:
        """Close this process's copy of the connection, in a forked child, so that the process sees its parent end."""
        self.close()
        self.process.returncode = 0


class _Server(Child):
    """A process that answers one request after the other."""

    def __init__(self, program: str, hello: bytes) -> None:
        super().__init__(program, LOOK_SECONDS)
        self._hello: bytes | None = hello  # A long one is received only once the process has imported its modules.

    def call(self, request: bytes | bytearray) -> bytes:
        """Return the answer to a request. Raise EOFError or OSError if the process died."""
        if self._hello is not None:
            self.connection.send_bytes(self._hello)
            self._hello = None
        self.connection.send_bytes(request)
        return self.connection.recv_bytes()

    def end(self) -> int:
        """End the process, wait until it has exited, and return its exit status."""
        status = self.stop()
        self.close()
        return status


def _end_all(children: list[_Server]) -> None:
    for child in children:
        child.end()


def serve(descriptor: int, start: Callable[[bytes], Callable[[bytes], bytes | bytearray]]) -> None:
    """Answer requests until the parent closes the connection.

    Args:
        descriptor: The socket.
        start: Returns the function that answers requests, given the first message.
    """
    connection = Connection(descriptor)
    if (hello := _received(connection)) is None:
        return
    answer = start(hello)
    while (request := _received(connection)) is not None:
        answered = answer(request)
        with suppress(OSError):  # The parent has ended, which `_received` notices next.
            connection.send_bytes(answered)


def _received(connection: Connection) -> bytes | None:
    """Return the next message of the parent, or None if the parent has closed the connection or ended."""
    with suppress(EOFError, OSError):
        return connection.recv_bytes()
    return None


if __name__ == "__main__":  # see `as_child`
    end_with(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
