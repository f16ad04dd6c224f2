"""Which transforms get a random generator: those with a parameter `rng` or with a second one that they need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataload import ConfigError, make_loader
from dataload.loader.transform import Transform

MINE = np.random.default_rng(7)


class Crop(torch.nn.Module):
    def forward(self, batch: Any, generator: np.random.Generator) -> Any:
        return batch, generator


class Same(torch.nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch, None


class Called:
    def __call__(self, batch: Any, generator: np.random.Generator) -> Any:
        return batch, generator

    def method(self, batch: Any, generator: np.random.Generator) -> Any:
        return batch, generator


def positional_only(batch: Any, rng: np.random.Generator, /) -> Any:
    return batch, rng


def keyword_only(batch: Any, size: int = 3, *, rng: np.random.Generator) -> Any:
    return batch, rng


def with_default(batch: Any, size: int = 3, rng: np.random.Generator | None = None) -> Any:
    return batch, rng


def by_size(batch: Any, size: int, rng: np.random.Generator) -> Any:
    return batch, rng


TAKING = [
    lambda batch, generator: (batch, generator),
    lambda batch, rng: (batch, rng),
    lambda batch, generator, size=3: (batch, generator),
    positional_only,
    keyword_only,
    with_default,
    functools.partial(by_size, size=3),
    functools.partial(lambda size, batch, generator: (batch, generator), 3),
    functools.partial(Crop()),
    Crop(),
    Called(),
    Called().method,
]
TAKING_NONE = [
    lambda batch: (batch, None),
    lambda batch, size=3: (batch, None),
    lambda rng: (rng, None),
    lambda *batches: (*batches, None),
    lambda batch, **options: (batch, options.get("rng")),
    lambda batch, *rng: (batch, *(rng or [None])),
    functools.partial(lambda batch, generator: (batch, None), generator=MINE),
    Same(),
]


@pytest.mark.parametrize("function", TAKING)
def test_the_generator_is_passed(function: Callable[..., Any]) -> None:
    transform = Transform(function)
    assert transform.wants_rng
    batch, generator = transform(5, (1, 2, 3), 4)
    _, again = transform(5, (1, 2, 3), 4)
    assert batch == 5
    assert generator.random() == again.random()


@pytest.mark.parametrize("function", TAKING_NONE)
def test_the_batch_alone_is_passed(function: Callable[..., Any]) -> None:
    transform = Transform(function)
    assert not transform.wants_rng
    assert transform(5, (1, 2, 3), 4) == (5, None)


@pytest.mark.parametrize("function", [by_size, positional_only, keyword_only, with_default])
def test_a_generator_that_is_bound_stays(function: Callable[..., Any]) -> None:
    if function is positional_only:
        bound = functools.partial(lambda rng, batch: (batch, rng), MINE)
    else:
        bound = functools.partial(function, **({"size": 3} if function is by_size else {}), rng=MINE)
    assert Transform(bound)(5, (1, 2, 3), 4) == (5, MINE)


def test_a_builtin_gets_the_batch_alone() -> None:
    assert Transform(dict)({"x": 1}) == {"x": 1}
    assert Transform(None)(5) == 5


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, generator, size: batch,
        lambda batch, size, rng: batch,
        lambda batch, *, size: batch,
        lambda batch, rng, *, size: batch,
        lambda: None,
        torch.nn.MultiheadAttention(1, 1),
    ],
)
def test_a_transform_of_other_arguments_raises_before_any_request(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"transform\(.*\) is called with a batch, .*bind others with functools"):
        make_loader("/this folder does not exist/", 4, transform=function)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_threads": 0}], ids=str)
def test_a_module_gets_the_generator_in_a_loader(tmp_path: Path, options: Any) -> None:
    pq.write_table(pa.table({"x": range(4)}), tmp_path / "x.parquet")
    [(batch, generator)] = make_loader(tmp_path, 4, transform=Crop(), cache=False, **options)
    [(_, expected)] = make_loader(tmp_path, 4, transform=lambda batch, rng: (batch, rng), cache=False)
    assert sorted(batch["x"].tolist()) == [0, 1, 2, 3]
    assert generator.random() == expected.random()
