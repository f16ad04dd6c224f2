"""The picture of the results: accelerators kept busy, cold and warm, and the seconds of ten epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dataload.benchmarks.suite.figures import Figures, Spread
from dataload.benchmarks.suite.measurement import EPOCHS

COLOURS = {"ours": "#d95f02", "peer": "#7f9bb3", "reference": "#c9c9c9"}
PANELS = (
    "accelerators kept busy, first epoch",
    "accelerators kept busy, later epochs",
    f"seconds of {EPOCHS} epochs, without conversion",
)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw bars of every system, a column for each dataset."""
    from matplotlib.figure import Figure

    figures = Figures(results)
    entries = figures.systems[::-1]
    datasets = list(figures.datasets)
    canvas = Figure(
        figsize=(3 * len(datasets) + 2, 0.9 + len(PANELS) * (0.5 + 0.22 * len(entries))), layout="constrained"
    )
    grid = canvas.subplots(len(PANELS), len(datasets), squeeze=False, sharey=True)
    for column, dataset in enumerate(datasets):
        for axes, title, spreads in zip(grid[:, column], PANELS, _spreads(figures, dataset, entries), strict=True):
            for row, (entry, spread) in enumerate(zip(entries, spreads, strict=True)):
                if spread is None:
                    axes.text(0, row, " stopped or not run", va="center", fontsize=7, color="#888888")
                    continue
                length = 0 if spread.bound == "<" else spread.median
                axes.barh(row, length, color=COLOURS[entry.kind])
                axes.text(length, row, f" {spread.shown('{:,.0f}'.format)}", va="center", fontsize=7)
            axes.set_yticks(range(len(entries)), [entry.name for entry in entries], fontsize=8)
            axes.set_xticks([])
            axes.margins(x=0.2)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.set_title(f"{dataset}: {title}" if column == 0 else dataset, fontsize=8, loc="left")
    canvas.suptitle("More accelerators and fewer seconds are better", fontsize=9)
    canvas.savefig(path, dpi=110)


def _spreads(figures: Figures, dataset: str, entries: list[Any]) -> list[list[Spread | None]]:
    return [
        [figures.fed(dataset, entry.name, "cold") for entry in entries],
        [figures.fed(dataset, entry.name, "warm") for entry in entries],
        [figures.cost(dataset, entry.name, 1, EPOCHS, "seconds") for entry in entries],
    ]
