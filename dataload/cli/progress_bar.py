"""A progress bar on a terminal."""

from __future__ import annotations

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


class Rate(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("?" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")


def bar(console: Console, counted: str = "") -> Progress:
    """With rate, and how long it will take. counted: what is counted, where it is not bytes."""
    sizes = (DownloadColumn(), TransferSpeedColumn())
    counts = (MofNCompleteColumn(), TextColumn(counted), Rate())
    columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        *(counts if counted else sizes),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, expand=True)
