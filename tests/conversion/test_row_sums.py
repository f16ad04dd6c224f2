"""Checksums of rows depend on the rows, and not on how Arrow holds them."""

from __future__ import annotations

import datetime as dt
import decimal

import numpy as np
import pyarrow as pa
import pytest

from dataload.conversion.row_sums import row_sum

ROWS = 500
COLUMNS = {
    "integers": pa.array([None if n % 7 == 3 else n for n in range(ROWS)]),
    "floats": pa.array([n / 3 for n in range(ROWS)]),
    "halves": pa.array(np.arange(ROWS).astype(np.float16)),
    "booleans": pa.array([None if n % 5 == 0 else n % 2 == 0 for n in range(ROWS)]),
    "text": pa.array([None if n % 7 == 3 else f"{n}" * (n % 9) for n in range(ROWS)]),
    "large text": pa.array([f"{n}" for n in range(ROWS)], pa.large_string()),
    "views": pa.array([f"{n}" * (n % 9) for n in range(ROWS)], pa.string_view()),
    "fixed bytes": pa.array([b"%04d" % n for n in range(ROWS)], pa.binary(4)),
    "decimals": pa.array([decimal.Decimal(n) / 100 for n in range(ROWS)]),
    "dates": pa.array([dt.date(2020, 1, 1) + dt.timedelta(n) for n in range(ROWS)]),
    "lists": pa.array([None if n % 7 == 3 else [n] * (n % 4) for n in range(ROWS)]),
    "large lists": pa.array([[n] for n in range(ROWS)], pa.large_list(pa.int64())),
    "arrays": pa.array([None if n % 7 == 3 else [n, 1, 2] for n in range(ROWS)], pa.list_(pa.int32(), 3)),
    "structs": pa.array([None if n % 7 == 3 else {"a": n, "b": [{"c": str(n)}]} for n in range(ROWS)]),
    "maps": pa.array([[(f"{n}", n)] for n in range(ROWS)], pa.map_(pa.string(), pa.int64())),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array([f"[{n}]" for n in range(ROWS)])),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([n % 2 for n in range(ROWS)], pa.int8())),
    "codes": pa.array([None if n % 7 == 3 else f"{n % 50}" for n in range(ROWS)]).dictionary_encode(),
    "tensors": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [3]), pa.array([[n, 1, 2] for n in range(ROWS)], pa.list_(pa.int32(), 3))
    ),
}
CAN_TURN = [name for name in COLUMNS if name != "views"]  # pyarrow takes no rows of views


@pytest.mark.parametrize("name", COLUMNS)
def test_sums_of_parts_add_up(name: str) -> None:
    table = pa.table({"x": COLUMNS[name]})
    cut = pa.concat_tables([table.slice(0, 123), table.slice(123, 0), table.slice(123)])
    for first, second in ((None, None), (0, 123)):
        whole = row_sum(table, first)
        assert row_sum(cut, first) == whole
        assert (row_sum(table.slice(0, 123), first) + row_sum(table.slice(123), second)) % 2**64 == whole


@pytest.mark.parametrize("name", COLUMNS)
def test_another_row_is_another_sum(name: str) -> None:
    table = pa.table({"x": COLUMNS[name]})
    assert row_sum(table.slice(0, ROWS - 1)) != row_sum(table.slice(1))


@pytest.mark.parametrize("name", CAN_TURN)
def test_order_counts_only_if_asked(name: str) -> None:
    table = pa.table({"x": COLUMNS[name]})
    turned = table.take(np.arange(ROWS)[::-1])
    assert row_sum(turned) == row_sum(table)
    assert row_sum(turned, 0) != row_sum(table, 0)


def test_columns_belong_to_their_rows() -> None:
    one, other = pa.table({"x": [1, 2], "y": [3, 4]}), pa.table({"x": [1, 2], "y": [4, 3]})
    assert row_sum(one) != row_sum(other)
    assert row_sum(pa.table({"x": [None, 0]})) != row_sum(pa.table({"x": [0, 0]}))
    assert row_sum(pa.table({"x": [[1], [2, 3]]})) != row_sum(pa.table({"x": [[1, 2], [3]]}))
