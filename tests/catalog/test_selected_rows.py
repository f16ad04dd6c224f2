"""The table of selected rows agrees with the selection, also after it was emptied, and from many threads."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dataload.catalog.selected_rows import MIN_BYTES, SelectedRows
from dataload.catalog.selection import Selection

DICE = np.random.default_rng(0)
MASKS = [
    DICE.random(rows) < share for rows, share in [(100_000, 0.5), (10, 0.3), (0, 0.0), (70_000, 0.01), (65_536, 1.0)]
]
ROWS = np.flatnonzero(np.concatenate(MASKS))


def test_numbers_become_rows() -> None:
    table = SelectedRows(Selection.of(MASKS))
    for size in (1, 200, 5000):
        numbers = DICE.integers(0, len(ROWS), size)
        np.testing.assert_array_equal(table.rows(numbers), ROWS[numbers])


def test_a_full_table_is_emptied() -> None:
    table = SelectedRows(Selection.of(MASKS))
    table.most_bytes = 1
    for first in (0, 40_000, 0, 100_000, 60_000):
        numbers = np.arange(first, first + 300)
        np.testing.assert_array_equal(table.rows(numbers), ROWS[numbers])
        assert table._expanded_bytes <= 2 * 2 * 65_536


def test_the_limit_follows_what_is_open() -> None:
    selection = Selection.of(np.ones(1 << 22, np.bool_) for _ in range(3))
    table = SelectedRows(selection, 0)
    assert table.most_bytes == MIN_BYTES
    assert SelectedRows(selection, 3).most_bytes == 3 * 2 * 2 * (1 << 22)
    table.keep(2)
    assert table.most_bytes == 2 * 2 * 2 * (1 << 22)


def test_threads_share_it() -> None:
    table = SelectedRows(Selection.of(MASKS))
    table.most_bytes = 1  # Each call empties what the others have expanded.

    def agrees(seed: int) -> bool:
        numbers = np.random.default_rng(seed).integers(0, len(ROWS), 500)
        return bool((table.rows(numbers) == ROWS[numbers]).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(agrees, range(200)))


def test_a_copy_has_the_same_rows() -> None:
    table = SelectedRows(Selection.of(MASKS), 3)
    numbers = np.arange(0, len(ROWS), 7)
    table.rows(numbers)
    copy = pickle.loads(pickle.dumps(table))
    np.testing.assert_array_equal(copy.rows(numbers), ROWS[numbers])
    assert copy.most_bytes == table.most_bytes


def test_a_forked_child_reads_on() -> None:
    table = SelectedRows(Selection.of(MASKS))
    numbers = np.arange(0, len(ROWS), 7)
    table.rows(numbers[:100])
    child = os.fork()
    if child == 0:
        os._exit(int(not np.array_equal(table.rows(numbers), ROWS[numbers])))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(table.rows(numbers), ROWS[numbers])
