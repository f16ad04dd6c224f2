"""Nodes that have copies of the data of their own, or mounts of it: other folders, inodes and times."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataload
from dataload import World, make_dataset, make_loader
from dataload.errors import ConfigError

FILES, ROWS = 16, 100


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Return the folder of each node."""
    first = tmp_path / "first" / "data"
    first.mkdir(parents=True)
    for number in range(FILES):
        ids = range(number * ROWS, (number + 1) * ROWS)
        pq.write_table(pa.table({"id": ids}), first / f"{number:02}.parquet", row_group_size=ROWS // 2)
    second = tmp_path / "other" / "disk" / "copy"
    shutil.copytree(first, second, copy_function=shutil.copyfile)
    for path in second.iterdir():
        os.utime(path, ns=(0, 0))
    return [first, second]


@pytest.mark.variants
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": "full"}, {"shuffle": False}, {"num_streams": 1}, {"num_streams": 4}], ids=str
)
def test_all_nodes_together_read_each_row_once(nodes: list[Path], options: dict[str, Any]) -> None:
    loaders = [
        make_loader(folder, 10, cache=False, world=World(rank, 2, 0, 1), **options) for rank, folder in enumerate(nodes)
    ]
    assert sorted(int(row) for loader in loaders for batch in loader for row in batch["id"]) == [*range(FILES * ROWS)]


def test_all_nodes_read_each_row_of_a_mixture_once(nodes: list[Path]) -> None:
    loaders = [
        make_loader(dataload.mix([folder, folder], cache=False), 10, world=World(rank, 2, 0, 1))
        for rank, folder in enumerate(nodes)
    ]
    rows = sorted(int(row) for loader in loaders for batch in loader for row in batch["id"])
    assert rows == sorted([*range(FILES * ROWS)] * 2)


def test_a_state_is_of_all_copies_and_of_no_other_files(nodes: list[Path]) -> None:
    first, second = (make_dataset(folder, cache=False) for folder in nodes)
    assert first.fingerprint != second.fingerprint
    state = make_loader(first, 10).state_dict()
    assert make_loader(second, 10).state_dict() == state
    make_loader(second, 10).load_state_dict(state)
    (nodes[1] / "00.parquet").rename(nodes[1] / "0.parquet")
    for other in (make_dataset(nodes[1], cache=False), first.select(range(500)), first.filter([("id", "<", 500)])):
        with pytest.raises(ConfigError, match="another dataset"):
            make_loader(other, 10).load_state_dict(state)
