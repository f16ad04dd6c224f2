"""Row groups that a test makes one by one."""

from __future__ import annotations

from dataload.rows.background_decoder.client import BackgroundDecoder, DemandSignal
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_group_life import RowGroupLife
from dataload.runtime.counters import Counters


def load(blobs: RowGroupCache, group: int) -> list[memoryview]:
    """Return the blobs of a row group."""
    return blobs.load(group, RowGroupLife())


def make_in_background(decoder: BackgroundDecoder, group: int, demand: DemandSignal | None = None) -> bool:
    """Cache a row group. Return whether the background decoder did it."""
    return decoder.make(group, demand or DemandSignal(), Counters())
