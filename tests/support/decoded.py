"""Batches of Arrow tables, by way of blobs in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dataload.formats.schema import Layout, fields_of, flatten
from dataload.rows.arrow_decode import decode
from dataload.rows.collate import Batch, to_batch
from dataload.rows.open_row_groups import OpenRowGroups
from dataload.rows.row_block import NO_KEY, Records, pack


def packed(table: pa.Table, fill_null: Any = None, *, null_masks: bool = False) -> memoryview:
    """Return the blob of a table."""
    schema = flatten(table.schema)
    layout = Layout(fields_of(schema, null_masks=null_masks))
    memory = bytearray()

    def allocate(size: int) -> memoryview:
        memory.extend(b"\xaa" * size)
        return memoryview(memory)

    pack(decode(table, layout.fields, fill_null, "here", schema), len(table), layout, NO_KEY, "here", allocate)
    return memoryview(memory).toreadonly()


def gather(
    tables: list[pa.Table], which: Any, rows: Any, fill_null: Any = None, *, null_masks: bool = False
) -> Records:
    """Return row rows[i] of tables[which[i]], for each i."""
    starts = np.concatenate(([0], np.cumsum([len(table) for table in tables])))
    layout = Layout(fields_of(flatten(tables[0].schema), null_masks=null_masks))
    open_row_groups = OpenRowGroups(len(tables), np.arange(len(tables) + 1), starts, layout)
    for number, table in enumerate(tables):
        open_row_groups.put(number, [packed(table, fill_null, null_masks=null_masks)])
    found = open_row_groups.take(starts[which] + rows, which)
    assert found is not None
    return found


def whole(table: pa.Table, fill_null: Any = None, *, null_masks: bool = False, **shape: Any) -> Batch:
    """Return all rows of a table as a batch."""
    rows = np.arange(len(table))
    return to_batch(gather([table], np.zeros_like(rows), rows, fill_null, null_masks=null_masks), **shape)


def plain(value: Any) -> Any:
    """Return a value of a batch as a Python object."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return bytes(value) if isinstance(value, memoryview) else value
