"""Who served each row group to an epoch: this host (memory or the cache), the cluster, or the origin."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from dataload.runtime.counters import Counters
from dataload.telemetry.loader_stats import LoaderStats

FETCHED = ("bytes_cluster", "bytes_origin", "requests_origin")
MISSED = ("ordered", "decoded", *FETCHED)  # any of these in a row group's account makes it a miss


def is_miss(account: Mapping[str, float]) -> bool:
    """Return whether an account has an entry that makes its row group a miss."""
    return any(account.get(name) for name in MISSED)


class Ledger:
    """An account for each row group: what loading it has taken since an epoch last counted it.

    An account holds `under_way` (loads that have not ended), `ordered` (orders to the background process that it has
    not answered), `decoded` (how often this process or the background process decoded the row group), and the amounts
    named in `FETCHED`.

    Notes: may be called from any thread.
    """

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # The garbage collector may end a loop here, in a thread that holds the lock.
        self._accounts: dict[int, Counters] = {}

    def begin(self, group: int) -> Counters:
        """Return the account of a row group, for a load that adds `under_way=-1` when it ends."""
        with self._mutex:
            account = self._accounts.setdefault(group, Counters())
            account.add(under_way=1)
            return account

    def missed(self, group: int) -> bool:
        """Return whether a row group's account has an entry that makes it a miss."""
        with self._mutex:
            account = self._accounts.get(group)
            return account is not None and is_miss(account.snapshot())

    def loading(self, group: int) -> bool:
        """Return whether a load of a row group is under way."""
        with self._mutex:
            account = self._accounts.get(group)
            return account is not None and bool(account.snapshot().get("under_way"))

    def take(self, group: int, *, at_rest: bool) -> dict[str, float] | None:
        """Return what is in a row group's account, and close it.

        at_rest: return None, and leave the account open, while a load is under way.
        """
        with self._mutex:
            account = self._accounts.get(group)
            took = {} if account is None else account.snapshot()
            if at_rest and took.get("under_way"):
                return None
            self._accounts.pop(group, None)
            return took


class Served:
    """Counts each row group of an epoch once: as a hit, or as a miss with the bytes fetched for it.

    The row groups that the batches use are hits or misses. A row group that this process fetched for another rank of
    its node is a miss, whether or not a batch of this rank uses it. Any other row group does not count.

    The first epoch to use a row group after it was fetched counts the miss. Of several processes that share a cache,
    the one that fetched the row group counts the miss, and the others count a hit. No figure ever falls: a row group
    that an epoch fetches again after its hit stays a hit, and only the bytes are added.

    Args:
        stats: Where the figures are added up.
        ledger: The accounts of the row groups that this process loads.
        size_of: Returns the bytes of a row group's records.
        in_flight: Batches that worker processes make at the same time, at most. The answer to any of them may show
            that a worker fetched a row group that another worker found in the cache. A hit is counted only after that
            many further batches.
    """

    def __init__(self, stats: LoaderStats, ledger: Ledger, size_of: Callable[[int], int], in_flight: int = 0) -> None:
        self._stats = stats
        self._ledger = ledger
        self._size_of = size_of
        self._in_flight = in_flight
        self._batches = 0
        self._counted: set[int] = set()
        self._pending_hits: OrderedDict[int, int] = OrderedDict()  # row group -> the batch after which it is counted
        self._unsettled: set[int] = set()  # used, but their accounts have not been counted yet
        self._prefetched: set[int] = set()  # not used so far, and not known to be fetched by another process

    def use(self, row_groups: Mapping[int, Mapping[str, float] | None], prefetched: Iterable[int] = ()) -> None:
        """Count the row groups that a batch uses.

        Args:
            row_groups: The row groups of the batch's rows, each with its account in the worker process that opened it,
                or None if it was open already.
            prefetched: Row groups that the lookahead requested for the batches up to this one, of all ranks of the
                node.
        """
        for group, account in row_groups.items():
            if account is not None or group not in self._counted:
                self._unsettled.add(group)
            if account and any(account.values()):
                self._count(group, account)
        self._prefetched.update(prefetched)
        self._settle(at_rest=True)
        self._count_hits(until=self._batches)
        self._batches += 1

    def close(self) -> None:
        """Count what is left; from now on the figures do not change."""
        self._settle(at_rest=False)
        self._count_hits(until=self._batches + self._in_flight)

    def _settle(self, *, at_rest: bool) -> None:
        """at_rest: only row groups whose loads have ended."""
        for group in list(self._prefetched):
            if group in self._unsettled or not self._ledger.loading(group):
                self._prefetched.discard(group)
            if self._ledger.missed(group):
                self._unsettled.add(group)
        for group in list(self._unsettled):
            took = self._ledger.take(group, at_rest=at_rest)
            if took is not None:
                self._unsettled.discard(group)
                self._count(group, took)

    def _count(self, group: int, account: Mapping[str, float]) -> None:
        stats = self._stats
        for name in FETCHED:
            setattr(stats, name, getattr(stats, name) + int(account.get(name, 0)))
        if group in self._counted:
            return
        if is_miss(account):
            stats.misses += 1
            self._counted.add(group)
            self._pending_hits.pop(group, None)
        else:
            self._pending_hits.setdefault(group, self._batches + self._in_flight)

    def _count_hits(self, until: int) -> None:
        """Count the pending hits that are due at batch `until`."""
        while self._pending_hits and next(iter(self._pending_hits.values())) <= until:
            group, _ = self._pending_hits.popitem(last=False)
            self._counted.add(group)
            self._stats.hits += 1
            self._stats.bytes_local += self._size_of(group)
