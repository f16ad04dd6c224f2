"""`dataload head`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from dataload.cache.config import CacheConfig
from dataload.cli.commands.options import (
    Columns,
    Json,
    PartitioningName,
    StorageOptions,
    Url,
    names,
    open_manifest,
    with_shared_options,
)
from dataload.cli.console import progress, show, table
from dataload.cli.values import plain_value, row_text
from dataload.runtime.text import counted

if TYPE_CHECKING:
    from dataload.catalog.preview import PreviewColumn


@with_shared_options()
def head(
    url: Url,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show, at most those of the first row group.")] = 5,
    columns: Columns = None,
    partitioning: PartitioningName = "hive",
    *,
    cache: CacheConfig,
    storage_options: StorageOptions = None,
    as_json: Json = False,
) -> None:
    """Show columns, their form in batches, nulls and the first rows."""
    from dataload.catalog.preview import first_rows, preview_columns

    kept = replace(cache, cache_bytes=None)  # A cache that is opened with a limit evicts what exceeds it.
    manifest, blocks, objects = open_manifest(url, storage_options, kept, partitioning=partitioning, quiet=as_json)
    chosen = manifest.select(names(columns))
    files = len({group.file for group in manifest.row_groups})
    with progress("counting nulls", files, quiet=as_json, unit="files") as advance:
        described = preview_columns(manifest, chosen, blocks, lambda: advance(1))
    first = [
        {name: plain_value(value) for name, value in row.items()} for row in first_rows(manifest, chosen, blocks, rows)
    ]
    figures = {
        "objects": len(objects),
        "bytes": sum(group.bytes for group in manifest.row_groups),
        "rows": manifest.num_rows,
        "row_groups": len(manifest.row_groups),
    }
    shape = f"{counted(figures['rows'], 'row')} in {counted(figures['row_groups'], 'row group')}"
    lines = [("dataset", f"{counted(figures['objects'], 'object')}, {decimal(figures['bytes'])}; {shape}")]
    lines += [
        (column.name, f"{_type(column)}: {column.batch or column.problem}{_nulls(column)}") for column in described
    ]
    lines += [(f"row {number}", row_text(row)) for number, row in enumerate(first)]
    show(
        {**figures, "columns": [asdict(column) for column in described], "first_rows": first},
        table(lines),
        as_json=as_json,
    )


def _type(column: PreviewColumn) -> str:
    return column.type if column.promoted is None else f"{column.type} ({column.promoted})"


def _nulls(column: PreviewColumn) -> str:
    if column.nulls is None:
        return ", may have nulls"
    way = "" if column.holds_nulls else ": pass fill_null= or null_masks=True"
    return f", {counted(column.nulls, 'null')}{way}" if column.nulls else ""
