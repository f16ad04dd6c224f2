"""The picture of the results: the busy share of every system, with the fewest ranks and the smallest row groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dataload.benchmarks.suite.figures import Figures, ranked
from dataload.benchmarks.suite.measurement import EPOCHS
from dataload.benchmarks.suite.report import percent

COLOURS = {"ours": "#d95f02", "peer": "#7f9bb3", "reference": "#c9c9c9"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw a bar for every system, a column for each dataset."""
    from matplotlib.figure import Figure

    figures = Figures(results)
    ranks, group = next(iter(figures.slices), (1, 0.0))
    datasets = [name for name, each in figures.datasets.items() if each["row_group_megabytes"] == group]
    entries = figures.entries[::-1]
    canvas = Figure(figsize=(2.4 * len(datasets) + 2, 1.3 + 0.3 * len(entries)), layout="constrained")
    for axes, name in zip(
        canvas.subplots(1, max(1, len(datasets)), sharey=True, squeeze=False)[0], datasets, strict=False
    ):
        for row, entry in enumerate(entries):
            share = figures.share(name, entry.name, ranks)
            axes.barh(row, 100, color="#f2f2f2")
            axes.barh(row, 100 * share.value if share and share.kind != "below" else 0, color=COLOURS[entry.kind])
            weight = "bold" if entry.kind == "ours" else "normal"
            style = "italic" if share and share.kind == "extrapolated" else "normal"
            text = percent(share).strip("*")
            axes.text(98, row, text, ha="right", va="center", fontsize=8, weight=weight, style=style)
        names = [f"{entry.name} (reference)" if entry.kind == "reference" else entry.name for entry in entries]
        axes.set_yticks(range(len(entries)), names, fontsize=9)
        axes.set_xticks([])
        axes.set_xlim(0, 100)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_title(figures.datasets[name]["workload"], fontsize=10, loc="left")
    title = "How much of the job the GPUs compute (more is better)"
    what = f"{EPOCHS} epochs from simulated S3, {ranked(ranks)}, start-up and conversion included"
    canvas.suptitle(f"{title}\n{what}", fontsize=11)
    canvas.supxlabel("italic: extrapolated      <: at most, stopped early", fontsize=8, color="#666666")
    canvas.savefig(path, dpi=130)
