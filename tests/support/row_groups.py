"""Row groups that a test makes one by one."""

from __future__ import annotations

from dataload.rows.background_decoder.client import BackgroundDecoder, DemandSignal
from dataload.rows.making.load_queue import Result
from dataload.rows.making.pipeline import make
from dataload.rows.row_group_cache import RowGroupCache
from dataload.rows.row_group_load import RowGroupLoad
from dataload.runtime.counters import Counters


def load(blobs: RowGroupCache, group: int) -> list[memoryview]:
    """Return the blobs of a row group, which is made if it is not cached."""
    results = list[Result]()
    make([RowGroupLoad(group, blobs, group)], lambda _, result: results.append(result), lambda _: None, lambda: None)
    [result] = results
    assert isinstance(result, list)
    return result


def make_in_background(decoder: BackgroundDecoder, group: int, demand: DemandSignal | None = None) -> bool:
    """Cache a row group. Return whether the background decoder did it."""
    return decoder.make(group, demand or DemandSignal(), Counters())
