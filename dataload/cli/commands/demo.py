"""`dataload demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dataload.cache.config import CacheConfig
from dataload.cli.commands.options import Json
from dataload.cli.console import FOUND_A_PROBLEM, show
from dataload.errors import ConfigError
from dataload.extras import check_extra

LEAST_ROWS = 10_000  # 5,000 are not enough.
MOST_SEED = 2**32 - 1  # of scikit-learn


def demo(
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder of the cache; default: a temporary one, or with --keep the user's.")
    ] = None,
    keep: Annotated[bool, typer.Option(help="Keep the cache for a second run.")] = False,
    shuffled_labels: Annotated[
        bool, typer.Option(help="Train on random labels as a control: the model must not learn.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Number of rows of the dataset, 4 kB each.", min=1000)] = 50_000,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle and of the model.", min=0, max=MOST_SEED)] = 0,
    serve: Annotated[
        bool, typer.Option("--serve", help="Only serve data for the README's first program, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model from an S3 server on this machine."""
    if rows < LEAST_ROWS and not serve:
        raise ConfigError(f"--rows={rows}: the model needs {LEAST_ROWS} rows to learn enough in three epochs")
    folder = None if cache_dir is None else CacheConfig(cache_dir).folder
    check_extra("demo", "the demo")
    from dataload.demo.runner import run_demo
    from dataload.demo.serving import serve_until_interrupt

    if serve:
        typer.echo(f"writing {rows:,} images", err=True)
        serve_until_interrupt(rows, seed, lambda settings: _show_settings(settings, as_json=as_json))
        return
    result = run_demo(cache_dir=folder, rows=rows, keep=keep, shuffled_labels=shuffled_labels, seed=seed, json=as_json)
    if result.problems:
        raise typer.Exit(FOUND_A_PROBLEM)


def _show_settings(settings: dict[str, str], *, as_json: bool) -> None:
    """Print the environment variables of the server as a line for a shell."""
    show(settings, f"export {' '.join(f'{name}={value}' for name, value in settings.items())}", as_json=as_json)
    typer.echo("serving s3://bucket/train/ until Ctrl-C: paste this line into another terminal", err=True)
