"""The values of some rows, with as few bytes as their files allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dataload.catalog.preview import rows_at
from dataload.map_style import MapStyle
from dataload.rows.numbered_rows import PlacedRows


def values_of(dataset: MapStyle, rows: PlacedRows) -> Iterable[Mapping[str, Any]]:
    """Return the values of rows: as the files have them; of a map or of packed documents, as batches have them.

    Raises:
        OriginError: The origin failed.
        DataError: A row group cannot be decoded.
    """
    if any(each.stages or each.packing for each in dataset.datasets):
        return dataset.__getitems__(rows)
    numbers, first, found = np.array(rows), 0, dict[int, Mapping[str, Any]]()
    for each in dataset.datasets:
        own = numbers[(numbers >= first) & (numbers < first + each.num_rows)]
        values = rows_at(each.manifest, each.file_columns, each.blocks, own - first)
        found.update(zip(own.tolist(), values, strict=True))
        first += each.num_rows
    return [found[row] for row in rows]
