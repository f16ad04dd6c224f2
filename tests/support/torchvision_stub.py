"""Lets MosaicML Streaming and LitData import a torchvision that was built for another torch, as `benchmarks` does."""

from __future__ import annotations

from contextlib import suppress

import torch

with suppress(ImportError):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
