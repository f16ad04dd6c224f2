"""Warnings that a process logs once."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

_reported: set[str] = set()


def warn_once(kind: str, message: str) -> None:
    """Log a warning, unless this process or the one it was forked from has logged one of this kind."""
    if kind not in _reported:
        _reported.add(kind)
        log.warning("%s", message)
