"""The requests in flight over time, as an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.0, 1.6  # inches


def draw(measured: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the requests in flight in the first run of each measurement.

    Args:
        measured: The measurements, as `main` writes them to JSON.
        path: The image file. Its suffix gives the format.
    """
    figure = Figure((WIDTH, HEIGHT * len(measured)), layout="constrained")
    for axes, entry in zip(figure.subplots(len(measured), squeeze=False)[:, 0], measured, strict=True):
        changes = entry["runs"][0]["over_time"]
        since = changes[0][0] if changes else 0.0
        axes.step([at - since for at, _ in changes], [count for _, count in changes], where="post", linewidth=0.8)
        axes.set_title(f"{entry['system']}: {entry['shape']}, row groups of {entry['group']:g} MB, {entry['origin']}")
        axes.set_xlabel("seconds since the first request")
        axes.set_ylabel("in flight")
    figure.savefig(path)
