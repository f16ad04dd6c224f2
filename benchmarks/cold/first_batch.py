"""The bytes that the first batch needs, and the time in which it should be there."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pyarrow.parquet as pq

from dataload.benchmarks.cold.epoch import Task
from dataload.benchmarks.origin import Origin
from dataload.benchmarks.systems.base import BUCKET
from dataload.dataset import make_dataset
from dataload.loader import make_loader
from dataload.world import World

FIRST = "first batch"  # the measurement: bare GETs of the bytes that it needs
LATENCIES, WIRES = 6, 1.3  # the bar: so many latencies, and so many times the bare time for the bytes


def needed(task: Task, origin: Origin) -> list[tuple[str, int, int]]:
    """Return the byte ranges (name, start, stop) that the loader's first batch needs: the row groups of its rows.

    A reader cannot leave out pages: these files have no page index, so the place of a row within a row group is not
    known. Almost every page has a row of the batch anyway, because a row group's rows are shuffled.
    """
    dataset = make_dataset(f"s3://{BUCKET}/{task.prefix}", cache=False, storage_options=origin.storage_options)
    loader = make_loader(dataset, task.batch_size, world=World(0, 1, 0, 1), window=task.window)
    rows = next(iter(loader.rank_sampler.batches()))
    groups = {(urlsplit(place.url).path.rsplit("/", 1)[-1], place.row_group) for place in dataset.locate(rows)}
    ranges = []
    for name, number in sorted(groups):
        group = pq.read_metadata(Path(task.files) / name).row_group(number)
        columns = [group.column(leaf) for leaf in range(group.num_columns)]
        starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        ends = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
        ranges.append((name, min(starts), max(ends)))
    return ranges


def bar(latency: float, bare_seconds: float) -> float:
    """Return the seconds in which the first batch should be there, with listing and footers.

    Args:
        latency: Latency of a request in seconds.
        bare_seconds: Time that bare GETs take for the bytes.
    """
    return LATENCIES * latency + WIRES * bare_seconds
