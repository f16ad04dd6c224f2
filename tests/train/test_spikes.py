"""Spikes of the loss and losses that are not finite: named, replayed, located, excluded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dataload import World, fit, make_dataset, make_loader
from dataload.cli.app import app
from dataload.dataset import Dataset
from dataload.errors import ConfigError, LossSpike, NonFiniteLoss

ROWS, BAD = 320, 154  # in step 27 of 40


def written(folder: Path, bad: float) -> Dataset:
    """Return a dataset in which one row has a target that is no good."""
    x = np.random.default_rng(5).normal(size=ROWS).astype(np.float32)
    y = 2 * x
    y[BAD] = bad
    pq.write_table(pa.table({"x": x, "y": y}), folder / "rows.parquet", row_group_size=40)
    return make_dataset(folder / "rows.parquet", cache=False)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), 0.01)


def squared(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])


def trained(dataset: Dataset, folder: Path, epochs: int, **how: Any) -> list[float]:
    """Train, in `folder`. Return the losses of the batches."""
    losses: list[float] = []

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = squared(model, batch)
        losses.append(loss.item())
        return loss

    model, optimizer = parts()
    loader = make_loader(dataset, 8, seed=how.pop("seed", 0), world=World(0, 1))
    fit(model, optimizer, loader, loss_fn, epochs=epochs, checkpoint_dir=folder, progress=False, **how)
    return losses


def asked(text: str, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the step that a message names, and the rows that its command shows."""
    [command] = set(re.findall(r"dataload rows (.*? --step \d+ --rank 0 --show)", text))
    done = CliRunner().invoke(app, ["rows", *command.split(), "--json"], catch_exceptions=False)
    shown = json.loads(done.stdout)
    assert command.startswith(str(folder))
    return shown["step"], [row for batch in shown["batches"] for row in batch["ranks"][0]["rows"]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALOAD_CACHE_DIR", str(tmp_path / "command"))


def test_from_a_spike_to_a_run_without_its_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset, run = written(tmp_path, 3000.0), tmp_path / "run"
    losses = trained(dataset, run, 1, spike=50)
    assert max(losses) > 1000
    step, rows = asked(caplog.text, run)
    assert losses.index(max(losses)) == step - 1
    [bad] = [row for row in rows if abs(row["values"]["y"]) > 100]
    assert bad["row_id"] == BAD
    assert dataset.locate(bad["row_id"]).row == bad["row"] == BAD % 40
    CliRunner().invoke(app, ["replay", str(run), "--step", str(step), "--out", str(tmp_path / "batch.pt")])
    assert torch.load(tmp_path / "batch.pt")["y"].tolist() == [row["values"]["y"] for row in rows]

    # by hand, from the switch on
    clean, (model, optimizer) = dataset.exclude([bad["row_id"]]), parts()
    for batch in make_loader(dataset, 8, world=World(0, 1)):
        _train(model, optimizer, batch)
    never = make_loader(dataset.select(np.arange(ROWS) != BAD), 8, world=World(0, 1))
    never.set_epoch(1)
    expected = [_train(model, optimizer, batch) for batch in never]
    assert trained(clean, run, 2, spike=50) == expected
    assert max(expected) < max(losses) / 100


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = squared(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loss_that_is_not_finite_names_the_command(tmp_path: Path, accumulate: int) -> None:
    """In the second epoch of the run: the steps of the first one are fewer by the part at its end."""
    dataset, run = written(tmp_path, np.nan), tmp_path / "run"
    clean = dataset.exclude([BAD])
    trained(clean, run, 1, accumulate=accumulate)
    with pytest.raises(NonFiniteLoss) as failed:
        trained(dataset, run, 2, accumulate=accumulate)
    step, rows = asked(str(failed.value), run)
    assert f"epoch 1, step {step}: the loss is nan" in str(failed.value)
    assert BAD in [row["row_id"] for row in rows]
    assert len(rows) == 8 * accumulate


def test_a_spike_may_raise(tmp_path: Path) -> None:
    with pytest.raises(LossSpike, match=r"rank 0, epoch 0, step 27: the loss is .* times the median"):
        trained(written(tmp_path, 3000.0), tmp_path / "run", 1, spike=50, on_spike="raise")


def test_usual_losses_are_no_spikes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(written(tmp_path, 1.0), tmp_path / "run", 2, spike=50)
    assert "median" not in caplog.text


@pytest.mark.parametrize(
    ("how", "message"), [({"spike": 1.0}, "spike=1.0: must be above 1"), ({"on_spike": "stop"}, "on_spike='stop': use")]
)
def test_arguments_that_cannot_work(tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        trained(written(tmp_path, 1.0), tmp_path / "run", 1, **how)


def test_a_run_without_a_ledger_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(written(tmp_path, 1.0), 8, world=World(0, 1))
    for how in ({"log_dir": "memory://logs"}, {}):
        caplog.clear()
        model, optimizer = parts()
        fit(model, optimizer, loader, squared, epochs=loader.rank_sampler.epoch + 2, progress=False, **how)  # type: ignore[arg-type]
        assert caplog.text.count("log_dir is a URL, so the run keeps no ledger") == len(how)
