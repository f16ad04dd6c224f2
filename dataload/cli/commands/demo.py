"""`dataload demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from dataload.cli.commands.options import CacheDir, Json
from dataload.cli.console import FOUND_A_PROBLEM
from dataload.errors import ConfigError


def demo(
    cache_dir: CacheDir = None,
    keep: Annotated[bool, typer.Option(help="Keep the cache for a second run.")] = False,
    shuffled_labels: Annotated[
        bool, typer.Option(help="Train on random labels as a control: the model must not learn.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Number of rows of the dataset, 4 kB each.", min=1000)] = 50_000,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle and of the model.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a model from an S3 server on this machine."""
    try:
        from dataload.demo.runner import run_demo
    except ImportError as error:
        raise ConfigError(f"the demo needs more packages ({error.name}): pip install 'dataload[demo]'") from error

    result = run_demo(
        cache_dir=cache_dir, rows=rows, keep=keep, shuffled_labels=shuffled_labels, seed=seed, json=as_json
    )
    if result.problems:
        raise typer.Exit(FOUND_A_PROBLEM)
