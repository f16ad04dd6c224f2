"""Rows of a batch that raise: their numbers in an error, and their replacement with `on_error="skip"`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from itertools import islice
from time import monotonic

import numpy as np

from dataload.catalog.locations import Location
from dataload.catalog.recipe import ranges
from dataload.errors import RowError
from dataload.rows.columns import Array
from dataload.rows.row_errors import is_of_a_row
from dataload.runtime.bisection import bisected

MOST_SUBSTITUTES = 32  # rows to try if a whole batch is bad
SEARCH_SECONDS = 10.0  # for the row that raised, before its exception goes on
CALL_SECONDS = 5.0  # of the call that raised; after a longer one there is no search

Works = Callable[[list[int]], bool]


@contextmanager
def naming_rows(
    numbers: Array, name: str, locate: Callable[[int], Location], works: Callable[[Array], bool] | None = None
) -> Iterator[None]:
    """Add a note with the rows of a batch, and the one that raised, to each exception of the block.

    Args:
        numbers: Row numbers, int64 [B].
        name: Names the batch.
        locate: Returns the location of a row number.
        works: Returns whether a batch of some of these rows can be made; None: don't search for the row that raised.
            Nor is it searched for after a call that took long or timed out: the search would take as long, or longer.
    """
    began = monotonic()
    try:
        yield
    except Exception as error:
        position = _position_in(error, numbers)
        is_slow = monotonic() - began > CALL_SECONDS or isinstance(error, (CancelledError, TimeoutError))
        if position is None and works is not None and is_of_a_row(error) and not is_slow:
            with suppress(Exception):  # The first error matters more.
                position = _first_bad(numbers, works)
        error.add_note(_note(numbers, name, position, locate))
        raise


def _position_in(error: Exception, numbers: Array) -> int | None:
    """Return the position in its batch of the row that an error names, if it names one."""
    # The user's function may have made a column with other rows, such as all images of several columns.
    return error.row if isinstance(error, RowError) and error.rows == len(numbers) else None


def _first_bad(numbers: Array, works: Callable[[Array], bool]) -> int | None:
    """Return the position of the first row that raises by itself; None if no row does.

    Raises:
        TimeoutError: The search takes too long.
    """
    deadline = monotonic() + SEARCH_SECONDS

    def fails(span: slice) -> bool:
        if monotonic() > deadline:
            raise TimeoutError
        return not works(numbers[span])

    return bisected(len(numbers), fails)


def _note(numbers: Array, name: str, position: int | None, locate: Callable[[int], Location]) -> str:
    lines, row = [f"{name} has {len(numbers)} rows of the dataset: {ranges(numbers)}"], int(numbers[position or 0])
    place = locate(row)
    if position is not None:
        lines.append(f"row {position} of the batch is the first that raises: row {row} of the dataset ({place.text})")
    lines.append(f"To look at them: {place.look(row)}")
    return "\n".join(lines)


def replacements(numbers: Array, source: range, works: Callable[[Array], bool]) -> Array | None:
    """Return the row numbers of a batch with its bad rows replaced.

    The good rows work together, and with any other row of the batch they do not. The n-th bad row is replaced by the
    n-th good one, from the first again if there are more. If no row is good, all are replaced by one row: the first of
    the `MOST_SUBSTITUTES` rows after the batch's greatest row number with which the whole batch works.

    Args:
        numbers: Row numbers of a batch that raised, int64 [B].
        source: Rows of the dataset or source that has the batch's greatest row. Its first row follows its last one.
        works: Returns whether a batch of these rows can be made. The same rows always give the same answer.

    Returns:
        Row numbers, int64 [B]; None if no row works.
    """
    good = _maximal(range(len(numbers)), lambda positions: works(numbers[positions]))
    if not good:
        last = source.index(int(numbers.max()))
        following = (source[(last + step) % len(source)] for step in range(1, len(source)))
        candidates = (np.full(len(numbers), row, np.int64) for row in islice(following, MOST_SUBSTITUTES))
        return next(filter(works, candidates), None)
    bad = np.setdiff1d(np.arange(len(numbers)), good)
    replaced = numbers.copy()
    replaced[bad] = np.resize(numbers[good], len(bad))
    return replaced


def _maximal(positions: Sequence[int], works: Works) -> list[int]:
    """Return positions that work together, such that with any other position they do not."""
    good = _by_halves(list(positions), works)
    left = sorted({*positions} - {*good}) if good else []
    # A call with one row costs less, but it tells nothing if a batch needs several.
    one_suffices = bool(left) and works(good[:1])
    for position in left:
        if (not one_suffices or works([position])) and works(sorted([*good, position])):
            good = sorted([*good, position])
    return good


def _by_halves(positions: list[int], works: Works) -> list[int]:
    """Return positions that work together: all but one after about 4 log2(n) calls if that one is bad."""
    if works(positions):
        return positions
    if len(positions) == 1:
        return []
    middle = len(positions) // 2
    left, right = _by_halves(positions[:middle], works), _by_halves(positions[middle:], works)
    together = [*left, *right]
    if left and right and (together == positions or not works(together)):
        return max(left, right, key=len)  # Some rows do not suit the others, such as arrays of another shape.
    return together
