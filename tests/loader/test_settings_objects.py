"""Arguments of configuration libraries: mappings and sequences of any type, wherever a dict or a list may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import make_dataset, make_loader, mix


class Node(Mapping[str, Any]):
    """A mapping that is no dict, as OmegaConf's DictConfig is none."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return wrapped(self._values[key])

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Nodes(Sequence[Any]):
    """A sequence that is no list."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __getitem__(self, number: Any) -> Any:
        return wrapped(self._values[number])

    def __len__(self) -> int:
        return len(self._values)


def wrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return Node(value)
    return Nodes(value) if isinstance(value, list) else value


def omega(value: Any) -> Any:
    return pytest.importorskip("omegaconf").OmegaConf.create(value)


@pytest.mark.parametrize("config", [wrapped, omega], ids=["abc", "omegaconf"])
def test_lists_and_dicts_of_a_configuration(tmp_path: Path, config: Any) -> None:
    files = []
    for name in ("a", "b"):
        table = pa.table({"x": pa.array([*range(9), None]), "y": np.arange(10) / 2, "z": np.ones(10)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=5)
        files.append(str(tmp_path / f"{name}.parquet"))
    settings = config(
        {
            "source": files,
            "columns": ["x", "y", "z"],
            "filters": [["x", "not in", [3, 4]]],
            "either": [[["x", "=", 1]], [["x", "=", 2]]],
            "fill_null": {"x": -1},
            "storage_options": {"auto_mkdir": False},
            "group": {"both": ["y", "z"]},
            "fractions": [0.5, 0.5],
            "mapped": ["y"],
            "weights": {"a": 3, "b": 1},
            "sources": {"a": files[0], "b": [files[1]]},
        }
    )
    arguments = {name: settings[name] for name in ("columns", "filters", "fill_null", "storage_options", "group")}
    loader = make_loader(settings["source"], 4, shuffle=False, cache=False, **arguments)
    batches = list(loader)
    assert sum(len(batch["x"]) for batch in batches) == 16
    assert batches[0]["both"].shape == (4, 2)
    dataset = make_dataset(settings["source"], fill_null=settings["fill_null"], cache=False)
    assert dataset.schema.names == ["x", "y", "z"]
    assert len(dataset.filter(settings["either"])) == 4
    assert [len(part) for part in dataset.split(settings["fractions"])] == [10, 10]
    mapped = dataset.map(lambda batch: {"y": 2 * batch["y"]}, columns=settings["mapped"])
    assert torch.equal(mapped.__getitems__([3]).columns["y"], torch.tensor([3.0], dtype=torch.float64))
    mixture = mix(settings["sources"], settings["weights"], fill_null=settings["fill_null"], cache=False)
    assert (mixture.names, mixture.weights) == (("a", "b"), (3, 1))
