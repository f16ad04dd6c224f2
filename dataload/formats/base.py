"""The interface of a file format: a file's footer, and readers of its row groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataload.cache.blocks.reader import Blocks, Object
from dataload.cache.tier import Span
from dataload.errors import DamagedError, DataloadError

if TYPE_CHECKING:
    import pyarrow.compute as pc
    import pyarrow.dataset as pads

SHARED_BYTES = 512 << 10  # row groups with fewer bytes are not worth a request each
TINY_BYTES = 64 << 10  # of a row group that takes less time than handing it to another thread
# Arrow's error if it reads codes of another type than int32 from Parquet, for which it casts and checks the dictionary
INVALID_CODED = "Invalid UTF8 payload"
GAP_BYTES = 256 << 10  # smaller gaps between ranges are fetched, which is cheaper than another request

Int64 = npt.NDArray[np.int64]
T = TypeVar("T")


class RowGroupReader(Protocol):
    """Decodes some columns of one row group.

    Attributes:
        fetches: The requests that `wait` waits for.
    """

    @property
    def fetches(self) -> Sequence[Future[None]]: ...

    def wait(self) -> None:
        """Wait for the bytes that are held in memory.

        Raises:
            OriginError: The origin failed.
        """

    def tables(self, rows: int) -> Iterator[pa.Table]:
        """Yield the row group in tables of `rows` rows; the last may be smaller."""


class Footer(Protocol):
    """A file's schema, without metadata, and its row groups by number. lengths: rows of each row group.

    Column names are flat: a member of a struct has a dotted name.

    Attributes:
        streams: Whether `open_row_group` streams what exceeds its capacity. Otherwise it holds everything in memory.
        unreadable: Why some columns of the flat schema cannot be read, by name. The text names the file.
        key_values: The metadata of the file or of its schema.
        renamed: Of a file of a table, how the file calls columns that the table calls otherwise, by the table's name.
        mark: A digest that copies of the file share, and other files of its name and size do not; "": there is none.
        file: The file, if it is small enough to be cached in place of its footer. Its rows are read from there.
    """

    renamed: Mapping[str, str]
    mark: str
    file: memoryview | None

    @property
    def streams(self) -> bool: ...

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def unreadable(self) -> Mapping[str, str]: ...

    @property
    def key_values(self) -> Mapping[bytes, bytes]: ...

    @property
    def lengths(self) -> Sequence[int]: ...

    def stored_bytes(self, number: int) -> int:
        """Return the bytes of a row group in the file, all its columns."""

    def decoded_bytes(self, number: int, columns: Collection[str]) -> list[int]:
        """Return about how many bytes each of these columns takes once decompressed."""

    def coded(self, number: int, columns: Collection[str]) -> list[str]:
        """Return the bytes, text or nested columns whose size `decoded_bytes` may underestimate by far.

        Their chunks have dictionary codes, or leave out the prefixes that values share.
        """

    def decompresses_whole(self, number: int) -> bool:
        """Return whether the first of a row group's `tables` takes the memory of all its rows, decompressed."""

    def fetched(self, number: int, columns: Sequence[str], capacity: int) -> tuple[list[Span], list[Span]]:
        """Return the byte ranges that `open_row_group` reads: through cached blocks, and in requests of their own.

        Each range of the second list is one request, unless cached blocks hold it.
        """

    def for_statistics(self, guarantee: pc.Expression, columns: Collection[str]) -> pads.ParquetFileFragment | None:
        """Return the footer as a fragment of an Arrow dataset that has no data; None: it has no statistics.

        Args:
            guarantee: An expression that holds in all rows of the file.
            columns: The columns of the file whose statistics are read.
        """

    def null_counts(self, number: int, columns: Collection[str]) -> list[int | None]:
        """Return the nulls of each of these columns in a row group by the file's metadata; None: unknown.

        The count of a column of lists has the empty lists too.
        """

    def null_elements(self, number: int, columns: Collection[str]) -> list[int]:
        """Return the nulls inside the lists of each of these columns in a row group; 0 if the file does not tell.

        columns: of lists of nullable numbers.
        """

    def num_values(self, number: int, column: str) -> int | None:
        """Return at least how many values the lists of a column have in a row group, by the file's metadata.

        Nulls and empty lists may count as one. None: unknown.
        """

    def opens_at_once(self, number: int, blocks: Blocks) -> bool:
        """Return whether `open_row_group` leaves waiting for the origin to the reader's `wait`."""

    def values_at(self, obj: Object, number: int, column: str, rows: Int64, blocks: Blocks) -> pa.ChunkedArray | None:
        """Return the values of a column in some rows of a row group, ascending: int64 [n].

        Nothing is fetched but the pages that hold them. None: the file does not tell where these are.
        """

    def open_row_group(
        self, obj: Object, number: int, columns: Sequence[str], blocks: Blocks, capacity: int
    ) -> AbstractContextManager[RowGroupReader]:
        """Open some columns of one row group of the file `obj`.

        Args:
            obj: The file.
            number: The row group.
            columns: Names of the columns.
            blocks: Reader of the file.
            capacity: Stored bytes to hold in memory. More are streamed while they are decoded, if the format can.

        Raises:
            DataError: The data cannot be decoded.
            OriginError: The origin failed.

        Notes: row groups of less than `SHARED_BYTES` go through cached blocks if they have neighbours that share the
        blocks. If the cache is too small to keep blocks, they are fetched directly.
        """


def read_row_group(
    footer: Footer,
    obj: Object,
    number: int,
    columns: Sequence[str],
    blocks: Blocks,
    capacity: int,
    use: Callable[[RowGroupReader], T],
) -> T:
    """Return `use(reader)` of some columns of a row group. Damaged bytes are fetched once more, past the cache.

    Args:
        footer: The footer of the file.
        obj: The file.
        number: The row group.
        columns: Names of the columns.
        blocks: Reader of the file.
        capacity: As for `Footer.open_row_group`.
        use: Reads the columns. It is called again if their bytes are damaged.

    Raises:
        DataError: As for `Footer.open_row_group`.
        OriginError: The origin failed.
    """

    def read(blocks: Blocks) -> T:
        with footer.open_row_group(obj, number, columns, blocks, capacity) as reader:
            return use(reader)

    return blocks.undamaged(read, obj, lambda: chain(*footer.fetched(number, columns, capacity)))


@contextmanager
def as_data_error(what: str, *others: type[Exception]) -> Iterator[None]:
    """Raise DamagedError for the exceptions that damaged data causes in the block. Full memory is none of them.

    Args:
        what: Names the file and the part of it that cannot be read.
        others: Exceptions that damage causes, besides those of Arrow and OSError.
    """
    try:
        yield
    except DataloadError:
        raise
    except MemoryError as error:  # Arrow's is also an ArrowException.
        error.add_note(what)
        raise
    except (pa.ArrowException, OSError, *others) as error:
        way = ": write that column with another type" if isinstance(error, pa.ArrowNotImplementedError) else ""
        if INVALID_CODED in str(error):
            way = ": a column with a dictionary type has text that is not UTF-8: write it as strings or bytes"
        raise DamagedError(f"{what}: {' '.join(str(error).split())}{way}") from error


def joined(spans: Sequence[Span], gap: int = GAP_BYTES) -> list[Span]:
    """Return the sorted spans [start, stop), merging neighbours that are at most `gap` bytes apart."""
    merged: list[Span] = []
    for start, stop in spans:
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
