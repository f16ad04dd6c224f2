"""The demo's network. A CPU core trains it on thousands of rows a second."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dataload.demo.dataset import SIDE


class DigitNet(nn.Module):
    """A convolutional classifier from uint8[B, 4096] pixels to float32[B, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=4, stride=4),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * (SIDE // 16) ** 2, 10),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels.view(-1, 1, SIDE, SIDE).float().div_(255).sub_(0.35)
        return self.layers(images)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of a batch with `image` and `label`."""
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of `images` (uint8[n, 4096]) whose label (int64[n]) the model predicts."""
    return float((model(images).argmax(1) == labels).double().mean())
