"""Checks of the arguments of `make_loader`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataload.errors import ConfigError


def check_arguments(
    batch_size: int,
    ragged: str,
    prefetch: int | None,
    num_workers: int,
    num_threads: int | None,
    dataloader_kwargs: Mapping[str, Any],
) -> None:
    """Check arguments that need no dataset. They are those of `make_loader`.

    Raises:
        ConfigError: An argument is out of range or unknown, or two of them exclude each other.
    """
    if ragged not in ("list", "flat"):
        raise ConfigError(f"ragged={ragged!r} is unknown: use 'list' or 'flat'")
    for name, number, least in (
        ("batch_size", batch_size, 1),
        ("prefetch", 1 if prefetch is None else prefetch, 1),
        ("num_threads", 1 if num_threads is None else num_threads, 0),
    ):
        if number < least:
            raise ConfigError(f"{name}={number} must be at least {least}")
    if num_workers and num_threads is not None:
        raise ConfigError(
            f"num_workers={num_workers} and num_threads={num_threads}: use one of them: threads for a transform that "
            "releases the interpreter lock, workers otherwise"
        )
    if not dataloader_kwargs.get("in_order", True):
        raise ConfigError("in_order=False: an epoch cannot be resumed if its batches are out of order; leave it out")
