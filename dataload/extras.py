"""The packages that pip installs only on request: `pip install 'dataload[demo]'`."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

from dataload.errors import ConfigError


def check_extra(extra: str, user: str) -> None:
    """Raise ConfigError unless every package of an extra is installed.

    Args:
        extra: Name of the extra, such as "demo".
        user: What needs its packages, for the message.
    """
    if missing := [name for name in _packages_of(extra) if not _is_installed(name)]:
        raise ConfigError(f"{user} needs more packages ({', '.join(missing)}): pip install 'dataload[{extra}]'")


def required(package: str, extra: str, user: str) -> Any:
    """Return a package of an extra. Raise ConfigError if it is not installed. `user` needs it, for the message."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{user} needs {package.partition('.')[0]}: pip install 'dataload[{extra}]'") from error


def _packages_of(extra: str) -> list[str]:
    found = (re.fullmatch(rf"""([\w.-]+).*;\s*extra == ["']{extra}["']""", line) for line in _requirements())
    return [match[1] for match in found if match]


def _requirements() -> list[str]:
    try:
        return metadata.requires("dataload") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return []


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False
