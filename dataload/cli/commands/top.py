"""`dataload top`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from time import sleep, time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from dataload.cli.commands.options import Json

EVERY = 1.0  # seconds between two looks


def top(
    folder: Annotated[Path, typer.Argument(help="The stats_dir of make_loader, or the log_dir of fit.")],
    once: Annotated[bool, typer.Option("--once", help="Show what the run does now, and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Watch the ranks of a run in the terminal, until Ctrl-C."""
    from dataload.reporting.live import figures, view
    from dataload.telemetry.stats_log import read_latest

    found, console = figures(read_latest(folder), time()), Console(highlight=False)
    if as_json:
        typer.echo(json.dumps(found))
    elif once or not console.is_interactive:
        console.print(view(found, console.width))
    else:
        for number in (signal.SIGTERM, signal.SIGQUIT):  # They end it after the terminal is as it was.
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z would leave the shell with a screen that it can't use
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(view(found, *console.size), refresh=True)
                sleep(EVERY)
                found = figures(read_latest(folder), time())
