"""What a figure depends on besides the code: the machine, the versions, the commit, the day."""

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

PACKAGES = ("torch", "numpy", "pyarrow", "fsspec", "s3fs", "datasets", "mosaicml-streaming", "litdata", "webdataset")
LIST = "import importlib.metadata as m; print(*(f'{d.name}={d.version}' for d in m.distributions()))"


def circumstances(peers_python: Path | None) -> dict[str, Any]:
    """JSON-able; versions of the peers' environment are marked so."""
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
    listed = subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=True).stdout.split()
    found = dict(each.split("=") for each in listed)
    return {f"{name} (peers)": found[name] for name in PACKAGES if name in found}


def _commit() -> str:
    """The checkout's commit, "+" when files differ from it; "unknown" outside of one."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    named = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if named.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return named.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
