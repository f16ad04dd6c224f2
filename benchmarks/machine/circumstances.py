"""The environment of a benchmark run: machine, package versions, commit and date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil
from rich.filesize import decimal

PACKAGES = (
    *("torch", "numpy", "pyarrow", "fsspec", "s3fs", "opencv-python-headless"),
    *("datasets", "mosaicml-streaming", "litdata", "webdataset"),
)
LIST = "import importlib.metadata as m; print(*(f'{d.name}={d.version}' for d in m.distributions()))"


def circumstances(peers_python: Path | None) -> dict[str, Any]:
    """Return the environment of this run as JSON values.

    Args:
        peers_python: Interpreter of the peers' environment. Its versions are marked "(peers)". None: no such
            environment.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory": decimal(psutil.virtual_memory().total),
            "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        },
        "versions": {"Python": platform.python_version()} | _own() | _peers(peers_python),
    }


def _own() -> dict[str, str]:
    return {each.name: each.version for each in distributions() if each.name in PACKAGES}


def _peers(python: Path | None) -> dict[str, str]:
    if python is None:
        return {}
    lines = subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=True).stdout.split()
    versions = dict(line.split("=") for line in lines)
    return {f"{name} (peers)": versions[name] for name in PACKAGES if name in versions}


def _commit() -> str:
    """Return the commit of the checkout, with "+" for changed files; "unknown" without a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
