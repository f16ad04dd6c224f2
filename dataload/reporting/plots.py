"""The plots of a report: waits by cause, throughput, and bytes by tier."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from rich.filesize import decimal

from dataload.reporting import aggregate
from dataload.reporting.aggregate import Epoch, throughput
from dataload.runtime.text import precise
from dataload.telemetry.loader_stats import TIERS
from dataload.telemetry.stats_log import Pass
from dataload.telemetry.wait_timeline import CAUSES

# The palette of Okabe and Ito, safe for colour-blind readers.
COLOURS = {
    "origin": "#d55e00",
    "cluster": "#cc79a7",
    "disk": "#e69f00",
    "decode": "#0072b2",
    "map": "#f0e442",
    "collate": "#56b4e9",
    "transform": "#009e73",
    "transfer": "#999999",
}
TIER_COLOURS = {"local": "#009e73", "cluster": "#cc79a7", "origin": "#d55e00"}
QUANTILE_LABELS = {"wait_max": "longest", "wait_p99": "99 %", "wait_p95": "95 %", "wait_p50": "50 %"}
SIZE = (4.4, 2.9)  # inches; about the width of a phone, so that text of 9 points stays legible
FEW = 8  # most ranks that have a line each
MANY = 40  # epochs from which on bars are too thin for gaps between them
LETTERS = 36  # most characters of all tick labels of an axis
SPANS = ((2 * 86_400, "days", 86_400), (2 * 3_600, "hours", 3_600), (240, "minutes", 60), (0, "seconds", 1))


@dataclass(frozen=True)
class Plot:
    """One plot.

    Args:
        title: Its heading.
        draw: Draws it into axes.
    """

    title: str
    draw: Callable[[Any], None]


def plots(passes: Sequence[Pass], epochs: Sequence[Epoch]) -> list[Plot]:
    """Return the plots of a report."""
    return [
        Plot("Waiting, by cause", lambda axes: _waiting(axes, epochs)),
        Plot("Wait for a batch", lambda axes: _quantiles(axes, epochs)),
        Plot("Throughput", lambda axes: _throughput(axes, passes, epochs)),
        Plot("Bytes, by tier", lambda axes: _bytes(axes, epochs)),
        Plot("Cache hits", lambda axes: _hits(axes, epochs)),
        Plot("Waiting, by rank", lambda axes: _ranks(axes, epochs)),
        Plot("Waiting of each rank, by cause", lambda axes: _causes_of_ranks(axes, epochs)),
    ]


def svg(plot: Plot) -> str:
    """Return the plot as a data: URL."""
    figure = Figure(figsize=SIZE, layout="constrained")
    _drawn(plot, figure.subplots())
    out = BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{b64encode(out.getvalue()).decode()}"


def write(passes: Sequence[Pass], path: Path) -> None:
    """Write all plots into one PNG file."""
    picture(plots(passes, aggregate.epochs(passes))).savefig(path, dpi=110, format="png")


def picture(some: Sequence[Plot]) -> Figure:
    """Return one figure of all plots, two in a row."""
    rows = -(-len(some) // 2)
    figure = Figure(figsize=(2 * SIZE[0], rows * SIZE[1]), layout="constrained")
    for plot, part in zip(some, figure.subfigures(rows, 2, squeeze=False).flat, strict=False):
        part.suptitle(plot.title, fontsize=11, x=0.02, ha="left")  # An axes title would collide with the legend.
        _drawn(plot, part.subplots())
    return figure


def _drawn(plot: Plot, axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    plot.draw(axes)


def _waiting(axes: Any, epochs: Sequence[Epoch]) -> None:
    totals = [epoch.total for epoch in epochs]
    parts = {cause: [100 * total.waits[cause] / (total.seconds or 1) for total in totals] for cause in CAUSES}
    _stacked(axes, parts, COLOURS)
    axes.set_ylabel("of the time")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.3g} %"))
    _over_epochs(axes, epochs)


def _quantiles(axes: Any, epochs: Sequence[Epoch]) -> None:
    for (name, label), shade in zip(QUANTILE_LABELS.items(), (1.0, 0.75, 0.5, 0.3), strict=True):
        waits = [getattr(epoch.total, name) or float("nan") for epoch in epochs]
        axes.plot(waits, "o-", color=COLOURS["decode"], alpha=shade, markersize=4, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda wait, _: precise(wait)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("waited up to")
    _legend(axes)
    _over_epochs(axes, epochs)


def _throughput(axes: Any, passes: Sequence[Pass], epochs: Sequence[Epoch]) -> None:
    edges, of_ranks = throughput(passes)
    name, unit = next((name, unit) for least, name, unit in SPANS if edges[-1] >= least)
    axes.stairs(sum(of_ranks.values()), edges / unit, baseline=None, linewidth=1.6, color="#222222", label="all")
    if 1 < len(of_ranks) <= FEW:
        for rank, rates in of_ranks.items():
            axes.stairs(rates, edges / unit, baseline=None, linewidth=1, alpha=0.6, label=f"rank {rank}")
    first = epochs[0].began
    for epoch in epochs:
        if epoch.restarted:  # grey where nothing ran
            axes.axvspan((epoch.began - epoch.pause - first) / unit, (epoch.began - first) / unit, color="#e5e5e5")
            axes.axvline((epoch.began - first) / unit, color="#d55e00", linewidth=1, linestyle=":")
    axes.set(xlabel=name, ylabel="rows/s", ylim=(0, None), xlim=(0, edges[-1] / unit or 1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: _short(rate)))
    if len(of_ranks) > 1:
        _legend(axes)


def _bytes(axes: Any, epochs: Sequence[Epoch]) -> None:
    totals = [epoch.total for epoch in epochs]
    _stacked(axes, {tier: [getattr(total, f"bytes_{tier}") for total in totals] for tier in TIERS}, TIER_COLOURS)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: decimal(int(size))))
    axes.set_ylabel("served by")
    _over_epochs(axes, epochs)


def _hits(axes: Any, epochs: Sequence[Epoch]) -> None:
    totals = [epoch.total for epoch in epochs]
    shares = [100 * total.hit_rate if total.hits + total.misses else float("nan") for total in totals]
    axes.plot(shares, "o-", color=TIER_COLOURS["local"], markersize=4)
    axes.set(ylim=(-4, 104), ylabel="of the row groups")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0f} %"))
    _over_epochs(axes, epochs)


def _ranks(axes: Any, epochs: Sequence[Epoch]) -> None:
    ranks = _all_ranks(epochs)
    shares = [
        [100 * epoch.ranks[rank].stats.stall_fraction if rank in epoch.ranks else float("nan") for epoch in epochs]
        for rank in ranks
    ]
    highest = max(5.0, np.nanmax(shares))  # negligible waits stay pale
    image = axes.imshow(shares, aspect="auto", cmap="OrRd", vmin=0, vmax=highest)
    axes.figure.colorbar(image, ax=axes, format=FuncFormatter(lambda share, _: f"{share:.3g} %")).outline.set_visible(
        False
    )
    axes.set_ylabel("rank")
    _named(axes.yaxis, [str(rank) for rank in ranks])
    _over_epochs(axes, epochs)


def _causes_of_ranks(axes: Any, epochs: Sequence[Epoch]) -> None:
    ranks = _all_ranks(epochs)
    left = [0.0] * len(ranks)
    for cause in CAUSES:
        waits = [sum(epoch.ranks[rank].stats.waits[cause] for epoch in epochs if rank in epoch.ranks) for rank in ranks]
        if any(waits):
            axes.barh(range(len(ranks)), waits, left=left, color=COLOURS[cause], label=cause)
            left = [before + more for before, more in zip(left, waits, strict=True)]
    axes.set(xlabel="seconds, all epochs", ylabel="rank", ylim=(len(ranks) - 0.5, -0.5))
    _named(axes.yaxis, [str(rank) for rank in ranks])
    _legend(axes)


def _all_ranks(epochs: Sequence[Epoch]) -> list[int]:
    return sorted({rank for epoch in epochs for rank in epoch.ranks})


def _stacked(axes: Any, parts: dict[str, list[float]], colours: dict[str, str]) -> None:
    """Draw one stacked bar per epoch. Names whose heights are all 0 are left out."""
    number = len(next(iter(parts.values())))
    bottom = np.zeros(number)
    for name, heights in parts.items():
        if not any(heights):
            continue
        top = bottom + heights
        if number < MANY:
            axes.bar(range(number), heights, bottom=bottom, color=colours[name], label=name, width=0.7)
        else:
            # The outline keeps epochs visible that are thinner than a pixel: the first, cold one matters most.
            shown, edges, colour = np.where(top > bottom, top, np.nan), np.arange(number + 1) - 0.5, colours[name]
            line = {"edgecolor": colour, "linewidth": 0.8}
            axes.stairs(shown, edges, baseline=bottom, fill=True, facecolor=colour, label=name, **line)
        bottom = top
    axes.set_ylim(0, bottom.max() * 1.05 or 1)
    _legend(axes)


def _over_epochs(axes: Any, epochs: Sequence[Epoch]) -> None:
    number = max(len(epochs), 3)
    margin = 0.5 + max(0.1, number / 50)
    axes.set(xlabel="epoch", xlim=(-margin, number - 1 + margin))
    _named(axes.xaxis, [epoch.name for epoch in epochs])
    for place, epoch in enumerate(epochs):
        if epoch.restarted:
            axes.axvline(place - 0.5, color="#d55e00", linewidth=1, linestyle=":")


def _named(axis: Any, names: Sequence[str]) -> None:
    fit = max(1, min(10, LETTERS // max(map(len, names))))
    round_ones = MaxNLocator(nbins=fit, integer=True, min_n_ticks=1).tick_values(0, max(1, len(names) - 1))
    ticks = [int(at) for at in round_ones if 0 <= at < len(names)]
    axis.set_ticks(ticks, [names[at] for at in ticks])


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        beside = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4, "columnspacing": 1, "handlelength": 1}
        axes.legend(handles, labels, fontsize=8.5, frameon=False, borderaxespad=0.2, **beside)


def _short(number: float) -> str:
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"
