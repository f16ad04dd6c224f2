"""The command line: `dataload`."""

from __future__ import annotations

from dataload.cli.app import main as main

__all__ = ["main"]
