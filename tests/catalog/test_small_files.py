"""Small Parquet files, which the first request for their footers fetches whole."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_store import Answer, Asked, faulty_store

from dataload import make_loader
from dataload.cache.config import CacheConfig
from dataload.errors import DataError

FILES, ROWS = 40, 20


def test_a_small_file_is_fetched_once_in_one_request(
    bucket: Any, table_of: Callable[[int, int], pa.Table], cache: CacheConfig
) -> None:
    """Files with one row group and with several, which share cached blocks if they are larger."""
    sizes = [
        bucket.put_table(f"{number:03}.parquet", table_of(number * ROWS, ROWS), row_group_size=6 + number % 2 * ROWS)
        for number in range(FILES)
    ]
    assert max(sizes) < 8 << 10
    bucket.server.reset()
    loader = make_loader(bucket.url(), batch_size=16, storage_options=bucket.options, cache=cache)
    assert sorted(int(row) for batch in loader for row in batch["row_id"]) == list(range(FILES * ROWS))
    stats = bucket.server.stats()
    assert (stats["get_requests"], stats["get_bytes"]) == (FILES, sum(sizes))


@pytest.mark.usefixtures("no_aws_settings")
@pytest.mark.parametrize("times", [1, 2])
def test_damaged_bytes_of_a_small_file_are_fetched_once_more(times: int, cache: CacheConfig) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"x": range(ROWS)}), file, use_dictionary=False, write_page_checksum=True)

    def spoil(asked: Asked, answer: Answer) -> Answer:
        if asked.kind != "get" or asked.number >= times:
            return answer
        end = (
            100 if asked.number == 0 else len(answer.body)
        )  # The footer is right; then a part of the page is asked for.
        return replace(answer, body=answer.body[:40] + bytes(end - 40) + answer.body[end:])

    with faulty_store(spoil=spoil) as store:
        store.put("d/0.parquet", file.getvalue())
        loader = make_loader("s3://bucket/d", ROWS, shuffle=False, storage_options=store.options, cache=cache)
        if times == 2:
            with pytest.raises(DataError, match=r"0\.parquet row group 0 cannot be decoded"):
                next(iter(loader))
            return
        assert next(iter(loader))["x"].tolist() == list(range(ROWS))
        assert store.count("get") == 2
