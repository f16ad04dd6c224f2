"""Rows of tables beside those that the table's own library reads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import make_dataset
from dataload.dataset import Dataset
from dataload.errors import ConfigError, DataError


def plain(value: Any) -> Any:
    """Return a value of a batch as one that can be sorted and compared."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def rows_of(dataset: Dataset) -> list[str]:
    """Return the rows of a dataset as texts, sorted."""
    columns = dataset.__getitems__(list(range(len(dataset)))).columns
    lists = {name: [plain(value) for value in values] for name, values in sorted(columns.items())}
    return sorted(repr(dict(zip(lists, row, strict=True))) for row in zip(*lists.values(), strict=True))


def rows_as_plain(table: pa.Table) -> list[str]:
    """Return the rows of an Arrow table as `rows_of` returns those of a plain file of it."""
    kinds = pa.schema([pa.field(each.name, _without_views(each.type)) for each in table.schema])
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.Table.from_pylist(table.to_pylist(), kinds), Path(folder) / "plain.parquet")
        return rows_of(make_dataset(folder, null_masks=True, cache=False))


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Return a type with text and bytes that Parquet's writer can slice."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _without_views(each.type)) for each in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_without_views(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), _without_views(kind.item_type))
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def check_same(source: Any, expected: pa.Table, **options: Any) -> None:
    """Check that a table has these rows: the same values, names and order of columns; or that it says it has none."""
    if not len(expected):
        with pytest.raises((ConfigError, DataError), match=r"no rows|no files|leave none of"):
            make_dataset(source, null_masks=True, cache=False, **options)
        return
    dataset = make_dataset(source, null_masks=True, cache=False, **options)
    found, wanted = rows_of(dataset), rows_as_plain(expected)
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        assert own == other
    tops = list(dict.fromkeys(name.partition(".")[0] for name in dataset.schema.names))
    assert tops == list(dict.fromkeys(name.partition(".")[0] for name in expected.column_names))
