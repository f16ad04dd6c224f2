"""Hits and misses of an epoch: which tier served each row group, this host, the cluster or the origin."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from dataload.runtime.counters import Counters
from dataload.telemetry.loader_stats import LoaderStats

FETCHED = ("bytes_cluster", "bytes_origin", "requests_origin", "retries_origin", "requests_limited")
MISSED = ("ordered", "decoded", *FETCHED)  # any of these in a row group's account makes it a miss


class Accounts:
    """The accounts of row groups. An account holds the cost of a row group's loads since an epoch last counted it.

    Its entries are `under_way` (loads that have not ended), `ordered` (requests that the background process has not
    answered), `decoded` (how often this process or the background process decoded the row group), and the amounts
    named in `FETCHED`.

    Notes:
        Any thread may call it.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a loop's generator in a thread that holds the lock.
        self._mutex = threading.RLock()
        self._accounts: dict[int, Counters] = {}

    def begin(self, group: int) -> Counters:
        """Return the account of a row group, for a load that adds `under_way=-1` when it ends."""
        with self._mutex:
            account = self._accounts.setdefault(group, Counters())
            account.add(under_way=1)
            return account

    def peek(self, group: int) -> dict[str, float]:
        """Return the entries of a row group's account."""
        with self._mutex:
            account = self._accounts.get(group)
            return {} if account is None else account.snapshot()

    def take(self, group: int, *, at_rest: bool) -> dict[str, float] | None:
        """Return the entries of a row group's account, and close the account.

        Args:
            group: The row group.
            at_rest: Return None and leave the account open while a load is under way.
        """
        with self._mutex:
            entries = self.peek(group)
            if at_rest and entries.get("under_way"):
                return None
            self._accounts.pop(group, None)
            return entries


class Served:
    """Counts each row group of an epoch once: as a hit, or as a miss with the bytes fetched for it.

    The row groups that the batches use are hits or misses. A row group that this process fetched for another rank of
    its node is a miss, whether or not a batch of this rank uses it. Any other row group does not count.

    The first epoch to use a row group after it was fetched counts the miss. Of several processes that share a cache,
    the one that fetched the row group counts the miss, and the others count a hit. No count ever falls: a row group
    that an epoch fetches again after its hit stays a hit, and only the bytes are added.

    Args:
        stats: The statistics that the counts are added to.
        ledger: The accounts of the row groups that this process loads.
        size_of: Returns the bytes of a row group's records.
        in_flight: Batches that worker processes make at the same time, at most. The answer to any of them may show
            that a worker fetched a row group that another worker found in the cache. A hit is counted only after that
            many further batches.
        source_of: Returns the name of a row group's source of a mixture, or None.
    """

    def __init__(
        self,
        stats: LoaderStats,
        ledger: Accounts,
        size_of: Callable[[int], int],
        in_flight: int,
        source_of: Callable[[int], str | None],
    ) -> None:
        self._stats = stats
        self._source_of = source_of
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
        if self._prefetched or self._unsettled:  # for few batches
            self._settle(at_rest=True)
        if self._pending_hits:
            self._count_hits(until=self._batches)
        self._batches += 1

    def close(self) -> None:
        """Count the row groups that are still pending. The counts do not change afterwards."""
        self._settle(at_rest=False)
        self._count_hits(until=self._batches + self._in_flight)

    def _settle(self, *, at_rest: bool) -> None:
        """Count the accounts of used row groups; with `at_rest`, only those without a load under way."""
        for group in list(self._prefetched):
            account = self._ledger.peek(group)
            if _is_miss(account):
                self._unsettled.add(group)
            if group in self._unsettled or not account.get("under_way"):
                self._prefetched.discard(group)
        for group in list(self._unsettled):
            entries = self._ledger.take(group, at_rest=at_rest)
            if entries is not None:
                self._unsettled.discard(group)
                self._count(group, entries)

    def _count(self, group: int, account: Mapping[str, float]) -> None:
        stats = self._stats
        for name in FETCHED:
            setattr(stats, name, getattr(stats, name) + int(account.get(name, 0)))
        fetched = int(account.get("bytes_cluster", 0)) + int(account.get("bytes_origin", 0))
        if fetched and (source := self._source_of(group)) is not None:
            stats.bytes_by_source[source] = stats.bytes_by_source.get(source, 0) + fetched
        if group in self._counted:
            return
        if _is_miss(account):
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


def _is_miss(account: Mapping[str, float]) -> bool:
    return any(account.get(name) for name in MISSED)
