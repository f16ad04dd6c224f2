"""The end of a run before its last epoch: at a signal, after a number of steps, or after some time."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan
from numbers import Real
from time import monotonic
from types import FrameType
from typing import Any, Final, Self

from dataload.arguments import whole_number
from dataload.errors import ConfigError
from dataload.runtime.handled_signals import is_handled
from dataload.train.ranks.collectives import Largest, process_count, process_number

STOP_SIGNALS: Final = ("SIGTERM", "SIGUSR1")

log = logging.getLogger(__name__)


class StopSignal:
    """A request to end, by a signal to any rank. During a `with` block the signals no longer end the process.

    Slurm (`--signal=USR1@120`), Kubernetes and spot instances send a signal some time before they kill. The ranks learn
    of it together, so all of them can end after the same step and save its checkpoint. One that comes after the last
    question ends nothing: ask again after the loop, or after the block, if something long follows.

    Args:
        signals: Names of the signals. One that the program handles itself is left to it, and so are all of them outside
            of the main thread. One that another `StopSignal` around this one handles is heeded by both.

    Attributes:
        reason: Which signal it was, and on which rank; "": none yet. Set by `requested`.

    Raises:
        ConfigError: There is no such signal, or no process can handle it.

    Example:
        >>> import os, signal
        >>> from dataload.train import StopSignal
        >>> done = []
        >>> with StopSignal() as stop:
        ...     for step in range(100):
        ...         done.append(step)
        ...         if step == 2:
        ...             os.kill(os.getpid(), signal.SIGUSR1)
        ...         if stop.requested():
        ...             break
        >>> done, stop.reason
        ([0, 1, 2], 'SIGUSR1')
    """

    def __init__(self, signals: Iterable[str] | None = STOP_SIGNALS) -> None:
        self.reason = ""
        self._signals = _numbers(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._received = 0
        self._largest = Largest()

    def __enter__(self) -> Self:
        self._process = os.getpid()  # that of a rank, which may have been forked since
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if _is_unhandled(number) or _owner(signal.getsignal(number)) not in (None, self):
                    self._before[number] = signal.getsignal(number)
                    signal.signal(number, self._note)
        if left := [number.name for number in self._signals if number not in self._before]:
            log.info("%s: left to the program", ", ".join(left))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # The program may have set a handler since.
                signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker, which has inherited this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = number
        outer = _owner(self._before.get(signal.Signals(number)))
        if outer is not None and outer._process == self._process:  # noqa: SLF001 (else that of this rank's parent)
            outer._note(number, frame)  # noqa: SLF001 (of this class)

    def requested(self) -> bool:
        """Return whether a rank has got a signal: the same on all ranks, which must call it after the same steps.

        It takes one small all-reduce, and none with one rank.
        """
        if self._signals and not self.reason:
            ranks = process_count()
            number, rank = divmod(self._largest(self._received * ranks + process_number()), ranks)
            if number:
                self.reason = signal.Signals(number).name + (f" on rank {rank}" if ranks > 1 else "")
        return bool(self.reason)


def _numbers(names: Iterable[str] | None) -> list[signal.Signals]:
    names = [names] if isinstance(names, (str, int)) else list(names or ())
    if not all(name in signal.Signals.__members__ for name in names) or {"SIGKILL", "SIGSTOP"}.intersection(names):
        raise ConfigError(f"stop_signals={names}: name signals that a process can handle, such as {STOP_SIGNALS}")
    return [signal.Signals[name] for name in names]


def _owner(handler: Any) -> StopSignal | None:
    """Return the `StopSignal` whose handler this is, such as that of a loop around `fit`; None: it is another one."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopSignal) else None


def _is_unhandled(number: signal.Signals) -> bool:
    """Return whether the program has no handler of a signal: neither in Python nor, as faulthandler's, in C."""
    if (handler := signal.getsignal(number)) is not signal.SIG_DFL:
        return handler is signal.default_int_handler
    return not is_handled(number)


@dataclass
class Ending:
    """What ends a run before its last epoch.

    Attributes:
        signals: Signals do.
        max_steps: So many optimizer steps do; None: none.
        max_seconds: So many seconds do, from now on, after a step at least; None: none.
        reason: What has ended the run; "": nothing yet.

    Raises:
        ConfigError: A value is no such number.
    """

    signals: StopSignal
    max_steps: int | None = None
    max_seconds: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.max_steps is not None:
            whole_number("max_steps", self.max_steps, least=1)
        if self.max_seconds is not None and not (isinstance(self.max_seconds, Real) and not isnan(self.max_seconds)):
            raise ConfigError(f"max_seconds={self.max_seconds!r} must be a number of seconds")
        self._began = monotonic()
        self._largest = Largest()

    @property
    def by_signal(self) -> bool:
        """Whether a signal has ended the run."""
        return bool(self.reason) and self.reason == self.signals.reason

    def ask_signals(self) -> bool:
        """Return whether a signal ends the run: the same on all ranks, which must ask together."""
        if self.signals.requested():
            self.reason = self.signals.reason
        return self.by_signal

    def ask(self, step: int) -> bool:
        """Return whether the run ends after a step: the same on all ranks, which must ask after the same steps."""
        if self.ask_signals() or self.reason:
            return True
        if self.is_over(step):
            self.reason = f"max_steps={self.max_steps}"
        elif self.max_seconds is not None and self._largest(int(monotonic() - self._began >= self.max_seconds)):
            self.reason = f"max_seconds={self.max_seconds:g}"
        return bool(self.reason)

    def is_over(self, step: int) -> bool:
        """Return whether the run has all of its steps."""
        return self.max_steps is not None and step >= self.max_steps

    def may_be_near(self, step: int) -> bool:
        """Return whether the next step is known to be the last one."""
        return bool(self.reason) or self.is_over(step + 1)
