"""A limit on the concurrent requests of a process."""

from __future__ import annotations

from contextlib import AbstractContextManager

from dataload.runtime.counters import charge
from dataload.runtime.forks import ForkAware
from dataload.runtime.instances import Instances, Largest
from dataload.runtime.memory_budget import MemoryBudget


class RequestLimiter(ForkAware):
    """At most `in_flight` requests at a time, in request order, among the threads of this process.

    All origins of one cache folder share a limiter; see `limiter_of`. `share` gives this process its part of what the
    processes of a host have together. They share no lock, so a process that is slow, stopped or dead delays no other.
    """

    def __init__(self, cache: str, in_flight: int, processes: int = 1) -> None:
        self._cache = cache
        self._in_flight = in_flight
        self._processes = processes
        self._shares = Largest()
        self.after_fork_in_child()
        super().__init__()

    def after_fork_in_child(self) -> None:
        self._budget = MemoryBudget(self.limit)

    def __reduce__(self) -> tuple[object, ...]:
        return limiter_of, (self._cache, self._in_flight, self._processes)

    @property
    def limit(self) -> int:
        """The most requests that this process may have in flight."""
        return max(1, self._in_flight // self._processes)

    @property
    def in_flight(self) -> int:
        """The requests of this process in flight."""
        return self._budget.reserved

    def share(self, loader: object, processes: int) -> None:
        """Divide `in_flight` equally among the reading processes of this host.

        With several loaders, the largest number applies. Each one counts until the first call after its end.

        Args:
            loader: Identifies the loader.
            processes: The processes of all ranks of the loader on this host.
        """
        [self._processes] = self._shares.of(loader, processes)
        self._budget.resize(self.limit)  # The requests in flight keep their part of it.

    def request(self) -> AbstractContextManager[object]:
        """Wait for a free slot and hold it for the duration of the block. Charge a wait as `requests_limited`."""
        if not self._budget.fits(1):
            charge(requests_limited=1)
        return self._budget.reserve(1)


_limiters: Instances[tuple[str, int], RequestLimiter] = Instances(inherited=True)


def limiter_of(cache: str, in_flight: int, processes: int = 1) -> RequestLimiter:
    """Return this process's limiter for a cache folder. processes: as for `share`, until there is a loader."""
    return _limiters.get((cache, in_flight), lambda: RequestLimiter(cache, in_flight, processes))
