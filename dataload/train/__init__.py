"""A thin training harness over torch: DDP, autocast, checkpoints and the profiler."""

from __future__ import annotations

from dataload.train.batch_size import find_batch_size as find_batch_size
from dataload.train.ending import StopSignal as StopSignal
from dataload.train.evaluation import evaluate_over as evaluate_over
from dataload.train.harness import fit as fit

__all__ = ["StopSignal", "evaluate_over", "find_batch_size", "fit"]
