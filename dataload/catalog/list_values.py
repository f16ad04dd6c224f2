"""How many values the lists of a column have in each row group, as the footers tell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from dataload.cache.blocks.reader import IN_FLIGHT, Blocks, Object
from dataload.catalog.footer_cache import FooterReader, Metadata
from dataload.catalog.manifest import MOST_NULLS, UNKNOWN, Counts, Manifest, RowGroup
from dataload.runtime.executor import DaemonExecutor

VERSION = 1


def values_of(manifest: Manifest, blocks: Blocks, column: str) -> Counts | None:
    """Return at least how many values the lists of a column have, int64 [row groups]. Each host looks once.

    A null or an empty list may count as a value.

    Args:
        manifest: The dataset.
        blocks: Reads the footers through the cache.
        column: The column.

    Returns:
        None if a file does not tell.
    """
    groups = manifest.row_groups

    def parse(data: memoryview) -> Counts:
        found = np.frombuffer(data, "<i8").astype(np.int64)
        if len(found) != len(groups) or found.min(initial=0) < UNKNOWN or found.max(initial=0) > MOST_NULLS:
            raise ValueError("the values are of other row groups")
        return found

    def read() -> bytes:
        footers = FooterReader(blocks, manifest.chunks_of_a_file)

        def of(groups: Sequence[RowGroup]) -> list[int]:
            if column in dict(groups[0].constants):  # The file lacks it.
                return [0] * len(groups)
            footer = footers.of(groups[0])
            counts = [footer.num_values(group.number, column) if group.rows else 0 for group in groups]
            return [count if count is not None and 0 <= count <= MOST_NULLS else UNKNOWN for count in counts]

        files = [list(each) for _, each in groupby(groups, lambda group: group.file)]
        counts = DaemonExecutor(IN_FLIGHT, "dataload-values").map(of, files)
        return np.array([count for of_file in counts for count in of_file], "<i8").tobytes()

    first = Object(groups[0].file.path, 0, manifest.fingerprint)
    what = f"values {VERSION} of {column!r}"
    found = Metadata(blocks, first, what, parse).get_or_make_once(read)
    return None if UNKNOWN in found else found
