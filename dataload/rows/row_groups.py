"""The interface of the cached row groups behind a row store: those of one dataset, or of several in a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from dataload.formats.schema import Layout
from dataload.rows.columns import Array
from dataload.rows.making.row_group_memory import RowGroupMemory
from dataload.rows.row_group_life import Lives, RowGroupLife

if TYPE_CHECKING:
    from dataload.rows.making.bunches import Made
    from dataload.rows.row_group_cache import RowGroupCache


class BlobPlan(Protocol):
    """The blobs of row groups. See `RowGroupPlan`."""

    @property
    def layout(self) -> Layout: ...

    @property
    def group_starts(self) -> Array: ...

    @property
    def row_starts(self) -> Array: ...

    @property
    def most_of_a_group(self) -> int: ...


class RowGroups(Protocol):
    """Row groups by number, as blobs of records in the cache. Any thread may call it.

    Attributes:
        plan: Layout, numbers and first rows of the blobs.
        by_dataset: The row groups of each dataset.
        memory: The memory in which row groups are made.
        is_mapped: Whether a function of the user makes rows.
        shared: Whether other processes can read the cached blobs.
        caches_everything: Whether every blob is still cached: the cache is neither full nor failing.
        num_bytes: Estimate of the bytes of the blobs of all row groups.
        row_bytes: Estimate of the mean bytes of a row in batches, at least 1.
    """

    @property
    def plan(self) -> BlobPlan: ...

    @property
    def by_dataset(self) -> tuple[RowGroupCache, ...]: ...

    @property
    def memory(self) -> RowGroupMemory: ...

    @property
    def is_mapped(self) -> bool: ...

    @property
    def shared(self) -> bool: ...

    @property
    def caches_everything(self) -> bool: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    def find(self, number: int) -> list[memoryview] | None:
        """Return the blobs of a row group, or None if this host has not cached them."""

    def load(self, number: int, life: RowGroupLife) -> list[memoryview]:
        """Return the blobs of a row group that `find` did not find: fetch and decode it, unless another process does.

        Args:
            number: The row group.
            life: Its life in this process, which can be cancelled while it is planned.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
            ReservationCancelled: The life was cancelled before the memory for the row group was reserved.
        """

    def bunched_bytes(self, number: int) -> int:
        """Return the bytes that a row group takes in `load_together`; 0: `load` makes it."""

    def load_together(self, lives: Lives, late: Callable[[], None]) -> Iterator[tuple[int, Made]]:
        """Yield row groups with their blobs, their error, or None: `load` makes these. See `make_together`."""

    def make(self, number: int, life: RowGroupLife | None = None) -> bool:
        """Cache the row group if space allows. Return whether it is cached. Cached blobs are not read.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """

    def reservation(self, number: int) -> int:
        """Return the bytes of memory that a row group takes while it is fetched, at least 1."""

    def touch(self) -> None:
        """Protect the cached blobs of all row groups from eviction as long as this process runs."""

    def is_transient(self, number: int) -> bool:
        """Return whether a row group is cached only in the transient region, or not at all."""

    def bytes_of(self, number: int) -> int:
        """Return an estimate of the bytes of a row group's blobs."""

    def describe(self, number: int) -> str:
        """Name a row group and count the requests in flight, for the log."""
