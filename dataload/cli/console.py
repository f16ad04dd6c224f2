"""What commands print: their result, and on the way there how far they are."""

from __future__ import annotations

import json
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.filesize import decimal

WRONG_USE = 2
FOUND_A_PROBLEM = 1  # what a command exits with that did what it was asked for, and found something wrong
FIRST_LINE, NEXT_LINES = 1.0, 10.0  # seconds, where there is no terminal


def show(figures: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the result: one JSON object, or the text."""
    typer.echo(json.dumps(figures) if as_json else text)


def show_help(context: typer.Context) -> NoReturn:
    """Print the help of a group of commands that was called without one, and exit with 2."""
    typer.echo(context.get_help())
    raise typer.Exit(WRONG_USE)


def table(lines: Sequence[tuple[str, str]]) -> str:
    """Lines with what they are about before them, folded to the width of the terminal."""
    wide, margin = shutil.get_terminal_size().columns, 2 + max(len(about) for about, _ in lines)
    return "\n".join(
        textwrap.fill(
            text,
            max(wide, 2 * margin),
            initial_indent=about.ljust(margin),
            subsequent_indent=" " * margin,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for about, text in lines
    )


@contextmanager
def progress(what: str, total: int, *, quiet: bool = False, counted: str = "") -> Iterator[Callable[[int], object]]:
    """Gives what to call with so much more of `total` done: a bar on a terminal's standard error, elsewhere lines.

    counted: what is counted, where it is not bytes.
    """
    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        from dataload.cli.progress_bar import bar

        with bar(console, counted) as shown:
            task = shown.add_task(what, total=total)
            yield lambda size: shown.advance(task, size)
    else:
        yield Lines(what, total, counted).advance


class Lines:
    """A line about how far something is: after a second, then every ten."""

    def __init__(self, what: str, total: int, counted: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._counted, self._clock = what, total, counted, clock
        self._done = 0
        self._since = clock()
        self._next = self._since + FIRST_LINE

    def advance(self, size: int) -> None:
        self._done += size
        now = self._clock()
        if now >= self._next:
            self._next = now + NEXT_LINES
            rate = self._done / max(1e-9, now - self._since)
            left = (self._total - self._done) / max(1e-9, rate)
            done = f"{self._said(self._done)} of {self._said(self._total)} ({self._done / self._total:.0%})"
            typer.echo(f"{self._what}: {done}, {self._said(round(rate))}/s, {duration(left)} to go", err=True)

    def _said(self, count: int) -> str:
        return f"{count:,} {self._counted}" if self._counted else decimal(count)


def duration(seconds: float) -> str:
    """A time as a person says it: "under 0.1 s", "0.2 s", "45 s", "3 min", "2.5 h"."""
    if seconds < 0.1:
        return "under 0.1 s"
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
