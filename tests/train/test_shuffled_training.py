"""A model trained on label-sorted rows with a block shuffle is as accurate as with a uniform shuffle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dataload.samplers.order import Order
from dataload.samplers.window_size import default_window

SEEDS = range(12)
EPOCHS = 5
BOUND = 0.01  # of accuracy, on either side
LENGTHS = [48] * 30


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, ...]:
    """1440 training images sorted by label, 357 test images, and the labels of both."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    drawn = np.random.default_rng(0).permutation(len(labels))
    train, test = drawn[:1440], drawn[1440:]
    train = train[np.argsort(labels[train], kind="stable")]
    parts = (images[train] / 16, labels[train], images[test] / 16, labels[test])
    return tuple(torch.from_numpy(part) for part in parts)


def accuracies(digits: tuple[torch.Tensor, ...], shuffle: str | bool, window: int | None = None) -> np.ndarray:
    """Return the accuracy of softmax regression after five epochs of SGD, for each seed of weights and order."""
    images, labels, test_images, test_labels = digits
    found = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = torch.nn.Linear(64, 10, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        order = Order(LENGTHS, shuffle=shuffle, seed=seed, window=window or default_window(LENGTHS, LENGTHS))
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, EPOCHS)
        for epoch in range(EPOCHS):
            for rows in torch.from_numpy(order.rows(epoch, np.arange(order.n))).split(32):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
                optimizer.step()
            scheduler.step()
        found.append((model(test_images).argmax(1) == test_labels).double().mean().item())
    return np.array(found)


def equivalent(first: np.ndarray, second: np.ndarray) -> bool:
    """Run two one-sided t tests on the differences of the pairs, at 5 % each (Schuirmann, 1987)."""
    from scipy import stats

    differences = first - second
    error = stats.sem(differences)
    margin = stats.t.ppf(0.95, len(differences) - 1) * error
    return bool(abs(differences.mean()) + margin < BOUND)


@pytest.mark.slow
def test_block_trains_as_well_as_full_and_less_does_not(digits: tuple[torch.Tensor, ...]) -> None:
    full, block, unshuffled = (accuracies(digits, shuffle) for shuffle in ("full", "block", False))
    assert full.min() > 0.9
    assert equivalent(block, full), (block, full)
    assert not equivalent(unshuffled, full)
    assert not equivalent(accuracies(digits, "block", window=1), full)
