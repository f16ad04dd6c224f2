# ruff: noqa: NPY002 (as programs of users do)
"""Each batch's code has generators of its own, and the loop keeps its draws and its modes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import dropout

from dataload import make_dataset, make_loader
from dataload.dataset import Dataset

BATCH = 16
WAYS: list[dict[str, Any]] = [{}, {"num_threads": 0}, {"num_threads": 3}, {"num_workers": 2}]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    pq.write_table(pa.table({"x": np.arange(200, dtype=np.float32)}), tmp_path / "x.parquet", row_group_size=40)
    return make_dataset(tmp_path / "x.parquet", cache_dir=tmp_path / "cache", cache_bytes="100MB")


class Mixed(torch.nn.Module):
    """Draws from torch in the ways of torchvision's transforms, and of torch's distributions."""

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["x"]
        parts = [
            torch.rand(len(x)),
            torch.randn(len(x)),
            torch.rand_like(x),
            torch.randint(0, 9, (len(x),)),
            torch.empty(len(x)).uniform_(-1, 1),
            torch.empty(len(x)).normal_(),
            torch.bernoulli(torch.full_like(x, 0.5)),
            torch.multinomial(torch.ones(4), len(x), replacement=True),
            torch.distributions.Beta(2.0, 3.0).sample(x.shape),
            torch.distributions.Normal(0.0, 1.0).sample(x.shape),
            torch.rand(len(x), generator=torch.default_generator),
            torch.poisson(x, torch.Generator().manual_seed(3)),
        ]
        return {"x": x, "y": torch.stack([x, *parts])[:, torch.randperm(len(x))]}


def with_numpy(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"], "y": batch["x"] + float(np.random.normal()) + random.random()}


def with_dropout(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"], "y": dropout(batch["x"])}


def trained(loader: Any) -> tuple[list[torch.Tensor], list[float]]:
    """Return the batches of an epoch, and losses that depend on the loop's own draws."""
    seed_loop()
    batches, losses = [], []
    for batch in loader:
        batches.append(batch["y"])
        losses.append(dropout(batch["y"]).sum().item() + float(np.random.normal()) + random.random())
    return batches, losses


def seed_loop() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_batches_and_losses_are_equal_in_threads_workers_and_the_loop(
    dataset: Dataset, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    batches, losses = trained(make_loader(dataset, BATCH, transform=Mixed(), num_threads=0))
    for _ in range(3):
        again, their_losses = trained(make_loader(dataset, BATCH, transform=Mixed(), **options))
        assert same(batches, again)
        assert losses == their_losses
    assert not caplog.records


def test_nothing_is_told_of_code_that_draws_nothing(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    for options in WAYS:
        trained(make_loader(dataset, BATCH, transform=lambda batch: {"y": batch["x"] - batch["x"].mean()}, **options))
    assert not caplog.records


@pytest.mark.variants
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_resumed_epoch_draws_the_same(dataset: Dataset, options: dict[str, Any]) -> None:
    whole, _ = trained(make_loader(dataset, BATCH, transform=Mixed()))
    loader = make_loader(dataset, BATCH, transform=Mixed(), **options)
    for _ in zip(range(5), loader, strict=False):
        state = loader.state_dict()
    resumed = make_loader(dataset, BATCH, transform=Mixed(), **options)
    resumed.load_state_dict(state)
    rest, _ = trained(resumed)
    assert same(whole[5:], rest)


@pytest.mark.variants
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_threads": 0}], ids=str)
@pytest.mark.parametrize("transform", [with_numpy, with_dropout])
def test_every_draw_of_workers_and_of_the_loop_is_the_batchs_own(
    dataset: Dataset, options: dict[str, Any], transform: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    batches, losses = trained(make_loader(dataset, BATCH, transform=transform, num_workers=1))
    again, their_losses = trained(make_loader(dataset, BATCH, transform=transform, **options))
    assert same(batches, again)
    assert losses == their_losses
    assert not caplog.records


def rarely(draw: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a transform that draws in the batches of one rare row only, which are not the first."""

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        return draw(batch) if (batch["x"] == 111).any() else {"x": batch["x"], "y": batch["x"]}

    return transform


@pytest.mark.variants
@pytest.mark.parametrize(
    ("draw", "ways"),
    [(Mixed(), WAYS), (with_numpy, [{"num_workers": 1}, {"num_threads": 0}])],
    ids=["torch", "numpy"],
)
def test_draws_after_a_batch_without_any_are_its_own(
    dataset: Dataset, draw: Callable[..., Any], ways: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    def loader(options: dict[str, Any]) -> Any:
        return make_loader(dataset, BATCH, shuffle=False, transform=rarely(draw), **options)

    batches, losses = trained(loader(ways[0]))
    for options in ways:
        again, their_losses = trained(loader(options))
        assert same(batches, again)
        assert losses == their_losses
        resumed = loader(options)
        resumed.load_state_dict({**resumed.state_dict(), "cursor": 6 * BATCH})
        assert same(batches[6:], [batch["y"] for batch in resumed])
    assert not caplog.records


def test_the_loop_keeps_its_draws_if_a_transform_raises(dataset: Dataset) -> None:
    def fail(_: Any) -> None:
        torch.rand(1), np.random.rand(), random.random()
        raise ValueError("no")

    seed_loop()
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    seed_loop()
    with pytest.raises(ValueError, match="no"):
        next(iter(make_loader(dataset, BATCH, transform=fail, num_threads=0)))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


@pytest.mark.parametrize(
    ("transform", "names"), [(with_numpy, "numpy.random and random"), (with_dropout, "torch")], ids=["numpy", "dropout"]
)
def test_draws_that_threads_share_with_the_loop_are_told_once(
    dataset: Dataset, transform: Callable[..., Any], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(dataset, BATCH, transform=transform, num_threads=2)
    for _ in range(2):
        trained(loader)
    [record] = caplog.records
    assert f"of {names}, " in record.getMessage()
    assert "transform(batch, rng)" in record.getMessage()


def seeded_by_row(batch: dict[str, Any]) -> dict[str, Any]:
    """Two views of each row with the same draws, which are its own in each epoch."""
    views = []
    for row in batch["x"].tolist():
        for _ in range(2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1000 + int(row))
                views.append(torch.rand(3))
    return {"x": batch["x"], "y": torch.stack(views).view(-1, 2, 3)}


@pytest.mark.variants
@pytest.mark.parametrize("options", [{"num_threads": 0}, {"num_workers": 1}], ids=str)
def test_code_that_seeds_torch_has_the_draws_of_its_seed(
    dataset: Dataset, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = seeded_by_row({"x": torch.from_numpy(dataset["x"])})["y"]
    for batch in make_loader(dataset, BATCH, transform=seeded_by_row, prefetch=1, **options):
        assert torch.equal(batch["y"], expected[batch["x"].long()])
    assert not caplog.records


def test_a_loop_in_the_program_leaves_batches_of_threads_as_they_are(dataset: Dataset) -> None:
    """It seeds the generator of the process for each batch."""
    expected, _ = trained(make_loader(dataset, BATCH, transform=Mixed()))
    found = []
    for batch in make_loader(dataset, BATCH, transform=Mixed(), num_threads=2):
        found.append(batch["y"])
        next(iter(make_loader(dataset, BATCH, transform=Mixed(), num_threads=0)))
        torch.manual_seed(len(found))
    assert same(expected, found)


def test_a_loop_in_another_thread_leaves_the_generators_of_the_program(dataset: Dataset) -> None:
    seed_loop()
    expected = [torch.rand(1).item() for _ in range(50)]
    loader, batches, found = make_loader(dataset, BATCH, transform=Mixed(), num_threads=0), [], []
    seed_loop()

    def run() -> None:
        for batch in loader:
            batches.append(batch["y"])
            found.append(torch.rand(1).item())  # as the program does meanwhile

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == expected[: len(found)]
    assert same(batches, trained(make_loader(dataset, BATCH, transform=Mixed()))[0])


def test_a_transform_in_threads_makes_tensors_on_the_default_device(dataset: Dataset) -> None:
    for options in WAYS[:3]:
        loader = make_loader(dataset, BATCH, transform=lambda _: torch.empty(1).device.type, **options)
        with torch.device("meta"):
            assert {*loader} == {"meta"}


def test_a_collate_function_draws_for_its_batch(dataset: Dataset) -> None:
    """As masks of language models do."""

    def collate(rows: Any) -> dict[str, Any]:
        return {"y": rows.columns["x"] * torch.bernoulli(torch.full((len(rows),), 0.5))}

    batches, losses = trained(make_loader(dataset, BATCH, collate_fn=collate, num_threads=0))
    for options in WAYS:
        again, their_losses = trained(make_loader(dataset, BATCH, collate_fn=collate, **options))
        assert same(batches, again)
        assert losses == their_losses


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_code_in_threads_has_the_modes_of_the_loop(dataset: Dataset, threads: int) -> None:
    def modes(batch: dict[str, Any]) -> Any:
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, len(batch["x"]))[:-1]

    loader = make_loader(dataset, BATCH, transform=modes, num_threads=threads)
    default = True, False, False, torch.get_autocast_dtype("cpu")
    assert {*loader} == {default}
    with torch.no_grad():
        assert {*loader} == {(False, *default[1:])}
    with torch.inference_mode():
        assert {*loader} == {(False, True, *default[2:])}
    with torch.autocast("cpu", torch.float16):
        assert {*loader} == {(True, False, True, torch.float16)}
    assert {*loader} == {default}
