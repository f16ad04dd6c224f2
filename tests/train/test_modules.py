"""Each module trains in the mode that the user set, also after evaluations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from regression import Rows, in_order, squared_error
from torch import nn

from dataload.errors import ConfigError
from dataload.train import evaluate_over, find_batch_size, fit
from dataload.train.modules import modes_kept

OPTIONS = {"precision": "fp32", "progress": False}


class CrashError(Exception):
    """An error in the user's code."""


def build():
    """Return a model with two batch norms, the first of which is frozen, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model[1].eval()
    return model, torch.optim.SGD(model.parameters(), 0.01)


def modes_of(model):
    return [module.training for module in model.modules()]


FROZEN = modes_of(build()[0])


def own_loop(model):
    """Switch modes as a hand-written evaluation does."""
    assert not any(modes_of(model))
    model.eval()
    model.train()
    return {}


def over_rows(model):
    return evaluate_over(model, in_order(4), lambda model, batch: {"guess": model(batch["x"]).squeeze(1)})


def trained(evaluate=None, **options):
    """Return the modes in each step and after the run, and whether each batch norm kept its initial statistics."""
    model, optimizer = build()
    seen = []

    def loss(replica, batch):
        seen.append(modes_of(model))
        assert replica.training
        return squared_error(replica, batch)

    fit(model, optimizer, in_order(4), loss, epochs=2, evaluate=evaluate, **OPTIONS, **options)
    untouched = [bool((norm.running_mean == 0).all()) for norm in model[1:3]]
    return seen, modes_of(model), untouched


@pytest.mark.variants
@pytest.mark.parametrize("evaluate", [None, own_loop, over_rows])
def test_frozen_batch_norms_stay_frozen(evaluate):
    assert trained(evaluate) == ([FROZEN] * 20, FROZEN, [True, False])


@pytest.mark.slow
def test_frozen_batch_norms_stay_frozen_on_two_ranks(ranks):
    assert ranks(2, trained, own_loop) == [([FROZEN] * 10, FROZEN, [True, False])] * 2


def test_frozen_batch_norms_stay_frozen_when_compiled():
    assert trained(own_loop, compile={"backend": "eager"}) == ([FROZEN] * 20, FROZEN, [True, False])


def modes_in_training(model):
    seen = []

    def loss(replica, batch):
        seen.append((replica.training, modes_of(model)))
        return squared_error(replica, batch)

    fit(model, torch.optim.SGD(model.parameters(), 0.01), in_order(20), loss, epochs=1, **OPTIONS)
    return seen


def test_a_model_all_in_eval_mode_is_put_into_training_mode():
    model = build()[0].eval()
    assert modes_in_training(model) == [(True, [True] * 5)] * 2


def train_only_the_head():
    model = build()[0].eval()
    model[3].train()
    return modes_in_training(model)


class FrozenNorm(nn.Module):
    """Keeps its batch norm in eval mode by overriding `train`."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3).double(), nn.Linear(3, 1).double()

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.layer(self.norm(x))


@pytest.mark.parametrize("evaluate", [None, own_loop, over_rows])
def test_a_new_model_is_put_into_training_mode_by_its_own_method(evaluate):
    model = FrozenNorm()
    assert all(modes_of(model))
    seen = []

    def loss(model, batch):
        seen.append(modes_of(model))
        return squared_error(model, batch)

    fit(model, torch.optim.SGD(model.parameters(), 0.01), in_order(20), loss, epochs=2, evaluate=evaluate, **OPTIONS)
    assert seen == [[True, False, True]] * 4
    assert bool((model.norm.running_mean == 0).all())


def test_modes_are_kept_if_one_module_is_in_training_mode(ranks):
    """Also the mode of the root that `loss_fn` gets: the model itself, or DDP around it."""
    assert train_only_the_head() == [(False, [False] * 4 + [True])] * 2
    assert ranks(2, train_only_the_head) == [[(False, [False] * 4 + [True])]] * 2


def test_modes_are_restored_after_a_failed_evaluation(tmp_path):
    """Also the evaluation with which a resumed run begins."""
    model, optimizer = build()
    options = {"epochs": 2, "checkpoint_dir": tmp_path, **OPTIONS}

    def crash(model):
        raise CrashError

    with pytest.raises(CrashError):
        fit(model, optimizer, in_order(20), squared_error, evaluate=crash, **options)
    assert modes_of(model) == FROZEN
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-000001"]
    seen = []

    def loss(model, batch):
        seen.append(modes_of(model))
        return squared_error(model, batch)

    fit(model, optimizer, in_order(20), loss, evaluate=own_loop, **options)
    assert seen == [FROZEN] * 2


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "evaluate returned NoneType: return a dict of scalars"),
        (torch.ones(()), "evaluate returned Tensor: return a dict of scalars"),
        ({"recall": torch.ones(3)}, r"evaluate returned 'recall' of shape \(3,\): return one number"),
        ({"recall": np.ones((2, 2))}, r"evaluate returned 'recall' of shape \(2, 2\)"),
    ],
)
def test_an_evaluation_that_returns_no_scalars_is_an_error(result, message):
    model, optimizer = build()
    with pytest.raises(ConfigError, match=message):
        fit(model, optimizer, in_order(20), squared_error, epochs=1, evaluate=lambda model: result, **OPTIONS)


@pytest.mark.parametrize("wrong", [True, False])
def test_evaluate_over_gives_each_module_its_own_mode_back(wrong):
    model, _ = build()

    def metrics(model, batch):
        assert not any(modes_of(model))
        if wrong:
            raise CrashError
        return {"one": torch.ones(len(batch["x"]))}

    try:
        evaluate_over(model, in_order(20), metrics)
    except CrashError:
        assert wrong
    assert modes_of(model) == FROZEN


def test_the_size_of_a_batch_is_tried_in_the_modes_of_training():
    model, optimizer = build()
    seen = []

    def loss(model, batch):
        seen.append(modes_of(model))
        return squared_error(model, batch)

    batch = {"x": Rows(8).x, "y": Rows(8).y}
    find_batch_size(model, optimizer, batch, loss, start=4, limit=4, precision="fp32")
    assert seen == [FROZEN] * 5


class Merging(nn.Linear):
    """A layer that merges weights in eval mode, as some low-rank adapters do."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("mode", [True, False])
def test_modes_are_restored_by_the_train_method_of_a_module(mode):
    model = nn.Sequential(Merging(3, 3), nn.Sequential(Merging(3, 3)))
    model[1].train(mode)
    with modes_kept(model):
        model.train(not mode)
    assert [model[0].merged, model[1][0].merged] == [False, not mode]
    assert modes_of(model) == [True, True, mode, mode]


@pytest.mark.slow
def test_a_module_of_two_parents_keeps_its_own_mode():
    shared = nn.Dropout()
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)).eval()
    model[1].training = True
    with modes_kept(model):
        model.eval()
    assert modes_of(model) == [False, False, False, True]
