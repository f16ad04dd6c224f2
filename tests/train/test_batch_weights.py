"""`loss_weight`: accumulated batches and ranks count by what their loss averages over, such as labels."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from regression import assert_close, parameters_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from dataload import make_loader
from dataload.errors import ConfigError
from dataload.rows.collate import Flat
from dataload.train import fit
from dataload.train.batch_weights import weight_of
from dataload.train.ranks.process_group import process_group
from dataload.world import World

ROWS, LENGTH, WORDS = 44, 8, 16


def labels():
    """Return labels [ROWS, LENGTH], of which each row has from none to all. The last four rows have none."""
    draw = torch.Generator().manual_seed(3)
    found = torch.randint(WORDS, (ROWS, LENGTH), generator=draw)
    lengths = torch.arange(ROWS) * 5 % (LENGTH + 1)
    lengths[-4:] = 0
    return found.masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100)


def build():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(WORDS, 6), nn.Tanh(), nn.Linear(6, WORDS)).double()
    return model, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)


def by_torch(model, batch):
    """The mean over the labels that are not -100; NaN if there are none."""
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def by_hand(model, batch):
    """The same, whose gradient is NaN as well if there are none."""
    mask, targets = batch["labels"] != -100, batch["labels"].clamp(0)
    losses = nn.functional.cross_entropy(model(batch["ids"]).transpose(1, 2), targets, reduction="none")
    mean = (losses * mask).sum() / mask.sum()
    return mean, {"mean": mean.detach()}


def trained(batch_size, loss_fn=by_torch, loss_weight="tokens", parts=None, **options):
    """Train on batches of rows in order, each of which the ranks share. Return parameters and history."""
    world = World.detect()
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % WORDS
    together = zip(ids.split(batch_size * world.world_size), labels().split(batch_size * world.world_size), strict=True)
    own = [[column[world.rank * batch_size :][:batch_size] for column in columns] for columns in together]
    batches = [dict(zip(("ids", "labels"), columns, strict=True)) for columns in own]
    model, optimizer = parts or build()
    options = {"epochs": 2, "precision": "fp32", "progress": False, "loss_weight": loss_weight, **options}
    history = fit(model, optimizer, batches, loss_fn, **options)
    return parameters_of(model), history


def test_batches_of_one_row_train_as_one_batch_of_all(ranks):
    """The last step of an epoch has fewer batches, and the last batches have no labels at all."""
    whole, history = trained(8)
    for batch_size, number, accumulate in [(1, 1, 8), (2, 1, 4), (4, 2, 1), (1, 2, 4), (2, 4, 1)]:
        for other, other_history in ranks(number, trained, batch_size, accumulate=accumulate):
            assert_close(other, whole)
            assert [record["rows"] for record in other_history] == [ROWS, ROWS]
            losses = [[record["loss"] for record in each] for each in (history, other_history)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert (trained(1, loss_weight=None, accumulate=8, check_finite=False)[0] - whole).abs().max() > 1e-3


def test_a_batch_without_labels_adds_nothing(ranks):
    """Its loss and its gradient are NaN, on one of two ranks, on both, and in the first batch of a step."""
    whole, _ = trained(8, by_hand)
    assert_close(whole, trained(8)[0])
    alone, history = trained(1, by_hand, accumulate=8)
    assert_close(alone, whole)
    assert history[-1]["mean"] == pytest.approx(history[-1]["loss"], rel=1e-12)
    for other, _ in ranks(2, trained, 1, by_hand, accumulate=4):
        assert_close(other, whole)


def trained_sharded():
    model, _ = build()
    with process_group(World.detect(), torch.device("cpu")):
        fully_shard(model)
        parts = model, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        history = trained(1, accumulate=4, parts=parts)[1]
        return torch.cat([value.full_tensor().detach().flatten() for value in model.parameters()]), history


def test_sharded_ranks_count_by_labels(ranks):
    whole, history = trained(8)
    for other, other_history in ranks(2, trained_sharded):
        assert_close(other, whole)
        assert other_history[-1]["loss"] == pytest.approx(history[-1]["loss"], rel=1e-12)


class CrashError(Exception):
    """An error in the user's code."""


@pytest.mark.variants
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_epoch_has_the_same_bits_and_the_same_loss(tmp_path, precision):
    """The checkpoint within an epoch has the weights behind its losses."""
    rows = pa.table({"row": range(ROWS)})
    pq.write_table(rows, tmp_path / "x.parquet", row_group_size=10)
    ids, targets = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS, labels()

    def transform(batch):
        return {"ids": ids[batch["row"]], "labels": targets[batch["row"]]}

    def run(folder, crash_at=None):
        model, optimizer = build()
        steps = itertools.count()

        def loss_fn(model, batch):
            if next(steps) == crash_at:
                raise CrashError
            return by_torch(model, batch)

        loader = make_loader(tmp_path / "x.parquet", 2, cache=False, transform=transform)
        options = {"epochs": 2, "accumulate": 3, "loss_weight": "tokens", "precision": precision, "progress": False}
        options |= {"checkpoint_dir": tmp_path / folder, "checkpoint_every": 1}
        history = fit(model, optimizer, loader, loss_fn, **options)
        return parameters_of(model), [(record["loss"], record["rows"]) for record in history]

    whole, history = run("whole")
    with pytest.raises(CrashError):
        run("parts", crash_at=32)
    resumed, again = run("parts")
    assert torch.equal(resumed, whole)
    assert again == history


def weighed(weights, dtype=torch.float64, **options):
    """Train on batches that weigh this much. Return parameters, the learning rate, and the history."""
    model = build()[0].to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ids = torch.arange(LENGTH).view(1, LENGTH) % WORDS
    batches = [{"ids": (ids + weight) % WORDS, "labels": ids, "weight": weight} for weight in weights]
    options = {"epochs": 1, "precision": "fp32", "progress": False, "scheduler": halved, **options}
    history = fit(model, optimizer, batches, by_torch, loss_weight=lambda batch: batch["weight"], **options)
    return parameters_of(model), optimizer.param_groups[0]["lr"], history


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_weighs_nothing_is_left_out(precision):
    """Weight decay, momentum and the scheduler would change what is trained."""
    without, rate, _ = weighed([1, 2], precision=precision)
    assert rate == 0.1 / 4
    between, rate, _ = weighed([1, 0, 2, 0, 0], precision=precision)
    assert rate == 0.1 / 4
    assert torch.equal(between, without)
    nothing, rate, [record] = weighed([0, 0, 0], accumulate=2, precision=precision)
    assert rate == 0.1
    assert torch.equal(nothing, parameters_of(build()[0]))
    assert math.isnan(record["loss"])
    assert record["rows"] == 3


def test_light_batches_that_begin_a_step_overflow_nothing_in_fp16():
    """Autocast leaves float64 alone. The scale of losses falls until the heavy batches fit."""
    options = {"dtype": torch.float32, "accumulate": 2, "precision": "fp16"}
    skipped = [
        weighed([5000, 5000] * 3 + last, **options)[2][0]["skipped_steps"]
        for last in ([5000] * 6, [1, 5000, 1, 5000, 0, 5000])
    ]
    assert skipped[1] == skipped[0] < 3


def test_a_light_batch_that_ends_an_epoch_overflows_nothing_in_the_next_one():
    options = {"dtype": torch.float32, "precision": "fp16", "epochs": 4}
    records = weighed([5000, 5000, 5000, 1], **options)[2]
    assert not any(record["skipped_steps"] for record in records[1:])


class Sums(nn.Module):
    """A model whose gradients are sums of powers of two, which are exact in any order."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


def in_powers_of_two(batch_size, accumulate, precision="fp32"):
    """Train one step on 8 rows with 1, 1, 2, 4, 8, 16, 16 and 16 values that count."""
    counts = torch.tensor([1, 1, 2, 4, 8, 16, 16, 16])
    x = torch.arange(32.0).view(8, 4)
    batches = [
        {"x": own, "counts": count} for own, count in zip(x.split(batch_size), counts.split(batch_size), strict=True)
    ]

    def loss_fn(model, batch):
        return (model(batch["x"]).sum(1) * batch["counts"]).sum() / batch["counts"].sum()

    model = Sums()
    options = {"epochs": 1, "precision": precision, "progress": False, "accumulate": accumulate}
    fit(model, torch.optim.SGD(model.parameters(), 0.25), batches, loss_fn, loss_weight=counted, **options)
    return parameters_of(model)


def counted(batch):
    return batch["counts"].sum()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_bits_are_equal_where_sums_are_exact(precision):
    """In fp16 a GradScaler scales the losses."""
    whole = in_powers_of_two(8, 1, precision)
    assert torch.equal(in_powers_of_two(1, 8, precision), whole)
    assert not torch.equal(whole, torch.ones(4))


@pytest.mark.parametrize(
    "counted_labels",
    [
        torch.tensor([[1, -100], [2, 3]]),
        np.array([1, 2, -100, 3]),
        [torch.tensor([1, 2, -100]), torch.tensor([3])],
        (torch.tensor([1, 2, -100]), torch.tensor([3])),
        Flat(torch.tensor([-100, 1, 2, 3]), torch.tensor([0, 2, 4])),
        Flat(Flat(torch.tensor([-100, 1, 2, 3]), torch.tensor([0, 2, 4])), torch.tensor([0, 2])),
        [[1, 2, -100], [], [3]],
        [1, 2, -100, 3],
    ],
)
def test_labels_are_counted_in_any_form(counted_labels):
    assert weight_of("tokens", {"labels": counted_labels}) == 3


@pytest.mark.parametrize(
    ("loss_weight", "message"),
    [
        ("rows", "loss_weight='rows' must be 'tokens', a function of the batch"),
        (lambda batch: -1, "loss_weight returned -1: return the number of what the loss averages over"),
        (lambda batch: torch.ones(2), "loss_weight returned tensor([1., 1.]): return the number"),
        (lambda batch: float("nan"), "loss_weight returned nan: return the number"),
        (lambda batch: None, "loss_weight returned None: return the number"),
    ],
)
def test_weights_that_cannot_be(loss_weight, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        trained(8, loss_weight=loss_weight)


def test_tokens_need_labels():
    with pytest.raises(ConfigError, match='has no "labels": pass a function of the batch'):
        weight_of("tokens", {"tokens": torch.ones(2)})


@pytest.mark.parametrize("row", [None, "text", [1, None]])
def test_tokens_need_labels_that_are_numbers(row):
    with pytest.raises(ConfigError, match=r"these are no numbers: .*: pass a function of the batch"):
        weight_of("tokens", {"labels": [torch.tensor([1]), row]})
