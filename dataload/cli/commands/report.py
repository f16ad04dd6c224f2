"""`dataload report`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dataload.cli.commands.options import Json
from dataload.cli.console import show
from dataload.errors import ConfigError


def report(
    folder: Annotated[Path, typer.Argument(help="The stats_dir of make_loader, or the log_dir of fit.")],
    html: Annotated[Path | None, typer.Option(help="Write a page to this file; default: FOLDER/report.html.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the plots to this PNG file instead.")] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Write metrics for Prometheus to this .prom file instead.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Report what a run waited for, by epoch and rank."""
    from dataload.reporting.html import lines, summary, write
    from dataload.telemetry.stats_log import merged, read_peers

    if not (html or png or metrics or as_json):
        html = folder / "report.html"
    peers = read_peers(folder, samples=bool(html or png))  # Cron may ask for metrics each minute.
    passes = merged(peers)
    if html:
        with _writing(html):
            write(passes, html, f"{folder.resolve().name}: where the time went")
    if png:
        with _writing(png):
            from dataload.reporting.plots import write as draw

            draw(passes, png)
    if metrics:
        with _writing(metrics):
            from dataload.reporting.prometheus import write as expose

            expose(merged(peers, steady=True), metrics)
    written = [str(path) for path in (html, png, metrics) if path]
    text = "" if as_json else "\n".join([*lines(passes), *written])
    show({**summary(passes), "written": written}, text, as_json=as_json)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise ConfigError for a missing package, or for a file that cannot be written."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"report needs more packages ({error.name}): pip install 'dataload[report]'") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
