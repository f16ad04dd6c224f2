"""Console output of the commands: results, tables, help and progress."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from dataload.runtime.progress import ProgressLines

WRONG_USE = 2
FOUND_A_PROBLEM = 1  # exit code of a command that ran and found a problem


def show(figures: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result of a command: `figures` as one JSON object, or `text`."""
    typer.echo(json.dumps(figures) if as_json else text)


def show_help(context: typer.Context) -> NoReturn:
    """Print the help of a command group that was called without a command, and exit with 2."""
    typer.echo(context.get_help())
    raise typer.Exit(WRONG_USE)


def table(lines: Sequence[tuple[str, str]]) -> str:
    """Format (label, text) lines in two columns. The text wraps at the width of the terminal."""
    width, margin = shutil.get_terminal_size().columns, 2 + max(len(label) for label, _ in lines)
    return "\n".join(
        textwrap.fill(
            text,
            max(width, 2 * margin),
            initial_indent=label.ljust(margin),
            subsequent_indent=" " * margin,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for label, text in lines
    )


@contextmanager
def progress(title: str, total: int, *, quiet: bool = False, unit: str = "") -> Iterator[Callable[[int], object]]:
    """Show progress on standard error: a bar on a terminal, lines elsewhere.

    Args:
        title: The name of the work.
        total: The amount of work, in bytes or in `unit`.
        quiet: Whether to show nothing.
        unit: The plural of what is counted, such as "files". Default: bytes.

    Yields:
        A function that advances the progress by an amount.
    """
    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with bar(console, unit) as shown:
            task = shown.add_task(title, total=total)
            yield lambda amount: shown.advance(task, amount)
    else:
        yield ProgressLines(title, total, unit).advance


class Rate(ProgressColumn):
    """A progress column with the count per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("?" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")


def bar(console: Console, unit: str = "") -> Progress:
    """Return a progress bar with rate and remaining time. It counts bytes without a `unit`."""
    sizes = (DownloadColumn(), TransferSpeedColumn())
    counts = (MofNCompleteColumn(), TextColumn(unit), Rate())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        *(counts if unit else sizes),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, expand=True)
