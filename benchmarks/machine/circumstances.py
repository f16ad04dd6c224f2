"""The conditions of a benchmark run: commit, machine and package versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil
from rich.filesize import decimal
from xxhash import xxh3_64_hexdigest

from dataload import benchmarks

CODE = ("benchmarks", "cache", "dataload", "samplers", ":!benchmarks/results")  # paths of a commit
PACKAGES = (
    *("torch", "numpy", "pyarrow", "fsspec", "s3fs", "opencv-python-headless"),
    *("datasets", "mosaicml-streaming", "litdata", "webdataset"),
)
LIST = "import importlib.metadata as m; print(*(f'{d.name}={d.version}' for d in m.distributions()))"


def conditions(peers_python: Path | None) -> dict[str, Any]:
    """Return what the figures of one run have in common, as JSON values.

    Args:
        peers_python: Interpreter of the peers' environment. Its versions are marked "(peers)". None: no such
            environment.
    """
    return {
        "commit": _commit(),
        "host": xxh3_64_hexdigest(platform.node().encode())[:8],
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
    """Return the last commit of the code, "+" and a hash if files have changed since; "unknown" without a checkout."""
    root = Path(benchmarks.__file__).resolve().parents[1]

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(root), *words, "--", *CODE], capture_output=True, check=True).stdout

    try:
        commit, changes = git("log", "-1", "--format=%h").decode().strip(), git("diff", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (f"+{xxh3_64_hexdigest(changes)[:6]}" if changes else "") if commit else "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
