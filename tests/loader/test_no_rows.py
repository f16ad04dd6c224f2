"""A dataset without any rows: loops end at once, and states restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataload import CacheConfig, World, make_dataset, make_loader
from dataload.loader.loader import Loader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"x": pa.array([], pa.int64()), "text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    return tmp_path


def check(make: Any) -> None:
    loader: Loader = make()
    assert len(loader) == 0
    state = loader.state_dict()
    assert list(loader) == list(loader) == []
    assert loader.padding == 0
    other = make()
    other.load_state_dict(state)
    other.load_state_dict(loader.state_dict())
    assert list(other) == []
    assert loader.stats().rows == 0


@pytest.mark.parametrize("num_streams", [None, 2])
@pytest.mark.parametrize("shuffle", [True, "full", False])
def test_an_epoch_of_no_rows(folder: Path, shuffle: Any, num_streams: int | None) -> None:
    dataset = make_dataset(folder, cache=False)
    assert (len(dataset), dataset.schema.names) == (0, ["x", "text"])
    check(lambda: make_loader(dataset, 4, shuffle=shuffle, num_streams=num_streams, row_ids=True))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1, "transform": dict},
        {"num_threads": 2, "transform": dict},
        {"drop_last": True},
        {"world": World(1, 2, 1, 2)},
        {"ragged": "flat", "null_masks": True},
    ],
    ids=str,
)
def test_options_for_no_rows(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    cache = CacheConfig(cache_dir=str(tmp_path / "cache"), cache_bytes="10MB")
    check(lambda: make_loader(folder / "a.parquet", 4, cache=cache, **options))
