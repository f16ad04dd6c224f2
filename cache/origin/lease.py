"""A lease on a folder in an object store, so that two runs never write into the same one.

It is a chain of small objects, each of which is created only if it is new. Whoever has created the latest one holds the
lease, and adds another one every `RENEWED` seconds. If none comes for `EXPIRED` seconds, by the clock of a process that
waits, or if the holder is a process of this host that has ended, those who wait create the next one: one succeeds.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from uuid import uuid4

from dataload.cache.local.run_lock import Holder
from dataload.cache.origin.store_path import StorePath
from dataload.errors import ConfigError
from dataload.runtime.redact import redacted

log = logging.getLogger(__name__)

CHAIN = ".lease"
NAME = re.compile(r"(\d{6,})\.json")
RENEWED, EXPIRED = 15.0, 60.0  # seconds
SEEN = 10.0  # seconds that a holder who renews it has, to end
RELEASED = 10.0  # seconds that a renewal under way has, before the lease is left to expire


class Record(NamedTuple):
    """What the latest object of the chain says.

    Attributes:
        nonce: Names the holder.
        holder: The process; None if it has released the lease.
        life: Names the process among all that this kernel has had.
    """

    nonce: str
    holder: Holder | None
    life: str | None

    @classmethod
    def parse(cls, content: bytes) -> Record:
        """Return what an object says. One that makes no sense is of an unknown holder."""
        with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            found = json.loads(content)
            holder = None if found["pid"] is None else Holder(int(found["pid"]), str(found["host"]))
            return cls(str(found["nonce"]), holder, found.get("life"))
        return cls("", Holder(), None)


class Lease:
    """The lease of a folder in an object store, which one process of all hosts holds.

    Args:
        folder: The folder.
    """

    pause = 1.0  # Each try takes requests to the store.

    def __init__(self, folder: StorePath) -> None:
        self._folder, self._chain = folder, folder / CHAIN
        self._pid = os.getpid()
        self._nonce = uuid4().hex
        self._seen: tuple[int, float] | None = None  # the latest object of another one, and since when
        self._renewals = 0  # of that holder, as long as this process has waited
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False

    def acquire(self) -> Holder | None:
        """Acquire the lease. Return None, or the process that holds it. Raises OSError."""
        number, record = self._latest()
        if record is not None and record.holder is not None and not self._is_over(number, record):
            return record.holder
        if not self._create(number + 1):
            return Holder()  # Another one was faster.
        self._thread = threading.Thread(target=self._keep, name="dataload-lease", daemon=True)
        self._thread.start()
        return None

    def patience(self, _: Holder) -> float:
        """Return for how many seconds to wait for the end of the holder."""
        return SEEN if self._renewals else EXPIRED + RENEWED

    def check(self) -> None:
        """Raise ConfigError if another run has taken the lease over."""
        if self._lost or self._held() is None:
            raise ConfigError(
                f"{self._folder} has been taken over by another run, because this one could not renew its lease for "
                f"{EXPIRED:.0f} s: end one of them, or give each a folder of its own"
            )

    def release(self) -> None:
        """Release the lease, if this process holds it."""
        if self._thread is None or self._pid != os.getpid():
            return  # A forked child has that of its parent.
        self._ended.set()
        thread, self._thread = self._thread, None
        thread.join(RELEASED)
        if thread.is_alive():  # in a request that is tried again: this process ends all the same
            log.warning("%s: the lease is not released, and expires: the store does not answer", self._folder)
            return
        try:
            if not self._lost and (number := self._held()) is not None:
                self._create(number + 1, released=True)
        except OSError as error:
            log.warning("%s: the lease is not released, and expires: %s", self._folder, redacted(error))

    def _keep(self) -> None:
        while not self._ended.wait(RENEWED):
            try:
                if (number := self._held()) is None or not self._create(number + 1):
                    self._lost = True
                    log.warning("%s has been taken over by another run: this one writes no more", self._folder)
                    return
            except Exception as error:  # noqa: BLE001 (whatever it is, the next try may work)
                log.warning("%s: the lease cannot be renewed: %s", self._folder, redacted(error))

    def _held(self) -> int | None:
        """Return the number of the latest object if it is this process's; None: another one holds the lease.

        It may be one that the other thread has just created, or of whose creation the answer was lost.
        """
        number, record = self._latest()
        return number if record is not None and record.nonce == self._nonce else None

    def _is_over(self, number: int, record: Record) -> bool:
        """Return whether the holder has ended, or has renewed nothing for too long."""
        is_here = record.holder is not None and record.holder.is_here
        if is_here and record.life is not None and _has_ended(record.life):  # Clones of a machine have its boot_id.
            return True
        if self._seen is None or self._seen[0] != number:
            self._renewals += self._seen is not None
            self._seen = number, monotonic()
        return monotonic() >= self._seen[1] + EXPIRED

    def _latest(self) -> tuple[int, Record | None]:
        """Return the number of the latest object, and what it says."""
        numbers = self._numbers()
        if not numbers:
            return 0, None
        try:
            return numbers[-1], Record.parse((self._chain / _name(numbers[-1])).read_bytes())
        except FileNotFoundError:  # Its holder has gone on.
            return self._latest()

    def _numbers(self) -> list[int]:
        return sorted(int(match[1]) for name in self._chain.files() if (match := NAME.fullmatch(name)))

    def _create(self, number: int, *, released: bool = False) -> bool:
        """Create the object of a number, as the latest one. Return whether nobody else has."""
        own: dict[str, Any] = {"nonce": self._nonce, "pid": None, "host": None}
        if not released:
            own |= {"pid": os.getpid(), "host": socket.gethostname(), "life": life_of(os.getpid())}
        if not (self._chain / _name(number)).create(json.dumps(own).encode()):
            return False
        numbers = self._numbers()
        if numbers[-1:] != [number]:  # This process stood still, while another one went on and removed older objects.
            return False
        self._chain.remove(_name(each) for each in numbers[:-1])
        return True


def _name(number: int) -> str:
    return f"{number:06d}.json"


def life_of(pid: int) -> str | None:
    """Return a name of a process that no other one has, or had, under this kernel.

    None: it has ended, or belongs to another user, whom /proc may hide.
    """
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":  # It has ended, and its parent does not know yet.
            return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino} {pid} {fields[19]}"
    return None


def _has_ended(life: str) -> bool:
    """Return whether a process has ended. False if that is unknown, such as of another host."""
    own, parts = life_of(os.getpid()), str(life).split()
    if own is None or len(parts) != 4 or parts[:2] != own.split()[:2] or not parts[2].isdecimal():
        return False
    try:
        os.kill(int(parts[2]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # of another user
        return False
    return life_of(int(parts[2])) != life
