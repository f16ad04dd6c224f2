"""The command-line program: its commands and exit codes."""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated

import typer

from dataload.benchmarks.run import bench
from dataload.cli.commands.cache import group
from dataload.cli.commands.convert import convert
from dataload.cli.commands.demo import demo
from dataload.cli.commands.doctor import doctor
from dataload.cli.commands.head import head
from dataload.cli.commands.plan import plan
from dataload.cli.commands.replay import replay, rows
from dataload.cli.commands.report import report
from dataload.cli.commands.top import top
from dataload.cli.commands.warm import warm
from dataload.cli.console import FOUND_A_PROBLEM, WRONG_USE, show_help
from dataload.errors import ConfigError, DataError, DataloadError, OriginNotFound

INTERRUPTED = 130
DEBUG = "--debug"

app = typer.Typer(
    name="dataload",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dataload {version('dataload')}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    _debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Data loading for PyTorch from S3."""
    if context.invoked_subcommand is None:
        show_help(context)


for command in (head, plan, warm, convert, doctor, report, top, rows, replay, demo, bench):
    app.command()(command)
app.add_typer(group, name="cache")


def main() -> None:
    """Run the command in `sys.argv` and exit with its code.

    The exit codes are 0 for success, 1 for a problem, 2 for wrong use and 130 for an interrupt.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # A dataset may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    words = [word for word in sys.argv[1:] if word != DEBUG]  # also allowed after the command
    try:
        code = app(words, standalone_mode=False)
    except Exception as error:  # noqa: BLE001 (any error is shown in one line)
        if DEBUG in sys.argv:
            traceback.print_exc()
        message, code = _explain(error)
        typer.echo(f"dataload: {message}", err=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code or 0)


def _explain(error: Exception) -> tuple[str, int]:
    """Return the message for an error in one line, and the exit code."""
    if isinstance(error, DataloadError):
        wrong_use = isinstance(error, (ConfigError, DataError, OriginNotFound))
        return " ".join(str(error).split()), WRONG_USE if wrong_use else FOUND_A_PROBLEM
    if isinstance(error, typer.Abort):
        return str(error) or "interrupted", INTERRUPTED
    if hasattr(error, "format_message"):  # the option parser's error about options or arguments
        return f"{error.format_message().rstrip('.')}. See --help.", WRONG_USE
    from dataload.runtime.redact import redacted

    return f"unexpected {type(error).__name__}: {redacted(error)} (dataload --debug … shows where)", FOUND_A_PROBLEM
