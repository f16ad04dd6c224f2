"""What a cache is given to make row groups: `FileMaker` decodes files, `MapMaker` calls a function of the user."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dataload.cache.blocks.reader import Blocks
from dataload.cache.tier import BlobKey, Span
from dataload.catalog.manifest import Manifest
from dataload.catalog.selection import Selection
from dataload.rows.columns import Column
from dataload.rows.making.row_group_memory import MemoryNeed, RowGroupMemory
from dataload.rows.row_group_plan import RowGroupPlan
from dataload.rows.size_sampling import ValueSizes

Columns = dict[str, Column]


@dataclass(frozen=True)
class Opened:
    """A row group whose bytes are being fetched.

    Attributes:
        fetches: The requests for the bytes that are held in memory.
        columns: Waits for them. Yields the columns of one blob after the other.
    """

    fetches: Sequence[Future[None]]
    columns: Callable[[], Iterator[Columns]]


class Maker(Protocol):
    """Makes the columns of a dataset's row groups. Any thread may call it.

    Attributes:
        manifest: The dataset.
        plan: Names, lengths and sizes of the blobs.
        blocks: Reader of the dataset's files, and the cache.
        selection: The rows of each row group that the blobs hold; None: all.
        memory: The memory in which row groups are made. See `share`.
        is_mapped: Whether a function of the user makes the rows.
    """

    manifest: Manifest
    blocks: Blocks
    memory: RowGroupMemory
    is_mapped: bool

    @property
    def plan(self) -> RowGroupPlan: ...

    @property
    def selection(self) -> Selection | None: ...

    @property
    def need(self) -> MemoryNeed:
        """The memory that these row groups need."""

    def share(self, memory: RowGroupMemory) -> None:
        """Use a memory that bounds this maker and others together."""

    def open(self, number: int, blocks: Blocks) -> AbstractContextManager[Opened]:
        """Start to fetch a row group. blocks: reader of its file.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """

    def opens_at_once(self, number: int) -> bool:
        """Return whether `open` waits for no request."""

    def from_cache(self, number: int) -> Generator[Columns, None, None] | None:
        """Return the columns of each blob, made of other blobs in the cache; None if these are not cached."""

    def head(self, number: int, rows: int) -> Iterator[tuple[Columns, int]]:
        """Yield the columns of a row group and their rows, at most `rows` at a time. The first ones need few bytes.

        Raises:
            OriginError: The origin does not answer, or the file does not exist.
            DataError: The row group cannot be decoded.
        """

    def sources(self, number: int, columns: Sequence[str] | None = None) -> tuple[list[Span], list[Span]]:
        """Return the byte ranges to fetch for a row group, or for some of its columns. See `Footer.fetched`."""

    def discard_sources(self, number: int, keys: Callable[[int], list[BlobKey]]) -> None:
        """Discard the cached blocks of files that a row group was made of, once its neighbours need them no more.

        Best effort. keys: returns the keys of the blobs of a row group.
        """

    def reservation(self, number: int) -> int:
        """Return the bytes of a row group that are fetched and held."""

    def decoding_bytes(self, number: int, growth: float) -> int:
        """Return the bytes that the decoding of a row group takes. growth: of blobs that exceed their forecast."""

    @property
    def known_nulls(self) -> str | None:
        """Which columns are known to have nulls that batches cannot hold; None: none."""

    @property
    def value_sizes(self) -> ValueSizes | None:
        """Sizes of values that neither footers nor `map` tell, but a sample of the files; None: there are none."""
